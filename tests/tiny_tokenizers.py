"""A small byte-level tokenizer, saved as transformers does it, with whatever tokens a test wants beside the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(
    folder: Path, extra: Mapping[str, int], added: Sequence[str] = (), end: str = "<end>", **more: str
) -> str:
    """Write a tokenizer with a token for each byte, the ids 0 to 255. Returns the folder.

    Args:
        extra: further tokens, with their ids
        added: those of them that a text has only where their very names stand
        end: the end-of-text token; added if there is none of that name
        more: as PreTrainedTokenizerFast takes it, such as bos_token or chat_template
    """
    core = Tokenizer(models.BPE(vocab={**{token: i for i, token in enumerate(ALPHABET)}, **extra}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in added])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, **more).save_pretrained(folder)
    return str(folder)

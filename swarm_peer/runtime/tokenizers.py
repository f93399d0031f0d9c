"""Text to token ids and back. Owns every trap of loading a tokenizer; knows nothing of datasets or samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from swarm_peer.config import DataSection
from swarm_peer.errors import UserError

# Any tokenizer that works turns this into several tokens; an empty one into none.
_PROBE = "A stage is served by several peers."


class Tokenizer(Protocol):
    """What the data source needs of a tokenizer.

    Attributes:
        vocab_size: ids are below this
        separator_id: the token put after every document
    """

    vocab_size: int
    separator_id: int

    def encode(self, text: str) -> list[int]:
        """The text's own tokens, with no special token added."""
        ...

    def decode(self, ids: list[int]) -> str: ...


class BytesTokenizer:
    """UTF-8 bytes as ids 0..255; byte 0, which text does not use, separates documents."""

    vocab_size = 256
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))  # lone surrogates do occur in scraped text

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class PretrainedTokenizer:
    """A transformers tokenizer behind the same two methods."""

    def __init__(self, tokenizer: Any, separator_id: int):
        self.vocab_size = len(tokenizer)
        self.separator_id = separator_id
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        # verbose=False: no warning about texts beyond the tokenizer's own length limit; they are cut later.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def load_tokenizer(section: DataSection, vocab_size: int, cache_dir: Path | None = None) -> Tokenizer:
    """The run's tokenizer, known to work and to fit the model.

    Args:
        section: its `tokenizer` is `bytes`, a local folder or a hub name
        vocab_size: the model's
        cache_dir: where files from the hub are kept

    Raises:
        UserError: it cannot be loaded, is empty, has no separator, or has more tokens than the model
    """
    name = section.tokenizer
    tokenizer: Tokenizer = BytesTokenizer() if name == "bytes" else _load_pretrained(name, cache_dir)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer={name!r} has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}: "
            f"set vocab_size in model.config to {tokenizer.vocab_size} or more, or choose a smaller tokenizer"
        )
    return tokenizer


def _load_pretrained(name: str, cache_dir: Path | None) -> PretrainedTokenizer:
    from transformers import AutoTokenizer

    source = os.path.expanduser(name)
    if looks_like_a_path(name) and not os.path.isdir(source):
        raise UserError(f"data.tokenizer={name!r}: there is no such folder; correct the path, or give a hub name")
    # Broken files make transformers raise nearly anything: OSError, ValueError, KeyError, TypeError, even Exception.
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, cache_dir=cache_dir)
        is_empty = not tokenizer.encode(_PROBE, add_special_tokens=False)
    except Exception as error:
        raise UserError(
            f"cannot load data.tokenizer={name!r}: {first_line(error)}; give bytes, a folder with tokenizer.json (or "
            f"vocab.json and merges.txt), or the name of a hub repository that this machine can reach"
        ) from error
    # transformers 5 makes an empty tokenizer, without a word, of a folder that has no vocabulary files.
    if is_empty:
        raise UserError(
            f"data.tokenizer={name!r} gives no tokens for {_PROBE!r}: its vocabulary is missing; "
            f"put tokenizer.json, or vocab.json and merges.txt, into that folder"
        )
    for separator_id in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if separator_id is not None:
            return PretrainedTokenizer(tokenizer, separator_id)
    raise UserError(
        f"data.tokenizer={name!r} has no end-of-text token to separate documents: add eos_token to its configuration"
    )


def looks_like_a_path(name: str) -> bool:
    """Whether it names a folder rather than something on the hub; the same on all machines, whatever is there."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def first_line(error: Exception) -> str:
    """What a foreign exception says, short enough for a one-line message."""
    text = str(error).strip()
    return text.splitlines()[0][:200].rstrip(".") if text else type(error).__name__

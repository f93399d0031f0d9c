"""Sampling: text of a saved model, and the parts that sampling of a live run shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel

PROMPT = "The "
# A decoder writes this for a character that is not complete yet.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a model continues a text.

    Attributes:
        temperature: 0 takes the likeliest token each time; higher values more of the others
        top_k: draw among this many likeliest tokens; 0 for all
        seed: for the same text again, of the same weights; None for another one each time
    """

    num_tokens: int
    temperature: float = 0.8
    top_k: int = 40
    seed: int | None = None


def generate(resolved: ResolvedManifest, model_folder: Path, num_tokens: int, cache_dir: Path | None = None) -> str:
    """Continue a prompt by `num_tokens`, with the model loaded as anybody would load it."""
    sampling = Sampling(num_tokens=num_tokens)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    cast(Callable[[], None], disable_progress_bar)()  # transformers declares no types here
    manifest = resolved.manifest
    tokenizer = load_tokenizer(manifest.data, resolved.vocab_size, cache_dir)
    model = cast(
        "GenerativePreTrainedModel", AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=False)
    )
    longest = manifest.data.sequence_length  # further on, the model has seen nothing
    prompt = torch.tensor([tokenizer.encode(PROMPT)[: longest - 1]])
    torch.manual_seed(manifest.seed)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(sampling.num_tokens, longest - prompt.shape[1]),
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        eos_token_id=None,
        pad_token_id=tokenizer.separator_id,
    )
    return tokenizer.decode(tokens[0].tolist())


def choose_token(logits_V: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """The next token: drawn among the `top_k` likeliest, or the likeliest itself if the temperature is 0.

    Args:
        top_k: 0 for all
    """
    if temperature == 0:
        return int(logits_V.argmax())
    top = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # In fp64, the least temperature is more than nothing.
    probabilities = torch.softmax((top.values - top.values[0]).double() / temperature, dim=0)
    return int(top.indices[torch.multinomial(probabilities, 1, generator=generator)])


class TextStream:
    """Turns tokens into text as they come; a character may take several.

    Args:
        prompt: tokens before the first one, whose text is known
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._written = len(tokenizer.decode(self._tokens))  # characters

    def push(self, token: int) -> str:
        """Text that is certain now: all but an unfinished character at the end."""
        self._tokens.append(token)
        return self._take(self._tokenizer.decode(self._tokens).removesuffix(REPLACEMENT))

    def rest(self) -> str:
        """The text that is left at the end, an unfinished character included."""
        return self._take(self._tokenizer.decode(self._tokens))

    def _take(self, text: str) -> str:
        new = text[self._written :]
        self._written += len(new)
        return new

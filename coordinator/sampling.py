"""What a model writes: a sample of a saved one, and the parts of sampling that a live one shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarm_peer.config import RunManifest
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.runtime.tokenizers import Tokenizer, load_tokenizer

PROMPT = "The "
TEMPERATURE = 0.8
TOP_K = 40
# How a decoder writes what is no whole character yet.
REPLACEMENT = "\ufffd"


def generate(manifest: RunManifest, model_folder: Path, num_tokens: int, cache_dir: Path | None = None) -> str:
    """Continue a prompt by `num_tokens`, with the model loaded as anybody would load it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    assert isinstance(manifest.model.config, dict)
    config = parse_model_config(manifest.model.config)
    tokenizer = load_tokenizer(manifest.data, config.vocab_size, cache_dir)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    longest = config.max_position_embeddings - prompt.shape[1]
    torch.manual_seed(manifest.seed)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(num_tokens, longest),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
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
    probabilities = torch.softmax((top.values - top.values[0]) / temperature, dim=0)
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
        return self._take(self._tokenizer.decode(self._tokens))

    def _take(self, text: str) -> str:
        new = text[self._written :]
        self._written += len(new)
        return new

"""A sample of what a saved model writes."""

from __future__ import annotations

from pathlib import Path

import torch

from swarm_peer.config import RunManifest
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.runtime.tokenizers import load_tokenizer

PROMPT = "The "
TEMPERATURE = 0.8
TOP_K = 40


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

"""A model of each family, small enough for tests, with whatever tells its layers apart switched on."""

from __future__ import annotations

from typing import Any

import transformers

VOCABULARY = 61
LENGTH = 12  # of samples; longer than the sliding windows below
WINDOW = 5

Config = dict[str, Any]

GPT2: Config = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 24,
    "n_layer": 4,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SIZES: Config = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LLAMA: Config = SIZES | {"model_type": "llama"}
LLAMA_LONG: Config = LLAMA | {
    "pad_token_id": 3,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}
# Weights so large that a window, a cap or a norm that is left out shows in the logits.
LARGE_WEIGHTS: Config = SIZES | {"initializer_range": 0.3}
MISTRAL: Config = LARGE_WEIGHTS | {"model_type": "mistral", "sliding_window": WINDOW}
QWEN2: Config = LARGE_WEIGHTS | {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
}
QWEN3: Config = LARGE_WEIGHTS | {"model_type": "qwen3", "head_dim": 8}
GEMMA2: Config = LARGE_WEIGHTS | {
    "model_type": "gemma2",
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
}
GEMMA3: Config = LARGE_WEIGHTS | {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_local_base_freq": 100.0,
    "final_logit_softcapping": 2.0,
}
CONFIGS = {config["model_type"]: config for config in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)}
# Those whose layers are all of one kind.
ALIKE = {name: CONFIGS[name] for name in ("gpt2", "llama", "mistral", "qwen3")}


def exactly(config: Config) -> Config:
    """How to load a model so that it computes all that its config says: transformers before 5.21 leaves capping out."""
    is_capped = config.get("attn_logit_softcapping") is not None
    leaves_it_out = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)
    return {"attn_implementation": "eager"} if is_capped and leaves_it_out else {}

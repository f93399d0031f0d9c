"""What a layer keeps for its backward pass is what its family says, counted from what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONFIGS

from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.families import family_of

# A prime length tells what has numbers for each token from weights.
LENGTH, HIDDEN = 127, 96
# Each normalisation keeps one value a token besides, and each head of attention another.
TOLERANCE = 0.03


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """Large enough for what is kept to show, with fewer keys than queries."""
    if config["model_type"] == "gpt2":
        return config | {"n_embd": HIDDEN, "n_head": 4, "n_positions": LENGTH}
    wide = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    wide |= {"max_position_embeddings": LENGTH}
    return config | wide | {key: 24 for key in ("head_dim", "query_pre_attn_scalar") if key in config}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "half"])
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_keeps_what_is_counted(name: str, index: int, half: bool) -> None:
    family = family_of(parse_model_config(widened(CONFIGS[name])))
    layer = family.build_layer(index).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # Autocast's copies of weights are counted with the weights, and the mask once for all layers.
        is_of_tokens = tensor.numel() % LENGTH == 0 and tensor.shape[:2] != (1, 1)
        if is_of_tokens and tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []  # else another tensor might take the place of one that is gone
    weights = {parameter.data_ptr() for parameter in layer.parameters()}
    hidden_BTD = torch.randn(1, LENGTH, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        arguments = family.layer_arguments(family.layer_kind(index), family.build_rotary(), hidden_BTD)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            layer(hidden_BTD, **arguments)
    counted = family.layer_activation_bytes(index, LENGTH, half)
    assert counted == pytest.approx(sum(kept.values()) / LENGTH, rel=TOLERANCE)

"""What the stages of a run ask of their peers: parameters, operations, bytes on the wire and in memory.

Counted from the model's config; no module is built. Shapes: B samples of a microbatch, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from swarm_peer.config import RunManifest
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.partition import ModelCosts, StageSpec, cut_stages, model_costs, stage_cost
from swarm_peer.policy.prediction import StageWork
from swarm_peer.wire.codecs import encoded_bytes

# A backward pass costs two forward passes: the gradients of the inputs and those of the weights (Kaplan et al.,
# "Scaling Laws for Neural Language Models", 2020, section 2.1: 6 operations per parameter and token in all).
BACKWARD_PER_FORWARD = 2
# Bytes per parameter of the optimizer's state: two fp32 values, two of 8 bits with a scale for 256 each, or momentum.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "sgd": 4.0}
# AdamW takes the roots of all second moments at once.
UPDATE_BYTES = {"adamw": 4.0, "adamw_8bit": 0.0, "sgd": 0.0}
# Bytes per gradient of a weight, encoded; in blocks of 4096 values with a code book of 256 (hivemind).
AVERAGING_BYTES = {"none": 4.0, "fp16": 2.0, "blockwise_8bit": 1.0 + 4 / 4096}
# Logits at the loss: as they are, their logarithms, and the gradient, in fp32.
FP32_LOGITS = 3


def stage_works(manifest: RunManifest, num_stages: int) -> tuple[StageWork, ...]:
    """The stages of a run if it had so many: cut as the manifest says where it names that number, else evenly.

    Args:
        manifest: its model config is inline (resolve_model_config)

    Raises:
        UserError: see parse_model_config and cut_stages
    """
    config = _config_of(manifest)
    layers = manifest.stages.layers if num_stages == manifest.stages.count else None
    length, shared = manifest.data.sequence_length, manifest.model.share_layers
    costs = model_costs(config, length)
    return tuple(
        _stage_work(manifest, config, costs, spec) for spec in cut_stages(config, num_stages, length, layers, shared)
    )


def _config_of(manifest: RunManifest) -> PretrainedConfig:
    assert isinstance(manifest.model.config, dict), "resolve_model_config comes first"
    return parse_model_config(manifest.model.config)


def _stage_work(manifest: RunManifest, config: PretrainedConfig, costs: ModelCosts, spec: StageSpec) -> StageWork:
    model, optimizer, length = manifest.model, manifest.optimizer, manifest.data.sequence_length
    tokens = manifest.training.microbatch_size * length
    cost = stage_cost(costs, spec, model.share_layers)
    forwards = cost.forward_flops * (1 + BACKWARD_PER_FORWARD)
    if model.activation_checkpointing:
        forwards += costs.layer.forward_flops * len(spec.layers)  # computed once more; the head is not
    half = model.precision != "fp32"
    kept, working = _activation_bytes(config, costs, spec, model.activation_checkpointing, half)
    # Without autocast's copies: each forward pass makes and keeps its own, of the weights that it multiplies with.
    copied = costs.head.parameters if spec.has_head else 0
    if not model.activation_checkpointing:
        distinct = 1 if model.share_layers else len(spec.layers)
        copied += costs.layer.parameters * distinct
    return StageWork(
        layers=len(spec.layers),
        parameters=cost.parameters,
        flops=forwards * length,
        activation_bytes=0.0 if spec.is_last else hop_bytes(length, config.hidden_size, manifest.wire.activations),
        gradient_bytes=0.0 if spec.is_first else hop_bytes(length, config.hidden_size, manifest.wire.gradients, False),
        averaging_bytes=AVERAGING_BYTES[manifest.averaging.compression] * cost.parameters,
        weight_bytes=4.0 * cost.parameters,
        weight_gradient_bytes=4.0 * cost.parameters,
        optimizer_bytes=optimizer_bytes(manifest) * cost.parameters,
        working_bytes=working * tokens,
        update_bytes=UPDATE_BYTES[optimizer.name] * cost.parameters,
        microbatch_bytes=kept * tokens + (2.0 * copied if half else 0.0),
    )


def hop_bytes(length: int, hidden_size: int, codec: Any, with_tokens: bool = True) -> float:
    """Of one sample at one boundary; its T + 1 token ids travel with the activations."""
    return encoded_bytes((length, hidden_size), codec) + (4.0 * (length + 1) if with_tokens else 0.0)


def optimizer_bytes(manifest: RunManifest) -> float:
    """Of the optimizer's state, per parameter."""
    if manifest.optimizer.name == "sgd" and manifest.optimizer.momentum == 0:
        return 0.0
    return OPTIMIZER_BYTES[manifest.optimizer.name]


def _activation_bytes(
    config: PretrainedConfig, costs: ModelCosts, spec: StageSpec, checkpointing: bool, half: bool
) -> tuple[float, float]:
    """Bytes per token that wait for the backward pass, and those that come on top while one microbatch is computed."""
    layer, hidden = layer_activation_bytes(config, half), 4.0 * config.hidden_size
    kept = (hidden if checkpointing else layer) * len(spec.layers)
    working = layer if checkpointing else 0.0
    if spec.has_head:
        logits = 4.0 * config.vocab_size
        kept += hidden + (hidden / 2 if half else hidden) + logits  # the normalisation's input and output
        working = max(working, (FP32_LOGITS - 1) * logits + (logits / 2 if half else 0.0))
    return kept, working


def layer_activation_bytes(config: PretrainedConfig, half: bool) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    Counted from what autograd keeps of transformers' layers without dropout. Products, queries, keys and values are of
    16 bits under autocast; normalisations and what GPT-2's activation function takes apart stay fp32.
    """
    hidden = config.hidden_size
    if config.model_type == "gpt2":
        inner = config.n_inner if config.n_inner is not None else 4 * hidden
        # Inputs of both normalisations, of both first products, query, key, value and their result; the activation
        # function's input, three parts of it, and its output.
        return (20.0 * hidden + 16.0 * inner) if half else (32.0 * hidden + 20.0 * inner)
    attention = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    # Of each normalisation its input, the normalised values and its output; query and result; keys and values; the
    # gate before and after its activation function, what it multiplies, and the product.
    if half:
        return 20.0 * hidden + 4.0 * attention + 4.0 * key_value + 8.0 * inner
    return 24.0 * hidden + 8.0 * attention + 8.0 * key_value + 16.0 * inner


def widened_layer_flops(manifest: RunManifest, factor: int) -> tuple[int, float]:
    """Hidden size, and operations of one sample in one layer, forward and backward, of a model so much wider."""
    config = dict(manifest.model.config)  # type: ignore[arg-type]
    for keys in _WIDTHS[config["model_type"]]:
        name = next((key for key in keys if config.get(key) is not None), None)
        if name is not None:
            config[name] *= factor
    parsed = parse_model_config(config)
    layer = model_costs(parsed, manifest.data.sequence_length).layer
    flops = layer.forward_flops * (1 + BACKWARD_PER_FORWARD + manifest.model.activation_checkpointing)
    return parsed.hidden_size, float(flops * manifest.data.sequence_length)


# What grows with a model's width, by the names that a config may give it; heads keep their size.
_WIDTHS: dict[str, Sequence[Sequence[str]]] = {
    "gpt2": (("n_embd", "hidden_size"), ("n_head", "num_attention_heads"), ("n_inner",)),
    "llama": (("hidden_size",), ("intermediate_size",), ("num_attention_heads",), ("num_key_value_heads",)),
}

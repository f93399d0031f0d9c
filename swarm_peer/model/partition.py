"""Where a model is cut into stages: what each part costs, and the cut whose dearest stage is cheapest.

Pure arithmetic on a config, so that every peer computes the same cut; no module is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from operator import add

from transformers import PretrainedConfig

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config

# A stage's compute decides the throughput of the pipeline; its parameters decide the traffic of averaging and the
# memory. The first is paid for each microbatch and the second once a global step, hence the smaller weight.
PARAMETER_WEIGHT = 0.25


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model one stage holds: layers first_layer to end_layer - 1, and perhaps an end of it."""

    index: int
    num_stages: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def has_embedding(self) -> bool:
        return self.is_first

    @property
    def has_head(self) -> bool:
        return self.is_last


@dataclass(frozen=True)
class Cost:
    """Parameters, and floating-point operations of the forward pass per token."""

    parameters: int
    forward_flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.forward_flops + other.forward_flops)


@dataclass(frozen=True)
class ModelCosts:
    """What the parts of a model cost; all layers cost the same, the head includes the last normalisation."""

    embedding: Cost
    layer: Cost
    head: Cost


def model_costs(config: PretrainedConfig, sequence_length: int) -> ModelCosts:
    """Costs at a sequence length of T tokens. A multiplication and its addition count as two operations.

    Counted are matrix products and causal attention (T / 2 keys for the average token); the rest is negligible.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    if config.model_type == "gpt2":
        inner = config.n_inner if config.n_inner is not None else 4 * hidden
        matrices = 4 * hidden * hidden + 2 * hidden * inner
        vectors = 4 * hidden + hidden + inner + 4 * hidden  # biases of attention, of the MLP, two LayerNorms
        attention_width = hidden
        embedding = (vocabulary + config.max_position_embeddings) * hidden
        norm = 2 * hidden
    else:
        attention_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        inner = config.intermediate_size
        matrices = 2 * hidden * (attention_width + key_value_width) + 3 * hidden * inner
        vectors = 2 * hidden
        if config.attention_bias:
            vectors += attention_width + 2 * key_value_width + hidden
        if config.mlp_bias:
            vectors += 2 * inner + hidden
        embedding = vocabulary * hidden
        norm = hidden
    return ModelCosts(
        embedding=Cost(embedding, 0),
        layer=Cost(matrices + vectors, 2 * matrices + 2 * sequence_length * attention_width),
        head=Cost(vocabulary * hidden + norm, 2 * vocabulary * hidden),
    )


def stage_cost(costs: ModelCosts, spec: StageSpec, share_layers: bool = False) -> Cost:
    """What one stage costs; layers that share their weights count as one in the parameters."""
    num_layers = len(spec.layers)
    cost = Cost(costs.layer.parameters * (1 if share_layers else num_layers), costs.layer.forward_flops * num_layers)
    if spec.has_embedding:
        cost += costs.embedding
    if spec.has_head:
        cost += costs.head
    return cost


def cut_stages(
    config: PretrainedConfig,
    num_stages: int,
    sequence_length: int,
    layers: Sequence[int] | None = None,
    share_layers: bool = False,
) -> tuple[StageSpec, ...]:
    """Cut a model into contiguous stages so that the largest stage cost is as small as it can be.

    A stage's cost is its share of the model's compute plus PARAMETER_WEIGHT times its share of the parameters,
    embedding and head included. Among the best cuts, the one with the most even costs is taken.

    Args:
        layers: how many layers each stage shall have, instead of the best cut

    Raises:
        UserError: more stages than layers, layers that do not add up, or samples longer than the model takes
    """
    num_layers = config.num_hidden_layers
    if sequence_length > config.max_position_embeddings:
        key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise UserError(
            f"data.sequence_length={sequence_length} is more than the model's {key}={config.max_position_embeddings}: "
            f"lower the one or raise the other"
        )
    if num_stages > num_layers:
        raise UserError(
            f"stages.count={num_stages} is more than the model's {num_layers} layers: "
            f"lower it to {num_layers} at most, since each stage holds a layer"
        )
    if layers is None:
        return _specs(_best_cut(model_costs(config, sequence_length), num_stages, num_layers, share_layers))
    if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 1:
        raise UserError(
            f"stages.layers={list(layers)} must be {num_stages} positive numbers that add up to the model's "
            f"{num_layers} layers, and they add up to {sum(layers)}: correct it, or leave it out for the balanced cut"
        )
    return _specs([sum(layers[:index]) for index in range(num_stages + 1)])


def stages_of(manifest: RunManifest) -> tuple[StageSpec, ...]:
    """The stages of a run whose model config is inline.

    Raises:
        UserError: see parse_model_config and cut_stages
    """
    assert isinstance(manifest.model.config, dict), "resolve_model_config comes first"
    return cut_stages(
        parse_model_config(manifest.model.config),
        manifest.stages.count,
        manifest.data.sequence_length,
        manifest.stages.layers,
        manifest.model.share_layers,
    )


def _specs(bounds: Sequence[int]) -> tuple[StageSpec, ...]:
    num_stages = len(bounds) - 1
    return tuple(StageSpec(index, num_stages, bounds[index], bounds[index + 1]) for index in range(num_stages))


def _best_cut(costs: ModelCosts, num_stages: int, num_layers: int, share_layers: bool) -> list[int]:
    num_distinct_layers = num_stages if share_layers else num_layers
    total_parameters = costs.embedding.parameters + costs.layer.parameters * num_distinct_layers + costs.head.parameters
    total_flops = costs.layer.forward_flops * num_layers + costs.head.forward_flops

    @cache
    def cost(index: int, stage_layers: int) -> float:
        stage = stage_cost(costs, StageSpec(index, num_stages, 0, stage_layers), share_layers)
        return stage.forward_flops / total_flops + PARAMETER_WEIGHT * stage.parameters / total_parameters

    largest, _ = _minimise(cost, max, num_stages, num_layers)

    @cache
    def unevenness(index: int, stage_layers: int) -> float:
        """Squares add up to least where costs are even; the smallest maximum, which comes first, must stay."""
        return cost(index, stage_layers) ** 2 if cost(index, stage_layers) <= largest else inf

    return _minimise(unevenness, add, num_stages, num_layers)[1]


def _minimise(
    cost: Callable[[int, int], float],
    combine: Callable[[float, float], float],
    num_stages: int,
    num_layers: int,
) -> tuple[float, list[int]]:
    """The least combined cost(stage, number of its layers), and the bounds of the stages that have it.

    Exact, by dynamic programming over (stages, layers): O(num_stages * num_layers^2).
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # of the stages so far, by their last layer's end
    for index in range(num_stages):
        num_later_stages = num_stages - 1 - index
        ends = range(index + 1, num_layers - num_later_stages + 1) if num_later_stages else (num_layers,)
        following = {}
        for end in ends:
            options = [(combine(best[start][0], cost(index, end - start)), start) for start in best if start < end]
            value, start = min(options)
            following[end] = (value, [*best[start][1], end])
        best = following
    return best[num_layers]

"""Where a model is cut into stages: what each part costs, and the cut whose dearest stage is cheapest.

Counted from the config alone, so that every peer computes the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import add

from transformers import PretrainedConfig

from swarm_peer.config import BoundarySection
from swarm_peer.errors import UserError
from swarm_peer.model.families import Cost, Family, family_of

# A stage's compute decides the throughput of the pipeline; its parameters decide the traffic of averaging and the
# memory. The first is paid for each microbatch and the second once an optimizer step, hence the smaller weight.
PARAMETER_WEIGHT = 0.25
NOTHING = Cost(0, 0, 0)


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model one stage holds: layers first_layer to end_layer - 1, and perhaps an end of it.

    The first stage has the embedding, the last one has the last normalisation and the head.
    """

    index: int
    num_stages: int
    first_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        """Indices of the stage's layers."""
        return range(self.first_layer, self.end_layer)

    @property
    def is_first(self) -> bool:
        """Whether microbatches begin here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model's parts; the head includes the last normalisation.

    Attributes:
        share_layers: the layers of a stage share their weights, so that they count as one in the parameters
        entering: of what stages but the first have at the boundary before them
        leaving: of what stages but the last have at the boundary behind them
        narrow: the costs of all stages but the last, where these write less of the residual stream
    """

    embedding: Cost
    layers: tuple[Cost, ...]
    head: Cost
    share_layers: bool
    entering: Cost = NOTHING
    leaving: Cost = NOTHING
    narrow: ModelCosts | None = None

    def at(self, spec: StageSpec) -> ModelCosts:
        """The costs of a model all of which is as in one stage."""
        return self if self.narrow is None or spec.is_last else self.narrow

    def layers_of(self, spec: StageSpec) -> Cost:
        """The cost of one stage's layers."""
        layers = self.at(spec).layers[spec.first_layer : spec.end_layer]
        distinct = layers[:1] if self.share_layers else layers
        return Cost(
            sum(layer.parameters for layer in distinct),
            sum(layer.forward_flops for layer in layers),
            max(layer.largest_parameter for layer in layers),
            sum(layer.matrices for layer in distinct),
        )

    def of(self, spec: StageSpec) -> Cost:
        """The cost of one stage: of its layers, of its ends of the model, and of what it has at boundaries."""
        cost = self.layers_of(spec)
        cost += self.at(spec).embedding if spec.is_first else self.entering
        cost += self.head if spec.is_last else self.leaving
        return cost


def model_costs(
    config: PretrainedConfig, sequence_length: int, share_layers: bool = False, boundary: BoundarySection | None = None
) -> ModelCosts:
    """Costs at a sequence length of T tokens."""
    costs = _costs_of(family_of(config), sequence_length, share_layers)
    if boundary is None:
        return costs
    if boundary.rank is not None:
        narrow = _costs_of(family_of(config, boundary.rank), sequence_length, share_layers)
        return replace(costs, narrow=narrow)
    size = config.hidden_size
    width = boundary_width(boundary, size)
    leaving = Cost(size * size, 2 * size * size, size * size)
    entering = Cost(width * size + 2 * width, 2 * width * size, width * size)
    return replace(costs, entering=entering, leaving=leaving)


def _costs_of(family: Family, sequence_length: int, share_layers: bool) -> ModelCosts:
    kinds = [family.layer_kind(index) for index in range(family.config.num_hidden_layers)]
    by_kind = {kind: family.layer_cost(kinds.index(kind), sequence_length) for kind in dict.fromkeys(kinds)}
    layers = tuple(by_kind[kind] for kind in kinds)
    return ModelCosts(family.embedding_cost(), layers, family.head_cost(), share_layers)


def boundary_width(section: BoundarySection | None, hidden_size: int) -> int:
    """How many values of a token pass a boundary, W."""
    if section is None:
        return hidden_size
    return section.rank or hidden_size // (section.maxout or 1)


def cut_stages(
    config: PretrainedConfig,
    num_stages: int,
    sequence_length: int,
    layers: Sequence[int] | None = None,
    share_layers: bool = False,
    boundary: BoundarySection | None = None,
) -> tuple[StageSpec, ...]:
    """Cut a model into contiguous stages so that the largest stage cost is as small as it can be.

    A stage's cost is its share of the model's compute plus PARAMETER_WEIGHT times its share of the parameters,
    embedding and head included. Among the best cuts, the one with the most even costs is taken.

    Args:
        layers: how many layers each stage shall have, instead of the best cut

    Raises:
        UserError: more stages than layers, layers that do not add up, samples longer than the model takes, or layers
            that are to share their weights and differ
    """
    num_layers = config.num_hidden_layers
    family = family_of(config)
    if share_layers and (difference := family.layers_differ_by()):
        raise UserError(
            f"model.share_layers=true needs layers that are all alike, and those of this {config.model_type} model "
            f"differ ({difference}): set share_layers: false, or choose another config"
        )
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
        return _specs(_best_cut(model_costs(config, sequence_length, share_layers, boundary), num_stages))
    if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 1:
        raise UserError(
            f"stages.layers={list(layers)} must be {num_stages} positive numbers that add up to the model's "
            f"{num_layers} layers, and they add up to {sum(layers)}: correct it, or leave it out for the balanced cut"
        )
    return _specs([sum(layers[:index]) for index in range(num_stages + 1)])


def _specs(bounds: Sequence[int]) -> tuple[StageSpec, ...]:
    num_stages = len(bounds) - 1
    return tuple(StageSpec(index, num_stages, bounds[index], bounds[index + 1]) for index in range(num_stages))


def _best_cut(costs: ModelCosts, num_stages: int) -> list[int]:
    num_layers = len(costs.layers)
    distinct = costs.layers[:num_stages] if costs.share_layers else costs.layers
    parts = (costs.embedding, costs.head)
    total_parameters = sum(part.parameters for part in (*parts, *distinct))
    total_flops = sum(part.forward_flops for part in (*parts, *costs.layers))

    @cache
    def cost(first_layer: int, end_layer: int) -> float:
        index = 0 if first_layer == 0 else num_stages - 1 if end_layer == num_layers else 1
        stage = costs.of(StageSpec(index, num_stages, first_layer, end_layer))
        return stage.forward_flops / total_flops + PARAMETER_WEIGHT * stage.parameters / total_parameters

    largest, _ = _minimise(cost, max, num_stages, num_layers)

    @cache
    def unevenness(first_layer: int, end_layer: int) -> float:
        """Squares add up to least where costs are even; the smallest maximum, which comes first, must stay."""
        value = cost(first_layer, end_layer)
        return value**2 if value <= largest else inf

    return _minimise(unevenness, add, num_stages, num_layers)[1]


def _minimise(
    cost: Callable[[int, int], float], combine: Callable[[float, float], float], num_stages: int, num_layers: int
) -> tuple[float, list[int]]:
    """The least combined cost(first layer, end of the layers) of stages, and the bounds of those that have it.

    Exact, by dynamic programming over (stages, layers): O(num_stages * num_layers^2).
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # of the stages so far, by their last layer's end
    for index in range(num_stages):
        num_later_stages = num_stages - 1 - index
        ends = range(index + 1, num_layers - num_later_stages + 1) if num_later_stages else (num_layers,)
        following = {}
        for end in ends:
            options = [(combine(best[start][0], cost(start, end)), start) for start in best if start < end]
            value, start = min(options)
            following[end] = (value, [*best[start][1], end])
        best = following
    return best[num_layers]

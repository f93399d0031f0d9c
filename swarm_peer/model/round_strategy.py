"""How rounds end: what becomes of the gradient that stage-mates have agreed on.

A further mode is a subclass here and a row in `STRATEGIES`. Its extra state travels with the stage's state: into
snapshots and checkpoints, to newcomers, and back in a rewind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from swarm_peer.config import AveragingSection
from swarm_peer.model.optimizer import STATE_PREFIX

# Begins the names of a strategy's entries in a stage's state.
STRATEGY_PREFIX = "round/"


class RoundStrategy:
    """`synchronous`: each round's gradient updates the weights before the next round opens.

    One object belongs to one StageTrainer. All members of a stage call it alike, so they stay alike.

    Attributes:
        kept_values: fp32 values that the strategy keeps for each parameter, for the memory model
    """

    kept_values: ClassVar[int] = 0

    def __init__(self, shapes: Sequence[torch.Size]):
        """Begin with the run's initial weights.

        Args:
            shapes: of the stage's parameters, in their order
        """
        self.shapes = list(shapes)

    def end_round(self, mean_gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Take in the gradient of a round that ends.

        Args:
            mean_gradients: as the stage-mates have agreed on them; CPU, fp32, not to be changed

        Returns:
            the gradient to update the weights with now; None to leave them as they are
        """
        return mean_gradients

    def state(self) -> dict[str, Tensor]:
        """Give what the strategy has to know in the next round: CPU tensors, by names of its own."""
        return {}

    def load_state(self, entries: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; the names, types and shapes are those of `state`."""


STRATEGIES: dict[str, type[RoundStrategy]] = {"synchronous": RoundStrategy}


def is_weight(name: str) -> bool:
    """Whether an entry of a stage's state is one of the model's weights."""
    return not name.startswith((STATE_PREFIX, STRATEGY_PREFIX))


def strategy_of(averaging: AveragingSection) -> type[RoundStrategy]:
    """The strategy that a manifest asks for."""
    return STRATEGIES[averaging.mode]

"""How rounds end: what a peer brings to the average of its stage-mates, and what becomes of the average.

A further mode is a subclass of RoundStrategy and a row in strategies.py. Its extra state travels with the stage's
state: into snapshots and checkpoints, to newcomers, and back in a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from swarm_peer.config import RunManifest
from swarm_peer.model.optimizer import STATE_PREFIX, Trained

# Begins the names of a strategy's entries in a stage's state.
STRATEGY_PREFIX = "round/"

# Tensors in the order of the trained parameters (CPU, fp32), and their weight, which they are a sum over, or a mean.
Work = tuple[Sequence[Tensor], int]


@dataclass(frozen=True)
class StepResult:
    """How one optimizer step went.

    Attributes:
        grad_norm: of the stage's mean gradient, before clipping
        skipped: the gradient was not finite or all zeros, so the weights stayed as they were
    """

    grad_norm: float
    learning_rate: float
    skipped: bool


class Trainee(Protocol):
    """The part of a StageTrainer that its strategy uses.

    Attributes:
        optimizer_step: that of the round which ends
    """

    manifest: RunManifest
    optimizer_step: int

    @property
    def trained(self) -> Trained:
        """The parameters that the stage trains, by name."""

    def update(self, mean_gradients: Sequence[Tensor], *, keeps_weights: bool = False) -> StepResult:
        """Empty the accumulator, and have the optimizer take a step with these gradients; or only measure them."""

    def discard_gradients(self) -> int:
        """Empty the accumulator, and return how many samples it held."""

    def try_update(self, mean_gradients: Sequence[Tensor]) -> list[Tensor]:
        """Update the weights, for one round, with the optimizer's state as it is; give the weights from before."""

    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Change the weights, and nothing else: in the order of the trained parameters."""


class RoundStrategy:
    """`synchronous`: each round's mean gradient updates the weights before the next round opens.

    One object belongs to one StageTrainer, and is used in its thread. All members of a stage call it alike.

    Attributes:
        kept_values: fp32 values that the strategy keeps for each trained parameter, for the memory model
        unshared_values: those of them that are in no state
    """

    kept_values: ClassVar[int] = 0
    unshared_values: ClassVar[int] = 0

    def __init__(self, trainee: Trainee):
        """Begin with the weights that the trainee has."""
        self.trainee = trainee

    def contribution(self, mean_gradients: Sequence[Tensor], weight: int) -> Work:
        """Give what this peer brings to the average that ends the round, and what it weighs.

        Called once in a round, when nothing is added to the accumulator any more.

        Args:
            mean_gradients: this peer's own; CPU, fp32
        """
        return mean_gradients, weight

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take in the average of what all members brought; CPU, fp32, not to be changed."""
        return self.trainee.update(averages)

    def try_own(self, mean_gradients: Sequence[Tensor]) -> None:
        """Begin a round with this replica's own gradient of the one before, whose average is not there yet."""

    def difference(self) -> Work:
        """Give what this replica would bring to the average that ends the period, in the middle of it, as a mean."""
        raise NotImplementedError("each round ends with an average")

    def forget_work(self) -> None:
        """Drop what was computed in rounds that have ended without an average."""

    def begin_from_weights(self) -> None:
        """Note that the trainee has taken over weights, after `load_state`."""

    def state(self) -> dict[str, Tensor]:
        """Give what the strategy has to know in the next round: CPU tensors, by names of its own."""
        return {}

    def load_state(self, entries: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned, before the trainee takes over the weights beside it.

        Args:
            entries: of the names, types and shapes of `state`
        """

    def adopt(self, weights: Sequence[Tensor], entries: Mapping[str, Tensor]) -> None:
        """Take over what stage-mates hold alike, and keep what is this replica's own. Where that is all, nothing is.

        Args:
            weights: in the order of the trained parameters
            entries: of the names, types and shapes of `state`
        """

    def weights(self) -> Iterator[Tensor]:
        """Give the weights that belong into a state, in the order of the trained parameters."""
        return (parameter.detach() for parameter in self.trainee.trained.values())


def shared_entries(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a stage's state that all stage-mates hold alike.

    That is all of it, unless replicas update their weights alone: the strategy has entries then, and the optimizer's
    are each replica's own.
    """
    is_own = any(name.startswith(STRATEGY_PREFIX) for name in state)
    return {name: value for name, value in state.items() if not (is_own and name.startswith(STATE_PREFIX))}


def is_weight(name: str) -> bool:
    """Whether an entry of a stage's state is one of the model's weights."""
    return not name.startswith((STATE_PREFIX, STRATEGY_PREFIX))


def numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Entries of a strategy's state: one for each trained parameter."""
    return {f"{name}/{number:05d}": tensor for number, tensor in enumerate(tensors)}


def take_numbered(name: str, entries: Mapping[str, Tensor], count: int) -> list[Tensor]:
    """The tensors that `numbered` has made entries of."""
    return [entries[f"{name}/{number:05d}"] for number in range(count)]

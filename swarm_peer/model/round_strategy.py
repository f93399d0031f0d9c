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
        num_samples: samples in the accumulator
    """

    manifest: RunManifest
    optimizer_step: int
    num_samples: int

    @property
    def weight(self) -> int:
        """The weight of these samples in an average."""

    def samples_of(self, weight: int) -> int:
        """About how many samples work of this weight is of."""

    @property
    def trained(self) -> Trained:
        """The parameters that the stage trains, by name."""

    def update(self, mean_gradients: Sequence[Tensor], *, keeps_weights: bool = False) -> StepResult:
        """Empty the accumulator, and have the optimizer take a step with these gradients; or only measure them."""

    def mean_gradients(self) -> list[Tensor]:
        """The mean of the accumulated gradients: CPU, fp32."""

    def gradient_sums(self) -> tuple[list[Tensor], int]:
        """The accumulated gradients: CPU, fp32."""

    def add_gradients(self, sums: Sequence[Tensor], weight: int) -> None:
        """Add a stage-mate's gradients to the accumulator."""

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
        is_in_period: whether the last round ended without an average, so that the work which a leaving stage-mate began
            to give before its end is still what it has to give
        kept_values: fp32 values that the strategy keeps for each trained parameter, for the memory model
        unshared_values: those of them that are in no state
        num_given: sums that `give_away` gives
    """

    is_in_period = False
    kept_values: ClassVar[int] = 0
    unshared_values: ClassVar[int] = 0
    num_given: ClassVar[int] = 1

    def __init__(self, trainee: Trainee):
        """Begin with the weights that the trainee has."""
        self.trainee = trainee

    @property
    def pending_samples(self) -> int:
        """The samples whose work would be lost if this peer died now."""
        return self.trainee.num_samples

    @property
    def held_back_samples(self) -> int:
        """Those of `pending_samples` that are of the round before."""
        return 0

    @property
    def holds_period(self) -> bool:
        """Whether work of rounds that have ended without an average goes into the next average."""
        return False

    def contribution(self, mean_gradients: Sequence[Tensor], weight: int) -> Work:
        """Give what this peer brings to the average that ends the round, and what it weighs.

        Called once in a round, when nothing is added to the accumulator any more.

        Args:
            mean_gradients: this peer's own; CPU, fp32
        """
        return mean_gradients, weight

    def next_contribution(self) -> Work | None:
        """Give what this peer brings to the average that ends the next round, if that is known by the end of this one.

        Called after `contribution`. The work of stage-mates that leave in the next round is added to it then.
        """
        return None

    def expect(self, averages: Sequence[Tensor]) -> None:
        """Note the average that is about to end the round, so that `state` is all that a round needs to be repeated."""

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take in the average of what all members brought; CPU, fp32, not to be changed."""
        return self.trainee.update(averages)

    def begin_round(self) -> None:
        """Prepare the weights for the passes of the next round, once `end_round` has ended one."""

    def try_own(self, mean_gradients: Sequence[Tensor]) -> None:
        """Begin a round with this replica's own gradient of the one before, whose average is not there yet."""

    def difference(self) -> Work:
        """Give what this replica would bring to the average that ends the period, in the middle of it, as a mean."""
        raise NotImplementedError("each round ends with an average")

    def forget_work(self) -> None:
        """Drop what was computed in rounds that have ended without an average."""

    def begin_from_weights(self) -> None:
        """Note that the trainee has taken over weights, after `load_state`."""

    def give_away(self) -> list[Work]:
        """Give what a stage-mate may add to its own work when this peer leaves: sums, and their weights.

        May be called again, if the stage-mates end the round first.
        """
        return [self.trainee.gradient_sums()]

    def take_in(self, given: Sequence[Work]) -> None:
        """Add what a leaving stage-mate in the same round has given away."""
        [(sums, weight)] = given
        self.trainee.add_gradients(sums, weight)

    def state(self) -> dict[str, Tensor]:
        """Give what the strategy has to know in the next round: CPU tensors, by names of its own."""
        return {}

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """Take over what `state` returned, before the trainee takes over the weights beside it.

        Args:
            entries: of the names, types and shapes of `state`
            keeps_work: bring this peer's work to the next average, if it fits the state that comes

        Returns:
            the samples whose work is lost
        """
        return self.pending_samples

    def adopt(self, weights: Sequence[Tensor], entries: Mapping[str, Tensor]) -> None:
        """Take over what stage-mates hold alike, and keep what is this replica's own. Where that is all, nothing is.

        Args:
            weights: in the order of the trained parameters
            entries: of the names, types and shapes of `state`
        """

    def weights(self) -> Iterator[Tensor]:
        """Give the weights that belong into a state, in the order of the trained parameters."""
        return (parameter.detach() for parameter in self.trainee.trained.values())

    def shared_weights(self) -> Iterator[Tensor]:
        """Give the weights that stage-mates hold alike, in the order of the trained parameters."""
        return self.weights()


def shared_entries(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a stage's state that all stage-mates hold alike, where rounds are agreed.

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

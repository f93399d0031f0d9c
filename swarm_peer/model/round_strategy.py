"""How rounds end: what a peer brings to the average of its stage-mates, and what becomes of the average.

A further mode is a subclass of RoundStrategy and a row in `STRATEGIES`. Its extra state travels with the stage's state:
into snapshots and checkpoints, to newcomers, and back in a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from swarm_peer.config import AveragingSection, RunManifest
from swarm_peer.model.optimizer import STATE_PREFIX

# Begins the names of a strategy's entries in a stage's state.
STRATEGY_PREFIX = "round/"

# Tensors in the order of the parameters (CPU, fp32), and the samples that they are a sum over, or a mean.
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
    def module(self) -> nn.Module:
        """The stage."""

    def update(self, mean_gradients: Sequence[Tensor], *, keeps_weights: bool = False) -> StepResult:
        """Have the optimizer take a step with these gradients; or only measure them."""

    def mean_gradients(self) -> list[Tensor]:
        """The mean of the accumulated gradients: CPU, fp32."""

    def gradient_sums(self) -> tuple[list[Tensor], int]:
        """The accumulated gradients: CPU, fp32."""

    def add_gradients(self, sums: Sequence[Tensor], num_samples: int) -> None:
        """Add a stage-mate's gradients to the accumulator."""

    def discard_gradients(self) -> None:
        """Empty the accumulator."""


class RoundStrategy:
    """`synchronous`: each round's mean gradient updates the weights before the next round opens.

    One object belongs to one StageTrainer, and is used in its thread. All members of a stage call it alike.

    Attributes:
        kept_values: fp32 values that the strategy keeps for each parameter, for the memory model
        num_given: sums that `give_away` gives
    """

    kept_values: ClassVar[int] = 0
    num_given: ClassVar[int] = 1

    def __init__(self, trainee: Trainee):
        """Begin with the weights that the trainee has."""
        self.trainee = trainee

    @property
    def pending_samples(self) -> int:
        """The samples whose work would be lost if this peer died now."""
        return self.trainee.num_samples

    def contribution(self, mean_gradients: Sequence[Tensor], num_samples: int) -> Work:
        """Give what this peer brings to the average that ends the round, and the samples that it is weighted by.

        Called once in a round, when nothing is added to the accumulator any more.

        Args:
            mean_gradients: this peer's own; CPU, fp32
        """
        return mean_gradients, num_samples

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

    def give_away(self) -> list[Work]:
        """Give what a stage-mate may add to its own work when this peer leaves: sums over samples.

        May be called again, if the stage-mates end the round first.
        """
        return [self.trainee.gradient_sums()]

    def take_in(self, given: Sequence[Work]) -> None:
        """Add what a leaving stage-mate in the same round has given away."""
        [(sums, num_samples)] = given
        self.trainee.add_gradients(sums, num_samples)

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

    def shared_weights(self) -> Iterator[Tensor]:
        """Give the weights that stage-mates hold alike, in the order of the parameters."""
        return (parameter.detach() for parameter in self.trainee.module.parameters())


class PeriodicStrategy(RoundStrategy):
    """`periodic`: replicas update their weights alone, and average their differences every `inner_steps` steps.

    This is DiLoCo among the replicas of each stage (Douillard et al., "DiLoCo: Distributed Low-Communication Training
    of Language Models", 2023). The outer weights are those that all replicas began the period with. At its end, the
    mean difference between them and the replicas' weights is the gradient of a Nesterov step on them, and all replicas
    go on from the result. The optimizer's state is each replica's own, and lasts over periods.

    A replica's difference is weighted by the samples that it has computed in the period. A newcomer takes over weights
    and optimizer's state of one stage-mate, and begins with no samples. A replica that leaves gives its difference
    away, and never a gradient: stage-mates have other weights. That costs the stage-mate one more value for each
    parameter, until the period ends.
    """

    kept_values = 2

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._averaging = trainee.manifest.averaging
        self._outer = [weights.to("cpu", copy=True) for weights in super().shared_weights()]
        self._momentum = [torch.zeros_like(outer) for outer in self._outer]
        self._own_update: StepResult | None = None
        self._forget_work()

    def _forget_work(self) -> None:
        self._num_samples = 0  # that this replica's difference is of
        self._taken_in: list[Tensor] = []  # differences of stage-mates that have left, summed over their samples
        self._num_taken_in = 0

    @property
    def pending_samples(self) -> int:
        """The samples of the period, and those whose gradient waits for the round's end."""
        return self.trainee.num_samples + self._num_samples + self._num_taken_in

    def contribution(self, mean_gradients: Sequence[Tensor], num_samples: int) -> Work:
        """Take the inner step. At the end of a period, give the difference and its samples; before, nothing."""
        self._own_update = self.trainee.update(mean_gradients)
        self.trainee.discard_gradients()
        self._num_samples += num_samples
        if not self._averaging.averages_at(self.trainee.optimizer_step):
            return (), num_samples
        sums, total = self._sums()
        return [each.div_(max(total, 1)) for each in sums], total

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take the outer step, at the end of a period. A replica that has not been there has no inner step to take."""
        result = self._own_update or self.trainee.update((), keeps_weights=True)
        self._own_update = None
        if averages:
            # All zeros: the work of all members is lost. The momentum would move the weights all the same.
            if any(bool(average.any()) for average in averages):
                self._outer_step(averages)
            self._set_weights()
            self._forget_work()
        return result

    @torch.no_grad()
    def _outer_step(self, averages: Sequence[Tensor]) -> None:
        rate, decay = self._averaging.outer_learning_rate, self._averaging.outer_momentum
        for outer, momentum, average in zip(self._outer, self._momentum, averages, strict=True):
            momentum.mul_(decay).add_(average)
            outer.sub_(average.add(momentum, alpha=decay), alpha=rate)

    @torch.no_grad()
    def _set_weights(self) -> None:
        for parameter, outer in zip(self.trainee.module.parameters(), self._outer, strict=True):
            parameter.copy_(outer)

    def _sums(self) -> tuple[list[Tensor], int]:
        """The differences of this replica and of those that have left, summed over samples; and the samples."""
        sums = [
            (outer - weights.to("cpu")).mul_(self._num_samples)
            for outer, weights in zip(self._outer, super().shared_weights(), strict=True)
        ]
        if self._taken_in:
            sums = [own + taken_in for own, taken_in in zip(sums, self._taken_in, strict=True)]
        return sums, self._num_samples + self._num_taken_in

    def give_away(self) -> list[Work]:
        """Take an inner step with what has been accumulated so far, and give the difference."""
        if num_samples := self.trainee.num_samples:
            self.trainee.update(self.trainee.mean_gradients())
            self.trainee.discard_gradients()
            self._num_samples += num_samples
        return [self._sums()]

    def take_in(self, given: Sequence[Work]) -> None:
        """Bring a leaving stage-mate's difference to the next average."""
        [(sums, num_samples)] = given
        self._taken_in = [a + b for a, b in zip(self._taken_in, sums, strict=True)] if self._taken_in else list(sums)
        self._num_taken_in += num_samples

    def state(self) -> dict[str, Tensor]:
        """Give the outer weights and their momentum."""
        return _numbered("outer", self._outer) | _numbered("momentum", self._momentum)

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """Take over outer weights and momentum. Work in the same period fits, as a difference to equal weights."""
        num_lost = self.pending_samples
        outer = _take_numbered("outer", entries, len(self._outer))
        if keeps_work and all(torch.equal(own, new) for own, new in zip(self._outer, outer, strict=True)):
            work = self._sums()
            num_lost -= work[1]
            self._forget_work()
            self.take_in([work])
        else:
            self._forget_work()
        self._own_update = None
        self._outer, self._momentum = outer, _take_numbered("momentum", entries, len(outer))
        return num_lost

    def shared_weights(self) -> Iterator[Tensor]:
        """Give the outer weights."""
        return iter(self._outer)


class DelayedStrategy(RoundStrategy):
    """`delayed`: the mean gradient of a round updates the weights at the end of the next one.

    So stage-mates average the gradients of a round while the next one computes: w(t+1) = Opt(w(t), g(t-1)), and each
    gradient is exactly one update old, the same on every stage. The first round of a run ends without an update, and
    the gradient of its last round is not used.

    A state holds the weights of a round, and the average that ends it if that is known: a snapshot is taken when it is.
    So the first round of a timeline takes its update from the snapshot, and no average ends it.
    """

    # The gradient of the round before; that of the round which ends, beside it; and the average which waits, while the
    # next one is being made.
    kept_values = 3
    num_given = 2

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._waiting = self._no_work()  # the mean gradient of the round before
        self._brought: Work | None = None  # the same, while a round ends that this replica has been in
        self._expected: Sequence[Tensor] | None = None  # the average that ends the round, where it is known

    def _no_work(self) -> Work:
        return [torch.zeros(parameter.shape) for parameter in self.trainee.module.parameters()], 0

    @property
    def pending_samples(self) -> int:
        """The samples of this round, and those whose gradient has not updated the weights yet."""
        return self.trainee.num_samples + self._waiting[1] + (self._brought[1] if self._brought else 0)

    def contribution(self, mean_gradients: Sequence[Tensor], num_samples: int) -> Work:
        """Give the gradient of the round before, and hold this one back, unless no round is left that it could end."""
        self._brought = self._waiting
        self._waiting = self._no_work() if self._is_last_round else (mean_gradients, num_samples)
        self.trainee.discard_gradients()
        return self._brought

    def next_contribution(self) -> Work | None:
        """Give the gradient of this round."""
        return None if self._is_last_round else self._waiting

    @property
    def _is_last_round(self) -> bool:
        return self.trainee.optimizer_step + 1 >= self.trainee.manifest.training.steps

    def expect(self, averages: Sequence[Tensor]) -> None:
        """Note the average that `end_round` gets next."""
        self._expected = averages

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Update the weights with an average, or with the one that came with the state.

        If this replica has not been in the round, what it holds back is too old for the next average.
        """
        averages = averages or self._expected or ()
        result = self.trainee.update(averages, keeps_weights=not averages)
        if self._brought is None:
            self._waiting = self._no_work()
        self._expected, self._brought = None, None
        return result

    def give_away(self) -> list[Work]:
        """Give the gradients of this round and of the round before."""
        means, num_samples = self._waiting
        return [self.trainee.gradient_sums(), ([mean * num_samples for mean in means], num_samples)]

    def take_in(self, given: Sequence[Work]) -> None:
        """Add a stage-mate's gradients to those of the same round.

        If the stage-mate takes part in the average of the round before, or has, that one is taken, and not what this
        peer brings to another try. So nothing counts twice.
        """
        (sums, num_samples), (waiting_sums, num_waiting) = given
        self.trainee.add_gradients(sums, num_samples)
        means, before = self._waiting
        total = before + num_waiting
        added = [(mean * before + other) / max(total, 1) for mean, other in zip(means, waiting_sums, strict=True)]
        self._waiting = added, total

    def state(self) -> dict[str, Tensor]:
        """Give the average that ends the round, or zeros: a mean of no samples updates nothing."""
        return _numbered("expected", self._expected or self._no_work()[0])

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """Take over the average, if it is known. Gradients are of other weights, so they are lost."""
        num_lost = self.pending_samples
        self._waiting, self._brought = self._no_work(), None
        self._expected = _take_numbered("expected", entries, len(self._waiting[0]))
        return num_lost


STRATEGIES: dict[str, type[RoundStrategy]] = {
    "synchronous": RoundStrategy,
    "periodic": PeriodicStrategy,
    "delayed": DelayedStrategy,
}


def _numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{name}/{number:05d}": tensor for number, tensor in enumerate(tensors)}


def _take_numbered(name: str, entries: Mapping[str, Tensor], count: int) -> list[Tensor]:
    return [entries[f"{name}/{number:05d}"] for number in range(count)]


def is_weight(name: str) -> bool:
    """Whether an entry of a stage's state is one of the model's weights."""
    return not name.startswith((STATE_PREFIX, STRATEGY_PREFIX))


def strategy_of(averaging: AveragingSection) -> type[RoundStrategy]:
    """The strategy that a manifest asks for."""
    return STRATEGIES[averaging.mode]

"""`averaging.mode: periodic`: what replicas share is the difference that many updates of their own have made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm_peer.model.round_strategy import RoundStrategy, StepResult, Trainee, Work, numbered, take_numbered


class PeriodicStrategy(RoundStrategy):
    """`periodic`: replicas update their weights alone, and average their differences every `inner_steps` steps.

    This is DiLoCo among the replicas of each stage (Douillard et al., "DiLoCo: Distributed Low-Communication Training
    of Language Models", 2023). The outer weights are those that all replicas began the period with. At its end, the
    mean difference between them and the replicas' weights is the gradient of a Nesterov step on them, and all replicas
    go on from the result. The optimizer's state is each replica's own, and lasts over periods.

    A replica's difference is weighted by what it has computed in the period. A newcomer takes over weights
    and optimizer's state of one stage-mate, and begins with no samples. A replica that leaves gives its difference
    away, and never a gradient: stage-mates have other weights. That costs the stage-mate one more value for each
    parameter, until the period ends.
    """

    kept_values = 2

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._averaging = trainee.manifest.averaging
        self._outer = [weights.to("cpu", copy=True) for weights in self.weights()]
        self._momentum = [torch.zeros_like(outer) for outer in self._outer]
        self._own_update: StepResult | None = None
        self._forget_work()

    def _forget_work(self) -> None:
        self._waiting: Work | None = None  # mean gradient of the inner step that ends the round
        self._weight = 0  # of this replica's difference
        self._taken_in: list[Tensor] = []  # differences of stage-mates that have left, summed over their weights
        self._weight_taken_in = 0

    @property
    def pending_samples(self) -> int:
        """The samples of the period, and those whose gradient waits for the round's end."""
        return self.trainee.num_samples + self.trainee.samples_of(self._weight + self._weight_taken_in)

    @property
    def holds_period(self) -> bool:
        """Whether work of rounds that have ended without an average goes into the next average."""
        return self._weight + self._weight_taken_in > 0

    def contribution(self, mean_gradients: Sequence[Tensor], weight: int) -> Work:
        """At the end of a period, take the inner step, and give the difference and its weight; before, nothing.

        Until a round without an average is over, the weights stay those of its state: stage-mates that need it may be
        waited for at the end of this round.
        """
        self._waiting = mean_gradients, weight
        if not self._averaging.averages_at(self.trainee.optimizer_step):
            return (), weight
        self._take_inner_step()
        sums, total = self._sums()
        return [each.div_(max(total, 1)) for each in sums], total

    def _take_inner_step(self) -> None:
        """Take the step of the round that ends; a replica that has not been there has none to take."""
        if self._waiting is not None:
            mean_gradients, weight = self._waiting
            self._waiting = None
            self._own_update = self.trainee.update(mean_gradients)
            self._weight += weight

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take the inner step, if that was not done, and at the end of a period the outer one."""
        self._take_inner_step()
        result = self._own_update or self.trainee.update((), keeps_weights=True)
        self._own_update = None
        self.is_in_period = not averages
        if averages:
            # All zeros: the work of all members is lost. The momentum would move the weights all the same.
            is_finite = all(bool(average.isfinite().all()) for average in averages)
            result = replace(result, skipped=not (is_finite and any(bool(average.any()) for average in averages)))
            if not result.skipped:
                self._outer_step(averages)
            self.trainee.set_weights(self._outer)
            self._forget_work()
        return result

    @torch.no_grad()
    def _outer_step(self, averages: Sequence[Tensor]) -> None:
        rate, decay = self._averaging.outer_learning_rate, self._averaging.outer_momentum
        for outer, momentum, average in zip(self._outer, self._momentum, averages, strict=True):
            momentum.mul_(decay).add_(average)
            outer.sub_(average.add(momentum, alpha=decay), alpha=rate)

    def _sums(self) -> tuple[list[Tensor], int]:
        """The differences of this replica and of those that have left, summed over weights; and these."""
        sums = [
            (outer - weights.to("cpu")).mul_(self._weight)
            for outer, weights in zip(self._outer, self.weights(), strict=True)
        ]
        if self._taken_in:
            sums = [own + taken_in for own, taken_in in zip(sums, self._taken_in, strict=True)]
        return sums, self._weight + self._weight_taken_in

    def give_away(self) -> list[Work]:
        """Take an inner step with what has been accumulated so far, and give the difference."""
        if weight := self.trainee.weight:
            self._own_update = self.trainee.update(self.trainee.mean_gradients())
            self._weight += weight
        return [self._sums()]

    def take_in(self, given: Sequence[Work]) -> None:
        """Bring a leaving stage-mate's difference to the next average."""
        [(sums, weight)] = given
        self._taken_in = [a + b for a, b in zip(self._taken_in, sums, strict=True)] if self._taken_in else list(sums)
        self._weight_taken_in += weight

    def state(self) -> dict[str, Tensor]:
        """Give the outer weights and their momentum."""
        return numbered("outer", self._outer) | numbered("momentum", self._momentum)

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """Take over outer weights and momentum. Work in the same period fits, as a difference to equal weights."""
        num_lost = self.pending_samples
        outer = take_numbered("outer", entries, len(self._outer))
        if keeps_work and all(torch.equal(own, new) for own, new in zip(self._outer, outer, strict=True)):
            self._take_inner_step()
            work = self._sums()
            num_lost -= self.trainee.samples_of(work[1])
            self._forget_work()
            self.take_in([work])
        else:
            self._forget_work()
        self._own_update = None
        self.is_in_period = False
        self._outer, self._momentum = outer, take_numbered("momentum", entries, len(outer))
        return num_lost

    def shared_weights(self) -> Iterator[Tensor]:
        """Give the outer weights."""
        return iter(self._outer)

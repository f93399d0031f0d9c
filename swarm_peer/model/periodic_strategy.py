"""`averaging.mode: periodic`: stage-mates share the difference that many steps have made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm_peer.model.round_strategy import RoundStrategy, StepResult, Trainee, Work, numbered, take_numbered


class InnerStepsStrategy(RoundStrategy):
    """Replicas update their weights alone, and average their differences every `inner_steps` steps.

    This is DiLoCo among the replicas of each stage (Douillard et al., "DiLoCo: Distributed Low-Communication Training
    of Language Models", 2023). The outer weights are those that all replicas began the period with. At its end, the
    mean difference between them and the replicas' weights is the gradient of a Nesterov step on them, and all replicas
    go on from the result.

    Stage-mates hold outer weights and momentum alike: these are what a state has, and what its root is of. Each
    replica has an optimizer's state of its own, which lasts over periods, and puts it into a state as well. A newcomer
    that takes one over in the middle of a period begins with the outer weights, so its difference is what it has
    computed itself. A replica that leaves gives its difference away, and never a gradient: stage-mates have other
    weights.
    """

    kept_values = 2
    unshared_values = 1

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._averaging = trainee.manifest.averaging
        self._outer: list[Tensor] = []
        self.begin_from_weights()
        self._momentum = [torch.zeros_like(outer) for outer in self._outer]
        self._waiting: Work | None = None  # mean gradient of the inner step that ends the round
        self._own_update: StepResult | None = None
        self._weight = 0  # of this replica's difference

    def begin_from_weights(self) -> None:
        """Have the weights that the trainee has now for outer weights."""
        self._outer = [parameter.detach().to("cpu", copy=True) for parameter in self.trainee.trained.values()]

    def forget_work(self) -> None:
        """Go back to the outer weights, without what was computed in the period."""
        self._waiting, self._own_update = None, None
        if self._weight:
            self.trainee.set_weights(self._outer)
        self._weight = 0

    def contribution(self, mean_gradients: Sequence[Tensor], weight: int) -> Work:
        """At the end of a period, take the inner step, and give the difference and its weight; before, nothing.

        The inner step of another round is taken as it ends.
        """
        self._waiting = mean_gradients, weight
        if not self._averaging.averages_at(self.trainee.optimizer_step):
            return (), weight
        return self.difference()

    def difference(self) -> Work:
        """Take the inner step of the round that ends, if that was not done; give the mean difference and its weight."""
        self._take_inner_step()
        parameters = self.trainee.trained.values()
        if not self._weight:
            return [torch.zeros_like(outer) for outer in self._outer], 0
        made = [outer - own.detach().to("cpu") for outer, own in zip(self._outer, parameters, strict=True)]
        return made, self._weight

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
        if averages:
            # All zeros: the work of all members is lost. The momentum would move the weights all the same.
            is_finite = all(bool(average.isfinite().all()) for average in averages)
            result = replace(result, skipped=not (is_finite and any(bool(average.any()) for average in averages)))
            if not result.skipped:
                self._outer_step(averages)
            self.trainee.set_weights(self._outer)
            self._weight = 0
        return result

    @torch.no_grad()
    def _outer_step(self, averages: Sequence[Tensor]) -> None:
        rate, decay = self._averaging.outer_learning_rate, self._averaging.outer_momentum
        for outer, momentum, average in zip(self._outer, self._momentum, averages, strict=True):
            momentum.mul_(decay).add_(average)
            outer.sub_(average.add(momentum, alpha=decay), alpha=rate)

    def state(self) -> dict[str, Tensor]:
        """Give the momentum of the outer weights, which are the state's weights."""
        return numbered("momentum", self._momentum)

    def load_state(self, entries: Mapping[str, Tensor]) -> None:
        """Take over the momentum, and lose the work of the period: it is a difference to other weights."""
        self.forget_work()
        self._momentum = take_numbered("momentum", entries, len(self._outer))

    @torch.no_grad()
    def adopt(self, weights: Sequence[Tensor], entries: Mapping[str, Tensor]) -> None:
        """Take over outer weights and momentum that are nearly this replica's own, and keep its difference."""
        pairs = zip(self.trainee.trained.values(), self._outer, weights, strict=True)
        self.trainee.set_weights([own.to("cpu") + (new - outer) for own, outer, new in pairs])
        self._outer = [new.clone() for new in weights]
        self._momentum = take_numbered("momentum", entries, len(self._outer))

    def weights(self) -> Iterator[Tensor]:
        """Give the outer weights."""
        return iter(self._outer)

"""`averaging.mode: delayed`: stage-mates average the gradients of a round while the next one computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from swarm_peer.model.round_strategy import RoundStrategy, StepResult, Trainee, Work, numbered, take_numbered


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
    unshared_values = 2
    num_given = 2

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._waiting = self._no_work()  # the mean gradient of the round before
        self._brought: Work | None = None  # the same, while a round ends that this replica has been in
        self._expected: Sequence[Tensor] | None = None  # the average that ends the round, where it is known

    def _no_work(self) -> Work:
        return [torch.zeros(parameter.shape) for parameter in self.trainee.trained.values()], 0

    @property
    def pending_samples(self) -> int:
        """The samples of this round, and those whose gradient has not updated the weights yet."""
        held = self._waiting[1] + (self._brought[1] if self._brought else 0)
        return self.trainee.num_samples + self.trainee.samples_of(held)

    @property
    def held_back_samples(self) -> int:
        """The samples of the round before, whose gradient ends this one."""
        return self.trainee.samples_of((self._brought or self._waiting)[1])

    def contribution(self, mean_gradients: Sequence[Tensor], weight: int) -> Work:
        """Give the gradient of the round before, and hold this one back, unless no round is left that it could end.

        Without such a gradient, give the average that came with the state: it ends the first round of a timeline.
        """
        self._brought = self._waiting
        self._waiting = self._no_work() if self._is_last_round else (mean_gradients, weight)
        self.trainee.discard_gradients()
        means, weight_brought = self._brought
        return means if weight_brought else self._expected or means, weight_brought

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
        """Update the weights. If this replica has not been in the round, what it holds back is too old for the next."""
        result = self.trainee.update(averages)
        if self._brought is None:
            self._waiting = self._no_work()
        self._expected, self._brought = None, None
        return result

    def give_away(self) -> list[Work]:
        """Give the gradients of this round and of the round before; nothing of a round that ends."""
        if self._brought is not None:
            return [self._no_work(), self._no_work()]
        means, weight = self._waiting
        return [self.trainee.gradient_sums(), ([mean * weight for mean in means], weight)]

    def take_in(self, given: Sequence[Work]) -> None:
        """Add a stage-mate's gradients to those of the same round.

        If the stage-mate takes part in the average of the round before, or has, that one is taken, and not what this
        peer brings to another try. So nothing counts twice.
        """
        (sums, weight), (waiting_sums, weight_waiting) = given
        self.trainee.add_gradients(sums, weight)
        means, before = self._waiting
        total = before + weight_waiting
        added = [(mean * before + other) / max(total, 1) for mean, other in zip(means, waiting_sums, strict=True)]
        self._waiting = added, total

    def state(self) -> dict[str, Tensor]:
        """Give the average that ends the round, or zeros: a mean of no samples updates nothing."""
        return numbered("expected", self._expected or self._no_work()[0])

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """Take over the average, if it is known. Gradients are of other weights, so they are lost."""
        num_lost = self.pending_samples
        self._waiting, self._brought = self._no_work(), None
        self._expected = take_numbered("expected", entries, len(self._waiting[0]))
        return num_lost


class EagerStrategy(DelayedStrategy):
    """`delayed` with `eager_updates`: each replica begins a round with an update by its own gradient of the one before.

    The average of all is not there yet. When it is, at the end of the round, it updates the weights from before, in
    place of the replica's own. So stage-mates share the same updates as without: w(t+1) = Opt(w(t), g(t-1)). But a
    replica computes its part of g(t) at Opt(w(t), its own part of g(t-1)), which is near the weights that g(t) updates.
    A replica without stage-mates makes the updates of a synchronous one, each a round later.

    The idea is that of Kale, Douillard and Donchev, "Eager Updates For Overlapped Communication and Computation in
    DiLoCo", 2025.
    """

    # The weights from before too, and while the own gradient updates them the optimizer's state.
    kept_values = DelayedStrategy.kept_values + 3
    unshared_values = DelayedStrategy.unshared_values + 3

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._settled: list[Tensor] | None = None  # the weights from before the own gradient's update, while it lasts

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take the own gradient's update back; then as without it."""
        if self._settled is not None:
            self.trainee.set_weights(self._settled)
            self._settled = None
        return super().end_round(averages)

    def begin_round(self) -> None:
        """Update the weights with the own gradient, which waits for those of the stage-mates."""
        means, weight = self._waiting
        if weight:
            self._settled = self.trainee.try_update(means)

    def load_state(self, entries: Mapping[str, Tensor], *, keeps_work: bool = False) -> int:
        """As without; other weights come."""
        self._settled = None
        return super().load_state(entries, keeps_work=keeps_work)

    def weights(self) -> Iterator[Tensor]:
        """Give the weights without the own gradient's update."""
        return super().weights() if self._settled is None else iter(self._settled)

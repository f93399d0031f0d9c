"""`averaging.mode: delayed` with `eager_updates`: a round begins with a trial of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from swarm_peer.model.round_strategy import RoundStrategy, StepResult, Trainee


class TrialStrategy(RoundStrategy):
    """Each replica begins a round with an update by its own gradient of the round before, whose average is not there.

    Once it is, the replica takes its own update back, and the average updates the weights in its place. So stage-mates
    share the updates that they share without: W(k) = Opt(W(k-1), G(k)). But a replica computes its part of G(k) at
    Opt(W(k-2), its own part of G(k-1)), which is near the weights that G(k) updates. A replica without stage-mates
    makes the updates of a synchronous one.

    The idea is that of Kale, Douillard and Donchev, "Eager Updates For Overlapped Communication and Computation in
    DiLoCo", 2025.
    """

    # The weights from before, and while the own gradient updates them the optimizer's state.
    kept_values = 3
    unshared_values = 3

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._settled: list[Tensor] | None = None  # the weights from before the trial, while it lasts

    def try_own(self, mean_gradients: Sequence[Tensor]) -> None:
        """Update the weights with the own gradient of the round before, until `end_round`. Once is enough."""
        if self._settled is None:
            self._settled = self.trainee.try_update(mean_gradients)

    def end_round(self, averages: Sequence[Tensor]) -> StepResult:
        """Take the trial back; then as without it."""
        if self._settled is not None:
            self.trainee.set_weights(self._settled)
            self._settled = None
        return super().end_round(averages)

    def load_state(self, entries: Mapping[str, Tensor]) -> None:
        """As without; other weights come."""
        self._settled = None

    def weights(self) -> Iterator[Tensor]:
        """Give the weights without the trial."""
        return super().weights() if self._settled is None else iter(self._settled)

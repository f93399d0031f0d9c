"""Tells of the rounds that have ended at one seat: in the log, in the metrics, and to the coordinator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from swarm_peer.model.round_strategy import StepResult
from swarm_peer.policy.data.ranges import num_windows
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Contribution
from swarm_peer.runtime.context import PeerContext
from swarm_peer.wire.fields import LEAST_MEASURED, MAX_LOSS, MAX_ROUNDS, MAX_SAMPLES
from swarm_peer.wire.records import MAX_REPORTS, RoundReport

log = logging.getLogger(__name__)


class RoundReports:
    """Reports rounds. Belongs to the event loop's thread.

    Args:
        result: how the update of the round that has just ended went
        samples_of: how many samples work of some weight is of, about

    Attributes:
        finished: the rounds that ended here lately; of stage 0 alone
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        result: Callable[[], StepResult | None],
        samples_of: Callable[[int], int],
    ):
        self.finished: deque[RoundReport] = deque(maxlen=MAX_REPORTS)
        self._clock = context.clock
        self._metrics = context.metrics
        self._manifest = context.resolved.manifest
        self._stage = stage
        self._result = result
        self._samples_of = samples_of
        self._began_s = context.clock.monotonic_s()

    def begin(self, optimizer_step: int) -> None:
        """Begin with weights that this seat has not made itself."""
        self._began_s = self._clock.monotonic_s()
        # These may not have been published yet.
        still_true = [report for report in self.finished if report.optimizer_step <= optimizer_step]
        self.finished.clear()
        self.finished.extend(still_true)

    def ended(self, committed: Committed, restart: Restart) -> None:
        """Report a round whose update the weights have now."""
        cut, result = committed.entry.cut, self._result()
        counts = [signed.body for signed in committed.close.counts]
        # Where rounds end without an average, the entry that has one holds the samples of all of them.
        is_each_held = self._manifest.averaging.steps_per_average == 1
        counted = [(each.samples, each.weight, each.loss_sum) for each in counts]
        held = [(num_windows(each.samples), each.weight, each.loss_sum) for each in cut.brings]
        told = held if is_each_held else counted
        samples, weight = sum(each[0] for each in told), sum(each[1] for each in told)
        # Stage 0 alone knows the losses of what an entry holds: more may have been under way as the round was closed.
        loss = self._mean_loss(held if is_each_held and self._stage == 0 else counted)
        now_s = self._clock.monotonic_s()
        seconds, self._began_s = now_s - self._began_s, now_s
        optimizer_step = restart.optimizer_step + cut.round + 1 - restart.first_round
        if self._stage == 0 and 0 <= optimizer_step < MAX_ROUNDS > cut.round:
            # Members tell of samples what they like, within what the protocol checks; no report is refused for it.
            self.finished.append(
                RoundReport(
                    round_number=cut.round,
                    optimizer_step=optimizer_step,
                    samples=min(max(samples, 0), MAX_SAMPLES - 1),
                    loss=loss,
                    seconds=seconds if seconds >= LEAST_MEASURED else 0.0,
                )
            )
        if cut.averages and not weight:
            log.error("update_skipped round=%d reason=all gradients are lost", cut.round)
        elif result is not None and result.skipped and cut.averages:
            log.error("update_skipped round=%d reason=the averaged gradient is not finite", cut.round)
        self._metrics.loss.set(loss)
        data = self._manifest.data
        self._metrics.step_targets.set(max(weight, 0) * (1 if data.has_targets else data.sequence_length))
        log.info(
            "step_done optimizer_step=%d loss=%.4f %s=%d seconds=%.2f grad_norm=%.3g lr=%.3g",
            optimizer_step,
            loss,
            "targets" if self._manifest.data.has_targets else "samples",
            weight,
            seconds,
            0.0 if result is None else result.grad_norm,
            0.0 if result is None else result.learning_rate,
        )

    def _mean_loss(self, told: Iterable[tuple[int, int, float]]) -> float:
        """The mean loss of the targets that have counted, in nats per token: what fits a report.

        The loss of a sample is a sum over its targets, divided by the length that all samples have. A sum that no stage
        computes is a lie, and left out.

        Args:
            told: samples, their weight and the sum of their losses, as members have told
        """
        data = self._manifest.data
        sound = [each for each in told if abs(each[2]) <= MAX_LOSS * each[0] and each[1] > 0]
        weight = sum(weight for _, weight, _ in sound)
        num_samples = weight / data.sequence_length if data.has_targets else weight
        loss = sum(loss_sum for _, _, loss_sum in sound) / num_samples if num_samples else 0.0
        return min(max(loss, -MAX_LOSS), MAX_LOSS)

    def lose(self, lost: list[Contribution]) -> None:
        """Report work that no update will hold, and forget it. Others read its samples again."""
        for contribution in lost:
            # Stage 0 alone knows which samples they are.
            num_samples = num_windows(contribution.samples) or self._samples_of(contribution.weight)
            self._metrics.lost_samples.inc(num_samples)
            text = "samples_given_up samples=%d round=%d reason=no update holds them: they are read again"
            log.info(text, num_samples, contribution.name.round)
        lost.clear()

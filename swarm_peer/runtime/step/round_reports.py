"""Tells of the rounds that have ended at one replica: in the log, in the metrics, and to the coordinator."""

from __future__ import annotations

import logging
from collections import deque

from swarm_peer.model.round_strategy import StepResult
from swarm_peer.policy.data.ranges import num_repeated
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.step_state import StepState
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.step.outcome import Settlement
from swarm_peer.wire.records import MAX_REPORTS, RoundReport

log = logging.getLogger(__name__)


def num_read_again(samples: int, step: StepState, timeline: Timeline, held_back: int) -> int:
    """How many samples of a round count anew on another timeline, since the run has gone back to before it.

    If it has gone back to this very round, it goes on with an average of the round before. This peer does not know
    whether its part is in that average; if not, its samples count, and are in no update.

    Args:
        held_back: those of the samples that are of the round before
    """
    if timeline <= step.timeline or timeline.created_at_round > step.round_number:
        return 0
    return samples if timeline.created_at_round < step.round_number else samples - held_back


class RoundReports:
    """Reports rounds. Belongs to the event loop's thread.

    Attributes:
        finished: the rounds that ended here lately; of stage 0 alone
    """

    def __init__(self, *, context: PeerContext, stage: int):
        self.finished: deque[RoundReport] = deque(maxlen=MAX_REPORTS)
        self._me = context.identity.peer_id
        self._clock = context.clock
        self._metrics = context.metrics
        self._averaging = context.resolved.manifest.averaging
        self._stage = stage
        self._has_targets = context.resolved.manifest.data.has_targets
        # Samples that the next average should be of; None if this replica does not know of all.
        self._num_counted: int | None = 0

    def begin(self, step: StepState) -> None:
        """Begin with weights that this replica has not made itself."""
        begins_period = step.optimizer_step == 0 or self._averaging.averages_at(step.optimizer_step - 1)
        self._num_counted = 0 if begins_period and self._averaging.mode != "delayed" else None
        # These may not have been published yet.
        still_true = [report for report in self.finished if report.optimizer_step <= step.optimizer_step]
        self.finished.clear()
        self.finished.extend(still_true)

    def report(self, step: StepState, settlement: Settlement, result: StepResult, samples: int, loss: float) -> None:
        """Report the end of a round.

        Args:
            step: where the replica stood in the round
            samples: that have counted in it
            loss: mean over the targets of these samples
        """
        optimizer_step, seconds = step.optimizer_step + 1, self._clock.monotonic_s() - step.began_s
        if self._stage == 0:
            report = RoundReport(
                round_number=step.round_number,
                optimizer_step=optimizer_step,
                samples=samples,
                loss=loss,
                seconds=seconds,
            )
            self.finished.append(report)
        is_delayed = self._averaging.mode == "delayed"
        if self._num_counted is not None and not is_delayed:
            self._num_counted += samples
        if self._averaging.averages_at(step.optimizer_step, begins_timeline=step.begins_timeline):
            self._check_average(step, settlement, result)
            self._num_counted = 0
        if is_delayed:
            self._num_counted = samples
        self._metrics.loss.set(loss)
        log.info(
            "step_done optimizer_step=%d loss=%.4f %s=%d seconds=%.2f grad_norm=%.3g lr=%.3g",
            optimizer_step,
            loss,
            "targets" if self._has_targets else "samples",
            settlement.samples,
            seconds,
            result.grad_norm,
            result.learning_rate,
        )

    def lose(self, samples: int, step: StepState, timeline: Timeline, held_back: int = 0) -> None:
        """Report work that no update will hold. That is no error if its samples are read again.

        Args:
            timeline: the one that this peer goes on with
            held_back: those of the samples that are of the round before
        """
        num_again = num_read_again(samples, step, timeline, held_back)
        self._metrics.lost_samples.inc(num_again)
        if num_again:
            log.info("samples_given_up samples=%d round=%d reason=the run goes back", num_again, step.round_number)
        reason = "stage-mates went on without this peer"
        self._metrics.lose(samples - num_again, reason, round_number=step.round_number)

    def _check_average(self, step: StepState, settlement: Settlement, result: StepResult) -> None:
        """Say so if the average changes nothing, has samples twice, or is not of all that counted since the last."""
        # Of two that have brought the same sample, the one with the greater id says so.
        own, brought = settlement.brought.get(self._me, ()), settlement.brought
        others = [item for peer_id in brought if peer_id < self._me for item in brought[peer_id]]
        self._metrics.repeat(num_repeated(own, others), round_number=step.round_number)
        if result.skipped and not settlement.samples:
            log.error("update_skipped round=%d reason=all gradients are lost", step.round_number)
        elif result.skipped:
            log.error("update_skipped round=%d reason=the averaged gradient is not finite", step.round_number)
        # Where averages are weighted by targets, nobody knows how many all samples have.
        if self._stage == 0 and not self._has_targets and self._num_counted not in (None, settlement.samples):
            text = "samples_differ round=%d counted=%d averaged=%d"
            log.warning(text, step.round_number, self._num_counted, settlement.samples)

"""Knows what this peer brought to the last updates of a stage, which is lost if stage-mates go on without it.

Outlives the replica: a peer that joins its stage anew finds out then what it has lost. Must not know how a peer takes
over a state: step/step_loop.py does.
"""

from __future__ import annotations

import logging

from swarm_peer.config import AveragingSection
from swarm_peer.policy.lineage import MOST_STEPS, Descent, last_common_step
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.step_state import StepState
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.snapshot_store import SnapshotStore

log = logging.getLogger(__name__)


class OwnWork:
    """Counts what this peer brought to each of the last updates of one stage. Belongs to the event loop's thread.

    Attributes:
        snapshots: those that this peer keeps, some of which are given up together with what it brought
    """

    def __init__(self, *, averaging: AveragingSection, metrics: PeerMetrics, snapshots: SnapshotStore):
        self.snapshots = snapshots
        self._averaging = averaging
        self._metrics = metrics
        self._samples: dict[int, int] = {}  # by the optimizer step before the update
        # The furthest that this peer has stood, with its samples in it.
        self._timeline: Timeline | None = None
        self._descent: Descent | None = None
        self._is_behind = False
        self._has_left = False
        self._made: tuple[int, int] | None = None  # while behind: the update just made, and what this peer brought

    def note(self, ended: ReplicaRound) -> None:
        """Note what this peer has brought to the update that ends a round; where nobody averages, nothing."""
        step = ended.step
        if self._averaging.averages_at(step.optimizer_step, begins_timeline=step.begins_timeline):
            if self._is_behind:
                self._made = step.optimizer_step, ended.samples
            else:
                self._samples[step.optimizer_step] = ended.samples

    def leave(self) -> None:
        """Note that this peer has left the stage, where stage-mates go on with its work."""
        self._has_left = True

    def stand_at(self, step: StepState) -> None:
        """Note where this peer stands."""
        self._has_left = False
        if self._is_behind:
            self.give_up(step)
            made, self._made = self._made, None
            if self._is_behind:
                return
            if made is not None:
                self._samples.setdefault(*made)  # the same update as before holds what was brought then
        self._timeline, self._descent = step.timeline, step.descent
        past = range(step.optimizer_step - MOST_STEPS, step.optimizer_step)
        self._samples = {made_at: samples for made_at, samples in self._samples.items() if made_at in past}

    def give_up(self, state: StageState | StepState) -> None:
        """Give up what has not led to a state that this peer takes over: its samples are lost.

        Snapshots of such weights are dropped: the run has others of the same steps. Where the run has gone back, to a
        newer timeline, samples since then are read again, so nothing of them is lost.

        A peer that comes back to its stage may be given a state that came before the one it left with. Whether its
        samples are lost shows once it has made the updates that follow.
        """
        if self._descent is None or self._timeline is None:
            return
        end = self._descent.optimizer_step
        if state.timeline > self._timeline:
            end = min(end, state.timeline.first_optimizer_step)
        common = last_common_step(self._descent, state.descent)
        self._is_behind = state.timeline == self._timeline and common == state.optimizer_step < end
        if self._is_behind:
            return
        if state.optimizer_step - self._descent.optimizer_step > MOST_STEPS and not self._has_left:
            self._forget_parted(state, end)
            return
        parted = end if common is None else min(common, end)
        lost = sum(samples for made_at, samples in self._samples.items() if parted <= made_at < end)
        self._samples = {made_at: samples for made_at, samples in self._samples.items() if made_at < parted}
        reason = f"stage-mates made the updates from optimizer step {parted} to {end} without this peer"
        self._metrics.lose(lost, reason, round_number=state.round_number)
        if parted < end:
            # Where updates are delayed, a snapshot also holds the average that ends its round, be it the one just made.
            is_of_other_average = self._averaging.mode == "delayed" and self._made is None
            last_common = parted - 1 if is_of_other_average else parted
            # The run may have gone back twice meanwhile, and this peer may have later snapshots from another stage.
            self.snapshots.give_up(last_common, self._descent.optimizer_step)

    def _forget_parted(self, state: StageState | StepState, end: int) -> None:
        """Give up weights of long ago: the state may have come from them, or this peer may have gone on alone.

        Args:
            end: the optimizer step after which samples are read again
        """
        assert self._descent is not None
        made, samples = self._descent.optimizer_step, sum(n for made_at, n in self._samples.items() if made_at < end)
        text = "samples_may_be_lost samples=%d round=%d reason=from optimizer step %d to %d this peer was cut off"
        if samples:
            log.warning(text, samples, state.round_number, made, state.optimizer_step)
        self._samples.clear()
        # Others hold the snapshots of these steps that the run has made, if they have not dropped them.
        self.snapshots.give_up(-1, made)

"""Counts what this peer brought to the last rounds of its timeline, which is lost if stage-mates went on without it.

Must not know how a peer takes over a state: step_loop.py does.
"""

from __future__ import annotations

import logging

from swarm_peer.policy.lineage import MOST_ROUNDS, last_common_round
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.stage.rounds import Round
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.store import SnapshotStore

log = logging.getLogger(__name__)


class BroughtSamples:
    """Counts the samples that this peer brought to each of the last updates. Belongs to the event loop's thread."""

    def __init__(self, metrics: PeerMetrics, snapshots: SnapshotStore):
        self._metrics = metrics
        self._snapshots = snapshots
        self._samples: dict[int, int] = {}  # by round

    def note(self, ended: Round) -> None:
        """Note what this peer brought to an update that it has made."""
        self._samples[ended.number] = ended.samples
        self._samples.pop(ended.number - MOST_ROUNDS, None)

    def give_up(self, step: StepState, state: StageState) -> None:
        """Give up what this peer did since the last round that it has in common with a state that it takes over.

        Its samples of these rounds are lost, and its snapshots are of weights that the run does not go on from. Another
        timeline begins with a snapshot, and the samples since then are read again: nothing of them is lost.

        Args:
            step: where this peer stands, without the state
        """
        brought, self._samples = self._samples, {}
        if state.timeline != step.timeline or step.phase is Phase.EMPTY:
            return
        own = step.round_number, step.history_hash, step.lineage
        common = last_common_round(own, (state.round_number, state.history_hash, state.lineage))
        first = min(brought, default=step.round_number) if common is None else common
        self._samples = {number: samples for number, samples in brought.items() if number < first}
        if lost := sum(samples for number, samples in brought.items() if number >= first):
            self._metrics.lost_samples.inc(lost)
            text = "samples_lost samples=%d round=%d until=%d reason=stage-mates went on without this peer"
            log.error(text, lost, first, step.round_number - 1)
        self._snapshots.give_up(step.timeline, first)

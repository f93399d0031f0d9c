"""Which announced speeds are believed, and what replaces those that are not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState, PeerView, SwarmView

# No honest peer is this many times faster than the typical one: the ratio of a data centre's GPU to a laptop's.
OUTLIER = 20.0
# The run may deliver this many times what a stage announces before the announcements count as wrong: the two are means
# over different times.
TOLERANCE = 1.25
# A peer's speed is the median of so many announcements: two lifetimes of one.
ANNOUNCEMENTS_COUNTED = 2 * ANNOUNCEMENTS_PER_LIFETIME


class RecentSpeeds:
    """The speeds that peers have announced of late. Their median counts: one odd measurement moves no peer."""

    def __init__(self) -> None:
        # By peer: its speeds by the serial number of the announcement, the last announcement, and that with the median.
        self._recent: dict[str, tuple[dict[int, float], PeerView, PeerView]] = {}

    def observe(self, view: SwarmView) -> SwarmView:
        """Remember the speeds of a view, and replace each by the median of the peer's last announcements."""
        former, self._recent = self._recent, {}
        for peer in view.peers:
            speeds, last, smoothed = former.get(peer.peer_id, ({}, None, peer))
            if last is not None and last.stage != peer.stage:  # it has moved
                speeds, smoothed = {}, peer
            if peer is not last and peer.samples_per_s > 0:
                speeds[peer.announced] = peer.samples_per_s
                if len(speeds) > ANNOUNCEMENTS_COUNTED:
                    del speeds[min(speeds)]
                smoothed = _with_speed(peer, statistics.median(speeds.values()))
            self._recent[peer.peer_id] = speeds, peer, smoothed if peer.samples_per_s > 0 else peer
        return SwarmView(view.num_stages, tuple(smoothed for _, _, smoothed in self._recent.values()))

    def is_measured(self, peer_id: str) -> bool:
        """Whether the peer has announced its speed for a lifetime of announcements."""
        return peer_id in self._recent and len(self._recent[peer_id][0]) >= ANNOUNCEMENTS_PER_LIFETIME


@dataclass(frozen=True, slots=True)
class Finding:
    """An announced speed that is not believed.

    Attributes:
        subject: `peer=ID`, or `stage=K` if it is the speed of a whole stage
        is_of_stage: whether it is, which is no wonder on busy machines
    """

    subject: str
    reason: str
    is_of_stage: bool = False


def believed(
    view: SwarmView, stage_costs: Sequence[float], delivered_per_s: float
) -> tuple[SwarmView, tuple[Finding, ...]]:
    """The view with believable speeds: outliers are capped, and no stage is slower than what has passed through it.

    The speed of one peer cannot be checked from outside, since others share its stage. But a false speed is bounded:
    from above by that of the typical peer, from below by the samples that pass through its stage.

    Args:
        stage_costs: compute of one sample in each stage, in any one unit
        delivered_per_s: samples of the run whose gradient came back to stage 0; each has passed through every stage

    Returns:
        the view, and a finding for each speed that was changed
    """
    measured = [peer for peer in view.peers if peer.samples_per_s > 0 and peer.stage != UNDECIDED]
    if not measured:
        return view, ()
    limit = OUTLIER * statistics.median_low(peer.samples_per_s * stage_costs[peer.stage] for peer in measured)
    findings = []
    speeds = {peer.peer_id: peer.samples_per_s for peer in view.peers}
    for peer in measured:
        most = limit / stage_costs[peer.stage]
        if peer.samples_per_s > most:
            speeds[peer.peer_id] = most
            reason = f"announces {peer.samples_per_s:.3g} samples/s; more than {most:.3g} is not believed"
            findings.append(Finding(f"peer={peer.peer_id}", reason))
    for stage in range(view.num_stages):
        announced = sum(speeds[peer.peer_id] for peer in view.in_stage(stage) if peer.state is PeerState.SERVING)
        if 0 < announced * TOLERANCE < delivered_per_s:
            reason = f"its peers announce {announced:.3g} samples/s, and {delivered_per_s:.3g} pass through it"
            findings.append(Finding(f"stage={stage}", reason, is_of_stage=True))
            for peer in view.in_stage(stage):
                scaled = speeds[peer.peer_id] * (delivered_per_s / announced)
                speeds[peer.peer_id] = min(scaled, limit / stage_costs[stage])
    peers = tuple(_with_speed(peer, speeds[peer.peer_id]) for peer in view.peers)
    peers = tuple(
        replace(peer, device_samples_per_s=min(peer.device_samples_per_s, limit / stage_costs[peer.stage]))
        if peer.device_samples_per_s > 0 and peer.stage != UNDECIDED
        else peer
        for peer in peers
    )
    return SwarmView(view.num_stages, peers), tuple(findings)


def _with_speed(peer: PeerView, samples_per_s: float) -> PeerView:
    return peer if peer.samples_per_s == samples_per_s else replace(peer, samples_per_s=samples_per_s)

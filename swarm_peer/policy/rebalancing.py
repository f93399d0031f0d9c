"""Which stage a peer serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_peer.policy.view import UNDECIDED, PeerState, SwarmView


@dataclass(frozen=True, slots=True)
class StageChoice:
    stage: int
    reason: str


def choose_stage(view: SwarmView, stage_costs: Sequence[float], me: str) -> StageChoice:
    """The stage where one more peer helps the swarm most: the one with the least throughput for its cost.

    Peers that choose at the same time are placed one after the other in the order of their ids, on top of those that
    have a stage already, so that all of them come to the same plan and no two fill the same gap.

    Args:
        stage_costs: compute of one sample in each stage, in any one unit
        me: this peer's id; it need not be in the view
    """
    others = [peer for peer in view.peers if peer.peer_id != me and peer.stage != UNDECIDED]
    work_per_s = sorted(peer.samples_per_s * stage_costs[peer.stage] for peer in others if peer.samples_per_s > 0)
    typical = work_per_s[len(work_per_s) // 2] if work_per_s else 1.0
    capacity = [0.0] * view.num_stages  # samples/s that each stage can take
    num_peers = [0] * view.num_stages
    for peer in others:
        if peer.state is not PeerState.DRAINING:
            capacity[peer.stage] += peer.samples_per_s or typical / stage_costs[peer.stage]
            num_peers[peer.stage] += 1

    undecided = {peer.peer_id for peer in view.peers if peer.stage == UNDECIDED} | {me}
    for peer_id in sorted(undecided):
        stage = min(range(view.num_stages), key=lambda k: (capacity[k], num_peers[k], k))
        if peer_id == me:
            reason = (
                f"stage {stage} has {num_peers[stage]} peers and the least capacity, {capacity[stage]:.3g} samples/s"
            )
            return StageChoice(stage, reason)
        capacity[stage] += typical / stage_costs[stage]
        num_peers[stage] += 1
    raise AssertionError("unreachable: this peer is among the undecided")

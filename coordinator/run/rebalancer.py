"""Moves peers of a live run between stages: what the policy decides becomes assignments and lines of the log.

All decisions are in swarm_peer/policy/placement/live_rebalancer.py, which the simulator runs as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from swarm_peer.model.costs import forward_flops
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.traffic import stage_traffic
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.placement.live_rebalancer import LiveRebalancer
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.view import SwarmView
from swarm_peer.wire.records import Assignment

log = logging.getLogger(__name__)

# Seconds that a move takes besides its download: the peer finds its assignment, hands its gradient over, and applies
# the updates that it has missed (benchmarks/moves-2026-11-22.md). Simulations take as long.
MOVE_OVERHEAD_S = 5.0


class Rebalancer:
    """Runs the policy for one term of this coordinator. Belongs to the event loop's thread.

    Args:
        min_replicas: peers that each stage keeps while one of them moves
        inherited: assignments of the coordinator before this one, which may still be under way

    Attributes:
        policy: knows how many moves it has assigned so far, and why it decided as it did
    """

    def __init__(
        self, resolved: ResolvedManifest, min_replicas: int, *, begun_s: float, inherited: Sequence[Assignment] = ()
    ):
        stages = range(resolved.num_stages)
        params = RebalancingParameters(
            stage_costs=tuple(forward_flops(resolved)),
            state_bytes=tuple(float(max_state_bytes(resolved, stage)) for stage in stages),
            min_replicas=tuple(min_replicas for _ in stages),
            overhead_s=MOVE_OVERHEAD_S,
            traffic=stage_traffic(resolved),
        )
        self.policy = LiveRebalancer(
            params,
            announcement_s=resolved.manifest.limits.announcement_s,
            begun_s=begun_s,
            inherited=[assignment.peer for assignment in inherited],
        )

    def look(self, view: SwarmView, delivered: int, seconds: float, now_s: float) -> None:
        """Have the policy look at the swarm (LiveRebalancer.look), and log what it says."""
        for note in self.policy.look(view, delivered, seconds, now_s):
            log.log(logging.WARNING if note.is_warning else logging.INFO, "%s", note.text)

    def assignments(self) -> tuple[Assignment, ...]:
        """The assignments that are under way, the latest last."""
        return tuple(
            Assignment(
                peer=peer_id,
                announced=assigned.peer.announced,
                from_stage=assigned.move.from_stage,
                to_stage=assigned.move.to_stage,
                reason=assigned.move.reason[:300],
            )
            for peer_id, assigned in self.policy.movers.open.items()
        )

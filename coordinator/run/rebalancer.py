"""Moves peers of a live run between stages: looks at their announcements, and decides on assignments.

The decision itself is swarm_peer/policy/placement/rebalancing.py. This module prepares what it needs to see of
a live run: peers on their way from one stage to another, and speeds that can be believed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_peer.model.costs import forward_flops, safe_stage_memory
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.placement.capacity import ideal_capacity, serving_capacity, work_per_s
from swarm_peer.policy.placement.churn import ChurnMeter
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import ExchangePatience, Move, rebalance
from swarm_peer.policy.placement.throughput_validation import believed
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.network.directory import ANNOUNCEMENTS_PER_LIFETIME
from swarm_peer.wire.records import Assignment

log = logging.getLogger(__name__)

# Measured speeds wander by some percent, so a smaller gain than this is not worth a move.
LEAST_GAIN = 0.1
# Moves may have lately fallen short of their promise: peers that share a machine slow each other down, and a stage may
# cost more there than its arithmetic says. A gain must be well above that shortfall, which halves in an hour.
SHORTFALL_MARGIN = 1.5
SHORTFALL_HALVED_S = 3600.0
# However far moves fell short, a gain of this share of the least stage's throughput is worth a move.
MOST_NEEDED_GAIN = 0.5
# Seconds that a peer takes to drain, end its process, start anew, and build the stage's module.
MOVE_OVERHEAD_S = 20.0
# A peer's speed is the median of so many announcements: two lifetimes of one.
ANNOUNCEMENTS_COUNTED = 2 * ANNOUNCEMENTS_PER_LIFETIME
# Announced speeds are means over about so long.
SETTLING_S = 15.0
# Decisions wait for a quiet moment, but no longer than this: in a large swarm peers come and go all the time.
LONGEST_WAIT_S = 30.0
# For so many lifetimes of an announcement, an exchange of peers must have looked worth it.
EXCHANGE_PATIENCE = 4
# A mover that has not shown up in its new stage after so many times the time that it should take is given up.
MOVE_PATIENCE = 3.0
# A peer that did not follow its assignment is not asked again for this long.
REFUSAL_S = 600.0
# A peer that has moved stays for this long, unless peers come or go: moving the same peers again would follow noise.
REST_S = 900.0
# Even if peers come and go, it stays for this long, as long as all stages are served.
LEAST_REST_S = 120.0


@dataclass(frozen=True, slots=True)
class RebalancingOptions:
    """How an operator wants peers to be moved.

    Attributes:
        min_replicas: peers that each stage keeps while one of them moves
        horizon_s: how long an advantage is expected to last; None to learn it from how often peers come and go
    """

    min_replicas: int = 1
    horizon_s: float | None = None


EVEN_OUT = RebalancingOptions()


@dataclass(slots=True, kw_only=True)
class _OpenAssignment:
    """A move under way, from its announcement to the moment that the peer serves its new stage."""

    move: Move
    peer: PeerView  # as it was
    work_per_s: float
    given_s: float
    patience_s: float
    is_obeyed: bool = False  # the peer was seen to drain


class Rebalancer:
    """Decides which peers of a live run move, and follows their moves. Belongs to the event loop's thread.

    Args:
        inherited: assignments of the coordinator before this one, which may still be under way

    Attributes:
        reason: of the last decision
        num_moves: moves assigned so far
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        options: RebalancingOptions,
        *,
        begun_s: float,
        inherited: Sequence[Assignment] = (),
    ):
        manifest, count = resolved.manifest, resolved.num_stages
        self._announcement_s = manifest.limits.announcement_s
        self._interval_s = self._announcement_s / ANNOUNCEMENTS_PER_LIFETIME
        self._settled_s = begun_s + self._announcement_s
        self._inherited = {assignment.peer for assignment in inherited}
        self._inherited_until_s = begun_s + MOVE_PATIENCE * MOVE_OVERHEAD_S
        self._options = options
        self._costs = forward_flops(resolved)
        self._params = RebalancingParameters(
            stage_costs=tuple(self._costs),
            state_bytes=tuple(float(max_state_bytes(resolved, stage)) for stage in range(count)),
            stage_memory_bytes=tuple(safe_stage_memory(resolved)),
            min_replicas=(options.min_replicas,) * count,
            overhead_s=MOVE_OVERHEAD_S,
        )
        self._churn = ChurnMeter()
        self._open: dict[str, _OpenAssignment] = {}  # by the id of the peer, as it was
        self._arrived: dict[str, _OpenAssignment] = {}  # by the id that a mover has now
        self._refused_s: dict[str, float] = {}
        self._first_ids: dict[str, str] = {}  # of all peers: a mover has another id now
        self._members: frozenset[str] | None = None  # by their first ids
        self._members_changed_s = -math.inf
        self._speeds: dict[str, dict[int, float]] = {}  # by peer and serial number of its announcement
        self._reported: frozenset[str] = frozenset()
        self._serving: frozenset[tuple[str, int]] = frozenset()
        self._serving_since_s = begun_s
        self._decided_s = begun_s
        self._computing_s = begun_s  # when the run was first seen to compute
        self._patience = ExchangePatience()
        self._promised: tuple[float, frozenset[str]] | None = None  # by the last moves, to these members
        self._shortfall, self._shortfall_s = 0.0, begun_s
        self.reason = "none yet: not all peers have been heard of and measured"
        self.num_moves = 0

    def look(self, view: SwarmView, delivered: int, seconds: float, now_s: float) -> None:
        """Take in what peers announce now, and assign moves if there are any to make.

        Args:
            delivered: samples that the run has trained on in the last seconds
            seconds: how many seconds these are
        """
        view = self._take_in(view, delivered, seconds, now_s)
        if not delivered:
            self._computing_s = now_s
        # The first announcements of some peers are still to come, or no peer has computed yet.
        if not delivered or now_s < self._settled_s:
            self._decided_s = now_s
            return
        self._forget_inherited(view, now_s)
        if self._inherited:
            self._decided_s = now_s
            return
        waited_s = now_s - self._decided_s
        # Of peers that vanish together, one is missed sooner than the other.
        if now_s - self._serving_since_s < self._interval_s and waited_s < LONGEST_WAIT_S:
            return
        if self._are_unknown(view, now_s) and waited_s < 2 * self._announcement_s:
            return
        self._decided_s = now_s
        self._decide(view, now_s)

    def _take_in(self, view: SwarmView, delivered: int, seconds: float, now_s: float) -> SwarmView:
        """Follow peers, movers and speeds; returns the view as the decision needs it."""
        self._record_speeds(view)
        self._follow_movers(view, now_s)
        view = self._with_movers(self._smoothed(view))
        serving = frozenset((peer.peer_id, peer.stage) for peer in view.peers if peer.state is PeerState.SERVING)
        if serving != self._serving:
            self._serving, self._serving_since_s = serving, now_s
        # Samples that former peers have done say nothing of those that are here now.
        is_theirs = seconds > 0 and now_s - self._serving_since_s > seconds + SETTLING_S
        view, findings = believed(view, self._costs, delivered / seconds if is_theirs else 0.0)
        reported = frozenset(finding.peer_id or finding.reason[:10] for finding in findings)
        for finding in findings if reported - self._reported else ():
            log.warning("speed_not_believed peer=%s reason=%s", finding.peer_id, finding.reason)
        self._reported = reported
        self._observe_members(view, now_s)
        return view

    def _decide(self, view: SwarmView, now_s: float) -> None:
        horizon_s = self._options.horizon_s or self._churn.horizon_s(view.num_stages, now_s)
        self._learn_from_last_moves(view, now_s)
        params = replace(self._params, horizon_s=horizon_s, least_gain=self._least_gain(now_s))
        decision = rebalance(self._without_resting(view, now_s), params, now_s)
        decision = self._patience.check(decision, EXCHANGE_PATIENCE * self._announcement_s, now_s)
        kind = decision.reason.partition(":")[0]
        if decision.moves or kind != self.reason.partition(":")[0]:  # the numbers change all the time
            log.info("rebalancing moves=%d reason=%s", len(decision.moves), decision.reason)
        self.reason = decision.reason
        if decision.moves and self._members is not None:
            self._promised = decision.promised, self._members
        for move in decision.moves:
            self._assign(move, view, now_s)

    def _assign(self, move: Move, view: SwarmView, now_s: float) -> None:
        peer = view.peer(move.peer_id)
        assert peer is not None
        self._open[move.peer_id] = _OpenAssignment(
            move=move,
            peer=peer,
            work_per_s=peer.samples_per_s * self._costs[move.from_stage],
            given_s=now_s,
            patience_s=MOVE_PATIENCE * self._params.move_s(peer, move.to_stage),
        )
        self.num_moves += 1
        log.info("peer_assigned peer=%s to=%d reason=%s", move.peer_id, move.to_stage, move.reason)

    def _record_speeds(self, view: SwarmView) -> None:
        """Remember the speeds that peers have announced of late."""
        self._speeds = {peer.peer_id: self._speeds.get(peer.peer_id, {}) for peer in view.peers}
        for peer in view.peers:
            if peer.samples_per_s > 0:
                known = self._speeds[peer.peer_id]
                known[peer.announced] = peer.samples_per_s
                for oldest in sorted(known)[:-ANNOUNCEMENTS_COUNTED]:
                    del known[oldest]

    def _smoothed(self, view: SwarmView) -> SwarmView:
        """The view with the speeds of the last announcements: one odd measurement moves no peer."""
        peers = (
            replace(peer, samples_per_s=statistics.median(self._speeds[peer.peer_id].values()))
            if peer.samples_per_s > 0
            else peer
            for peer in view.peers
        )
        return SwarmView(view.num_stages, tuple(peers))

    def _are_unknown(self, view: SwarmView, now_s: float) -> bool:
        """Whether so many peers have just begun to serve a stage that their speeds may change the decision."""
        if view.fewest_serving() == 0:
            return False  # however fast they are, a peer has to go to the empty stage
        for stage in range(view.num_stages):
            serving = view.serving(stage)
            if sum(self._is_being_measured(peer, now_s) for peer in serving) > LEAST_GAIN * len(serving):
                return True
        return False

    def _is_being_measured(self, peer: PeerView, now_s: float) -> bool:
        """Whether the peer's speed will be known in a moment. That of a mover is known from its former stage."""
        if peer.peer_id in self._arrived or self._is_measured(peer.peer_id) or peer.since_s is None:
            return False
        return now_s - max(peer.since_s, self._computing_s) < 2 * self._announcement_s

    def _is_measured(self, peer_id: str) -> bool:
        return len(self._speeds.get(peer_id, ())) >= ANNOUNCEMENTS_PER_LIFETIME

    def _observe_members(self, view: SwarmView, now_s: float) -> None:
        """Note which peers take part. A peer that moves gets a new id, and yet no peer has come or gone."""
        # A peer is known by the id that it named first: it could claim another former id each time.
        self._first_ids = {
            peer.peer_id: self._first_ids.get(peer.peer_id)
            or self._first_ids.get(peer.formerly)
            or peer.formerly
            or peer.peer_id
            for peer in view.peers
        }
        members = frozenset(self._first_ids.values())
        self._churn.observe(members, now_s)
        if self._members is not None and members != self._members:
            self._members_changed_s = now_s
        self._members = members

    def _learn_from_last_moves(self, view: SwarmView, now_s: float) -> None:
        """Once all movers are measured, note by how much the last moves fell short of their promise."""
        if self._promised is None or self._open or not all(map(self._is_measured, self._arrived)):
            return
        promised, members = self._promised
        self._promised = None
        capacity = serving_capacity(view, work_per_s(view.peers, self._costs), self._costs)
        if members == self._members and min(capacity) > 0:
            kept = min(capacity) / ideal_capacity(capacity, self._costs)
            if promised / kept - 1 > self._faded_shortfall(now_s):
                self._shortfall, self._shortfall_s = promised / kept - 1, now_s
                log.info("moves_fell_short promised=%.2f kept=%.2f", promised, kept)

    def _least_gain(self, now_s: float) -> float:
        """The gain below which no move is worth it: above the noise, and above what moves lately fell short by."""
        return min(max(LEAST_GAIN, SHORTFALL_MARGIN * self._faded_shortfall(now_s)), MOST_NEEDED_GAIN)

    def _faded_shortfall(self, now_s: float) -> float:
        return self._shortfall * math.pow(0.5, (now_s - self._shortfall_s) / SHORTFALL_HALVED_S)

    def _without_resting(self, view: SwarmView, now_s: float) -> SwarmView:
        """The view in which peers that have just moved, or did not follow an assignment, are not movable."""
        is_lost = view.fewest_serving() == 0

        def stays(peer: PeerView) -> bool:
            if peer.peer_id in self._refused_s:
                return True
            if is_lost or not peer.formerly or peer.since_s is None:
                return False
            rest_s = REST_S if peer.since_s > self._members_changed_s else LEAST_REST_S
            return now_s - peer.since_s < rest_s

        peers = (replace(peer, movable=False) if stays(peer) else peer for peer in view.peers)
        return SwarmView(view.num_stages, tuple(peers))

    def _forget_inherited(self, view: SwarmView, now_s: float) -> None:
        """Wait no longer for movers of the former coordinator that are in one of their two stages, or are overdue."""
        if now_s < self._inherited_until_s:
            serving = {peer.peer_id for peer in view.peers if peer.state is PeerState.SERVING}
            self._inherited -= serving | {peer.formerly for peer in view.peers}
        else:
            self._inherited = set()

    def assignments(self) -> tuple[Assignment, ...]:
        """The assignments that are under way, the latest last."""
        return tuple(
            Assignment(
                peer=peer_id,
                announced=assignment.peer.announced,
                from_stage=assignment.move.from_stage,
                to_stage=assignment.move.to_stage,
                reason=assignment.move.reason[:300],
            )
            for peer_id, assignment in self._open.items()
        )

    def _follow_movers(self, view: SwarmView, now_s: float) -> None:
        """Find out which assignments are carried out, void or overdue; a peer that moves gets a new id on the way."""
        seen = {peer.peer_id: peer for peer in view.peers}
        for peer in view.peers:
            assignment = self._open.get(peer.formerly)
            if assignment is not None and peer.stage == assignment.move.to_stage:
                del self._open[peer.formerly]
                self._arrived[peer.peer_id] = assignment
                log.info("peer_moved peer=%s from=%d to=%d", peer.peer_id, assignment.move.from_stage, peer.stage)
        self._arrived = {peer_id: assignment for peer_id, assignment in self._arrived.items() if peer_id in seen}
        for peer_id, assignment in list(self._open.items()):
            is_here = peer_id in seen
            assignment.is_obeyed |= is_here and seen[peer_id].state is PeerState.DRAINING
            if not is_here and not assignment.is_obeyed:
                del self._open[peer_id]
                log.warning("assignment_void peer=%s reason=it is gone", peer_id)
            elif now_s - assignment.given_s > assignment.patience_s:
                del self._open[peer_id]
                self._refused_s[peer_id] = now_s
                self._promised = None
                to_stage = assignment.move.to_stage
                log.warning("assignment_given_up peer=%s to=%d reason=it did not come", peer_id, to_stage)
        self._refused_s = {peer: at for peer, at in self._refused_s.items() if now_s - at < REFUSAL_S}

    def _with_movers(self, view: SwarmView) -> SwarmView:
        """The view with each mover once, in the stage that it goes to and at the speed that it had where it was."""
        peers = {peer.peer_id: peer for peer in view.peers}
        former = {assignment.move.peer_id for assignment in self._arrived.values()}
        for peer_id, assignment in self._open.items():
            peers[peer_id] = replace(
                assignment.peer,
                stage=assignment.move.to_stage,
                state=PeerState.JOINING,
                samples_per_s=0.0,
                work_per_s=assignment.work_per_s,
                since_s=assignment.given_s,
                moved_from=assignment.move.from_stage,
            )
        for peer_id, assignment in self._arrived.items():
            if not self._is_measured(peer_id):
                samples_per_s = assignment.work_per_s / self._costs[peers[peer_id].stage]
                peers[peer_id] = replace(peers[peer_id], samples_per_s=samples_per_s)
        return SwarmView(view.num_stages, tuple(peer for peer in peers.values() if peer.peer_id not in former))

"""Moves peers of a live run between stages: looks at what they announce, and decides on orders.

The decision itself is swarm_peer/policy/rebalancing.py. Here is what it needs to see of a live run: peers that are on
their way from one stage to another, and speeds that can be believed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_peer.config import RunManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.churn import ChurnMeter
from swarm_peer.policy.exchange import RebalancingParameters
from swarm_peer.policy.forecast import ideal_capacity, serving_capacity, work_per_s
from swarm_peer.policy.rebalancing import ExchangePatience, Move, rebalance
from swarm_peer.policy.trust import believed
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.directory import ANNOUNCEMENTS_PER_LIFETIME
from swarm_peer.runtime.preparation import stage_costs, stage_memory
from swarm_peer.wire.records import Assignment

log = logging.getLogger(__name__)

# Measured speeds wander by some percent. What is smaller than this is not worth a move.
LEAST_GAIN = 0.1
# Nor is what is not well above what moves have lately fallen short of their promise by: peers that share a machine slow
# each other down, and a stage may cost more there than its arithmetic says. Halved in an hour.
SHORTFALL_MARGIN = 1.5
SHORTFALL_HALVED_S = 3600.0
# Of what the least stage takes, whatever has fallen short.
MOST_NEEDED_GAIN = 0.5
# To drain, end the process, start anew, and build the stage's module.
MOVE_OVERHEAD_S = 20.0
# A peer's speed is the median of so many announcements: two lifetimes of one.
ANNOUNCEMENTS_COUNTED = 2 * ANNOUNCEMENTS_PER_LIFETIME
# Announced speeds are means over about so long.
SETTLING_S = 15.0
# In a large swarm somebody comes or goes all the time.
LONGEST_WAIT_S = 30.0
# For so many lifetimes of an announcement, an exchange of peers must have looked worth it.
EXCHANGE_PATIENCE = 4
# A mover that has not shown up in its new stage after so many times the time that it should take is given up.
MOVE_PATIENCE = 3.0
# A peer that did not obey is not asked again for this long.
REFUSAL_S = 600.0
# Nor is one that has moved, as long as nobody comes or goes: to move the same peers about again is to follow noise.
REST_S = 900.0
# Nor for this long whoever comes or goes, as long as all stages are served.
LEAST_REST_S = 120.0


@dataclass(frozen=True, slots=True)
class RebalancingOptions:
    """What the operator says about it.

    Attributes:
        min_replicas: peers that each stage keeps while one of them moves
        horizon_s: how long an advantage is expected to last; None to learn it from how often peers come and go
    """

    min_replicas: int = 1
    horizon_s: float | None = None


EVEN_OUT = RebalancingOptions()


@dataclass(slots=True)
class _Order:
    """A move under way, from its announcement to the moment that the peer serves its new stage."""

    move: Move
    peer: PeerView  # as it was
    work_per_s: float
    given_s: float
    patience_s: float
    is_obeyed: bool = False  # the peer was seen to drain


class Rebalancer:
    """Belongs to the event loop's thread.

    Args:
        inherited: orders of the coordinator before this one, which may still be under way

    Attributes:
        reason: of the last decision
        migrations: moves ordered so far
    """

    def __init__(
        self,
        manifest: RunManifest,
        options: RebalancingOptions,
        begun_s: float,
        inherited: Sequence[Assignment] = (),
    ):
        count = manifest.stages.count
        self._announcement_s = manifest.limits.announcement_s
        self._interval_s = self._announcement_s / ANNOUNCEMENTS_PER_LIFETIME
        self._settled_s = begun_s + self._announcement_s
        self._inherited = {order.peer for order in inherited}
        self._inherited_until_s = begun_s + MOVE_PATIENCE * MOVE_OVERHEAD_S
        self._options = options
        self._costs = stage_costs(manifest)
        self._params = RebalancingParameters(
            stage_costs=tuple(self._costs),
            state_bytes=tuple(float(max_state_bytes(manifest, stage)) for stage in range(count)),
            stage_memory_bytes=tuple(stage_memory(manifest)),
            min_replicas=(options.min_replicas,) * count,
            overhead_s=MOVE_OVERHEAD_S,
            exchange_patience_s=EXCHANGE_PATIENCE * self._announcement_s,
        )
        self._churn = ChurnMeter()
        self._orders: dict[str, _Order] = {}  # by the id of the peer, as it was
        self._arrived: dict[str, _Order] = {}  # by the id that a mover has now
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
        self.migrations = 0

    def look(self, view: SwarmView, delivered: int, seconds: float, now_s: float) -> None:
        """Order moves, if there are any to make.

        Args:
            delivered: samples that the run has done
            seconds: in these last seconds
        """
        view = self._with_movers(self._smoothed(view), now_s)
        serving = frozenset((peer.peer_id, peer.stage) for peer in view.peers if peer.state is PeerState.SERVING)
        if serving != self._serving:
            self._serving, self._serving_since_s = serving, now_s
        # What was done by others says nothing of those that are here now.
        is_theirs = seconds > 0 and now_s - self._serving_since_s > seconds + SETTLING_S
        view, findings = believed(view, self._costs, delivered / seconds if is_theirs else 0.0)
        reported = frozenset(finding.peer_id or finding.reason[:10] for finding in findings)
        for finding in findings if reported - self._reported else ():
            log.warning("speed_not_believed peer=%s reason=%s", finding.peer_id, finding.reason)
        self._reported = reported
        self._observe_members(view, now_s)
        if not delivered:
            self._computing_s = now_s
        # Not all have been heard of yet, nor those whom another coordinator moves; or nobody is measured.
        if not delivered or now_s < self._settled_s or self._is_awaiting_inherited(view, now_s):
            self._decided_s = now_s
            return
        waited_s = now_s - self._decided_s
        # Of peers that vanish together, one is missed sooner than the other.
        if now_s - self._serving_since_s < self._interval_s and waited_s < LONGEST_WAIT_S:
            return
        if self._are_unknown(view, now_s) and waited_s < 2 * self._announcement_s:
            return
        self._decided_s = now_s
        horizon_s = self._options.horizon_s or self._churn.horizon_s(view.num_stages, now_s)
        params = replace(self._params, horizon_s=horizon_s, least_gain=self._least_gain(view, now_s))
        decision = rebalance(self._without_resting(view, now_s), params, now_s)
        decision = self._patience.check(decision, params.exchange_patience_s, now_s)
        kind = decision.reason.partition(":")[0]
        if decision.moves or kind != self.reason.partition(":")[0]:  # the numbers change all the time
            log.info("rebalancing moves=%d reason=%s", len(decision.moves), decision.reason)
        self.reason = decision.reason
        if decision.moves and self._members is not None:
            self._promised = decision.promised, self._members
        for move in decision.moves:
            peer = view.peer(move.peer_id)
            assert peer is not None
            patience_s = MOVE_PATIENCE * self._params.move_s(peer, move.to_stage)
            work_per_s = peer.samples_per_s * self._costs[move.from_stage]
            self._orders[move.peer_id] = _Order(move, peer, work_per_s, now_s, patience_s)
            self.migrations += 1
            log.info("peer_ordered peer=%s to=%d reason=%s", move.peer_id, move.to_stage, move.reason)

    def _smoothed(self, view: SwarmView) -> SwarmView:
        """Speeds as they have been announced of late: one odd measurement moves nobody."""
        self._speeds = {peer.peer_id: self._speeds.get(peer.peer_id, {}) for peer in view.peers}
        peers = []
        for peer in view.peers:
            known = self._speeds[peer.peer_id]
            if peer.samples_per_s > 0:
                known[peer.announced] = peer.samples_per_s
                for oldest in sorted(known)[:-ANNOUNCEMENTS_COUNTED]:
                    del known[oldest]
                peer = replace(peer, samples_per_s=statistics.median(known.values()))
            peers.append(peer)
        return SwarmView(view.num_stages, tuple(peers))

    def _are_unknown(self, view: SwarmView, now_s: float) -> bool:
        """Whether so many have just begun to serve a stage that what they turn out to do may change the decision."""
        if view.fewest_serving() == 0:
            return False  # whatever they do, somebody has to go there
        for stage in range(view.num_stages):
            serving = view.serving(stage)
            if sum(self._is_being_measured(peer, now_s) for peer in serving) > LEAST_GAIN * len(serving):
                return True
        return False

    def _is_being_measured(self, peer: PeerView, now_s: float) -> bool:
        """Whether its speed will be known in a moment. That of a mover is known from where it was."""
        if peer.peer_id in self._arrived or self._is_measured(peer.peer_id) or peer.since_s is None:
            return False
        return now_s - max(peer.since_s, self._computing_s) < 2 * self._announcement_s

    def _is_measured(self, peer_id: str) -> bool:
        return len(self._speeds.get(peer_id, ())) >= ANNOUNCEMENTS_PER_LIFETIME

    def _observe_members(self, view: SwarmView, now_s: float) -> None:
        """A peer that moves gets a new id, and yet nobody has come or gone."""
        # What a peer said first is kept: it could say that it is another one each time.
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

    def _least_gain(self, view: SwarmView, now_s: float) -> float:
        """Above the noise, by what has become of the last moves."""
        if self._promised is not None and not self._orders and all(map(self._is_measured, self._arrived)):
            promised, members = self._promised
            self._promised = None
            capacity = serving_capacity(view, work_per_s(view.peers, self._costs), self._costs)
            if members == self._members and min(capacity) > 0:
                kept = min(capacity) / ideal_capacity(capacity, self._costs)
                if promised / kept - 1 > self._faded_shortfall(now_s):
                    self._shortfall, self._shortfall_s = promised / kept - 1, now_s
                    log.info("moves_fell_short promised=%.2f kept=%.2f", promised, kept)
        return min(max(LEAST_GAIN, SHORTFALL_MARGIN * self._faded_shortfall(now_s)), MOST_NEEDED_GAIN)

    def _faded_shortfall(self, now_s: float) -> float:
        return self._shortfall * 0.5 ** ((now_s - self._shortfall_s) / SHORTFALL_HALVED_S)

    def _without_resting(self, view: SwarmView, now_s: float) -> SwarmView:
        """The view where those are not movable that have moved, or that did not when they should have."""
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

    def _is_awaiting_inherited(self, view: SwarmView, now_s: float) -> bool:
        """Whether somebody who moves at the former coordinator's word is in neither stage yet."""
        if self._inherited and now_s < self._inherited_until_s:
            serving = {peer.peer_id for peer in view.peers if peer.state is PeerState.SERVING}
            self._inherited -= serving | {peer.formerly for peer in view.peers}
        else:
            self._inherited = set()
        return bool(self._inherited)

    def assignments(self) -> tuple[Assignment, ...]:
        """The orders that are under way, the latest last."""
        return tuple(
            Assignment(
                peer=peer_id,
                announced=order.peer.announced,
                from_stage=order.move.from_stage,
                to_stage=order.move.to_stage,
                reason=order.move.reason[:300],
            )
            for peer_id, order in self._orders.items()
        )

    def _with_movers(self, view: SwarmView, now_s: float) -> SwarmView:
        """The view with movers where they are going, each once: a peer that moves gets a new id on the way."""
        peers = {peer.peer_id: peer for peer in view.peers}
        for peer in view.peers:
            order = self._orders.get(peer.formerly)
            if order is not None and peer.stage == order.move.to_stage:
                del self._orders[peer.formerly]
                self._arrived[peer.peer_id] = order
                log.info("peer_moved peer=%s from=%d to=%d", peer.peer_id, order.move.from_stage, peer.stage)
        self._arrived = {peer_id: order for peer_id, order in self._arrived.items() if peer_id in peers}
        former = {order.move.peer_id for order in self._arrived.values()}
        for peer_id, order in list(self._orders.items()):
            seen = peers.get(peer_id)
            order.is_obeyed |= seen is not None and seen.state is PeerState.DRAINING
            if seen is None and not order.is_obeyed:
                del self._orders[peer_id]
                log.warning("order_void peer=%s reason=it is gone", peer_id)
            elif now_s - order.given_s > order.patience_s:
                del self._orders[peer_id]
                self._refused_s[peer_id] = now_s
                self._promised = None
                log.warning("order_given_up peer=%s to=%d reason=it did not come", peer_id, order.move.to_stage)
        self._refused_s = {peer: at for peer, at in self._refused_s.items() if now_s - at < REFUSAL_S}
        for peer_id, order in self._orders.items():
            peers[peer_id] = replace(
                order.peer,
                stage=order.move.to_stage,
                state=PeerState.JOINING,
                samples_per_s=0.0,
                work_per_s=order.work_per_s,
                since_s=order.given_s,
                moved_from=order.move.from_stage,
            )
        for peer_id, order in self._arrived.items():
            if not self._is_measured(peer_id):
                samples_per_s = order.work_per_s / self._costs[peers[peer_id].stage]
                peers[peer_id] = replace(peers[peer_id], samples_per_s=samples_per_s)
        return SwarmView(view.num_stages, tuple(peer for peer in peers.values() if peer.peer_id not in former))

"""Moves peers of a live run between stages, by what they announce.

The moves themselves are found by `rebalancing.py`. This module decides when to look for them, which speeds to believe,
which peers rest, and how much a move must gain. The coordinator and the simulator run it alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from swarm_peer.policy.placement.capacity import (
    JOINING_PATIENCE_S,
    ideal_capacity,
    measured_work,
    serving_capacity,
    work_per_s,
)
from swarm_peer.policy.placement.churn import ChurnMeter
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.movers import Movers, Note, OpenMove
from swarm_peer.policy.placement.rebalancing import ExchangePatience, Move, rebalance
from swarm_peer.policy.placement.throughput_validation import RecentSpeeds, believed
from swarm_peer.policy.placement.ways import as_reached, lacking
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState, PeerView, SwarmView

# Measured speeds wander by some percent, so a smaller gain than this is not worth a move where a stage has one peer.
# Where it has several, their errors cancel out: the sum wanders less, by the square root of their number.
LEAST_GAIN = 0.1
# Moves may have lately fallen short of their promise: peers that share a machine slow each other down, and a stage may
# cost more there than its arithmetic says. A gain must be well above that shortfall, which halves in an hour.
SHORTFALL_MARGIN = 1.5
SHORTFALL_HALVED_S = 3600.0
# However far moves fell short, a gain of this share of the least stage's throughput is worth a move.
MOST_NEEDED_GAIN = 0.5
# Announced speeds are means over about so long.
SETTLING_S = 15.0
# Decisions wait for a quiet moment, but no longer than this: in a large swarm peers come and go all the time.
LONGEST_WAIT_S = 30.0
# For so many lifetimes of an announcement, an exchange of peers must have looked worth it.
EXCHANGE_PATIENCE = 4
# A mover that has not shown up in its new stage after so many times the time that it should take is given up, but not
# before the least patience: it also has to find its assignment, and its machine may be busy. One that says that it
# prepares has longer (movers.py).
MOVE_PATIENCE = 3.0
LEAST_PATIENCE_S = 60.0
# A peer that has moved stays for this long, unless peers come or go: moving the same peers again would follow noise.
REST_S = 900.0
# Even if peers come and go, it stays for this long, as long as all stages are served.
LEAST_REST_S = 120.0


class LiveRebalancer:
    """Decides which peers move, and follows their moves.

    Args:
        announcement_s: lifetime of an announcement
        begun_s: when the coordinator began to act; as all times, on one clock with `now_s`
        inherited: peers that the coordinator before this one has assigned, and that may still be on their way

    Attributes:
        movers: the moves under way
        reason: of the last decision
        num_moves: moves assigned so far
    """

    def __init__(
        self,
        params: RebalancingParameters,
        *,
        announcement_s: float,
        begun_s: float,
        inherited: Collection[str] = (),
    ):
        self._params = params
        self._announcement_s = announcement_s
        self._settled_s = begun_s + announcement_s
        self._inherited = set(inherited)
        self._inherited_until_s = begun_s + LEAST_PATIENCE_S
        self._churn = ChurnMeter()
        self._speeds = RecentSpeeds()
        self._members: frozenset[str] | None = None  # by their first ids
        self._members_changed_s = -math.inf
        self._joining_s: dict[tuple[str, int], float] = {}  # when a peer was first seen joining a stage
        self._disbelieved: set[str] = set()  # what has been told of those who serve now
        self._serving: frozenset[tuple[str, int]] = frozenset()
        self._serving_since_s = begun_s
        self._decided_s = begun_s
        self._computing_s = begun_s  # when the run was first seen to compute
        self._patience = ExchangePatience()
        self._promised: tuple[float, frozenset[str] | None] | None = None  # by the last moves, to these members
        self._shortfall, self._shortfall_s = 0.0, begun_s
        self.movers = Movers()
        self.reason = "none yet: not all peers have been heard of and measured"
        self.num_moves = 0

    def look(self, view: SwarmView, delivered: float, seconds: float, now_s: float) -> list[Note]:
        """Take in what peers announce now, and assign moves if there are any to make; `movers.open` holds them.

        Args:
            delivered: samples that the run has trained on in the last seconds
            seconds: how many seconds these are

        Returns:
            what there is to say of it
        """
        notes = self.movers.follow(view, now_s)
        if now_s in self.movers.refused_s.values():
            self._promised = None
        view = self.movers.placed(self._speeds.observe(view), self._params.stage_costs, self._speeds.is_measured)
        # Without some way that they need, those that are here may not have computed yet, and a move may bring one.
        is_cut_off = bool(lacking(view))
        view = as_reached(view)
        serving = frozenset((peer.peer_id, peer.stage) for peer in view.peers if peer.state is PeerState.SERVING)
        if serving != self._serving:
            self._serving, self._serving_since_s = serving, now_s
            self._disbelieved.clear()
        # Samples that former peers have done say nothing of those that are here now.
        is_theirs = seconds > 0 and now_s - self._serving_since_s > seconds + SETTLING_S
        view, findings = believed(view, self._params.stage_costs, delivered / seconds if is_theirs else 0.0)
        # Means over different times come and go beside each other.
        new = [finding for finding in findings if finding.subject not in self._disbelieved]
        notes += [Note(f"speed_not_believed {f.subject} reason={f.reason}", is_warning=not f.is_of_stage) for f in new]
        self._disbelieved |= {finding.subject for finding in new}
        self._observe_members(view, now_s)
        return notes + (self._decide(view, now_s) if self._is_time(view, delivered > 0 or is_cut_off, now_s) else [])

    def _is_time(self, view: SwarmView, computes: bool, now_s: float) -> bool:
        """Whether enough is known for a decision, and nothing is about to change."""
        if not computes:
            self._computing_s = now_s
        # The first announcements of some peers are still to come, no peer has computed yet, or all have gone.
        is_early = not computes or not self._serving or now_s < self._settled_s
        if is_early or self._waits_for_inherited(view, now_s):
            self._decided_s = now_s
            return False
        waited_s = now_s - self._decided_s
        # Of peers that vanish together, one is missed sooner than the other.
        interval_s = self._announcement_s / ANNOUNCEMENTS_PER_LIFETIME
        if now_s - self._serving_since_s < interval_s and waited_s < LONGEST_WAIT_S:
            return False
        if waited_s < 2 * self._announcement_s and self._are_unknown(view, now_s):
            return False
        self._decided_s = now_s
        return True

    def _waits_for_inherited(self, view: SwarmView, now_s: float) -> bool:
        """Whether movers of the former coordinator are neither in one of their two stages nor overdue."""
        self._inherited -= {
            peer.peer_id
            for peer in view.peers
            if peer.state is PeerState.SERVING or (peer.state is PeerState.JOINING and peer.moved_from != UNDECIDED)
        }
        return bool(self._inherited) and now_s < self._inherited_until_s

    def _are_unknown(self, view: SwarmView, now_s: float) -> bool:
        """Whether so many peers have just begun to serve a stage that their speeds may change the decision."""
        if view.fewest_serving() == 0:
            return False  # however fast they are, a peer has to go to the empty stage

        def is_being_measured(peer: PeerView) -> bool:
            # The speed of a mover is known from its former stage.
            if peer.peer_id in self.movers.arrived or self._speeds.is_measured(peer.peer_id) or peer.since_s is None:
                return False
            return now_s - max(peer.since_s, self._computing_s) < 2 * self._announcement_s

        stages = [view.serving(stage) for stage in range(view.num_stages)]
        return any(sum(map(is_being_measured, serving)) > LEAST_GAIN * len(serving) for serving in stages)

    def _observe_members(self, view: SwarmView, now_s: float) -> None:
        """Note which peers take part, those on their way included."""
        members = frozenset(peer.peer_id for peer in view.peers)
        self._churn.observe(members, now_s)
        if self._members is not None and members != self._members:
            self._members_changed_s = now_s
        self._members = members
        joining = ((peer.peer_id, peer.stage) for peer in view.peers if peer.state is PeerState.JOINING)
        self._joining_s = {key: self._joining_s.get(key, now_s) for key in joining}

    def _decide(self, view: SwarmView, now_s: float) -> list[Note]:
        notes = self._learn_from_last_moves(view, now_s)
        params = replace(
            self._params,
            horizon_s=self._churn.horizon_s(view.num_stages, now_s),
            # Above the noise, and above what moves lately fell short by.
            least_gain=min(max(_least_gain(view), SHORTFALL_MARGIN * self._faded_shortfall(now_s)), MOST_NEEDED_GAIN),
        )
        decision = rebalance(self._without_resting(self._without_stuck(view, now_s), now_s), params, now_s)
        decision = self._patience.check(decision, EXCHANGE_PATIENCE * self._announcement_s, now_s)
        kind = decision.reason.partition(":")[0]
        if decision.moves or kind != self.reason.partition(":")[0]:  # the numbers change all the time
            notes.append(Note(f"rebalancing moves={len(decision.moves)} reason={decision.reason}"))
        self.reason = decision.reason
        if decision.moves:
            self._promised = decision.promised, self._members
        for move in decision.moves:
            self._assign(move, view, now_s)
            notes.append(Note(f"peer_assigned peer={move.peer_id} to={move.to_stage} reason={move.reason}"))
        return notes

    def _assign(self, move: Move, view: SwarmView, now_s: float) -> None:
        peer = view.peer(move.peer_id)
        assert peer is not None
        self.movers.open[move.peer_id] = OpenMove(
            move=move,
            peer=peer,
            work_per_s=measured_work(peer, self._params.stage_costs),
            given_s=now_s,
            patience_s=max(LEAST_PATIENCE_S, MOVE_PATIENCE * self._params.move_s(peer, move.to_stage)),
        )
        self.num_moves += 1

    def _learn_from_last_moves(self, view: SwarmView, now_s: float) -> list[Note]:
        """Once all movers are measured, note by how much the last moves fell short of their promise."""
        if self._promised is None or self.movers.open or not all(map(self._speeds.is_measured, self.movers.arrived)):
            return []
        promised, members = self._promised
        self._promised = None
        costs = self._params.stage_costs
        capacity = serving_capacity(view, work_per_s(view.peers, costs), costs, self._params.traffic)
        if members != self._members or min(capacity) <= 0:
            return []
        kept = min(capacity) / ideal_capacity(capacity, costs)
        if promised / kept - 1 <= self._faded_shortfall(now_s):
            return []
        self._shortfall, self._shortfall_s = promised / kept - 1, now_s
        return [Note(f"moves_fell_short promised={promised:.2f} kept={kept:.2f}")]

    def _faded_shortfall(self, now_s: float) -> float:
        return self._shortfall * math.pow(0.5, (now_s - self._shortfall_s) / SHORTFALL_HALVED_S)

    def _without_stuck(self, view: SwarmView, now_s: float) -> SwarmView:
        """The view without the peers that have been joining for so long that they may never serve."""

        def may_come(peer: PeerView) -> bool:
            if peer.state is not PeerState.JOINING or peer.stage == UNDECIDED or peer.peer_id in self.movers.open:
                return True  # this coordinator's own movers have a patience of their own
            patience_s = max(JOINING_PATIENCE_S, MOVE_PATIENCE * self._params.move_s(peer, peer.stage))
            return now_s - self._joining_s[peer.peer_id, peer.stage] <= patience_s

        return SwarmView(view.num_stages, tuple(filter(may_come, view.peers)))

    def _without_resting(self, view: SwarmView, now_s: float) -> SwarmView:
        """The view in which peers that have just moved, or did not follow an assignment, are not movable."""
        is_lost = view.fewest_serving() == 0

        def stays(peer: PeerView) -> bool:
            if peer.peer_id in self.movers.refused_s:
                return True
            if is_lost or peer.moved_from == UNDECIDED or peer.since_s is None:
                return False
            rest_s = REST_S if peer.since_s > self._members_changed_s else LEAST_REST_S
            return now_s - peer.since_s < rest_s

        peers = (replace(peer, movable=False) if stays(peer) else peer for peer in view.peers)
        return SwarmView(view.num_stages, tuple(peers))


def _least_gain(view: SwarmView) -> float:
    """The share by which the throughput of the slowest stage must rise."""
    num_serving = sum(peer.state is PeerState.SERVING for peer in view.peers)
    return LEAST_GAIN / math.sqrt(max(1.0, num_serving / view.num_stages))

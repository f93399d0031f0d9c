"""Which stage a newcomer serves, and which peers move when the stages are out of balance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_peer.policy.link_limit import Traffic, most_samples_per_s
from swarm_peer.policy.placement.capacity import JOINING_PATIENCE_S, speed_in, work_per_s
from swarm_peer.policy.placement.move_search import MoveSearch, RebalancingParameters
from swarm_peer.policy.placement.ways import lacked, lacking
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The stage that a newcomer serves, and why.

    Attributes:
        lacks: those that it needs there and has no way to, as far as it knows: it has to wait
    """

    stage: int
    reason: str
    lacks: frozenset[str] = frozenset()


def choose_stage(
    view: SwarmView, stage_costs: Sequence[float], me: str, now_s: float, traffic: Traffic = ()
) -> StageChoice:
    """The stage where one more peer helps the swarm most: of those that fit it, the one with the least capacity.

    A stage in which it lacks nobody, as far as it knows (see ways.py), goes before all others. Peers that lack somebody
    count for nothing where they are.

    Peers may choose at the same time. Each of them places all undecided peers, in the order of their ids, on top of the
    peers that have a stage. So all come to the same plan, and no two fill the same gap.

    Args:
        stage_costs: compute of one sample in each stage, in any one unit
        me: this peer's id; it need not be in the view, if every stage fits it
        now_s: on the clock of `PeerView.since_s`
        traffic: of each stage; of stages that need a peer alike, one with a limited link takes that with the least
    """
    stages = range(view.num_stages)
    others = [peer for peer in view.peers if peer.peer_id != me]
    myself = view.peer(me) or PeerView(peer_id=me, stage=UNDECIDED, state=PeerState.JOINING)
    work = work_per_s(others, stage_costs)
    capacity = [0.0] * view.num_stages  # samples/s that each stage can take
    placed = [set[str]() for _ in stages]
    idle = lacking(view)
    for peer in others:
        comes = peer.state is PeerState.JOINING and not _is_stuck(peer, now_s) and peer.peer_id not in idle
        if peer.stage != UNDECIDED and (peer.state is PeerState.SERVING or comes):
            placed[peer.stage].add(peer.peer_id)
            if peer.peer_id not in idle:
                capacity[peer.stage] += speed_in(peer, peer.stage, work[peer.peer_id], stage_costs, traffic)

    undecided = [peer for peer in others if peer.stage == UNDECIDED]
    for peer in sorted([*undecided, myself], key=lambda peer: peer.peer_id):
        fitting = [k for k in stages if k not in peer.too_large]
        if not fitting and peer.peer_id != me:
            continue  # it cannot take part
        carried = [most_samples_per_s(peer, k, traffic) for k in stages]
        reached = [k for k in fitting or stages if not lacked(k, placed, frozenset(peer.unreached))]
        stage = min(reached or fitting or stages, key=lambda k: (capacity[k], len(placed[k]), -carried[k], k))
        if peer.peer_id == me:
            which = "the least capacity" if len(fitting) == len(stages) else "the least capacity of those that fit"
            which += " and reach it" if 0 < len(reached) < len(fitting or stages) else ""
            is_known = any(other.samples_per_s > 0 for other in others)
            amount = f"{capacity[stage]:.3g} samples/s" if is_known else "as far as is known before anybody computes"
            reason = f"stage {stage} has {len(placed[stage])} peers and {which}, {amount}"
            return StageChoice(stage, reason, lacked(stage, placed, frozenset(peer.unreached)))
        capacity[stage] += speed_in(peer, stage, work[peer.peer_id], stage_costs, traffic)
        placed[stage].add(peer.peer_id)
    raise AssertionError("unreachable: this peer is among the undecided")


def _is_stuck(peer: PeerView, now_s: float) -> bool:
    """Whether a peer has been in its state for longer than joining takes."""
    return peer.since_s is not None and now_s - peer.since_s > JOINING_PATIENCE_S


@dataclass(frozen=True, slots=True)
class Move:
    """One peer's change from one stage to another."""

    peer_id: str
    from_stage: int
    to_stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """A decision: moves to make now, all at once, or none.

    Attributes:
        promised: the capacity of the slowest stage after these moves, as a share of the ideal
    """

    moves: tuple[Move, ...]
    reason: str
    promised: float = 0.0


class ExchangePatience:
    """Holds an exchange of peers back until it has seemed worthwhile for some time.

    After an exchange each stage has as many peers as before, so the gain depends on measured speeds alone. On shared
    machines these drift for minutes.
    """

    def __init__(self) -> None:
        self._exchange: frozenset[tuple[str, int]] = frozenset()  # the one that waits: peers and their new stages
        self._due_s = math.inf

    def check(self, decision: Rebalancing, patience_s: float, now_s: float) -> Rebalancing:
        """The decision, unless it is an exchange that has to wait."""
        leaving = Counter(move.from_stage for move in decision.moves)
        coming = Counter(move.to_stage for move in decision.moves)
        exchange = frozenset((move.peer_id, move.to_stage) for move in decision.moves if leaving == coming)
        if exchange != self._exchange:
            self._exchange, self._due_s = exchange, now_s + patience_s
        if not exchange or now_s >= self._due_s:
            return decision
        reason = f"an exchange may pay: it is made if it still does in a while; {decision.reason}"
        return Rebalancing((), reason)


def rebalance(view: SwarmView, params: RebalancingParameters, now_s: float) -> Rebalancing:
    """The moves with which the swarm computes the most samples from now on.

    A mover computes nothing while it downloads its new state, and the gain from its move lasts only for some time
    (`horizon_s`). A move is made if it gains more than it costs. Peers that are joining count from their expected
    arrival on, and nobody moves so that more peers lack a way that they need (ways.py). At any time at most one peer
    moves away from each stage and at most one moves to it, and `min_replicas` go on serving it.

    Call it whenever something has changed. It takes little time if the stages are in balance.
    """
    search = MoveSearch(view, params, now_s)
    ideal, rest = search.ideal, min(search.rest.capacity)
    if ideal - rest <= params.least_gain * ideal:
        return Rebalancing((), f"in balance: the slowest stage will do {rest:.3g} of at most {ideal:.3g} samples/s")
    plan = search.best()
    if not plan.moves:
        return Rebalancing(
            (),
            f"no move pays: the slowest stage will do {rest:.3g} samples/s, {ideal:.3g} would be ideal, but a mover "
            f"does nothing while it downloads, and the last peers of a stage stay",
        )
    capacity = search.rest.capacity
    moves = tuple(
        Move(
            move.peer.peer_id,
            move.peer.stage,
            move.to_stage,
            f"without the move, stage {move.peer.stage} would do {capacity[move.peer.stage]:.3g} samples/s and stage "
            f"{move.to_stage} {capacity[move.to_stage]:.3g}; the peer takes {move.arrival_s - move.start_s:.0f} s to "
            f"move",
        )
        for move in plan.moves
        if move.start_s <= 0
    )
    later = len(plan.moves) - len(moves)
    moves_words = f"{len(plan.moves)} move{'s' * (len(plan.moves) > 1)}"
    waiting = f"; {later} more wait{'s' * (later == 1)} for movers under way" if later else ""
    after = min(plan.capacity)
    # Moves that wait for others are decided on anew once the others are there.
    at_once = search.schedule(plan.pairs_at_once)
    reason = f"the swarm's throughput rises from {rest:.3g} to {after:.3g} samples/s with {moves_words}{waiting}"
    return Rebalancing(moves, reason, min(at_once.capacity) / ideal)

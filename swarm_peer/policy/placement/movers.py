"""Peers on their way from one stage to another, followed by what they announce.

A peer that moves keeps its id. On its way it announces nothing for a while; before that, that it has left its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm_peer.policy.placement.capacity import measured_work
from swarm_peer.policy.placement.rebalancing import Move
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# A peer that did not follow its assignment is not asked again for this long.
REFUSAL_S = 600.0
# A mover that announces that it prepares its move may do so for this many times its patience.
PREPARING_PATIENCE = 10
# For this long, a coordinator counts a peer where it goes to that moves without its order: by another coordinator's, or
# to a stage that was lost.
OTHERS_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log, as `event key=value`."""

    text: str
    is_warning: bool = False


@dataclass(slots=True, kw_only=True)
class OpenMove:
    """A move under way, from its announcement to the moment that the peer serves its new stage.

    Attributes:
        peer: the mover as it was
        patience_s: how long it may take since it was given, or since it was last seen to prepare
        is_obeyed: whether it was seen to drain, or to have left its stage
        prepared_s: how long after it was given the peer was last seen to prepare it
    """

    move: Move
    peer: PeerView
    work_per_s: float
    given_s: float
    patience_s: float
    is_obeyed: bool = False
    prepared_s: float = 0.0

    def is_overdue(self, now_s: float) -> bool:
        """Whether the peer has used up its patience, and the time in which it was seen to prepare."""
        return now_s - self.given_s > self.patience_s + min(self.prepared_s, PREPARING_PATIENCE * self.patience_s)


class Movers:
    """The moves under way.

    Attributes:
        open: assigned, and not seen in the new stage yet; by peer, the latest last
        arrived: seen in the new stage; by peer
        refused_s: when a peer was found not to have come
    """

    def __init__(self) -> None:
        self.open: dict[str, OpenMove] = {}
        self.arrived: dict[str, OpenMove] = {}
        self.refused_s: dict[str, float] = {}
        self._moving_s: dict[tuple[str, int], float] = {}  # when a peer was first seen moving to a stage
        self._unordered: frozenset[str] = frozenset()  # peers that move without an order of this coordinator

    def follow(self, view: SwarmView, now_s: float) -> list[Note]:
        """Find out which moves are carried out, void or overdue."""
        notes = []
        seen = {peer.peer_id: peer for peer in view.peers}
        for peer in view.peers:
            assigned = self.open.get(peer.peer_id)
            if assigned is not None and peer.stage == assigned.move.to_stage:
                self.arrived[peer.peer_id] = self.open.pop(peer.peer_id)
                notes.append(Note(f"peer_moved peer={peer.peer_id} from={assigned.move.from_stage} to={peer.stage}"))
        moving = ((peer.peer_id, peer.moving_to) for peer in view.peers if peer.moving_to != UNDECIDED)
        self._moving_s = {move: self._moving_s.get(move, now_s) for move in moving}
        self.arrived = {peer_id: assigned for peer_id, assigned in self.arrived.items() if peer_id in seen}
        self.refused_s = {peer_id: at_s for peer_id, at_s in self.refused_s.items() if now_s - at_s < REFUSAL_S}
        for peer_id, assigned in list(self.open.items()):
            is_here = peer_id in seen
            if is_here and seen[peer_id].moving_to == assigned.move.to_stage:
                assigned.prepared_s = now_s - assigned.given_s
            assigned.is_obeyed |= peer_id in view.left or (is_here and seen[peer_id].state is PeerState.DRAINING)
            if not is_here and not assigned.is_obeyed:
                del self.open[peer_id]
                notes.append(Note(f"assignment_void peer={peer_id} reason=it is gone", is_warning=True))
            elif assigned.is_overdue(now_s):
                del self.open[peer_id]
                self.refused_s[peer_id] = now_s
                text = f"assignment_given_up peer={peer_id} to={assigned.move.to_stage} reason=it did not come"
                notes.append(Note(text, is_warning=True))
        believed = {peer_id for (peer_id, _), first_s in self._moving_s.items() if now_s - first_s < OTHERS_PATIENCE_S}
        self._unordered = frozenset(believed - self.open.keys() - self.refused_s.keys())
        return notes

    def placed(self, view: SwarmView, stage_costs: tuple[float, ...], is_measured: Callable[[str], bool]) -> SwarmView:
        """The view with each mover once, in the stage that it goes to and at the speed that it had where it was."""
        peers = {peer.peer_id: peer for peer in view.peers}
        for peer in view.peers:
            if peer.peer_id in self._unordered:
                work = measured_work(peer, stage_costs)
                peers[peer.peer_id] = _on_its_way(peer, peer.moving_to, work, None)
        for peer_id, assigned in self.open.items():
            peers[peer_id] = _on_its_way(assigned.peer, assigned.move.to_stage, assigned.work_per_s, assigned.given_s)
        for peer_id, assigned in self.arrived.items():
            if not is_measured(peer_id) and peer_id not in self.open:
                samples_per_s = assigned.work_per_s / stage_costs[peers[peer_id].stage]
                peers[peer_id] = replace(peers[peer_id], samples_per_s=samples_per_s, device_samples_per_s=0.0)
        return SwarmView(view.num_stages, tuple(peers.values()))


def _on_its_way(peer: PeerView, to_stage: int, work_per_s: float, since_s: float | None) -> PeerView:
    return replace(
        peer,
        stage=to_stage,
        state=PeerState.JOINING,
        samples_per_s=0.0,
        device_samples_per_s=0.0,
        work_per_s=work_per_s,
        since_s=since_s,
        moved_from=peer.stage,
    )

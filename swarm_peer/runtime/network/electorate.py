"""Says for whom a run waits whose peers choose no epoch any more. Pure: time is an argument."""

from __future__ import annotations

from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import COORDINATORS, Epoch

# Voters that are silent for less may only be slow, or this process has just begun to listen.
PATIENCE_S = 10.0


class Electorate:
    """Knows by name the peers that vote on a run's epochs, after they are gone, too.

    Args:
        me: the id of this process

    Attributes:
        silent_since_s: when a quorum of them fell silent, if that is so
    """

    def __init__(self, me: str):
        self._me = me
        self._names: dict[str, str] = {}
        self.silent_since_s: float | None = None

    def look(self, epoch: Epoch, view: SwarmView, now_s: float, *, lacks_voters: bool) -> str:
        """Find out whether the run waits for those who vote; returns for whom, or nothing.

        Args:
            epoch: the newest one
            lacks_voters: whether less than a quorum of its voters has been heard of lately
        """
        there = {peer.peer_id: peer.name for peer in view.peers}
        self._names = {seat.peer: self._names.get(seat.peer, "") for seat in epoch.seats} | there
        if not lacks_voters:
            self.silent_since_s = None
            return ""
        if self.silent_since_s is None:
            self.silent_since_s = now_s
        if now_s < self.silent_since_s + PATIENCE_S:
            return ""
        gone = [seat.peer for seat in epoch.voters if seat.peer != self._me and seat.peer not in there]
        coordinators = {seat.peer for seat in epoch.roster(COORDINATORS)}
        names = ", ".join(
            f"{'a coordinator' if peer in coordinators else plain_text(self._names[peer], 32) or 'peer'} (…{peer[-8:]})"
            for peer in gone
        )
        return f"most of those who vote are gone: {names}" if gone else "most of those who vote are silent"

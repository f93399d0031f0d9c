"""The ways that a stage needs of this peer: it tries them, remembers which were in vain, and says what would help.

policy/placement/ways.py says what a peer needs, and which of two gives its place up. Another peer's word moves nobody:
each acts on what it has found out itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from swarm_peer.errors import CallError
from swarm_peer.policy.placement.ways import gives_way, helpful_ports, lacked, missing_ways
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import ID_CHARS, PeerView, SwarmView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.peer_addresses import ports_of

log = logging.getLogger(__name__)

# A peer with a place gives it up once a way has been missing for so many lifetimes of an announcement: a connection may
# break for a moment.
PATIENCE = 2
# A peer tries so many ways at a time: helpers see to few of its wishes at once.
MOST_TRIED = 8
# A try in vain is remembered for so long, if this peer does not repeat it.
REMEMBERED_S = 900.0
# Peers that a line names.
MOST_NAMED = 4


class NeededWays:
    """The ways from this peer to those that it works with. Belongs to the event loop's thread.

    Args:
        agreement: knows who has a place
    """

    def __init__(self, *, context: PeerContext, dht: SwarmDHT, directory: Directory, agreement: Agreement):
        self._me = context.identity.peer_id
        self._clock = context.clock
        self._patience_s = PATIENCE * context.resolved.manifest.limits.announcement_s
        self._dht = dht
        self._directory = directory
        self._agreement = agreement
        # By peer, the serial number of its announcement when it was first missed, and the time.
        self._in_vain: dict[str, tuple[int, float]] = {}

    @property
    def _view(self) -> SwarmView:
        return self._directory.view

    def _rosters(self) -> list[list[str]]:
        """The peers with a place in each stage, oldest first; without those that announce themselves no more.

        Not as the view has them: this peer takes those that it cannot reach out of that.
        """
        epoch, knows = self._agreement.core.epoch, self._directory.takes_part
        return [
            [seat.peer for seat in epoch.roster(stage) if seat.peer == self._me or knows(seat.peer)]
            for stage in range(self._view.num_stages)
        ]

    @property
    def without(self) -> frozenset[str]:
        """The peers to whom no way was found, and that have announced themselves since: they are there."""
        return frozenset(
            peer.peer_id for peer in self._known(self._in_vain) if peer.announced > self._in_vain[peer.peer_id][0]
        )

    def _known(self, peer_ids: Iterable[str]) -> list[PeerView]:
        return [peer for peer_id in sorted(peer_ids) if (peer := self._directory.known(peer_id)) is not None]

    def complete(self, view: SwarmView) -> SwarmView:
        """A view with all peers that this one has tried in vain, and with what it knows of ways itself."""
        peers = {peer.peer_id: peer for peer in (*self._known(self.without), *view.peers)}
        if self._me in peers:
            peers[self._me] = replace(peers[self._me], unreached=tuple(sorted(self.without)))
        return replace(view, peers=tuple(peers.values()))

    async def _connected(self) -> frozenset[str]:
        """Those that this peer has a way to: itself, too, where it is alone in the stage that it would leave."""
        return frozenset({self._me, *await self._dht.connected()})

    async def lacks(self, stage: int) -> frozenset[str]:
        """Try the ways that this peer needs in a stage; returns those that it needs and does not reach now.

        It tries some at a time, those first that it has not tried yet, and goes on at the next call.

        One of them may only have died: `without` tells who is there all the same.
        """
        rosters = self._rosters()
        try:
            connected = await self._connected()
            mates = set(rosters[stage]) - {self._me}
            others = [there for k, there in enumerate(rosters) if k != stage and connected.isdisjoint(there)]
            wanted = sorted((mates - connected).union(*others), key=lambda peer: (peer in self._in_vain, peer))
            if tried := wanted[:MOST_TRIED]:
                await self._dht.dial(tried)
                connected = await self._connected()
        except CallError as error:
            log.debug("ways_unknown reason=%s", error)
            return frozenset()
        now_s = self._clock.monotonic_s()
        remembered = {peer_id for peer_id, (_, at_s) in self._in_vain.items() if at_s > now_s - REMEMBERED_S}
        failed = remembered.union(tried) - connected
        self._in_vain = {
            peer.peer_id: self._in_vain.get(peer.peer_id, (peer.announced, now_s)) for peer in self._known(failed)
        }
        return lacked(stage, rosters, failed | (mates - connected))

    @property
    def _without_for_long(self) -> set[str]:
        since_s = self._clock.monotonic_s() - self._patience_s
        return {peer_id for peer_id in self.without if self._in_vain[peer_id][1] <= since_s}

    def lacks_for_long(self, stage: int) -> frozenset[str]:
        """Those that this peer needs in a stage, and has not reached for PATIENCE lifetimes of an announcement."""
        return lacked(stage, self._rosters(), self._without_for_long)

    def gives_way(self, stage: int) -> frozenset[str]:
        """The peers because of whom this one gives up its place in a stage; none if it stays."""
        rosters = self._rosters()
        if self._me not in rosters[stage]:
            return frozenset()
        told = {peer.peer_id: set(peer.unreached) for peer in self._view.peers}
        told[self._me] = self._without_for_long
        return gives_way(self._me, stage, rosters, told)

    async def explain(self, stage: int) -> str:
        """Try the ways that this peer needs in a stage; says which are missing, and what would help; empty if none."""
        lacks = await self.lacks(stage)
        for _ in range(len(lacks) // MOST_TRIED):
            lacks = await self.lacks(stage)
        return self.in_words(lacks) if lacks else ""

    def missing_in_words(self, stage: int) -> str:
        """Which ways that this peer needs in a stage were tried in vain, and what would help; empty if none.

        Ways that it has not tried yet are not missing, and neither is one to a mate that has just died.
        """
        return self.in_words(lacks) if (lacks := lacked(stage, self._rosters(), self.without)) else ""

    def in_words(self, lacks: Collection[str]) -> str:
        """Name the peers that this one does not reach, and those whose open port would help most."""
        ends = helpful_ports(self._me, lacks, missing_ways(self.complete(self._view).peers))
        help_ = " or ".join(f"{self._port_of(end)} on the router of {self._name_of(end)}" for end in ends[:MOST_NAMED])
        names = sorted(map(self._name_of, lacks))
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"no way to {', '.join(names[:MOST_NAMED])}{more}; what would help most: forward {help_}"

    def _name_of(self, peer_id: str) -> str:
        if peer_id == self._me:
            return "this machine"
        peer = self._directory.known(peer_id)
        return plain_text(peer.name if peer else "", 32) or f"…{peer_id[-ID_CHARS:]}"

    def _port_of(self, peer_id: str) -> str:
        addresses: Sequence[str] = self._dht.addresses if peer_id == self._me else self._directory.addresses_of(peer_id)
        return f"port {ports_of(addresses)[0]}" if ports_of(addresses) else "a port"

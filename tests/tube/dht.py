"""A simulated DHT node, under the real SwarmDHT: signed records on the nodes nearest to their key, each with its view.

A record is kept by its author's node and those that it could reach when it was stored; it is found if one of the nodes
that are asked keeps it, can be reached and answers. So views differ, and are late.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from hivemind.dht import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from loop import OUTSIDE

from swarm_peer.runtime.network.dht import NODES_ASKED
from swarm_peer.runtime.network.record_validator import SignedRecordValidator

if TYPE_CHECKING:
    from hosts import Host
    from world import World

# As hivemind has it: copies of a record, and the time that a node has for its answer.
REPLICAS = 5
WAIT_S = 3.0
# As hivemind has it: how long a node does not ask one again that did not answer; twice as long after each further time.
BAN_S = 5.0
# Requests that do not reach their node, and answers that do not come back, though the node is there.
LOST = 0.005


class TubeNode:
    """One host's node: what SwarmDHT uses of hivemind's DHTNode."""

    def __init__(self, world: World, host: Host):
        self._world = world
        self._host = host
        self._rng = host.rng("dht")
        self._validator = SignedRecordValidator(host.clock, host.passes)
        self.places = self._validator.places
        self._records: dict[bytes, dict[str, tuple[list[bytes], float]]] = {}
        self._banned_until: dict[str, float] = {}
        self._in_vain = Counter[str]()  # times in a row that a node did not answer
        self.p2p = SimpleNamespace(
            _child=SimpleNamespace(wait=anyio.sleep_forever),
            tell_revocations=self._tell_revocations,
            connections=self._connections,
            dial=self._dial,
        )
        self.cache_refresh_task = None
        self.num_answers = 0  # of other nodes
        # With "store", others keep nothing of this node's; with "get", it finds what it keeps itself alone.
        self.failing: set[str] = set()

    async def _connections(self) -> set[str]:
        """All that can be reached now, as if each had been dialled."""
        network, me = self._world.network, self._host
        others = [host for host in self._world.hosts if host.is_alive and host is not me and host.node is not None]
        blocked = {host for host in others if network.is_blocked(me, host) or network.is_blocked(host, me)}
        return {host.peer_id for host in others if host not in blocked}

    async def _dial(self, peer_id: str) -> None:
        """Nothing more to do: see _connections."""
        await anyio.lowlevel.checkpoint()

    async def _tell_revocations(self, peer_id: str) -> None:
        """Each host hears of a revocation at a moment of its own: see the fault."""

    async def shutdown(self) -> None:
        """Nothing of it stays."""

    def _nearest(self, key: bytes, count: int) -> list[Host]:
        now = self._world.loop.time()
        known = [
            host
            for host in self._world.hosts
            if host.node is not None and self._banned_until.get(host.name, 0.0) <= now
        ]
        known = [host for host in known if host.is_alive or now - host.died_s < 10.0]
        return sorted(known, key=lambda host: hashlib.sha256(key + host.peer_id.encode()).digest())[:count]

    async def _ask(self, hosts: Sequence[Host], arrive: Callable[[Host, TubeNode, bool], None]) -> None:
        """Ask nodes all at once, for as long as that takes.

        By timers, which are cheaper than a task for each of many requests.

        Args:
            arrive: called with each one that the request reaches, and whether its answer comes back
        """
        if not hosts:
            return
        loop, over, left = self._world.loop, anyio.Event(), len(hosts)

        def end(host: Host, arrives: bool, answers: bool) -> None:
            nonlocal left
            left -= 1
            if arrives and host.is_alive and host.node is not None:
                arrive(host, host.node, answers)
            if answers:
                self.num_answers += host is not self._host
                self._in_vain.pop(host.name, None)
                self._banned_until.pop(host.name, None)
            elif self._banned_until.get(host.name, 0.0) <= loop.time():
                self._banned_until[host.name] = loop.time() + BAN_S * 2 ** self._in_vain[host.name]
                self._in_vain[host.name] += 1
            if not left:
                over.set()

        drawn = [(host, self._draw_answer(host)) for host in hosts]
        # Answers come from outside, also while this host is halted.
        timers = [
            loop.call_later(wait_s, end, host, arrives, answers, context=OUTSIDE)
            for host, (wait_s, arrives, answers) in drawn
        ]
        try:
            await over.wait()
        finally:
            for timer in timers:
                timer.cancel()

    def _draw_answer(self, other: Host) -> tuple[float, bool, bool]:
        """How long it takes to ask a node, in s, whether the request reaches it, and whether its answer comes back."""
        network = self._world.network
        if other is self._host:
            return 0.0, True, True
        if network.is_blocked(self._host, other) or not other.is_alive or self._rng.random() < LOST:
            return WAIT_S, False, False
        if network.is_blocked(other, self._host) or self._rng.random() < LOST:
            return WAIT_S, True, False
        round_trip_s = network.link(self._host, other).latency_s + network.link(other, self._host).latency_s
        seconds = round_trip_s * self._rng.uniform(1.0, 2.0)
        return min(seconds, WAIT_S), True, seconds < WAIT_S

    async def store(self, key: str, value: list[bytes], expiration: float, *, subkey: str, beam_size: int) -> bool:
        key_bytes = DHTID.generate(source=key).to_bytes()
        stored = 0

        def store_at(host: Host, node: TubeNode, answers: bool) -> None:
            nonlocal stored
            stored += node.keep(key_bytes, subkey, value, expiration) and answers

        if not self._host.is_alive:
            await anyio.sleep_forever()
        self._world.note("store", self._host.name, key.rpartition(".")[2])
        if "store" in self.failing:
            await anyio.sleep(WAIT_S)
        else:
            await self._ask(self._nearest(key_bytes, REPLICAS), store_at)
        self.keep(key_bytes, subkey, value, expiration)  # as KeepingNode does
        return stored > 0

    def keep(self, key: bytes, author: str, value: list[bytes], expiration: float) -> bool:
        """Store a record here, if it is valid and newer than the one that is here."""
        known = self._records[key] = self.kept(key)
        if not self._is_valid(key, author, value, expiration):
            return False
        if author in known and known[author][1] >= expiration:
            return False
        known[author] = (value, expiration)
        return True

    def _is_valid(self, key: bytes, author: str, value: list[bytes], expiration: float) -> bool:
        packed = MSGPackSerializer.dumps
        return self._validator.validate(DHTRecord(key, packed(author), packed(value), expiration))

    def kept(self, key: bytes) -> dict[str, tuple[list[bytes], float]]:
        """The records under a key that are here, have not expired and do not last too long, as RecordStorage has it."""
        now, latest = self._host.clock.unix_s(), self._validator.latest_expiration(key)
        return {author: entry for author, entry in self._records.get(key, {}).items() if now < entry[1] <= latest}

    async def get(self, key: str, *, latest: bool, beam_size: int) -> Any:
        key_bytes = DHTID.generate(source=key).to_bytes()
        found: dict[str, tuple[list[bytes], float]] = {}

        def take(host: Host, node: TubeNode, answers: bool) -> None:
            if not answers:
                return
            for author, entry in node.kept(key_bytes).items():
                is_newer = author not in found or found[author][1] < entry[1]
                if is_newer and (host is self._host or self._is_valid(key_bytes, author, *entry)):
                    found[author] = entry

        if not self._host.is_alive:
            await anyio.sleep_forever()
        if "get" in self.failing:
            await anyio.sleep(WAIT_S)
            take(self._host, self, True)
        else:
            await self._ask(self._nearest(key_bytes, NODES_ASKED), take)
        return SimpleNamespace(value=dict(sorted(found.items()))) if found else None

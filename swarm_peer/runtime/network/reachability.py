"""Where others reach this node: peers that it is connected to tell it what they see of it, and try it.

A node that is asked connects to the host that the asking node's connection comes from, and to no other: nobody can
have it knock at a stranger's door. It takes whatever greets as libp2p does for the node: peers that dial check the id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from ipaddress import ip_address

import anyio
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm_peer.errors import CallError, InvalidMessage
from swarm_peer.runtime.network.frame_stream import on_network
from swarm_peer.runtime.network.guarded_p2p import GuardedP2P
from swarm_peer.runtime.network.peer_addresses import (
    CONNECT_TIMEOUT_S,
    best_first,
    host_of,
    is_loopback,
    is_public,
    listening,
    ports_of,
)
from swarm_peer.runtime.network.short_messages import receive, send, taken

log = logging.getLogger(__name__)

PROTOCOL = "/swarm/reach/1"
# Ports that a node may have tried at a time, and nodes that may have theirs tried here at a time.
MAX_PORTS = 4
MAX_ASKING = 16
# Peers that a node asks. Some may be in its own network, and some may lie.
PEERS_ASKED = 5
ANSWER_TIMEOUT_S = CONNECT_TIMEOUT_S + 5.0
# Pause between looks at this machine's own addresses, and between questions as long as those stay the same. Until
# somebody has answered, a node asks at each look; until somebody from outside has, it asks newcomers, too.
LOOK_S = 15.0
ASK_EVERY_S = 300.0


@dataclass(frozen=True)
class Sight:
    """This node as one peer sees it.

    Attributes:
        host: where this node's connection comes from, such as /ip4/1.2.3.4
        open_ports: those of this node's ports on which libp2p greets there
    """

    host: str
    open_ports: tuple[int, ...]

    @property
    def is_from_outside(self) -> bool:
        """Whether the host is one of the internet, and not of a private network or of this machine."""
        return is_public(self.host)


@dataclass(frozen=True)
class Ways:
    """How others reach this node.

    Attributes:
        addresses: the multiaddresses that may work, best first, without the node's id
        is_reachable: whether those who are furthest away can dial it, by IPv4 if it has that; None if nobody has told
        closed: hosts and ports that do not answer those who are furthest away, if it is not reachable
        own_hosts: the IP addresses of the node's interfaces
        seen_hosts: the IP address that each peer sees
    """

    addresses: tuple[str, ...]
    is_reachable: bool | None = None
    closed: tuple[str, ...] = ()
    own_hosts: tuple[str, ...] = field(default=(), compare=False)
    seen_hosts: tuple[str, ...] = field(default=(), compare=False)


def ways_to(own: Sequence[str], announced: Sequence[str], sights: Sequence[Sight]) -> Ways:
    """Conclude how a node is reached, from what others see of it.

    Args:
        own: the addresses of the node's interfaces, with its ports, without its id
        announced: the addresses that its operator has named; they stand in place of all others
        sights: what peers see
    """
    far = [sight for sight in sights if sight.is_from_outside]
    far = far or [sight for sight in sights if not is_loopback(f"{sight.host}/")]
    # A node has an address of IPv4 and one of IPv6, and each peer sees the one that it is connected by. More than half
    # of those must see a host: a single one that lies has no say where several answer.
    num_by = Counter(_protocol_of(sight.host) for sight in far)
    hosts = [
        host
        for host, count in Counter(sight.host for sight in far).most_common()
        if 2 * count > num_by[_protocol_of(host)] and (count > 1 or len(far) == 1)
    ]
    tried = ports_of(announced or own)
    opened = {(sight.host, port) for sight in far for port in sight.open_ports if port in tried}
    seen = [f"{host}/tcp/{port}" for host in hosts for port in tried if (host, port) in opened]
    # There are callers without IPv6, and hardly any without IPv4. A single peer that sees this node by IPv4 is believed
    # in that it is closed: then the node calls others, which does no harm.
    by_ip4 = [sight.host for sight in far if _protocol_of(sight.host) == "ip4"]
    decisive = [host for host in by_ip4 if host in hosts] or by_ip4 or hosts
    open_hosts = {host for host, _ in opened}
    is_reachable = open_hosts.issuperset(decisive)
    closed = [
        f"{host.split('/')[2]}:{port}"
        for host in dict.fromkeys([*hosts, *decisive])
        for port in tried
        if host not in open_hosts
    ]
    elsewhere = [address for address in own if not is_loopback(address)]
    addresses = announced or dict.fromkeys([*seen, *best_first(elsewhere or own)])
    return Ways(
        tuple(addresses),
        is_reachable if hosts else None,
        () if is_reachable else tuple(closed),
        own_hosts=tuple(dict.fromkeys(map(host_of, own))),
        seen_hosts=tuple(host_of(sight.host) for sight in sights),
    )


class Reachability:
    """Finds out how others reach this node, and tells others the same of theirs.

    Attributes:
        ways: what is known by now
    """

    def __init__(self, p2p: GuardedP2P, own: Sequence[str], announced: Sequence[str], *, can_be_forwarded: bool = True):
        """Make what knows this machine's own addresses alone.

        Args:
            own: see ways_to
            announced: see ways_to
            can_be_forwarded: whether the port will be the same one when the node starts anew
        """
        self._p2p = p2p
        self._can_be_forwarded = can_be_forwarded
        self._own = list(own)
        self._announced = announced
        self._rng = random.Random(p2p.peer_id.to_base58())
        self._asking: set[str] = set()
        self._asked: set[PeerID] = set()  # of those that this node is connected to
        self.ways = ways_to(own, announced, ())

    @classmethod
    async def begin(cls, p2p: GuardedP2P, announced: Sequence[str], wanted: Sequence[str]) -> Reachability:
        """As this machine sees it by itself.

        Args:
            announced: the addresses that the node's operator has named
            wanted: the addresses to listen on; port 0 is any
        """
        return cls(p2p, await _own_addresses(p2p), announced, can_be_forwarded=0 not in ports_of(wanted))

    async def run(self) -> None:
        """Answer others, and ask anew now and then, until cancelled."""
        with _of_daemon():
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._answer)
        asked_s = -ASK_EVERY_S
        sights: list[Sight] = []
        while True:
            try:
                own = await _own_addresses(self._p2p)
                now_s = anyio.current_time()
                has_moved = own != self._own
                peers = await self._connected()
                is_seen = any(sight.is_from_outside for sight in sights)
                has_news = has_moved or not sights or not (is_seen or self._asked.issuperset(peers))
                if has_news or now_s >= asked_s + ASK_EVERY_S:
                    self._own, asked_s = own, now_s
                    sights = await self._ask_some(peers)
                    if sights or has_moved:  # what is known holds as long as nobody answers
                        self._conclude(sights)
            except CallError as error:
                log.warning("addresses_unknown reason=%s", error)
            await anyio.sleep(LOOK_S)

    @property
    def own(self) -> list[str]:
        """The addresses of this machine's interfaces, with the node's ports."""
        return self._own

    def _conclude(self, sights: Sequence[Sight]) -> None:
        before, self.ways = self.ways, ways_to(self._own, self._announced, sights)
        if before.addresses != self.ways.addresses:
            me = self._p2p.peer_id.to_base58()
            log.info("addresses_changed addresses=%s", " ".join(f"{way}/p2p/{me}" for way in self.ways.addresses))
        if self._can_be_forwarded and self.ways.is_reachable is False and before.is_reachable is not False:
            ports = " and ".join(map(str, ports_of(self._announced or self._own)))
            log.warning(
                "not_reachable closed=%s: others cannot dial this node. Members help each other's dials through "
                "routers, or carry the connection, slowly; to be reached by all, forward port %s of the router (TCP) "
                "to this machine, and let its firewall through",
                ",".join(self.ways.closed),
                ports,
            )

    async def _connected(self) -> list[PeerID]:
        with _of_daemon():
            return [info.peer_id for info in await self._p2p.list_peers()]

    async def _ask_some(self, peers: Sequence[PeerID]) -> list[Sight]:
        """Ask some peers; first those that have not been asked."""
        self._asked.intersection_update(peers)
        chosen = sorted(self._rng.sample(peers, len(peers)), key=self._asked.__contains__)[:PEERS_ASKED]
        self._asked.update(chosen)
        sights: list[Sight] = []

        async def ask(peer_id: PeerID) -> None:
            try:
                sights.append(await self._ask(peer_id))
            except CallError as error:
                log.debug("reachability_unknown peer=%s reason=%s", peer_id, error)

        async with anyio.create_task_group() as tasks:
            for peer_id in chosen:
                tasks.start_soon(ask, peer_id)
        return sights

    async def _ask(self, peer_id: PeerID) -> Sight:
        """Have a peer try this node's ports.

        Raises:
            CallError: it does not, or its answer is none
        """
        with _of_daemon():
            _, reader, writer = await self._p2p.call_binary_stream_handler(peer_id, PROTOCOL)
            with closing(writer):
                await send(writer, [self._p2p.passes.own_pass, ports_of(self._announced or self._own)[:MAX_PORTS]])
                return parse_sight(await receive(reader, "reach"))

    async def _answer(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Try the ports of a node that asks, at the host that its connection comes from."""
        peer_id = info.peer_id.to_base58()
        try:
            with closing(writer), on_network(ANSWER_TIMEOUT_S, is_closing=writer.is_closing):
                shown, ports = _parse_request(await receive(reader, "reach"))
                self._p2p.passes.check(peer_id, shown)  # before a place is taken, which strangers could hold
                if peer_id in self._asking or len(self._asking) >= MAX_ASKING:
                    return
                self._asking.add(peer_id)
                try:
                    host = _host_of(str(info.addr))
                    opened = await listening([f"{host}/tcp/{port}/p2p/{peer_id}" for port in ports])
                    await send(writer, [host, ports_of(opened)])
                    await taken(reader)
                finally:
                    self._asking.discard(peer_id)
        except CallError as error:
            log.debug("reachability_not_told peer=%s reason=%s", peer_id, error)


def _of_daemon() -> AbstractContextManager[None]:
    """Have PeerUnreachable raised for all that hivemind's client raises: its errors have no common class."""
    return on_network(ANSWER_TIMEOUT_S, errors=(Exception,))


async def _own_addresses(p2p: GuardedP2P) -> list[str]:
    with _of_daemon():
        addresses = await p2p.get_visible_maddrs(latest=True)
    # libp2p names port 0 where a router has refused to forward one.
    plain = [str(address).rpartition("/p2p/")[0] for address in addresses]
    return [address for address in plain if any(ports_of([address]))]


def _parse_request(values: object) -> tuple[bytes, tuple[int, ...]]:
    match values:
        case [bytes() as shown, tuple() as ports] if len(ports) <= MAX_PORTS and all(map(_is_port, ports)):
            return shown, ports
        case _:
            raise InvalidMessage(f"reach: not [pass, {MAX_PORTS} ports at most]")


def parse_sight(values: object) -> Sight:
    """Read the answer of a peer.

    Raises:
        InvalidMessage: it is no sight
    """
    match values:
        case [str() as host, tuple() as ports] if len(ports) <= MAX_PORTS and all(map(_is_port, ports)):
            return Sight(_host_of(host), ports)
        case _:
            raise InvalidMessage("reach: not [host, ports]")


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 65536


def _protocol_of(host: str) -> str:
    return host.split("/")[1]


def _host_of(address: str) -> str:
    """The host that a multiaddress begins with.

    Raises:
        InvalidMessage: it begins with none
    """
    match address.split("/"):
        # A scope, as in fe80::1%eth0, means something on its own machine alone, and may be of any length.
        case ["", "ip4" | "ip6" as family, host, *rest] if "p2p-circuit" not in rest and "%" not in host:
            try:
                if ip_address(host).version == int(family[2]):
                    return f"/{family}/{ip_address(host)}"
            except ValueError:
                pass
    raise InvalidMessage(f"{address!r:.80} names no host")

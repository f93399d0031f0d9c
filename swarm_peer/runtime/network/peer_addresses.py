"""Addresses of peers: which can be one, and at which somebody listens. Knows nothing of the DHT."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

# If there are several initial peers, those that do not accept a connection in this time are not dialled.
CONNECT_TIMEOUT_S = 3.0
# Addresses that are tried at the same time.
MOST_CONNECTING = 32
# libp2p sends this first, unasked.
GREETING = b"\x13/multistream/1.0.0\n"


async def listening(addresses: Sequence[str]) -> list[str]:
    """The addresses where libp2p listens. It would dial all of them in turn, and give each silent one five seconds."""
    found: set[str] = set()
    room = anyio.Semaphore(MOST_CONNECTING)

    async def check(address: str) -> None:
        async with room:
            if await _accepts(address):
                found.add(address)

    async with anyio.create_task_group() as tasks:
        for address in addresses:
            tasks.start_soon(check, address)
    return [address for address in addresses if address in found]


async def _accepts(address: str) -> bool:
    """Whether libp2p answers at the address; True if that cannot be told, since the address is not plain TCP."""
    match address.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, "p2p", _]:
            try:
                with anyio.fail_after(CONNECT_TIMEOUT_S):
                    # Of a host with addresses of both families it tries the next one soon if the first is silent.
                    async with await anyio.connect_tcp(host, int(port)) as stream:
                        return await BufferedByteReceiveStream(stream).receive_exactly(len(GREETING)) == GREETING
            # Nothing listens there, what listens breaks off, or the host is no valid name.
            except (OSError, anyio.BrokenResourceError, anyio.IncompleteRead, UnicodeError):
                return False
    return True


def is_tcp_address(address: str, peer_id: str) -> bool:
    """Whether an address is one of the peer, over TCP. libp2p's daemon does not start if it is given any other form."""
    host = "/(ip4|ip6|dns[46]?)/[0-9A-Za-z.:-]{1,253}"
    return re.fullmatch(rf"{host}/tcp/[0-9]{{1,5}}/p2p/{re.escape(peer_id)}", address) is not None


def ports_of(addresses: Sequence[str]) -> list[int]:
    """The TCP ports of some multiaddresses, each once."""
    parts = [address.split("/") for address in addresses]
    ports = [int(part[4]) for part in parts if len(part) > 4 and part[3] == "tcp" and part[4].isdecimal()]
    return list(dict.fromkeys(ports))


def host_of(address: str) -> str:
    """The IP address or name in a multiaddress."""
    return address.split("/")[2]


def door_of(addresses: Sequence[str]) -> tuple[str, int] | None:
    """Host and port at which this machine itself connects to a node that listens on such addresses by TCP, if any."""
    for address in sorted(addresses, key=is_loopback, reverse=True):
        match address.split("/"):
            case ["", "ip4" | "ip6", host, "tcp", port, *_]:
                any_of = {"0.0.0.0": "127.0.0.1", "::": "::1"}
                return any_of.get(host, host), int(port)
    return None


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, or a name; the others work in private networks alone."""
    try:
        return ip_address(host_of(address)).is_global
    except ValueError:
        return True


def best_first(addresses: Sequence[str]) -> list[str]:
    """A machine's own multiaddresses: public ones first, and those that others of the same kind stand before, last.

    An interface may have many addresses of IPv6, and announcements name few: they should not be of one kind.
    """
    num_before = Counter[tuple[str, bool]]()
    ranked = []
    for address in addresses:
        kind = address.split("/")[1], is_public(address)
        ranked.append((num_before[kind], not kind[1], address))
        num_before[kind] += 1
    return [address for _, _, address in sorted(ranked, key=lambda each: each[:2])]


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from its own machine only."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def is_dialable(address: str, own: Sequence[str]) -> bool:
    """Whether an address that somebody else announces may be dialled.

    It may not be one of this machine itself, whose services trust their own machine, nor one of no single machine.
    Names are: they are to be resolved first.

    Args:
        own: addresses of the node that dials; if all are of loopback, so is the whole swarm
    """
    try:
        host = ip_address(address.split("/")[2])
    except ValueError:
        return True
    if isinstance(host, IPv6Address):
        host = host.ipv4_mapped or host
    if host.is_loopback:
        return bool(own) and all(map(is_loopback, own))
    return not (host.is_unspecified or host.is_multicast or host.is_link_local or host.is_reserved)


async def resolved(address: str) -> list[str]:
    """An address, with each IP address that its host has now, if that is a name."""
    match address.split("/"):
        case ["", "dns" | "dns4" | "dns6" as kind, name, *rest]:
            family = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}[kind]
            try:
                found = await anyio.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):  # nobody has it, or it is none
                return []
            hosts = [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
            # A name may have an IP address more than once.
            return ["/".join(["", f"ip{host.version}", str(host), *rest]) for host in dict.fromkeys(hosts)]
    return [address]


def metrics_address(host: str, port: int | None, addresses: Sequence[str]) -> str:
    """IP:PORT at which others reach the metrics of a peer; empty if they do not.

    Args:
        host: that the metrics are served on; of a name, nobody is told
        port: None if there are no metrics
        addresses: that the peer listens on; if all are of loopback, so is the whole swarm
    """
    try:
        served_on = ip_address(host)
    except ValueError:
        return ""
    nearest = [address.split("/")[2] for address in sorted(addresses, key=is_loopback) if address.startswith("/ip")]
    if port is None or not nearest or (served_on.is_loopback and not all(map(is_loopback, addresses))):
        return ""
    address = ip_address(nearest[0]) if served_on.is_unspecified else served_on
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"

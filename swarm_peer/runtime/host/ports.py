"""TCP ports to listen on: a peer keeps its own over restarts, so that a router can forward it."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from swarm_peer.errors import UserError

# A coordinator's. Peers leave it free, since invites name it.
FIRST_PORT = 31337
FIRST_PORT_OF_PEERS = 31338
# Ports that are looked through for a free one: as many programs of this kind may run on one machine.
MAX_PORTS = 256


class PortTaken(UserError):
    """Another program listens on the port that this one should listen on."""


def usable(addresses: Sequence[str]) -> list[str]:
    """Multiaddresses to listen on, without that of all of IPv6 where the system has none and others are named."""
    others = [address for address in addresses if not f"{address}/".startswith("/ip6/::/")]
    return list(addresses) if not others or has_ip6() else others


def has_ip6() -> bool:
    """Whether this system knows IPv6. It may have no address of it but that of loopback, or none."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


@contextmanager
def with_ports(addresses: Sequence[str], first: int) -> Iterator[list[str]]:
    """Multiaddresses to listen on, with their ports; those that name none get the first one from `first` on.

    That is one that is free at all of them, so that a router or a firewall is told of one port. While the context is
    open, no other process chooses it: two daemons of libp2p that begin at the same moment would both listen on it, and
    report nothing.

    Raises:
        PortTaken: a port that is named is taken
        UserError: all are
    """
    for address in addresses:
        if "/tcp/" in address:
            _check_is_free(address)
    if all("/tcp/" in address for address in addresses):
        yield list(addresses)
        return
    for port in range(first, first + MAX_PORTS):
        if (lock := _locked(port)) is None:
            continue
        with lock:
            chosen = [address if "/tcp/" in address else f"{address}/tcp/{port}" for address in addresses]
            if all(_is_free(new) for new, old in zip(chosen, addresses, strict=True) if new != old):
                yield chosen
                return
    raise UserError(f"no port from {first} to {first + MAX_PORTS - 1} is free: name one in --host-maddrs")


def _locked(port: int) -> AbstractContextManager[object] | None:
    """Keep a port from other processes until the result is closed; None if another process has it.

    On Linux that is an abstract Unix socket. Like the port, it belongs to one machine or network namespace, and ends
    with its process; a lock on a file would be shared by all machines with the same home.
    """
    if sys.platform != "linux":
        return nullcontext()
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0swarm-port-{port}")
    except OSError as error:
        lock.close()
        return None if error.errno == errno.EADDRINUSE else nullcontext()
    return lock


def _is_free(address: str) -> bool:
    try:
        _check_is_free(address)
    except UserError:
        return False
    return True


def _check_is_free(address: str) -> None:
    """Raise PortTaken if the port is taken: libp2p's daemon would report nothing, and never become ready."""
    match address.split("/"):
        case ["", "ip4" | "ip6" as family, host, "tcp", port, *_]:
            with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == "ip6":  # as libp2p listens: the same port of IPv4 is another one
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    probe.bind((host, int(port)))
                except OSError as error:
                    raise PortTaken(
                        f"cannot listen on {address}: {error.strerror}; name another address or port in --host-maddrs"
                    ) from error

"""Ports to listen on, of TCP and UDP alike: a peer keeps its own over restarts, so that a router can forward it."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from swarm_peer.errors import UserError

# A coordinator's. Peers leave it free, since invites name it.
FIRST_PORT = 31337
FIRST_PORT_OF_PEERS = 31338
# Ports that are looked through for a free one: as many programs of this kind may run on one machine.
MAX_PORTS = 256


class PortTaken(UserError):
    """Another program listens on the port that this one should listen on."""


@contextmanager
def with_port(address: str, first: int) -> Iterator[str]:
    """A multiaddress to listen on, with its port; one that names no port gets the first free one from `first` on.

    While the context is open, no other process chooses that port: two daemons of libp2p that begin at the same moment
    would both listen on it, and report nothing.

    Raises:
        PortTaken: the port is taken
        UserError: all are
    """
    if "/tcp/" in address:
        _check_is_free(address)
        yield address
        return
    for port in range(first, first + MAX_PORTS):
        if (lock := _locked(port)) is None:
            continue
        with lock:
            with_its_port = f"{address}/tcp/{port}"
            if _is_free(with_its_port):
                yield with_its_port
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
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):  # QUIC is over UDP
                with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET, kind) as probe:
                    if kind is socket.SOCK_STREAM:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((host, int(port)))
                    except OSError as error:
                        raise PortTaken(
                            f"cannot listen on {address}: {error.strerror}; name another address or port in "
                            "--host-maddrs"
                        ) from error

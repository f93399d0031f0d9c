"""A connection of TCP that both ends begin at the same moment, each of which opens its own router for the other.

libp2p's daemon cannot do that: both would take themselves for the one that began. So a socket of this process does it,
from the daemon's own port, since that is the one that others see. The daemons then connect through it.
"""

from __future__ import annotations

import asyncio
import socket

import anyio

from swarm_peer.errors import PeerUnreachable
from swarm_peer.runtime.network.carrying import Ends

# Each end sends this first: a daemon of libp2p, which says something else, may have come before.
_HELLO = b"\x0eswarm-punch/1\n"
# Between tries at one address: a router may refuse what comes before its own machine has sent something.
_AGAIN_S = 0.25
# For the other end to say that it is one.
_HELLO_TIMEOUT_S = 1.5
# Addresses of one node that are tried at once.
MOST_PUNCHED = 3


async def punch(port: int, addresses: list[str]) -> Ends:
    """Connect to a node that does the same at the same time. Goes on until that is so, or it is cancelled.

    Args:
        port: at which this machine's daemon listens
        addresses: where others see the node, by TCP

    Raises:
        PeerUnreachable: this machine gives no socket for it
    """
    found: list[Ends | PeerUnreachable] = []
    async with anyio.create_task_group() as tasks:

        async def go_on(address: str) -> None:
            try:
                ends = await _go_on(port, address)
            except PeerUnreachable as error:
                found.append(error)
            else:
                if found:
                    ends.writer.close()
                found.append(ends)
            tasks.cancel_scope.cancel()

        for address in addresses[:MOST_PUNCHED]:
            tasks.start_soon(go_on, address)
    if not found:
        raise PeerUnreachable("no address to dial")
    if isinstance(found[0], PeerUnreachable):
        raise found[0]
    return found[0]


async def _go_on(port: int, address: str) -> Ends:
    _, kind, host, _, number, *_ = address.split("/")
    while True:
        with _bound(port, socket.AF_INET6 if kind == "ip6" else socket.AF_INET) as own:
            try:
                await asyncio.get_running_loop().sock_connect(own, (host, int(number)))
                with anyio.fail_after(_HELLO_TIMEOUT_S):
                    answer = await _exchange(own)
                if answer == _HELLO:
                    return Ends(*await asyncio.open_connection(sock=own.dup()))
            except (OSError, TimeoutError):
                pass
        await anyio.sleep(_AGAIN_S)


def _bound(port: int, family: socket.AddressFamily) -> socket.socket:
    """A socket beside the daemon's at its port; raises PeerUnreachable."""
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        own.setblocking(False)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own.bind(("", port))
    except (OSError, AttributeError) as error:  # some systems share no ports
        own.close()
        raise PeerUnreachable(f"no socket at port {port}: {error}") from error
    return own


async def _exchange(own: socket.socket) -> bytes:
    """Say hello, and read as much of the other end."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_sendall(own, _HELLO)
    while len(answer) < len(_HELLO) and (piece := await loop.sock_recv(own, len(_HELLO) - len(answer))):
        answer += piece
    return answer

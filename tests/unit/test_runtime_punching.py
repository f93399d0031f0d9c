"""Connections of TCP that both ends begin; those that succeed need routers (tests/integration/test_routers.py)."""

import asyncio
import socket
from contextlib import asynccontextmanager

import anyio
import pytest

from swarm_peer.errors import PeerUnreachable
from swarm_peer.runtime.network.peer_addresses import GREETING
from swarm_peer.runtime.network.punching import punch


@asynccontextmanager
async def listener(says=b"", *, shares=True):
    """A port at which a daemon listens; gives the port."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    own.bind(("127.0.0.1", 0))

    async def answer(reader, writer):
        writer.write(says)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, sock=own)
    yield own.getsockname()[1]
    server.close()


def at(port):
    return f"/ip4/127.0.0.1/tcp/{port}"


@pytest.mark.parametrize("says", [GREETING, b"", b"HTTP/1.1 400 Bad Request"])
async def test_what_answers_otherwise_is_tried_again(says):
    async with listener(says) as other, listener() as own:
        with anyio.move_on_after(0.6) as tried:
            await punch(own, [at(other)])
        assert tried.cancelled_caught


async def test_a_port_that_is_not_shared_cannot_be_punched_from():
    async with listener(shares=False) as own:
        with pytest.raises(PeerUnreachable, match="no socket at port"):
            await punch(own, [at(1)])
    with pytest.raises(PeerUnreachable, match="no address"):
        await punch(1, [])

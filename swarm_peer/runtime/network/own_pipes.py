"""A node's own connections that do not begin at its daemon: over a stream that a helper carries, or a punched one.

Each end makes its stream look like a connection of TCP to its own daemon, and the daemons connect through it as through
any other: who they are is proven end to end.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing, suppress
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from swarm_peer.errors import NoRoom, PeerUnreachable
from swarm_peer.runtime.network.carrying import Ends, carry
from swarm_peer.runtime.network.frame_stream import on_network
from swarm_peer.runtime.network.guarded_p2p import GuardedP2P

log = logging.getLogger(__name__)

# For the daemons to connect, once the stream is there.
CONNECT_S = 8.0
# For this machine's daemon to accept a connection.
DOOR_TIMEOUT_S = 3.0
# Between looks whether the daemons have connected.
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Carrier:
    """A helper that carries a connection of this node.

    Attributes:
        bytes_per_s: that the connection has of what the helper carries; as of its beginning
    """

    helper: str
    bytes_per_s: float


class OwnPipes:
    """This node's connections that are carried between its daemon and a stream.

    Args:
        door: host and port at which this node's daemon accepts connections of TCP from this machine, if known

    Attributes:
        tasks: in which they live
        carriers: how this node's connection to a node is carried, by node; those that no helper carries are not here
    """

    def __init__(self, p2p: GuardedP2P, door: tuple[str, int] | None):
        self.tasks: TaskGroup | None = None
        self.carriers: dict[str, Carrier] = {}
        self.door = door
        self._p2p = p2p

    async def dial(self, name: str, ends: Ends, carrier: Carrier | None) -> None:
        """Have the daemon connect to a node over a stream, which is closed if it does not.

        Raises:
            CallError: the node does not answer there
        """
        is_taken = False

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal is_taken
            assert self.tasks is not None
            if is_taken:  # by the daemon, which is the only one that has been told of this port
                writer.close()
                return
            is_taken = True
            port = writer.get_extra_info("sockname")[1]
            self.tasks.start_soon(self._carry, name, carrier, port, Ends(reader, writer), ends)

        server: asyncio.Server | None = None
        is_connected = False
        try:
            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with on_network(CONNECT_S, errors=(Exception,)):
                await self._p2p.connect(name, [f"/ip4/127.0.0.1/tcp/{port}"])
            is_connected = True
        finally:
            if server is not None:
                server.close()
            # The daemon may have been connected before, and not come; or it came, and nobody answered it.
            if not (is_connected and is_taken):
                ends.writer.close()

    async def knock(self) -> Ends:
        """Connect to this machine's own daemon, as if from afar.

        Raises:
            NoRoom: this node does not know where it listens itself
            PeerUnreachable: the daemon does not answer
        """
        if self.door is None:
            raise NoRoom("this node does not know where it listens itself")
        with on_network(DOOR_TIMEOUT_S):
            return Ends(*await asyncio.open_connection(*self.door))

    async def accept(self, name: str, daemon: Ends, ends: Ends, carrier: Carrier | None) -> None:
        """Carry a connection from a stream to the daemon, which `knock` has called, until it ends."""
        with closing(daemon.writer):
            await self._carry(name, carrier, daemon.writer.get_extra_info("sockname")[1], daemon, ends)

    async def _carry(self, name: str, carrier: Carrier | None, port: int, daemon: Ends, ends: Ends) -> None:
        """Carry this node's own connection to a node between its daemon and a stream, until it ends.

        Args:
            port: of this end, as the daemon sees it. Others name whom they like; that it is the node that is at the
                other end is true once the daemon has made sure of it
        """
        async with anyio.create_task_group() as tasks:
            if carrier is not None:
                tasks.start_soon(self._note_carrier, name, carrier, f"/ip4/127.0.0.1/tcp/{port}")
            try:
                await carry(daemon, ends)
            finally:
                tasks.cancel_scope.cancel()
                if carrier is not None and self.carriers.get(name) is carrier:
                    del self.carriers[name]
                    log.info("way_ended peer=%s way=through %s", name, carrier.helper)

    async def _note_carrier(self, name: str, carrier: Carrier, address: str) -> None:
        with anyio.move_on_after(CONNECT_S), suppress(PeerUnreachable):
            while address not in (await self._p2p.connections()).get(name, ()):  # noqa: ASYNC110
                await anyio.sleep(LOOK_S)
            self.carriers[name] = carrier

"""Bytes between two streams, at a rate that their carrier allows: what a relay does, and each end of what is relayed.

The bytes are those of a connection of libp2p between two daemons, with its encryption and its proof of who they are. So
the carrier reads nothing of it, and can only end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

import anyio

from swarm_peer.errors import PeerUnreachable
from swarm_peer.runtime.network.frame_stream import on_network

PIECE_BYTES = 1 << 16
# libp2p asks the other end for a sign of life more often than that.
SILENCE_S = 120.0
# So much of a second's bytes may come at once.
BURST_S = 0.25


@dataclass(frozen=True, slots=True)
class Ends:
    """One stream's two ends."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Rate:
    """Bytes a second that all who share this may take together, in the order in which they ask."""

    def __init__(self, bytes_per_s: float, count: Callable[[int], None]):
        """Make what nobody has taken from.

        Args:
            count: told of the bytes that are taken
        """
        self._bytes_per_s = bytes_per_s
        self._count = count
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        now_s = anyio.current_time()
        self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
        self._count(num_bytes)
        await anyio.sleep(max(0.0, self._free_s - now_s - BURST_S))


async def carry(one: Ends, other: Ends, rate: Rate | None = None) -> None:
    """Carry bytes both ways until either stream ends; then both are closed.

    Args:
        rate: that both directions take from; None for no limit
    """
    with closing(one.writer), closing(other.writer):
        async with anyio.create_task_group() as tasks:

            async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with suppress(PeerUnreachable):  # a stream has broken
                    await _pass_on(reader, writer, rate)
                tasks.cancel_scope.cancel()

            tasks.start_soon(pass_on, one.reader, other.writer)
            tasks.start_soon(pass_on, other.reader, one.writer)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: Rate | None) -> None:
    while True:
        with on_network(SILENCE_S):
            piece = await reader.read(PIECE_BYTES)
        if not piece:
            return
        if rate is not None:
            await rate.take(len(piece))
        with on_network(SILENCE_S, is_closing=writer.is_closing):
            writer.write(piece)
            await writer.drain()

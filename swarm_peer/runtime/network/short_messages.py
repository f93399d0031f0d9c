"""A message of few values, for streams on which nodes ask each other how they are reached."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import anyio
import msgpack

from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.packing import unpack

# For what was written last to arrive.
FAREWELL_S = 2.0
# Two passes, some addresses, and some numbers.
MAX_MESSAGE_BYTES = 8192


async def send(writer: asyncio.StreamWriter, values: list[Any]) -> None:
    """Write a message."""
    data = msgpack.packb(values)
    writer.write(len(data).to_bytes(2, "big") + data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, name: str) -> Any:
    """Read a message; arrays in it are tuples.

    Args:
        name: of the message, for the error

    Raises:
        InvalidMessage: it is too long, or no msgpack
    """
    num_bytes = int.from_bytes(await reader.readexactly(2), "big")
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"{name}: {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} go")
    return unpack(await reader.readexactly(num_bytes), name)


async def taken(reader: asyncio.StreamReader) -> None:
    """Wait for the other end to close its stream: to close at once would reset it, with what is still on its way."""
    with suppress(OSError, EOFError), anyio.move_on_after(FAREWELL_S):
        await reader.read(1)

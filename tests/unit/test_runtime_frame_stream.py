"""Frames that take turns on one stream. What libp2p does with them is for tests/integration/test_p2p_transport.py."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.frame_stream import SMALL_FRAME_BYTES, FrameStream


class SlowWriter:
    """Takes a frame's bytes at once, and lets the next ones come when it is told to.

    Attributes:
        begun: the heads of the frames whose writing has begun
    """

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self._room = asyncio.Semaphore(0)

    def write(self, data: bytes | memoryview) -> None:
        if isinstance(data, bytes):
            self.begun.append(data)

    async def drain(self) -> None:
        await self._room.acquire()

    def is_closing(self) -> bool:
        return False

    def flush(self) -> None:
        for _ in range(2):  # after the tensor, and at the end of the frame
            self._room.release()


@pytest.mark.parametrize("num_large", [1, 5])
async def test_a_small_frame_waits_for_one_large_frame_at_most(num_large: int) -> None:
    writer: Any = SlowWriter()
    reader: Any = None
    stream = FrameStream(reader=reader, writer=writer, max_payload_bytes=1, metrics=PeerMetrics())
    async with anyio.create_task_group() as tasks:
        for number in range(num_large):
            tasks.start_soon(stream.send, b"large %d" % number, [memoryview(bytes(SMALL_FRAME_BYTES + 1))])
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(stream.send, b"small")
        for _ in range(num_large + 1):
            await anyio.wait_all_tasks_blocked()
            writer.flush()
    large = [b"large %d" % number for number in range(num_large)]
    assert writer.begun == [large[0], b"small", *large[1:]]

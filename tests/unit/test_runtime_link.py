"""The buckets of a link, on a clock that sleeping moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from swarm_peer.runtime.context import BYTES_PER_BYTE
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network import frame_stream
from swarm_peer.runtime.network.frame_stream import SMALL_FRAME_BYTES, FrameStream
from swarm_peer.runtime.network.link import BURST_S, Bucket, Link

RATE = 1e6
# Of the event loop, until all tasks wait for the clock.
TURNS = 20


class SleepingClock:
    """A clock that moves on to the next task that sleeps, once all others wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._asleep: list[tuple[float, int, anyio.Event]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        awake = anyio.Event()
        heapq.heappush(self._asleep, (self.now_s + seconds, next(self._numbers), awake))
        await awake.wait()

    async def run(self) -> None:
        while True:
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
            if self._asleep:
                self.now_s, _, awake = heapq.heappop(self._asleep)
                awake.set()

    def bucket(self, rate: float = RATE) -> Bucket:
        return Bucket(rate, self, self.sleep)


@pytest.fixture
async def clock() -> AsyncIterator[SleepingClock]:
    made = SleepingClock()
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()


async def test_large_frames_pass_at_the_rate(clock: SleepingClock) -> None:
    bucket = clock.bucket()
    with bucket.turn() as turn:
        for _ in range(200):
            await bucket.take(bucket.piece_bytes, turn)
    expected_s = (200 * bucket.piece_bytes) / RATE
    assert clock.now_s == pytest.approx(expected_s, rel=0.02)


async def test_an_idle_link_saves_up_little(clock: SleepingClock) -> None:
    bucket = clock.bucket()
    clock.now_s = 3600.0
    with bucket.turn() as turn:
        for _ in range(100):
            await bucket.take(bucket.piece_bytes, turn)
    assert clock.now_s - 3600.0 == pytest.approx(100 * bucket.piece_bytes / RATE - BURST_S, rel=0.02)


async def test_small_frames_pass_at_once_and_large_ones_make_up_for_them(clock: SleepingClock) -> None:
    bucket = clock.bucket()
    for _ in range(1000):
        bucket.spend(1000)
    assert clock.now_s == 0.0
    with bucket.turn() as turn:
        await bucket.take(1000, turn)
    assert clock.now_s == pytest.approx(1e6 / RATE - BURST_S, rel=0.01)


async def test_frames_go_one_after_the_other_but_for_one_that_something_small_waits_for(clock: SleepingClock) -> None:
    bucket, done, hurried = clock.bucket(), [], set[str]()

    async def send(name: str) -> None:
        with bucket.turn(lambda: name in hurried) as turn:
            for number in range(3):
                await bucket.take(RATE, turn)
                done.append(name)
                if name == "a" and number == 0:
                    hurried.add("c")

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(send, name)
            await anyio.lowlevel.checkpoint()
    assert "".join(done) == "acccaabbb"


async def test_one_whose_receiver_stalls_does_not_hold_up_the_others(clock: SleepingClock) -> None:
    bucket = clock.bucket()
    with bucket.turn() as stalled, bucket.turn() as other:
        await bucket.take(1.0, stalled)
        with anyio.fail_after(5):
            await bucket.take(1.0, other)


async def test_without_a_limit_nothing_waits() -> None:
    bucket = Bucket()
    assert math.isinf(bucket.piece_bytes)
    with bucket.turn() as turn, anyio.fail_after(5):
        await bucket.take(1e15, turn)


class Writer:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        self.sizes.append(len(data))

    async def drain(self) -> None:
        await anyio.lowlevel.checkpoint()

    def is_closing(self) -> bool:
        return False


async def test_a_link_counts_and_limits_what_its_streams_send(clock: SleepingClock) -> None:
    link = Link(upload=clock.bucket())
    streams = []
    for _ in range(2):
        reader: Any = None
        writer: Any = Writer()
        metrics = PeerMetrics()
        streams.append(FrameStream(reader=reader, writer=writer, max_payload_bytes=1, metrics=metrics, link=link))
    large = memoryview(bytes(10 * SMALL_FRAME_BYTES))
    async with anyio.create_task_group() as tasks:
        for stream in streams:
            for _ in range(5):
                tasks.start_soon(stream.send, b"head", [large])
    sent = 10 * (large.nbytes + 4)
    assert link.sent_bytes == pytest.approx(sent * BYTES_PER_BYTE)
    assert clock.now_s == pytest.approx(sent * BYTES_PER_BYTE / RATE, rel=0.03)
    assert max(max(stream.writer.sizes) for stream in streams) <= link.upload.piece_bytes  # type: ignore[attr-defined]


async def test_a_message_waits_for_the_frame_that_is_under_way_alone(clock: SleepingClock) -> None:
    """Though its messages travel as tensors, and other frames of the same stream and of others wait already."""
    link = Link(upload=clock.bucket())
    reader: Any = None
    order: list[str] = []

    async def send(stream: FrameStream, name: str, num_bytes: int) -> None:
        await stream.send(name.encode(), [memoryview(bytes(num_bytes))])
        order.append(name)

    streams = []
    for _ in range(2):
        writer: Any = Writer()
        streams.append(FrameStream(reader=reader, writer=writer, max_payload_bytes=1, metrics=PeerMetrics(), link=link))
    large = 1_000_000
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            for at, stream in enumerate(streams):
                tasks.start_soon(send, stream, f"large {at}.{number}", large)
        while not order:
            await clock.sleep(0.1)
        tasks.start_soon(send, streams[0], "small", frame_stream.SMALL_FRAME_BYTES)
        asked_s = clock.now_s
        while "small" not in order:
            await clock.sleep(0.01)
        assert clock.now_s - asked_s < 1.2 * 2 * large / RATE, "one frame of this stream, and what was under way"


async def test_what_the_kernel_counts_beyond_the_calls_is_made_up_for(clock: SleepingClock) -> None:
    link = Link(upload=clock.bucket())
    link.settle(1000, 5000)
    assert (link.sent_bytes, link.received_bytes) == (0, 0), "before this peer had a link"
    link.send_now(10_000)
    charged = link.sent_bytes
    link.settle(1000 + 9_000, 5000)
    assert link.sent_bytes == charged, "the rest is on its way"
    link.settle(1000 + 2_000_000, 5000 + 3_000_000)
    assert (link.sent_bytes, link.received_bytes) == (2_000_000, 3_000_000)
    with link.upload.turn() as turn:
        await link.upload.take(1, turn)
    assert clock.now_s == pytest.approx(2.0 - BURST_S, rel=0.05)

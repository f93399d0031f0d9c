"""One end of a stream of frames, with a deadline for each frame. Knows nothing of calls, nor of the network below."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np

from swarm_peer.errors import PeerUnreachable
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.link import Link, Turn
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.frames import MAX_HEADER_BYTES, PREFIX, Frame, parse_frame, parse_lengths

# A frame that has begun may take this long, plus the time for its bytes on the slowest link that is of any use.
FRAME_TIMEOUT_S = 30.0
# A caller that is turned away may still be sending so much.
MOST_DROPPED_BYTES = 1 << 20
SLOWEST_BYTES_PER_S = 64e3
# Read and write in pieces of this size, so that no copy of a whole tensor piles up in asyncio's buffers.
PIECE_BYTES = 1 << 18
# A frame with fewer bytes of tensors waits for no others but the one that is being written: messages of agreement have
# a few kilobytes.
SMALL_FRAME_BYTES = 1 << 16

# The errors of a broken stream. TimeoutError is an OSError.
BROKEN_STREAM: tuple[type[Exception], ...] = (OSError, EOFError)


def num_bytes_of(tensors: Sequence[memoryview]) -> int:
    """The bytes of some tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def on_network(
    timeout_s: float,
    tensors: Sequence[memoryview] = (),
    *,
    errors: tuple[type[Exception], ...] = BROKEN_STREAM,
    is_closing: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Raise PeerUnreachable for all errors of a stream, and if the body takes too long.

    Args:
        timeout_s: time for all but the tensors
        tensors: they are sent or read in the body, and add to the time that it may take
        errors: the classes of errors that mean a broken stream
        is_closing: whether this end has closed the stream already; uvloop then raises RuntimeError. Any other
            RuntimeError is a defect of this program, and is not mapped
    """
    timeout_s += num_bytes_of(tensors) / SLOWEST_BYTES_PER_S
    try:
        with anyio.fail_after(timeout_s):
            yield
    except Exception as error:
        if isinstance(error, errors) or (isinstance(error, RuntimeError) and is_closing()):
            raise PeerUnreachable(f"{error!r:.200} within {timeout_s:.0f} s") from error
        raise


def _pieces(tensors: Sequence[memoryview], most_bytes: float) -> Iterator[memoryview]:
    """The bytes of some tensors, in pieces."""
    piece_bytes = int(min(PIECE_BYTES, most_bytes))
    for tensor in tensors:
        for start in range(0, tensor.nbytes, piece_bytes):
            yield tensor[start : start + piece_bytes]


@dataclass(eq=False, kw_only=True)
class FrameStream:
    """One end of a stream of frames. Reading and sending raise PeerUnreachable if it ends, breaks or stalls.

    Attributes:
        link: that all streams of this peer share
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_payload_bytes: int
    metrics: PeerMetrics
    link: Link = field(default_factory=Link)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _turn_of_large: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _num_small: int = field(init=False, default=0)  # small frames that are to be written

    def _on_network(self, timeout_s: float, tensors: Sequence[memoryview] = ()) -> AbstractContextManager[None]:
        return on_network(timeout_s, tensors, is_closing=self.writer.is_closing)

    async def read_head(self, max_header_bytes: int = MAX_HEADER_BYTES) -> Frame:
        """Wait for the next frame and read its header. Its tensors are filled by `read_tensors`."""
        with self._on_network(math.inf):
            prefix = await self.reader.readexactly(PREFIX.size)
        header_bytes, payload_bytes = parse_lengths(prefix, self.max_payload_bytes, max_header_bytes)
        with self._on_network(FRAME_TIMEOUT_S):
            header = await self.reader.readexactly(header_bytes)
        self.metrics.received_bytes.inc(PREFIX.size + header_bytes)
        self.link.receive_now(PREFIX.size + header_bytes)
        # Unlike a bytearray's, this memory is taken only as it is filled, so an announced length alone takes none.
        return parse_frame(header, bytes_of(np.empty(payload_bytes, np.uint8)))

    async def read_tensors(self, frame: Frame) -> None:
        """Fill the tensors of the frame whose header has just been read."""
        num_bytes = num_bytes_of(frame.tensors)
        with self._on_network(FRAME_TIMEOUT_S, frame.tensors), self.link.download.turn() as turn:
            for piece in _pieces(frame.tensors, self.link.download.piece_bytes):
                if num_bytes > SMALL_FRAME_BYTES:
                    await self.link.receive(piece.nbytes, turn)
                else:
                    self.link.receive_now(piece.nbytes)
                piece[:] = await self.reader.readexactly(piece.nbytes)
        self.metrics.received_bytes.inc(num_bytes)

    async def send(
        self, head: bytes, tensors: Sequence[memoryview] = (), wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a whole frame, or close the stream if that fails.

        Large frames line up among themselves, so that small ones wait for one of them at most: a hundred parts of an
        average take seconds on a slow link, in which a stage-mate that asks something would time out.

        Args:
            wanted: asked when the frame's turn comes

        Returns:
            False if the frame was not wanted any more, and nothing was written
        """
        if num_bytes_of(tensors) > SMALL_FRAME_BYTES:
            with self.link.upload.turn(lambda: self._num_small > 0) as turn:
                async with self._turn_of_large, self._turn:
                    # Its deadline, and that of the other end, begin with its first byte.
                    await self.link.send(len(head), turn)
                    return await self._write(head, tensors, wanted, turn)
        self._num_small += 1
        try:
            async with self._turn:
                return await self._write(head, tensors, wanted, None)
        finally:
            self._num_small -= 1

    async def _write(
        self, head: bytes, tensors: Sequence[memoryview], wanted: Callable[[], bool], turn: Turn | None
    ) -> bool:
        if not wanted():
            return False
        num_bytes = len(head) + num_bytes_of(tensors)
        with ExitStack() as unless_whole, self._on_network(FRAME_TIMEOUT_S, tensors):
            unless_whole.callback(self.close)
            if turn is None:
                self.link.send_now(num_bytes)
            self.writer.write(head)
            for piece in _pieces(tensors, self.link.upload.piece_bytes):
                if turn is not None:
                    await self.link.send(piece.nbytes, turn)
                self.writer.write(piece)
                await self.writer.drain()
            await self.writer.drain()
            unless_whole.pop_all()
        self.metrics.sent_bytes.inc(num_bytes)
        return True

    async def closed_by_other_end(self, timeout_s: float) -> None:
        """Wait until the other end closes the stream, and drop a little of what it still sends."""
        left = MOST_DROPPED_BYTES
        with self._on_network(timeout_s):
            while left > 0 and (dropped := await self.reader.read(PIECE_BYTES)):
                left -= len(dropped)

    def close(self) -> None:
        """Close at once. To write buffered bytes first would take for ever if the other peer does not read."""
        self.writer.transport.abort()

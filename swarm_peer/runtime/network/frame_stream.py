"""One end of a stream of frames, with a deadline for each frame. Knows nothing of calls, nor of the network below."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import anyio
import numpy as np

from swarm_peer.errors import PeerUnreachable
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.frames import MAX_HEADER_BYTES, PREFIX, Frame, parse_frame, parse_lengths

# A frame that has begun may take this long, plus the time for its bytes on the slowest link that is of any use.
FRAME_TIMEOUT_S = 30.0
# A caller that is turned away may still be sending so much.
MOST_DROPPED_BYTES = 1 << 20
SLOWEST_BYTES_PER_S = 64e3
# Read and write in pieces of this size, so that no copy of a whole tensor piles up in asyncio's buffers.
PIECE_BYTES = 1 << 18

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


@dataclass(eq=False, kw_only=True)
class FrameStream:
    """One end of a stream of frames. Reading and sending raise PeerUnreachable if it ends, breaks or stalls."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    max_payload_bytes: int
    metrics: PeerMetrics
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _turn_of_tensors: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

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
        # Unlike a bytearray's, this memory is taken only as it is filled, so an announced length alone takes none.
        return parse_frame(header, bytes_of(np.empty(payload_bytes, np.uint8)))

    async def read_tensors(self, frame: Frame) -> None:
        """Fill the tensors of the frame whose header has just been read."""
        with self._on_network(FRAME_TIMEOUT_S, frame.tensors):
            for tensor in frame.tensors:
                for start in range(0, tensor.nbytes, PIECE_BYTES):
                    piece = tensor[start : start + PIECE_BYTES]
                    piece[:] = await self.reader.readexactly(piece.nbytes)
        self.metrics.received_bytes.inc(num_bytes_of(frame.tensors))

    async def send(
        self, head: bytes, tensors: Sequence[memoryview] = (), wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a whole frame, or close the stream if that fails.

        Frames with tensors line up among themselves, so that those without wait for one of them at most: a hundred
        parts of an average take seconds on a slow link, in which a stage-mate that asks something would time out.

        Args:
            wanted: asked when the frame's turn comes

        Returns:
            False if the frame was not wanted any more, and nothing was written
        """
        async with self._turn_of_tensors if tensors else nullcontext(), self._turn:
            if not wanted():
                return False
            with ExitStack() as unless_whole, self._on_network(FRAME_TIMEOUT_S, tensors):
                unless_whole.callback(self.close)
                self.writer.write(head)
                for tensor in tensors:
                    for start in range(0, tensor.nbytes, PIECE_BYTES):
                        self.writer.write(tensor[start : start + PIECE_BYTES])
                        await self.writer.drain()
                await self.writer.drain()
                unless_whole.pop_all()
        self.metrics.sent_bytes.inc(len(head) + num_bytes_of(tensors))
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

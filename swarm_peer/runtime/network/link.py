"""This peer's link, of which its owner may lend a part: token buckets that all bytes of calls pass, and counts of them.

Small frames pass at once, and large ones make up for them: a round's agreement must not wait behind megabytes of
tensors. Of the large frames, the one that has begun first goes first, so that each is under way for as short as
possible; one that a small frame of the same stream waits for goes before all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from swarm_peer.runtime.context import BYTES_PER_BYTE, Clock

# Bytes of acknowledgements for each byte that comes the other way.
ACKNOWLEDGED_PER_BYTE = 0.02
# Of what the owner lends: the kernel's counts come a second late.
USED_SHARE = 0.985
# An idle link saves up so many seconds of its rate.
BURST_S = 0.1
# Bytes that pass in one piece take so many seconds, so that frames take turns.
PIECE_S = 0.05
LEAST_PIECE_BYTES = 4096
# Timers are no more exact than this.
LEAST_SLEEP_S = 0.002


@dataclass(eq=False)
class Turn:
    """The place of one large frame among those that wait.

    Attributes:
        is_hurried: whether something small waits for its end
    """

    number: int
    is_hurried: Callable[[], bool] = lambda: False


class Bucket:
    """One direction of a link. Belongs to the event loop's thread.

    Args:
        bytes_per_s: without a limit it needs no clock

    Attributes:
        piece_bytes: the most that a frame asks for at once
    """

    def __init__(
        self,
        bytes_per_s: float = math.inf,
        now_s: Callable[[], float] = lambda: 0.0,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ):
        self._bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._sleep = sleep
        self._left = 0.0 if math.isinf(bytes_per_s) else bytes_per_s * BURST_S
        self._at_s = now_s()
        self._numbers = itertools.count()
        self._waiting: set[Turn] = set()
        self.piece_bytes = math.inf
        if not math.isinf(bytes_per_s):
            self.piece_bytes = max(LEAST_PIECE_BYTES, int(bytes_per_s * PIECE_S))

    def spend(self, num_bytes: float) -> None:
        """Let bytes pass at once. If there are not enough left, large frames wait until these are made up for."""
        self._fill()
        self._left -= num_bytes

    @contextmanager
    def turn(self, is_hurried: Callable[[], bool] = lambda: False) -> Iterator[Turn]:
        """The place of a large frame, which it keeps until it is whole."""
        turn = Turn(next(self._numbers), is_hurried)
        try:
            yield turn
        finally:
            self._waiting.discard(turn)

    async def take(self, num_bytes: float, turn: Turn) -> None:
        """Wait until bytes of a large frame may pass."""
        if not math.isinf(self._bytes_per_s):
            self._waiting.add(turn)
            try:
                while (wait_s := self._wait_s()) > 0 or self._first() is not turn:
                    await self._sleep(max(wait_s, LEAST_SLEEP_S))
            finally:
                self._waiting.discard(turn)
        self.spend(num_bytes)

    def _first(self) -> Turn:
        return min(self._waiting, key=lambda turn: (not turn.is_hurried(), turn.number))

    def _wait_s(self) -> float:
        self._fill()
        return max(0.0, -self._left / self._bytes_per_s)

    def _fill(self) -> None:
        now_s = self._now_s()
        if not math.isinf(self._bytes_per_s):
            filled = self._left + (now_s - self._at_s) * self._bytes_per_s
            self._left = min(filled, self._bytes_per_s * BURST_S)
        self._at_s = now_s


@dataclass(eq=False, kw_only=True)
class Link:
    """Both directions of this peer's link, for all its streams.

    Attributes:
        sent_bytes, received_bytes: on the wire so far, by the measured overhead of libp2p and TCP, or as the kernel
            counts where that is more
    """

    upload: Bucket = field(default_factory=Bucket)
    download: Bucket = field(default_factory=Bucket)
    sent_bytes: float = field(init=False, default=0.0)
    received_bytes: float = field(init=False, default=0.0)
    _before: tuple[float, float] | None = field(init=False, default=None)

    @classmethod
    def of(cls, upload_mbps: float | None, download_mbps: float | None, clock: Clock) -> Link:
        """A link whose directions have at most so many megabits per second; None for any number."""
        given = (upload_mbps, download_mbps)
        upload, download = (math.inf if mbps is None else USED_SHARE * mbps * 1e6 / 8 for mbps in given)
        return cls(upload=Bucket(upload, clock.monotonic_s), download=Bucket(download, clock.monotonic_s))

    def send_now(self, num_bytes: int) -> None:
        """Let a small frame out."""
        self.upload.spend(self._sends(num_bytes))

    async def send(self, num_bytes: int, turn: Turn) -> None:
        """Wait until a piece of a large frame may go out."""
        await self.upload.take(self._sends(num_bytes), turn)

    def receive_now(self, num_bytes: int) -> None:
        """Let a small frame in."""
        self.download.spend(self._receives(num_bytes))

    async def receive(self, num_bytes: int, turn: Turn) -> None:
        """Wait until a piece of a large frame may be read; TCP has its sender wait meanwhile."""
        await self.download.take(self._receives(num_bytes), turn)

    def carry(self, num_bytes: int) -> None:
        """Let bytes through that come from one peer for another."""
        self.receive_now(num_bytes)
        self.send_now(num_bytes)

    def settle(self, sent_bytes: int, received_bytes: int) -> None:
        """Have the calls make up for bytes that the kernel has counted beyond them, such as those of the DHT.

        Bytes of calls that it has not counted yet are on their way.

        Args:
            sent_bytes, received_bytes: on the wire so far; where that begins does not matter
        """
        if self._before is None:
            self._before = sent_bytes - self.sent_bytes, received_bytes - self.received_bytes
        more = max(0.0, sent_bytes - self._before[0] - self.sent_bytes)
        self.upload.spend(more)
        self.sent_bytes += more
        more = max(0.0, received_bytes - self._before[1] - self.received_bytes)
        self.download.spend(more)
        self.received_bytes += more

    def _sends(self, num_bytes: int) -> float:
        self.download.spend(num_bytes * ACKNOWLEDGED_PER_BYTE)
        self.received_bytes += num_bytes * ACKNOWLEDGED_PER_BYTE
        self.sent_bytes += num_bytes * BYTES_PER_BYTE
        return num_bytes * BYTES_PER_BYTE

    def _receives(self, num_bytes: int) -> float:
        self.upload.spend(num_bytes * ACKNOWLEDGED_PER_BYTE)
        self.sent_bytes += num_bytes * ACKNOWLEDGED_PER_BYTE
        self.received_bytes += num_bytes * BYTES_PER_BYTE
        return num_bytes * BYTES_PER_BYTE

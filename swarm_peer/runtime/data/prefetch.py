"""Prefetch: a thread that reads samples ahead of their use, from the slices that a stage-0 peer leases.

This module owns the thread and the samples that it has read. It knows nothing of other peers: leases.py tells it which
slices to read, and which of their windows have counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_peer.errors import UserError, first_line
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted, WindowRange
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.slices import OPEN_SLICES, SliceReader, SliceWindows

log = logging.getLogger(__name__)

# Samples to read ahead of their use: the device must not wait for reading and tokenizing.
SAMPLES_AHEAD = 256


class Sample(NamedTuple):
    """A sample with its name. `tokens` has shape (T+1,)."""

    id: SampleId
    tokens: npt.NDArray[np.int32]


class SamplePool:
    """Gives out samples of several slices, mixed; the samples of one slice come in their order.

    All samples of a pass are read and given out before those of a later pass, in whatever order slices are leased. All
    methods belong to the event loop's thread; reading happens in a thread of the pool.

    Args:
        reader: only the pool's thread uses it after `start`
    """

    def __init__(self, *, context: PeerContext, reader: SliceReader):
        self._threads = context.threads
        self._reader = reader
        self._rng = context.random.stream("samples")
        self._changed = context.changed
        self._arrived = Condition()
        self._state = threading.Condition()  # guards all attributes below; reentrant
        self._leased: set[SliceId] = set()
        self._unread: dict[SliceId, SliceWindows] = {}
        self._ready: dict[SliceId, deque[Sample]] = {}  # without slices that have none
        self._awaited: list[int] = []  # the number of samples that each waiting task wants
        self._ends: list[WindowRange] = []
        self._empty_in_a_row = 0
        self._error: UserError | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to read. To be called in the event loop whose tasks will ask for samples."""
        self._loop = asyncio.get_running_loop()
        self._threads.start(self._read, "samples")

    def stop(self) -> None:
        """End the thread when its present read returns. The caller has to cancel the tasks that wait for samples."""
        with self._state:
            self._stopping = True
            self._state.notify()

    # --- leases

    @property
    def wants_leases(self) -> int:
        """The number of slices that should be leased besides, so that OPEN_SLICES are read at a time."""
        return max(0, OPEN_SLICES - len(self._unread))

    @property
    def is_read_out(self) -> bool:
        """Whether all leased slices have been read to their ends, so that it is time to run ahead to the next pass."""
        return not self._unread

    def add_lease(self, slice_id: SliceId, left: Uncounted) -> None:
        """Read a slice from now on. It must not be leased already.

        Args:
            left: the windows that have not counted
        """
        with self._state:
            assert slice_id not in self._leased, slice_id
            self._leased.add(slice_id)
            self._unread[slice_id] = self._reader.open(slice_id, left)
            self._state.notify()

    def drop(self, slice_id: SliceId) -> None:
        """Give out no more samples of a slice that is finished, or whose lease is lost. Some may still be in flight."""
        with self._state:
            self._leased.discard(slice_id)
            self._unread.pop(slice_id, None)
            self._ready.pop(slice_id, None)
            self._state.notify()

    def take_ends(self) -> list[WindowRange]:
        """Take the ends of slices that were found since the last call, as ranges to be counted."""
        with self._state:
            ends, self._ends = self._ends, []
        return ends

    # --- samples

    async def next_samples(self, count: int) -> list[Sample]:
        """Wait for `count` samples and take them, for ever if the leased slices have no more. If cancelled, take none.

        Raises:
            UserError: reading has failed, or there is no text to train on
        """
        with self._state:
            self._awaited.append(count)
            self._state.notify()
        try:
            while (samples := self._take(count)) is None:
                await self._arrived.wait_for(lambda: self._error is not None or self._num_ready() >= count)
        finally:
            with self._state:
                self._awaited.remove(count)
        return samples

    def _take(self, count: int) -> list[Sample] | None:
        with self._state:
            if self._num_ready() >= count:
                self._state.notify()
                return [self._take_one() for _ in range(count)]
            if self._error is not None:
                raise self._error
            return None

    def _take_one(self) -> Sample:
        oldest = min(slice_id.pass_number for slice_id in self._ready)
        slice_id = self._rng.choice([known for known in self._ready if known.pass_number == oldest])
        sample = self._ready[slice_id].popleft()
        if not self._ready[slice_id]:
            del self._ready[slice_id]
        return sample

    def _num_ready(self) -> int:
        with self._state:
            return sum(map(len, self._ready.values()))

    # --- in the thread

    def _read(self) -> None:
        try:
            while (chosen := self._choose()) is not None:
                slice_id, windows = chosen
                self._keep(slice_id, windows, next(windows, None))
            with self._state:
                self._unread.clear()  # closes the files that they have open
        except Exception as error:  # `next_samples` raises it in the event loop, which ends the peer
            if not isinstance(error, UserError):
                log.exception("reading_failed")
            self._fail(error)

    def _choose(self) -> tuple[SliceId, SliceWindows] | None:
        """Wait until there is room, and choose the slice to read: of the oldest pass, with the fewest samples ready.

        Returns:
            None after `stop`
        """
        with self._state:
            while not self._stopping:
                if self._unread and self._num_ready() < max([SAMPLES_AHEAD, *self._awaited]):
                    oldest = min(slice_id.pass_number for slice_id in self._unread)
                    candidates = [slice_id for slice_id in self._unread if slice_id.pass_number == oldest]
                    chosen = min(candidates, key=lambda slice_id: len(self._ready.get(slice_id, ())))
                    return chosen, self._unread[chosen]
                self._state.wait()
            return None

    def _keep(self, slice_id: SliceId, windows: SliceWindows, item: tuple[int, npt.NDArray[np.int32]] | None) -> None:
        with self._state:
            if self._unread.get(slice_id) is not windows:
                return  # the slice was dropped meanwhile
            if item is not None:
                sample = Sample(SampleId(*slice_id, item[0]), item[1])
                self._ready.setdefault(slice_id, deque()).append(sample)
                if self._awaited and self._num_ready() >= min(self._awaited):
                    self._notify(self._arrived)
                return
            del self._unread[slice_id]
            assert windows.num_windows is not None
            self._ends.append(WindowRange(*slice_id, windows.num_windows, windows.num_windows, True))
            self._empty_in_a_row = 0 if windows.num_windows else self._empty_in_a_row + 1
            self._notify(self._changed)
        if self._empty_in_a_row >= self._reader.num_slices():
            raise self._reader.no_text()

    def _fail(self, error: Exception) -> None:
        with self._state:
            if isinstance(error, UserError):
                self._error = error
            else:
                self._error = UserError(f"cannot read the data: {first_line(error)}; the log has the details")
                self._error.__cause__ = error
            self._notify(self._arrived)
            self._notify(self._changed)

    def _notify(self, condition: Condition) -> None:
        """Wake up tasks of the event loop. To be called with the state locked: after `stop`, the loop may be gone."""
        if not self._stopping and self._loop is not None:
            self._loop.call_soon_threadsafe(condition.notify)

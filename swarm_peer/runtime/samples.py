"""The samples that a stage-0 peer has at hand: read ahead, in a thread of its own, from the slices that it leases.

Owns that thread and what it has read. It knows nothing of other peers: who leases a slice, and what of it has counted,
is told to it (policy/data_ledger.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from swarm_peer.errors import UserError
from swarm_peer.policy.ranges import SampleId, SliceId, Uncounted, WindowRange
from swarm_peer.runtime.data import OPEN_SLICES, SliceReader, SliceWindows
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.tokenizers import first_line

log = logging.getLogger(__name__)

# Samples read ahead of use: reading and tokenising must not hold up the device.
SAMPLES_AHEAD = 256


class Sample(NamedTuple):
    """A sample and its name; `tokens` are int32 of shape (T+1,)."""

    id: SampleId
    tokens: np.ndarray


class SamplePool:
    """Samples of several slices at a time, mixed; those of one slice come in order.

    Belongs to the event loop's thread, but for the reading. Samples of a pass are read and given out before those of a
    later one, whatever is leased.

    Args:
        reader: used by the pool's thread alone from `start` on
        rng: mixes the slices
        changed: notified when a slice has ended, so that there is an end to tell and room for a lease, and when
            reading has failed
    """

    def __init__(self, reader: SliceReader, rng: random.Random, changed: Signal):
        self._reader = reader
        self._rng = rng
        self._changed = changed
        self._arrived = Signal()
        self._state = threading.Condition()  # guards all that follows; reentrant
        self._leased: set[SliceId] = set()
        self._unread: dict[SliceId, SliceWindows] = {}
        self._ready: dict[SliceId, deque[Sample]] = {}  # none of them empty
        self._awaited: list[int] = []  # for so many samples somebody waits
        self._ends: list[WindowRange] = []
        self._empty_in_a_row = 0
        self._error: UserError | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to read; from the event loop whose tasks will ask for samples."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="samples", daemon=True).start()

    def stop(self) -> None:
        """End the thread, as soon as the read that it is in returns. Whoever waits for samples is to be cancelled."""
        with self._state:
            self._stopping = True
            self._state.notify()

    # --- leases

    @property
    def wants_leases(self) -> int:
        """How many more slices should be leased, so that OPEN_SLICES are read at a time."""
        return max(0, OPEN_SLICES - len(self._unread))

    @property
    def is_read_out(self) -> bool:
        """Whether all leased slices are read to their ends: time to run ahead to the next pass."""
        return not self._unread

    def add_lease(self, slice_id: SliceId, left: Uncounted) -> None:
        """Read what is `left` of a slice from now on; one that is not leased already."""
        with self._state:
            assert slice_id not in self._leased, slice_id
            self._leased.add(slice_id)
            self._unread[slice_id] = self._reader.open(slice_id, left)
            self._state.notify()

    def drop(self, slice_id: SliceId) -> None:
        """Give out no more samples of a slice: its lease is lost, or it is finished. Others may be in flight still."""
        with self._state:
            self._leased.discard(slice_id)
            self._unread.pop(slice_id, None)
            self._ready.pop(slice_id, None)
            self._state.notify()

    def take_ends(self) -> list[WindowRange]:
        """Ends of slices found since the last call, as ranges to be counted."""
        with self._state:
            ends, self._ends = self._ends, []
        return ends

    # --- samples

    async def next_samples(self, count: int) -> list[Sample]:
        """Wait for `count` samples; for ever, if what is leased has no more. When cancelled, it has taken none.

        Raises:
            UserError: reading has failed, or there is nothing to read in the data
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
        except Exception as error:  # handed to the event loop, which ends the peer with it
            if not isinstance(error, UserError):
                log.exception("reading_failed")
            self._fail(error)

    def _choose(self) -> tuple[SliceId, SliceWindows] | None:
        """The slice to read next, when there is room: of the oldest pass the one with the fewest samples at hand."""
        with self._state:
            while not self._stopping:
                if self._unread and self._num_ready() < max([SAMPLES_AHEAD, *self._awaited]):
                    oldest = min(slice_id.pass_number for slice_id in self._unread)
                    candidates = [slice_id for slice_id in self._unread if slice_id.pass_number == oldest]
                    chosen = min(candidates, key=lambda slice_id: len(self._ready.get(slice_id, ())))
                    return chosen, self._unread[chosen]
                self._state.wait()
            self._unread.clear()  # with what they hold open
            return None

    def _keep(self, slice_id: SliceId, windows: SliceWindows, item: tuple[int, np.ndarray] | None) -> None:
        with self._state:
            if self._unread.get(slice_id) is not windows:
                return  # dropped while it was read
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

    def _notify(self, signal: Signal) -> None:
        """Called with the state locked: after `stop` has returned, the loop may be gone."""
        if not self._stopping and self._loop is not None:
            self._loop.call_soon_threadsafe(signal.notify)

"""Prefetch: samples are read ahead of their use, from the slices that a stage-0 peer leases.

This module owns the samples that have been read and not yet used. It knows nothing of other peers: granted_slices.py
tells it which slices to read, and which of their windows have counted.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import NamedTuple

import anyio
import numpy as np
import numpy.typing as npt

from swarm_peer.errors import HubFailed, UserError, first_line
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted, WindowRange
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.slices import OPEN_SLICES, SliceReader, SliceWindows

log = logging.getLogger(__name__)

# Samples to read ahead of their use: the device must not wait for reading and tokenizing. The pool reads when it has
# fewer, so it may keep up to WINDOWS_AT_A_TIME - 1 more.
SAMPLES_AHEAD = 256
# Windows to read by one call of a worker thread. A call costs some 0.15 ms, whatever it reads, so there should be few
# calls. But a batch that lacks one sample waits for a whole call.
WINDOWS_AT_A_TIME = 8
# `datasets` itself tries for some two minutes to read from the hub. After that the pool tries again after such pauses,
# for an hour from a slice's first failure: if its peers left, the run would lose stage 0.
HUB_PAUSE_S = 30.0
HUB_PATIENCE_S = 3600.0
# The pool reads a local file again after the same pauses, for so long.
FILE_PATIENCE_S = 60.0
# Other slices of which one has to be readable before a slice is ended where it cannot be read. Some may be broken, too.
MOST_PROBED = 8
# A peer that waits for samples for so long says so, though no error tells why: a data set that is opened for the first
# time, or a slow disk, may take a while.
LONG_WAIT_S = 60.0
# For so long a peer tells of a slice that it has cut short.
CUT_TOLD_S = 600.0


class Sample(NamedTuple):
    """A sample with its name. `tokens` has shape (T+1,)."""

    id: SampleId
    tokens: npt.NDArray[np.int32]


class SamplePool:
    """Gives out samples of several slices, mixed; the samples of one slice come in their order.

    All samples of a pass are read and given out before those of a later pass, in whatever order slices are leased, but
    for slices that cannot be read at present. All methods belong to the event loop's thread; `run` reads in worker
    threads, one at a time.

    Args:
        reader: `run` reads with it in worker threads, so no other thread should
    """

    def __init__(self, *, context: PeerContext, reader: SliceReader):
        self._threads = context.threads
        self._clock = context.clock
        self._reader = reader
        self._rng = context.random.stream("samples")
        self._changed = context.changed
        self._stock = Condition()  # notified when samples or slices come or go
        self._leased: set[SliceId] = set()
        self._unread: dict[SliceId, SliceWindows] = {}
        self._ready: dict[SliceId, deque[Sample]] = {}  # without slices that have none
        self._awaited: list[int] = []  # the number of samples that each waiting task wants
        self._ends: list[WindowRange] = []
        self._empty_in_a_row = 0
        self._resting: set[SliceId] = set()  # reading these has just failed
        self._failing_since_s: dict[SliceId, float] = {}
        self._unread_why = ""  # the newest reason
        self._waits_since_s: float | None = None  # a task has waited for samples since then
        self._cut: Complaint | None = None  # of the last slice that was cut short
        self._has_read = False
        self._error: UserError | None = None

    async def run(self) -> None:
        """Read samples as there is room for them, until cancelled. After an error, `next_samples` raises it.

        When cancelled, `run` does not wait for the read that is under way: a remote file system may hang. It lets go of
        that slice and of whatever the read returns later, and closes all other slices at once.
        """
        try:
            async with anyio.create_task_group() as pauses:
                while True:
                    await self._stock.wait_for(self._may_read)
                    slice_id = self._choose()
                    try:
                        await self._read_some(slice_id)
                    except UserError as error:
                        self._unread_why = str(error)
                        if await self._may_try_again(slice_id, error):
                            self._resting.add(slice_id)
                            self._changed.notify()
                            pauses.start_soon(self._rest, slice_id, error)
                        else:
                            await self._give_up(slice_id, error)
                    except Exception as error:  # `next_samples` raises it, which ends the peer
                        self._fail(error)
        finally:
            self._unread.clear()  # closes the files that they have open

    # --- leases

    def num_wanted(self, num_readers: int) -> int:
        """The number of slices that should be leased besides. The reader must know already how many there are.

        Args:
            num_readers: peers that read this data, this one among them
        """
        readable = len(self._unread.keys() - self._resting)
        most = self._reader.num_at_a_time(num_readers)
        return max(0, min(most - readable, OPEN_SLICES - len(self._unread)))

    def add_lease(self, slice_id: SliceId, left: Uncounted) -> None:
        """Read a slice from now on. It must not be leased already.

        Args:
            left: the windows that have not counted
        """
        assert slice_id not in self._leased, slice_id
        self._leased.add(slice_id)
        self._failing_since_s.pop(slice_id, None)  # of an earlier lease
        self._unread[slice_id] = self._reader.open(slice_id, left)
        self._stock.notify()

    def drop(self, slice_id: SliceId) -> None:
        """Give out no more samples of a slice that is finished, or whose lease is lost. Some may still be in flight."""
        self._leased.discard(slice_id)
        self._unread.pop(slice_id, None)
        self._ready.pop(slice_id, None)
        self._stock.notify()

    def take_ends(self) -> list[WindowRange]:
        """Take the ends of slices that were found since the last call, as ranges to be counted."""
        ends, self._ends = self._ends, []
        return ends

    # --- samples

    def num_ready(self, slice_id: SliceId) -> int:
        """How many samples of a slice wait to be drawn."""
        return len(self._ready.get(slice_id, ()))

    async def next_samples(self, count: int) -> list[Sample]:
        """Wait for `count` samples and take them, for ever if the leased slices have no more. If cancelled, take none.

        Raises:
            UserError: reading has failed, or there is no text to train on
        """
        self._awaited.append(count)
        self._stock.notify()
        if self._waits_since_s is None:
            self._waits_since_s = self._clock.monotonic_s()
        try:
            await self._stock.wait_for(lambda: self._error is not None or self._num_ready() >= count)
        finally:
            self._awaited.remove(count)
            self._waits_since_s = self._clock.monotonic_s() if self._awaited else None
        if self._error is not None and self._num_ready() < count:
            raise self._error
        samples = [self._take_one() for _ in range(count)]
        self._stock.notify()
        return samples

    def complaint(self, now_s: float) -> Complaint | None:
        """This peer's trouble in reading, if it has any."""
        since_s = self._waits_since_s
        if since_s is not None and self._resting:
            return Complaint(Trouble.NO_DATA, since_s, f"its training data cannot be read: {self._unread_why}")
        if since_s is not None and now_s - since_s >= LONG_WAIT_S:
            why = "reading takes long" if self._unread else "no part of the data is left for it to read"
            return Complaint(Trouble.NO_DATA, since_s, f"it waits for samples: {why}")
        if self._resting:
            first_s = min(self._failing_since_s.get(each, now_s) for each in self._resting)
            words = f"a part of its training data cannot be read: {self._unread_why}"
            return Complaint(Trouble.DATA_UNREAD, first_s, words)
        is_news = self._cut is not None and now_s - self._cut.since_s < CUT_TOLD_S
        return self._cut if is_news else None

    def _take_one(self) -> Sample:
        oldest = min(slice_id.pass_number for slice_id in self._ready)
        slice_id = self._rng.choice([known for known in self._ready if known.pass_number == oldest])
        sample = self._ready[slice_id].popleft()
        if not self._ready[slice_id]:
            del self._ready[slice_id]
        return sample

    def _num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    # --- reading

    async def _may_try_again(self, slice_id: SliceId, error: UserError) -> bool:
        is_of_hub = isinstance(error, HubFailed)
        if not (is_of_hub or self._has_read or await self._can_read_others(slice_id)):  # the settings are wrong
            return False
        now_s = self._clock.monotonic_s()
        since_s = self._failing_since_s.setdefault(slice_id, now_s)
        return now_s - since_s < (HUB_PATIENCE_S if is_of_hub else FILE_PATIENCE_S)

    async def _give_up(self, slice_id: SliceId, error: UserError) -> None:
        """End a slice where it cannot be read any further, if others can be read; else fail.

        Otherwise each peer of stage 0 would lease it in its turn, and leave.
        """
        windows = self._unread.get(slice_id)
        if windows is None:  # the lease is lost
            return
        # A peer that has counted further could read it.
        is_cut = not windows.has_counted_further and await self._can_read_others(slice_id)
        if self._unread.get(slice_id) is not windows:
            return
        if not is_cut:
            self._fail(error)
            return
        num_read = windows.num_read
        try:
            await self._read_some(slice_id)  # the hub may have come back meanwhile
        except Exception as again:
            if not isinstance(again, UserError):
                self._fail(again)
            elif self._unread.get(slice_id) is windows and windows.num_read == num_read:
                log.error("slice_cut_short slice=%s windows=%d reason=%s", tuple(slice_id), num_read, again)
                words = f"the rest of slice {slice_id.slice_index} is left out, after {num_read} samples: {again}"
                self._cut = Complaint(Trouble.DATA_UNREAD, self._clock.monotonic_s(), words)
                self._end(slice_id, num_read)

    async def _can_read_others(self, slice_id: SliceId) -> bool:
        """Whether another slice can be read from its beginning; slices that are open have much in their buffers."""
        others = [index for index in range(self._reader.num_slices()) if index != slice_id.slice_index]
        for index in self._rng.sample(others, min(len(others), MOST_PROBED)):
            windows = self._reader.open(SliceId(slice_id.pass_number, index))
            items, error = await self._threads.run(_next_windows, windows, abandon_on_cancel=True)
            if items or error is None:
                return True
        return False

    async def _rest(self, slice_id: SliceId, error: UserError) -> None:
        """Leave a slice alone for a while; others are read meanwhile."""
        log.warning("reading_waits slice=%d seconds=%.0f reason=%s", slice_id.slice_index, HUB_PAUSE_S, error)
        await anyio.sleep(HUB_PAUSE_S)
        self._resting.discard(slice_id)
        self._stock.notify()

    def _may_read(self) -> bool:
        has_room = self._num_ready() < max([SAMPLES_AHEAD, *self._awaited])
        return bool(self._readable()) and has_room and self._error is None

    def _readable(self) -> list[SliceId]:
        """The slices to read from: of those that do not rest, the ones of the oldest pass."""
        awake = self._unread.keys() - self._resting
        oldest = min((slice_id.pass_number for slice_id in awake), default=0)
        return [known for known in self._unread if known.pass_number == oldest and known in awake]

    async def _read_some(self, slice_id: SliceId) -> None:
        windows = self._unread[slice_id]
        items, error = await self._threads.run(_next_windows, windows, abandon_on_cancel=True)
        if self._unread.get(slice_id) is windows:  # otherwise the slice was dropped meanwhile
            self._keep(slice_id, windows, items)
        if items or error is None:
            self._has_read = True
            self._failing_since_s.pop(slice_id, None)
        if error is not None:
            raise error

    def _choose(self) -> SliceId:
        """The slice to read: the one with the fewest samples ready."""
        return min(self._readable(), key=lambda slice_id: len(self._ready.get(slice_id, ())))

    def _keep(self, slice_id: SliceId, windows: SliceWindows, items: list[tuple[int, npt.NDArray[np.int32]]]) -> None:
        """Keep what was read of a slice, and note its end if that was found."""
        if items:
            samples = (Sample(SampleId(*slice_id, window), tokens) for window, tokens in items)
            self._ready.setdefault(slice_id, deque()).extend(samples)
            self._empty_in_a_row = 0
            self._stock.notify()
        if windows.num_windows is None:
            return
        self._end(slice_id, windows.num_windows)
        self._empty_in_a_row = 0 if windows.num_windows else self._empty_in_a_row + 1
        if self._empty_in_a_row >= self._reader.num_slices():
            self._fail(self._reader.no_text())

    def _end(self, slice_id: SliceId, num_windows: int) -> None:
        del self._unread[slice_id]
        self._ends.append(WindowRange(*slice_id, num_windows, num_windows, True))
        self._changed.notify()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, UserError):
            self._error = error
        else:
            log.exception("reading_failed")
            self._error = UserError(f"cannot read the data: {first_line(error)}; the log has the details")
            self._error.__cause__ = error
        self._stock.notify()
        self._changed.notify()


def _next_windows(windows: SliceWindows) -> tuple[list[tuple[int, npt.NDArray[np.int32]]], Exception | None]:
    """Read the next windows of a slice, until WINDOWS_AT_A_TIME are read, the slice ends or there is an error."""
    items = []
    try:
        for item in itertools.islice(windows, WINDOWS_AT_A_TIME):
            items.append(item)
    except Exception as error:  # the windows before it are good
        return items, error
    return items, None

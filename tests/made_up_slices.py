"""Slices of data that are made up, for tests of those who read them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from swarm_peer.errors import UserError
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted
from swarm_peer.runtime.data.slices import ALL_WINDOWS, OPEN_SLICES, SliceWindows


class FakeReader:
    """Slices of windows whose tokens say which sample it is.

    Attributes:
        being_read: slices that are begun and not closed
        disk_error: that slices fail with which are begun from now on
    """

    at_a_time = OPEN_SLICES

    def __init__(self, *lengths: int):
        self.lengths = lengths
        self.read: list[SampleId] = []
        self.being_read: list[SliceId] = []
        self.errors: dict[SampleId, Exception] = {}
        self.disk_error: Exception | None = None

    def num_slices(self) -> int:
        return len(self.lengths)

    def num_at_a_time(self, num_readers: int) -> int:
        return self.at_a_time

    def no_text(self) -> UserError:
        return UserError("no text")

    def open(self, slice_id: SliceId, left: Uncounted = ALL_WINDOWS) -> SliceWindows:
        return SliceWindows(partial(self.windows, slice_id), left)

    def windows(self, slice_id: SliceId) -> Iterator[np.ndarray]:
        if self.disk_error is not None:
            raise self.disk_error
        self.being_read.append(slice_id)
        try:
            for window in range(self.lengths[slice_id.slice_index]):
                sample = SampleId(*slice_id, window)
                if sample in self.errors:
                    raise self.errors[sample]
                self.read.append(sample)
                yield np.array(sample, dtype=np.int32)
        finally:
            self.being_read.remove(slice_id)

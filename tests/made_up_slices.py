"""Slices of data that are made up, for tests of those who read them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from swarm_peer.errors import UserError
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted
from swarm_peer.runtime.data.slices import OPEN_SLICES, SliceWindows


class FakeReader:
    """Slices of windows whose tokens say which sample it is. `being_read` are those that are begun and not closed."""

    at_a_time = OPEN_SLICES

    def __init__(self, *lengths: int):
        self.lengths = lengths
        self.read: list[SampleId] = []
        self.being_read: list[SliceId] = []
        self.errors: dict[SampleId, Exception] = {}

    def num_slices(self) -> int:
        return len(self.lengths)

    def num_at_a_time(self, num_readers: int) -> int:
        return self.at_a_time

    def no_text(self) -> UserError:
        return UserError("no text")

    def open(self, slice_id: SliceId, left: Uncounted) -> SliceWindows:
        return SliceWindows(partial(self.windows, slice_id), left)

    def windows(self, slice_id: SliceId) -> Iterator[np.ndarray]:
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

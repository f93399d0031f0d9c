"""Slices of data that are made up, for tests of those who read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from swarm_peer.errors import UserError
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted
from swarm_peer.runtime.data.slices import SliceWindows

DEADLINE_S = 50


class FakeReader:
    """Slices of windows whose tokens say which sample it is; reading can be held up."""

    def __init__(self, *lengths: int):
        self.lengths = lengths
        self.read: list[SampleId] = []
        self.held_up: dict[SampleId, tuple[threading.Event, threading.Event]] = {}  # is there; may go on
        self.errors: dict[SampleId, Exception] = {}

    def num_slices(self) -> int:
        return len(self.lengths)

    def no_text(self) -> UserError:
        return UserError("no text")

    def open(self, slice_id: SliceId, left: Uncounted) -> SliceWindows:
        return SliceWindows(self.windows(slice_id), left)

    def windows(self, slice_id: SliceId) -> Iterator[np.ndarray]:
        for window in range(self.lengths[slice_id.slice_index]):
            sample = SampleId(*slice_id, window)
            if sample in self.held_up:
                arrived, may_go_on = self.held_up[sample]
                arrived.set()
                assert may_go_on.wait(DEADLINE_S)
            if sample in self.errors:
                raise self.errors[sample]
            self.read.append(sample)
            yield np.array(sample, dtype=np.int32)

    def hold_up(self, sample: SampleId) -> tuple[threading.Event, threading.Event]:
        self.held_up[sample] = threading.Event(), threading.Event()
        return self.held_up[sample]

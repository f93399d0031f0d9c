"""Samples by name, and sets of them as ranges.

A sample is a window of T+1 tokens of a slice of the data in one pass over it (runtime/data.py), the same sample at
every peer. A peer takes the windows of a slice in order, so what has counted of a slice is a few ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Ranges in one progress count. A peer counts windows of some ten slices in a step, of more where slices are short.
MAX_RANGES = 1024


class SliceId(NamedTuple):
    pass_number: int
    slice_index: int


class SampleId(NamedTuple):
    pass_number: int
    slice_index: int
    window: int

    @property
    def slice_id(self) -> SliceId:
        return SliceId(self.pass_number, self.slice_index)


class WindowRange(NamedTuple):
    """Windows `start` up to, not including, `end` of a slice have counted; with `is_last` the slice ends there.

    An empty range says nothing but that, if `is_last`, the slice ends at `end`.
    """

    pass_number: int
    slice_index: int
    start: int
    end: int
    is_last: bool = False

    @property
    def slice_id(self) -> SliceId:
        return SliceId(self.pass_number, self.slice_index)


class Uncounted(NamedTuple):
    """What is left of a slice: the windows of `gaps` [start, end), and all from `next_window` on."""

    gaps: tuple[tuple[int, int], ...]
    next_window: int


def ranges_of(samples: Iterable[SampleId]) -> tuple[WindowRange, ...]:
    """The fewest ranges that are these samples."""
    return merge_ranges(WindowRange(*sample, sample.window + 1) for sample in samples)


def merge_ranges(ranges: Iterable[WindowRange]) -> tuple[WindowRange, ...]:
    """The same facts in the fewest ranges, sorted by slice. Of several ends of one slice the smallest is kept."""
    slices: dict[SliceId, CountedWindows] = {}
    for item in ranges:
        slices.setdefault(item.slice_id, CountedWindows()).add(item.start, item.end, item.is_last)
    return tuple(fact for slice_id, state in sorted(slices.items()) for fact in state.facts(slice_id))


@dataclass(slots=True)
class CountedWindows:
    """What is known of one slice.

    Attributes:
        spans: windows that have counted, as [start, end); ascending, with a gap between any two
        num_windows: where the slice ends, if anybody has been there
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    num_windows: int | None = None

    def add(self, start: int, end: int, is_last: bool) -> int:
        """Returns how many of the windows were there already."""
        if is_last:
            self.num_windows = end if self.num_windows is None else min(self.num_windows, end)
        if start == end:
            return 0
        # All spans that overlap or touch the new one become one with it.
        first = bisect_left(self.spans, start, key=lambda span: span[1])
        behind = bisect_right(self.spans, end, key=lambda span: span[0])
        touched = self.spans[first:behind]
        known = sum(max(0, min(end, e) - max(start, s)) for s, e in touched)
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
        self.spans[first:behind] = [(start, end)]
        return known

    def is_finished(self) -> bool:
        """Whether all windows of the slice have counted."""
        if self.num_windows is None:
            return False
        return self.num_windows == 0 or (
            bool(self.spans) and self.spans[0][0] == 0 and self.spans[0][1] >= self.num_windows
        )

    def uncounted(self) -> Uncounted:
        ends = [0, *(end for _, end in self.spans)]
        gaps = zip(ends, (start for start, _ in self.spans), strict=False)
        return Uncounted(tuple(gap for gap in gaps if gap[0] < gap[1]), ends[-1])

    def facts(self, slice_id: SliceId) -> Iterator[WindowRange]:
        for start, end in self.spans:
            yield WindowRange(*slice_id, start, end, end == self.num_windows)
        if self.num_windows is not None and all(end != self.num_windows for _, end in self.spans):
            yield WindowRange(*slice_id, self.num_windows, self.num_windows, True)

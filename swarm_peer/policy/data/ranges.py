"""Samples by name, and sets of them as ranges.

A sample is a window of T+1 tokens of one slice of the data in one pass over it (runtime/data/slices.py). Its name means
the same tokens at every peer. A peer reads the windows of a slice in order, so the counted ones are a few ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Ranges in one count, or in one answer about a period. In a round a peer counts windows of some ten slices, or of more
# if slices are short.
MAX_RANGES = 1024


class SliceId(NamedTuple):
    """A slice of the data in one pass over it."""

    pass_number: int
    slice_index: int


class SampleId(NamedTuple):
    """One window of a slice."""

    pass_number: int
    slice_index: int
    window: int

    @property
    def slice_id(self) -> SliceId:
        """The slice that the window belongs to."""
        return SliceId(self.pass_number, self.slice_index)


class WindowRange(NamedTuple):
    """The fact that windows [start, end) of a slice have counted and, with `is_last`, that the slice ends at `end`.

    An empty range with `is_last` says only where the slice ends.
    """

    pass_number: int
    slice_index: int
    start: int
    end: int
    is_last: bool = False

    @property
    def slice_id(self) -> SliceId:
        """The slice that the windows belong to."""
        return SliceId(self.pass_number, self.slice_index)


class Uncounted(NamedTuple):
    """The windows of a slice that have not counted: those in `gaps` [start, end), and all from `next_window` on."""

    gaps: tuple[tuple[int, int], ...]
    next_window: int


def ranges_of(samples: Iterable[SampleId]) -> tuple[WindowRange, ...]:
    """The smallest number of ranges that hold exactly these samples."""
    return merge_ranges(WindowRange(*sample, sample.window + 1) for sample in samples)


def merge_ranges(ranges: Iterable[WindowRange]) -> tuple[WindowRange, ...]:
    """The same facts in the fewest ranges, sorted by slice. If they give a slice several ends, the smallest is kept."""
    slices: dict[SliceId, CountedWindows] = {}
    for item in ranges:
        slices.setdefault(item.slice_id, CountedWindows()).add(item.start, item.end, item.is_last)
    return tuple(fact for slice_id, state in sorted(slices.items()) for fact in state.facts(slice_id))


def num_windows(ranges: Iterable[WindowRange]) -> int:
    """The number of samples in ranges; one that is in two of them counts twice."""
    return sum(item.end - item.start for item in ranges)


@dataclass(slots=True)
class CountedWindows:
    """The counted windows of one slice.

    Attributes:
        spans: the counted windows as [start, end), ascending, with a gap between any two spans
        num_windows: the number of windows in the slice; None while no peer has reached its end
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    num_windows: int | None = None

    def add(self, start: int, end: int, is_last: bool) -> int:
        """Add windows [start, end), and return how many of them had counted before."""
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
        """The windows that have not counted; the end of the slice is left out of account."""
        ends = [0, *(end for _, end in self.spans)]
        gaps = zip(ends, (start for start, _ in self.spans), strict=False)
        return Uncounted(tuple(gap for gap in gaps if gap[0] < gap[1]), ends[-1])

    def facts(self, slice_id: SliceId) -> Iterator[WindowRange]:
        """All that is known of this slice, as ranges in ascending order."""
        for start, end in self.spans:
            yield WindowRange(*slice_id, start, end, end == self.num_windows)
        if self.num_windows is not None and all(end != self.num_windows for _, end in self.spans):
            yield WindowRange(*slice_id, self.num_windows, self.num_windows, True)

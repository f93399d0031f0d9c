"""Ranges of samples, merged and counted."""

import itertools

from any_ledgers import any_range, ledger_of
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.data.ranges import CountedWindows, SampleId, SliceId, WindowRange, merge_ranges, ranges_of


@given(st.lists(any_range, max_size=20))
def test_merged_ranges_are_few_and_say_the_same(ranges: list[WindowRange]) -> None:
    merged = merge_ranges(ranges)
    assert merge_ranges(merged) == merged
    assert ledger_of(list(merged)).to_tuple() == ledger_of(ranges).to_tuple()
    assert [item.slice_id for item in merged] == sorted(item.slice_id for item in merged)
    spans = [item for item in merged if item.start < item.end]
    for this, following in itertools.pairwise(spans):
        assert this.slice_id != following.slice_id or this.end < following.start, "adjacent ranges are one"
    ends = [item.slice_id for item in merged if item.is_last]
    assert len(ends) == len(set(ends))


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_windows_are_counted_as_in_a_set(first: set[int], second: set[int]) -> None:
    windows = CountedWindows()
    for window in first:
        assert windows.add(window, window + 1, False) == 0
    known = sum(windows.add(item.start, item.end, False) for item in ranges_of(SampleId(0, 0, w) for w in second))
    assert known == len(first & second)
    assert {w for start, end in windows.spans for w in range(start, end)} == first | second
    gaps, next_window = windows.uncounted()
    left = {w for start, end in gaps for w in range(start, end)}
    assert left == set(range(max(first | second, default=-1) + 1)) - (first | second)
    assert next_window == max(first | second, default=-1) + 1


def test_ranges_of_samples() -> None:
    samples = [SampleId(1, 2, 5), SampleId(0, 7, 1), SampleId(1, 2, 4), SampleId(1, 3, 6)]
    assert ranges_of(samples) == (WindowRange(0, 7, 1, 2), WindowRange(1, 2, 4, 6), WindowRange(1, 3, 6, 7))
    assert samples[0].slice_id == SliceId(1, 2)

"""The ledger of a run's data: which samples have counted. Pure; it follows from the entries of stage 0's log.

A pass over the data consists of slices, the same numbered list for every peer; a sample is a window of a slice
(ranges.py). Facts say that windows of a slice have counted, or where a slice ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator

from swarm_peer.policy.data.ranges import CountedWindows, SliceId, Uncounted, WindowRange, merge_ranges, num_windows

# A slice holds at least some megabytes of text, so a million slices are terabytes.
MAX_SLICES = 1 << 20
MAX_WINDOWS = 1 << 40
# Passes that may begin before the oldest one is finished. With a data set of one window, a global batch takes one pass
# for each of its samples.
MAX_PASSES_AHEAD = 1 << 12
MAX_PASSES = 1 << 40
# Facts in one ledger beyond two for each slice of a pass: gaps, and later passes. A ledger with this many takes 0.1 s
# to encode.
MAX_SPARE_FACTS = 1 << 16


class Ledger:
    """The samples that have counted.

    Attributes:
        num_slices: slices in a pass
        current_pass: the oldest pass with an unfinished slice; all samples of earlier passes have counted
    """

    def __init__(self, num_slices: int, current_pass: int = 0):
        if not 1 <= num_slices <= MAX_SLICES:
            raise ValueError(f"a pass of {num_slices} slices: 1 to {MAX_SLICES} go")
        self.num_slices = num_slices
        self.current_pass = current_pass
        # By pass and slice. Slices are begun, or finished; those of passes that are over are gone.
        self._begun: dict[int, dict[int, CountedWindows]] = {}
        self._finished: dict[int, dict[int, int]] = {}
        self._order: tuple[int, list[int]] = (-1, [])

    def admits(self, item: WindowRange) -> bool:
        """Whether an honest peer can have counted this: the slice exists, and its pass is not too far ahead."""
        return (
            0 <= item.pass_number < self.current_pass + MAX_PASSES_AHEAD
            and 0 <= item.slice_index < self.num_slices
            and 0 <= item.start <= item.end <= MAX_WINDOWS
        )

    def add(self, ranges: Iterable[WindowRange]) -> int:
        """Note samples that have counted, and ends of slices. Ranges that are not admitted are skipped.

        Returns:
            the number of duplicates: samples that had counted before
        """
        duplicates = 0
        for item in ranges:
            pass_number, index, start, end, is_last = item
            if not self.admits(item) or (start == end and not is_last):
                continue
            if self.is_finished(item.slice_id):
                duplicates += end - start
                continue
            begun = self._begun.setdefault(pass_number, {}).setdefault(index, CountedWindows())
            duplicates += begun.add(start, end, is_last)
            if begun.num_windows is not None and begun.is_finished():
                del self._begun[pass_number][index]
                self._finished.setdefault(pass_number, {})[index] = begun.num_windows
                self._advance()
        return duplicates

    def num_counted(self, ranges: Iterable[WindowRange]) -> int:
        """How many samples of these ranges have counted before."""
        return sum(self._num_counted(item) for item in merge_ranges(ranges))

    def repeats(self, samples: Collection[WindowRange]) -> bool:
        """Whether some of these samples are there twice, or have counted before."""
        return num_windows(merge_ranges(samples)) < num_windows(samples) or self.num_counted(samples) > 0

    def _num_counted(self, item: WindowRange) -> int:
        if self.is_finished(item.slice_id):
            return item.end - item.start
        known = self._begun.get(item.pass_number, {}).get(item.slice_index, CountedWindows())
        return sum(max(0, min(item.end, end) - max(item.start, start)) for start, end in known.spans)

    def is_finished(self, slice_id: SliceId) -> bool:
        """Whether all samples of the slice have counted."""
        pass_number, index = slice_id
        return pass_number < self.current_pass or index in self._finished.get(pass_number, {})

    def uncounted(self, slice_id: SliceId) -> Uncounted:
        """The windows of a slice that are left to read; none if it is finished."""
        if self.is_finished(slice_id):
            return Uncounted((), MAX_WINDOWS)
        return self._begun.get(slice_id.pass_number, {}).get(slice_id.slice_index, CountedWindows()).uncounted()

    def unfinished(self, pass_number: int) -> Iterator[SliceId]:
        """The slices of a pass that are left to read: first those that were begun, then the others as drawn by lot."""
        begun, finished = self._begun.get(pass_number, {}), self._finished.get(pass_number, {})
        if pass_number < self.current_pass:
            return
        yield from (SliceId(pass_number, index) for index in sorted(begun))
        if self._order[0] != pass_number:  # a million slices take a second
            self._order = pass_number, list(range(self.num_slices))
            random.Random(pass_number).shuffle(self._order[1])
        yield from (SliceId(pass_number, i) for i in self._order[1] if i not in begun and i not in finished)

    def _advance(self) -> None:
        while len(self._finished.get(self.current_pass, {})) == self.num_slices:
            del self._finished[self.current_pass]
            self.current_pass += 1

    # --- as plain values

    def facts(self) -> Iterator[WindowRange]:
        """All facts about the passes that are not over."""
        for pass_number in sorted(self._begun.keys() | self._finished.keys()):
            begun, finished = self._begun.get(pass_number, {}), self._finished.get(pass_number, {})
            for index in sorted(begun.keys() | finished.keys()):
                if index in finished:
                    yield WindowRange(pass_number, index, 0, finished[index], True)
                else:
                    yield from begun[index].facts(SliceId(pass_number, index))

    def to_tuple(self) -> tuple[object, ...]:
        """The tuple (number of slices, current pass, facts), of ints and bools, sorted."""
        return (self.num_slices, self.current_pass, tuple(self.facts()))

    @classmethod
    def from_tuple(cls, value: object) -> Ledger:
        """The ledger that `to_tuple` turned into this value; lists may stand for tuples. Takes linear time.

        Raises:
            ValueError: it is no such value, its facts are not in order, or there are more facts than a run can have
        """
        match value:
            case (int(num_slices), int(current_pass), (*facts,)) if 0 <= current_pass < MAX_PASSES:
                ledger = cls(num_slices, current_pass)
            case _:
                raise ValueError("a ledger is (slices, current pass, facts)")
        most = 2 * num_slices + MAX_SPARE_FACTS
        if len(facts) > most:
            raise ValueError(f"{len(facts)} facts: at most {most} go with {num_slices} slices")
        checked = [_checked(item, ledger) for item in facts]
        for this, following in itertools.pairwise(checked):
            if not _is_in_order(this, following):
                raise ValueError(
                    f"{tuple(following)} does not come after {tuple(this)}: facts are ascending and merged"
                )
        ledger.add(checked)
        return ledger

    def copy(self) -> Ledger:
        """Another ledger of the same facts."""
        other = Ledger(self.num_slices, self.current_pass)
        other.add(self.facts())
        return other


def _checked(item: object, ledger: Ledger) -> WindowRange:
    match item:
        case (int(pass_number), int(index), int(start), int(end), bool(is_last)):
            found = WindowRange(pass_number, index, start, end, is_last)
            if ledger.admits(found) and pass_number >= ledger.current_pass:
                return found
    raise ValueError(
        f"{item!r:.80} is no range of windows of {ledger.num_slices} slices from pass {ledger.current_pass} on"
    )


def _is_in_order(this: WindowRange, following: WindowRange) -> bool:
    """Whether two facts are in order: by slice, then ranges with gaps between them, then an end on its own."""
    if this.slice_id != following.slice_id:
        return this.slice_id < following.slice_id
    is_end = following.start == following.end
    return this.start < this.end and (is_end or this.end < following.start)

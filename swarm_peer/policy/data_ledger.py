"""Which samples have counted: within one pass over the data none counts twice, whoever comes, goes and restarts.

A pass over the data consists of slices, the same numbered list for every peer, and a sample is a window of a slice
(ranges.py).

Facts and leases. That windows have counted and that a slice ends at some window are facts: they only accumulate, so
they may be added in any order and as often as one likes. Facts travel as `WindowRange`s, the end of a slice too
(`is_last`); they are what is kept in checkpoints. Who may read a slice is a lease, which comes and goes. Another peer's
lease is hearsay here; the owner alone knows for sure, and refuses it to everybody else.

How a peer leases slices (two live peers never hold the same one, as long as each knows of the other):

1. `wanted` names slices. It asks `arbiter(live_peers)` first, and keeps to those that are granted: of peers that want
   the same one at the same time, one gets it. If it is the arbiter itself, there is nobody to ask.
2. It has its own ledger `grant` them to itself, and asks all other live stage-mates at once. One refusal, or one that
   does not answer, and the slice is given up: `release` here, and at all who were asked. That holds for one that has
   died meanwhile, too: it may have told somebody who had answered before what nobody else knew.
3. With each answer comes what the stage-mate knows of the slice: `counted`, to be added, and the progress counts of
   the step under way that it has heard, to be merged as always; those of a peer that is gone, too. So what that one had
   told to a single survivor is respected. The answer also holds the stage-mate's `current_pass`, for `begin_pass`.
4. It reads `uncounted(slice, pending)`: the gaps, and all from the next window on. `pending` are the ranges in the
   counts that are not added yet, its own among them. It counts windows only while it holds the lease.

Who holds a slice finds its end itself, and others cannot end many without reading them (`credible`). Whoever has not
believed an end finds the slice unfinished, asks for it, and is told, or reads it and finds the end itself.

A refusal names the owner, for `note_lease`: the slice is not wanted again while that one lives. A peer that has
restarted knows of no leases, and is granted what others believe it to have.

News can be missed, and hearsay would then keep a peer from a slice for ever. So whoever asks a stage-mate also names
what it believes it to lease, `leases(stage_mate)`, and the answer holds the `corrections`, to be `release`d: what it
neither leases nor is asking for. Counts that arrive when their step is over are added then.

What remains: a count that is on its way when its author dies may arrive after another peer has begun to read the slice,
and a peer whom all believe dead may still be counting. `add` tells how many samples counted twice.

Everything here is pure. One thread at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from swarm_peer.policy.ranges import CountedWindows, SliceId, Uncounted, WindowRange

# A slice is some megabytes of text at least, so a million of them are terabytes.
MAX_SLICES = 1 << 20
MAX_WINDOWS = 1 << 40
# Passes begun before the oldest one is finished: of a data set of one window, as many as a global batch has samples.
MAX_PASSES_AHEAD = 1 << 12
MAX_PASSES = 1 << 40
# Empty slices in one count that are believed of who is not known to hold them: whoever has joined of late has not heard
# what its author had leased before.
MAX_UNHELD_EMPTY = 32
# Facts of one ledger, on top of two for each slice of a pass: gaps, and passes ahead. These take 0.1 s to encode.
MAX_SPARE_FACTS = 1 << 16
# Orders of slices kept: one peer's, of the passes that are under way at the same time.
MAX_ORDERS = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """Whether a peer may read a slice, and why (not).

    Attributes:
        owner: who leases it now, if anybody
    """

    granted: bool
    reason: str
    owner: str | None = None


def arbiter(peers: Collection[str]) -> str:
    """Who is asked first for a lease: any choice that all make alike."""
    return min(peers)


@dataclass(slots=True)
class _Pass:
    finished: dict[int, int] = field(default_factory=dict)  # slice -> its number of windows
    begun: dict[int, CountedWindows] = field(default_factory=dict)  # counted from, or of known length; not finished
    owners: dict[int, str] = field(default_factory=dict)  # of slices that are not finished


class DataLedger:
    """The ledger of one run's data.

    Attributes:
        num_slices: slices of a pass
        current_pass: the oldest pass of which not all slices are finished; all before it have counted completely
    """

    def __init__(self, num_slices: int):
        if not 1 <= num_slices <= MAX_SLICES:
            raise ValueError(f"a pass of {num_slices} slices: 1 to {MAX_SLICES} go")
        self.num_slices = num_slices
        self.current_pass = 0
        self._passes: dict[int, _Pass] = {}
        self._orders: dict[tuple[int, str], list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataLedger) and self.to_tuple() == other.to_tuple()

    __hash__ = None  # type: ignore[assignment]  # it changes

    @property
    def num_finished(self) -> int:
        """Slices of the current pass that have counted completely."""
        known = self._passes.get(self.current_pass)
        return len(known.finished) if known else 0

    # --- facts

    def admits(self, item: WindowRange) -> bool:
        """Whether an honest peer can have counted this: a slice that exists, of a pass not too far ahead."""
        return (
            0 <= item.pass_number < self.current_pass + MAX_PASSES_AHEAD
            and 0 <= item.slice_index < self.num_slices
            and 0 <= item.start <= item.end <= MAX_WINDOWS
        )

    def add(self, ranges: Iterable[WindowRange]) -> int:
        """Note samples that have counted, and ends of slices. What is not admitted is passed over.

        The growing count of a step under way is not to be added again and again, since the returned number would be
        no measure of anything: add each peer's count of a step when the step is over.

        Returns:
            how many of the samples had counted before: duplicates
        """
        duplicates = 0
        for item in ranges:
            if not self.admits(item) or (item.start == item.end and not item.is_last):
                continue
            if item.pass_number < self.current_pass:
                duplicates += item.end - item.start
                continue
            state = self._passes.setdefault(item.pass_number, _Pass())
            num_windows = state.finished.get(item.slice_index)
            if num_windows is None:
                duplicates += state.begun.setdefault(item.slice_index, CountedWindows()).add(*item[2:])
                self._settle(item.pass_number, item.slice_index)
            else:
                duplicates += item.end - item.start
                if item.is_last:
                    state.finished[item.slice_index] = min(num_windows, item.end)
        return duplicates

    def credible(
        self,
        author: str,
        ranges: Iterable[WindowRange],
        held: Collection[SliceId],
        max_empty: int = MAX_UNHELD_EMPTY,
    ) -> Iterator[WindowRange]:
        """A stage-mate's count without ends that it cannot know: what follows a false one is never read.

        Args:
            held: slices that this peer reads: nobody else knows their ends
            max_empty: slices without windows to believe in of those that the author is not known to lease; where
                there are windows, an end is worth nothing before they have counted, too
        """
        for item in ranges:
            if item.is_last and self.owner(item.slice_id) != author:
                if item.slice_id in held or (item.end == 0 and max_empty <= 0):
                    item = item._replace(is_last=False)
                elif item.end == 0:
                    max_empty -= 1
            yield item

    def finish(self, slice_id: SliceId, num_windows: int) -> None:
        """Note where a slice ends. It is finished when all windows before that have counted."""
        self.add([WindowRange(*slice_id, num_windows, num_windows, True)])

    def begin_pass(self, pass_number: int) -> None:
        """Note that all passes before `pass_number` have counted completely. Of an older one it changes nothing."""
        if pass_number > self.current_pass:
            self.current_pass = pass_number
            self._advance()

    def is_finished(self, slice_id: SliceId) -> bool:
        state = self._passes.get(slice_id.pass_number)
        return slice_id.pass_number < self.current_pass or bool(state and slice_id.slice_index in state.finished)

    def counted(self, slice_id: SliceId) -> tuple[WindowRange, ...]:
        """All that is known of a slice of a pass that is not over; what is sent with the answer to a lease."""
        state = self._passes.get(slice_id.pass_number, _Pass())
        num_windows = state.finished.get(slice_id.slice_index)
        if num_windows is not None:
            return (WindowRange(*slice_id, 0, num_windows, True),)
        return tuple(state.begun.get(slice_id.slice_index, CountedWindows()).facts(slice_id))

    def uncounted(self, slice_id: SliceId, pending: Iterable[WindowRange] = ()) -> Uncounted:
        """What is left to read of a slice; of one that is finished, nothing.

        Args:
            pending: ranges that have counted and are not added yet: those of the step under way; of any slices
        """
        if self.is_finished(slice_id):
            return Uncounted((), MAX_WINDOWS)
        left = CountedWindows()
        for item in (*self.counted(slice_id), *pending):
            if item.slice_id == slice_id:
                left.add(*item[2:])
        return left.uncounted()

    # --- leases

    def wanted(self, peer: str, count: int, live_peers: Collection[str], run_ahead: bool = True) -> list[SliceId]:
        """Up to `count` slices that `peer` might lease now, best first.

        First come slices that a peer has begun that is gone, then those that nobody has begun. Each peer has an order
        of its own, so that peers seldom want the same one.

        Args:
            run_ahead: whether to go to a later pass than `peer` is in, if no slice is free before; not as long as it
                has something to read. There is always a slice to run ahead to.
        """
        newest = max([self.current_pass, *(slice_id.pass_number for slice_id in self.leases(peer))])
        found: list[SliceId] = []
        for pass_number in range(self.current_pass, self.current_pass + MAX_PASSES_AHEAD):
            if len(found) >= count or (pass_number > newest and (found or not run_ahead)):
                break
            found += itertools.islice(self._free(pass_number, peer, live_peers), count - len(found))
        return found

    def _free(self, pass_number: int, peer: str, live_peers: Collection[str]) -> Iterator[SliceId]:
        state = self._passes.get(pass_number, _Pass())
        taken = {index for index, owner in state.owners.items() if owner == peer or owner in live_peers}
        begun = [SliceId(pass_number, index) for index in state.begun if index not in taken]
        yield from sorted(begun, key=lambda slice_id: _rank(slice_id, peer))
        for slice_index in self._order(pass_number, peer):
            if not (slice_index in state.finished or slice_index in state.begun or slice_index in taken):
                yield SliceId(pass_number, slice_index)

    def grant(self, slice_id: SliceId, peer: str, live_peers: Collection[str]) -> Grant:
        """Lease a slice to a peer, unless it is finished or another live peer leases it."""
        ahead = slice_id.pass_number - self.current_pass
        if not (ahead < MAX_PASSES_AHEAD and 0 <= slice_id.slice_index < self.num_slices):
            return Grant(False, f"no slice {slice_id.slice_index} of pass {slice_id.pass_number} in this run")
        if self.is_finished(slice_id):
            return Grant(False, "finished")
        owner = self.owner(slice_id)
        if owner is not None and owner != peer and owner in live_peers:
            return Grant(False, "leased to another live peer", owner)
        self.note_lease(slice_id, peer)
        if owner is None:
            return Grant(True, "free", peer)
        return Grant(True, "leased to it before" if owner == peer else "its owner is gone", peer)

    def note_lease(self, slice_id: SliceId, owner: str) -> None:
        """Take somebody's word for who leases a slice. Of what is finished or cannot be, nothing is noted."""
        if self.admits(WindowRange(*slice_id, 0, 0)) and not self.is_finished(slice_id):
            self._passes.setdefault(slice_id.pass_number, _Pass()).owners[slice_id.slice_index] = owner

    def owner(self, slice_id: SliceId) -> str | None:
        return self._passes.get(slice_id.pass_number, _Pass()).owners.get(slice_id.slice_index)

    def leases(self, peer: str) -> list[SliceId]:
        """Slices that `peer` leases, as far as is known here; ascending."""
        passes = sorted(self._passes.items())
        return [
            SliceId(n, index) for n, state in passes for index, owner in sorted(state.owners.items()) if owner == peer
        ]

    def release(self, peer: str, slices: Iterable[SliceId] | None = None) -> None:
        """End the leases of `peer`: of these slices, or of all (it is gone). What has counted stays counted."""
        for slice_id in self.leases(peer) if slices is None else slices:
            if self.owner(slice_id) == peer:
                del self._passes[slice_id.pass_number].owners[slice_id.slice_index]

    def corrections(self, me: str, believed: Iterable[SliceId]) -> list[SliceId]:
        """For a stage-mate that believes this peer to lease these slices: those that it does not.

        A slice that this peer is asking for just now is not to be named: others may have granted it already.
        """
        return [slice_id for slice_id in believed if self.owner(slice_id) != me]

    # --- as plain values

    def facts(self) -> Iterator[WindowRange]:
        """All that has counted of the passes that are not over; to add to another ledger that has begun this pass."""
        for pass_number, state in sorted(self._passes.items()):
            for slice_index in sorted(state.finished.keys() | state.begun.keys()):
                yield from self.counted(SliceId(pass_number, slice_index))

    def to_tuple(self) -> tuple[object, ...]:
        """(slices, current pass, facts): ints and bools; sorted. Leases are not in it."""
        return (self.num_slices, self.current_pass, tuple(self.facts()))

    @classmethod
    def from_tuple(cls, value: object) -> DataLedger:
        """The ledger that `to_tuple` made a value of; sequences may be lists or tuples. Takes linear time.

        Raises:
            ValueError: it is no such value, its facts are not in order, or there are more than a run has
        """
        match value:
            case (int(num_slices), int(current_pass), (*facts,)) if 0 <= current_pass < MAX_PASSES:
                ledger = cls(num_slices)
                ledger.begin_pass(current_pass)
            case _:
                raise ValueError("a ledger is (slices, current pass, facts)")
        most = 2 * num_slices + MAX_SPARE_FACTS
        if len(facts) > most:
            raise ValueError(f"{len(facts)} facts: at most {most} go with {num_slices} slices")
        checked = [_checked(item, num_slices, current_pass) for item in facts]
        for this, following in itertools.pairwise(checked):
            if not _is_in_order(this, following):
                raise ValueError(
                    f"{tuple(following)} does not come after {tuple(this)}: facts are ascending and merged"
                )
        ledger.add(checked)
        return ledger

    # --- within

    def _settle(self, pass_number: int, slice_index: int) -> None:
        """After news of a slice: is it finished, is its pass?"""
        state = self._passes[pass_number]
        known = state.begun[slice_index]
        if known.num_windows is None or not known.is_finished():
            return
        del state.begun[slice_index]
        state.owners.pop(slice_index, None)
        state.finished[slice_index] = known.num_windows
        self._advance()

    def _advance(self) -> None:
        while len(self._passes.get(self.current_pass, _Pass()).finished) == self.num_slices:
            self.current_pass += 1
        for old in [number for number in self._passes if number < self.current_pass]:
            del self._passes[old]

    def _order(self, pass_number: int, peer: str) -> list[int]:
        """All slices in this peer's order. Made once in a pass: it takes a second for a million slices."""
        key = (pass_number, peer)
        if key not in self._orders:
            if len(self._orders) >= MAX_ORDERS:
                self._orders.clear()
            self._orders[key] = list(range(self.num_slices))
            random.Random(f"{pass_number}/{peer}").shuffle(self._orders[key])
        return self._orders[key]


def _rank(slice_id: SliceId, peer: str) -> bytes:
    return hashlib.blake2b(f"{slice_id.pass_number}/{slice_id.slice_index}/{peer}".encode(), digest_size=8).digest()


def _checked(item: object, num_slices: int, current_pass: int) -> WindowRange:
    match item:
        case (int(pass_number), int(slice_index), int(start), int(end), bool(is_last)) if (
            0 <= pass_number - current_pass < MAX_PASSES_AHEAD
            and 0 <= slice_index < num_slices
            and 0 <= start <= end <= MAX_WINDOWS
        ):
            return WindowRange(pass_number, slice_index, start, end, is_last)
        case _:
            raise ValueError(
                f"what has counted is ranges of windows, of {num_slices} slices, from pass {current_pass} on"
            )


def _is_in_order(this: WindowRange, following: WindowRange) -> bool:
    """Whether one fact follows on another: by slice, then the ranges with gaps between them, then an end on its own."""
    if this.slice_id != following.slice_id:
        return this.slice_id < following.slice_id
    is_end = following.start == following.end
    return this.start < this.end and (is_end or this.end < following.start)

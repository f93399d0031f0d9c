"""Which samples have counted. Within one pass over the data none counts twice, even if peers come, go and restart.

A pass over the data consists of slices, the same numbered list for every peer. A sample is a window of a slice
(ranges.py).

**Facts.** A fact says that windows of a slice have counted, or where a slice ends. Facts only accumulate, so a peer may
add them in any order and any number of times. They travel as `WindowRange`s, and checkpoints hold them.

**Leases.** A lease says which peer may read a slice; leases come and go. The owner alone knows its leases for sure, and
refuses these slices to all other peers. A ledger knows the leases of other peers from hearsay.

Two live peers never hold a lease of the same slice, as long as each knows of the other. A peer leases slices like this:

1. `wanted` names slices to ask for. The peer first asks `arbiter(live_peers)`, unless it is the arbiter itself, and
   goes on with those that are granted. So if several peers want the same slice at the same time, one of them gets it.
2. The peer has its own ledger `grant` them to itself, and asks all other live stage-mates at once. If one of them
   refuses a slice or does not answer, the peer gives the slice up: it calls `release`. Stage-mates that granted it go
   on to believe that the peer leases it, until they ask the peer themselves (see below). This holds even for a
   stage-mate that has died meanwhile: it may have told facts to a peer that had answered before.
3. Each answer holds the stage-mate's facts about the slice (`counted`), which the peer adds, and all progress counts of
   the present round that the stage-mate has heard, which the peer merges as always. These include counts of dead peers,
   so a dead peer's count is respected if a single survivor has heard it. The answer also holds the stage-mate's
   `current_pass`, for `begin_pass`.
4. The peer reads `uncounted(slice, pending)`: the gaps, and all windows from the next one on. `pending` are the ranges
   of all counts that have not been added yet, its own included. It counts windows only while it holds the lease.

The owner of a slice finds its end by reading. Other peers can claim only a few ends (`credible`). A peer that did not
believe a true end asks for the slice, and is told, also of the last pass that is over; or it reads on to the end.

A refusal names the owner, for `note_lease`: the peer does not want the slice again while the owner lives. If it names
none, and tells no end though the pass is over, the peer passes the slice over until the round ends. A peer that has
restarted knows of no leases; it is granted the slices that others believe it to lease.

A peer can miss news, and hearsay would then keep it from a slice forever. So whenever a peer asks a stage-mate, it also
names the slices that it believes the stage-mate to lease, `leases(stage_mate)`. The answer holds the `corrections`, for
`release`: those that the stage-mate neither leases nor is asking for. Counts that arrive after their round are added
then.

Where stage-mates average every so many rounds, some may end rounds without others. At the next average, each tells all
samples that it brings (`note`).

Two gaps remain. A count that is under way when its author dies may arrive after another peer has begun to read the
slice. And a peer that all others believe dead may still be counting. `add` returns how many samples counted twice.
Everything here is pure, and belongs to one thread at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from swarm_peer.policy.data.ranges import CountedWindows, SampleId, SliceId, Uncounted, WindowRange, merge_ranges

# A slice holds at least some megabytes of text, so a million slices are terabytes.
MAX_SLICES = 1 << 20
MAX_WINDOWS = 1 << 40
# Passes that may begin before the oldest one is finished. With a data set of one window, a global batch takes one pass
# for each of its samples.
MAX_PASSES_AHEAD = 1 << 12
MAX_PASSES = 1 << 40
# Empty slices in one count that are believed although the author is not known to lease them: a peer that has just
# joined has not heard of earlier leases.
MAX_UNHELD_EMPTY = 32
# Facts in one ledger beyond two for each slice of a pass: gaps, and later passes. A ledger with this many takes 0.1 s
# to encode.
MAX_SPARE_FACTS = 1 << 16
# A stage-mate's word can have this peer pass over slices of so many passes, the oldest ones.
MAX_PASSED_OVER = 8
# Orders of slices that are cached: those of one peer, for the passes that are under way at the same time.
MAX_ORDERS = 4


@dataclass(frozen=True, slots=True)
class LeaseDecision:
    """Whether a peer may read a slice, and why.

    Attributes:
        owner: the peer that leases the slice now, if any
    """

    granted: bool
    reason: str
    owner: str | None = None


def arbiter(peers: Collection[str]) -> str:
    """The peer to ask first for a lease. Any rule would do that makes all peers choose the same one."""
    return min(peers)


@dataclass(slots=True)
class _DataPass:
    finished: dict[int, int] = field(default_factory=dict)  # slice index -> its number of windows
    # Slices that are not finished: those with counted windows or known length, and the peers that lease them.
    begun: dict[int, CountedWindows] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)


class SampleLedger:
    """The facts and leases of one run's data, as one peer knows them.

    Attributes:
        num_slices: slices in a pass
        current_pass: the oldest pass with an unfinished slice; all samples of earlier passes have counted
        passed_over: slices that `wanted` leaves out: a stage-mate says that their pass is over, but not where they end
    """

    def __init__(self, num_slices: int):
        if not 1 <= num_slices <= MAX_SLICES:
            raise ValueError(f"a pass of {num_slices} slices: 1 to {MAX_SLICES} go")
        self.num_slices = num_slices
        self.current_pass = 0
        self.passed_over: set[SliceId] = set()
        self._passes: dict[int, _DataPass] = {}
        self._last_over: tuple[int, dict[int, int]] = (-1, {})  # the last pass that is over, and its finished slices
        self._orders: dict[tuple[int, str], list[int]] = {}

    # --- facts

    def admits(self, item: WindowRange) -> bool:
        """Whether an honest peer can have counted this: the slice exists, and its pass is not too far ahead."""
        return (
            0 <= item.pass_number < self.current_pass + MAX_PASSES_AHEAD
            and 0 <= item.slice_index < self.num_slices
            and 0 <= item.start <= item.end <= MAX_WINDOWS
        )

    def add(self, ranges: Iterable[WindowRange]) -> int:
        """Note samples that have counted, and ends of slices. Ranges that are not admitted are skipped.

        Add each peer's count of a round once, when the round is over. If a growing count were added repeatedly, the
        returned number would mean nothing.

        Returns:
            the number of duplicates: samples that had counted before
        """
        duplicates = 0
        for item in ranges:
            if not self.admits(item) or (item.start == item.end and not item.is_last):
                continue
            if item.pass_number < self.current_pass:
                duplicates += item.end - item.start
                continue
            state = self._passes.setdefault(item.pass_number, _DataPass())
            num_windows = state.finished.get(item.slice_index)
            if num_windows is None:
                duplicates += state.begun.setdefault(item.slice_index, CountedWindows()).add(*item[2:])
                self._settle(item.pass_number, item.slice_index)
            else:
                duplicates += item.end - item.start
                if item.is_last:
                    state.finished[item.slice_index] = min(num_windows, item.end)
        return duplicates

    def note(self, ranges: Iterable[WindowRange]) -> set[SliceId]:
        """Note samples that have counted, some of which may be known. Returns the slices of which some were not."""
        facts = merge_ranges(item._replace(is_last=False) for item in ranges if self.admits(item))
        return {item.slice_id for item in facts if self.add([item]) < item.end - item.start}

    def credible(
        self, author: str, ranges: Iterable[WindowRange], held: Collection[SliceId], max_empty: int = MAX_UNHELD_EMPTY
    ) -> Iterator[WindowRange]:
        """A stage-mate's count without the slice ends that it cannot know.

        The windows after a false end would never be read.

        Args:
            held: slices that this peer reads, so that no other peer knows their ends
            max_empty: how many slices to believe empty that the author is not known to lease. The end of a slice with
                windows needs no such bound: it takes effect only when these windows have counted.
        """
        for item in ranges:
            if item.is_last and self.owner(item.slice_id) != author:
                if item.slice_id in held or (item.end == 0 and max_empty <= 0):
                    item = item._replace(is_last=False)
                elif item.end == 0:
                    max_empty -= 1
            yield item

    def begin_pass(self, pass_number: int) -> None:
        """Note that all samples of the passes before `pass_number` have counted. An older pass changes nothing."""
        if pass_number > self.current_pass:
            self.current_pass = pass_number
            self._advance()

    def is_finished(self, slice_id: SliceId) -> bool:
        """Whether all samples of the slice have counted."""
        state = self._passes.get(slice_id.pass_number)
        return slice_id.pass_number < self.current_pass or bool(state and slice_id.slice_index in state.finished)

    def counted(self, slice_id: SliceId) -> tuple[WindowRange, ...]:
        """All facts about a slice of a pass that is not over, or of the last one that is.

        Peers send them with the answer to a request. A peer that asks for a slice of a pass that is over lacks its end.
        """
        state = self._passes.get(slice_id.pass_number, _DataPass())
        number, finished = self._last_over
        num_windows = (finished if slice_id.pass_number == number else state.finished).get(slice_id.slice_index)
        if num_windows is not None:
            return (WindowRange(*slice_id, 0, num_windows, True),)
        return tuple(state.begun.get(slice_id.slice_index, CountedWindows()).facts(slice_id))

    def uncounted(self, slice_id: SliceId, pending: Iterable[WindowRange] = ()) -> Uncounted:
        """The windows of a slice that are left to read; none if it is finished.

        Args:
            pending: ranges that have counted and are not added yet, those of the present round; of any slices
        """
        if self.is_finished(slice_id):
            return Uncounted((), MAX_WINDOWS)
        left = CountedWindows()
        for item in (*self.counted(slice_id), *pending):
            if item.slice_id == slice_id:
                left.add(*item[2:])
        return left.uncounted()

    def lacking(self, ranges: Iterable[WindowRange]) -> list[SampleId]:
        """The samples in these ranges that have not counted, as far as is known here; in order, each once."""
        found = list[SampleId]()
        for item in merge_ranges(ranges):
            gaps, next_window = self.uncounted(item.slice_id)
            for start, end in (*gaps, (next_window, MAX_WINDOWS)):
                windows = range(max(start, item.start), min(end, item.end))
                found += [SampleId(*item.slice_id, window) for window in windows]
        return found

    # --- leases

    def wanted(self, peer: str, count: int, live_peers: Collection[str], run_ahead: bool = True) -> list[SliceId]:
        """Up to `count` slices that `peer` might lease now, best first.

        Slices that a dead peer has begun come first, then slices that no peer has begun. Each peer has its own order,
        so that peers seldom want the same slice.

        Args:
            run_ahead: whether `peer` may go on to a later pass if its own pass has no free slice. Pass False as long as
                the peer has something to read. A later pass always has a free slice.
        """
        newest = max([self.current_pass, *(slice_id.pass_number for slice_id in self.leases(peer))])
        found: list[SliceId] = []
        for pass_number in range(self.current_pass, self.current_pass + MAX_PASSES_AHEAD):
            if len(found) >= count or (pass_number > newest and (found or not run_ahead)):
                break
            found += itertools.islice(self._free(pass_number, peer, live_peers), count - len(found))
        return found

    def _free(self, pass_number: int, peer: str, live_peers: Collection[str]) -> Iterator[SliceId]:
        state = self._passes.get(pass_number, _DataPass())
        taken = {index for index, owner in state.owners.items() if owner == peer or owner in live_peers}
        taken |= {slice_id.slice_index for slice_id in self.passed_over if slice_id.pass_number == pass_number}
        begun = [SliceId(pass_number, index) for index in state.begun if index not in taken]
        yield from sorted(begun, key=lambda slice_id: _rank(slice_id, peer))
        for slice_index in self._order(pass_number, peer):
            if not (slice_index in state.finished or slice_index in state.begun or slice_index in taken):
                yield SliceId(pass_number, slice_index)

    def pass_over(self, slices: Iterable[SliceId]) -> None:
        """Add to `passed_over`. A lie goes no further than a few passes, since `wanted` looks through all of them."""
        self.passed_over.update(each for each in slices if each.pass_number < self.current_pass + MAX_PASSED_OVER)

    def grant(self, slice_id: SliceId, peer: str, live_peers: Collection[str]) -> LeaseDecision:
        """Lease a slice to a peer, unless it is finished or another live peer leases it."""
        ahead = slice_id.pass_number - self.current_pass
        if not (ahead < MAX_PASSES_AHEAD and 0 <= slice_id.slice_index < self.num_slices):
            return LeaseDecision(False, f"no slice {slice_id.slice_index} of pass {slice_id.pass_number} in this run")
        if self.is_finished(slice_id):
            return LeaseDecision(False, "finished")
        owner = self.owner(slice_id)
        if owner is not None and owner != peer and owner in live_peers:
            return LeaseDecision(False, "leased to another live peer", owner)
        self.note_lease(slice_id, peer)
        if owner is None:
            return LeaseDecision(True, "free", peer)
        return LeaseDecision(True, "leased to it before" if owner == peer else "its owner is gone", peer)

    def note_lease(self, slice_id: SliceId, owner: str) -> None:
        """Note that `owner` leases a slice, by hearsay. A finished or impossible slice is ignored."""
        if self.admits(WindowRange(*slice_id, 0, 0)) and not self.is_finished(slice_id):
            self._passes.setdefault(slice_id.pass_number, _DataPass()).owners[slice_id.slice_index] = owner

    def owner(self, slice_id: SliceId) -> str | None:
        """The peer that leases the slice, as far as is known here."""
        return self._passes.get(slice_id.pass_number, _DataPass()).owners.get(slice_id.slice_index)

    def leases(self, peer: str) -> list[SliceId]:
        """The slices that `peer` leases, as far as is known here, in ascending order."""
        passes = sorted(self._passes.items())
        return [
            SliceId(n, index) for n, state in passes for index, owner in sorted(state.owners.items()) if owner == peer
        ]

    def release(self, peer: str, slices: Iterable[SliceId] | None = None) -> None:
        """End the leases of `peer` on these slices, or all its leases if it is gone. Facts stay."""
        for slice_id in self.leases(peer) if slices is None else slices:
            if self.owner(slice_id) == peer:
                del self._passes[slice_id.pass_number].owners[slice_id.slice_index]

    def corrections(self, me: str, believed: Iterable[SliceId]) -> list[SliceId]:
        """Of the slices that a stage-mate believes this peer to lease, those that it does not lease.

        The caller removes slices that this peer is asking for at this moment: others may have granted them already.
        """
        return [slice_id for slice_id in believed if self.owner(slice_id) != me]

    # --- as plain values

    def facts(self) -> Iterator[WindowRange]:
        """All facts about the passes that are not over. Add them to another ledger only after `begin_pass`."""
        for pass_number, state in sorted(self._passes.items()):
            for slice_index in sorted(state.finished.keys() | state.begun.keys()):
                yield from self.counted(SliceId(pass_number, slice_index))

    def to_tuple(self) -> tuple[object, ...]:
        """The tuple (number of slices, current pass, facts), of ints and bools, sorted. Leases are not in it."""
        return (self.num_slices, self.current_pass, tuple(self.facts()))

    @classmethod
    def from_tuple(cls, value: object) -> SampleLedger:
        """The ledger that `to_tuple` turned into this value; lists may stand for tuples. Takes linear time.

        Raises:
            ValueError: it is no such value, its facts are not in order, or there are more facts than a run can have
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
        """Check whether a slice is finished after news of it, and whether its pass is over."""
        state = self._passes[pass_number]
        known = state.begun[slice_index]
        if known.num_windows is None or not known.is_finished():
            return
        del state.begun[slice_index]
        state.owners.pop(slice_index, None)
        state.finished[slice_index] = known.num_windows
        self._advance()

    def _advance(self) -> None:
        while len(self._passes.get(self.current_pass, _DataPass()).finished) == self.num_slices:
            self.current_pass += 1
        if (last := self._passes.get(self.current_pass - 1)) is not None:
            self._last_over = self.current_pass - 1, last.finished
        for old in [number for number in self._passes if number < self.current_pass]:
            del self._passes[old]

    def _order(self, pass_number: int, peer: str) -> list[int]:
        """All slices in this peer's order. It is made once in a pass, since a million slices take a second."""
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
    """Whether two facts are in order: by slice, then ranges with gaps between them, then an end on its own."""
    if this.slice_id != following.slice_id:
        return this.slice_id < following.slice_id
    is_end = following.start == following.end
    return this.start < this.end and (is_end or this.end < following.start)

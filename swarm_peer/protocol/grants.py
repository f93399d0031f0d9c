"""The leader of stage 0 grants each seat slices of the data to read, and a share of each round to launch. Pure.

A grant is no promise to others: what counts is decided by cuts, which hold no sample twice. Grants keep seats from
reading what others read, and from computing more than the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_peer.policy.data.ledger import MAX_PASSES_AHEAD, Ledger
from swarm_peer.policy.data.ranges import SliceId
from swarm_peer.protocol.statements import EpochId, Seat

# Slices that one grant adds at most.
MAX_GRANTED = 64
# Slices that one seat reads at most, beyond one for each sample of open rounds that it is believed to have computed.
MAX_HELD = 64


@dataclass(frozen=True)
class Wants:
    """A seat of stage 0 tells its leader how far it is, and what it would like to have.

    Attributes:
        seen: the number of the newest grant that what it reads follows from
        reads: slices that it reads, and has not come to the end of
        slices: how many more it would read
        round: that is open here
        claimed: samples that it has launched in that round
        samples: how many more it could launch now
        voids: how often it has given up what it had computed in that round
    """

    seen: int
    reads: tuple[SliceId, ...]
    slices: int
    round: int
    claimed: int
    samples: int
    voids: int


@dataclass(frozen=True)
class Grant:
    """The leader allows a seat of stage 0 to read these slices and no others, and to launch so many samples in a round.

    Attributes:
        number: of the grants of this leader to this seat
    """

    reign: EpochId
    number: int
    slices: tuple[SliceId, ...]
    round: int
    up_to: int


@dataclass(frozen=True)
class Reads:
    """A driver says what its seat of stage 0 reads.

    A grant may be known that the driver has yet to follow. Slices of such a grant are not put away: it has not begun.

    Attributes:
        slices: that it reads, or has read in rounds that are open
        wanted: how many more it would read
        grant: the newest that it has followed
    """

    slices: tuple[SliceId, ...] = ()
    wanted: int = 0
    grant: Grant | None = None


@dataclass
class _Share:
    """One seat's share of a round.

    Attributes:
        up_to: samples that it may launch
        done: that it has had computed, and since when
        unbelieved: those of them that it lacks receipts for
    """

    up_to: int = 0
    claimed: int = 0
    voids: int = 0
    done: int = 0
    unbelieved: int = 0
    since_s: float = 0.0

    def taken(self, late_s: float) -> int:
        """The part of the batch that is not for others; of a seat that has long done nothing, what it has done.

        One that says it has done more than it may has no less of the batch for that than what is believed.
        """
        return (self.done if self.since_s < late_s else max(self.up_to, self.done)) - self.unbelieved


@dataclass
class _Held:
    """A slice that a seat reads, or has read.

    Attributes:
        seat: None if it has put the slice away
        until: where it has, or is gone, the round whose entry decides whether its samples count; None while it reads
    """

    seat: Seat | None
    until: int | None = None


class _Followed(NamedTuple):
    """The stage, as its leader has seen it last.

    Attributes:
        carried_to: the round whose entry holds what rounds that are over have left; less than 0 if none has
    """

    carried_to: int = -1
    num_seats: int = 1


@dataclass
class Grants:
    """The grants of one leader.

    Attributes:
        batch, unit: samples of a round, and of a microbatch
        patience_s: after so long without a microbatch, others may take a seat's share of the round
    """

    reign: EpochId
    batch: int
    unit: int
    patience_s: float
    _followed: _Followed = field(default_factory=_Followed)
    _held: dict[SliceId, _Held] = field(default_factory=dict)
    _given: dict[Seat, Grant] = field(default_factory=dict)
    _shares: dict[int, dict[Seat, _Share]] = field(default_factory=dict)

    def hold(self, seat: Seat, slices: Iterable[SliceId]) -> None:
        """Note that a seat reads these slices, by grants of an earlier leader."""
        for slice_id in slices:
            self._held.setdefault(slice_id, _Held(seat))

    def are_others(self, seat: Seat, slices: Iterable[SliceId]) -> bool:
        """Whether some of these slices are read by another seat than this one."""
        holders = (self._held[slice_id].seat for slice_id in slices if slice_id in self._held)
        return any(holder not in (None, seat) for holder in holders)

    def follow(
        self, roster: Collection[Seat], ledger: Ledger, next_round: int, decided_in: int, carried_to: int = -1
    ) -> None:
        """Note who is there, and how far the log is.

        Args:
            decided_in: the round whose entry holds what is computed now
            carried_to: the same for the rounds that are over; less than the next round if entries hold all of it
        """
        self._followed = _Followed(carried_to if carried_to >= next_round else -1, max(len(roster), 1))
        for slice_id, held in list(self._held.items()):
            if held.seat in roster:
                held.until = None
            elif held.until is None:
                held.until = decided_in
            if ledger.is_finished(slice_id) or (held.until is not None and held.until < next_round):
                del self._held[slice_id]
        self._given = {seat: given for seat, given in self._given.items() if seat in roster}
        self._shares = {number: shares for number, shares in self._shares.items() if number >= next_round}
        for shares in self._shares.values():
            for seat in [seat for seat in shares if seat not in roster]:
                del shares[seat]

    def note_done(self, seat: Seat, number: int, done: int, believed: int, now_s: float) -> None:
        """Note how far a seat is with its share."""
        share = self._shares.setdefault(number, {}).setdefault(seat, _Share(since_s=now_s))
        if believed != share.done - share.unbelieved:
            share.since_s = now_s
        share.done = min(done, 2 * self.batch)
        share.unbelieved = share.done - min(believed, share.done)

    def grant(self, seat: Seat, wants: Wants, ledger: Ledger, now_s: float) -> Grant:
        """The newest grant of a seat."""
        before = self._given.get(seat)
        if before is None or wants.seen >= before.number:
            # It has seen all grants: what it does not read any more, others may.
            for slice_id, held in list(self._held.items()):
                if held.seat == seat and slice_id not in wants.reads:
                    self._put_away(slice_id)
        shares = (shares[seat] for shares in self._shares.values() if seat in shares)
        most = MAX_HELD + sum(min(each.done - each.unbelieved, self.batch) for each in shares)
        reads = wants.reads[:most]
        self.hold(seat, (slice_id for slice_id in reads if not ledger.is_finished(slice_id)))
        granted = [slice_id for slice_id, held in self._held.items() if held.seat == seat]
        missing = min(len(reads) + wants.slices, most) - len(granted)
        added = list(itertools.islice(self._free(ledger), max(missing, 0)))
        self.hold(seat, added)
        number = max(wants.seen, before.number if before is not None else 0)
        if before is None or added or before.round != wants.round:
            number += 1
        up_to = self._places(seat, wants, now_s)
        given = Grant(self.reign, number, tuple(sorted((*granted, *added))), wants.round, up_to)
        self._given[seat] = given
        return given

    def _put_away(self, slice_id: SliceId) -> None:
        """Note that a seat reads a slice no more. In a period, an entry has yet to hold what it has read."""
        if self._followed.carried_to < 0:
            del self._held[slice_id]
        else:
            self._held[slice_id] = _Held(None, self._followed.carried_to)

    def _free(self, ledger: Ledger) -> list[SliceId]:
        """Slices that nobody reads, of the oldest pass that has some."""
        for pass_number in range(ledger.current_pass, ledger.current_pass + MAX_PASSES_AHEAD):
            free = (slice_id for slice_id in ledger.unfinished(pass_number) if slice_id not in self._held)
            if found := list(itertools.islice(free, MAX_GRANTED)):
                return found
        return []

    def _places(self, seat: Seat, wants: Wants, now_s: float) -> int:
        shares = self._shares.setdefault(wants.round, {})
        share = shares.setdefault(seat, _Share(since_s=now_s))
        if wants.voids < share.voids:
            return share.up_to  # an old message
        if wants.voids > share.voids:
            share.voids, share.up_to, share.claimed = wants.voids, 0, 0
        share.claimed = max(share.claimed, min(wants.claimed, 2 * self.batch))
        others = sum(each.taken(now_s - self.patience_s) for other, each in shares.items() if other != seat)
        share.up_to = max(share.up_to, share.claimed)
        room = self.batch - others + share.unbelieved
        # No more at a time than its part of the batch. Others, which the leader hears of later, would get none of any
        # round, and never come to the end of the slices that they read.
        most = share.done + max(self.unit, math.ceil(self.batch / self._followed.num_seats))
        missing = min(share.claimed + min(wants.samples, self.batch), room, most) - share.up_to
        share.up_to += self.unit * math.ceil(max(missing, 0) / self.unit)
        return share.up_to

"""The round that the leader of a stage ends next, and its attempt to do so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_peer.protocol.accusations import Unit, culprits_of, to_leave_out
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Blamed, Committed, Cut, Have, Pass
from swarm_peer.protocol.messages import Ready, Timing
from swarm_peer.protocol.statements import Seat, Signed

# Of so many tries in a row, one is of all that may take part, whoever was silent.
MAX_TRIES = 3


@dataclass
class Attempt:
    """One cut of a round, as the leader sees it.

    Attributes:
        most_s: when its entry was agreed
        failed_s: when most of its members had said that they have no result
        left_out: those that it does without, since they may have been to blame for the ones before
    """

    cut: Cut
    shown: tuple[Committed, ...]
    since_s: float
    most_s: float | None = None
    failed_s: float | None = None
    left_out: Collection[Seat] = ()
    said: dict[Seat, Signed[Have] | Signed[Pass]] = field(default_factory=dict)
    blamed: dict[Seat, Signed[Blamed]] = field(default_factory=dict)

    @property
    def silent(self) -> set[Seat]:
        """Its members that have said nothing of a result."""
        return {seat for seat in self.cut.seats if seat not in self.said and seat not in self.blamed}

    def having(self, epoch: Epoch) -> set[Seat]:
        """Those of its members that have the same result as most of them; nobody, if there is none such."""
        having = defaultdict[str, set[Seat]](set)
        for seat, signed in self.said.items():
            if isinstance(signed.body, Have):
                having[signed.body.digest].add(seat)
        return next((seats for seats in having.values() if epoch.is_quorum(seats, self.cut.seats)), set())

    def dissenting(self, epoch: Epoch) -> set[Seat]:
        """Those of its members that have another result than most."""
        most = self.having(epoch)
        return {seat for seat in self.cut.seats if most and seat in self.said and seat not in most}

    def accuses_nobody(self, epoch: Epoch) -> bool:
        """Whether it has failed, and neither accusations nor silence tell a member that is to blame from the others."""
        accused = {seat for signed in self.blamed.values() for seat in signed.body.seats} & set(self.cut.seats)
        return not self.having(epoch) and not accused and self.silent in (set(), set(self.cut.seats))

    def failure(
        self, now_s: float, epoch: Epoch, timing: Timing, *, has_more: bool, may_agree: set[Seat]
    ) -> Failure | None:
        """How it has failed by now, if it has: members are gone or silent for too long, or all have spoken in vain.

        Args:
            has_more: whether others have become ready since, which do not agree to be left out
            may_agree: seats that may do so
        """
        gone = set(self.cut.seats) - set(epoch.roster(self.cut.stage))
        silent = self.silent - gone
        if self.failed_s is None and epoch.is_quorum(self.blamed, self.cut.seats):
            self.failed_s = now_s
        is_late = now_s > self.since_s + timing.average_s
        if silent and self.failed_s is not None:
            # A member that hears of others' failure waits as long again before it says so.
            is_late |= now_s >= 2 * self.failed_s - self.since_s + timing.others_s
        late = silent if is_late else set[Seat]()
        # Those that were left out may have no place any more, or do not agree.
        having, roster = self.having(epoch), epoch.roster(self.cut.stage)
        agreeing = having | may_agree | (self.said.keys() - set(self.cut.seats))
        is_of_no_use = (
            epoch.id != self.cut.epoch
            or bool(self.blamed)
            or not having
            or (has_more and self.most_s is None)
            or (epoch.is_divided and not epoch.is_quorum(agreeing & set(roster), roster))
        )
        if not gone and not is_late and (silent or not is_of_no_use):
            return None
        return Failure(late, has_gone=bool(gone))


class Failure(NamedTuple):
    """How a cut has failed.

    Attributes:
        late: its members that have said nothing, and have had their time
        has_gone: whether a member has no place any more
    """

    late: set[Seat]
    has_gone: bool


class NextTry(NamedTuple):
    """A leader's choice for the next cut of a round.

    Attributes:
        left_out: those that one of whom was to blame for each cut before
        culprits: of the cuts of the round so far
    """

    seats: set[Seat]
    left_out: set[Seat]
    culprits: tuple[tuple[Unit, ...], ...]


def next_try(
    epoch: Epoch,
    attempt: Attempt,
    failure: Failure,
    weights: Mapping[Seat, int],
    more: set[Seat],
    culprits: tuple[tuple[Unit, ...], ...],
    order: Callable[[Unit], int],
) -> NextTry | None:
    """Choose whom a leader tries with after a cut has failed. Pure.

    It is those that have spoken, where others were silent or are gone; else all but some that may have been to blame
    for all cuts that have failed in the round, and once more all where that may be anybody. Where no such choice leaves
    a quorum, all try anew; or where one seat is enough for an entry, the one that brings most.

    Args:
        epoch: that holds now
        weights: what each seat brings that is ready and has a place
        more: those of them that were in no cut of the round
        culprits: of the cuts that have failed before
        order: in which units are left out; see to_leave_out

    Returns:
        None if nobody is ready any more
    """
    cut, number, ready = attempt.cut, attempt.cut.attempt + 1, set(weights)
    roster = epoch.roster(cut.stage)
    is_unknown = attempt.accuses_nobody(epoch) and not failure.has_gone
    dissenting = attempt.dissenting(epoch)

    def is_enough(left_out: set[Seat]) -> bool:
        return epoch.is_quorum(ready - left_out, roster) if epoch.is_divided else not ready <= left_out

    left = ((set(cut.seats) & ready) - failure.late) | more
    # Seats that were silent agree to be left out, and no others.
    may_try = bool(left) and bool(number % MAX_TRIES) and (is_enough(ready - left) or not attempt.left_out)
    if failure.late and not is_unknown:
        culprits = (*culprits, (frozenset(failure.late),))
        if may_try:
            return NextTry(left, failure.late if attempt.failed_s is not None else set(), culprits)
    elif failure.has_gone or not (attempt.blamed or dissenting or not attempt.having(epoch)):
        if may_try and is_enough(ready - left):
            return NextTry(left, set(), culprits)
    elif not is_unknown or number > 1:
        culprits = (*culprits, culprits_of(epoch, cut, attempt.blamed, dissenting))

    if len(culprits) <= len({epoch.vote_of(seat) for seat in ready}) + 2:
        left_out = to_leave_out(culprits, order, is_enough)
        if left_out is not None:
            return NextTry(ready - left_out, left_out, culprits)
    if ready and (not epoch.is_divided or epoch.is_quorum([min(ready)], roster)):
        ready = {max(ready, key=lambda seat: (weights[seat], seat))}
    return NextTry(ready, set(), ()) if ready else None


@dataclass
class Round:
    """The round that comes next, as the leader sees it.

    Attributes:
        late: those who have kept the others waiting
        learning: those who have asked for the log: what they were told of the round before had no effect
        culprits: of each cut that has failed, those of whom one at least was to blame; and those left out for now
        tried: those who were in a cut
    """

    number: int
    ready: dict[Seat, Ready] = field(default_factory=dict)
    first_ready_s: float = 0.0
    late: set[Seat] = field(default_factory=set)
    learning: set[Seat] = field(default_factory=set)
    culprits: tuple[tuple[Unit, ...], ...] = ()
    tried: set[Seat] = field(default_factory=set)
    attempt: Attempt | None = None

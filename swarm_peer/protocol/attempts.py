"""The round that the leader of a stage ends next, and its attempt to do so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_peer.protocol.accusations import holds_most, in_turn, to_leave_out
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Blamed, Committed, Cut, Have, Pass
from swarm_peer.protocol.messages import Ready, Timing
from swarm_peer.protocol.statements import Seat, Signed

# Of so many tries in a row, one does without all that any of them has failed with.
MAX_TRIES = 3


@dataclass
class Attempt:
    """One cut of a round, as the leader sees it.

    Attributes:
        most_s: when its entry was agreed
        failed_s: when most of its members had said that they have no result
        left_out: those with whom most averaged the one before in vain
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

    def has_result(self, epoch: Epoch) -> bool:
        """Whether most of its members have the same result."""
        having = defaultdict[str, set[Seat]](set)
        for seat, signed in self.said.items():
            if isinstance(signed.body, Have):
                having[signed.body.digest].add(seat)
        return any(epoch.is_quorum(seats, self.cut.seats) for seats in having.values())

    def accuses_nobody(self, epoch: Epoch) -> bool:
        """Whether it has failed, and neither accusations nor silence tell a member that is to blame from the others."""
        accused = {seat for signed in self.blamed.values() for seat in signed.body.seats} & set(self.cut.seats)
        return not self.has_result(epoch) and not accused and self.silent in (set(), set(self.cut.seats))

    def failure(self, now_s: float, epoch: Epoch, timing: Timing, *, has_more: bool) -> Failure | None:
        """How it has failed by now, if it has: members are gone or silent for too long, or all have spoken in vain.

        Args:
            has_more: whether others have become ready since, which do not agree to be left out
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
        is_of_no_use = (
            epoch.id != self.cut.epoch
            or bool(self.blamed)
            or not self.has_result(epoch)
            or (has_more and self.most_s is None)
        )
        if not gone and not is_late and (silent or not is_of_no_use):
            return None
        return Failure(late, has_gone=bool(gone), has_spoken=not gone and not silent)


class Failure(NamedTuple):
    """How a cut has failed.

    Attributes:
        late: its members that have said nothing, and have had their time
        has_gone: whether a member has no place any more
        has_spoken: whether all of its members have said what has come of it
    """

    late: set[Seat]
    has_gone: bool
    has_spoken: bool


class Try(NamedTuple):
    """A leader's choice for the next cut of a round.

    Attributes:
        blamed: accusations that those agree to who are left out
        left_out: those with whom most averaged the cut before in vain
        unreached: the same of all cuts of the round so far
    """

    seats: set[Seat]
    blamed: tuple[Signed[Blamed], ...]
    left_out: set[Seat]
    unreached: set[Seat]


def next_try(
    epoch: Epoch,
    attempt: Attempt,
    failure: Failure,
    weights: Mapping[Seat, int],
    more: set[Seat],
    unreached: set[Seat],
) -> Try | None:
    """Choose whom a leader tries with after a cut has failed: the first of these rules that leaves enough. Pure.

    1. Where nobody knows who is to blame: all once more, then all but the seats of one vote, of each in its turn.
    2. Where that is known, in two tries of three: those that have spoken, and are not accused with reason.
    3. All with whom no cut of the round has failed; or the one of them that brings most, where one is enough.
    4. All.

    Args:
        epoch: that holds now
        weights: what each seat brings that is ready and has a place
        more: those of them that were in no cut of the round
        unreached: those that cuts of the round have failed with before

    Returns:
        None if nobody is ready any more
    """
    cut, number, ready = attempt.cut, attempt.cut.attempt + 1, set(weights)
    roster = epoch.roster(cut.stage)
    left_out = failure.late if attempt.failed_s is not None else set[Seat]()
    blamed: tuple[Signed[Blamed], ...] = ()
    left = ((set(cut.seats) & ready) - failure.late) | more
    if failure.has_spoken:
        accused, blamed = to_leave_out(epoch, cut, attempt.blamed)
        if len(blamed) > 1:
            left_out = accused
            left -= accused
        else:  # of accuser and accused, all of their votes
            votes = {epoch.vote_of(seat) for seat in accused}
            left = {seat for seat in left if epoch.vote_of(seat) not in votes}
            if epoch.is_divided and votes and not holds_most(epoch, cut.stage, left, votes):
                left = set()  # those who are left out would not agree
    unreached = unreached | left_out if left else set()
    reached = ready - unreached
    if not failure.has_gone and attempt.accuses_nobody(epoch) and len({epoch.vote_of(seat) for seat in reached}) > 2:
        suspects = in_turn(epoch, reached, cut.round, number)
        is_enough = not epoch.is_divided or epoch.is_quorum(reached - suspects, roster)
        if is_enough and (suspects or number == 1):
            return Try(reached - suspects, (), suspects, unreached)
    elif left and number % MAX_TRIES:
        return Try(left, blamed, left_out, unreached)
    if epoch.is_divided and not epoch.is_quorum(reached, roster):  # who is not accused does not agree to be left out
        reached, unreached = ready, set()
    if reached and (not epoch.is_divided or epoch.is_quorum([min(reached)], roster)):
        reached = {max(reached, key=lambda seat: (weights[seat], seat))}
    return Try(reached, (), left_out, unreached) if reached else None


@dataclass
class Round:
    """The round that comes next, as the leader sees it.

    Attributes:
        late: those who have kept the others waiting
        learning: those who have asked for the log: what they were told of the round before had no effect
        unreached: those with whom most of a cut have averaged in vain
        tried: those who were in a cut
    """

    number: int
    ready: dict[Seat, Ready] = field(default_factory=dict)
    first_ready_s: float = 0.0
    late: set[Seat] = field(default_factory=set)
    learning: set[Seat] = field(default_factory=set)
    unreached: set[Seat] = field(default_factory=set)
    tried: set[Seat] = field(default_factory=set)
    attempt: Attempt | None = None

"""For whom a leader waits, and how long a member waits for its leader. Pure.

A seat that has kept the others waiting is not waited for in the next rounds; a leader that has done so loses the lead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Cut
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.statements import Seat

# Rounds in which a seat that was late once is not waited for; each further time it is four times as many.
FIRST_ROUNDS = 4
MOST_ROUNDS = 64
# After so many rounds in time a seat has an account of its own. Until then it has that of its vote, so that one seat
# after the other counts as one.
OWN_AFTER = 16
# A member that works so many times as long as it waits never finds its leader stuck: that takes a fifth of its time.
WORK_PER_WAIT = 4
# A member thinks nothing of so many seconds of waiting in each round: messages take their time.
FREE_S = 3.0
# A member excuses once in so many rounds what an honest leader does now and then.
EXCUSED_EVERY = 16


@dataclass
class _Account:
    """How a seat, or all new ones of a vote, have kept time.

    Attributes:
        left: rounds in which it is still not waited for
        penalty: so many they were the last time, less those in time since
        is_left_out: whether it takes no part meanwhile
    """

    left: int = 0
    penalty: int = 0
    is_left_out: bool = False

    def end_round(self, *, is_late: bool, is_unreached: bool) -> None:
        if (is_late and not self.left) or (is_unreached and not self.is_left_out):
            self.left = self.penalty = min(max(4 * self.penalty, FIRST_ROUNDS), MOST_ROUNDS)
            self.is_left_out = is_unreached
        elif self.left:
            self.left -= 1  # nobody knows whether it would have been in time
            self.is_left_out &= self.left > 0
        else:
            self.penalty = max(self.penalty - 1, 0)


class Patience:
    """The seats that a leader waits for, by how they have kept time before.

    A seat that is not waited for takes part all the same where it is in time, unless most have averaged with it in
    vain: by that it would keep them waiting in each round.
    """

    def __init__(self) -> None:
        self._accounts: dict[Seat | str, _Account] = {}
        self._in_time: dict[Seat, int] = {}
        self._num_rounds = 0
        self._left_out_in: dict[str, int] = {}

    def _account(self, epoch: Epoch, seat: Seat) -> _Account:
        return self._accounts.get(self._owner(epoch, seat)) or _Account()

    def _owner(self, epoch: Epoch, seat: Seat) -> Seat | str:
        return epoch.vote_of(seat) if self._in_time.get(seat, 0) < OWN_AFTER else seat

    def waited_for(self, epoch: Epoch, seats: Iterable[Seat]) -> set[Seat]:
        """Those of some seats that are worth waiting for."""
        return {seat for seat in seats if not self._account(epoch, seat).left}

    def left_out(self, epoch: Epoch, seats: Iterable[Seat]) -> set[Seat]:
        """Those of some seats that take no part for now."""
        return {seat for seat in seats if self._account(epoch, seat).is_left_out}

    def last_left_out(self, epoch: Epoch, seats: Iterable[Seat]) -> int:
        """The round in which votes of some seats were left out last, as this leader counts them; 0 if none was."""
        return max((self._left_out_in.get(epoch.vote_of(seat), 0) for seat in seats), default=0)

    def end_round(
        self, epoch: Epoch, roster: Collection[Seat], late: Collection[Seat], unreached: Collection[Seat] = ()
    ) -> None:
        """Note who of a roster has kept the others waiting in a round.

        Args:
            unreached: that the others were left without, since they may have been to blame for cuts that have failed
        """
        self._num_rounds += 1
        votes = {epoch.vote_of(seat) for seat in roster}
        self._left_out_in |= {epoch.vote_of(seat): self._num_rounds for seat in unreached}
        self._left_out_in = {vote: number for vote, number in self._left_out_in.items() if vote in votes}
        seats_of = defaultdict[Seat | str, set[Seat]](set)
        for seat in roster:
            seats_of[self._owner(epoch, seat)].add(seat)
        for owner, seats in seats_of.items():
            account = self._accounts.setdefault(owner, _Account())
            for seat in seats - {*late, *unreached} if not account.left else ():
                self._in_time[seat] = self._in_time.get(seat, 0) + 1
            account.end_round(is_late=bool(seats & set(late)), is_unreached=bool(seats & set(unreached)))
        for seat in self._in_time.keys() - set(roster):
            del self._in_time[seat]
            self._accounts.pop(seat, None)
        self._accounts = {owner: account for owner, account in self._accounts.items() if account != _Account()}


class Waits:
    """How long a member has waited for one leader, over all of its rounds.

    Time in which it has work of its own makes up for some of that, and so does each round that ends. An average is such
    work once an entry is of its cut. Once another cut has come, it was waiting: a leader that has members average in
    vain does nothing. But once for each seat, a leader may leave it out then, and so find who was to blame; and now and
    then it may try with the same ones again. A member was waiting as well for as long as it computed what its leader
    has it give up, but for now and then: another stage may have made its entry anew.

    Attributes:
        waited_s: more than what was made up for
    """

    def __init__(self, now_s: float, leader: Seat | None):
        self.leader = leader
        self.waited_s = 0.0
        self._looked_s = now_s
        self._averaged: tuple[Cut, float] | None = None
        self._excused = set[Seat]()
        self._round = 0
        self._excused_in: dict[str, int] = {}
        self._num_voids: int | None = None
        self._worked_s = 0.0

    def look(self, now_s: float, member: Member, timing: Timing) -> bool:
        """Note what a member does since the last look. Returns whether its leader has had it wait for too long."""
        # More is a stall of this process.
        passed_s, self._looked_s = min(now_s - self._looked_s, timing.resend_s), now_s
        cut = member.averaging
        if self._num_voids is None:
            self._num_voids = member.num_voids
        if member.num_voids != self._num_voids:
            if not self._is_excused("a void"):
                self._add(self._worked_s * (1 + 1 / WORK_PER_WAIT), is_work=False)
            self._num_voids, self._worked_s = member.num_voids, 0.0
        if member.log.next_round != self._round:
            self._worked_s = 0.0
            self.waited_s = max(0.0, self.waited_s - FREE_S * max(member.log.next_round - self._round, 0))
            self._round = member.log.next_round
            for committed in member.log.committed:
                self._settle(committed.entry.cut)
            self._averaged = None
        elif cut is not None:
            self._settle(cut, is_under_way=True)
        if cut is not None:
            spent_s = self._averaged[1] if self._averaged is not None else 0.0
            self._averaged = cut, spent_s + passed_s
        else:
            self._worked_s += 0.0 if member.is_waiting else passed_s
            self._add(passed_s, is_work=not member.is_waiting)
        self.waited_s = min(self.waited_s, 2 * timing.stuck_s)
        return self.waited_s > timing.stuck_s

    def _settle(self, cut: Cut, *, is_under_way: bool = False) -> None:
        """Note what the last average was good for, now that a cut of its round has come."""
        if self._averaged is None or cut.round != self._averaged[0].round:
            return
        before, spent_s = self._averaged
        if cut.hash == before.hash:
            if not is_under_way:
                self._add(spent_s, is_work=True)
            return
        left_out = set(before.seats) - set(cut.seats) - self._excused
        self._excused |= left_out
        if not left_out and not self._is_excused("the same again"):
            self._add(spent_s, is_work=False)
        self._averaged = None

    def _is_excused(self, what: str) -> bool:
        if self._round < self._excused_in.get(what, -EXCUSED_EVERY) + EXCUSED_EVERY:
            return False
        self._excused_in[what] = self._round
        return True

    def _add(self, spent_s: float, *, is_work: bool) -> None:
        self.waited_s = max(0.0, self.waited_s - spent_s / WORK_PER_WAIT) if is_work else self.waited_s + spent_s

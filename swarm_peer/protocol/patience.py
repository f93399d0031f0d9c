"""For whom a leader waits: a seat that has kept the others waiting is not waited for in the next rounds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.statements import Seat

# Rounds in which a seat that was late once is not waited for; each further time it is four times as many.
FIRST_ROUNDS = 4
MOST_ROUNDS = 64
# After so many rounds in time a seat has an account of its own. Until then it has that of its vote, so that one seat
# after the other counts as one.
OWN_AFTER = 16


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

    def end_round(
        self, epoch: Epoch, roster: Collection[Seat], late: Collection[Seat], unreached: Collection[Seat] = ()
    ) -> None:
        """Note who of a roster has kept the others waiting in a round.

        Args:
            unreached: with whom most have averaged in vain
        """
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

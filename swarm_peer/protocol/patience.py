"""For whom a leader waits: a seat that has kept the others waiting is not waited for in the next rounds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarm_peer.protocol.statements import Seat

# Rounds in which a seat that was late once is not waited for; each further time it is four times as many.
FIRST_ROUNDS = 4
MOST_ROUNDS = 64


class Patience:
    """The seats that a leader waits for, by how they have kept time before.

    A seat that is not waited for takes part all the same where it is in time.
    """

    def __init__(self) -> None:
        self._left: dict[Seat, int] = {}
        self._penalty: dict[Seat, int] = {}

    def waited_for(self, seats: Iterable[Seat]) -> set[Seat]:
        """Those of some seats that are worth waiting for."""
        return {seat for seat in seats if not self._left.get(seat)}

    def end_round(self, roster: Collection[Seat], late: Collection[Seat]) -> None:
        """Note who of a roster has kept the others waiting in a round."""
        for seat in roster:
            if seat in late and not self._left.get(seat):
                penalty = min(max(4 * self._penalty.get(seat, 0), FIRST_ROUNDS), MOST_ROUNDS)
                self._left[seat] = self._penalty[seat] = penalty
            elif self._left.get(seat):
                self._left[seat] -= 1  # nobody knows whether it would have been in time
            else:
                self._left[seat], self._penalty[seat] = 0, max(self._penalty.get(seat, 0) - 1, 0)
        for seat in self._left.keys() - set(roster):
            del self._left[seat], self._penalty[seat]

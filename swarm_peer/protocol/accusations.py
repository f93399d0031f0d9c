"""Accusations after a cut has failed: who was to blame, and whom the next cut does without. Pure.

Nobody is believed: of an accuser and whom it accuses, one is to blame, and a liar can be either. So a leader leaves out
each of them in its turn. The others agree by being a quorum themselves; nobody agrees to be left out for what others
say of it, or a leader could have members say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Blamed, Cut
from swarm_peer.protocol.statements import Seat, Signed

# Seats that are left out together: one, or all of a vote.
Unit = frozenset[Seat]
# Units that one cut does without at most.
MOST_LEFT_OUT = 3


def culprits_of(
    epoch: Epoch, cut: Cut, blamed: Mapping[Seat, Signed[Blamed]], dissenting: set[Seat]
) -> tuple[Unit, ...]:
    """The units of which one at least was to blame for a cut that has failed, the likelier ones first.

    It is those whom most votes of the cut accuse, or whom these accuse: a member that has failed first, for what one of
    them did to it alone, is accused by all others. Or else it is one of the pair between which most accusations are;
    or anybody, where nobody is accused.

    Args:
        dissenting: members that have another result than most
    """
    accusers = {
        accused: {author for author, each in blamed.items() if accused in each.body.seats and author != accused}
        for accused in cut.seats
    }

    def units_of(seats: set[Seat]) -> list[Unit]:
        votes = sorted({epoch.vote_of(seat) for seat in seats})
        return [frozenset(seat for seat in cut.seats if epoch.vote_of(seat) == vote) for vote in votes]

    if worst := dissenting | {accused for accused, by in accusers.items() if epoch.is_quorum(by, cut.seats)}:
        named = {accused for accused in cut.seats if accusers[accused] & worst} - worst
        # A member that accuses most of the others is likelier to blame itself; of two others, both are most.
        is_sound = not epoch.is_quorum(named, cut.seats) or len({epoch.vote_of(seat) for seat in cut.seats}) <= 3
        together = [frozenset(worst)] if epoch.is_quorum(set(cut.seats) - worst, cut.seats) else []
        each = [unit & worst for unit in units_of(worst)]
        return (*together, *each, *(units_of(named) if is_sound else ()))
    pairs = Counter(frozenset({author, accused}) for accused, by in accusers.items() for author in by)
    if pairs:
        pair = max(pairs.items(), key=lambda item: (item[1], sorted(item[0])))[0]
        return tuple(units_of(set(pair)))
    units = units_of(set(cut.seats))
    first = cut.round % len(units)  # each round begins with another vote
    return (*units[first:], *units[:first])


def to_leave_out(
    culprits: Sequence[Sequence[Unit]], order: Callable[[Unit], int], is_enough: Callable[[set[Seat]], bool]
) -> set[Seat] | None:
    """The fewest units with one at least of the culprits of each failed cut; None if no few of them leave enough.

    The members of a cut that was without some of them are none of its own culprits, so nothing is tried twice.

    Args:
        order: of two units, the one with the smaller number is left out first
        is_enough: whether a cut can do without some seats
    """

    def search(left_out: set[Seat], more: int) -> set[Seat] | None:
        missed = next((each for each in culprits if not any(unit <= left_out for unit in each)), None)
        if missed is None:
            return left_out if is_enough(left_out) else None
        found = (search(left_out | unit, more - 1) for unit in sorted(missed, key=order) if more)
        return next((each for each in found if each is not None), None)

    tries = (search(set(), most) for most in range(MOST_LEFT_OUT + 1))
    return next((each for each in tries if each is not None), None)

"""Accusations after a cut has failed: whom the next cut does without. Pure.

A leader leaves out whom accusations are about, and those agree to it by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Blamed, Cut
from swarm_peer.protocol.statements import Seat, Signed


def to_leave_out(
    epoch: Epoch, cut: Cut, blamed: dict[Seat, Signed[Blamed]]
) -> tuple[set[Seat], tuple[Signed[Blamed], ...]]:
    """The seats that are left out after accusations, and these.

    It is all whom most votes of the cut accuse; or else all seats of two votes, of accuser and accused of the pair
    between which most accusations are, since one of the two lies. The others whom that accuser accuses stay.
    """
    accusers = {
        accused: {author for author, each in blamed.items() if accused in each.body.seats and author != accused}
        for accused in cut.seats
    }
    if worst := {accused for accused, by in accusers.items() if epoch.is_quorum(by, cut.seats)}:
        authors = sorted(set[Seat]().union(*(accusers[accused] for accused in worst)))
        return worst, tuple(blamed[author] for author in authors)
    pairs = Counter(
        frozenset({author, accused})
        for author, each in blamed.items()
        for accused in each.body.seats
        if author != accused and accused in cut.seats
    )
    if not pairs:
        return set(), ()
    pair = max(pairs.items(), key=lambda item: (item[1], sorted(item[0])))[0]
    author = next(seat for seat in sorted(pair) if seat in blamed and pair <= {seat, *blamed[seat].body.seats})
    votes = {epoch.vote_of(seat) for seat in pair}
    return {seat for seat in cut.seats if epoch.vote_of(seat) in votes}, (blamed[author],)


def in_turn(epoch: Epoch, seats: Collection[Seat], number: int, attempt: int) -> set[Seat]:
    """Nobody, then all seats of one vote, another one in each attempt; and anew once each was left out.

    Args:
        number: of the round; each round begins with another vote
        attempt: 1 for the first one after a failure
    """
    votes = sorted({epoch.vote_of(seat) for seat in seats})
    if (turn := (attempt - 1) % (len(votes) + 1)) == 0:
        return set()
    return {seat for seat in seats if epoch.vote_of(seat) == votes[(turn + number) % len(votes)]}


def is_rightly_left_out(seat: Seat, cut: Cut, before: Cut, epoch: Epoch) -> bool:
    """Whether a seat that is ready agrees to be left out of a cut, for what was said about the one before.

    It was in that one, and accuses a member of that, or is accused by one, and the cut lacks the votes of these two
    alone; or most votes of that one accuse it. A seat of another life or ticket than were in it is anybody's invention.

    Args:
        epoch: of the cut
    """
    if seat not in before.seats:
        return False
    about_it = [signed.body for signed in cut.blamed if signed.body.cut == before.hash]
    accusers = {body.author for body in about_it if seat in body.seats} & set(before.seats)
    accused = {each for body in about_it if body.author == seat for each in body.seats} & set(before.seats)
    votes = {epoch.vote_of(each) for each in cut.seats}
    lacking = {epoch.vote_of(each) for each in before.seats if each in epoch.roster(cut.stage)} - votes
    others = {epoch.vote_of(each) for each in accusers | accused} - votes
    pairs = [{epoch.vote_of(seat), other} for other in others if lacking <= {epoch.vote_of(seat), other}]
    if epoch.is_quorum(accusers, before.seats):
        pairs.append(lacking)
    return any(holds_most(epoch, cut.stage, cut.seats, pair) for pair in pairs)


def holds_most(epoch: Epoch, stage: int, seats: Collection[Seat], without: Collection[str]) -> bool:
    """Whether some seats have most votes of a stage, of those that are not left out: else a leader could choose few."""
    return epoch.is_quorum(seats, [seat for seat in epoch.roster(stage) if epoch.vote_of(seat) not in without])

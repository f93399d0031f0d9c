"""An epoch follows from its parent and a set of wishes, the same for everybody."""

import itertools

import pytest

from swarm_peer.protocol.epochs import (
    BEGINNING,
    COORDINATORS,
    Certified,
    Epoch,
    Place,
    Restart,
    Rules,
    next_epoch,
)
from swarm_peer.protocol.statements import (
    Accepted,
    Ballot,
    EpochId,
    Join,
    KeySigned,
    Leave,
    Offer,
    Seat,
    Signed,
    Silent,
    Snapshot,
    Stuck,
)

RULES = Rules(num_stages=2, begin_anew_steps=5)
C = Seat("c", 1, "operator")
A, B, D, E = (Seat(name, 1, f"of {name}") for name in "abde")
ID = EpochId(1, C, 3)


def epoch_of(*places, restart=BEGINNING, begun=(0, 1)):
    return Epoch(ID, tuple(Place(stage, seat) for stage, seat in places), restart, begun)


FOUR = epoch_of((COORDINATORS, C), (0, A), (1, B), (1, D))


def places_after(epoch, *wishes):
    found = next_epoch(epoch, wishes, RULES)
    return None if found is None else [tuple(place) for place in found.places]


def join(seat, stage, epoch_id=ID, has_state=True):
    return Join(seat, epoch_id, stage, has_state)


def fresh(seat, stage):
    return join(seat, stage, has_state=False)


@pytest.mark.parametrize(
    ("wishes", "change"),
    [
        ([], None),
        ([join(E, 0)], [(0, E)]),
        ([join(E, 2)], None),  # no such stage
        ([join(E, -2)], None),
        ([join(E, 0, ID._replace(number=2))], None),  # about another epoch
        ([join(A, 0)], None),  # it is there
        ([join(A, 1)], [(1, A)]),  # it serves two stages
        ([join(E, 1), join(E, 0)], [(0, E), (1, E)]),
        ([Leave(E, ID, 0)], None),  # it is not there
        ([Leave(A, ID, 1)], None),
    ],
)
def test_who_wishes_gets_a_place_or_none(wishes, change):
    expected = None if change is None else [tuple(place) for place in FOUR.places] + change
    for order in itertools.permutations(wishes):
        assert places_after(FOUR, *order) == expected


def test_who_leaves_is_gone_and_the_next_one_leads():
    found = next_epoch(FOUR, [Leave(B, ID, 1)], RULES)
    assert (found.leader(1), found.id) == (D, ID.next())
    assert places_after(FOUR, Leave(A, ID, 0), join(A, 1)) == [(COORDINATORS, C), (1, B), (1, D), (1, A)]


def test_a_later_life_takes_the_place_of_an_earlier_one():
    again = A._replace(life=2)
    assert places_after(FOUR, join(again, 1)) == [(COORDINATORS, C), (1, B), (1, D), (1, again)]
    later = epoch_of((COORDINATORS, C), (0, again), (1, B))
    assert places_after(later, join(A, 0)) is None
    third = A._replace(life=3)
    assert places_after(later, join(third, 1), join(A._replace(life=4), 1))[-1] == (1, A._replace(life=4))


def test_nobody_is_put_out_on_one_word():
    assert places_after(FOUR, Silent(B, ID, frozenset({A}))) is None
    two = [Silent(seat, ID, frozenset({A})) for seat in (B, C)]
    assert places_after(FOUR, *two) is None, "two of four tickets are no quorum"
    three = [*two, Silent(D, ID, frozenset({A}))]
    assert places_after(FOUR, *three) == [(COORDINATORS, C), (1, B), (1, D)]
    assert places_after(FOUR, Silent(E, ID, frozenset({A})), *two) is None, "who has no seat has no vote"
    found = next_epoch(FOUR, [], RULES, new_id=EpochId(2, C, 0), silent=frozenset({A}))
    assert [seat.peer for seat in found.seats] == ["c", "b", "d"], "the run key's word is enough"


def test_a_hundred_peers_of_one_ticket_are_one_vote():
    many = [Seat(f"x{number:02}", 1, "sybil") for number in range(100)]
    epoch = epoch_of((COORDINATORS, C), (0, A), (1, B), *((0, seat) for seat in many))
    assert epoch.voters == (A, B, many[0])
    assert places_after(epoch, *(Silent(seat, ID, frozenset({A})) for seat in many)) is None


def test_peers_of_few_tickets_vote_one_by_one():
    epoch = epoch_of(*((0, Seat(f"x{number}", 1, "mine")) for number in range(9)))
    assert [seat.peer for seat in epoch.voters] == [f"x{number}" for number in range(7)]


def test_a_stuck_leader_loses_the_lead_alone():
    epoch = epoch_of((1, B), (1, D), (1, E), (0, A))
    assert places_after(epoch, Stuck(D, ID, 1, B)) is None
    assert places_after(epoch, Stuck(D, ID, 1, E), Stuck(E, ID, 1, E)) is None, "it does not lead"
    both = [Stuck(D, ID, 1, B), Stuck(E, ID, 1, B)]
    assert places_after(epoch, *both) == [(1, D), (1, E), (0, A), (1, B)]


# --- a lost stage

LOST = epoch_of((COORDINATORS, C), (0, A), (0, D))


def offer(seat, step, *snapshots, round_number=None):
    held = frozenset(Snapshot(at, stage, f"{at}/{stage}") for at, stage in snapshots)
    return Offer(seat, ID, step if round_number is None else round_number, step, held)


def test_a_lost_stage_waits_without_snapshots():
    assert places_after(LOST, fresh(E, 1)) is None
    assert places_after(LOST, fresh(E, 1), offer(A, 30, (30, 0))) is None, "of stage 1 there is none"


def test_the_newest_snapshot_of_all_stages_is_where_it_begins_anew():
    offers = [offer(A, 34, (30, 0), (30, 1), (20, 0), (20, 1)), offer(D, 35, (35, 0), (20, 1), round_number=41)]
    found = next_epoch(LOST, [fresh(E, 1), *offers], RULES)
    assert found.restart == Restart(42, 30, ("30/0", "30/1"), found.id)
    assert (found.leader(1), found.begun) == (E, (0, 1))
    assert next_epoch(found, [], RULES) is None


def test_who_left_its_place_to_take_over_the_lost_stage_offers_what_it_holds():
    found = next_epoch(LOST, [fresh(E, 1), offer(A, 34), offer(E, 33, (30, 0), (30, 1))], RULES)
    assert found.restart == Restart(35, 30, ("30/0", "30/1"), found.id)


def test_the_snapshots_of_a_restart_are_of_one_base():
    def held(*snapshots):
        return frozenset(Snapshot(step, stage, f"{base}/{step}/{stage}", base) for step, stage, base in snapshots)

    own, left_behind = ((20, 0, "new"), (20, 1, "new"), (30, 0, "new")), ((30, 1, "old"), (20, 0, "old"))
    offers = [Offer(A, ID, 34, 30, held(*own)), Offer(D, ID, 30, 30, held(*left_behind))]
    found = next_epoch(LOST, [fresh(E, 1), *offers], RULES)
    assert found.restart == Restart(35, 20, ("new/20/0", "new/20/1"), found.id)
    both = [Offer(seat, ID, 34, 30, held(*own)) for seat in (A, D)]
    other = Offer(C, ID, 30, 30, held((20, 0, "old"), (20, 1, "old")))
    found = next_epoch(LOST, [fresh(E, 1), other, *both], RULES)
    assert found.restart.entries == ("new/20/0", "new/20/1"), "more hold these"


def test_a_run_of_few_steps_begins_with_its_initial_weights():
    assert next_epoch(LOST, [fresh(E, 1), offer(A, 5)], RULES).restart == Restart(6, 0, (), ID.next())
    assert next_epoch(LOST, [fresh(E, 1), offer(A, 6)], RULES) is None


def test_a_stage_that_nobody_has_served_yet_is_not_lost():
    unbegun = epoch_of((COORDINATORS, C), (0, A), begun=(0,))
    found = next_epoch(unbegun, [fresh(E, 1)], RULES)
    assert (found.restart, found.begun) == (BEGINNING, (0, 1))


def test_who_has_the_state_takes_the_place_of_the_last_one_and_nothing_is_lost():
    epoch = epoch_of((0, A), (1, B))
    found = next_epoch(epoch, [join(E, 1), Leave(B, ID, 1)], RULES)
    assert (found.restart, found.leader(1)) == (BEGINNING, E)


def test_who_has_no_state_joins_no_stage_that_others_serve():
    epoch = epoch_of((0, A), (1, B))
    assert next_epoch(epoch, [fresh(E, 1)], RULES) is None
    begins = next_epoch(epoch, [fresh(E, 1), Leave(B, ID, 1), offer(A, 2)], RULES)
    assert (begins.restart, begins.leader(1)) == (Restart(3, 0, (), ID.next()), E)


def test_an_older_life_leaves_no_state_to_a_later_one():
    again = B._replace(life=2)
    found = next_epoch(epoch_of((0, A), (1, B)), [fresh(again, 1), offer(A, 2)], RULES)
    assert (found.restart, found.roster(1)) == (Restart(3, 0, (), ID.next()), (again,))


# --- certificates


def votes(parent, successor, *seats, ballot=1):
    return tuple(Signed(Accepted(seat, parent.id, Ballot(ballot, C), successor.hash), b"") for seat in seats)


def test_an_epoch_is_certified_by_a_quorum_of_its_parents_voters_in_one_ballot():
    child = next_epoch(FOUR, [join(E, 0)], RULES)
    assert FOUR.voters == (A, B, D), "three of four can do without one, as all four could"
    assert Certified(child, votes(FOUR, child, A, B)).follows(FOUR)
    assert not Certified(child, votes(FOUR, child, A)).follows(FOUR)
    assert not Certified(child, votes(FOUR, child, A, C, E)).follows(FOUR), "these have no votes"
    split = votes(FOUR, child, A) + votes(FOUR, child, B, ballot=2)
    assert not Certified(child, split).follows(FOUR)
    other = next_epoch(FOUR, [join(E, 1)], RULES)
    assert not Certified(child, votes(FOUR, other, A, B, D)).follows(FOUR)
    later = Epoch(ID.next().next(), child.places, child.restart, child.begun)
    assert not Certified(later, votes(FOUR, later, A, B, D)).follows(FOUR)


def test_voters_are_an_odd_number():
    assert epoch_of((COORDINATORS, C)).voters == (C,)
    assert epoch_of((COORDINATORS, C), (0, A)).voters == (A,), "it goes on without its coordinator"
    assert epoch_of((COORDINATORS, C), (0, A), (1, B)).voters == (C, A, B)
    assert epoch_of((0, A), (1, B)).voters == (A,)


def test_the_run_keys_signature_is_about_one_epoch():
    child = next_epoch(FOUR, [join(E, 0)], RULES)
    assert Certified(child, (Signed(KeySigned(child.hash), b""),)).is_of_key
    assert not Certified(child, (Signed(KeySigned(FOUR.hash), b""),)).is_of_key


def test_two_sides_that_choose_the_same_rounds_and_snapshots_begin_anew_each_for_itself():
    wishes = [fresh(E, 1), offer(A, 5)]
    here, there = (next_epoch(LOST, wishes, RULES, new_id=new_id) for new_id in (None, EpochId(2, C, 0)))
    assert here.restart[:3] == there.restart[:3]
    assert here.restart != there.restart


def test_the_run_key_takes_all_stages_for_begun():
    """It may know an old epoch: a seat of a stage that has begun since has to go back with the others."""
    before = epoch_of((COORDINATORS, C), (0, A), begun=(0,))
    found = next_epoch(before, [], RULES, new_id=EpochId(2, C, 0))
    assert (found.begun, found.lost) == ((0, 1), (1,))
    nothing = epoch_of((COORDINATORS, C), begun=())
    assert next_epoch(nothing, [], RULES, new_id=EpochId(2, C, 0)).begun == (), "nobody has made a round"

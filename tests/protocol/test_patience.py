"""A leader waits ever more seldom for a seat that keeps it waiting, and again for one that is in time."""

import itertools

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place
from swarm_peer.protocol.patience import FIRST_ROUNDS, MOST_ROUNDS, OWN_AFTER, Patience
from swarm_peer.protocol.statements import EpochId, Seat

A, B, C = (Seat(name, 1, f"of {name}") for name in ("a", "b", "c"))
OTHERS_OF_B = [Seat(f"b{number}", 1, "of b") for number in range(8)]
ID = EpochId(1, Seat("coordinator", 1, ""), 0)
EPOCH = Epoch(ID, (Place(COORDINATORS, ID.author), *(Place(0, seat) for seat in (A, B, C))), BEGINNING, (0,))


def rounds_waited(patience, num_rounds, is_late):
    """The rounds in which B is waited for; it keeps the others waiting in those that `is_late` names."""
    waited = []
    for number in range(num_rounds):
        late = patience.waited_for(EPOCH, [A, B]) & ({B} if is_late(number) else set())
        waited += [number] if B in patience.waited_for(EPOCH, [A, B]) else []
        patience.end_round(EPOCH, [A, B], late)
    return waited


def test_who_is_always_late_is_waited_for_ever_more_seldom():
    waited = rounds_waited(Patience(), 200, lambda number: True)
    pauses = [after - before - 1 for before, after in itertools.pairwise(waited)]
    assert pauses == [FIRST_ROUNDS, 4 * FIRST_ROUNDS, MOST_ROUNDS, MOST_ROUNDS]


def test_who_is_in_time_for_long_is_forgiven():
    patience = Patience()
    patience.end_round(EPOCH, [A, B], {B})
    rounds_waited(patience, 2 * FIRST_ROUNDS, lambda number: False)
    patience.end_round(EPOCH, [A, B], {B})
    assert rounds_waited(patience, FIRST_ROUNDS + 1, lambda number: False) == [FIRST_ROUNDS]


def test_one_new_seat_of_a_ticket_after_the_other_is_waited_for_as_if_it_were_one():
    patience, waited = Patience(), 0
    for seat in OTHERS_OF_B:
        late = patience.waited_for(EPOCH, [A, seat]) - {A}
        waited += len(late)
        patience.end_round(EPOCH, [A, seat], late)
    assert waited == 2
    assert patience.waited_for(EPOCH, [A, C]) == {A, C}


def test_a_seat_that_was_long_in_time_is_waited_for_whatever_others_of_its_ticket_do():
    patience = Patience()
    for _ in range(OWN_AFTER):
        patience.end_round(EPOCH, [A, B], ())
    patience.end_round(EPOCH, [A, B, OTHERS_OF_B[0]], {OTHERS_OF_B[0]})
    assert patience.waited_for(EPOCH, [A, B, OTHERS_OF_B[0]]) == {A, B}


def test_with_whom_most_have_averaged_in_vain_takes_no_part_for_some_rounds():
    patience = Patience()
    patience.end_round(EPOCH, [A, B], {B}, {B})
    left_out = []
    for number in range(2 * FIRST_ROUNDS):
        left_out += [number] if patience.left_out(EPOCH, [A, B]) == {B} else []
        patience.end_round(EPOCH, [A, B], ())
    assert left_out == list(range(FIRST_ROUNDS))
    patience.end_round(EPOCH, [A, B], {B})
    assert not patience.left_out(EPOCH, [A, B]), "who is late takes part where it is in time"

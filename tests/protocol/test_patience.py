"""A leader waits ever more seldom for a seat that keeps it waiting, and again for one that is in time."""

import itertools

from swarm_peer.protocol.patience import FIRST_ROUNDS, MOST_ROUNDS, Patience
from swarm_peer.protocol.statements import Seat

A, B = Seat("a", 1, "of a"), Seat("b", 1, "of b")


def rounds_waited(patience, num_rounds, is_late):
    """The rounds in which B is waited for; it keeps the others waiting in those that `is_late` names."""
    waited = []
    for number in range(num_rounds):
        late = patience.waited_for([A, B]) & ({B} if is_late(number) else set())
        waited += [number] if B in patience.waited_for([A, B]) else []
        patience.end_round([A, B], late)
    return waited


def test_who_is_always_late_is_waited_for_ever_more_seldom():
    waited = rounds_waited(Patience(), 200, lambda number: True)
    pauses = [after - before - 1 for before, after in itertools.pairwise(waited)]
    assert pauses == [FIRST_ROUNDS, 4 * FIRST_ROUNDS, MOST_ROUNDS, MOST_ROUNDS]


def test_who_is_in_time_for_long_is_forgiven():
    patience = Patience()
    patience.end_round([A, B], {B})
    rounds_waited(patience, 2 * FIRST_ROUNDS, lambda number: False)
    patience.end_round([A, B], {B})
    assert rounds_waited(patience, FIRST_ROUNDS + 1, lambda number: False) == [FIRST_ROUNDS]

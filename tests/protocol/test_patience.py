"""A leader waits ever more seldom for a seat that keeps it waiting, and again for one that is in time."""

import itertools
from types import SimpleNamespace

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.patience import (
    EXCUSED_EVERY,
    FIRST_ROUNDS,
    FREE_S,
    MOST_ROUNDS,
    OWN_AFTER,
    WORK_PER_WAIT,
    Patience,
    Waits,
)
from swarm_peer.protocol.statements import EpochId, Seat

A, B, C = (Seat(name, 1, f"of {name}") for name in ("a", "b", "c"))
OTHERS_OF_B = [Seat(f"b{number}", 1, "of b") for number in range(8)]
TIMING = Timing()
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


def waited_after(rounds, waits_s, works_s):
    """For how long a leader is found to have had a member wait, after rounds of so many seconds each."""
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=False, num_voids=0)
    waits, now_s = Waits(0.0, None), 0.0
    for _ in range(rounds):
        for member.is_waiting, seconds in ((False, works_s), (True, waits_s)):
            for _ in range(seconds):
                now_s += 1.0
                waits.look(now_s, member, TIMING)
        member.log.next_round += 1
    return waits.waited_s


def test_what_a_leader_has_its_members_wait_adds_up_over_rounds():
    found = waited_after(rounds=2, waits_s=60, works_s=4)
    assert found > TIMING.stuck_s, "otherwise it keeps the lead as long as each round ends"


def test_a_member_that_works_most_of_the_time_does_not_find_its_leader_stuck():
    assert waited_after(rounds=1000, waits_s=5, works_s=5 * WORK_PER_WAIT) <= 5


def test_short_rounds_of_messages_alone_are_nobody_s_fault():
    assert waited_after(rounds=1000, waits_s=int(FREE_S), works_s=0) <= FREE_S


def test_an_hour_of_waiting_is_made_up_for_in_some_minutes():
    """Nobody could do anything about it, where a stage or most voters were gone."""
    assert waited_after(rounds=1, waits_s=3600, works_s=0) == 2 * TIMING.stuck_s


def test_a_stall_of_the_own_process_is_no_waiting():
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=True, num_voids=0)
    waits = Waits(0.0, None)
    assert not waits.look(300.0, member, TIMING)
    assert waits.waited_s == TIMING.resend_s


def test_a_leader_that_has_its_members_give_up_what_they_compute_has_them_wait():
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=False, num_voids=0)
    waits, now_s = Waits(0.0, None), 0.0
    while not waits.look(now_s, member, TIMING) and now_s < 600.0:
        now_s += 1.0
        member.num_voids = int(now_s // 5)
    assert TIMING.stuck_s < now_s < TIMING.stuck_s + 10.0


def test_a_leader_that_tells_of_other_heads_once_keeps_the_lead():
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=False, num_voids=3)
    waits = Waits(0.0, None)
    for now_s in range(1000):
        member.num_voids = 3 + (now_s > 500)
        assert not waits.look(float(now_s), member, TIMING)
    assert waits.waited_s == 0.0


def test_a_leader_that_tells_of_other_heads_now_and_then_keeps_the_lead():
    """Whatever a round's work takes: else the second time in a week would cost it the lead."""
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=False, num_voids=0)
    waits, seconds = Waits(0.0, None), int(2 * TIMING.stuck_s)
    for now_s in range(40 * seconds):
        log.next_round = now_s // seconds
        member.num_voids = (now_s + seconds // 2) // (EXCUSED_EVERY * seconds)
        assert not waits.look(float(now_s), member, TIMING)


def averages_in_vain(rounds_between):
    """How long a member waits whose averages of a minute are made again by the same ones, once in so many rounds."""
    log = SimpleNamespace(next_round=0, committed=())
    member = SimpleNamespace(log=log, averaging=None, is_waiting=False, num_voids=0)
    waits, now_s, most_s = Waits(0.0, None), 0.0, 0.0
    for log.next_round in range(0, 4 * rounds_between, rounds_between):
        for number in range(2):
            member.averaging = SimpleNamespace(round=log.next_round, hash=f"{log.next_round} {number}", seats=())
            for _ in range(60):
                now_s += 1.0
                waits.look(now_s, member, TIMING)
                most_s = max(most_s, waits.waited_s)
    return most_s


def test_a_leader_may_try_with_the_same_ones_again_now_and_then():
    assert averages_in_vain(EXCUSED_EVERY) == 0.0
    assert averages_in_vain(1) > TIMING.stuck_s

"""Seats of stage 0 read different slices, and together launch the batch."""

import pytest

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SliceId, WindowRange
from swarm_peer.protocol.grants import Grants, Wants
from swarm_peer.protocol.statements import EpochId, Seat

A, B = Seat("a", 1, "of a"), Seat("b", 1, "of b")
REIGN = EpochId(1, A, 4)


@pytest.fixture
def ledger():
    return Ledger(6)


@pytest.fixture
def grants():
    return Grants(REIGN, batch=8, unit=2, patience_s=60.0)


def wants(seen=0, reads=(), slices=2, claimed=0, samples=2, voids=0, round=5):
    return Wants(seen, tuple(reads), slices, round, claimed, samples, voids)


def test_two_seats_read_different_slices(grants, ledger):
    first, second = (grants.grant(seat, wants(), ledger, 0.0) for seat in (A, B))
    assert len({*first.slices, *second.slices}) == 4


def test_a_grant_that_was_not_seen_is_given_again(grants, ledger):
    first = grants.grant(A, wants(), ledger, 0.0)
    assert grants.grant(A, wants(), ledger, 0.0) == first


def test_what_a_seat_has_put_away_others_may_read(grants, ledger):
    first = grants.grant(A, wants(slices=6), ledger, 0.0)
    assert set(grants.grant(B, wants(slices=1), ledger, 0.0).slices) & set(first.slices) == set()
    grants.grant(A, wants(seen=first.number, reads=first.slices[1:], slices=0), ledger, 0.0)
    seen = grants.grant(B, wants(slices=1), ledger, 0.0)
    assert first.slices[0] in grants.grant(B, wants(seen=seen.number, slices=3), ledger, 0.0).slices


def test_what_a_period_has_yet_to_hold_is_read_by_nobody_else(grants, ledger):
    first = grants.grant(A, wants(slices=6), ledger, 0.0)
    grants.follow([A, B], ledger, 4, decided_in=6, carried_to=6)
    grants.grant(A, wants(seen=first.number, reads=first.slices[1:], slices=0), ledger, 0.0)
    assert first.slices[0] not in grants.grant(B, wants(slices=9), ledger, 0.0).slices
    assert first.slices[0] not in grants.grant(A, wants(reads=first.slices[1:], slices=9), ledger, 0.0).slices
    grants.follow([A, B], ledger, 7, decided_in=9, carried_to=6)
    assert first.slices[0] in grants.grant(B, wants(slices=12), ledger, 0.0).slices


def test_an_old_message_puts_nothing_away(grants, ledger):
    first = grants.grant(A, wants(), ledger, 0.0)
    second = grants.grant(A, wants(seen=first.number, reads=first.slices, slices=1), ledger, 0.0)
    assert grants.grant(A, wants(seen=first.number, reads=first.slices, slices=1), ledger, 0.0) == second


def test_a_slice_that_was_put_away_and_is_granted_again_is_news(grants):
    ledger = Ledger(1)
    first = grants.grant(A, wants(slices=1), ledger, 0.0)
    second = grants.grant(A, wants(seen=first.number, slices=1), ledger, 0.0)
    assert second.slices == first.slices
    assert second.number > first.number


def test_a_later_pass_begins_where_the_present_one_has_nothing_left(grants):
    ledger = Ledger(2)
    grants.grant(A, wants(slices=2), ledger, 0.0)
    assert {slice_id.pass_number for slice_id in grants.grant(B, wants(), ledger, 0.0).slices} == {1}


def test_what_a_seat_that_left_has_read_waits_for_the_round_that_decides(grants):
    ledger = Ledger(1)
    held = grants.grant(A, wants(slices=1), ledger, 0.0).slices[0]
    grants.follow([B], ledger, 5, 6)
    assert grants.grant(B, wants(slices=1), ledger, 0.0).slices[0].pass_number == 1
    grants.follow([B], ledger, 6, 7)
    assert held not in grants.grant(B, wants(slices=1), ledger, 0.0).slices
    ledger.add([WindowRange(*held, 0, 3)])
    grants.follow([B], ledger, 7, 8)
    assert held in grants.grant(B, wants(seen=9, slices=1), ledger, 0.0).slices


def test_slices_that_have_counted_are_granted_no_more(grants, ledger):
    first = grants.grant(A, wants(), ledger, 0.0)
    ledger.add(WindowRange(*slice_id, 0, 2, True) for slice_id in first.slices)
    grants.follow([A], ledger, 6, 6)
    assert not set(grants.grant(A, wants(seen=first.number), ledger, 0.0).slices) & set(first.slices)


def test_a_new_leader_takes_over_what_seats_read(grants, ledger):
    read = SliceId(0, 3)
    grants.hold(B, [read])
    granted = [
        grants.grant(A, wants(slices=9), ledger, 0.0).slices,
        grants.grant(B, wants(reads=[read], slices=0), ledger, 0.0).slices,
    ]
    assert read not in granted[0]
    assert granted[1] == (read,)


def test_seats_launch_the_batch_together_and_no_more(grants, ledger):
    assert grants.grant(A, wants(samples=6), ledger, 0.0).up_to == 6
    assert grants.grant(B, wants(samples=6), ledger, 0.0).up_to == 2
    assert grants.grant(A, wants(claimed=6, samples=6), ledger, 0.0).up_to == 6


def test_a_seat_gets_no_more_at_a_time_than_leaves_the_others_their_part(grants, ledger):
    grants.follow([A, B], ledger, 5, 5)
    assert grants.grant(A, wants(samples=8), ledger, 0.0).up_to == 4
    assert grants.grant(B, wants(samples=2), ledger, 0.0).up_to == 2
    grants.note_done(A, 5, 2, 2, 0.0)
    assert grants.grant(A, wants(samples=6, claimed=4), ledger, 0.0).up_to == 6, "what is done makes room for more"


def test_the_share_of_a_seat_that_does_nothing_is_for_others(grants, ledger):
    grants.grant(A, wants(samples=6), ledger, 0.0)
    grants.note_done(A, 5, 2, 2, 10.0)
    assert grants.grant(B, wants(samples=8), ledger, 50.0).up_to == 2
    assert grants.grant(B, wants(claimed=2, samples=8), ledger, 80.0).up_to == 6


def test_counts_without_receipts_take_nothing_of_the_batch(grants, ledger):
    grants.grant(A, wants(samples=8), ledger, 0.0)
    grants.note_done(A, 5, 8, 6, 0.0)
    assert grants.grant(A, wants(claimed=8, samples=4), ledger, 0.0).up_to == 10


def test_counts_beyond_what_was_granted_leave_the_others_no_more_than_the_batch(grants, ledger):
    grants.grant(A, wants(samples=4), ledger, 0.0)
    grants.note_done(A, 5, 64, 3, 0.0)
    assert grants.grant(B, wants(samples=8), ledger, 0.0).up_to == 6, "of 5, in microbatches of two"


def test_a_seat_that_has_given_up_its_work_begins_anew(grants, ledger):
    assert grants.grant(A, wants(samples=8), ledger, 0.0).up_to == 8
    assert grants.grant(A, wants(claimed=0, samples=4, voids=1), ledger, 0.0).up_to == 4
    assert grants.grant(A, wants(claimed=8, samples=4, voids=0), ledger, 0.0).up_to == 4


def test_another_round_has_another_batch(grants, ledger):
    assert grants.grant(A, wants(samples=8), ledger, 0.0).up_to == 8
    assert grants.grant(B, wants(samples=8, round=6), ledger, 0.0).up_to == 8

"""Whom a leader tries a round with after a cut has failed."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.attempts import Attempt, Failure, next_try
from swarm_peer.protocol.epochs import BEGINNING, Epoch, Place
from swarm_peer.protocol.log import Blamed, Cut, Have, Part
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.statements import EpochId, Seat, Signed

A, B, C, D, E = FIVE = tuple(Seat(name, 1, f"of {name}") for name in "abcde")
ID = EpochId(1, A, 0)
SPOKEN = Failure(set(), has_gone=False, has_spoken=True)
WEIGHTS = dict(zip(FIVE, (1, 5, 2, 3, 4), strict=True))


def epoch_of(seats, *elsewhere):
    return Epoch(ID, (*(Place(1, seat) for seat in seats), *(Place(0, seat) for seat in elsewhere)), BEGINNING, (0, 1))


def of_one_ticket(seats):
    return tuple(seat._replace(ticket="all") for seat in seats)


def attempt_of(seats, number=0, **blamed):
    """A cut of some seats that has failed; each blames those whose letters stand there."""
    parts = tuple(Part(seat, (), ()) for seat in seats)
    cut = Cut(stage=1, round=7, epoch=ID, attempt=number, parent="", root="", base=(), averages=True, parts=parts)
    by_name = {seat.peer: seat for seat in seats}
    said = {
        by_name[name]: Signed(Blamed(by_name[name], ID, cut.hash, tuple(by_name[each] for each in accused)), b"")
        for name, accused in blamed.items()
    }
    return Attempt(cut, (), 0.0, blamed=said)


def tries(epoch, seats, count, failure=SPOKEN, **blamed):
    """The members of the cuts that follow, if each fails as the first has."""
    weights = {seat: WEIGHTS[seat._replace(ticket=f"of {seat.peer}")] for seat in seats}
    found, unreached = [], set()
    for number in range(count):
        attempt = attempt_of(seats, number, **blamed)
        chosen = next_try(epoch, attempt, failure, weights, set(), unreached)
        unreached = chosen.unreached
        found.append("".join(sorted(seat.peer for seat in chosen.seats)))
    return found


def nobody_blamed_by(seats):
    return {seat.peer: "" for seat in seats}


def test_where_nobody_knows_who_is_to_blame_all_try_once_more_and_then_without_each_in_turn():
    found = tries(epoch_of(FIVE), FIVE, 7, **nobody_blamed_by(FIVE))
    assert found[0] == found[6] == "abcde"
    assert set(found[1:6]) == {"bcde", "acde", "abde", "abce", "abcd"}


def test_the_work_of_one_is_taken_alone_only_after_each_was_left_out():
    seats = of_one_ticket(FIVE)
    found = tries(epoch_of(seats), seats, 7, **nobody_blamed_by(seats))
    assert found[0] == "abcde"
    assert {len(members) for members in found[1:6]} == {4}
    assert found[6] == "b", "it brings most"


@pytest.mark.parametrize(
    ("blamed", "expected"),
    [
        ({"a": "e", "b": "e", "c": "e", "d": "", "e": "a"}, ["abcd", "abcd", "abcd"]),
        ({"a": "e", "b": "e", "c": "", "d": "", "e": ""}, ["acd", "acd", "abcde"]),
        ({"a": "", "b": "", "c": "", "d": "", "e": "a"}, ["bcd", "bcd", "abcde"]),
    ],
    ids=["most accuse one", "two accuse one", "one accuses another"],
)
def test_who_is_accused_is_left_out_with_the_accuser_unless_most_accuse_it(blamed, expected):
    assert tries(epoch_of(FIVE), FIVE, 3, **blamed) == expected


def test_two_seats_of_a_ticket_that_accuse_each_other_do_not_stop_a_stage_that_has_no_other():
    first, second = of_one_ticket((A, B))
    epoch = epoch_of((first, second), C, D)
    assert epoch.is_divided
    assert tries(epoch, (first, second), 2, a="b", b="a") == ["b", "b"]


def test_two_tickets_that_accuse_each_other_try_again_together():
    """Neither could go on alone."""
    assert tries(epoch_of((A, B), C), (A, B), 3, a="b", b="a") == ["ab", "ab", "ab"]


def test_who_was_silent_for_too_long_is_not_in_the_next_and_counts_as_unreached_where_most_had_failed():
    epoch, attempt = epoch_of(FIVE), attempt_of(FIVE, a="e", b="e", c="e")
    attempt.said[D] = Signed(Have(D, ID, attempt.cut.hash, "digest"), b"")
    timing = Timing()
    assert attempt.failure(1.0, epoch, timing, has_more=False) is None, "it may yet speak"
    failure = attempt.failure(2.0 + timing.others_s, epoch, timing, has_more=False)
    assert failure == Failure({E}, has_gone=False, has_spoken=False)
    chosen = next_try(epoch, attempt, failure, WEIGHTS, set(), set())
    assert (chosen.seats, chosen.left_out, chosen.unreached) == ({A, B, C, D}, {E}, {E})


def test_after_a_member_has_lost_its_place_the_others_go_on():
    epoch = replace(epoch_of((A, B, C, D), E), begun=(0, 1))
    failure = attempt_of(FIVE).failure(0.1, epoch, Timing(), has_more=False)
    assert failure is not None
    assert failure.has_gone
    weights = {seat: WEIGHTS[seat] for seat in (A, B, C, D)}
    assert next_try(epoch, attempt_of(FIVE), failure, weights, set(), set()).seats == {A, B, C, D}


def test_where_nobody_is_ready_any_more_there_is_no_next_cut():
    assert next_try(epoch_of(FIVE), attempt_of(FIVE, a="b"), SPOKEN, {}, set(), set()) is None

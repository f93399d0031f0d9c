"""Whom a leader tries a round with after a cut has failed."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.accusations import Unit, to_leave_out
from swarm_peer.protocol.attempts import Attempt, Failure, next_try
from swarm_peer.protocol.epochs import BEGINNING, Epoch, Place
from swarm_peer.protocol.log import Blamed, Cut, Have, Part
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.statements import EpochId, Seat, Signed

A, B, C, D, E = FIVE = tuple(Seat(name, 1, f"of {name}") for name in "abcde")
ID = EpochId(1, A, 0)
SPOKEN = Failure(set(), has_gone=False)
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


def tries(epoch, seats, count, failed_by):
    """The members of the cuts that follow, and of the last one's those left out.

    Args:
        failed_by: says how a cut of some members fails: whom each of them blames, by letters; None if it does not
    """
    weights = {seat: WEIGHTS[seat._replace(ticket=f"of {seat.peer}")] for seat in seats}
    found, members, culprits = ["".join(seat.peer for seat in seats)], set(seats), ()
    for number in range(count):
        blamed = failed_by("".join(sorted(seat.peer for seat in members)))
        if blamed is None:
            break
        attempt = attempt_of(sorted(members), number, **blamed)
        members, _, culprits = next_try(epoch, attempt, SPOKEN, weights, set(), culprits, lambda unit: 0)
        found.append("".join(sorted(seat.peer for seat in members)))
    return found[1:]


def nobody_blames(members):
    return dict.fromkeys(members, "")


def links(*broken):
    """Two members that cannot reach each other say so, and the others accuse both or nobody."""

    def failed_by(members):
        bad = [link for link in broken if set(link) <= set(members)]
        accused = {each: "".join(set("".join(link for link in bad if each in link)) - {each}) for each in members}
        return accused if bad else None

    return failed_by


def test_where_nobody_knows_who_is_to_blame_all_try_once_more_and_then_without_each_in_turn():
    found = tries(epoch_of(FIVE), FIVE, 6, nobody_blames)
    assert found[0] == "abcde"
    assert set(found[1:]) == {"bcde", "acde", "abde", "abce", "abcd"}


def test_the_work_of_one_is_taken_alone_only_after_each_was_left_out():
    seats = of_one_ticket(FIVE)
    found = tries(epoch_of(seats), seats, 9, nobody_blames)
    assert found[0] == "abcde"
    assert {len(members) for members in found[1:6]} == {4}
    assert found[-1] == "b", "it brings most"


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_accuser_and_accused_each_is_left_out_in_its_turn(count):
    """One of the two lies. The others are a quorum without either, and nobody has to agree to be left out."""
    seats = FIVE[:count]
    for accuser, accused in ("ab", "ba"):
        found = tries(epoch_of(seats), seats, 2, lambda members, pair=(accuser, accused): _accusing(members, *pair))
        others = "".join(seat.peer for seat in seats[2:])
        assert {*found} == {f"a{others}", f"b{others}"}


def _accusing(members, accuser, accused):
    is_both = {accuser, accused} <= set(members)
    return {each: accused if each == accuser and is_both else "" for each in members}


def test_whom_most_accuse_is_left_out_first():
    assert tries(epoch_of(FIVE), FIVE, 1, lambda members: dict.fromkeys("abcd", "e") | {"e": "a"}) == ["abcd"]


def test_one_that_makes_another_fail_first_each_time_is_found():
    """The others accuse that one, since it has given up."""

    def failed_by(members):
        victim = next(each for each in members if each != "e")
        return {each: victim if each != victim else "e" for each in members} if "e" in members else None

    assert tries(epoch_of(FIVE), FIVE, 9, failed_by) == ["bcde", "abcd"]


def test_broken_links_that_share_no_seat_do_not_stop_a_stage():
    found = tries(epoch_of(FIVE), FIVE, 9, links("ab", "cd"))
    assert len(found) <= 3
    assert len(found[-1]) == 3


@pytest.mark.parametrize("count", [3, 4])
def test_two_whom_most_accuse_are_left_out_one_after_the_other_where_no_quorum_is_without_both(count):
    """A dead link, and the others accuse both of its ends."""

    def failed_by(members):
        return dict.fromkeys(members, "bc") | {"b": "c", "c": "b"} if {"b", "c"} <= set(members) else None

    [members] = tries(epoch_of(FIVE[:count]), FIVE[:count], 9, failed_by)
    assert members in ("abd"[: count - 1], "acd"[: count - 1])


def test_no_cut_is_made_that_could_get_no_agreement():
    """Who was left out for an accusation does not agree to it; so those that are left go on with that one."""
    epoch, attempt = epoch_of(FIVE[:4]), attempt_of((B, C, D), 1, b="d", c="d")
    attempt = replace(attempt, left_out={A}, failed_s=1.0)
    failure = Failure({D}, has_gone=False)
    culprits = ((Unit({A}), Unit({D})),)
    chosen = next_try(epoch, attempt, failure, dict.fromkeys((A, B, C, D), 1), set(), culprits, lambda unit: 0)
    assert chosen.seats == {A, B, C}


def test_one_with_another_result_than_most_is_left_out_where_the_others_lack_agreement():
    epoch, attempt = epoch_of(FIVE[:4]), replace(attempt_of((B, C, D), 1), left_out={A})
    for seat, digest in ((B, "good"), (C, "good"), (D, "bad")):
        attempt.said[seat] = Signed(Have(seat, ID, attempt.cut.hash, digest), b"")
    assert attempt.failure(0.1, epoch, Timing(), has_more=False, may_agree={A}) is None
    failure = attempt.failure(0.1, epoch, Timing(), has_more=False, may_agree=set())
    culprits = ((Unit({A}), Unit({D})),)
    chosen = next_try(epoch, attempt, failure, dict.fromkeys((A, B, C, D), 1), set(), culprits, lambda unit: 0)
    assert chosen.seats == {A, B, C}


def test_two_seats_of_a_ticket_that_accuse_each_other_do_not_stop_a_stage_that_has_no_other():
    first, second = of_one_ticket((A, B))
    epoch = epoch_of((first, second), C, D)
    assert epoch.is_divided
    assert tries(epoch, (first, second), 1, links("ab")) == ["b"]


def test_two_tickets_that_accuse_each_other_try_again_together():
    """Neither could go on alone."""
    assert tries(epoch_of((A, B), C), (A, B), 3, links("ab")) == ["ab", "ab", "ab"]


def test_who_was_left_out_last_is_the_last_to_be_left_out_again():
    culprits = ((Unit({A}), Unit({B})),)
    for earlier in (A, B):
        chosen = to_leave_out(culprits, lambda unit, earlier=earlier: int(earlier not in unit), lambda _: True)
        assert chosen == {earlier}


def test_who_was_silent_for_too_long_is_not_in_the_next_and_is_left_out_for_longer_where_most_had_failed():
    epoch, attempt = epoch_of(FIVE), attempt_of(FIVE, a="e", b="e", c="e")
    attempt.said[D] = Signed(Have(D, ID, attempt.cut.hash, "digest"), b"")
    timing = Timing()
    assert attempt.failure(1.0, epoch, timing, has_more=False, may_agree=set()) is None, "it may yet speak"
    failure = attempt.failure(2.0 + timing.others_s, epoch, timing, has_more=False, may_agree=set())
    assert failure == Failure({E}, has_gone=False)
    chosen = next_try(epoch, attempt, failure, WEIGHTS, set(), (), lambda unit: 0)
    assert chosen == ({A, B, C, D}, {E}, ((Unit({E}),),))


def test_after_a_member_has_lost_its_place_the_others_go_on():
    epoch = replace(epoch_of((A, B, C, D), E), begun=(0, 1))
    failure = attempt_of(FIVE).failure(0.1, epoch, Timing(), has_more=False, may_agree=set())
    assert failure is not None
    assert failure.has_gone
    weights = {seat: WEIGHTS[seat] for seat in (A, B, C, D)}
    assert next_try(epoch, attempt_of(FIVE), failure, weights, set(), (), lambda unit: 0).seats == {A, B, C, D}


def test_where_nobody_is_ready_any_more_there_is_no_next_cut():
    assert next_try(epoch_of(FIVE), attempt_of(FIVE, a="b"), SPOKEN, {}, set(), (), lambda unit: 0) is None

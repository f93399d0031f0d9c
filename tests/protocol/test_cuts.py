"""What a leader cuts, and when it cuts again."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Blamed, Close, Contribution, Done, HandedOver, Have, Name, Part, base_of
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Blame, Ready, Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext

LEADS, MATE, LIES, DIES = (Seat(name, 1, f"of {name}") for name in ("leads", "mate", "lies", "dies"))
C, GHOST = Seat("c", 1, ""), Seat("ghost", 1, "of nobody")
ID = EpochId(1, C, 0)
BASE = tuple(base_of(stage, BEGINNING) for stage in (0, 1))
STAGE_1 = (LEADS, MATE, LIES, DIES)
BEFORE = Epoch(ID, (Place(COORDINATORS, C), *(Place(1, seat) for seat in STAGE_1)), BEGINNING, (1,))
AFTER = replace(BEFORE, id=ID.next(), places=tuple(place for place in BEFORE.places if place.seat != DIES))


@pytest.fixture
def leader():
    rounds = RoundRules(num_stages=2, batch=8)
    context = RoundContext(
        num_stages=2, batch=8, unit=2, most=rounds.most, lag=0, averages=rounds.averages,
        is_rooted=lambda number: False, fills=lambda close: True, believed=lambda counts: {},
        epoch_of={ID: BEFORE, ID.next(): AFTER}.get,
        sign=lambda body: Signed(body, b""), timing=Timing(),
    )  # fmt: skip
    member = Member(me=LEADS, stage=1, restart=BEGINNING, context=context)
    leader = Leader(member=member, reign=ID, context=context)
    leader.is_synced = True
    member.closes[0] = Close(0, (Signed(Done(C, ID, 0, 0, 8, BASE), b""),))
    for seat in STAGE_1:
        part = Part(seat, (Contribution(Name(seat, 0), 2, (), BASE),))
        leader.take_ready(seat, Ready(1, 0, member.log.head, "", part), 0.0)
    return leader


def brought(leader, *contributions):
    given = tuple(
        Signed(HandedOver(each.name.seat, ID, each, ""), b"") for each in contributions if each.name.seat != LIES
    )
    part = Part(LIES, contributions, given)
    leader.take_ready(LIES, Ready(1, 0, leader._member.log.head, "", part), 0.0)
    return {each.name for part in leader._parts([LIES, MATE], BASE) for each in part.brings}


def test_nothing_is_cut_in_the_name_of_a_seat_that_never_had_a_place(leader):
    own, guest, ghost = (Contribution(Name(seat, 0), 2, (), BASE) for seat in (LIES, DIES, GHOST))
    assert brought(leader, own, guest, ghost) == {own.name, guest.name, Name(MATE, 0)}


def said(leader, *seats):
    cut = leader.round.attempt.cut
    for seat in seats:
        leader.take_said(seat, Signed(Have(seat, ID, cut.hash, "digest"), b""))


def blames(leader, seat, *accused):
    cut = leader.round.attempt.cut
    leader.take_blame(seat, Blame(1, Signed(Blamed(seat, ID, cut.hash, accused), b"")))


def test_a_seat_that_is_ready_after_a_cut_without_which_it_is_none_of_most_is_in_the_next(leader):
    ready = leader.round.ready.pop(DIES)
    del leader.round.ready[LIES]
    leader._cut(0.0, BEFORE, BASE, [LEADS, MATE], 0)
    said(leader, LEADS, MATE)
    leader.take_ready(DIES, ready, 0.1)
    leader._cut_again_after_failure(0.2, BEFORE, BASE, leader.round.attempt)
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE, DIES}
    said(leader, LEADS, MATE, DIES)
    leader._member.closes[0] = Close(0, ())
    assert leader._agreed(0.3, BEFORE, leader.round.attempt) is not None


def test_only_whom_the_attempt_that_went_well_did_without_is_left_out_of_later_rounds(leader):
    leader._cut_when_ready(0.0, BEFORE, BASE)
    for slow in (LIES, DIES):
        for seat in leader.round.attempt.cut.seats:
            blames(leader, seat, *(() if seat == slow else (slow,)))
        leader._cut_again_after_failure(1.0, BEFORE, BASE, leader.round.attempt)
        left_out = {LIES} if slow == LIES else set()  # two of four are no quorum
        assert leader.round.attempt.left_out == left_out
        assert set(leader.round.attempt.cut.seats) == set(STAGE_1) - left_out


def test_what_most_have_is_an_entry_whomever_the_others_blame(leader):
    leader._cut_when_ready(0.0, BEFORE, BASE)
    leader._member.closes[0] = Close(0, ())
    said(leader, LEADS, MATE, DIES)
    assert leader._agreed(0.1, BEFORE, leader.round.attempt) is None, "one has yet to speak"
    blames(leader, LIES, MATE)
    assert leader._agreed(0.1, BEFORE, leader.round.attempt) is not None


def test_a_leader_waits_for_most_tickets_even_where_it_is_not_patient_with_all(leader):
    leader._patience.end_round(BEFORE, STAGE_1, {LIES, DIES})
    late = {seat: leader.round.ready.pop(seat) for seat in (LIES, DIES)}
    leader._cut_when_ready(0.1, BEFORE, BASE)
    assert leader.round.attempt is None, "no entry follows from two of four tickets"
    leader.take_ready(DIES, late[DIES], 0.2)
    leader._cut_when_ready(0.2, BEFORE, BASE)
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE, DIES}


def test_a_leader_does_not_wait_for_those_that_lack_much(leader):
    leader.round.number = 1
    leader._member.closes[1] = leader._member.closes[0]
    for seat in (LIES, DIES):
        leader._far[seat] = 0.0
        del leader.round.ready[seat]
    leader._cut_when_ready(0.1, BEFORE, BASE)
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE}, "the others agree to be left out"


def test_who_says_nothing_while_most_have_no_result_is_left_out_soon_and_for_some_rounds(leader):
    timing = Timing()
    leader._cut_when_ready(0.0, BEFORE, BASE)
    for seat in (LEADS, MATE, DIES):
        blames(leader, seat, LIES)
    leader._cut_again_after_failure(1.0, BEFORE, BASE, leader.round.attempt)
    assert leader.round.attempt.cut.attempt == 0, "it may yet say whom it blames"
    leader._cut_again_after_failure(2.0 + timing.others_s, BEFORE, BASE, leader.round.attempt)
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE, DIES}
    leader._patience.end_round(BEFORE, STAGE_1, leader.round.late, leader.round.attempt.left_out)
    leader.round.attempt = None
    leader._cut_when_ready(9.0, BEFORE, BASE)
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE, DIES}


def test_a_cut_whose_quorum_an_epoch_has_changed_is_made_anew(leader):
    leader.round.ready = {seat: leader.round.ready[seat] for seat in (LEADS, MATE)}
    leader._cut(0.0, BEFORE, BASE, [LEADS, MATE], 0)
    cut = leader.round.attempt.cut
    for seat in cut.seats:
        leader.take_said(seat, Signed(Have(seat, ID, cut.hash, "digest"), b""))
    # Two of four tickets are no quorum.
    leader._cut_again_after_failure(9.0, BEFORE, BASE, leader.round.attempt)
    assert leader.round.attempt.cut == cut, "those that were left out may yet agree"
    leader._cut_again_after_failure(9.0, AFTER, BASE, leader.round.attempt)
    assert leader.round.attempt.cut.epoch == AFTER.id
    assert set(leader.round.attempt.cut.seats) == {LEADS, MATE}

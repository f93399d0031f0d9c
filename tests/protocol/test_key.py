"""The holder of the run key begins terms: where the run goes back, and where its own earlier life was a voter."""

from dataclasses import replace
from random import Random

import pytest
import world

from swarm_peer.protocol.epochs import (
    BEGINNING,
    COORDINATORS,
    Certified,
    Epoch,
    Place,
    Restart,
    Rules,
    choose_restart,
    next_epoch,
)
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Alive, Message, Missing, News, Probe, Timing
from swarm_peer.protocol.statements import EpochId, KeySigned, Leave, Offer, Seat, Signed

C, A, B = (Seat(name, 1, "all") for name in "cab")
ID = EpochId(1, C, 0)


def sign(body):
    return Signed(body, b"")


def membership(me, *places, has_key=False, begun=(0, 1)):
    epoch = Epoch(ID, tuple(Place(stage, seat) for stage, seat in places), BEGINNING, begun)
    made = Membership(
        me=me,
        first=Certified(epoch, (sign(KeySigned(epoch.hash)),)),
        rules=Rules(num_stages=2, begin_anew_steps=5),
        timing=Timing(),
        random=Random(0),
        sign=sign,
        sign_as_key=sign if has_key else None,
    )
    made.desired = frozenset({COORDINATORS} if has_key else {0})
    return made


PLACES = (COORDINATORS, C), (0, A), (1, B)


def test_the_key_has_the_run_go_back_with_the_same_places():
    key, peer = membership(C, *PLACES, has_key=True), membership(A, *PLACES)
    restart = Restart(40, 30, ("x", "y"))
    sent = key.announce_by_key(key.epoch.places, restart)
    assert {to for to, _ in sent} == {"a", "b"}, "all are told"
    assert (key.epoch.id, key.epoch.begun) == (EpochId(2, C, 0), (0, 1))
    assert key.epoch.restart == restart._replace(epoch=key.epoch.id)
    for to, message in sent:
        assert isinstance(message.body, News)
        if to == "a":
            peer.receive(1.0, message)
    assert peer.epoch == key.epoch
    assert peer.stages == {0}


def test_a_word_changes_nothing_else_and_stays_said():
    key, peer = membership(C, *PLACES, has_key=True), membership(A, *PLACES)
    before = key.epoch
    sent = key.say_by_key("tea", least_term=5)
    assert {to for to, _ in sent} == {"a", "b"}, "all are told"
    assert key.epoch == replace(before, id=EpochId(5, C, 0), word="tea")
    peer.receive(1.0, next(message for to, message in sent if to == "a"))
    assert peer.epoch == key.epoch
    leaves = Leave(B, key.epoch.id, 1)
    assert next_epoch(key.epoch, [leaves], peer.rules).word == "tea", "voters do not read it"
    assert next_epoch(key.epoch, [], peer.rules, new_id=EpochId(6, C, 0)).word == "tea"
    key.announce_by_key(key.epoch.places, Restart(40, 30, ("x", "y")))
    assert key.epoch.word == "tea"
    key.say_by_key("milk")
    assert key.epoch.word == "milk"


def test_a_stage_without_a_place_has_not_begun():
    key = membership(C, *PLACES, has_key=True)
    key.announce_by_key([Place(COORDINATORS, C), Place(1, B)], Restart(40, 30))
    assert (key.epoch.begun, key.epoch.seats) == ((1,), (C, B))


def hear(key, now_s, *seats):
    for seat in seats:
        key.receive(now_s, Message(seat, key.epoch.id, Alive()))


def decides_after(key, *seats, until_s=200):
    key.tick(0.0)
    for now_s in range(1, until_s):
        hear(key, float(now_s), *seats)
        key.tick(float(now_s))
        if key.epoch.id.term > 1:
            return now_s
    return None


def test_whoever_starts_again_need_not_wait_for_the_vote_of_its_own_earlier_life():
    again = C._replace(life=2)
    key = membership(again, *PLACES, has_key=True)
    assert decides_after(key, A) <= Timing().silent_s + Timing().alive_s
    assert (COORDINATORS, again) in {tuple(place) for place in key.epoch.places}


def test_it_waits_for_others_and_for_the_voters_that_are_enough():
    again = C._replace(life=2)
    key = membership(again, *PLACES, has_key=True)
    assert decides_after(key, B) <= Timing().silent_s + Timing().probe_s + Timing().alive_s, (
        "two of three, and one is an earlier life"
    )
    key = membership(again, (COORDINATORS, C), (0, A), (1, B), (1, Seat("d", 1, "all")), has_key=True)
    assert decides_after(key, A, until_s=int(Timing().key_s)) is None, "one of three"
    key = membership(again, *PLACES, has_key=True)
    assert decides_after(key, A, B) == int(Timing().key_s + Timing().probe_s) + 1, (
        "they may choose, and choose nothing for long"
    )
    key = membership(again, *PLACES, has_key=True)
    assert decides_after(key) is None, "it may be cut off"


def test_a_coordinator_that_starts_again_has_the_rank_of_its_earlier_life():
    other, again = Seat("o", 1, "all"), C._replace(life=2)
    places = (COORDINATORS, C), (COORDINATORS, other), (0, A), (1, B), (1, Seat("d", 1, "all"))
    key = membership(again, *places, has_key=True)
    assert decides_after(key, A) == int(Timing().key_s)


def test_a_coordinator_without_a_vote_and_the_voters_hear_of_each_other():
    """Of an even number of votes, the coordinator gives up its own."""
    d = Seat("d", 1, "all")
    places = (*PLACES, (1, d))
    seats = {seat.peer: membership(seat, *places, has_key=seat == C) for _, seat in places}
    for seat, (stage, _) in zip(seats.values(), places, strict=True):
        seat.desired = frozenset({stage})
    said = set()
    for now_s in range(60):
        sent = [each for seat in seats.values() for each in seat.tick(float(now_s))]
        said |= {type(message.body) for _, message in sent}
        for to, message in sent:
            for answer_to, answer in seats[to].receive(float(now_s), message):
                seats[answer_to].receive(float(now_s), answer)
    assert seats["c"].me not in seats["a"].epoch.voters
    assert said == {Alive}, "nobody is asked"


def test_a_voter_does_not_look_for_itself():
    voter = membership(A, *PLACES)
    voter.tick(0.0)
    voter.receive(0.0, Message(B, voter.epoch.id, Missing(frozenset({A}))))
    asked = [to for now_s in range(1, 6) for to, message in voter.tick(float(now_s)) if isinstance(message.body, Probe)]
    assert asked == []


def go_back(schedule):
    """A coordinator that has a place has the run go back, as far as there are snapshots."""
    holders = [each for each in schedule.processes.values() if each.has_key and each.core is not None]
    for process in holders:
        membership = process.core.membership
        if not membership.stages or schedule.now_s < process.stalled_until_s:
            continue
        cores = [each.core for each in schedule.processes.values() if each.core is not None]
        epoch = membership.epoch
        offers = [Offer(core.membership.me, epoch.id, *core.membership.holds) for core in cores]
        restart = choose_restart(epoch, offers, replace(schedule.rules, begin_anew_steps=10**9))
        schedule.count("goes back")
        schedule.send(process, membership.announce_by_key(epoch.places, restart))
        return


@pytest.mark.parametrize("seed", range(6))
def test_schedules_in_which_the_run_goes_back(seed):
    schedule = world.World(seed)
    for time_s in range(15, 80, 10):
        schedule._at(time_s, lambda: go_back(schedule))
    schedule.run()
    assert schedule.counts.get("goes back")


def say(schedule, word):
    """A coordinator that has a place says a word."""
    for process in schedule.processes.values():
        core = process.core
        if core is None or not process.has_key or schedule.now_s < process.stalled_until_s:
            continue
        settled = all(core.epoch.roster(stage) for stage in range(schedule.rules.num_stages))
        if core.membership.stages and settled and not core.membership.lacks_voters:
            schedule.count("said")
            schedule.send(process, core.membership.say_by_key(word))
            return


@pytest.mark.parametrize("seed", range(12))
def test_schedules_in_which_words_are_said(seed):
    """All members make each update by the same word: Checks looks at it. In the end, all know the last one."""
    schedule = world.World(seed)
    for time_s in range(15, 80, 5):
        schedule._at(time_s, lambda word=f"word {time_s}": say(schedule, word))
    schedule.run()
    assert schedule.counts.get("said")
    words = {each.core.epoch.word for each in schedule.processes.values() if each.core is not None}
    assert len(words) == 1
    assert words != {""}

"""Which message goes where: what a peer hears of whom, and what it answers."""

from dataclasses import replace

import pytest
from quiet import Quiet

from swarm_peer.protocol.log import Blamed, Close, Done, Have
from swarm_peer.protocol.messages import Blame, Counted, Granted, Message, Recall
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import Signed


@pytest.fixture
def run():
    made = Quiet(RoundRules(num_stages=2, batch=4, roots_every=(0,)))
    for number in range(3):
        made.add(f"p{number}", {0})
        made.add(f"q{number}", {1})
    made.run_until(30)
    return made


def core_of(run, seat):
    return run.processes[seat.peer].core


def told(run, sender, target, body):
    core = core_of(run, target)
    return [message.body for _, message in core.receive(run.now_s, Message(sender, core.epoch.id, body))]


def test_an_accusation_is_its_authors_alone(run):
    leads, author, accused, liar = (*run.cores[0].epoch.roster(0), run.cores[0].epoch.roster(1)[0])[:4]
    leader = core_of(run, leads).leaders[0]
    run.run_until(60, lambda: leader.round.attempt is not None and accused in leader.round.attempt.cut.seats)
    present = leader.round.attempt
    statement = Signed(Blamed(author, present.cut.epoch, present.cut.hash, (accused,)), b"")
    for sender, blamed in ((accused, {}), (liar, {}), (author, {author: statement})):
        told(run, sender, leads, Blame(0, statement))
        assert present.blamed == blamed


def test_the_leader_of_a_stage_says_how_its_round_was_closed(run, monkeypatch):
    monkeypatch.setattr(RoundRules, "fills", lambda *_: True)
    first, own = (run.cores[0].epoch.roster(stage) for stage in (0, 1))
    member = core_of(run, own[1]).members[1]
    number = member.log.next_round
    member.closes.pop(number, None)
    known, other = (
        Close(number, (Signed(Done(first[0], run.cores[0].epoch.id, number, 0, 4, base), b""),))
        for base in (("a", "b"), ("a2", "b"))
    )
    for sender, close, kept in ((own[0], known, known), (first[0], other, known), (own[0], other, other)):
        told(run, sender, own[1], close)
        assert member.closes[number] == kept


def test_a_count_is_of_the_epoch_in_which_it_is_told(run):
    leads, author = run.cores[0].epoch.roster(0)[:2]
    core = core_of(run, author)
    run.run_until(60, lambda: any(isinstance(body, Counted) for body in core.members[0].sayings(core.epoch)))
    counted = next(body for body in core.members[0].sayings(core.epoch) if isinstance(body, Counted))
    before = core.epoch.id._replace(number=core.epoch.id.number - 1)
    assert core.membership.epoch_of(before) is not None
    old = replace(counted, done=Signed(replace(counted.done.body, epoch=before), b""))
    assert not told(run, author, leads, old)
    assert isinstance(told(run, author, leads, counted)[0], Granted)


def test_a_leader_keeps_the_epochs_of_what_it_was_told(run):
    leads, author = run.cores[0].epoch.roster(0)[:2]
    core = core_of(run, leads)
    leader, past = core.leaders[0], core.epoch.id._replace(number=1000)
    counted = next(iter(leader.batch._counted.values()))
    leader.batch._counted[author] = replace(counted, done=Signed(replace(counted.done.body, epoch=past), b""))
    assert past in core._named_epochs()


def test_a_leader_asks_for_epochs_that_a_status_names_and_it_has_forgotten(run):
    leads, seat = run.cores[0].epoch.roster(0)[:2]
    member = core_of(run, seat).members[0]
    assert not any(isinstance(body, Recall) for body in told(run, seat, leads, member.status()))
    forgotten = run.cores[0].epoch.id._replace(term=0)
    cut = replace(member.log.committed[-1].entry.cut, epoch=forgotten)
    said = ((cut, Signed(Have(seat, forgotten, cut.hash, ""), b"")),)
    answers = told(run, seat, leads, replace(member.status(), said=said))
    assert answers[0] == Recall(forgotten)
    assert len(answers) > 1, "it tells where it stands all the same"

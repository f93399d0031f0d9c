"""A leader that lies gets no agreement to train alone, and what it has others give up costs it the lead."""

from dataclasses import replace

import pytest
from quiet import Quiet

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Pass, Receipt
from swarm_peer.protocol.messages import Begin, Cutting, Said
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed, hash_of
from swarm_peer.protocol.work import Computed

LONG_S = 400.0


@pytest.fixture
def run():
    """A run of five tickets in one stage, whose averages take three seconds."""
    made = Quiet(RoundRules(num_stages=1, batch=8, roots_every=(0,)))
    for number in range(5):
        made.add(f"p{number}", {0}, ticket=f"of {number}")
    averages(made, 3.0)
    made.run_until(40)
    return made


def averages(run, seconds):
    """Have averages take so long, but for those of one member."""
    average, begun = run.driver._average, {}

    def slowly(process, member, cut):
        since_s = begun.setdefault((cut.hash, member.me), run.now_s)
        if len(cut.seats) == 1 or run.now_s > since_s + seconds:
            average(process, member, cut)
        else:
            run.driver._started.setdefault(cut.hash, {}).setdefault(member.me, run.now_s)

    run.driver._average = slowly


def liar_of(run, stage=0):
    """The seat that leads a stage."""
    return run.cores[0].epoch.leader(stage)


def entries_of(run, liar, stage=0):
    """The newest entries, as somebody else has them."""
    return next(c.members[stage].log.committed for c in run.cores if stage in c.members and c.membership.me != liar)


def alone_in(run, liar, until_s=LONG_S):
    """The rounds whose entries, as others have them, are of one member alone, while time passes."""
    found = set()

    def look():
        newest = entries_of(run, liar)[-1:]
        found.update(each.entry.cut.round for each in newest if len(each.entry.cut.seats) == 1)

    run.run_until(until_s, look)
    return found


@pytest.mark.parametrize("waits_s", [0.5, 6.0])
def test_a_leader_that_cuts_itself_alone_gets_no_agreement(run, monkeypatch, waits_s):
    """Members have had no time to average; or they have, and agree to no other cut than one that they are in."""
    liar, agreed, lies = liar_of(run), Leader._agreed, []

    def lying(self, now_s, epoch, present):
        if self._member.me != liar or len(present.cut.seats) == 1:
            return agreed(self, now_s, epoch, present)
        if now_s > present.since_s + waits_s:
            lies.append(now_s)
            self._cut(now_s, epoch, present.cut.base, [liar], present.cut.attempt + 1)
        return None

    monkeypatch.setattr(Leader, "_agreed", lying)
    before = run.next_round()
    assert alone_in(run, liar) == set()
    assert lies
    assert liar_of(run) != liar
    assert run.next_round() > before + 10


def test_a_leader_that_has_one_after_the_other_accused_by_most_gets_no_agreement_to_train_alone(run, monkeypatch):
    """Of five tickets: two are accused, each in another attempt, and they hear only of that."""
    liar, *others = run.cores[0].epoch.roster(0)
    victims, average, agreed, send, lies = others[:2], run.driver._average, Leader._agreed, run.send, []

    def fails(process, member, cut):
        if liar_of(run) != liar or liar not in cut.seats or len(cut.seats) == 1 or cut.attempt > 1:
            average(process, member, cut)
        elif member.me != liar:
            victim = victims[cut.attempt]
            member.failed(cut, frozenset({liar if member.me == victim else victim}))

    def lying(self, now_s, epoch, present):
        if self._member.me != liar or len(present.cut.seats) == 1 or present.said:
            return agreed(self, now_s, epoch, present)
        if len(present.blamed) == 4 - present.cut.attempt:
            lies.append(now_s)
            seats = [liar] if present.cut.attempt else sorted(epoch.roster(0))
            self._cut(now_s, epoch, present.cut.base, seats, present.cut.attempt + 1)
        return None

    def keeps(process, sent):
        def is_kept(to, body):
            return isinstance(body, Cutting) and to == victims[0].peer and body.cut.attempt == 1

        send(process, [each for each in sent if process.peer != liar.peer or not is_kept(each[0], each[1].body)])

    run.driver._average, run.send = fails, keeps
    monkeypatch.setattr(Leader, "_agreed", lying)
    before = run.next_round()
    assert alone_in(run, liar) == set()
    assert len(lies) > 1
    assert run.next_round() > before + 10


@pytest.mark.parametrize("first", [3, 5])
def test_a_leader_that_has_others_accuse_one_gets_no_agreement_to_train_alone(run, monkeypatch, first):
    """It sends one member a part that does not fit: that one blames it, and the others blame that one."""
    liar, cut, (_, victim, third, *_) = liar_of(run), Leader._cut, run.cores[0].epoch.roster(0)
    average, lies = run.driver._average, []

    def fails(process, member, each):
        if {liar, victim} <= set(each.seats) and member.me != liar:
            member.failed(each, frozenset({liar if member.me == victim else victim}))
        elif member.me != liar or len(each.seats) == 1:
            average(process, member, each)

    def lying(self, now_s, epoch, base, seats, attempt, left_out=()):
        before = self.round.attempt
        if self._member.me == liar and before is not None and len(before.cut.seats) > 1:
            lies.append(now_s)
            seats = [liar]
        elif self._member.me == liar:
            seats = seats if first == 5 else sorted({liar, victim, third})
        cut(self, now_s, epoch, base, seats, attempt, left_out)

    run.driver._average = fails
    monkeypatch.setattr(Leader, "_cut", lying)
    before = run.next_round()
    assert alone_in(run, liar) == set()
    assert lies
    assert run.next_round() > before + 10


@pytest.mark.parametrize("has_result", [True, False], ids=["another result for each", "nobody knows who"])
@pytest.mark.parametrize("tickets", ["few", "many"])
def test_rounds_go_on_without_one_with_whom_all_averages_fail(has_result, tickets):
    run = Quiet(RoundRules(num_stages=1, batch=4, roots_every=(0,)))
    for number in range(5):
        run.add(f"p{number}", {0}, ticket=f"of {number}" if tickets == "many" else "all")
    run.run_until(40)
    average, bad = run.driver._average, run.processes["p4"].core.membership.me

    def fails(process, member, cut):
        if bad not in cut.seats or len(cut.seats) == 1:
            average(process, member, cut)
        elif has_result:
            member.averaged(cut, hash_of(("update", cut.parts, member.me)))
        else:
            member.failed(cut, frozenset())

    run.driver._average = fails
    before = run.next_round()
    run.run_until(240)
    assert run.next_round() > before + 50
    brought = [len(each.entry.cut.seats) for each in entries_of(run, bad)]
    assert sum(brought) > 3 * len(brought), "most average without it, and nobody alone"


def test_a_leader_that_has_work_given_up_loses_the_lead():
    run = Quiet(RoundRules(num_stages=2, batch=60, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0}, ticket=f"of {number}")
        run.add(f"q{number}", {1}, ticket=f"of {number}")
    run.run_until(60)
    liar, send = liar_of(run, 1), run.send

    def lies(process, sent):
        if process.peer == liar.peer:
            sent = [(to, replace(each, body=lie_about(each.body))) for to, each in sent]
        send(process, sent)

    def lie_about(body):
        is_lie = isinstance(body, Begin) and body.stage == 1
        return replace(body, base=("made up", *body.base[1:])) if is_lie else body

    run.send = lies
    run.run_until(300)
    assert liar_of(run, 1) != liar
    before = run.next_round()
    run.run_until(360)
    assert run.next_round() > before + 4


def test_what_stage_1_has_lost_keeps_no_round_open_for_ever():
    batch = 40
    run = Quiet(RoundRules(num_stages=2, batch=batch, roots_every=(0,)))
    run.add("p", {0})
    run.add("q", {1})
    run.run_until(60)
    number, losses = run.next_round() + 1, []

    def loses():
        member = run.processes["q"].core.members[1]
        present = member.work.open.get(number)
        if present is not None and sum(present.computed.callers.values()) > 0.8 * batch and number not in member.closes:
            member.work.void_all(member.log.next_round)
            losses.append(run.now_s)
        return len(losses) == 3

    run.run_until(300, loses)
    assert len(losses) == 3
    run.run_until(run.now_s + 120)
    assert run.next_round() > number + 3


def test_one_peer_can_lead_two_stages():
    run = Quiet(RoundRules(num_stages=2, batch=4, roots_every=(0,), lag=1))
    run.add("both", {0, 1})
    run.run_until(8)
    for number in range(2):
        run.add(f"p{number}", {0})
        run.add(f"q{number}", {1})
    run.run_until(60)
    assert {liar_of(run, stage).peer for stage in (0, 1)} == {"both"}
    assert min(run.next_round(0), run.next_round(1)) > 10


@pytest.mark.parametrize("tickets", [3, 4])
def test_one_that_makes_another_fail_and_agrees_to_nothing_is_left_out(tickets):
    """A member sends one mate alone a wrong average, once the others have theirs, and agrees to nothing."""
    run = Quiet(RoundRules(num_stages=1, batch=8, roots_every=(0,)))
    for number in range(tickets):
        run.add(f"p{number}", {0}, ticket=f"of {number}")
    run.run_until(40)
    average, send, (_, victim, *_, liar) = run.driver._average, run.send, run.cores[0].epoch.roster(0)

    def lies(process, sent):
        passes = [
            each for _, each in sent if isinstance(each.body, Said) and isinstance(each.body.statement.body, Pass)
        ]
        send(process, [each for each in sent if process.peer != liar.peer or each[1] not in passes])

    def fails(process, member, cut):
        if not {victim, liar} <= set(cut.seats):
            average(process, member, cut)
        elif member.me in (victim, liar):
            member.failed(cut, frozenset({liar}) if member.me == victim else frozenset())
        else:
            member.averaged(cut, hash_of(("update", cut.parts)))

    run.driver._average, run.send = fails, lies
    leader, before = liar_of(run), run.next_round()
    run.run_until(240)
    assert run.next_round() > before + 20
    assert liar_of(run) == leader


@pytest.mark.parametrize("bad", range(5))
def test_with_few_tickets_nobody_is_taken_alone_before_each_was_left_out(bad):
    run = Quiet(RoundRules(num_stages=1, batch=4, roots_every=(0,)))
    for number in range(5):
        run.add(f"p{number}", {0})
    run.run_until(40)
    average, bad_one = run.driver._average, run.processes[f"p{bad}"].core.membership.me

    def fails(process, member, cut):
        if bad_one not in cut.seats or len(cut.seats) == 1:
            average(process, member, cut)
        else:
            member.failed(cut, frozenset())

    run.driver._average = fails
    before = run.next_round()
    assert alone_in(run, None, 200) == set()
    assert run.next_round() > before + 20


def test_receipts_of_other_heads_are_none():
    me, other = Seat("a", 1, "a"), Seat("b", 1, "b")
    made = Computed(base=("x", "y"), claimed=4, samples=[WindowRange(0, 0, 0, 4)])
    epoch = EpochId(1, me, 0)
    for base, lacks in ((("x", "z"), True), (("x", "y"), False)):
        made.receipts = {other: Signed(Receipt(other, epoch, me, 3, 4, base), b"")}
        assert made.lacks_receipts(me, 3) is lacks

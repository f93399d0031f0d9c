"""What readers of the core have found: the sequence of messages that led to each, in a stage of a few seats."""

from dataclasses import replace
from random import Random

import pytest

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Certified, Epoch, Place, Rules, choose_restart
from swarm_peer.protocol.heard_wishes import HeardWishes
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import (
    Blamed,
    Close,
    Committed,
    Contribution,
    Cut,
    Done,
    Entry,
    HandedOver,
    Have,
    Log,
    Name,
    Part,
    Pass,
    base_of,
)
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import (
    MAX_EPOCHS,
    MAX_STATEMENTS,
    Blame,
    Counted,
    Cutting,
    Entries,
    Ready,
    Said,
    Status,
    Timing,
    Wants,
    that_fit,
)
from swarm_peer.protocol.patience import Waits
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, KeySigned, Offer, Seat, Signed, Snapshot
from swarm_peer.protocol.work import RoundContext

OPERATOR = Seat("c", 1, "operator")
A, B, D, F, X = (Seat(name, 1, name) for name in "abdfx")
FIRST = base_of(0, BEGINNING)
RULES = RoundRules(num_stages=1, batch=4, roots_every=(0,))
TIMING = Timing()


def epoch_of(number, *seats):
    return Epoch(EpochId(1, OPERATOR, number), tuple(Place(0, seat) for seat in seats), BEGINNING, (0,))


def of_ticket(ticket, count):
    return [Seat(f"{ticket}{number}", 1, ticket) for number in range(count)]


def signs_as(seat):
    return lambda body: Signed(body, seat.peer.encode())


class Stage:
    """A stage of which one seat leads, and some others are members here; the rest is what a test says for it."""

    def __init__(self, epoch, *members, leader=None, epochs=()):
        self.epoch = epoch
        self.epochs = {each.id: each for each in (epoch, *epochs)}
        oldest = epoch.roster(0)[0]
        self.close = Close(0, (signs_as(oldest)(Done(oldest, epoch.id, 0, 0, RULES.batch, (FIRST,))),))
        self.members = {seat: self.member(seat) for seat in members}
        self.leads = self.members[leader or members[0]]
        self.leader = Leader(member=self.leads, reign=epoch.id, context=self.context(self.leads.me))
        self.now_s = 0.0

    def context(self, me):
        return RoundContext(
            num_stages=1,
            batch=RULES.batch,
            unit=1,
            most=RULES.most,
            lag=0,
            averages=RULES.averages,
            is_rooted=RULES.is_rooted,
            fills=lambda close: RULES.fills(close, self.epochs.get),
            believed=lambda counts: RULES.believed(counts, self.epochs.get),
            epoch_of=self.epochs.get,
            sign=signs_as(me),
            timing=TIMING,
        )

    def member(self, seat, log=None):
        made = Member(
            me=seat,
            stage=0,
            restart=BEGINNING,
            context=self.context(seat),
            log=log,
            state=FIRST if log is None else log.head,
            ledger=Ledger(100),
        )
        made.reign = self.epoch.id
        if log is None:
            made.take_close(self.close)
            present = made.work.round(0)
            present.computed.weight, present.computed.base, present.is_drained = 1, (FIRST,), True
        return made

    def begin(self):
        """All say where they stand, and are ready."""
        self.leader.tick(self.now_s, self.epoch, True)
        for seat in self.epoch.roster(0):
            if seat != self.leads.me:
                self.leader.take_status(seat, Status(0, (), FIRST, (self.close,), (), ()), self.now_s)
        self.tick()
        for seat in self.epoch.roster(0):
            part = self.members[seat].part_of(0) if seat in self.members else self.part(seat)
            self.leader.take_ready(seat, Ready(0, 0, FIRST, "", part), self.now_s)
        return self.tick()

    @staticmethod
    def part(seat):
        return Part(seat, (Contribution(Name(seat, 0), 1, (), (FIRST,)),))

    def tick(self, after_s=1.0):
        """The leader's cut, if it makes one; its members hear of it."""
        self.now_s += after_s
        sent = self.leader.tick(self.now_s, self.epoch, True)
        cuts = [body.cut for body in sent if isinstance(body, Cutting)]
        for member in self.members.values():
            for cut in cuts:
                member.take_cut(cut, is_late=False)
        return cuts[0] if cuts else None

    def say(self):
        """Members that average have the right result, and say so."""
        for seat, member in self.members.items():
            if member.averaging is not None:
                member.averaged(member.averaging, "good")
            said = member.work.open[0].answer.said if 0 in member.work.open else None
            if said is not None:
                self.leader.take_said(seat, said)

    def have(self, seat, cut, digest="good"):
        return signs_as(seat)(Have(seat, cut.epoch, cut.hash, digest))

    def entry(self, number, parent, epoch, seats, signers, digest="good"):
        cut = Cut(
            stage=0,
            round=number,
            epoch=epoch.id,
            attempt=0,
            parent=parent,
            root="",
            base=(parent,),
            averages=True,
            parts=tuple(Part(seat, (Contribution(Name(seat, number), 1, (), (parent,)),)) for seat in seats),
        )
        count = signs_as(seats[0])(Done(seats[0], epoch.id, number, 0, RULES.batch, (parent,)))
        agreement = tuple(self.have(seat, cut, digest) for seat in signers)
        return Committed(Entry(cut, digest), agreement, Close(number, (count,)))


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_certificate_of_an_epoch_of_few_tickets_proves_nothing_later(rewrites):
    """In the first epoch one word was enough; it must not be for what follows on entries of the second."""
    few, more = epoch_of(1, X, A), epoch_of(2, B, A, X)
    stage = Stage(more, B, epochs=[few])
    first = stage.entry(0, FIRST, more, [A, B, X], [A, B, X])
    second = stage.entry(1, first.entry.hash, more, [A, B, X], [A, B, X])
    member = stage.member(A, Log(0, BEGINNING, (first, second)))
    assert member.log_of((first, second)) is not None
    made, parent, start = [], FIRST if rewrites else second.entry.hash, 0 if rewrites else 2
    for number in range(start, 4):
        made.append(stage.entry(number, parent, few, [X], [X], "bad"))
        parent = made[-1].entry.hash
    told = tuple(made) if rewrites else (first, second, *made)
    assert member.log_of(told) is None
    member.take_entries(Entries(0, more.id, told, None))
    assert member.log.head == second.entry.hash


def test_those_who_are_left_out_agree_to_no_result():
    """Three of five say that they have a result or pass: but of the cut itself, one says so, against two."""
    stage = Stage(epoch_of(1, A, B, D, F, X), A)
    made = stage.entry(0, FIRST, stage.epoch, [A, B, X], [A, B])
    cut = made.entry.cut
    passes = tuple(signs_as(seat)(Pass(seat, cut.epoch, cut.hash)) for seat in (D, F))
    assert made.entry.is_agreed((*made.agreement, *passes), stage.epoch)
    assert not Entry(cut, "bad").is_agreed((stage.have(X, cut, "bad"), *passes), stage.epoch)


def test_a_ticket_s_many_seats_do_not_decide_which_result_counts():
    seats = of_ticket("x", 3)
    stage = Stage(epoch_of(1, A, B, *seats), A, B)
    cut = stage.begin()
    stage.say()
    for seat in seats:
        stage.leader.take_said(seat, stage.have(seat, cut, "bad"))
    stage.tick()
    stage.tick(TIMING.others_s + 1)
    assert [each.entry.digest for each in stage.leads.log.committed] == ["good"]


def test_accusations_cost_a_ticket_all_its_seats():
    """Otherwise one after the other would be given up for one honest seat each, and the rest would be the majority."""
    seats = of_ticket("x", 5)
    stage = Stage(epoch_of(1, A, B, *seats), A, B)
    cut = stage.begin()
    stage.members[B].failed(cut, frozenset(seats[:1]))
    stage.leader.take_blame(B, Blame(0, stage.members[B].work.open[0].answer.failed))
    stage.say()
    for seat in seats:
        accused = (B,) if seat == seats[0] else ()
        stage.leader.take_blame(seat, Blame(0, signs_as(seat)(Blamed(seat, cut.epoch, cut.hash, accused))))
    assert set(stage.tick().seats) == {A, *seats}, "accused and accuser are left out in their turn"
    for seat in seats:
        cut = stage.leader.round.attempt.cut
        stage.leader.take_blame(seat, Blame(0, signs_as(seat)(Blamed(seat, cut.epoch, cut.hash, (A,)))))
    stage.say()
    assert stage.tick().seats == (A, B)
    stage.say()
    stage.tick()
    [committed] = stage.leads.log.committed
    assert committed.entry.cut.seats == (A, B)


def test_of_two_that_name_a_sample_the_seat_that_was_granted_it_counts():
    stage = Stage(epoch_of(1, B, A, X), B)
    read = WindowRange(0, 3, 0, 4)
    stage.leader.batch.adopt({X: [read.slice_id]})
    stage.part = lambda seat: Part(seat, (Contribution(Name(seat, 0), 1, (read,), (FIRST,)),))
    assert [each.name.seat for each in stage.begin().brings if each.samples] == [X]


def look(waits, member, seconds):
    """Look at a member each half second for some time. Returns what it has waited."""
    for _ in range(int(2 * seconds)):
        waits.look(waits._looked_s + 0.5, member, TIMING)
    return waits.waited_s


def test_averages_in_vain_are_no_signs_of_life_of_a_leader():
    stage = Stage(epoch_of(1, A, B, X), A, B)
    member, waits = stage.members[B], Waits(0.0, A)
    cut = stage.begin()
    assert look(waits, member, 40) == 0, "nobody knows yet what that average is good for"
    member.take_cut(replace(cut, attempt=1))
    assert member.averaging.attempt == 1
    assert look(waits, member, 40) == 0, "a leader may try the same again now and then"
    member.take_cut(replace(cut, attempt=2))
    assert look(waits, member, 0.5) == 40


def test_a_leader_may_find_who_was_to_blame_for_an_average_once_for_each_seat():
    stage = Stage(epoch_of(1, A, B, X), A, B)
    member, waits = stage.members[B], Waits(0.0, A)
    cut = stage.begin()
    without = tuple(part for part in cut.parts if part.seat != X)
    for attempt, parts in enumerate([without, cut.parts, without], start=1):
        look(waits, member, 40)
        member.take_cut(replace(cut, attempt=attempt, parts=parts))
        look(waits, member, 0.5)
        assert waits.waited_s == (0, 0, 40.5)[attempt - 1]


def test_an_average_that_ends_its_round_is_no_waiting():
    stage = Stage(epoch_of(1, A, B), A, B)
    cut, member = stage.begin(), stage.members[B]
    waits = Waits(0.0, A)
    look(waits, member, 40)
    for each in stage.members.values():
        each.averaged(cut, "good")
    stage.say()
    stage.tick(41)
    [committed] = stage.leads.log.committed
    member.take_commit(committed)
    assert look(waits, member, 0.5) == 0


def test_a_new_leader_is_not_taken_for_the_one_before():
    net = Net(epoch_of(1, A, B, D), A, B, D)
    for member in net.members.values():
        member.desired = frozenset({0})
    for peer in ("b", "d"):
        net.members[peer].stuck = frozenset({0})
    net.run(TIMING.propose_s + 1.0, stop=lambda: net.members["b"].epoch.leader(0) == B)
    net.run(net.now_s + 5.0)
    assert net.members["b"].epoch.leader(0) == B


def test_all_whom_nobody_reaches_are_left_out_for_the_round():
    seats = [Seat(f"s{number}", 1, f"s{number}") for number in range(9)]
    stage = Stage(epoch_of(1, *seats), seats[0])
    cut = stage.begin()
    unreached = set(seats[6:])
    for seat in seats[1:]:
        accused = set(seats[:6]) if seat in unreached else unreached
        stage.leader.take_blame(
            seat, Blame(0, signs_as(seat)(Blamed(seat, cut.epoch, cut.hash, tuple(sorted(accused)))))
        )
    stage.leads.failed(cut, frozenset(unreached))
    stage.leader.take_blame(seats[0], Blame(0, stage.leads.work.open[0].answer.failed))
    for tries in range(4):
        again = stage.tick()
        assert set(again.seats) <= set(seats[:6])
        assert len(again.seats) == (5 if tries else 6), "nobody is accused any more: each is left out in its turn"
        for seat in again.seats:
            said = signs_as(seat)(Blamed(seat, again.epoch, again.hash, ()))
            stage.leader.take_blame(seat, Blame(0, said))
    assert stage.leader.round.attempt.left_out > unreached


@pytest.mark.parametrize("is_given", [False, True])
def test_contributions_of_others_are_theirs_to_give(is_given):
    stage = Stage(epoch_of(1, A, B, X), A, B)
    gone = Seat("gone", 1, "gone")
    before = epoch_of(0, A, B, X, *([gone] if is_given else []))
    stage.epochs[before.id] = before
    guest = Contribution(Name(gone, 0), RULES.most.weight, (WindowRange(0, 7, 0, 2),), (FIRST,))
    given = signs_as(gone)(HandedOver(gone, before.id, guest, "digest"))
    part = Part(X, (guest,), (given,))
    own = stage.leads
    stage.begin()
    stage = Stage(stage.epoch, A, B, epochs=[before])
    stage.part = lambda seat: part
    cut = stage.begin()
    assert (guest in cut.brings) == is_given
    assert stage.members[B].averaging == cut
    forged = Cut(**{**vars(cut), "parts": (*cut.parts[:2], Part(X, (guest,)))})
    assert not forged.parts[2].is_given(0, stage.epochs.get), "without the statement"
    assert own.take_guest(signs_as(gone)(HandedOver(gone, before.id, guest, "digest")))


def test_ranges_that_run_backwards_are_none():
    most = RULES.most
    good, bad = WindowRange(0, 0, 0, 4), WindowRange(0, 1, 1000, 0)
    assert Contribution(Name(A, 0), 4, (good,), ()).is_within(most)
    assert not Contribution(Name(A, 0), 4, (good, bad), ()).is_within(most)
    assert not Contribution(Name(A, 0), 4, (WindowRange(0, 0, -4, 0),), ()).is_within(most)


def test_counts_of_rounds_that_are_far_are_not_kept():
    stage = Stage(epoch_of(1, A, B, X), A)
    stage.begin()
    for number, is_heard in ((1, True), (9, False)):
        done = Done(X, stage.epoch.id, number, 0, 1, (FIRST,))
        wants = Wants(0, (), 1, number, 0, 1, 0)
        answer = stage.leader.take_counted(X, Counted(signs_as(X)(done), wants, ()), stage.epoch, 1.0)
        assert (answer is not None) == is_heard


def with_signed_entry():
    """The old leader has died; the two that are left have signed an entry, and one of them has begun to lead."""
    old, new = epoch_of(1, A, B, D), epoch_of(2, B, D)
    stage = Stage(new, B, D, epochs=[old])
    entry = stage.entry(0, FIRST, old, [A, B, D], [A, B, D]).entry
    for member in stage.members.values():
        member.take_cut(entry.cut)
        member.averaged(entry.cut, "good")
        member.reign = None
    stage.leader.tick(0.0, new, True)
    return stage, new, entry


def test_a_new_leader_waits_for_those_that_may_know_of_an_entry():
    """The old leader has committed, and told another stage; the two that are left have signed what proves it."""
    stage, new, entry = with_signed_entry()
    stage.leader.tick(TIMING.status_s + 1, new, True)
    assert not stage.leader.is_synced
    stage.leader.take_status(D, stage.members[D].status(), TIMING.status_s + 1.1)
    stage.leader.tick(TIMING.status_s + 1.2, new, True)
    assert [each.entry.hash for each in stage.leads.log.committed] == [entry.hash]


@pytest.mark.parametrize("has_cut", [False, True])
def test_a_status_that_comes_late_tells_a_leader_of_an_entry_as_long_as_it_has_committed_none(has_cut):
    stage, new, entry = with_signed_entry()
    now_s = TIMING.synced_s + 1
    stage.leader.tick(now_s, new, True)
    assert stage.leader.is_synced
    if has_cut:
        ready = next(body for body in stage.members[B].sayings(new) if isinstance(body, Ready))
        stage.leader.take_ready(B, ready, now_s)
        now_s += TIMING.ready_s + 1
        assert any(isinstance(body, Cutting) for body in stage.leader.tick(now_s, new, True))
    late = stage.members[D]
    late.take_entries(stage.leader.take_status(D, late.status(), now_s))
    stage.leader.tick(now_s, new, True)
    assert [each.entry.hash for each in stage.leads.log.committed] == [entry.hash]
    told = stage.leader.take_said(D, next(body.statement for body in late.sayings(new) if isinstance(body, Said)))
    late.take_entries(told)
    assert late.log.head == entry.hash


def test_a_close_is_repeated_for_a_member_that_was_still_learning_as_it_was_told():
    """It may have closed the round with other heads, and so refuse the cut."""
    stage = Stage(epoch_of(1, A, B, D), A, B, D)
    cut = stage.begin()
    assert not any(stage.leader.is_awaited(seat, stage.close) for seat in (A, B, D))
    stage.leader.take_status(B, stage.members[B].status(), stage.now_s)
    assert [seat for seat in (A, B, D) if stage.leader.is_awaited(seat, stage.close)] == [B]
    stage.members[B].averaged(cut, "good")
    stage.leader.take_said(B, stage.members[B].work.open[0].answer.said)
    assert not stage.leader.is_awaited(B, stage.close)


def test_a_leader_keeps_no_statuses_of_seats_that_have_left():
    stage, new, entry = with_signed_entry()
    stage.leader.tick(TIMING.synced_s + 1, new, True)
    for life in range(20):
        stage.leader.take_status(X._replace(life=life), Status(0, (), FIRST, (), (), ()), TIMING.synced_s + 1)
    signed = stage.members[D].status()
    assert signed.said
    left, other = F._replace(life=2), replace(entry.cut, attempt=7)
    said = ((other, Signed(Have(left, other.epoch, other.hash, "good"), b"")),)
    stage.leader.take_status(left, replace(signed, said=said), 0.0)
    stage.leader.tick(TIMING.synced_s + 1, new, True)
    assert set(stage.leader._statuses) == {B, left}, "what it has signed may be needed"


def test_a_message_holds_only_the_newest_entries_that_fit():
    stage = Stage(epoch_of(1, A, B, X), A)
    entries, parent = [], FIRST
    for number in range(6):
        entries.append(stage.entry(number, parent, stage.epoch, [A, B, X], [A, B, X]))
        parent = entries[-1].entry.hash
    assert that_fit(entries, stage.epochs.get) == tuple(entries)
    count = entries[2].close.counts[0]
    entries[2] = entries[2]._replace(close=Close(2, (count,) * MAX_STATEMENTS))
    assert that_fit(entries, stage.epochs.get) == tuple(entries[3:])
    assert that_fit(entries[:3], stage.epochs.get) == (entries[2],), "at least one"
    old = Signed(replace(count.body, epoch=EpochId(1, OPERATOR, 77)), count.signature)
    old = entries[3]._replace(close=Close(3, (old,)))
    assert that_fit([old, *entries[4:]], stage.epochs.get) == tuple(entries[4:]), "of epochs that are known"
    for number, before in enumerate(entries):
        counts = tuple(
            signs_as(A)(Done(A, EpochId(1, OPERATOR, 100 * number + each), number, 0, 1, (FIRST,)))
            for each in range(MAX_EPOCHS // 2)
        )
        entries[number] = before._replace(close=Close(number, counts))
    assert len(that_fit(entries, stage.epochs.get)) == 1
    assert that_fit(entries, {}.get) == (entries[-1],), "epochs that the teller does not know itself"


# --- epochs


def membership(me, epoch, has_key=False):
    sign = signs_as(me)
    return Membership(
        me=me,
        first=Certified(epoch, (Signed(KeySigned(epoch.hash), b"key"),)),
        rules=Rules(2, 5),
        timing=TIMING,
        random=Random(me.peer),
        sign=sign,
        sign_as_key=sign if has_key else None,
    )


class Net:
    """Memberships that hear each other after 30 ms, but for those that are dead or do not hear."""

    def __init__(self, epoch, *seats, key=None):
        self.members = {seat.peer: membership(seat, epoch, seat == key) for seat in seats}
        self.dead = set()
        self.deaf = set()  # (message body, receiver)
        self.now_s = 0.0
        self._under_way = []

    def run(self, until_s, stop=lambda: False):
        while self.now_s < until_s and not stop():
            self.now_s = round(self.now_s + 0.1, 3)
            due = [each for each in self._under_way if each[0] <= self.now_s]
            self._under_way = [each for each in self._under_way if each[0] > self.now_s]
            for _, to, message in due:
                self._post(self.members[to].receive(self.now_s, message))
            for peer, member in self.members.items():
                if peer not in self.dead:
                    self._post(member.tick(self.now_s))

    def _post(self, sent):
        for to, message in sent:
            if to in self.members and to not in self.dead and (type(message.body).__name__, to) not in self.deaf:
                self._under_way.append((self.now_s + 0.03, to, message))


@pytest.mark.parametrize(("dead", "times", "is_out"), [({"b"}, 2, True), ({"b"}, 1, False), (set(), 2, False)])
def test_who_cannot_be_reached_twice_is_silent_at_once(dead, times, is_out):
    net = Net(epoch_of(1, A, B, D), A, B, D)
    net.dead = dead
    for member in net.members.values():
        member.desired = frozenset({0})
    for _ in range(times):
        net.run(net.now_s + TIMING.resend_s + 0.1)
        for peer in ("a", "d"):
            net.members[peer].suspect("b")
    net.run(net.now_s + TIMING.propose_s + 1.0)
    assert (B not in net.members["a"].epoch.seats) == is_out


def test_the_key_puts_out_nobody_whom_it_has_not_asked():
    """It hears voters and leaders alone; the others are well. Two voters do not know the ticket of a newcomer."""
    seats, newcomer = [*of_ticket("p", 4), *of_ticket("q", 4)], Seat("n", 1, "n")
    places = (Place(COORDINATORS, OPERATOR), *(Place(number // 4, seat) for number, seat in enumerate(seats)))
    epoch = Epoch(EpochId(1, OPERATOR, 9), places, BEGINNING, (0, 1))
    net = Net(epoch, OPERATOR, *seats, newcomer, key=OPERATOR)
    for peer, member in net.members.items():
        member.desired = epoch.stages_of(member.me) if peer != "n" else frozenset({0})
    net.members["n"].prepared = frozenset({0})
    for voter in set(epoch.voters) - {OPERATOR}:
        net.members[voter.peer]._has_ticket = lambda seat: seat != newcomer
    net.run(2 * TIMING.key_s, stop=lambda: net.members["n"].stages)
    after = net.members["c"].epoch
    assert after.id.term == 2, "voters chose nothing"
    assert set(after.seats) == {OPERATOR, *seats, newcomer}


def test_a_coordinator_tells_voters_of_wishes_that_they_have_not_heard():
    epoch = Epoch(EpochId(1, OPERATOR, 9), (Place(COORDINATORS, OPERATOR), Place(0, A), Place(0, B), Place(1, D)))
    assert OPERATOR not in epoch.voters
    net = Net(epoch, OPERATOR, A, B, D, X, key=OPERATOR)
    for member in net.members.values():
        member.desired = epoch.stages_of(member.me) or frozenset({0})
    net.members["x"].prepared = frozenset({0})
    send = net._post
    net._post = lambda sent: send([(to, each) for to, each in sent if each.sender != X or to == "c"])
    net.run(TIMING.key_s / 2, stop=lambda: X in net.members["a"].epoch.seats)
    assert net.members["a"].epoch.id == epoch.id.next(), "they have chosen it themselves"


def test_a_seat_that_comes_and_goes_does_not_keep_a_dead_one_in_the_run():
    seats = (A, B, D, F)
    epoch = Epoch(EpochId(1, OPERATOR, 9), (Place(0, A), Place(0, B), Place(1, F), Place(1, D)), BEGINNING, (0, 1))
    net = Net(epoch, *seats, X)
    for member in net.members.values():
        member.desired = epoch.stages_of(member.me)
    flapper = net.members["x"]
    flapper.prepared = frozenset({0})
    net.dead = {"f"}
    while net.now_s < 40 and F in net.members["a"].epoch.seats:
        flapper.desired = frozenset() if 0 in flapper.stages else frozenset({0})
        flapper._next_resend_s = 0
        net.run(net.now_s + 0.1)
    assert net.now_s < 20
    assert net.members["a"].epoch.id.number > epoch.id.number + 3


def test_a_restart_that_another_voter_may_have_accepted_is_accepted_in_the_end():
    """A voter has heard of a later snapshot than the one that accepted first: without the third, both would wait."""
    epoch = Epoch(EpochId(1, OPERATOR, 3), (Place(0, A), Place(0, B), Place(0, D)), BEGINNING, (0, 1))
    net = Net(epoch, A, B, D, X)
    for member in net.members.values():
        member.desired = epoch.stages_of(member.me) or frozenset({1})
    for seat, step in ((A, 10), (B, 20)):
        held = frozenset(Snapshot(step, stage, f"{stage}{step}", f"b{step}") for stage in (0, 1))
        net.members[seat.peer].holds = 30, 30, held
    net.dead = {"d"}
    # The first hears nothing of the other's snapshot until it has accepted; the other hears nothing of its proposal.
    net.deaf = {("Wanted", "a"), ("Accept", "b")}
    net.members["a"]._wishes = HeardWishes()
    net.run(TIMING.offers_s + 8)
    net.deaf = set()
    net.run(4 * TIMING.relent_s, stop=lambda: net.members["a"].epoch.id.number > 3)
    assert net.members["a"].epoch.restart.optimizer_step in (10, 20)


def test_one_word_moves_no_restart_far():
    epoch = Epoch(EpochId(1, OPERATOR, 3), tuple(Place(0, seat) for seat in (A, B, D, X)), BEGINNING, (0, 1))
    rules, held = Rules(2, 5), frozenset(Snapshot(50, stage, f"{stage}", "base") for stage in (0, 1))
    honest = [Offer(seat, epoch.id, 60, 60, held) for seat in (A, B, D)]
    assert choose_restart(epoch, honest, rules).first_round == 61
    far = Offer(X, epoch.id, (1 << 40) - 1, 10**9, frozenset())
    assert choose_restart(epoch, [*honest, far], rules).first_round < 200
    early = [Offer(seat, epoch.id, 3, 3, frozenset()) for seat in (A, B, D)]
    assert choose_restart(epoch, [*early, far], rules).optimizer_step == 0, "a run of a few steps may begin anew"

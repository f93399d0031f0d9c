"""A leader judges what other stages have told before it cuts: it may have heard that while it had another log."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Close, Committed, Cut, Done, Entry, Have, Log, Part
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Ready, Timing
from swarm_peer.protocol.other_stages import OtherStages
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext

C, A1, A2, A3, B1, B2 = (Seat(name, 1, "all") for name in ("c", "a1", "a2", "a3", "b1", "b2"))
RULES = RoundRules(num_stages=2, batch=8, lag=1)
# The round of stage 1 whose entry is lost with B1, which has told it A1 alone.
LOST = 3


def epoch_of(number, first, second):
    places = (Place(COORDINATORS, C), *(Place(0, seat) for seat in first), *(Place(1, seat) for seat in second))
    return Epoch(EpochId(1, C, number), places, BEGINNING, (0, 1))


EPOCHS = (
    epoch_of(1, (A1, A2, A3), (B1, B2)),
    epoch_of(2, (A1, A2, A3), (B2,)),
    epoch_of(3, (A2, A3), (B2,)),
)
CONTEXT = RoundContext(
    num_stages=2, batch=8, unit=2, most=RULES.most, lag=1, averages=RULES.averages,
    is_rooted=lambda number: False, fills=lambda close: True, believed=lambda counts: {},
    epoch_of={each.id: each for each in EPOCHS}.get, sign=lambda body: Signed(body, b""), timing=Timing(),
)  # fmt: skip


def base_of(log, other, number):
    return tuple(each.base_of(number, 1) for each in sorted((log, other), key=lambda each: each.stage))


def cut_of(log, other, epoch):
    return Cut(
        stage=log.stage, round=log.next_round, epoch=epoch.id, attempt=0, parent=log.head, root="",
        base=base_of(log, other, log.next_round), averages=True,
        parts=tuple(Part(seat, ()) for seat in epoch.roster(log.stage)),
    )  # fmt: skip


def close_of(number, base):
    return Close(number, (Signed(Done(A2, EPOCHS[0].id, number, 0, 8, base), b""),))


def put(log, other, epoch, digest="digest"):
    cut = cut_of(log, other, epoch)
    agreement = tuple(Signed(Have(seat, epoch.id, cut.hash, digest), b"") for seat in cut.seats)
    log.append(Committed(Entry(cut, digest), agreement, close_of(cut.round, cut.base)))


@pytest.fixture
def logs():
    """Stage 0; stage 1 as A1 knows it, with an entry that is lost; and with another one in its place."""
    first, second = Log(0, BEGINNING), Log(1, BEGINNING)
    for _ in range(LOST):
        put(first, second, EPOCHS[0])
        put(second, first, EPOCHS[0])
    lost = Log(1, BEGINNING, second.committed)
    put(lost, first, EPOCHS[0], "lost")
    put(first, second, EPOCHS[0])
    put(first, lost, EPOCHS[0])
    for _ in range(4):
        put(second, first, EPOCHS[1])
    return first, lost, second


@pytest.fixture
def made_from_lost(logs):
    """The next entry of stage 0, which A2 and A3 have signed: it is made from the lost one."""
    first, lost, _ = logs
    cut = cut_of(first, lost, EPOCHS[0])
    agreement = tuple(Signed(Have(seat, EPOCHS[0].id, cut.hash, "digest"), b"") for seat in cut.seats)
    return Committed(Entry(cut, "digest"), agreement, close_of(cut.round, cut.base))


@pytest.fixture
def members(logs, made_from_lost):
    """Of stage 0, before they hear of their leader."""
    first, made = logs[0], {}
    for seat in (A2, A3):
        made[seat] = each = Member(
            me=seat, stage=0, restart=BEGINNING, context=CONTEXT,
            log=Log(0, BEGINNING, first.committed), state=first.head,
        )  # fmt: skip
        each.reign = EPOCHS[0].id
        each.take_close(made_from_lost.close)
        each.drained(LOST + 2)
        each.work.round(LOST + 2).answer.cut = made_from_lost.entry.cut
        each.averaged(made_from_lost.entry.cut, "digest")
        each.reign = None
    return made


def ready(leader, members, number, base, now_s):
    for seat, each in members.items():
        each.take_close(close_of(number, base))
        each.drained(number)
        leader.take_ready(seat, Ready(0, number, each.log.head, "", each.part_of(number)), now_s)


def leader_of(members, second):
    """A leader that has heard of the other stage before it knows its own log."""
    leader = Leader(member=members[A2], reign=EPOCHS[2].id, context=CONTEXT)
    leader.tick(0.0, EPOCHS[2], True)
    other = Member(me=B2, stage=1, restart=BEGINNING, context=CONTEXT, log=second, state=second.head)
    leader.take_head(B2, other.head())
    return leader


def test_a_leader_does_not_go_on_from_an_entry_that_was_made_from_a_lost_one(logs, members, made_from_lost):
    *_, second = logs
    leader = leader_of(members, second)
    members[A3].take_commit(made_from_lost)
    leader.take_status(A3, members[A3].status(), 0.1)
    leader.tick(0.2, EPOCHS[2], True)
    assert members[A2].log.head == made_from_lost.entry.hash, "it was committed"
    members[A3].take_entries(leader.entries(0))
    ready(leader, members, LOST + 3, base_of(members[A2].log, second, LOST + 3), 0.3)
    leader.tick(0.4, EPOCHS[2], True)
    assert leader.round.attempt is None
    members[A3].take_entries(leader.tick(0.5, EPOCHS[2], True)[0])
    assert [each.is_lost for each in members.values()] == [True, True]


@pytest.mark.parametrize("is_evidence", [False, True])
def test_what_was_signed_and_would_lose_the_stage_is_cut_anew(logs, members, made_from_lost, is_evidence):
    first, _, second = logs
    leader = leader_of(members, Log(1, BEGINNING) if is_evidence else second)
    for each in second.committed if is_evidence else ():
        leader.take_evidence(each)
    leader.take_status(A3, members[A3].status(), 0.1)
    for now_s in (0.2, 0.21, 0.22):
        leader.tick(now_s, EPOCHS[2], True)
    assert members[A2].log.head == first.head, "all that others could have made from it is void as well"
    leader.take_head(B2, Member(me=B2, stage=1, restart=BEGINNING, context=CONTEXT, log=second).head())
    leader.tick(0.25, epoch_of(4, (A2, A3), ()), True)
    assert members[A2].log.head == first.head, "who has told so has left meanwhile"
    members[A3].take_entries(leader.entries(0))
    ready(leader, members, LOST + 2, made_from_lost.close.base, 0.3)
    cutting = leader.tick(0.4, EPOCHS[2], True)[-1]
    assert cutting.cut.base == base_of(first, second, LOST + 2)
    for seat, each in members.items():
        each.take_cut(cutting.cut, cutting.shown)
        each.averaged(cutting.cut, "anew")
        leader.take_said(seat, each.work.open[LOST + 2].answer.said)
    leader.tick(0.5, EPOCHS[2], True)
    assert members[A2].log.head == Entry(cutting.cut, "anew").hash
    leader.tick(0.6, EPOCHS[2], True)
    assert not members[A2].is_lost


def test_a_leader_commits_what_was_signed_before_it_judges_what_was_made_from_that(logs, members, made_from_lost):
    first, other, _ = logs
    leader = leader_of(members, other)
    leader.tick(1.0 + Timing().synced_s, EPOCHS[2], True)
    assert leader.is_synced
    assert members[A2].log.head == first.head
    leader.take_status(A3, members[A3].status(), 20.0)
    longer = Log(0, BEGINNING, (*first.committed, made_from_lost))
    while other.next_round <= made_from_lost.entry.cut.round + 2:
        put(other, longer, EPOCHS[0])
    leader.take_head(B2, Member(me=B2, stage=1, restart=BEGINNING, context=CONTEXT, log=other, state=other.head).head())
    leader.take_evidence(other.committed[-1])
    told = leader.tick(20.1, EPOCHS[2], True)
    assert members[A2].log.head == made_from_lost.entry.hash
    assert [each.entry.cut.round for each in told[0].committed] == [made_from_lost.entry.cut.round], "all hear of it"
    leader.tick(20.2, EPOCHS[2], True)
    assert not members[A2].is_lost


def test_another_digest_of_a_cut_does_not_keep_the_one_that_most_have_from_being_committed(
    logs, members, made_from_lost
):
    first, other, _ = logs
    cut, longer = made_from_lost.entry.cut, Log(0, BEGINNING, (*first.committed, made_from_lost))
    leader = leader_of(members, other)
    while other.next_round <= cut.round + 2:
        put(other, longer, EPOCHS[0])
    leader.take_evidence(other.committed[-1])
    wrong = tuple((cut, Signed(Have(seat, EPOCHS[0].id, cut.hash, "wrong"), b"")) for seat in (A1, A3))
    leader.take_status(A3, replace(members[A3].status(), said=wrong[1:]), 0.1)
    leader.tick(0.2, EPOCHS[2], True)
    assert members[A2].log.head == first.head
    assert not leader._refused, "most have not signed it"
    leader.take_status(A3, members[A3].status(), 0.3)
    leader.tick(0.4, EPOCHS[2], True)
    assert members[A2].log.head == made_from_lost.entry.hash
    assert not members[A2].is_lost


def test_a_leader_is_shown_what_its_stage_has_lost(logs, members):
    first, lost, _ = logs
    for log in (first, lost):
        while log.next_round <= 9:
            put(log, lost if log is first else first, EPOCHS[0])
    leader = leader_of(members, Log(1, BEGINNING))
    leader.tick(1.0 + Timing().synced_s, EPOCHS[2], True)
    assert leader.is_synced
    leader.take_evidence(lost.committed[-1])
    told = leader.tick(20.0, EPOCHS[2], True)
    assert members[A2].is_lost
    assert told[0].lost == leader.evidence == lost.committed[-1]


def test_heads_of_rounds_further_ahead_than_a_stage_can_be_are_not_kept(logs):
    first, _, second = logs
    other = Member(me=B2, stage=1, restart=BEGINNING, context=CONTEXT, log=second, state=second.head)
    for own, is_kept in ((Log(0, BEGINNING), False), (first, True)):
        keeps = Member(me=A2, stage=0, restart=BEGINNING, context=CONTEXT, log=own, state=own.head)
        others = OtherStages(keeps, CONTEXT)
        others.take(B2, other.head())
        assert bool(others.entries(EPOCHS[1])) is is_kept

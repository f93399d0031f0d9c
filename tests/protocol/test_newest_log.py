"""Which of two logs of a stage holds, and what its new leader commits: a later epoch goes before a longer log."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place, next_epoch
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Close, Committed, Cut, Done, Entry, Have, Log, Part, base_of
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Entries, Ready, Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed, Stuck
from swarm_peer.protocol.work import RoundContext

LEADS, MATE, OTHER, LATE = (Seat(name, 1, f"of {name}") for name in ("leads", "mate", "other", "late"))
C = Seat("c", 1, "operator")
OF_ALL = (LEADS, MATE, OTHER, LATE)
RULES = RoundRules(num_stages=1, batch=8)


def epoch_of(term, number, *seats):
    places = (Place(COORDINATORS, C), *(Place(0, seat) for seat in seats))
    return Epoch(EpochId(term, C, number), places, BEGINNING, (0,))


BEFORE, OF_KEY, NOW = epoch_of(1, 4, *OF_ALL), epoch_of(2, 0, LATE), epoch_of(2, 1, *OF_ALL)
CONTEXT = RoundContext(
    num_stages=1, batch=8, unit=2, most=RULES.most, lag=0, averages=RULES.averages,
    is_rooted=lambda number: False, fills=lambda close: True, believed=lambda counts: {},
    epoch_of={each.id: each for each in (BEFORE, OF_KEY, NOW)}.get,
    sign=lambda body: Signed(body, b""), timing=Timing(),
)  # fmt: skip


def closed(number, head, epoch=BEFORE):
    return Close(number, (Signed(Done(C, epoch.id, number, 0, 8, (head,)), b""),))


def entry(log, epoch, *seats):
    cut = Cut(
        stage=0, round=log.next_round, epoch=epoch.id, attempt=0, parent=log.head, root="", base=(log.head,),
        averages=True, parts=tuple(Part(seat, ()) for seat in seats),
    )  # fmt: skip
    agreement = tuple(Signed(Have(seat, epoch.id, cut.hash, "digest"), b"") for seat in seats)
    return Committed(Entry(cut, "digest"), agreement, closed(cut.round, log.head, epoch))


def log_of(*epochs):
    """A log with an entry of each epoch, all of whose members have signed."""
    log = Log(0, BEGINNING)
    for epoch in epochs:
        log.append(entry(log, epoch, *epoch.roster(0)))
    return log


OLDER, NEWER = log_of(*[BEFORE] * 6), log_of(BEFORE, BEFORE, OF_KEY)


def member(seat, log):
    return Member(me=seat, stage=0, restart=BEGINNING, context=CONTEXT, log=log, state=log.head)


@pytest.fixture
def members():
    logs = {LEADS: OLDER, MATE: OLDER, OTHER: OLDER, LATE: NEWER}
    return {seat: member(seat, Log(0, BEGINNING, log.committed)) for seat, log in logs.items()}


def leader_of(members, *early):
    """The leader, after it has heard of some where they stand, and has told all the log; returns what it told."""
    leader = Leader(member=members[LEADS], reign=NOW.id, context=CONTEXT)
    leader.tick(0.0, NOW, True)
    for seat in early:
        leader.take_status(seat, members[seat].status(), 0.0)
    told = leader.tick(Timing().status_s + 0.1, NOW, True)
    for body in told:
        for each in members.values():
            each.take_entries(body)
    return leader


def test_of_two_logs_that_a_leader_hears_of_that_of_the_later_epoch_holds(members):
    leader = leader_of(members, MATE, OTHER, LATE)
    assert leader.is_synced
    assert {each.log.head for each in members.values()} == {NEWER.head}


@pytest.mark.parametrize("num_more", [1, 9], ids=["that is told whole", "whose older entries are not told"])
def test_a_leader_that_hears_of_a_newer_log_too_late_keeps_its_own_and_leads_no_longer(members, num_more):
    members[LATE] = member(LATE, log_of(BEFORE, BEFORE, *[OF_KEY] * num_more))
    leader = leader_of(members, MATE, OTHER)
    assert members[LATE].reign is None, "it does not give up what it has"
    told = leader.take_status(LATE, members[LATE].status(), 5.0)
    members[MATE].take_entries(told)
    assert [members[seat].log.head for seat in (LEADS, MATE)] == [OLDER.head] * 2, "one history under one reign"
    assert leader.resigns
    after = next_epoch(NOW, [Stuck(LEADS, NOW.id, 0, LEADS)], RULES)
    assert after.roster(0) == (MATE, OTHER, LATE, LEADS)
    for seat in (LEADS, MATE, OTHER):
        leader.take_ready(seat, ready_for(members[seat], 6), 6.0)
    leader.tick(6.0, NOW, True)
    leader.tick(6.1 + Timing().ready_s, NOW, True)
    assert leader.round.attempt is None, "it cuts nothing any more"


def ready_for(each, number):
    each.take_close(closed(number, each.log.head))
    each.drained(number)
    return Ready(0, number, each.log.head, "", each.part_of(number))


@pytest.mark.parametrize("closed_from", [OLDER.head, "a head that is lost"])
@pytest.mark.parametrize("num_missed", [0, 1, 3])
def test_what_most_have_signed_is_committed_by_a_leader_that_lacks_entries_before_it(members, num_missed, closed_from):
    cut = entry(OLDER, BEFORE, MATE, OTHER, LATE).entry.cut
    for seat in (MATE, OTHER, LATE):
        members[seat] = signs = member(seat, Log(0, BEGINNING, OLDER.committed))
        signs.reign = BEFORE.id
        signs.take_close(closed(6, closed_from))
        signs.drained(6)
        signs.take_cut(cut)
        signs.averaged(cut, "digest")
        signs.reign = None
    members[LEADS] = member(LEADS, log_of(*[BEFORE] * (6 - num_missed)))
    leader_of(members, MATE, OTHER, LATE)
    assert members[LEADS].log.head == Entry(cut, "digest").hash


def test_a_new_leader_takes_closes_of_the_log_alone_that_it_follows(members):
    replaced = replace(members[MATE].status(), closes=(closed(3, OLDER.head_before(3)),))
    leader = leader_of(members, MATE, OTHER, LATE)
    leader.take_status(MATE, replaced, 5.0)
    assert not members[LEADS].closes
    of_newer = closed(3, NEWER.head)
    leader.take_status(MATE, replace(replaced, closes=(*replaced.closes, of_newer)), 5.0)
    assert members[LEADS].closes == {3: of_newer}


def test_a_leader_that_resigns_commits_nothing_that_was_signed(members):
    members[LATE] = member(LATE, log_of(BEFORE, BEFORE, OF_KEY))
    leader = leader_of(members, MATE, OTHER)
    leader.take_status(LATE, members[LATE].status(), 5.0)
    assert leader.resigns
    cut = entry(OLDER, BEFORE, LEADS, MATE, OTHER).entry.cut
    members[LEADS].take_close(closed(6, OLDER.head))
    for seat in (MATE, OTHER):
        said = tuple((cut, Signed(Have(of, BEFORE.id, cut.hash, "digest"), b"")) for of in (LEADS, MATE, OTHER))
        leader.take_status(seat, replace(members[seat].status(), said=said), 5.0)
    assert members[LEADS].log.head == OLDER.head


def test_the_close_of_the_leader_replaces_another_one(members):
    first, other = closed(6, "a head that is lost"), closed(6, OLDER.head)
    for close, is_of_leader, kept in ((first, True, first), (other, False, first), (other, True, other)):
        assert members[MATE].take_close(close, is_of_leader=is_of_leader)
        assert members[MATE].closes == {6: kept}


def test_counts_of_older_epochs_than_what_they_were_computed_from_close_nothing(members):
    own = member(MATE, log_of(BEFORE, OF_KEY, OF_KEY))
    assert not own.take_close(closed(3, own.log.head, BEFORE))
    assert own.take_close(closed(3, own.log.head, OF_KEY))
    late = entry(own.log, OF_KEY, LATE)
    assert own.log_of((late._replace(close=closed(3, own.log.head, BEFORE)),)) is None
    assert own.log_of((late,)) is not None
    assert member(MATE, log_of(BEFORE, BEFORE, OF_KEY)).take_close(closed(3, "any head", BEFORE))


def test_a_certificate_has_a_statement_of_each_author(members):
    cut = entry(OLDER, BEFORE, MATE, OTHER, LATE).entry.cut
    statements = [Signed(Have(seat, BEFORE.id, cut.hash, "digest"), b"") for seat in (MATE, OTHER, LATE, LEADS, C)]
    leader = Leader(member=members[LEADS], reign=NOW.id, context=CONTEXT)
    leader.tick(0.0, NOW, True)
    for seat in (MATE, OTHER):
        status = replace(members[seat].status(), closes=(closed(6, OLDER.head),))
        leader.take_status(seat, replace(status, said=tuple((cut, each) for each in statements * 5)), 0.0)
    leader.tick(Timing().synced_s + 0.1, NOW, True)
    newest = members[LEADS].log.committed[-1]
    assert newest.entry.cut == cut
    assert sorted(newest.agreement, key=repr) == sorted(statements[:4], key=repr)


def test_who_says_again_what_it_has_of_an_older_cut_is_told_all_entries_since(members):
    leader = leader_of(members, MATE, OTHER)
    said = Signed(Have(MATE, BEFORE.id, OLDER.committed[3].entry.cut.hash, "digest"), b"")
    assert [each.entry.cut.round for each in leader.take_said(MATE, said).committed] == [3, 4, 5]


def test_other_stages_are_told_entries_without_counts(members):
    told = members[MATE].head().committed
    assert [committed.entry for committed in told] == [committed.entry for committed in OLDER.committed[-2:]]
    assert not any(committed.close.counts for committed in told)


def test_a_leader_follows_a_log_that_goes_on_from_its_own_however_late(members):
    members[LATE] = member(LATE, log_of(*[BEFORE] * 7))
    leader = leader_of(members, MATE, OTHER)
    leader.take_status(LATE, members[LATE].status(), 5.0)
    assert members[LEADS].log.head == members[LATE].log.head
    assert not leader.resigns


def test_a_log_of_older_epochs_is_none_unless_an_entry_of_a_later_one_follows(members):
    late = members[LATE]
    late.take_entries(Entries(0, NOW.id, OLDER.committed, None))
    assert late.log.head == NEWER.head
    followed = log_of(*[BEFORE] * 6, NOW)
    late.take_entries(Entries(0, NOW.id, followed.committed, None))
    assert late.log.head == followed.head


def test_what_has_closed_a_round_of_a_log_closes_none_of_another(members):
    late = members[LATE]
    late.closes[3] = closed(3, late.log.head)
    late.take_entries(Entries(0, NOW.id, log_of(BEFORE, BEFORE, BEFORE, NOW).committed[:3], None))
    assert 3 in late.closes, "an older log changes nothing"
    late.take_entries(Entries(0, NOW.id, log_of(BEFORE, BEFORE, NOW).committed, None))
    assert late.log.next_round == 3
    assert not late.closes


def test_a_cut_of_other_heads_than_were_counted_is_signed_only_if_their_entries_are_shown():
    cut = entry(Log(0, BEGINNING), BEFORE, LEADS, MATE).entry.cut
    assert cut.base == (base_of(0, BEGINNING),)
    other = entry(Log(1, BEGINNING), BEFORE, LEADS).entry
    counted = (cut.base[0], "head of stage 1")
    for base, shown, is_of in (
        (counted, [], True),
        ((cut.base[0], "made up"), [], False),
        ((cut.base[0], other.hash), [], False),
    ):
        assert replace(cut, base=base).is_of(counted, shown) == is_of
    shown = Entry(replace(other.cut, stage=1), other.digest)
    assert replace(cut, base=(cut.base[0], shown.hash)).is_of(counted, [shown])

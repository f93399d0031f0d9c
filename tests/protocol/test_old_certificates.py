"""A certificate that few tickets could make, as the run began, is none once a stage has gone on with more of them."""

from dataclasses import replace

import pytest

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place, Restart
from swarm_peer.protocol.log import Close, Committed, Cut, Done, Entry, Have, Log, Part
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Head, Timing
from swarm_peer.protocol.other_stages import OtherStages
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext

C = Seat("c", 1, "operator")
FIRST, SECOND = (tuple(Seat(f"{name}{stage}", 1, name) for name in "xabdf") for stage in (0, 1))
LIAR = SECOND[0]
RULES = RoundRules(num_stages=2, batch=8, roots_every=(0,))
# It was alone in its stage as the run began.
FEW = Epoch(EpochId(1, C, 1), (Place(COORDINATORS, C), Place(1, LIAR)), BEGINNING, (1,))
PLACES = (Place(COORDINATORS, C), *(Place(0, seat) for seat in FIRST), *(Place(1, seat) for seat in SECOND))


def context_of(*epochs):
    return RoundContext(
        num_stages=2, batch=8, unit=1, most=RULES.most, lag=0, averages=RULES.averages, is_rooted=RULES.is_rooted,
        fills=lambda close: True, believed=lambda counts: {}, epoch_of={each.id: each for each in epochs}.get,
        sign=lambda body: Signed(body, b""), timing=Timing(),
    )  # fmt: skip


def agreed(log, number, parent, base, epoch, seats):
    cut = Cut(
        stage=log.stage, round=number, epoch=epoch.id, attempt=0, parent=parent, root="", base=base, averages=True,
        parts=tuple(Part(seat, ()) for seat in seats),
    )  # fmt: skip
    agreement = tuple(Signed(Have(seat, epoch.id, cut.hash, "digest"), b"") for seat in seats)
    return Committed(Entry(cut, "digest"), agreement, close_of(number, base))


def close_of(number, base):
    return Close(number, (Signed(Done(FIRST[1], EpochId(1, C, 9), number, 0, 8, base), b""),))


@pytest.mark.parametrize(
    ("restart", "num_rounds"),
    [(BEGINNING, 3), (Restart(40, 0, (), EpochId(1, C, 2)), 1)],
    ids=["once", "before a restart"],
)
def test_who_was_alone_as_the_run_began_makes_no_entries_for_others_to_build_on(restart, num_rounds):
    now = Epoch(EpochId(1, C, 9), PLACES, restart, (0, 1))
    assert now.is_divided
    assert not FEW.is_divided
    context = context_of(FEW, now)
    logs = Log(0, restart), Log(1, restart)
    for number in range(restart.first_round, restart.first_round + num_rounds):
        base = tuple(log.head for log in logs)
        for log, seats in zip(logs, (FIRST, SECOND), strict=True):
            log.append(agreed(log, number, log.head, base, now, seats))
    number, head = logs[0].next_round, tuple(log.head for log in logs)
    before = tuple(log.head_before(number - 1) for log in logs)
    forged = agreed(logs[1], number - 1, before[1], before, FEW, (LIAR,))
    member = Member(me=FIRST[1], stage=0, restart=restart, context=context, log=logs[0], state=head[0])
    others = OtherStages(member, context)
    others.take(LIAR, Head(1, (forged,)))
    assert others.base(number, replace(now, places=(*PLACES[:6], Place(1, LIAR), *PLACES[7:]))) is None, "as it leads"
    member.reign = now.id
    member.take_close(close_of(number, head))
    member.drained(number)
    genuine = logs[1].committed[-1]
    for shown, is_signed in ((forged, False), (genuine, True)):
        base = head[0], shown.entry.hash
        cut = agreed(logs[0], number, head[0], base, now, FIRST).entry.cut
        member.closes[number] = close_of(number, (head[0], "another head"))
        member.take_cut(cut, (shown,))
        assert (member.averaging == cut) is is_signed


def test_an_entry_of_the_epoch_before_that_was_made_from_this_log_is_believed():
    """Stages hear of an epoch one after the other."""
    few = replace(FEW, places=(*FEW.places, Place(0, FIRST[0])))
    now = Epoch(EpochId(1, C, 9), PLACES, BEGINNING, (0, 1))
    context = context_of(few, now)
    log, other = Log(0, BEGINNING), Log(1, BEGINNING)
    base = log.head, other.head
    log.append(agreed(log, 0, log.head, base, now, FIRST))
    other.append(agreed(other, 0, other.head, base, few, (LIAR,)))
    member = Member(me=FIRST[1], stage=0, restart=BEGINNING, context=context, log=log, state=log.head)
    others = OtherStages(member, context)
    others.take(LIAR, Head(1, other.committed))
    assert others.base(1, now) == (log.head, other.head)

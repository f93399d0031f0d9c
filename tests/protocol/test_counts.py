"""What the counts of a round are believed for, and what a member waits for in a cut."""

from dataclasses import replace

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Epoch, Place
from swarm_peer.protocol.log import MAX_GUESTS, Close, Contribution, Cut, Done, Name, Part, Receipt
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed

RULES = RoundRules(num_stages=2, batch=10)
BASE = ("one", "two")
C = Seat("c", 1, "operator")
ID = EpochId(1, C, 0)
# Two seats of one ticket in stage 0, and one of the three of stage 1 is of that ticket as well.
A, B, OWN, OTHER = Seat("a", 1, "mine"), Seat("b", 1, "mine"), Seat("own", 1, "mine"), Seat("other", 1, "another")
FEW = (Place(COORDINATORS, C), Place(0, A), Place(0, B), Place(1, OWN), Place(1, OTHER))
EPOCH = Epoch(ID, (*FEW, Place(1, Seat("third", 1, "a third"))), BEGINNING, (0, 1))


def done(author, samples, **receipts):
    seats = {"own": OWN, "other": OTHER}
    signed = tuple(Signed(Receipt(seats[name], ID, author, 0, n, BASE), b"") for name, n in receipts.items())
    return Done(author, ID, 0, 0, samples, BASE, signed)


def test_a_ticket_is_believed_for_its_part_of_stage_1_once_and_not_for_each_of_its_seats():
    assert EPOCH.is_divided
    counts = [done(A, 5, own=4, other=1), done(B, 5, own=4, other=1)]
    believed = RULES.believed(counts, lambda _: EPOCH)
    assert believed == {A: 5, B: 1}, "a third of stage 1 is of their ticket: 4 of the 10 samples"
    assert not RULES.fills(Close(0, tuple(Signed(count, b"") for count in counts)), lambda _: EPOCH)
    counts[1] = done(B, 9, own=4, other=5)
    assert sum(RULES.believed(counts, lambda _: EPOCH).values()) == RULES.batch
    assert RULES.fills(Close(0, tuple(Signed(count, b"") for count in counts)), lambda _: EPOCH)


def test_of_two_tickets_in_stage_1_none_is_asked_to_keep_up_with_the_other():
    two = Epoch(ID, FEW, BEGINNING, (0, 1))
    assert two.is_divided
    assert RULES.believed([done(A, 10, own=9, other=1)], lambda _: two) == {A: 10}


def test_counts_are_believed_by_the_epoch_in_which_they_are_told():
    told = replace(done(A, 10, own=10), epoch=ID.next())
    few = Epoch(ID.next(), FEW, BEGINNING, (0, 1))
    assert RULES.believed([done(A, 10, own=10)], lambda _: EPOCH) == {A: 4}
    assert RULES.believed([told], {ID: EPOCH, ID.next(): few}.get) == {A: 10}, "the receipt is of the time before"


def test_a_member_does_not_wait_for_a_contribution_that_no_cut_may_hold():
    most = RULES.most
    cut = Cut(stage=0, round=0, epoch=ID, attempt=0, parent="", root="", base=BASE, averages=True, parts=(Part(A, ()),))
    heavy, fair = (Contribution(Name(A, 0), weight, (), BASE) for weight in (most.weight + 1, most.weight))
    assert cut.holds(Part(A, (heavy,)), None, None, most)
    assert not cut.holds(Part(A, (fair,)), None, None, most)
    assert cut.holds(Part(A, (fair,)), (), None, most), "it has come when the leader had made its cut"


def test_a_member_brings_no_more_contributions_of_others_than_it_may_hold():
    brings = tuple(Contribution(Name(Seat(f"{number}", 1, ""), 0), 1, (), BASE) for number in range(MAX_GUESTS + 2))
    assert Part(A, brings[:-1]).is_within(0, RULES.most)
    assert not Part(A, brings).is_within(0, RULES.most)


def test_roots_are_told_of_states_that_are_compared_or_become_snapshots():
    rules = RoundRules(num_stages=2, batch=10, roots_every=(6, 4))
    assert [step for step in range(25) if rules.is_rooted(step)] == [0, 4, 6, 8, 12, 16, 18, 20, 24]
    periodic = RoundRules(num_stages=2, batch=10, roots_every=(6, 8), period=4)
    assert [step for step in range(25) if periodic.is_rooted(step)] == [0, 8, 12, 16, 24]
    without = RoundRules(num_stages=2, batch=10, roots_every=(0, 0))
    assert not any(without.is_rooted(step) for step in range(25))

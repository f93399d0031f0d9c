"""What a seat brings to cuts in a period of rounds without an average."""

import pytest

from swarm_peer.policy.data.ranges import MAX_RANGES, SliceId, WindowRange
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Contribution, Cut, Log, Name, Part
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext, Work

ME, OTHER = Seat("me", 1, ""), Seat("other", 1, "")
PERIOD = 4
LAST = PERIOD - 1


def context(**rules):
    rounds = RoundRules(num_stages=2, batch=4, **rules)
    return RoundContext(
        num_stages=2, batch=4, unit=1, most=rounds.most, lag=rounds.lag, averages=rounds.averages,
        is_rooted=lambda n: False, fills=lambda c: True, believed=lambda counts: {}, epoch_of=lambda e: None,
        sign=lambda body: Signed(body, b""), timing=Timing(), last_step=rounds.last_step,
    )  # fmt: skip


@pytest.fixture
def work():
    return Work(ME, context(period=PERIOD))


def compute(work, number, *windows, slice_index=0):
    work.round(number)
    samples = [WindowRange(0, slice_index, window, window + 1) for window in windows]
    assert work.computed(number, base(number), weight=len(samples), samples=samples)


def base(number):
    return f"first of {number}", f"second of {number}"


def end(work, number, *brings):
    work.end_round(
        Cut(
            stage=0,
            round=number,
            epoch=EpochId(1, OTHER, 0),
            attempt=0,
            parent="",
            root="",
            base=base(number),
            averages=number == LAST,
            parts=(Part(ME, brings),),
        )
    )


def test_rounds_of_a_period_add_up_to_one_contribution(work):
    for number in range(PERIOD):
        compute(work, number, number)
        work.open[number].is_drained = True
        own = work.own(number)
        assert own.name == Name(ME, LAST)
        assert own.weight == number + 1
        assert own.base == (base(number) if number == LAST else ()), "another round's entry has another base"
        end(work, number, *([own] if number == LAST else []))
    assert work.own(PERIOD) is None
    assert work.lost == []


def test_a_round_that_ended_before_this_seat_was_drained_is_lost_and_the_others_are_not(work):
    compute(work, 0, 0)
    work.open[0].is_drained = True
    end(work, 0)
    compute(work, 1, 1)
    end(work, 1)
    assert [each.samples for each in work.lost] == [(WindowRange(0, 0, 1, 2),)]
    compute(work, 2, 2)
    assert work.own(2).samples == (WindowRange(0, 0, 0, 1), WindowRange(0, 0, 2, 3))


def test_a_voided_round_loses_its_own_part_of_a_period(work):
    compute(work, 0, 0)
    work.open[0].is_drained = True
    end(work, 0)
    compute(work, 1, 1)
    work.void(1)
    assert work.own(1).samples == (WindowRange(0, 0, 0, 1),)
    assert [each.weight for each in work.lost] == [1]


def test_whoever_takes_over_a_state_has_lost_its_part_of_the_period(work):
    compute(work, 0, 0)
    work.open[0].is_drained = True
    end(work, 0)
    compute(work, 1, 1)
    work.void_all(1)
    assert work.own(1) is None
    assert sum(each.weight for each in work.lost) == 2


def test_no_contribution_has_more_ranges_than_a_cut_holds(work):
    work.round(0)
    samples = [WindowRange(0, 0, 2 * window, 2 * window + 1) for window in range(MAX_RANGES + 1)]
    assert work.computed(0, base(0), weight=len(samples), samples=samples)
    own = work.own(0)
    assert len(own.samples) == MAX_RANGES
    assert own.weight == len(samples)


def test_a_new_leader_hears_of_all_slices_of_which_no_entry_holds_the_samples(work):
    compute(work, 0, 0, slice_index=2)
    work.open[0].is_drained = True
    end(work, 0)
    name = Name(OTHER, LAST)
    work.guests[name] = Contribution(name, 1, (WindowRange(0, 5, 0, 1),), ())
    assert work.undecided([SliceId(0, 7)]) == (SliceId(0, 2), SliceId(0, 5), SliceId(0, 7))


def test_what_others_have_given_in_a_period_is_lost_with_the_log(work):
    in_a_period, at_its_end = (Name(Seat(peer, 1, ""), LAST) for peer in "ab")
    work.guests[in_a_period] = Contribution(in_a_period, 1, (), ())
    work.guests[at_its_end] = Contribution(at_its_end, 1, (), base(LAST))
    work.give_up(1, Log(0, BEGINNING))
    assert set(work.guests) == {at_its_end}
    assert [each.name for each in work.lost] == [in_a_period]


def test_what_others_have_given_is_lost_with_the_place(work):
    """Nobody else may have it: its author has left since."""
    compute(work, 0, 0)
    name = Name(OTHER, LAST)
    work.guests[name] = Contribution(name, 3, (), base(LAST))
    work.give_up(0)
    assert work.guests == {}
    assert [(each.name.seat, each.weight) for each in work.lost] == [(ME, 1), (OTHER, 3)]


def test_a_run_is_over_with_its_last_update():
    work, log = Work(ME, context(last_step=0)), Log(0, BEGINNING)
    assert work.is_over(log)
    assert not Work(ME, context(last_step=1)).is_over(log)
    assert not Work(ME, context()).is_over(log)


def test_targets_and_samples_have_limits_of_their_own():
    most = RoundRules(num_stages=2, batch=10, unit=2, targets=100, period=3).most
    assert most.samples == 3 * (40 + 128)
    assert most.weight == 100 * most.samples
    many = (WindowRange(0, 0, 0, most.samples),)
    assert Contribution(Name(ME, 0), most.weight, many, ()).is_within(most)
    assert not Contribution(Name(ME, 0), most.weight + 1, many, ()).is_within(most)
    more = (WindowRange(0, 0, 0, most.samples + 1),)
    assert not Contribution(Name(ME, 0), 1, more, ()).is_within(most)

"""What has counted follows from the ranges that entries hold, in any order, and none counts twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.data.ledger import MAX_PASSES_AHEAD, MAX_SLICES, Ledger
from swarm_peer.policy.data.ranges import SliceId, WindowRange

SIZES = {0: 3, 1: 0, 2: 5}
SAMPLES = [(p, s, w) for p in range(2) for s, size in SIZES.items() for w in range(size)]


def windows(pass_number, index, start, end, is_last=False):
    return WindowRange(pass_number, index, start, end, is_last)


def test_a_slice_is_finished_once_its_end_is_known_and_all_before_has_counted():
    ledger = Ledger(2)
    ledger.add([windows(0, 0, 2, 4, True)])
    assert not ledger.is_finished(SliceId(0, 0))
    assert ledger.uncounted(SliceId(0, 0)).gaps == ((0, 2),)
    ledger.add([windows(0, 0, 0, 2)])
    assert ledger.is_finished(SliceId(0, 0))
    assert list(ledger.unfinished(0)) == [SliceId(0, 1)]


def test_an_empty_slice_is_finished_by_its_end_alone():
    ledger = Ledger(1)
    ledger.add([windows(0, 0, 0, 0)])
    assert not ledger.is_finished(SliceId(0, 0))
    ledger.add([windows(0, 0, 0, 0, True)])
    assert ledger.current_pass == 1


def test_what_counts_again_is_told():
    ledger = Ledger(2)
    assert ledger.add([windows(0, 0, 0, 4)]) == 0
    assert ledger.num_counted([windows(0, 0, 2, 6), windows(0, 1, 0, 2)]) == 2
    assert ledger.add([windows(0, 0, 2, 6)]) == 2
    ledger.add([windows(0, 0, 6, 7, True), windows(0, 1, 0, 1, True)])
    assert ledger.current_pass == 1
    assert ledger.num_counted([windows(0, 1, 0, 1)]) == 1
    assert ledger.add([windows(0, 1, 0, 1)]) == 1


@given(st.permutations(SAMPLES), st.integers(1, 4))
def test_any_order_of_samples_makes_the_same_ledger(order, chunk):
    ledger, whole = Ledger(3), Ledger(3)
    ends = [windows(p, 1, 0, 0, True) for p in range(2)]
    whole.add([*ends, *(windows(p, s, 0, SIZES[s], True) for p in range(2) for s in (0, 2))])
    for start in range(0, len(order), chunk):
        ledger.add(windows(p, s, w, w + 1, w + 1 == SIZES[s]) for p, s, w in order[start : start + chunk])
    ledger.add(ends)
    assert ledger.to_tuple() == whole.to_tuple() == (3, 2, ())


@given(st.lists(st.sampled_from(SAMPLES), max_size=12))
def test_a_ledger_is_read_as_it_was_written(samples):
    ledger = Ledger(3)
    ledger.add(windows(p, s, w, w + 1, w + 1 == SIZES[s]) for p, s, w in samples)
    value = ledger.to_tuple()
    assert Ledger.from_tuple(value).to_tuple() == value
    assert ledger.copy().to_tuple() == value


@pytest.mark.parametrize(
    "item",
    [
        windows(-1, 0, 0, 1),
        windows(MAX_PASSES_AHEAD, 0, 0, 1),
        windows(0, 3, 0, 1),
        windows(0, 0, 2, 1),
        windows(0, 0, -1, 1),
    ],
)
def test_ranges_that_cannot_be_are_passed_over(item):
    ledger = Ledger(3)
    ledger.add([item])
    assert ledger.to_tuple() == (3, 0, ())


@pytest.mark.parametrize(
    "value",
    [
        None,
        (3, 0),
        (3, -1, ()),
        (0, 0, ()),
        (MAX_SLICES + 1, 0, ()),
        (3, 1, ((0, 0, 0, 1, False),)),
        (3, 0, ((0, 3, 0, 1, False),)),
        (3, 0, ((0, 0, 0, 1),)),
        (3, 0, ((0, 1, 0, 1, False), (0, 0, 0, 1, False))),
        (3, 0, ((0, 0, 0, 1, False), (0, 0, 1, 2, False))),
        (3, 0, ((0, 0, 0, 1, False), (0, 0, 0, 1, False))),
    ],
)
def test_what_is_no_ledger_is_refused(value):
    with pytest.raises(ValueError, match=r"ledger|slices|ranges|come after"):
        Ledger.from_tuple(value)


def test_begun_slices_come_first_and_the_others_by_lot():
    ledger = Ledger(40)
    ledger.add([windows(0, 7, 0, 1), windows(0, 9, 0, 1, True)])
    order = [slice_id.slice_index for slice_id in ledger.unfinished(0)]
    assert order[0] == 7
    assert sorted(order) == [i for i in range(40) if i != 9]
    assert order[1:] != sorted(order[1:])


def finish_pass(ledger, pass_number):
    ledger.add(windows(pass_number, index, 0, 3, True) for index in range(ledger.num_slices))


def test_a_ledger_has_slices() -> None:
    with pytest.raises(ValueError, match="a pass of 0 slices"):
        Ledger(0)


def test_what_was_there_is_a_duplicate() -> None:
    ledger = Ledger(4)
    assert ledger.add([WindowRange(0, 0, 0, 5), WindowRange(0, 0, 8, 10)]) == 0
    assert ledger.add([WindowRange(0, 0, 3, 9)]) == 3
    assert ledger.add([WindowRange(0, 1, 3, 9)]) == 0, "another slice"
    assert ledger.add([WindowRange(1, 0, 3, 9)]) == 0, "another pass"
    ledger.add([WindowRange(0, 0, 10, 10, True)])
    assert ledger.add([WindowRange(0, 0, 2, 4)]) == 2, "of a finished slice"
    finish_pass(ledger, 0)
    assert ledger.current_pass == 1
    assert ledger.add([WindowRange(0, 3, 0, 2)]) == 2, "of a pass that is over"


def test_of_two_ends_the_smaller_one_counts() -> None:
    """Peers whose data differ must not wait for windows that one of them lacks."""
    for ends in ((5, 7), (7, 5)):
        ledger = Ledger(4)
        for end in ends:
            ledger.add([WindowRange(0, 0, end, end, True)])
        ledger.add([WindowRange(0, 0, 0, 5)])
        assert ledger.is_finished(SliceId(0, 0))


def test_the_next_pass_begins_when_all_slices_are_finished() -> None:
    ledger = Ledger(4)
    finish_pass(ledger, 1)
    ledger.add([WindowRange(2, 0, 0, 1)])
    assert ledger.current_pass == 0, "a later pass may be finished before"
    finish_pass(ledger, 0)
    assert ledger.current_pass == 2
    assert ledger.is_finished(SliceId(1, 3))
    assert not ledger.is_finished(SliceId(2, 0))
    assert list(ledger.facts()) == [WindowRange(2, 0, 0, 1)]

"""The run key's word of a decay, as a restart carries it."""

import pytest

from swarm_peer.policy.decay import Decay, decay_in, last_step_of, names_in, with_decay


def test_a_restart_carries_a_decay_behind_the_names_of_its_snapshots():
    entries = with_decay(("a", "b"), Decay(50, 20))
    assert entries[:2] == ("a", "b")
    assert (names_in(entries, 2), decay_in(entries, 2)) == (("a", "b"), Decay(50, 20))
    assert last_step_of(1000, entries, 2) == Decay(50, 20).end == 70


@pytest.mark.parametrize("entries", [(), ("a", "b"), ("a", "b", "x"), ("a", "b", "decay/5"), ("a", "b", "decay/1/0")])
def test_what_is_no_word_of_a_decay_is_none(entries):
    assert decay_in(entries, 2) is None
    assert last_step_of(1000, entries, 2) == 1000


@pytest.mark.parametrize(
    "word", ["decay/01/2", "decay/1/2\n", "decay/1/2/3", "decay/-1/2", "decay/1/99999999999", "decay/١/2"]
)
def test_a_word_is_read_in_one_form_alone(word):
    """Two readings of one restart would be two histories."""
    assert decay_in(("a", word), 1) is None


def test_a_name_of_a_snapshot_is_no_word():
    assert decay_in(("decay/1/2",), 1) is None
    assert decay_in(with_decay(("decay/1/2",), None), 1) is None

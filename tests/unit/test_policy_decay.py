"""The run key's word of a decay."""

import pytest

from swarm_peer.policy.decay import Decay, decay_in, last_step_of


def test_a_word_tells_of_a_decay():
    word = Decay(50, 20).word
    assert decay_in(word) == Decay(50, 20)
    assert last_step_of(1000, word) == Decay(50, 20).end == 70


@pytest.mark.parametrize(
    "word",
    [
        "",
        "decay/5",
        "decay/1/0",
        "decay/01/2",
        "decay/1/2\n",
        "decay/1/2/3",
        "decay/-1/2",
        "decay/1/99999999999",
        "decay/١/2",
    ],
)
def test_a_word_is_read_in_one_form_alone(word):
    assert decay_in(word) is None
    assert last_step_of(1000, word) == 1000

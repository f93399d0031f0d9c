import pytest
from pydantic import ValidationError

from swarm_peer.policy.lineage import (
    DIGEST_BYTES,
    MAX_LINEAGE_BYTES,
    MOST_STEPS,
    Descent,
    extend_lineage,
    last_common_step,
)
from swarm_peer.wire.messages import StateIndex


def descent(first_step, hashes):
    """Of weights whose updates since a step have these history hashes, that of the step itself first."""
    lineage = b""
    for history_hash in hashes[:-1]:
        lineage = extend_lineage(lineage, history_hash)
    return Descent(first_step + len(hashes) - 1, hashes[-1], lineage)


@pytest.mark.parametrize(
    ("own", "other", "common"),
    [
        ("abc", "abcde", 12),  # left behind, and nothing else
        ("abcde", "abc", 12),
        ("abc", "abxyz", 11),
        ("abc", "xyz", 10),  # parted before
        ("a", "a", 10),
    ],
)
def test_the_last_step_that_has_led_to_both(own, other, common):
    assert last_common_step(descent(10, own), descent(10, other)) == common


def test_of_others_that_are_far_nothing_is_known():
    assert last_common_step(descent(10, "abc"), descent(13, "xyz")) is None
    assert last_common_step(descent(10, "abc"), descent(12, "cde")) == 12


def test_a_lineage_keeps_the_last_steps():
    hashes = [str(number) for number in range(MOST_STEPS + 5)]
    own = descent(0, hashes)
    assert len(own.lineage) == MAX_LINEAGE_BYTES
    assert own == descent(4, hashes[4:])
    assert last_common_step(own, descent(0, hashes[:7])) == 6
    assert last_common_step(own, descent(0, hashes[:4])) is None


def test_a_lineage_of_any_bytes_breaks_nothing():
    own = descent(10, "abc")
    for told in (b"", b"x", bytes(DIGEST_BYTES + 3), bytes(MAX_LINEAGE_BYTES)):
        assert last_common_step(own, Descent(11, "x", told)) == 10


def test_an_index_whose_lineage_is_cut_off_in_a_digest_is_refused():
    told = {"stage": 0, "kind": "state", "round_number": 1, "history_hash": "x", "entries": ()}
    told |= {f"timeline_{name}": 0 for name in ("first_round", "first_optimizer_step", "created_at_round")}
    assert StateIndex(**told, lineage=bytes(2 * DIGEST_BYTES)).lineage
    with pytest.raises(ValidationError, match="9 bytes are no lineage"):
        StateIndex(**told, lineage=bytes(DIGEST_BYTES + 1))

import pytest

from swarm_peer.policy.lineage import DIGEST_BYTES, MAX_LINEAGE_BYTES, MOST_ROUNDS, extend_lineage, last_common_round


def lineage_of(*history_hashes):
    lineage = b""
    for history_hash in history_hashes:
        lineage = extend_lineage(lineage, history_hash)
    return lineage


def place(first_round, hashes):
    """Where a peer stands that began a timeline in a round, and began each round since with these hashes."""
    return first_round + len(hashes) - 1, hashes[-1], lineage_of(*hashes[:-1])


@pytest.mark.parametrize(
    ("own", "other", "common"),
    [
        ("abc", "abcde", 12),  # left behind, and nothing else
        ("abcde", "abc", 12),
        ("abc", "abxyz", 11),
        ("axcd", "abcd", 13),  # by the digests: no two histories meet again, since each hash covers those before
        ("abc", "xyz", None),
        ("a", "a", 10),
    ],
)
def test_the_last_round_with_the_same_weights(own, other, common):
    assert last_common_round(place(10, own), place(10, other)) == common


def test_a_lineage_keeps_the_last_rounds():
    hashes = [str(number) for number in range(MOST_ROUNDS + 5)]
    lineage = lineage_of(*hashes)
    assert len(lineage) == MAX_LINEAGE_BYTES
    assert lineage == lineage_of(*hashes[5:])
    number, history_hash, lineage = place(0, hashes)
    assert last_common_round((number, history_hash, lineage), (6, "6", lineage_of(*hashes[:6]))) == 6
    assert last_common_round((number, history_hash, lineage), (3, "3", lineage_of(*hashes[:3]))) is None


def test_a_lineage_of_any_bytes_breaks_nothing():
    number, history_hash, lineage = place(10, "abc")
    for told in (b"", b"x", bytes(DIGEST_BYTES + 3), bytes(MAX_LINEAGE_BYTES)):
        assert last_common_round((number, history_hash, lineage), (11, "x", told)) is None

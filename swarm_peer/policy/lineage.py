"""Finds the last round that two stage-mates had in common, from what each keeps of its last rounds.

Stage-mates that do not reach each other may go on by themselves, each with weights of its own. When they meet again,
one takes over the state of the other, and no update holds what it has done since their last common round.

A lineage has a digest of DIGEST_BYTES for each of the last rounds of a timeline, up to the one before the present
round: of the history hash that the round began with. Stage-mates with the same weights have the same lineage, byte by
byte.
"""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 8
# Of a cut that lasts for more rounds, no common round is found.
MOST_ROUNDS = 512
MAX_LINEAGE_BYTES = MOST_ROUNDS * DIGEST_BYTES


def extend_lineage(lineage: bytes, history_hash: str) -> bytes:
    """The lineage of the next round, where the present one began with this history hash."""
    return (lineage + _digest(history_hash))[-MAX_LINEAGE_BYTES:]


def last_common_round(own: tuple[int, str, bytes], other: tuple[int, str, bytes]) -> int | None:
    """The last round that two peers on the same timeline began with the same weights.

    Args:
        own, other: the present round of each, the history hash that it began with, and the lineage before it

    Returns:
        None if neither knows of one
    """
    ours, theirs = _by_round(*own), _by_round(*other)
    return max((number for number, digest in ours.items() if theirs.get(number) == digest), default=None)


def _digest(history_hash: str) -> bytes:
    return hashlib.sha256(history_hash.encode()).digest()[:DIGEST_BYTES]


def _by_round(round_number: int, history_hash: str, lineage: bytes) -> dict[int, bytes]:
    known = extend_lineage(lineage, history_hash)
    digests = [known[at : at + DIGEST_BYTES] for at in range(0, len(known), DIGEST_BYTES)]
    return dict(enumerate(digests, start=round_number - len(digests) + 1))

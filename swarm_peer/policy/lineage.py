"""Finds the last optimizer step that two stage-mates had in common, from what each keeps of its last ones.

Stage-mates that do not reach each other may go on by themselves, each with weights of its own. When they meet again,
one takes over the state of the other, and no update holds what it has done since their last common step.

A lineage has a digest of DIGEST_BYTES for each of the last optimizer steps, up to the one before the present step: of
the history hash that belongs to its weights. Stage-mates with the same weights have the same lineage, byte by byte. It
goes on through rewinds, which go back to an earlier step.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

DIGEST_BYTES = 8
# Of peers that have been apart for more steps, nothing is known.
MOST_STEPS = 512
MAX_LINEAGE_BYTES = MOST_STEPS * DIGEST_BYTES


class Descent(NamedTuple):
    """Where weights come from: their optimizer step, their history hash, and the lineage before them."""

    optimizer_step: int
    history_hash: str
    lineage: bytes


def extend_lineage(lineage: bytes, history_hash: str) -> bytes:
    """The lineage of the next weights, where the present ones have this history hash."""
    return (lineage + _digest(history_hash))[-MAX_LINEAGE_BYTES:]


def last_common_step(own: Descent, other: Descent) -> int | None:
    """The last optimizer step that has led to both.

    Returns:
        None if they know of no step that both have gone through. If they know of some and none is common, the first one
        that `own` knows of: they have parted before.
    """
    ours, theirs = _by_step(own), _by_step(other)
    if not ours.keys() & theirs.keys():
        return None
    return max((step for step, digest in ours.items() if theirs.get(step) == digest), default=min(ours))


def _digest(history_hash: str) -> bytes:
    return hashlib.sha256(history_hash.encode()).digest()[:DIGEST_BYTES]


def _by_step(descent: Descent) -> dict[int, bytes]:
    known = descent.lineage + _digest(descent.history_hash)
    digests = [known[at : at + DIGEST_BYTES] for at in range(0, len(known), DIGEST_BYTES)]
    return dict(enumerate(digests, start=descent.optimizer_step - len(digests) + 1))

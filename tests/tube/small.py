"""Pieces and limits as small as the tube's model, in a share of the schedules: several chunks of a state, parts of an
average, updates that are dropped while somebody wants them.

Elsewhere each tensor is one chunk, a gradient that is handed over another, and each member averages one part; peers
have room for all microbatches of a round, and for two replicas; and no schedule is long enough for the limits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from loop import HOST

from swarm_peer.codecs import parts
from swarm_peer.runtime import mover
from swarm_peer.runtime.data import launcher
from swarm_peer.runtime.state import chunks, index, named_snapshots, state_server
from swarm_peer.runtime.step import giving, kept_updates

SMALL_SHARE = 1 / 3
# A stage has 900 to 5,000 values, and its largest tensor 8 KiB.
GIVEN_BYTES = 2 * 2**10
STATE_BYTES = 2**10
PART_VALUES = 256
LAUNCHES = 4
UPDATES_KEPT = 2
LEASE_S = 20.0


def is_small(seed: str) -> bool:
    """Whether a schedule is of those with small pieces."""
    return _rng(seed).random() < SMALL_SHARE


def max_in_flight(seed: str) -> int:
    """The microbatches that a peer holds at once: so few that it refuses some, or as many as by default."""
    return _rng(seed, "in flight").choice([1, 2, 4, 16]) if is_small(seed) else 16


@contextmanager
def pieces_of(seed: str) -> Iterator[None]:
    """While the context is open, pieces are as small as a seed has them."""

    def has_room(*_: Any) -> bool:
        return bool(HOST.get().rng("room").random() < 0.5)

    with ExitStack() as stack:
        if is_small(seed):
            stack.enter_context(patch.object(giving, "CHUNK_BYTES", GIVEN_BYTES))
            stack.enter_context(patch.object(parts, "MAX_PART_VALUES", PART_VALUES))
            stack.enter_context(patch.object(mover, "has_room_beside", has_room))
            for module in (index, named_snapshots, chunks):
                stack.enter_context(patch.object(module, "STATE_CHUNK_BYTES", STATE_BYTES))
            stack.enter_context(patch.object(launcher, "MAX_LAUNCHES", LAUNCHES))
            stack.enter_context(patch.object(kept_updates, "KEPT_UPDATES", UPDATES_KEPT))
            stack.enter_context(patch.object(kept_updates, "SMALL_BYTES", 0))
            stack.enter_context(patch.object(state_server, "LEASE_S", LEASE_S))
        yield


def _rng(seed: str, purpose: str = "small") -> random.Random:
    return random.Random(f"{purpose} {seed.partition('+')[0]}")

"""The digests by which entries name states and updates: the same at all members."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm_peer.model.round_strategy import shared_entries
from swarm_peer.runtime.state.index import as_bytes


def root_of(state: Mapping[str, Tensor], ledger: bytes) -> str:
    """The root of a stage's state: a digest of all that stage-mates hold alike.

    That is all that the next steps depend on, unless replicas update their weights alone.

    Args:
        ledger: as states carry it; empty at other stages than 0
    """
    digest = hashlib.sha256(ledger)
    for name, tensor in sorted(shared_entries(state).items()):
        # The same bytes under other names, or cut otherwise, are another state.
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()[:32]


def digest_of(averages: Sequence[Tensor]) -> str:
    """A digest of an update, as entries name it."""
    digest = hashlib.sha256()
    for average in averages:
        digest.update(as_bytes(average))
    return digest.hexdigest()[:32]

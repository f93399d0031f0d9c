"""Says which updates a seat keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from swarm_peer.protocol.log import KEPT_ENTRIES

# Updates that are kept for stage-mates that have missed them.
KEPT_UPDATES, MOST_KEPT_UPDATES = 4, KEPT_ENTRIES
# Of small updates, as many more as fit: rounds may be quicker than the download of a state.
SMALL_BYTES = 2**26


def kept_updates(updates: Mapping[str, list[Tensor]], heads: Sequence[str], reached: str) -> dict[str, list[Tensor]]:
    """The newest of the updates that a seat has applied, and all that it has yet to apply.

    Args:
        updates: by the hashes of their entries
        heads: of the log, the oldest first
        reached: the entry that the weights embody
    """
    # None, if another log has taken the place of this one meanwhile: then a state is taken over.
    applied = heads[: heads.index(reached) + 1] if reached in heads else []
    most_bytes = max((sum(each.nbytes for each in averages) for averages in updates.values()), default=0)
    num_kept = min(max(KEPT_UPDATES, SMALL_BYTES // max(most_bytes, 1)), MOST_KEPT_UPDATES)
    kept = {*applied[-num_kept:], *set(heads) - set(applied)}
    return {entry: averages for entry, averages in updates.items() if entry in kept}

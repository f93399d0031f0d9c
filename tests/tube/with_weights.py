"""What comes with a stage's weights belongs to them: their lineage, and at stage 0 the ledger of samples."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from loop import HOST

from swarm_peer.policy.data.ranges import ranges_of
from swarm_peer.wire.ledger_codec import decode_ledger

if TYPE_CHECKING:
    from invariants import Invariants, Place

# What a ledger lacks of earlier updates was seen as they were made.
UPDATES_LOOKED_AT = 6


def check_lineage(watch: Invariants, place: Place, lineage: bytes, what: str) -> None:
    """Whoever has the same weights has the same lineage."""
    known = watch.records.beginnings[place].lineage
    if lineage != known:
        watch.tube.violation(
            f"{HOST.get()}: a {what} of stage {place[0]} in round {place[2]} has another lineage than its stage-mates"
        )


def check_ledger(watch: Invariants, place: Place, ledger: bytes, what: str) -> None:
    """The ledger that stage 0 gives away with its weights has all samples of the updates that have led to them."""
    if place[0] != 0 or not ledger:
        return
    newest = islice(watch.history(place), UPDATES_LOOKED_AT)
    names = {name for _, ids in newest for name in watch.names(ids)}
    assert watch.num_slices is not None
    if lacking := decode_ledger(ledger, watch.num_slices).lacking(ranges_of(names)):
        watch.tube.violation(
            f"{HOST.get()}: the ledger of a {what} in round {place[2]} lacks {len(lacking)} samples that are in its "
            f"weights, such as {lacking[:2]}"
        )

"""The ledger of a run's data as bytes. Everything that is decoded is checked first."""

from __future__ import annotations

import msgpack

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ledger import MAX_SPARE_FACTS, Ledger
from swarm_peer.wire.packing import unpack

# Enough for a pass of a million finished slices, at ten bytes each.
MAX_LEDGER_BYTES = 16 << 20


def encode_ledger(ledger: Ledger) -> bytes:
    """The ledger as bytes, for checkpoints and for stage-mates that join. Equal ledgers make equal bytes."""
    return bytes(msgpack.packb(ledger.to_tuple()))


def read_ledger(data: bytes, num_slices: int) -> Ledger:
    """The ledger that comes with a state; no bytes are one in which nothing has counted yet.

    Args:
        num_slices: the number of slices in a pass over the data that this peer reads

    Raises:
        InvalidMessage: the bytes are no ledger, or one of other data
    """
    if not data:
        return Ledger(num_slices)
    if not isinstance(data, bytes) or len(data) > MAX_LEDGER_BYTES:
        raise InvalidMessage(f"data ledger: not at most {MAX_LEDGER_BYTES} bytes")
    # The tuple itself, that of its facts, and the facts.
    values = unpack(data, "data ledger", max_items=2 + 2 * num_slices + MAX_SPARE_FACTS, max_bytes=MAX_LEDGER_BYTES)
    try:
        ledger = Ledger.from_tuple(values)
    except ValueError as error:
        raise InvalidMessage(f"data ledger: {error}") from error
    if ledger.num_slices != num_slices:
        raise InvalidMessage(f"data ledger: of {ledger.num_slices} slices, where the data here has {num_slices}")
    return ledger

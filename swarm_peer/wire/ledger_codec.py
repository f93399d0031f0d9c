"""The sample ledger as bytes, and its ranges as a field of records. Everything that is decoded is checked first."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgpack
from pydantic import AfterValidator, Field

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import MAX_RANGES, SliceId, WindowRange
from swarm_peer.policy.data.sample_ledger import MAX_PASSES, MAX_SLICES, MAX_SPARE_FACTS, MAX_WINDOWS, SampleLedger
from swarm_peer.wire.packing import unpack

# Enough for a pass of a million finished slices, at ten bytes each.
MAX_LEDGER_BYTES = 16 << 20


AnySlice = TypeVar("AnySlice", SliceId, WindowRange)


def _check_slice(item: AnySlice) -> AnySlice:
    if not (0 <= item.pass_number < MAX_PASSES and 0 <= item.slice_index < MAX_SLICES):
        raise ValueError("no slice")
    return item


def _check_range(item: WindowRange) -> WindowRange:
    if not 0 <= item.start <= item.end <= MAX_WINDOWS:
        raise ValueError("no range of windows")
    return _check_slice(item)


# Fields of pydantic models. `CountedRanges` are the samples that a peer has counted in one round. The schema checks
# nothing but their form; `SampleLedger.admits` checks whether they can be samples of this run.
CountedRange = Annotated[WindowRange, AfterValidator(_check_range)]
CountedRanges = Annotated[tuple[CountedRange, ...], Field(max_length=MAX_RANGES, fail_fast=True)]
SliceName = Annotated[SliceId, AfterValidator(_check_slice)]


def encode_ledger(ledger: SampleLedger | Ledger) -> bytes:
    """The ledger as bytes, for checkpoints and for stage-mates that join. Equal ledgers make equal bytes."""
    return bytes(msgpack.packb(ledger.to_tuple()))


def decode_ledger(data: object, num_slices: int) -> SampleLedger:
    """The ledger that `encode_ledger` encoded.

    Args:
        num_slices: the number of slices in a pass over the data that this peer reads

    Raises:
        InvalidMessage: the bytes are no ledger, or one of other data
    """
    if not isinstance(data, bytes) or len(data) > MAX_LEDGER_BYTES:
        raise InvalidMessage(f"data ledger: not at most {MAX_LEDGER_BYTES} bytes")
    # The tuple itself, that of its facts, and the facts.
    values = unpack(data, "data ledger", max_items=2 + 2 * num_slices + MAX_SPARE_FACTS, max_bytes=MAX_LEDGER_BYTES)
    try:
        ledger = SampleLedger.from_tuple(values)
    except ValueError as error:
        raise InvalidMessage(f"data ledger: {error}") from error
    if ledger.num_slices != num_slices:
        raise InvalidMessage(f"data ledger: of {ledger.num_slices} slices, where the data here has {num_slices}")
    return ledger


def read_ledger(data: bytes, num_slices: int) -> Ledger:
    """The ledger that comes with a state; no bytes are one in which nothing has counted yet.

    Raises:
        InvalidMessage: the bytes are no ledger, or one of other data
    """
    if not data:
        return Ledger(num_slices)
    return Ledger.from_tuple(decode_ledger(data, num_slices).to_tuple())

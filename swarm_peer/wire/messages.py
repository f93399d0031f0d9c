"""Calls between peers: their frames on a stream, and the schema of each body.

A frame is `[header length: u32][payload length: u64][header: msgpack][payload: the tensors, one after the other]`. It
says its length because a dropped libp2p stream reads as a plain end of stream: whatever is short was cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES, CountedRange, SliceName
from swarm_peer.wire.records import FiniteFloat, NonNegativeFloat, Samples, Step

PROTOCOL = "swarm/1"
PREFIX = struct.Struct("!IQ")
# Progress counts of some hundred stage-0 peers are the largest thing in a header.
MAX_HEADER_BYTES = 2**20
# One of them, with its ranges of samples.
MAX_COUNT_BYTES = 32 * 1024
MAX_TENSORS = 8
# Microbatches of one peer's share of a global step; 20 bytes of a header each.
MAX_COUNTED_IDS = 8192
STATE_CHUNK_BYTES = 4 * 2**20
# Of a reply with logits; every peer takes frames of this length.
MAX_LOGITS_BYTES = STATE_CHUNK_BYTES


class FrameType(IntEnum):
    CALL = 0
    REPLY = 1
    ERROR = 2
    CANCEL = 3


@dataclass(slots=True)
class Frame:
    """One message on a stream. `op` names what is called; replies and errors carry the id of their call."""

    type: FrameType
    call_id: int
    op: str = ""
    body: dict[str, Any] | None = None
    tensors: Sequence[memoryview] = ()

    def head(self) -> bytes:
        """All bytes of the frame but its tensors."""
        sizes = [tensor.nbytes for tensor in self.tensors]
        header = msgpack.packb([int(self.type), self.call_id, self.op, self.body, sizes])
        return bytes(PREFIX.pack(len(header), sum(sizes)) + header)


def parse_lengths(prefix: bytes, max_payload_bytes: int) -> tuple[int, int]:
    """Header and payload length, bounded before anything is allocated.

    Raises:
        InvalidMessage
    """
    header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_payload_bytes:
        raise InvalidMessage(
            f"frame of {header_bytes} + {payload_bytes} bytes; at most {MAX_HEADER_BYTES} + {max_payload_bytes} go"
        )
    return header_bytes, payload_bytes


def parse_frame(header: bytes, payload: memoryview) -> Frame:
    """Build a frame of its two parts; the tensors are views of the payload.

    Raises:
        InvalidMessage
    """
    try:
        fields = msgpack.unpackb(header, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessage(f"header is no msgpack: {error}") from error
    match fields:
        case [int() as kind, int() as call_id, str() as op, dict() | None as body, tuple() as sizes] if (
            0 <= kind <= FrameType.CANCEL
            and len(sizes) <= MAX_TENSORS
            and all(isinstance(size, int) and size >= 0 for size in sizes)
            and sum(sizes) == len(payload)
        ):
            tensors, offset = [], 0
            for size in sizes:
                tensors.append(payload[offset : offset + size])
                offset += size
            return Frame(FrameType(kind), call_id, op, body, tensors)
        case _:
            raise InvalidMessage("header is not [type, id, op, body, sizes that add up to the payload]")


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Hash = Annotated[str, Field(min_length=32, max_length=32)]
# A signed progress count: (peer id of its author, envelope).
SignedCount = tuple[Annotated[str, Field(max_length=64)], Annotated[bytes, Field(max_length=MAX_COUNT_BYTES)]]
SignedCounts = Annotated[tuple[SignedCount, ...], Field(max_length=1024)]


# The same on every try and at every stage.
MicrobatchId = Annotated[bytes, Field(min_length=16, max_length=16)]


# train is counted; evaluate is the run's own validation; score and predict are queries from outside of the run.
Mode = Literal["train", "evaluate", "score", "predict"]
QUERIES: tuple[Mode, ...] = ("score", "predict")


class MicrobatchCall(Body):
    """Run a microbatch through `stage` and all later stages.

    Tensors: tokens (B, T+1), or (B, T) to predict what follows them, and hidden (B, T, D), which stage 0 does not take.
    Stage 0 answers queries alone: it launches the run's own microbatches itself.

    Attributes:
        length: T; a query's may be shorter than the run's sequences
    """

    op: Literal["microbatch"] = "microbatch"
    manifest: Hash
    step: Step
    mode: Mode
    stage: int = Field(ge=0, lt=256)
    microbatch: MicrobatchId
    num_samples: int = Field(ge=1, lt=2**20)
    length: int = Field(ge=1, le=2**20)
    timeout_s: float = Field(gt=0, le=86400, allow_inf_nan=False)
    counts: SignedCounts = ()

    @field_validator("stage")
    @classmethod
    def _stage_0_answers_queries(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("mode") not in QUERIES:
            raise ValueError("stage 0 answers queries alone")
        return value


class MicrobatchReply(Body):
    """Tensors: in mode train, the gradient of the loss sum with respect to the call's hidden (B, T, D); in mode
    predict, the logits of what follows the last token, fp32 (B, V)."""

    loss_sum: FiniteFloat
    samples_per_s: NonNegativeFloat
    counts: SignedCounts = ()


class CountsCall(Body):
    """Progress for a peer that has no traffic to learn it from. The reply has the callee's counts."""

    op: Literal["counts"] = "counts"
    manifest: Hash
    step: Step
    counts: SignedCounts


class GreetCall(Body):
    """A stage-mate that serves from now on. The reply has the callee's step and counts."""

    op: Literal["greet"] = "greet"
    manifest: Hash
    stage: int = Field(ge=0, lt=256)
    step: Step
    counts: SignedCounts


class CountsReply(Body):
    step: Step
    counts: SignedCounts


Checksum = Annotated[str, Field(max_length=64)]


class ReadyCall(Body):
    """The caller has finished its microbatches of `step` and waits for its stage-mates to average with."""

    op: Literal["ready"] = "ready"
    manifest: Hash
    stage: int = Field(ge=0, lt=256)
    step: Step
    attempt: int = Field(ge=0, lt=1000)
    counts: SignedCounts


class ReadyReply(Body):
    """Attributes:
    attempt: the round that the callee is ready for; None while it is not ready: ask again
    lineage: digest of all updates that made its weights
    samples: that it brings to the round
    """

    attempt: int | None = Field(ge=0, lt=1000)
    lineage: Checksum
    samples: Samples
    counts: SignedCounts


class VoteCall(Body):
    """What came of the round at the caller's; the reply says what came of it at the callee's."""

    op: Literal["vote"] = "vote"
    manifest: Hash
    stage: int = Field(ge=0, lt=256)
    step: Step
    attempt: int = Field(ge=0, lt=1000)


class VoteReply(Body):
    """Attributes:
    attempt: the round that the callee speaks of; None while it has no outcome: ask again
    """

    attempt: int | None = Field(ge=0, lt=1000)
    checksum: Checksum | None = None
    samples: Samples = 0


class GoodbyeCall(Body):
    """The caller leaves: nobody needs to wait for it, or to send to it, until it announces itself anew.

    Attributes:
        serial: of its last announcement
    """

    op: Literal["goodbye"] = "goodbye"
    manifest: Hash
    serial: int = Field(ge=0, lt=2**63)
    counts: SignedCounts


# Slices that a peer asks for at once: as many as it reads at a time.
MAX_SLICES_ASKED = 64
# Of what is known of them: slices with more gaps than this wait for a later pass.
MAX_FACTS = 4096


class LeaseCall(Body):
    """The caller, of stage 0, wants to read these slices of the data (policy/data_ledger.py).

    Attributes:
        line: the global step that its line of updates began with: after a rewind, other samples have counted
        believed: slices that it believes the callee to lease
    """

    op: Literal["lease"] = "lease"
    manifest: Hash
    stage: Literal[0] = 0
    line: Step
    slices: tuple[SliceName, ...] = Field(max_length=MAX_SLICES_ASKED)
    believed: tuple[SliceName, ...] = Field(max_length=MAX_FACTS)
    counts: SignedCounts


class LeaseReply(Body):
    """Attributes:
    refused: slices that the caller may not read, with who leases them, if anybody
    facts: what the callee knows of the slices asked for
    current_pass: the oldest pass that is not over
    corrections: slices that it does not lease, of those that the caller believed it to
    """

    refused: tuple[tuple[SliceName, Annotated[str, Field(max_length=64)] | None], ...] = Field(
        max_length=MAX_SLICES_ASKED
    )
    facts: tuple[CountedRange, ...] = Field(max_length=MAX_FACTS)
    current_pass: int = Field(ge=0, lt=2**40)
    corrections: tuple[SliceName, ...] = Field(max_length=MAX_FACTS)
    counts: SignedCounts


class GradientChunkCall(Body):
    """Part of what the caller has accumulated, and wants to hand over. Tensor: fp32 bytes from `offset` on."""

    op: Literal["gradient_chunk"] = "gradient_chunk"
    manifest: Hash
    stage: int = Field(ge=0, lt=256)
    step: Step
    transfer: bytes = Field(min_length=16, max_length=16)
    offset: int = Field(ge=0, lt=2**50)


class AdoptCall(Body):
    """Add the gradient that came as `transfer`, a sum over `samples`, to the callee's own. May be repeated.

    Attributes:
        counted: its microbatches, by id, with their samples; the callee counts them no more
    """

    op: Literal["adopt"] = "adopt"
    manifest: Hash
    stage: int = Field(ge=0, lt=256)
    step: Step
    transfer: bytes = Field(min_length=16, max_length=16)
    samples: Annotated[int, Field(ge=1, lt=2**40)]
    sha256: bytes = Field(min_length=32, max_length=32)
    counted: tuple[tuple[MicrobatchId, Annotated[int, Field(ge=1, lt=2**20)]], ...] = Field(max_length=MAX_COUNTED_IDS)


Stage = Annotated[int, Field(ge=0, lt=256)]


class StateIndexCall(Body):
    """What is in a state (weights, optimizer) or in an update; the reply's only tensor is a StateIndex as msgpack.

    Attributes:
        kind: state, with the snapshot of weights that were `born` then (policy/recovery.py, Origin), or the callee's
            newest if that is None, or one a few steps older that it holds already; or update, with the averaged
            gradients that ended global step `min_step` of the callee's own stage
        min_step: a state of an earlier global step is of no use to the caller; the callee waits for this one
    """

    op: Literal["state_index"] = "state_index"
    manifest: Hash
    of_stage: Stage
    kind: Literal["state", "update"] = "state"
    min_step: Step = 0
    born: Step | None = None


Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]


class StateEntry(Body):
    """One tensor, and the hashes of its chunks of STATE_CHUNK_BYTES; the last one may be shorter."""

    name: str = Field(max_length=512)
    dtype: str = Field(max_length=32)
    shape: tuple[Annotated[int, Field(ge=0, lt=2**40)], ...] = Field(max_length=8)
    chunks: tuple[Sha256, ...] = Field(max_length=2**20)


class StateIndex(Body):
    """Peers that hold the same make the same index, byte by byte: its hash names what is downloaded.

    Attributes:
        step: global step that begins with this state, or that ended with this update
        lineage: digest of all updates that made it
        ledger: of stage 0, which samples these updates have counted; see ledger_codec.py
    """

    stage: Stage
    kind: Literal["state", "update"]
    step: Step
    origin_step: Step
    origin_updates: Step
    origin_born: Step
    lineage: Checksum
    ledger: bytes = Field(b"", max_length=MAX_LEDGER_BYTES)
    entries: tuple[StateEntry, ...] = Field(max_length=100_000)


class StateChunkCall(Body):
    """One chunk of a tensor of what an index describes. The reply's only tensor is its bytes."""

    op: Literal["state_chunk"] = "state_chunk"
    manifest: Hash
    index: Sha256
    entry: int = Field(ge=0, lt=100_000)
    chunk: int = Field(ge=0, lt=2**20)


class KeptCall(Body):
    """Which snapshots the callee keeps, and where it stands."""

    op: Literal["kept"] = "kept"
    manifest: Hash


class KeptReply(Body):
    """Attributes:
    kept: stage, born and updates of each snapshot
    """

    step: Step
    origin_step: Step
    origin_updates: Step
    origin_born: Step
    kept: tuple[tuple[Stage, Step, Step], ...] = Field(max_length=64)


class RewindCall(Body):
    """The caller has taken over a stage that had lost its peers: the run goes on from `updates`, as step `step`.

    Attributes:
        born: see policy/recovery.py, Origin
    """

    op: Literal["rewind"] = "rewind"
    manifest: Hash
    lost_stage: Stage
    step: Step
    updates: Step
    born: Step


class RewindReply(Body):
    step: Step

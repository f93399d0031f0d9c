"""The calls between peers: the schema of each body. Frames on a stream are in frames.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from swarm_peer.wire.fields import LossSum, Measured, OptimizerStep, RoundNumber
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES

PROTOCOL = "swarm/7"
STATE_CHUNK_BYTES = 4 * 2**20
# Tensors in a state, the optimizer's included: a model of 100 layers has some thousand.
MAX_STATE_TENSORS = 1 << 13
# Small files beside a model's weights.
MAX_BASE_FILES = 64
# Chunks of one tensor: of 128 GiB.
MAX_CHUNKS = 1 << 15
# The longest reply with logits: every peer takes frames of this length.
MAX_LOGITS_BYTES = STATE_CHUNK_BYTES
# The most that is sent to measure a link, in one direction.
MAX_PROBE_BYTES = 4 * 2**20


class Body(BaseModel):
    """Base of the bodies of all calls and replies: unknown fields and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Hash = Annotated[str, Field(min_length=32, max_length=32)]
Checksum = Annotated[str, Field(max_length=64)]
Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]
Stage = Annotated[int, Field(ge=0, lt=256)]

# Of one microbatch: the same on every try and at every stage.
MicrobatchId = Annotated[bytes, Field(min_length=16, max_length=16)]

# Microbatches of mode `train` are counted. Those of mode `evaluate` are the run's own validation; `score` and `predict`
# are queries from outside the run.
Mode = Literal["train", "evaluate", "score", "predict"]
QUERIES: tuple[Mode, ...] = ("score", "predict")
# The most time that a call may give its callee.
LONGEST_CALL_S = 86400.0


class Call(Body):
    """Base of all calls; each has an `op` of its own."""

    manifest: Hash


class RoundCall(Call):
    """Base of the calls about a round of the callee's stage."""

    stage: Stage
    round_number: RoundNumber


# The hash of an entry of a stage's log.
Head = Annotated[str, Field(min_length=1, max_length=64)]
Heads = Annotated[tuple[Head, ...], Field(max_length=256)]
# One signed receipt (wire/agreement.py).
MAX_RECEIPT_BYTES = 32 * 1024
# One entry with its certificate (wire/agreement.py): it has come in a message.
MAX_ENTRY_BYTES = 1 << 20


class MicrobatchCall(RoundCall):
    """Run a microbatch through `stage` and all later stages.

    Tensors: tokens (B, T+1), in mode predict (B, T), and for all stages but 0 hidden (B, T, D). Stage 0 takes nothing
    but queries, since it launches the run's own microbatches itself.

    Attributes:
        length: T; a query may be shorter than the run's sequences
        timeline: first round of the timeline that the caller is on; None for queries
        base: heads of the stages that it has passed
    """

    op: Literal["microbatch"] = "microbatch"
    mode: Mode
    timeline: RoundNumber | None
    microbatch: MicrobatchId
    num_samples: int = Field(ge=1, lt=2**20)
    length: int = Field(ge=1, le=2**20)
    timeout_s: float = Field(gt=0, le=LONGEST_CALL_S, allow_inf_nan=False)
    base: Heads = ()

    @field_validator("timeline")
    @classmethod
    def _all_but_queries_have_one(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None and info.data.get("mode", QUERIES[0]) not in QUERIES:
            raise ValueError("only queries are of any timeline")
        return value

    @field_validator("mode")
    @classmethod
    def _stage_0_answers_queries(cls, value: Mode, info: ValidationInfo) -> Mode:
        if info.data.get("stage") == 0 and value not in QUERIES:
            raise ValueError("stage 0 answers queries alone")
        return value


class MicrobatchReply(Body):
    """The result of a microbatch at the callee and all later stages.

    Tensors: in mode train, the gradient of the loss sum with respect to the call's hidden (B, T, D); in mode predict,
    the logits of the token after the last one, fp32 (B, V).

    Attributes:
        base: heads of the callee's stage and of those behind it
        receipt: of a callee of stage 1
    """

    loss_sum: LossSum
    samples_per_s: Measured
    base: Heads = ()
    receipt: Annotated[bytes, Field(max_length=MAX_RECEIPT_BYTES)] = b""


class AveragePartCall(Call):
    """One part of the caller's gradients, which the callee averages. Tensor: the part; the reply's: the average.

    Attributes:
        group: names the averaging round, its members and what each of them brings
        part: number among the parts that the callee averages
    """

    op: Literal["average_part"] = "average_part"
    stage: Stage
    group: bytes = Field(min_length=32, max_length=32)
    part: int = Field(ge=0, lt=2**32)


class AgreeCall(Call):
    """Messages of the protocol by which the members of a run agree (wire/agreement.py). Tensors: the messages, encoded;
    the reply's: answers to them.
    """

    op: Literal["agree"] = "agree"


class GiveCall(Call):
    """A chunk of a contribution that the callee may bring to an average in its author's place.

    Tensors: the author's signed statement (wire/agreement.py: HandedOver), and the chunk.

    Attributes:
        offset, num_bytes: where the chunk begins, and the length of all
    """

    op: Literal["give"] = "give"
    stage: Stage
    offset: int = Field(ge=0, lt=2**40)
    num_bytes: int = Field(gt=0, lt=2**40)


class StateIndexCall(Call):
    """Asks for the index of a state (weights, optimizer) or of an update. The reply's only tensor is a StateIndex.

    Attributes:
        kind: `state` asks for a snapshot, if `entry` or `optimizer_step` names one; if not, for the callee's newest
            state, or one a few rounds older that it holds already. `update` asks for the averages that ended round
            `min_round` of the callee's own stage.
        min_round: the earliest round whose state is of use to the caller; the callee waits until it is there
        entry: asks for the snapshot that the entry of this hash names (docs/protocol.md)
        optimizer_step: asks for the snapshot of this step, whatever its name is
    """

    op: Literal["state_index"] = "state_index"
    of_stage: Stage
    kind: Literal["state", "update"] = "state"
    min_round: RoundNumber = 0
    entry: Checksum = ""
    optimizer_step: OptimizerStep | None = None


class StateEntry(Body):
    """One tensor, and the hashes of its chunks of STATE_CHUNK_BYTES; the last one may be shorter."""

    name: str = Field(max_length=512)
    dtype: str = Field(max_length=32)
    shape: tuple[Annotated[int, Field(ge=0, lt=2**40)], ...] = Field(max_length=8, fail_fast=True)
    chunks: tuple[Sha256, ...] = Field(max_length=MAX_CHUNKS, fail_fast=True)


class StateIndex(Body):
    """The tensors of a state or an update, with the hashes of their chunks.

    Peers that hold the same state make the same index, byte by byte, so the index's hash names the state.

    Attributes:
        round_number: the round that begins with this state, or that ended with this update
        history_hash: of the entry of the stage's log that the weights embody, or whose averages these are
        ledger: at stage 0, the samples that these updates have counted (ledger_codec.py)
        entry: of a snapshot, the entry that names its root, with its certificate (wire/agreement.py)
    """

    stage: Stage
    kind: Literal["state", "update"]
    round_number: RoundNumber
    timeline_first_round: RoundNumber
    timeline_first_optimizer_step: OptimizerStep
    timeline_created_at_round: RoundNumber
    history_hash: Checksum
    ledger: bytes = Field(b"", max_length=MAX_LEDGER_BYTES)
    entry: bytes = Field(b"", max_length=MAX_ENTRY_BYTES)
    entries: tuple[StateEntry, ...] = Field(max_length=MAX_STATE_TENSORS, fail_fast=True)


class StateChunkCall(Call):
    """Asks for one chunk of a tensor in an index. The reply's only tensor is the chunk's bytes."""

    op: Literal["state_chunk"] = "state_chunk"
    index: Sha256
    entry: int = Field(ge=0, lt=MAX_STATE_TENSORS)
    chunk: int = Field(ge=0, lt=MAX_CHUNKS)


class BaseIndexCall(Call):
    """Asks for the index of the run's frozen weights, and for which of them the callee has.

    Tensors of the reply: the BaseIndex, empty if the caller knows it; and a bit for each of its entries, the first ones
    first, the highest bit of a byte first.
    """

    op: Literal["base_index"] = "base_index"
    is_known: bool = False


class BaseIndex(Body):
    """The frozen weights of a run and the small files beside them; `model.base_sha256` of the manifest names it.

    Attributes:
        tensors: as they are published, by name and of safetensors' types
        files: by name, of type `file`, the tokenizer's among them
    """

    tensors: tuple[StateEntry, ...] = Field(max_length=MAX_STATE_TENSORS, fail_fast=True)
    files: tuple[StateEntry, ...] = Field(max_length=MAX_BASE_FILES, fail_fast=True)


class BaseChunkCall(Call):
    """Asks for one chunk of an entry of a BaseIndex, tensors first. The reply's only tensor is the chunk's bytes."""

    op: Literal["base_chunk"] = "base_chunk"
    entry: int = Field(ge=0, lt=MAX_STATE_TENSORS + MAX_BASE_FILES)
    chunk: int = Field(ge=0, lt=MAX_CHUNKS)


class ProbeCall(Call):
    """Asks for the callee's time, and for bytes that mean nothing: how long they take tells how fast the link is.

    Tensors of the call: none, or bytes that mean nothing; of the reply: `num_bytes` of these, if any.
    """

    op: Literal["probe"] = "probe"
    num_bytes: int = Field(0, ge=0, le=MAX_PROBE_BYTES)


class ProbeReply(Body):
    """The callee's clock.

    Attributes:
        unix_s: seconds since 1970, as far as it knows
    """

    unix_s: float = Field(ge=0, lt=2**40, allow_inf_nan=False)

"""The calls between peers: the schema of each body. Frames on a stream are in frames.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from swarm_peer.policy.lineage import DIGEST_BYTES, MAX_LINEAGE_BYTES
from swarm_peer.policy.recovery import MOST_LISTED
from swarm_peer.wire.fields import LossSum, Measured, OptimizerStep, RoundNumber, Samples
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES, CountedRange, CountedRanges, SliceName

PROTOCOL = "swarm/4"
# One signed progress count, with its ranges of samples.
MAX_COUNT_BYTES = 32 * 1024
# Progress counts in one message: more than fit into its header (runtime/network/progress.py, MAX_MESSAGE_BYTES).
MAX_COUNTS = 4096
# Microbatches that one peer has counted in a round; each takes 20 bytes of a header.
MAX_COUNTED_IDS = 8192
STATE_CHUNK_BYTES = 4 * 2**20
# Tensors in a state, the optimizer's included: a model of 100 layers has some thousand.
MAX_STATE_TENSORS = 1 << 13
# Chunks of one tensor: of 128 GiB.
MAX_CHUNKS = 1 << 15
# The longest reply with logits: every peer takes frames of this length.
MAX_LOGITS_BYTES = STATE_CHUNK_BYTES


class Body(BaseModel):
    """Base of the bodies of all calls and replies: unknown fields and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Hash = Annotated[str, Field(min_length=32, max_length=32)]
Checksum = Annotated[str, Field(max_length=64)]
Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]
Stage = Annotated[int, Field(ge=0, lt=256)]
Attempt = Annotated[int, Field(ge=0, lt=1000)]
# A signed progress count: (peer id of its author, envelope).
SignedCount = tuple[Annotated[str, Field(max_length=64)], Annotated[bytes, Field(max_length=MAX_COUNT_BYTES)]]
SignedCounts = Annotated[tuple[SignedCount, ...], Field(max_length=MAX_COUNTS, fail_fast=True)]

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
    counts: SignedCounts = ()
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
    counts: SignedCounts = ()
    base: Heads = ()
    receipt: Annotated[bytes, Field(max_length=MAX_RECEIPT_BYTES)] = b""


class CountsCall(Call):
    """Tells progress counts to a peer that learns of none from microbatches. The reply has the callee's counts."""

    op: Literal["counts"] = "counts"
    round_number: RoundNumber
    counts: SignedCounts


class GreetCall(RoundCall):
    """Says that the caller serves the callee's stage from now on. The reply has the callee's round and counts."""

    op: Literal["greet"] = "greet"
    counts: SignedCounts


class CountsReply(Body):
    """The round that the callee is in, with the first round of its timeline, and the progress counts that it knows."""

    round_number: RoundNumber
    timeline: RoundNumber
    counts: SignedCounts


class ReadyCall(RoundCall):
    """Says that the caller has finished its microbatches of the round and is ready to average with its stage-mates.

    Attributes:
        timeline: first round of the timeline that the caller is on
    """

    op: Literal["ready"] = "ready"
    timeline: RoundNumber
    attempt: Attempt
    counts: SignedCounts


class ReadyReply(Body):
    """Whether the callee is ready to average too.

    Attributes:
        attempt: the try of the averaging round that the callee is ready for; None while it is not ready: ask again
        history_hash: of the callee's weights
        weights_digest: of the callee's weights themselves, in rounds in which stage-mates compare them; else empty
        samples: how many samples the callee brings to the averaging round
        next_samples: how many it brings to that of the next round, if stage-mates begin with it at once
        does_without: whether it waits for other stage-mates alone, since the caller has held up a barrier
        brings: the samples of a whole period of stage 0 that it brings to its average. While the stage was cut in two,
            both parts may have read them
    """

    attempt: Attempt | None
    history_hash: Checksum
    weights_digest: Checksum = ""
    samples: Samples
    next_samples: Samples = 0
    does_without: bool = False
    brings: CountedRanges = ()
    counts: SignedCounts


class VoteCall(RoundCall):
    """Asks how the averaging round has ended at the callee."""

    op: Literal["vote"] = "vote"
    attempt: Attempt


class VoteReply(Body):
    """The callee's vote (see policy/voting.py, AveragingVote).

    Attributes:
        attempt: the try of the averaging round that the vote is about; None while it has no outcome: ask again
    """

    attempt: Attempt | None
    checksum: Checksum | None = None
    samples: int = Field(0, ge=0, lt=2**53)  # of all members: each may tell of as many as Samples admits
    abstains: bool = False


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


class GoodbyeCall(Call):
    """Says that the caller leaves: nobody waits for it, or sends to it, until it announces itself again.

    Attributes:
        serial: that of the caller's last announcement
    """

    op: Literal["goodbye"] = "goodbye"
    serial: int = Field(ge=0, lt=2**63)
    counts: SignedCounts


# Slices that a peer asks for at once: as many as it reads at a time.
MAX_SLICES_ASKED = 64
# Facts about these slices. Where there are more gaps than this, the slice waits for a later pass.
MAX_FACTS = 4096


class LeaseCall(Call):
    """Asks a stage-mate of stage 0 for leave to read these slices of the data (see policy/data/sample_ledger.py).

    Attributes:
        timeline_first_round: names the caller's timeline; on another one, other samples have counted
        believed: slices that the caller believes the callee to lease
    """

    op: Literal["lease"] = "lease"
    stage: Literal[0] = 0
    timeline_first_round: RoundNumber
    slices: tuple[SliceName, ...] = Field(max_length=MAX_SLICES_ASKED, fail_fast=True)
    believed: tuple[SliceName, ...] = Field(max_length=MAX_FACTS, fail_fast=True)
    counts: SignedCounts


class LeaseReply(Body):
    """The callee's answer to a request for leases.

    Attributes:
        refused: slices that the caller may not read, each with the peer that leases it, if any
        facts: which windows of the requested slices have counted
        current_pass: the oldest pass that is not over
        corrections: slices in `believed` that the callee does not lease
    """

    refused: tuple[tuple[SliceName, Annotated[str, Field(max_length=64)] | None], ...] = Field(
        max_length=MAX_SLICES_ASKED, fail_fast=True
    )
    facts: tuple[CountedRange, ...] = Field(max_length=MAX_FACTS, fail_fast=True)
    current_pass: int = Field(ge=0, lt=2**40)
    corrections: tuple[SliceName, ...] = Field(max_length=MAX_FACTS, fail_fast=True)
    counts: SignedCounts


class GradientChunkCall(RoundCall):
    """One part of the gradient that the caller hands over before it leaves. Tensor: its fp32 bytes from `offset` on."""

    op: Literal["gradient_chunk"] = "gradient_chunk"
    transfer: bytes = Field(min_length=16, max_length=16)
    offset: int = Field(ge=0, lt=2**50)


class CommitGradientCall(RoundCall):
    """Has the callee add the transferred gradients to its own. The call may be repeated.

    Attributes:
        samples: over which each of the gradients is a sum; that of the present round first
        sha256: of the history hash of the caller's weights, and of the gradients
        counted: the microbatches in the gradient of the present round, by id, with their samples; the callee does not
            count them again
        held: the samples of the period that the gradients are of, from stage 0
        counts: how many samples have counted; those of a peer of stage 0 may not be known to anybody yet
    """

    op: Literal["commit_gradient"] = "commit_gradient"
    transfer: bytes = Field(min_length=16, max_length=16)
    samples: tuple[Samples, ...] = Field(min_length=1, max_length=2)
    sha256: Sha256
    counted: tuple[tuple[MicrobatchId, Annotated[int, Field(ge=1, lt=2**20)]], ...] = Field(
        max_length=MAX_COUNTED_IDS, fail_fast=True
    )
    held: CountedRanges = ()
    counts: SignedCounts = ()


class StateIndexCall(Call):
    """Asks for the index of a state (weights, optimizer) or of an update. The reply's only tensor is a StateIndex.

    Attributes:
        kind: `state` asks for the snapshot of the weights that `created_at_round` names (policy/recovery.py, Timeline);
            if that is None, for the callee's newest state, or one a few rounds older that it holds already. `update`
            asks for the averaged gradients that ended round `min_round` of the callee's own stage.
        min_round: the earliest round whose state is of use to the caller; the callee waits until it is there
        entry: asks for the snapshot that the entry of this hash names (docs/protocol.md)
        optimizer_step: asks for the snapshot of this step, whatever its name is
    """

    op: Literal["state_index"] = "state_index"
    of_stage: Stage
    kind: Literal["state", "update"] = "state"
    min_round: RoundNumber = 0
    created_at_round: RoundNumber | None = None
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
        history_hash: digest of the updates that led to these weights
        lineage: of a state, see policy/lineage.py; whole digests
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
    lineage: bytes = Field(b"", max_length=MAX_LINEAGE_BYTES)
    ledger: bytes = Field(b"", max_length=MAX_LEDGER_BYTES)
    entry: bytes = Field(b"", max_length=MAX_ENTRY_BYTES)
    entries: tuple[StateEntry, ...] = Field(max_length=MAX_STATE_TENSORS, fail_fast=True)

    @field_validator("lineage")
    @classmethod
    def _has_whole_digests(cls, lineage: bytes) -> bytes:
        if len(lineage) % DIGEST_BYTES:
            raise ValueError(f"{len(lineage)} bytes are no lineage")
        return lineage


class StateChunkCall(Call):
    """Asks for one chunk of a tensor in an index. The reply's only tensor is the chunk's bytes."""

    op: Literal["state_chunk"] = "state_chunk"
    index: Sha256
    entry: int = Field(ge=0, lt=MAX_STATE_TENSORS)
    chunk: int = Field(ge=0, lt=MAX_CHUNKS)


class ListSnapshotsCall(Call):
    """Asks which snapshots the callee holds, and how far it has come."""

    op: Literal["list_snapshots"] = "list_snapshots"


class ListSnapshotsReply(Body):
    """The callee's round, timeline and snapshots.

    Attributes:
        snapshots: stage, created_at_round and optimizer step of each snapshot
    """

    round_number: RoundNumber
    timeline_first_round: RoundNumber
    timeline_first_optimizer_step: OptimizerStep
    timeline_created_at_round: RoundNumber
    snapshots: tuple[tuple[Stage, RoundNumber, RoundNumber], ...] = Field(max_length=MOST_LISTED, fail_fast=True)


class RewindCall(Call):
    """Says that the caller has taken over a stage that had lost its peers: the run goes on with a new timeline.

    `first_round` and the two fields after it are those of the timeline (policy/recovery.py, Timeline).

    Attributes:
        asks_only: the caller wants to take the stage over, and asks whether the callee would go back
    """

    op: Literal["rewind"] = "rewind"
    asks_only: bool = False
    lost_stage: Stage
    first_round: RoundNumber
    first_optimizer_step: OptimizerStep
    created_at_round: RoundNumber


class RewindReply(Body):
    """The round that the callee is in."""

    round_number: RoundNumber

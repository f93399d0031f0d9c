"""Signed records: what stands in the DHT, and the progress counts that ride on calls.

A record travels as an envelope `[kind, run, body, signature]` under the id of its author. The signature covers all of
it, so no record can be passed off as one of another kind or of another run. In the DHT it covers the place as well, key
and time of expiry: whoever stored somebody's record again, to expire later, would keep all newer ones out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm_peer.config import describe
from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.ledger import StepCount
from swarm_peer.policy.recovery import Origin
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView
from swarm_peer.wire.identity import Identity, verify
from swarm_peer.wire.ledger_codec import CountedRanges

# The largest are counts with many ranges of samples.
MAX_RECORD_BYTES = 64 * 1024
# Hivemind's DHT process does not survive a request of more than 16 KiB: it reads half of it from its pipe.
MAX_STORED_BYTES = 15 * 1024
# That a peer tells of itself: one for each network that it is in.
MAX_ADDRESSES = 4

# So many fit, with reasons of any length.
MAX_ASSIGNMENTS = 32
# Finished steps that a stage-0 peer tells of: where they take a second, coordinators may look away for a minute.
MAX_REPORTS = 64

# Of the Unix clock.
Seconds = Annotated[int, Field(ge=0, lt=2**40)]
# Bounded, so that sums of what peers report stay finite.
FiniteFloat = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=0, lt=2**40)]
Samples = Annotated[int, Field(ge=0, lt=2**40)]


class Record(BaseModel):
    """Base of all signed records; unknown fields, wrong types and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    kind: ClassVar[str]


class ManifestRecord(Record):
    """The run's manifest as canonical JSON; signed with the run key, stored under the run's id."""

    kind = "manifest"
    manifest: str = Field(max_length=MAX_STORED_BYTES)


class OriginRecord(Record):
    """Where the run begins: beyond 0 if it goes on from a checkpoint. Signed with the run key, under the run's id.

    Attributes:
        begun: Unix seconds when it began, or went on from a checkpoint
    """

    kind = "origin"
    step: Step
    updates: Step
    begun: Seconds

    def origin(self) -> Origin:
        return Origin(self.step, self.updates, born=self.step)


class EndRecord(Record):
    """The run is over, and its model saved if it has reached its steps: peers may go. Signed with the run key.

    Attributes:
        begun: of the run's origin; it may have gone on from a checkpoint since, with the same key
    """

    kind = "end"
    begun: Seconds
    reason: str = Field(max_length=200)


class Announcement(Record):
    """What a peer says of itself, every few seconds.

    `serial` grows with every announcement of a peer, so an old one cannot be played back over a newer one.

    Attributes:
        step: its global step, and
        updates: the optimizer updates in its weights, which are fewer after a rewind
        movable: it may be moved to another stage
        note: what keeps it from serving
        state_s: for how long it has been in this state
        memory_bytes: what it has for a stage; 0 if that is no limit
        bandwidth_bytes_per_s: at which it downloaded its state; 0 if it did not
        moved_from: the stage that it has left for this one, until it serves
        formerly: its id before that: a peer that moves starts anew
        addresses: where it says that it listens
    """

    kind = "announcement"
    serial: int = Field(ge=0)
    stage: int = Field(ge=UNDECIDED, lt=256)
    state: str = Field(pattern="^(joining|serving|draining)$")
    step: Step
    updates: Step
    movable: bool
    note: str = Field(max_length=200)
    samples_per_s: NonNegativeFloat
    queue: int = Field(ge=0, lt=2**20)
    version: str = Field(max_length=32)
    device: str = Field(max_length=64)
    state_s: NonNegativeFloat = 0.0
    memory_bytes: int = Field(0, ge=0, lt=2**60)
    bandwidth_bytes_per_s: NonNegativeFloat = 0.0
    moved_from: int = Field(UNDECIDED, ge=UNDECIDED, lt=256)
    formerly: str = Field("", max_length=64)
    addresses: tuple[Annotated[str, Field(max_length=512)], ...] = Field((), max_length=MAX_ADDRESSES)

    def view(self, peer_id: str, arrived_s: float) -> PeerView:
        """Args:
        arrived_s: when this announcement came, on the reader's clock
        """
        return PeerView(
            peer_id,
            self.stage,
            PeerState(self.state),
            self.step,
            self.samples_per_s,
            self.queue,
            self.updates,
            self.movable,
            self.note,
            memory_bytes=self.memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            since_s=arrived_s - self.state_s,
            moved_from=self.moved_from,
            formerly=self.formerly,
            announced=self.serial,
        )


class Assignment(Record):
    """A peer is to serve another stage.

    Attributes:
        announced: serial of the announcement that this was decided upon; the order means the peer as it was then, and
            is void once it has started anew
        reason: in words
    """

    kind = "assignment"
    peer: str = Field(max_length=64)
    announced: int = Field(ge=0)
    from_stage: int = Field(ge=0, lt=256)
    to_stage: int = Field(ge=0, lt=256)
    reason: str = Field(max_length=300)


class Warrant(Record):
    """A coordinator may act for the run in this term (see policy/leadership.py). Signed with the run key."""

    kind = "warrant"
    coordinator: str = Field(max_length=64)
    term: int = Field(ge=1, lt=2**40)


class CoordinationRecord(Record):
    """A coordinator's sign of life, and its orders. Signed by itself: each coordinator has an identity of its own.

    Attributes:
        warrant: by which it acts, sealed
        beat: grows for as long as it lives
        assignments: all orders that may still be under way
        reason: of its last decision, in words
    """

    kind = "coordination"
    warrant: bytes = Field(max_length=1024)
    beat: int = Field(ge=0, lt=2**40)
    assignments: tuple[Assignment, ...] = Field((), max_length=MAX_ASSIGNMENTS)
    reason: str = Field("", max_length=300)

    def term(self, run_id: str, author: str) -> Term:
        """Raises InvalidMessage: it has no valid warrant"""
        warrant = unseal(Warrant, self.warrant, run_id, run_id)
        if warrant.coordinator != author:
            raise InvalidMessage(f"coordination of {author[:60]}: a warrant of {warrant.coordinator}")
        return Term(warrant.term, author)


class Progress(Record):
    """One stage-0 peer's count of one global step (see policy/ledger.py)."""

    kind = "progress"
    step: Step
    samples: Samples
    claimed: Samples
    loss_sum: FiniteFloat
    ranges: CountedRanges = ()

    def count(self) -> StepCount:
        return StepCount(self.samples, self.claimed, self.loss_sum, self.ranges)


class StepReport(Record):
    """A finished global step, as its stage-0 group agreed on it.

    Attributes:
        step: the global step's number, which never goes back
        updates: optimizer updates that the weights have after it; after a rewind, fewer than before
    """

    kind = "report"
    step: Step
    updates: Step
    samples: Samples
    loss: FiniteFloat
    seconds: NonNegativeFloat


class Validation(Record):
    """One stage-0 peer's share of the validation of the weights that begin global step `step`."""

    kind = "validation"
    step: Step
    updates: Step
    samples: Samples
    loss_sum: FiniteFloat


class ProgressRecord(Record):
    """The slow path of progress: a stage-0 peer's newest count, its last finished steps and validations."""

    kind = "progress_record"
    current: Progress
    finished: tuple[StepReport, ...] = Field(max_length=MAX_REPORTS)
    validations: tuple[Validation, ...] = Field(max_length=64)


AnyRecord = TypeVar("AnyRecord", bound=Record)


STORED_KINDS = frozenset(
    record_type.kind
    for record_type in (ManifestRecord, OriginRecord, EndRecord, Announcement, CoordinationRecord, ProgressRecord)
)


def _signed_bytes(kind: str, run: str, body: bytes, place: bytes = b"") -> bytes:
    return msgpack.packb(["swarm", kind, run, body, place])  # type: ignore[no-any-return]


def seal(record: Record, run: str, identity: Identity, place: bytes = b"") -> bytes:
    """Sign a record.

    Args:
        run: hash of the run's manifest; for what the run key signs, the run's id
        place: where in the DHT it is to stand, if it is
    """
    body = msgpack.packb(record.model_dump())
    signature = identity.sign(_signed_bytes(record.kind, run, body, place))
    return bytes(msgpack.packb([record.kind, run, body, signature]))


def open_envelope(data: object, author: str, place: bytes = b"") -> tuple[str, str, bytes]:
    """Check size, form and signature of an envelope. Returns kind, run and body.

    Raises:
        InvalidMessage: with what is wrong
    """
    name = f"record of {author[:60]}"
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise InvalidMessage(f"{name}: not an envelope of at most {MAX_RECORD_BYTES} bytes")
    try:
        envelope = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessage(f"{name}: no msgpack ({error})") from error
    match envelope:
        case [str() as kind, str() as run, bytes() as body, bytes() as signature]:
            pass
        case _:
            raise InvalidMessage(f"{name}: an envelope is [kind, run, body, signature]")
    if not verify(author, _signed_bytes(kind, run, body, place), signature):
        raise InvalidMessage(f"{name}: the signature does not match")
    return kind, run, body


def unseal(record_type: type[AnyRecord], data: object, run: str, author: str, place: bytes = b"") -> AnyRecord:
    """Check an envelope and the schema of the record in it, and return the record.

    Raises:
        InvalidMessage: with what is wrong
    """
    kind, of_run, body = open_envelope(data, author, place)
    if (kind, of_run) != (record_type.kind, run):
        raise InvalidMessage(
            f"record of {author[:60]}: {kind:.20} of run {of_run:.40}, expected {record_type.kind} of run {run}"
        )
    return parse(record_type, body, f"{record_type.kind} of {author[:60]}")


def parse(model: type[AnyRecord], body: bytes, name: str) -> AnyRecord:
    try:
        fields = msgpack.unpackb(body, use_list=False)
        return model.model_validate(fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        detail = describe(error) if isinstance(error, ValidationError) else str(error)
        raise InvalidMessage(f"{name}: {detail:.300}") from error


# DHT key of manifests. One key for all runs: a newcomer knows an address and nothing else.
MANIFESTS_KEY = "swarm/runs"


def origin_key(run_id: str) -> str:
    return f"swarm/{run_id}/origin"


def end_key(run_id: str) -> str:
    return f"swarm/{run_id}/end"


def coordination_key(run_id: str) -> str:
    return f"swarm/{run_id}/coordination"


def stage_key(manifest_hash: str, stage: int) -> str:
    """DHT key of the announcements of one stage; UNDECIDED for peers that have not chosen yet."""
    return f"swarm/{manifest_hash}/stage/{stage}"


def progress_key(manifest_hash: str) -> str:
    return f"swarm/{manifest_hash}/progress"

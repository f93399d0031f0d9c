"""Signed records: all that peers store in the DHT.

A record travels as an envelope `[kind, run, body, signature]` under the id of its author. The signature covers kind and
run too, so nobody can pass a record off as one of another kind or of another run. In the DHT the signature also covers
the place, which is key and time of expiry. Otherwise anybody could store an old record again with a later expiry, and
so keep all newer ones out.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm_peer.config_errors import describe
from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import ID_CHARS, UNDECIDED, Neighbour, PeerState, PeerView, TimeShares
from swarm_peer.settings import PEER_NAME
from swarm_peer.wire.fields import (
    FiniteFloat,
    Incarnation,
    Measured,
    MetricsAddress,
    NonNegativeFloat,
    OptimizerStep,
    RoundNumber,
    Samples,
    Seconds,
    TimePercent,
)
from swarm_peer.wire.identity import Identity, verify
from swarm_peer.wire.packing import unpack

# More than any of them has.
MAX_RECORD_BYTES = 64 * 1024
# Every node keeps the records of others in memory, and every look at a key brings all of them.
MAX_STORED_BYTES = 15 * 1024
# In a record of its own, with kind, run and signature.
MAX_MANIFEST_BYTES = MAX_STORED_BYTES - 512
# Addresses in one announcement: one for each network that the peer is in.
MAX_ADDRESSES = 4
# Other peers that one announcement names, each for another reason.
MAX_RELAYS = 4
MAX_NEIGHBOURS = 6
MAX_UNREACHED = 8
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Neighbour = tuple[
    Annotated[str, Field(min_length=1, max_length=ID_CHARS)], Annotated[str, Field(max_length=ID_CHARS)], _Count, _Count
]

# Most assignments that fit MAX_STORED_BYTES with the longest reasons.
MAX_ASSIGNMENTS = 32
# Finished rounds in one progress record: with rounds of a second, a coordinator may miss a minute.
MAX_REPORTS = 64


class Record(BaseModel):
    """Base of all signed records; unknown fields, wrong types and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    kind: ClassVar[str]


class ManifestRecord(Record):
    """The run's manifest as canonical JSON; signed with the run key, stored under the run's id."""

    kind = "manifest"
    manifest: str = Field(max_length=MAX_STORED_BYTES)


class TimelineRecord(Record):
    """The run's first timeline; signed with the run key, stored under the run's id.

    It begins with round 0, or with a later one if the run was resumed from a checkpoint.

    Attributes:
        begun: Unix seconds at which the run began, or was resumed
        reached_round: the round that the run has come to, as far as its coordinator has seen; perhaps on a later
            timeline
        reached_optimizer_step: that of the weights which this round begins with
    """

    kind = "timeline"
    first_round: RoundNumber
    first_optimizer_step: OptimizerStep
    begun: Seconds
    reached_round: RoundNumber = 0
    reached_optimizer_step: OptimizerStep = 0

    def timeline(self) -> Timeline:
        """The timeline that this record publishes."""
        return Timeline(self.first_round, self.first_optimizer_step, created_at_round=self.first_round)

    def reached(self) -> tuple[int, int]:
        """The round that the run has come to, and the optimizer step of its weights."""
        return self.reached_round, self.reached_optimizer_step


class EndRecord(Record):
    """The run is over, so peers may leave. Signed with the run key.

    If the run has made all its optimizer steps, its model is saved by now.

    Attributes:
        begun: that of the TimelineRecord; if the two differ, the run was resumed later, with the same key
    """

    kind = "end"
    begun: Seconds
    reason: str = Field(max_length=200)


class Announcement(Record):
    """The state of one peer, which it announces every few seconds; and once more when it leaves its stage.

    Attributes:
        serial: grows with every announcement of a peer, so nobody can replay an old announcement over a newer one
        round_number: the round that the peer is in
        optimizer_step: that of the peer's weights; a rewind lowers it
        movable: whether the coordinator may move the peer to another stage
        note: why the peer does not serve, until when its owner has it paused, or what its trouble is, in words
        state_s: for how long it has been in this state
        memory_bytes: memory that it may take for a stage, as its operator says; 0 for no limit
        too_large: the stages that it has no memory for
        bandwidth_bytes_per_s: how fast it downloaded its state; 0 if it downloaded none
        upload_bytes_per_s, download_bytes_per_s: what its owner lends of its link, in bytes of calls; 0 for no limit
        device_samples_per_s: what its device could do, if its link lets less through; else 0
        moved_from: the stage that it left to join this one; UNDECIDED if it did not move
        moving_to: the stage that it prepares to move to, or leaves this one for; UNDECIDED if none
        addresses: where others may dial it, by its own account, the best one first
        is_reachable: whether others have found that they can dial it; None if none of them has tried
        relays: who carries its connections to others, where there is no direct way; some of them
        neighbours: those with which it exchanges most, as policy/view.py: Neighbour names it
        unreached: peers that it needs, or would need in another stage, and has found no way to; some of them
        incarnation: which life of the peer this is (see policy/view.py: Life)
        name: by which people recognise it; anybody may take any name
        time_shares: the percentages of its time that policy/view.py: TimeShares names
        metrics_address: IP:PORT where it shows its Prometheus metrics, by its own account; empty if to nobody
        trouble: what keeps it from its work (see policy/trouble.py: Trouble); empty if nothing does
        trouble_s: for how long it has been in trouble
    """

    kind = "announcement"
    serial: int = Field(ge=0, lt=2**63)
    stage: int = Field(ge=UNDECIDED, lt=256)
    state: str = Field(pattern="^(joining|serving|draining|left|paused)$")
    round_number: RoundNumber
    optimizer_step: OptimizerStep
    movable: bool
    note: str = Field(max_length=200)
    samples_per_s: Measured
    queue: int = Field(ge=0, lt=2**20)
    version: str = Field(max_length=32)
    device: str = Field(max_length=64)
    state_s: NonNegativeFloat = 0.0
    memory_bytes: int = Field(0, ge=0, lt=2**60)
    too_large: tuple[Annotated[int, Field(ge=0, lt=256)], ...] = Field((), max_length=256, fail_fast=True)
    bandwidth_bytes_per_s: Measured = 0.0
    upload_bytes_per_s: Measured = 0.0
    download_bytes_per_s: Measured = 0.0
    device_samples_per_s: Measured = 0.0
    moved_from: int = Field(UNDECIDED, ge=UNDECIDED, lt=256)
    moving_to: int = Field(UNDECIDED, ge=UNDECIDED, lt=256)
    addresses: tuple[Annotated[str, Field(max_length=512)], ...] = Field((), max_length=MAX_ADDRESSES, fail_fast=True)
    is_reachable: bool | None = None
    relays: tuple[Annotated[str, Field(max_length=64)], ...] = Field((), max_length=MAX_RELAYS, fail_fast=True)
    neighbours: tuple[_Neighbour, ...] = Field((), max_length=MAX_NEIGHBOURS, fail_fast=True)
    unreached: tuple[Annotated[str, Field(max_length=64)], ...] = Field((), max_length=MAX_UNREACHED, fail_fast=True)
    incarnation: Incarnation = 0
    name: str = Field("", max_length=32, pattern=PEER_NAME)
    time_shares: TimePercent | None = None
    metrics_address: MetricsAddress = ""
    trouble: str = Field("", pattern=f"^({'|'.join(['', *(each.value for each in Trouble)])})$")
    trouble_s: NonNegativeFloat = 0.0

    def view(self, peer_id: str, arrived_s: float) -> PeerView:
        """The announcement as policies read it.

        Args:
            peer_id: the announcement's author
            arrived_s: when this announcement came, on the reader's clock
        """
        # The others are alike.
        own = {"serial", "state", "state_s", "addresses", "neighbours", "time_shares", "trouble", "trouble_s"}
        return PeerView(
            peer_id=peer_id,
            state=PeerState(self.state),
            since_s=arrived_s - self.state_s,
            announced=self.serial,
            neighbours=tuple(Neighbour(*each) for each in self.neighbours),
            time_shares=None if self.time_shares is None else TimeShares(*self.time_shares),
            trouble=Trouble(self.trouble) if self.trouble else None,
            trouble_since_s=arrived_s - self.trouble_s if self.trouble else None,
            **self.model_dump(exclude=own),
        )


class Assignment(Record):
    """The coordinator's request that a peer serve another stage.

    Attributes:
        announced: serial of the announcement that the decision is based on. The assignment is void once the peer has
            restarted.
        reason: in words
    """

    kind = "assignment"
    peer: str = Field(max_length=64)
    announced: int = Field(ge=0, lt=2**63)
    from_stage: int = Field(ge=0, lt=256)
    to_stage: int = Field(ge=0, lt=256)
    reason: str = Field(max_length=300)


class Warrant(Record):
    """Allows a coordinator to act for the run in this term (see policy/leadership.py). Signed with the run key."""

    kind = "warrant"
    coordinator: str = Field(max_length=64)
    term: int = Field(ge=1, lt=2**40)


class CoordinationRecord(Record):
    """A coordinator's sign of life, and its assignments. Signed with the coordinator's own identity.

    Attributes:
        warrant: the sealed Warrant that allows it to act
        beat: grows for as long as the coordinator lives
        assignments: all that peers may not have carried out yet
        reason: why its last decision was taken, in words
    """

    kind = "coordination"
    warrant: bytes = Field(max_length=1024)
    beat: int = Field(ge=0, lt=2**40)
    assignments: tuple[Assignment, ...] = Field((), max_length=MAX_ASSIGNMENTS, fail_fast=True)
    reason: str = Field("", max_length=300)

    def term(self, run_id: str, author: str) -> Term:
        """The term that the coordinator `author` acts in.

        Raises:
            InvalidMessage: its warrant is invalid, or another coordinator's
        """
        warrant = unseal(Warrant, self.warrant, run_id, run_id)
        if warrant.coordinator != author:
            raise InvalidMessage(f"coordination of {author[:60]}: a warrant of {warrant.coordinator}")
        return Term(warrant.term, author)


class Progress(Record):
    """The samples that a stage-0 peer has computed in the round that it works at."""

    kind = "progress"
    round_number: RoundNumber
    samples: Samples


class RoundReport(Record):
    """A finished round, as the peers of stage 0 agreed on it.

    Attributes:
        optimizer_step: that of the weights after the round; a rewind lowers it
        seconds: how long the round took
    """

    kind = "report"
    round_number: RoundNumber
    optimizer_step: OptimizerStep
    samples: Samples
    loss: FiniteFloat
    seconds: Measured


class Validation(Record):
    """One stage-0 peer's share of the validation of the weights that the round begins with.

    Attributes:
        held_out: the samples that its stage-0 peers share out: fewer than the manifest has, where the text is short
    """

    kind = "validation"
    round_number: RoundNumber
    optimizer_step: OptimizerStep
    samples: Samples
    held_out: Samples
    loss_sum: FiniteFloat


class ProgressRecord(Record):
    """A stage-0 peer's present round, last finished rounds and validations, for readers that get no calls from it."""

    kind = "progress_record"
    current: Progress
    finished: tuple[RoundReport, ...] = Field(max_length=MAX_REPORTS, fail_fast=True)
    validations: tuple[Validation, ...] = Field(max_length=64, fail_fast=True)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def _signed_bytes(kind: str, run: str, body: bytes, place: bytes = b"") -> bytes:
    return msgpack.packb(["swarm", kind, run, body, place])  # type: ignore[no-any-return]


def seal(record: Record, run: str, identity: Identity, place: bytes = b"") -> bytes:
    """Sign a record and wrap it in an envelope.

    Args:
        run: hash of the run's manifest; in records that the run key signs, the run's id
        place: the record's place in the DHT, if it is to be stored there
    """
    body = msgpack.packb(record.model_dump())
    signature = identity.sign(_signed_bytes(record.kind, run, body, place))
    return bytes(msgpack.packb([record.kind, run, body, signature]))


def open_envelope(data: object, author: str, place: bytes = b"") -> tuple[str, str, bytes]:
    """Check size, form and signature of an envelope.

    Returns:
        kind, run and body

    Raises:
        InvalidMessage: one of them is wrong; the message says which
    """
    name = f"record of {author[:60]}"
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise InvalidMessage(f"{name}: not an envelope of at most {MAX_RECORD_BYTES} bytes")
    match unpack(data, name):
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
        InvalidMessage: one of the checks failed; the message says which
    """
    kind, of_run, body = open_envelope(data, author, place)
    if (kind, of_run) != (record_type.kind, run):
        raise InvalidMessage(
            f"record of {author[:60]}: {kind:.20} of run {of_run:.40}, expected {record_type.kind} of run {run}"
        )
    return parse(record_type, body, f"{record_type.kind} of {author[:60]}")


def parse(model: type[AnyRecord], body: bytes, name: str) -> AnyRecord:
    """Check the body of a record against its schema.

    Raises:
        InvalidMessage: it does not match; the message begins with `name`
    """
    try:
        return model.model_validate(unpack(body, name))
    except ValidationError as error:
        raise InvalidMessage(f"{name}: {describe(error):.300}") from error


# DHT key of the manifests of all runs: a newcomer knows an address and no run.
MANIFESTS_KEY = "swarm/runs"


def timeline_key(run_id: str) -> str:
    """DHT key of the run's TimelineRecord."""
    return f"swarm/{run_id}/timeline"


def end_key(run_id: str) -> str:
    """DHT key of the run's EndRecord."""
    return f"swarm/{run_id}/end"


def coordination_key(run_id: str) -> str:
    """DHT key of the CoordinationRecords of the run's coordinators."""
    return f"swarm/{run_id}/coordination"


def stage_key(manifest_hash: str, stage: int) -> str:
    """DHT key of the announcements of one stage; stage UNDECIDED is for peers that have not chosen one yet."""
    return f"swarm/{manifest_hash}/stage/{stage}"


def progress_key(manifest_hash: str) -> str:
    """DHT key of the ProgressRecords of the stage-0 peers."""
    return f"swarm/{manifest_hash}/progress"

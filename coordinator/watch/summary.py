"""The summary of a run that `status` shows, as plain values for people and programs."""

from __future__ import annotations

from typing import TypedDict

from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerView, SwarmView
from swarm_peer.wire.records import CoordinationRecord


class PeerSummary(TypedDict):
    """One peer of a stage, as it announced itself last."""

    peer: str
    state: str
    optimizer_step: int
    note: str
    samples_per_s: float
    tokens_per_s: float
    queue: int


class StageSummary(TypedDict):
    """One stage and its peers."""

    stage: int
    peers: list[PeerSummary]


# `from` is a keyword of Python, so that this one cannot be written as a class.
MoveSummary = TypedDict("MoveSummary", {"peer": str, "from": int, "to": int, "reason": str})


class CoordinatorSummary(TypedDict):
    """The coordinator that acts: its last decision, and the moves that are under way."""

    peer: str
    term: int
    decision: str
    moves: list[MoveSummary]


class RunSummary(TypedDict):
    """The run as a whole; losses in nats per token, None where there is none yet."""

    name: str
    manifest: str
    optimizer_step: int
    optimizer_steps: int
    samples_in_round: int
    global_batch_size: int
    loss: float | None
    tokens_per_s: float | None
    validation_loss: float | None
    coordinator: CoordinatorSummary | None
    stages: list[StageSummary]


def summarise_stages(view: SwarmView, manifest: RunManifest) -> list[StageSummary]:
    """All stages of a view, each with the peers that announce it."""
    length = manifest.data.sequence_length
    return [
        StageSummary(stage=stage, peers=[_peer_summary(peer, length) for peer in view.in_stage(stage)])
        for stage in range(manifest.stages.count)
    ]


def _peer_summary(peer: PeerView, sequence_length: int) -> PeerSummary:
    return PeerSummary(
        peer=peer.peer_id,
        state=peer.state.value,
        optimizer_step=peer.optimizer_step,
        note=peer.note,
        samples_per_s=round(peer.samples_per_s, 3),
        tokens_per_s=round(peer.samples_per_s * sequence_length, 1),
        queue=peer.queue,
    )


def summarise_coordinator(term: Term, record: CoordinationRecord) -> CoordinatorSummary:
    """The last decision of a term's coordinator."""
    moves: list[MoveSummary] = [
        {
            "peer": assignment.peer,
            "from": assignment.from_stage,
            "to": assignment.to_stage,
            "reason": assignment.reason,
        }
        for assignment in record.assignments
    ]
    return CoordinatorSummary(peer=term.coordinator, term=term.number, decision=record.reason, moves=moves)

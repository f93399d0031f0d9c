"""The summary of a run that `status --json` prints, as plain values."""

from __future__ import annotations

from typing import Any

from coordinator.watch.metrics_file import stage_shares
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import in_words, served_by_nobody
from coordinator.watch.what_is_trained import what_is_trained
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerView, TimeShares
from swarm_peer.wire.records import CoordinationRecord


def summarise(watch: RunWatch) -> dict[str, Any]:
    """The run as a whole, its stages and their peers; losses in nats per token, None where there is none yet."""
    manifest, line = watch.manifest, watch.shown_line
    length = manifest.data.sequence_length
    return {
        "name": manifest.name,
        "manifest": manifest.hash,
        "trains": what_is_trained(manifest.model),
        "optimizer_step": watch.shown_step,
        "optimizer_steps": watch.last_step,
        "samples_in_round": watch.current_samples,
        "global_batch_size": manifest.training.global_batch_size,
        "loss": line["loss"] if line else None,
        "tokens_per_s": line["tokens_per_s"] if line else None,
        "validation_loss": watch.validation_loss,
        "standstill": _summarise_standstill(watch),
        "coordinator": None if watch.coordination is None else _summarise_coordinator(*watch.coordination),
        "stages": [
            {
                "stage": stage,
                **_summarise_time(watch, stage),
                "peers": [_summarise_peer(peer, length) for peer in watch.view.in_stage(stage)],
            }
            for stage in range(manifest.stages.count)
        ],
    }


def _summarise_standstill(watch: RunWatch) -> dict[str, Any] | None:
    """That the run stands still: for how long, in which stage, and why, as a peer there says; None if it goes on.

    Nobody tells since when a stage has had no peer.
    """
    if (found := watch.standstill) is None:
        if watch.has_finished or not (empty := watch.view.empty_stages()):
            return None
        why = served_by_nobody(empty)
        return {"seconds": None, "stage": empty[0], "trouble": "no_peers", "reason": why, "peer": None}
    return {
        "seconds": round(watch.seen_s - found.since_s),
        "stage": found.stage,
        "trouble": found.kind,
        "reason": in_words(found),
        "peer": found.spokesman.peer_id,
    }


def _summarise_peer(peer: PeerView, sequence_length: int) -> dict[str, Any]:
    """One peer of a stage, as it announced itself last."""
    return {
        "peer": peer.peer_id,
        "name": peer.name,
        "state": peer.state.value,
        "optimizer_step": peer.optimizer_step,
        "note": peer.note,
        "trouble": None if peer.trouble is None else peer.trouble.value,
        "samples_per_s": round(peer.samples_per_s, 3),
        "tokens_per_s": round(peer.samples_per_s * sequence_length, 1),
        "queue": peer.queue,
        "is_reachable": peer.is_reachable,
        "relays": list(peer.relays),
        "unreached": list(peer.unreached),
        "neighbours": [each._asdict() for each in peer.neighbours],
        "time_percent": None if peer.time_shares is None else _time_of(peer.time_shares),
    }


def _time_of(shares: TimeShares) -> dict[str, int]:
    return {**shares._asdict(), "waiting": shares.waiting}


def _summarise_time(watch: RunWatch, stage: int) -> dict[str, float | None]:
    """How the stage's peers spend their time, in the mean, as in metrics.jsonl."""
    return {name: by_stage[stage] for name, by_stage in stage_shares(watch.view)._asdict().items()}


def _summarise_coordinator(term: Term, record: CoordinationRecord) -> dict[str, Any]:
    """The coordinator that acts: its last decision, and the moves that are under way."""
    moves = [
        {"peer": move.peer, "from": move.from_stage, "to": move.to_stage, "reason": move.reason}
        for move in record.assignments
    ]
    return {"peer": term.coordinator, "term": term.number, "decision": record.reason, "moves": moves}

"""Checkpoints of states that are at hand, for tests of those who read them."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.state.index import StageState


def save(store: CheckpointStore, optimizer_step: int, manifest: RunManifest, states: Sequence[StageState]) -> str:
    """Write a checkpoint as a coordinator does that has the states of all stages. Returns its address."""
    draft = store.begin(optimizer_step, manifest)
    try:
        for stage, state in enumerate(states):
            draft.put(stage, state)
        return store.finish(draft)
    except UserError:
        draft.discard()
        raise

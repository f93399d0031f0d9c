"""The checkpoint that a run was resumed from: which settings have changed since, and its note, resumed.json.

A coordinator that dies before every stage has its state would leave peers that wait for the rest. The next one cannot
resume the run once more, since it is alive; so it finds here what to give again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from coordinator.checkpoints.folder import Checkpoint, one_line
from coordinator.checkpoints.store import find_checkpoint
from coordinator.config_files import changed_settings
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.files import replace_file
from swarm_peer.model.optimizer import learning_rate
from swarm_peer.policy.timeline import Timeline

log = logging.getLogger(__name__)

RESUMED = "resumed.json"


class Resumed(BaseModel):
    """A checkpoint, and the timeline that began with its states."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    optimizer_step: int
    first_round: int


def note_resumed(output: Path, checkpoint: Checkpoint, timeline: Timeline) -> None:
    """Write down in a run's folder what it goes on from. The run goes on without that note."""
    step = checkpoint.optimizer_step
    note = Resumed(address=checkpoint.address, optimizer_step=step, first_round=timeline.first_round)
    try:
        replace_file(output / RESUMED, note.model_dump_json() + "\n")
    except OSError as error:
        log.warning("resumed_not_noted path=%s reason=%s", output / RESUMED, one_line(error))


def find_resumed(output: Path, timeline: Timeline) -> Checkpoint | None:
    """The checkpoint that a run's first timeline began with; None if it began otherwise, or nobody noted it here.

    Waits for the store: call it from a worker thread.
    """
    path = output / RESUMED
    try:
        note = Resumed.model_validate_json(path.read_text(encoding="utf-8"))
        if (note.optimizer_step, note.first_round) != (timeline.first_optimizer_step, timeline.first_round):
            return None
        checkpoint = find_checkpoint(note.address)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, UserError) as error:
        log.warning("checkpoint_not_given path=%s reason=%s", path, one_line(error))
        return None
    return checkpoint if checkpoint.address == note.address else None  # another one may have taken its place


def tell_changes(checkpoint: Checkpoint, manifest: RunManifest) -> None:
    """Log what the run does otherwise from now on: the user may have left something out of the command."""
    for key, was, now in changed_settings(checkpoint.manifest, manifest):
        log.warning("setting_changed setting=%s checkpoint=%s now=%s", key, was, now)
    # It depends on several settings, on training.steps among them, and each of these looks harmless.
    step = checkpoint.optimizer_step
    was, now = learning_rate(checkpoint.manifest, step), learning_rate(manifest, step)
    if was != now:
        text = "setting_changed setting=the learning rate at optimizer step %d checkpoint=%.3g now=%.3g"
        log.warning(text, step, was, now)

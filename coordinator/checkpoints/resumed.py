"""resumed.json: which checkpoint a run was resumed from.

A coordinator that dies before every stage has its state would leave peers that wait for the rest. The next one cannot
resume the run once more, since it is alive; so it finds here what to give again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from coordinator.checkpoints.folder import Checkpoint, one_line
from coordinator.checkpoints.store import find_checkpoint
from swarm_peer.errors import UserError
from swarm_peer.files import replace_file
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

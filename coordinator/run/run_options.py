"""How a coordinator runs its run, and which folder it may use for it."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from coordinator.checkpoints.writer import NO_CHECKPOINTS, CheckpointPlan
from coordinator.run.coordinator_options import OnDivergence
from coordinator.run.decay_file import DecayFile
from coordinator.watch.journal import has_ended
from coordinator.watch.metrics_file import METRICS, last_step
from coordinator.watch.promises import Promises
from coordinator.watch.run_file import CHECKPOINTS, MODEL
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.files import lock
from swarm_peer.runtime.base.base_index import Base


def check_output(output: Path, steps: int | None = None, *, is_resumed: bool = False) -> None:
    """Make the folder of a run, and check that none has ended there.

    Args:
        steps: optimizer steps of a run that may have ended there all the same: its coordinator may have been killed
            after it had saved the model, before all peers had heard of it; None if it would begin anew

    Raises:
        UserError: one has, or the folder cannot be made
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot write there ({error.strerror}); name another folder") from error
    if (output / MODEL).exists() and (steps is None or not (last_step(output) == steps or has_ended(output))):
        way = " to train its run further" if is_resumed else _way_to_resume(output, "once it is moved, ")
        raise UserError(f"{output / MODEL} is there already: name another --output, or move it away{way}")


def has_begun(output: Path) -> bool:
    """Whether a run has made optimizer steps in this folder."""
    metrics = output / METRICS
    return metrics.exists() and metrics.stat().st_size > 0


def check_not_begun(output: Path) -> None:
    """Check that a run that begins anew would erase no other run's metrics.jsonl.

    Raises:
        UserError: it would
    """
    if has_begun(output):
        raise UserError(
            f"a run has begun in {output} (metrics.jsonl), and this one would begin anew: name another --output, or "
            f"move its files away{_way_to_resume(output)}"
        )


def _way_to_resume(output: Path, first: str = "") -> str:
    has_checkpoints = (output / CHECKPOINTS).exists()
    return f"; {first}with --resume {output}, the run goes on from its last checkpoint" if has_checkpoints else ""


def lock_folder(output: Path) -> IO[str]:
    """Lock a folder, in which two programs would overwrite each other's files, until the lock is closed.

    Raises:
        UserError: another one holds it, or the folder cannot be written to
    """
    try:
        file = (output / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot write there ({error.strerror}); name another folder") from error
    try:
        lock(fcntl.lockf, file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, output)  # forked children would hold flock's
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise UserError(f"--output {output}: cannot be locked ({error.strerror}); name another folder") from error
        raise UserError(f"another program trains into {output}: stop it, or name another --output") from error
    return file


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a coordinator runs its run.

    Attributes:
        output: folder of metrics.jsonl and of the model
        resume: carry on with the metrics.jsonl that is there
        plan: which checkpoints to write, and which to go on from
        cache_dir: where tokenizers are cached
        min_replicas: peers that each stage keeps while one of them moves elsewhere; None to move no peer
        standby: leave the run to another coordinator for as long as there is one
        dashboard: host and port of the page that shows the run; None for no page
        on_divergence: when its weights have diverged, the run ends, or goes back to its last good checkpoint once
        promises: collects what was asked for and not done
        base: lists the frozen weights, where members give these to each other
    """

    output: Path
    resume: bool = False
    plan: CheckpointPlan = NO_CHECKPOINTS
    cache_dir: Path | None = None
    min_replicas: int | None = 1
    standby: bool = False
    dashboard: tuple[str, int] | None = None
    on_divergence: OnDivergence = "end"
    promises: Promises = field(default_factory=Promises)
    base: Base | None = None

    def check_divergence(self) -> None:
        """Check that there are checkpoints to go back to, if the run is to go back to one.

        Raises:
            UserError: none is written
        """
        if self.on_divergence == "rewind" and self.plan.store is None:
            raise UserError(
                "--on-divergence rewind goes back to a checkpoint, and none is written: add --checkpoint-every N"
            )

    def check_output(self, manifest: RunManifest) -> None:
        """Check the folder for a run; see `check_output`."""
        goes_on = self.resume and self.plan.resume is None
        note = DecayFile(self.output).read()
        decay = None if note is None else note.decay
        last_step = manifest.training.steps if decay is None else decay.end
        check_output(self.output, last_step if goes_on else None, is_resumed=self.resume)

"""Options that several commands share. Imports nothing heavy: each `--help` reads this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from coordinator.watch.loggers import LoggerName
from swarm_peer.config import load_manifest

if TYPE_CHECKING:
    from coordinator.checkpoints.writer import CheckpointPlan
    from swarm_peer.config import RunManifest
    from swarm_peer.model.resolved import ResolvedManifest

LogLevel = Literal["debug", "info", "warning", "error"]
Overrides = Annotated[
    tuple[str, ...], Parameter(name="--set", negative="", help="Override the file, such as --set training.steps=500.")
]
Addresses = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
CheckpointEvery = Annotated[
    int | None,
    Parameter(
        help="Optimizer steps between checkpoints, a multiple of recovery.snapshot_every (the default); 0 for none."
    ),
]
LogTo = Annotated[
    tuple[LoggerName, ...],
    Parameter(name="--log-to", negative="", help="Plot the run's metrics there too; may be given for each."),
]
Positive = Parameter(validator=Number(gt=0))
NotNegative = Parameter(validator=Number(gte=0))
# Fields of such a parameter are options of their own.
Flat = Parameter(name="*")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where a run's checkpoints go, and which one it goes on from.

    Attributes:
        checkpoints: Folder or URL (such as s3://bucket/run) of checkpoints; OUTPUT/checkpoints if not given.
        keep_checkpoints: How many of them are kept.
        resume: Checkpoint folder or URL to go on from: its newest good one, or one of them.
    """

    checkpoints: str | None = None
    checkpoint_every: CheckpointEvery = None
    keep_checkpoints: int = 3
    resume: str | None = None

    def plan(self, manifest: RunManifest, output: Path) -> CheckpointPlan:
        """Check these options against the run.

        Raises:
            UserError: see plan_checkpoints
        """
        from coordinator.checkpoints.writer import plan_checkpoints

        url = self.checkpoints or str(output / "checkpoints")
        return plan_checkpoints(manifest, url, self.checkpoint_every, self.keep_checkpoints, self.resume)


def load_and_resolve(
    config: Path, overrides: tuple[str, ...], cache_dir: Path | None, steps: int | None = None
) -> ResolvedManifest:
    """The manifest of a run's YAML file as it is published.

    Args:
        steps: optimizer steps, if other than in the file

    Raises:
        UserError: see load_manifest and resolve_manifest
    """
    if steps is not None:
        overrides = (*overrides, f"training.steps={steps}")
    manifest = load_manifest(config, overrides)

    from coordinator.run.service import resolve_manifest

    return resolve_manifest(manifest, cache_dir)

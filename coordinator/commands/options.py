"""Options that several commands share. Imports nothing heavy: each `--help` reads this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from coordinator.watch.loggers import LoggerName
from swarm_peer.config import load_manifest

if TYPE_CHECKING:
    from swarm_peer.model.resolved import ResolvedManifest

LogLevel = Literal["debug", "info", "warning", "error"]
Overrides = Annotated[
    tuple[str, ...], Parameter(name="--set", negative="", help="Override the file, such as --set training.steps=500.")
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
LogTo = Annotated[
    tuple[LoggerName, ...],
    Parameter(name="--log-to", negative="", help="Plot the run's metrics there too; may be given for each."),
]
Positive = Parameter(validator=Number(gt=0))
NotNegative = Parameter(validator=Number(gte=0))
# Fields of such a parameter are options of their own.
Flat = Parameter(name="*")


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

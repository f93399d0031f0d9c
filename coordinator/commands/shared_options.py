"""Options that several commands share. Imports nothing heavy: each `--help` reads this."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from coordinator.config_files import check_overrides, load_manifest
from coordinator.watch.loggers import LoggerName
from swarm_peer.peer_options import LOGS, MACHINE, NETWORK, RUN, Addresses

if TYPE_CHECKING:
    from swarm_peer.model.resolved import ResolvedManifest

log = logging.getLogger(__name__)

# Of large numbers, as people write those of tokens.
SUFFIXES = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}


def _whole_number(_: object, tokens: Sequence[Token]) -> int:
    """A number such as 300, 300e9 or 300B."""
    text = tokens[0].value
    with suppress(ValueError):
        return int(text)
    number = text[:-1] + SUFFIXES[text[-1]] if text[-1:] in SUFFIXES else text
    with suppress(ValueError):
        if (value := float(number)).is_integer():
            return int(value)
    raise ValueError(f"{text!r} is no whole number")


Config = Annotated[
    Path, RUN, Parameter(name="CONFIG", help="The run's YAML file, or a run that comes with Swarm, such as demo.")
]
RunFolder = Annotated[
    Path | None,
    RUN,
    Parameter(
        name="RUN",
        help="Folder of a live run, such as runs/demo; the newest live one in ./runs if nothing names a run.",
    ),
]
RunKey = Annotated[
    Path | None,
    RUN,
    Parameter(name="--identity-path", help="The run's key; the one in the run's folder if not given."),
]
RunPeers = Annotated[Addresses, NETWORK, Parameter(help="Addresses of any peers of the run, instead of its folder.")]
RunId = Annotated[str | None, NETWORK, Parameter(help="Which run, where the addresses lead to several.")]
CacheDir = Annotated[
    Path | None,
    MACHINE,
    Parameter(help="Folder where datasets and tokenizers are cached; Hugging Face's own if not given."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], LOGS, Parameter(help="Least severe log line to print.")
]
Overrides = Annotated[
    tuple[str, ...],
    RUN,
    Parameter(
        name="--set",
        negative="",
        help="Override the file, such as --set training.steps=500; may be repeated.",
        validator=lambda _, overrides: check_overrides(overrides),
    ),
]
# Of the page on which people watch a run.
DASHBOARD = "127.0.0.1:8470"
Dashboard = Annotated[
    str | None,
    LOGS,
    Parameter(
        name="--dashboard",
        negative_none="no-",
        help="Where to show the run in a browser, as [HOST:]PORT; the next port that is free, if that one is taken.",
    ),
]
Json = Annotated[
    bool, Parameter(name="--json", negative="", help="Print JSON.", group=Group.create_ordered("Output", sort_key=1))
]
LogTo = Annotated[
    tuple[LoggerName, ...],
    LOGS,
    Parameter(name="--log-to", negative="", help="Plot the run's metrics there too; may be given for each."),
]
Count = Annotated[int, Parameter(converter=_whole_number)]
Positive = Parameter(validator=Number(gt=0))
NotNegative = Parameter(validator=Number(gte=0))
# Fields of such a parameter are options of their own.
Flat = Parameter(name="*")


def load_and_resolve(
    config: Path, overrides: tuple[str, ...], cache_dir: Path | None, steps: int | None = None
) -> ResolvedManifest:
    """The manifest of a run's YAML file as it is published.

    Args:
        steps: optimizer steps, if other than in the file; the warm-up is not longer than these

    Raises:
        UserError: see load_manifest and resolve_manifest
    """
    manifest = load_manifest(config, overrides)
    if steps is not None:
        overrides = (*overrides, f"training.steps={steps}")
        if (warmup_steps := manifest.schedule.warmup_steps) > steps:
            log.warning("warmup_shortened from=%d to=%d reason=the run ends with --steps", warmup_steps, steps)
            overrides = (*overrides, f"schedule.warmup_steps={steps}")
        manifest = load_manifest(config, overrides)

    from coordinator.run.resolving import resolve_manifest

    return resolve_manifest(manifest, cache_dir)

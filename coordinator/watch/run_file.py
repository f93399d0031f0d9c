"""run.json: which run a folder is of, its manifest, and the versions that its coordinator ran with."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coordinator.watch.promises import Promises
from swarm_peer import __version__
from swarm_peer.config import RunManifest

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
# Folders beside it: of the model once the run is finished, and of checkpoints.
MODEL = "model"
CHECKPOINTS = "checkpoints"
# Their versions may matter to somebody who repeats a run.
PACKAGES = ("torch", "transformers", "datasets", "hivemind", "numpy")


@contextmanager
def run_file_written(output: Path, run_id: str, manifest: RunManifest, promises: Promises) -> Iterator[None]:
    """Have a run's folder say what the run is, from now on, or at least when the context is left."""
    why_not = write_run_file(output, run_id, manifest)
    try:
        yield
    finally:
        if why_not and (why_not := write_run_file(output, run_id, manifest)):
            promises.broken(f"{RUN_FILE} was not written", why_not)


def write_run_file(output: Path, run_id: str, manifest: RunManifest) -> str:
    """Write down what the run is, for those who look at its folder later; returns why that failed, or nothing.

    The run goes on without it.
    """
    about = {
        "run_id": run_id,
        "manifest_hash": manifest.hash,
        "versions": {"swarm": __version__, "python": platform.python_version(), **_installed()},
        "manifest": manifest.model_dump(mode="json"),
    }
    try:
        (output / RUN_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("run_file_not_written path=%s reason=%s", output / RUN_FILE, error.strerror)
        return error.strerror or str(error)
    return ""


def read_run_file(folder: Path) -> dict[str, Any]:
    """Read what `write_run_file` has written; empty if it is not there, or of another form."""
    try:
        about = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

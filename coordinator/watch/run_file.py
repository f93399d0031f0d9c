"""run.json: which run a folder is of, its manifest, and the versions that its coordinator ran with."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swarm_peer import __version__
from swarm_peer.config import RunManifest

RUN_FILE = "run.json"
# Their versions may matter to somebody who repeats a run.
PACKAGES = ("torch", "transformers", "datasets", "hivemind", "numpy")


def write_run_file(output: Path, run_id: str, manifest: RunManifest) -> None:
    """Write down what the run is, for those who look at its folder later."""
    about = {
        "run_id": run_id,
        "manifest_hash": manifest.hash,
        "versions": {"swarm": __version__, "python": platform.python_version(), **_installed()},
        "manifest": manifest.model_dump(mode="json"),
    }
    (output / RUN_FILE).write_text(json.dumps(about, indent=2) + "\n")


def _installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

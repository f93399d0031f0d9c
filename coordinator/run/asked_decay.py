"""Asks the coordinator that serves a run from a folder for the run's decay, and checks first whether it can be had."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from coordinator.run.decay_file import DecayFile, DecayNote
from coordinator.run.decaying import Standing, begins_at, why_not
from coordinator.watch.metrics_file import last_step
from coordinator.watch.run_file import read_run_file
from swarm_peer.config import MAX_STEPS, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.decay import Decay


def ask_for_decay(folder: Path, steps: int) -> str:
    """Note in a run's folder that it shall decay; returns a sentence of when it will.

    Raises:
        UserError: the folder is no run's, or its run cannot decay so, or does already
    """
    try:
        manifest = RunManifest.model_validate(read_run_file(folder)["manifest"])
    except (KeyError, ValidationError):
        raise UserError(f"{folder} says nothing of its run yet: serve the run from there first") from None
    file = DecayFile(folder)
    if (note := file.read()) is not None and (known := note.decay) is not None:
        raise UserError(
            f"its run decays since optimizer step {known.begins_at}, for {known.steps} steps: it ends at {known.end}"
        )
    earliest = begins_at(manifest, Standing(last_step(folder), step_s=0.0, acts=False))
    if why := why_not(manifest, Decay(earliest, min(steps, MAX_STEPS))):
        raise UserError(f"--steps {steps}: {why}")
    file.write(DecayNote(steps=steps))
    return (
        f"The coordinator has the decay begin in a little while, so that all peers have heard of it, and the run ends "
        f"{steps} steps after that."
    )

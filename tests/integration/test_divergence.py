"""Real peers whose weights diverge: the run ends, or goes back to its last good checkpoint once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import COORDINATOR, Processes
from swarm import tiny_manifest

HASTY_LOCAL = (sys.executable, str(Path(__file__).with_name("hasty_coordinator.py")), "local", "--no-dashboard")


def config_of(folder: Path, **optimizer: Any) -> str:
    # Three microbatches fail side by side, and no step ends between two of the coordinator's looks.
    training = {"steps": 8, "global_batch_size": 24, "microbatch_size": 4, "validation_every": 0, "max_grad_norm": None}
    manifest = tiny_manifest(
        training=training,
        limits={"announcement_s": 2.0},
        recovery={"snapshot_every": 4},
        optimizer={"name": "adamw", "learning_rate": 1e-3, "momentum": 0.0} | optimizer,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    return str(path)


def events_of(output: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (output / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_whose_weights_have_diverged_ends_and_says_so(tmp_path: Path, processes: Processes) -> None:
    output = tmp_path / "out"
    options = ("--peers", "1,1", "--output", str(output), "--checkpoint-every", "4")
    assert processes.run("local", *HASTY_LOCAL, config_of(tmp_path, learning_rate=1e6), *options) == 1
    last = processes.log("local").splitlines()[-1]
    assert last.startswith("swarm-coordinator: the run has ended: its weights have diverged after optimizer step ")
    assert "says: every microbatch fails: not_finite: " in last
    assert "there is no good checkpoint of it" in last
    assert "Traceback" not in processes.log("local")
    assert events_of(output)[-1].startswith("The run has ended: its weights have diverged")


@pytest.mark.slow
def test_a_run_whose_weights_have_diverged_goes_back_once(tmp_path: Path, processes: Processes) -> None:
    """With all peers of all stages; and what broke it breaks it again."""
    first, output = tmp_path / "first", tmp_path / "out"
    options = ("--peers", "2,2", "--checkpoint-every", "4")
    assert processes.run("first", *COORDINATOR, "local", config_of(tmp_path), *options, "--output", str(first)) == 0
    changed = ("--set", "training.steps=40", "--set", "optimizer.learning_rate=1e6", "--on-divergence", "rewind")
    resume = ("--output", str(output), "--resume", str(first), *changed)
    assert processes.run("again", *HASTY_LOCAL, config_of(tmp_path), *options, *resume) == 1
    texts = events_of(output)
    assert "The run's weights have diverged, and it goes back to its checkpoint of optimizer step 8." in texts
    assert any(text.startswith("The run has gone back from optimizer step ") for text in texts), "its peers follow"
    assert "its last good checkpoint is of optimizer step 8: go on from it" in processes.log("again").splitlines()[-1]
    for peer in ("0.0", "0.1", "1.0", "1.1"):
        assert "run_rewound" in (output / "logs" / f"peer-{peer}.log").read_text()

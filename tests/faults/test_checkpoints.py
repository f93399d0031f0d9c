"""A run whose machines all fail goes on from a checkpoint, with other peers, as if nothing had been."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from forks import ForkedProcess
from programs import COORDINATOR, Processes, wait_for
from swarm import tiny_manifest
from transformers import AutoModelForCausalLM

from coordinator.checkpoints.folder import optimizer_step_of
from coordinator.checkpoints.store import find_checkpoint
from coordinator.run.address_files import PEERS
from swarm_peer.config import RunManifest
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.wire.ledger_codec import read_ledger

SAMPLE_S = 0.01


def lines_of(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoints_of(output: Path) -> list[Path]:
    # But those that are being written.
    return sorted(path.parent for path in (output / "checkpoints").glob(f"step-{8 * '?'}/checkpoint.json"))


def manifest_of(steps: int) -> RunManifest:
    return tiny_manifest(
        training={"steps": steps, "global_batch_size": 64, "microbatch_size": 4, "validation_every": 0},
        limits={"hop_timeout_s": 10, "announcement_s": 6},
        recovery={"snapshot_every": 4},
        optimizer={"name": "adamw", "learning_rate": 3e-3, "momentum": 0.0},
    )


@pytest.mark.slow
def test_when_all_peers_are_killed_the_next_ones_go_on_from_a_checkpoint(tmp_path: Path, processes: Processes) -> None:
    """As where a provider takes all its machines back. Nobody has to do anything."""
    steps = 30
    config, output, addresses = tmp_path / "run.yaml", tmp_path / "out", tmp_path / "addresses"
    config.write_text(yaml.safe_dump(manifest_of(steps).model_dump(mode="json")))
    listening = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--address-file", str(addresses))
    serve = (*COORDINATOR, "serve", str(config), "--output", str(output), "--checkpoint-every", "4", *listening)
    coordinator = processes.start("coordinator", *serve)

    def start_peers(life: str) -> list[ForkedProcess]:
        joining = ("--initial-peers", f"@{addresses}", "--stage")
        return [processes.start_slow_peer(f"{life}.{n}", SAMPLE_S, *joining, str(n)) for n in range(2)]

    first = start_peers("first")
    # A run of fewer steps would begin anew.
    wait_for(lambda: len(checkpoints_of(output)) >= 3, "three checkpoints")
    for peer in first:
        peer.kill()
        peer.wait()
    wait_for(lambda: "checkpoint_given" in processes.log("coordinator"), "that it is given")
    optimizer_step = optimizer_step_of(checkpoints_of(output)[-1].name)
    assert f"checkpoint_given optimizer_step={optimizer_step} " in processes.log("coordinator")
    start_peers("second")
    assert coordinator.wait(200) == 0, processes.log("coordinator")[-3000:]
    for stage in range(2):
        begun = next(line for line in processes.log(f"second.{stage}").splitlines() if " serving stage=" in line)
        assert begun.endswith(f" optimizer_step={optimizer_step}")
    lines = lines_of(output)
    assert [line["optimizer_step"] for line in lines] == list(range(1, steps + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    jumps = [abs(after["loss"] - before["loss"]) for before, after in itertools.pairwise(lines[3:])]
    assert max(jumps) < 0.5, "the loss goes on where it was"


def test_a_run_goes_on_from_its_last_good_checkpoint(tmp_path: Path, processes: Processes) -> None:
    steps = 16
    manifest = manifest_of(steps)
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))

    def start(life: str, peers_by_stage: list[int], *options: str) -> ForkedProcess:
        addresses = tmp_path / f"{life}.addresses"
        serve = (*COORDINATOR, "serve", str(config), "--output", str(output), "--checkpoint-every", "4")
        listening = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--address-file", str(addresses))
        coordinator = processes.start(life, *serve, *listening, *options)
        for stage, count in enumerate(peers_by_stage):
            for number in range(count):
                joining = ("--stage", str(stage), "--initial-peers", f"@{addresses}")
                processes.start_slow_peer(f"{life}.{stage}.{number}", SAMPLE_S, *joining)
        return coordinator

    start("first", [2, 1])
    wait_for(lambda: len(checkpoints_of(output)) >= 2, "two checkpoints")
    for process in processes.running:
        process.kill()
        process.wait()
    done = lines_of(output)[-1]["optimizer_step"]
    *_, good, newest = checkpoints_of(output)
    assert done < steps
    with (newest / "stage-000.safetensors").open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"damaged")

    known = (output / PEERS).read_text()
    resumed = start("resumed", [1, 0], "--resume", str(output / "checkpoints"))
    wait_for(lambda: " serving stage=0" in processes.log("resumed.0.0"), "a peer that has the state of stage 0")
    wait_for(lambda: (output / PEERS).read_text() != known, "its address, kept for the next coordinator")
    resumed.kill()  # before anybody has the state of stage 1
    resumed.wait()
    again = start("again", [0, 2])
    assert again.wait(200) == 0, processes.log("again")[-3000:]
    assert "checkpoint_damaged" in processes.log("resumed")
    optimizer_step = optimizer_step_of(good.name)
    for life in ("resumed", "again"):
        assert f"checkpoint_given optimizer_step={optimizer_step} " in processes.log(life)
    lines = lines_of(output)
    assert [line["optimizer_step"] for line in lines] == list(range(1, steps + 1))
    later = [line for line in lines if line["optimizer_step"] > optimizer_step]
    assert later[-1]["peers"] == [1, 2]
    jump = later[0]["loss"] - lines[optimizer_step - 1]["loss"]
    assert abs(jump) < 0.5, "the loss goes on where it was"
    assert later[-1]["loss"] < lines[0]["loss"] - 0.5
    AutoModelForCausalLM.from_pretrained(output / "model")

    # Had a sample counted again after the resumption, it would be in the ledger once and in the lines twice.
    last = checkpoints_of(output)[-1]
    state = find_checkpoint(str(last)).load_stage(0)
    ledger = read_ledger(state.ledger, SliceReader(manifest=manifest).num_slices())
    assert ledger.current_pass == 0
    num_counted = sum(item.end - item.start for item in ledger.facts())
    assert num_counted == sum(
        line["samples"] for line in lines if line["optimizer_step"] <= optimizer_step_of(last.name)
    )

    # The model of any checkpoint that is left can be had, too.
    export = (*COORDINATOR, "export", "--checkpoint", str(output / "checkpoints"), "--output", str(tmp_path / "export"))
    assert processes.run("export", *export) == 0, processes.log("export")[-2000:]
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")

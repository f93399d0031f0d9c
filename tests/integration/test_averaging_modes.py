"""Modes of averaging in live swarms: bit by bit against a process with as many replicas; peers come and go.

Delayed updates that all begin a round with the same weights are held to one process in test_keystone.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_peer import RECORD_ROUTES
from swarm import LiveSwarm, SwarmRun, check_ledger, run_swarm, tiny_manifest
from test_keystone import check_counts, check_nothing_lost

from coordinator.run.baseline import ReplicatedBaseline
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight


def orders_of(run: SwarmRun, folder: Path, num_stages: int) -> dict[int, list[list[list[int]]]]:
    """By optimizer step, stage and replica: the counted microbatches, in the order of the backward passes.

    Replicas are in the order of their peers' ids.
    """
    numbers = {each: number for counted in run.ids.values() for number, each in enumerate(counted)}
    orders: dict[int, list[list[list[int]]]] = {step: [[] for _ in range(num_stages)] for step in run.ids}
    for path in sorted(folder.glob("*.route")):
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for step, stages in orders.items():
            own = [entry for entry in entries if entry["round"] == step]
            stages[entries[0]["stage"]].append([numbers[bytes.fromhex(entry["id"])] for entry in own])
    return orders


SYNCHRONOUS = {"mode": "synchronous"}
PERIODIC = {"mode": "periodic", "inner_steps": 4}
EAGER = {"mode": "delayed"}


@pytest.mark.parametrize(
    "averaging",
    # The keystone compares the updates of synchronous rounds.
    [pytest.param(SYNCHRONOUS, marks=pytest.mark.slow), PERIODIC, EAGER],
    ids=lambda section: section["mode"],
)
@pytest.mark.parametrize(
    ("num_stages", "num_peers", "optimizer"),
    [
        (2, 2, "sgd"),
        pytest.param(1, 2, "adamw", marks=pytest.mark.slow),
        pytest.param(3, 1, "sgd", marks=pytest.mark.slow),
        pytest.param(3, 2, "adamw", marks=pytest.mark.slow),
    ],
)
def test_a_swarm_equals_a_process_with_as_many_replicas(
    num_stages: int,
    num_peers: int,
    optimizer: str,
    averaging: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RECORD_ROUTES, "yes")
    section = {"name": "adamw", "learning_rate": 3e-3, "momentum": 0.0} if optimizer == "adamw" else {}
    manifest = tiny_manifest(
        stages={"count": num_stages, "peers_to_start": num_peers},
        training={"steps": 8, "validation_every": 4, "validation_samples": 4},
        averaging=averaging | {"compare_weights_every": 2},
        recovery={"snapshot_every": 4},
        optimizer=section,
    )
    run = run_swarm(manifest, [num_peers] * num_stages, tmp_path)

    check_counts(run, manifest)
    check_nothing_lost(run)
    orders = orders_of(run, tmp_path / "records", num_stages)
    reference = ReplicatedBaseline(ResolvedManifest.of(manifest), [num_peers] * num_stages)
    for step in range(manifest.training.steps):
        loss, samples = reference.train_step(run.counted[step], orders[step])
        assert samples == run.lines[step]["samples"]
        assert run.lines[step]["loss"] == pytest.approx(loss, rel=1e-5 if optimizer == "sgd" else 1e-4)
    for replicas, states in zip(reference.stages, run.states, strict=True):
        assert len(states) == num_peers
        for name, expected in replicas[0].state().items():
            # Between two averages, optimizers' states are each replica's own.
            if averaging != PERIODIC or is_weight(name) or name.startswith("round/"):
                assert all(torch.equal(state.tensors[name], expected) for state in states), name


@pytest.mark.slow
@pytest.mark.parametrize("averaging", [{"mode": "periodic", "inner_steps": 8}, {"mode": "delayed"}], ids=str)
def test_peers_come_and_go_and_a_stage_is_lost(averaging: dict[str, Any], tmp_path: Path) -> None:
    manifest = tiny_manifest(
        stages={"count": 2, "peers_to_start": 2},
        training={"steps": 64, "global_batch_size": 64},
        averaging=averaging,
        recovery={"snapshot_every": 8},
        limits={"hop_timeout_s": 10},
    )

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(10)
        swarm.start(1, "late.1")
        await swarm.until(lambda: "serving stage=" in swarm.log("late.1"), "late.1 serves")
        await swarm.leave("1.0")
        await swarm.leave("0.1")
        left.append("samples_given_up" in swarm.log("1.0") + swarm.log("0.1"))
        given.append("work_handed_over" in swarm.log("1.0"))
        swarm.kill("1.1")
        swarm.kill("late.1")
        swarm.start(1, "heir")

    left: list[bool] = []
    given: list[bool] = []
    run = run_swarm(manifest, [2, 2], tmp_path, script=script)
    assert (left, given) == ([False], [True])
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, 65))
    assert [len(states) for states in run.states] == [1, 1]
    check_ledger(run, manifest)
    targets = {int(match[1]) for match in re.finditer(r"run_rewound stage=0 .* to=(\d+)", run.logs())}
    assert len(targets) == 1
    assert targets.pop() % 8 == 0, "where all replicas held the same"
    assert run.lines[-1]["loss"] < run.lines[0]["loss"] - 0.5

"""The coordinator moves a peer to a stage that has lost most of its own, and the run keeps its pace."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from recording_peer import FIRST_STAGE
from swarm import GPT2, LiveSwarm, SwarmStopped, run_swarm, tiny_manifest

from coordinator.run.baseline import Baseline
from swarm_peer.model.costs import forward_flops
from swarm_peer.model.resolved import ResolvedManifest

pytestmark = pytest.mark.slow

FAST_S, SLOW_S = 0.06, 0.12  # a sample


def throughput(lines: list[dict[str, Any]]) -> float:
    assert len(lines) >= 4
    return float(sum(line["samples"] for line in lines) / sum(line["seconds"] for line in lines))


def bound_of(seconds: list[float], costs: list[float]) -> float:
    """Samples per second of the best of all assignments of these peers to stages, if they compute all the time."""
    relative = [cost * len(costs) / sum(costs) for cost in costs]
    best = 0.0
    for stages in itertools.product(range(len(costs)), repeat=len(seconds)):
        capacity = [0.0] * len(costs)
        for stage, each_s in zip(stages, seconds, strict=True):
            capacity[stage] += 1 / each_s / relative[stage]
        best = max(best, min(capacity))
    return best


def test_a_stage_that_loses_two_of_three_peers_gets_one_from_another(tmp_path: Path) -> None:
    steps = 16
    manifest = tiny_manifest(
        model={"config": GPT2 | {"n_layer": 9}},
        stages={"count": 3, "layers": [3, 3, 3], "peers_to_start": 2},
        training={"steps": steps, "global_batch_size": 128, "microbatch_size": 2, "validation_every": 0},
        optimizer={"learning_rate": 0.03},
        limits={"hop_timeout_s": 20, "announcement_s": 6},
    )
    costs = forward_flops(ResolvedManifest.of(manifest))
    recovered_at: list[int] = []

    async def script(swarm: LiveSwarm) -> None:
        # In balance, and so at rest.
        for stage, name, seconds in (
            (0, "0.fast", FAST_S), (0, "0.other", FAST_S), (1, "1.fast", FAST_S), (1, "1.other", FAST_S),
            (2, "2.fast", FAST_S), (2, "2.slow", SLOW_S), (2, "2.other", SLOW_S),
        ):  # fmt: skip
            # Of its own choice, and so free to be moved.
            os.environ[FIRST_STAGE] = str(stage)
            swarm.start("auto", name, f"slow:1:{seconds}")
        del os.environ[FIRST_STAGE]
        await swarm.reached(5)
        assert swarm.service.metrics._moves._value.get() == 0, "a swarm in balance is left alone"
        swarm.kill("2.fast")
        swarm.kill("2.other")
        names = ("0.fast", "0.other", "1.fast", "1.other")
        await swarm.until(
            lambda: any("moving from=" in swarm.log(name) and "serving stage=2" in swarm.log(name) for name in names),
            "a peer serves stage 2 that served another",
        )
        recovered_at.append(swarm.optimizer_step)

    run = run_swarm(manifest, [0, 0, 0], tmp_path, script=script)
    assert run.logs().count("assigned stage=2") == 1
    assert [len(states) for states in run.states].count(2) == 2
    assert len(run.states[2]) == 2
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, steps + 1))
    assert all(line["samples"] >= 128 for line in run.lines)
    # Other samples would have a loss 0.3 apart: one stage-0 peer reads batches of neighbouring ones.
    undisturbed = Baseline(ResolvedManifest.of(manifest))
    for line in run.lines:
        loss, _ = undisturbed.train_step(run.counted[line["round"]])
        assert line["loss"] == pytest.approx(loss, abs=0.01), "but for what the killed had summed up, nothing is lost"

    achieved = throughput(run.lines[recovered_at[0] + 2 :])

    # What the survivors do where they are best placed from the beginning: the bound alone knows no averaging rounds.
    async def best_placed(swarm: LiveSwarm) -> None:
        for stage, name, seconds in (
            (0, "0.fast", FAST_S), (1, "1.fast", FAST_S), (1, "1.other", FAST_S), (2, "2.fast", FAST_S),
            (2, "2.slow", SLOW_S),
        ):  # fmt: skip
            swarm.start(stage, name, f"slow:1:{seconds}")
        await swarm.reached(9)
        raise SwarmStopped

    (tmp_path / "best").mkdir()
    still = manifest.model_copy(update={"stages": manifest.stages.model_copy(update={"peers_to_start": 1})})
    best = throughput(run_swarm(still, [0, 0, 0], tmp_path / "best", script=best_placed).lines[4:])
    bound = bound_of([FAST_S, FAST_S, FAST_S, FAST_S, SLOW_S], costs)
    print(f"samples/s: {achieved:.2f} after the move, {best:.2f} in the best places, bound {bound:.2f}")
    assert achieved > 0.9 * best

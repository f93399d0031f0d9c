"""Peers come late, leave on notice, and whole stages are lost: what comes out is what one process would have made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from every_second_round import VARIABLE, EverySecondRound
from recording_peer import FIRST_STAGE
from swarm import LLAMA, LiveSwarm, SwarmRun, check_ledger, run_swarm, tiny_manifest, without_data_dir
from tiny_adapters import write_base

from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.baseline import Baseline
from coordinator.run.shared_base import with_base
from swarm_peer.config import RunManifest
from swarm_peer.model.optimizer import STATE_PREFIX
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.strategies import STRATEGIES

# The test tube shows the same under as many schedules as one likes.
pytestmark = pytest.mark.slow


def manifest_of(steps: int, **sections: Any) -> RunManifest:
    limits = {"hop_timeout_s": 10, "announcement_s": 6}
    training = {"steps": steps, "global_batch_size": 64, "microbatch_size": 2, "validation_every": 0}
    return tiny_manifest(
        **({"training": training, "limits": limits, "stages": {"count": 2, "peers_to_start": 1}} | sections)
    )


def check_equals_one_process(run: SwarmRun, manifest: RunManifest) -> None:
    """The weights of all peers are those of one process that was fed what the run has counted."""
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, manifest.training.steps + 1))
    baseline = Baseline(ResolvedManifest.of(manifest))
    seen = set()
    for line in run.lines:
        counted = run.counted[line["round"]]
        assert sum(map(len, counted)) == line["samples"] >= manifest.training.global_batch_size
        # By name: the same text, such as a line of dashes, may well stand in the data twice.
        samples = set(run.samples[line["round"]])
        assert len(samples) == line["samples"]
        assert seen.isdisjoint(samples), "a sample was counted twice"
        seen |= samples
        loss, _ = baseline.train_step(counted)
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
    check_ledger(run, manifest)
    for trainer, states in zip(baseline.trainers, run.states, strict=True):
        assert states, f"nobody serves stage {trainer.spec.index}"
        for name, expected in trainer.state().items():
            for state in states:
                difference = float((state.tensors[name] - expected).norm() / expected.norm().clamp_min(1e-12))
                # Momenta are sums of gradients of either sign: over dozens of steps their rounding shows more.
                limit = 1e-4 if name.startswith(STATE_PREFIX) else 1e-5
                assert difference < limit, f"{name} differs by {difference:.2e}"
        for other in states[1:]:
            assert all(torch.equal(other.tensors[name], tensor) for name, tensor in states[0].tensors.items())


@pytest.fixture
def every_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all peers, and the one process, update their weights with the mean of every second round."""
    monkeypatch.setenv(VARIABLE, "yes")
    monkeypatch.setitem(STRATEGIES, "synchronous", EverySecondRound)


def test_peers_that_leave_on_notice_lose_nothing(tmp_path: Path) -> None:
    manifest = manifest_of(18, stages={"count": 2, "peers_to_start": 2})

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(4)
        await swarm.leave("1.0")
        await swarm.until(lambda: swarm.dead_ids() & swarm.service.watch.view.left, "the peer's tombstone in the DHT")
        await swarm.reached(11)
        await swarm.leave("0.1")

    run = run_swarm(manifest, [2, 2], tmp_path, script=script)
    check_equals_one_process(run, manifest)
    assert run.logs().count("leaving reason=SIGTERM") == 4, "two in the middle and two at the end"
    assert "samples_given_up" not in run.logs()
    assert [len(states) for states in run.states] == [1, 1]


def test_peers_that_come_in_the_middle_take_part_at_once(tmp_path: Path) -> None:
    """Also one that cannot reach its stage-mate at first: it waits, and does not start the run over without."""
    manifest = manifest_of(60, recovery={"snapshot_every": 5})
    latecomers = {"late.1": "", "late.0": "", "cut.1": "cut-off:1:4"}

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(6)
        for name, fault in latecomers.items():
            swarm.start(int(name[-1]), name, fault)
        for name in latecomers:
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), f"{name} serves")

    run = run_swarm(manifest, [1, 1], tmp_path, script=script)
    check_equals_one_process(run, manifest)
    assert [len(states) for states in run.states] == [2, 3]
    assert "downloaded kind=state stage=1" in run.logs()
    assert len(run.fired) == 1, "the fault has struck"
    assert "run_rewound" not in run.logs()


def test_a_lost_stage_is_taken_over_from_a_snapshot_of_another(tmp_path: Path) -> None:
    # One heir has to do where the run began with two.
    manifest = manifest_of(25, recovery={"snapshot_every": 5}, stages={"count": 2, "peers_to_start": 2})

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(13)
        swarm.kill("1.0")
        swarm.kill("1.1")
        swarm.start(1, "heir")

    run = run_swarm(manifest, [2, 2], tmp_path, script=script)
    assert [len(states) for states in run.states] == [2, 1]
    assert run.logs().count("run_rewound stage=0") == 2, "both peers of the other stage went back"
    check_equals_one_process(run, manifest)
    [jump] = [
        (before["round"], after["round"])
        for before, after in zip(run.lines, run.lines[1:], strict=False)
        if after["round"] != before["round"] + 1
    ]
    assert jump[1] > jump[0] + 1


def test_adapters_go_through_joins_departures_and_a_lost_stage(tmp_path: Path) -> None:
    """Their base is on no peer's machine at first: whoever comes gets its part from members."""
    written = write_base(LLAMA, tmp_path / "base")
    manifest = manifest_of(
        30,
        model={"config": LLAMA, "pretrained": str(written), "adapter": {"rank": 4, "alpha": 8}, "base": "nf4"},
        data={"foreign_tokenizer": True},
        stages={"count": 2, "peers_to_start": 2},
        recovery={"snapshot_every": 5},
    )
    resolved, base = with_base(ResolvedManifest.of(manifest), None)
    manifest = resolved.manifest

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(7)
        swarm.kill("1.0")
        swarm.kill("1.1")
        swarm.start(1, "heir")
        await swarm.until(lambda: "serving stage=1" in swarm.log("heir"), "the heir serves")
        await swarm.leave("0.1")
        swarm.start("auto", "late")
        await swarm.until(lambda: "serving stage=" in swarm.log("late"), "the newcomer serves")

    (folder := tmp_path / "run").mkdir()
    store = CheckpointStore(str(folder / "checkpoints"))
    options = {"script": script, "launch": without_data_dir, "base": base, "plan": CheckpointPlan(store, every=10)}
    run = run_swarm(manifest, [2, 2], folder, **options)
    check_equals_one_process(run, manifest)
    assert run.logs().count("base_downloaded") >= 6
    assert "run_rewound stage=0" in run.logs()
    assert find_checkpoint(str(folder / "checkpoints")).optimizer_step >= 20


@pytest.mark.usefixtures("every_second_round")
def test_another_strategy_of_rounds_goes_through_joins_departures_and_rewinds(tmp_path: Path) -> None:
    """What it keeps from one round for the next travels with the state; the rewind goes to an odd step."""
    manifest = manifest_of(60, recovery={"snapshot_every": 15}, stages={"count": 2, "peers_to_start": 2})

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(17)
        swarm.kill("1.0")
        swarm.kill("1.1")
        swarm.start(1, "heir")
        await swarm.until(lambda: "serving stage=" in swarm.log("heir"), "the heir serves")
        swarm.start(0, "late.0")
        await swarm.until(lambda: "serving stage=" in swarm.log("late.0"), "late.0 serves")
        await swarm.leave("0.1")

    run = run_swarm(manifest, [2, 2], tmp_path, script=script)
    assert [len(states) for states in run.states] == [2, 1]
    assert "downloaded kind=state stage=0" in run.logs()
    [target] = {int(match[1]) for match in re.finditer(r"run_rewound stage=0 .* to=(\d+)", run.logs())}
    assert target % 2, "where a gradient was kept"
    check_equals_one_process(run, manifest)


def test_a_peer_that_moves_again_and_again_loses_nothing_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = 20
    training = {"steps": 80, "global_batch_size": 512, "microbatch_size": 2, "validation_every": 0}
    manifest = manifest_of(0, training=training, recovery={"snapshot_every": 10})
    monkeypatch.setenv(FIRST_STAGE, "0")

    async def script(swarm: LiveSwarm) -> None:
        swarm.start("auto", "mover", f"moves:{moves}")
        await swarm.until(lambda: swarm.log("mover").count("serving stage=") > moves, "the last move")
        await swarm.reached(swarm.optimizer_step + 4)

    run = run_swarm(manifest, [1, 1], tmp_path, script=script)
    check_equals_one_process(run, manifest)
    assert "samples_given_up" not in run.logs()
    mover = (run.output / "logs" / "peer-mover.log").read_text()
    assert mover.count("prepared=True") == moves, "make before break"
    assert len(set(re.findall(r"peer_started peer=(\S+)", mover))) == 1
    [used] = [json.loads(fired.split(" ", 1)[1]) for fired in run.fired if fired.startswith("moves")]
    # What is left behind shows in the least of several moves: some come while microbatches or a snapshot are there. The
    # first moves still import what the other stage needs, and fill torch's caches.
    early, late = used[8:14], used[-6:]
    least = [{what: min(entry[what] for entry in span) for what in used[0]} for span in (early, late)]
    print(f"used after 8 moves and after {moves}: {least}")
    assert all(entry["replicas"] == 1 for entry in used)
    assert least[1]["resident_kb"] - least[0]["resident_kb"] < 10 * 1024
    for what in ("tasks", "threads", "files"):
        # Streams to other peers come and go; what each move left behind would be twelve more.
        assert least[1][what] <= least[0][what] + 3, what


def test_a_peer_of_another_stage_moves_when_nobody_else_comes(tmp_path: Path) -> None:
    # Far from the next snapshot: with a peer of stage 0 that is killed, the report of its last step may be lost.
    manifest = manifest_of(50, recovery={"snapshot_every": 20})

    async def script(swarm: LiveSwarm) -> None:
        for name in ("first", "second", "third"):
            swarm.start("auto", name)
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), f"{name} serves")
        await swarm.reached(22)
        alone = [name for name in ("first", "second", "third") if "stage_chosen" in swarm.log(name)]
        by_stage: dict[str, list[str]] = {}
        for name in alone:
            by_stage.setdefault(swarm.log(name).partition("serving stage=")[2][0], []).append(name)
        [victim] = min(by_stage.values(), key=len)
        swarm.kill(victim)

    run = run_swarm(manifest, [0, 0], tmp_path, script=script, min_replicas=None)
    assert "moving from=" in run.logs()
    assert "run_rewound" in run.logs()
    check_equals_one_process(run, manifest)
    assert [len(states) for states in run.states] == [1, 1]

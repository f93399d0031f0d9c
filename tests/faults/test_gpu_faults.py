"""Real swarms on a GPU that fails, or has less memory than it says."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from swarm import GPT2, LiveSwarm, SwarmStopped, forked_peer, run_swarm, tiny_manifest
from test_keystone import check_counts, relative_difference

from coordinator.run.baseline import Baseline
from coordinator.run.local_peers import Launch, Process
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.data.ranges import SampleId

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_peer_whose_gpu_fails_ends_and_others_go_on(tmp_path: Path) -> None:
    steps: list[int] = []

    async def script(live: LiveSwarm) -> None:
        await live.reached(1)
        live.expect_death("broken")
        live.start(0, "broken", "device-breaks:4")
        await live.until(lambda: live.is_dead("broken"), "the end of the peer whose GPU has failed", 150)
        steps.append(live.optimizer_step)
        await live.reached(live.optimizer_step + 5)
        log = live.log("broken")
        assert "SwarmError: the device has failed" in log, log[-3000:]
        raise SwarmStopped

    manifest = tiny_manifest(stages={"count": 1}, training={"steps": 100_000, "validation_every": 0})
    run_swarm(manifest, [1], tmp_path, script=script, device="cuda")
    assert steps


def test_a_cpu_and_a_gpu_train_one_stage(tmp_path: Path) -> None:
    """They round differently. When they compare weights, one takes over the other's, and its part of a round goes."""
    manifest = tiny_manifest(
        stages={"count": 1, "peers_to_start": 2},
        training={"steps": 7},
        averaging={"compare_weights_every": 3},
    )
    lost: dict[int, set[SampleId]] = defaultdict(set)

    async def script(live: LiveSwarm) -> None:
        await live.reached(manifest.training.steps)
        for name in ("0.0", "0.1"):
            for number in map(int, re.findall(r"samples_lost .*round=(\d+)", live.log(name))):
                lost[number].update(live.counted(name)[number])

    run = run_swarm(manifest, [2], tmp_path, script=script, launch=peer_of_either_kind, device="cuda")
    check_counts(run, manifest)
    assert lost, "they differ at one comparison at least: a few small steps in a row may round alike"
    assert lost.keys() <= {3, 6}, "weights are compared there alone"
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        names = iter(run.samples[round_number])
        microbatches = [(tokens, set(islice(names, len(tokens)))) for tokens in run.counted[round_number]]
        loss, _ = baseline.train_step([tokens for tokens, of in microbatches if of.isdisjoint(lost[round_number])])
        if not lost[round_number]:
            assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-4)
    assert len(run.states[0]) == 2
    for state in run.states[0]:
        for name, expected in baseline.state().items():
            assert relative_difference(state.tensors[name], expected) < 1e-3, name


def peer_of_either_kind(records: Path, fault: str) -> Launch:
    """A peer on the GPU, but for the second of a stage."""
    launch = forked_peer(records, fault)

    def start(options: Sequence[str], log_file: Path, threads: int) -> Process:
        name = options[options.index("--name") + 1]
        return launch(["cpu" if name.endswith(".1") and o == "cuda" else o for o in options], log_file, threads)

    return start


def limited_peer(limit: str, records: Path, fault: str) -> Launch:
    return forked_peer(records, fault or limit)


def test_a_gpu_with_less_memory_than_it_says_takes_fewer_microbatches(tmp_path: Path) -> None:
    """A microbatch keeps some 170 MB at the first of two stages, and sixteen would be admitted."""
    manifest = tiny_manifest(
        model={"config": GPT2 | {"n_positions": 512, "n_embd": 256, "n_layer": 4, "n_head": 4}},
        data={"sequence_length": 512},
        training={"steps": 4, "global_batch_size": 192, "microbatch_size": 8, "validation_every": 0},
    )
    launch = partial(limited_peer, "little-memory:800")
    run = run_swarm(manifest, [1, 1], tmp_path, launch=launch, device="cuda")
    check_counts(run, manifest)
    assert "out_of_memory microbatches=" in run.logs()

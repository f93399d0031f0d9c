"""Real swarms on a GPU that fails, or has less memory than it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from swarm import GPT2, LiveSwarm, SwarmStopped, forked_peer, run_swarm, tiny_manifest
from test_keystone import check_counts

from coordinator.run.local_peers import Launch

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
    logs = run.logs()
    print("\n".join(line for line in logs.splitlines() if "memory" in line))
    assert "out_of_memory microbatches=" in logs

"""One peer fails in the middle of its work. The swarm goes on, its survivors agree, and no sample counts twice."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from swarm import LiveSwarm, SwarmRun, run_swarm, tiny_manifest

from swarm_peer.config import RunManifest

STEPS = 16


def manifest_of(**averaging: float) -> RunManifest:
    return tiny_manifest(
        stages={"count": 2, "peers_to_start": 2},
        training={"steps": STEPS, "global_batch_size": 32, "microbatch_size": 2, "validation_every": 0},
        limits={"hop_timeout_s": 4, "announcement_s": 6},
        averaging={"round_timeout_s": 10, "chunk_timeout_s": 2} | averaging,
    )


def check_goes_on(run: SwarmRun, manifest: RunManifest, survivors: list[int], recorders_died: bool) -> None:
    """All steps are done with full batches, survivors hold the same, and nothing that counted counted twice.

    A peer of stage 0 that dies once its round is closed takes its part of the batch with it: others read it again.
    """
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, STEPS + 1))
    short = [line for line in run.lines if line["samples"] < manifest.training.global_batch_size]
    assert len(short) <= recorders_died
    seen = set()
    for line in run.lines:
        counted = run.counted[line["round"]]
        # What a stage-0 peer counted in its last moment, and told nobody, is not the run's.
        surplus = sum(map(len, counted)) - line["samples"]
        assert surplus == 0 or (recorders_died and 0 < surplus <= 16), (
            f"step {line['optimizer_step']}: {surplus} too many"
        )
        # By the names of their samples: the same text, such as a line of dashes, may well stand in the data twice.
        names = iter(run.samples[line["round"]])
        microbatches = {tuple(islice(names, len(tokens_BS))) for tokens_BS in counted}
        assert len(microbatches) == len(counted)
        assert seen.isdisjoint(microbatches), "a microbatch was counted twice"
        seen |= microbatches
    assert [len(states) for states in run.states] == survivors
    for states in run.states:
        for other in states[1:]:
            assert (other.round_number, other.history_hash) == (states[0].round_number, states[0].history_hash)
            assert all(torch.equal(other.tensors[name], tensor) for name, tensor in states[0].tensors.items())


# The test tube kills peers at all of these moments and at any other, stalls them and cuts them off; so all are slow.
KILLS = [
    pytest.param("kill-before-forward:20", marks=pytest.mark.slow),
    pytest.param("kill-after-forward:20", marks=pytest.mark.slow),
    pytest.param("kill-after-backward:20", marks=pytest.mark.slow),
    pytest.param("kill-before-reply:20", marks=pytest.mark.slow),
    pytest.param("kill-after-reply:20", marks=pytest.mark.slow),
    pytest.param("kill-before-averaging:4", marks=pytest.mark.slow),
    pytest.param("kill-in-averaging:4", marks=pytest.mark.slow),
    pytest.param("kill-after-averaging:4", marks=pytest.mark.slow),
]
MISBEHAVIOUR = [
    pytest.param("drop-reply:10", marks=pytest.mark.slow),
    pytest.param("garbage:10", marks=pytest.mark.slow),
    pytest.param("stall:20:8", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault", KILLS)
def test_a_peer_that_dies(fault: str, tmp_path: Path) -> None:
    """In the last stage; those kills that a stage-0 peer can suffer, there as well, at another time of the same run."""
    manifest = manifest_of()
    in_first_stage = "reply" not in fault

    async def script(swarm: LiveSwarm) -> None:
        swarm.start(1, "doomed.1", fault)
        swarm.expect_death("doomed.1")
        if in_first_stage:
            kind, _, number = fault.partition(":")
            swarm.start(0, "doomed.0", f"{kind}:{2 * int(number)}")
            swarm.expect_death("doomed.0")
        for name in ["doomed.1", "doomed.0"][: 1 + in_first_stage]:
            await swarm.until(lambda name=name: swarm.is_dead(name), f"the death of {name}")

    run = run_swarm(manifest, [1 if in_first_stage else 2, 1], tmp_path, script=script)
    assert len(run.fired) == 1 + in_first_stage, "the fault has struck"
    check_goes_on(run, manifest, [1 if in_first_stage else 2, 1], recorders_died=in_first_stage)


@pytest.mark.parametrize("fault", MISBEHAVIOUR)
def test_a_peer_that_misbehaves(fault: str, tmp_path: Path) -> None:
    manifest = manifest_of()

    async def script(swarm: LiveSwarm) -> None:
        swarm.start(1, "odd", fault)
        await swarm.reached(STEPS)

    run = run_swarm(manifest, [2, 1], tmp_path, script=script)
    assert len(run.fired) == 1, "the fault has struck"
    # Six, as a rule: what is on its way at once. A peer that is not avoided spoils two hundred.
    assert run.logs().count("microbatch_failed") < 40, "who fails is avoided"
    check_goes_on(run, manifest, [2, 2], recorders_died=False)


@pytest.mark.slow
def test_a_peer_whose_clock_is_wrong_is_gone_to_the_others(tmp_path: Path) -> None:
    manifest = manifest_of()
    manifest = manifest.model_copy(update={"stages": manifest.stages.model_copy(update={"peers_to_start": 1})})

    async def script(swarm: LiveSwarm) -> None:
        swarm.start(1, "odd", "clock:1:300")
        await swarm.reached(STEPS)

    run = run_swarm(manifest, [2, 1], tmp_path, script=script)
    assert len(run.fired) == 1, "the fault has struck"
    check_goes_on(run, manifest, [2, 1], recorders_died=False)


@pytest.mark.slow
def test_a_partition_between_two_stages_heals(tmp_path: Path) -> None:
    manifest = manifest_of()

    async def script(swarm: LiveSwarm) -> None:
        swarm.start(0, "cut.0", "partition:10:6")
        swarm.start(0, "cut.1", "partition:10:6")
        await swarm.reached(STEPS)

    run = run_swarm(manifest, [0, 2], tmp_path, script=script)
    assert len(run.fired) == 2, "the fault has struck"
    check_goes_on(run, manifest, [2, 2], recorders_died=False)

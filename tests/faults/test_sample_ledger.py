"""Stage-0 peers die and come: within a pass over a finite data set no counted sample repeats, and none is left out."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from swarm import LiveSwarm, run_swarm, tiny_manifest

from swarm_peer.policy.data.ranges import SampleId, SliceId
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.wire.ledger_codec import read_ledger

pytestmark = pytest.mark.slow


def text_file(folder: Path, num_lines: int) -> Path:
    rng = random.Random(0)
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(rng.choices("abcdefgh", k=rng.randrange(5, 60))) for _ in range(num_lines)))
    return path


def test_passes_over_a_small_data_set_while_stage_0_peers_die_and_come(tmp_path: Path) -> None:
    manifest = tiny_manifest(
        data={"dataset": "text", "files": [str(text_file(tmp_path, 300))], "validation_documents": 4},
        training={"steps": 90, "global_batch_size": 64, "microbatch_size": 2, "validation_every": 0},
        limits={"hop_timeout_s": 10, "announcement_s": 6},
        stages={"count": 2, "peers_to_start": 1},
    )
    killed = ["0.1", "0.0"]
    counted_by_killed: list[dict[int, list[SampleId]]] = []

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(8)
        swarm.kill(killed[0])
        swarm.start(0, "late.0")
        await swarm.until(lambda: "serving stage=" in swarm.log("late.0"), "late.0 serves")
        await swarm.reached(swarm.optimizer_step + 6)
        swarm.kill(killed[1])
        counted_by_killed.extend(map(swarm.counted, killed))

    run = run_swarm(manifest, [2, 1], tmp_path, script=script)
    reader = SliceReader(manifest=manifest)
    lengths = [sum(1 for _ in reader.open(SliceId(0, index))) for index in range(reader.num_slices())]
    [state] = run.states[0]
    ledger = read_ledger(state.ledger, len(lengths))
    assert ledger.current_pass >= 3, "the run has gone through the data several times"
    times = Counter(sample for samples in run.samples.values() for sample in samples)
    # What a peer had counted when it was killed, and told nobody, has not counted: others read it again.
    in_doubt = {sample for counted in counted_by_killed for sample in counted[max(counted)]}
    again = {sample for sample, count in times.items() if count > 1}
    assert again <= in_doubt, sorted(again - in_doubt)
    assert len(again) <= 2 * manifest.limits.max_in_flight * manifest.training.microbatch_size * len(killed)
    everything = {
        SampleId(pass_number, index, window)
        for pass_number in range(ledger.current_pass)
        for index, length in enumerate(lengths)
        for window in range(length)
    }
    assert {sample for sample in times if sample.pass_number < ledger.current_pass} == everything

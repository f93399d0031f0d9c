"""What do many peers on little cost? Cores, the wait between rounds, and the share of what the devices could do.

A tiny model, each peer a process of its own over real libp2p on loopback. Each peer's device takes a time of its own
for a sample and sleeps for what it did not compute of it. So nearly all of the CPU time is what it takes to be a swarm:
the DHT, libp2p's daemons, calls, barriers, averaging.

* cores: CPU time of all processes over the measured time, and of that the peers, their libp2p daemons, and the
  coordinator with its daemon.
* gap: from the last gradient of a round that comes back to stage 0, to the first one of the next round. Of that,
  `round_end_s` passes until a stage-0 peer is in the next round; the rest fills the pipeline.
* share: samples per second over what the devices of a stage can do together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from processes import adopt_orphans, descendants
from simulation_check import counted, step_ends_s
from swarm import GPT2, LiveSwarm, SwarmStopped, forked_peer, run_swarm, tiny_manifest

WARM_UP_STEPS = 2
MICROBATCH_SIZE = 2


def cpu_seconds_by_kind() -> dict[str, float]:
    """CPU time so far of libp2p's daemons, of the peers' Python processes, and of this one, the coordinator's."""
    seconds = {"daemons": 0.0, "peers": 0.0, "coordinator": time.process_time()}
    for pid, fields in descendants().items():
        try:
            kind = "daemons" if "p2pd" in Path(f"/proc/{pid}/comm").read_text() else "peers"
        except OSError:  # it has ended
            continue
        seconds[kind] += sum(int(tick) for tick in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    return seconds


class ManyPeersMeasurement:
    """The script: lets the swarm train for a number of rounds."""

    def __init__(self, *, peers: list[int], sample_s: float, rounds: int):
        self._peers = peers
        self._sample_s = sample_s
        self._rounds = rounds
        self.first_step = self.last_step = 0
        self.cores: dict[str, float] = {}

    async def __call__(self, swarm: LiveSwarm) -> None:
        # One by one, or imports take the cores for longer than a newcomer waits for an answer. And each stage gets its
        # first peer early: as long as a stage has none, the others look for one all the time.
        for number in range(max(self._peers)):
            for stage, count in enumerate(self._peers):
                if number < count:
                    await self._start(swarm, stage, f"{stage}.{number}")
        await swarm.until(lambda: swarm.optimizer_step >= WARM_UP_STEPS, "the warm-up", 600)
        begun, before = time.monotonic(), cpu_seconds_by_kind()
        self.first_step = swarm.optimizer_step
        self.last_step = self.first_step + self._rounds
        await swarm.until(lambda: swarm.optimizer_step >= self.last_step, "the measured rounds", 200.0 * self._rounds)
        seconds = time.monotonic() - begun
        self.cores = {kind: (cpu_s - before[kind]) / seconds for kind, cpu_s in cpu_seconds_by_kind().items()}
        raise SwarmStopped

    async def _start(self, swarm: LiveSwarm, stage: int, name: str) -> None:
        swarm.start(stage, name, f"slow:1:{self._sample_s}")
        await swarm.until(lambda: "peer_started" in swarm.log(name), f"the start of {name}")


def summarise(folder: Path, measurement: ManyPeersMeasurement, peers: list[int], sample_s: float) -> dict[str, Any]:
    """The figures of the measured rounds, from the peers' records and logs."""
    rounds = counted(folder)
    # Steps are counted by updates there and by their number here: `first` has just ended when it began.
    first, last = measurement.first_step - 1, measurement.last_step - 1
    last_gradient = {number: max(rounds[number])[0] for number in range(first, last + 1)}
    gaps = [min(rounds[number])[0] - last_gradient[number - 1] for number in range(first + 1, last + 1)]
    samples = sum(size for number in range(first + 1, last + 1) for _, size in rounds[number])
    samples_per_s = samples / (last_gradient[last] - last_gradient[first])
    return {
        "rounds": last - first,
        "round_s": round((last_gradient[last] - last_gradient[first]) / (last - first), 2),
        "cores": round(sum(measurement.cores.values()), 2),
        "cores_by_kind": {kind: round(cores, 2) for kind, cores in measurement.cores.items()},
        "gap_s": round(mean(gaps), 2),
        "round_end_s": [round(mean(step_ends_s(folder, last_gradient, stage)), 2) for stage in range(len(peers))],
        "samples_per_s": round(samples_per_s, 2),
        "share": round(samples_per_s * sample_s / min(peers), 3),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="8,8,8")
    parser.add_argument("--sample-s", type=float, default=0.5, help="a device's time for a sample")
    parser.add_argument("--global-batch", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    peers = [int(number) for number in options.peers.split(",")]
    # The last stage has the head, too, which costs nearly as much as a layer.
    layers = [4] * (len(peers) - 1) + [3]
    manifest = tiny_manifest(
        name="many",
        model={"config": GPT2 | {"n_layer": sum(layers)}},
        stages={"count": len(peers), "layers": layers, "peers_to_start": 1},
        training={
            "steps": 1_000_000,
            "global_batch_size": options.global_batch,
            "microbatch_size": MICROBATCH_SIZE,
            "validation_every": 0,
        },
        recovery={"snapshot_every": 1000},
        limits={"announcement_s": 30},  # as runs have it by default; tests have less
    )
    measurement = ManyPeersMeasurement(peers=peers, sample_s=options.sample_s, rounds=options.rounds)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="swarm-") as name:
        timeout_s = 600 + 200.0 * options.rounds
        run_swarm(manifest, [0] * len(peers), Path(name), timeout_s, script=measurement, launch=forked_peer)
        print(json.dumps(summarise(Path(name), measurement, peers, options.sample_s)))


if __name__ == "__main__":
    main()

"""How long does a swarm take to get over a peer that is killed, and to take in one that joins?

The demo model, 2 stages x 2 peers on this machine, each as a process of its own, over real libp2p on loopback.

* reroute: SIGKILL of a peer of the last stage. From then on, the longest time in which no microbatch came back to
  stage 0, beside the longest such time in the seconds before it.
* join: from the start of a new stage-0 peer's process to its state, to its serving, and to the first microbatch that it
  launched and got back.
* lost stage: SIGKILL of both peers of the last stage while two new ones start; until the next optimizer steps after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from swarm import LiveSwarm, SwarmStopped, new_peer, run_swarm

from coordinator.config_files import load_manifest
from coordinator.run.resolving import resolve_manifest

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
SETTINGS = (
    "training.steps=1000000",
    "training.validation_every=0",
    "stages.peers_to_start=2",
    "recovery.snapshot_every=10",
)
OBSERVED_S = 10.0


class RecoveryMeasurement:
    """The script: kills and starts peers; `figures` are in seconds."""

    def __init__(self, records: Path):
        self._records = records
        self.figures: dict[str, Any] = {}

    def counted(self) -> list[float]:
        """Times at which microbatches came back."""
        lines = [line for path in self._records.glob("*.jsonl") for line in path.read_text().splitlines()]
        times = []
        for line in lines:
            try:
                times.append(json.loads(line)["time"])
            except ValueError:  # it is being written
                continue
        return sorted(times)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time between two moments in which no microbatch came back."""
        times = [begin, *(known for known in self.counted() if begin <= known <= end), end]
        return max(after - before for before, after in pairwise(times))

    async def __call__(self, swarm: LiveSwarm) -> None:
        await swarm.reached(10)
        await anyio.sleep(OBSERVED_S)
        killed = time.time()
        swarm.kill("1.0")
        await anyio.sleep(OBSERVED_S)
        self.figures["longest_gap_before_kill"] = self.longest_gap(killed - OBSERVED_S, killed)
        self.figures["longest_gap_after_kill"] = self.longest_gap(killed, killed + OBSERVED_S)

        before = {path for path in self._records.glob("*.jsonl") if path.stat().st_size}
        started = time.time()
        swarm.start(0, "newcomer")
        await swarm.until(lambda: "downloaded kind=state" in swarm.log("newcomer"), "the newcomer's state", 90)
        self.figures["join_state"] = time.time() - started
        await swarm.until(lambda: "serving stage=" in swarm.log("newcomer"), "the newcomer's serving", 90)
        self.figures["join_serving"] = time.time() - started
        await swarm.until(
            lambda: {path for path in self._records.glob("*.jsonl") if path.stat().st_size} - before,
            "the newcomer's first microbatch",
            90,
        )
        self.figures["join_first_microbatch"] = time.time() - started

        lost_in_round = swarm.service.watch.round_number
        started = time.time()
        swarm.kill("1.1")
        swarm.start(1, "heir.0")
        swarm.start(1, "heir.1")
        await swarm.until(
            lambda: swarm.service.watch.round_number > lost_in_round + 2, "a step after the lost stage", 120
        )
        self.figures["lost_stage_next_step"] = time.time() - started
        raise SwarmStopped


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    manifest = resolve_manifest(load_manifest(CONFIG, SETTINGS)).manifest
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        measurement = RecoveryMeasurement(Path(folder) / "records")
        run_swarm(manifest, [2, 2], Path(folder), 400, script=measurement, launch=new_peer)
    figures = {name: round(seconds, 2) for name, seconds in measurement.figures.items()}
    if options.json:
        print(json.dumps(figures))
    else:
        for name, seconds in figures.items():
            print(f"{name:26s} {seconds:6.2f} s")


if __name__ == "__main__":
    main()

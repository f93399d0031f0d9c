"""Does the simulator say what a real swarm does? Throughput predicted against measured, of six peers on this machine.

A tiny model, each peer a process of its own over real libp2p on loopback. Six peers here share two cores, which is not
what is simulated; so each peer's device takes a time of its own for a sample (drawn from the seed, the slowest up to
four times as long as the fastest) and sleeps for what it did not compute of it. The machine must have a core to spare;
`cores_used` is the whole swarm's load.

The microbatch level of the simulator is told what the run announces: each peer's stage and speed, as the coordinator
saw them while the swarm ran; the manifest's global batch and limits; no latency. One more number, `step_end_s`, is
measured in the run: from the last gradient of a round that came back to stage 0 until a stage-0 peer is in the next
round, read off the peers' records and logs. It covers the barrier, the averaging, the vote and the optimizer's step.
The measured throughput is the number of samples that counted between the last gradients of two rounds, over that time.
The aim is a prediction within 15 %.

    python benchmarks/simulation_check.py --peers 2,2,2 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from processes import cpu_seconds
from swarm import GPT2, LiveSwarm, SwarmStopped, new_peer, run_swarm, tiny_manifest

from coordinator.simulator.flow import FlowSwarm
from coordinator.simulator.microbatches import MicrobatchSwarm
from coordinator.simulator.network import Network
from coordinator.simulator.options import ArrivalOptions, MicrobatchOptions, StageOptions
from coordinator.simulator.simulate import Scenario
from coordinator.simulator.traces import MachineChange, Trace
from coordinator.simulator.world import Machine
from swarm_peer.config import RunManifest
from swarm_peer.model.costs import forward_flops
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.view import PeerState, SwarmView

VIEW_LOOK_S = 1.0
# Optimizer steps before anything is measured: speeds and windows settle.
WARM_UP_STEPS = 4
SIMULATED_S = 1200.0
MICROBATCH_SIZE = 2
# Seconds of one microbatch, in a stage of average cost.
FASTEST_S, SLOWEST_S = 0.1, 0.4
STEP_DONE = re.compile(r"^(\S+ \S+) INFO step_done optimizer_step=(\d+) ", re.MULTILINE)


class ThroughputMeasurement:
    """The script: lets the swarm train for a while; `views` are the announcements of that time."""

    def __init__(self, *, seconds: float, peers: list[int], devices_s: list[float]):
        self._seconds = seconds
        self._peers = peers
        self._devices_s = devices_s
        self.first_step = self.last_step = 0
        self.cores_used = 0.0
        self.views: list[SwarmView] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        devices = iter(self._devices_s)
        for stage, count in enumerate(self._peers):
            for number in range(count):
                swarm.start(stage, f"{stage}.{number}", f"slow:1:{next(devices) / MICROBATCH_SIZE}")
        await swarm.reached(WARM_UP_STEPS)
        begun, cpu_s = time.monotonic(), cpu_seconds()
        self.first_step = swarm.optimizer_step
        while time.monotonic() < begun + self._seconds:
            await anyio.sleep(VIEW_LOOK_S)
            self.views.append(swarm.service.watch.view)
        self.last_step = swarm.optimizer_step
        self.cores_used = (cpu_seconds() - cpu_s) / (time.monotonic() - begun)
        raise SwarmStopped


def counted(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """By round, when gradients came back to stage 0 and of how many samples."""
    found: dict[int, list[tuple[float, int]]] = {}
    for path in (folder / "records").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["round"], []).append((entry["time"], len(entry["samples"])))
    return found


def step_ends_s(folder: Path, last_gradient: dict[int, float], stage: int) -> list[float]:
    """How long after a round's last gradient the peers of a stage were in the next one."""
    ends = []
    for path in (folder / "logs").glob(f"peer-{stage}.*.log"):
        for text, updates in STEP_DONE.findall(path.read_text()):
            if (moment := last_gradient.get(int(updates) - 1)) is not None:
                ends.append(datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").timestamp() - moment)
    return ends


def predict(views: list[SwarmView], manifest: RunManifest, step_end_s: float | None) -> float:
    """Samples per second by the microbatch level; without rounds if `step_end_s` is None."""
    costs = forward_flops(ResolvedManifest.of(manifest))
    speeds: dict[str, list[float]] = {}
    stages: dict[str, int] = {}
    for view in views:
        for peer in view.peers:
            if peer.state is PeerState.SERVING and peer.samples_per_s > 0:
                speeds.setdefault(peer.peer_id, []).append(peer.samples_per_s)
                stages[peer.peer_id] = peer.stage
    # One microbatch counts as one unit of work in the simulator.
    size = manifest.training.microbatch_size
    machines = {
        name: Machine(mean(values) * costs[stages[name]] / size, 1e12, latency_s=0.0) for name, values in speeds.items()
    }
    trace = Trace(tuple(MachineChange(0.0, True, name) for name in sorted(machines)), SIMULATED_S)
    scenario = Scenario(
        stages=StageOptions(num_stages=len(costs), stage_costs=tuple(costs)),
        arrivals=ArrivalOptions(num_peers=len(machines)),
    )
    flow = FlowSwarm(
        trace=trace,
        machine_of=machines.__getitem__,
        params=scenario.parameters(),
        rebalancer=None,
        pinned=stages,
    )
    limit = manifest.limits.max_in_flight
    options = MicrobatchOptions(
        window_limit=limit,
        capacity=limit,
        activation_bytes=0.0,
        global_batch=None if step_end_s is None else manifest.training.global_batch_size // size,
        averaging_s=step_end_s or 0.0,
    )
    swarm = MicrobatchSwarm(flow, Network(machines=flow.machines), options, seed=0)
    swarm.run(SIMULATED_S)
    late = [moment for moment in swarm.completed if moment > SIMULATED_S / 4]
    return len(late) * size / (SIMULATED_S * 3 / 4)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="2,2,2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peers = [int(number) for number in options.peers.split(",")]
    rng = random.Random(f"devices {options.seed}")
    devices_s = [rng.uniform(FASTEST_S, SLOWEST_S) for _ in range(sum(peers))]
    manifest = tiny_manifest(
        name="check",
        model={"config": GPT2 | {"n_layer": 3 * len(peers)}},
        stages={"count": len(peers), "layers": [3] * len(peers), "peers_to_start": min(peers)},
        # Checkpoints and validation are no part of what is predicted.
        training={
            "steps": 1_000_000,
            "global_batch_size": options.global_batch,
            "microbatch_size": MICROBATCH_SIZE,
            "validation_every": 0,
        },
        recovery={"snapshot_every": 1000},
        limits={"announcement_s": 30},  # as runs have it by default; tests have less
    )
    measurement = ThroughputMeasurement(seconds=options.seconds, peers=peers, devices_s=devices_s)
    with tempfile.TemporaryDirectory(prefix="swarm-") as name:
        folder = Path(name)
        run_swarm(manifest, [0] * len(peers), folder, 240 + options.seconds, script=measurement, launch=new_peer)
        steps = counted(folder)
        # Steps are counted by updates there and by their number here: `first` has just ended when it began.
        first, last = measurement.first_step - 1, measurement.last_step - 1
        last_gradient = {step: max(steps[step])[0] for step in range(first, last + 1)}
        ends = [step_ends_s(folder, last_gradient, stage) for stage in range(len(peers))]
    samples = sum(number for step in range(first + 1, last + 1) for _, number in steps[step])
    measured = samples / (last_gradient[last] - last_gradient[first])
    predicted = predict(measurement.views, manifest, mean(ends[0]))
    without_steps = predict(measurement.views, manifest, None)
    figures: dict[str, Any] = {
        "devices_s": [round(seconds, 3) for seconds in devices_s],
        "optimizer_steps": last - first,
        "samples_per_step": round(samples / (last - first), 1),
        "cores_used": round(measurement.cores_used, 2),
        "step_end_s": [round(mean(values), 3) for values in ends],
        "measured_samples_per_s": round(measured, 2),
        "predicted_samples_per_s": round(predicted, 2),
        "predicted_over_measured": round(predicted / measured, 3),
        "without_steps_over_measured": round(without_steps / measured, 3),
    }
    print(json.dumps(figures) if options.json else figures)


if __name__ == "__main__":
    main()

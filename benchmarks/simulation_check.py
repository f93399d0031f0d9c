"""Does the simulator say what a real swarm does? Throughput predicted against measured, of six peers on this machine.

The demo model, each peer a process of its own with one compute thread, over real libp2p on loopback. What peers
announce as their speed while the swarm runs goes into the microbatch level of the simulator, with the run's own window
rule and no latency; it then says how many samples a second come back to stage 0. Measured is what the coordinator
counts over the same time.

The processes share the machine's cores, and global steps end with an averaging round, which the simulator knows nothing
of. So the machine must have nothing else to do, and what is predicted is the most there can be. The aim is a prediction
within 15 %.

    python benchmarks/simulation_check.py --peers 3,3 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from swarm import LiveSwarm, SwarmStopped, run_swarm

from coordinator.service import resolve_manifest
from coordinator.simulator.flow import FlowSwarm
from coordinator.simulator.microbatches import MicrobatchOptions, MicrobatchSwarm
from coordinator.simulator.network import Network
from coordinator.simulator.rebalancers import NoRebalancing
from coordinator.simulator.simulate import Scenario
from coordinator.simulator.traces import Change, Trace
from coordinator.simulator.world import Machine
from swarm_peer.config import RunManifest, load_manifest
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.preparation import stage_costs

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
# Checkpoints and validation are no part of what is predicted.
SETTINGS = ("training.steps=1000000", "training.validation_every=0", "recovery.snapshot_every=1000")
LOOK_S = 1.0
SIMULATED_S = 120.0


class Measurement:
    """The script; afterwards, `samples_per_s` is what was measured, and `views` what was announced meanwhile."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.samples_per_s = 0.0
        self.views: list[SwarmView] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        await swarm.reached(10)
        begun, first = time.monotonic(), swarm.step
        while time.monotonic() < begun + self._seconds:
            await anyio.sleep(LOOK_S)
            self.views.append(swarm.service.watch.view)
        steps = swarm.step - first
        batch = swarm.service.manifest.training.global_batch_size
        self.samples_per_s = steps * batch / (time.monotonic() - begun)
        raise SwarmStopped


class _Fixed:
    """Machines by their names, each in the stage that it serves."""

    def __init__(self, machines: dict[str, Machine]):
        self._machines = machines

    def machine(self, name: str, seed: int) -> Machine:
        return self._machines[name]


def predict(views: list[SwarmView], manifest: RunManifest) -> float:
    """Samples per second by the microbatch level."""
    costs = stage_costs(manifest)
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
    trace = Trace(tuple(Change(0.0, True, name) for name in sorted(machines)), SIMULATED_S)
    scenario = Scenario(len(costs), num_peers=len(machines), stage_costs=tuple(costs))
    flow = FlowSwarm(trace, _Fixed(machines), 0, scenario.parameters(), NoRebalancing(), scenario.flow, pinned=stages)
    swarm = MicrobatchSwarm(flow, Network(flow.machine), MicrobatchOptions(activation_bytes=0.0), 0)
    swarm.run(SIMULATED_S)
    late = [moment for moment in swarm.completed if moment > SIMULATED_S / 4]
    return len(late) * size / (SIMULATED_S * 3 / 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="3,3")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peers = [int(number) for number in options.peers.split(",")]
    settings = (*SETTINGS, f"stages.peers_to_start={min(peers)}", f"stages.count={len(peers)}")
    manifest = resolve_manifest(load_manifest(CONFIG, settings))
    measurement = Measurement(options.seconds)
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        run_swarm(manifest, peers, Path(folder), 200 + options.seconds, script=measurement)
    predicted = predict(measurement.views, manifest)
    figures: dict[str, Any] = {
        "measured_samples_per_s": round(measurement.samples_per_s, 2),
        "predicted_samples_per_s": round(predicted, 2),
        "predicted_over_measured": round(predicted / measurement.samples_per_s, 3),
    }
    print(json.dumps(figures) if options.json else figures)


if __name__ == "__main__":
    main()

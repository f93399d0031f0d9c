"""How much does evaluating a live run slow its training? One swarm, with and without queries in turn.

A run of the demo model (or another) on this machine, 2 stages x 2 peers over real libp2p on loopback. Its time is cut
into phases: nothing is asked in the even ones; in the odd ones the coordinator evaluates held-out samples over and
over, as many at once as the peers take. Tokens per second are those of the steps that lie within a phase, as the run
itself takes their time; the ratio is the median over phases of one with queries to the mean of its two neighbours
without, since the load of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import anyio

from coordinator.checkpoints.fetching import open_transport
from coordinator.config_files import load_manifest
from coordinator.query.live_model import LiveModel
from coordinator.run.local_peers import LOOPBACK, LocalPeers
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.observer import observer_directory, open_node
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.slices import validation_samples
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.network.bootstrap import Entrance
from swarm_peer.runtime.network.dht import SwarmDHT

PEERS_BY_STAGE = [2, 2]
WARM_UP_STEPS = 5


async def measure(service: RunService, dht: SwarmDHT, output: Path, phases: int, phase_s: float) -> None:
    """Train through all phases, and print the speed of each and the ratios."""
    manifest = service.manifest
    held_out = validation_samples(manifest, manifest.training.validation_samples)
    marks, evaluated = [], []
    async with anyio.create_task_group() as tasks, open_transport(dht, PeerMetrics()) as transport:
        tasks.start_soon(service.run)
        while service.watch.optimizer_step < WARM_UP_STEPS:  # noqa: ASYNC110
            await anyio.sleep(0.2)
        directory = observer_directory(manifest, dht)
        model = LiveModel(
            service.resolved, identity=dht.identity, transport=transport, look=directory.refresh, rng=random.Random(0)
        )
        for phase in range(phases):
            marks.append(service.watch.optimizer_step)
            evaluated.append(0)
            until = time.monotonic() + phase_s
            if phase % 2 == 0:
                await anyio.sleep(phase_s)
                continue
            while time.monotonic() < until:
                result = await model.evaluate(held_out)
                evaluated[-1] += result.samples
        marks.append(service.watch.optimizer_step)
        await anyio.sleep(2)  # the last lines come a moment late
        tasks.cancel_scope.cancel()
    lines = {
        line["optimizer_step"]: line for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    }
    speeds = []
    for phase in range(phases):
        # The first step of a phase began in the one before, and the watch is a step late.
        inside = [lines[step] for step in range(marks[phase] + 3, marks[phase + 1] + 1) if step in lines]
        seconds, samples = sum(line["seconds"] for line in inside), sum(line["samples"] for line in inside)
        speeds.append(samples * manifest.data.sequence_length / seconds if seconds else 0.0)
        share = evaluated[phase] / (samples or 1)
        print(
            f"phase {phase}: {len(inside)} steps, {speeds[-1]:.0f} tokens/s, {share:.2f} samples evaluated per trained"
        )
    ratios = [speeds[p] / mean((speeds[p - 1], speeds[p + 1])) for p in range(1, phases - 1, 2)]
    print(f"ratio with queries to without: {median(ratios):.3f}  of {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


async def run(manifest: RunManifest, output: Path, phases: int, phase_s: float) -> None:
    """Start a swarm and measure it."""
    async with (
        open_node(output / "identity", Entrance(), (LOOPBACK,)) as dht,
        LocalPeers(dht.addresses, PEERS_BY_STAGE, output).running(),
    ):
        service = RunService(ResolvedManifest.of(manifest), dht, RunOptions(output=output))
        await measure(service, dht, output, phases, phase_s)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/demo.yaml"))
    parser.add_argument("--phases", type=int, default=7, help="odd: begins and ends without queries")
    parser.add_argument("--phase-seconds", type=float, default=25)
    parser.add_argument("--output", type=Path, help="folder for the logs")
    options = parser.parse_args()
    manifest = load_manifest(options.config, ("training.steps=1000000", "training.validation_every=0"))
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder)
        run_loop(run, manifest, output, options.phases, options.phase_seconds)


if __name__ == "__main__":
    main()

"""How much of a link does a peer take whose owner lends a part of it? By the kernel's counters, in a busy run.

    python benchmarks/capped_link.py [--upload-mbps 8] [--download-mbps 0] [--seconds 120]

Two stages with two peers each, on machines of a box of links at 100 Mb/s and 10 ms (links.py), with real packets of at
most 1500 bytes; one peer of the second stage has a cap. Its device could do several times what its link lets through.
Half-way a newcomer comes into each stage and downloads the state. At the end the owner pauses the peer for a while.
Prints a JSON object: megabits per second of the capped peer's network device, in and out, by half minute, as
/proc/net/dev counts packets with the headers of TCP and IP; and a round's seconds until the newcomers come, beside
those that the planner expects of the peers and their links. Linux, and root, only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import anyio.to_thread
from links import Box, LinkOptions, box, enter_namespace
from wan_prediction import predict, usual_peer
from wan_swarm import PROGRAM, troubles
from wan_workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from forks import fork
from swarm import LiveSwarm, SwarmStopped, run_swarm

from coordinator.run.local_peers import LOOPBACK, Launch
from swarm_peer.commands.pause import pause
from swarm_peer.runtime.context import BYTES_PER_BYTE

CAPPED = "capped.1"
METRICS_PORT = 9100
SAMPLE_S = 5.0
PAUSED_S = 60.0
LINKS = LinkOptions(latency_s=0.01, bytes_per_s=100e6 / 8)
WORKLOAD = Workload(
    num_stages=2,
    num_peers=2,
    microbatch_s=0.05,
    num_microbatches=128,
    width=256,
    sequence_length=512,
    wire="fp16",
    max_in_flight=16,
)


def device_bytes(namespace: str) -> tuple[int, int]:
    """Bytes that a namespace's network device has received and sent so far, by the kernel's counters."""
    name = Path(namespace).name
    shown = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], check=True, capture_output=True)
    [line] = [line for line in shown.stdout.decode().splitlines() if line.strip().startswith("wan:")]
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[8])


@dataclass(frozen=True, slots=True)
class Lent:
    """The part of its link that a peer has from its owner, in megabits per second; 0 for all of it."""

    upload_mbps: float
    download_mbps: float

    def options(self) -> list[str]:
        """The options of `swarm-peer` that say so."""
        caps = {"upload": self.upload_mbps, "download": self.download_mbps}
        return [word for name, mbps in caps.items() if mbps for word in (f"--max-{name}-mbps", str(mbps))]


class Measurement:
    """The script of the run."""

    def __init__(self, network: Box, lent: Lent, seconds: float, metrics: Path):
        self._network = network
        self._metrics = metrics
        self._lent = lent
        self._seconds = seconds
        self.figures: dict[str, Any] = {}
        self.machines: dict[str, Any] = {}

    def launch(self, records: Path, options_of_owner: str) -> Launch:
        """How peers are started: each on the next machine, with the options of its owner in a fault's place."""

        def start(options: Any, log_file: Path, threads: int) -> Any:
            machine = self._network.machines[1 + len(self.machines)]
            self.machines[log_file.stem.removeprefix("peer-")] = machine
            own = [f"/ip4/{machine.ip}/tcp/0" if option == LOOPBACK else option for option in options]
            metrics = ["--metrics-port", str(METRICS_PORT), "--metrics-host", machine.ip]
            arguments = [machine.namespace, str(WORKLOAD.microbatch_s), str(records)]
            return fork([sys.executable, str(PROGRAM), *arguments, *own, *metrics, *options_of_owner.split()], log_file)

        return start

    def _metric(self, name: str) -> float:
        url = f"http://{self.machines[CAPPED].ip}:{METRICS_PORT}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return float(answer.read().decode().partition(f"\n{name} ")[2].split()[0])

    def _now(self) -> tuple[float, ...]:
        return (
            time.monotonic(),
            *device_bytes(self.machines[CAPPED].namespace),
            self._metric("swarm_received_bytes_total"),
            self._metric("swarm_sent_bytes_total"),
        )

    async def __call__(self, swarm: LiveSwarm) -> None:
        names = {"0.0": "", "0.1": "", "1.0": "", CAPPED: " ".join(self._lent.options())}
        for name, options in names.items():
            swarm.start(int(name.rpartition(".")[2]) if name == CAPPED else int(name[0]), name, options)
        await swarm.until(lambda: swarm.optimizer_step >= 2, "the warm-up", 300)
        looks, first_step = [self._now()], swarm.optimizer_step
        last_alone = None  # the last step before the newcomers
        while looks[-1][0] - looks[0][0] < self._seconds:
            await anyio.sleep(SAMPLE_S)
            looks.append(self._now())
            if last_alone is None and looks[-1][0] - looks[0][0] > self._seconds / 2:
                last_alone = swarm.optimizer_step
                for stage in range(2):
                    swarm.start(stage, f"late.{stage}", "")
        last_step = swarm.optimizer_step
        found = troubles(swarm.log(name) for name in (*names, "late.0", "late.1"))
        await anyio.to_thread.run_sync(pause, CAPPED)
        paused = [self._now()]
        await anyio.sleep(PAUSED_S)
        paused.append(self._now())
        self.figures = summarise(looks) | {
            "paused_kbps_out": round(1000 * rate(paused[0], paused[1], 2)),
            "paused_kbps_in": round(1000 * rate(paused[0], paused[1], 1)),
            "steps": last_step - first_step,
            "round_s": round_s(self._metrics, first_step, last_alone or last_step),
            "predicted_round_s": round(predicted_round_s(self._lent), 2),
            "newcomer_serves": "serving stage=1" in swarm.log("late.1"),
            "troubles": dict(found),
        }
        for name in (*names, "late.0", "late.1"):
            swarm.kill(name)
        raise SwarmStopped


def round_s(metrics: Path, first_step: int, last_step: int) -> float | None:
    """The mean of the rounds' seconds after one optimizer step and up to another, as the coordinator has them."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [line["seconds"] for line in lines if first_step < line["optimizer_step"] <= last_step]
    return round(fmean(found), 2) if found else None


def predicted_round_s(lent: Lent) -> float:
    """Seconds of a round, as the planner has them."""
    usual = usual_peer(WORKLOAD, LINKS)
    capped = replace(
        usual,
        name="capped",
        upload_bytes_per_s=min(usual.upload_bytes_per_s, lent.upload_mbps * 1e6 / 8 / BYTES_PER_BYTE or inf),
        download_bytes_per_s=min(usual.download_bytes_per_s, lent.download_mbps * 1e6 / 8 / BYTES_PER_BYTE or inf),
        averaging_gain=1.0,
    )
    return predict(WORKLOAD, [usual, capped], [[2, 0], [1, 1]]).step_s


def rate(first: tuple[float, ...], last: tuple[float, ...], at: int) -> float:
    """Megabits per second of one of the counts, between two looks."""
    return (last[at] - first[at]) * 8 / 1e6 / (last[0] - first[0])


def summarise(looks: list[tuple[float, ...]]) -> dict[str, Any]:
    """Rates between looks, in Mb/s, and how many bytes the kernel counts for each of the calls'."""

    def mbps(first: tuple[float, ...], last: tuple[float, ...], at: int) -> float:
        return round(rate(first, last, at), 2)

    first, last = looks[0], looks[-1]
    per_minute = max(1, round(30 / SAMPLE_S))
    spans = list(pairwise(looks[::per_minute]))
    return {
        "seconds": round(last[0] - first[0], 1),
        "mbps_out": mbps(first, last, 2),
        "mbps_in": mbps(first, last, 1),
        "mbps_out_by_half_minute": [mbps(*span, 2) for span in spans],
        "mbps_in_by_half_minute": [mbps(*span, 1) for span in spans],
        "calls_mbps_out": mbps(first, last, 4),
        "calls_mbps_in": mbps(first, last, 3),
    }


def measure(lent: Lent, seconds: float, keep: Path | None) -> dict[str, Any]:
    """Run the swarm, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="swarm-cap-") as name, box(7, LINKS) as network:
        enter_namespace(network.machines[0].namespace)
        measurement = Measurement(network, lent, seconds, Path(name) / "metrics.jsonl")
        launch: Callable[[Path, str], Launch] = measurement.launch
        try:
            run_swarm(
                WORKLOAD.manifest(),
                [0, 0],
                Path(name),
                600 + 2 * seconds,
                script=measurement,
                launch=launch,
                listen_on=f"/ip4/{network.machines[0].ip}/tcp/0",
            )
        finally:
            if keep is not None:
                subprocess.run(["cp", "-r", f"{name}/logs", str(keep)], check=False)
        return measurement.figures


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upload-mbps", type=float, default=8.0, help="0 for no cap")
    parser.add_argument("--download-mbps", type=float, default=0.0, help="0 for no cap")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--keep", type=Path, help="folder that gets the peers' logs")
    given = parser.parse_args()
    print(json.dumps(measure(Lent(given.upload_mbps, given.download_mbps), given.seconds, given.keep)))


if __name__ == "__main__":
    main()

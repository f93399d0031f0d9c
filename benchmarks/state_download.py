"""At what share of its link's rate does a newcomer download its stage's state, while the swarm trains?

Two stages with two peers each and a newcomer to stage 0, as processes over real libp2p, in a network namespace of their
own whose loopback interface carries only so much (tc tbf): what all of them send each other shares that one link. The
state is that of 13 million parameters with AdamW's two moments, 12 bytes a parameter. Needs root, iproute2.

    python benchmarks/state_download.py --mbit 200

Printed are the rate of the transfer itself (the newcomer's log), and that from the choice of its stage on, with the
donors' copying and hashing of the state and the newcomer's looking for them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from swarm import GPT2, LiveSwarm, SwarmStopped, new_peer, run_swarm, tiny_manifest

MODEL = GPT2 | {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 64}
# So many that no averaging round falls into the newcomer's download.
SAMPLES_A_STEP = 400


class DownloadMeasurement:
    """The script: starts a newcomer; afterwards `log` is its log."""

    def __init__(self) -> None:
        self.log = ""

    async def __call__(self, swarm: LiveSwarm) -> None:
        await swarm.until(lambda: swarm.optimizer_step >= 1, "the first step", 400)
        swarm.start(0, "newcomer")
        await swarm.until(lambda: "serving stage=" in swarm.log("newcomer"), "the newcomer's serving", 200)
        self.log = swarm.log("newcomer")
        raise SwarmStopped


def at_of(log: str, event: str) -> datetime:
    """The time of an event's first line in a log."""
    [stamp] = re.findall(rf"^(\S+ \S+) \w+ {event}", log, re.MULTILINE)[:1]
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")


def measure(mbit: float) -> dict[str, float]:
    """Run the swarm and read the newcomer's log; runs in the namespace."""
    manifest = tiny_manifest(
        model={"config": MODEL},
        stages={"count": 2, "peers_to_start": 2},
        data={"sequence_length": 63},
        training={"steps": 1000, "global_batch_size": SAMPLES_A_STEP, "microbatch_size": 2, "validation_every": 0},
        optimizer={"name": "adamw", "learning_rate": 1e-4, "momentum": 0.0},
        limits={"hop_timeout_s": 60, "announcement_s": 30},
    )
    measurement = DownloadMeasurement()
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        run_swarm(manifest, [2, 2], Path(folder), 600, script=measurement, launch=new_peer)
    [(num_bytes, donors, seconds)] = re.findall(
        r"downloaded kind=state \S+ \S+ bytes=(\d+) donors=(\d+) seconds=(\S+)", measurement.log
    )
    whole_s = (at_of(measurement.log, "downloaded") - at_of(measurement.log, "stage_chosen")).total_seconds()
    link = mbit * 1e6 / 8
    return {
        "link_mbit": mbit,
        "bytes": int(num_bytes),
        "donors": int(donors),
        "transfer_s": float(seconds),
        "transfer_share_of_link": round(int(num_bytes) / float(seconds) / link, 3),
        "from_choice_s": whole_s,
        "from_choice_share_of_link": round(int(num_bytes) / whole_s / link, 3),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.mbit)))
        return
    name = f"swarm-{os.getpid()}"
    inside = ("ip", "netns", "exec", name)
    shape = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{options.mbit}mbit", "burst", "256kb")
    subprocess.run(("ip", "netns", "add", name), check=True)
    try:
        subprocess.run((*inside, "ip", "link", "set", "lo", "up"), check=True)
        subprocess.run((*inside, *shape, "latency", "100ms"), check=True)
        subprocess.run((*inside, sys.executable, *sys.argv, "--inside"), check=True)
    finally:
        subprocess.run(("ip", "netns", "del", name), check=True)


if __name__ == "__main__":
    main()

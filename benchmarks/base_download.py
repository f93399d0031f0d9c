"""At what share of its link's rate does a newcomer download its stage's frozen weights from members?

Two stages with two peers each train adapters; the base lies in the coordinator's folder alone. Each peer is a process
on a machine of its own in a box of links (links.py), with a cache of its own. Then a newcomer to stage 0 comes with an
empty cache, and once more with what it has kept. Needs root, iproute2.

    python benchmarks/base_download.py --mbit 50 --latency-ms 100 --jitter-ms 50

Printed are the rate of the download (the newcomer's log), and the seconds from a newcomer's choice of its stage until
it serves: with an empty cache, and with a full one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from links import Box, LinkOptions, box, enter_namespace
from state_download import at_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from forks import fork
from swarm import LLAMA, LiveSwarm, SwarmStopped, run_swarm, tiny_manifest
from wan_swarm import PROGRAM

from coordinator.run.local_peers import LOOPBACK, Launch
from coordinator.run.shared_base import with_base
from swarm_peer.model.resolved import ResolvedManifest

MODEL = LLAMA | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}
STARTED = ("0.0", "1.0", "0.1", "1.1")
MICROBATCH_S = 2.0


class NewcomersMeasurement:
    """The script: starts the peers, then a newcomer with an empty cache, then one with a full one.

    Attributes:
        logs: of the two newcomers
    """

    def __init__(self) -> None:
        self.logs: list[str] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        for name in STARTED:
            swarm.start(int(name[0]), name)
        await swarm.until(lambda: swarm.optimizer_step >= 1, "the first step", 900)
        for name in ("newcomer", "newcomer-2"):
            swarm.start(0, name)
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), "the newcomer's serving", 400)
            self.logs.append(swarm.log(name))
            swarm.kill(name)
        raise SwarmStopped


def launch_on(network: Box, caches: Path) -> Callable[[Path, str], Launch]:
    """How peers are started: each on the next machine, without the folder of the base, and with a cache of its own."""
    machines = iter(network.machines[1:])

    def launch(records: Path, _: str) -> Launch:
        def start(options: Sequence[str], log_file: Path, threads: int) -> Any:
            machine = next(machines)
            at = options.index("--data-dir")
            own = [f"/ip4/{machine.ip}/tcp/0" if option == LOOPBACK else option for option in options]
            cache = caches / log_file.stem.removesuffix("-2")
            arguments = [machine.namespace, str(MICROBATCH_S), str(records), *own[:at], *own[at + 2 :]]
            return fork([sys.executable, str(PROGRAM), *arguments, "--cache-dir", str(cache)], log_file)

        return start

    return launch


def measure(links: LinkOptions, folder: Path) -> dict[str, float]:
    """Run the swarm and read the newcomers' logs."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL))
    model.bfloat16().save_pretrained(folder / "base")
    manifest = tiny_manifest(
        model={"config": MODEL, "pretrained": str(folder / "base"), "adapter": {"rank": 4}, "base": "nf4"},
        stages={"count": 2, "peers_to_start": 2},
        data={"sequence_length": 63, "foreign_tokenizer": True},
        training={"steps": 10**6, "global_batch_size": 24, "microbatch_size": 2, "validation_every": 0},
        limits={"hop_timeout_s": 60, "announcement_s": 30},
    )
    resolved, base = with_base(ResolvedManifest.of(manifest), None)
    measurement = NewcomersMeasurement()
    (folder / "run").mkdir()
    with box(1 + len(STARTED) + 2, links, 0) as network:
        enter_namespace(network.machines[0].namespace)
        run_swarm(
            resolved.manifest,
            [0, 0],
            folder / "run",
            2400,
            script=measurement,
            launch=launch_on(network, folder / "caches"),
            listen_on=f"/ip4/{network.machines[0].ip}/tcp/0",
            base=base,
        )
    empty, full = measurement.logs
    Path("/tmp/nc2.log").write_text(full)
    # The small files come first, by themselves.
    sizes = re.findall(r"base_downloaded entries=\d+ bytes=(\d+) seconds=(\S+)", empty)
    num_bytes, seconds = max((int(size), float(took)) for size, took in sizes)
    assert "base_downloaded" not in full
    return {
        "link_mbit": links.bytes_per_s * 8 / 1e6,
        "bytes": num_bytes,
        "seconds": seconds,
        "share_of_link": round(num_bytes / seconds / links.bytes_per_s, 3),
        "serves_after_s": (at_of(empty, "serving") - at_of(empty, "stage_chosen")).total_seconds(),
        "serves_after_with_cache_s": (at_of(full, "serving") - at_of(full, "stage_chosen")).total_seconds(),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--latency-ms", type=float, default=100.0)
    parser.add_argument("--jitter-ms", type=float, default=50.0)
    options = parser.parse_args()
    links = LinkOptions(options.latency_ms / 1e3, options.jitter_ms / 1e3, options.mbit * 1e6 / 8)
    with tempfile.TemporaryDirectory(prefix="swarm-base-") as folder:
        print(json.dumps(measure(links, Path(folder))))


if __name__ == "__main__":
    main()

"""Does a run whose peers keep being killed learn as well? The same manifest with and without a kill every so often.

The demo model, 2 stages x 2 peers on this machine over real libp2p on loopback, and the single process as the baseline.
A killed peer's place is taken by a new one at once; the two stages take turns, and no stage loses both of its peers at
a time. The figures are validation losses after the last step, in nats per byte.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from swarm import LiveSwarm, new_peer, run_swarm

from coordinator.config_files import load_manifest
from coordinator.run.baseline import Baseline, train
from coordinator.run.resolving import resolve_manifest
from swarm_peer.model.resolved import ResolvedManifest

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"


class Killer:
    """The script: kills a peer every so often, and counts its `kills`."""

    def __init__(self, every_s: float):
        self._every_s = every_s
        self.kills = 0

    async def __call__(self, swarm: LiveSwarm) -> None:
        await swarm.reached(2)
        oldest = {0: ["0.0", "0.1"], 1: ["1.0", "1.1"]}
        while not swarm.service.model_folder.exists():
            with anyio.move_on_after(self._every_s):
                await swarm.until(swarm.service.model_folder.exists, "the end", 10 * self._every_s)
                return
            if swarm.optimizer_step > swarm.service.manifest.training.steps - 5:
                continue  # the last steps are for the newcomer
            stage = self.kills % 2
            heir = f"{stage}.heir-{self.kills}"
            swarm.kill(oldest[stage].pop(0))
            swarm.start(stage, heir)
            oldest[stage].append(heir)
            self.kills += 1
            await swarm.until(lambda heir=heir: "serving stage=" in swarm.log(heir), f"{heir} serves")


def last_validation(folder: Path) -> float:
    """The last validation loss of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float([line["validation_loss"] for line in lines if "validation_loss" in line][-1])


def measure(resolved: ResolvedManifest, every_s: float) -> dict[str, float]:
    """Number of kills, and the last validation loss of each way to train."""
    manifest = resolved.manifest
    with tempfile.TemporaryDirectory(prefix="swarm-") as name:
        folder = Path(name)
        for part in ("undisturbed", "killed"):
            (folder / part).mkdir()
        *_, last = train(Baseline(resolved))
        run_swarm(manifest, [2, 2], folder / "undisturbed", 900, launch=new_peer)
        killer = Killer(every_s)
        run_swarm(manifest, [2, 2], folder / "killed", 900, script=killer, launch=new_peer)
        return {
            "kills": killer.kills,
            "baseline": last.get("validation_loss", 0.0),
            **{part: last_validation(folder / part) for part in ("undisturbed", "killed")},
        }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every-s", type=float, default=30.0)
    options = parser.parse_args()
    for seed in options.seeds:
        settings = (f"seed={seed}", f"training.steps={options.steps}", "stages.peers_to_start=2")
        resolved = resolve_manifest(load_manifest(CONFIG, settings))
        print(json.dumps({"seed": seed, **measure(resolved, options.every_s)}), flush=True)


if __name__ == "__main__":
    main()

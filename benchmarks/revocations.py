"""How long does a peer that was revoked stay in a run?

A swarm of 2 stages x 2 peers by invitation, with a tiny model and devices that sleep, as processes over real libp2p on
loopback. Guests join it, a few at a time. Each is revoked by its id, at some moment of all lifetimes and looks, as
`swarm-coordinator revoke` does it in the run's folder. From that moment until

* `ended`: the guest's process has ended, since it was revoked;
* `unseen`: it is in the view of no peer that stays, and not in the coordinator's.

Both should be at most two lifetimes of an announcement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

import anyio
from forks import fork
from processes import adopt_orphans
from programs import RECORDING_PEER
from swarm import LiveSwarm, SwarmStopped, run_swarm, tiny_manifest

from coordinator.run.invites import InviteBook
from coordinator.run.local_peers import Launch
from coordinator.run.run_key import run_key_of
from swarm_peer.config import RunManifest
from swarm_peer.runtime.network.directory import Directory

PEERS_BY_STAGE = (2, 2)
GUESTS_AT_ONCE = 4
SAMPLE_S = 0.5
# Between two revocations, so that they fall into all parts of a look and of a lifetime.
LONGEST_PAUSE_S = 2.0
# A guest that stays longer is counted as one that stays.
PATIENCE_S = 60.0


def record_views(path: Path) -> None:
    """Write down who is in this process's view, at each change."""
    rebuild = Directory._rebuild
    last: list[str] = []

    def recording(self: Directory) -> None:
        nonlocal last
        rebuild(self)
        peers = sorted(peer.peer_id for peer in self.view.peers)
        if peers != last:
            last = peers
            with path.open("a") as file:
                file.write(json.dumps({"time": time.time(), "peers": peers}) + "\n")

    Directory._rebuild = recording  # type: ignore[method-assign]


def watching_peer(records: Path, fault: str) -> Launch:
    """A peer that writes down its view."""
    command = (sys.executable, __file__, "--peer", str(records), fault)
    return lambda options, log_file, threads: fork([*command, *options], log_file)


def last_seen(paths: Sequence[Path], peer_id: str) -> float:
    """The moment at which a peer left the last of some views; infinite if it is in one still."""
    moments = [0.0]
    for path in paths:
        is_in = False
        for line in map(json.loads, path.read_text().splitlines()):
            if is_in and peer_id not in line["peers"]:
                moments.append(line["time"])
            is_in = peer_id in line["peers"]
        if is_in:
            return float("inf")
    return max(moments)


class RevocationMeasurement:
    """The script: guests come and are revoked."""

    def __init__(self, folder: Path, num_guests: int, seed: int):
        self._folder = folder
        self._num_guests = num_guests
        self._rng = random.Random(seed)
        self.found: list[dict[str, float]] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        for stage, count in enumerate(PEERS_BY_STAGE):
            for number in range(count):
                swarm.start(stage, f"{stage}.{number}", f"slow:1:{SAMPLE_S}")
        await swarm.until(lambda: swarm.optimizer_step >= 1, "the first step", 300)
        views = [self._folder / "coordinator.views", *(self._folder / "records").glob("*.views")]
        for first in range(0, self._num_guests, GUESTS_AT_ONCE):
            await self._revoke_some(swarm, views, range(first, min(first + GUESTS_AT_ONCE, self._num_guests)))
        raise SwarmStopped

    async def _revoke_some(self, swarm: LiveSwarm, views: Sequence[Path], numbers: Sequence[int]) -> None:
        names = [f"guest-{number}" for number in numbers]
        for name in names:
            swarm.expect_death(name)
            swarm.start(1, name, f"slow:1:{SAMPLE_S}")
        for name in names:
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), f"the service of {name}", 120)
        ids = {name: re.findall(r"peer_started peer=(\S+)", swarm.log(name))[0] for name in names}
        for peer_id in ids.values():
            await swarm.until(lambda who=peer_id: all(who in path.read_text() for path in views), "all views", 60)
        book, run_key = InviteBook(self._folder), run_key_of(self._folder)
        begun: dict[str, float] = {}
        ended: dict[str, float] = {}

        def look() -> bool:
            for name in begun.keys() - ended.keys():
                if swarm.is_dead(name):
                    ended[name] = time.time()
            return len(ended) == len(names)

        for name in names:
            begun[name] = time.time()
            book.revoke(run_key, ids[name])
            with anyio.move_on_after(self._rng.uniform(0, LONGEST_PAUSE_S)):
                await swarm.until(look, "never mind", PATIENCE_S)
        await swarm.until(look, f"the end of {names}", PATIENCE_S)
        await swarm.until(
            lambda: max(last_seen(views, peer_id) for peer_id in ids.values()) < time.time(), "empty views", PATIENCE_S
        )
        for name in names:
            assert "was revoked by the run's operator" in swarm.log(name).splitlines()[-1], swarm.log(name)[-2000:]
            unseen = last_seen(views, ids[name]) - begun[name]
            self.found.append({"ended": ended[name] - begun[name], "unseen": unseen})


def summarise(found: Sequence[dict[str, float]], lifetime_s: float) -> dict[str, Any]:
    """Median, 90th percentile and maximum in seconds, and how many took longer than two lifetimes."""
    summary: dict[str, Any] = {"revocations": len(found), "lifetime_s": lifetime_s}
    for kind in ("ended", "unseen"):
        values = sorted(each[kind] for each in found)
        shown = [median(values), values[int(0.9 * (len(values) - 1))], values[-1]]
        summary[f"{kind}_s"] = [round(value, 2) for value in shown]
        summary[f"{kind}_late"] = sum(value > 2 * lifetime_s for value in values)
    return summary


def make_manifest(lifetime_s: float) -> RunManifest:
    """A run by invitation whose devices sleep."""
    training = {"steps": 1_000_000, "global_batch_size": 16, "microbatch_size": 2, "validation_every": 0}
    manifest: RunManifest = tiny_manifest(
        name="revocations",
        training=training,
        recovery={"snapshot_every": 1000},
        limits={"announcement_s": lifetime_s, "hop_timeout_s": 10},
    )
    return manifest


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--peer"]:
        record_views(Path(sys.argv[2]) / f"{os.getpid()}.views")
        sys.argv = [str(RECORDING_PEER), *sys.argv[2:]]
        runpy.run_path(str(RECORDING_PEER), run_name="__main__")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guests", type=int, default=20, help="that are revoked, one after the other")
    parser.add_argument("--lifetime", type=float, default=4.0, help="of an announcement, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the pauses between revocations")
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="swarm-") as name:
        folder = Path(name)
        record_views(folder / "coordinator.views")
        measurement = RevocationMeasurement(folder, options.guests, options.seed)
        manifest = make_manifest(options.lifetime)
        timeout_s = 400 + 60.0 * options.guests
        run_swarm(manifest, [0] * len(PEERS_BY_STAGE), folder, timeout_s, script=measurement, launch=watching_peer)
        print(json.dumps(summarise(measurement.found, options.lifetime)))
        print(json.dumps([{kind: round(value, 2) for kind, value in each.items()} for each in measurement.found]))


if __name__ == "__main__":
    main()

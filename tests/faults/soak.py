"""A long run on which something happens every few seconds: `make soak`, or `python soak.py --minutes 30 --seed 1`.

Peers are killed, stalled, told to leave and started at random (seeded), at least one of each stage left alone, except
that now and then a stage loses all its peers and has to be taken over. It ends with an account, and fails unless all
snapshots of a stage's peers are bitwise the same, no microbatch counted twice, memory stayed flat and no process is
left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from swarm import LiveSwarm, SwarmStopped, new_peer, run_swarm, tiny_manifest

from coordinator.checkpoints.fetching import open_transport
from swarm_peer.errors import CallError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.messages import StateIndexCall

NUM_STAGES = 2
PEERS_PER_STAGE = 2
MOST_PEERS_PER_STAGE = 3
STALL_S = 6.0
# Once in so many events a whole stage is killed.
STAGE_LOSS_EVERY = 12
SNAPSHOT_EVERY = 20
# Memory at the end may exceed that after the first quarter by so much.
MEMORY_GROWTH = 1.15
# Younger peers still load their libraries, and their daemons have not taken yet what they take with traffic.
WARM_UP_S = 60.0


class Soak:
    """The script that acts on a live run, and what it saw."""

    def __init__(self, seconds: float, event_every_s: float, rng: random.Random):
        self._seconds = seconds
        self._event_every_s = event_every_s
        self._rng = rng
        self._names: list[list[str]] = [[f"{k}.{n}" for n in range(PEERS_PER_STAGE)] for k in range(NUM_STAGES)]
        self._number = 0
        self.events: Counter[str] = Counter()
        self.memory: list[tuple[float, dict[str, float]]] = []  # (seconds since the beginning, bytes by program)
        self._first_seen: dict[int, float] = {}
        self.pids: set[int] = set()
        self.snapshots_compared = 0

    async def __call__(self, swarm: LiveSwarm) -> None:
        begin = time.monotonic()
        await swarm.reached(3)
        while (elapsed := time.monotonic() - begin) < self._seconds:
            before = swarm.service.watch.round_number
            await self._act(swarm)
            await anyio.sleep(self._event_every_s)
            self._measure_memory(swarm, elapsed)
            print(
                f"{elapsed:6.0f} s  step {swarm.optimizer_step:6d} (+{swarm.service.watch.round_number - before})  "
                f"peers {[len(names) for names in self._names]}  {dict(self.events)}",
                flush=True,
            )
        for name in (name for names in self._names for name in names):  # who came last may be starting yet
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), f"{name} serves", 90.0)
        await self._compare_snapshots(swarm)
        raise SwarmStopped

    async def _act(self, swarm: LiveSwarm) -> None:
        stage = self._rng.randrange(NUM_STAGES)
        names = self._names[stage]
        if sum(self.events.values()) % STAGE_LOSS_EVERY == STAGE_LOSS_EVERY - 1:
            self.events["stage lost"] += 1
            for name in names:
                swarm.kill(name)
            names.clear()
            for _ in range(PEERS_PER_STAGE):
                self._join(swarm, stage)
            return None
        spare = len(names) > 1
        choices = ["join"] * (len(names) < MOST_PEERS_PER_STAGE) + ["kill", "leave", "stall"] * spare
        event = self._rng.choice(choices or ["join"])
        self.events[event] += 1
        if event == "join":
            return self._join(swarm, stage)
        name = self._rng.choice(names)
        if event == "stall":
            swarm.signal(name, signal.SIGSTOP)
            await anyio.sleep(STALL_S)
            return swarm.signal(name, signal.SIGCONT)
        names.remove(name)
        if event == "kill":
            return swarm.kill(name)
        # Before it serves, a signal just ends it.
        await swarm.until(lambda: "serving stage=" in swarm.log(name), f"{name} serves", 90.0)
        await swarm.leave(name, 40.0)
        return None

    def _join(self, swarm: LiveSwarm, stage: int) -> None:
        self._number += 1
        name = f"{stage}.late{self._number}"
        self._names[stage].append(name)
        swarm.start(stage, name)

    def _measure_memory(self, swarm: LiveSwarm, elapsed: float) -> None:
        """Of the peers that have warmed up: there is always somebody young, and more so at the beginning."""
        families = {pid: list(family(pid)) for pid in swarm.pids()}
        self.pids.update(pid for members in families.values() for pid in members)
        old = [pid for pid in families if elapsed - self._first_seen.setdefault(pid, elapsed) >= WARM_UP_S]
        by_program: Counter[str] = Counter()
        for pid in (member for root in old for member in families[root]):
            by_program[program_of(pid)] += memory_of(pid)
        if old:
            self.memory.append((elapsed, {program: total / len(old) for program, total in by_program.items()}))

    def memory_between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """The median of each program's memory per peer, in MB."""
        samples = [by_program for elapsed, by_program in self.memory if begin_s <= elapsed < end_s]
        programs = sorted({program for by_program in samples for program in by_program})
        return {p: statistics.median(sample.get(p, 0) for sample in samples) / 2**20 for p in programs}

    async def _compare_snapshots(self, swarm: LiveSwarm) -> None:
        """All peers that keep the newest snapshot of their stage keep the same."""
        manifest = swarm.service.manifest
        metrics = PeerMetrics()
        async with open_transport(swarm.dht, metrics) as transport:
            for stage in range(NUM_STAGES):
                found: dict[int, list[str]] = {}
                view = await swarm.service._directory.refresh([stage])
                newest = swarm.optimizer_step // SNAPSHOT_EVERY * SNAPSHOT_EVERY
                for optimizer_step in range(max(newest - SNAPSHOT_EVERY, SNAPSHOT_EVERY), newest + 1, SNAPSHOT_EVERY):
                    call = StateIndexCall(manifest=manifest.hash, of_stage=stage, optimizer_step=optimizer_step)
                    for peer in view.serving(stage):
                        with suppress(CallError):
                            limit = max_state_bytes(ResolvedManifest.of(manifest), stage)
                            state = await fetch_state(
                                transport, [peer.peer_id], call, max_bytes=limit, rng=random.Random()
                            )
                            found.setdefault(optimizer_step, []).append(digest(state.tensors))
                for optimizer_step, digests in found.items():
                    assert len(set(digests)) == 1, f"stage {stage}: snapshots of {optimizer_step} updates differ"
                    self.snapshots_compared += len(digests)


def digest(tensors) -> str:  # type: ignore[no-untyped-def]
    from swarm_peer.runtime.state.roots import digest_of

    return digest_of([tensors[name] for name in sorted(tensors)])


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                yield from family(int(child))


def memory_of(pid: int) -> int:
    """Bytes that a process has for itself; what it shares with the others, the libraries, is not counted."""
    with suppress(OSError):
        fields = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
        return 1024 * sum(int(field[1]) for field in fields if field[0].startswith("Private_"))
    return 0


def program_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended"


def wait_for_end(pids: set[int], timeout_s: float = 15.0) -> list[int]:
    """Those of the processes that stay: daemons take seconds to notice that their owner is gone."""
    end = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def counts(folder: Path) -> dict[str, Any]:
    """Of the line of updates that survived: steps without a line, and microbatches that were counted twice."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["round"] for line in lines}
    counted: Counter[tuple[int, ...]] = Counter()
    for path in (folder / "records").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a peer that was killed
                entry = json.loads(text)
                if entry["round"] in steps:
                    counted[tuple(token for sample in entry["tokens"] for token in sample)] += 1
    told = [line["optimizer_step"] for line in lines]
    assert told == sorted(set(told)), "a line a step, in order"
    return {
        "steps": told[-1],
        "steps_without_a_line": sorted(set(range(1, told[-1])) - set(told)),
        "samples": sum(line["samples"] for line in lines),
        "microbatches_counted": len(counted),
        "microbatches_counted_twice": sum(times > 1 for times in counted.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between events")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    manifest = tiny_manifest(
        training={"steps": 10**6, "global_batch_size": 64, "microbatch_size": 4, "validation_every": 0},
        stages={"count": NUM_STAGES, "peers_to_start": PEERS_PER_STAGE},
        limits={"hop_timeout_s": 5, "announcement_s": 8},
        averaging={"round_timeout_s": 15, "chunk_timeout_s": 3},
        recovery={"snapshot_every": SNAPSHOT_EVERY},
    )
    soak = Soak(60 * options.minutes, options.every, random.Random(options.seed))
    folder = Path(tempfile.mkdtemp(prefix="swarm-soak-"))
    print(f"logs and records, removed if all holds: {folder}", flush=True)
    run_swarm(
        manifest, [PEERS_PER_STAGE] * NUM_STAGES, folder, 60 * options.minutes + 300, script=soak, launch=new_peer
    )
    logs = "\n".join(path.read_text(errors="replace") for path in (folder / "logs").glob("*.log"))
    orphans = wait_for_end(soak.pids)
    quarter = 60 * options.minutes / 4
    early, late = soak.memory_between(quarter, 2 * quarter), soak.memory_between(3 * quarter, 4 * quarter)
    figures = {
        "minutes": options.minutes,
        "seed": options.seed,
        **counts(folder),
        "events": dict(soak.events),
        "rewinds": logs.count("run_rewound"),
        "handovers": logs.count("work_handed_over"),
        "samples_lost_on_leaving": logs.count("samples_lost"),
        "snapshots_compared": soak.snapshots_compared,
        "memory_mb_per_peer": {
            name: {"all": round(sum(memory.values()))} | {program: round(mb) for program, mb in memory.items()}
            for name, memory in (("second_quarter", early), ("last_quarter", late))
        },
        "orphans": len(orphans),
    }
    print(json.dumps(figures, indent=2))
    assert not figures["microbatches_counted_twice"]
    assert not figures["steps_without_a_line"]
    assert not orphans, f"processes are left: {orphans}"
    assert sum(late.values()) < MEMORY_GROWTH * sum(early.values()), "memory grew"
    assert soak.snapshots_compared >= 2 * NUM_STAGES
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

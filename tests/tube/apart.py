"""What two peers without a way cost a run in which nothing else fails: entries of each stage in ten virtual seconds.

`PYTHONHASHSEED=0 python tests/tube/apart.py leaders 78` cuts the leaders of two stages apart, `mates 78` the
first two of one stage. The results are in benchmarks/ways-2026-11-30.md.
"""

from __future__ import annotations

import random
import sys

import anyio
import faults
from outcome import run_schedule
from schedule import Event, Schedule
from tube import Tube

BEGIN_S, EVERY_S = 60.0, 10.0
NUM_PEERS = 6


def main() -> None:
    """Run one schedule."""
    pair, seed, seconds = sys.argv[1], sys.argv[2], float((*sys.argv, "120")[3])

    async def apart(tube: Tube, rng: random.Random) -> None:
        hosts = {host.peer_id: host for host in tube.peers()}
        agreement = next(host.agreement for host in tube.peers() if host.agreement is not None)
        rosters = [[hosts[seat.peer] for seat in agreement.core.epoch.roster(k)] for k in range(tube.num_stages)]
        a, b = (rosters[0][0], rosters[1][0]) if pair == "leaders" else rosters[1][:2]
        print(f"rosters {rosters}, apart: {a} and {b}")
        tube.struck("apart", a, b)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tube.block, [(a, b), (b, a)], seconds)
            tasks.start_soon(count, tube)

    async def count(tube: Tube) -> None:
        passed_s, before = 0.0, [len(tube._committed[k]) for k in range(tube.num_stages)]
        while passed_s < seconds:
            await anyio.sleep(EVERY_S)
            passed_s += EVERY_S
            now = [len(tube._committed[k]) for k in range(tube.num_stages)]
            print(f"{passed_s:.0f} s: entries {[n - m for n, m in zip(now, before, strict=True)]}", flush=True)
            before = now

    faults.KINDS["apart"] = apart, 0.0
    events = (Event(0, BEGIN_S, "apart"),)
    schedule = Schedule(
        seed, stages=2, peers=NUM_PEERS, standbys=0, first_s=BEGIN_S, faults_s=seconds + EVERY_S, events=events
    )
    outcome = run_schedule(schedule)
    print("\n".join(line[:160] for line in outcome.log if "gives_way" in line))
    print(f"violations: {outcome.violations}")


if __name__ == "__main__":
    main()

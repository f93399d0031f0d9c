"""The command line of the tube."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App
from schedule import Schedule
from tqdm import tqdm
from tube import Outcome, run_schedule

app = App(name="tube", help="Swarms in virtual time, with faults that follow from seeds.")


@app.default
def run_one(seed: str, *, only: str | None = None, log: Path | None = None, shrink: bool = False) -> None:
    """Run one seed.

    Args:
        only: numbers of the events to keep, with commas between them
        log: file for the trace and the log
        shrink: if it fails, look for the fewest events that still fail
    """
    numbers = None if only is None else [int(number) for number in only.split(",") if number]
    outcome = run_schedule(Schedule.draw(seed, numbers))
    if log is not None:
        log.write_text("\n".join(outcome.log))
    print(
        f"seed {seed}: {outcome.steps} steps, {sum(outcome.strikes.values())} faults, {outcome.moves} moves, "
        f"{outcome.rewinds} rewinds, {outcome.checked} updates checked ({outcome.forks} not), "
        f"{outcome.virtual_s:.0f} virtual s, {outcome.cpu_s:.1f} CPU s, {outcome.events} events, {outcome.trace_hash}"
    )
    for violation in outcome.violations:
        print(violation)
    if outcome.violations:
        print(f"again: {command_of(seed, numbers)}")
        if shrink:
            kept = shrunk(seed, numbers)
            print(f"smaller: {command_of(seed, kept)}")
            for event in Schedule.draw(seed, kept).events:
                print(f"  {event.at_s:.1f} s {event.kind}")
        sys.exit(1)


def command_of(seed: str, numbers: Sequence[int] | None) -> str:
    """The command that repeats a schedule."""
    kept = "" if numbers is None else f" --only {','.join(map(str, numbers))}"
    return f"python tests/tube {seed}{kept} --log tube.log"


def shrunk(seed: str, numbers: Sequence[int] | None) -> list[int]:
    """Drop events as long as the schedule still fails: halves first, then one at a time."""
    kept = [event.number for event in Schedule.draw(seed, numbers).events]
    size = max(len(kept) // 2, 1)
    while size:
        begin = 0
        while begin < len(kept):
            tried = kept[:begin] + kept[begin + size :]
            if run_schedule(Schedule.draw(seed, tried)).violations:
                kept = tried
            else:
                begin += size
        size //= 2
    return kept


@app.command
def seeds(*, first: int = 0, count: int = 30, processes: int = 2) -> None:
    """Run many seeds, and sum up."""
    failed: list[Outcome] = []
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=50) as pool:
        for outcome in tqdm(
            pool.imap_unordered(_run_seed, map(str, range(first, first + count))), total=count, disable=None
        ):
            outcomes.append(outcome)
            if outcome.violations:
                failed.append(outcome)
                print(f"{command_of(outcome.seed, None)}: {outcome.violations[0].splitlines()[0][:300]}", flush=True)
    strikes: Counter[str] = Counter()
    for outcome in outcomes:
        strikes.update(outcome.strikes)
    print(f"{len(outcomes)} seeds, {len(failed)} with violations")
    print(f"{strikes.total()} faults that struck: {', '.join(f'{name} {n}' for name, n in strikes.most_common())}")
    for name in ("steps", "moves", "rewinds", "checked", "forks", "doubled", "lost", "virtual_s", "cpu_s"):
        values = [getattr(outcome, name) for outcome in outcomes]
        print(f"{name}: {sum(values):.0f}, median {statistics.median(values):.1f}")
    print(f"median faults that struck: {statistics.median(sum(o.strikes.values()) for o in outcomes):.0f}")
    sys.exit(bool(failed))


def _run_seed(seed: str) -> Outcome:
    outcome = run_schedule(Schedule.draw(seed))
    outcome.log = []
    return outcome

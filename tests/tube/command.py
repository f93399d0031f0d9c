"""The command line of the tube: one seed, many seeds, and the smallest schedule that still fails."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

from cyclopts import App
from faults import KINDS
from liars import HONEST, LIES
from outcome import Outcome, run_schedule
from planted import planted
from schedule import LIES_S, Schedule, numbered
from tqdm import tqdm
from tube import WATCHES

ROOT = Path(__file__).parents[2]
SOURCES = ("swarm_peer", "coordinator", "tests/tube")
# A process keeps what its schedules have left in caches.
SEEDS_PER_PROCESS = 50
# Of the first hundred seeds, cheap ones in which all kinds of faults strike, with swarms of all sizes.
QUICK = (0, 1, 2, 3, 9, 14, 16, 28, 32, 35, 40, 48, 55, 58)
COUNTED = ("steps", "passes", "moves", "rewinds", "checked", "validated", "doubled", "lost")

# With one member that lies, the others keep so much of the pace that they have in the same seed with that one honest.
LEAST_PACE = 0.8

app = App(name="tube", help="Swarms in virtual time, with faults that follow from seeds: see tests/tube/README.md.")
app.command(planted)


@app.default
def run_one(seed: str, *, only: str | None = None, log: Path | None = None, shrink: bool = False) -> None:
    """Run one seed.

    Args:
        seed: a number, with a mode before it and a kind of fault after it that is drawn far more often: periodic-7+lag
        only: numbers of the events to keep, with commas between them; the log has each as it begins
        log: file for the trace and the log
        shrink: if it fails, look for the fewest events that still fail
    """
    _check(seed)
    numbers = None if only is None else _numbers(seed, only)
    outcome = run_schedule(Schedule.draw(seed, numbers))
    if log is not None:
        log.write_text("\n".join(outcome.log))
    print(
        f"seed {seed}: {outcome.steps} steps, {sum(outcome.strikes.values())} faults, {outcome.moves} moves, "
        f"{outcome.rewinds} rewinds, {outcome.checked} updates checked, "
        f"{'the run is lost, ' if outcome.lost else ''}"
        f"{outcome.virtual_s:.0f} virtual s, {outcome.cpu_s:.1f} CPU s, {outcome.events} events, {outcome.trace_hash}"
        f"{'' if outcome.violations else ': no violation'}"
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


def _check(seed: str) -> None:
    """Check that a seed is a number, with a mode of the tube before it if with anything."""
    mode, dash, number = seed.partition("+")[0].rpartition("-")
    if dash and mode not in WATCHES:
        raise SystemExit(f"{seed}: there is no mode {mode}, but {', '.join(WATCHES)}, and none for the synchronous one")
    if not number.isdigit():
        raise SystemExit(f"{seed}: {number!r} is no number: expected a seed such as 97, periodic-7 or periodic-7+lag")


def _numbers(seed: str, only: str) -> list[int]:
    """The numbers of the events to keep."""
    texts, known = only.split(","), {str(event.number) for event in Schedule.draw(seed).events}
    if unknown := [text for text in texts if text not in known]:
        raise SystemExit(f"--only {only}: {seed} has events 0 to {len(known) - 1}, and no {', '.join(unknown)}")
    return [int(text) for text in texts]


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
def seeds(
    *,
    first: int = 0,
    count: int = 30,
    mode: str = "",
    often: str = "",
    each_mode: int = 0,
    quick: bool = False,
    processes: int = 2,
    results: Path | None = None,
) -> None:
    """Run many seeds, and sum up. The first one in each batch is run twice: it must go the same way, event by event.

    Args:
        mode: of averaging, if it is not synchronous: periodic, delayed, eager (delayed with eager updates); or short
            (synchronous, with a text that the run passes over more than once), or finish, finish-delayed or
            finish-periodic (a run that comes to its last step), or lost, lost-delayed or lost-periodic (stages lose all
            their peers time and again), or adapters (on a frozen base), or feedback (averages of few bits, whose losses
            are brought to later ones)
        often: a kind of fault that is drawn far more often than else
        each_mode: so many seeds more in each of these modes
        quick: in place of `first` and `count`, some ten seeds in which all kinds of faults strike
        results: file of what came of each seed, one line each; seeds that are in it are not run again, unless the code
            has changed
    """
    for seed in numbered([first], mode, often):
        _check(seed)
    kept = _read(results)
    # The longest first, so that no process is left alone with one at the end.
    wanted = [seed for other in reversed(WATCHES) for seed in numbered(range(first, first + each_mode), other, often)]
    chosen = numbered(QUICK if quick else range(first, first + count), mode, often)
    wanted += chosen
    outcomes = [kept[seed] for seed in wanted if seed in kept]
    todo = [seed for seed in wanted if seed not in kept]
    for outcome in tqdm(_run(todo, processes), total=len(todo), disable=None):
        outcomes.append(outcome)
        _keep(outcome, results)
        if outcome.violations:
            print(f"{command_of(outcome.seed, None)}: {outcome.violations[0].splitlines()[0][:300]}", flush=True)
    has_violations = _sum_up(outcomes)
    struck = {name for outcome in outcomes if outcome.seed in chosen for name in outcome.strikes}
    idle = KINDS.keys() - struck if quick else set()
    if idle:
        print(f"QUICK needs other seeds: these faults never struck: {', '.join(sorted(idle))}")
    sys.exit(has_violations or bool(idle))


@app.command
def liars(
    *kinds: str,
    count: int = 2,
    first: int = 0,
    processes: int = 1,
    logs: Path | None = None,
    results: Path | None = None,
) -> None:
    """Have one member lie, in each of these ways, and compare with the same seeds in which it is honest.

    Pace is rounds of stage 0 for as long as faults strike. `later` is the same without what a leader may cost that does
    nothing: if the liar leads at any time, the worst minute and a half and some, until it is none any more. Work is
    what the others have brought to all entries.

    Args:
        kinds: of lies; all by default
        logs: folder for the log of each schedule that fails
        results: file of what came of each schedule, one line each; see `seeds`
    """
    if unknown := [kind for kind in kinds if kind not in LIES]:
        raise SystemExit(f"no lie is called {', '.join(unknown)}; there are {', '.join(LIES)}")
    known = _read(results)
    numbers = numbered(range(first, first + count), "liar")
    wanted = [f"{number}+{kind}" for number in numbers for kind in (HONEST, *(kinds or LIES))]
    todo = [seed for seed in wanted if seed not in known]
    fork = multiprocessing.get_context("fork")
    for begin in range(0, len(todo), size := SEEDS_PER_PROCESS * processes):
        with ProcessPoolExecutor(processes, fork, initializer=_end_with_parent) as pool:
            for outcome in pool.map(partial(_run_logged, logs=logs), todo[begin : begin + size]):
                known[outcome.seed] = outcome
                _keep(outcome, results)
                print(_of_one(outcome, known[f"{Schedule.draw(outcome.seed).chance}+{HONEST}"]), flush=True)
    has_failed = False
    print("\n| lie | seeds | told | pace (least) | later | work | rewinds | violated |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in kinds or LIES:
        pairs = [(known[f"{number}+{kind}"], known[f"{number}+{HONEST}"]) for number in numbers]
        found = [outcome for outcome, _ in pairs]
        paces, later, works = ([call(*pair) for pair in pairs] for call in (_pace, _later_pace, _work))
        violated = sum(bool(outcome.violations) for outcome in found)
        has_failed |= min(later) < LEAST_PACE or bool(violated)
        told, rewinds = sum(outcome.told for outcome in found), sum(outcome.rewinds for outcome in found)
        columns = [f"{statistics.median(each):.2f} ({min(each):.2f})" for each in (paces, later, works)]
        print(f"| `{kind}` | {len(found)} | {told} | {' | '.join(columns)} | {rewinds} | {violated} |")
    sys.exit(has_failed)


def _run_logged(seed: str, logs: Path | None) -> Outcome:
    outcome = run_schedule(Schedule.draw(seed))
    if logs is not None and outcome.violations:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{seed}.log").write_text("\n".join(outcome.log))
    outcome.log = []
    return outcome


def _of_one(outcome: Outcome, honest: Outcome) -> str:
    """A line about a schedule in which one member lies."""
    pace, later, work = _pace(outcome, honest), _later_pace(outcome, honest), _work(outcome, honest)
    is_wrong = outcome.violations or later < LEAST_PACE
    lines = [violation.splitlines()[0][:300] for violation in outcome.violations[:2]]
    about = f"told {outcome.told}, pace {pace:.2f}, later {later:.2f}, work {work:.2f}, {outcome.cpu_s:.0f} CPU s"
    return "\n  ".join([f"{outcome.seed}: {about}{' WRONG' if is_wrong else ''}", *lines])


def _inside(outcome: Outcome) -> list[tuple[float, int, dict[str, int]]]:
    """The entries for as long as faults strike."""
    begun_s = Schedule.draw(outcome.seed).first_s
    return [entry for entry in outcome.entries if begun_s <= entry[0] < begun_s + LIES_S]


def _pace(outcome: Outcome, honest: Outcome, since_s: float = 0.0, until_s: float = 0.0) -> float:
    """The part of the pace that is left beside a liar, but for what is between these times."""
    now, before = (
        sum(stage == 0 and not since_s <= at_s < until_s for at_s, stage, _ in _inside(each))
        for each in (outcome, honest)
    )
    return now / max(before, 1)


def _later_pace(outcome: Outcome, honest: Outcome) -> float:
    """The same, but for the time that the liar may cost once, where it costs most."""
    since = [Schedule.draw(outcome.seed).first_s, *(at_s for at_s, stage, _ in _inside(outcome) if stage == 0)]
    return max(_pace(outcome, honest, since_s, since_s + outcome.price_s) for since_s in since)


def _work(outcome: Outcome, honest: Outcome) -> float:
    """The part that is left of what the others have brought."""
    liars = {name.partition("'")[0] for name in outcome.liars}
    now, before = (
        sum(num for _, _, held in _inside(each) for name, num in held.items() if name not in liars)
        for each in (outcome, honest)
    )
    return now / max(before, 1)


def _run(todo: Sequence[str], processes: int) -> Iterator[Outcome]:
    fork = multiprocessing.get_context("fork")  # imports take long, and this process runs no schedules of its own
    spawn = multiprocessing.get_context("spawn")  # what is run again has other addresses in memory
    size = SEEDS_PER_PROCESS * processes
    for batch in (todo[begin : begin + size] for begin in range(0, len(todo), size)):
        # New processes for each batch: the executor's own max_tasks_per_child may hang in Python 3.11.
        with (
            ProcessPoolExecutor(processes, fork, initializer=_end_with_parent) as pool,
            ProcessPoolExecutor(1, spawn, initializer=_end_with_parent) as other_pool,
        ):
            futures = [pool.submit(run_seed, seed) for seed in batch]
            again = other_pool.submit(run_seed, batch[0])
            for future in as_completed(futures):
                outcome = future.result()
                if outcome.seed == batch[0]:
                    hashes = {outcome.trace_hash, again.result().trace_hash}
                    if len(hashes) > 1:
                        outcome.violations.append(f"two runs differ: {' '.join(sorted(hashes))}")
                yield outcome


def _end_with_parent() -> None:
    """Have this worker end when its parent is killed: by itself it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_seed(seed: str) -> Outcome:
    """Run a seed; what comes of it is without its log."""
    outcome = run_schedule(Schedule.draw(seed))
    outcome.log = []
    return outcome


def _code_hash() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _keep(outcome: Outcome, results: Path | None) -> None:
    """Add what came of a seed to the file."""
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def _read(results: Path | None) -> dict[str, Outcome]:
    """What is known of seeds from the file; a file of other code is begun anew."""
    if results is None:
        return {}
    code = _code_hash()
    lines = results.read_text().splitlines() if results.exists() else []
    if not lines or json.loads(lines[0]) != {"code": code}:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps({"code": code}) + "\n")
        return {}
    names = {field.name for field in fields(Outcome)}
    known = [json.loads(line) for line in lines[1:]]
    return {entry["seed"]: Outcome(**{name: entry[name] for name in names}) for entry in known}


def _sum_up(outcomes: Sequence[Outcome]) -> bool:
    """Print a summary. Returns whether there was any violation."""
    failed = [outcome for outcome in outcomes if outcome.violations]
    strikes = sum((Counter(outcome.strikes) for outcome in outcomes), Counter[str]())
    print(f"{len(outcomes)} seeds, {len(failed)} with violations")
    for outcome in failed:
        print(f"  {command_of(outcome.seed, None)}")
    print(f"{strikes.total()} faults that struck: {', '.join(f'{name} {n}' for name, n in strikes.most_common())}")
    print(f"faults in a schedule: median {statistics.median(sum(o.strikes.values()) for o in outcomes):.0f}")
    for name in (*COUNTED, "virtual_s", "cpu_s"):
        values = [getattr(outcome, name) for outcome in outcomes]
        print(f"{name}: {sum(values):.0f}, median {statistics.median(values):.1f}")
    print(f"virtual hours: {sum(outcome.virtual_s for outcome in outcomes) / 3600:.1f}")
    return bool(failed)

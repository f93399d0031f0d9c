"""When machines come and go: read from a file, or drawn.

Two formats are read; the first row that is no heading tells which one it is.

* `time_ms,add|remove,machine`: which machines came and went. A machine that comes back is a new peer.
* `date, time, live count`: how many were alive. The machines that leave are drawn.

Rows of counts come in no order of time, and may contradict each other: a reading is often written down again for some
minutes after it, while newer ones come in. Two rules make one history of them:

1. If time mostly falls from row to row, the file is newest first and is read from its end.
2. A row is dropped if one further down in the file, with another count, is of the same time or up to REPEATED_FOR_S
   older: it repeats a reading that was outdated by then. The other rows are sorted by time.

So a file in order is taken as it is, and one in no order at all still gives the true count, some changes up to
REPEATED_FOR_S late.
"""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from swarm_peer.errors import UserError

REPEATED_FOR_S = 180.0


@dataclass(frozen=True, slots=True)
class MachineChange:
    """A machine comes (`joins`) or goes, without notice."""

    time_s: float
    joins: bool
    machine: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in order of time; the first is at 0, and those of one time are in one order for good."""

    changes: tuple[MachineChange, ...]
    duration_s: float


def read_trace(path: Path, rng: random.Random) -> Trace:
    """Read a file of either format.

    Args:
        rng: draws the machines that leave, where a file has counts only

    Raises:
        UserError: it cannot be read, or holds neither
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--trace: cannot read {path}: {reason}; check the path") from error
    changes: list[tuple[float, bool, str]] = []
    counts: list[tuple[float, int]] = []
    for number, line in enumerate(lines, 1):
        fields = [field.strip() for field in line.split(",")]
        if not any(fields) or line.lstrip().startswith("#"):
            continue
        try:
            if len(fields) >= 3 and fields[1] in ("add", "remove") and not counts:
                changes.append((float(fields[0]) / 1000, fields[1] == "add", fields[2]))
            elif len(fields) >= 3 and not changes:
                moment = datetime.fromisoformat(f"{fields[0]} {fields[1]}")
                counts.append(((moment - datetime(1970, 1, 1)).total_seconds(), int(fields[2])))
                if counts[-1][1] < 0:
                    raise ValueError("a negative count")
            else:
                raise ValueError("a row of another kind")
        except ValueError as error:
            if not changes and not counts:
                continue  # a heading
            raise UserError(
                f"--trace {path}, line {number}: {line.strip()!r} ({error}); expected "
                f"{'time_ms,add|remove,machine' if changes else 'date, time, live count'}"
            ) from error
    if not changes and not counts:
        raise UserError(f"--trace {path}: neither rows of time_ms,add|remove,machine nor of date, time, live count")
    return _from_names(changes) if changes else from_counts(consistent_counts(counts), rng)


def _from_names(rows: list[tuple[float, bool, str]]) -> Trace:
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    alive: set[str] = set()
    changes = []
    for time_s, joins, machine in rows:
        # Of a machine that is there already, or that was never seen to come, there is nothing to replay.
        if joins != (machine in alive):
            (alive.add if joins else alive.discard)(machine)
            changes.append(MachineChange(time_s - start, joins, machine))
    return Trace(tuple(changes), rows[-1][0] - start)


def consistent_counts(rows: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """One history of readings that come in any order and may contradict each other; see the module's text."""
    back = sum(after[0] < before[0] for before, after in itertools.pairwise(rows))
    forth = sum(after[0] > before[0] for before, after in itertools.pairwise(rows))
    if back > forth:
        rows = rows[::-1]
    later: list[tuple[float, int]] = []  # rows further down, by time
    kept = []
    for time_s, count in reversed(rows):
        first = bisect.bisect_left(later, (time_s - REPEATED_FOR_S, 0))
        behind = bisect.bisect_right(later, (time_s, 1 << 62))
        if all(other == count for _, other in later[first:behind]):
            kept.append((time_s, count))
        bisect.insort(later, (time_s, count))
    return sorted(kept)


def from_counts(history: list[tuple[float, int]], rng: random.Random) -> Trace:
    """A trace with these numbers of machines; those that leave are drawn from those alive, all alike."""
    start = history[0][0]
    alive: list[str] = []
    changes = []
    num_seen = 0
    for time_s, count in history:
        while len(alive) < count:
            alive.append(f"machine{num_seen:06d}")
            num_seen += 1
            changes.append(MachineChange(time_s - start, True, alive[-1]))
        while len(alive) > count:
            changes.append(MachineChange(time_s - start, False, alive.pop(rng.randrange(len(alive)))))
    return Trace(tuple(changes), history[-1][0] - start)


def draw_trace(num_peers: int, duration_s: float, mean_lifetime_s: float, rng: random.Random) -> Trace:
    """`num_peers` at the start and on the average: lifetimes and times between arrivals are exponential."""
    changes = []
    arrivals = [0.0] * num_peers
    time_s = 0.0
    while num_peers and (time_s := time_s + rng.expovariate(num_peers / mean_lifetime_s)) < duration_s:
        arrivals.append(time_s)
    for number, time_s in enumerate(arrivals):
        changes.append(MachineChange(time_s, True, f"machine{number:06d}"))
        end = time_s + rng.expovariate(1 / mean_lifetime_s)
        if end < duration_s:
            changes.append(MachineChange(end, False, f"machine{number:06d}"))
    return Trace(tuple(sorted(changes, key=lambda change: change.time_s)), duration_s)

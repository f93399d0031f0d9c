"""The simulated world of one schedule: its hosts, network, trace, and what has gone wrong with the invariants."""

from __future__ import annotations

import hashlib
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from loop import HOST, TubeLoop
from network import TubeNetwork

if TYPE_CHECKING:
    from hosts import Host


# Errors that are logged since faults have struck: full disks, devices without memory, stages that have lost what they
# had. Others are errors of the system.
EXPECTED_ERRORS = {
    "checkpoint_failed",
    "checkpoint_missed",
    "model_not_saved",
    "run_not_ended",
    "samples_lost",
    "snapshot_lost",
    "snapshot_not_stored",
    "state_lost",
    "update_skipped",
}


class World:
    """Everything of one schedule.

    Attributes:
        strikes: faults that struck, by kind
        violations: broken invariants, in words
        liars: hosts that lie: what goes wrong on them is their own affair
    """

    def __init__(self, loop: TubeLoop, seed: str):
        self.loop = loop
        self.seed = seed
        self.hosts: list[Host] = []
        self.strikes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.liars: list[Host] = []
        self.log: list[str] = []
        self.network = TubeNetwork(self)
        self.on_violation: Callable[[], None] = lambda: None
        self._digest = hashlib.sha256()
        self.num_events = 0

    def rng(self, purpose: str) -> random.Random:
        """Chance for one purpose: a fault more or less does not change what others draw."""
        return random.Random(f"{self.seed} {purpose}")

    def note(self, *event: object) -> None:
        """Add an event to the trace."""
        self.num_events += 1
        line = f"{self.loop.time():.6f} {' '.join(map(str, event))}"
        self._digest.update(line.encode() + b"\n")
        self.log.append(line)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()[:16]

    def struck(self, kind: str) -> None:
        self.strikes[kind] += 1
        self.note("fault", kind)

    def violation(self, what: str, error: BaseException | None = None) -> None:
        """Note that an invariant is broken."""
        if HOST.get() in self.liars:
            self.note("liar", what.splitlines()[0])
            return
        if error is not None:
            what += "\n" + "".join(traceback.format_exception(error)[-30:])
        self.note("violation", what.splitlines()[0])
        self.violations.append(what)
        self.on_violation()

    def alive(self) -> list[Host]:
        return [host for host in self.hosts if host.is_alive]

    def host(self, name: str) -> Host:
        """The newest life of that name."""
        return next(host for host in reversed(self.hosts) if host.name == name or host.name.startswith(f"{name}'"))


class LogToWorld(logging.Handler):
    """Keeps the program's log lines among the trace's, with time and host. They are not part of the trace's hash."""

    def __init__(self, world: World):
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        host = HOST.get()
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self._world.log.append(f"{self._world.loop.time():.6f} {host} {record.levelname} {record.name[12:]} {text}")
        if record.levelno >= logging.ERROR and text.partition(" ")[0] not in EXPECTED_ERRORS:
            self._world.violation(f"{host} logs an error: {record.name} {text}")

"""Processes of a benchmark: run them, read their CPU time, leave none behind. Linux only: /proc and a subreaper."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# The checkout whose code is measured, wherever the benchmark is called.
ROOT = Path(__file__).resolve().parent.parent
PROCESS_POLL_S = 0.02
# Peers that are told to go finish their microbatches in flight; `local` gives each 25 s.
LEAVE_TIMEOUT_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have processes below this one whose parents end become its children: none is missed or left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants() -> dict[int, list[str]]:
    """All processes below this one, with their /proc fields. Those whose parents ended are adopted by this process."""
    fields = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                fields[int(entry.name)] = _stat_fields(int(entry.name))
    found: dict[int, list[str]] = {}
    parents = {os.getpid()}
    while parents:
        children = {pid: values for pid, values in fields.items() if int(values[1]) in parents}
        found |= children
        parents = set(children)
    return found


def cpu_seconds() -> float:
    """User and system time of all processes below this one and of their children that have ended."""
    ticks = sum(int(tick) for values in descendants().values() for tick in values[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(
    commands: Sequence[Sequence[str]], log_file: Path, environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands with their output in a file; on leaving, none of their processes is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log_file.open("wb") as log:
            for command in commands:
                # A session of its own: Ctrl+C goes to this process alone, which then stops the others in order.
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
                )
                processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        kill_descendants()


def kill_descendants() -> None:
    """Kill all processes below this one, by their ids, and reap them."""
    while left := descendants():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # a grandchild: its parent's or, later, ours to reap
                os.waitpid(pid, os.WNOHANG)
        time.sleep(PROCESS_POLL_S)

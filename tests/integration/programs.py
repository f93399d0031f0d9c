"""Our programs in processes of their own, for tests that use them as people do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forks import ForkedProcess, fork

PEER = (sys.executable, "-m", "swarm_peer.cli", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--threads", "1")
COORDINATOR = (sys.executable, "-m", "coordinator.cli")
RECORDING_PEER = Path(__file__).with_name("recording_peer.py")
# These show a page, which no test but that of the page needs.
WITH_PAGE = [(*COORDINATOR, "serve"), (*COORDINATOR, "local")]


class Processes:
    """Programs of ours with their logs; ended by their ids."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.running: list[ForkedProcess] = []

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> ForkedProcess:
        if command[:4] in WITH_PAGE and "--dashboard" not in command:
            command = (*command, "--no-dashboard")
        process = fork(command, self.path(name), environment)
        self.running.append(process)
        return process

    def start_slow_peer(self, name: str, sample_s: float, *options: str) -> ForkedProcess:
        """A peer whose device sleeps for a time of its own: its run is as fast on any machine."""
        recording = (sys.executable, str(RECORDING_PEER), str(self._folder), f"slow:1:{sample_s}", *PEER[3:])
        return self.start(name, *recording, *options)

    def run(self, name: str, *command: str, timeout_s: float = 400) -> int:
        """To its end; returns its exit code."""
        return self.start(name, *command).wait(timeout_s)

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.path(name).read_text(errors="replace")

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 400) -> None:
    """Until another process has done something: there is nothing to wait on but what it writes."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Ids of all descendants of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


def cmdline_of(pid: int) -> bytes:
    """The program that a process runs and its arguments, with a null byte after each."""
    return (Path("/proc") / str(pid) / "cmdline").read_bytes()


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

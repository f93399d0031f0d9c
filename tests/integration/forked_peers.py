"""Peers forked from a process that has its imports behind it; each would spend six seconds of a core on them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

from coordinator.local import Launch
from swarm_peer.runtime.processes import die_with_parent

PROGRAM = Path(__file__).with_name("recording_peer.py")
# All that peers import but hivemind: its locks are made when it is imported, and a peer that is killed while it holds
# one would have the others wait for ever.
IMPORTS = [
    "swarm_peer.model.pretrained",
    "swarm_peer.model.training",
    "swarm_peer.runtime.compute",
    "swarm_peer.runtime.data",
    "swarm_peer.runtime.preemption",
    "swarm_peer.runtime.state_transfer",
    "cyclopts",
    "pytest",  # of which each child imports the main module
]

_forks = multiprocessing.get_context("forkserver")


def forked_peer(records: Path, fault: str = "") -> Launch:
    """Launches recording_peer.py; see there for the arguments."""
    return partial(_launch, [str(records), fault])


class _ForkedProcess:
    """As much of subprocess.Popen as LocalPeers uses."""

    def __init__(self, function: Callable[..., None], *args: object):
        self._process = _forks.Process(target=function, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(PROGRAM), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _launch(arguments: Sequence[str], options: Sequence[str], log_file: Path, threads: int) -> _ForkedProcess:
    log_file.touch()  # tests read it at once
    _forks.set_forkserver_preload(IMPORTS)
    # Read when torch is imported, which is when the first peer of a test session is launched.
    with patch.dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive"):
        return _ForkedProcess(_run, [*arguments, *options], log_file)


def _run(arguments: list[str], log_file: Path) -> None:
    """The program as a new process would run it."""
    multiprocessing.set_start_method("fork", force=True)  # a child of the fork server would go on with it
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGTERM)
    with log_file.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [str(PROGRAM), *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]  # what it starts anew with
    from recording_peer import app

    app(arguments)

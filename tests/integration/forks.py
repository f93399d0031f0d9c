"""Our programs, forked from a process that has their imports behind it, which take ten seconds of a core.

Two things differ from processes that people start: all have the same hash seed, so that sets have the same order
everywhere, and none is finalised by the interpreter when it ends. Tests that must see those start new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

# Several share the cores, and idle OpenMP threads must not spin.
OPENMP = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# hivemind reads these when it is imported; the programs set them before that.
HIVEMIND = {"HIVEMIND_LOGLEVEL": "ERROR", "USE_LEGACY_BFLOAT16": "0"}

_forks = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """As much of subprocess.Popen as is used of it."""

    def __init__(self, function: Callable[..., None], *args: object):
        _forks.set_forkserver_preload(["fork_server"])
        self._process = _forks.Process(target=function, args=args)
        # For the fork server, which starts when the first process of a test session is forked. Before Python 3.12 it
        # does not take over where modules are, and says nothing of those that it does not find.
        with patch.dict(os.environ, OPENMP | HIVEMIND, PYTHONPATH=os.pathsep.join(sys.path)):
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
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has ended, and the fork server has not said so yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None) -> ForkedProcess:
    """Run `python -m MODULE ...` or `python FILE ...`; what it prints goes to the file, and it ends with the tests."""
    log_file.touch()  # tests read it at once
    return ForkedProcess(_run, list(command), log_file, {**os.environ, **OPENMP, **(environment or {})})


def _run(command: list[str], log_file: Path, environment: dict[str, str]) -> None:
    from hivemind.utils.asyncio import _AsyncContextWrapper
    from hivemind.utils.mpfuture import MPFuture

    from swarm_peer.runtime.host.processes import die_with_parent

    multiprocessing.set_start_method("fork", force=True)  # a child of the fork server would go on with it
    # Else a process that is killed while it holds one of hivemind's locks would have the others wait for ever.
    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()
    os.setsid()
    # The fork server ends with the last process that holds this: the tests, and nobody else.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    die_with_parent(os.getppid(), signal.SIGTERM)
    with log_file.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()  # it is that of the tests when their first process was forked
    os.environ.update(environment)
    sys.orig_argv = command  # what a peer starts anew with
    if command[1] == "-m":
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command[1:]
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")

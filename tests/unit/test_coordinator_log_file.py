"""What `serve` logs is in a file of the run's folder as well."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import swarm_peer.logs
from coordinator.run import log_file, serve
from coordinator.run.coordinator_options import NodeOptions
from coordinator.run.log_file import logged_to
from coordinator.run.run_options import RunOptions
from coordinator.watch.promises import Promises
from swarm_peer.errors import SwarmError

log = logging.getLogger("coordinator.test")


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a program prints that is told to print warnings."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    swarm_peer.logs.configure_logging("warning")
    yield stderr
    logging.root.setLevel(level)


def test_serve_writes_to_the_folder_what_the_terminal_does_not_show(
    tmp_path: Path, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_loop(*_: object) -> None:
        log.debug("detail")
        log.info("moving peer=a\nb")
        log.warning("checkpoint_missed step=%d", 50)

    monkeypatch.setattr(serve, "run_loop", run_loop)
    monkeypatch.setattr(serve, "spare_imports", lambda: None)
    resolved: Any = type("Resolved", (), {"manifest": None})
    monkeypatch.setattr(RunOptions, "check_output", lambda *_: None)
    serve.run_serve(resolved, NodeOptions(), RunOptions(output=tmp_path))
    log.info("after the run")
    moving, missed = (tmp_path / "coordinator.log").read_text().splitlines()
    assert moving.endswith(r" INFO moving peer=a\nb")
    assert missed.endswith(" checkpoint_missed step=50")
    assert stderr.getvalue().splitlines() == [missed]


@pytest.mark.parametrize(("error", "has_traceback"), [(SwarmError("the daemon died"), False), (KeyError(3), True)])
def test_the_error_that_ends_the_coordinator_is_in_its_file(
    tmp_path: Path, stderr: io.StringIO, error: Exception, has_traceback: bool
) -> None:
    with pytest.raises(type(error)), logged_to(tmp_path, Promises()):
        raise error
    first, *traceback = (tmp_path / "coordinator.log").read_text().splitlines()
    assert first.endswith(f" ERROR ended reason={error}")
    assert bool(traceback) == has_traceback
    assert stderr.getvalue() == ""


def test_the_file_takes_no_more_than_its_room(
    tmp_path: Path, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "MAX_BYTES", 1000)
    with logged_to(tmp_path, Promises()):
        for number in range(200):
            log.info("line number=%d", number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["coordinator.log", "coordinator.log.1", "coordinator.log.2"]
    assert all((tmp_path / name).stat().st_size <= 1000 for name in files)
    assert "number=199" in (tmp_path / "coordinator.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_disk_that_is_full_is_told_once(tmp_path: Path, stderr: io.StringIO) -> None:
    (tmp_path / "coordinator.log").symlink_to("/dev/full")
    promises = Promises()
    with logged_to(tmp_path, promises):
        log.warning("first")
        log.warning("second")
    assert [line.split()[3] for line in stderr.getvalue().splitlines()] == ["first", "log_not_kept", "second"]
    assert promises.unkept() == ["coordinator.log lacks lines ([Errno 28] No space left on device)"]

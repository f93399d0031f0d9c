"""A file is replaced as a whole, or stays as it was; locks where there are some; text is UTF-8 everywhere."""

import ast
import fcntl
import os
from contextlib import nullcontext
from errno import EAGAIN, EINVAL, EIO, ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

import pytest

from swarm_peer.files import OWNER, lock, replace_file, sync

ROOT = Path(__file__).parents[2]


def test_a_file_is_replaced_and_nobody_else_may_read_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text("a long former content")
    replace_file(path, "new")
    assert path.read_text() == "new"
    replace_file(path, b"secret", mode=OWNER)
    assert path.read_bytes() == b"secret"
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == ["known"]


def test_what_cannot_be_written_leaves_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "known"
    path.write_text("former")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["known"]


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(os.fstat(number).st_size) or sync(number))
    monkeypatch.setattr(Path, "replace", lambda path, target: done.append(target.name) or rename(path, target))
    replace_file(tmp_path / "file", "content")
    assert done == [len("content"), "file"]


@pytest.mark.parametrize(
    ("code", "is_folder", "is_fine"), [(EINVAL, True, True), (EINVAL, False, False), (EIO, True, False)]
)
def test_some_file_systems_sync_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_folder: bool, is_fine: bool
) -> None:
    path = tmp_path if is_folder else tmp_path / "file"
    (tmp_path / "file").write_text("content")

    def fail(number: int) -> None:
        raise OSError(code, "failed")

    monkeypatch.setattr(os, "fsync", fail)
    with nullcontext() if is_fine else pytest.raises(OSError, match="failed"):
        sync(path)


@pytest.mark.parametrize("code", [ENOSYS, ENOLCK, EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_reason_to_stop(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    lock(fail, 0, fcntl.LOCK_EX, tmp_path)
    assert f"not_locked folder={tmp_path} reason={os.strerror(code)}" in caplog.text


@pytest.mark.parametrize("code", [EAGAIN, EIO])
def test_a_lock_that_another_process_holds_or_a_broken_disk_is_one(tmp_path: Path, code: int) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        lock(fail, 0, fcntl.LOCK_EX, tmp_path)


@pytest.mark.parametrize("folder", ["swarm_peer", "coordinator"])
def test_text_is_utf8_whatever_the_locale_says(folder: str) -> None:
    """Files come from other machines, and go to them."""
    calls = [
        (path, node)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    found = [(path, node) for path, node in calls if _is_of_text(node)]
    assert len(found) > 5, "the test finds calls"
    for path, node in found:
        assert any(k.arg == "encoding" for k in node.keywords), f"{path}:{node.lineno}: which encoding?"


def _is_of_text(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    modes = {a.value for a in node.args if isinstance(a, ast.Constant)} & {"r", "w", "a", "x", "rt", "wt"}
    return name in ("read_text", "write_text") or (name == "open" and bool(modes))

"""A file is replaced as a whole, or stays as it was."""

import os
from contextlib import nullcontext
from errno import EINVAL, EIO
from pathlib import Path

import pytest

from swarm_peer.files import OWNER, replace_file, sync


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

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from swarm_peer.runtime.host import scratch
from swarm_peer.runtime.host.scratch import scratch_folder, temporary_folder

OWNER = """
from swarm_peer.runtime.host.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "snapshot").write_bytes(b"large")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_with_its_process(parent):
    with scratch_folder() as folder:
        assert folder.parent == parent
        (folder / "snapshot").write_bytes(b"large")
    assert list(parent.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(parent):
    foreign = parent / "swarm-peer-of-somebody"
    foreign.mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        left = process.stdout.readline().decode().strip()
        with scratch_folder():
            assert sorted(os.listdir(left)) == ["lock", "snapshot"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert os.path.exists(left)
        with scratch_folder() as mine:
            assert set(parent.iterdir()) == {mine, foreign}


def test_a_folder_that_another_process_takes_for_abandoned_is_made_anew(parent, monkeypatch):
    """It looked between the making of the lock's file and the locking. Peers of one machine may start all at once."""
    lock, locked = fcntl.flock, []

    def late(file, operation):
        if not locked:
            shutil.rmtree(next(parent.glob("swarm-peer-*")))
        locked.append(file)
        lock(file, operation)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with scratch_folder() as folder:
        assert os.listdir(folder) == ["lock"]
        assert list(parent.iterdir()) == [folder]
    assert list(parent.iterdir()) == []
    assert len(locked) == 2


@pytest.mark.parametrize(
    ("in_memory", "is_named", "chosen"),
    [
        ({"tmp"}, False, "on-disk"),
        ({"tmp"}, True, "tmp"),
        ((), False, "tmp"),
        ({"tmp", "on-disk"}, False, "tmp"),
    ],
)
def test_the_folder_is_on_a_disk_unless_one_is_named(parent, monkeypatch, caplog, in_memory, is_named, chosen):
    tmp, on_disk = parent / "tmp", parent / "on-disk"
    for folder in (tmp, on_disk):
        folder.mkdir()
    if is_named:
        monkeypatch.setenv("TMPDIR", str(tmp))
    else:
        monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    monkeypatch.setattr(scratch, "ON_DISK", on_disk)
    monkeypatch.setattr(scratch, "is_in_memory", lambda folder: folder.name in in_memory)
    assert temporary_folder() == parent / chosen
    abandoned = parent / chosen / "swarm-peer-killed"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    with scratch_folder() as folder:
        assert folder.parent == parent / chosen
        assert not abandoned.exists()
    assert (f"snapshots_take_memory path={tmp}" in caplog.text) == (chosen in in_memory)


@pytest.mark.parametrize(("kind", "in_memory"), [("tmpfs", True), ("ramfs", True), ("ext4", False), (None, False)])
def test_a_folder_is_in_memory_if_what_is_mounted_there_is(parent, monkeypatch, kind, in_memory):
    number = parent.stat().st_dev
    mounts = parent / "mountinfo"
    if kind is not None:
        own = f"{os.major(number)}:{os.minor(number)}"
        other = "22 1 0:999 / /else rw,relatime - tmpfs tmpfs rw"
        mounts.write_text(f"{other}\n25 1 {own} /a /b rw shared:1 master:2 - {kind} {kind} rw\n")
    monkeypatch.setattr(scratch, "MOUNTS", mounts)
    assert scratch.is_in_memory(parent) is in_memory

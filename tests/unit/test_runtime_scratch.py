import os
import signal
import subprocess
import sys
import tempfile

import pytest

from swarm_peer.runtime.host.scratch import scratch_folder

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

"""Peers of one user keep their identities over restarts, and never share one."""

import subprocess
import sys
from pathlib import Path

from swarm_peer.runtime.host.identities import KeptFile, free_identity

HOLD = """
import sys
from pathlib import Path
from swarm_peer.runtime.host.identities import free_identity
with free_identity(Path(sys.argv[1]), Path("/nowhere")) as path:
    print(path.name, flush=True)
    sys.stdin.read()
"""


def test_each_process_takes_the_first_identity_that_is_free(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "state")]
    first, second = (subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    try:
        names = {process.stdout.readline().strip() for process in (first, second)}
        assert names == {b"identity-0", b"identity-1"}
        with free_identity(tmp_path / "state", tmp_path) as path:
            assert path == tmp_path / "state" / "identity-2"
        first.kill()  # a lock ends with its process, however that ends
        first.wait()
        with free_identity(tmp_path / "state", tmp_path) as path:
            assert path.name.encode() in names
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_where_nothing_can_be_kept_a_peer_has_an_identity_for_one_start(tmp_path, caplog):
    (tmp_path / "file").touch()
    with free_identity(tmp_path / "file" / "state", tmp_path) as path:
        assert path == tmp_path / "identity"
    assert "identity_not_kept" in caplog.text


def test_what_a_full_disk_does_not_take_leaves_what_was_kept(tmp_path, monkeypatch, caplog):
    kept = KeptFile(tmp_path / "contributions.json")
    kept.write(b"a week's work")

    def full(path, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    kept.write(b"a week's work, and a minute's")
    assert kept.read() == b"a week's work"
    assert "not_kept" in caplog.text

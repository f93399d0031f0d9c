"""Peers of a run on one machine that die, and what becomes of the run."""

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from test_coordinator_service import MANIFEST, RESOLVED

from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.cli import app
from coordinator.config_files import load_manifest
from coordinator.run import local, serve
from coordinator.run.coordinator_options import NodeOptions
from coordinator.run.local import EARLY_S, MAX_EARLY_DEATHS, PeerWatch, name_processes, notes_at_start
from coordinator.run.local_peers import LocalPeers, launch_peer
from coordinator.run.run_options import RunOptions
from swarm_peer.errors import Interrupted, SwarmError, UserError


class FakeProcess:
    returncode = None

    def __init__(self, pid):
        self.pid = pid

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        return self.returncode

    def terminate(self):
        self.returncode = 0

    def kill(self):
        self.returncode = -signal.SIGKILL


class Machine:
    """Peers that are started on it, what the user is told, and a clock that a test sets."""

    def __init__(self, folder, *, restart=True, peers_by_stage=(1, 2), devices=("cpu",)):
        self.now_s, self.told, self.options = 0.0, [], []
        self.peers = LocalPeers(["/ip4/address"], peers_by_stage, folder, devices=devices, launch=self.launch)
        self.watch = PeerWatch(peers=self.peers, restart=restart, say=self.told.append, now_s=lambda: self.now_s)

    def launch(self, options, log_file, threads):
        log_file.write_text("first words\nlast words\n\n")
        self.options.append(list(options))
        return FakeProcess(100 + len(self.options))

    def end(self, name, returncode, after_s=0.0):
        """End a peer after it has run for some seconds, and look."""
        self.watch.look()
        self.now_s += after_s
        (peer,) = (peer for peer in self.peers.peers if peer.name == name)
        peer.process.returncode = returncode
        self.watch.look()

    @property
    def running(self):
        return [peer.name for peer in self.peers.peers]


async def test_peers_take_several_gpus_in_turns_and_who_stands_in_the_one_that_is_free(tmp_path):
    machine = Machine(tmp_path, peers_by_stage=(2, 2), devices=("cuda:0", "cuda:1"))
    async with machine.peers.running():
        machine.end("0.1", -signal.SIGKILL)
        named = [options[options.index("--device") + 1] for options in machine.options]
        assert named == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:1"]


async def test_another_peer_takes_the_place_of_one_that_died(tmp_path):
    machine = Machine(tmp_path)
    async with machine.peers.running():
        machine.end("1.0", -signal.SIGKILL)
        assert machine.told == [
            "Peer 1.0 of stage 1 was killed by SIGKILL; peer 1.0-2 (process 104) takes its place, and the run goes on."
        ]
        assert machine.running == ["0.0", "1.1", "1.0-2"]
        first, second = machine.options[1], machine.options[3]
        assert [each.replace("1.0-2", "1.0") for each in second] == list(first), "it is started as the first one was"
        machine.watch.look()
        assert len(machine.told) == 1
        machine.end("1.0-2", 0)
        assert "peer 1.0-3 (process 105) takes its place" in machine.told[1]
        assert "Peer 1.0-2 of stage 1 left;" in machine.told[1]
    assert all(peer.process.returncode == 0 for peer in machine.peers.peers)


async def test_a_full_disk_is_told_where_peers_die_of_it(tmp_path, monkeypatch):
    class Full:
        def __init__(self, **_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    machine = Machine(tmp_path)
    async with machine.peers.running():
        machine.end("1.0", 1)
        assert "takes its place" in machine.told[0], "there is room"
        monkeypatch.setattr(tempfile, "TemporaryFile", Full)
        with pytest.raises(UserError, match=r"peer 1\.1 of stage 1 ended with exit code 1: .*logs: No space left"):
            machine.end("1.1", 1)


async def test_peers_leave_stage_by_stage(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(FakeProcess, "terminate", lambda process: left.append(process.pid - 101))
    machine = Machine(tmp_path, peers_by_stage=[1] * 12)
    async with machine.peers.running():
        machine.peers.start("auto", "chooses")
    assert left == list(range(13))


def test_a_folder_of_ones_own_has_modules_of_any_name(tmp_path, monkeypatch):
    """Such as a project's datasets.py, where its owner tries a run."""
    monkeypatch.chdir(tmp_path)
    for name in ("datasets", "queue", "token"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the folder was imported')")
    process = launch_peer(["--version"], tmp_path / "log", 1)
    assert process.wait(30) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().startswith("swarm-peer ")


def test_two_programs_never_train_into_one_folder(tmp_path):
    # As another program does it, but for its imports.
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
    hold += "print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another program trains into"):
            local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path))
        other.stdin.close()


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_no_run_begins_anew_where_one_has_begun(tmp_path, monkeypatch, has_checkpoints):
    """Ctrl+C at step 300 of 400, and the same command once more, would erase the 300 lines."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"optimizer_step": 300}\n')
    if has_checkpoints:
        (tmp_path / "checkpoints").mkdir()
    ran = []
    monkeypatch.setattr(local, "run_loop", lambda *_: ran.append(1))
    with pytest.raises(UserError, match=r"a run has begun in .*name another --output") as caught:
        local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path))
    assert (f"with --resume {tmp_path}," in str(caught.value)) is has_checkpoints
    assert not ran
    resumed = CheckpointPlan(None, resume=object())
    local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path, plan=resumed))
    metrics.write_text("")  # its first step was not made yet
    local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path))
    assert len(ran) == 2


def test_a_folder_without_weights_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "run_loop", lambda *_: pytest.fail("the run has begun"))
    folder = tmp_path / "model"
    folder.mkdir()
    manifest = MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"pretrained": str(folder)})})
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        local.check_weights(manifest)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match="a pointer of Git LFS"):
        local.run_local(manifest, [1], ("cpu",), RunOptions(output=tmp_path / "run"))


def test_no_run_begins_anew_with_the_checkpoints_of_another(tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "step-00000200").mkdir(parents=True)
    ran = []
    monkeypatch.setattr(local, "run_loop", lambda *_: ran.append(1))
    plan = CheckpointPlan(CheckpointStore(str(tmp_path / "elsewhere")), 10)
    with pytest.raises(UserError, match="has checkpoints of an earlier run"):
        local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path, plan=plan))
    resumed = replace(plan, resume=object())
    local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path, plan=resumed))
    assert len(ran) == 1


def checkpoints_of(monkeypatch, tmp_path, *words):
    """Which checkpoints a run gets that these words start on this machine."""
    plans = []

    def run_local(manifest, peers_by_stage, devices, options, log_to, *, restart):
        plans.append(options.plan)
        raise Interrupted

    monkeypatch.setattr(local, "run_local", run_local)
    words = ["local", "demo", "--output", str(tmp_path / "out"), *words]
    with pytest.raises(Interrupted):
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
    return plans[0]


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ((), 0),
        (("--checkpoints", "DIR"), 10),
        (("--keep-checkpoints", "3"), 10),
        (("--checkpoint-every", "20"), 20),
        (("--checkpoint-every", "0"), 0),
    ],
)
def test_a_run_on_one_machine_has_checkpoints_if_one_of_their_options_is_given(monkeypatch, tmp_path, words, every):
    plan = checkpoints_of(monkeypatch, tmp_path, *(word.replace("DIR", str(tmp_path / "kept")) for word in words))
    assert (plan.every, plan.store is not None) == (every, every > 0)
    assert plan.store is None or plan.store.url == str(tmp_path / ("kept" if "DIR" in words else "out/checkpoints"))


def test_the_user_is_told_that_there_are_no_checkpoints(tmp_path):
    def told(snapshot_every, plan):
        manifest = load_manifest(Path("demo"), ("training.steps=50", f"recovery.snapshot_every={snapshot_every}"))
        return notes_at_start(manifest, plan, ("cpu",), 0)

    none = ["No checkpoints are written; for one every 10 optimizer steps: --checkpoint-every 10."]
    assert told(10, CheckpointPlan(None)) == none
    assert told(10, CheckpointPlan(CheckpointStore(str(tmp_path)), 10)) == []
    assert told(0, CheckpointPlan(None)) == told(50, CheckpointPlan(None)) == [], (
        "there are none to have, or one beside the model"
    )


def test_the_user_is_told_of_gpus_that_no_peer_takes(tmp_path):
    def told(devices, num_gpus):
        return notes_at_start(MANIFEST, CheckpointPlan(CheckpointStore(str(tmp_path)), 10), devices, num_gpus)

    assert told(("cpu",), 4) == ["The peers compute on the CPU; this machine has 4 GPUs: --device cuda."]
    assert told(("cpu",), 1) == ["The peers compute on the CPU; this machine has a GPU: --device cuda."]
    assert told(("cuda:0", "cuda:1"), 2) == told(("cpu",), 0) == []


async def test_the_user_is_told_whom_to_kill(tmp_path):
    machine = Machine(tmp_path)
    async with machine.peers.running():
        named = "Peers by process: 0.0 is 101, 1.0 is 102, 1.1 is 103. If you kill one (kill -9 101), "
        assert name_processes(machine.peers.peers, restart=True) == named + "another peer takes its place."
        assert name_processes(machine.peers.peers, restart=False) == named + "the run goes on without it."


async def test_the_loss_of_a_whole_stage_is_said(tmp_path):
    machine = Machine(tmp_path)
    async with machine.peers.running():
        machine.end("0.0", 1)
    assert machine.told == [
        "Peer 0.0 of stage 0 ended with exit code 1, the last one there; peer 0.0-2 (process 104) takes its place, and "
        "the run goes back to its last snapshot or its beginning."
    ]


async def test_a_place_where_peers_die_again_and_again_ends_the_run(tmp_path):
    machine = Machine(tmp_path)
    async with machine.peers.running():
        machine.end("1.0", 1, after_s=EARLY_S - 1)
        machine.end("1.1", 1)  # another place has a count of its own
        machine.end("1.0-2", 1)
        with pytest.raises(SwarmError) as caught:
            machine.end("1.0-3", 1)
    said = str(caught.value)
    assert said.startswith(
        f"peer 1.0-3 of stage 1 ended with exit code 1, and so the run ends: {MAX_EARLY_DEATHS} peers"
    )
    assert said.endswith(f"last words (see {tmp_path}/logs/peer-1.0-3.log)")
    assert len(machine.told) == 3


async def test_a_peer_that_lasts_shows_that_its_place_is_fine(tmp_path):
    machine = Machine(tmp_path)
    async with machine.peers.running():
        for number in range(2, 3 * MAX_EARLY_DEATHS):
            name = "1.0" if number == 2 else f"1.0-{number - 1}"
            machine.end(name, 1, after_s=EARLY_S if number % 3 == 0 else 0)
    assert len(machine.told) == 3 * MAX_EARLY_DEATHS - 2


@pytest.mark.parametrize("restart", [True, False])
async def test_a_peer_that_cannot_work_as_it_was_started_ends_the_run_at_once(tmp_path, restart):
    machine = Machine(tmp_path, restart=restart)
    async with machine.peers.running():
        with pytest.raises(SwarmError, match=r"peer 1\.1 of stage 1 ended with exit code 2: last words \(see "):
            machine.end("1.1", 2)


async def test_one_that_could_not_start_in_the_place_of_another_is_replaced(tmp_path):
    """It found nobody on a busy machine."""
    machine = Machine(tmp_path)
    async with machine.peers.running():
        machine.end("1.1", -signal.SIGKILL, after_s=EARLY_S)
        machine.end("1.1-2", 2)
        assert machine.running[-1] == "1.1-3"


async def test_without_restart_the_run_goes_on_while_each_stage_has_peers(tmp_path):
    machine = Machine(tmp_path, restart=False)
    async with machine.peers.running():
        machine.end("1.0", -signal.SIGTERM)
        assert machine.told == ["Peer 1.0 of stage 1 was killed by SIGTERM; the run goes on without it."]
        assert machine.running == ["0.0", "1.1"]
        with pytest.raises(SwarmError, match=r"peer 1\.1 of stage 1 left, the last one there, so the run cannot go on"):
            machine.end("1.1", 0)


@pytest.mark.parametrize("program", ["local", "serve"])
def test_no_collection_of_all_that_is_imported_holds_up_the_event_loop(program, tmp_path, monkeypatch):
    """With torch's and transformers' objects it takes a fifth of a second."""
    spared = []
    for module in (local, serve):
        monkeypatch.setattr(module, "run_loop", lambda *_: spared.append(gc.get_freeze_count()))
    gc.unfreeze()
    try:
        if program == "local":
            local.run_local(MANIFEST, [1], ("cpu",), RunOptions(output=tmp_path))
        else:
            serve.run_serve(RESOLVED, NodeOptions(), RunOptions(output=tmp_path))
    finally:
        gc.unfreeze()
    assert spared[0] > 100_000

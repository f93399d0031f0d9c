"""What was saved comes back; what is damaged is told in one line, and the checkpoint before it is taken."""

import dataclasses
import itertools
import json
import logging
import os
import random
import shutil
import struct
import tempfile
import threading
from contextlib import asynccontextmanager
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import anyio
import fsspec
import numpy as np
import pytest
import torch
from given_states import Gullible
from memory_transport import MemoryNetwork
from safetensors import SafetensorError

from coordinator.checkpoints import file_store as checkpoint_files
from coordinator.checkpoints import folder as checkpoint_folder
from coordinator.checkpoints import state_receiver
from coordinator.checkpoints import writer as checkpointing
from coordinator.checkpoints.fetching import fetch_snapshots
from coordinator.checkpoints.resumed import RESUMED, find_resumed, note_resumed, tell_changes
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from coordinator.checkpoints.writer import CheckpointPlan, CheckpointWriter, Duty, plan_checkpoints
from coordinator.run.coordinator_options import CheckpointOptions
from coordinator.watch.promises import Promises
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage, NoRoom, SwarmError, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Close, Committed, Cut, Entry
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemThreads
from swarm_peer.runtime.network.agreement import NO_EPOCH
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.state.stored import write_stored

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)


def manifest_of(**changes):
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {"model_type": "gpt2"}},
            "stages": {"count": 2},
            "data": {"sequence_length": 12},
            "training": {"steps": 30, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
        | changes
    )


MANIFEST = manifest_of()


def state_of(stage, round_number):
    generator = torch.Generator().manual_seed(100 * round_number + stage)
    tensors = {
        f"layer.{stage}.weight": torch.randn(5, 7, generator=generator),
        f"optimizer/layer.{stage}.weight/exp_avg": torch.randn(5, 7, generator=generator).T,  # not contiguous
        f"optimizer/layer.{stage}.weight/step": torch.tensor(float(round_number)),
        "empty": torch.zeros(0, 4),
    }
    for dtype in DTYPES:
        tensors[f"as {dtype}"] = torch.randint(0, 100, (3, 4), generator=generator).to(dtype)
    history_hash, ledger = (
        f"history_hash of stage {stage} at {round_number}",
        b"" if stage else b"\x00\xff of any bytes",
    )
    return StageState(
        round_number=round_number,
        history_hash=history_hash,
        tensors=tensors,
        timeline=Timeline(2, 1, 1),
        ledger=ledger,
    )


def states_of(round_number):
    return [state_of(stage, round_number) for stage in range(2)]


def assert_same(state, expected):
    for field in dataclasses.fields(StageState):
        if field.name != "tensors":
            assert getattr(state, field.name) == getattr(expected, field.name)
    assert state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert state.tensors[name].shape == tensor.shape
        assert torch.equal(state.tensors[name], tensor), name


class World:
    """A store, and a way around it to its files."""

    def __init__(self, url, path, fs):
        self.url, self.path, self.fs = url, path, fs

    def store(self, keep=3):
        return CheckpointStore(self.url, keep)

    def save(self, *steps, keep=9):
        for round_number in steps:
            self.store(keep).save(round_number, MANIFEST, states_of(round_number))

    def file(self, round_number, name):
        return f"{self.path}/step-{round_number:08d}/{name}"

    def names(self):
        return sorted(path.rpartition("/")[2] for path in self.fs.ls(self.path, detail=False))

    def change(self, path, change):
        self.fs.pipe_file(path, change(self.fs.cat_file(path)))

    def forge(self, round_number, name, content):
        """Change a file, and its entry in checkpoint.json with it."""
        self.fs.pipe_file(self.file(round_number, name), content)
        entry = checkpoint_files.FileStore(self.url).describe(self.file(round_number, name)).model_dump()

        def change(text):
            contents = json.loads(text)
            contents["files"][name] = entry
            return json.dumps(contents).encode()

        self.change(self.file(round_number, "checkpoint.json"), change)


@pytest.fixture(params=["disk", "memory"])
def world(request, tmp_path):
    fs = fsspec.filesystem("file" if request.param == "disk" else "memory")
    path = str(tmp_path / "checkpoints")
    yield World(path if request.param == "disk" else f"memory:/{path}", path, fs)
    if request.param == "memory":
        fs.rm(str(tmp_path), recursive=True) if fs.exists(str(tmp_path)) else None


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is saved ----------------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(world):
    path = world.store().save(5, MANIFEST, states_of(5))
    checkpoint = world.store().newest(MANIFEST)
    assert (checkpoint.optimizer_step, checkpoint.manifest) == (5, MANIFEST)
    for stage in range(2):
        assert_same(checkpoint.load_stage(stage), state_of(stage, 5))
    assert find_checkpoint(path).path == checkpoint.path
    assert world.names() == ["step-00000005"]


def test_the_files_are_what_is_promised(world):
    world.save(5)
    names = ["checkpoint.json", "manifest.json", "stage-000.safetensors", "stage-001.safetensors"]
    assert sorted(path.rpartition("/")[2] for path in world.fs.ls(world.file(5, ""), detail=False)) == names
    contents = json.loads(world.fs.cat_file(world.file(5, "checkpoint.json")))
    assert (contents["format"], contents["optimizer_step"], contents["manifest"]) == (3, 5, MANIFEST.hash)
    assert [stage["history_hash"] for stage in contents["stages"]] == [
        "history_hash of stage 0 at 5",
        "history_hash of stage 1 at 5",
    ]
    assert sorted(contents["files"]) == names[1:]
    assert world.fs.cat_file(world.file(5, "manifest.json")) == MANIFEST.canonical_json()


def test_the_summary_is_written_last(world, monkeypatch):
    written = []
    real = checkpoint_files.FileStore.write

    def write(self, path, write):
        written.append(path.rpartition("/")[2])
        assert not self.exists(world.file(5, "checkpoint.json"))
        return real(self, path, write)

    monkeypatch.setattr(checkpoint_files.FileStore, "write", write)
    world.save(5)
    assert written[-1] == "checkpoint.json"
    assert len(written) == 4


def test_an_empty_store_has_no_newest(world):
    assert world.store().newest() is None
    with pytest.raises(UserError, match=r"there are no checkpoints in .*: correct the path"):
        find_checkpoint(world.url)


def test_a_store_of_another_run_takes_none_of_one_that_begins_anew(world):
    world.store().check_empty()
    world.save(5)
    with pytest.raises(UserError, match="has checkpoints of an earlier run, and this run begins anew") as caught:
        world.store().check_empty()
    assert one_line(caught).endswith(
        f"name another folder or URL with --checkpoints, or go on from the earlier run with --resume {world.url}"
    )


def test_the_newest_is_the_one_with_the_highest_number(world):
    world.save(100_000_000, 99_999_999, 9)
    assert world.store().newest().optimizer_step == 100_000_000
    assert world.store().at(9).optimizer_step == 9


def test_a_checkpoint_of_the_same_number_is_replaced(world):
    world.save(5)
    for version in (1, 2):
        path = world.store().save(5, MANIFEST, states_of(5 + version))
        former = find_checkpoint(f"{world.url}/step-00000005")
        for checkpoint in (world.store().newest(), find_checkpoint(path), former):
            assert_same(checkpoint.load_stage(1), state_of(1, 5 + version))
        assert world.names() == [f"step-00000005.{version}"]


def test_a_folder_that_is_named_is_the_one_that_is_opened(world, tmp_path):
    """One that a kill has left beside its replacement, or that somebody has put there."""
    world.save(5)
    world.fs.cp(f"{world.path}/step-00000005", f"{world.path}/step-00000005.1", recursive=True)
    assert find_checkpoint(world.url, 5).path.endswith("/step-00000005.1")
    assert find_checkpoint(f"{world.url}/step-00000005").path.endswith("/step-00000005")


@pytest.mark.parametrize("name", ["best", "step-5", "run 3, before the new data"])
def test_a_checkpoint_may_have_any_name(world, name):
    world.save(5, 7)
    world.fs.cp(f"{world.path}/step-00000005", f"{world.path}/{name}", recursive=True)
    checkpoint = find_checkpoint(f"{world.url}/{name}/", 5)
    assert checkpoint.optimizer_step == 5
    assert_same(checkpoint.load_stage(1), state_of(1, 5))
    assert find_checkpoint(checkpoint.address).optimizer_step == 5  # as a coordinator that is started again finds it
    with pytest.raises(UserError, match=r"^--step 7: .* is the checkpoint of step 5; leave one of them out$"):
        find_checkpoint(f"{world.url}/{name}", 7)
    assert find_checkpoint(world.url).optimizer_step == 7


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path):
    CheckpointStore(str(tmp_path)).save(5, MANIFEST, states_of(5))
    (tmp_path / "latest").symlink_to("step-00000005")
    assert find_checkpoint(str(tmp_path / "latest")).optimizer_step == 5


def test_a_checkpoint_with_another_steps_name_is_refused(world):
    world.save(5)
    world.fs.cp(f"{world.path}/step-00000005", f"{world.path}/step-00000006", recursive=True)
    with pytest.raises(UserError, match=r"checkpoint\.json does not belong to it"):
        find_checkpoint(f"{world.url}/step-00000006")


class Killed(BaseException):
    """Nobody cleans up."""


def test_there_is_a_checkpoint_whenever_the_coordinator_is_killed(world, monkeypatch):
    """A replacement is killed before each thing that it does to the store; the next one succeeds all the same."""
    left = None

    def counting(function):
        def call(*args, **kwargs):
            nonlocal left
            if left is not None:
                if left == 0:
                    raise Killed
                left -= 1
            return function(*args, **kwargs)

        return call

    for owner, names in (
        (type(world.fs), ["rm_file", "rm", "makedirs", "put_file"]),
        (os, ["rename", "unlink", "rmdir", "fsync"]),
        (Path, ["write_bytes"]),
        (checkpoint_folder, ["save_file"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, counting(getattr(owner, name)))

    def whole():
        """Which one there is."""
        checkpoint = world.store().newest(MANIFEST)
        assert checkpoint.optimizer_step == world.store().at(5).optimizer_step == 5
        history_hash = checkpoint.load_stage(0).history_hash
        round_number = int(history_hash.split()[-1])
        for stage in range(2):
            assert_same(checkpoint.load_stage(stage), state_of(stage, round_number))
        return round_number

    world.save(5)
    seen = set()
    for num_calls in itertools.count():
        left = num_calls
        try:
            world.store().save(5, MANIFEST, states_of(6))
            break
        except Killed:
            left = None
        seen.add(whole())
        world.store().save(5, MANIFEST, states_of(5))
        assert whole() == 5
        assert len(world.names()) == 1
    assert seen == {5, 6}
    assert num_calls > 8


def test_a_folder_of_that_name_in_the_way_is_replaced(world):
    """Such as what a save to an object store leaves when it is cut off."""
    world.fs.makedirs(world.file(5, ""))
    world.fs.pipe_file(world.file(5, "stage-007.safetensors"), b"junk")
    world.save(5)
    assert world.store().newest().optimizer_step == 5
    assert not world.fs.exists(world.file(5, "stage-007.safetensors"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error\nof some kind")])
def test_a_save_that_fails_leaves_what_was_there(world, error, monkeypatch):
    world.save(5)

    def full(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint_folder, "save_file", full)
    with pytest.raises(UserError, match=r"cannot write checkpoint .*step-00000006 \(.*\): check space") as caught:
        world.save(6)
    one_line(caught)
    assert world.names() == ["step-00000005"]
    assert world.store().newest().optimizer_step == 5


def test_a_save_that_fails_and_cannot_clean_up_is_one_line(world, monkeypatch):
    def broken_remove(*_, **__):
        raise OSError(5, "Input/output error")

    def write(self, path, write):
        monkeypatch.setattr(checkpoint_files.FileStore, "remove", broken_remove)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files.FileStore, "write", write)
    with pytest.raises(UserError, match="No space left on device"):
        world.save(6)


def test_what_has_just_been_written_is_not_read_back_to_prune(world, monkeypatch):
    """An object store may be far away."""
    world.save(1, 2)

    def read(self, path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(checkpoint_files.FileStore, "describe", read)
    world.save(3, keep=1)
    assert world.names() == ["step-00000003"]


def test_what_has_just_been_written_stays_where_later_steps_are_there(world):
    """The run has gone back. Those that were there stay, too: they may be all that is left of days."""
    world.save(8, 9)
    world.save(2, keep=2)
    assert world.names() == ["step-00000002", "step-00000008", "step-00000009"]
    world.save(3, keep=2)
    assert world.names() == ["step-00000003", "step-00000008", "step-00000009"]


def test_a_save_whose_pruning_fails_is_a_save(world, monkeypatch, caplog):
    world.save(1, 2)

    def denied(self, folder, first):
        if "step-00000003" not in folder:
            raise PermissionError(13, "denied")

    monkeypatch.setattr(checkpoint_files.FileStore, "remove", denied)
    world.save(3, keep=1)
    assert world.store().newest().optimizer_step == 3
    assert "checkpoints_not_pruned" in caplog.text


def test_a_save_whose_folder_is_not_synced_is_made_once(tmp_path, monkeypatch, caplog):
    """The checkpoint has its name by then: another try would save it once more, beside it."""
    base = tmp_path / "checkpoints"

    def fail(path):
        if path == base:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "sync", fail)
    CheckpointStore(str(base), 3).save(8, MANIFEST, states_of(8))
    assert sorted(os.listdir(base)) == ["step-00000008"]
    assert "checkpoint_not_synced" in caplog.text


@pytest.mark.parametrize("unseen", ["step-00000002", "step-00000003"])
@pytest.mark.parametrize("method", ["info", "open"])
def test_nothing_is_removed_while_the_store_does_not_answer(world, unseen, method, monkeypatch, caplog):
    """Clients say that a file does not exist if they cannot reach it, and what is incomplete is removed."""
    world.save(1, 2)
    store = world.store(keep=2)
    client = type(store._files._fs)
    request, real_prune = getattr(client, method), store.prune

    def fail(fs, path, *args, **options):
        if unseen in str(path) and str(path).endswith("checkpoint.json"):
            raise OSError(116, "Stale file handle")
        return request(fs, path, *args, **options)

    def prune(**options):
        monkeypatch.setattr(client, method, fail)
        real_prune(**options)

    monkeypatch.setattr(store, "prune", prune)
    store.save(3, MANIFEST, states_of(3))
    monkeypatch.setattr(client, method, request)
    assert ("checkpoints_not_pruned" if method == "info" else "checkpoint_not_read") in caplog.text
    assert world.names() == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_checkpoint_that_is_never_read_does_not_keep_others(world, monkeypatch):
    world.save(1)
    read = checkpoint_files.FileStore.read

    def fail(files, path, max_bytes):
        if "step-00000001" in path:
            raise PermissionError(13, "denied")
        return read(files, path, max_bytes)

    monkeypatch.setattr(checkpoint_files.FileStore, "read", fail)
    for step in (2, 3, 4, 5):
        world.save(step, keep=2)
    assert world.names() == ["step-00000001", "step-00000004", "step-00000005"]


# --- what is damaged --------------------------------------------------------------------------------------------------


def cut(world):
    world.change(world.file(8, "stage-001.safetensors"), lambda data: data[:-1])


def flip(world):
    world.change(world.file(8, "stage-000.safetensors"), lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def remove(name):
    return lambda world: world.fs.rm_file(world.file(8, name))


def write(name, content):
    return lambda world: world.fs.pipe_file(world.file(8, name), content)


def forge(name, content):
    return lambda world: world.forge(8, name, content)


def edit(**changes):
    def change(text):
        return json.dumps(json.loads(text) | changes).encode()

    return lambda world: world.change(world.file(8, "checkpoint.json"), change)


def rename(world):
    world.fs.mv(world.file(8, "").rstrip("/"), world.file(11, "").rstrip("/"), recursive=True)


def point_elsewhere(world):
    def change(text):
        contents = json.loads(text)
        contents["files"]["../../secret"] = contents["files"].pop("stage-000.safetensors")
        return json.dumps(contents).encode()

    world.change(world.file(8, "checkpoint.json"), change)


DAMAGES = {
    "truncated": (cut, "stage-001.safetensors has "),
    "flipped byte": (flip, "stage-000.safetensors does not match its hash"),
    "missing stage": (remove("stage-001.safetensors"), "stage-001.safetensors: "),
    "missing manifest": (remove("manifest.json"), "manifest.json: "),
    "incomplete": (remove("checkpoint.json"), "it has no checkpoint.json"),
    "no JSON": (write("checkpoint.json", b'{"format"'), "checkpoint.json: "),
    "deep manifest": (forge("manifest.json", b"[" * 100_000), "manifest.json: "),
    "deep JSON": (write("checkpoint.json", b"[" * 100_000), "checkpoint.json: "),
    "no text": (write("checkpoint.json", b"\xff\xfe\x00"), "checkpoint.json: "),
    "no mapping": (write("checkpoint.json", b"[]"), "checkpoint.json: "),
    "empty": (write("checkpoint.json", b""), "checkpoint.json: "),
    "other format": (edit(format=2), "checkpoint.json: format: Input should be 3 (got 2)"),
    "other key": (edit(more=1), "checkpoint.json: more: unknown key"),
    "history_hash of another type": (
        edit(stages=[{"round_number": 8, "history_hash": 3}] * 2),
        "checkpoint.json: stages",
    ),
    "too few stages": (edit(stages=[]), "checkpoint.json does not belong to it"),
    "other step": (edit(optimizer_step=7), "checkpoint.json does not belong to it"),
    "renamed": (rename, "checkpoint.json does not belong to it"),
    "paths that lead elsewhere": (point_elsewhere, "checkpoint.json does not belong to it"),
    "other run": (edit(manifest="0" * 32), f"it is of manifest {'0' * 32}, and the run's is {MANIFEST.hash}"),
    "edited manifest": (write("manifest.json", b"{}"), "manifest.json has 2 bytes"),
    "unfit manifest": (forge("manifest.json", b"{}"), "manifest.json: name: missing: add it"),
    "manifest of more stages": (
        forge("manifest.json", manifest_of(stages={"count": 3}).canonical_json()),
        "its files do not fit its manifest of 3 stages",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_the_one_before_a_damaged_checkpoint_is_taken(world, damage, reason, caplog):
    world.save(3, 8)
    damage(world)
    is_of_other_run = "it is of manifest" in reason  # which is no damage
    with caplog.at_level(logging.DEBUG if is_of_other_run else logging.WARNING, "coordinator"):
        checkpoint = world.store().newest(MANIFEST)
    assert checkpoint.optimizer_step == 3
    assert_same(checkpoint.load_stage(0), state_of(0, 3))
    # The scratch folder may be in memory, which is told as well.
    (message,) = (record.message for record in caplog.records if not record.name.endswith(".scratch"))
    assert message.startswith("checkpoint_passed_over path=" if is_of_other_run else "checkpoint_damaged path=")
    assert f" reason={reason}" in message
    assert "\n" not in message


def test_no_older_checkpoint_is_taken_while_the_newest_cannot_be_read(world, monkeypatch):
    """Who resumes would go back for a read that timed out, and the newest would be removed later on."""
    world.save(3, 8)
    describe = checkpoint_files.FileStore.describe

    def time_out(files, path):
        if "step-00000008/stage-001" in path:
            raise TimeoutError("read timed out")
        return describe(files, path)

    monkeypatch.setattr(checkpoint_files.FileStore, "describe", time_out)
    with pytest.raises(UserError, match=r"step-00000008 may be the newest, .*read timed out.*: try again") as failure:
        find_checkpoint(world.url)
    assert "\n" not in str(failure.value)
    assert find_checkpoint(f"{world.url}/step-00000003").optimizer_step == 3
    assert world.store().newest_that(lambda *_: True, MANIFEST).optimizer_step == 3, "a lost stage cannot wait"


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in ("incomplete", "renamed", "other run")])
def test_a_damaged_checkpoint_that_is_asked_for_is_one_line(world, name):
    damage, reason = DAMAGES[name]
    world.save(8)
    damage(world)
    with pytest.raises(UserError) as caught:
        world.store().at(8)
    assert f"cannot be used ({reason}" in one_line(caught)
    with pytest.raises(UserError) as caught:
        world.store().newest()
    assert "none of the 1 checkpoints in " in one_line(caught)
    assert reason in str(caught.value)


def test_a_run_whose_first_save_was_cut_off_has_no_checkpoint(world):
    world.save(8)
    remove("checkpoint.json")(world)
    assert world.store().newest() is None


def test_a_file_that_changes_after_the_check_is_not_loaded(world):
    world.save(8)
    checkpoint = world.store().newest()
    flip(world)
    with pytest.raises(UserError, match=r"\(stage-000\.safetensors has changed since it was checked\)"):
        checkpoint.load_stage(0)
    assert_same(checkpoint.load_stage(1), state_of(1, 8))
    remove("stage-001.safetensors")(world)
    with pytest.raises(UserError, match=r"\(stage-001\.safetensors: "):
        checkpoint.load_stage(1)


HUGE_HEADER = struct.pack("<Q", 2**62) + b"{}"
LONG_HEADER = struct.pack("<Q", 2**27) + b" " * 100
BEYOND_THE_END = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()


@pytest.mark.parametrize(
    "content",
    [b"", b"no safetensors", HUGE_HEADER, LONG_HEADER, struct.pack("<Q", len(BEYOND_THE_END)) + BEYOND_THE_END],
)
def test_tensors_that_cannot_be_read_are_one_line(world, content):
    """Though all hashes agree: whoever made the file made its hash, too."""
    world.save(8)
    world.forge(8, "stage-001.safetensors", content)
    checkpoint = world.store().newest()
    with pytest.raises(
        UserError, match=r"checkpoint .*step-00000008 cannot be used \(stage-001\.safetensors: "
    ) as caught:
        checkpoint.load_stage(1)
    one_line(caught)


def test_a_summary_without_end_is_not_read_to_its_end(world, monkeypatch):
    world.save(3, 8)
    write("checkpoint.json", b" " * 100_000)(world)
    monkeypatch.setattr(checkpoint_folder, "MAX_JSON_BYTES", 10_000)
    with pytest.raises(UserError, match=r"\(checkpoint\.json: .* has more than 10000 bytes\)"):
        world.store().at(8)
    assert world.store().newest().optimizer_step == 3


# --- what may go ------------------------------------------------------------------------------------------------------


def test_the_newest_are_snapshots(world):
    world.save(*range(1, 6), keep=2)
    assert world.names() == ["step-00000004", "step-00000005"]
    world.store(keep=1).prune()
    assert world.names() == ["step-00000005"]


def test_a_run_that_was_resumed_from_an_earlier_step_has_its_newest_there(world):
    """Its rounds count on. What was given up goes as others come."""
    world.save(20, 30, 40, keep=3)
    for optimizer_step, round_number in ((22, 50), (24, 52)):
        world.store(3).save(optimizer_step, MANIFEST, states_of(round_number))
        assert find_checkpoint(world.url).optimizer_step == optimizer_step
    assert world.names() == ["step-00000022", "step-00000024", "step-00000040"]


def test_no_more_is_read_than_has_to_be(world, monkeypatch):
    """A store far away gives gigabytes for nothing."""
    world.save(1, 2, 3)
    read = []
    describe = checkpoint_files.FileStore.describe

    def describing(files, path):
        read.append(path)
        return describe(files, path)

    monkeypatch.setattr(checkpoint_files.FileStore, "describe", describing)
    world.save(8, keep=2)
    assert world.names() == ["step-00000003", "step-00000008"]
    assert read == [], "what has just been saved is good, so that others may go unread"
    fits = lambda optimizer_step, round_number: optimizer_step == round_number == 3  # noqa: E731
    assert world.store().newest_that(fits, MANIFEST).optimizer_step == 3
    assert {path.split("/")[-2] for path in read} == {"step-00000003"}
    assert world.store().newest_that(lambda *_: False, MANIFEST) is None


def test_what_was_cut_off_goes(world):
    world.save(3, 8, 9)
    remove("checkpoint.json")(world)
    for name in ("step-00000010.partial", "step-00000003.1.partial", "step-00000012"):
        world.fs.makedirs(f"{world.path}/{name}")
        world.fs.pipe_file(f"{world.path}/{name}/stage-000.safetensors", b"junk")
    world.store().prune()
    assert world.names() == ["step-00000003", "step-00000009"]


def test_what_is_none_of_ours_stays(world):
    world.save(3)
    others = ["notes.txt", "step-1", "step-000000010", "precious"]
    for name in others:
        world.fs.makedirs(f"{world.path}/{name}")
        world.fs.pipe_file(f"{world.path}/{name}/file", b"mine")
    world.store().prune()
    assert set(world.names()) == {*others, "step-00000003"}


def test_the_only_good_one_is_never_removed(world):
    world.save(1, 2, 3, 8)
    flip(world)
    world.change(world.file(3, "manifest.json"), lambda data: data + b" ")
    world.store(keep=2).prune()
    assert world.names() == ["step-00000002", "step-00000003", "step-00000008"]
    assert world.store().newest().optimizer_step == 2


def test_if_none_is_good_none_is_removed(world):
    world.save(1, 2, 8)
    for round_number in (1, 2, 8):
        world.change(world.file(round_number, "manifest.json"), lambda data: data + b" ")
    world.store(keep=1).prune()
    assert len(world.names()) == 3


def test_a_damaged_one_among_the_kept_does_not_spare_others(world):
    world.save(1, 2, 3, 8)
    flip(world)
    world.store(keep=2).prune()
    assert world.names() == ["step-00000003", "step-00000008"]


def test_cut_off_saves_stay_where_nothing_is_complete(world):
    world.fs.makedirs(f"{world.path}/step-00000010.partial")
    world.fs.pipe_file(f"{world.path}/step-00000010.partial/stage-000.safetensors", b"perhaps of use")
    world.store().prune()
    assert world.names() == ["step-00000010.partial"]


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_by_its_base_its_step_or_itself(world, monkeypatch):
    world.save(3, 8)
    assert find_checkpoint(world.url).optimizer_step == 8
    assert find_checkpoint(world.url + "/").optimizer_step == 8
    assert find_checkpoint(world.url, 3).optimizer_step == 3
    assert find_checkpoint(f"{world.url}/step-00000003").optimizer_step == 3
    assert find_checkpoint(f"{world.url}/step-00000003/", 3).optimizer_step == 3
    with pytest.raises(UserError, match=r"--step 8: .* is the checkpoint of step 3; leave one of them out"):
        find_checkpoint(f"{world.url}/step-00000003", 8)
    with pytest.raises(UserError, match=r"has no checkpoint of step 4: name one of those it has \(3, 8\)"):
        find_checkpoint(world.url, 4)


def test_a_runs_folder_has_its_checkpoints_below_it(tmp_path):
    CheckpointStore(str(tmp_path / "checkpoints")).save(8, MANIFEST, states_of(8))
    assert find_checkpoint(str(tmp_path)).optimizer_step == 8
    assert find_checkpoint(f"{tmp_path}/", 8).optimizer_step == 8
    with pytest.raises(UserError, match=r"checkpoints has no checkpoint of step 4: name one of those it has \(8\)"):
        find_checkpoint(str(tmp_path), 4)
    with pytest.raises(UserError, match=r"there are no checkpoints in .*nowhere: correct the path"):
        find_checkpoint(str(tmp_path / "nowhere"))


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = CheckpointStore("runs").save(3, MANIFEST, states_of(3))
    assert Path(path) == tmp_path / "runs" / "step-00000003"
    assert find_checkpoint("runs").optimizer_step == 3
    monkeypatch.chdir("runs")
    assert find_checkpoint("step-00000003").optimizer_step == 3
    assert find_checkpoint(".").optimizer_step == 3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nonsense://bucket/x",
            r"cannot reach nonsense://bucket/x \(Protocol not known: nonsense\): correct the address",
        ),
        ("s3://bucket/x", r"cannot reach s3://bucket/x \(.*s3fs.*\): correct the address, or install what it needs"),
    ],
)
def test_addresses_that_cannot_work(url, message):
    with pytest.raises(UserError, match=message) as caught:
        CheckpointStore(url)
    one_line(caught)


def test_a_base_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write checkpoint .*: check space, permissions and network") as caught:
        CheckpointStore(str(tmp_path / "file")).save(1, MANIFEST, states_of(1))
    one_line(caught)


def test_a_store_that_does_not_answer_is_one_line(monkeypatch):
    """Its client's errors have no common class."""

    class ClientError(Exception):
        pass

    def silent(*_, **__):
        raise ClientError("no route\nto the store")

    store = CheckpointStore("memory://silent")
    monkeypatch.setattr(fsspec.filesystem("memory"), "ls", silent)
    for action in (store.newest, store.prune, lambda: store.at(3)):
        with pytest.raises(
            UserError, match=r"cannot list memory://silent \(ClientError: no route to the store\)"
        ) as caught:
            action()
        one_line(caught)


def test_states_that_do_not_fit_together_are_refused():
    with pytest.raises(AssertionError, match="one round"):
        CheckpointStore("memory://mixed").save(3, MANIFEST, [state_of(0, 3), state_of(1, 4)])
    with pytest.raises(AssertionError, match="one state for each stage"):
        CheckpointStore("memory://mixed").save(3, MANIFEST, states_of(3)[:1])


# --- on the disk meanwhile --------------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(tmp_path, monkeypatch):
    """A machine with 50 kB of memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(state_receiver, "host_memory", lambda: (50_000, 50_000))
    monkeypatch.setattr(state_receiver, "is_in_memory", lambda path: False)

    def is_mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    return SimpleNamespace(is_mapped=is_mapped, folder=tmp_path)


def test_room_for_states_is_on_the_disk_where_memory_has_none_and_leaves_no_file(small_machine):
    room = state_receiver.room_for(10_000, 40_000, 40_000, None)
    assert not small_machine.is_mapped()
    room = state_receiver.room_for(10_001, 40_000, 40_000, None)
    room[10_000] = 7
    assert (room.dtype, room.shape, room[10_000]) == (np.uint8, (10_001,), 7)
    assert small_machine.is_mapped()
    assert list(small_machine.folder.iterdir()) == []
    del room
    assert not small_machine.is_mapped()


def full(*args):
    raise OSError(ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        (os, "posix_fallocate", full, "[Errno 28] No space left on device"),
        (state_receiver, "is_in_memory", lambda path: True, " is on no disk"),
        (shutil, "disk_usage", lambda path: SimpleNamespace(free=89_999), "89999 bytes are free on the disk of "),
    ],
)
def test_room_for_states_is_memory_where_no_disk_has_it(
    monkeypatch, caplog, small_machine, module, name, value, reason
):
    monkeypatch.setattr(module, name, value)
    assert state_receiver.room_for(20_000, 45_000, 45_000, None).shape == (20_000,)
    assert not small_machine.is_mapped()
    assert "state_is_in_memory bytes=20000 reason=" in caplog.text
    assert reason in caplog.text
    with pytest.raises(NoRoom, match=r"no room for states of 45001 bytes: 50000 bytes of memory are free, and .*TMP"):
        state_receiver.room_for(20_000, 45_001, 45_001, None)


def test_memory_for_a_state_is_taken_at_once():
    """The next state must find less."""

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    room = state_receiver.room_for(2**27, 2**27, 2**27, None)
    assert resident_bytes() - before > 0.9 * room.nbytes


def test_the_disk_keeps_room_for_what_is_written_there(small_machine, monkeypatch):
    monkeypatch.setattr(state_receiver, "host_memory", lambda: (0, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99_999))
    assert len(state_receiver.room_for(10_000, 50_000, 50_000, Path("/proc/1"))) == 10_000
    for folder in (small_machine.folder, small_machine.folder / "not" / "yet", None):
        with pytest.raises(NoRoom, match=r"99999 bytes are free on the disk of .*, of 100000 for them and what"):
            state_receiver.room_for(10_000, 50_000, 50_000, folder)


class SmallMachine:
    """A machine whose memory has no room for states, and a run whose stages have different states."""

    def __init__(self, folder, monkeypatch, **options):
        self.free = 0
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(state_receiver, "host_memory", lambda: (0, 0))
        monkeypatch.setattr(state_receiver, "is_in_memory", lambda path: False)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))
        config = {
            "model_type": "gpt2",
            "n_embd": 8,
            "n_head": 2,
            "n_layer": 9,
            "vocab_size": 300,
            "tie_word_embeddings": False,
        }
        manifest = manifest_of(model={"config": config}, stages={"count": 2, "layers": [1, 8]})
        self.receiver = StateReceiver(ResolvedManifest.of(manifest), SystemThreads(), folder, **options)

    async def sizes(self):
        """The bytes of each stage's tensors."""
        return [
            [tensor.numel() * tensor.element_size() for tensor in template.values()]
            for template in await self.receiver.templates()
        ]

    async def allocate(self, stage):
        before = sum(room.nbytes for room in self.receiver._held.values())
        tensors = await self.receiver.of_stage(stage).allocate((await self.sizes())[stage])
        self.free -= sum(room.nbytes for room in self.receiver._held.values()) - before
        return tensors


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.001)


async def test_the_first_state_has_no_room_where_all_have_none(tmp_path, monkeypatch):
    """Peers would send what there is room for in vain. What the first ones have taken is not asked for once more."""
    machine = SmallMachine(tmp_path, monkeypatch)
    first, second = (sum(-(-size // 64) * 64 for size in sizes) for sizes in await machine.sizes())
    assert first != second
    machine.free = 2 * (first + second) - 1
    with pytest.raises(NoRoom):
        await machine.allocate(0)
    machine.free += 1
    held = [await machine.allocate(0)]
    assert [len(tensor) for tensor in held[0]] == (await machine.sizes())[0]
    held.append(await machine.allocate(1))
    assert machine.free == first + second
    del held
    await until(lambda: not machine.receiver._held)  # a worker thread lets go just after it has given its result


async def test_of_a_model_the_weights_alone_are_written(tmp_path, monkeypatch):
    machine = SmallMachine(tmp_path, monkeypatch, only_weights=True)
    first, second = (sum(-(-size // 64) * 64 for size in sizes) for sizes in await machine.sizes())
    machine.free = int(1.3 * (first + second))
    with pytest.raises(NoRoom):
        await machine.allocate(0)
    machine.free = int(1.4 * (first + second))
    assert len([await machine.allocate(0), await machine.allocate(1)]) == 2


async def test_a_state_that_is_too_large_for_its_stage_takes_no_room(tmp_path, monkeypatch):
    """Who offers it lies: where room is short, it must not be what there is no room for."""
    receiver = SmallMachine(tmp_path, monkeypatch).receiver
    with pytest.raises(InvalidMessage, match=r"offered 1048576 bytes; a state of stage 0 takes \d{6}$"):
        await receiver.of_stage(0).allocate([2**20])


# --- of a live run ----------------------------------------------------------------------------------------------------


async def is_member(caller):
    return True


class Names:
    """Believes a state that carries an entry."""

    def __init__(self):
        self.offered = []

    async def check(self, stage, state):
        if state.entry != entry_of(stage, state.round_number):
            raise InvalidMessage("not what the entry names")

    async def check_together(self, states):
        if len({state.round_number for state in states}) != 1:
            raise InvalidMessage("they do not fit together")

    async def saved(self, states):
        self.offered.append(states[0].optimizer_step)


def entry_of(stage, round_number):
    return f"the entry of stage {stage} that ends round {round_number}".encode()


def named(stage, state):
    """A state with an entry that names it."""
    cut = Cut(
        stage=stage,
        round=state.round_number,
        epoch=NO_EPOCH,
        attempt=0,
        parent=state.history_hash,
        root="root",
        base=(),
        averages=False,
        parts=(),
    )
    return NamedState(Committed(Entry(cut, ""), (), Close(state.round_number, ())), state)


class Run:
    """Peers that keep snapshots of a run that has made 60 updates and waits there."""

    def __init__(self, folder):
        self.folder = folder
        self.network = MemoryNetwork()
        self.peers = []
        self.manifest = manifest_of(
            model={"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "tie_word_embeddings": False}},
            recovery={"snapshot_every": 10},
            training={"steps": 1000, "global_batch_size": 2, "microbatch_size": 2},
        )
        self.store = CheckpointStore(str(folder / "checkpoints"))
        self.saved = []
        self.names = Names()
        self.told = []
        self.promises = Promises()
        self.begun_at = 0
        self.acts = True
        self.receiver = Gullible(ResolvedManifest.of(self.manifest), SystemThreads())
        self.watch = SimpleNamespace(
            optimizer_step=60,
            created_at_round=lambda optimizer_step: 60,
            observe_checkpoint=self.saved.append,
        )

    async def add(self, peer_id, stage, round_number, timeline=FIRST_TIMELINE, tensors=None, own=False):
        """Add a peer that keeps a snapshot.

        Args:
            own: its replica is in that state, which no entry names
        """
        entry = b"" if own else entry_of(stage, round_number)
        state = dataclasses.replace(state_of(stage, round_number), timeline=timeline, entry=entry)
        if tensors is not None:
            state = dataclasses.replace(state, tensors=tensors)
        storage = FolderStorage(self.folder / peer_id)
        store = NamedSnapshots(
            clock=SystemClock(),
            threads=SystemThreads(),
            storage=storage,
            is_member=is_member,
            restart=lambda: BEGINNING,
        )
        if own:
            stored = write_stored(storage, "own", stage, state)

            async def find(call):
                return stored

            store.sources[stage] = SimpleNamespace(find=find, stored={stored.key: stored})
        else:
            await store.keep(named(stage, state))
        await self.network.transport(peer_id).serve(CallDispatcher(manifest_hash=self.manifest.hash, calls=store.calls))
        self.peers.append(
            PeerView(peer_id=peer_id, stage=stage, state=PeerState.SERVING, round_number=60, optimizer_step=60)
        )
        return state

    async def refresh(self, stages):
        return self.view

    @property
    def view(self):
        return SwarmView(2, tuple(self.peers))

    def writer(self, every=10):
        plan = CheckpointPlan(self.store, every)
        writer = CheckpointWriter(
            ResolvedManifest.of(self.manifest),
            plan,
            watch=self.watch,
            directory=self,
            threads=SystemThreads(),
            rng=random.Random(0),
            duty=Duty(
                acts=lambda: self.acts,
                is_led_by_other=lambda: not self.acts,
                begun_at=self.begun_at,
                tell=self.told.append,
                promises=self.promises,
            ),
            names=self.names,
        )
        writer._receiver = self.receiver
        return writer

    def reach(self, optimizer_step, first_round=0):
        """Go on, or back, to a step; the steps' rounds have numbers that are higher by `first_round`."""
        self.watch.optimizer_step = optimizer_step
        self.watch.created_at_round = lambda step: step + first_round if 0 < step <= optimizer_step else None

    @asynccontextmanager
    async def written(self, monkeypatch, every):
        """A writer is at work; gives a function that waits until it has seen where the run is."""
        monkeypatch.setattr(checkpointing, "SNAPSHOT_RETRY_S", 0.001)
        writer = self.writer(every)

        async def looks():
            await anyio.sleep(0.02)
            await writer.finish()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run, self.network.transport("coordinator"))
            yield looks
            await looks()
            tasks.cancel_scope.cancel()

    async def save(self):
        await self.writer()._save(self.network.transport("coordinator"), 60)


@pytest.mark.parametrize(
    ("section", "setting", "other"), [("averaging", "mode", "delayed"), ("optimizer", "name", "adamw_8bit")]
)
def test_a_run_goes_on_with_the_settings_that_its_states_are_of(tmp_path, section, setting, other):
    url = str(tmp_path / "checkpoints")
    CheckpointStore(url).save(3, MANIFEST, states_of(3))
    options = CheckpointOptions(resume=url)
    assert plan_checkpoints(MANIFEST, tmp_path, options).resume.optimizer_step == 3
    its = getattr(MANIFEST, section)
    changed = MANIFEST.model_copy(update={section: its.model_copy(update={setting: other})})
    with pytest.raises(UserError, match=rf"resume with --set {section}\.{setting}={getattr(its, setting)}"):
        plan_checkpoints(changed, tmp_path, options)


@pytest.mark.parametrize("options", [{"checkpoints": "memory://elsewhere"}, {"keep_checkpoints": 2}])
@pytest.mark.parametrize(
    ("every", "snapshot_every", "reason"),
    [
        (None, 0, r"recovery\.snapshot_every=0 has them keep none: change it"),
        (0, 10, "no checkpoint is written with --checkpoint-every 0: give another number"),
    ],
)
def test_where_no_checkpoint_is_written_none_is_asked_for(tmp_path, options, every, snapshot_every, reason):
    manifest = manifest_of(recovery={"snapshot_every": snapshot_every})
    with pytest.raises(UserError, match=rf"^--(keep-)?checkpoints \S+: .*{reason}, or leave --\S+ out$"):
        plan_checkpoints(manifest, tmp_path, CheckpointOptions(checkpoint_every=every, **options))
    assert plan_checkpoints(manifest, tmp_path, CheckpointOptions(checkpoint_every=every)).store is None


def test_a_momentum_may_change_when_a_run_goes_on_but_not_end(tmp_path):
    def with_momentum(momentum):
        optimizer = MANIFEST.optimizer.model_copy(update={"name": "sgd", "momentum": momentum})
        return MANIFEST.model_copy(update={"optimizer": optimizer})

    url = str(tmp_path / "checkpoints")
    CheckpointStore(url).save(3, with_momentum(0.9), states_of(3))
    options = CheckpointOptions(resume=url)
    assert plan_checkpoints(with_momentum(0.5), tmp_path, options).resume.optimizer_step == 3
    with pytest.raises(UserError, match=r"resume with --set optimizer\.momentum=0\.9$"):
        plan_checkpoints(with_momentum(0.0), tmp_path, options)


@pytest.fixture
async def run(tmp_path):
    run = Run(tmp_path)
    async with run.network:
        yield run


async def test_a_checkpoint_is_made_of_the_snapshots_that_entries_name(run):
    states = [await run.add("a", 0, 60), await run.add("b", 1, 60)]
    await run.save()
    assert run.saved == [60], "the watch is told"
    assert run.names.offered == [60], "and whoever offers it"
    assert run.receiver.num_allocated == 2, "they may be larger than the memory here"
    checkpoint = run.store.newest(run.manifest)
    assert (checkpoint.optimizer_step, checkpoint.round_number) == (60, 60)
    assert checkpoint.entries == (entry_of(0, 60), entry_of(1, 60))
    for stage, state in enumerate(states):
        assert_same(checkpoint.load_stage(stage), state)


async def test_a_live_run_is_exported_from_the_newest_snapshots_of_all_stages(run):
    """Anybody may have these, and they take no memory of the peers."""
    await run.add("a", 0, 60)
    await run.add("b", 1, 50)
    resolved = ResolvedManifest.of(run.manifest)

    class Receiver(Gullible):
        async def check(self, stage, state):
            if not state.tensors:
                raise InvalidMessage("does not fit")

    receiver = Receiver(resolved, SystemThreads())
    with pytest.raises(SwarmError, match=r"no snapshots of all stages .*of stage 0.*snapshot_every=10"):
        await fetch_snapshots(run.network.transport("anybody"), run, resolved, receiver)
    expected = [await run.add("c", 0, 50, FIRST_TIMELINE), await run.add("d", 1, 50, FIRST_TIMELINE)]
    await run.add("liar", 1, 5000)
    await run.add("z", 1, 50, tensors={})
    for stage, state in enumerate(await fetch_snapshots(run.network.transport("anybody"), run, resolved, receiver)):
        assert_same(state, expected[stage])
    assert receiver.num_allocated >= 2, "they may be larger than the memory here"


async def test_what_is_being_saved_can_be_waited_for(run, monkeypatch):
    """It is what was due as the coordinator began: the one before it may have died while it wrote that."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    writer, may_save = run.writer(), threading.Event()
    save = run.store.save

    def save_late(*args):
        may_save.wait(10)
        return save(*args)

    monkeypatch.setattr(run.store, "save", save_late)
    monkeypatch.setattr(checkpointing, "SNAPSHOT_RETRY_S", 0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run, run.network.transport("coordinator"))
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.05) as waited:
            await writer.finish()
        assert waited.cancelled_caught
        for name, stage in (("c", 0), ("d", 1)):
            await run.add(name, stage, 70)
        run.reach(70)  # the run's last step: its checkpoint is due as the one before is still being written
        may_save.set()
        await writer.finish()
        assert run.saved == [60, 70]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("is_saved", [True, False])
async def test_a_coordinator_that_comes_back_complains_of_nothing_that_was_due_before(
    run, monkeypatch, caplog, is_saved
):
    """Peers have no snapshots of that step any more."""
    if is_saved:
        run.store.save(30, run.manifest, states_of(30))
    run.begun_at = 55
    run.reach(55)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        assert run.saved == [30] * is_saved
        run.reach(85)
    assert run.told == ["The checkpoint of optimizer step 60 was missed: the run went on too soon."]
    [told] = run.promises.unkept()
    assert told.startswith("1 checkpoint was not written, of optimizer step 60 (the run went on too soon)")


async def test_a_quick_run_gets_the_checkpoint_before_the_newest_and_is_told_of_those_before(run, monkeypatch):
    """Peers keep their last two snapshots."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 30)
        await run.add(f"{name}'", stage, 40)
    run.reach(1)
    async with run.written(monkeypatch, every=10) as looks:
        await looks()
        run.reach(41)
    assert run.saved == [30, 40]
    [told] = run.promises.unkept()
    assert told.startswith("2 checkpoints were not written, of optimizer steps 10 and 20 (the run makes steps faster")


async def test_the_newest_checkpoint_does_not_wait_for_the_one_before(run, monkeypatch):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 40)
    run.reach(1)
    async with run.written(monkeypatch, every=10) as looks:
        await looks()
        run.reach(40)
    assert run.saved == [40]


async def test_a_peer_that_keeps_no_snapshots_says_why_there_is_no_checkpoint(run, monkeypatch):
    run.reach(1)
    async with run.written(monkeypatch, every=60) as looks:
        await looks()
        words = {"trouble": Trouble.NO_SNAPSHOTS, "trouble_since_s": 1.0, "note": "its disk is full", "name": "anna"}
        run.peers.append(PeerView(peer_id="12D3KooWabcdefgh", stage=0, state=PeerState.SERVING, **words))
        run.reach(60)
        await anyio.sleep(0.02)
        told = ["1 checkpoint was not written, of optimizer step 60 (anna (…abcdefgh) says: its disk is full)"]
        assert run.promises.unkept() == told, "as long as it waits"
        run.reach(85)
    assert run.promises.unkept() == told, "and when it is too late"


async def test_a_checkpoint_of_weights_that_are_given_up_was_not_promised(run, monkeypatch):
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.reach(60)
        await anyio.sleep(0.02)
        assert run.promises.unkept()
        run.reach(20)
    assert run.promises.unkept() == []


async def test_a_coordinator_that_takes_over_complains_of_nothing_that_was_due_before(run, monkeypatch):
    run.acts = False
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.reach(55)
        await looks()
        run.acts = True
    assert run.told == []
    assert run.promises.unkept() == []


async def test_a_checkpoint_whose_line_of_metrics_is_forgotten_is_not_missed(run, monkeypatch):
    """A coordinator remembers some thousand lines, and checkpoints may lie further apart."""
    run.store.save(30, run.manifest, states_of(30))
    run.reach(55)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.watch.created_at_round = lambda step: None
    assert run.told == []


async def test_what_was_saved_is_not_fetched_again(run, monkeypatch):
    """A coordinator is started again soon after it has saved a checkpoint. Another round's would be another one."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    run.store.save(60, run.manifest, states_of(59))
    run.begun_at = 55
    run.reach(60)
    for told in (["The checkpoint of optimizer step 60 is saved."], []):
        run.told.clear()
        async with run.written(monkeypatch, every=10):
            pass
        assert run.told == told
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000060.1"]
    assert run.saved == [60, 60]


async def test_a_store_that_does_not_answer_has_nothing(run, monkeypatch, caplog):
    def newest_that(*_):
        raise UserError("no network")

    monkeypatch.setattr(run.store, "newest_that", newest_that)
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    run.begun_at = 55
    run.reach(60)
    async with run.written(monkeypatch, every=10):
        pass
    assert run.told == ["The checkpoint of optimizer step 60 is saved."]
    assert "checkpoints_not_seen reason=no network" in caplog.text


async def test_after_a_rewind_what_holds_is_not_saved_again_and_what_is_made_anew_is(run, monkeypatch):
    for name, stage, round_number in (("a", 0, 30), ("b", 1, 30), ("c", 0, 60), ("d", 1, 60)):
        await run.add(name, stage, round_number)
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        for optimizer_step in (30, 60, 55):  # peers have no snapshots of step 30 any more when it is at 55
            await looks()
            run.peers = run.peers[-2:] if optimizer_step == 55 else run.peers
            run.reach(optimizer_step)
        await looks()
        assert run.told == [f"The checkpoint of optimizer step {step} is saved." for step in (30, 60)]
        run.told.clear()
        for name, stage in (("e", 0), ("f", 1)):
            await run.add(name, stage, 80, Timeline(75, 55, 55))
        run.reach(60, first_round=20)
    assert run.told == ["The checkpoint of optimizer step 60 is saved."]
    assert run.store.newest().round_number == 80


async def test_no_checkpoint_waits_for_one_that_the_run_has_gone_back_before(run, monkeypatch):
    """Until the run has come there again, there may be many, and its stages may be lost once more."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 30)
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await anyio.sleep(0.02)
        run.reach(60)
        await anyio.sleep(0.02)
        assert run.told == [], "peers have no snapshots of step 60 yet"
        run.reach(30)
        await looks()
        assert run.told == ["The checkpoint of optimizer step 30 is saved."]
        for name, stage in (("c", 0), ("d", 1)):
            await run.add(name, stage, 60)
        run.reach(60)
        await looks()
        assert run.told[1:] == ["The checkpoint of optimizer step 60 is saved."]


async def test_the_last_steps_checkpoint_is_waited_for(run, monkeypatch):
    """The run stands still there, and a peer may still be making its last update. No entry names these weights."""
    training = run.manifest.training.model_copy(update={"steps": 60})
    run.manifest = run.manifest.model_copy(update={"training": training})
    await run.add("a", 0, 60, own=True)

    async def sleep(seconds):
        await run.add("b", 1, 60, own=True)

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert run.saved == [60]
    assert run.names.offered == []


async def test_while_a_stage_is_waited_for_others_are_not_fetched_again_and_again(run, monkeypatch):
    states = [await run.add("a", 0, 60, FIRST_TIMELINE)]

    async def sleep(seconds):
        sleep.count += 1
        if sleep.count == 5:
            states.append(await run.add("b", 1, 60, FIRST_TIMELINE))

    sleep.count = 0
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert run.saved == [60]
    of_first, of_last = [run.network.num_calls("state_chunk", peer) for peer in "ab"]
    assert of_first == 2 * of_last > 0, "once before it is known that another one lacks, and once with that"
    for stage, state in enumerate(states):
        assert_same(run.store.newest().load_stage(stage), state)


@pytest.mark.parametrize("change", [{"acts": False}, {"created_at_round": lambda step: 70}])
async def test_a_checkpoint_that_others_have_to_write_or_of_a_round_that_is_given_up_is_not_tried_again(
    run, monkeypatch, change
):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    tries = []

    def fail(*args):
        tries.append(args)
        raise UserError("no network")

    async def sleep(seconds):
        run.acts = change.get("acts", True)
        run.watch.created_at_round = change.get("created_at_round", run.watch.created_at_round)
        run.watch.optimizer_step += 4

    monkeypatch.setattr(run.store, "save", fail)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert (len(tries), run.saved) == (1, [])
    missed = "The checkpoint of optimizer step 60 was missed: the run went on too soon."
    assert run.told == ([missed] if run.acts else []), "the coordinator that acts says so"


@pytest.mark.parametrize("num_failures", [2, 9])
async def test_a_checkpoint_fails_soon_where_there_is_no_room(run, monkeypatch, num_failures):
    """Each try may download states in vain; and who offers the first one may lie about its size."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    failures, pauses = [NoRoom("the disk is full")] * num_failures, []

    class Receiver(Gullible):
        async def allocate(self, stage, sizes):
            if stage == 1 and failures:
                raise failures.pop()
            return await super().allocate(stage, sizes)

    async def sleep(seconds):
        pauses.append(seconds)

    run.receiver = Receiver(run.receiver._resolved, SystemThreads())
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert pauses == list(checkpointing.SAVE_PAUSES_S[:num_failures])
    assert bool(run.promises.unkept()) == (num_failures == 9), "what is late is kept"
    text = "is saved." if num_failures == 2 else "could not be saved: the disk is full."
    assert run.told == [f"The checkpoint of optimizer step 60 {text}"]
    assert run.receiver.num_allocated == (3 if num_failures == 2 else 1), "the stage without room is asked for first"


@pytest.mark.parametrize("num_failures", [2, 9])
async def test_a_checkpoint_is_written_again_if_the_disk_fails_for_a_moment(run, monkeypatch, num_failures):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    save, failures, pauses = run.store.save, [UserError("no network")] * num_failures, []

    def fail_first(*args):
        if failures:
            raise failures.pop()
        return save(*args)

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(run.store, "save", fail_first)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert pauses == list(checkpointing.SAVE_PAUSES_S[:num_failures])
    assert run.told == [
        "The checkpoint of optimizer step 60 is saved."
        if num_failures == 2
        else "The checkpoint of optimizer step 60 could not be saved: no network."
    ]


@pytest.mark.parametrize("is_due", [True, False])
async def test_nothing_is_saved_if_another_coordinator_may_act_when_the_states_have_come(run, monkeypatch, is_due):
    monkeypatch.setattr(checkpointing, "SAVE_PAUSES_S", (0.001, 0.001))
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    fetch_all = CheckpointWriter._fetch_all

    async def fetch_slowly(*args):
        states = await fetch_all(*args)
        run.acts, run.watch.optimizer_step = is_due, 60 if is_due else 80  # it gives up when the next one is due
        return states

    with patch.object(CheckpointWriter, "_fetch_all", fetch_slowly):
        await run.save()
    assert (run.store.newest() is not None) is is_due


async def test_states_that_have_come_are_kept_while_it_is_not_known_who_acts(run, monkeypatch):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    fetch, fetched, pauses = CheckpointWriter._fetch, [], []

    async def fetch_last(writer, transport, stage, weights):
        fetched.append(stage)
        run.acts = False  # the look at the DHT has become old
        return await fetch(writer, transport, stage, weights)

    async def sleep(seconds):
        pauses.append(seconds)
        run.acts = len(pauses) == 2

    monkeypatch.setattr(CheckpointWriter, "_fetch", fetch_last)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert (fetched, run.saved, pauses) == ([0, 1], [60], list(checkpointing.SAVE_PAUSES_S[:2]))


async def test_who_gives_a_state_of_other_updates_is_not_believed(run, monkeypatch):
    """Nor does the coordinator end of it: it waits until somebody gives the right one."""
    await run.add("a", 0, 60)
    await run.add("liar", 1, 77, Timeline(77, 60, 60))
    expected = []

    async def sleep(seconds):
        expected.append(await run.add("b", 1, 60, FIRST_TIMELINE))

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    [state] = expected
    assert_same(run.store.newest().load_stage(1), state)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: {}, "the state lacks"),
        (lambda state: state | {"__metadata__": torch.ones(2)}, "the state has 1 tensors that this stage lacks"),
        (lambda state: state | {name: value + torch.nan for name, value in list(state.items())[:1]}, "not finite"),
    ],
)
async def test_a_checkpoint_is_made_of_states_that_peers_would_take_over(run, monkeypatch, caplog, damage, reason):
    """One peer gives another one, and is not the only one that has any."""
    caplog.set_level(logging.INFO)
    resolved = ResolvedManifest.of(run.manifest)
    run.receiver = StateReceiver(resolved, SystemThreads())
    tensors = [StageTrainer(resolved, spec, blank=True).state() for spec in resolved.specs]
    await run.add("a", 0, 60, tensors=tensors[0])
    await run.add("liar", 1, 60, tensors=damage(tensors[1]))

    async def sleep(seconds):
        assert not run.saved
        await run.add("b", 1, 60, tensors=tensors[1])

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert reason in caplog.text
    loaded = run.store.newest().load_stage(1).tensors
    assert loaded.keys() == tensors[1].keys()
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.values())


# --- what a run is resumed from ---------------------------------------------------------------------------------------


def saved(folder, manifest, optimizer_step):
    """A checkpoint in a run's folder."""
    store = CheckpointStore(str(folder / "checkpoints"))
    store.save(optimizer_step, manifest, states_of(optimizer_step))
    return store.newest(manifest)


def test_what_has_changed_since_a_checkpoint_is_told(tmp_path, caplog):
    """Somebody may have left a `--set` out of the command."""
    checkpoint = saved(tmp_path, MANIFEST, 3)
    tell_changes(checkpoint, MANIFEST)
    assert "setting_changed" not in caplog.text
    training = MANIFEST.training.model_copy(update={"steps": 999})
    tell_changes(checkpoint, MANIFEST.model_copy(update={"training": training}))
    [told] = [record.getMessage() for record in caplog.records if "setting_changed" in record.getMessage()]
    assert told == f"setting_changed setting=training.steps checkpoint={MANIFEST.training.steps} now=999"


def test_more_steps_move_the_learning_rate_which_is_told(tmp_path, caplog):
    """The schedule is over the run's steps: one that is at its end is high up again."""
    schedule = MANIFEST.schedule.model_copy(update={"name": "cosine"})
    manifest = MANIFEST.model_copy(update={"schedule": schedule})
    last = manifest.training.steps - 1
    checkpoint = saved(tmp_path, manifest, last)
    training = manifest.training.model_copy(update={"steps": 2 * (last + 1)})
    tell_changes(checkpoint, manifest.model_copy(update={"training": training}))
    [_, told] = [record.getMessage() for record in caplog.records if "setting_changed" in record.getMessage()]
    highest = manifest.optimizer.learning_rate
    assert told.startswith(f"setting_changed setting=the learning rate at optimizer step {last} checkpoint=")
    was, now = (float(part) for part in told.partition("checkpoint=")[2].split(" now="))
    assert was == pytest.approx(0.1 * highest)
    assert 0.5 * highest < now < 0.6 * highest


def test_what_a_run_was_resumed_from_is_found_again(tmp_path, monkeypatch, caplog):
    checkpoint, timeline = saved(tmp_path, MANIFEST, 3), Timeline(53, 3, 53)
    assert find_resumed(tmp_path, timeline) is None, "nobody has noted anything"
    monkeypatch.chdir(tmp_path)
    note_resumed(tmp_path, find_checkpoint("checkpoints/step-00000003"), timeline)
    monkeypatch.chdir("/")
    assert find_resumed(tmp_path, timeline).path == checkpoint.path
    assert find_resumed(tmp_path, dataclasses.replace(timeline, first_round=99)) is None
    CheckpointStore(str(tmp_path / "checkpoints")).save(3, MANIFEST, states_of(12))
    assert find_resumed(tmp_path, timeline) is None, "another checkpoint of that step has taken its place"
    assert not caplog.text
    shutil.rmtree(tmp_path / "checkpoints")
    assert find_resumed(tmp_path, timeline) is None
    (tmp_path / RESUMED).write_text('{"path": 5')
    assert find_resumed(tmp_path, timeline) is None
    (tmp_path / RESUMED).write_bytes(b"\xff")
    assert find_resumed(tmp_path, timeline) is None
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["checkpoint_not_given"] * 3


def test_a_store_that_is_no_disk_is_found_again(world, tmp_path):
    world.save(3)
    timeline = Timeline(53, 3, 53)
    note_resumed(tmp_path, world.store().newest(), timeline)
    assert find_resumed(tmp_path, timeline).load_stage(0).round_number == 3

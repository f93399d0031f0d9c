"""What was saved comes back, and a save that fails or is cut off leaves what was there."""

import itertools
import json
import os
from pathlib import Path

import pytest
from checkpoint_worlds import MANIFEST, assert_same, one_line, state_of, states_of
from checkpoint_worlds import world as world
from safetensors import SafetensorError

from coordinator.checkpoints import file_store as checkpoint_files
from coordinator.checkpoints import folder as checkpoint_folder
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from swarm_peer.errors import UserError


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


def test_states_that_do_not_fit_together_are_refused():
    with pytest.raises(AssertionError, match="one round"):
        CheckpointStore("memory://mixed").save(3, MANIFEST, [state_of(0, 3), state_of(1, 4)])
    with pytest.raises(AssertionError, match="one state for each stage"):
        CheckpointStore("memory://mixed").save(3, MANIFEST, states_of(3)[:1])

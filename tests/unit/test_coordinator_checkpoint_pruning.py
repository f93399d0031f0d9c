"""Which checkpoints make room for newer ones, and what is never removed."""

import pytest
from checkpoint_worlds import MANIFEST, flip, remove, states_of
from checkpoint_worlds import world as world

from coordinator.checkpoints import file_store as checkpoint_files
from coordinator.checkpoints.store import find_checkpoint


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

"""What a run is resumed from: what has changed since is told, and it is found again."""

import dataclasses
import shutil

import pytest
from checkpoint_worlds import MANIFEST, states_of
from checkpoint_worlds import world as world

from coordinator.checkpoints.resumed import RESUMED, find_resumed, note_resumed, tell_changes
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from swarm_peer.policy.timeline import Timeline


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

"""What is damaged is told in one line, and the checkpoint before it is taken."""

import json
import logging
import struct

import pytest
from checkpoint_worlds import MANIFEST, assert_same, flip, manifest_of, one_line, remove, state_of
from checkpoint_worlds import world as world

from coordinator.checkpoints import file_store as checkpoint_files
from coordinator.checkpoints import folder as checkpoint_folder
from coordinator.checkpoints.store import find_checkpoint
from swarm_peer.errors import UserError


def cut(world):
    world.change(world.file(8, "stage-001.safetensors"), lambda data: data[:-1])


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

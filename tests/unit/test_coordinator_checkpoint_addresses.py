"""Where a checkpoint is found, and addresses at which there can be none."""

from pathlib import Path

import fsspec
import pytest
from checkpoint_worlds import MANIFEST, one_line, states_of
from checkpoint_worlds import world as world

from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from swarm_peer.errors import UserError


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

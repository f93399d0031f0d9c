"""Promises that were not kept are told at the end of a command, which is an error then."""

import json
import sys

import pytest
import yaml

import coordinator.cli
from coordinator.commands import runs
from coordinator.watch.journal import EVENTS
from coordinator.watch.metrics_file import METRICS, MetricsFile, metrics_line
from coordinator.watch.promises import NotKept, Promises
from coordinator.watch.run_file import RUN_FILE, run_file_written
from swarm_peer.config import RunManifest
from swarm_peer.errors import Interrupted, SwarmError, UserError
from swarm_peer.runtime.host.identities import KeptFile

MANIFEST = RunManifest.model_validate(
    {
        "name": "promised",
        "model": {"config": "none"},
        "stages": {"count": 2},
        "data": {"sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)


def test_all_that_was_asked_for_is_no_error():
    promises = Promises()
    with promises.told_at_end():
        promises.broken("the report was not written", "a full disk")
        promises.checkpoint_due(5, "its peers are still writing")
        promises.checkpoint_failed(10, "a full disk")
        promises.kept("the report was not written")
        for step in (5, 10):
            promises.checkpoint_saved(step)


def test_the_rest_is_told_with_how_many_which_and_why():
    promises = Promises()
    promises.broken("the report was not written", "a full\ndisk.")
    promises.checkpoint_due(10, "no donor")
    promises.checkpoint_failed(5, "no donor")
    promises.checkpoint_due(10, "\x1b[2Ja full disk")
    with pytest.raises(NotKept) as told, promises.told_at_end():
        pass
    assert str(told.value) == (
        "not all that was asked for was done: 2 checkpoints were not written, of optimizer steps 5 and 10 "
        "([2Ja full disk); the report was not written (a full disk)"
    )


def test_of_many_checkpoints_the_first_and_the_last_are_named():
    promises = Promises()
    for step in range(5, 105, 5):
        promises.checkpoint_failed(step, "slow")
    [told] = promises.unkept()
    assert told == "20 checkpoints were not written, of optimizer steps 5, 10, 15, …, 90, 95 and 100 (slow)"


def test_another_error_goes_first_and_the_rest_is_told_beside_it(capsys):
    promises = Promises()
    promises.checkpoint_failed(5, "a full disk")
    with pytest.raises(Interrupted), promises.told_at_end():
        raise Interrupted("Ctrl+C")
    assert capsys.readouterr().err == "Not done: 1 checkpoint was not written, of optimizer step 5 (a full disk).\n"


def test_what_is_under_way_when_a_coordinator_stops_is_the_next_ones():
    promises = Promises()
    promises.checkpoint_failed(5, "a full disk")
    promises.checkpoint_due(10, "being written")
    promises.stops_early()
    assert [told[:45] for told in promises.unkept()] == ["1 checkpoint was not written, of optimizer st"]
    assert "step 5 " in promises.unkept()[0]


def test_checkpoints_of_weights_that_were_given_up_are_not_missed():
    promises = Promises()
    for step in (5, 10, 15):
        promises.checkpoint_due(step, "slow")
    promises.went_back(7)
    assert "step 5 " in promises.unkept()[0]


def blocked(path):
    """Have nothing be written at a path, until it is removed."""
    path.mkdir()
    return path


def test_metrics_that_the_disk_does_not_take_are_told_when_the_file_is_closed(tmp_path):
    metrics = MetricsFile(tmp_path)
    (tmp_path / METRICS).unlink()
    blocked(tmp_path / METRICS)
    line = metrics_line(
        optimizer_step=1, round_number=0, loss=1.0, samples=2, seconds=1.0, sequence_length=8, peers=[1]
    )
    assert metrics.write(line)
    assert metrics.close() == "Is a directory"
    (tmp_path / METRICS).rmdir()
    assert metrics.close() == "", "it is kept late"
    assert json.loads((tmp_path / METRICS).read_text())["optimizer_step"] == 1


def test_the_file_of_the_run_is_written_late_where_it_could_not_be_at_once(tmp_path):
    promises, path = Promises(), blocked(tmp_path / RUN_FILE)
    with run_file_written(tmp_path, "run", MANIFEST, promises):
        assert promises.unkept() == []
    assert promises.unkept() == ["run.json was not written (Is a directory)"]
    promises.kept("run.json was not written")
    with run_file_written(tmp_path, "run", MANIFEST, promises):
        path.rmdir()
    assert promises.unkept() == []
    assert json.loads(path.read_text())["run_id"] == "run"


def test_a_file_that_is_not_kept_says_why(tmp_path):
    assert KeptFile(blocked(tmp_path / EVENTS)).write(b"x") == "Is a directory"
    assert KeptFile(tmp_path / "other").write(b"x") == ""


@pytest.mark.parametrize(("error", "code"), [(None, 0), (UserError("cannot write report.html: disk full"), 1)])
def test_a_local_run_without_its_report_has_not_done_all(tmp_path, monkeypatch, capsys, error, code):
    def write(folder):
        if error is not None:
            raise error
        return folder / "report.html"

    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(MANIFEST.model_dump(mode="json")))
    monkeypatch.setattr(runs, "load_and_resolve", lambda *_: type("Resolved", (), {"manifest": MANIFEST}))
    monkeypatch.setattr("coordinator.run.room.check_local_peers", lambda *_: None)
    monkeypatch.setattr("swarm_peer.runtime.data.slices.validation_samples", lambda *_: None)
    monkeypatch.setattr("coordinator.run.local.run_local", lambda *_, **__: None)
    monkeypatch.setattr(runs, "_print_result", lambda *_: None)
    monkeypatch.setattr("coordinator.report.page.write_report", write)
    monkeypatch.setattr(sys, "argv", ["swarm-coordinator", "local", str(config), "--output", str(tmp_path / "o")])
    if error is None:
        coordinator.cli.run()
    else:
        with pytest.raises(SystemExit) as ended:
            coordinator.cli.run()
        assert ended.value.code == code
        assert "the report was not written (cannot write report.html: disk full)" in capsys.readouterr().err
    assert isinstance(NotKept("x"), SwarmError)

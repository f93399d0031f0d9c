"""The lines of a run in its file, through full disks, restarts and rewinds."""

import json
import time
from pathlib import Path

import pytest
from watched_runs import LENGTH, make_watch, record, report, rewound

from coordinator.dashboard.from_folder import read_history
from coordinator.watch.metrics_file import MetricsFile, ValidationLoss, metrics_line, whole_lines
from swarm_peer.errors import UserError


def make_line(optimizer_step, round_number=None, loss=1.0, validation_loss=None, seconds=0.5):
    return metrics_line(
        optimizer_step=optimizer_step,
        round_number=optimizer_step - 1 if round_number is None else round_number,
        loss=loss,
        samples=8,
        seconds=seconds,
        sequence_length=LENGTH,
        peers=[1],
        validation=None if validation_loss is None else ValidationLoss(validation_loss, 4),
    )


def written(folder):
    """The lines in the file, without the times at which they were written."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(line.pop("time") - time.time()) < 60 for line in lines)
    return lines


def test_a_step_that_took_no_time():
    assert make_line(1, seconds=0.0)["tokens_per_s"] == 0.0


def test_when_the_last_line_was_written(tmp_path):
    assert MetricsFile(tmp_path).written_s == 0.0
    MetricsFile(tmp_path, unix_s=lambda: 77.5).write(make_line(1))
    assert MetricsFile(tmp_path, resume=True).written_s == 77.5


@pytest.mark.parametrize("validation_loss", [None, 1.25])
def test_metrics_are_on_disk_at_once(tmp_path, validation_loss):
    metrics = MetricsFile(tmp_path / "run" / "output")
    lines = [make_line(round_number, validation_loss=validation_loss) for round_number in (1, 2)]
    for number, line in enumerate(lines, 1):
        assert metrics.write(line)
        assert written(tmp_path / "run" / "output") == lines[:number]
    metrics.close()


def test_a_rewind_removes_lines_from_the_file(tmp_path):
    metrics = MetricsFile(tmp_path)
    for round_number in range(1, 6):
        metrics.write(make_line(round_number))
    rewound = [make_line(3, round_number=9, loss=0.5), make_line(4, round_number=10)]
    assert metrics.write(rewound[0])
    assert written(tmp_path) == [make_line(1), make_line(2), rewound[0]]
    assert metrics.write(rewound[1])
    assert not metrics.write(make_line(5)), "of the line that was given up"
    assert written(tmp_path) == [make_line(1), make_line(2), *rewound]
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.fixture
def full_disk(monkeypatch):
    """A function that has files be cut off, until it is called again."""
    real = Path.open

    def cut_off(path, *_, **__):
        with real(path, "a") as file:
            file.write('{"optimizer_st')
        raise OSError(28, "No space left on device")

    def refuse(path, target):
        raise OSError(28, "No space left on device")

    def switch():
        if Path.open is real:
            monkeypatch.setattr(Path, "open", cut_off)
            monkeypatch.setattr(Path, "replace", refuse)
        else:
            monkeypatch.undo()

    return switch


@pytest.mark.parametrize("ends_there", [False, True])
def test_lines_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path, full_disk, caplog, ends_there):
    metrics = MetricsFile(tmp_path)
    metrics.write(make_line(1))
    full_disk()
    assert all(metrics.write(make_line(step)) for step in (2, 3))
    assert caplog.messages == [f"metrics_not_written path={tmp_path / 'metrics.jsonl'} reason=No space left on device"]
    full_disk()
    if not ends_there:
        metrics.write(make_line(4))
    metrics.close()
    assert written(tmp_path) == [make_line(step) for step in range(1, 4 if ends_there else 5)]


def test_a_disk_that_is_full_from_the_beginning_is_told_in_one_line(tmp_path, full_disk):
    full_disk()
    with pytest.raises(UserError, match=r"No space left on device.*: check space"):
        MetricsFile(tmp_path)


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    for round_number in (3, 1):
        metrics = MetricsFile(tmp_path)
        metrics.write(make_line(round_number))
        metrics.close()
    assert written(tmp_path) == [make_line(1)]


def test_a_damaged_line_costs_no_other(tmp_path):
    lines = [json.dumps(make_line(number)).encode() for number in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"\n".join([b"\xff{", lines[0], lines[0][:9] + b"\xc3", lines[1], b"\0\0"])
    )
    assert whole_lines(tmp_path / "metrics.jsonl") == [make_line(1), make_line(2)]


@pytest.mark.parametrize("line", ['{"step": 1, "global_step": 0}', '{"optimizer_step": 1, "round": 0, "loss": 2.0}'])
def test_metrics_of_another_version_are_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    assert read_history(tmp_path).points() == {}, "the page has no curves, and the run goes on"
    with pytest.raises(UserError, match="was written by another version of swarm"):
        MetricsFile(tmp_path, resume=True)


def test_a_coordinator_that_restarts_writes_no_line_twice(tmp_path):
    first = MetricsFile(tmp_path)
    for round_number in (1, 2, 3):
        first.write(make_line(round_number))
    first.close()
    again = MetricsFile(tmp_path, resume=True)
    assert [again.write(make_line(round_number)) for round_number in (2, 3, 4)] == [False, False, True]
    again.close()
    assert written(tmp_path) == [make_line(round_number) for round_number in (1, 2, 3, 4)]


def test_a_coordinator_that_restarts_in_the_middle_of_a_rewind_takes_lines_back_too(tmp_path):
    """The new one has a fresh watch, and hears of both lines again."""
    first = MetricsFile(tmp_path)
    for round_number in range(1, 6):
        first.write(make_line(round_number))
    first.write(make_line(3, round_number=9))
    first.close()
    again = MetricsFile(tmp_path, resume=True)
    watch = make_watch()
    old = [report(optimizer_step) for optimizer_step in range(1, 6)]
    rewind = [report(optimizer_step, round_number=number) for optimizer_step, number in [(3, 9), (4, 10), (5, 11)]]
    new = [line for line in watch.observe(rewound(12, 5), {"a": record(*old, *rewind)}, 0.0) if again.write(line)]
    again.close()
    assert [(line["optimizer_step"], line["round"]) for line in new] == [(4, 10), (5, 11)]
    expected = [(1, 0), (2, 1), (3, 9), (4, 10), (5, 11)]
    assert [(line["optimizer_step"], line["round"]) for line in written(tmp_path)] == expected
    assert [(line["optimizer_step"], line["round"]) for line in watch.lines] == expected


def test_a_coordinator_that_was_away_during_a_rewind_takes_lines_back(tmp_path):
    first = MetricsFile(tmp_path)
    for round_number in range(1, 6):
        first.write(make_line(round_number))
    first.close()
    again = MetricsFile(tmp_path, resume=True)
    assert again.write(make_line(2, round_number=8))
    again.close()
    assert written(tmp_path) == [make_line(1), make_line(2, round_number=8)]

import json

import pytest

from coordinator.run_watch import VALIDATION_WAIT_S, MetricsFile, RunWatch, step_line
from swarm_peer.config import RunManifest
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.wire.records import Progress, ProgressRecord, StepReport, Validation

LENGTH = 10


def make_watch(validation_every=0, validation_samples=4, steps=10):
    manifest = RunManifest.model_validate(
        {
            "name": "watched",
            "model": {"config": "none"},
            "stages": {"count": 2},
            "data": {"sequence_length": LENGTH},
            "training": {
                "steps": steps,
                "global_batch_size": 8,
                "microbatch_size": 2,
                "validation_every": validation_every,
                "validation_samples": validation_samples,
            },
            "optimizer": {"learning_rate": 0.1},
        }
    )
    return RunWatch(manifest, SwarmView(2))


def peer(peer_id, stage, state=PeerState.SERVING):
    return PeerView(peer_id, stage, state, step=1, samples_per_s=2.0, queue=3)


VIEW = SwarmView(2, (peer("a", 0), peer("b", 0), peer("c", 1)))


def report(step, loss=2.5, samples=8, seconds=2.0):
    return StepReport(step=step, samples=samples, loss=loss, seconds=seconds)


def record(*reports, step=0, samples=0, validations=()):
    current = Progress(step=step, samples=samples, claimed=samples, loss_sum=0.0)
    return ProgressRecord(
        current=current,
        finished=reports,
        validations=tuple(Validation(step=at, samples=count, loss_sum=loss_sum) for at, count, loss_sum in validations),
    )


def steps_of(lines):
    return [line["step"] for line in lines]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_finished_step_is_a_line():
    watch = make_watch()
    assert watch.observe(VIEW, {"a": record(report(1))}, now=0.0) == [
        {
            "step": 1,
            "loss": 2.5,
            "samples": 8,
            "tokens": 8 * LENGTH,
            "tokens_per_s": 40.0,
            "seconds": 2.0,
            "peers": [2, 1],
        }
    ]
    assert watch.step == 1


def test_each_step_is_told_once_however_many_report_it():
    watch = make_watch()
    assert steps_of(watch.observe(VIEW, {"a": record(report(1)), "b": record(report(1, loss=9.0))}, 0.0)) == [1]
    assert watch.lines[0]["loss"] == 2.5, "that of the first by id"
    assert watch.observe(VIEW, {"a": record(report(1)), "b": record(report(1))}, 1.0) == []


def test_lines_come_in_order():
    watch = make_watch()
    progress = {"a": record(report(3), report(2)), "b": record(report(1))}
    assert steps_of(watch.observe(VIEW, progress, 0.0)) == [1, 2, 3]
    assert steps_of(watch.lines) == [1, 2, 3]


def test_a_step_that_comes_too_late_is_no_line_any_more():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(report(1), report(3))}, 0.0)
    assert watch.observe(VIEW, {"a": record(report(2))}, 1.0) == []
    assert steps_of(watch.observe(VIEW, {"a": record(report(2), report(4))}, 2.0)) == [4]
    assert steps_of(watch.lines) == [1, 3, 4]


def test_a_line_has_the_peers_of_the_time_of_its_report():
    watch = make_watch(validation_every=1)
    watch.observe(VIEW, {"a": record(report(1))}, 0.0)
    smaller = SwarmView(2, (peer("a", 0), peer("b", 0, PeerState.DRAINING)))
    [line] = watch.observe(smaller, {"a": record(report(1))}, VALIDATION_WAIT_S)
    assert line["peers"] == [2, 1]
    assert watch.peers_by_stage() == [1, 0]


def test_reports_of_peers_outside_of_stage_0_are_not_believed():
    watch = make_watch()
    told = {"c": record(report(1), step=5, samples=6, validations=[(0, 4, 1.0)]), "x": record(report(1))}
    assert watch.observe(VIEW, told, 0.0) == []
    assert (watch.current_step, watch.current_samples, watch.initial_validation_loss) == (0, 0, None)


# --- validation -------------------------------------------------------------------------------------------------------


def test_a_line_waits_for_the_validation_of_its_step():
    watch = make_watch(validation_every=2, validation_samples=4)
    finished = [report(1), report(2), report(3)]
    assert steps_of(watch.observe(VIEW, {"a": record(*finished)}, 0.0)) == [1], "the third waits with the second"
    half = {"a": record(*finished, validations=[(2, 2, 3.0)])}
    assert watch.observe(VIEW, half, 1.0) == []
    both = half | {"b": record(validations=[(2, 2, 5.0)])}
    second, third = watch.observe(VIEW, both, 2.0)
    assert (second["step"], second["validation_loss"], second["validation_samples"]) == (2, 2.0, 4)
    assert third["step"] == 3
    assert "validation_loss" not in third


def test_shares_are_weighted_by_their_samples():
    watch = make_watch(validation_every=1, validation_samples=4)
    progress = {
        "a": record(report(1), validations=[(1, 1, 4.0)]),
        "b": record(validations=[(1, 3, 6.0)]),
    }
    [line] = watch.observe(VIEW, progress, 0.0)
    assert line["validation_loss"] == 2.5


def test_a_share_that_is_told_again_counts_once():
    watch = make_watch(validation_every=1, validation_samples=4)
    share = {"a": record(report(1), validations=[(1, 2, 3.0)])}
    for now in range(3):
        assert watch.observe(VIEW, share, float(now)) == []
    [line] = watch.observe(VIEW, share | {"b": record(validations=[(1, 2, 3.0)])}, 4.0)
    assert line["validation_samples"] == 4


def test_a_line_does_not_wait_for_ever():
    watch = make_watch(validation_every=1, validation_samples=4)
    partial = {"a": record(report(1), validations=[(1, 2, 3.0)])}
    assert watch.observe(VIEW, partial, 100.0) == []
    assert watch.observe(VIEW, partial, 100.0 + VALIDATION_WAIT_S - 0.1) == []
    [line] = watch.observe(VIEW, partial, 100.0 + VALIDATION_WAIT_S)
    assert (line["validation_loss"], line["validation_samples"]) == (1.5, 2)


def test_a_line_without_any_validation_comes_in_the_end():
    watch = make_watch(validation_every=1)
    watch.observe(VIEW, {"a": record(report(1))}, 0.0)
    [line] = watch.observe(VIEW, {}, VALIDATION_WAIT_S)
    assert "validation_loss" not in line


def test_the_last_step_is_validated_whatever_its_number():
    watch = make_watch(validation_every=100, steps=3)
    assert steps_of(watch.observe(VIEW, {"a": record(report(1), report(2), report(3))}, 0.0)) == [1, 2]
    done = {"a": record(validations=[(3, 4, 8.0)])}
    [line] = watch.observe(VIEW, done, 1.0)
    assert (line["step"], line["validation_loss"]) == (3, 2.0)


def test_no_validation_is_waited_for_where_there_is_none():
    watch = make_watch(validation_every=0, steps=1)
    assert steps_of(watch.observe(VIEW, {"a": record(report(1))}, 0.0)) == [1]


def test_the_validation_before_training_is_known():
    watch = make_watch(validation_every=5)
    watch.observe(VIEW, {"a": record(validations=[(0, 2, 8.0)]), "b": record(validations=[(0, 2, 12.0)])}, 0.0)
    assert watch.initial_validation_loss == 5.0


# --- the run as a whole -----------------------------------------------------------------------------------------------


def test_progress_of_the_newest_step_is_summed():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(step=4, samples=2), "b": record(step=4, samples=4)}, 0.0)
    assert (watch.current_step, watch.current_samples) == (4, 6)
    watch.observe(VIEW, {"a": record(step=5, samples=2), "b": record(step=4, samples=8)}, 0.0)
    assert (watch.current_step, watch.current_samples) == (5, 2)
    watch.observe(VIEW, {}, 0.0)
    assert (watch.current_step, watch.current_samples) == (5, 0)


def test_the_summary_before_anything_happened():
    summary = make_watch().summary()
    assert summary["step"] == 0
    assert summary["loss"] is summary["tokens_per_s"] is summary["validation_loss"] is None
    assert [stage["peers"] for stage in summary["stages"]] == [[], []]


def test_the_summary():
    watch = make_watch(validation_every=1, validation_samples=2)
    watch.observe(VIEW, {"a": record(report(1), step=1, samples=4, validations=[(1, 2, 3.0)])}, 0.0)
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), step=2, samples=6)}, 0.0)
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), step=2, samples=6)}, VALIDATION_WAIT_S)
    summary = watch.summary()
    assert json.loads(json.dumps(summary)) == summary
    expected = {
        "name": "watched",
        "manifest": watch.manifest.hash,
        "step": 2,
        "steps": 10,
        "samples_in_step": 6,
        "global_batch_size": 8,
        "loss": 2.0,
        "tokens_per_s": 40.0,
        "validation_loss": 1.5,
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["stages"][1]["peers"] == [
        {"peer": "c", "state": "serving", "step": 1, "samples_per_s": 2.0, "tokens_per_s": 20.0, "queue": 3}
    ]


def test_a_step_that_took_no_time():
    assert step_line(1, 1.0, 8, 0.0, LENGTH, [1], None, 0)["tokens_per_s"] == 0.0


@pytest.mark.parametrize("validation_loss", [None, 1.25])
def test_metrics_are_on_disk_at_once(tmp_path, validation_loss):
    metrics = MetricsFile(tmp_path / "run" / "output")
    lines = [step_line(step, 1.0, 8, 0.5, LENGTH, [1], validation_loss, 4) for step in (1, 2)]
    for number, line in enumerate(lines, 1):
        metrics.write(line)
        written = (tmp_path / "run" / "output" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(text) for text in written] == lines[:number]
    metrics.close()

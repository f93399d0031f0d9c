"""A run that goes back takes its lines back."""

import pytest
from watched_runs import VIEW, make_watch, peer, record, report, rewound, steps_of

from coordinator.dashboard.from_folder import read_history
from coordinator.dashboard.history import History
from coordinator.run.run_files import RunFiles
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.happenings import Happenings
from coordinator.watch.journal import Journal
from coordinator.watch.metrics_file import whole_lines
from coordinator.watch.promises import Promises
from coordinator.watch.run_watch import RETURN_PATIENCE
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.machine import SystemClock


def test_a_rewind_takes_lines_back():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(*(report(optimizer_step) for optimizer_step in range(1, 6)))}, 0.0)
    [line] = watch.observe(rewound(9, 2), {"a": record(report(3, loss=1.5, round_number=9))}, 1.0)
    assert (line["optimizer_step"], line["round"], line["loss"]) == (3, 9, 1.5)
    assert steps_of(watch.lines) == [1, 2, 3]
    assert [line["round"] for line in watch.lines] == [0, 1, 9]
    assert (watch.optimizer_step, watch.round_number) == (3, 9)
    assert steps_of(watch.observe(rewound(9, 2), {"a": record(report(4, round_number=10))}, 2.0)) == [4]


def after_a_cut(steps=40):
    """A run of two stages that has made 4 steps; a part of it that was cut off goes back to 2 and makes 6 more."""
    watch = make_watch(steps=steps)
    at_fork = SwarmView(2, (peer("a", 0, round_number=4), peer("c", 1, round_number=4)))
    watch.observe(at_fork, {"a": record(*map(report, range(1, 5)))}, 0.0)
    of_part = [report(step, round_number=50 + step) for step in range(3, 9)]
    part = SwarmView(2, tuple(peer(name, stage, round_number=59, optimizer_step=8) for stage, name in enumerate("bd")))
    watch.observe(part, {"b": record(*of_part)}, 1.0)
    assert [line["round"] for line in watch.lines] == [0, 1, *range(53, 59)]
    return watch


def other_part(round_number):
    """The other part has trained on meanwhile, and most peers go on with it: in rounds below those of the first."""
    return SwarmView(2, tuple(peer(name, stage, round_number=round_number) for stage, name in enumerate("ac")))


def rewinds(happenings, watch, now_s):
    return [event["text"] for event in happenings.look(watch, now_s) if event["kind"] == "rewound"]


def open_files(folder, manifest):
    return RunFiles(
        folder=folder,
        manifest=manifest,
        resume=True,
        journal=Journal(folder),
        contributions=ContributionEstimates(folder),
        clock=SystemClock(),
        on_line=lambda line: None,
        promises=Promises(),
    )


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_run_that_goes_on_with_an_older_timeline_is_followed(tmp_path, is_restarted):
    """Otherwise no step would be seen until it has come to the rounds of the newer one; near its end, for ever."""
    watch, happenings, history = after_a_cut(), Happenings(lifetime_s=9, begun_s=0), History()
    files = open_files(tmp_path, watch.manifest)
    files.write_lines(watch.lines, watch.returns)
    if is_restarted:
        files.close()
        watch, files = make_watch(steps=40), open_files(tmp_path, watch.manifest)
        watch.recall(files.lines_since(0))
        history = read_history(tmp_path)
        happenings = Happenings(
            lifetime_s=9, begun_s=0, optimizer_step=files.optimizer_step, round_number=files.round_number
        )
    happenings.look(watch, 1.0)
    history.add(watch.lines, watch.returns)
    reports = {"a": record(*map(report, range(3, 11)))}
    patience = RETURN_PATIENCE * watch.manifest.limits.announcement_s
    assert watch.observe(other_part(10), reports, 2.0) == []
    assert watch.observe(other_part(10), reports, 1.9 + patience) == []
    assert watch.returns == (0, 0)
    new = watch.observe(other_part(10), reports, 2.1 + patience)
    assert [line["optimizer_step"] for line in new] == list(range(3, 11))
    assert [line["round"] for line in watch.lines] == list(range(10))
    assert watch.returns == (1, 2)
    assert watch.created_at_round(10) == 10
    for _ in range(2):
        files.write_lines(new, watch.returns)
        assert [line["round"] for line in whole_lines(tmp_path / "metrics.jsonl")] == list(range(10))
        history.add(watch.lines, watch.returns)
        assert history.training_s == (8 + 8) * 2.0
    assert rewinds(happenings, watch, 3.0) == ["The run goes on without the updates after optimizer step 2, of 8."]
    assert rewinds(happenings, watch, 4.0) == []


@pytest.mark.parametrize(("name", "stage"), [("d", 0), ("d", 1)])
def test_most_peers_of_every_stage_have_to_be_in_earlier_rounds(name, stage):
    watch = after_a_cut()
    view = SwarmView(2, (*other_part(10).peers, peer(name, stage, round_number=59, optimizer_step=8)))
    for now in (2.0, 1000.0, 2000.0):
        assert watch.observe(view, {"a": record(*map(report, range(3, 11)))}, now) == []
    assert watch.returns == (0, 0)


def test_a_rewind_to_the_beginning_takes_all_lines_back():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(report(1), report(2))}, 0.0)
    watch.observe(rewound(6, 0), {"a": record(report(1, round_number=6))}, 1.0)
    assert [(line["optimizer_step"], line["round"]) for line in watch.lines] == [(1, 6)]


def test_a_rewind_is_believed_when_the_next_stage_tells_of_it():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(report(1), report(2))}, 0.0)
    gone_back = {"a": record(report(2, round_number=6), report(3, round_number=7))}
    assert watch.observe(VIEW, gone_back, 1.0) == []
    assert steps_of(watch.observe(rewound(6, 1), gone_back, 2.0)) == [2, 3]


def test_what_was_kept_of_the_line_before_is_told_after_a_rewind():
    """It went back before the other stages had announced that they had been there."""
    watch = make_watch()
    watch.observe(VIEW, {"a": record(report(1))}, 0.0)
    gone_back = {"a": record(report(2), report(3), report(4, round_number=9))}
    authors = (peer("a", 0, round_number=10, optimizer_step=4), peer("d", 0, round_number=10, optimizer_step=4))
    view = SwarmView(2, (*authors, peer("c", 1, round_number=10, optimizer_step=4)))
    assert steps_of(watch.observe(view, gone_back, 1.0)) == [2, 3, 4]


def test_reports_of_a_line_that_was_given_up_come_too_late():
    watch = make_watch()
    watch.observe(VIEW, {"a": record(report(1), report(2))}, 0.0)
    watch.observe(rewound(6, 1), {"a": record(report(2, round_number=6))}, 1.0)
    assert watch.observe(rewound(6, 1), {"b": record(report(3), report(4))}, 2.0) == []
    assert steps_of(watch.lines) == [1, 2]


def test_both_lines_at_once_come_in_the_order_of_rounds():
    """One that was left behind has downloaded the state after the rewind: it remembers what it did before."""
    watch = make_watch()
    old, new = [report(1), report(2), report(3)], report(2, round_number=9)
    lines = watch.observe(rewound(9, 1), {"a": record(*old, new)}, 0.0)
    assert steps_of(lines) == [1, 2, 3, 2]
    assert steps_of(watch.lines) == [1, 2]


def test_validations_are_those_of_the_line_that_goes_on():
    """A step is validated anew after a rewind: what was measured before counts no more."""
    watch = make_watch(validation_every=2, validation_samples=4)
    watch.observe(VIEW, {"a": record(report(1), report(2), validations=[(2, 4, 12.0)])}, 0.0)
    assert watch.lines[-1]["validation_loss"] == 3.0
    gone_back = {"a": record(report(2, round_number=8), validations=[(2, 4, 12.0)])}
    assert watch.observe(rewound(8, 1), gone_back, 1.0) == []
    [line] = watch.observe(rewound(8, 1), {"a": record(validations=[(9, 4, 4.0)])}, 2.0)
    assert (line["optimizer_step"], line["validation_loss"]) == (2, 1.0)

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from coordinator.dashboard.from_folder import read_history
from coordinator.dashboard.history import History
from coordinator.run.run_files import RunFiles
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.happenings import Happenings
from coordinator.watch.journal import Journal
from coordinator.watch.live_view import LiveView, peers_table, run_table
from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.metrics_file import MetricsFile, ValidationLoss, metrics_line, whole_lines
from coordinator.watch.promises import Promises
from coordinator.watch.run_watch import AUTHORS_REMEMBERED_S, LINES_KEPT, RETURN_PATIENCE, VALIDATION_WAIT_S, RunWatch
from coordinator.watch.summary import summarise
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.run_progress import LAST_BELIEVED_ROUND, MAX_ROUNDS_AHEAD
from swarm_peer.policy.view import PeerState, PeerView, SwarmView, TimeShares
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.wire.records import Progress, ProgressRecord, RoundReport, Validation

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


def peer(peer_id, stage, state=PeerState.SERVING, round_number=0, optimizer_step=None):
    optimizer_step = round_number if optimizer_step is None else optimizer_step
    return PeerView(
        peer_id=peer_id,
        stage=stage,
        state=state,
        round_number=round_number,
        samples_per_s=2.0,
        queue=3,
        optimizer_step=optimizer_step,
        note="busy",
    )


# One who reports, one who joins, and one of the next stage whose last announcement is from the run's beginning.
VIEW = SwarmView(2, (peer("a", 0), peer("b", 0, PeerState.JOINING), peer("c", 1)))
BOTH = SwarmView(2, (peer("a", 0), peer("b", 0), peer("c", 1)))


def rewound(round_number, optimizer_step):
    """As VIEW, after the next stage has come to announce that it went back."""
    return SwarmView(2, (*VIEW.in_stage(0), peer("c", 1, round_number=round_number, optimizer_step=optimizer_step)))


def report(optimizer_step, loss=2.5, samples=8, seconds=2.0, round_number=None):
    """Of a run that never went back, if no round is given."""
    round_number = optimizer_step - 1 if round_number is None else round_number
    return RoundReport(
        round_number=round_number, optimizer_step=optimizer_step, samples=samples, loss=loss, seconds=seconds
    )


def record(*reports, round_number=0, samples=0, validations=(), held_out=1000):
    current = Progress(round_number=round_number, samples=samples)
    return ProgressRecord(
        current=current,
        finished=reports,
        validations=tuple(
            Validation(round_number=at, optimizer_step=at, samples=count, held_out=held_out, loss_sum=loss_sum)
            for at, count, loss_sum in validations
        ),
    )


def steps_of(lines):
    return [line["optimizer_step"] for line in lines]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_finished_step_is_a_line():
    watch = make_watch()
    assert watch.observe(VIEW, {"a": record(report(1))}, now=0.0) == [
        {
            "optimizer_step": 1,
            "loss": 2.5,
            "samples": 8,
            "tokens": 8 * LENGTH,
            "tokens_per_s": 40.0,
            "seconds": 2.0,
            "peers": [1, 1],
            "round": 0,
            "busy_share": [None, None],
            "ending_share": [None, None],
            "joining_share": [None, None],
        }
    ]


def test_a_line_says_how_the_peers_of_each_stage_spend_their_time(tmp_path):
    watch = make_watch()
    one, other, silent = TimeShares(80, 10, 0), TimeShares(41, 30, 9), None
    told = [replace(each, time_shares=shares) for each, shares in zip(VIEW.peers, (one, other, silent), strict=True)]
    view = SwarmView(2, tuple(told))
    (line,) = watch.observe(view, {"a": record(report(1))}, now=0.0)
    assert line["busy_share"] == [0.605, None], "the mean of those that tell"
    assert (line["ending_share"], line["joining_share"]) == ([0.2, None], [0.045, None])
    stages = summarise(watch)["stages"]
    assert [stage["busy_share"] for stage in stages] == [0.605, None]
    assert stages[0]["peers"][1]["time_percent"] == {"computing": 41, "ending": 30, "joining": 9, "waiting": 20}
    metrics = CoordinatorMetrics(tmp_path, SimpleNamespace(addresses=[], metrics=PeerMetrics()))
    metrics.update(watch)
    read = metrics.registry.get_sample_value
    by_activity = {
        activity: read("swarm_run_stage_time_share", {"stage": "0", "activity": activity})
        for activity in ("computing", "ending", "joining", "waiting")
    }
    assert by_activity == pytest.approx({"computing": 0.605, "ending": 0.2, "joining": 0.045, "waiting": 0.15})
    metrics.update(make_watch())
    gone = {"stage": "0", "activity": "waiting"}
    assert read("swarm_run_stage_time_share", gone) is None, "no peer there tells it any more"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(run_table(watch))
    console.print(peers_table(watch))
    assert "60%" in (text := console.export_text())
    assert "41%" in text
    assert "20/30/9%" in text, "it waited in the rest of the time"
    assert (watch.optimizer_step, watch.round_number) == (1, 0)


def test_a_step_is_shown_before_the_first_line():
    """After a resumption, a restart of the coordinator, or while no step can be believed."""
    watch = make_watch()
    assert watch.shown_step == 0
    watch.begun_at = 4
    assert watch.shown_step == 4
    far = [peer(name, 1, optimizer_step=step) for name, step in (("c", 7), ("d", 8), ("liar", 2**40))]
    watch.observe(SwarmView(2, (peer("a", 0, optimizer_step=6), *far)), {}, now=0.0)
    assert (watch.shown_step, watch.optimizer_step) == (8, 0)
    watch.observe(VIEW, {"a": record(report(1))}, now=1.0)
    assert (watch.shown_step, watch.optimizer_step) == (4, 1), "lines of older steps may come first"
    watch.observe(rewound(8, 1), {"a": record(report(1, round_number=7))}, now=2.0)
    assert watch.shown_step == watch.optimizer_step == 1, "the run has gone back"


def test_a_status_says_which_stage_the_run_waits_for_and_nothing_of_balance():
    def caption(view, begun_at=0):
        watch = make_watch()
        watch.begun_at = begun_at
        watch.observe(view, {}, 0.0)
        watch.coordination = Term(1, "a"), SimpleNamespace(reason="no move pays: it does 0 samples/s", assignments=())
        return run_table(watch).caption.plain.splitlines()[1:]

    assert caption(VIEW) == ["rebalancing: no move pays: it does 0 samples/s"]
    assert caption(SwarmView(2, (peer("a", 0),))) == ["the run waits: nobody serves stage 1"]
    assert caption(SwarmView(2, ())) == ["the run waits: nobody serves stage 0, 1"]
    assert caption(SwarmView(2, ()), 3) == ["rebalancing: no move pays: it does 0 samples/s"], "nobody is seen yet"


def test_a_coordinator_commands_no_terminal():
    watch = make_watch()
    watch.begun_at = 1
    reason = "[/b] [red]\x1b[2J\nrun over"
    watch.coordination = Term(1, "a"), SimpleNamespace(reason=reason, assignments=())
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(run_table(watch))
    assert "rebalancing: [/b] [red] [2J run over" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_a_log_says_once_that_the_run_waits_for_a_stage(capsys):
    """Where there is no terminal, a line comes with each step, and none with a run that stands still."""
    watch, live = make_watch(), LiveView(10)
    empty = SwarmView(2, (peer("a", 0),))
    for begun_at, view in ((0, empty), (3, VIEW), (3, empty), (3, empty), (3, VIEW), (3, empty)):
        watch.begun_at = begun_at
        watch.observe(view, {}, 0.0)
        live.update(watch)
    assert capsys.readouterr().out.count("The run waits: nobody serves stage 1.") == 2


def test_a_coordinator_that_is_started_again_says_nothing_before_it_has_looked(capsys):
    """Its files say how far the run is, and nothing of who serves it."""
    watch, live = make_watch(), LiveView(10)
    watch.begun_at = 3
    watch.observe(SwarmView(2), {}, 0.0)
    live.update(watch)
    assert capsys.readouterr().out == ""
    watch.observe(VIEW, {}, 1.0)
    live.update(watch)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  step 3/10 .* peers 2,1\n$", capsys.readouterr().out)


def test_who_looks_on_is_told_that_the_run_went_back(capsys):
    watch, live = make_watch(), LiveView(10)
    watch.begun_at = 9
    for step in (0, 3, 7, 5, 6):
        watch.lines = [{"optimizer_step": step, "loss": 1.0, "tokens_per_s": 1.0}] if step else []
        live.update(watch)
    out = capsys.readouterr().out
    assert out.count("gone back") == 1
    assert "The run has gone back from optimizer step 7 to 5." in out


def test_a_run_is_finished_where_nobody_is_left_who_made_the_last_step():
    """All have been replaced, or have gone back to its end; and a coordinator has been started since."""
    watch = make_watch(steps=10)
    there = SwarmView(2, tuple(peer(name, stage, optimizer_step=10) for name, stage in (("a", 0), ("c", 1))))
    liar = SwarmView(2, (peer("a", 0, optimizer_step=10), peer("c", 1, optimizer_step=9)))
    patience_s = RETURN_PATIENCE * watch.manifest.limits.announcement_s
    seen = []
    for view, now in ((there, 0.0), (there, patience_s - 1), (liar, patience_s), (there, patience_s + 1)):
        watch.observe(view, {}, now)
        seen.append(watch.has_finished)
    watch.observe(there, {}, 2 * patience_s + 1)
    assert [*seen, watch.has_finished] == [False, False, False, False, True]
    watch.observe(SwarmView(2, there.peers[:1]), {}, 2 * patience_s + 2)
    assert not watch.has_finished, "a stage is empty"


def test_a_note_gives_a_terminal_no_commands():
    note = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e[red]\nnote"
    view = SwarmView(2, (replace(peer("a", 0), note=note, is_reachable=False),))
    terminal = io.StringIO()
    Console(width=160, file=terminal, color_system=None, force_terminal=True).print(
        peers_table(RunWatch(make_watch().manifest, view))
    )
    assert "]52;c;ZXZpbA== [2J [red] note; others cannot dial it" in terminal.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(terminal.getvalue())


def test_each_step_is_told_once_however_many_report_it():
    watch = make_watch()
    assert steps_of(watch.observe(BOTH, {"a": record(report(1)), "b": record(report(1, loss=9.0))}, 0.0)) == [1]
    assert watch.lines[0]["loss"] == 2.5, "the lower of two"
    assert watch.observe(BOTH, {"a": record(report(1)), "b": record(report(1))}, 1.0) == []


def test_lines_come_in_order():
    watch = make_watch()
    progress = {"a": record(report(3), report(2)), "b": record(report(1), report(3))}
    assert steps_of(watch.observe(BOTH, progress, 0.0)) == [1, 2, 3]
    assert steps_of(watch.lines) == [1, 2, 3]


def test_what_is_kept_of_a_long_run_is_bounded():
    watch = make_watch(validation_every=1)
    steps = LINES_KEPT + 500
    for round_number in range(1, steps + 1):
        view = SwarmView(2, (peer("a", 0), peer("c", 1, round_number=round_number)))
        [line] = watch.observe(
            view, {"a": record(report(round_number), validations=[(round_number, 8, 8.0 * round_number)])}, 0.0
        )
        assert (line["optimizer_step"], line["validation_loss"]) == (round_number, round_number)
    assert steps_of(watch.lines) == list(range(steps + 1 - LINES_KEPT, steps + 1))
    assert not watch._reports
    assert not watch._validations


def test_the_last_validation_is_known_however_long_ago_it_was():
    watch = make_watch(validation_every=10)
    watch.observe(VIEW, {"a": record(report(10), validations=[(10, 8, 16.0)])}, 0.0)
    for round_number in range(11, LINES_KEPT + 20):
        view = SwarmView(2, (peer("a", 0), peer("c", 1, round_number=round_number)))
        watch.observe(view, {"a": record(report(round_number))}, 100.0 * round_number)
        watch.observe(view, {"a": record(report(round_number))}, 100.0 * round_number + VALIDATION_WAIT_S)
    assert watch.lines[0]["optimizer_step"] > 10
    assert watch.validation_loss == 2.0


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
    assert line["peers"] == [1, 1]
    assert watch.peers_by_stage() == [1, 0]


def test_reports_of_peers_that_do_not_serve_stage_0_are_not_believed():
    watch = make_watch()
    told = {"c": record(report(1), round_number=5, samples=6, validations=[(0, 4, 1.0)]), "x": record(report(1))}
    told["b"] = record(report(1), round_number=5, samples=6)  # it joins
    assert watch.observe(VIEW, told, 0.0) == []
    assert (watch.current_round, watch.current_samples) == (0, 0)
    assert (watch.optimizer_step, watch.round_number) == (0, -1)


# --- validation -------------------------------------------------------------------------------------------------------


def test_a_line_waits_for_the_validation_of_its_step():
    watch = make_watch(validation_every=2, validation_samples=4)
    finished = [report(1), report(2), report(3)]
    assert steps_of(watch.observe(VIEW, {"a": record(*finished)}, 0.0)) == [1], "the third waits with the second"
    half = {"a": record(*finished, validations=[(2, 2, 3.0)])}
    assert watch.observe(VIEW, half, 1.0) == []
    both = half | {"b": record(validations=[(2, 2, 5.0)])}
    second, third = watch.observe(BOTH, both, 2.0)
    assert (second["optimizer_step"], second["validation_loss"], second["validation_samples"]) == (2, 2.0, 4)
    assert third["optimizer_step"] == 3
    assert "validation_loss" not in third


def test_shares_are_weighted_by_their_samples():
    watch = make_watch(validation_every=1, validation_samples=4)
    progress = {
        "a": record(report(1), validations=[(1, 1, 4.0)]),
        "b": record(report(1), validations=[(1, 3, 6.0)]),
    }
    [line] = watch.observe(BOTH, progress, 0.0)
    assert line["validation_loss"] == 2.5


def test_a_share_that_is_told_again_counts_once():
    watch = make_watch(validation_every=1, validation_samples=4)
    share = {"a": record(report(1), validations=[(1, 2, 3.0)])}
    for now in range(3):
        assert watch.observe(VIEW, share, float(now)) == []
    [line] = watch.observe(BOTH, share | {"b": record(validations=[(1, 2, 3.0)])}, 4.0)
    assert line["validation_samples"] == 4


def test_a_line_does_not_wait_for_ever():
    watch = make_watch(validation_every=1, validation_samples=4)
    partial = {"a": record(report(1), validations=[(1, 2, 3.0)])}
    assert watch.observe(VIEW, partial, 100.0) == []
    assert watch.observe(VIEW, partial, 100.0 + VALIDATION_WAIT_S - 0.1) == []
    [line] = watch.observe(VIEW, partial, 100.0 + VALIDATION_WAIT_S)
    assert (line["validation_loss"], line["validation_samples"]) == (1.5, 2)


def test_a_line_does_not_wait_for_more_samples_than_the_held_out_text_has():
    watch = make_watch(validation_every=1, validation_samples=32)
    part = {"a": record(report(1), validations=[(1, 10, 20.0)], held_out=19)}
    assert watch.observe(VIEW, part, 0.0) == []
    [line] = watch.observe(BOTH, part | {"b": record(validations=[(1, 9, 18.0)], held_out=19)}, 1.0)
    assert (line["validation_loss"], line["validation_samples"]) == (2.0, 19)


def test_a_peer_that_tells_of_few_held_out_samples_does_not_end_the_wait_for_the_others():
    watch = make_watch(validation_every=1, validation_samples=4)
    few = record(report(1), validations=[(1, 1, 4.0)], held_out=1)
    told = {"a": record(report(1), validations=[(1, 2, 4.0)]), "b": few}
    assert watch.observe(BOTH, told, 0.0) == []
    assert watch.observe(BOTH, told | {"a": record(report(1), validations=[(1, 3, 4.0)])}, 1.0) != []


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
    assert (line["optimizer_step"], line["validation_loss"]) == (3, 2.0)


def test_who_looks_once_does_not_wait_and_has_the_last_loss_that_peers_tell():
    manifest = make_watch(validation_every=2, steps=9).manifest
    watch = RunWatch(manifest, SwarmView(2), validation_wait_s=0.0)
    view = SwarmView(2, tuple(peer(name, stage, round_number=8) for name, stage in (("a", 0), ("b", 0), ("c", 1))))
    told = {
        "a": record(report(6), report(7), report(8), validations=[(2, 2, 9.0), (4, 2, 5.0), (8, 2, 1.0)]),
        "b": record(validations=[(4, 6, 3.0)]),
    }
    lines = watch.observe(view, told, 0.0)
    assert steps_of(lines) == [6, 7, 8]
    assert "validation_loss" not in lines[0]
    assert (lines[2]["validation_loss"], lines[2]["validation_samples"]) == (0.5, 2)
    before = RunWatch(manifest, SwarmView(2), validation_wait_s=0.0)
    nobody = Validation(round_number=6, optimizer_step=6, samples=0, held_out=8, loss_sum=0.0)
    told["b"] = told["b"].model_copy(update={"validations": (*told["b"].validations, nobody)})
    before.observe(view, {"a": record(report(7), validations=[(2, 2, 9.0), (4, 2, 5.0)]), "b": told["b"]}, 0.0)
    assert before.validation_loss == 1.0


def test_the_lines_of_an_earlier_process_are_gone_on_from():
    watch, longer = make_watch(), make_watch(validation_every=2)
    lines = [metrics_line(**report(step).model_dump(), sequence_length=LENGTH, peers=[2, 1]) for step in range(1, 1101)]
    lines[9]["validation_loss"] = 2.5
    longer.recall(lines)
    assert longer.observe(SwarmView(2), {}, 0.0) == []
    assert longer.optimizer_step == 0, "nobody is there who could tell whether the run has gone on"
    assert longer.observe(VIEW, {}, 0.0) == []
    assert (longer.optimizer_step, len(longer.lines), longer.validation_loss) == (1100, LINES_KEPT, 2.5)
    watch.recall(lines[:2])
    assert steps_of(watch.observe(VIEW, {"a": record(report(1), report(2), report(3))}, 0.0)) == [3]
    assert steps_of(watch.lines) == [1, 2, 3]


def test_no_validation_is_waited_for_where_there_is_none():
    watch = make_watch(validation_every=0, steps=1)
    assert steps_of(watch.observe(VIEW, {"a": record(report(1))}, 0.0)) == [1]


# --- rewinds ----------------------------------------------------------------------------------------------------------


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


# --- whom to believe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [report(10, round_number=10), report(1, round_number=2**40 - 1)])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_of_stage_0_neither_ends_the_run_nor_makes_its_account_deaf(lie, num_stages):
    watch = make_watch()
    liar, honest, past = report(4, round_number=20), range(1, 10), []
    for optimizer_step in honest:
        peers = [peer("a", 0), peer("b", 0, PeerState.SERVING, round_number=2**40 - 1, optimizer_step=1)]
        peers += [peer("c", 1)] if num_stages == 2 else [peer("c", 0)]
        past.append(report(optimizer_step))
        told = {"a": record(*past), "b": record(lie, liar)} | ({"c": record(*past)} if num_stages == 1 else {})
        watch.observe(SwarmView(num_stages, tuple(peers)), told, 0.0)
        if num_stages == 2:  # the liar is half of stage 0, and the next stage has announced itself
            view = SwarmView(2, (*peers[:2], peer("c", 1, round_number=optimizer_step)))
            watch.observe(view, told, 1.0)
        assert (watch.optimizer_step, watch.round_number) == (optimizer_step, optimizer_step - 1)


@pytest.mark.parametrize("round_number", [LAST_BELIEVED_ROUND, 2**40 - 1])
def test_no_majority_of_a_single_stage_makes_up_a_round_that_no_message_could_follow(round_number):
    """The coordinator publishes the round after it, and checkpoints begin with that."""
    watch = make_watch()
    view = SwarmView(1, (peer("a", 0, round_number=1), peer("b", 0), peer("c", 0)))
    lie = record(report(1), report(2, round_number=round_number))
    assert steps_of(watch.observe(view, {"a": record(report(1)), "b": lie, "c": lie}, 0.0)) == [1]


def test_who_is_alone_in_stage_0_tells_of_nothing_that_the_others_are_far_from():
    watch = make_watch()
    for claim in (report(1, round_number=2**40 - 1), report(MAX_ROUNDS_AHEAD + 1), report(5, round_number=30)):
        assert watch.observe(VIEW, {"a": record(claim)}, 0.0) == []
    nobody = SwarmView(2, (peer("a", 0),))
    assert watch.observe(nobody, {"a": record(report(1))}, 0.0) == []
    assert steps_of(watch.observe(VIEW, {"a": record(report(1))}, 0.0)) == [1]


def test_who_has_died_or_hangs_is_not_waited_for_when_the_next_stage_goes_on():
    watch = make_watch()
    told = {"a": record(report(1), report(2)), "b": record(report(1))}
    assert steps_of(watch.observe(BOTH, told, 0.0)) == [1]
    on = SwarmView(2, (*BOTH.in_stage(0), peer("c", 1, round_number=2)))
    assert steps_of(watch.observe(on, told, 1.0)) == [2]


def test_who_has_died_is_not_waited_for_when_its_announcement_is_over():
    watch = make_watch()
    told = {"a": record(report(1), report(2)), "b": record(report(1))}
    assert steps_of(watch.observe(BOTH, told, 0.0)) == [1]
    assert steps_of(watch.observe(SwarmView(2, (peer("a", 0), peer("c", 1))), told, 1.0)) == [2]


def test_what_one_told_and_died_is_known_though_its_stage_mate_is_new():
    watch = make_watch()
    watch.observe(BOTH, dict.fromkeys("ab", record(report(1))), now=0.0)
    left = SwarmView(2, (peer("b", 0, round_number=3), peer("c", 1, round_number=3)))
    progress = {"a": record(report(1), report(2), report(3)), "b": record(report(4))}
    assert steps_of(watch.observe(left, progress, now=AUTHORS_REMEMBERED_S - 1)) == [2, 3, 4]


def test_who_died_bears_nothing_out():
    watch = make_watch()
    watch.observe(BOTH, dict.fromkeys("ab", record(report(1))), now=0.0)
    left = SwarmView(2, (peer("b", 0, round_number=1), peer("c", 1, round_number=1)))
    assert steps_of(watch.observe(left, {"a": record(report(1), report(2))}, now=1.0)) == []


def test_who_died_long_ago_is_nobody():
    watch = make_watch()
    watch.observe(BOTH, dict.fromkeys("ab", record(report(1))), now=0.0)
    left = SwarmView(2, (peer("b", 0, round_number=3), peer("c", 1, round_number=3)))
    assert steps_of(watch.observe(left, {"a": record(report(2))}, now=AUTHORS_REMEMBERED_S)) == []


def test_who_came_later_bears_out_what_came_before():
    watch = make_watch()
    first = {"a": record(report(1))}
    newcomer = SwarmView(2, (peer("a", 0), peer("b", 0, round_number=1), peer("c", 1)))
    assert steps_of(watch.observe(newcomer, first, 0.0)) == [1], "by its announcement"
    told = {"a": record(report(1), report(2), report(3)), "b": record(report(3))}
    assert steps_of(watch.observe(newcomer, told, 0.0)) == [2, 3], "by its reports"


def test_a_coordinator_that_restarts_in_mid_run_begins_with_what_is_told_first():
    """After a rewind, too: rounds and optimizer steps differ."""
    watch = make_watch(steps=1000)
    told = {
        "a": record(*(report(optimizer_step, round_number=optimizer_step + 40) for optimizer_step in range(101, 133)))
    }
    lines = watch.observe(rewound(131, 90), told, 0.0)
    assert steps_of(lines) == list(range(101, 133))


def test_what_one_alone_says_of_the_current_step_is_not_shown():
    watch = make_watch()
    crowd = SwarmView(2, (*BOTH.peers, peer("d", 0)))
    told = {
        "a": record(round_number=4, samples=2),
        "b": record(round_number=2**40 - 1, samples=4),
        "d": record(round_number=4, samples=1),
    }
    watch.observe(crowd, told, 0.0)
    assert (watch.current_round, watch.current_samples) == (4, 3)


# --- the run as a whole -----------------------------------------------------------------------------------------------


def test_progress_of_the_newest_step_is_summed():
    watch = make_watch()
    watch.observe(BOTH, {"a": record(round_number=4, samples=2), "b": record(round_number=4, samples=4)}, 0.0)
    assert (watch.current_round, watch.current_samples) == (4, 6)
    watch.observe(BOTH, {"a": record(round_number=5, samples=2), "b": record(round_number=4, samples=8)}, 0.0)
    assert (watch.current_round, watch.current_samples) == (5, 2)
    watch.observe(VIEW, {}, 0.0)
    assert (watch.current_round, watch.current_samples) == (5, 0)


def test_the_summary_before_anything_happened():
    summary = summarise(make_watch())
    assert summary["optimizer_step"] == 0
    assert summary["loss"] is summary["tokens_per_s"] is summary["validation_loss"] is None
    assert [stage["peers"] for stage in summary["stages"]] == [[], []]


def test_the_summary():
    watch = make_watch(validation_every=1, validation_samples=2)
    watch.observe(VIEW, {"a": record(report(1), round_number=1, samples=4, validations=[(1, 2, 3.0)])}, 0.0)
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), round_number=2, samples=6)}, 0.0)
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), round_number=2, samples=6)}, VALIDATION_WAIT_S)
    summary = summarise(watch)
    assert json.loads(json.dumps(summary)) == summary
    expected = {
        "name": "watched",
        "manifest": watch.manifest.hash,
        "optimizer_step": 2,
        "optimizer_steps": 10,
        "samples_in_round": 6,
        "global_batch_size": 8,
        "loss": 2.0,
        "tokens_per_s": 40.0,
        "validation_loss": 1.5,
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["stages"][1]["peers"] == [
        {
            "peer": "c",
            "name": "",
            "state": "serving",
            "optimizer_step": 0,
            "note": "busy",
            "trouble": None,
            "samples_per_s": 2.0,
            "tokens_per_s": 20.0,
            "queue": 3,
            "is_reachable": None,
            "time_percent": None,
        }
    ]


def test_a_step_that_took_no_time():
    assert make_line(1, seconds=0.0)["tokens_per_s"] == 0.0


# --- the file ---------------------------------------------------------------------------------------------------------


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

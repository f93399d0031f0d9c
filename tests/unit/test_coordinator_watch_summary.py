"""The run as a whole: its progress, and how its peers spend their time."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from watched_runs import BOTH, VIEW, make_watch, record, report

from coordinator.watch.live_view import peers_table, run_table
from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.summary import summarise
from swarm_peer.policy.view import SwarmView, TimeShares
from swarm_peer.runtime.host.metrics import PeerMetrics


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


def test_the_summary_of_a_run_that_waits_for_a_stage():
    watch = make_watch()
    told = {"a": record(report(1), report(2, loss=2.0)), "b": record(report(1))}
    waiting = SwarmView(2, BOTH.in_stage(0))
    watch.observe(waiting, told, 0.0)
    summary = summarise(watch)
    assert summary["standstill"] == {
        "seconds": None,
        "stage": 1,
        "trouble": "no_peers",
        "reason": "nobody serves stage 1",
        "peer": None,
    }
    assert (summary["loss"], summary["tokens_per_s"]) == (2.5, 40.0), "one alone is not believed"
    watch.observe(waiting, dict.fromkeys("ab", told["a"]), 1.0)
    assert summarise(watch)["loss"] == 2.0
    assert watch.lines == [], "nobody bears it out"
    assert "loss 2.0000" in run_table(watch).caption.plain
    watch.observe(BOTH, dict.fromkeys("ab", record()), 2.0)
    assert summarise(watch)["standstill"] is summarise(watch)["loss"] is None


def test_nothing_is_told_of_a_last_step_that_most_have_not_heard_of():
    watch = make_watch()
    watch.observe(SwarmView(2, BOTH.in_stage(0)), {"a": record(report(1)), "b": record()}, 0.0)
    assert summarise(watch)["loss"] is None


def test_the_summary():
    watch = make_watch(validation_every=1, validation_samples=2)
    watch.observe(VIEW, {"a": record(report(1), round_number=1, samples=4, validations=[(1, 2, 3.0)])}, 0.0)
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), round_number=2, samples=6)}, 0.0)
    # Later than any validation is waited for.
    watch.observe(VIEW, {"a": record(report(2, loss=2.0), round_number=2, samples=6)}, 1000.0)
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
            "relays": [],
            "unreached": [],
            "neighbours": [],
            "time_percent": None,
        }
    ]

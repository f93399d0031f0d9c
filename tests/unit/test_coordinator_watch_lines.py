"""Each step that peers report is a line, once and in order."""

from watched_runs import BOTH, LENGTH, VIEW, make_watch, peer, record, report, rewound, steps_of

from coordinator.watch.metrics_file import metrics_line
from coordinator.watch.run_watch import LINES_KEPT, RETURN_PATIENCE, VALIDATION_WAIT_S
from swarm_peer.policy.view import PeerState, SwarmView


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
    [line] = watch.observe(smaller, {"a": record(report(1), validations=[(1, 4, 6.0)])}, 1.0)
    assert line["peers"] == [1, 1]
    assert watch.peers_by_stage() == [1, 0]


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

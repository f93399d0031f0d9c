"""Whose reports are believed: neither one liar nor one that died holds up the account of a run."""

import pytest
from watched_runs import BOTH, VIEW, make_watch, peer, record, report, rewound, steps_of

from coordinator.watch.run_watch import AUTHORS_REMEMBERED_S
from swarm_peer.policy.run_progress import LAST_BELIEVED_ROUND, MAX_ROUNDS_AHEAD
from swarm_peer.policy.view import PeerState, SwarmView


def test_reports_of_peers_that_do_not_serve_stage_0_are_not_believed():
    watch = make_watch()
    told = {"c": record(report(1), round_number=5, samples=6, validations=[(0, 4, 1.0)]), "x": record(report(1))}
    told["b"] = record(report(1), round_number=5, samples=6)  # it joins
    assert watch.observe(VIEW, told, 0.0) == []
    assert (watch.current_round, watch.current_samples) == (0, 0)
    assert (watch.optimizer_step, watch.round_number) == (0, -1)


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

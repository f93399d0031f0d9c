"""A line waits for the validation of its step, and not for ever."""

from watched_runs import BOTH, VIEW, make_watch, peer, record, report, steps_of

from coordinator.watch.run_watch import LONGEST_VALIDATION_S, VALIDATION_WAIT_S, RunWatch
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.wire.records import Validation


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


def test_a_slow_validation_is_waited_for_while_the_next_round_is_not_over():
    watch = make_watch(validation_every=1)
    half = {"a": record(report(1), validations=[(1, 2, 3.0)]), "b": record(report(1))}
    assert watch.observe(BOTH, half, 0.0) == []
    assert watch.observe(BOTH, half, 5 * VALIDATION_WAIT_S) == []
    whole = half | {"b": record(report(1), validations=[(1, 2, 5.0)])}
    [line] = watch.observe(BOTH, whole, 5 * VALIDATION_WAIT_S + 1)
    assert line["validation_samples"] == 4


def test_a_validation_is_not_waited_for_any_longer_once_the_next_round_is_over():
    watch = make_watch(validation_every=1)
    later = {"a": record(report(1), report(2))}
    assert watch.observe(VIEW, {"a": record(report(1))}, 0.0) == []
    assert watch.observe(VIEW, later, 30.0) == []
    assert watch.observe(VIEW, later, 30.0 + VALIDATION_WAIT_S - 0.1) == []
    [line] = watch.observe(VIEW, later, 30.0 + VALIDATION_WAIT_S)
    assert line["optimizer_step"] == 1


def test_a_line_without_any_validation_comes_in_the_end():
    watch = make_watch(validation_every=1)
    watch.observe(VIEW, {"a": record(report(1))}, 0.0)
    assert watch.observe(VIEW, {}, LONGEST_VALIDATION_S - 1) == []
    [line] = watch.observe(VIEW, {}, LONGEST_VALIDATION_S)
    assert "validation_loss" not in line


def test_a_validation_whose_peers_are_gone_is_not_waited_for_long():
    watch = make_watch(validation_every=1)
    watch.observe(VIEW, {"a": record(report(1))}, 0.0)
    left = SwarmView(2, (peer("b", 0, PeerState.JOINING), peer("c", 1)))
    assert watch.observe(left, {}, VALIDATION_WAIT_S - 1) == []
    assert steps_of(watch.observe(left, {}, VALIDATION_WAIT_S)) == [1]


def test_the_last_step_is_validated_whatever_its_number():
    watch = make_watch(validation_every=100, steps=3)
    assert steps_of(watch.observe(VIEW, {"a": record(report(1), report(2), report(3))}, 0.0)) == [1, 2]
    done = {"a": record(validations=[(3, 4, 8.0)])}
    [line] = watch.observe(VIEW, done, 1.0)
    assert (line["optimizer_step"], line["validation_loss"]) == (3, 2.0)


def test_who_looks_once_does_not_wait_and_has_the_last_loss_that_peers_tell():
    manifest = make_watch(validation_every=2, steps=9).manifest
    watch = RunWatch(manifest, SwarmView(2), waits=False)
    view = SwarmView(2, tuple(peer(name, stage, round_number=8) for name, stage in (("a", 0), ("b", 0), ("c", 1))))
    told = {
        "a": record(report(6), report(7), report(8), validations=[(2, 2, 9.0), (4, 2, 5.0), (8, 2, 1.0)]),
        "b": record(validations=[(4, 6, 3.0)]),
    }
    lines = watch.observe(view, told, 0.0)
    assert steps_of(lines) == [6, 7, 8]
    assert "validation_loss" not in lines[0]
    assert (lines[2]["validation_loss"], lines[2]["validation_samples"]) == (0.5, 2)
    before = RunWatch(manifest, SwarmView(2), waits=False)
    nobody = Validation(round_number=6, optimizer_step=6, samples=0, held_out=8, loss_sum=0.0)
    told["b"] = told["b"].model_copy(update={"validations": (*told["b"].validations, nobody)})
    before.observe(view, {"a": record(report(7), validations=[(2, 2, 9.0), (4, 2, 5.0)]), "b": told["b"]}, 0.0)
    assert before.validation_loss == 1.0


def test_no_validation_is_waited_for_where_there_is_none():
    watch = make_watch(validation_every=0, steps=1)
    assert steps_of(watch.observe(VIEW, {"a": record(report(1))}, 0.0)) == [1]

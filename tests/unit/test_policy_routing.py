import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.in_flight_window import SPARE, InFlightWindow
from swarm_peer.policy.peer_backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, PeerBackoff
from swarm_peer.policy.routing import SMALLEST_PART, THROUGHPUT_SMOOTHING, Router, num_callers, parts_of
from swarm_peer.policy.view import UNDECIDED, Life, PeerState, PeerView, SwarmView
from swarm_peer.wire.fields import LEAST_MEASURED


def serving(**speeds):
    return [
        PeerView(peer_id=name, stage=1, state=PeerState.SERVING, samples_per_s=speed) for name, speed in speeds.items()
    ]


def make_router(seed=0, **speeds):
    router = Router(random.Random(seed))
    router.update(serving(**speeds))
    return router


# --- routing ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 8))
def test_peers_get_microbatches_in_proportion_to_their_speed(speeds, num_samples):
    router = make_router(**{f"p{number}": float(speed) for number, speed in enumerate(speeds)})
    num_sent = 20 * sum(speeds)
    sent = Counter(router.choose(num_samples).peer_id for _ in range(num_sent))
    for number, speed in enumerate(speeds):
        assert abs(sent[f"p{number}"] - 20 * speed) <= 1


def test_a_fast_peer_gets_its_microbatches_interleaved_and_not_in_bursts():
    router = make_router(fast=3.0, slow=1.0)
    sent = "".join(str(router.choose(1).peer_id)[0] for _ in range(40))
    assert sent.count("f") == 30
    assert "ss" not in sent
    assert "fffff" not in sent


def test_equal_peers_take_turns():
    router = make_router(a=1.0, b=1.0, c=1.0)
    for _ in range(10):
        assert {router.choose(2).peer_id for _ in range(3)} == {"a", "b", "c"}


def choose_and_do(router, num, **options):
    """Choose for so many microbatches, each of which is done before the next one is sent."""
    sent = Counter()
    for _ in range(num):
        peer_id = router.choose(1, **options).peer_id
        router.done(Life(peer_id), 1)
        sent[peer_id] += 1
    return sent


def test_a_newcomer_first_gets_as_many_as_the_others_have_outstanding():
    router = make_router(a=1.0, b=1.0)
    choose_and_do(router, 100)
    router.choose(3, avoid={"a"})
    router.choose(3, avoid={"b"})
    router.update(serving(a=1.0, b=1.0, new=1.0))
    assert [router.choose(1).peer_id for _ in range(3)] == ["new"] * 3
    assert Counter(router.choose(1).peer_id for _ in range(30)) == {"a": 10, "b": 10, "new": 10}


def test_a_peer_that_is_slower_than_it_says_gets_what_it_answers():
    router = make_router(slow=1.0, quick=1.0)
    outstanding, sent = [], Counter()
    for step in range(400):
        while len(outstanding) < 8:
            outstanding.append(router.choose(1).peer_id)
            sent[outstanding[-1]] += 1
        done = "slow" if step % 4 == 0 and "slow" in outstanding else "quick"
        outstanding.remove(done)
        router.done(Life(done), 1)
    assert sent["slow"] == pytest.approx(100, abs=8)
    assert outstanding.count("slow") == pytest.approx(4, abs=1), "and has no queue when all else is done"


def test_a_microbatch_of_a_former_life_is_not_counted_as_done():
    router = make_router(a=1.0, b=1.0)
    router.choose(5, avoid={"b"})
    router.done(Life("a", 7), 5)
    assert [router.choose(1).peer_id for _ in range(5)] == ["b"] * 5
    router.done(Life("stranger"), 5)


def test_a_peer_that_comes_back_is_a_newcomer():
    router = make_router(a=1.0, b=1.0)
    router.choose(50, avoid={"a"})
    router.update(serving(a=1.0))
    router.update(serving(a=1.0, b=1.0))
    assert Counter(router.choose(1).peer_id for _ in range(20)) == {"a": 10, "b": 10}
    router.done(Life("b"), 50)
    assert Counter(router.choose(1).peer_id for _ in range(20)) == {"a": 5, "b": 15}, "and nothing is outstanding at it"


def test_a_peer_in_a_new_life_is_a_newcomer():
    router = make_router(a=1.0, b=1.0)
    router.choose(50, avoid={"a"})
    for _ in range(20):
        router.observe("b", 9.0)
    a, b = serving(a=1.0, b=1.0)
    router.update([a, replace(b, incarnation=1)])
    assert Counter(router.choose(1).peer_id for _ in range(20)) == {"a": 10, "b": 10}, "its old work and speed are void"


def test_an_update_keeps_what_is_known_of_a_peer():
    router = make_router(a=1.0, b=1.0)
    router.choose(10, avoid={"b"})
    router.update(serving(a=1.0, b=1.0))
    assert [router.choose(1).peer_id for _ in range(10)] == ["b"] * 10


def test_avoided_peers_get_nothing():
    router = make_router(a=5.0, b=1.0)
    assert {router.choose(1, avoid={"a"}).peer_id for _ in range(20)} == {"b"}


def test_a_peer_that_was_avoided_does_not_get_everything_afterwards():
    router = make_router(a=1.0, b=1.0)
    choose_and_do(router, 100, avoid={"b"})
    assert Counter(router.choose(1).peer_id for _ in range(20)) == {"a": 10, "b": 10}


def test_a_peer_that_has_got_more_than_its_share_gains_nothing_by_being_avoided():
    router = make_router(a=1.0, b=1.0)
    router.choose(10, avoid={"b"})
    router.choose(1, avoid={"a"})
    assert [router.choose(1).peer_id for _ in range(9)] == ["b"] * 9


def test_no_route_says_why():
    nobody = Router(random.Random(0)).choose(1)
    assert nobody.peer_id is None
    assert nobody.reason == "no peer serves the stage"
    avoided = make_router(a=1.0, b=1.0).choose(1, avoid={"a", "b"})
    assert avoided.peer_id is None
    assert avoided.reason == "all 2 peers are to be avoided"


def test_a_route_says_why():
    assert make_router(a=2.0, b=1.0).choose(1, avoid={"b"}).reason == (
        "earliest expected finish at 2 samples/s of 1 candidates"
    )


def test_an_unmeasured_peer_is_taken_for_a_typical_one():
    router = make_router(a=4.0, b=4.0, new=0.0)
    sent = Counter(router.choose(1).peer_id for _ in range(30))
    assert sent == {"a": 10, "b": 10, "new": 10}


def test_unmeasured_peers_alone_take_turns():
    router = make_router(a=0.0, b=0.0)
    assert Counter(router.choose(1).peer_id for _ in range(10)) == {"a": 5, "b": 5}


def test_measurements_are_blended_in():
    router = make_router(a=1.0, b=1.0)
    for _ in range(200):
        router.observe("a", 3.0)
    sent = Counter(router.choose(1).peer_id for _ in range(40))
    assert abs(sent["a"] - 30) <= 1


def test_one_measurement_moves_the_speed_a_little():
    router = make_router(a=1.0)
    router.observe("a", 11.0)
    assert f"at {1 + 10 * THROUGHPUT_SMOOTHING:.3g} samples/s" in router.choose(1).reason


def test_the_first_measurement_counts_in_full():
    router = make_router(a=0.0)
    router.observe("a", 7.0)
    assert "at 7 samples/s" in router.choose(1).reason


def test_measurements_of_strangers_and_of_nothing_are_ignored():
    router = make_router(a=2.0)
    router.observe("stranger", 5.0)
    router.observe("a", 0.0)
    router.observe("a", -3.0)
    assert "at 2 samples/s of 1" in router.choose(1).reason


def test_same_seed_same_routes():
    def trace(seed):
        router = make_router(seed, a=1.0, b=1.0, c=1.0, d=1.0)
        return [router.choose(1).peer_id for _ in range(40)]

    assert trace(1) == trace(1)
    assert any(trace(1) != trace(seed) for seed in range(2, 6)), "ties are broken at random, peer by peer"


# --- a part for each caller -------------------------------------------------------------------------------------------


def callers(**speeds):
    return [replace(peer, stage=0) for peer in serving(**speeds)]


def sent_by(caller, senders, receivers, count=100, round_number=0):
    router = Router(random.Random(0))
    router.update(serving(**receivers), caller, callers(**senders), round_number)
    return Counter(router.choose(1).peer_id for _ in range(count))


def test_equal_stages_make_pairs():
    senders, receivers = {"a": 1.0, "b": 1.02, "c": 0.99}, {"x": 4.0, "y": 3.98, "z": 4.03}
    for round_number in range(10):
        sent = [sent_by(name, senders, receivers, 100, round_number) for name in "abc"]
        assert [list(one.values()) for one in sent] == [[100]] * 3
        assert {name for one in sent for name in one} == set("xyz")


def test_a_caller_sends_to_the_peers_beside_it():
    senders, receivers = {"a": 3.0, "b": 1.0}, {"x": 1.0, "y": 1.0}
    for round_number in range(10):
        [shared] = sent_by("b", senders, receivers, 100, round_number)
        assert sent_by("a", senders, receivers, 90, round_number) == {"x": 60, "y": 60} | {shared: 30}


def partners(senders, receivers, round_number):
    return {name: set(sent_by(name, senders, receivers, 50, round_number)) for name in senders}


def test_pairs_are_drawn_anew_for_each_round_and_all_draw_alike():
    senders, receivers = dict.fromkeys("abcd", 1.0), dict.fromkeys("wxyz", 1.0)
    drawn = [partners(senders, receivers, number) for number in range(20)]
    assert drawn == [partners(dict(reversed(senders.items())), receivers, number) for number in range(20)]
    assert sum(one != other for one, other in itertools.pairwise(drawn)) >= 15


def test_over_the_rounds_each_caller_meets_each_callee_as_often_as_any_other():
    senders, receivers = dict.fromkeys("abcd", 1.0), dict.fromkeys("wxyz", 1.0)
    met = Counter(
        (caller, callee)
        for number in range(400)
        for caller in senders
        for callee, part in parts_of(caller, senders, receivers, number).items()
        if part
    )
    assert len(met) == 16
    assert 60 < min(met.values()) <= max(met.values()) < 140


def test_unlike_callers_meet_all_callees_too():
    senders, receivers = {"a": 5.0, "b": 1.0, "c": 0.0}, {"w": 0.5, "x": 9.0, "y": 2.0, "z": 2.5}
    met = {name: set() for name in senders}
    for number in range(100):
        for name in senders:
            met[name] |= {callee for callee, part in parts_of(name, senders, receivers, number).items() if part}
    assert all(callees == set(receivers) for callees in met.values())


def test_a_round_begins_with_what_is_right_for_it_whatever_the_parts_were_before():
    senders, receivers = {"a": 5.0, "b": 1.0, "c": 3.0}, {"w": 0.5, "x": 9.0, "y": 2.0, "z": 2.5}
    router = Router(random.Random(0))
    for number in range(300):
        router.update(serving(**receivers), "a", callers(**senders), number)
        parts = parts_of("a", senders, receivers, number)
        speeds = {name: receivers[name] * part for name, part in parts.items()}
        sent = Counter(router.choose(1).peer_id for _ in range(10))
        for name, speed in speeds.items():
            assert abs(sent[name] - 10 * speed / sum(speeds.values())) < 2
            router.done(Life(name), sent[name])


def test_one_caller_sends_to_all():
    assert sent_by("a", {"a": 1.0}, {f"p{number}": 1.0 for number in range(80)}, 80).total() == 80
    assert len(sent_by("a", {"a": 1.0}, {f"p{number}": 1.0 for number in range(80)}, 80)) == 80


def test_a_caller_that_is_not_in_the_view_sends_to_all():
    assert sent_by("new", {"a": 1.0, "b": 1.0}, {"x": 1.0, "y": 1.0}) == {"x": 50, "y": 50}


def test_unmeasured_peers_are_taken_for_typical_ones_side_by_side():
    [one], [other] = (sent_by(name, {"a": 0.0, "b": 0.0}, {"x": 3.0, "y": 0.0}) for name in "ab")
    assert one != other


def test_when_the_peers_beside_a_caller_are_avoided_another_one_steps_in_and_gains_nothing_by_it():
    router = Router(random.Random(0))
    for round_number in range(5):
        update = partial(router.update, serving(x=1.0, y=1.0), "a", callers(a=1.0, b=1.0), round_number)
        update()
        own = router.choose(1).peer_id
        [other] = {"x", "y"} - {own}
        update()
        assert {router.choose(1, avoid={own}).peer_id for _ in range(5)} == {other}
        update()
        assert {router.choose(1).peer_id for _ in range(50)} == {own}
        assert router.choose(1, avoid={"x", "y"}).peer_id is None


def test_a_caller_moves_on_when_its_stage_changes():
    router = Router(random.Random(0))
    router.update(serving(x=1.0, y=1.0), "b", callers(a=1.0, b=1.0))
    assert len(choose_and_do(router, 100)) == 1
    router.update(serving(x=1.0, y=1.0), "b", callers(b=1.0))
    assert Counter(router.choose(1).peer_id for _ in range(20)) == {"x": 10, "y": 10}


def test_only_callers_with_a_part_of_a_peer_are_counted():
    mates, senders = serving(x=1.0, y=1.0), callers(a=3.0, b=1.0)
    for round_number in range(10):
        [shared] = sent_by("b", {"a": 3.0, "b": 1.0}, {"x": 1.0, "y": 1.0}, 100, round_number)
        counted = {name: num_callers(name, mates, senders, round_number) for name in "xy"}
        assert counted == {"x": 1, "y": 1} | {shared: 2}
    assert num_callers("new", mates, senders, 0) == 2
    assert num_callers("x", mates, [], 0) == 0


speeds_of_stage = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8)


@given(speeds_of_stage, speeds_of_stage, st.integers(0, 1000))
def test_the_parts_of_all_callers_make_up_each_peer_in_each_round(senders, receivers, round_number):
    senders = {f"c{number}": speed for number, speed in enumerate(senders)}
    receivers = {f"p{number}": speed for number, speed in enumerate(receivers)}
    parts = [parts_of(caller, senders, receivers, round_number) for caller in senders]
    assert all(any(own.values()) for own in parts), "nobody is left without a peer to send to"
    assert sum(part > 0 for own in parts for part in own.values()) < len(senders) + len(receivers)
    left_out = SMALLEST_PART * len(senders)
    for name in receivers:
        assert 1 - left_out <= sum(own[name] for own in parts) < 1 + 1e-9


@pytest.mark.parametrize("speed", [1e30, 1e16, LEAST_MEASURED])
@pytest.mark.parametrize("lies", ["caller", "callee"])
def test_beside_a_peer_that_names_any_speed_the_others_keep_their_parts(lies, speed):
    senders, receivers = {"a": 1.0, "b": 2.0, "c": 1.0}, {"w": 1.0, "x": 1.0, "y": 2.0}
    (senders if lies == "caller" else receivers)["liar"] = speed
    for round_number in range(30):
        parts = [parts_of(caller, senders, receivers, round_number) for caller in senders]
        assert all(any(own.values()) for own in parts), "nobody is left without a peer to send to"
        assert all(any(own[name] for own in parts) for name in receivers), "and nobody without a caller"


# --- health -----------------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_a_limit():
    backoff, now, pauses = PeerBackoff(), 0.0, []
    for _ in range(8):
        pauses.append(backoff.failed("a", now))
        now += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == pauses[-2] == LONGEST_PAUSE_S


def test_calls_that_fail_together_count_once():
    backoff = PeerBackoff()
    for _ in range(20):
        backoff.failed("a", now=0.0)
    assert backoff.failed("a", now=0.25 * FIRST_PAUSE_S) == 0.75 * FIRST_PAUSE_S
    assert backoff.avoided(FIRST_PAUSE_S) == frozenset()
    assert backoff.failed("a", now=FIRST_PAUSE_S) == 2 * FIRST_PAUSE_S


def test_a_peer_is_avoided_for_its_pause():
    backoff = PeerBackoff()
    pause_s = backoff.failed("a", now=100.0)
    backoff.failed("b", now=100.0 - pause_s)
    assert backoff.avoided(100.0) == {"a"}
    assert backoff.avoided(100.0 + pause_s - 0.001) == {"a"}
    assert backoff.avoided(100.0 + pause_s) == frozenset()


def test_a_success_clears_the_record():
    backoff = PeerBackoff()
    for _ in range(5):
        backoff.failed("a", now=0.0)
    backoff.succeeded("a")
    backoff.succeeded("never failed")
    assert backoff.avoided(0.0) == frozenset()
    assert backoff.failed("a", now=0.0) == FIRST_PAUSE_S


def test_failures_of_one_life_are_not_those_of_another():
    backoff = PeerBackoff()
    backoff.failed(Life("a", 1), now=0.0)
    assert backoff.avoided(0.0) == {Life("a", 1)}
    backoff.succeeded(Life("a", 2))
    assert backoff.failed(Life("a", 2), now=0.0) == FIRST_PAUSE_S
    assert backoff.avoided(0.0) == {Life("a", 1), Life("a", 2)}


def test_peers_that_failed_long_ago_are_forgotten():
    """In a long run, thousands come and die."""
    backoff = PeerBackoff()
    for number in range(1000):
        backoff.failed(f"peer-{number}", now=100.0 * number)
    assert len(backoff._failures) < 10
    assert backoff.failed("peer-0", now=100_000.0) == FIRST_PAUSE_S
    assert backoff.failed("peer-999", now=100_000.0) == 2 * FIRST_PAUSE_S


# --- view -------------------------------------------------------------------------------------------------------------


def test_a_view_is_sorted_and_names_the_serving_peers():
    peers = (
        PeerView(peer_id="c", stage=0, state=PeerState.SERVING),
        PeerView(peer_id="a", stage=0, state=PeerState.SERVING),
        PeerView(peer_id="b", stage=0, state=PeerState.JOINING),
        PeerView(peer_id="d", stage=1, state=PeerState.DRAINING),
        PeerView(peer_id="e", stage=UNDECIDED, state=PeerState.JOINING),
    )
    view = SwarmView(2, peers)
    assert [peer.peer_id for peer in view.peers] == list("abcde")
    assert view == SwarmView(2, peers[::-1])
    assert [peer.peer_id for peer in view.in_stage(0)] == ["a", "b", "c"]
    assert [peer.peer_id for peer in view.serving(0)] == ["a", "c"]
    assert view.serving(1) == ()
    assert view.fewest_serving() == 0
    assert view.peer("d") == peers[3]
    assert view.peer("x") is None


# --- window -----------------------------------------------------------------------------------------------------------


def test_the_window_fits_the_round_trip():
    window = InFlightWindow(limit=100)
    window.observe(round_trip_s=0.5, compute_s=0.1, now=0.0)
    assert window.size() == 1 + 5 * SPARE


def test_before_any_measurement_the_window_is_small():
    assert InFlightWindow(limit=8).size() == 2
    assert InFlightWindow(limit=1).size() == 1


@given(st.integers(1, 50), st.floats(0, 1e6), st.just(0.0) | st.floats(1e-9, 1e3))
def test_the_window_keeps_to_its_limits(limit, round_trip_s, compute_s):
    window = InFlightWindow(limit)
    window.observe(round_trip_s, compute_s, 0.0)
    assert 1 <= window.size() <= limit


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0, 30)), min_size=1, max_size=40))
def test_the_shortest_round_trip_of_late_counts(measurements):
    window, now, seen = InFlightWindow(10**9, memory_s=60.0), 0.0, []
    for round_trip_s, pause_s in measurements:
        now += pause_s
        window.observe(round_trip_s, 0.01, now)
        seen.append((now, round_trip_s))
    shortest = min(seconds for time, seconds in seen if time >= now - 60.0)
    expected = InFlightWindow(10**9)
    expected.observe(shortest, 0.01, 0.0)
    assert abs(window.size() - expected.size()) <= 1  # the compute time is a running mean, with rounding


def test_queueing_does_not_widen_the_window():
    window = InFlightWindow(100)
    window.observe(0.2, 0.1, now=0.0)
    for second in range(1, 50):
        window.observe(0.2 * second, 0.1, now=float(second))
    assert window.size() == 1 + 2 * SPARE


def test_a_link_that_has_become_slower_is_noticed_in_time():
    window = InFlightWindow(100, memory_s=10.0)
    window.observe(0.1, 0.1, now=0.0)
    window.observe(1.0, 0.1, now=10.0)
    assert window.size() == 1 + SPARE
    window.observe(1.0, 0.1, now=10.1)
    assert window.size() == 1 + 10 * SPARE


def test_a_slow_way_is_taken_by_as_much_as_it_carries_and_only_where_no_better_one_is_there():
    router = make_router(near=1.0, far=1.0)
    ways = {"far": 0.25}
    assert choose_and_do(router, 40, carried=lambda peer: ways.get(peer, 9.0)) == {"near": 40}
    ways["near"] = 0.75
    sent = Counter(router.choose(1, carried=lambda peer: ways.get(peer, 9.0)).peer_id for _ in range(40))
    assert 28 <= sent["near"] <= 32, "by the speed of the ways"


def test_a_caller_whose_own_part_lies_behind_a_slow_way_sends_to_others():
    callers = [replace(peer, stage=0) for peer in serving(a=1.0, b=1.0)]
    router = Router(random.Random(0))
    router.update(serving(x=1.0, y=1.0), "a", callers, 1)
    (own,) = {router.choose(1).peer_id for _ in range(10)}
    (other,) = {"x", "y"} - {own}
    sent = Counter(router.choose(1, carried=lambda peer: 0.01 if peer == own else 9.0).peer_id for _ in range(20))
    assert sent[other] >= 19, "one at most learns how slow the way is"

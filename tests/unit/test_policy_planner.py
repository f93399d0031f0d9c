from dataclasses import replace
from itertools import permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_peer.policy.planning import planner as planning
from swarm_peer.policy.planning.automatic import predict_automatic
from swarm_peer.policy.planning.performance_model import (
    AVERAGING,
    COMPUTE,
    FILL,
    MEMORY,
    ROUND_TRIPS,
    UPDATE_BYTES_PER_S,
    UPLOAD,
    Predictor,
)
from swarm_peer.policy.planning.planner import assign, plan, smallest_fitting
from swarm_peer.policy.planning.resources import PeerGroup, StageWork, StepSettings
from swarm_peer.policy.planning.square_cube import Hop
from swarm_peer.policy.stage_memory import StageMemory

SETTINGS = StepSettings(global_batch_size=96, microbatch_size=2, max_in_flight=64)


def work(flops=10.0, activation=0.0, gradient=0.0, averaging=0.0, fixed=0.0, microbatch=0.0):
    """A stage in round numbers; its update takes no time."""
    return StageWork(
        layers=1,
        parameters=1,
        trained=1,
        flops=flops,
        activation_bytes=activation,
        gradient_bytes=gradient,
        averaging_bytes=averaging,
        memory=StageMemory(
            weight_bytes=fixed, weight_gradient_bytes=0.0, optimizer_bytes=0.0, microbatch_bytes=microbatch
        ),
    )


def group(name="p", count=1, flops=10.0, **more):
    return PeerGroup(name=name, count=count, flops_per_s=flops, **more)


def test_an_average_every_so_many_steps_is_shared_by_them():
    works, groups = [work(averaging=30.0)], [group("a", 2, upload_bytes_per_s=20.0, latency_s=0.1)]

    def predict(steps_per_average):
        settings = replace(SETTINGS, steps_per_average=steps_per_average)
        return Predictor(works=works, groups=groups, settings=settings).predict([[2]])

    each, periodic = predict(1), predict(10)
    assert each.times.averaging_s == pytest.approx(1.5 + 4 * 0.1)
    # A tenth of the 30 bytes at 20/s and of three round trips; and the barrier's round trip in each step.
    assert periodic.times.averaging_s == pytest.approx((1.5 + 3 * 0.1) / 10 + 0.1)
    assert periodic.sent_bytes == pytest.approx(each.sent_bytes / 10)


def test_an_average_ahead_holds_up_what_does_not_fit_beside_the_microbatches():
    """Two stages of two peers; 48 microbatches of 2 samples, 10 FLOP at 10 FLOP/s: 2 s each, so 48 s."""
    works = [work(activation=8.0, averaging=0.0), work(gradient=4.0, averaging=400.0)]
    settings = replace(SETTINGS, averages_ahead=True)

    def averaging_s(speed, settings=settings):
        groups = [group("a", 4, upload_bytes_per_s=speed, download_bytes_per_s=speed, latency_s=0.1)]
        made = Predictor(works=works, groups=groups, settings=settings).predict([[2], [2]])
        assert made.times.stream_s == pytest.approx(48.0)
        return made.times.averaging_s

    # A peer receives 24 times 16 bytes a step. At 20/s these take 19.2 s, and averaging 400 bytes 20.3 s: it fits.
    assert averaging_s(20.0) == pytest.approx(0.1 + 0.1)
    # At 10/s they take 38.4 s and 40.3 s: 30.7 s are left over.
    assert averaging_s(10.0) == pytest.approx(38.4 + 40.3 - 48.0 + 0.1)
    assert averaging_s(10.0, SETTINGS) == pytest.approx(40.3 + 0.1)


# --- prediction -------------------------------------------------------------------------------------------------------


def test_a_case_computed_by_hand():
    """Stage 0: two peers of 10 and 20 FLOP/s on 10 FLOP a sample, stage 1: one of 24 on 8."""
    works = [work(10.0, activation=4.0, averaging=30.0), work(8.0, gradient=2.0)]
    groups = [
        group("a", 1, 10.0, upload_bytes_per_s=40.0, download_bytes_per_s=20.0, latency_s=0.1),
        group("b", 1, 20.0, upload_bytes_per_s=40.0, download_bytes_per_s=20.0, latency_s=0.1),
        group("c", 1, 24.0, upload_bytes_per_s=16.0, download_bytes_per_s=16.0, latency_s=0.3),
    ]
    made = Predictor(works=works, groups=groups, settings=SETTINGS).predict([[1, 1, 0], [0, 0, 1]])
    # A microbatch of two samples: a 2 s, b 1 s; c computes 2/3 s, and 8 bytes come in at 16/s: 1/2 s.
    assert made.stages[0].samples_per_s == pytest.approx(1 + 2)
    assert made.stages[1].samples_per_s == pytest.approx(3)
    assert made.times.stream_s == pytest.approx(96 / 3)
    # Held at stage 1 for 2/3 s; on the way 1/2 s for the activations (c receives more slowly than they are sent), 1/4 s
    # for the gradients (c sends more slowly), 0.2 s for the round trip; and two thirds of all are computed by b.
    # The stages are equally slow: the first one's peers compute 4/3 s on the average microbatch.
    first = 2 / 3 + 1 / 2 + 1 / 4 + 0.2 + (2 * 1 + 1 * 2) / 3
    assert made.times.fill_s == pytest.approx(first - 4 / 3)
    # Two peers: each moves its gradients once, 30 bytes at 20/s, and four round trips of 0.1 s.
    assert made.times.averaging_s == pytest.approx(1.5 + 4 * 0.1)
    assert made.step_s == pytest.approx(made.times.stream_s + made.times.fill_s + made.times.averaging_s)
    assert made.samples_per_s == pytest.approx(96 / made.step_s)
    assert made.sent_bytes == pytest.approx(96 * (4 + 2) + 2 * 30)
    assert made.stages[0].busy_share == pytest.approx(96 * 10 / 30 / made.step_s)


@pytest.mark.parametrize(
    ("upload", "latency", "limit", "memory", "expected", "reason"),
    [
        (inf, 0.0, 64, inf, 5.0, COMPUTE),
        (2.0, 0.0, 64, inf, 2.0, UPLOAD),
        (inf, 8.0, 64, inf, 5.0, COMPUTE),
        # Held for 2/5 + 8 + 2/50 s: with four at once, one every 2.11 s.
        (inf, 8.0, 4, inf, 2 * 4 / 8.44, ROUND_TRIPS),
        # Memory for 3 of 100 bytes beside 1000.
        (inf, 8.0, 64, 1399.0, 2 * 3 / 8.44, MEMORY),
    ],
)
def test_what_limits_a_stage(upload, latency, limit, memory, expected, reason):
    works = [work(10.0, activation=1.0, fixed=1000.0, microbatch=100.0), work(1.0)]
    groups = [group("a", 1, 50.0, upload_bytes_per_s=upload, latency_s=latency, memory_bytes=memory)]
    groups.append(group("b", 1, 50.0, latency_s=latency))
    made = Predictor(works=works, groups=groups, settings=replace(SETTINGS, max_in_flight=limit)).predict(
        [[1, 0], [0, 1]]
    )
    assert made.stages[0].samples_per_s == pytest.approx(expected)
    assert made.stages[0].limit == reason


def test_what_limits_a_step():
    slow_link = group("p", 2, 10.0, upload_bytes_per_s=1.0)
    assert (
        Predictor(works=[work(averaging=100.0)], groups=[slow_link], settings=SETTINGS).predict([[2]]).limit
        == AVERAGING
    )
    one = replace(SETTINGS, global_batch_size=2)
    assert (
        Predictor(works=[work(), work(), work()], groups=[group("p", 3)], settings=one).predict([[1], [1], [1]]).limit
        == FILL
    )


def test_a_step_is_stream_fill_averaging_and_update():
    stage = work(averaging=100.0)
    works = [replace(stage, memory=replace(stage.memory, weight_gradient_bytes=3 * UPDATE_BYTES_PER_S))]
    peers = [group("p", 2, 10.0, upload_bytes_per_s=1.0)]
    compute_s, averaging_s, update_s = 96 / 2, 100.0, 3.0
    fill_s = 0.0  # a single stage has nothing before or after it
    made = Predictor(works=works, groups=peers, settings=SETTINGS).predict([[2]])
    assert made.step_s == pytest.approx(compute_s + fill_s + averaging_s + update_s)


def test_prices():
    peers = [group("p", 2, 10.0, dollars_per_hour=3.0, dollars_per_sent_byte=0.5)]
    made = Predictor(works=[work(averaging=100.0)], groups=peers, settings=SETTINGS).predict([[2]])
    assert (made.dollars_per_hour, made.sent_bytes, made.traffic_dollars) == (6.0, 200.0, 100.0)


def test_memory_of_a_stage():
    memory = work(fixed=100.0, microbatch=10.0).memory
    stage = replace(memory, working_bytes=5.0, update_bytes=40.0, host_bytes=20.0, weight_bytes=80.0)
    assert [stage.peak_bytes(n) for n in (1, 3, 4)] == [140.0, 140.0, 145.0]
    assert [stage.window(m, 8) for m in (139.0, 140.0, 144.0, 145.0, 1e9)] == [0, 3, 3, 4, 8]


# --- planning ---------------------------------------------------------------------------------------------------------

links = st.sampled_from([inf, 50.0, 10.0, 2.0])
peer_groups = st.lists(
    st.builds(
        PeerGroup,
        name=st.just("p"),
        count=st.integers(1, 2),
        flops_per_s=st.sampled_from([5.0, 10.0, 25.0]),
        memory_bytes=st.sampled_from([50.0, 120.0, 400.0]),
        upload_bytes_per_s=links,
        download_bytes_per_s=links,
        latency_s=st.sampled_from([0.0, 0.5]),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: [replace(each, name=f"p{number}") for number, each in enumerate(found)])
stage_works = st.builds(
    work,
    st.sampled_from([5.0, 10.0, 20.0]),
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([0.0, 20.0, 200.0]),
    st.sampled_from([10.0, 40.0, 100.0]),
    st.sampled_from([1.0, 15.0]),
)
cut_lists = st.lists(stage_works, min_size=1, max_size=3).map(lambda found: {len(found): tuple(found)})


def check(made, step):
    """Assert all that holds for every plan."""
    for option in made.options:
        if option.prediction is None:
            assert option.reason
            continue
        prediction = option.prediction
        for index, each in enumerate(made.groups):
            assert sum(stage.peers[index] for stage in prediction.stages) <= each.count, "a peer has one stage"
        for stage, needs in zip(prediction.stages, option.works, strict=True):
            assert sum(stage.peers) >= step.min_peers
            assert stage.memory_bytes <= stage.memory_limit_bytes
            for each, number in zip(made.groups, stage.peers, strict=True):
                assert not number or needs.memory.peak_bytes(1) <= each.memory_bytes
        slowest = min(stage.samples_per_s for stage in prediction.stages)
        assert prediction.times.stream_s == pytest.approx(step.global_batch_size / slowest)
        assert prediction.samples_per_s == pytest.approx(
            step.global_batch_size
            / (
                prediction.times.stream_s
                + prediction.times.fill_s
                + prediction.times.averaging_s
                + prediction.times.update_s
            )
        )
        assert made.best is not None
        assert made.best.samples_per_s >= option.samples_per_s


@settings(max_examples=25)
@given(cut_lists, peer_groups, st.integers(1, 2))
def test_what_holds_for_every_plan(cuts, peers, min_peers):
    step = replace(SETTINGS, min_peers=min_peers)
    made = plan(cuts, peers, step)
    check(made, step)
    for change in made.changes:
        if change.samples_per_s is not None and change.difference > 0:
            assert change.samples_per_s >= made.best.samples_per_s * (1 - 1e-9)


@settings(max_examples=25)
@given(cut_lists, peer_groups)
def test_what_holds_for_a_search(cuts, peers):
    tried = planning.MOST_TRIED
    exact = plan(cuts, peers, SETTINGS)
    planning.MOST_TRIED = 0
    try:
        searched = plan(cuts, peers, SETTINGS)
    finally:
        planning.MOST_TRIED = tried
    check(searched, SETTINGS)
    assert (searched.best is None) == (exact.best is None), "the search finds peers for all stages if there are enough"
    if exact.best is not None:
        assert searched.best.samples_per_s >= 0.85 * exact.best.samples_per_s


@settings(max_examples=25)
@given(cut_lists, peer_groups.map(lambda peers: peers[:2]), st.integers(0, 1))
def test_more_peers_are_never_slower(cuts, peers, index):
    index %= len(peers)
    more = [replace(each, count=each.count + (number == index)) for number, each in enumerate(peers)]
    before, after = plan(cuts, peers, SETTINGS).best, plan(cuts, more, SETTINGS).best
    if before is not None:
        assert after.samples_per_s >= before.samples_per_s * (1 - 1e-9)


@settings(max_examples=25)
@given(cut_lists, peer_groups)
def test_the_order_of_peers_does_not_matter(cuts, peers):
    plans = [plan(cuts, order, SETTINGS) for order in permutations(peers)]
    assert all(made == plans[0] for made in plans)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 200))
def test_equal_peers_on_equal_stages_are_spread_evenly(num_stages, num_peers):
    made = plan({num_stages: [work()] * num_stages}, [group("p", num_peers)], SETTINGS)
    if num_peers < num_stages:
        assert made.best is None
    else:
        numbers = [sum(stage.peers) for stage in made.best.prediction.stages]
        assert min(numbers) == num_peers // num_stages


def test_a_large_memory_is_kept_for_the_stage_that_needs_it():
    works = [work(10.0, fixed=100.0), work(10.0, fixed=10.0)]
    peers = [group("small", 30, 10.0, memory_bytes=20.0), group("large", 1, 50.0, memory_bytes=200.0)]
    counts = assign(Predictor(works=works, groups=peers, settings=SETTINGS))
    assert counts is not None
    assert counts[0] == [0, 1]
    assert counts[1][1] == 0


def test_a_peer_with_a_slow_link_is_left_out_of_averaging():
    peers = [group("fast", 4, 10.0, upload_bytes_per_s=1000.0), group("slow", 4, 10.0, upload_bytes_per_s=1.0)]
    made = plan({1: [work(averaging=100.0)]}, peers, SETTINGS)
    assert made.best.prediction.stages[0].peers == (4, 0)
    slow = [change for change in made.changes if made.groups[change.group].name == "slow"]
    assert [change.stages for change in slow] == [(), ()]


def test_the_best_number_of_stages():
    cuts = {1: [work(20.0, averaging=2000.0)], 2: [work(10.0, activation=1.0, averaging=1000.0)] * 2}
    fast = [group("p", 2, 10.0, upload_bytes_per_s=1e6)]
    slow = [group("p", 2, 10.0, upload_bytes_per_s=100.0)]
    assert plan(cuts, fast, SETTINGS).best.num_stages == 1, "no pipeline to fill"
    assert plan(cuts, slow, SETTINGS).best.num_stages == 2, "nothing to average"
    assert plan(cuts, slow, SETTINGS, num_stages=1).best.num_stages == 1


def test_one_peer_fewer_may_be_one_too_few():
    made = plan({2: [work(), work()]}, [group("p", 2)], SETTINGS)
    assert [(change.difference, change.samples_per_s is None) for change in made.changes] == [(1, False), (-1, True)]


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        ([group("p", 9, memory_bytes=150e9)], "stage 1 needs 200.0 GB with one microbatch in flight, and the largest"),
        ([group("p", 1, memory_bytes=300e9)], "2 stages of 1 need 2 peers, and there are 1"),
        (
            [group("p", 9, memory_bytes=50e9), group("q", 1, memory_bytes=300e9)],
            "too few peers have the memory: stage 1 needs 200.0 GB, and 1 of 10 have that",
        ),
    ],
)
def test_why_there_is_no_plan(peers, reason):
    cuts = {2: [work(fixed=100e9), work(fixed=200e9)], 3: [work(fixed=100e9)] * 3}
    made = plan({2: cuts[2]}, peers, SETTINGS)
    assert made.best is None
    assert reason in made.options[0].reason


def test_the_fewest_stages_that_fit():
    cuts = {number: [work(fixed=120.0 / number)] * number for number in range(1, 7)}
    assert smallest_fitting(cuts, [group(memory_bytes=30.0), group(memory_bytes=45.0)]) == 3
    assert smallest_fitting(cuts, [group(memory_bytes=10.0)]) is None


# --- the square-cube law ----------------------------------------------------------------------------------------------


def hop(hidden, bytes_per_element, latency_s=0.0, tokens=512):
    """One GPT layer on one device of 6 TFLOP/s, at 500 Mb/s."""
    flops = 3 * tokens * (24 * hidden**2 + 2 * tokens * hidden)
    size = tokens * hidden * bytes_per_element
    return Hop(
        compute_s=flops / 6e12, activation_bytes=size, gradient_bytes=size, bytes_per_s=500e6 / 8, latency_s=latency_s
    )


def test_wider_layers_need_less_of_the_network():
    shares = [hop(hidden, 2).share_alone for hidden in (768, 1536, 4096, 12288)]
    assert shares == sorted(shares)
    assert 0.1 < shares[0] < 0.25
    assert 0.65 < shares[-1] < 0.9
    assert hop(12288, 1).share_alone > shares[-1]


def test_transfers_cost_twice_as_much_as_compute_alone_where_they_take_as_long():
    even = Hop(compute_s=1.0, activation_bytes=50.0, gradient_bytes=50.0, bytes_per_s=100.0, latency_s=0.0)
    assert even.share_alone == 0.5
    assert even.share_in_flight == 1.0
    assert even.in_flight == 2.0
    assert replace(even, latency_s=8.0).share_alone == 0.1
    assert replace(even, latency_s=8.0).share_in_flight == 1.0
    assert replace(even, bytes_per_s=25.0).share_in_flight == 0.25


# --- peers that choose their stages themselves ------------------------------------------------------------------------


def test_peers_that_choose_by_themselves_balance_compute_and_nobody_stays_out():
    works = [work(averaging=100.0), work(averaging=100.0)]
    groups = [group("fast", 2, flops=30.0), group("slow", 3, flops=10.0, upload_bytes_per_s=1.0)]
    predictor = Predictor(works=works, groups=groups, settings=SETTINGS)
    automatic = predict_automatic(predictor)
    assert automatic is not None
    assert [sum(stage.peers) for stage in automatic.stages] == [3, 2]
    assert [stage.peers[0] for stage in automatic.stages] == [1, 1]
    planned = predictor.predict(assign(predictor))
    assert planned.samples_per_s > 4 * automatic.samples_per_s, "a plan leaves out those whose links are slow"


def test_peers_that_choose_by_themselves_need_memory_for_a_stage():
    works = [work(fixed=5.0), work(fixed=50.0)]
    settings = replace(SETTINGS, min_peers=2)

    def automatic(num_large, num_small):
        groups = [group("large", num_large, memory_bytes=100.0), group("small", num_small, memory_bytes=10.0)]
        made = predict_automatic(Predictor(works=works, groups=groups, settings=settings))
        return made and [stage.peers for stage in made.stages]

    assert automatic(2, 2) == [(0, 2), (2, 0)]
    assert automatic(3, 0) is None
    assert automatic(1, 5) is None, "the small ones do not fit the second stage"


@pytest.mark.parametrize("num_closed", [4, 40])
def test_closed_peers_are_never_stage_mates_nor_alone_beside_each_other(num_closed):
    """Of few peers all assignments are tried; of many a search tries some."""
    peers = [group("closed", num_closed, 20.0, is_closed=True), group("open", 4, 10.0)]
    made = plan({2: [work(), work()], 3: [work(), work(), work()]}, peers, SETTINGS)
    closed = [each.name for each in made.groups].index("closed")
    for option in made.options:
        assert option.prediction
        counts = [stage.peers for stage in option.prediction.stages]
        assert all(here[closed] == 1 for here in counts), "each stage takes one, and the others have no stage"
        assert all(here[1 - closed] for here in counts)


def test_too_many_closed_peers_are_said_to_be_why():
    made = plan({3: [work()] * 3}, [group("closed", 9, is_closed=True)], SETTINGS)
    assert made.best is None
    assert made.options[0].reason.startswith("9 of 9 peers are closed")
    assert plan({3: [work()] * 3}, [group("closed", 1, is_closed=True), group("open", 2)], SETTINGS).best
    assert not plan({3: [work()] * 3}, [group("closed", 2, is_closed=True), group("open", 1)], SETTINGS).best

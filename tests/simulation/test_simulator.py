"""The simulator: seeded, so the same seed gives the same trace of events."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import app
from coordinator.simulator.announcements import INTERVAL_S, LOOK_S, SILENCE_S, Announcements
from coordinator.simulator.network import read_places
from coordinator.simulator.optimum import OPTIMUM_TOLERANCE, optimum, upper_bound
from coordinator.simulator.options import ArrivalOptions, MicrobatchOptions, StageOptions
from coordinator.simulator.rebalancers import PeriodicRebalancing
from coordinator.simulator.simulate import Scenario, best_of, simulate_flow, simulate_microbatches
from coordinator.simulator.traces import MachineChange, Trace, consistent_counts, draw_trace, from_counts, read_trace
from coordinator.simulator.world import Distribution, Population
from swarm_peer.errors import UserError
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

DATA = Path(__file__).parent / "data"
NAMES, COUNTS = DATA / "names.csv", DATA / "counts.txt"
ALIKE = Population(speed=Distribution("constant", (1.0,)))


# --- traces


def test_named_machines_come_and_go_as_written():
    trace = read_trace(NAMES, random.Random(0))
    assert trace.changes[0] == MachineChange(0.0, True, "node1")
    rows = [line.split(",") for line in NAMES.read_text().splitlines()]
    assert [(c.joins, c.machine) for c in trace.changes] == [(kind == "add", name) for _, kind, name in rows]
    assert trace.duration_s == (int(rows[-1][0]) - int(rows[0][0])) / 1000


def test_machines_that_come_twice_or_were_never_there(tmp_path):
    path = tmp_path / "trace"
    path.write_text("time_ms,what,who\n\n5000,add,a\n2000,add,a\n1000,remove,b\n9000,remove,a\n9500,add,a\n")
    changes = [MachineChange(1.0, True, "a"), MachineChange(8.0, False, "a"), MachineChange(8.5, True, "a")]
    assert read_trace(path, random.Random(0)) == Trace(tuple(changes), 8.5)


def alive_at(trace, time_s):
    return sum(1 if c.joins else -1 for c in trace.changes if c.time_s <= time_s)


def test_repeated_readings_give_way_to_newer_ones():
    minute = 60.0
    rows = [(n * minute, 80) for n in range(3)] + [(n * minute + 90, 70) for n in range(3)]
    # The reading of 70 at 90 s makes the repetition of 80 at 120 s outdated.
    assert consistent_counts(rows) == [(0.0, 80), (60.0, 80), (90.0, 70), (150.0, 70), (210.0, 70)]
    assert consistent_counts(rows[::-1]) != [], "newest first"
    assert {count for _, count in consistent_counts([(5.0, 3), (5.0, 4)])} == {4}, "the last of one time"


def test_counts_in_order_are_taken_as_they_are_and_in_reverse_are_turned():
    rows = [(n * 30.0, 10 + n * 7 % 5) for n in range(50)]
    assert consistent_counts(rows) == rows
    assert consistent_counts(rows[::-1]) == rows


@given(st.randoms(use_true_random=False))
def test_shuffled_counts_still_tell_how_many_there_were(rng):
    truth = [(n * 60.0, 20 if n < 60 else 12) for n in range(120)]
    rows = list(truth)
    rng.shuffle(rows)
    history = consistent_counts(rows)
    assert len(history) >= 50
    trace = from_counts(history, random.Random(0))
    for minute in (30, 55, 70, 110):
        assert alive_at(trace, minute * 60.0 - history[0][0]) == truth[minute][1]


def test_who_leaves_is_drawn_from_the_seed():
    traces = [read_trace(COUNTS, random.Random(seed)) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]
    assert [alive_at(traces[0], t) for t in (0, 4000, 9000)] == [alive_at(traces[2], t) for t in (0, 4000, 9000)]
    assert 10 <= min(alive_at(traces[0], t) for t in range(0, 10000, 50)) < 30


@pytest.mark.parametrize("text", ["", "hello\n", "1000,add,a\nnonsense\n", "2026-01-01, 10:00:00, -4\n", "1000,add\n"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UserError, match=r"time_ms,add|date, time, live count"):
        read_trace(path, random.Random(0))


def test_a_drawn_trace_has_as_many_peers_as_asked_for():
    trace = draw_trace(50, 36000.0, 3000.0, random.Random(3))
    assert alive_at(trace, 0.0) == 50
    assert 30 < sum(alive_at(trace, t * 600.0) for t in range(60)) / 60 < 70
    assert trace.duration_s == 36000.0


# --- the optimum


def brute_force(work, num_stages):
    best = 0.0
    for stages in itertools.product(range(num_stages), repeat=len(work)):
        loads = [0.0] * num_stages
        for done, stage in zip(work, stages, strict=True):
            loads[stage] += done
        best = max(best, min(loads))
    return best


@given(st.lists(st.floats(0.2, 5), max_size=7), st.integers(1, 3))
def test_the_optimum_is_that_of_brute_force(work, num_stages):
    best = brute_force(work, num_stages)
    assert best * (1 - 1e-9) <= optimum(work, [1.0] * num_stages) <= best * (1 + 2 * OPTIMUM_TOLERANCE) + 1e-12
    assert upper_bound(work, [1.0] * num_stages) >= best * (1 - 1e-9)


def exact_optimum(work_per_s, stage_costs, tolerance=OPTIMUM_TOLERANCE):
    """The optimum by integer programming (HiGHS). For tens of peers; takes seconds, or much longer, beyond 20."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    work = np.asarray(work_per_s, dtype=np.float64)
    num_peers, num_stages = len(work), len(stage_costs)
    goal = np.zeros(num_peers * num_stages + 1)
    goal[-1] = -1.0  # the variables: peer i serves stage k; and the least stage's throughput
    rows = np.zeros((num_stages + num_peers, len(goal)))
    for k in range(num_stages):
        rows[k, k:-1:num_stages] = work / stage_costs[k]
        rows[k, -1] = -1.0
    for i in range(num_peers):
        rows[num_stages + i, i * num_stages : (i + 1) * num_stages] = 1.0
    low = np.concatenate([np.zeros(num_stages), np.zeros(num_peers)])
    high = np.concatenate([np.full(num_stages, np.inf), np.ones(num_peers)])
    most, integral = np.ones(len(goal)), np.ones(len(goal))
    most[-1], integral[-1] = np.inf, 0
    found = milp(
        goal,
        constraints=LinearConstraint(rows, low, high),
        integrality=integral,
        bounds=Bounds(0, most),
        options={"mip_rel_gap": tolerance},
    )
    return float(-found.fun)


@pytest.mark.parametrize(("num_peers", "num_stages"), [(8, 4), (9, 6), (11, 5)])
def test_the_optimum_is_that_of_integer_programming(num_peers, num_stages):
    pytest.importorskip("scipy")
    rng = random.Random(num_peers)
    work = [math.exp(0.35 * rng.gauss(0, 1)) for _ in range(num_peers)]
    exact = exact_optimum(work, [1.0] * num_stages)
    assert optimum(work, [1.0] * num_stages) == pytest.approx(exact, rel=2 * OPTIMUM_TOLERANCE)
    costs = [1.0 + k % 3 for k in range(num_stages)]
    assert optimum(work, costs) >= exact_optimum(work, costs) * (1 - 1e-6)


def test_the_bound_is_close_where_there_are_many_peers():
    rng = random.Random(5)
    work = sorted((math.exp(0.35 * rng.gauss(0, 1)) for _ in range(60)), reverse=True)
    loads = [0.0] * 6
    for done in work:
        loads[loads.index(min(loads))] += done
    assert min(loads) > 0.98 * upper_bound(work, [1.0] * 6)


# --- flow


def make_scenario(**values):
    """A scenario of the fields of all its parts."""
    parts = {}
    for name, kind in (("stages", StageOptions), ("arrivals", ArrivalOptions)):
        known = {field.name for field in dataclasses.fields(kind)}
        parts[name] = kind(**{key: values.pop(key) for key in known & values.keys()})
    return Scenario(**parts, **values)


def scenario(**more):
    return make_scenario(**{"num_stages": 3, "trace": NAMES, "seed": 1, **more})


@pytest.mark.parametrize(
    ("arrivals", "rebalance"),
    [
        *itertools.product(({"trace": NAMES}, {"trace": COUNTS}), ("none", "300", "60", "events")),
        ({"trace": None, "num_peers": 12, "hours": 1.0, "mean_lifetime_s": 1200.0}, "live"),  # it decides very often
    ],
)
def test_the_same_seed_gives_the_same_result_and_all_is_accounted_for(arrivals, rebalance):
    first, again, other = (simulate_flow(scenario(**arrivals, seed=seed), rebalance).summary for seed in (1, 1, 2))
    first.pop("wall_s"), again.pop("wall_s")
    assert first == again
    assert first["samples"] != other["samples"]
    share = first["share_of_optimum"]
    assert 0.3 < share["overall"] <= 1.0
    assert share["overall"] + sum(first["loss"].values()) == pytest.approx(1.0)
    assert first["bytes_moved"] == first["moves"] * 1e9
    assert (first["moves"] == 0) == (rebalance == "none")
    assert share["overall"] <= first["attainable_share_of_optimum"] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("trace", [NAMES, COUNTS], ids=["names", "counts"])
def test_deciding_upon_events_beats_every_minute_beats_none(trace):
    def mean(rebalance):
        runs = [simulate_flow(scenario(trace=trace, num_stages=4, seed=seed), rebalance).summary for seed in range(2)]
        return sum(run["share_of_optimum"]["overall"] for run in runs) / len(runs)

    none, minute, events, live = mean("none"), mean("60"), mean("events"), mean("live")
    assert none < minute < events
    assert none < live < events, "who hears of everything late, and mistrusts small gains, does less"


def run_flow(trace, num_stages, rebalance="events", **more):
    chosen = make_scenario(num_stages=num_stages, trace=NAMES, population=ALIKE, **more)
    swarm = chosen.flow_swarm(trace, rebalance)
    swarm.run()
    return swarm


def come(*machines, at=0.0):
    return [MachineChange(at, True, machine) for machine in machines]


def test_a_departure_is_made_good_within_a_minute_and_the_mover_does_nothing_meanwhile():
    # a, c, e serve stage 0 and b, d, f stage 1.
    trace = Trace((*come(*"abcdef"), MachineChange(100.0, False, "a"), MachineChange(100.0, False, "c")), 1000.0)
    swarm = run_flow(trace, 2)
    assert [d.move.to_stage for d in swarm.decisions] == [0]
    assert 102.0 <= swarm.decisions[0].time_s <= 103.0, "seconds after it was noticed"
    by_time = [(sample.time_s, sample.throughput) for sample in swarm.samples]
    assert by_time == [(0.0, 3.0), (100.0, 1.0), (102.5, 1.0), (147.5, 2.0)]


def test_newcomers_download_under_every_policy():
    trace = Trace((*come(*"ab"), *come("c", "d", at=50.0)), 300.0)
    for rebalance in ("none", "60", "events"):
        swarm = run_flow(trace, 2, rebalance)
        assert [(s.time_s, s.throughput) for s in swarm.samples] == [(0.0, 1.0), (50.0, 1.0), (95.0, 2.0)]
        assert swarm.bytes_joined == 2e9
        assert swarm.bytes_migrated == 0


def test_several_that_download_share_what_their_one_donor_sends():
    trace = Trace((*come("a"), *come("b", "c", at=50.0)), 300.0)
    swarm = run_flow(trace, 1)
    assert [s.time_s for s in swarm.samples] == [0.0, 50.0, 135.0], "80 s of download, where one alone takes 40 s"


def test_a_stage_that_empties_waits_for_a_newcomer_where_nobody_moves():
    trace = Trace((*come(*"abc"), MachineChange(100.0, False, "b"), *come("d", at=500.0)), 1000.0)
    assert [s.throughput for s in run_flow(trace, 2, "none").samples][-3:] == [0.0, 0.0, 1.0]
    assert run_flow(trace, 2, "events").samples[-1].throughput == 1.0
    assert run_flow(trace, 2, "events").decisions[0].time_s < 104.0


def test_the_live_policy_makes_a_departure_good_as_well():
    trace = Trace((*come(*"abcdef"), MachineChange(100.0, False, "a"), MachineChange(100.0, False, "c")), 1000.0)
    swarm = run_flow(trace, 2, "live")
    assert [d.move.to_stage for d in swarm.decisions] == [0]
    assert 100.0 + INTERVAL_S <= swarm.decisions[0].time_s <= 100.0 + SILENCE_S + INTERVAL_S + 4 * LOOK_S
    served_s = swarm.decisions[0].time_s + 45.0
    assert [(s.time_s, s.throughput) for s in swarm.samples][-2:] == [(served_s - 45.0, 1.0), (served_s, 2.0)]


def test_a_mover_can_serve_until_it_has_its_new_state():
    trace = Trace((*come(*"abcdef"), MachineChange(100.0, False, "a"), MachineChange(100.0, False, "c")), 1000.0)
    swarm = run_flow(trace, 2, "live", make_before_break=True)
    [decision] = swarm.decisions
    counts = [(s.time_s - decision.time_s, s.throughput) for s in swarm.samples if s.time_s >= decision.time_s]
    assert counts == [(0.0, 1.0), (40.0, 1.0), (45.0, 2.0)]
    assert {d.move.peer_id for d in swarm.decisions} <= {"b", "d", "f"}
    with pytest.raises(UserError, match="--make-before-break goes with --rebalance live"):
        run_flow(trace, 2, "events", make_before_break=True)


def test_announcements_come_late_with_noise_and_of_dead_peers_and_a_mover_drains_first():
    announcements = Announcements(drain_s=5.0, seed=0)
    a, b = (
        PeerView(peer_id=name, stage=0, state=PeerState.SERVING, samples_per_s=1.0, movable=True, since_s=0.0)
        for name in "ab"
    )
    moving = dataclasses.replace(b, stage=1, state=PeerState.JOINING, since_s=60.0, moved_from=0)
    moved = dataclasses.replace(moving, state=PeerState.SERVING, since_s=100.0)
    seen = {}
    for look in range(80):
        now_s = LOOK_S * look
        peers = [b if now_s < 60 else moving if now_s < 100 else moved] + ([a] if now_s < 30 else [])
        seen[now_s] = {peer.peer_id: peer for peer in announcements.look(SwarmView(2, tuple(peers)), now_s).peers}
    assert seen[0.0]["a"].samples_per_s == 0.0, "not measured yet"
    speeds = {view["b"].announced: view["b"].samples_per_s for now_s, view in seen.items() if 10 < now_s < 60}
    assert len(speeds) == 6, "every 7.5 s, and from there to the next look"
    assert len(set(speeds.values())) == 6
    assert all(0.8 < speed < 1.2 for speed in speeds.values())
    last_s = max(now_s for now_s, view in seen.items() if "a" in view)
    assert 30 + SILENCE_S - INTERVAL_S <= last_s <= 30 + SILENCE_S + LOOK_S, "it died at 30 s"
    assert seen[60.0]["b"].state is PeerState.SERVING, "late by a look"
    assert {seen[at_s]["b"].state for at_s in (62.0, 66.0)} == {PeerState.DRAINING}
    joining, serving = seen[68.0]["b"], seen[120.0]["b"]
    assert (joining.stage, joining.state, joining.moved_from) == (1, PeerState.JOINING, 0)
    assert (serving.stage, serving.state, serving.moved_from) == (1, PeerState.SERVING, 0)
    assert serving.samples_per_s > 0


def test_the_papers_protocol_moves_one_peer_at_a_time_and_does_not_flap():
    params = make_scenario(num_stages=2, trace=NAMES).parameters()
    peers = [
        PeerView(peer_id=f"p{n}", stage=0 if n < 4 else 1, state=PeerState.SERVING, samples_per_s=1.0, movable=True)
        for n in range(6)
    ]
    decide = PeriodicRebalancing(params, 60.0).decide
    assert [m.to_stage for m in decide(SwarmView(2, tuple(peers)), 0.0).moves] == [1]
    assert decide(SwarmView(2, tuple(peers[1:])), 0.0).moves == ()


def test_nothing_beats_what_is_attainable_and_that_not_the_optimum():
    chosen = scenario(num_stages=4)
    best = best_of(chosen, chosen.read_trace())
    times = sorted({time_s for time_s, _ in (*best.optimum, *best.attainable)})

    def value(series, time_s):
        return next((v for t, v in reversed(series) if t <= time_s), 0.0)

    result = simulate_flow(chosen, "events")
    for time_s in times:
        attainable, ideal = value(best.attainable, time_s), value(best.optimum, time_s)
        assert attainable <= ideal * (1 + 2 * OPTIMUM_TOLERANCE)
        assert value(result.throughput, time_s) <= attainable * (1 + 1e-9)


def test_hundreds_of_peers():
    chosen = make_scenario(num_stages=8, num_peers=400, hours=1.0, mean_lifetime_s=7200.0, seed=3)
    result = simulate_flow(chosen, "events").summary
    assert result["share_of_optimum"]["overall"] > 0.93


def test_a_trace_of_one_moment_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text("2026-01-01, 10:00:00, 7\n")
    with pytest.raises(UserError, match="nothing to simulate"):
        make_scenario(num_stages=2, trace=path).read_trace()


# --- microbatches


@pytest.mark.parametrize("num_stages", [1, 3])
def test_flow_and_microbatches_agree_where_windows_are_ample(num_stages):
    chosen = make_scenario(num_stages=num_stages, num_peers=9, hours=0.2, mean_lifetime_s=1e9, seed=2)
    result = simulate_microbatches(chosen, "none", MicrobatchOptions(window=30))
    assert result["share_of_flow"] == pytest.approx(1.0, abs=0.03)
    assert result["retries"] == 0


def test_flow_and_microbatches_agree_while_peers_come_and_go():
    chosen = make_scenario(num_stages=3, num_peers=12, hours=0.4, mean_lifetime_s=1200.0, seed=5)
    result = simulate_microbatches(chosen, "events", MicrobatchOptions(window=30))
    assert result["share_of_flow"] == pytest.approx(1.0, abs=0.06)
    assert result["retries"] > 0


def test_routing_by_speed_beats_routing_at_random():
    chosen = make_scenario(
        num_stages=2, num_peers=8, hours=0.05, mean_lifetime_s=1e9, seed=2,
        population=Population(speed=Distribution("choice", (1.0, 4.0))),
    )  # fmt: skip
    done = {
        name: simulate_microbatches(chosen, "none", MicrobatchOptions(routing=name, window=20))["throughput_per_s"]
        for name in ("uniform", "own", "jsed", "po2")
    }
    assert done["uniform"] < 0.93 * done["own"]
    assert min(done["jsed"], done["po2"]) > done["uniform"]


def test_a_small_window_leaves_devices_idle_over_a_slow_link():
    chosen = make_scenario(
        num_stages=2, num_peers=4, hours=0.05, mean_lifetime_s=1e9,
        population=Population(speed=Distribution("constant", (5.0,)), latency_s=Distribution("constant", (0.5,))),
    )  # fmt: skip
    one, many, live = (
        simulate_microbatches(chosen, "none", MicrobatchOptions(window=window))["share_of_flow"]
        for window in (1, 30, None)
    )
    assert one < 0.4
    assert many > 0.95
    # The live rule goes by the shortest round trip of late, and asks for twice what that takes.
    assert 0.6 < live <= many


def test_a_microbatch_takes_the_time_of_its_links_and_computations():
    chosen = make_scenario(
        num_stages=2, num_peers=2, hours=0.1, mean_lifetime_s=1e9,
        population=Population(speed=Distribution("constant", (2.0,)), latency_s=Distribution("constant", (0.1,))),
    )  # fmt: skip
    result = simulate_microbatches(chosen, "none", MicrobatchOptions(window=1, activation_bytes=2.5e6))
    # 0.1 s of latency and 0.1 s of 2.5 MB at 25 MB/s, there and back, and half a second of compute.
    assert result["median_round_trip_s"] == pytest.approx(0.9)


def steady(num_stages, num_peers, speeds=(1.0,), **options):
    chosen = make_scenario(
        num_stages=num_stages, num_peers=num_peers, hours=1.0, mean_lifetime_s=1e9,
        population=Population(speed=Distribution("choice", speeds)),
    )  # fmt: skip
    return simulate_microbatches(chosen, "none", MicrobatchOptions(activation_bytes=0.0, **options))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_round_takes_its_microbatches_the_length_of_the_pipeline_and_the_averaging_round(num_stages):
    result = steady(num_stages, num_stages, window=8, global_batch=8, averaging_s=3.0)
    # The last stage computes all the time, from the first forward pass that reaches it; then the last backward passes.
    # What is under way at an earlier stage is not interrupted, so that it may last a little longer.
    assert 3600 / result["rounds"] == pytest.approx(8 + (num_stages - 1) + 3, rel=0.03)
    assert result["throughput_per_s"] == pytest.approx(8 * result["rounds"] / 3600, rel=0.01)


def test_long_rounds_cost_nothing():
    assert steady(2, 6, window=20, global_batch=1000)["share_of_flow"] == pytest.approx(1.0, abs=0.02)


def test_a_fast_peer_of_stage_0_does_more_of_the_global_batch_and_waits_at_its_end_for_a_slow_one():
    # As live, whoever comes first has the next microbatch. The last one takes the slow peer four times as long.
    few, many = (steady(1, 2, (0.5, 2.0), window=1, global_batch=n)["share_of_flow"] for n in (21, 101))
    assert 0.6 < few < 0.9 < many < 1.0


def test_rounds_go_on_while_peers_come_and_go():
    chosen = make_scenario(num_stages=3, num_peers=12, hours=0.4, mean_lifetime_s=1200.0, seed=5)
    options = MicrobatchOptions(window=8, capacity=8, global_batch=50, averaging_s=1.0)
    first, again = (simulate_microbatches(chosen, "events", options) for _ in range(2))
    first.pop("wall_s"), again.pop("wall_s")
    assert first == again
    assert first["retries"] > 0
    assert first["busy"] > 0
    done = first["throughput_per_s"] * (first["simulated_s"] - 60)
    assert 50 * (first["rounds"] - 3) < done + 60 * 12, "every step counted its whole global batch"
    assert first["rounds"] > 0.6 * done / 50
    assert 0.5 < first["share_of_flow"] < 0.95


def test_places_of_a_table_and_of_a_matrix(tmp_path):
    path = tmp_path / "network"
    path.write_text("region_a,region_b,delay_ms,bandwidth_gbps\nX,Y,50,0.08\n")
    latencies, bandwidths = read_places(path)
    assert latencies == [[0.0, 0.05], [0.05, 0.0]]
    assert bandwidths[0][1] == bandwidths[1][0] == 1e7
    path.write_text("0 0.2 0\n0.4 0 0.6\n0 0.6 0\n")
    assert read_places(path)[0] == [[0.1, 0.1, 0.3], [0.2, 0.1, 0.3], [0.3, 0.3, 0.1]]
    header = "a,b,c,d\n"
    no_tables = [f"{header}{rows}" for rows in ("", "X,Y,5,0\n", "X,Y,-5,1\n", "X,Y,5,nan\n", "X,Y,5,1\nY,Z,5,1\n")]
    for text in ("1 2\n3\n", f"{header}X,Y,no,1\n", "", *no_tables):
        path.write_text(text)
        with pytest.raises(UserError, match="--network"):
            read_places(path)


# --- the command


def command(capsys, *words):
    app([*words], result_action="return_value")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "source", [("--trace", str(NAMES)), ("--peers", "12", "--hours", "2", "--mean-lifetime-s", "3000")]
)
def test_the_command_prints_json_and_nothing_else(capsys, source):
    words = ("simulate", *source, "--stages", "3", "--rebalance", "events", "--seed", "4", "--json")
    first, again = (json.loads(command(capsys, *words)) for _ in range(2))
    assert {*first} >= {"share_of_optimum", "moves", "bytes_moved", "simulated_s", "wall_s"}
    assert {*first["share_of_optimum"]} == {"overall", "first_hour", "last_hour"}
    first.pop("wall_s"), again.pop("wall_s")
    assert first == again


def test_the_command_prints_for_people_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    text = command(capsys, "simulate", "--peers", "8", "--hours", "2", "--stages", "2", "--figure", str(path))
    assert "  overall: 0." in text
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "0", "--peers", "3"], "at least 1"),
        (["--stages", "2"], "needs --trace FILE, or --peers"),
        (["--stages", "2", "--peers", "3", "--rebalance", "often"], "live, none, events, or seconds"),
        (["--stages", "2", "--peers", "3", "--rebalance", "nan"], "live, none, events, or seconds"),
        (["--stages", "2", "--peers", "3", "--speed", "gauss:1"], "--speed 'gauss:1': expected constant"),
        (["--stages", "2", "--peers", "3", "--stage-costs", "1"], "--stage-costs has 1 values for 2 stages"),
        (["--stages", "2", "--trace", "/does/not/exist"], "--trace: cannot read /does/not/exist"),
        (["--stages", "2", "--peers", "3", "--hours", "0"], "must be above 0"),
        (["--stages", "2", "--peers", "3", "--window", "0"], "--window 0"),
        (["--stages", "2", "--peers", "3", "--global-batch", "0"], "--global-batch 0"),
        (["--stages", "2", "--peers", "3", "--global-batch", "4"], "--level microbatch"),
        (["--stages", "2", "--peers", "3", "--averaging-s", "2"], "--averaging-s 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_do(words, message):
    with pytest.raises(UserError, match=message):
        app(["simulate", *words], result_action="return_value")


# --- peers without a way to each other


def closed_swarm(closed_share):
    return Scenario(
        stages=StageOptions(num_stages=3, state_gb=0.1),
        arrivals=ArrivalOptions(num_peers=14, hours=1.0, mean_lifetime_s=3600.0),
        population=dataclasses.replace(ALIKE, closed_share=closed_share),
    )


@pytest.mark.parametrize(("rebalance", "most_down_s"), [("live", 60.0), ("none", 600.0)])
def test_no_two_closed_peers_serve_one_stage_and_the_swarm_goes_on(rebalance, most_down_s):
    """Half of the peers are closed. Without moves, the swarm waits for newcomers where the open ones have left."""
    scenario = closed_swarm(0.5)
    swarm = scenario.flow_swarm(scenario.read_trace(), rebalance)
    swarm.start()
    num_waiting = 0
    for minute in range(1, 60):
        swarm.env.run(until=60.0 * minute)
        num_waiting += sum(peer.state is PeerState.JOINING and bool(peer.unreached) for peer in swarm.peers.values())
        for stage in range(3):
            assert sum(bool(swarm.without_way(peer.peer_id)) for peer in swarm.view().serving(stage)) <= 1
    assert num_waiting, "the others wait"
    ends_s = [sample.time_s for sample in swarm.samples[1:]] + [3600.0]
    down_s = [end_s - s.time_s for s, end_s in zip(swarm.samples, ends_s, strict=True) if not s.throughput]
    assert 0 < sum(down_s) < most_down_s


def test_a_swarm_of_closed_peers_alone_does_nothing():
    assert simulate_flow(closed_swarm(1.0), "live").summary["samples"] == 0


def test_no_microbatch_goes_where_no_way_leads():
    scenario = Scenario(
        stages=StageOptions(num_stages=2, state_gb=0.0),
        arrivals=ArrivalOptions(num_peers=8, hours=0.1, mean_lifetime_s=1e9),
        population=dataclasses.replace(ALIKE, closed_share=0.5),
    )
    assert simulate_microbatches(scenario, "none", MicrobatchOptions())["throughput_per_s"] > 0
    alone = dataclasses.replace(scenario, population=dataclasses.replace(ALIKE, closed_share=1.0))
    assert simulate_microbatches(alone, "none", MicrobatchOptions())["throughput_per_s"] == 0
    with pytest.raises(UserError, match="--closed-share 2"):
        dataclasses.replace(scenario, population=dataclasses.replace(ALIKE, closed_share=2.0))

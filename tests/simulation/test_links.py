"""Links that several transfers share, and what the planner says of them."""

import math

import pytest
import simpy

from coordinator.simulator.network import Links, Network, read_places
from coordinator.simulator.options import ArrivalOptions, MicrobatchOptions, StageOptions
from coordinator.simulator.simulate import Scenario, simulate_microbatches
from coordinator.simulator.world import Distribution, Machine, Population
from swarm_peer.policy.planning.performance_model import Predictor
from swarm_peer.policy.planning.resources import PeerGroup, StageWork, StepSettings
from swarm_peer.policy.stage_memory import StageMemory

PLACES = "region_a,region_b,delay_ms,bandwidth_gbps\nX,Y,50,0.08\n"


def arrivals(transfers, machines, places=None):
    """When each transfer has arrived: (begin, sender, receiver, bytes)."""
    env = simpy.Environment()
    links = Links(env, Network(machines=machines, places=places))
    ends = {}

    def carry(number, begin_s, sender, receiver, num_bytes):
        yield env.timeout(begin_s)
        yield from links.transfer(sender, receiver, num_bytes)
        ends[number] = env.now

    for number, transfer in enumerate(transfers):
        env.process(carry(number, *transfer))
    env.run()
    return [ends[number] for number in range(len(transfers))]


MACHINES = {name: Machine(1.0, 10.0, latency_s=0.0) for name in "abcd"}


def test_a_transfer_alone_has_the_whole_link_and_then_travels():
    machines = {"a": Machine(1.0, 10.0, latency_s=2.0), "b": Machine(1.0, 5.0, latency_s=4.0)}
    assert arrivals([(1.0, "a", "b", 100.0)], machines) == [1.0 + 20.0 + 3.0]
    assert arrivals([(0.0, "a", "b", 0.0)], machines) == [3.0]


@pytest.mark.parametrize("other", [("a", "c"), ("c", "b")], ids=["of the sender", "of the receiver"])
def test_transfers_share_a_link(other):
    # From second 5 on both are half as fast; when the first is over, the other has the link to itself again.
    assert arrivals([(0.0, "a", "b", 100.0), (5.0, *other, 100.0)], MACHINES) == pytest.approx([15.0, 20.0])


@pytest.mark.parametrize("other", [("b", "a"), ("c", "d"), ("b", "c")], ids=["back", "elsewhere", "on"])
def test_directions_and_links_do_not_disturb_each_other(other):
    assert arrivals([(0.0, "a", "b", 100.0), (5.0, *other, 100.0)], MACHINES) == pytest.approx([10.0, 15.0])


def test_transfers_between_the_same_two_follow_each_other():
    assert arrivals([(0.0, "a", "b", 100.0), (5.0, "a", "b", 10.0)], MACHINES) == pytest.approx([10.0, 11.0])


def test_who_has_gone_is_no_limit_and_takes_no_time():
    assert arrivals([(0.0, "gone", "too", 100.0), (0.0, "a", "gone", 100.0)], MACHINES) == pytest.approx([0.0, 10.0])


def test_places_have_a_bandwidth_between_them(tmp_path):
    (tmp_path / "network").write_text(PLACES)
    places = read_places(tmp_path / "network")
    machines = {"a": Machine(1.0, math.inf, latency_s=9.0), "b": Machine(1.0, math.inf, latency_s=9.0)}
    # Two peers are in one place or in two, as their names have it.
    assert arrivals([(0.0, "a", "b", 1e7)], machines, places)[0] in (0.0, pytest.approx(1.05))


@pytest.mark.parametrize(("x_over_c", "latency_s"), [(0.5, 0.1), (1.5, 0.0), (1.5, 0.1)])
def test_the_planner_says_of_slow_links_what_the_simulator_does(x_over_c, latency_s):
    """4 stages x 2 peers, 1 s a microbatch: a hop takes half as long as traffic takes of the compute, and both ways."""
    num_stages, num_peers, num_microbatches, window, hop_bytes = 4, 2, 64, 16, 1e6
    bytes_per_s = 2 * hop_bytes / x_over_c
    scenario = Scenario(
        stages=StageOptions(num_stages=num_stages),
        arrivals=ArrivalOptions(num_peers=num_stages * num_peers, hours=0.12, mean_lifetime_s=1e12),
        population=Population(
            speed=Distribution("constant", (1.0,)),
            bandwidth_mbps=Distribution("constant", (bytes_per_s * 8 / 1e6,)),
            latency_s=Distribution("constant", (latency_s,)),
        ),
    )
    options = MicrobatchOptions(window=window, activation_bytes=hop_bytes, global_batch=num_microbatches)
    simulated_s = num_microbatches / simulate_microbatches(scenario, "none", options)["throughput_per_s"]
    memory = StageMemory(weight_bytes=0.0, weight_gradient_bytes=0.0, optimizer_bytes=0.0, microbatch_bytes=0.0)
    works = [
        StageWork(
            layers=1,
            parameters=1,
            trained=1,
            flops=1.0,
            activation_bytes=hop_bytes if stage < num_stages - 1 else 0.0,
            gradient_bytes=hop_bytes if stage else 0.0,
            averaging_bytes=0.0,
            memory=memory,
        )
        for stage in range(num_stages)
    ]
    peers = PeerGroup(
        name="peer",
        count=num_stages * num_peers,
        flops_per_s=1.0,
        upload_bytes_per_s=bytes_per_s,
        download_bytes_per_s=bytes_per_s,
        latency_s=2 * latency_s,
    )
    settings = StepSettings(global_batch_size=num_microbatches, microbatch_size=1, max_in_flight=window)
    predictor = Predictor(works=works, groups=[peers], settings=settings)
    streamed_s = sum(predictor.predict([[num_peers]] * num_stages).times[:2])
    assert simulated_s == pytest.approx(streamed_s, rel=0.1)

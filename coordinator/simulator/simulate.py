"""From options to a summary: what `swarm-coordinator simulate` prints."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.simulator.flow import FlowOptions, FlowSwarm
from coordinator.simulator.microbatches import MicrobatchOptions, MicrobatchSwarm
from coordinator.simulator.network import Network, Places
from coordinator.simulator.optimum import FEW_PER_STAGE, optimum
from coordinator.simulator.rebalancers import make_rebalancer
from coordinator.simulator.traces import Trace, draw_trace, read_trace
from coordinator.simulator.world import Population
from swarm_peer.errors import UserError
from swarm_peer.policy.exchange import RebalancingParameters

HOUR_S = 3600.0
WARM_UP_S = 60.0

Series = list[tuple[float, float]]  # (from when on, how much), by time


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, but for the rebalancing.

    Attributes:
        state_gb: weights and optimizer state of one stage
        stage_memory_gb: what a peer needs to serve each stage; empty where memory is no limit
    """

    num_stages: int
    trace: Path | None = None
    num_peers: int = 0
    hours: float = 24.0
    mean_lifetime_s: float = 4 * HOUR_S
    seed: int = 0
    stage_costs: tuple[float, ...] = ()
    state_gb: float = 1.0
    overhead_s: float = 5.0
    stage_memory_gb: tuple[float, ...] = ()
    min_replicas: int = 1
    population: Population = field(default_factory=Population)
    flow: FlowOptions = field(default_factory=FlowOptions)

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise UserError(f"--stages {self.num_stages}: at least 1 is needed")
        if self.trace is None and self.num_peers < 1:
            raise UserError("simulate needs --trace FILE, or --peers N to draw one")
        if self.trace is None and (self.hours <= 0 or self.mean_lifetime_s <= 0):
            raise UserError(f"--hours {self.hours} --mean-lifetime-s {self.mean_lifetime_s}: both must be above 0")
        for option, values in (("--stage-costs", self.stage_costs), ("--stage-memory-gb", self.stage_memory_gb)):
            if values and len(values) != self.num_stages:
                raise UserError(f"{option} has {len(values)} values for {self.num_stages} stages: give one for each")
        if any(cost <= 0 for cost in self.stage_costs):
            raise UserError("--stage-costs must all be above 0")

    def read_trace(self) -> Trace:
        rng = random.Random(f"trace {self.seed}")
        if self.trace is not None:
            trace = read_trace(self.trace, rng)
            if not trace.duration_s:
                raise UserError(f"--trace {self.trace}: all of it is at one moment, so there is nothing to simulate")
            return trace
        return draw_trace(self.num_peers, self.hours * HOUR_S, self.mean_lifetime_s, rng)

    def parameters(self) -> RebalancingParameters:
        return RebalancingParameters(
            stage_costs=self.stage_costs or (1.0,) * self.num_stages,
            state_bytes=(self.state_gb * 1e9,) * self.num_stages,
            stage_memory_bytes=tuple(gigabytes * 1e9 for gigabytes in self.stage_memory_gb),
            min_replicas=(self.min_replicas,) * self.num_stages,
            bandwidth_bytes_per_s=min(self.population.bandwidth_mbps.values) * 1e6 / 8,
            overhead_s=self.overhead_s,
        )


@dataclass(frozen=True, slots=True)
class Best:
    """What could be done at best at each moment.

    Attributes:
        optimum: by the best assignment of all that are alive, moves being free
        attainable: the same without those that came so lately that their state cannot have arrived
    """

    optimum: Series
    attainable: Series


@dataclass(frozen=True, slots=True)
class Result:
    summary: dict[str, Any]
    throughput: Series
    best: Best


def best_of(scenario: Scenario, trace: Trace) -> Best:
    """It depends on who is alive alone, so that one serves for all rebalancing policies."""
    params = scenario.parameters()
    begins_s = _begins_s(trace, scenario.num_stages)
    all_: list[tuple[float, bool, str]] = []
    arrived: list[tuple[float, bool, str]] = []
    ready_s: dict[str, float] = {}
    for change in trace.changes:
        all_.append((change.time_s, change.joins, change.machine))
        if change.joins:
            bandwidth = scenario.population.machine(change.machine, scenario.seed).bandwidth_bytes_per_s
            download_s = params.overhead_s + min(params.state_bytes) / bandwidth
            ready_s[change.machine] = change.time_s + (download_s if change.time_s > begins_s else 0.0)
            arrived.append((ready_s[change.machine], True, change.machine))
        elif change.time_s >= ready_s[change.machine]:
            arrived.append((change.time_s, False, change.machine))
        else:
            arrived.remove((ready_s[change.machine], True, change.machine))
    known: dict[frozenset[str], float] = {}
    arrived.sort(key=lambda item: item[0])
    return Best(
        _series(scenario, all_, params.stage_costs, known), _series(scenario, arrived, params.stage_costs, known)
    )


def _begins_s(trace: Trace, num_stages: int) -> float:
    """When there is a peer for each stage for the first time."""
    alive = 0
    for change in trace.changes:
        alive += 1 if change.joins else -1
        if alive >= num_stages:
            return change.time_s
    return trace.duration_s


def _series(
    scenario: Scenario,
    changes: Sequence[tuple[float, bool, str]],
    stage_costs: Sequence[float],
    known: dict[frozenset[str], float],
) -> Series:
    alive: dict[str, float] = {}
    series: Series = []
    for number, (time_s, joins, machine) in enumerate(changes):
        if joins:
            alive[machine] = scenario.population.machine(machine, scenario.seed).work_per_s
        else:
            del alive[machine]
        if number + 1 == len(changes) or changes[number + 1][0] > time_s:
            # Of a large swarm the bound is quick to work out, and the sets would fill the memory.
            who = frozenset(alive) if len(alive) <= FEW_PER_STAGE * len(stage_costs) else None
            value = known.get(who) if who is not None else None
            if value is None:
                value = optimum([alive[name] for name in sorted(alive)], stage_costs)
                if who is not None:
                    known[who] = value
            series.append((time_s, value))
    return series


def integral(series: Series, start_s: float, end_s: float) -> float:
    """Of a function that is constant between its changes."""
    total = 0.0
    for number, (time_s, value) in enumerate(series):
        until_s = series[number + 1][0] if number + 1 < len(series) else end_s
        total += value * max(0.0, min(until_s, end_s) - max(time_s, start_s))
    return total


def simulate_flow(scenario: Scenario, rebalance: str, trace: Trace | None = None, best: Best | None = None) -> Result:
    """One simulation of `rebalance`: none, events, or seconds.

    Args:
        trace, best: of the same scenario, where they are known already
    """
    begun = time.perf_counter()
    trace = trace or scenario.read_trace()
    best = best or best_of(scenario, trace)
    params = scenario.parameters()
    swarm = FlowSwarm(
        trace, scenario.population, scenario.seed, params, make_rebalancer(rebalance, params), scenario.flow
    )
    swarm.run()
    end_s = trace.duration_s
    throughput = [(sample.time_s, sample.throughput) for sample in swarm.samples]
    with_movers = integral([(sample.time_s, sample.with_movers) for sample in swarm.samples], 0.0, end_s)
    with_all = integral([(sample.time_s, sample.with_all) for sample in swarm.samples], 0.0, end_s)
    ideal = integral(best.optimum, 0.0, end_s)
    done = integral(throughput, 0.0, end_s)

    def share(series: Series, of: Series, start_s: float, until_s: float) -> float | None:
        possible = integral(of, max(0.0, start_s), min(until_s, end_s))
        return integral(series, max(0.0, start_s), min(until_s, end_s)) / possible if possible > 0 else None

    peer_s = integral([(s.time_s, s.waiting) for s in swarm.samples], 0.0, end_s)
    downloading_s = integral([(s.time_s, float(s.downloading)) for s in swarm.samples], 0.0, end_s)
    summary: dict[str, Any] = {
        "level": "flow",
        "rebalance": rebalance,
        "stages": scenario.num_stages,
        "seed": scenario.seed,
        "share_of_optimum": {
            "overall": share(throughput, best.optimum, 0.0, end_s),
            "first_hour": share(throughput, best.optimum, 0.0, HOUR_S),
            "last_hour": share(throughput, best.optimum, end_s - HOUR_S, end_s),
        },
        "attainable_share_of_optimum": share(best.attainable, best.optimum, 0.0, end_s),
        "loss": {
            "joining": (with_all - with_movers) / ideal if ideal else None,
            "moving": (with_movers - done) / ideal if ideal else None,
            "imbalance": 1 - with_all / ideal if ideal else None,
        },
        "migrations": len(swarm.decisions),
        "bytes_moved": round(swarm.bytes_migrated),
        "joined": swarm.num_joined,
        "bytes_joined": round(swarm.bytes_joined),
        "idle": {"waiting_peer_s": peer_s, "downloading_peer_s": downloading_s},
        "samples": done,
        "simulated_s": end_s,
        "wall_s": time.perf_counter() - begun,
    }
    return Result(summary, throughput, best)


def simulate_microbatches(
    scenario: Scenario, rebalance: str, options: MicrobatchOptions, places: Places | None = None
) -> dict[str, Any]:
    """The same swarm with each microbatch in it, beside what the flow level says of it."""
    begun = time.perf_counter()
    trace = scenario.read_trace()
    params = scenario.parameters()
    flow = FlowSwarm(
        trace, scenario.population, scenario.seed, params, make_rebalancer(rebalance, params), scenario.flow
    )
    swarm = MicrobatchSwarm(flow, Network(flow.machine, places, scenario.seed), options, scenario.seed)
    end_s = trace.duration_s
    swarm.run(end_s)
    # Until the pipeline is full the two cannot agree.
    warm_up_s = min(WARM_UP_S, end_s / 4)
    possible = integral([(sample.time_s, sample.throughput) for sample in flow.samples], warm_up_s, end_s)
    done = sum(moment >= warm_up_s for moment in swarm.completed)
    trips = sorted(swarm.round_trips_s)
    return {
        "level": "microbatch",
        "routing": options.routing,
        "rebalance": rebalance,
        "stages": scenario.num_stages,
        "seed": scenario.seed,
        "throughput_per_s": done / (end_s - warm_up_s),
        "flow_throughput_per_s": possible / (end_s - warm_up_s),
        "share_of_flow": done / possible if possible else None,
        "median_round_trip_s": trips[len(trips) // 2] if trips else None,
        "retries": swarm.num_retries,
        "busy": swarm.num_busy,
        "global_steps": swarm.num_steps,
        "busy_peer_s": swarm.busy_s(),
        "migrations": len(flow.decisions),
        "bytes_moved": round(flow.bytes_migrated),
        "simulated_s": end_s,
        "wall_s": time.perf_counter() - begun,
    }

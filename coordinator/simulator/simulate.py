"""From a scenario to the summary that `swarm-coordinator simulate` prints."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.simulator.flow import FlowSwarm
from coordinator.simulator.microbatches import MicrobatchSwarm
from coordinator.simulator.network import Network, Places
from coordinator.simulator.optimum import optimum
from coordinator.simulator.options import ArrivalOptions, MicrobatchOptions, StageOptions
from coordinator.simulator.rebalancers import make_rebalancer
from coordinator.simulator.traces import MachineChange, Trace, draw_trace, read_trace
from coordinator.simulator.world import Machine, Population
from swarm_peer.errors import UserError
from swarm_peer.policy.placement.move_search import RebalancingParameters

HOUR_S = 3600.0
WARM_UP_S = 60.0

cached_optimum = functools.lru_cache(maxsize=4096)(optimum)
Series = list[tuple[float, float]]  # (from when on, how much), by time


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that is simulated, but for the rebalancing."""

    stages: StageOptions
    arrivals: ArrivalOptions = ArrivalOptions()  # noqa: RUF009 (frozen)
    seed: int = 0
    population: Population = field(default_factory=Population)

    def __post_init__(self) -> None:
        """Check what an operator may have typed.

        Raises:
            UserError: the parts contradict each other, or a number cannot be
        """
        stages, arrivals = self.stages, self.arrivals
        if stages.num_stages < 1:
            raise UserError(f"--stages {stages.num_stages}: at least 1 is needed")
        if arrivals.trace is None and (arrivals.num_peers or 0) < 1:
            raise UserError("simulate needs --trace FILE, or --peers N to draw one")
        if arrivals.trace is None and (arrivals.hours <= 0 or arrivals.mean_lifetime_s <= 0):
            raise UserError(
                f"--hours {arrivals.hours} --mean-lifetime-s {arrivals.mean_lifetime_s}: both must be above 0"
            )
        for option, values in (("--stage-costs", stages.stage_costs), ("--stage-memory-gb", stages.stage_memory_gb)):
            if values and len(values) != stages.num_stages:
                raise UserError(f"{option} has {len(values)} values for {stages.num_stages} stages: give one for each")
        if not 0 <= self.population.closed_share <= 1:
            raise UserError(f"--closed-share {self.population.closed_share}: it must be from 0 to 1")
        if any(cost <= 0 for cost in stages.stage_costs):
            raise UserError("--stage-costs must all be above 0")

    def read_trace(self) -> Trace:
        """The trace of the file, or one that is drawn from the seed.

        Raises:
            UserError: see read_trace, or the file has a single moment
        """
        rng = random.Random(f"trace {self.seed}")
        arrivals = self.arrivals
        if arrivals.trace is not None:
            trace = read_trace(arrivals.trace, rng)
            if not trace.duration_s:
                raise UserError(
                    f"--trace {arrivals.trace}: all of it is at one moment, so there is nothing to simulate"
                )
            return trace
        return draw_trace(arrivals.num_peers or 0, arrivals.hours * HOUR_S, arrivals.mean_lifetime_s, rng)

    def machine(self, name: str) -> Machine:
        """The machine of this name; always the same."""
        machine = self.population.machine(name, self.seed)
        needed = [gigabytes * 1e9 for gigabytes in self.stages.stage_memory_gb]
        return replace(
            machine, too_large=tuple(k for k, bytes_ in enumerate(needed) if 0 < machine.memory_bytes < bytes_)
        )

    def parameters(self) -> RebalancingParameters:
        """Parameters of the live policies in this scenario."""
        stages = self.stages
        return RebalancingParameters(
            stage_costs=stages.stage_costs or (1.0,) * stages.num_stages,
            state_bytes=(stages.state_gb * 1e9,) * stages.num_stages,
            min_replicas=(stages.min_replicas,) * stages.num_stages,
            bandwidth_bytes_per_s=min(self.population.bandwidth_mbps.values) * 1e6 / 8,
            overhead_s=stages.overhead_s,
            serves_while_downloading=stages.make_before_break,
        )

    def flow_swarm(self, trace: Trace, rebalance: str) -> FlowSwarm:
        """The swarm of this scenario, at the flow level and under one of the rebalancing policies.

        Raises:
            UserError: the policy cannot follow movers that go on serving
        """
        if self.stages.make_before_break and rebalance not in ("none", "live"):
            raise UserError(f"--make-before-break goes with --rebalance live, not {rebalance}: leave one of them out")
        params = self.parameters()
        return FlowSwarm(
            trace=trace,
            machine_of=self.machine,
            params=params,
            rebalancer=make_rebalancer(rebalance, params, self.seed),
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The best possible throughput at each moment.

    Attributes:
        optimum: by the best assignment of all that are alive, moves being free
        attainable: the same without peers that came so lately that their state cannot have arrived
    """

    optimum: Series
    attainable: Series


@dataclass(frozen=True, slots=True)
class FlowResult:
    """A simulation at the flow level: its summary, its throughput over time, and the best possible one."""

    summary: dict[str, Any]
    throughput: Series
    best: Best


def best_of(scenario: Scenario, trace: Trace) -> Best:
    """The best possible throughput; it depends on the trace alone, so that it is the same for all policies."""
    num_alive = itertools.accumulate(1 if change.joins else -1 for change in trace.changes)
    enough = (
        c.time_s for c, alive in zip(trace.changes, num_alive, strict=True) if alive >= scenario.stages.num_stages
    )
    begins_s = next(enough, trace.duration_s)
    params = scenario.parameters()
    came_s: dict[str, float] = {}
    lives = []
    for change in (*trace.changes, *(MachineChange(math.inf, False, c.machine) for c in trace.changes)):
        if change.joins:
            came_s[change.machine] = change.time_s
        elif change.machine in came_s:
            lives.append((change.machine, came_s.pop(change.machine), change.time_s))
    arrived = []
    for name, from_s, until_s in lives:
        download_s = params.overhead_s + min(params.state_bytes) / scenario.machine(name).bandwidth_bytes_per_s
        arrived.append((name, from_s + (download_s if from_s > begins_s else 0.0), until_s))
    return Best(_best_series(scenario, lives), _best_series(scenario, arrived))


def _best_series(scenario: Scenario, lives: Iterable[tuple[str, float, float]]) -> Series:
    """The optimum over time of machines that are there from one moment until another."""
    there = [life for life in lives if life[1] < life[2]]
    changes = [(begin_s, True, name) for name, begin_s, _ in there] + [(end_s, False, name) for name, _, end_s in there]
    costs = scenario.parameters().stage_costs
    alive: dict[str, float] = {}
    series: Series = []
    # A machine that goes and comes at one moment goes first.
    for time_s, moment in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        for _, joins, name in moment:
            if joins:
                alive[name] = scenario.machine(name).work_per_s
            else:
                del alive[name]
        if time_s < math.inf:
            series.append((time_s, cached_optimum(tuple(sorted(alive.values())), costs)))
    return series


def integral(series: Series, start_s: float, end_s: float) -> float:
    """The integral of a function that is constant between its changes."""
    total = 0.0
    for number, (time_s, value) in enumerate(series):
        until_s = series[number + 1][0] if number + 1 < len(series) else end_s
        total += value * max(0.0, min(until_s, end_s) - max(time_s, start_s))
    return total


def simulate_flow(
    scenario: Scenario, rebalance: str, trace: Trace | None = None, best: Best | None = None
) -> FlowResult:
    """One simulation of `rebalance`: none, events, or seconds.

    Args:
        trace, best: of the same scenario, where they are known already
    """
    begun = time.perf_counter()
    trace = trace or scenario.read_trace()
    best = best or best_of(scenario, trace)
    swarm = scenario.flow_swarm(trace, rebalance)
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

    summary: dict[str, Any] = {
        "level": "flow",
        "rebalance": rebalance,
        "stages": scenario.stages.num_stages,
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
        "moves": len(swarm.decisions),
        "bytes_moved": round(swarm.bytes_migrated),
        "joined": swarm.num_joined,
        "bytes_joined": round(swarm.bytes_joined),
        "samples": done,
        "simulated_s": end_s,
        "wall_s": time.perf_counter() - begun,
    }
    return FlowResult(summary, throughput, best)


def simulate_microbatches(
    scenario: Scenario, rebalance: str, options: MicrobatchOptions, places: Places | None = None
) -> dict[str, Any]:
    """One simulation of every microbatch, with the throughput that the flow level predicts beside it."""
    begun = time.perf_counter()
    trace = scenario.read_trace()
    flow = scenario.flow_swarm(trace, rebalance)
    network = Network(machines=flow.machines, places=places, seed=scenario.seed)
    swarm = MicrobatchSwarm(flow, network, options, seed=scenario.seed)
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
        "stages": scenario.stages.num_stages,
        "seed": scenario.seed,
        "throughput_per_s": done / (end_s - warm_up_s),
        "flow_throughput_per_s": possible / (end_s - warm_up_s),
        "share_of_flow": done / possible if possible else None,
        "median_round_trip_s": trips[len(trips) // 2] if trips else None,
        "retries": swarm.num_retries,
        "busy": swarm.num_busy,
        "rounds": swarm.rounds.num_done,
        "busy_peer_s": swarm.busy_s(),
        "moves": len(flow.decisions),
        "bytes_moved": round(flow.bytes_migrated),
        "simulated_s": end_s,
        "wall_s": time.perf_counter() - begun,
    }

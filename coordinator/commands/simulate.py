"""`simulate`: a swarm in virtual time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from coordinator.commands.shared_options import Flat, Json
from coordinator.simulator.options import ArrivalOptions, MicrobatchOptions, SimulationOptions, StageOptions
from coordinator.simulator.world import Population
from swarm_peer.errors import UserError

# Headings of --help.
STAGES, ARRIVALS, POPULATION, SIMULATION, MICROBATCHES = (
    Parameter(group=Group.create_ordered(heading))
    for heading in ("Stages", "Peers that come and go", "Their machines", "The simulation", "At --level microbatch")
)


def simulate(
    *,
    stages: Annotated[StageOptions, Flat, STAGES],
    arrivals: Annotated[ArrivalOptions, Flat, ARRIVALS] = ArrivalOptions(),  # noqa: B008 (frozen)
    seed: Annotated[int, ARRIVALS] = 0,
    population: Annotated[Population, Flat, POPULATION] = Population(),  # noqa: B008 (frozen)
    simulation: Annotated[SimulationOptions, Flat, SIMULATION] = SimulationOptions(),  # noqa: B008 (frozen)
    microbatches: Annotated[MicrobatchOptions, Flat, MICROBATCHES] = MicrobatchOptions(),  # noqa: B008 (frozen)
    figure: Annotated[Path | None, SIMULATION] = None,
    json_: Json = False,
) -> None:
    """Simulate a swarm whose peers come and go, with the policies that run live.

    Distributions are written constant:X, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA or choice:X,Y,...

    Args:
        seed: Draws the trace and the machines; the same seed gives the same result.
        figure: PNG to draw throughput and optimum into.
    """
    from coordinator.simulator.network import read_places
    from coordinator.simulator.simulate import Scenario, simulate_flow, simulate_microbatches

    scenario = Scenario(stages=stages, arrivals=arrivals, seed=seed, population=population)
    _check(simulation, microbatches, figure)
    if simulation.level == "microbatch":
        places = read_places(simulation.network) if simulation.network else None
        summary = simulate_microbatches(scenario, simulation.rebalance, microbatches, places)
    else:
        result = simulate_flow(scenario, simulation.rebalance)
        summary = result.summary
        if figure is not None:
            from coordinator.simulator.figure import draw

            draw({simulation.rebalance: result}, figure)
    print(json.dumps(summary) if json_ else "\n".join(_lines(summary)))


def _check(options: SimulationOptions, microbatches: MicrobatchOptions, figure: Path | None) -> None:
    try:
        is_policy = options.rebalance in ("none", "live", "events") or 0 < float(options.rebalance) < float("inf")
    except ValueError:
        is_policy = False
    if not is_policy:
        raise UserError(f"--rebalance {options.rebalance}: expected live, none, events, or seconds such as 300")
    global_batch, averaging_s = microbatches.global_batch, microbatches.averaging_s
    for option, value in (("--window", microbatches.window), ("--global-batch", global_batch)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: at least 1 is needed")
    if not 0 <= averaging_s < float("inf") or (averaging_s and global_batch is None):
        raise UserError(f"--averaging-s {averaging_s}: seconds of each round; it needs --global-batch")
    if options.level == "microbatch" and figure is not None:
        raise UserError("--figure is drawn at --level flow only")
    if options.level == "flow" and global_batch is not None:
        raise UserError("--global-batch counts at --level microbatch only: at --level flow nothing is ever drained")
    if options.level == "flow" and options.network is not None:
        raise UserError("--network counts at --level microbatch only; at --level flow, see --bandwidth-mbps")


def _lines(values: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {f'{value:.4f}' if isinstance(value, float) else value}")
    return lines

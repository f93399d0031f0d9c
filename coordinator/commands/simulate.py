"""`simulate`: a swarm in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from coordinator.commands.options import Flat, Json
from coordinator.simulator.options import (
    ArrivalOptions,
    MicrobatchOptions,
    SimulationOptions,
    StageOptions,
)
from coordinator.simulator.world import Population


def simulate(
    *,
    stages: Annotated[StageOptions, Flat],
    arrivals: Annotated[ArrivalOptions, Flat] = ArrivalOptions(),  # noqa: B008 (frozen)
    seed: int = 0,
    population: Annotated[Population, Flat] = Population(),  # noqa: B008 (frozen)
    simulation: Annotated[SimulationOptions, Flat] = SimulationOptions(),  # noqa: B008 (frozen)
    microbatches: Annotated[MicrobatchOptions, Flat] = MicrobatchOptions(),  # noqa: B008 (frozen)
    figure: Path | None = None,
    json_: Json = False,
) -> None:
    """Simulate a swarm whose peers come and go, with the policies that run live.

    Distributions are written constant:X, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA or choice:X,Y,...

    Args:
        seed: Draws the trace and the machines; the same seed gives the same result.
        figure: PNG to draw throughput and optimum into.
    """
    from coordinator.simulator.command import run_command
    from coordinator.simulator.simulate import Scenario

    scenario = Scenario(stages=stages, arrivals=arrivals, seed=seed, population=population)
    run_command(scenario, simulation, microbatches, figure=figure, as_json=json_)

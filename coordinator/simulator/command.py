"""`swarm-coordinator simulate`: checks the options, simulates, and prints the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.simulator.microbatches import MicrobatchOptions
from coordinator.simulator.network import read_places
from coordinator.simulator.options import MachineOptions, SimulationOptions
from coordinator.simulator.simulate import Scenario, simulate_flow, simulate_microbatches
from coordinator.simulator.world import Distribution, Population
from swarm_peer.errors import UserError


def run_command(
    scenario: Scenario,
    options: SimulationOptions,
    *,
    figure: Path | None = None,
    as_json: bool = False,
) -> None:
    """Simulate a scenario, and print the summary.

    Raises:
        UserError: options contradict each other, or a value cannot be
    """
    _check(options, figure)
    if options.level == "microbatch":
        places = read_places(options.network) if options.network else None
        microbatches = MicrobatchOptions(
            routing=options.routing,
            window=options.window,
            global_batch=options.global_batch,
            averaging_s=options.averaging_s,
        )
        summary = simulate_microbatches(scenario, options.rebalance, microbatches, places)
    else:
        result = simulate_flow(scenario, options.rebalance)
        summary = result.summary
        if figure is not None:
            from coordinator.simulator.figure import draw

            draw({options.rebalance: result}, figure)
    if as_json:
        print(json.dumps(summary))
        return
    for line in _lines(summary):
        print(line)


def _check(options: SimulationOptions, figure: Path | None) -> None:
    _check_rebalance(options.rebalance)
    if options.window is not None and options.window < 1:
        raise UserError(f"--window {options.window}: at least 1 is needed")
    if options.global_batch is not None and options.global_batch < 1:
        raise UserError(f"--global-batch {options.global_batch}: at least 1 is needed")
    if not 0 <= options.averaging_s < float("inf") or (options.averaging_s and options.global_batch is None):
        raise UserError(f"--averaging-s {options.averaging_s}: seconds of each round; it needs --global-batch")
    if options.level == "microbatch" and figure is not None:
        raise UserError("--figure is drawn at --level flow only")
    if options.level == "flow" and options.global_batch is not None:
        raise UserError("--global-batch counts at --level microbatch only: at --level flow nothing is ever drained")
    if options.level == "flow" and options.network is not None:
        raise UserError("--network counts at --level microbatch only; at --level flow, see --bandwidth-mbps")


def draw_population(machines: MachineOptions) -> Population:
    """Where machines are drawn from.

    Raises:
        UserError: a text is no distribution
    """
    return Population(
        speed=Distribution.parse(machines.speed, "--speed"),
        bandwidth_mbps=Distribution.parse(machines.bandwidth_mbps, "--bandwidth-mbps"),
        memory_gb=Distribution.parse(machines.memory_gb, "--memory-gb"),
        latency_s=Distribution.parse(machines.latency_s, "--latency-s"),
    )


def _check_rebalance(text: str) -> None:
    try:
        good = text in ("none", "live", "events") or 0 < float(text) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise UserError(f"--rebalance {text}: expected live, none, events, or seconds such as 300")


def _lines(values: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {f'{value:.4f}' if isinstance(value, float) else value}")
    return lines

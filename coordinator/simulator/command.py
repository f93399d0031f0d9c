"""`swarm-coordinator simulate`: from what was typed to what is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.simulator.microbatches import MicrobatchOptions
from coordinator.simulator.network import read_places
from coordinator.simulator.routing import RoutingName
from coordinator.simulator.simulate import Scenario, simulate_flow, simulate_microbatches
from coordinator.simulator.world import Distribution, Population
from swarm_peer.errors import UserError


@dataclass(frozen=True, slots=True)
class Options:
    """What is done with a scenario, as typed."""

    level: str
    rebalance: str
    routing: RoutingName
    window: int | None
    global_batch: int | None
    averaging_s: float
    network: Path | None
    figure: Path | None
    json: bool


def run_command(options: Options, *, machines: tuple[str, str, str, str], **scenario_fields: Any) -> None:
    """Args:
    machines: distributions of speed, bandwidth, memory, latency
    scenario_fields: of `Scenario`

    Raises:
        UserError: something typed cannot be
    """
    _check_rebalance(options.rebalance)
    if options.window is not None and options.window < 1:
        raise UserError(f"--window {options.window}: at least 1 is needed")
    if options.global_batch is not None and options.global_batch < 1:
        raise UserError(f"--global-batch {options.global_batch}: at least 1 is needed")
    if not 0 <= options.averaging_s < float("inf") or (options.averaging_s and options.global_batch is None):
        raise UserError(f"--averaging-s {options.averaging_s}: seconds of each global step; it needs --global-batch")
    names = ("--speed", "--bandwidth-mbps", "--memory-gb", "--latency-s")
    drawn = [Distribution.parse(text, name) for text, name in zip(machines, names, strict=True)]
    scenario = Scenario(**scenario_fields, population=Population(*drawn))
    if options.level == "microbatch":
        if options.figure is not None:
            raise UserError("--figure is drawn at --level flow only")
        places = read_places(options.network) if options.network else None
        microbatches = MicrobatchOptions(
            options.routing, options.window, global_batch=options.global_batch, averaging_s=options.averaging_s
        )
        summary = simulate_microbatches(scenario, options.rebalance, microbatches, places)
    else:
        if options.global_batch is not None:
            raise UserError("--global-batch counts at --level microbatch only: at --level flow nothing is ever drained")
        if options.network is not None:
            raise UserError("--network counts at --level microbatch only; at --level flow, see --bandwidth-mbps")
        result = simulate_flow(scenario, options.rebalance)
        summary = result.summary
        if options.figure is not None:
            from coordinator.simulator.figure import draw

            draw({options.rebalance: result}, options.figure)
    if options.json:
        print(json.dumps(summary))
        return
    for line in _lines(summary):
        print(line)


def _check_rebalance(text: str) -> None:
    try:
        good = text in ("none", "events") or 0 < float(text) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise UserError(f"--rebalance {text}: expected none, events, or seconds such as 300")


def _lines(values: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {f'{value:.4f}' if isinstance(value, float) else value}")
    return lines

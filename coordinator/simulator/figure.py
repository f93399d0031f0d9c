"""Throughput over time beside the optimum, as a PNG. Needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from coordinator.simulator.simulate import HOUR_S, FlowResult, Series, integral
from swarm_peer.errors import UserError

# Points of a line; each is a mean, so that events of seconds do not fill the figure.
NUM_POINTS = 240


def draw(results: Mapping[str, FlowResult], path: Path) -> None:
    """Draw throughput and optimum above, and their ratio below.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--figure needs matplotlib: pip install 'swarm-train[figures]'") from error

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    first = next(iter(results.values()))
    end_s = first.summary["simulated_s"]
    edges = [end_s * number / NUM_POINTS for number in range(NUM_POINTS + 1)]
    hours = [edge / HOUR_S for edge in edges]
    ideal = _means(first.best.optimum, edges)
    above.stairs(ideal, hours, color="black", label="optimum", baseline=None)
    for name, result in results.items():
        done = _means(result.throughput, edges)
        above.stairs(done, hours, label=name, baseline=None)
        below.stairs([a / b if b else 0.0 for a, b in zip(done, ideal, strict=True)], hours, baseline=None)
    above.set_ylabel("samples/s")
    above.legend(loc="lower right", fontsize="small", ncols=3)
    below.set_ylabel("share of the optimum")
    below.set_xlabel("hours")
    below.set_ylim(0, 1.02)
    try:
        figure.savefig(path, dpi=80)
    except OSError as error:
        raise UserError(f"--figure {path}: cannot write there ({error.strerror}); name another file") from error


def _means(series: Series, edges: list[float]) -> list[float]:
    return [integral(series, start, end) / (end - start) for start, end in itertools.pairwise(edges)]

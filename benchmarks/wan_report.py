"""Writes what wan.py has measured as a table in Markdown and a figure, with command, date and machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = ("arm", "round, s", "predicted, s", "share", "busy", "averaging, s", "end of a round, s", "MB sent", "load")


def machine() -> str:
    """Describe the machine that measures."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def provenance() -> str:
    """Say when, where and by which command this process measures."""
    return f"{date.today()}, {machine()}: `python {shlex.join(sys.argv)}`"


def rows(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A row of text for each arm; medians over its runs, means over stages."""
    for arm, runs in results.items():

        def stages(name: str, runs: Sequence[Mapping[str, Any]] = runs) -> float:
            return median(fmean(stage.get(name, 0.0) for stage in run["stages"]) for run in runs)

        predicted = [run["predicted_round_s"] for run in runs if "predicted_round_s" in run]
        sent = median(fmean(run["sent_bytes_a_round"]["peers"]) for run in runs)
        loads = [load for run in runs for load in run["load"]]
        yield (
            arm,
            f"{median(run['round_s'] for run in runs):.2f}",
            f"{median(predicted):.2f}" if predicted else "",
            f"{median(run['share'] for run in runs):.3f}",
            f"{stages('busy_share'):.3f}",
            f"{stages('averaging_s'):.2f}",
            f"{stages('barrier_s') + stages('averaging_s'):.2f}",
            f"{sent / 1e6:.2f}",
            f"{min(loads):.1f} to {max(loads):.1f}",
        )


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """All arms as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Figure:
    """The share of the ideal of each arm, and how much of a round its end takes."""
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(results)[::-1]
    shares = [median(run["share"] for run in results[name]) for name in names]
    ends = [
        median(
            fmean(stage.get("barrier_s", 0.0) + stage.get("averaging_s", 0.0) for stage in run["stages"])
            / run["round_s"]
            for run in results[name]
        )
        for name in names
    ]
    axes.barh(names, shares, color="#3a6ea5", label="computes")
    axes.barh(names, ends, left=shares, color="#d98c3f", label="waits for stage-mates and averages")
    for number, share in enumerate(shares):
        axes.text(share - 0.01, number, f"{share:.2f}", ha="right", va="center", color="white")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a round")
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower right", fontsize="small")
    return figure


def write_report(folder: Path, results: Mapping[str, Sequence[Mapping[str, Any]]], costs: Mapping[str, Any]) -> None:
    """Write table.md and figure.png."""
    folder.mkdir(parents=True, exist_ok=True)
    told = " ".join(f"{name}={value}" for name, value in costs.items())
    (folder / "table.md").write_text(f"{provenance()} ({told})\n\n{table(results)}\n")
    draw(results, f"{date.today()}, {machine()}\n{told}").savefig(folder / "figure.png", dpi=120)

"""Writes what wan.py has measured as a table in Markdown and a figure, with command, date and machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = (
    "arm",
    "round, s",
    "predicted, s",
    "share",
    "ratio to the first arm",
    "busy",
    "waits for averages, s",
    "end of a round, s",
    "MB sent",
    "cores",
    "load",
    "troubles",
)
# Figures of each run of each arm, by arm and repetition.
Results = dict[str, dict[int, dict[str, Any]]]


def machine() -> str:
    """Describe the machine that measures."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    cpu = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}, torch {version('torch')}"


def commit() -> str:
    """The commit of this file's repository, short; empty where there is none, or no git."""
    if (git := shutil.which("git")) is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read_lines(file: Path) -> list[Any]:
    """The lines of a file of JSON, without one that a killed process has left half-written."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def add_line(file: Path, entry: Any) -> None:
    """Add a line of JSON to a file, on a line of its own, whatever was left half-written before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    is_torn = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
    with file.open("a") as out:
        out.write(("\n" if is_torn else "") + json.dumps(entry) + "\n")


def provenance() -> str:
    """Say when, where and by which command this process measures."""
    return f"{date.today()}, {machine()}, {commit()}: `python {shlex.join(sys.argv)}`"


def ratios(runs: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """How many times as many microbatches a second as another arm's these runs have, by repetition."""
    both = runs.keys() & base.keys()
    return [runs[number]["microbatches_per_s"] / base[number]["microbatches_per_s"] for number in sorted(both)]


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """A row of text for each arm that has run; medians over its runs, means over stages."""
    first = next((by_number for by_number in results.values() if by_number), {})
    for arm, by_number in results.items():
        runs = list(by_number.values())
        if not runs:
            continue
        predicted = [run["predicted_round_s"] for run in runs if "predicted_round_s" in run]
        sent = median(fmean(run["sent_bytes_a_round"]["peers"]) for run in runs)
        loads = [load for run in runs for load in run["load"]]
        troubles = sum((Counter(run.get("troubles", {})) for run in runs), Counter[str]())
        barrier_s, averaging_s = over_stages(runs, "barrier_s"), over_stages(runs, "averaging_s")
        yield (
            arm,
            f"{median(run['round_s'] for run in runs):.2f}",
            f"{median(predicted):.2f}" if predicted else "",
            f"{median(run['share'] for run in runs):.3f}",
            spread(ratios(by_number, first)),
            f"{over_stages(runs, 'busy_share'):.3f}",
            f"{averaging_s:.2f}",
            f"{barrier_s + averaging_s:.2f}",
            f"{sent / 1e6:.2f}",
            f"{median(run['cores'] for run in runs):.2f}",
            f"{min(loads):.1f} to {max(loads):.1f}",
            " ".join(f"{name} {count}" for name, count in troubles.items()),
        )


def over_stages(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """The median over runs of a figure's mean over stages."""
    return median(fmean(stage.get(name, 0.0) for stage in run["stages"]) for run in runs)


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most if there are several."""
    if not values:
        return ""
    ends = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{median(values):.3f}{ends}"


def table(results: Results) -> str:
    """All arms as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: Results, title: str) -> Figure:
    """The share of the ideal of each arm, and how much of a round its end takes."""
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [name for name, runs in results.items() if runs][::-1]
    shares = [median(run["share"] for run in results[name].values()) for name in names]
    ends = [
        median(
            fmean(stage.get("barrier_s", 0.0) + stage.get("averaging_s", 0.0) for stage in run["stages"])
            / run["round_s"]
            for run in results[name].values()
        )
        for name in names
    ]
    axes.barh(names, shares, color="#3a6ea5", label="computes")
    axes.barh(names, ends, left=shares, color="#d98c3f", label="waits for stage-mates and averages")
    for number, share in enumerate(shares):
        axes.text(share - 0.01, number, f"{share:.2f}", ha="right", va="center", color="white")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of a round")
    axes.set_title(title, fontsize="x-small")
    axes.legend(loc="lower right", fontsize="small")
    return figure


def write_report(folder: Path, results: Results, costs: Mapping[str, Any]) -> None:
    """Write table.md and figure.png."""
    folder.mkdir(parents=True, exist_ok=True)
    told = " ".join(f"{name}={value}" for name, value in costs.items())
    commits = {run["commit"] for runs in results.values() for run in runs.values() if "commit" in run}
    origin = f"{provenance()} ({told}). Runs of {', '.join(sorted(commits))}."
    (folder / "table.md").write_text(f"{origin}\n\n{table(results)}\n")
    title = "\n".join(textwrap.wrap(f"{told}\n{provenance()}", 110))
    draw(results, title).savefig(folder / "figure.png", dpi=120)

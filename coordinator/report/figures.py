"""The figures of a report. Needs matplotlib. No text of a run's files gets into them, so nothing has to be escaped."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coordinator.report.run_folder import RecordedRun
from swarm_peer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Points of a line; each is the mean of neighbouring steps where there are more.
MAX_POINTS = 600
# Most steps whose mean the thick line of the training loss shows.
SMOOTHED_STEPS = 20
# Where no step ends for so long, a curve is broken.
GAP_S = 60.0
# Activities of peers, as bars from the left; the last one is the rest of their time.
ACTIVITIES = ("computing", "ending rounds", "joining", "waiting for microbatches")
ACTIVITY_COLOURS = ("tab:green", "tab:orange", "tab:purple", "lightgrey")
# Events that are drawn, with what they say; others are in the table alone.
EVENT_MARKS = {
    "joined": ("^", "tab:green"),
    "left": ("v", "tab:grey"),
    "died": ("X", "tab:red"),
    "moved": (">", "tab:blue"),
    "rewound": ("<", "tab:orange"),
    "checkpoint": ("s", "tab:cyan"),
}


class NotInstalled(UserError):
    """A package that figures are drawn with is missing, so that nobody was promised any."""


def draw_all(run: RecordedRun) -> dict[str, bytes]:
    """The figures of a run by name, as PNG files; those that the run's folder tells nothing of are left out.

    Raises:
        NotInstalled: matplotlib is missing
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotInstalled("a report needs matplotlib: pip install 'swarm-train[figures]'") from error

    drawn = {}
    for name, (draw, height) in FIGURES.items():
        figure = Figure(figsize=(10, height), layout="constrained")
        if draw(figure, run):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=130)
            drawn[name] = file.getvalue()
    return drawn


def _means(values: Sequence[float]) -> list[float]:
    """The means of at most MAX_POINTS pieces of neighbouring values."""
    pieces = np.array_split(np.asarray(values, dtype=float), min(MAX_POINTS, len(values)))
    return [float(piece.mean()) for piece in pieces]


def _smooth(values: Sequence[float], count: int) -> list[float]:
    """The means of each value and those before it, so many together."""
    return [sum(values[max(0, end - count) : end]) / min(count, end) for end in range(1, len(values) + 1)]


def _draw_loss(figure: Figure, run: RecordedRun) -> bool:
    axes = figure.subplots(1, 3, sharey=True)
    losses = [line.loss for line in run.lines]
    tokens = np.cumsum([line.tokens for line in run.lines]) / 1e6
    smoothed = min(SMOOTHED_STEPS, 1 + len(losses) // SMOOTHED_STEPS)  # a mean of few steps would lag far behind
    name = f"training, mean of {smoothed} steps" if smoothed > 1 else "training"
    scales: list[tuple[str, Sequence[float]]] = [
        ("optimizer steps", [line.optimizer_step for line in run.lines]),
        (run.unit[0], [run.elapsed(end) for end in run.ends]),
        ("million tokens", list(tokens)),
    ]
    for ax, (label, xs) in zip(axes, scales, strict=True):
        ax.plot(_means(xs), _means(losses), color="tab:blue", alpha=0.35, linewidth=0.8)
        ax.plot(_means(xs), _means(_smooth(losses, smoothed)), color="tab:blue", label=name)
        held_out = [(x, line.validation_loss) for x, line in zip(xs, run.lines, strict=True) if line.validation_loss]
        if held_out:
            ax.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", markersize=3, label="validation")
        ax.set_xlabel(label)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("loss, nats per token")
    axes[0].legend(fontsize="small")
    return True


def _draw_throughput(figure: Figure, run: RecordedRun) -> bool:
    """Tokens over all time, so that the time in which no step was made shows."""
    ax = figure.subplots()
    done, moments, total = [0.0], [run.begin], 0.0
    for line, end in zip(run.lines, run.ends, strict=True):
        moments += [max(moments[-1], end - line.seconds), end]
        done += [total, total := total + line.tokens]
    edges = np.linspace(run.begin, run.ends[-1], max(2, min(MAX_POINTS // 4, len(run.lines) // 4)))
    seconds = np.maximum(np.diff(edges), 1e-9)
    tokens_per_s = np.diff(np.interp(edges, moments, done)) / seconds
    ax.stairs(tokens_per_s, [run.elapsed(edge) for edge in edges], baseline=None, color="tab:blue", linewidth=1.5)
    ax.set_ylim(bottom=0)
    _label(ax, run, "tokens per second")
    return True


def _draw_busy(figure: Figure, run: RecordedRun) -> bool:
    ax = figure.subplots()
    for stage in range(run.num_stages):
        times, shares = [], []
        last_end = run.begin
        for line, end in zip(run.lines, run.ends, strict=True):
            share = _at(line.busy_share, stage)
            # A line over the time without steps would say that nothing had changed.
            is_known = share is not None and end - line.seconds - last_end < max(GAP_S, 2 * line.seconds)
            times.append(run.elapsed(end))
            shares.append(100 * share if share is not None and is_known else math.nan)
            last_end = end
        if not all(map(math.isnan, shares)):
            ax.plot(_means(times), _means(shares), label=f"stage {stage}")
    if not ax.lines:
        return False
    ax.set_ylim(0, 102)
    ax.legend(fontsize="small", ncols=6, loc="lower left")
    _label(ax, run, "% of the time computing")
    return True


def _at(shares: Sequence[float | None], stage: int) -> float | None:
    return shares[stage] if stage < len(shares) else None


def time_by_stage(run: RecordedRun) -> dict[int, list[float]]:
    """The shares of ACTIVITIES in the time of each stage's peers, over the whole run; of stages that tell them."""
    found = {}
    for stage in range(run.num_stages):
        told = [
            (line.seconds, computing, ending, joining)
            for line in run.lines
            if (computing := _at(line.busy_share, stage)) is not None
            and (ending := _at(line.ending_share, stage)) is not None
            and (joining := _at(line.joining_share, stage)) is not None
        ]
        if total := sum(seconds for seconds, *_ in told):
            shares = [sum(each[0] * each[column] for each in told) / total for column in (1, 2, 3)]
            found[stage] = [*shares, max(0.0, 1 - sum(shares))]
    return found


def _draw_time(figure: Figure, run: RecordedRun) -> bool:
    by_stage = time_by_stage(run)
    ax = figure.subplots()
    begins = dict.fromkeys(by_stage, 0.0)
    for number, (activity, colour) in enumerate(zip(ACTIVITIES, ACTIVITY_COLOURS, strict=True)):
        widths = {stage: 100 * shares[number] for stage, shares in by_stage.items()}
        names = [f"stage {stage}" for stage in widths]
        bars = ax.barh(names, list(widths.values()), left=list(begins.values()), color=colour, label=activity)
        texts = [f"{width:.0f} %" if width >= 5 else "" for width in widths.values()]
        ax.bar_label(bars, texts, label_type="center", fontsize="small")
        begins = {stage: begins[stage] + width for stage, width in widths.items()}
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("% of the peers' time")
    ax.legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return bool(by_stage)


def _draw_peers(figure: Figure, run: RecordedRun) -> bool:
    if not run.num_stages:
        return False
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    times = [0.0, *map(run.elapsed, run.ends)]
    counts = [
        [line.peers[stage] if stage < len(line.peers) else 0 for line in run.lines] for stage in range(run.num_stages)
    ]
    names = [f"stage {stage}" for stage in range(run.num_stages)]
    above.stackplot(times, [[each[0], *each] for each in counts], step="pre", labels=names, alpha=0.8)
    for number, (begin, end) in enumerate(empty_times(run)):
        label = "a stage has no peer" if number == 0 else None
        above.axvspan(begin, end, color="tab:red", alpha=0.6, linewidth=0, label=label)
    above.set_ylim(bottom=0)
    above.yaxis.get_major_locator().set_params(integer=True)
    above.set_ylabel("peers that serve")
    above.legend(fontsize="small", ncols=6, loc="lower left")
    _draw_events(below, run)
    return True


def _draw_events(ax: Axes, run: RecordedRun) -> None:
    """One row for each kind of event that has happened."""
    drawn = [kind for kind in EVENT_MARKS if any(event.kind == kind for event in run.events)]
    for row, kind in enumerate(drawn):
        marker, colour = EVENT_MARKS[kind]
        times = [run.elapsed(event.time) for event in run.events if event.kind == kind]
        ax.plot(times, [row] * len(times), marker, color=colour, markersize=5)
    ax.set_yticks(range(len(drawn)), drawn)
    ax.set_ylim(-0.7, max(len(drawn), 1) - 0.3)
    _label(ax, run, "")
    if not drawn:
        ax.text(0.5, 0.5, "no events are recorded", transform=ax.transAxes, ha="center", color="tab:grey")


def empty_times(run: RecordedRun) -> list[tuple[float, float]]:
    """From when to when some stage had no peer, by the events, in the run's unit of time."""
    found: list[tuple[float, float]] = []
    empty: dict[int | None, float] = {}
    for event in run.events:
        if event.kind == "stage_empty":
            empty.setdefault(event.stage, event.time)
        elif event.kind == "stage_served" and event.stage in empty:
            found.append((empty.pop(event.stage), event.time))
    last = max([run.ends[-1], *(event.time for event in run.events)])
    found += [(begin, last) for begin in empty.values()]
    return [(run.elapsed(begin), run.elapsed(end)) for begin, end in found]


def _label(ax: Axes, run: RecordedRun, text: str) -> None:
    ax.set_xlabel(run.unit[0])
    ax.set_ylabel(text)
    ax.grid(alpha=0.3)


# By name: the function that draws it and says whether there is something to see, and its height in inches.
FIGURES: dict[str, tuple[Callable[[Figure, RecordedRun], bool], float]] = {
    "loss": (_draw_loss, 3.6),
    "throughput": (_draw_throughput, 3.0),
    "busy": (_draw_busy, 3.0),
    "time": (_draw_time, 2.4),
    "peers": (_draw_peers, 4.4),
}

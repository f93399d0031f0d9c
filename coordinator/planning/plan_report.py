"""A plan for people: the report of planning/plan.py as tables in a terminal."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.planning.advice import MOST_NAMED, named_counts
from coordinator.planning.stage_work import COMPARED_CODECS
from coordinator.planning.ways_to_train import LITTLE
from coordinator.watch.what_is_trained import in_millions

# Options that do less than this share of the best one's tokens/s are left out.
SHOWN = 0.25
# Columns of the square-cube table: each microbatch waits for the one before it; enough of them to hide latency.
HOW = ("alone", "many")
# Columns of the table of ways to train.
WAYS = ("way", "tokens/s", "steps", "time", "known from")
# Columns of words, which may be wrapped: numbers that are cut off say nothing.
WORDS = ("peers", "limit", "what", "peer", "peers a stage", "way", "known from")


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report of make_report as text and tables."""
    console.print(_headline(report), highlight=False)
    for table in (
        _stages(report),
        _step(report),
        _options(report),
        _changes(report),
        _ways(report),
        _square_cube(report),
    ):
        if table is not None:
            console.print(table)
            console.print()
    console.print(_advice(report), highlight=False)
    console.print(_training(report["training"]), highlight=False)
    for note in report["notes"]:
        console.print(f"Note: {note}.", highlight=False)


def _headline(report: dict[str, Any]) -> str:
    configured = report["configured_stages"]
    other = f" (configured: {configured})" if configured != report["stages"] else ""
    stages = f"{report['stages']} stage{'s' if report['stages'] > 1 else ''}{other}"
    trained = (
        "" if report["trained_parameters"] == report["parameters"] else f"{in_millions(report['trained_parameters'])}: "
    )
    return (
        f"[bold]{report['name']}[/bold], {in_millions(report['parameters'])} parameters: "
        f"[bold]{stages}, {report['tokens_per_s']:,.0f} tokens/s[/bold]\n"
        f"What is trained: {trained}{escape(report['trains'])}.\n"
        f"What limits it: {report['reason']}.\n"
    )


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table. Tables have at most 80 columns, as wide as a terminal is at least."""
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        if column in WORDS:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _stages(report: dict[str, Any]) -> Table:
    columns = ("stage", "layers", "params", "peers", "tokens/s", "busy", "memory\nGB", "in\nflight", "limit")
    caption = "busy: share of a step that devices compute; memory: with the microbatches in flight, of what is there"
    table = _table("Stages", *columns, caption=caption)
    # Neighbouring stages that agree in these values share a row.
    for _, alike in groupby(report["stage_plans"], key=itemgetter("layers", "parameters", "peers", "limit")):
        run = list(alike)
        first, last = run[0], run[-1]
        limit = first["memory_limit_bytes"]
        table.add_row(
            _span(first["stage"], last["stage"]),
            _span(first["first_layer"], last["first_layer"] + last["layers"] - 1),
            f"{first['parameters'] / 1e6:,.1f} M",
            named_counts(first["peers"]),
            f"{min(stage['tokens_per_s'] for stage in run):,.0f}",
            f"{first['busy_share']:.0%}",
            f"{max(s['memory_bytes'] for s in run) / 1e9:.1f} of {'?' if limit is None else f'{limit / 1e9:.1f}'}",
            str(max(stage["in_flight"] for stage in run)),
            first["limit"],
        )
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _step(report: dict[str, Any]) -> Table:
    step = report["step"]
    table = _table(f"A round, {step['mode']}", "what", "seconds", "share")
    parts = {
        "microbatches": step["stream_s"],
        "filling and draining the pipeline": step["fill_s"],
        "averaging gradients": step["averaging_s"],
        "updating weights": step["update_s"],
    }
    for name, seconds in parts.items():
        table.add_row(name, _seconds(seconds), f"{seconds / step['seconds']:.0%}")
    table.add_row("[bold]step", f"[bold]{_seconds(step['seconds'])}", "")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _worth_showing(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers of stages that are not far slower, the configured one, and the largest that is too small to fit."""
    options = report["options"]
    possible = [option["stages"] for option in options if option["tokens_per_s"] is not None]
    shown = {report["stages"], report["configured_stages"]}
    shown |= {option["stages"] for option in options if (option["tokens_per_s"] or 0) >= SHOWN * report["tokens_per_s"]}
    shown |= set([option["stages"] for option in options if option["stages"] < possible[0]][-1:])
    return [option for option in options if option["stages"] in shown]


def _options(report: dict[str, Any]) -> Table:
    table = _table("Numbers of stages", "stages", "tokens/s", "peers a stage", "memory", "averaging", "limit")
    table.caption = "memory: of the largest stage, with one microbatch; averaging: share of a step"
    for option in _worth_showing(report):
        chosen = option["stages"] == report["stages"]
        possible = option["tokens_per_s"] is not None
        cells = (
            str(option["stages"]),
            f"{option['tokens_per_s']:,.0f}" if possible else "-",
            _peers_a_stage(option["peers"]) if possible else "-",
            f"{option['largest_memory_bytes'] / 1e9:.1f} GB",
            f"{option['averaging_share']:.0%}" if possible else "-",
            option["limit"] if possible else option["reason"],
        )
        table.add_row(*cells, style="bold" if chosen else None if possible else "dim")
    return table


def _peers_a_stage(peers: list[int]) -> str:
    if len(peers) <= 8:
        return ", ".join(map(str, peers))
    return str(min(peers)) if min(peers) == max(peers) else f"{min(peers)} to {max(peers)}"


def _changes(report: dict[str, Any]) -> Table:
    table = _table(
        "One peer more or fewer, at the same number of stages", "peer", "change", "tokens/s", "difference", "what"
    )
    for change in report["changes"]:
        more = change["difference"] > 0
        if change["tokens_per_s"] is None:
            cells = ("-", "-", f"{report['stages']} stages could not be served any more")
        else:
            stages = _few(change["stages"])
            what = "stays without a stage" if more else "had no stage"
            if stages:
                what = f"other peers at stage {stages}"
            cells = (f"{change['tokens_per_s']:,.0f}", f"{change['ratio'] - 1:+.1%}", what)
        table.add_row(change["group"], "+1" if more else "-1", *cells)
    return table


def _few(stages: list[int]) -> str:
    return ", ".join(map(str, stages[:MOST_NAMED])) + (", ..." if len(stages) > MOST_NAMED else "")


def _ways(report: dict[str, Any]) -> Table | None:
    """Ways to train, if any of them changes the throughput, or is recommended."""
    rows = report["ways"]
    if all(abs(row["speed"] - 1) < LITTLE for row in rows) and _recommended(report) is None:
        return None
    caption = (
        "steps: times as many as the configured way takes to the same loss; time: to that loss, relative to the "
        "configured way's; both with their intervals; known from: size of the model and pairs of trainings"
    )
    table = _table("Ways to train, by time to the same loss", *WAYS, caption=caption)
    for row in rows:
        figures = f"{row['tokens_per_s']:,.0f}", _interval(row, "steps"), _interval(row, "time")
        cells = (_name_of(row), *figures, "; ".join(row["known_from"]))
        table.add_row(*cells, style="bold" if row["recommended"] else None)
    return table


def _name_of(row: dict[str, Any]) -> str:
    """The changes of a way in words."""
    changes = dict(row["changes"])
    if changes.get("activations") == (gradients := changes.get("gradients")) is not None:
        changes = {"wires": gradients} | changes
        del changes["activations"], changes["gradients"]
    coded = ("wires", "activations", "gradients", "averaging")
    return (
        ", ".join(f"{part} {value}" if part in coded else value for part, value in changes.items()) or "as configured"
    )


def _interval(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "not known"
    ends = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.2f}" + ("" if ends[0] == ends[1] else f" ({ends[0]:.2f}-{ends[1]:.2f})")


def _recommended(report: dict[str, Any]) -> dict[str, Any] | None:
    return next((row for row in report["ways"] if row["recommended"]), None)


def _advice(report: dict[str, Any]) -> str:
    """Which way to take."""
    row = _recommended(report)
    if row is None:
        return "Way to train: [bold]as configured[/bold]. No other one is known to come to the same loss sooner."
    settings = escape(" ".join(f"--set '{setting}'" for setting in row["set"]))
    rate = " The learning rate is to be found anew." if "optimizer" in row["changes"] else ""
    return (
        f"Way to train: [bold]{_name_of(row)}[/bold] comes to the same loss in {_interval(row, 'time')} of "
        f"the configured way's time: {settings}. Compare some hundred steps of both first.{rate}"
    )


def _square_cube(report: dict[str, Any]) -> Table | None:
    square_cube = report["square_cube"]
    if square_cube is None:
        return None
    table = _table(
        f"Square-cube law: share of the time that {square_cube['group']} computes, with "
        f"{square_cube['bytes_per_s'] * 8 / 1e6:,.0f} Mb/s of a link used and {square_cube['latency_s'] * 1e3:.0f} ms",
        *("hidden", "layers", "compute\nms"),
        *(f"{words}\n{how}" for words in COMPARED_CODECS.values() for how in HOW),
        caption="alone: each microbatch waits for the one before it; many: enough of them in flight to hide latency",
    )
    for row in square_cube["rows"]:
        shares = [f"{row[codec][key]:.0%}" for codec in COMPARED_CODECS for key in ("share_alone", "share_in_flight")]
        table.add_row(str(row["hidden_size"]), str(row["layers"]), f"{row['compute_s'] * 1e3:,.1f}", *shares)
    return table


def _training(training: dict[str, Any]) -> str:
    text = (
        f"Training on {_tokens(training['tokens'])} tokens: {training['steps']:,.0f} optimizer steps, "
        f"[bold]{_duration(training['days'])}[/bold], {training['sent_bytes'] / 1e9:,.1f} GB sent"
    )
    if training["dollars"]:
        text += (
            f", [bold]${training['dollars']:,.2f}[/bold] (${training['peer_dollars']:,.2f} for peers, "
            f"${training['traffic_dollars']:,.2f} for traffic)"
        )
    return text + ". Peers that come and go, snapshots and checkpoints, and validation are not counted."


def _tokens(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 1 else f"{days * 24 * 60:.1f} minutes"

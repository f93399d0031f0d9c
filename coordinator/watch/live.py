"""The live view of a run in a terminal; plain lines where there is none."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from coordinator.watch.run_watch import RunWatch
from coordinator.watch.summary import CoordinatorSummary, RunSummary

# Seconds between lines where the output is no terminal.
PLAIN_LINE_S = 5.0


class LiveView:
    """Shows a run in a terminal: a context manager, to `update` after each look at the run."""

    def __init__(self, title: str, num_steps: int, *, console: Console | None = None):
        self._console = console or Console()
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            expand=True,
        )
        self._task = self._progress.add_task("optimizer steps", total=num_steps)
        self._live = Live(console=self._console, refresh_per_second=2, transient=False)
        self._printed_at = 0.0
        self._printed_step = -1

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def print(self, text: str) -> None:
        """Print above the view without breaking lines: a command in two lines cannot be copied."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def update(self, watch: RunWatch) -> None:
        """Show the run as it is now."""
        summary = watch.summary()
        if not self._console.is_terminal:
            self._print_line(summary)
            return
        self._progress.update(self._task, completed=summary["optimizer_step"])
        self._live.update(Group(summary_table(self._title, summary), self._progress))

    def _print_line(self, summary: RunSummary) -> None:
        done = summary["optimizer_step"] == summary["optimizer_steps"]
        if summary["optimizer_step"] == self._printed_step or (
            time.monotonic() < self._printed_at + PLAIN_LINE_S and not done
        ):
            return
        self._printed_at, self._printed_step = time.monotonic(), summary["optimizer_step"]
        peers = ",".join(str(len(stage["peers"])) for stage in summary["stages"])
        self._console.print(
            f"step {summary['optimizer_step']}/{summary['optimizer_steps']}  "
            f"loss {_number(summary['loss'], '.4f')}  validation loss "
            f"{_number(summary['validation_loss'], '.4f')}  {_number(summary['tokens_per_s'], ',.0f')} tokens/s  "
            f"peers {peers}",
            highlight=False,
        )


def summary_table(title: str, summary: RunSummary) -> Table:
    """Stages with their peers, queue and throughput; the run in the caption."""
    table = Table(
        title=title,
        expand=True,
        caption=(
            f"step {summary['optimizer_step']}/{summary['optimizer_steps']} "
            f"({summary['samples_in_round']}/{summary['global_batch_size']} samples of the next)   "
            f"loss {_number(summary['loss'], '.4f')}   validation loss {_number(summary['validation_loss'], '.4f')}   "
            f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s"
            f"{_coordination(summary['coordinator'])}"
        ),
    )
    for column in ("stage", "peers serving", "joining / draining", "queue", "tokens/s announced", "step"):
        table.add_column(column, justify="right")
    for stage in summary["stages"]:
        peers = stage["peers"]
        serving = [peer for peer in peers if peer["state"] == "serving"]
        table.add_row(
            str(stage["stage"]),
            str(len(serving)),
            str(len(peers) - len(serving)),
            str(sum(peer["queue"] for peer in peers)),
            f"{sum(peer['tokens_per_s'] for peer in peers):,.0f}",
            str(max((peer["optimizer_step"] for peer in peers), default="-")),
        )
    return table


def _coordination(coordinator: CoordinatorSummary | None) -> str:
    """The coordinator's last decision and the moves that are under way."""
    if coordinator is None:
        return ""
    moves = [
        f"peer {move['peer'][-8:]} moves from stage {move['from']} to {move['to']}" for move in coordinator["moves"]
    ]
    return "".join(f"\n{line}" for line in (coordinator["decision"], *moves) if line)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""The live view of a run in a terminal; plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coordinator.watch.happenings import Event
from coordinator.watch.reached import how_reached, longest_round_trip, missing_ways_line
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import how_long, in_words, served_by_nobody
from coordinator.watch.what_is_trained import training_line
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import PeerView
from swarm_peer.runtime.context import BYTES_PER_BYTE

# Seconds between lines where the output is no terminal.
PLAIN_LINE_S = 5.0
# Events that are told on the terminal as they happen; the view shows what the others come to.
TOLD = frozenset({"rewound", "stands_still", "goes_on", "trouble"})


class LiveView:
    """Shows a run in a terminal: a context manager, to `update` after each look at the run."""

    def __init__(self, num_steps: int):
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("optimizer steps", total=num_steps)
        self._live = Live(console=self._console, refresh_per_second=2, transient=False)
        self._printed_at = 0.0
        self._printed_step = -1
        self._was_empty: list[int] = []
        self._has_seen_peers = False

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

    def tell(self, event: Event) -> None:
        """Print an event that people have to know of."""
        if event["kind"] in TOLD:
            self.print(f"{_now()}  {event['text']}")

    def update(self, watch: RunWatch) -> None:
        """Show the run as it is now."""
        # A coordinator that is started again knows from its files how far the run is, and has not looked round yet.
        self._has_seen_peers |= bool(watch.view.peers)
        if not self._console.is_terminal:
            if not self._has_seen_peers:
                return
            self._print_line(watch)
            self._print_waiting(watch)
            return
        self._progress.update(self._task, completed=watch.shown_step, total=watch.last_step)
        self._live.update(Group(run_table(watch), self._progress))

    def _print_waiting(self, watch: RunWatch) -> None:
        """Say once for which stages the run waits; before its first step, not for those that peers are joining."""
        has_begun = bool(watch.shown_step)
        empty = [stage for stage in watch.view.empty_stages() if has_begun or not watch.view.in_stage(stage)]
        if empty and empty != self._was_empty:
            self.print(f"{_waits(empty).capitalize() if has_begun else _waits_for_first(empty)}.")
        self._was_empty = empty

    def _print_line(self, watch: RunWatch) -> None:
        done = watch.shown_step == watch.last_step
        if watch.shown_step == self._printed_step or (time.monotonic() < self._printed_at + PLAIN_LINE_S and not done):
            return
        self._printed_at, self._printed_step = time.monotonic(), watch.shown_step
        peers = ",".join(str(len(watch.view.in_stage(stage))) for stage in range(watch.view.num_stages))
        self.print("  ".join([_now(), _step(watch), *_figures(watch), f"peers {peers}"]))


def _now() -> str:
    """The time for lines that go to a file, which its user reads the next morning."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def run_table(watch: RunWatch) -> Table:
    """Stages with their peers, queue and throughput; the run in the caption."""
    manifest = watch.manifest
    samples = f"({watch.current_samples}/{manifest.training.global_batch_size} samples of the next)"
    caption = "   ".join([f"{_step(watch)} {samples}", *_figures(watch)]) + _coordination(watch)
    title = Text(f"run {manifest.name}\n{training_line(manifest)}")
    table = Table(title=title, expand=True, caption=Text(caption))  # rich must see no markup in them
    for column in ("stage", "peers serving", "others", "queue", "tokens/s announced", "busy", "step"):
        table.add_column(column, justify="right")
    for stage in range(manifest.stages.count):
        peers, num_serving = watch.view.in_stage(stage), len(watch.view.serving(stage))
        table.add_row(
            str(stage),
            str(num_serving),
            str(len(peers) - num_serving),
            str(sum(peer.queue for peer in peers)),
            f"{sum(peer.samples_per_s for peer in peers) * manifest.data.sequence_length:,.0f}",
            _number(None if (shares := watch.view.mean_time_shares(stage)) is None else shares[0], ".0%"),
            str(max((peer.optimizer_step for peer in peers), default="-")),
        )
    return table


def peers_table(watch: RunWatch) -> Table:
    """All peers by stage, each by its name and the end of its id, and how others reach it."""
    table = Table(expand=True)
    for column in ("peer", "stage", "state", "tokens/s", "busy", "waits / ends / joins", "queue", "step"):
        # In a narrow terminal, values go on in the next line, and none is cut off.
        table.add_column(column, justify="left" if column == "peer" else "right", overflow="fold")
    table.add_column("reached")
    table.add_column("note")
    manifest = watch.manifest
    for stage in range(manifest.stages.count):
        for peer in sorted(watch.view.in_stage(stage), key=lambda peer: (peer.name, peer.peer_id)):
            table.add_row(
                f"{peer.name} {peer.peer_id[-8:]}".strip(),
                str(stage),
                peer.state.value,
                f"{peer.samples_per_s * manifest.data.sequence_length:,.0f}",
                *_time_percent(peer),
                str(peer.queue),
                str(peer.optimizer_step),
                # rich must see no markup in them
                Text(", ".join(filter(None, (how_reached(peer, watch), longest_round_trip(peer)))) or "-"),
                Text(note_of(peer)),
            )
    return table


def note_of(peer: PeerView) -> str:
    """The peer's own note, without what would command a terminal, and what it lends."""
    return "; ".join(filter(None, (plain_text(peer.note, 200), what_is_lent(peer))))


def what_is_lent(peer: PeerView) -> str:
    """The part of its link that a peer's owner lends, such as `lends 8 Mb/s up, 40 Mb/s down`; empty if all of it."""
    ways = ((peer.upload_bytes_per_s, "up"), (peer.download_bytes_per_s, "down"))
    parts = [f"{rate * BYTES_PER_BYTE * 8 / 1e6:.3g} Mb/s {way}" for rate, way in ways if rate]
    return f"lends {', '.join(parts)}" if parts else ""


def _time_percent(peer: PeerView) -> list[str]:
    """How a peer spends its time: computing; and waiting for microbatches, ending rounds and joining."""
    if (shares := peer.time_shares) is None:
        return ["-", "-"]
    return [f"{shares.computing}%", f"{shares.waiting}/{shares.ending}/{shares.joining}%"]


def _coordination(watch: RunWatch) -> str:
    """The stages that the run waits for, the coordinator's last decision, and the moves that are under way."""
    # A coordinator that is started again may not have seen the peers of its run yet.
    empty = watch.view.empty_stages() if watch.view.peers or not watch.shown_step else []
    lines = [_waits(empty)] if empty else _waits_to_begin(watch)
    if (found := watch.standstill) is not None:
        lines.append(f"the run stands still, for {how_long(found, watch.seen_s)}: {in_words(found)}")
    if words := missing_ways_line(watch):
        lines.append(words)
    if watch.waits_for:
        lines.append(f"the run waits: {watch.waits_for}")
    if watch.coordination is not None:
        _, record = watch.coordination
        lines += [f"rebalancing: {plain_text(record.reason, 300)}"] if record.reason and not empty else []
        lines += [
            f"peer {move.peer[-8:]} moves from stage {move.from_stage} to {move.to_stage}"
            for move in record.assignments
        ]
    return "".join(f"\n{line}" for line in lines)


def _waits(empty: Sequence[int]) -> str:
    return f"the run waits: {served_by_nobody(empty)}"


def _waits_for_first(empty: Sequence[int]) -> str:
    return f"The run waits for its first peer of stage {', '.join(map(str, empty))}"


def _waits_to_begin(watch: RunWatch) -> list[str]:
    """That the first round waits for more peers, if it does."""
    wanted = watch.manifest.stages.peers_to_start
    few = [stage for stage in range(watch.view.num_stages) if len(watch.view.serving(stage)) < wanted]
    if not few or watch.shown_step or watch.current_samples or watch.current_round:
        return []
    return [f"the run begins once each stage has {wanted} peers; stage {', '.join(map(str, few))} has fewer"]


def _step(watch: RunWatch) -> str:
    return f"step {watch.shown_step}/{watch.last_step}"


def _figures(watch: RunWatch) -> list[str]:
    line = watch.shown_line
    targets = [] if watch.target_share is None else [f"{watch.target_share:.0%} of tokens are targets"]
    return [
        f"loss {_number(line['loss'] if line else None, '.4f')}",
        f"validation loss {_number(watch.validation_loss, '.4f')}",
        f"{_number(line['tokens_per_s'] if line else None, ',.0f')} tokens/s",
        *targets,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""The files that a coordinator writes as it looks at its run: metrics.jsonl, events.jsonl, contributions.json."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path

from coordinator.run.run_options import lock_folder
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.ending import ENDED_BY_OPERATOR
from coordinator.watch.happenings import EventKind
from coordinator.watch.journal import Journal, read_events
from coordinator.watch.metrics_file import MetricsFile, MetricsLine
from coordinator.watch.promises import Promises
from coordinator.watch.run_watch import RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.context import Clock

log = logging.getLogger(__name__)


class RunFiles:
    """The files of one run in its folder, opened. Belongs to the event loop's thread.

    Args:
        resume: carry on with the files that are there
        journal: of this folder, not begun yet
        contributions: of this folder, not begun yet
        on_line: called for each line that is new in metrics.jsonl
        promises: told of what is not in the files when they are closed
    """

    def __init__(
        self,
        *,
        folder: Path,
        manifest: RunManifest,
        resume: bool,
        journal: Journal,
        contributions: ContributionEstimates,
        clock: Clock,
        on_line: Callable[[MetricsLine], None],
        promises: Promises,
    ):
        self._metrics = MetricsFile(folder, resume, clock.unix_s)
        self._num_returns = 0
        self._journal = journal
        self._contributions = contributions
        self._clock = clock
        self._on_line = on_line
        self._promises = promises
        # Peers tell of earlier rounds once more, after a restart.
        contributions.begin(resume, round_number=self._metrics.round_number)
        is_known = journal.begin(
            lifetime_s=manifest.limits.announcement_s,
            now_s=clock.unix_s(),
            resume=resume,
            optimizer_step=self._metrics.optimizer_step,
            round_number=self._metrics.round_number,
        )
        if is_known:
            self.tell("coordinator", "A coordinator begins to write this journal again.")
        else:
            stages, steps = manifest.stages.count, manifest.training.steps
            self.tell("started", f"Run {manifest.name}: {stages} stages, {steps} optimizer steps to make.")

    @property
    def round_number(self) -> int:
        """The round of the last line of metrics.jsonl; -1 if there is none."""
        return self._metrics.round_number

    @property
    def optimizer_step(self) -> int:
        """The optimizer step of the last line of metrics.jsonl; 0 if there is none."""
        return self._metrics.optimizer_step

    @property
    def written_s(self) -> float:
        """When the last optimizer step, or the run's end, was written down, in Unix seconds; 0 if neither was."""
        endings = (event["time"] for event in self._journal.newest if event["kind"] == "ended")
        return max(self._metrics.written_s, *endings, 0.0)

    def lines_since(self, first_round: int) -> list[MetricsLine]:
        """The lines of metrics.jsonl of this round and later ones."""
        return self._metrics.lines_since(first_round)

    def has_made(self, optimizer_step: int, round_number: int) -> bool:
        """Whether metrics.jsonl has the line of an optimizer step, made in this round."""
        return self._metrics.has_made(optimizer_step, round_number)

    def write_lines(self, lines: Iterable[MetricsLine], returns: tuple[int, int]) -> None:
        """Write down the optimizer steps that are new.

        Args:
            returns: see RunWatch
        """
        if returns[0] != self._num_returns:
            self._num_returns = returns[0]
            self._metrics.give_up_after(returns[1])
        for line in lines:
            if 0 < self._metrics.optimizer_step < line["optimizer_step"] - 1:
                missing = f"{self._metrics.optimizer_step + 1} to {line['optimizer_step'] - 1}"
                log.warning("lines_missing optimizer_steps=%s reason=no peer tells of them any more", missing)
            if self._metrics.write(line):
                self._on_line(line)

    def look(self, watch: RunWatch) -> None:
        """Write down what has happened since the last look."""
        self._journal.look(watch, self._clock.unix_s())
        self._contributions.look(watch, self._clock.unix_s())

    def tell(self, kind: EventKind, text: str) -> None:
        """Write down an event that looking at the peers does not show."""
        self._journal.tell(kind, text, self._clock.unix_s())

    def optimizer_step_at(self, seconds_ago: float) -> int:
        """The optimizer step of the last line of metrics.jsonl that had been written by then."""
        return self._metrics.optimizer_step_at(self._clock.unix_s() - seconds_ago)

    def close(self) -> None:
        """Close the files. Everything is in them already, unless the disk did not take it."""
        files = {
            "metrics.jsonl lacks lines": self._metrics.close(),
            "events.jsonl lacks lines": self._journal.close(),
            "contributions.json was not kept": self._contributions.save(self._clock.unix_s()),
        }
        for what, why_not in files.items():
            if why_not:
                self._promises.broken(what, why_not)


def note_end(folder: Path) -> None:
    """Write down that the operator has ended a folder's run, if no coordinator is there to do it."""
    with suppress(UserError, OSError), closing(lock_folder(folder)):
        events = read_events(folder)
        if events and events[-1]["kind"] != "ended":
            Journal(folder).tell("ended", f"The run has ended: {ENDED_BY_OPERATOR}.", time.time())

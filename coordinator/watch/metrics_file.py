"""metrics.jsonl: what one line says of one optimizer step, and the file of all lines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from typing_extensions import NotRequired

from swarm_peer.errors import UserError
from swarm_peer.files import replace_file
from swarm_peer.policy.view import SwarmView

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
# Without these, no run can be gone on with and no curve be drawn.
COUNTS = ("optimizer_step", "round", "samples")
NEEDED = frozenset({*COUNTS, "loss", "seconds", "tokens_per_s"})


class MetricsLine(TypedDict):
    """One line: losses in nats per token, times in seconds, `peers` by stage; validation only where it was due.

    The shares, by stage, are of the time of its peers over the last minute or so, from 0 to 1: their devices computed
    (busy), or were idle while the round ended (ending) or while they joined (joining). The rest of 1 they waited for
    microbatches. None where no peer tells it. `time` is in unix seconds.

    `optimizer_step` counts the updates that the weights have had and goes back where the run does; `round` is the
    number of the round that made the last of them and never goes back. `targets` are the tokens that were learnt, where
    samples say which: `baseline` alone knows them of each step.
    """

    optimizer_step: int
    loss: float
    samples: int
    tokens: int
    tokens_per_s: float
    seconds: float
    peers: list[int]
    round: int
    busy_share: NotRequired[list[float | None]]
    ending_share: NotRequired[list[float | None]]
    joining_share: NotRequired[list[float | None]]
    targets: NotRequired[int]
    time: NotRequired[float]
    validation_loss: NotRequired[float]
    validation_samples: NotRequired[int]


class StageShares(NamedTuple):
    """How the peers of each stage spend their time, by stage; see MetricsLine."""

    busy_share: list[float | None]
    ending_share: list[float | None]
    joining_share: list[float | None]


def stage_shares(view: SwarmView) -> StageShares:
    """How the peers of each stage spend their time now, in the mean."""
    means = [view.mean_time_shares(stage) or (None, None, None) for stage in range(view.num_stages)]
    rounded = [[None if share is None else round(share, 3) for share in mean] for mean in means]
    return StageShares(*map(list, zip(*rounded, strict=True)))


class ValidationLoss(NamedTuple):
    """The mean loss of held-out samples, in nats per token, and how many there were."""

    loss: float
    samples: int


def metrics_line(
    *,
    optimizer_step: int,
    round_number: int,
    loss: float,
    samples: int,
    seconds: float,
    sequence_length: int,
    peers: list[int],
    validation: ValidationLoss | None = None,
    shares: StageShares | None = None,
    targets: int | None = None,
) -> MetricsLine:
    """One line of metrics.jsonl, rounded for reading."""
    tokens = samples * sequence_length
    line = MetricsLine(
        optimizer_step=optimizer_step,
        loss=round(loss, 6),
        samples=samples,
        tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1) if seconds else 0.0,
        seconds=round(seconds, 4),
        peers=peers,
        round=round_number,
    )
    if targets is not None:
        line["targets"] = targets
    if shares is not None:
        line.update(shares._asdict())  # type: ignore[typeddict-item]
    if validation is not None:
        line["validation_loss"] = round(validation.loss, 6)
        line["validation_samples"] = validation.samples
    return line


class MetricsFile:
    """metrics.jsonl of a run: one line for each optimizer step, written at once.

    Lines that the disk does not take are written with the next line that it takes.

    Args:
        resume: keep the lines that are there, and add only later steps
        unix_s: tells the time of a line

    Raises:
        UserError: the file cannot be written
    """

    def __init__(self, folder: Path, resume: bool = False, unix_s: Callable[[], float] = time.time):
        self._unix_s = unix_s
        self._path = folder / METRICS
        self._is_whole = True  # the file has all lines, and no others
        self._failure = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = whole_lines(self._path) if resume and self._path.exists() else []
            self._rewrite()
        except OSError as error:
            raise UserError(f"cannot write {self._path} ({error.strerror}): check space and permissions") from error

    @property
    def round_number(self) -> int:
        """The round of the last line; -1 if there is none."""
        return self._lines[-1]["round"] if self._lines else -1

    @property
    def optimizer_step(self) -> int:
        """The optimizer step of the last line; 0 if there is none."""
        return self._lines[-1]["optimizer_step"] if self._lines else 0

    @property
    def written_s(self) -> float:
        """When the last line was written, in Unix seconds; 0 if there is none."""
        return self._lines[-1].get("time", 0.0) if self._lines else 0.0

    def optimizer_step_at(self, unix_s: float) -> int:
        """The optimizer step of the last line that was written by then; 0 if there was none."""
        return next((line["optimizer_step"] for line in reversed(self._lines) if line.get("time", 0.0) <= unix_s), 0)

    def lines_since(self, first_round: int) -> list[MetricsLine]:
        """The lines of this round and later ones."""
        return [line for line in self._lines if line["round"] >= first_round]

    def has_made(self, optimizer_step: int, round_number: int) -> bool:
        """Whether the run has come to an optimizer step in this round, and has not gone back to before it since."""
        return any(
            (known["optimizer_step"], known["round"]) == (optimizer_step, round_number)
            for known in reversed(self._lines)
        )

    def write(self, line: MetricsLine) -> bool:
        """Add a line; where the run has gone back, the lines of the steps that it gave up are removed.

        Returns:
            whether the line is a new one
        """
        if line["round"] <= self.round_number:
            return False
        line = MetricsLine(**line, time=round(self._unix_s(), 2))
        kept = [known for known in self._lines if known["optimizer_step"] < line["optimizer_step"]]
        is_next = len(kept) == len(self._lines)
        self._lines = [*kept, line]
        self._save(line if is_next and self._is_whole else None)
        return True

    def give_up_after(self, optimizer_step: int) -> None:
        """Remove the lines of later steps: the run goes on without them, in rounds before theirs."""
        self._lines = [known for known in self._lines if known["optimizer_step"] <= optimizer_step]
        self._save(None)

    def close(self) -> str:
        """Write the lines that the disk has not taken so far, if it takes them now; returns why not, or nothing."""
        if not self._is_whole:
            self._save(None)
        return "" if self._is_whole else self._failure

    def _save(self, line: MetricsLine | None) -> None:
        """Append a line that is new, or write all lines anew."""
        was_whole, self._is_whole = self._is_whole, False
        try:
            if line is None:
                self._rewrite()
            else:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            self._is_whole = True
        except OSError as error:
            self._failure = error.strerror or str(error)
            if was_whole:  # a full disk fails at each line
                log.error("metrics_not_written path=%s reason=%s", self._path, error.strerror)

    def _rewrite(self) -> None:
        replace_file(self._path, "".join(json.dumps(known) + "\n" for known in self._lines))


def last_step(folder: Path) -> int:
    """The optimizer step of the last line of a folder's metrics.jsonl; 0 if there is none."""
    path = folder / METRICS
    lines = whole_lines(path) if path.exists() else []
    return lines[-1]["optimizer_step"] if lines else 0


def whole_lines(path: Path) -> list[MetricsLine]:
    """All lines of a metrics.jsonl but those that were cut off, as the last one is when its writer was killed.

    Raises:
        UserError: another version of this program wrote them
    """
    lines: list[MetricsLine] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        is_line = isinstance(fields, dict) and fields.keys() >= NEEDED
        if not (is_line and all(isinstance(fields[name], int) for name in COUNTS)):
            raise UserError(f"{path} was written by another version of swarm: move it away, or name another --output")
        lines.append(cast(MetricsLine, fields))
    return lines

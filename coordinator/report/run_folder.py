"""Reads a run's folder: metrics.jsonl, and events.jsonl and run.json if they are there. Believes none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.watch.run_file import read_run_file
from swarm_peer.errors import UserError

HOUR_S = 3600.0
# Others than these are nothing that a clock or a counter has told.
Seconds = Annotated[float, Field(ge=0, lt=2**40)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Line(BaseModel):
    """One line of metrics.jsonl, as far as a report uses it (see MetricsLine)."""

    model_config = ConfigDict(frozen=True)
    optimizer_step: Count
    loss: float
    tokens: Count
    targets: Count | None = None
    tokens_per_s: float
    seconds: Seconds
    peers: list[Count] = []
    time: Seconds | None = None
    validation_loss: float | None = None
    busy_share: list[float | None] = []
    ending_share: list[float | None] = []
    joining_share: list[float | None] = []


class RecordedEvent(BaseModel):
    """One line of events.jsonl; `time` is in unix seconds."""

    model_config = ConfigDict(frozen=True)
    time: Seconds
    kind: str
    stage: int | None = None
    peer: str | None = None
    name: str | None = None
    text: str = ""


AnyLine = TypeVar("AnyLine", Line, RecordedEvent)


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells of it.

    Attributes:
        lines: by optimizer step
        events: by time
        about: the contents of run.json; empty if there is none
        num_unread: lines of the files that are none
        has_model: whether the run has reached its end
    """

    folder: Path
    lines: tuple[Line, ...]
    events: tuple[RecordedEvent, ...]
    about: dict[str, Any]
    num_unread: int
    has_model: bool

    @property
    def num_stages(self) -> int:
        """The stages that the lines tell of."""
        return max((len(line.peers) for line in self.lines), default=0)

    @cached_property
    def ends(self) -> list[float]:
        """When each step ended, in unix seconds; where times are missing, as if each step followed the one before."""
        first = self.lines[0]
        times = [first.seconds if first.time is None else first.time]
        for line in self.lines[1:]:
            times.append(times[-1] + line.seconds if line.time is None else max(line.time, times[-1]))
        return times

    @property
    def begin(self) -> float:
        """When the first step began, in unix seconds."""
        return self.ends[0] - self.lines[0].seconds

    @property
    def unit(self) -> tuple[str, float]:
        """The unit in which people read the run's time, and its seconds."""
        return ("minutes", 60.0) if self.ends[-1] - self.begin < 2 * HOUR_S else ("hours", HOUR_S)

    def elapsed(self, unix_s: float) -> float:
        """The time from the beginning of the run, in its unit."""
        return (unix_s - self.begin) / self.unit[1]

    @property
    def peer_hours(self) -> float:
        """The hours of all peers that served, while the run made steps, together; not those in which it was stopped."""
        return sum(sum(line.peers) * line.seconds for line in self.lines) / HOUR_S


def read_run(folder: Path) -> RecordedRun:
    """Read what a run's folder tells of it.

    Raises:
        UserError: there is no metrics.jsonl, no line in it, or it cannot be read
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name that of a run")
    lines, unread_lines = _read(folder / "metrics.jsonl", Line)
    if not lines:
        raise UserError(f"{folder / 'metrics.jsonl'} has no optimizer step: name the folder of a run that has begun")
    events, unread_events = _read(folder / "events.jsonl", RecordedEvent)
    return RecordedRun(
        folder=folder,
        lines=tuple(sorted(lines, key=lambda line: line.optimizer_step)),
        events=tuple(sorted(events, key=lambda event: event.time)),
        about=read_run_file(folder),
        num_unread=unread_lines + unread_events,
        has_model=(folder / "model").is_dir(),
    )


def _read(path: Path, kind: type[AnyLine]) -> tuple[Sequence[AnyLine], int]:
    """The lines of a file, and how many are none: the last one may be cut off."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    found, unread = [], 0
    for text in texts:
        try:
            found.append(kind.model_validate_json(text))
        except ValidationError:
            unread += 1
    return found, unread

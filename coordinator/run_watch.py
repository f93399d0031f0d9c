"""What the coordinator makes of announcements and progress: the state of the run, and one line a global step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high, median_low
from typing import Any

from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.position import Position, is_reached
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.wire.records import CoordinationRecord, ProgressRecord, StepReport

# A step's line waits this long for the validation of its weights.
VALIDATION_WAIT_S = 20.0
# What is asked of older ones is in metrics.jsonl.
LINES_KEPT = 1024
RECENT_STEPS = 3
# Who has served stage 0 so long ago may have left a record of what nobody else tells: it was killed, and its stage-mate
# is new. What it says is believed only as far as those who are there bear it out.
AUTHORS_REMEMBERED_S = 60.0


def step_line(
    step: int,
    global_step: int,
    loss: float,
    samples: int,
    seconds: float,
    sequence_length: int,
    peers: list[int],
    validation_loss: float | None,
    validation_samples: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl: losses in nats per token, times in seconds, peers a list by stage.

    Args:
        step: updates that the weights have had
        global_step: number of the global step that made the last of them; it never goes back, `step` may
    """
    tokens = samples * sequence_length
    line: dict[str, Any] = {
        "step": step,
        "loss": round(loss, 6),
        "samples": samples,
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "seconds": round(seconds, 4),
        "peers": peers,
        "global_step": global_step,
    }
    if validation_loss is not None:
        line |= {"validation_loss": round(validation_loss, 6), "validation_samples": validation_samples}
    return line


@dataclass
class RunWatch:
    """Merges what stage-0 peers report, as far as the run's other peers bear it out (policy/position.py).

    Attributes:
        lines: the newest ones; complete, in order, one a finished step; rewinds take some back
        coordination: what the coordinator of the newest term said last
    """

    manifest: RunManifest
    view: SwarmView
    lines: list[dict[str, Any]] = field(default_factory=list)
    current_samples: int = 0
    current_step: int = 0
    coordination: tuple[Term, CoordinationRecord] | None = None
    _reports: dict[int, tuple[StepReport, list[int], float]] = field(default_factory=dict)
    _validations: dict[int, dict[str, tuple[int, float]]] = field(default_factory=dict)
    _authors: dict[str, float] = field(default_factory=dict)  # when each was seen last
    _older_validation_loss: float | None = None  # the last one of lines that are not kept any more

    @property
    def step(self) -> int:
        """Finished steps: updates that the weights have had."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def born(self, updates: int) -> int | None:
        """The global step that the weights of so many updates were first there for; None if it is not known."""
        steps = (int(line["global_step"]) for line in self.lines if line["step"] == updates)
        return next((step + 1 for step in steps), None)

    def delivered(self) -> tuple[int, float]:
        """Samples of the last few steps, and the seconds that these took."""
        last = self.lines[-RECENT_STEPS:]
        return sum(line["samples"] for line in last), sum(line["seconds"] for line in last)

    @property
    def global_step(self) -> int:
        """Number of the last finished global step; -1 before the first."""
        return int(self.lines[-1]["global_step"]) if self.lines else -1

    def peers_by_stage(self) -> list[int]:
        return [len(self.view.serving(stage)) for stage in range(self.manifest.stages.count)]

    def observe(self, view: SwarmView, progress: Mapping[str, ProgressRecord], now: float) -> list[dict[str, Any]]:
        """Take in what the DHT says and return the lines of steps that are complete now."""
        self.view = view
        authors = sorted(peer.peer_id for peer in view.in_stage(0) if peer.state is not PeerState.JOINING)
        known = {author: progress[author] for author in authors if author in progress}
        if known:
            self.current_step = median_high(record.current.step for record in known.values())
        self.current_samples = sum(
            record.current.samples for record in known.values() if record.current.step == self.current_step
        )
        self._authors |= dict.fromkeys(authors, now)
        self._authors = {author: seen for author, seen in self._authors.items() if now - seen < AUTHORS_REMEMBERED_S}
        told = {author: progress[author] for author in sorted(self._authors) if author in progress}
        self._believe(told, now)
        for author, record in told.items():
            for validation in record.validations:
                if validation.step - 1 in self._reports:
                    self._validations.setdefault(validation.step, {})[author] = (
                        validation.samples,
                        validation.loss_sum,
                    )
        new = []
        while (line := self._next_line(now)) is not None:
            new.append(line)
            self.lines = [known for known in self.lines if known["step"] < line["step"]]
            self.lines.append(line)
            for old in self.lines[:-LINES_KEPT]:
                self._older_validation_loss = old.get("validation_loss", self._older_validation_loss)
            del self.lines[:-LINES_KEPT]
        self._reports = {step: known for step, known in self._reports.items() if step > self.global_step}
        # A line tells how the weights that its step led to did.
        self._validations = {step: known for step, known in self._validations.items() if step > self.global_step + 1}
        return new

    def _believe(self, known: Mapping[str, ProgressRecord], now: float) -> None:
        """Take over what stage-0 peers report of steps since the last one, if it is true."""
        told: dict[str, list[Position]] = {}
        reports: dict[Position, list[StepReport]] = {}
        last = Position(self.global_step + 1, self.step)
        if self._reports:
            last = _reached_by(self._reports[max(self._reports)][0])
        for author, record in known.items():
            for report in record.finished:
                told.setdefault(author, []).append(_reached_by(report))
                reports.setdefault(_reached_by(report), []).append(report)
        for position in sorted(reports):
            if position.step > last.step and is_reached(position, told, self.view, last):
                report = _middle(reports[position])
                self._reports[report.step] = (report, self.peers_by_stage(), now)
                last = position

    def _validation(self, step: int) -> tuple[float | None, int]:
        shares = self._validations.get(step, {}).values()
        samples = sum(count for count, _ in shares)
        return (sum(loss for _, loss in shares) / samples if samples else None), samples

    def _next_line(self, now: float) -> dict[str, Any] | None:
        later = [step for step in self._reports if step > self.global_step]
        if not later:
            return None
        report, peers, seen = self._reports[min(later)]
        loss, samples = self._validation(report.step + 1)
        training = self.manifest.training
        due = training.validation_every and (
            report.updates % training.validation_every == 0 or report.updates == training.steps
        )
        if due and samples < training.validation_samples and now < seen + VALIDATION_WAIT_S:
            return None
        return step_line(
            report.updates,
            report.step,
            report.loss,
            report.samples,
            report.seconds,
            self.manifest.data.sequence_length,
            peers,
            loss,
            samples,
        )

    def summary(self) -> dict[str, Any]:
        """What `status` shows: the run as a whole, its stages and their peers."""
        last = self.lines[-1] if self.lines else None
        return {
            "name": self.manifest.name,
            "manifest": self.manifest.hash,
            "step": self.step,
            "steps": self.manifest.training.steps,
            "samples_in_step": self.current_samples,
            "global_batch_size": self.manifest.training.global_batch_size,
            "loss": last["loss"] if last else None,
            "tokens_per_s": last["tokens_per_s"] if last else None,
            "validation_loss": next(
                (line["validation_loss"] for line in reversed(self.lines) if "validation_loss" in line),
                self._older_validation_loss,
            ),
            "coordinator": None if self.coordination is None else _coordinator(*self.coordination),
            "stages": [
                {
                    "stage": stage,
                    "peers": [
                        {
                            "peer": peer.peer_id,
                            "state": peer.state.value,
                            "step": peer.updates,
                            "note": peer.note,
                            "samples_per_s": round(peer.samples_per_s, 3),
                            "tokens_per_s": round(peer.samples_per_s * self.manifest.data.sequence_length, 1),
                            "queue": peer.queue,
                        }
                        for peer in self.view.in_stage(stage)
                    ],
                }
                for stage in range(self.manifest.stages.count)
            ],
        }


def _reached_by(report: StepReport) -> Position:
    return Position(report.step + 1, report.updates)


def _middle(reports: Sequence[StepReport]) -> StepReport:
    """What those who have told of a step so far agree on: losses differ in what each had heard of, or are made up."""
    return StepReport(
        step=reports[0].step,
        updates=reports[0].updates,
        samples=median_low(report.samples for report in reports),
        loss=median_low(report.loss for report in reports),
        seconds=median_low(report.seconds for report in reports),
    )


def _coordinator(term: Term, record: CoordinationRecord) -> dict[str, Any]:
    return {
        "peer": term.coordinator,
        "term": term.number,
        "decision": record.reason,
        "moves": [
            {"peer": order.peer, "from": order.from_stage, "to": order.to_stage, "reason": order.reason}
            for order in record.assignments
        ],
    }


class MetricsFile:
    """metrics.jsonl: one line a global step, flushed at once.

    Args:
        resume: keep the lines that are there, and add only later steps
    """

    def __init__(self, folder: Path, resume: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._lines = _whole_lines(self._path) if resume and self._path.exists() else []
        self._rewrite()

    @property
    def global_step(self) -> int:
        """Of the last line; -1 if there is none."""
        return int(self._lines[-1]["global_step"]) if self._lines else -1

    @property
    def step(self) -> int:
        """Of the last line; 0 if there is none."""
        return int(self._lines[-1]["step"]) if self._lines else 0

    def write(self, line: dict[str, Any]) -> bool:
        """Add a line; where the run has gone back, the lines of the steps that it gave up are removed.

        Returns:
            whether the line is a new one
        """
        if line["global_step"] <= self.global_step:
            return False
        kept = [known for known in self._lines if known["step"] < line["step"]]
        if len(kept) < len(self._lines):
            self._file.close()
            self._lines = kept
            self._rewrite()
        self._lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return True

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(json.dumps(known) + "\n" for known in self._lines))
        partial.replace(self._path)
        self._file = self._path.open("a")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """All lines but a last one that was cut off when its writer was killed."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines

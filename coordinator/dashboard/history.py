"""The curves of a run: loss, validation loss and throughput of all its steps, in a bounded number of points."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from coordinator.watch.metrics_file import MetricsLine

MAX_POINTS = 600


@dataclass(slots=True)
class _Point:
    """The optimizer steps of one stretch: their number, sums over them, and what came last."""

    num_steps: int = 0
    loss_sum: float = 0.0
    tokens_per_s_sum: float = 0.0
    hours: float = 0.0
    validation_loss: float | None = None

    def add(self, other: _Point) -> None:
        """Take in a later stretch."""
        self.num_steps += other.num_steps
        self.loss_sum += other.loss_sum
        self.tokens_per_s_sum += other.tokens_per_s_sum
        self.hours = other.hours
        self.validation_loss = self.validation_loss if other.validation_loss is None else other.validation_loss


class History:
    """Means over stretches of optimizer steps, of equal length, which grows with the run.

    Attributes:
        training_s: how long all steps took, those included that a rewind took back
    """

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._steps_per_point = 1
        self._round_number = -1
        self._num_returns = 0
        self.training_s = 0.0

    def add(self, lines: Collection[MetricsLine], returns: tuple[int, int] = (0, 0)) -> None:
        """Take in the lines that are new; a rewind takes points back.

        Args:
            returns: see RunWatch
        """
        if returns[0] != self._num_returns:
            self._num_returns = returns[0]
            held = (line["round"] for line in lines if line["optimizer_step"] <= returns[1])
            self._round_number = max(held, default=-1)
        for line in lines:
            if line["round"] <= self._round_number:
                continue
            self._round_number = line["round"]
            self.training_s += line["seconds"]
            at = line["optimizer_step"] // self._steps_per_point
            for later in [known for known in self._points if known > at]:
                del self._points[later]
            self._points.setdefault(at, _Point()).add(
                _Point(
                    num_steps=1,
                    loss_sum=line["loss"],
                    tokens_per_s_sum=line["tokens_per_s"],
                    hours=self.training_s / 3600,
                    validation_loss=line.get("validation_loss"),
                )
            )
            if len(self._points) > MAX_POINTS:
                self._merge()

    def _merge(self) -> None:
        points, self._points = self._points, {}
        self._steps_per_point *= 2
        for at, point in sorted(points.items()):
            self._points.setdefault(at // 2, _Point()).add(point)

    def points(self) -> dict[str, list[float | None]]:
        """Hours, loss, validation loss (or null) and tokens per second, by optimizer step."""
        return {
            str(at * self._steps_per_point): [
                round(point.hours, 4),
                round(point.loss_sum / point.num_steps, 4),
                None if point.validation_loss is None else round(point.validation_loss, 4),
                round(point.tokens_per_s_sum / point.num_steps),
            ]
            for at, point in sorted(self._points.items())
        }

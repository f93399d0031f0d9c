"""How many times as many steps each way to train takes to the same loss: what was measured, from step_factors.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import inf, log
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from coordinator.yaml_text import parse_yaml
from swarm_peer.settings import Count, Section

Part = Literal["mode", "activations", "gradients", "averaging", "boundary", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
# Factors are against a way with these values.
REFERENCE: Mapping[Part, str] = {
    "mode": "synchronous",
    "activations": "none",
    "gradients": "none",
    "averaging": "none",
    "boundary": "none",
    "optimizer": "adamw",
}
# A figure without an interval is taken to be this much off, to either side (see step_factors.yaml).
UNKNOWN_SPREAD = 0.1


class Interval(NamedTuple):
    """A number that is not known exactly."""

    value: float
    low: float
    high: float

    def times(self, other: Interval) -> Interval:
        """The product of two positive numbers, which are off independently or not."""
        return Interval(self.value * other.value, self.low * other.low, self.high * other.high)

    def over(self, other: Interval) -> Interval:
        """The quotient of two positive numbers."""
        return Interval(self.value / other.value, self.low / other.high, self.high / other.low)


EXACTLY_ONE = Interval(1.0, 1.0, 1.0)


class StepFactor(Section):
    """One entry of step_factors.yaml, which describes the fields."""

    part: Part
    value: str
    factor: float | None = Field(None, gt=0)
    loss: float | None = Field(None, gt=-1)
    slope: float | None = Field(None, gt=0)
    low: float | None = None
    high: float | None = None
    parameters: float = Field(gt=0)
    seeds: Count | None = Field(None, ge=1)
    members: Count | None = Field(None, ge=2)
    beside: dict[Part, str] = Field(default_factory=dict)
    outer: tuple[float, float] | None = None
    source: str

    @model_validator(mode="after")
    def _is_one_figure(self) -> StepFactor:
        name = f"{self.part} {self.value}"
        if (self.factor is None) != (self.loss is not None) or (self.loss is None) != (self.slope is None):
            raise ValueError(f"{name}: give factor, or loss and slope")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{name}: give both of low and high, or none")
        if self.low is not None and self.high is not None and not self.low <= self._figure <= self.high:
            raise ValueError(f"{name}: {self._figure} is not between low={self.low} and high={self.high}")
        return self

    @property
    def _figure(self) -> float:
        figure = self.loss if self.factor is None else self.factor
        assert figure is not None, "one of them is given"
        return figure

    @property
    def steps(self) -> Interval:
        """Times as many steps as the reference takes."""
        value = self._in_steps(self._figure)
        if self.low is None or self.high is None:
            return Interval(value, value * (1 - UNKNOWN_SPREAD), value * (1 + UNKNOWN_SPREAD))
        return Interval(value, self._in_steps(self.low), self._in_steps(self.high))

    def _in_steps(self, figure: float) -> float:
        return figure if self.slope is None else float((1 + figure) ** (1 / self.slope))

    @property
    def known_from(self) -> str:
        """Where the figure is from, in a few words."""
        if self.seeds is None:
            return f"published, {_in_words(self.parameters)}"
        return f"{_in_words(self.parameters)}, {self.seeds} seed{'s' if self.seeds > 1 else ''}"


def _in_words(parameters: float) -> str:
    return f"{parameters / 1e9:g} B" if parameters >= 1e9 else f"{parameters / 1e6:g} M"


@cache
def step_factors() -> tuple[StepFactor, ...]:
    """All entries of step_factors.yaml."""
    content = parse_yaml(Path(__file__).with_name("step_factors.yaml").read_text(encoding="utf-8"))
    return tuple(StepFactor.model_validate(entry) for entry in content)


class Way(NamedTuple):
    """A way to train, as far as its steps depend on it.

    Attributes:
        parts: the value of each part, as step_factors.yaml has it
        outer: averaging.outer_learning_rate and averaging.outer_momentum
        members: the most peers of a stage that average
        parameters: of the whole model
    """

    parts: Mapping[Part, str]
    outer: tuple[float, float]
    members: int
    parameters: float


def find_factor(way: Way, part: Part) -> StepFactor | None:
    """The entry for one part of a way that was measured nearest to it; None if there is none.

    The nearest is that of as few members as do, then of the nearest size, then of most seeds.
    """
    known = [entry for entry in step_factors() if entry.part == part and _holds_for(entry, way)]
    return min(known, key=lambda entry: _distance(entry, way), default=None)


def known_periods(way: Way) -> dict[str, tuple[float, float]]:
    """The periods of which something is known, and the outer steps with which they were measured nearest to a way."""
    found: dict[str, tuple[float, float]] = {}
    periodic = [entry for entry in step_factors() if entry.part == "mode" and entry.outer is not None]
    for entry in sorted(periodic, key=lambda entry: (way.members > (entry.members or inf), _distance(entry, way))):
        if entry.outer is not None:
            found.setdefault(entry.value, entry.outer)
    return found


def _holds_for(entry: StepFactor, way: Way) -> bool:
    return (
        entry.value == way.parts[entry.part]
        and all(way.parts[other].startswith(value) for other, value in entry.beside.items())
        and way.members <= (entry.members or inf)
        and entry.outer in (None, way.outer)
    )


def _distance(entry: StepFactor, way: Way) -> tuple[float, float, int]:
    return entry.members or inf, abs(log(entry.parameters / way.parameters)), -(entry.seeds or 0)


def relative_steps(way: Way, base: Way) -> tuple[Interval | None, list[StepFactor]]:
    """Times as many steps as another way takes to the same loss, and what that is known from; None if it is not known.

    Parts that both have in common are left out.
    """
    steps, sources = EXACTLY_ONE, []
    for part in PARTS:
        mine, its = find_factor(way, part), find_factor(base, part)
        if way.parts[part] == base.parts[part] and mine is its:
            continue
        for each, found, is_base in ((way, mine, False), (base, its, True)):
            if found is not None:
                steps = steps.over(found.steps) if is_base else steps.times(found.steps)
                sources.append(found)
            elif each.parts[part] != REFERENCE[part]:
                return None, sources
    return steps, sources

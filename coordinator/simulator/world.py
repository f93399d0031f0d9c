"""The machines of a simulation, drawn from its seed before anything happens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, Token

from swarm_peer.errors import UserError


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of numbers, written as `constant:1`, `uniform:0.5,2`, `lognormal:1,0.35` or `choice:1,2,4`.

    A lognormal one has its median and the deviation of its logarithm.
    """

    kind: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(f'{value:g}' for value in self.values)}"

    @classmethod
    def parse(cls, text: str, option: str = "value") -> Distribution:
        """Read a distribution as it is written; `option` names it in errors.

        Raises:
            UserError: it is none
        """
        kind, _, rest = text.partition(":")
        try:
            values = tuple(float(value) for value in rest.split(","))
        except ValueError:
            values = ()
        num_values = {"constant": 1, "uniform": 2, "lognormal": 2, "choice": len(values)}.get(kind)
        if not values or num_values != len(values) or not all(math.isfinite(v) and v >= 0 for v in values):
            raise UserError(
                f"{option} {text!r}: expected constant:X, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA or choice:X,Y,..."
            )
        return cls(kind, values)

    def draw(self, rng: random.Random) -> float:
        """Draw one number."""
        first, last = self.values[0], self.values[-1]
        if self.kind == "constant":
            return first
        if self.kind == "uniform":
            return rng.uniform(first, last)
        if self.kind == "lognormal":
            return first * math.exp(last * rng.gauss(0.0, 1.0))
        return rng.choice(self.values)


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the link of a peer.

    Attributes:
        too_large: the stages that it has no memory for
        is_closed: whether its router lets in no other closed machine, and nobody carries their connections
    """

    work_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: float = 0.0
    latency_s: float = 0.0
    too_large: tuple[int, ...] = ()
    is_closed: bool = False


def _typed(_: type, tokens: Sequence[Token]) -> Distribution:
    return Distribution.parse(tokens[0].value, tokens[0].keyword or "value")


Typed = Annotated[Distribution, Parameter(converter=_typed, accepts_keys=False, n_tokens=1)]


@dataclass(frozen=True, kw_only=True)
class Population:
    """Where the peers' machines are drawn from. A machine is the same in every simulation of one seed.

    Attributes:
        speed: Work per second of a machine; a stage of cost 1 takes 1 for a sample.
        bandwidth_mbps: Bandwidth of a machine, in Mb/s.
        memory_gb: Memory of a machine; 0 for enough.
        latency_s: Latency of a machine, half at either end of a link.
        closed_share: Share of the machines of which no two have a way to each other.
    """

    speed: Typed = Distribution("lognormal", (1.0, 0.35))
    bandwidth_mbps: Typed = Distribution("constant", (200.0,))
    memory_gb: Typed = Distribution("constant", (0.0,))
    latency_s: Typed = Distribution("constant", (0.05,))
    closed_share: float = 0.0

    def machine(self, name: str, seed: int) -> Machine:
        """Draw the machine of this name."""
        rng = random.Random(f"machine {seed} {name}")
        return Machine(
            max(self.speed.draw(rng), 1e-6),
            max(self.bandwidth_mbps.draw(rng), 1e-6) * 1e6 / 8,
            self.memory_gb.draw(rng) * 1e9,
            self.latency_s.draw(rng),
            is_closed=rng.random() < self.closed_share,
        )

"""The machines of a simulation, drawn from its seed before anything happens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from swarm_peer.errors import UserError


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of numbers, written as `constant:1`, `uniform:0.5,2`, `lognormal:1,0.35` or `choice:1,2,4`.

    A lognormal one has its median and the deviation of its logarithm.
    """

    kind: str
    values: tuple[float, ...]

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
    """The device and the link of a peer."""

    work_per_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Population:
    """How machines are drawn. A machine is the same in every simulation of one seed."""

    speed: Distribution = Distribution("lognormal", (1.0, 0.35))
    bandwidth_mbps: Distribution = Distribution("constant", (200.0,))
    memory_gb: Distribution = Distribution("constant", (0.0,))
    latency_s: Distribution = Distribution("constant", (0.05,))

    def machine(self, name: str, seed: int) -> Machine:
        """Draw the machine of this name."""
        rng = random.Random(f"machine {seed} {name}")
        return Machine(
            max(self.speed.draw(rng), 1e-6),
            max(self.bandwidth_mbps.draw(rng), 1e-6) * 1e6 / 8,
            self.memory_gb.draw(rng) * 1e9,
            self.latency_s.draw(rng),
        )

"""The types of fields that peers fill in: all are bounded, and checked when a record or message arrives."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, Field

# Unix seconds.
Seconds = Annotated[int, Field(ge=0, lt=2**40)]
# Bounded, so that sums of what peers report stay finite.
FiniteFloat = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
# The largest loss of a microbatch, and of a sample on average. The sum over as many samples as a count may have still
# goes into a record.
MAX_LOSS = 1e15
LossSum = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
# The smallest speed and the shortest time that are not 0: what divides by them stays finite, too.
LEAST_MEASURED = 1e-9


def _check_measured(value: float) -> float:
    if 0 < value < LEAST_MEASURED:
        raise ValueError(f"neither 0 nor at least {LEAST_MEASURED}")
    return value


Measured = Annotated[NonNegativeFloat, AfterValidator(_check_measured)]
Percent = Annotated[int, Field(ge=0, le=100)]


def _check_shares(shares: tuple[int, int, int]) -> tuple[int, int, int]:
    if sum(shares) > 100:
        raise ValueError(f"shares of time that are {sum(shares)} percent together")
    return shares


def _check_metrics_address(value: str) -> str:
    if value:
        host, _, port = value.rpartition(":")
        # A name would be looked up, and could lead anywhere.
        address = ip_address(host.strip("[]"))
        known = f"[{address}]" if address.version == 6 else str(address)
        if f"{known}:{int(port)}" != value or "%" in value or not 0 < int(port) < 2**16:
            raise ValueError("not IP:PORT")
    return value


TimePercent = Annotated[tuple[Percent, Percent, Percent], AfterValidator(_check_shares)]
MetricsAddress = Annotated[str, Field(max_length=64), AfterValidator(_check_metrics_address)]
MAX_ROUNDS = 2**40
RoundNumber = Annotated[int, Field(ge=0, lt=MAX_ROUNDS)]
OptimizerStep = Annotated[int, Field(ge=0, lt=MAX_ROUNDS)]
MAX_SAMPLES = 2**40
Samples = Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
# Unix milliseconds; 0 if not known.
Incarnation = Annotated[int, Field(ge=0, lt=2**53)]

"""Options of `swarm-coordinator simulate`, as typed. Imports nothing heavy: the command line is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

RoutingName = Literal["own", "uniform", "jsed", "po2"]
Numbers = Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative="")]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The stages of a simulated run.

    Attributes:
        num_stages: Pipeline stages.
        stage_costs: Work of a sample in each stage, relative to the others; all 1 if not given.
        stage_memory_gb: Gigabytes of memory that a peer needs to serve each stage; no limit if not given.
        state_gb: Gigabytes of weights and optimizer state of a stage, which a newcomer or mover downloads.
        overhead_s: Seconds that joining or moving takes besides.
        min_replicas: Peers that go on serving a stage when one of them moves away.
        make_before_break: Movers serve their former stage while they download.
    """

    num_stages: Annotated[int, Parameter(name="--stages")]
    stage_costs: Numbers = ()
    stage_memory_gb: Numbers = ()
    state_gb: float = 1.0
    overhead_s: float = 5.0
    min_replicas: int = 1
    make_before_break: Annotated[bool, Parameter(negative="")] = False


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """How peers come and go.

    Attributes:
        trace: File of time_ms,add|remove,machine or date, time, live count of machines; one is drawn if not given.
        num_peers: How many peers a drawn trace has, on the average.
        hours: How long a drawn trace lasts, in hours.
        mean_lifetime_s: Mean lifetime of the peers of a drawn trace, in seconds.
    """

    trace: Path | None = None
    num_peers: Annotated[int | None, Parameter(name="--peers")] = None
    hours: float = 24.0
    mean_lifetime_s: float = 14400.0


@dataclass(frozen=True, kw_only=True)
class MicrobatchOptions:
    """How microbatches are launched, sent and counted, at --level microbatch.

    Attributes:
        routing: own (what runs live), uniform, jsed (shortest expected delay) or po2 (two random choices).
        window: Microbatches in flight per stage-0 peer; if not given, by the live rule, which goes by the round trip.
        window_limit: The largest window of that rule.
        capacity: Microbatches that a peer of a later stage holds at once before it is busy; any number if not given.
        activation_bytes: Bytes of a microbatch from one stage to the next, and as many back.
        global_batch: Microbatches of a round, at whose end all is drained; without it, all goes on for ever.
        averaging_s: Seconds from the last gradient of a round until the next one begins; nothing is computed meanwhile.
    """

    routing: RoutingName = "own"
    window: int | None = None
    window_limit: int = 64
    capacity: int | None = None
    activation_bytes: float = 4e6
    global_batch: int | None = None
    averaging_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How closely and under which policy a swarm is simulated.

    Attributes:
        rebalance: live (what runs live), events (the same search of moves, by a policy that knows everything at once),
            none, or seconds between moves of the paper's protocol, such as 300 or 60.
        level: flow for up to thousands of peers, microbatch for tens.
        network: Latencies (and bandwidths) of places: a table of regions, or a matrix of round trips in seconds.
    """

    rebalance: str = "live"
    level: Literal["flow", "microbatch"] = "flow"
    network: Path | None = None

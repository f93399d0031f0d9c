"""Links between peers, and the transfers that share them: by each peer's latency and bandwidth, or by matrices."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter, deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import simpy

from coordinator.simulator.world import Machine
from swarm_peer.errors import UserError

# Latencies in seconds and bandwidths in bytes/s, from each place to each.
Places = tuple[list[list[float]], list[list[float]]]


class Bandwidths(NamedTuple):
    """In bytes/s: of the sender's link, of the receiver's, and between their places."""

    up: float
    down: float
    between: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """How long it is from peer to peer, and how fast.

    Attributes:
        machines: of the peers that are there
        places: latencies in seconds and bandwidths in bytes/s (infinite where the peers' own count) between places; a
            peer's name and the seed give its place. None: each peer's own latency counts, half at either end.
    """

    machines: Mapping[str, Machine]
    places: Places | None = None
    seed: int = 0

    def latency_s(self, sender: str, receiver: str) -> float:
        """Seconds that the first byte takes."""
        if self.places is not None:
            return self._between(self.places[0], sender, receiver)
        ends = (self.machines[peer_id] for peer_id in (sender, receiver) if peer_id in self.machines)
        return sum(machine.latency_s for machine in ends) / 2

    def bandwidths(self, sender: str, receiver: str) -> Bandwidths:
        """The bandwidths on the way; a peer that has gone is no limit."""
        up, down = (
            self.machines[peer_id].bandwidth_bytes_per_s if peer_id in self.machines else math.inf
            for peer_id in (sender, receiver)
        )
        return Bandwidths(
            up, down, math.inf if self.places is None else self._between(self.places[1], sender, receiver)
        )

    def _between(self, matrix: list[list[float]], sender: str, receiver: str) -> float:
        here, there = (zlib.crc32(f"{self.seed} {peer_id}".encode()) % len(matrix) for peer_id in (sender, receiver))
        return matrix[here][there]


@dataclass(slots=True)
class _Transfer:
    left_bytes: float
    bandwidths: Bandwidths
    sent: simpy.Event


class Links:
    """The links of a simulation, which transfers share.

    A link sends and receives at the same time. Each direction of it divides its bandwidth evenly among the peers that
    it has transfers with, as TCP roughly does; those between the same two peers follow each other, as they do live.
    """

    def __init__(self, env: simpy.Environment, network: Network):
        self._env = env
        self._network = network
        self._queues: dict[tuple[str, str], deque[_Transfer]] = {}
        self._rates: dict[tuple[str, str], float] = {}  # of the first transfer of each queue, since `_planned_s`
        self._planned_s = 0.0
        self._num_plans = 0

    def transfer(self, sender: str, receiver: str, num_bytes: float) -> Generator[simpy.Event, Any, None]:
        """Wait until a message of so many bytes has arrived."""
        bandwidths = self._network.bandwidths(sender, receiver)
        if num_bytes and min(bandwidths) < math.inf:
            transfer = _Transfer(num_bytes, bandwidths, self._env.event())
            self._advance()
            self._queues.setdefault((sender, receiver), deque()).append(transfer)
            self._plan()
            yield transfer.sent
        yield self._env.timeout(self._network.latency_s(sender, receiver))

    def _advance(self) -> None:
        """Take note of what has been sent since the last plan."""
        for pair, rate in self._rates.items():
            self._queues[pair][0].left_bytes -= rate * (self._env.now - self._planned_s)

    def _plan(self) -> None:
        """Divide the links among the transfers of now, until the first of these is over."""
        senders, receivers = (Counter(ends) for ends in zip(*self._queues, strict=True)) if self._queues else ({}, {})
        self._rates = {}
        for (sender, receiver), queue in self._queues.items():
            up, down, between = queue[0].bandwidths
            self._rates[sender, receiver] = min(up / senders[sender], down / receivers[receiver], between)
        self._planned_s = self._env.now
        self._num_plans += 1
        if self._rates:
            ends_s = {pair: max(self._queues[pair][0].left_bytes, 0.0) / rate for pair, rate in self._rates.items()}
            first = min(ends_s, key=lambda pair: ends_s[pair])
            self._env.process(self._end(first, ends_s[first], self._num_plans))

    def _end(self, pair: tuple[str, str], after_s: float, plan: int) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(after_s)
        if plan != self._num_plans:
            return
        self._advance()
        self._queues[pair].popleft().sent.succeed()
        if not self._queues[pair]:
            del self._queues[pair]
        self._plan()


def read_places(path: Path) -> Places:
    """Read a table `region_a,region_b,delay_ms,bandwidth_gbps`, or a square matrix of round trips in seconds.

    In a matrix 0 off the diagonal means not measured, and the median is taken. Within a place there is no latency in a
    table, and the least measured one in a matrix, each row of which is one person's device.

    Raises:
        UserError: it is neither
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and "," in lines[0]:
            return _from_table([line.split(",") for line in lines[1:]])
        return _from_matrix([[float(value) for value in line.split()] for line in lines])
    except (OSError, ValueError, IndexError) as error:
        raise UserError(
            f"--network {path}: {error}; expected region_a,region_b,delay_ms,bandwidth_gbps, or a square matrix of "
            "round trips in seconds"
        ) from error


def _from_table(rows: list[list[str]]) -> Places:
    names = sorted({row[0] for row in rows} | {row[1] for row in rows})
    latencies = [[0.0] * len(names) for _ in names]
    bandwidths = [[float("inf")] * len(names) for _ in names]
    for row in rows:
        a, b = names.index(row[0]), names.index(row[1])
        latencies[a][b] = latencies[b][a] = float(row[2]) / 1000
        bandwidths[a][b] = bandwidths[b][a] = float(row[3]) * 1e9 / 8
        if not (0 <= latencies[a][b] < math.inf and bandwidths[a][b] > 0):
            raise ValueError(f"a delay of {row[2]} ms and a bandwidth of {row[3]} Gb/s")
    if not rows:
        raise ValueError("no rows below the header")
    known = {frozenset(row[:2]) for row in rows}
    missing = [pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in known]
    if missing:
        raise ValueError(f"no row for {' and '.join(missing[0])}")
    return latencies, bandwidths


def _from_matrix(rows: list[list[float]]) -> Places:
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{len(rows)} rows, and not all as long")
    known = sorted(value for row in rows for value in row if value > 0)
    if not known:
        raise ValueError("nothing above 0")
    median = known[len(known) // 2]
    latencies = [
        [(known[0] if i == j else value if value > 0 else median) / 2 for j, value in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    return latencies, [[float("inf")] * len(rows) for _ in rows]

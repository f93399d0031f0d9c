"""Links between peers: one latency and bandwidth for each peer, or matrices of places."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.simulator.world import Machine
from swarm_peer.errors import UserError

# Latencies in seconds and bandwidths in bytes/s, from each place to each.
Places = tuple[list[list[float]], list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class Network:
    """How long transfers take from peer to peer.

    Attributes:
        machines: of the peers that are there
        places: latencies in seconds and bandwidths in bytes/s (infinite where the peers' own count) between places; a
            peer's name and the seed give its place. None: each peer's own latency counts, half at either end.
    """

    machines: Mapping[str, Machine]
    places: Places | None = None
    seed: int = 0

    def transfer_s(self, sender: str, receiver: str, num_bytes: float) -> float:
        """Seconds until a message of so many bytes has arrived."""
        ends = [self.machines[peer_id] for peer_id in (sender, receiver) if peer_id in self.machines]
        bandwidth = min((machine.bandwidth_bytes_per_s for machine in ends), default=float("inf"))
        latency_s = sum(machine.latency_s for machine in ends) / 2
        if self.places is not None:
            latencies, bandwidths = self.places
            here, there = self._place(sender, len(latencies)), self._place(receiver, len(latencies))
            latency_s, bandwidth = latencies[here][there], min(bandwidth, bandwidths[here][there])
        return latency_s + num_bytes / bandwidth

    def _place(self, peer_id: str, num_places: int) -> int:
        return zlib.crc32(f"{self.seed} {peer_id}".encode()) % num_places


def read_places(path: Path) -> Places:
    """Read a table `region_a,region_b,delay_ms,bandwidth_gbps`, or a square matrix of round trips in seconds.

    In a matrix 0 off the diagonal means not measured, and the median is taken. Within a place there is no latency in a
    table, and the least measured one in a matrix, each row of which is one person's device.

    Raises:
        UserError: it is neither
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
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

"""How many microbatches stage 0 keeps in flight: enough to hide latency, not so many that memory goes."""

from __future__ import annotations

import math
from collections import deque

# Twice what fills an idle pipeline: microbatches meet others in the later stages' queues, and with none to spare this
# device waits whenever one is late. Measured with 3 stages that are just balanced: 10 % more samples/s than with 1.
SPARE = 2.0


class InFlightWindow:
    """Little's law on the *shortest* round trip of late: one that waited in queues would ask for longer queues.

    Args:
        limit: the most microbatches that memory allows
        memory_s: how long a measurement counts
    """

    def __init__(self, limit: int, memory_s: float = 60.0):
        self.limit = limit
        self._memory_s = memory_s
        self._round_trips: deque[tuple[float, float]] = deque()  # (time, seconds), seconds ascending
        self._compute_s: float | None = None

    def observe(self, round_trip_s: float, compute_s: float, now: float) -> None:
        """Record one microbatch.

        Args:
            round_trip_s: from sending the activations to having the gradient
            compute_s: what this peer itself computed on it, forward and backward
        """
        while self._round_trips and self._round_trips[-1][1] >= round_trip_s:
            self._round_trips.pop()
        self._round_trips.append((now, round_trip_s))
        while self._round_trips[0][0] < now - self._memory_s:
            self._round_trips.popleft()
        self._compute_s = compute_s if self._compute_s is None else 0.9 * self._compute_s + 0.1 * compute_s

    def size(self) -> int:
        """Microbatches to keep in flight: one that is computed here, and SPARE times those that fit a round trip."""
        if not self._round_trips or not self._compute_s:
            return min(2, self.limit)
        away = math.ceil(SPARE * self._round_trips[0][1] / self._compute_s)
        return max(1, min(1 + away, self.limit))

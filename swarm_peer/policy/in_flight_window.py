"""How many microbatches stage 0 keeps in flight: enough to hide latency, few enough for memory."""

from __future__ import annotations

import math
from collections import deque

# Microbatches in flight, as a multiple of those that fill an idle pipeline. Microbatches wait in the queues of later
# stages, and without spare ones this device idles whenever one is late. With 3 well-balanced stages, 2 was measured to
# give 10 % more samples/s than 1.
SPARE = 2.0


class InFlightWindow:
    """The number of microbatches in flight, by Little's law on the *shortest* recent round trip.

    A longer round trip includes waiting in queues, and would only make these queues longer.

    Args:
        limit: the most microbatches that memory allows
        memory_s: for how long a measurement counts
    """

    def __init__(self, limit: int, memory_s: float = 60.0):
        self.limit = limit
        self._memory_s = memory_s
        self._round_trips: deque[tuple[float, float]] = deque()  # (time, seconds), seconds ascending
        self._compute_s: float | None = None

    def observe(self, round_trip_s: float, compute_s: float, now: float) -> None:
        """Record one microbatch.

        Args:
            round_trip_s: from sending the activations to receiving the gradient
            compute_s: this peer's own compute, forward and backward
        """
        while self._round_trips and self._round_trips[-1][1] >= round_trip_s:
            self._round_trips.pop()
        self._round_trips.append((now, round_trip_s))
        while self._round_trips[0][0] < now - self._memory_s:
            self._round_trips.popleft()
        self._compute_s = compute_s if self._compute_s is None else 0.9 * self._compute_s + 0.1 * compute_s

    def size(self) -> int:
        """Microbatches to keep in flight: one in compute here, and SPARE times as many as fit into a round trip."""
        if not self._round_trips or not self._compute_s:
            return min(2, self.limit)
        away = math.ceil(SPARE * self._round_trips[0][1] / self._compute_s)
        return max(1, min(1 + away, self.limit))

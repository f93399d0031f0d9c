"""How long the stages keep the peers that they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# How far back comings and goings count.
REMEMBERED_S = 3600.0
# The expected time between two changes of a stage before anything is known; no estimate is longer.
QUIET_S = 900.0
# The weight of that expectation, in changes of a stage.
EXPECTED_CHANGES = 1.0


class ChurnMeter:
    """Counts the moments at which peers have come or gone. Any number of peers that go at once make one moment."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None
        self._begun_s = 0.0
        self._moments: deque[float] = deque()

    def observe(self, members: Iterable[str], now_s: float) -> None:
        """Compare the peers with those of the last call, and record a moment if they differ. To be called every view.

        Args:
            members: names of all peers; a peer that moves keeps its name
        """
        known = frozenset(members)
        if self._known is None:
            self._begun_s = now_s
        elif known != self._known:
            self._moments.append(now_s)
        self._known = known
        while self._moments and self._moments[0] < now_s - REMEMBERED_S:
            self._moments.popleft()

    def horizon_s(self, num_stages: int, now_s: float) -> float:
        """The expected time between two changes of one stage: about as long as a move is of use."""
        watched_s = min(now_s - self._begun_s, REMEMBERED_S)
        changes = len(self._moments) / num_stages
        return min(QUIET_S, (QUIET_S * EXPECTED_CHANGES + watched_s) / (EXPECTED_CHANGES + changes))

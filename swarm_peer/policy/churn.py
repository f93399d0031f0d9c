"""How long the stages stay as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# How far back comings and goings count.
REMEMBERED_S = 3600.0
# What is expected of a stage before anything is known, and never more than that: a change in a quarter of an hour.
QUIET_S = 900.0
# For how many changes of a stage that expectation counts.
EXPECTED_CHANGES = 1.0


class ChurnMeter:
    """Counts the moments at which peers have come or gone. Any number that go at once are one moment."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None
        self._begun_s = 0.0
        self._moments: deque[float] = deque()

    def observe(self, members: Iterable[str], now_s: float) -> None:
        """To be called with every view; who has come or gone since the last one is taken to have done so now.

        Args:
            members: names of all peers, each of which it keeps when it moves
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
        """The time between two changes of one stage: about as long as it pays to have evened the stages out."""
        watched_s = min(now_s - self._begun_s, REMEMBERED_S)
        changes = len(self._moments) / num_stages
        return min(QUIET_S, (QUIET_S * EXPECTED_CHANGES + watched_s) / (EXPECTED_CHANGES + changes))

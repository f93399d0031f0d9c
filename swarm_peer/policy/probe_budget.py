"""How many bytes a peer spends on measuring links for others: so few that nobody can use it as a server for that."""

from __future__ import annotations

from collections import deque

# Both directions count together. One caller may have 4 MiB each way.
CALLER_BYTES = 8 * 2**20
ALL_BYTES = 16 * 2**20
PERIOD_S = 60.0
# A measurement counts as this at least, so that few are remembered.
LEAST_BYTES = 2**16


class ProbeBudget:
    """The bytes that a peer has spent for others within the last minute."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, str, int]] = deque()  # when, for whom and how many, the oldest first

    def take(self, now_s: float, caller: str, num_bytes: int) -> bool:
        """Spend bytes for a caller, if that many are left."""
        while self._spent and self._spent[0][0] <= now_s - PERIOD_S:
            self._spent.popleft()
        num_bytes = max(num_bytes, LEAST_BYTES)
        of_caller = sum(spent for _, who, spent in self._spent if who == caller)
        of_all = sum(spent for _, _, spent in self._spent)
        if of_caller + num_bytes > CALLER_BYTES or of_all + num_bytes > ALL_BYTES:
            return False
        self._spent.append((now_s, caller, num_bytes))
        return True

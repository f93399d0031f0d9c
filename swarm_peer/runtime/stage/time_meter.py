"""How a peer spends its time in a stage, for people to see. Nothing is decided by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.view import TimeShares
from swarm_peer.runtime.context import Clock

# The shares are of at least the last minute, and of a whole phase where one is longer: long enough for some rounds.
WINDOW_S = 60.0
# Phases may change many times a second; marks closer than this are not kept.
MARK_EVERY_S = 1.0


class _Idle(Enum):
    """The things that an idle device waits for."""

    MICROBATCHES = 0
    ROUND_END = 1
    JOINING = 2


_IDLE_IN = {
    Phase.EMPTY: _Idle.JOINING,
    Phase.CATCHING_UP: _Idle.JOINING,
    Phase.OPEN: _Idle.MICROBATCHES,
    Phase.ENDING: _Idle.ROUND_END,
    Phase.LEFT: _Idle.ROUND_END,
}


class TimeMeter:
    """Adds up for what a replica's device has been idle, by the phase of the round. Belongs to the event loop's thread.

    Args:
        busy_s: seconds that the device has computed so far, the present job's until now included
    """

    def __init__(self, *, clock: Clock, busy_s: Callable[[], float]):
        self._clock = clock
        self._busy_s = busy_s
        self._phase = Phase.EMPTY
        self._seconds = dict.fromkeys(_Idle, 0.0)
        # Time, seconds that the device had computed, and seconds that it had been idle, at changes of phase.
        self._marks = deque([(clock.monotonic_s(), busy_s(), self._seconds)])
        self._last = self._marks[0]

    def enter(self, phase: Phase) -> None:
        """Note that the replica enters a phase."""
        self._last = now = self._measure()
        self._seconds, self._phase = now[2], phase
        if now[0] >= self._marks[-1][0] + MARK_EVERY_S:
            self._marks.append(now)
        while len(self._marks) > 1 and self._marks[1][0] <= now[0] - WINDOW_S:
            self._marks.popleft()

    def _measure(self) -> tuple[float, float, dict[_Idle, float]]:
        began_s, computed_s, _ = self._last
        now_s, busy_s = self._clock.monotonic_s(), self._busy_s()
        idle = _IDLE_IN[self._phase]
        idle_s = max(0.0, now_s - began_s - (busy_s - computed_s))
        return now_s, busy_s, self._seconds | {idle: self._seconds[idle] + idle_s}

    def shares(self) -> TimeShares | None:
        """How the time was spent lately; None if there is too little of it to say so."""
        now_s, busy_s, idle_s = self._measure()
        began_s, computed_s, idled_s = self._marks[0]
        if (seconds := now_s - began_s) < MARK_EVERY_S:
            return None

        def percent(part_s: float) -> int:
            return max(0, min(100, int(100 * part_s / seconds)))

        ending, joining = (percent(idle_s[idle] - idled_s[idle]) for idle in (_Idle.ROUND_END, _Idle.JOINING))
        return TimeShares(min(percent(busy_s - computed_s), 100 - ending - joining), ending, joining)

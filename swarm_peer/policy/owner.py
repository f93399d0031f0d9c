"""Whether a machine's owner lets its peer serve now: one decision for command, hours, other use and the daily limit.

Pure: local time, what was sent, and what is seen of the machine are arguments. How a paused peer behaves is not known
here (runtime/peer.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

DAY_S = 24 * 3600
# A machine is in use once it has been seen so for this long: a thumbnail that is drawn is no reason to leave a stage.
BUSY_AFTER_S = 4.0
# It is free again after this long: between two levels of a game its GPU is idle, too.
FREE_AFTER_S = 60.0
# Part of the daily limit that is left for what is sent while the peer hands over, and while it is paused.
RESERVED_SHARE = 0.02
_TIME = r"([01]?[0-9]|2[0-4])(?::([0-5][0-9]))?"


class Reason(str, Enum):
    """Why a peer is paused."""

    COMMAND = "command"
    DAILY_LIMIT = "daily_limit"
    HOURS = "hours"
    BUSY = "busy"


class Pause(NamedTuple):
    """That a peer is paused, with the reason, and in words that people read in `status` and on the page."""

    reason: Reason
    words: str


class Hours(NamedTuple):
    """The part of each day in which a peer may serve, in seconds since midnight; it may go on past midnight."""

    begin_s: int
    end_s: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read hours such as 22-7 or 8:30-17.

        Raises:
            ValueError: it is something else, or no part of a day
        """
        if (match := re.fullmatch(f"{_TIME}-{_TIME}", text)) is None:
            raise ValueError(f"expected two times of the day such as 22-7 or 8:30-17, got {text!r:.40}")
        begin, begin_minutes, end, end_minutes = (int(each or 0) for each in match.groups())
        begin_s, end_s = (hour * 3600 + minute * 60 for hour, minute in ((begin, begin_minutes), (end, end_minutes)))
        if max(begin_s, end_s) > DAY_S or begin_s % DAY_S == end_s % DAY_S:
            raise ValueError(f"{text} is no part of a day: name two times from 0 to 24, or leave it out for all day")
        return cls(begin_s % DAY_S, end_s % DAY_S)

    def include(self, second: float) -> bool:
        """Whether a time is within them, in seconds since midnight."""
        if self.begin_s < self.end_s:
            return self.begin_s <= second < self.end_s
        return second >= self.begin_s or second < self.end_s


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that the decision depends on.

    Attributes:
        day: the local date, in any form; it changes at midnight
        second: of that day, in local time
        is_told_to_pause: whether the owner has said so
        use: what else uses the machine, in words; empty if nothing is seen
        sent_bytes: on that day so far
        leaving_bytes: that the peer still sends if it is told to leave now, about
    """

    day: str = ""
    second: float = 0.0
    is_told_to_pause: bool = False
    use: str = ""
    sent_bytes: float = 0.0
    leaving_bytes: float = 0.0


class OwnerPolicy:
    """Decides from one look to the next. It remembers since when the machine is in use, and which day is used up.

    Attributes:
        spent_day: the last day on which the daily limit was reached; a new process goes on from that of the former one
    """

    def __init__(
        self, *, hours: Hours | None = None, max_sent_bytes_per_day: float | None = None, spent_day: str | None = None
    ):
        self._hours = hours
        self._max_sent_bytes = max_sent_bytes_per_day
        self.spent_day = spent_day
        self._use = ""  # the last that was seen
        self._in_use_since_s: float | None = None
        self._free_since_s: float | None = None
        self._is_in_use = False

    def decide(self, now_s: float, seen: Seen) -> Pause | None:
        """Whether the peer is to be paused now.

        Args:
            now_s: on a clock that never goes back
        """
        self._look_at_limit(seen)
        self._look_at_use(now_s, seen.use)
        if seen.is_told_to_pause:
            return Pause(Reason.COMMAND, "paused by its owner")
        hours = self._hours
        if self.spent_day == seen.day and self._max_sent_bytes is not None:
            # From midnight on, or later if that is not within the hours.
            back = "00:00" if hours is None or hours.include(0) else time_of_day(hours.begin_s)
            amount = f"{self._max_sent_bytes / 1e9:g} GB"
            return Pause(Reason.DAILY_LIMIT, f"paused until {back} (its {amount} of today are sent)")
        if hours is not None and not hours.include(seen.second):
            return Pause(Reason.HOURS, f"paused until {time_of_day(hours.begin_s)} (hours)")
        return Pause(Reason.BUSY, f"paused: {self._use}") if self._is_in_use else None

    def _look_at_limit(self, seen: Seen) -> None:
        if self._max_sent_bytes is None:
            return
        # The peer has to be gone before the limit is reached.
        if seen.sent_bytes + seen.leaving_bytes >= (1 - RESERVED_SHARE) * self._max_sent_bytes:
            self.spent_day = seen.day

    def _look_at_use(self, now_s: float, use: str) -> None:
        if use:
            self._use, self._free_since_s = use, None
            if self._in_use_since_s is None:
                self._in_use_since_s = now_s
            self._is_in_use = self._is_in_use or now_s - self._in_use_since_s >= BUSY_AFTER_S
            return
        self._in_use_since_s = None
        if self._free_since_s is None:
            self._free_since_s = now_s
        self._is_in_use = self._is_in_use and now_s - self._free_since_s < FREE_AFTER_S


def time_of_day(second: int) -> str:
    """A time of the day as people write it, such as 22:00."""
    return f"{second // 3600:02d}:{second % 3600 // 60:02d}"

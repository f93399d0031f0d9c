"""Counts what this peer exchanges with each of its neighbours, and how fast they answer, in the last minute or so."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# The last one or two periods of this length count.
PERIOD_S = 30.0
# A peer that hears of more in a period does not count the others: anybody may call it.
MAX_COUNTED = 1000


class Exchanged(NamedTuple):
    """The bytes that this peer exchanges with one neighbour, and how fast that one answers.

    Attributes:
        round_trip_s: of the call that it has answered fastest
        bytes_per_s: of tensors, both ways together
    """

    peer_id: str
    round_trip_s: float
    bytes_per_s: float


@dataclass(slots=True)
class _Sum:
    round_trip_s: float = math.inf
    num_bytes: int = 0


class ExchangedRecord:
    """Counts what is exchanged. Belongs to the event loop's thread.

    Args:
        now_s: a clock
    """

    def __init__(self, now_s: Callable[[], float]):
        self._now_s = now_s
        self._since_s = now_s()
        self._before: dict[str, _Sum] = {}
        self._before_s = 0.0  # how long that has lasted
        self._present: dict[str, _Sum] = {}

    def called(self, peer_id: str, round_trip_s: float, num_bytes: int) -> None:
        """Note a call that a peer has answered.

        Args:
            num_bytes: of the tensors of the call and its reply
        """
        if (found := self._sum_of(peer_id)) is not None:
            found.round_trip_s = min(found.round_trip_s, round_trip_s)
            found.num_bytes += num_bytes

    def answered(self, peer_id: str, num_bytes: int) -> None:
        """Note a call of a peer that was answered."""
        if num_bytes and (found := self._sum_of(peer_id)) is not None:
            found.num_bytes += num_bytes

    def _sum_of(self, peer_id: str) -> _Sum | None:
        self._turn()
        if peer_id not in self._present and len(self._present) >= MAX_COUNTED:
            return None
        return self._present.setdefault(peer_id, _Sum())

    def _turn(self) -> None:
        passed_s = self._now_s() - self._since_s
        if passed_s >= PERIOD_S:
            is_next = passed_s < 2 * PERIOD_S
            self._before, self._before_s = (self._present, passed_s) if is_next else ({}, 0.0)
            self._present, self._since_s = {}, self._now_s()

    def busiest(self, most: int) -> tuple[Exchanged, ...]:
        """Those with whom most bytes are exchanged, of those that have answered a call, the busiest first."""
        self._turn()
        seconds = self._now_s() - self._since_s + self._before_s
        found = []
        for peer_id in self._before.keys() | self._present.keys():
            sums = [each[peer_id] for each in (self._before, self._present) if peer_id in each]
            round_trip_s = min(each.round_trip_s for each in sums)
            if not math.isinf(round_trip_s) and seconds > 0:
                found.append(Exchanged(peer_id, round_trip_s, sum(each.num_bytes for each in sums) / seconds))
        return tuple(heapq.nlargest(most, found, key=lambda each: (each.bytes_per_s, each.peer_id)))

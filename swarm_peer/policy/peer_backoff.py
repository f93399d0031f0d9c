"""Which peers to avoid after failures, and for how long."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# The first pause after a failure: about one retry to another continent. Each further failure in a row doubles it.
FIRST_PAUSE_S = 1.0
# The longest pause. If the peer is dead, its announcement expires in about this time.
LONGEST_PAUSE_S = 30.0
# A failure is forgotten after this many of the longest pauses: the peer is gone, or well again.
PAUSES_REMEMBERED = 10


# How a peer is named: by its id, or by its life where a new life shall begin without a record.
PeerName = TypeVar("PeerName", bound=Hashable)


@dataclass(slots=True)
class PeerBackoff(Generic[PeerName]):
    """Remembers the failures of peers. A success clears a peer's record."""

    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    _failures: dict[PeerName, tuple[int, float]] = field(default_factory=dict)

    def failed(self, peer: PeerName, now: float) -> float:
        """Record a failure and return the pause that follows, in seconds.

        Calls that are under way together often fail together, for one reason, so further failures within a pause do not
        count.
        """
        oldest = now - PAUSES_REMEMBERED * self.longest_pause_s
        self._failures = {failed: known for failed, known in self._failures.items() if known[1] >= oldest}
        count, until = self._failures.get(peer, (0, now))
        if now < until:
            return until - now
        count += 1
        pause_s = min(self.first_pause_s * 2.0 ** min(count - 1, 30), self.longest_pause_s)
        self._failures[peer] = (count, now + pause_s)
        return pause_s

    def succeeded(self, peer: PeerName) -> None:
        """Forget the peer's failures."""
        self._failures.pop(peer, None)

    def avoided(self, now: float) -> frozenset[PeerName]:
        """The peers whose pause is not over."""
        return frozenset(peer for peer, (_, until) in self._failures.items() if now < until)

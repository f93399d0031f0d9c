"""Which peers to avoid after failures, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

# First pause after a failure: about one retry on another continent. Each further failure in a row doubles it.
FIRST_PAUSE_S = 1.0
# A peer is tried again after at most this long; its announcement expires in about the same time if it is dead.
LONGEST_PAUSE_S = 30.0
# A peer whose last pause has been over for so many of the longest ones is forgotten: it is gone, or well again.
PAUSES_REMEMBERED = 10


@dataclass(slots=True)
class PeerHealth:
    """Remembers failures. A success clears a peer's record."""

    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)

    def failed(self, peer_id: str, now: float) -> float:
        """Record a failure and return the pause that follows from it, in seconds.

        Calls that were under way together fail together, for one reason: those that do so within a pause count once.
        """
        oldest = now - PAUSES_REMEMBERED * self.longest_pause_s
        self._failures = {peer: known for peer, known in self._failures.items() if known[1] >= oldest}
        count, until = self._failures.get(peer_id, (0, now))
        if now < until:
            return until - now
        count += 1
        pause_s = min(self.first_pause_s * 2.0 ** min(count - 1, 30), self.longest_pause_s)
        self._failures[peer_id] = (count, now + pause_s)
        return pause_s

    def succeeded(self, peer_id: str) -> None:
        self._failures.pop(peer_id, None)

    def avoided(self, now: float) -> frozenset[str]:
        return frozenset(peer_id for peer_id, (_, until) in self._failures.items() if now < until)

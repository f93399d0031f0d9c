"""Which peers to avoid after failures, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

# The first pause after a failure: about one retry to another continent. Each further failure in a row doubles it.
FIRST_PAUSE_S = 1.0
# The longest pause. If the peer is dead, its announcement expires in about this time.
LONGEST_PAUSE_S = 30.0
# A failure is forgotten after this many of the longest pauses: the peer is gone, or well again.
PAUSES_REMEMBERED = 10


@dataclass(slots=True)
class PeerBackoff:
    """Remembers the failures of peers. A success clears a peer's record."""

    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)

    def failed(self, peer_id: str, now: float) -> float:
        """Record a failure and return the pause that follows, in seconds.

        Calls that are under way together often fail together, for one reason, so further failures within a pause do not
        count.
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
        """Forget the peer's failures."""
        self._failures.pop(peer_id, None)

    def avoided(self, now: float) -> frozenset[str]:
        """The peers whose pause is not over."""
        return frozenset(peer_id for peer_id, (_, until) in self._failures.items() if now < until)

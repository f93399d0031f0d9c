"""Knows which stage-mates may be reading data, so that their leases are respected."""

from __future__ import annotations

from collections.abc import Callable

from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.context import Clock

# In lifetimes of an announcement: the leases of a peer that vanished without a goodbye are respected for this long. It
# may be alive, and only out of reach of this peer.
PATIENCE = 2


class ReadingMates:
    """The peers of stage 0 beside this one. Belongs to the event loop's thread."""

    def __init__(self, *, me: str, clock: Clock, announcement_s: float, view: Callable[[], SwarmView]):
        """Make a list without stage-mates.

        Args:
            announcement_s: lifetime of an announcement
        """
        self._me = me
        self._clock = clock
        self._patience_s = PATIENCE * announcement_s
        self._view = view
        self._seen: dict[str, float] = {}  # when each was last known to be present

    def welcome(self, peer_id: str) -> None:
        """Note a stage-mate that has called this peer. Its announcement may not have been seen yet."""
        self._seen[peer_id] = self._clock.monotonic_s()

    def forget(self, peer_id: str) -> None:
        """Forget a stage-mate that has said goodbye."""
        self._seen.pop(peer_id, None)

    def present(self) -> list[str]:
        """The stage-mates in view that may be reading."""
        reading = (PeerState.SERVING, PeerState.DRAINING)
        peers = [peer.peer_id for peer in self._view().in_stage(0) if peer.state in reading]
        return [peer_id for peer_id in peers if peer_id != self._me]

    def live(self) -> set[str]:
        """The peers whose leases are respected: this one, and the stage-mates that were seen a short time ago."""
        oldest = self._clock.monotonic_s() - self._patience_s
        return {self._me, *self.present(), *(peer_id for peer_id, at in self._seen.items() if at >= oldest)}

    def note_present(self) -> None:
        """Remember which stage-mates are in view now, and forget those last seen too long ago."""
        now = self._clock.monotonic_s()
        self._seen.update((peer_id, now) for peer_id in self.present())
        self._seen = {peer_id: at for peer_id, at in self._seen.items() if now - at <= self._patience_s}

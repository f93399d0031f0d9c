"""The stage-mates of this peer, and which of them it waits for at the end of a round.

Owns what this peer remembers of them: announcements, greetings and delays. Calls nobody, and knows no rounds.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm_peer.policy.peer_backoff import PeerBackoff
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.context import Clock

# How long a stage-mate that has left the view is still known, in lifetimes of an announcement. It may be missing for a
# moment only, because this peer could not dial it once or the DHT was late.
PATIENCE = 2
# A draining peer is among them, since it may have to end the round with the others.
PRESENT = (PeerState.SERVING, PeerState.DRAINING)


class StageMates:
    """The peers that announce this stage. Queries change nothing. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        clock: Clock,
        stage: int,
        announcement_s: float,
        barrier_timeout_s: float,
        view: Callable[[], SwarmView],
    ):
        """Know nobody yet.

        Args:
            announcement_s: lifetime of an announcement
            barrier_timeout_s: how long a stage-mate may hold up a barrier
        """
        self._clock = clock
        self._stage = stage
        self._announcement_s = announcement_s
        self._view = view
        self._announced: dict[str, float] = {}  # when each was last in the view
        self._welcomed: dict[str, float] = {}  # when each last made itself known
        self._backoff: PeerBackoff[str] = PeerBackoff(2 * barrier_timeout_s, 64 * barrier_timeout_s)

    def refresh(self) -> None:
        """Take in the present view, and forget the peers that have been missing in it for long."""
        now = self._clock.monotonic_s()
        oldest = now - PATIENCE * self._announcement_s
        self._announced = {peer_id: seen for peer_id, seen in self._announced.items() if seen >= oldest}
        self._announced.update((peer.peer_id, now) for peer in self._view().in_stage(self._stage))

    def is_known(self, peer_id: str) -> bool:
        """Whether a peer announced this stage when `refresh` was last called, or shortly before."""
        return peer_id in self._announced

    def expected(self) -> set[str]:
        """The peers to wait for: those in the view and those that greeted lately, without those that were late."""
        now = self._clock.monotonic_s()
        in_view = {peer.peer_id for peer in self._view().in_stage(self._stage) if peer.state in PRESENT}
        oldest = now - self._announcement_s
        welcomed = {peer_id for peer_id, since in self._welcomed.items() if since >= oldest}
        return (in_view | welcomed) - self._backoff.avoided(now)

    def welcome(self, peer_id: str) -> None:
        """Expect a peer that has made itself known, until its announcement is sure to be in the view."""
        now = self._clock.monotonic_s()
        oldest = now - self._announcement_s
        self._welcomed = {known: since for known, since in self._welcomed.items() if since >= oldest} | {peer_id: now}

    def was_ready(self, peer_id: str) -> None:
        """Note that a peer is ready for a round: forget its delays."""
        self._backoff.succeeded(peer_id)

    def was_late(self, peer_id: str) -> None:
        """Note that a peer held up a barrier: the next ones do without it, unless it says that it is ready."""
        self._backoff.failed(peer_id, self._clock.monotonic_s())

    def was_unreachable(self, peer_id: str) -> None:
        """Note that a peer could not be reached: unless it is in the view, each round would dial it in vain."""
        self._welcomed.pop(peer_id, None)

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
# A peer that held up a barrier may hold up so many more, for one poll each, before its pause is over. It may be well
# again, so it is asked as soon as it says that it is ready; but it may say so and not be.
CHANCES = 3
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
        self._waited_in_vain: dict[str, set[int]] = {}  # rounds, by the peers that are in a pause
        self._on_trial: set[str] = set()  # those of them that have said since that they are ready
        self._doing_without: dict[str, set[int]] = {}  # rounds in which each did without this peer

    def refresh(self) -> None:
        """Take in the present view, and forget the peers that have been missing in it for long."""
        now = self._clock.monotonic_s()
        oldest = now - PATIENCE * self._announcement_s
        self._announced = {peer_id: seen for peer_id, seen in self._announced.items() if seen >= oldest}
        self._announced.update((peer.peer_id, now) for peer in self._view().in_stage(self._stage))
        avoided = self._backoff.avoided(now)
        self._waited_in_vain = {peer: rounds for peer, rounds in self._waited_in_vain.items() if peer in avoided}
        self._on_trial &= avoided

    def is_known(self, peer_id: str) -> bool:
        """Whether a peer announced this stage when `refresh` was last called, or shortly before."""
        return peer_id in self._announced

    def expected(self) -> set[str]:
        """The peers to wait for: those in the view and those that greeted lately, without those that were late."""
        now = self._clock.monotonic_s()
        in_view = {peer.peer_id for peer in self._view().in_stage(self._stage) if peer.state in PRESENT}
        oldest = now - self._announcement_s
        welcomed = {peer_id for peer_id, since in self._welcomed.items() if since >= oldest}
        return (in_view | welcomed) - (self._backoff.avoided(now) - self._on_trial)

    def is_left_out(self, peer_id: str) -> bool:
        """Whether a peer has held up a barrier, and has not completed one since. It must not be told to average."""
        return peer_id in self._backoff.avoided(self._clock.monotonic_s())

    def welcome(self, peer_id: str) -> None:
        """Expect a peer that has made itself known, until its announcement is sure to be in the view."""
        now = self._clock.monotonic_s()
        oldest = now - self._announcement_s
        self._welcomed = {known: since for known, since in self._welcomed.items() if since >= oldest} | {peer_id: now}

    def says_ready(self, peer_id: str, round_number: int) -> None:
        """Note that a peer says it is ready for a round: if it has held up a barrier, it is asked once more."""
        in_vain = self._waited_in_vain.get(peer_id)
        if in_vain is not None and round_number not in in_vain and len(in_vain) <= CHANCES:
            self._on_trial.add(peer_id)

    def begin_trial(self, peer_id: str, round_number: int) -> bool:
        """Whether a peer that held up a barrier is asked once more now. If it is not ready, this barrier goes on."""
        if peer_id not in self._on_trial:
            return False
        self._on_trial.discard(peer_id)
        self._waited_in_vain[peer_id].add(round_number)  # until it proves to be ready
        return True

    def was_ready(self, peer_id: str) -> None:
        """Note that a peer has completed a barrier: forget its delays."""
        self._backoff.succeeded(peer_id)
        self._waited_in_vain.pop(peer_id, None)
        self._doing_without.pop(peer_id, None)
        self._on_trial.discard(peer_id)

    def does_without(self, peer_id: str, round_number: int) -> None:
        """Note that a peer does without this one in a round."""
        self._doing_without.setdefault(peer_id, set()).add(round_number)

    def was_late(self, peer_id: str, round_number: int) -> None:
        """Note that a peer held up the barrier of a round: this one and the next ones do without it.

        Not so, for some rounds, where the peer does without this one. Two that did without each other would ask each
        other no more, and until the pause of one is over nobody could average with both.
        """
        rounds = self._doing_without.get(peer_id, ())
        if round_number in rounds and len(rounds) <= CHANCES:
            return
        self._backoff.failed(peer_id, self._clock.monotonic_s())
        self._waited_in_vain.setdefault(peer_id, set()).add(round_number)
        self._on_trial.discard(peer_id)

    def was_unreachable(self, peer_id: str) -> None:
        """Note that a peer could not be reached: unless it is in the view, each round would dial it in vain."""
        self._welcomed.pop(peer_id, None)

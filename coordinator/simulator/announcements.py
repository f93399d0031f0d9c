"""The announcements of a simulated swarm, as its coordinator finds them: late, with noise, some of dead peers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from swarm_peer.policy.view import (
    ANNOUNCEMENTS_PER_LIFETIME,
    OVERDUE_ANNOUNCEMENTS,
    PeerState,
    PeerView,
    SwarmView,
)

# How often a coordinator looks. It finds what was announced up to the look before: a directory looks as seldom.
LOOK_S = 2.0
# Lifetime of an announcement, and time between two of one peer: the default of a manifest.
ANNOUNCEMENT_S = 30.0
INTERVAL_S = ANNOUNCEMENT_S / ANNOUNCEMENTS_PER_LIFETIME
# A peer that is overdue is called, and taken for dead if it does not answer for so long.
SILENCE_S = OVERDUE_ANNOUNCEMENTS * INTERVAL_S + 3.0
# Deviation of the logarithm of an announced speed: measured speeds wander by some percent.
SPEED_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class _Announced:
    """A peer's last announcement, with the state that the peer was in and the moment of its next one."""

    peer: PeerView
    announcement: PeerView
    at_s: float
    next_s: float


class Announcements:
    """The announcements of one simulated swarm: of each change of a peer's state, and again every few seconds.

    A mover drains for a while.

    Args:
        drain_s: for how long a mover drains
    """

    def __init__(self, *, drain_s: float, seed: int):
        self._drain_s = drain_s
        self._rng = random.Random(f"announcements {seed}")
        self._last: dict[str, _Announced] = {}
        self._swarm: SwarmView | None = None

    def look(self, swarm: SwarmView, now_s: float) -> SwarmView:
        """The view of a coordinator, which knows the swarm as it was at the look before."""
        seen, self._swarm = self._swarm or swarm, swarm
        for peer in seen.peers:
            last = self._last.get(peer.peer_id)
            if last is None or last.peer is not peer or now_s >= last.next_s:
                self._last[peer.peer_id] = self._announced(peer, last, now_s)
        alive = {peer.peer_id for peer in seen.peers}
        for peer_id in self._last.keys() - alive:
            if now_s > self._last[peer_id].at_s + SILENCE_S:
                del self._last[peer_id]
        return SwarmView(seen.num_stages, tuple(last.announcement for last in self._last.values()))

    def _announced(self, peer: PeerView, last: _Announced | None, now_s: float) -> _Announced:
        has_changed = last is None or last.peer is not peer
        serial = int(1000 * now_s)
        if last is not None and last.peer.stage != peer.stage:
            draining = replace(last.announcement, state=PeerState.DRAINING, since_s=now_s, announced=serial)
            return _Announced(peer, draining, now_s, now_s + self._drain_s)
        is_measured = peer.state is PeerState.SERVING and not has_changed
        announcement = replace(
            peer,
            samples_per_s=peer.samples_per_s * math.exp(SPEED_NOISE * self._rng.gauss(0, 1)) if is_measured else 0.0,
            announced=serial,
        )
        # A change is announced at once, beside the others, so the next of those comes at any time.
        wait_s = INTERVAL_S * (self._rng.random() if has_changed else 1.0)
        return _Announced(peer, announcement, now_s, now_s + wait_s)

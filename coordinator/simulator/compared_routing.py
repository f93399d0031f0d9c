"""The routing policies that are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Sequence

from coordinator.simulator.options import RoutingName
from swarm_peer.policy.routing import Router
from swarm_peer.policy.view import Life, PeerView


class Routing:
    """Chooses the peers of the next stage by the policy of a name.

    `own`, the earliest expected finish by what the caller has outstanding itself, with a part for each caller, runs
    live. `uniform` takes any peer, all alike. The others know all queues as they are, which no live peer does: `jsed`
    joins the shortest expected delay of all, `po2` that of two peers drawn at random.

    Args:
        expected_s: the delay that a microbatch would meet at a peer
    """

    def __init__(self, name: RoutingName, rng: random.Random, expected_s: Callable[[PeerView], float]):
        self._name = name
        self._rng = rng
        self._expected_s = expected_s
        self._router = Router(rng)
        self._peers: list[PeerView] = []

    def update(self, peers: Iterable[PeerView], caller: str, callers: Sequence[PeerView], round_number: int) -> None:
        """Take over which peers serve the stage now, and which peers send to it, and in which round."""
        self._peers = sorted(peers, key=lambda peer: peer.peer_id)
        if self._name == "own":
            self._router.update(self._peers, caller, callers, round_number)

    def choose(self, avoid: Container[str]) -> Life | None:
        """The peer for the next microbatch, if there is any."""
        if self._name == "own":
            chosen = self._router.choose(1, avoid).peer_id
            return next((peer.life for peer in self._peers if peer.peer_id == chosen), None)
        allowed = [peer for peer in self._peers if peer.peer_id not in avoid]
        if not allowed:
            return None
        if self._name == "uniform":
            return self._rng.choice(allowed).life
        tried = allowed if self._name == "jsed" else self._rng.sample(allowed, min(2, len(allowed)))
        return min(tried, key=lambda peer: (self._expected_s(peer), self._rng.random())).life

    def done(self, peer: Life) -> None:
        """Note that the microbatch is done that a peer was chosen for."""
        self._router.done(peer, 1)

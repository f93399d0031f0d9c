"""The routing policies that are compared."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from typing import Protocol

from coordinator.simulator.options import RoutingName
from swarm_peer.policy.routing import Router
from swarm_peer.policy.view import PeerView


class Routing(Protocol):
    """Chooses the peers of the next stage."""

    def update(self, peers: Iterable[PeerView]) -> None:
        """Take over which peers serve the stage now."""

    def choose(self, avoid: Container[str]) -> str | None:
        """The peer for the next microbatch, if there is any."""


class IwrrRouting:
    """Interleaved weighted round-robin, which runs live."""

    def __init__(self, rng: random.Random):
        self._router = Router(rng)

    def update(self, peers: Iterable[PeerView]) -> None:
        """See Routing."""
        self._router.update(peers)

    def choose(self, avoid: Container[str]) -> str | None:
        """See Routing."""
        return self._router.choose(1, avoid).peer_id


class _Informed(ABC):
    def __init__(self, rng: random.Random, expected_s: Callable[[PeerView], float]):
        self._rng = rng
        self._expected_s = expected_s
        self._peers: list[PeerView] = []

    def update(self, peers: Iterable[PeerView]) -> None:
        """See Routing."""
        self._peers = sorted(peers, key=lambda peer: peer.peer_id)

    def choose(self, avoid: Container[str]) -> str | None:
        """See Routing."""
        allowed = [peer for peer in self._peers if peer.peer_id not in avoid]
        return self._among(allowed).peer_id if allowed else None

    @abstractmethod
    def _among(self, allowed: list[PeerView]) -> PeerView:
        """One of the peers, of which there is at least one."""


class UniformRouting(_Informed):
    """Any peer, all alike."""

    def _among(self, allowed: list[PeerView]) -> PeerView:
        return self._rng.choice(allowed)


class ShortestDelayRouting(_Informed):
    """Joins the shortest expected delay. It knows all queues as they are, which no live peer does."""

    def _among(self, allowed: list[PeerView]) -> PeerView:
        return min(allowed, key=lambda peer: (self._expected_s(peer), self._rng.random()))


class TwoChoicesRouting(_Informed):
    """The shorter expected delay of two peers drawn at random, whose queues it knows."""

    def _among(self, allowed: list[PeerView]) -> PeerView:
        return min(self._rng.sample(allowed, min(2, len(allowed))), key=self._expected_s)


def make_routing(name: RoutingName, rng: random.Random, expected_s: Callable[[PeerView], float]) -> Routing:
    """The policy of a name; `expected_s` is the delay that a microbatch would meet at a peer."""
    if name == "iwrr":
        return IwrrRouting(rng)
    if name == "uniform":
        return UniformRouting(rng, expected_s)
    return ShortestDelayRouting(rng, expected_s) if name == "jsed" else TwoChoicesRouting(rng, expected_s)

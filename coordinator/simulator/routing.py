"""The routing policies that are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable
from typing import Literal, Protocol

from swarm_peer.policy.routing import Router
from swarm_peer.policy.view import PeerView

RoutingName = Literal["iwrr", "uniform", "jsed", "po2"]


class Routing(Protocol):
    def update(self, peers: Iterable[PeerView]) -> None: ...

    def choose(self, avoid: Container[str]) -> str | None:
        """The peer for the next microbatch, if there is any."""


class IwrrRouting:
    """What runs live."""

    def __init__(self, rng: random.Random):
        self._router = Router(rng)

    def update(self, peers: Iterable[PeerView]) -> None:
        self._router.update(peers)

    def choose(self, avoid: Container[str]) -> str | None:
        return self._router.choose(1, avoid).peer_id


class _Informed:
    def __init__(self, rng: random.Random, expected_s: Callable[[PeerView], float]):
        self._rng = rng
        self._expected_s = expected_s
        self._peers: list[PeerView] = []

    def update(self, peers: Iterable[PeerView]) -> None:
        self._peers = sorted(peers, key=lambda peer: peer.peer_id)

    def choose(self, avoid: Container[str]) -> str | None:
        allowed = [peer for peer in self._peers if peer.peer_id not in avoid]
        return self._among(allowed).peer_id if allowed else None

    def _among(self, allowed: list[PeerView]) -> PeerView:
        raise NotImplementedError


class UniformRouting(_Informed):
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
    if name == "iwrr":
        return IwrrRouting(rng)
    kinds = {"uniform": UniformRouting, "jsed": ShortestDelayRouting, "po2": TwoChoicesRouting}
    return kinds[name](rng, expected_s)

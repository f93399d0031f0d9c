"""The ways in which a peer's parts reach the other peers of the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.network.gossip import Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.wire.records import TimelineRecord


class Look(Protocol):
    """Looks up the peers that announce some stages; waits until the DHT answers. See Directory.refresh_surely."""

    async def __call__(self, stages: Sequence[int], max_age_s: float = 0.0) -> SwarmView:
        """The swarm, with these stages as they are now, or were so short a time ago."""


@dataclass(frozen=True, kw_only=True)
class SwarmAccess:
    """The means to find other peers and to talk to them.

    Attributes:
        view: returns the swarm as this peer knows it now
        coordinators: finds the ids of the run's coordinators, which give checkpoints
        beginning: finds the run's first timeline, and how far it has come; signed by the run key. Raises CallError if
            the DHT does not tell
    """

    transport: Transport
    progress: ProgressBook
    gossip: Gossip
    view: Callable[[], SwarmView]
    look: Look
    coordinators: Callable[[], Awaitable[Sequence[str]]]
    beginning: Callable[[], Awaitable[TimelineRecord]]

    def stage_mates(self, stage: int) -> list[str]:
        """Ids of the other peers that serve a stage."""
        return [peer.peer_id for peer in self.view().serving(stage) if peer.peer_id != self.transport.peer_id]

"""Tells members of the run, which are known by their announcements or a warrant of the run key, from strangers."""

from __future__ import annotations

import logging
import math

import anyio

from swarm_peer.errors import CallError
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory

log = logging.getLogger(__name__)

# Strangers may call as often as they like. So often the DHT is searched for them.
LOOK_PAUSE_S = 1.0


class RunMembers:
    """The members of the run: peers and coordinators. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, directory: Directory, dht: SwarmDHT):
        self._run_id = context.run_id
        self._clock = context.clock
        self._num_stages = context.resolved.num_stages
        self._directory = directory
        self._dht = dht
        self._looking = anyio.Lock()
        self._looked_s = -math.inf
        self._coordinators: frozenset[str] = frozenset()

    async def include(self, peer_id: str) -> bool:
        """Whether somebody takes part in the run. Looks into the DHT for those who are not known here.

        A newcomer announces itself first, and asks this peer then, which may not have looked since.
        """
        if self.known(peer_id):
            return True
        async with self._looking:
            now_s = self._clock.monotonic_s()
            if not self.known(peer_id) and now_s >= self._looked_s + LOOK_PAUSE_S:
                self._looked_s = now_s
                try:
                    await self._directory.refresh(range(self._num_stages))
                    terms = await self._dht.fetch_coordination(self._run_id)
                    self._coordinators = frozenset(term.coordinator for term in terms)
                except CallError as error:
                    log.info("caller_unknown peer=%s reason=%s", peer_id, error)
        return self.known(peer_id)

    def known(self, peer_id: str) -> bool:
        """Whether somebody is known here to take part in the run."""
        # The first coordinator's identity often is the run's key.
        return peer_id == self._run_id or peer_id in self._coordinators or self._directory.takes_part(peer_id)

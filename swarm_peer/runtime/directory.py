"""Who is in the swarm: announces this peer in the DHT and keeps a view of the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import anyio

from swarm_peer import __version__
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.policy.view import PeerView, SwarmView
from swarm_peer.runtime.dht import SwarmDHT, is_loopback, is_tcp_address
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.signal import Signal
from swarm_peer.wire.records import MAX_ADDRESSES, Announcement, stage_key

log = logging.getLogger(__name__)

# Announcements of an announcement's lifetime; one or two may be lost on the way.
ANNOUNCEMENTS_PER_LIFETIME = 4
# Announcements do not come to the second.
OVERDUE_ANNOUNCEMENTS = 1.5
# How often to look for others: quickly while peers are missing, then at leisure.
FAST_POLL_S = 0.5
SLOW_POLL_S = 3.0
# Stage-0 peers whose counts are believed after they are gone.
AUTHORS_REMEMBERED = 4096


class Directory:
    """Belongs to the event loop's thread.

    Args:
        describe_self: this peer as of now, asked at each announcement; None for one who only looks on
    """

    def __init__(
        self,
        manifest: RunManifest,
        dht: SwarmDHT,
        device: str,
        describe_self: Callable[[], PeerView] | None,
        metrics: PeerMetrics,
        changed: Signal,
    ):
        self._manifest = manifest
        self._hash = manifest.hash
        self._dht = dht
        self._device = device
        self._describe_self = describe_self
        self._metrics = metrics
        self._changed = changed
        self._peers: dict[str, tuple[Announcement, float]] = {}  # with the time of arrival
        self._authors: dict[str, None] = {}  # peers that have announced stage 0, the latest last
        self._dropped: dict[str, int] = {}  # peers that are gone, with the serial of their last announcement
        self._stranger_seen = anyio.Event()
        self.serial = 0  # of this peer's last announcement
        self.view = SwarmView(manifest.stages.count)

    async def refresh(self, stages: Sequence[int]) -> SwarmView:
        """Look up who announces these stages; the rest of the view stays as it was.

        Raises:
            CallError: the DHT does not answer
        """
        try:
            for stage in stages:
                found = await self._dht.fetch(stage_key(self._hash, stage), Announcement, self._hash)
                for peer_id, announcement in found.items():
                    known = self._peers.get(peer_id)
                    fits = announcement.stage == stage and stage < self._manifest.stages.count
                    if fits and (known is None or announcement.serial > known[0].serial):
                        self._peers[peer_id] = (announcement, time.monotonic())
                        if stage == 0:
                            self._authors.pop(peer_id, None)
                            self._authors[peer_id] = None
        finally:
            self._rebuild()
        return self.view

    async def refresh_surely(self, stages: Sequence[int]) -> SwarmView:
        """The same, tried until the DHT answers: that nobody serves a stage is not to be taken from its silence."""
        while True:
            try:
                return await self.refresh(stages)
            except CallError:  # logged
                await anyio.sleep(FAST_POLL_S)

    def _rebuild(self) -> None:
        oldest = time.monotonic() - self._manifest.limits.announcement_s
        self._peers = {peer_id: entry for peer_id, entry in self._peers.items() if entry[1] >= oldest}
        for peer_id in list(self._authors)[:-AUTHORS_REMEMBERED]:
            del self._authors[peer_id]
        self._dropped = {peer_id: serial for peer_id, serial in self._dropped.items() if peer_id in self._peers}
        peers = {
            peer_id: announcement.view(peer_id, arrived_s)
            for peer_id, (announcement, arrived_s) in self._peers.items()
            if announcement.serial > self._dropped.get(peer_id, -1)
        }
        if self._describe_self is not None:
            peers[self._dht.identity.peer_id] = self._describe_self()
        self.view = SwarmView(self._manifest.stages.count, tuple(peers.values()))
        self._changed.notify()

    def overdue(self) -> list[str]:
        """Peers that have missed an announcement: they may be gone."""
        lifetime_s = self._manifest.limits.announcement_s
        oldest = time.monotonic() - OVERDUE_ANNOUNCEMENTS * lifetime_s / ANNOUNCEMENTS_PER_LIFETIME
        return [peer.peer_id for peer in self.view.peers if self._peers[peer.peer_id][1] < oldest]

    def unreached(self) -> list[PeerView]:
        """Peers that are out of the view because they could not be reached, as they announced themselves last.

        Who has said goodbye is not among them: that names an announcement of its own.
        """
        return [
            announcement.view(peer_id, arrived_s)
            for peer_id, (announcement, arrived_s) in self._peers.items()
            if announcement.serial == self._dropped.get(peer_id, -1)
        ]

    def addresses(self) -> list[str]:
        """Where the peers in view say that they listen."""
        return [
            address
            for peer in self.view.peers
            if peer.peer_id in self._peers
            for address in self._peers[peer.peer_id][0].addresses
            if is_tcp_address(address, peer.peer_id)  # it may have said anything
        ]

    def drop(self, peer_id: str, serial: int = -1) -> None:
        """Take a peer that said goodbye, or that cannot be reached, out of the view until it announces itself anew.

        Args:
            serial: of its last announcement, where it is known better than from the DHT
        """
        known = self._peers.get(peer_id)
        if known is not None and self._dropped.get(peer_id, -1) < max(serial, known[0].serial):
            log.info("peer_dropped peer=%s stage=%d", peer_id, known[0].stage)
            self._dropped[peer_id] = max(serial, known[0].serial)
            self._rebuild()

    async def announce(self) -> None:
        """Publish this peer's state now."""
        assert self._describe_self is not None, "an onlooker has nothing to announce"
        me = self._describe_self()
        self._metrics.samples_per_s.set(me.samples_per_s)
        self.serial = time.time_ns() // 1_000_000
        record = Announcement(
            serial=self.serial,
            stage=me.stage,
            state=me.state.value,
            step=me.step,
            updates=me.updates,
            movable=me.movable,
            note=me.note[:200],
            samples_per_s=me.samples_per_s,
            queue=me.queue,
            version=__version__,
            device=self._device,
            state_s=0.0 if me.since_s is None else time.monotonic() - me.since_s,
            memory_bytes=me.memory_bytes,
            bandwidth_bytes_per_s=me.bandwidth_bytes_per_s,
            moved_from=me.moved_from,
            formerly=me.formerly,
            addresses=tuple(sorted(self._dht.addresses(), key=is_loopback)[:MAX_ADDRESSES]),
        )
        await self._dht.store(stage_key(self._hash, me.stage), record, self._hash, self._manifest.limits.announcement_s)
        self._rebuild()

    async def run_announcing(self) -> None:
        while True:
            await self.announce()
            await anyio.sleep(self._manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME)

    def is_author(self, peer_id: str) -> bool:
        """Whether a peer announces stage 0, or did: what it counted stays counted when it is gone.

        If nothing is known of it, `run_polling` looks at its next turn.
        """
        if peer_id not in self._authors:
            self._stranger_seen.set()
        return peer_id in self._authors

    async def run_polling(self, stages: Sequence[int]) -> None:
        """Keep the view of these stages fresh."""
        while True:
            await self.refresh_surely(stages)
            has_begun = any(peer.step > 0 for peer in self.view.peers)
            wanted = 1 if has_begun else self._manifest.stages.peers_to_start
            all_served = all(len(self.view.serving(stage)) >= wanted for stage in stages)
            await anyio.sleep(FAST_POLL_S)
            self._stranger_seen = anyio.Event()
            with anyio.move_on_after(SLOW_POLL_S if all_served else 0):
                await self._stranger_seen.wait()

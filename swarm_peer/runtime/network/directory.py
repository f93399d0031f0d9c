"""The directory of a peer: it announces the peer in the DHT and keeps a view of the other peers."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from swarm_peer import __version__
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.policy.view import (
    ANNOUNCEMENTS_PER_LIFETIME,
    OVERDUE_ANNOUNCEMENTS,
    PeerState,
    PeerView,
    SwarmView,
    fault_of,
)
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.peer_addresses import is_dialable, is_tcp_address
from swarm_peer.wire.records import MAX_ADDRESSES, MAX_UNREACHED, Announcement, stage_key

log = logging.getLogger(__name__)

# Pauses between looks for other peers: short while peers are missing, long afterwards.
FAST_POLL_S = 0.5
SLOW_POLL_S = 3.0
# While peers are missing, all others look, and ask the same few nodes: the more of them, the longer the pause.
FAST_POLL_S_PER_PEER = 0.1
# Stages that are looked up at the same time. One after the other, the first of a hundred would be out of date before
# the last was found.
LOOKS_AT_ONCE = 8
# How long an announcement tells who a caller is, in its own lifetimes: the next one may be late in the DHT, and this
# peer may not be able to dial a caller whose calls arrive.
REMEMBERED = 2


class Directory:
    """The announcements of all peers of a run, as far as this peer has found them. Belongs to the event loop's thread.

    Attributes:
        serial: serial number of this peer's last announcement
        view: the swarm as this peer knows it now
    """

    def __init__(
        self,
        *,
        manifest: RunManifest,
        dht: SwarmDHT,
        clock: Clock,
        metrics: PeerMetrics,
        changed: Condition,
        describe_self: Callable[[], PeerView] | None = None,
        device: str = "",
    ):
        """Make a directory that knows no peers.

        Args:
            changed: notified at each change of the view
            describe_self: returns this peer as of now, for each announcement; None for an observer
            device: the device that this peer computes on, in words, for its announcements
        """
        self._manifest = manifest
        self._hash = manifest.hash
        self._dht = dht
        self._clock = clock
        self._device = device
        self._describe_self = describe_self
        self._metrics = metrics
        self._changed = changed
        self._peers: dict[str, tuple[Announcement, float]] = {}  # with the time at which it arrived
        self._remembered: dict[str, tuple[Announcement, float]] = {}  # the same, for longer
        self._dropped: dict[str, int] = {}  # peers that are gone, with the serial number of their last announcement
        self._looked_s: dict[int, float] = {}  # when each stage was last looked up, and the DHT answered
        self._stranger_seen = anyio.Event()
        self._has_left = False  # the stage, as it has announced
        self.serial = 0
        self.view = SwarmView(manifest.stages.count)

    async def refresh(self, stages: Sequence[int]) -> SwarmView:
        """Look up the peers that announce these stages; the rest of the view stays as it was.

        Raises:
            CallError: the DHT does not answer
        """
        failures: list[CallError] = []
        at_once = anyio.CapacityLimiter(LOOKS_AT_ONCE)

        async def look(stage: int) -> None:
            async with at_once:
                if failures:
                    return
                begun_s = self._clock.monotonic_s()
                try:
                    found = await self._dht.fetch(stage_key(self._hash, stage), Announcement, self._hash)
                except CallError as error:
                    failures.append(error)
                    return
                self._looked_s[stage] = begun_s
                for peer_id, announcement in found.items():
                    self._take(peer_id, announcement, stage)

        try:
            async with anyio.create_task_group() as tasks:
                for stage in stages:
                    tasks.start_soon(look, stage)
        finally:
            self._rebuild()
        if failures:
            raise failures[0]
        return self.view

    def _take(self, peer_id: str, announcement: Announcement, stage: int) -> None:
        """Keep an announcement that was found under the key of a stage, if it is news and fits the run."""
        now_s = self._clock.monotonic_s()
        fault = fault_of(announcement.view(peer_id, now_s), self._manifest.stages.count)
        if fault is None and announcement.stage != stage:
            fault = f"stage {announcement.stage} under the key of stage {stage}"
        if fault is not None:
            self._metrics.invalid_messages.labels("record").inc()
            log.warning("invalid_record peer=%s reason=an announcement of %s", peer_id, fault)
            return
        known = self._peers.get(peer_id)
        if known is None or announcement.serial > known[0].serial:
            self._peers[peer_id] = self._remembered[peer_id] = (announcement, now_s)

    async def refresh_surely(self, stages: Sequence[int], max_age_s: float = 0.0) -> SwarmView:
        """Like `refresh`, but try until the DHT answers: its silence does not mean that a stage has no peers.

        Args:
            max_age_s: stages that were looked up so short a time ago are not looked up again
        """
        while True:
            oldest_s = self._clock.monotonic_s() - max_age_s
            try:
                return await self.refresh([s for s in stages if self._looked_s.get(s, -math.inf) <= oldest_s])
            except CallError:  # the DHT has logged it
                await anyio.sleep(FAST_POLL_S)

    def _rebuild(self) -> None:
        """Forget announcements that are too old, and make a new view."""
        now_s, lifetime_s = self._clock.monotonic_s(), self._manifest.limits.announcement_s
        self._peers = {peer: entry for peer, entry in self._peers.items() if entry[1] >= now_s - lifetime_s}
        oldest = now_s - REMEMBERED * lifetime_s
        self._remembered = {peer: entry for peer, entry in self._remembered.items() if entry[1] >= oldest}
        self._dropped = {peer_id: serial for peer_id, serial in self._dropped.items() if peer_id in self._peers}
        found = {
            peer_id: announcement.view(peer_id, arrived_s) for peer_id, (announcement, arrived_s) in self._peers.items()
        }
        left = frozenset(peer_id for peer_id, peer in found.items() if peer.state is PeerState.LEFT)
        peers = {
            peer_id: peer
            for peer_id, peer in found.items()
            if peer_id not in left and peer.announced > self._dropped.get(peer_id, -1)
        }
        if self._describe_self is not None and (me := self._describe_self()).state is not PeerState.LEFT:
            peers[me.peer_id] = me
        self.view = SwarmView(self._manifest.stages.count, tuple(peers.values()), left.difference(peers))
        self._changed.notify()

    def overdue(self) -> list[PeerView]:
        """The peers in view that should have announced themselves again by now: they may be gone."""
        lifetime_s = self._manifest.limits.announcement_s
        oldest = self._clock.monotonic_s() - OVERDUE_ANNOUNCEMENTS * lifetime_s / ANNOUNCEMENTS_PER_LIFETIME
        return [peer for peer in self.view.peers if self._peers[peer.peer_id][1] < oldest]

    def addresses(self) -> list[str]:
        """The addresses that the peers in view announce."""
        return [address for peer in self.view.peers for address in self.addresses_of(peer.peer_id)]

    def addresses_of(self, peer_id: str) -> list[str]:
        """The addresses that a peer announces, those left out that are not to be dialled; none if it is not known."""
        announced = self._peers[peer_id][0].addresses if peer_id in self._peers else ()
        own = self._dht.addresses
        # A peer can announce any text.
        return [each for each in announced if is_tcp_address(each, peer_id) and is_dialable(each, own)]

    def can_be_dialled(self, peer_id: str) -> bool | None:
        """Whether others can dial a peer, by its own account; None if nobody has told it, or it is not known."""
        known = self._peers.get(peer_id)
        return known[0].is_reachable if known else None

    def drop(self, peer_id: str, serial: int = -1) -> None:
        """Take a peer that said goodbye, or that cannot be reached, out of the view until it announces itself anew.

        Args:
            serial: serial number of its last announcement, if its goodbye names one; a goodbye that comes after a newer
                announcement was found is one of a former life, and changes nothing
        """
        known = self._peers.get(peer_id)
        if known is None:
            return
        last = known[0].serial if serial < 0 else serial
        if last >= known[0].serial and self._dropped.get(peer_id, -1) < last:
            log.info("peer_dropped peer=%s stage=%d", peer_id, known[0].stage)
            self._dropped[peer_id] = last
            self._rebuild()

    async def drop_revoked(self) -> None:
        """Take peers that may take part no more out of the view, and tell them; their announcements may be fresh."""
        revoked = [peer.peer_id for peer in self.view.peers if self._dht.passes.is_revoked(peer.peer_id)]
        for peer_id in revoked:
            self.drop(peer_id)
        async with anyio.create_task_group() as tasks:
            for peer_id in revoked:
                tasks.start_soon(self._dht.p2p.tell_revocations, peer_id)

    async def keep_revoked_out(self, every_s: float) -> None:
        """Look for revoked peers in the view every so often, as `drop_revoked` does, until cancelled."""
        while True:
            await self.drop_revoked()
            await anyio.sleep(every_s)

    async def announce(self) -> None:
        """Announce this peer as it is now; that it has left its stage is announced once.

        Such an announcement takes the place of the last one, so that peers which look at this stage alone see the peer
        gone at once. It expires like any other.
        """
        assert self._describe_self is not None, "an observer has nothing to announce"
        me = self._describe_self()
        had_left, self._has_left = self._has_left, me.state is PeerState.LEFT
        if not (had_left and self._has_left):
            await self._store(me)

    async def _store(self, me: PeerView) -> None:
        self._metrics.samples_per_s.set(me.samples_per_s)
        self._metrics.show_time_shares(me.time_shares)
        self.serial = max(int(self._clock.unix_s() * 1000), self.serial + 1)
        record = Announcement(
            serial=self.serial,
            stage=me.stage,
            state=me.state.value,
            round_number=me.round_number,
            optimizer_step=me.optimizer_step,
            movable=me.movable,
            note=me.note[:200],
            samples_per_s=me.samples_per_s,
            queue=me.queue,
            version=__version__,
            device=self._device[:64],
            state_s=0.0 if me.since_s is None else self._clock.monotonic_s() - me.since_s,
            memory_bytes=me.memory_bytes,
            too_large=me.too_large,
            bandwidth_bytes_per_s=me.bandwidth_bytes_per_s,
            upload_bytes_per_s=me.upload_bytes_per_s,
            download_bytes_per_s=me.download_bytes_per_s,
            device_samples_per_s=me.device_samples_per_s,
            moved_from=me.moved_from,
            moving_to=me.moving_to,
            addresses=tuple(self._dht.addresses[:MAX_ADDRESSES]),
            is_reachable=me.is_reachable,
            relays=me.relays,
            neighbours=me.neighbours,
            unreached=me.unreached[:MAX_UNREACHED],
            incarnation=me.incarnation,
            name=me.name,
            time_shares=me.time_shares,
            metrics_address=me.metrics_address,
            trouble="" if me.trouble is None else me.trouble.value,
            trouble_s=0.0 if me.trouble_since_s is None else self._clock.monotonic_s() - me.trouble_since_s,
        )
        await self._dht.store(stage_key(self._hash, me.stage), record, self._hash, self._manifest.limits.announcement_s)
        self._rebuild()

    @asynccontextmanager
    async def kept_fresh(self, stages: Sequence[int]) -> AsyncIterator[None]:
        """Meanwhile, announce this peer again and again, and keep the view of these stages fresh."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_announcing)
            tasks.start_soon(self.run_polling, stages)
            yield
            tasks.cancel_scope.cancel()

    async def _run_announcing(self) -> None:
        while True:
            await anyio.sleep(self._manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME)
            await self.announce()

    def serves(self, peer_id: str, stage: int) -> bool:
        """Whether a caller serves a stage, by its last announcement."""
        known = self._remembered.get(peer_id)
        serving = (PeerState.SERVING.value, PeerState.DRAINING.value)
        return known is not None and known[0].stage == stage and known[0].state in serving

    def known(self, peer_id: str) -> PeerView | None:
        """A peer by its last announcement, also one that cannot be reached; None if it has left, or is not known."""
        announcement, arrived_s = self._remembered.get(peer_id, (None, 0.0))
        if announcement is None or announcement.state == PeerState.LEFT.value:
            return None
        return announcement.view(peer_id, arrived_s)

    def takes_part(self, peer_id: str) -> bool:
        """Whether a caller is a peer of the run, in any stage and state, by its last announcement."""
        known = self._remembered.get(peer_id)
        return known is not None and known[0].state != PeerState.LEFT.value

    def has_left(self, peer_id: str) -> bool:
        """Whether the last announcement of a peer is that it has left its stage."""
        known = self._remembered.get(peer_id)
        return known is not None and known[0].state == PeerState.LEFT.value

    def look_soon(self) -> None:
        """Have `run_polling` look without a long pause, since this directory does not know some peer yet."""
        self._stranger_seen.set()

    async def run_polling(self, stages: Sequence[int]) -> None:
        """Keep the view of these stages fresh, until cancelled."""
        while True:
            await self.refresh_surely(stages)
            has_begun = any(peer.round_number > 0 for peer in self.view.peers)
            wanted = 1 if has_begun else self._manifest.stages.peers_to_start
            all_served = all(len(self.view.serving(stage)) >= wanted for stage in stages)
            pause_s = min(FAST_POLL_S_PER_PEER * len(self.view.peers) - FAST_POLL_S, SLOW_POLL_S)
            await anyio.sleep(FAST_POLL_S)
            self._stranger_seen = anyio.Event()
            with anyio.move_on_after(SLOW_POLL_S if all_served else max(pause_s, 0)):
                await self._stranger_seen.wait()

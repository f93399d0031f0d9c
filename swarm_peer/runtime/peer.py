"""A peer of a run: it opens and closes replicas of stages, moves from one to the next, and leaves."""

from __future__ import annotations

import logging

import anyio
import torch

from swarm_peer.errors import CallError, HubFailed, NotAdmitted, OtherTimeline, UserError
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState, PeerView
from swarm_peer.runtime.assembly import PeerParts
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.data.prefetch import HUB_PATIENCE_S, HUB_PAUSE_S
from swarm_peer.runtime.host.preemption import wait_for_notice
from swarm_peer.runtime.host.preparation import free_device_memory, in_words
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.network.assignments import wait_for_end
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.members import RunMembers
from swarm_peer.runtime.network.peer_addresses import metrics_address
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.replica import StageReplica
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.state.recovery import Start
from swarm_peer.runtime.state.snapshot_store import SnapshotStore

log = logging.getLogger(__name__)

# Pause between tries to join a stage.
JOIN_PAUSE_S = 1.0
# A peer that was left behind waits for stage-mates that were not, for so many lifetimes of an announcement.
LEFT_BEHIND_PATIENCE = 8
# Peers that one which nobody can dial keeps connections to.
MOST_DIALLED = 256
# A leaving peer has this long to tell others that it is gone.
GOODBYE_S = 5.0


class Peer:
    """Takes part in a run, in one stage after the other, with one id and its connections.

    While it moves it may have two replicas: the one that serves, and the next one, which gets its state meanwhile.
    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        dht: SwarmDHT,
        transport: Transport,
        device: torch.device,
        device_thread: DeviceThread,
        counted: CountedHook | None = None,
    ):
        """Make a peer without replicas.

        Args:
            device: that it computes on
            device_thread: uses the device; the peer stops it at its end
            counted: told of each microbatch that the peer counts at stage 0; for tests
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._options = context.options
        self._dht = dht
        self._transport = transport
        self._metrics = context.metrics
        self._counted = counted
        self._me = context.identity.peer_id
        self._lifecycle = Lifecycle(context.clock)
        self._device_thread = device_thread
        self._directory = Directory(
            manifest=self._manifest,
            dht=dht,
            clock=context.clock,
            metrics=context.metrics,
            changed=context.changed,
            describe_self=self._describe,
            device=in_words(device),
        )
        dht.dial_by(self._directory.addresses_of)
        self._members = RunMembers(context=context, directory=self._directory, dht=dht)
        snapshots = SnapshotStore(
            clock=context.clock, threads=context.threads, storage=context.storage, is_member=self._members.include
        )
        self._parts = PeerParts(
            context=context,
            device=device,
            device_thread=self._device_thread,
            dht=dht,
            transport=transport,
            dispatcher=CallDispatcher(manifest_hash=context.resolved.hash, calls=snapshots.calls),
            directory=self._directory,
            snapshots=snapshots,
        )
        self._mover = Mover(parts=self._parts, lifecycle=self._lifecycle, counted=counted)
        self._replica: StageReplica | None = None  # the one that serves, or is to serve next
        self._moved_from = UNDECIDED
        # Where its stage-mates are left behind as well, it must not take their state and serve on. They leave, too; but
        # whoever has left them behind may die before they know, and then theirs is the only state.
        self._min_round, self._holds_out_until_s = 0, 0.0
        self._shunned: Timeline | None = None
        self._failure: UserError | None = None

    def _describe(self) -> PeerView:
        """This peer as it announces itself."""
        lifecycle, replica = self._lifecycle, self._replica
        about = PeerView(
            peer_id=self._me,
            stage=UNDECIDED,
            state=lifecycle.state,
            name=self._options.name or "",
            movable=self._mover.movable,
            note=lifecycle.note,
            memory_bytes=self._options.max_memory or 0,
            too_large=self._context.too_large,
            since_s=lifecycle.since_s,
            moved_from=self._moved_from,
            moving_to=self._mover.moving_to,
            is_reachable=self._dht.is_reachable,
            metrics_address=metrics_address(
                self._options.metrics_host, self._options.metrics_port, self._dht.addresses
            ),
        )
        return about if replica is None else replica.describe(about)

    async def run(self, stage: int, ended: anyio.Event) -> None:
        """Take part in the run, until it is over for this peer.

        Args:
            stage: the stage to serve first
            ended: set when the peer is told to end

        Raises:
            UserError: this machine has no memory for the stage, or cannot read its data
        """

        async def end() -> None:
            await ended.wait()
            self._lifecycle.end()

        await self._transport.serve(self._parts.dispatcher, self._directory.drop, self._members.known)
        try:
            async with anyio.create_task_group() as tasks:
                for watch in (end, self._dht.watch, self._watch_event_loop, self._leave_on_notice, self._look_for_end):
                    tasks.start_soon(watch)
                tasks.start_soon(self._device_thread.watch)
                tasks.start_soon(self._look_for_revocations)
                tasks.start_soon(self._keep_dialling)
                self._replica = await self._open(stage)
                while self._replica is not None and (next_stage := await self._stay(self._replica)) is not None:
                    await self._begin_stay(next_stage)
                if self._failure is not None:
                    raise self._failure
                tasks.cancel_scope.cancel()
        finally:
            self._device_thread.stop()

    async def _keep_dialling(self) -> None:
        """While others cannot dial this peer, dial them: they call it over the connections that it has made."""
        while True:
            await anyio.sleep(self._context.resolved.manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME)
            if self._dht.is_reachable is False:
                others = [peer.peer_id for peer in self._directory.view.peers if peer.peer_id != self._me]
                await self._dht.dial(others[:MOST_DIALLED])

    async def _look_for_revocations(self) -> None:
        """Learn what the run's operator revokes; raise UserError if this peer may not take part any more."""
        passes = self._dht.passes
        while not passes.is_open:
            await self._dht.learn_revocations(self._context.run_id)
            try:
                passes.check_own(self._me)
            except NotAdmitted as error:
                raise UserError(str(error)) from None
            await self._directory.drop_revoked()
            await anyio.sleep(self._context.resolved.manifest.limits.announcement_s)

    async def _open(self, stage: int) -> StageReplica | None:
        """Make a replica of a stage, which may read from the hub. Returns None if this peer is told to end meanwhile.

        Raises:
            UserError: this machine has no memory for the stage, or cannot read its data
        """
        replica = None
        with first_error():
            async with anyio.create_task_group() as tasks:

                async def give_up() -> None:
                    await self._lifecycle.ended.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(give_up)
                replica = await StageReplica.open(self._parts, stage, self._counted)
                tasks.cancel_scope.cancel()
        return replica

    async def _stay(self, replica: StageReplica) -> int | None:
        """Serve the stage of the present replica until this peer leaves it, and close the replica.

        Returns:
            the stage that this peer moves to; None if it leaves for good
        """
        replica.start_answering()
        self._metrics.stage.set(replica.stage)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work, replica)
            await self._lifecycle.stop.wait()
            await self._leave(replica)
            tasks.cancel_scope.cancel()
        await replica.close()
        self._moved_from = replica.stage
        return self._lifecycle.next_stage

    async def _begin_stay(self, stage: int) -> None:
        """Begin to serve the next stage, with the replica that has been prepared for it or with a new one.

        There is none if this peer is to end before it is made.
        """
        # The stage that was left has to be out of memory before the next one is made.
        self._replica = self._mover.take_prepared()
        await self._context.threads.run(free_device_memory, self._parts.device)
        began_s = self._context.clock.monotonic_s()
        while self._replica is None and not self._lifecycle.has_ended:
            try:
                self._replica = await self._open(stage)
            except HubFailed as error:  # this peer has left its stage, and would leave the run
                if self._context.clock.monotonic_s() - began_s >= HUB_PATIENCE_S:
                    raise
                log.warning("waiting stage=%d reason=%s", stage, error)
                with anyio.move_on_after(HUB_PAUSE_S):
                    await self._lifecycle.ended.wait()
        if self._replica is None:
            return
        if self._moved_from == stage:
            self._moved_from = UNDECIDED
        else:
            self._min_round, self._shunned = 0, None
        self._lifecycle.begin_stay()

    async def _work(self, replica: StageReplica) -> None:
        """Join the stage, then serve it until this task is cancelled or the stage-mates are lost."""
        start = None
        if not replica.has_weights:
            await self._directory.announce()
            # It may take many lifetimes of an announcement to download a state.
            async with self._directory.kept_fresh(range(self._manifest.stages.count)):
                start = await self._join(replica)
        # Announced first, looked up second: of two peers that begin at the same time, at least one sees the other.
        if self._lifecycle.stop.is_set():
            return
        self._lifecycle.enter(PeerState.SERVING)
        since = self._directory.serial + 1
        await self._directory.announce()
        await self._directory.refresh_surely(replica.stages_of_interest)
        async with self._directory.kept_fresh(replica.stages_of_interest):
            await self._serve(replica, start, since)

    async def _serve(self, replica: StageReplica, start: Start | None, since: int) -> None:
        """Serve the stage that has been joined, as `_work` says.

        Args:
            since: serial number of the announcement that this peer serves it
        """
        try:
            await replica.catch_up(self._shunned)
        except CallError as error:
            self._join_anew(replica, error)
            return
        step = replica.step
        log.info("serving stage=%d round=%d optimizer_step=%d", replica.stage, step.round_number, step.optimizer_step)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._directory.announce)  # the round that it has caught up to
            tasks.start_soon(self._mover.rescue, replica)
            if self._options.stage == "auto":
                tasks.start_soon(self._mover.obey, replica, since)
            await replica.serve(start, lambda error: self._join_anew(replica, error), self._cannot_read)

    async def _join(self, replica: StageReplica) -> Start | None:
        """Have a replica join. Returns where it began; None if stage-mates gave their state."""
        while True:
            await self._directory.refresh_surely(range(self._manifest.stages.count))
            try:
                holds_out = self._context.clock.monotonic_s() < self._holds_out_until_s
                return await (replica.join(self._min_round, self._shunned) if holds_out else replica.join())
            except CallError as error:
                note = f"waits to join stage {replica.stage}: {error}"
                if note != self._lifecycle.note:
                    level = logging.WARNING if replica.stage_mates() else logging.ERROR
                    log.log(level, "waiting stage=%d reason=%s", replica.stage, error)
                self._lifecycle.explain(note)
            await self._directory.announce()
            await anyio.sleep(JOIN_PAUSE_S)

    def _cannot_read(self, error: UserError) -> None:
        """Leave for good, as upon a signal: what this peer has computed is handed over before the error ends it."""
        log.error("leaving reason=%s", error)
        self._failure = error
        self._lifecycle.end()

    def _join_anew(self, replica: StageReplica, error: CallError) -> None:
        """Leave and join the same stage: its stage-mates went on without this peer and none gives it their state."""
        if self._lifecycle.stop.is_set():  # it leaves already, perhaps for another reason
            return
        log.error("joining_anew stage=%d reason=%s", replica.stage, error)
        replica.is_left_behind = True
        # On another timeline the run may be in an earlier round.
        has_left_timeline = isinstance(error, OtherTimeline)
        self._shunned = replica.step.timeline if has_left_timeline else None
        self._min_round = 0 if has_left_timeline else replica.step.round_number + 1
        patience_s = LEFT_BEHIND_PATIENCE * self._manifest.limits.announcement_s
        self._holds_out_until_s = self._context.clock.monotonic_s() + patience_s
        self._lifecycle.move(replica.stage)

    async def _leave(self, replica: StageReplica) -> None:
        """Finish microbatches in flight, hand the gradient to a stage-mate, and tell others that this peer is gone."""
        with anyio.move_on_after(self._options.grace_s / 2):
            await self._context.changed.wait_for(lambda: replica.leaves_timeline or not self._is_awaited(replica.stage))
        is_serving = self._lifecycle.state is PeerState.SERVING
        if is_serving and self._lifecycle.has_ended and not self._metrics.run_is_over and not replica.stage_mates():
            text = "leaves_alone stage=%d: no other peer serves it; the run waits for one, and goes back to a snapshot"
            log.warning(text, replica.stage)
        self._lifecycle.enter(PeerState.DRAINING)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._directory.announce)
            await replica.leave()
        if not replica.is_left_behind:
            self._parts.own_work[replica.stage].leave()
        self._lifecycle.enter(PeerState.LEFT)
        with anyio.move_on_after(GOODBYE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._directory.announce)
                await replica.say_goodbye()
        log.info("left stage=%d round=%d", replica.stage, replica.step.round_number)

    def _is_awaited(self, stage: int) -> bool:
        """Whether a peer is joining this stage and has nobody but this one to get its state from."""
        others = {peer.state for peer in self._directory.view.in_stage(stage) if peer.peer_id != self._me}
        is_alone = PeerState.SERVING not in others
        return self._lifecycle.state is PeerState.SERVING and is_alone and PeerState.JOINING in others

    async def _look_for_end(self) -> None:
        """Stop when the run's key says that the run is over."""

        def is_due() -> bool:
            return self._replica is not None and self._replica.parts.step_loop.finished

        log.info("run_ended reason=%s", await wait_for_end(self._dht, self._context.run_id, is_due))
        self._metrics.run_is_over = True
        self._lifecycle.end()

    async def _leave_on_notice(self) -> None:
        """Stop when the cloud says that it takes this instance away."""
        if self._options.preemption_notice != "none":
            notice = await wait_for_notice(self._options.preemption_notice, failed=self._metrics.notice_failures.inc)
            log.warning("leaving reason=spot notice: %s", notice)
            self._lifecycle.end()

    async def _watch_event_loop(self) -> None:
        """Measure how late timers fire: whatever blocks the event loop holds up all traffic."""
        while True:
            begin = self._context.clock.monotonic_s()
            await anyio.sleep(0.5)
            self._metrics.event_loop_lag_seconds.set(self._context.clock.monotonic_s() - begin - 0.5)

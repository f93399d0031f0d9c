"""A peer of a run: it opens and closes replicas of stages, moves from one to the next, and leaves."""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio
import torch

from swarm_peer.errors import CallError, HubFailed, NotAdmitted, UserError
from swarm_peer.policy.owner import Pause
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState, PeerView
from swarm_peer.protocol.epochs import Certified
from swarm_peer.runtime.assembly import PeerParts
from swarm_peer.runtime.base.base_sources import BaseSources
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.data.prefetch import HUB_PATIENCE_S, HUB_PAUSE_S
from swarm_peer.runtime.host.preemption import wait_for_notice
from swarm_peer.runtime.host.preparation import free_device_memory, in_words
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.lifecycle import Lifecycle, left_alone, refusing
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.network.agreement import Agreement, find_epochs, ticket_of
from swarm_peer.runtime.network.assignments import wait_for_end
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.electorate import Electorate
from swarm_peer.runtime.network.members import RunMembers
from swarm_peer.runtime.network.needed_ways import NeededWays
from swarm_peer.runtime.network.peer_addresses import metrics_address
from swarm_peer.runtime.network.probing import ProbeGiver
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.owner import Owner, PeerCondition
from swarm_peer.runtime.replica import Replica
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.records import MAX_RELAYS

log = logging.getLogger(__name__)

# Peers that one which nobody can dial keeps connections to.
MOST_DIALLED = 256
# A leaving peer has this long to tell others that it is gone.
GOODBYE_S = 5.0
# Others are asked for the run's epochs for so long, and after such a pause once more.
FIND_EPOCHS_S = 10.0
FIND_PAUSE_S = 1.0
# Between two looks whether those who vote can be heard.
VOTERS_PAUSE_S = 1.0


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
        owner: Owner | None = None,
        counted: CountedHook | None = None,
    ):
        """Make a peer without replicas.

        Args:
            device: that it computes on
            device_thread: uses the device; the peer stops it at its end
            owner: says when the peer may serve; None for always
            counted: told of each microbatch that the peer counts at stage 0; for tests
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._options = context.options
        self._dht = dht
        self._transport = transport
        self._metrics = context.metrics
        self._owner = owner
        self._counted = counted
        self._me = context.identity.peer_id
        self._lifecycle = Lifecycle(context.clock)
        self._device = device
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
        dht.dial_by(self._directory.addresses_of, self._directory.can_be_dialled, self._directory.has_left)
        self._members = RunMembers(context=context, directory=self._directory, dht=dht)
        probes = refusing(ProbeGiver(context.clock).calls, self._lifecycle)
        self._dispatcher = CallDispatcher(manifest_hash=context.resolved.hash, calls=probes)
        self._mover: Mover | None = None
        self._replica: Replica | None = None  # the one that serves, or is to serve next
        self._opens = UNDECIDED  # the stage of the replica that is being made, or will be after a pause
        self._moved_from = UNDECIDED
        self.is_resting, self._left_alone = False, ""
        self._failure: UserError | None = None
        self._waits: Complaint | None = None  # for those who vote

    def _describe(self) -> PeerView:
        """This peer as it announces itself."""
        lifecycle, replica, mover = self._lifecycle, self._replica, self._mover
        lent = self._context.lent_bytes_per_s
        about = PeerView(
            peer_id=self._me,
            stage=self._opens,
            state=lifecycle.state,
            name=self._options.name or "",
            movable=self._options.stage == "auto" if mover is None else mover.movable,
            note=lifecycle.note,
            memory_bytes=self._options.max_memory or 0,
            too_large=self._context.too_large,
            upload_bytes_per_s=lent[0],
            download_bytes_per_s=lent[1],
            since_s=lifecycle.since_s,
            moved_from=self._moved_from,
            moving_to=UNDECIDED if mover is None else mover.moving_to,
            is_reachable=self._dht.is_reachable,
            relays=self._dht.relays[:MAX_RELAYS],
            unreached=() if mover is None else mover.unreached,
            metrics_address=metrics_address(
                self._options.metrics_host, self._options.metrics_port, self._dht.addresses
            ),
        )
        if replica is not None:
            about = replica.describe(about)
        return about if self._waits is None else about.complaining(self._waits)

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

        await self._transport.serve(self._dispatcher, self._directory.drop, self._members.known)
        try:
            async with anyio.create_task_group() as tasks:
                for watch in (end, self._dht.watch, self._watch_event_loop, self._leave_on_notice, self._look_for_end):
                    tasks.start_soon(watch)
                tasks.start_soon(self._device_thread.watch)
                tasks.start_soon(self._look_for_revocations)
                tasks.start_soon(self._keep_dialling)
                if self._owner is not None:
                    tasks.start_soon(self._owner.run, self._condition, self._obey_owner)
                if (first := await self._find_epochs()) is not None:
                    parts = self._make_parts(first)
                    tasks.start_soon(parts.agreement.run)
                    tasks.start_soon(self._look_for_voters, parts.agreement)
                    await self._stay_in_stages(parts, stage)
                if self._failure is not None:
                    raise self._failure
                tasks.cancel_scope.cancel()
        finally:
            self._device_thread.stop()

    # --- the run's epochs

    async def _find_epochs(self) -> list[Certified] | None:
        """Ask for the run's epochs until somebody knows them; None if this peer is told to end meanwhile."""
        statements = Statements(self._context.run_id, self._context.identity)
        has_complained = False
        while not self._lifecycle.has_ended:
            await self._directory.announce()  # others answer those alone who take part
            known = sorted(await self._whom_to_ask() - {self._me})
            found = await find_epochs(self._transport, statements, self._context.resolved.hash, known, FIND_EPOCHS_S)
            if found:
                return found
            self._lifecycle.explain("waits for the coordinator, or any peer, to say who takes part in the run")
            if not has_complained:
                log.warning("waiting reason=%s asked=%d", self._lifecycle.note, len(known))
            has_complained = True
            with anyio.move_on_after(FIND_PAUSE_S):
                await self._lifecycle.ended.wait()
        return None

    async def _whom_to_ask(self) -> set[str]:
        asked = {self._context.run_id}  # the first coordinator's identity often is the run's key
        try:
            view = await self._directory.refresh(range(self._manifest.stages.count))
            asked |= {peer.peer_id for peer in view.peers}
            asked |= {term.coordinator for term in await self._dht.fetch_coordination(self._context.run_id)}
        except CallError as error:
            log.info("run_not_seen reason=%s", error)
        return asked

    def _make_parts(self, first: list[Certified]) -> PeerParts:
        context = self._context
        # Two lives may begin in the same millisecond, and somebody may set the clock back.
        life = max(int(context.clock.unix_s() * 1000), self._directory.serial + 1)
        agreement = Agreement(
            context=context,
            transport=self._transport,
            life=life,
            first=first,
            ticket=ticket_of(self._dht.passes, self._me),
            acquaintances=lambda: [peer.peer_id for peer in self._directory.view.peers if peer.peer_id != self._me],
        )
        snapshots = NamedSnapshots(
            clock=context.clock,
            threads=context.threads,
            storage=context.storage,
            is_member=self._members.include,
            restart=lambda: agreement.core.epoch.restart,
        )
        base = BaseSources(
            context=context,
            transport=self._transport,
            members=self._whom_to_ask,
            explain=self._lifecycle.explain,
        )
        large = refusing(snapshots.calls | base.giver.calls, self._lifecycle)
        self._dispatcher.add(None, agreement.calls | large)
        parts = PeerParts(
            context=context,
            device=self._device,
            device_thread=self._device_thread,
            dht=self._dht,
            transport=self._transport,
            dispatcher=self._dispatcher,
            directory=self._directory,
            snapshots=snapshots,
            agreement=agreement,
            base=base,
            ways=NeededWays(context=context, dht=self._dht, directory=self._directory, agreement=agreement),
        )
        self._mover = Mover(parts=parts, lifecycle=self._lifecycle, counted=self._counted)
        return parts

    async def _look_for_voters(self, agreement: Agreement) -> None:
        """Say for whom the run waits, while most of those who vote cannot be heard."""
        electorate, clock = Electorate(self._me), self._context.clock
        while True:
            await anyio.sleep(VOTERS_PAUSE_S)
            membership = agreement.core.membership
            view, lacks = self._directory.view, membership.lacks_voters
            words = electorate.look(membership.epoch, view, clock.monotonic_s(), lacks_voters=lacks)
            before, self._waits = self._waits, None
            if words and electorate.silent_since_s is not None:
                self._waits = Complaint(Trouble.NO_VOTERS, electorate.silent_since_s, f"the run waits: {words}")
            if self._waits != before:
                log.warning("waiting reason=%s", words) if words else log.info("waited voters=heard")
                await self._directory.announce()

    # --- stays in stages

    async def _stay_in_stages(self, parts: PeerParts, stage: int) -> None:
        assert self._mover is not None
        patience_s = 0.0  # nobody depends on this peer yet
        while not self._lifecycle.has_ended:
            if self._lifecycle.is_paused:
                await self._rest(self._mover, stage)
            await self._begin_stay(parts, self._mover, stage, patience_s)
            if self._replica is not None:
                stage, patience_s = await self._stay(self._replica, self._mover), HUB_PATIENCE_S

    async def _rest(self, mover: Mover, stage: int) -> None:
        """Hold nothing of any stage while the owner has this peer paused; it still takes part in agreement.

        Args:
            stage: that it has left, and comes back to
        """
        self._replica, self._opens, self._moved_from = None, stage, UNDECIDED
        mover.take_prepared()  # for a move that came to nothing
        self._lifecycle.enter(PeerState.PAUSED)
        self._lifecycle.explain(self._lifecycle.pause_note)
        await self._context.threads.run(free_device_memory, self._device)
        log.warning("paused stage=%d reason=%s", stage, self._lifecycle.note)
        self.is_resting = True
        while not self._lifecycle.resumed.is_set():
            await self._directory.announce()
            with suppress(CallError):  # seldom: it only has to know whom agreement may hear of
                await self._directory.refresh(range(self._manifest.stages.count))
            with anyio.move_on_after(self._manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME):
                await self._lifecycle.resumed.wait()
        self.is_resting = False
        if self._lifecycle.has_ended:
            await self._say_goodbye()
            return
        log.warning("resumed stage=%d", stage)

    def _condition(self) -> PeerCondition:
        """This peer as its owner's commands show it."""
        replica = self._replica
        return PeerCondition(
            stage=self._opens if replica is None else replica.stage,
            state=self._lifecycle.state.value,
            note=self._lifecycle.note,
            is_at_rest=self.is_resting,
            left_alone=self._left_alone,
            leaving_bytes=0 if replica is None else replica.leaving_bytes,
        )

    def _obey_owner(self, pause: Pause | None) -> None:
        self._lifecycle.resume() if pause is None else self._lifecycle.pause(pause.words)

    async def _keep_dialling(self) -> None:
        """While others cannot dial this peer, dial them: they call it over the connections that it has made."""
        while True:
            await anyio.sleep(self._manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME)
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
            await anyio.sleep(self._manifest.limits.announcement_s)

    async def _open(self, parts: PeerParts, stage: int) -> Replica | None:
        """Make a replica of a stage. Returns None if this peer is told to end, or is paused, meanwhile.

        That may take hours, where weights are downloaded: newcomers are to know of it, and donors to know this peer.
        One that moves has them before it leaves its stage.

        Raises:
            UserError: this machine has no memory for the stage, or cannot read its data
        """
        replica = None
        with first_error():
            async with anyio.create_task_group() as tasks:

                async def give_up() -> None:
                    await self._lifecycle.halted.wait()
                    tasks.cancel_scope.cancel()

                async def announce() -> None:
                    self._opens = stage
                    await self._directory.announce()
                    async with self._directory.kept_fresh([stage]):
                        await anyio.sleep_forever()

                tasks.start_soon(give_up)
                if self._lifecycle.state is PeerState.JOINING:
                    tasks.start_soon(announce)
                replica = await Replica.open(parts, stage, self._counted)
                tasks.cancel_scope.cancel()
        self._opens = UNDECIDED
        return replica

    async def _stay(self, replica: Replica, mover: Mover) -> int:
        """Serve the stage of the present replica until this peer leaves it, and close the replica.

        Returns:
            the stage that this peer moves to, or comes back to after a pause
        """
        replica.start_answering()
        self._left_alone = ""
        self._metrics.stage.set(replica.stage)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replica.work, self._lifecycle.explain, self._cannot_read)
            async with anyio.create_task_group() as followers:
                followers.start_soon(self._follow_place, replica, mover)
                followers.start_soon(mover.keep_ways, replica)
                await self._lifecycle.stop.wait()
                followers.cancel_scope.cancel()
            await self._leave(replica)
            tasks.cancel_scope.cancel()
        await replica.close()
        self._moved_from = replica.stage
        return replica.stage if self._lifecycle.next_stage is None else self._lifecycle.next_stage

    async def _begin_stay(self, parts: PeerParts, mover: Mover, stage: int, patience_s: float = HUB_PATIENCE_S) -> None:
        """Begin to serve the next stage, with the replica that has been prepared for it or with a new one.

        There is none if this peer is to end, or is paused, before it is made.

        Args:
            patience_s: for a hub that fails
        """
        # The stage that was left has to be out of memory before the next one is made.
        self._replica = mover.take_prepared()
        await self._context.threads.run(free_device_memory, self._device)
        began_s = self._context.clock.monotonic_s()
        while self._replica is None and not self._lifecycle.halted.is_set():
            try:
                self._replica = await self._open(parts, stage)
            except HubFailed as error:  # this peer has left its stage, and would leave the run
                if self._context.clock.monotonic_s() - began_s >= patience_s:
                    raise
                log.warning("waiting stage=%d reason=%s", stage, error)
                with anyio.move_on_after(HUB_PAUSE_S):
                    await self._lifecycle.halted.wait()
        if self._replica is None:
            return
        if self._moved_from == stage:
            self._moved_from = UNDECIDED
        self._lifecycle.begin_stay()

    async def _follow_place(self, replica: Replica, mover: Mover) -> None:
        """Announce that the replica serves whenever it has a place and weights, and look for moves meanwhile."""
        while True:
            await self._directory.announce()
            async with self._directory.kept_fresh(range(self._manifest.stages.count)):
                await self._context.changed.wait_for(lambda: replica.is_serving)
            self._lifecycle.enter(PeerState.SERVING)
            since = self._directory.serial + 1
            await self._directory.announce()
            step = replica.step
            text = "serving stage=%d round=%d optimizer_step=%d"
            log.info(text, replica.stage, step.round_number, step.optimizer_step)
            async with self._directory.kept_fresh(replica.stages_of_interest), anyio.create_task_group() as tasks:
                tasks.start_soon(mover.rescue, replica)
                if self._options.stage == "auto":
                    tasks.start_soon(mover.obey, replica, since)
                await self._context.changed.wait_for(lambda: not replica.has_place)
                tasks.cancel_scope.cancel()
            self._lifecycle.enter(PeerState.JOINING)

    def _cannot_read(self, error: UserError) -> None:
        """Leave for good, as upon a signal: what this peer has computed is handed over before the error ends it."""
        log.error("leaving reason=%s", error)
        self._failure = error
        self._lifecycle.end()

    async def _leave(self, replica: Replica) -> None:
        """Finish microbatches in flight, hand the gradient to a stage-mate, and tell others that this peer is gone."""
        with anyio.move_on_after(self._options.grace_s / 2):
            # A peer that was joining may serve by now, and take this one's work.
            async with self._directory.kept_fresh([replica.stage]):
                await self._context.changed.wait_for(lambda: not self._is_awaited(replica.stage))
        is_alone = self._lifecycle.state is PeerState.SERVING and not replica.stage_mates()
        if is_alone and self._lifecycle.halted.is_set() and not self._metrics.run_is_over:
            self._left_alone = left_alone(
                replica.stage, replica.step.optimizer_step, self._manifest.recovery.snapshot_every
            )
            log.warning("leaves_alone stage=%d: %s", replica.stage, self._left_alone)
        self._lifecycle.enter(PeerState.DRAINING)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._directory.announce)
            await replica.leave(lambda: self._lifecycle.next_stage)
        await self._say_goodbye()
        log.info("left stage=%d round=%d", replica.stage, replica.step.round_number)

    async def _say_goodbye(self) -> None:
        self._lifecycle.enter(PeerState.LEFT)
        with anyio.move_on_after(GOODBYE_S):
            await self._directory.announce()

    def _is_awaited(self, stage: int) -> bool:
        """Whether a peer is joining this stage and has nobody but this one to get its state from."""
        others = {peer.state for peer in self._directory.view.in_stage(stage) if peer.peer_id != self._me}
        is_alone = PeerState.SERVING not in others
        return self._lifecycle.state is PeerState.SERVING and is_alone and PeerState.JOINING in others

    async def _look_for_end(self) -> None:
        """Stop when the run's key says that the run is over."""

        def is_due() -> bool:
            return self._replica is not None and self._replica.is_finished

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

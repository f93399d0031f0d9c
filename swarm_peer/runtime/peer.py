"""A peer in one stage of a run: joins it, serves it, and leaves it for another one or for good."""

from __future__ import annotations

import logging

import anyio
import numpy as np
import numpy.typing as npt

from swarm_peer.errors import CallError, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState, PeerView
from swarm_peer.runtime.assembly import Assembly, PeerParts
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.allowed_files import check_data_files
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.host.preemption import wait_for_notice
from swarm_peer.runtime.host.preparation import microbatch_capacity
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.network.assignments import wait_for_assignment, wait_for_end
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.state.recovery import Start
from swarm_peer.runtime.state.store import SnapshotStore
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.messages import STATE_CHUNK_BYTES
from swarm_peer.wire.records import ProgressRecord, TimelineRecord, progress_key, timeline_key

log = logging.getLogger(__name__)

# Pause between looks for new progress to publish.
PUBLISH_PROGRESS_S = 1.0
# Pause between tries to join a stage.
JOIN_PAUSE_S = 1.0
# A leaving peer has this long to write its last replies. Calls of stage-mates that wait for a round are not answered.
LAST_REPLIES_S = 3.0
# Room in a frame for the index of a state, and for headers.
FRAME_SLACK_BYTES = 16 * 2**20


class Peer:
    """One life of this peer, in one stage. When it moves, another object takes over, with its id and connections."""

    def __init__(
        self,
        *,
        context: PeerContext,
        trainer: StageTrainer,
        dht: SwarmDHT,
        transport: P2PTransport,
        snapshots: SnapshotStore,
        held_out: npt.NDArray[np.int32] | None,
        moved_from: int = UNDECIDED,
        last_serial: int = 0,
        counted: CountedHook | None = None,
    ):
        """Make a peer that has not joined yet.

        Args:
            trainer: of the stage, without weights yet
            snapshots: the snapshots that this peer keeps, from stages that it served before, too
            held_out: samples (N, T+1) that a stage-0 peer validates with; None at other stages
            moved_from: the stage that it served before, perhaps this same one; UNDECIDED if it is new
            last_serial: that of its life before this one, in this process; 0 if there was none
            counted: told of each microbatch that a stage-0 peer counts; for tests
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._hash = context.resolved.hash
        self._run_id = context.run_id
        self._spec = trainer.spec
        self._options = context.options
        self._dht = dht
        self._metrics = context.metrics
        self._movable = context.options.stage == "auto"
        self._moved_from = UNDECIDED if moved_from == trainer.spec.index else moved_from
        self._me = context.identity.peer_id
        self._lifecycle = Lifecycle(context.clock, last_serial=last_serial)
        self._trainer = trainer
        self._device_thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=context.metrics)
        self._directory = Directory(
            manifest=self._manifest,
            dht=dht,
            clock=context.clock,
            metrics=context.metrics,
            changed=context.changed,
            describe_self=self._describe,
            device=str(trainer.device),
            serial=self._lifecycle.incarnation,
        )
        self._transport = transport
        self._parts: PeerParts = Assembly(
            context=context,
            trainer=trainer,
            device_thread=self._device_thread,
            directory=self._directory,
            transport=transport,
            snapshots=snapshots,
            first_timeline=self._first_timeline,
            held_out=held_out,
            incarnation=self._lifecycle.incarnation,
            counted=counted,
        ).assemble()
        context.metrics.stage.set(trainer.spec.index)

    @property
    def last_serial(self) -> int:
        """Serial number of this peer's last announcement."""
        return self._directory.serial

    def _describe(self) -> PeerView:
        """This peer as it announces itself."""
        lifecycle, parts = self._lifecycle, self._parts
        admission, step = parts.replica.admission, parts.replica.rounds.step
        return PeerView(
            peer_id=self._me,
            stage=self._spec.index,
            state=lifecycle.state,
            round_number=step.round_number,
            samples_per_s=self._device_thread.samples_per_s,
            queue=admission.admitted + admission.held,
            optimizer_step=step.optimizer_step,
            movable=self._movable,
            note=lifecycle.note,
            memory_bytes=self._options.max_memory or 0,
            bandwidth_bytes_per_s=parts.step_loop.download_bytes_per_s,
            since_s=lifecycle.since_s,
            moved_from=self._moved_from,
            incarnation=lifecycle.incarnation,
        )

    async def run(self, ended: anyio.Event) -> int | None:
        """Take part in the run, until it is over for this peer or this peer leaves the stage for another one.

        Args:
            ended: set when the peer is told to end

        Returns:
            the stage that it moves to; None if it leaves for good
        """
        lifecycle = self._lifecycle

        async def end() -> None:
            await ended.wait()
            lifecycle.end()

        await self._transport.serve(self._parts.dispatcher, self._directory.drop)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end)
                tasks.start_soon(self._dht.watch)
                tasks.start_soon(self._watch_event_loop)
                tasks.start_soon(self._leave_on_notice)
                tasks.start_soon(self._look_for_end)
                tasks.start_soon(self._work)
                await lifecycle.stop.wait()
                await self._leave()
                tasks.cancel_scope.cancel()
        finally:
            self._transport.pause()
            self._device_thread.stop()
        return lifecycle.next_stage

    async def _work(self) -> None:
        """Join the stage, then serve it until this task is cancelled or the stage-mates are lost."""
        await self._directory.announce()
        start = await self._begin()
        # Announced first, looked up second: of two peers that begin at the same time, at least one sees the other.
        self._lifecycle.enter(PeerState.SERVING)
        await self._directory.announce()
        view = await self._directory.refresh_surely(self._stages_of_interest())
        mates = [peer.peer_id for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
        try:
            await self._parts.step_loop.catch_up(mates)
        except CallError as error:
            self._join_anew(error)
            return
        log.info(
            "serving stage=%d round=%d optimizer_step=%d",
            self._spec.index,
            self._parts.step_loop.step.round_number,
            self._parts.step_loop.step.optimizer_step,
        )
        async with anyio.create_task_group() as tasks:
            if start is not None and start.rewound:
                tasks.start_soon(self._parts.recovery.have_all_go_back, start.timeline)
            tasks.start_soon(self._directory.run_announcing)
            tasks.start_soon(self._directory.run_polling, self._stages_of_interest())
            tasks.start_soon(self._parts.snapshot_keeper.run)
            tasks.start_soon(self._move_when_needed)
            if self._options.stage == "auto":
                tasks.start_soon(self._obey)
            if self._parts.launcher is not None:
                tasks.start_soon(self._parts.launcher.run)
                tasks.start_soon(self._publish_progress)
            try:
                await self._parts.step_loop.run()
            except CallError as error:
                self._join_anew(error)

    async def _begin(self) -> Start | None:
        """Get this stage's state: from stage-mates, or where there are none, from where recovery says to begin.

        Returns:
            where this peer began; None if stage-mates gave their state
        """
        while True:
            view = await self._directory.refresh_surely(range(self._manifest.stages.count))
            donors = [peer.peer_id for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
            try:
                if donors:
                    await self._parts.step_loop.join(donors)
                    return None
                start = await self._parts.recovery.find_start()
                await self._parts.step_loop.begin(start.timeline, start.state)
                self._log_beginning(start)
                return start
            except CallError as error:
                note = f"waits to join stage {self._spec.index}: {error}"
                if note != self._lifecycle.note:
                    level = logging.WARNING if donors else logging.ERROR
                    log.log(level, "waiting stage=%d reason=%s", self._spec.index, error)
                self._lifecycle.explain(note)
            await self._directory.announce()
            await anyio.sleep(JOIN_PAUSE_S)

    def _log_beginning(self, start: Start) -> None:
        first = start.timeline
        log.info(
            "beginning stage=%d round=%d optimizer_step=%d rewound=%s reason=%s",
            self._spec.index,
            first.first_round,
            first.first_optimizer_step,
            start.rewound,
            start.reason,
        )

    async def _move_when_needed(self) -> None:
        """Move to a stage that has lost all its peers, if this peer is the one chosen to take it over."""
        while not await self._leave_for(await self._parts.recovery.watch_stages()):
            pass

    def _join_anew(self, error: CallError) -> None:
        """Leave and join the same stage: its stage-mates went on without this peer and none gives it their state."""
        log.error("joining_anew stage=%d reason=%s", self._spec.index, error)
        self._move_to(self._spec.index)

    async def _leave_for(self, stage: int) -> bool:
        """Move to another stage, unless this peer is the last of its own, or cannot serve the other one.

        Returns:
            whether it moves
        """
        try:
            await self._context.threads.run(self._check_move, stage)
        except UserError as error:
            log.warning("move_refused stage=%d reason=%s: this peer stays where it is from now on", stage, error)
            self._movable = False
            self._lifecycle.explain(f"cannot serve stage {stage}: {error}")
            await self._directory.announce()
            return False
        self._lifecycle.enter(PeerState.DRAINING)
        # Announced first, looked up second: of two peers that leave at once, at least one sees that the other does.
        await self._directory.announce()
        view = await self._directory.refresh_surely([self._spec.index])
        others = [peer for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
        if others:
            self._move_to(stage)
        elif not self._lifecycle.stop.is_set():
            # Not if it was told to end meanwhile: then it must not announce that it serves.
            log.warning("stays stage=%d reason=nobody else serves it any more", self._spec.index)
            self._lifecycle.enter(PeerState.SERVING)
            await self._directory.announce()
        return bool(others)

    def _check_move(self, stage: int) -> None:
        """Raise UserError if this machine may not read the stage's data, or has no memory for it."""
        resolved = self._context.resolved
        microbatch_capacity(resolved, resolved.specs[stage], self._trainer.device, self._options.max_memory)
        if stage == 0:
            check_data_files(self._manifest, self._options.data_dir)

    def _move_to(self, stage: int) -> None:
        """Leave, and go on in another stage."""
        if self._lifecycle.move(stage):
            log.warning("moving from=%d to=%d", self._spec.index, stage)

    async def _obey(self) -> None:
        """Move when the run's coordinator says so."""
        while self._movable:
            assignment = await wait_for_assignment(
                me=self._me,
                stage=self._spec.index,
                fetch=lambda: self._dht.fetch_coordination(self._run_id),
                view=lambda: self._directory.view,
                serial=lambda: self._directory.serial,
            )
            log.warning("assigned stage=%d reason=%s", assignment.to_stage, assignment.reason)
            if await self._leave_for(assignment.to_stage):
                return

    async def _first_timeline(self) -> Timeline:
        """The timeline that the run began with, by word of the run key.

        Raises:
            CallError: the DHT does not answer, or no coordinator has published it yet
        """
        records = await self._dht.fetch(timeline_key(self._run_id), TimelineRecord, self._run_id)
        if self._run_id not in records:
            raise CallError("the run's coordinator has not said where it begins")
        return records[self._run_id].timeline()

    def _stages_of_interest(self) -> list[int]:
        """The stages whose peers this one must know: its own, the next, and stage 0, which counts; stage 0: all."""
        index, count = self._spec.index, self._manifest.stages.count
        return list(range(count)) if index == 0 else sorted({0, index, min(index + 1, count - 1)})

    async def _publish_progress(self) -> None:
        """Store progress in the DHT: at once if there is any, and else often enough that the record does not expire."""
        assert self._parts.launcher is not None
        lifetime_s = self._manifest.limits.announcement_s
        stored: ProgressRecord | None = None
        stored_s = 0.0
        while True:
            record = ProgressRecord(
                # Without the ranges of samples, which are long and travel with calls.
                current=self._parts.launcher.current.model_copy(update={"ranges": ()}),
                finished=tuple(self._parts.step_loop.reports),
                validations=tuple(self._parts.launcher.validations),
            )
            now_s = self._context.clock.monotonic_s()
            if record != stored or now_s - stored_s > lifetime_s / ANNOUNCEMENTS_PER_LIFETIME:
                key, run = progress_key(self._hash), self._hash
                stored = record if await self._dht.store(key, record, run, lifetime_s) else None
                stored_s = now_s
            await anyio.sleep(PUBLISH_PROGRESS_S)

    async def _look_for_end(self) -> None:
        """Stop when the run's key says that the run is over."""
        log.info(
            "run_ended reason=%s", await wait_for_end(self._dht, self._run_id, lambda: self._parts.step_loop.finished)
        )
        self._lifecycle.end()

    async def _leave(self) -> None:
        """Finish microbatches in flight, hand the gradient to a stage-mate, and tell others that this peer is gone."""
        with anyio.move_on_after(self._options.grace_s / 2):
            await self._context.changed.wait_for(lambda: not self._is_awaited())
        self._lifecycle.enter(PeerState.DRAINING)
        if self._parts.launcher is not None:
            self._parts.launcher.stop()
        if self._parts.next_stage is not None:
            self._parts.next_stage.stop_waiting()
        self._parts.replica.admission.leave()
        with anyio.move_on_after(self._options.grace_s) as grace:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._directory.announce)
                await self._parts.replica.admission.drained()
                # If a reply were cut off, its caller would have the microbatch computed again and counted twice.
                with anyio.move_on_after(LAST_REPLIES_S):
                    await self._parts.swarm.transport.answered()
                await self._parts.step_loop.leave()
        if grace.cancelled_caught and (samples := self._trainer.num_samples):
            self._metrics.lost_samples.inc(samples)
            log.error("samples_lost samples=%d reason=not handed over within %.0f s", samples, self._options.grace_s)
        callers = {0, max(self._spec.index - 1, 0), self._spec.index}
        peers = [peer.peer_id for peer in self._directory.view.peers if peer.stage in callers]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._directory.leave)
            await self._parts.swarm.gossip.say_goodbye(peers, self._directory.serial)
        log.info("left stage=%d round=%d", self._spec.index, self._parts.step_loop.step.round_number)

    def _is_awaited(self) -> bool:
        """Whether a peer is joining this stage and has nobody but this one to get its state from."""
        stage, view = self._spec.index, self._directory.view
        others = {peer.state for peer in view.in_stage(stage) if peer.peer_id != self._me}
        is_alone = PeerState.SERVING not in others
        return self._lifecycle.state is PeerState.SERVING and is_alone and PeerState.JOINING in others

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


def max_payload_bytes(resolved: ResolvedManifest) -> int:
    """Most bytes of tensors in a frame that any stage of a run receives."""
    manifest = resolved.manifest
    shape = (manifest.training.microbatch_size, manifest.data.sequence_length, resolved.hidden_size)
    return max(encoded_bytes(shape, "none"), STATE_CHUNK_BYTES) + FRAME_SLACK_BYTES

"""One stage in this peer: a replica that opens, joins its stage-mates, serves, leaves and closes.

Several replicas may be open in one peer at once. `Peer` decides when one opens and closes; nobody else does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio

from swarm_peer.config import PeerOptions
from swarm_peer.errors import CallError, OtherTimeline, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.trouble import Complaint, worst
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, PeerState, PeerView
from swarm_peer.runtime.assembly import Assembly, PeerParts, StageData
from swarm_peer.runtime.data.allowed_files import check_data_files
from swarm_peer.runtime.data.launcher import CountedHook, MicrobatchLauncher
from swarm_peer.runtime.data.slices import SliceReader, validation_samples
from swarm_peer.runtime.data.tokenizers import load_tokenizer
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.state.recovery import Start
from swarm_peer.wire.records import ProgressRecord, progress_key

log = logging.getLogger(__name__)

# Pause between looks for new progress to publish.
PUBLISH_PROGRESS_S = 1.0
# For this share of `--grace-s` a leaving replica waits for the microbatches inside. A slow link, or a later peer
# that has just died, may hold one for longer, and the gradient is still to be handed over.
DRAINING_SHARE = 0.5
# A leaving replica has this long to write its last replies. Calls of stage-mates that wait for a round are not
# answered.
LAST_REPLIES_S = 3.0
LAST_REPLIES_SHARE = 0.15  # of `--grace-s`, if that is shorter
# For a job of the device thread that is under way as the time to hand over is up.
LAST_JOB_S = 5.0


class StageReplica:
    """Everything of one stage in one peer. Belongs to the event loop's thread.

    Attributes:
        stage: index in the pipeline, from 0
        incarnation: which life of the peer this is (see policy/view.py: Life)
        parts: what the replica is made of
        leaves_timeline: whether the run goes on without it on another timeline: stage-mates end no round with it
        is_left_behind: whether it leaves because stage-mates went on without it, be it on the same timeline
    """

    def __init__(self, assembly: Assembly):
        self.stage = assembly.trainer.spec.index
        self.incarnation = assembly.incarnation
        self.parts = assembly.assemble()
        self._peer = assembly.peer
        self._trainer = assembly.trainer
        self._manifest = self._peer.context.resolved.manifest
        self.leaves_timeline = False
        self.is_left_behind = False

    @classmethod
    async def open(cls, peer: PeerParts, stage: int, counted: CountedHook | None = None) -> StageReplica:
        """Make a replica without weights, which answers no calls yet.

        Args:
            counted: told of each microbatch that a stage-0 replica counts; for tests

        Raises:
            UserError: this machine has no memory for the stage, or cannot read its data
        """
        context = peer.context
        resolved, options = context.resolved, context.options
        spec = resolved.specs[stage]
        data = None
        if spec.is_first:  # it may wait for the hub
            data = await context.threads.run(_read_data, resolved, options, abandon_on_cancel=True)
        make = partial(StageTrainer, resolved, spec, device=peer.device, cache_dir=options.cache_dir, blank=True)
        trainer = await context.threads.run(make)
        # Two lives may begin in the same millisecond, and somebody may set the clock back.
        incarnation = max(int(context.clock.unix_s() * 1000), peer.directory.serial + 1)
        return cls(Assembly(peer=peer, trainer=trainer, incarnation=incarnation, data=data, counted=counted))

    def start_answering(self) -> None:
        """Answer calls from now on.

        A replica that is only being prepared must not: stage-mates that remember this peer from an earlier stay would
        wait for it at their barrier, while it waits until the peer has left the stage that it serves.
        """
        self._peer.snapshots.sources[self.stage] = self.parts.state_server
        self._peer.dispatcher.add(self.stage, self.parts.calls)

    async def close(self) -> None:
        """Answer no more calls, not even those that are under way."""
        del self._peer.snapshots.sources[self.stage]
        await self._peer.dispatcher.remove(self.stage)

    @property
    def step(self) -> StepState:
        """Where the replica stands."""
        return self.parts.core.rounds.step

    @property
    def has_weights(self) -> bool:
        """Whether it has joined."""
        return self.step.phase is not Phase.EMPTY

    def describe(self, peer: PeerView) -> PeerView:
        """Complete what this peer announces of itself by what it says of this replica."""
        admission, step = self.parts.core.admission, self.step
        if peer.state is PeerState.SERVING and (complaint := self._complaint()) is not None:
            words = complaint.words
            peer = replace(peer, note=words, trouble=complaint.trouble, trouble_since_s=complaint.since_s)
        return replace(
            peer,
            stage=self.stage,
            incarnation=self.incarnation,
            round_number=step.round_number,
            optimizer_step=step.optimizer_step,
            samples_per_s=self.parts.core.speed.samples_per_s,
            queue=admission.admitted + admission.held,
            bandwidth_bytes_per_s=self.parts.step_loop.download_bytes_per_s,
            time_shares=self.parts.core.time.shares(),
        )

    def _complaint(self) -> Complaint | None:
        """The worst of what keeps this replica from its work."""
        parts = self.parts
        complaints = [parts.step_loop.complaint(), parts.snapshot_keeper.complaint()]
        return worst([*complaints, *([] if parts.launcher is None else [parts.launcher.complaint()])])

    @property
    def stages_of_interest(self) -> Sequence[int]:
        """The stages whose peers it must know: its own, those around it, and stage 0, which counts; stage 0: all."""
        count = self._manifest.stages.count
        around = {self.stage - 1, self.stage, min(self.stage + 1, count - 1)}
        return range(count) if self.stage == 0 else sorted({0} | around)

    def stage_mates(self) -> list[str]:
        """Ids of the other peers in view that serve this stage."""
        return self.parts.swarm.stage_mates(self.stage)

    async def join(self, min_round: int = 0, shunned: Timeline | None = None) -> Start | None:
        """Get the stage's state: from stage-mates, or where there are none, from where recovery says to begin.

        Args:
            min_round: of stage-mates, take no state of an earlier round
            shunned: nor one of stage-mates that are on this timeline, which this peer has left

        Returns:
            where the replica began; None if stage-mates gave their state

        Raises:
            CallError: nobody gave it, or the replica has to wait; it may try again
        """
        donors = self.stage_mates()
        if donors:
            donors, _ = await self.parts.timeline_watch.choose_donors(donors, shunned)
            if not donors:
                raise CallError("no stage-mate says that it is on another timeline than this peer has left")
            await self.parts.step_loop.join(donors, min_round)
            return None
        start = await self.parts.recovery.find_start()
        await self.parts.step_loop.begin(start.timeline, start.fetch)
        return start

    async def catch_up(self, shunned: Timeline | None = None) -> None:
        """Catch up with the stage-mates that are on the run's timeline, and serve; see StepLoop.

        Args:
            shunned: a timeline that this peer has left
        """
        mates = self.stage_mates()
        choose = partial(self.parts.timeline_watch.choose_donors, mates, shunned)
        await self.parts.step_loop.catch_up(mates, choose)

    async def serve(
        self, start: Start | None, left_behind: Callable[[CallError], None], unreadable: Callable[[UserError], None]
    ) -> None:
        """Go from round to round, until cancelled.

        Args:
            start: where the replica began
            left_behind: called if stage-mates went on without this peer, and none of them gives its state: the replica
                has to leave then
            unreadable: called if the training data cannot be read; the same holds
        """
        parts = self.parts
        async with anyio.create_task_group() as tasks:
            if start is not None and start.rewound:
                # Another peer may have taken the stage over as well, and this one may follow it, now or later.
                is_there = partial(self._is_on, start.timeline)
                tasks.start_soon(parts.recovery.have_all_go_back, start.timeline, is_there)
            tasks.start_soon(parts.snapshot_keeper.run)
            tasks.start_soon(parts.state_server.run)
            tasks.start_soon(self._follow_run, left_behind)
            if parts.launcher is not None:
                tasks.start_soon(self._launch, parts.launcher, unreadable)
                tasks.start_soon(self._publish_progress)
                tasks.start_soon(self._begin_anew_with_run)
            try:
                await parts.step_loop.run()
            except CallError as error:
                left_behind(error)

    async def _launch(self, launcher: MicrobatchLauncher, unreadable: Callable[[UserError], None]) -> None:
        await launcher.run()
        if launcher.failure is not None:
            unreadable(launcher.failure)

    async def _begin_anew_with_run(self) -> None:
        """Go back where the run's key has the run begin anew from a checkpoint, and have the other stages follow.

        Those do what they do for a stage that was lost and taken over: they go back once all of stage 0 have.
        """
        while True:
            timeline = await self.parts.step_loop.rewinds.wait_for_beginning()
            log.warning("run_begins_anew optimizer_step=%d reason=its key says so", timeline.first_optimizer_step)
            await self._peer.context.changed.wait_for(partial(self._has_come_to, timeline))
            await self.parts.recovery.have_all_go_back(timeline, partial(self._is_on, timeline))

    def _has_come_to(self, timeline: Timeline) -> bool:
        return self.step.timeline >= timeline

    def _is_on(self, timeline: Timeline) -> bool:
        return self.step.timeline == timeline

    async def _follow_run(self, left_behind: Callable[[CallError], None]) -> None:
        """Go back with the run if nobody has told this replica to; or leave, if the whole stage is left behind."""
        core = self.parts.core
        try:
            while True:
                timeline = await self.parts.timeline_watch.wait_until_left(core.rounds, core.admission)
                self.parts.step_loop.rewinds.go_back(timeline)
        except CallError as error:
            self.leaves_timeline = isinstance(error, OtherTimeline)
            left_behind(error)

    async def leave(self) -> None:
        """Finish the microbatches in flight, and hand the accumulated gradient to a stage-mate.

        Microbatches that are not done within DRAINING_SHARE of `--grace-s` fail, and others compute them. A gradient
        that no stage-mate has taken within `--grace-s` is lost, with an error in the log.
        """
        parts, grace_s = self.parts, self._peer.context.options.grace_s
        if parts.launcher is not None:
            parts.launcher.stop()
        parts.core.executor.stop_waiting()
        parts.core.admission.leave()
        with anyio.move_on_after(grace_s) as grace:
            with anyio.move_on_after(DRAINING_SHARE * grace_s) as draining:
                await parts.core.admission.drained()
            if draining.cancelled_caught:
                await parts.core.device_thread.run(Priority.STEP, parts.core.executor.give_up)
                parts.core.admission.give_up_inside()
            # If a reply were cut off, its caller would have the microbatch computed again and counted twice.
            with anyio.move_on_after(min(LAST_REPLIES_S, LAST_REPLIES_SHARE * grace_s)):
                await self._peer.transport.answered()
            await parts.step_loop.leave(may_end_round=not self.leaves_timeline)
        if grace.cancelled_caught and self.step.phase is not Phase.LEFT:
            parts.core.rounds.enter(Phase.LEFT)  # stage-mates do without it at the barrier
            samples = self._trainer.strategy.pending_samples
            # In the device thread, where microbatches are counted: one that is under way is among them, or fails.
            with anyio.move_on_after(LAST_JOB_S):
                samples = await parts.core.device_thread.run(Priority.STEP, parts.core.executor.give_up)
            reason = f"not handed over within {grace_s:.0f} s"
            self._peer.context.metrics.lose(samples, reason, round_number=self.step.round_number)

    async def say_goodbye(self) -> None:
        """Tell those who call this replica that it is gone."""
        directory = self._peer.directory
        callers = {0, max(self.stage - 1, 0), self.stage}
        peers = [peer.peer_id for peer in directory.view.peers if peer.stage in callers]
        await self.parts.swarm.gossip.say_goodbye(peers, directory.serial)

    async def _publish_progress(self) -> None:
        """Store progress in the DHT: at once at the end of a round, and else often enough that it does not expire."""
        assert self.parts.launcher is not None
        run, lifetime_s = self._peer.context.resolved.hash, self._manifest.limits.announcement_s
        stored: tuple[object, ...] | None = None
        stored_s = 0.0
        while True:
            record = ProgressRecord(
                # Without the ranges of samples, which are long and travel with calls.
                current=self.parts.launcher.current.model_copy(update={"ranges": ()}),
                finished=tuple(self.parts.step_loop.reports.finished),
                validations=tuple(self.parts.launcher.validations),
            )
            now_s = self._peer.context.clock.monotonic_s()
            # Not at once if the count alone has grown: it grows all the time, and people see it, nobody acts on it.
            news = (record.finished, record.validations)
            if news != stored or now_s - stored_s > lifetime_s / ANNOUNCEMENTS_PER_LIFETIME:
                is_stored = await self._peer.dht.store(progress_key(run), record, run, lifetime_s)
                stored, stored_s = news if is_stored else None, now_s
            await anyio.sleep(PUBLISH_PROGRESS_S)


def check_data(resolved: ResolvedManifest, options: PeerOptions) -> None:
    """Raise UserError if this machine may not read the run's data, or cannot read its tokenizer."""
    check_data_files(resolved.manifest, options.data_dir)
    tokenizer = load_tokenizer(resolved.manifest.data, resolved.vocab_size, options.cache_dir)
    log.info("tokenizer_loaded tokenizer=%s tokens=%d", resolved.manifest.data.tokenizer, tokenizer.vocab_size)


def _read_data(resolved: ResolvedManifest, options: PeerOptions) -> StageData:
    """Read what stage 0 needs of the data before it serves.

    Raises:
        UserError: this machine may not read the run's data, or cannot read it or its tokenizer
    """
    check_data(resolved, options)
    manifest = resolved.manifest
    held_out = validation_samples(manifest, manifest.training.validation_samples, options.cache_dir)
    reader = SliceReader(manifest=manifest, cache_dir=options.cache_dir)
    reader.num_slices()
    return StageData(reader=reader, held_out=held_out)

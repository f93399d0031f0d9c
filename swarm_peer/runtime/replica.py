"""One stage in this peer: a replica that opens, gets a place in the stage, serves, leaves and closes.

Several replicas may be open in one peer at once. `Peer` decides when one opens and closes; nobody else does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.pretrained import WrongTensor
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.data.ranges import num_windows
from swarm_peer.policy.decay import last_step_of
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.trouble import Complaint, worst
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, PeerState, PeerView
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.assembly import Assembly, PeerParts, StageData
from swarm_peer.runtime.data.allowed_files import check_data_files
from swarm_peer.runtime.data.launcher import BatchLauncher, CountedHook
from swarm_peer.runtime.data.slices import SliceReader, validation_samples
from swarm_peer.runtime.data.tokenizers import load_tokenizer
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.state.joining import join, leave_former_place
from swarm_peer.wire.records import Progress, ProgressRecord, progress_key

log = logging.getLogger(__name__)

# Pause between looks for new progress to publish.
PUBLISH_PROGRESS_S = 1.0
# For this share of `--grace-s` a leaving replica waits for the microbatches inside. A slow link, or a later peer
# that has just died, may hold one for longer, and the gradient is still to be handed over.
DRAINING_SHARE = 0.5
# A leaving replica has this long to write its last replies.
LAST_REPLIES_S = 3.0
LAST_REPLIES_SHARE = 0.15  # of `--grace-s`, if that is shorter
# A leaving replica waits for so long until an epoch without it was chosen. Others put it out without its help, later.
PLACE_S = 5.0
# For so long it waits to hear of the entry that may hold what nobody has taken.
COMMITTED_S = 2.0
# Copies of the frozen weights that are tried, where they turn out to be damaged: this machine's, and what members give.
BASE_TRIES = 4


class Replica:
    """Everything of one stage in one peer. Belongs to the event loop's thread.

    Attributes:
        stage: index in the pipeline, from 0
        parts: what the replica is made of
    """

    def __init__(self, assembly: Assembly):
        self.stage = assembly.trainer.spec.index
        self.parts = assembly.assemble()
        self._peer = assembly.peer
        self._manifest = self._peer.context.resolved.manifest
        self._placing = anyio.CancelScope()

    @classmethod
    async def open(cls, peer: PeerParts, stage: int, counted: CountedHook | None = None) -> Replica:
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
            manifest = await peer.base.manifest()
            data = await context.threads.run(_read_data, manifest, resolved, options, abandon_on_cancel=True)
        trainer = await cls._make_trainer(peer, stage)
        await leave_former_place(peer.agreement, stage)
        return cls(Assembly(peer=peer, trainer=trainer, data=data, counted=counted))

    @staticmethod
    async def _make_trainer(peer: PeerParts, stage: int) -> StageTrainer:
        context, source = peer.context, await peer.base.source(stage)
        make = partial(StageTrainer, context.resolved, context.resolved.specs[stage], device=peer.device, blank=True)
        for tries_left in reversed(range(BASE_TRIES)):
            try:
                return await context.threads.run(partial(make, cache_dir=context.options.cache_dir, source=source))
            except WrongTensor as error:
                if source is None or not tries_left:
                    raise
                await peer.base.distrust(source, stage, error)
            source = await peer.base.source(stage)
        raise AssertionError("the last try returns or raises")

    def start_answering(self) -> None:
        """Answer calls from now on."""
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
    def _member(self) -> Member | None:
        return self._peer.agreement.core.members.get(self.stage)

    @property
    def has_place(self) -> bool:
        """Whether the newest epoch has a place for it."""
        return self._member is not None

    @property
    def is_serving(self) -> bool:
        """Whether it has a place, and weights to compute with."""
        return self.has_place and self.step.phase not in (Phase.EMPTY, Phase.LEFT)

    @property
    def is_finished(self) -> bool:
        """Whether the run's last optimizer step is done."""
        if (member := self._member) is None:
            return False
        word = self._peer.agreement.core.epoch.word
        return member.log.optimizer_step >= last_step_of(self._manifest.training.steps, word)

    def describe(self, peer: PeerView) -> PeerView:
        """Complete what this peer announces of itself by what it says of this replica."""
        admission, speed, step = self.parts.core.admission, self.parts.core.speed, self.step
        if (complaint := self._complaint(peer.state)) is not None:
            peer = peer.complaining(complaint)
        return replace(
            peer,
            stage=self.stage,
            incarnation=self._peer.agreement.core.membership.me.life,
            round_number=step.weights_round,
            optimizer_step=step.optimizer_step,
            samples_per_s=speed.samples_per_s,
            device_samples_per_s=speed.device_samples_per_s if speed.is_limited else 0.0,
            queue=admission.admitted + admission.held,
            bandwidth_bytes_per_s=self.parts.sources.bytes_per_s,
            time_shares=self.parts.core.time.shares(),
            neighbours=self._peer.neighbours(),
        )

    def _complaint(self, state: PeerState) -> Complaint | None:
        """The worst of what keeps this replica from its work, or, once it has a place, from beginning with it."""
        parts = self.parts
        if state is not PeerState.SERVING:
            return parts.driver.complaint() if state is PeerState.JOINING else None
        of_data = [] if parts.launcher is None else [parts.launcher.complaint()]
        return worst([parts.driver.complaint(), parts.updates.complaint(), parts.keeper.complaint(), *of_data])

    @property
    def stages_of_interest(self) -> Sequence[int]:
        """The stages whose peers it must know: its own and those around it; stage 0: all."""
        count = self._manifest.stages.count
        around = {self.stage - 1, self.stage, min(self.stage + 1, count - 1)}
        return range(count) if self.stage == 0 else sorted({0} | around)

    @property
    def leaving_bytes(self) -> int:
        """Bytes that it still sends if it leaves now, at the most: its gradients, which may be of two rounds."""
        return 2 * self.parts.giving.num_bytes

    def stage_mates(self) -> list[str]:
        """Ids of the other peers that have a place in this stage and announce that they serve it."""
        core = self._peer.agreement.core
        serving = {peer.peer_id for peer in self._peer.directory.view.serving(self.stage)}
        mates = [seat.peer for seat in core.epoch.roster(self.stage) if seat != core.membership.me]
        return [peer_id for peer_id in mates if peer_id in serving]

    async def work(self, explain: Callable[[str], None], unreadable: Callable[[UserError], None]) -> None:
        """Get a place in the stage, and go from round to round, until cancelled.

        Args:
            explain: told why it has no place yet
            unreadable: called if the training data cannot be read: the replica has to leave then
        """
        parts = self.parts
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parts.driver.run)
            tasks.start_soon(parts.giving.run)
            tasks.start_soon(parts.state_server.run)
            tasks.start_soon(parts.keeper.run)
            tasks.start_soon(self._keep_place, explain)
            if parts.launcher is not None and parts.pool is not None:
                tasks.start_soon(parts.pool.run)
                tasks.start_soon(self._launch, parts.launcher, unreadable)
                tasks.start_soon(self._publish_progress, parts.launcher)

    async def _keep_place(self, explain: Callable[[str], None]) -> None:
        """Get a place in the stage, and another one where the run goes on without this peer."""
        agreement = self._peer.agreement
        with self._placing:
            while True:
                lacks = partial(self._peer.ways.missing_in_words, self.stage)
                await join(agreement, self.stage, self.parts.sources, explain, lacks)
                member = agreement.core.members[self.stage]
                self.parts.reports.begin(member.log.optimizer_step)
                await agreement.changed.wait_for(lambda: not self.has_place)
                log.warning("place_lost stage=%d epoch=%s", self.stage, tuple(agreement.core.epoch.id))
                self.parts.driver.keep_weights(member)

    async def _launch(self, launcher: BatchLauncher, unreadable: Callable[[UserError], None]) -> None:
        await launcher.run()
        if launcher.failure is not None:
            unreadable(launcher.failure)

    async def leave(self, next_stage: Callable[[], int | None]) -> None:
        """Finish the microbatches in flight, give what was computed to a stage-mate, and give up the place.

        Microbatches that are not done within DRAINING_SHARE of `--grace-s` fail, and others compute them. Work that no
        stage-mate has taken within `--grace-s` is lost; its samples are read again.

        Args:
            next_stage: that this peer moves to. It asks for its place there at once, if it has the state already
        """
        parts, grace_s = self.parts, self._peer.context.options.grace_s
        if parts.launcher is not None:
            parts.launcher.stop()
        parts.core.executor.stop_waiting()
        parts.core.admission.leave()
        self._placing.cancel()
        with anyio.move_on_after(grace_s) as grace:
            with anyio.move_on_after(DRAINING_SHARE * grace_s) as draining:
                await parts.core.admission.drained()
            if draining.cancelled_caught:
                await parts.core.device_thread.run(Priority.STEP, parts.core.executor.give_up)
                parts.core.admission.give_up_inside()
            # If a reply were cut off, its caller would have the microbatch computed again in vain.
            with anyio.move_on_after(min(LAST_REPLIES_S, LAST_REPLIES_SHARE * grace_s)):
                await self._peer.transport.answered()
            await self._give_work()
        if grace.cancelled_caught:
            log.warning("work_not_given stage=%d reason=nobody took it within %.0f s", self.stage, grace_s)
        await self._give_up_place(next_stage)
        parts.core.rounds.enter(Phase.LEFT)

    async def _give_work(self) -> None:
        member = self._member
        if member is None or self._peer.context.metrics.run_is_over or self.is_finished:
            return
        lost = member.to_hand_over()
        try:
            lost = held = await self.parts.driver.leave()
            lost = await self.parts.giving.give(held, self.stage_mates(), enough=1)
            if given := [each for each in held if each not in lost]:
                samples = sum(num_windows(each.samples) for each in given)
                log.info("work_handed_over stage=%d contributions=%d samples=%d", self.stage, len(given), samples)
            if lost:
                # Stage-mates refuse what they have averaged already, together with this seat.
                newest = max(each.name.round for each in lost)
                with anyio.move_on_after(COMMITTED_S):
                    await self._peer.context.changed.wait_for(lambda: member.log.next_round > newest)
        finally:  # also when the time is over
            in_entries = {each for committed in member.log.committed for each in committed.entry.cut.brings}
            self.parts.reports.lose([each for each in lost if each not in in_entries])

    async def _give_up_place(self, next_stage: Callable[[], int | None]) -> None:
        agreement = self._peer.agreement
        membership = agreement.core.membership

        def wanted() -> frozenset[int]:
            return (membership.prepared | membership.stages) & {next_stage()}

        metrics = self._peer.context.metrics
        with anyio.move_on_after(0 if metrics.run_is_over else PLACE_S):
            while membership.desired != wanted():  # again, if this peer is told to end meanwhile
                membership.desired = wanted()
                agreement.look()
                await agreement.changed.wait_for(lambda: membership.stages <= membership.desired or metrics.run_is_over)
            await agreement.told()  # it may be the only one that knows the epoch without it

    async def _publish_progress(self, launcher: BatchLauncher) -> None:
        """Store progress in the DHT: at once at the end of a round, and else often enough that it does not expire."""
        run, lifetime_s = self._peer.context.resolved.hash, self._manifest.limits.announcement_s
        stored: tuple[object, ...] | None = None
        stored_s = 0.0
        while True:
            await anyio.sleep(PUBLISH_PROGRESS_S)
            record = ProgressRecord(
                current=self._progress(),
                finished=tuple(self.parts.reports.finished),
                validations=tuple(launcher.validations),
            )
            now_s = self._peer.context.clock.monotonic_s()
            # Not at once if the count alone has grown: it grows all the time, and people see it, nobody acts on it.
            news = (record.finished, record.validations)
            if news != stored or now_s - stored_s > lifetime_s / ANNOUNCEMENTS_PER_LIFETIME:
                is_stored = await self._peer.dht.store(progress_key(run), record, run, lifetime_s)
                stored, stored_s = news if is_stored else None, now_s

    def _progress(self) -> Progress:
        """The samples that this peer has computed in the round that it works at."""
        member = self._member
        present = member.working if member is not None else None
        if member is None or present is None:
            return Progress(round_number=self.step.round_number, samples=0)
        return Progress(round_number=present.number, samples=num_windows(present.computed.samples))


def check_data(manifest: RunManifest, resolved: ResolvedManifest, options: PeerOptions) -> None:
    """Check that this machine may read the run's data, and can read its tokenizer.

    Args:
        manifest: the run's, perhaps with a tokenizer that members have given

    Raises:
        UserError: it may not, or cannot
    """
    is_given = manifest.data.tokenizer != resolved.manifest.data.tokenizer
    check_data_files(resolved.manifest, options.data_dir, reads_tokenizer=not is_given)
    tokenizer = load_tokenizer(manifest.data, resolved.vocab_size, options.cache_dir)
    log.info("tokenizer_loaded tokenizer=%s tokens=%d", resolved.manifest.data.tokenizer, tokenizer.vocab_size)


def _read_data(manifest: RunManifest, resolved: ResolvedManifest, options: PeerOptions) -> StageData:
    """Read what stage 0 needs of the data before it serves.

    Args:
        manifest: see check_data

    Raises:
        UserError: this machine may not read the run's data, or cannot read it or its tokenizer
    """
    check_data(manifest, resolved, options)
    held_out = validation_samples(manifest, manifest.training.validation_samples, options.cache_dir)
    reader = SliceReader(manifest=manifest, cache_dir=options.cache_dir)
    reader.num_slices()
    return StageData(reader=reader, held_out=held_out)

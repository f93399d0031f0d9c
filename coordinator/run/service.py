"""The coordinator of a run: publishes the manifest, watches the run, saves the model at its end.

It is not on the data path: kill it and training goes on; started again with its key, it carries on from the records in
the DHT.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from coordinator.checkpoints.fetching import fetch_states, newest_position
from coordinator.checkpoints.folder import Checkpoint, Fits
from coordinator.checkpoints.model_card import Training
from coordinator.checkpoints.model_folder import NO_TOKENIZER, export_states
from coordinator.checkpoints.resumed import note_resumed, tell_changes
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.writer import CheckpointWriter, Duty
from coordinator.run.address_files import COORDINATOR, KnownPeers, write_addresses
from coordinator.run.agreed_run import AgreedRun, Surroundings
from coordinator.run.agreeing import others_in
from coordinator.run.beginning import Beginning
from coordinator.run.context import CoordinatorContext
from coordinator.run.coordination import Coordination
from coordinator.run.decaying import Decaying, Standing
from coordinator.run.divergence import DIVERGED, Diverged, Divergence
from coordinator.run.events import NO_EVENTS, RunEvents
from coordinator.run.invites import InviteBook
from coordinator.run.lasting_peers import LastingPeers
from coordinator.run.rebalancer import Rebalancer
from coordinator.run.run_files import RunFiles
from coordinator.run.run_options import RunOptions
from coordinator.run.silent_peers import drop_silent_peers
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.ending import FINISHED, see_off
from coordinator.watch.journal import Journal
from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.metrics_file import MetricsLine
from coordinator.watch.observer import observe, observer_directory
from coordinator.watch.run_file import MODEL
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import in_words
from coordinator.watch.what_is_trained import count_parameters
from swarm_peer.errors import CallError, NoRoom, SwarmError, UserError, forget_frames
from swarm_peer.model.export import NotWritten
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.scratch import scratch_folder
from swarm_peer.runtime.network.assignments import wait_for_end
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import RevocationsRecord, revocations_key
from swarm_peer.wire.records import (
    MANIFESTS_KEY,
    ManifestRecord,
    Record,
    timeline_key,
)

log = logging.getLogger(__name__)

RUN_LOOK_S = 2.0
# Each try to save the model downloads it.
NOT_WRITTEN_PAUSE_S = 30.0
# Peers wait for as long at the run's end, if the store of checkpoints is slow.
LAST_CHECKPOINT_S = 30.0
# Published again and again while the coordinator lives, and kept for a day after it: newcomers need it.
RUN_LIFETIME_S = 24 * 3600.0
PUBLISH_RUN_S = 60.0
# Peers and standbys find the end only while a node keeps it, and do not ask one for some 20 s that did not answer once.
LINGER_S = 30.0


class RunService:
    """Coordinates one run until its end. Belongs to the event loop's thread.

    Args:
        run_key: names the run and signs for it; this node's identity if not given

    Attributes:
        ended: why the run has ended before its model was saved here, if it has
        journal: what has happened to the run
        contributions: which peer has given how much to it
        lasting_peers: the peers that invites name beside the coordinator
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        dht: SwarmDHT,
        options: RunOptions,
        *,
        events: RunEvents = NO_EVENTS,
        run_key: Identity | None = None,
        context: CoordinatorContext | None = None,
    ):
        self._context = context or CoordinatorContext()
        self.resolved = resolved
        self.manifest = resolved.manifest
        self.watch = RunWatch(resolved.manifest, SwarmView(resolved.num_stages))
        self.journal = Journal(options.output, dht.passes.is_revoked, events.on_event)
        self.contributions = ContributionEstimates(options.output)
        self.metrics = CoordinatorMetrics(options.output, dht, options.plan.every)
        self.metrics.show_parameters(count_parameters(resolved))
        self.ended: str | None = None
        self._dht = dht
        self._options = options
        self._events = events
        self._run_key = run_key or dht.identity
        self._run_id = self._run_key.peer_id
        self._rebalancer: Rebalancer | None = None
        self._rebalancer_term: Term | None = None
        self._writer: CheckpointWriter | None = None
        self._beginning = Beginning(dht, self._run_id, self._context.clock.unix_s())
        self._divergence = Divergence(
            options=options, manifest=resolved.manifest, watch=self.watch, threads=self._context.threads
        )
        self._agreed: AgreedRun | None = None
        self._decaying = Decaying(resolved.manifest, options.output, self._context.threads)
        self._peer_metrics = PeerMetrics()
        self._directory = observer_directory(resolved.manifest, dht, self._peer_metrics, clock=self._context.clock)
        self._known_peers = KnownPeers(options.output)
        self.lasting_peers = LastingPeers(options.output)
        self._invites = InviteBook(options.output)

    @property
    def begun_s(self) -> int:
        """Unix seconds at which the run began, or was resumed."""
        return self._beginning.begun_s

    @property
    def model_folder(self) -> Path:
        """The folder that the run's model is saved to at its end."""
        return self._options.output / MODEL

    async def run(self) -> bool:
        """Coordinate until the run has reached its steps and its model is saved.

        Returns:
            whether it is saved here; False if the run has been ended elsewhere

        Raises:
            UserError: the model could not be saved in that folder
            Diverged: the run has to end, and its peers are to be told, since its weights have diverged; or another
                coordinator has ended it for that
            SwarmError: libp2p's daemon has died, or the run was ended before its model was saved
        """
        self._options.check_output(self.manifest)
        was_saved = self.model_folder.exists()  # by an earlier process, which may have told nobody
        self._dht.keep_run(self._run_id, self.manifest)
        with closing(self._open_files()) as files, scratch_folder() as scratch:
            async with (
                self._context.open_transport(self._dht, self._peer_metrics) as transport,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(self._dht.watch)
                agreed = await self._agree(transport, tasks, files, scratch)
                coordination = await self._begin(transport, tasks, files, agreed)
                was_saved = was_saved and self.begun_s <= files.written_s  # or it was resumed since
                saved, failure = False, None
                while not saved and self.ended is None:
                    await self._look_at_run(files, coordination)
                    try:
                        # Too few peers may be left to tell that all steps are done.
                        if coordination.acts and (was_saved or self.watch.has_finished):
                            saved = was_saved or await self._export(transport, files)
                        elif coordination.acts:
                            await self._look_for_divergence(agreed, files)
                    except Diverged as error:
                        self.ended, failure = error.reason, error
                    await anyio.sleep(0 if saved else RUN_LOOK_S)
                if saved:
                    await self._finish_checkpoint()
                files.tell("ended", "The run has made all its steps." if saved else f"The run has ended: {self.ended}.")
                if failure is None and (self.ended or "").startswith(DIVERGED):
                    failure = await self._divergence.failure(self._beginning.timeline, self._fits(files))
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not saved and coordination.acts and self.watch.has_finished and self.ended != FINISHED:
            raise SwarmError("the run was ended before its model was saved: export one of its checkpoints")
        return saved

    async def _look_for_divergence(self, agreed: AgreedRun, files: RunFiles) -> None:
        """Have the run go back to its last good checkpoint if its weights have diverged.

        Raises:
            Diverged: it has to end
        """
        if (found := self._divergence.found()) is None:
            return
        step = self.watch.shown_step
        if found.trouble is not Trouble.DIVERGED:  # it has made steps since, in vain
            step = min(step, files.optimizer_step_at(self.watch.seen_s - found.since_s))
        checkpoint = await self._divergence.choose(found, self._beginning.timeline, step, self._fits(files))
        try:
            await self._go_back(checkpoint, agreed, files)
        except UserError as error:
            why = f"{in_words(found)}; and it cannot go back, since {error}"
            raise await self._divergence.failure(self._beginning.timeline, self._fits(files), why) from error

    async def _go_back(self, checkpoint: Checkpoint, agreed: AgreedRun, files: RunFiles) -> None:
        """Have the run go on from a checkpoint, in a new term of its epochs."""
        timeline = await agreed.resume(checkpoint, self._newest_round())
        note_resumed(self._options.output, checkpoint, timeline)
        self._divergence.went_back(timeline)
        self._beginning.follow(timeline, agreed.begun_s)
        await self._publish_run()
        back = f"goes back to its checkpoint of optimizer step {checkpoint.optimizer_step}"
        files.tell("rewound", f"The run's weights have diverged, and it {back}.")
        log.warning("run_goes_back optimizer_step=%d path=%s", checkpoint.optimizer_step, checkpoint.path)

    async def _look_for_decay(self, files: RunFiles, coordination: Coordination) -> None:
        """Have the run decay, if its operator asks for it, and know where it ends then."""
        if self._agreed is None:
            return
        line = self.watch.last_line
        standing = Standing(self.watch.shown_step, 0.0 if line is None else line["seconds"], coordination.acts)
        if told := await self._decaying.look(self._agreed, standing):
            files.tell("decay", told)
        self.watch.last_step = self._agreed.last_step

    def _newest_round(self) -> int:
        """The last round that the run has come to, as far as is known here."""
        return max(newest_position(self.watch.view).round_number, self.watch.round_number + 1)

    def _fits(self, files: RunFiles) -> Fits:
        return partial(self._is_of_run, files)

    async def _finish_checkpoint(self) -> None:
        """Give the last checkpoint some time: the run may go on from it later, and its peers are still there."""
        if self._writer is not None:
            with anyio.move_on_after(LAST_CHECKPOINT_S):
                await self._writer.finish()

    def _open_files(self) -> RunFiles:
        return RunFiles(
            folder=self._options.output,
            manifest=self.manifest,
            resume=self._options.resume,
            journal=self.journal,
            contributions=self.contributions,
            clock=self._context.clock,
            on_line=self._events.on_line,
            promises=self._options.promises,
        )

    async def _agree(self, transport: Transport, tasks: TaskGroup, files: RunFiles, scratch: Path) -> AgreedRun:
        """Find the run's epochs or begin them, and take part in agreement from now on."""
        if self._options.plan.resume is None:
            await self._beginning.find()
        view = await self._directory.refresh_surely(range(self.resolved.num_stages))
        around = Surroundings(
            resolved=self.resolved,
            dht=self._dht,
            run_key=self._run_key,
            context=self._context,
            options=self._options,
            scratch=scratch,
            find_others=others_in(self._dht, self._directory, self._run_id),
        )
        # Newcomers wait where nobody has begun anything. Before its first step, a run has nothing to lose.
        is_served = any(peer.has_work for peer in view.peers)
        is_under_way = is_served or self._beginning.reached != (0, 0)
        run = await AgreedRun.open(around, transport, is_under_way=is_under_way, last_round=files.round_number)
        self._agreed = run
        self._follow_epochs()
        self._go_on_from(files)
        await transport.serve(run.dispatcher)
        tasks.start_soon(run.run, self._fits(files), lambda: (files.round_number, files.optimizer_step))
        return run

    def _follow_epochs(self) -> None:
        if self._agreed is not None:
            self._beginning.follow(self._agreed.timeline, self._agreed.begun_s)

    def _go_on_from(self, files: RunFiles) -> None:
        """Have the watch go on from where the run stands, as far as it is known before any peer has told."""
        if (resumed := self._options.plan.resume) is not None:
            tell_changes(resumed, self.manifest)
            note_resumed(self._options.output, resumed, self._beginning.timeline)
        else:
            # The DHT forgets the record a day after the last coordinator.
            if known := files.lines_since(self._beginning.timeline.first_round):
                self._beginning.see(files.round_number + 1, files.optimizer_step)
            self.watch.recall(known)
        self.watch.begun_at = max(self._beginning.reached[1], self._beginning.timeline.first_optimizer_step)

    def _is_of_run(self, files: RunFiles, optimizer_step: int, round_number: int) -> bool:
        """Whether the run has come to a step in a round since it was begun or resumed, and has not gone back since."""
        is_later = round_number > self._beginning.timeline.first_round
        return is_later and files.has_made(optimizer_step, round_number - 1)

    async def _begin(self, transport: Transport, tasks: TaskGroup, files: RunFiles, agreed: AgreedRun) -> Coordination:
        """Publish the run, and start what goes on beside the looks at it."""
        await self._publish_run()
        tasks.start_soon(self._keep_published)
        write_addresses(self._options.output / COORDINATOR, self._dht.addresses)
        self._events.on_ready()
        tasks.start_soon(self._directory.run_polling, range(self.resolved.num_stages))
        lease_s = self.manifest.limits.announcement_s
        coordination = Coordination(
            self._dht, self._run_key, lease_s=lease_s, waits=self._options.standby, clock=self._context.clock
        )
        tasks.start_soon(coordination.run)
        if (plan := self._options.plan).store is not None:
            self._writer = CheckpointWriter(
                self.resolved,
                plan,
                watch=self.watch,
                directory=self._directory,
                threads=self._context.threads,
                rng=self._context.random.stream("checkpoints"),
                duty=Duty(
                    acts=lambda: coordination.acts,
                    is_led_by_other=lambda: self._is_led_by_other(coordination),
                    begun_at=self.watch.begun_at,
                    tell=partial(files.tell, "checkpoint"),
                    promises=self._options.promises,
                ),
                names=agreed.names,
            )
            tasks.start_soon(self._writer.run, transport)
        tasks.start_soon(drop_silent_peers, transport, self._directory, self.manifest.hash)
        tasks.start_soon(self._look_for_end)
        tasks.start_soon(self._directory.keep_revoked_out, RUN_LOOK_S)
        return coordination

    def _is_led_by_other(self, coordination: Coordination) -> bool:
        return coordination.term is not None and coordination.term.coordinator != self._dht.identity.peer_id

    async def _look_at_run(self, files: RunFiles, coordination: Coordination) -> None:
        """Take in what the DHT says now, write it down, and move peers if this coordinator is the one that acts."""
        has_answer = False
        self._follow_epochs()
        with self._going_on("observe"):
            lines = await self._observe()
            has_answer = lines is not None
            files.write_lines(lines or (), self.watch.returns)
        with self._going_on("decay"):
            await self._look_for_decay(files, coordination)
        self._keep_peers()
        with self._going_on("invites"):
            await self._keep_invites()
        self.watch.observe_coordinator(coordination.newest)
        if self._agreed is not None:
            self.watch.observe_waiting(self._agreed.waits_for(self.watch.view))
        with self._going_on("journal"):
            if has_answer:  # a coordinator that is cut off from all peers would tell of their deaths
                files.look(self.watch)
        with self._going_on("rebalance"):
            await self._rebalance(coordination)
        with self._going_on("show"):
            self.metrics.update(self.watch)
            self._events.on_update(self.watch)

    def _keep_peers(self) -> None:
        """Keep the addresses of peers, for this coordinator's next life and for invites."""
        directory, own, now_s = self._directory, self._dht.addresses, anyio.current_time()
        self._known_peers.keep(directory.addresses())
        self.lasting_peers.look(directory.view.peers, directory.addresses_of, own=own, now_s=now_s)

    @contextmanager
    def _going_on(self, work: str) -> Iterator[None]:
        """Log what fails, count a defect of this program, and go on: what one look meets would end standbys, too."""
        try:
            yield
        except SwarmError:
            raise
        except OSError as error:  # a full disk: the run needs nothing of what is written down here
            self.metrics.looks_incomplete.labels(work).inc()
            log.warning("look_incomplete work=%s reason=%s", work, error)
        except Exception:
            self.metrics.look_defects.labels(work).inc()
            log.exception("look_failed work=%s", work)

    async def _keep_invites(self) -> None:
        """Write down who has come by which invite, and tell everybody what the operator has revoked since."""
        passes = self._dht.passes
        if passes.is_open:
            return
        try:
            if passes.learn(self._invites.merge(self._run_key, passes.revoked)):
                await self._tell_revocations()
        except UserError as error:
            log.warning("revocations_not_told reason=%s", error)
        peers = {peer.peer_id for peer in self.watch.view.peers}  # observers come by invites as well
        self._invites.keep_members({ticket: peers.intersection(seen) for ticket, seen in passes.members().items()})

    async def _observe(self) -> list[MetricsLine] | None:
        try:
            return await observe(self._dht, self._directory.view, self.watch)
        except CallError as error:
            log.warning("run_not_seen reason=%s", error)
            return None

    async def _rebalance(self, coordination: Coordination) -> None:
        if self._options.min_replicas is None or not coordination.acts:
            return  # the assignments of a coordinator stand for as long as its term is the newest
        if self._rebalancer is None or self._rebalancer_term != coordination.term:
            self._rebalancer_term = coordination.term
            now_s = anyio.current_time()
            self._rebalancer = Rebalancer(
                self.resolved, self._options.min_replicas, begun_s=now_s, inherited=coordination.inherited
            )
        self._rebalancer.look(self.watch.view, *self.watch.delivered(), anyio.current_time())
        await coordination.assign(self._rebalancer.assignments(), self._rebalancer.policy.reason)
        self.metrics.count_moves(self._rebalancer.policy.num_moves)

    async def _look_for_end(self) -> None:
        self.ended = await wait_for_end(self._dht, self._run_id, lambda: self.watch.has_finished)

    async def end(self, reason: str = FINISHED) -> None:
        """Tell the peers, and other coordinators, that the run is over, and wait until they have gone."""
        begun_s, least_s = self.begun_s, LINGER_S
        farewell = await see_off(
            self._dht, self._directory, self.manifest, self._run_key, reason, begun_s=begun_s, least_s=least_s
        )
        if not farewell.is_told or farewell.left:
            why = f"{farewell.left} peers are left" if farewell.is_told else "the DHT does not take it"
            log.error("run_not_ended reason=%s: have the peers leave with swarm-coordinator end", why)
            told = f"{why}: have the peers leave with swarm-coordinator end"
            self._options.promises.broken("not all peers know that the run is over", told)

    async def _publish_run(self) -> None:
        """Publish the run: its timeline first, since peers that find the manifest may look for that."""
        await self._store_for_run(timeline_key(self._run_id), self._beginning.record())
        await self._store_for_run(MANIFESTS_KEY, ManifestRecord(manifest=self.manifest.canonical_json().decode()))
        await self._tell_revocations()

    async def _tell_revocations(self) -> None:
        if told := self._dht.passes.revocations:
            await self._store_for_run(revocations_key(self._run_id), RevocationsRecord(revocations=told))

    async def _store_for_run(self, key: str, record: Record) -> bool:
        return await self._dht.store(key, record, self._run_id, RUN_LIFETIME_S, signer=self._run_key)

    async def _keep_published(self) -> None:
        while True:
            await anyio.sleep(PUBLISH_RUN_S)
            self._beginning.see(self.watch.round_number + 1, self.watch.optimizer_step)
            await self._beginning.learn()
            await self._dht.learn_revocations(self._run_id)  # another coordinator may have a newer list
            await self._publish_run()

    async def _export(self, transport: Transport, files: RunFiles) -> bool:
        """Save the model, if peers give their states and the disk takes it; returns whether it is saved.

        Raises:
            Diverged: the peers of a stage have no weights that are finite
        """
        receiver = StateReceiver(self.resolved, self._context.threads, self.model_folder, only_weights=True)
        try:
            min_round, rng = self.watch.round_number + 1, self._context.random.stream("states")
            states = await fetch_states(transport, self._directory, self.resolved, receiver, min_round, rng)
        except SwarmError as error:
            log.warning("model_not_saved reason=%s", error)
            forget_frames(error)
            if receiver.has_met_broken:  # each peer of the stage was asked many times
                why = "the weights after its last step are not finite"
                raise await self._divergence.failure(self._beginning.timeline, self._fits(files), why) from None
            await anyio.sleep(NOT_WRITTEN_PAUSE_S if isinstance(error, NoRoom) else 0)
            return False
        if states[0].optimizer_step < self.watch.last_step:
            # Stage 0 has reported steps that were never made, or the run has just gone back.
            log.warning("model_not_saved reason=its stages have made %d optimizer steps", states[0].optimizer_step)
            return False
        cache_dir = self._options.cache_dir
        try:
            training = Training(
                optimizer_step=states[0].optimizer_step,
                lines=files.lines_since(0),
                num_peers=len(self.contributions.given) or None,
            )
            export = partial(export_states, self.resolved, states, self.model_folder, cache_dir, training=training)
            if why_not := await self._context.threads.run(export):
                self._options.promises.broken(NO_TOKENIZER, why_not)
        except NotWritten as error:
            del states  # their room is free before they are downloaded anew
            forget_frames(error)
            self.metrics.looks_incomplete.labels("export").inc()
            log.error("model_not_saved reason=%s", error)
            await anyio.sleep(NOT_WRITTEN_PAUSE_S)
            return False
        log.info("model_saved folder=%s", self.model_folder)
        return True

"""Takes a replica from round to round: wait until the global batch is full, drain, average, apply the update.

If stage-mates have gone on without this peer, it downloads their state. If a lost stage makes the run rewind, it loads
a snapshot. Owns the round book: no other part begins a round, or has the weights changed. Must not know how stage-mates
agree on an update (settlement.py) or how states travel (state/).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import torch

from swarm_peer.errors import CallError
from swarm_peer.model.round_strategy import Work
from swarm_peer.policy.data.sample_ledger import SampleLedger
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.trouble import Complaint, UpdateRecord, worst
from swarm_peer.policy.voting import Verdict
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState, extend_history
from swarm_peer.runtime.state.joining import DOWNLOAD_TRIES, Fetch, StateDownloads
from swarm_peer.runtime.state.own_work import OwnWork
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.step.contribution import contributions
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.outcome import Settlement
from swarm_peer.runtime.step.rewinds import Rewinds
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.runtime.step.settlement import StageGroup

log = logging.getLogger(__name__)

# Callers may be a round ahead for as long as the slowest hop takes. A peer that is behind for longer has missed news.
BEHIND_S = 3.0
# Tries to catch up. A peer that is still behind afterwards serves all the same, until the end of the round.
CATCH_UP_TRIES = 4
# A peer that was left behind greets its stage-mates for so long: one that stalls, or says that it does not know this
# peer, must not have it miss the next round as well.
GREETING_S = 3.0
# Says which stage-mates are on the run's timeline, and that timeline if it is known; see TimelineWatch.choose_donors.
DonorChoice = Callable[[], Awaitable[tuple[list[str], Timeline | None]]]


class StepLoop:
    """Takes this peer's replica from round to round. Belongs to the event loop's thread.

    Attributes:
        reports: of the rounds that ended here
        rewinds: where the run goes back to
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        core: ReplicaCore,
        swarm: SwarmAccess,
        group: StageGroup,
        state_server: StateServer,
        own_work: OwnWork,
        handover: GradientHandover,
        leases: SliceLeases | None,
    ):
        """Make a loop that has no weights yet: call `begin` or `join` first.

        Args:
            leases: the slices of data that this peer reads; None but at stage 0
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._hash = context.resolved.hash
        self._trainer = core.trainer
        self._device_thread = core.device_thread
        self._rounds = core.rounds
        self._admission = core.admission
        self._group = group
        self._state_server = state_server
        self._progress = swarm.progress
        self._handover = handover
        self._leases = leases
        self._gossip = swarm.gossip
        self._view = swarm.view
        self._metrics = context.metrics
        self._changed = context.changed
        self._rng = context.random.stream("rounds")
        self._stage = core.stage
        self._downloads = StateDownloads(
            context=context,
            stage=core.stage,
            shapes=core.trainer.shapes,
            swarm=swarm,
            snapshots=own_work.snapshots,
        )
        self._own_work = own_work
        self._ending = anyio.Lock()  # held while the round ends, or while this peer's gradient is handed over
        self._failures: list[CallError] = []  # that ended `run`: this peer ends no more rounds
        self._updates = UpdateRecord()
        self.reports = RoundReports(context=context, stage=core.stage)
        self.rewinds = Rewinds(context=context, core=core, swarm=swarm)

    @property
    def step(self) -> StepState:
        """Where this peer's replica stands."""
        return self._rounds.step

    @property
    def download_bytes_per_s(self) -> float:
        """Speed of the last download of a state; 0 if there was none."""
        return self._downloads.bytes_per_s

    @property
    def finished(self) -> bool:
        """Whether the run's last optimizer step is done."""
        return self.step.optimizer_step >= self._manifest.training.steps

    def complaint(self) -> Complaint | None:
        """This peer's trouble in ending rounds with an update, if it has any."""
        return worst((self._group.complaint(), self._updates.complaint()))

    async def begin(self, timeline: Timeline, fetch: Fetch | None) -> None:
        """Start at the beginning of a timeline, with a snapshot or with the run's initial weights.

        Args:
            fetch: gets the snapshot; None for the initial weights

        Raises:
            CallError: there is no snapshot that fits
            UserError: the initial weights cannot be read
        """
        if fetch is not None:
            await fetch(lambda snapshot: self._take_over(snapshot.at_beginning_of(timeline)))
            return
        self._give_up_work(timeline)
        await self._device_thread.run(Priority.STEP, self._trainer.restart)
        # Another version of torch may make other initial weights. So the history hash, which stage-mates compare,
        # begins with a digest of them.
        weights = await self._device_thread.run(Priority.STEP, self._trainer.state)
        history_hash = await self._context.threads.run(extend_history, self._hash, list(weights.values()))
        ledger = await self._read_ledger(b"")
        self._begin_anew(ledger, timeline.first_round, history_hash, timeline, b"", b"")

    async def join(self, donors: list[str], min_round: int = 0) -> None:
        """Take over the newest state of stage-mates, of that round or a later one. Asks each of them once.

        Raises:
            CallError: none of them gave it
        """
        await self._catch_up_by_state(donors, min_round, tries=1)

    async def catch_up(self, stage_mates: list[str], choose_donors: DonorChoice) -> None:
        """Greet the stage-mates, apply the updates that they made since this peer's state, and serve.

        From the greeting on they wait for this peer at the end of each round, so it does catch up.

        Args:
            choose_donors: says which of them are on the run's timeline, and that timeline if it is known
        """
        for _ in range(CATCH_UP_TRIES):
            newest = await self._gossip.greet(self._stage, stage_mates)
            donors, timeline = await choose_donors()
            is_elsewhere = timeline not in (None, self.step.timeline)  # the run has gone back just now
            if newest <= self.step.round_number and not is_elsewhere:
                break
            if is_elsewhere or not await self._replay(donors, until=newest):
                min_round = 0 if is_elsewhere else self.step.round_number + 1
                await self._catch_up_by_state(donors, min_round, timeline=timeline)
        self._rounds.enter(Phase.OPEN)

    async def run(self) -> None:
        """End one round after the other, and rewind when a lost stage makes the run do so. Never returns.

        Raises:
            CallError: stage-mates went on without this peer, and none of them gives its state
        """

        async def attempt(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except CallError as error:
                self._failures.append(error)
                self._changed.notify()

        while not self._failures:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._group.ahead.run)
                tasks.start_soon(attempt, self._run_rounds)
                tasks.start_soon(self._look_when_behind)
                await self._changed.wait_for(lambda: self.rewinds.target is not None or bool(self._failures))
                tasks.cancel_scope.cancel()
            if not self._failures:
                await attempt(self._rewind)
        raise self._failures[0]

    async def _look_when_behind(self) -> None:
        """When callers have named later rounds for a while, ask stage-mates whether they have left this peer behind."""
        while True:
            await self._changed.wait_for(lambda: self._admission.is_behind)
            present = self._rounds.current
            await anyio.sleep(BEHIND_S)
            if self._rounds.current is present and self._admission.is_open:
                mates = [peer.peer_id for peer in self._view().serving(self._stage)]
                if await self._gossip.greet(self._stage, mates) > present.number:
                    self._progress.saw_round(present.number + 1)
            self._admission.forget_later_rounds()

    async def _run_rounds(self) -> None:
        while not self.finished:
            await self._progress.wait_until_over(self.step.round_number)
            async with self._ending:
                if self.step.phase is Phase.LEFT:
                    return
                await self._end(self._rounds.current)
            self._rounds.enter(Phase.OPEN)
        text = "run_finished optimizer_step=%d: the coordinator saves the model now, and ends the run"
        log.info(text, self.step.optimizer_step)

    async def leave(self, *, may_end_round: bool = True) -> None:
        """Hand this peer's gradient to a stage-mate, or end the round with them.

        Call `RoundAdmission.leave` first, and have all microbatches inside end, or the executor give them up.
        """
        while True:
            async with self._ending:
                present, gone = self._rounds.current, partial(self._rounds.enter, Phase.LEFT)
                if (target := self.rewinds.target) is not None:  # nobody takes what the run has gone back from
                    self._give_up_work(target)
                    gone()
                    return
                if await self._handover.hand_over(on_gone=gone, may_end_round=may_end_round and not self._failures):
                    return
            await self._changed.wait_for(partial(self._is_past, present))

    def _is_past(self, ended: ReplicaRound) -> bool:
        return self._rounds.current is not ended or bool(self._failures)

    async def _rewind(self) -> None:
        async with self._ending:
            # There is none if a stage-mate's state has brought this peer to that round or beyond at that very moment.
            while (target := self.rewinds.target) is not None:
                if self.step.phase is Phase.LEFT:
                    self.rewinds.drop_until(target.first_round)
                    return
                text = "run_rewound stage=%d optimizer_step=%d to=%d round=%d"
                made, back = self.step.optimizer_step, target.first_optimizer_step
                log.warning(text, self._stage, made, back, target.first_round)
                self._metrics.rewinds.inc()
                self._rounds.enter(Phase.ENDING)
                take = partial(self._downloads.take_snapshot_of, is_further=back > made)
                fetch = partial(take, target) if back else None
                try:
                    await self.begin(target, fetch)
                except CallError as error:
                    if self.rewinds.target is target:
                        raise
                    # Another peer has told of a newer timeline: the holder of this one's snapshot may have died.
                    log.warning("run_not_rewound round=%d reason=%s", target.first_round, error)
        self._rounds.enter(Phase.OPEN)

    async def _end(self, ending: ReplicaRound) -> None:
        self._rounds.enter(Phase.ENDING)
        async with anyio.create_task_group() as tasks:
            if not self._trainer.spec.is_last:  # no more microbatches tell the next stage that the global batch is full
                later = [peer.peer_id for peer in self._view().serving(self._stage + 1)]
                tasks.start_soon(self._gossip.tell_some, later, self._rng)
            await self._admission.drained()
            contribution, samples, upcoming = await self._device_thread.run(Priority.STEP, self._contributions)
            settlement = await self._group.settle(ending, contribution, samples, upcoming)
            tasks.cancel_scope.cancel()
        if settlement.verdict is Verdict.COMMIT:
            await self._commit(settlement)
        # Each update that this peer missed is a third of a state, as long as stage-mates keep it. A newcomer takes over
        # one, too: it takes no part in an average that began before it came, and has the weights that it belongs to. If
        # this peer has made another update than the stage-mates, theirs do not go on with its history and are refused.
        elif settlement.cause == "other_weights" or not await self._replay(settlement.holders):
            self._metrics.resyncs.labels(settlement.cause).inc()
            await self._catch_up_by_state(settlement.holders, ending.number + 1, timeline=self.step.timeline)
            await self._follow(settlement.holders)

    async def _follow(self, holders: Sequence[str]) -> None:
        """Apply the updates that stage-mates have made while this peer downloaded their state.

        They do not wait for a peer that has held them up. In a round that is over there, it would be left behind anew.
        """
        for _ in range(CATCH_UP_TRIES):
            newest, mates = None, [peer.peer_id for peer in self._view().serving(self._stage)]
            with anyio.move_on_after(GREETING_S):
                newest = await self._gossip.greet(self._stage, mates)
            if newest == self.step.round_number or not await self._replay(holders, until=newest):
                return

    def _contributions(self) -> tuple[Sequence[torch.Tensor], int, Work | None]:
        return contributions(self._trainer, self._metrics, self._updates, self.step.round_number)

    async def _commit(self, settlement: Settlement) -> None:
        step, round_number = self.step, self.step.round_number
        counter = self._progress.counter
        samples = counter.samples(round_number)
        loss = counter.mean_loss(round_number, self._context.resolved.manifest.data.sequence_length)
        counted = b"" if self._leases is None else self._leases.end_round(round_number, settlement.brought)
        update = settlement.gradients, settlement.history_hash, counted
        await self._state_server.retain_update(*update, is_wanted=settlement.is_wanted)
        if self._manifest.averaging.mode == "delayed" and self._manifest.recovery.snapshots_at(step.optimizer_step):
            await self._device_thread.run(Priority.STEP, partial(self._trainer.strategy.expect, settlement.gradients))
            await self._state_server.keep_complete()
        with anyio.CancelScope(shield=True):  # a rewind must know what this peer brought to the update
            result = await self._device_thread.run(Priority.STEP, lambda: self._trainer.apply(settlement.gradients))
        self.reports.report(step, settlement, result, samples, loss)
        self._updates.end_round(self._context.clock.monotonic_s(), is_skipped=result.skipped)
        self._own_work.note(self._rounds.current)
        self._begin_round(round_number + 1, settlement.history_hash, step.timeline, counted, step.next_lineage)

    def _begin_anew(
        self,
        ledger: SampleLedger | None,
        number: int,
        history_hash: str,
        timeline: Timeline,
        ledger_bytes: bytes,
        lineage: bytes,
    ) -> None:
        """Begin a round with what others have given; stage 0 reads from their ledger on."""
        if self._leases is not None and ledger is not None:
            held = self._rounds.current.held if self._trainer.strategy.holds_period else ()
            self._leases.begin(number, timeline, ledger, held)
        self._begin_round(number, history_hash, timeline, ledger_bytes, lineage)
        self.reports.begin(self.step)
        self._updates.begin()

    def _begin_round(self, number: int, history_hash: str, timeline: Timeline, ledger: bytes, lineage: bytes) -> None:
        self.rewinds.drop_until(number)
        step = StepState(
            round_number=number,
            timeline=timeline,
            history_hash=history_hash,
            lineage=lineage,
            ledger=ledger,
            weights_version=self._trainer.weights_version,
            began_s=self._context.clock.monotonic_s(),
        )
        strategy = self._trainer.strategy
        self._rounds.begin(step, keeps_transfers=strategy.is_in_period, keeps_work=strategy.holds_period)
        self._own_work.stand_at(step)
        self._progress.forget_past()
        self._metrics.optimizer_step.set(step.optimizer_step)

    async def _catch_up_by_state(
        self, donors: Sequence[str], min_round: int, tries: int = DOWNLOAD_TRIES, timeline: Timeline | None = None
    ) -> None:
        """Take over the newest state that a stage-mate gives.

        Raises:
            CallError: nobody gave one
        """
        await self._downloads.take_newest(donors, min_round, partial(self._take_over, keeps_work=True), tries, timeline)

    async def _take_over(self, state: StageState, *, keeps_work: bool = False) -> None:
        # The trainer and the ledger may refuse a state. At most work that no state will hold is gone by then.
        ledger = await self._read_ledger(state.ledger)
        keeps_work = keeps_work and state.timeline == self.step.timeline
        strategy = self._trainer.strategy
        load = partial(self._trainer.load_state, state.tensors, state.optimizer_step, keeps_work=keeps_work)
        with anyio.CancelScope(shield=True):  # a rewind must not keep the loss from being told
            # Both in the device thread: until then, a stage-mate may hand some over.
            held_back, lost = await self._device_thread.run(Priority.STEP, lambda: (strategy.held_back_samples, load()))
        self.reports.lose(lost, self.step, state.timeline, held_back)
        self._own_work.give_up(state)
        self._begin_anew(ledger, state.round_number, state.history_hash, state.timeline, state.ledger, state.lineage)

    def _give_up_work(self, timeline: Timeline) -> None:
        strategy = self._trainer.strategy
        self.reports.lose(strategy.pending_samples, self.step, timeline, strategy.held_back_samples)

    async def _read_ledger(self, data: bytes) -> SampleLedger | None:
        """The ledger of a state, which stage 0 alone has."""
        return None if self._leases is None else await self._leases.read_ledger(data)

    async def _replay(self, donors: Sequence[str], until: int | None = None) -> bool:
        """Apply the updates that stage-mates made since this peer's state. Returns whether there was any.

        Args:
            until: the round that they are in, if known. While they vote on its update, they make a peer that asks for
                it wait, and one of them may wait for this peer before it votes
        """
        before = self.step.round_number
        while until is None or self.step.round_number < until:
            step = self.step
            try:
                update = await self._downloads.update_after(donors, step)
                ledger = await self._read_ledger(update.ledger)
            except CallError as error:
                log.info("replayed rounds=%d until=%d reason=%s", step.round_number - before, step.round_number, error)
                break
            num_pending, gradients = self._trainer.strategy.pending_samples, list(update.tensors.values())
            with anyio.CancelScope(shield=True):
                await self._device_thread.run(Priority.STEP, partial(self._trainer.apply, gradients))
            self.reports.lose(num_pending - self._trainer.strategy.pending_samples, step, step.timeline)
            begun = step.round_number + 1, update.history_hash, step.timeline, update.ledger, step.next_lineage
            self._begin_anew(ledger, *begun)
        return self.step.round_number > before

"""From one global step to the next: wait until it is full, drain, average, apply; or download the state."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import anyio
import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.policy.agreement import Verdict
from swarm_peer.policy.position import MAX_STEPS_AHEAD
from swarm_peer.policy.recovery import FIRST_ORIGIN, Origin, last_credible_step
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.averaging import checksum
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.gossip import Gossip
from swarm_peer.runtime.handover import GradientHandover
from swarm_peer.runtime.leases import SliceLeases
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.snapshots import StateDonor
from swarm_peer.runtime.stage_group import Settlement, StageGroup
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.runtime.state_index import StageState
from swarm_peer.runtime.state_transfer import fetch_state
from swarm_peer.runtime.transport import Handler, Reply, Transport
from swarm_peer.wire.messages import Body, RewindCall, RewindReply, StateIndexCall
from swarm_peer.wire.records import MAX_REPORTS, StepReport

log = logging.getLogger(__name__)

# Peers of the next stage that each peer tells of a full step; they tell their stage-mates at the barrier.
PEERS_TOLD = 4
# Pause before the state is asked for again, when no stage-mate gave it.
RESYNC_PAUSE_S = 1.0
DOWNLOAD_TRIES = 30
# Callers may be a step ahead for as long as the slowest hop takes; who is behind for longer has missed something.
BEHIND_S = 3.0
# Of a rewind: the new line begins above the highest step that its author believes, of which this peer may be short.
MAX_STEPS_OF_REWIND = 2 * MAX_STEPS_AHEAD
# A newcomer that is still behind after so many rounds of catching up serves all the same: the end of the step tells.
CATCH_UP_TRIES = 4


class StepLoop:
    """Owns the sequence of global steps of one peer. Belongs to the event loop's thread."""

    def __init__(
        self,
        manifest: RunManifest,
        trainer: StageTrainer,
        compute: ComputeThread,
        runner: StageRunner,
        gate: StepGate,
        group: StageGroup,
        donor: StateDonor,
        progress: ProgressBook,
        handover: GradientHandover,
        leases: SliceLeases | None,
        transport: Transport,
        gossip: Gossip,
        view: Callable[[], SwarmView],
        look_again: Callable[[Sequence[int]], Awaitable[SwarmView]],
        metrics: PeerMetrics,
        changed: Signal,
        rng: random.Random,
    ):
        """Args:
        leases: of stage 0, what it reads
        look_again: looks up who announces some stages now
        """
        self._manifest = manifest
        self._hash = manifest.hash
        self._trainer = trainer
        self._compute = compute
        self._runner = runner
        self._gate = gate
        self._group = group
        self._donor = donor
        self._progress = progress
        self._handover = handover
        self._leases = leases
        self._transport = transport
        self._gossip = gossip
        self._view = view
        self._look_again = look_again
        self._metrics = metrics
        self._changed = changed
        self._rng = rng
        self._stage = trainer.spec.index
        self._began = time.monotonic()
        self._ending = anyio.Lock()  # held while the step ends, or while this peer's share of it is handed over
        self._rewind_to: Origin | None = None
        self.step = 0
        self.origin = FIRST_ORIGIN
        self.download_bytes_per_s = 0.0  # of the last state; 0 if none was downloaded
        self.reports: deque[StepReport] = deque(maxlen=MAX_REPORTS)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {RewindCall: self.handle_rewind}

    @property
    def updates(self) -> int:
        """Optimizer updates in this peer's weights."""
        return self.origin.updates_at(self.step)

    @property
    def finished(self) -> bool:
        """Whether the run's last global step is done."""
        return self.updates >= self._manifest.training.steps

    async def begin(self, origin: Origin, state: StageState | None) -> None:
        """Start where the run begins: with a snapshot, or with the run's initial weights.

        Raises:
            UserError: the initial weights cannot be read
        """
        if state is not None:
            await self._take_over(state, origin.step, origin)
            return
        await self._compute.run(Priority.STEP, self._trainer.restart)
        # Of other versions of torch, the initial weights may be others: stage-mates compare their lineages.
        weights = await self._compute.run(Priority.STEP, self._trainer.state)
        lineage = await anyio.to_thread.run_sync(checksum, self._hash, list(weights.values()))
        await self._begin_to_read(origin.step, origin, b"")
        self._enter(origin.step, lineage, origin, b"")

    async def join(self, donors: list[str]) -> None:
        """Take over the newest state of stage-mates, who are asked once.

        Raises:
            CallError: none of them gave it
        """
        await self._download(donors, min_step=0, tries=1)

    async def catch_up(self, stage_mates: list[str]) -> None:
        """Make this peer known to its stage-mates, replay what they did meanwhile, and serve.

        From the greeting on they wait for this peer at the end of a step, so it does catch up.
        """
        for _ in range(CATCH_UP_TRIES):
            newest = await self._gossip.greet(self._stage, stage_mates)
            if newest <= self.step:
                break
            if not await self._replay(stage_mates):
                await self._download(stage_mates, min_step=self.step + 1)
        self._admit()

    async def run(self) -> None:
        """Finish global steps, and go back when a lost stage makes the run do so; for ever.

        Raises:
            CallError: stage-mates went on without this peer, and none of them gives their state
        """
        failures: list[CallError] = []

        async def run_steps() -> None:
            try:
                await self._run_steps()
            except CallError as error:
                failures.append(error)
                self._changed.notify()

        while True:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_steps)
                tasks.start_soon(self._look_when_behind)
                await self._changed.wait_for(lambda: self._rewind_to is not None or bool(failures))
                tasks.cancel_scope.cancel()
            if failures:
                raise failures[0]
            await self._rewind()

    async def _look_when_behind(self) -> None:
        """When others are in later steps for a while, ask stage-mates whether they have left this peer behind."""
        while True:
            await self._changed.wait_for(lambda: self._gate.newest_asked > self.step)
            step = self.step
            await anyio.sleep(BEHIND_S)
            if self.step == step and self._gate.is_open:
                mates = [peer.peer_id for peer in self._view().serving(self._stage)]
                if await self._gossip.greet(self._stage, mates) > step:
                    self._progress.saw_step(step + 1)
            self._gate.newest_asked = 0  # who asked may have lied

    async def _run_steps(self) -> None:
        while not self.finished:
            step = self.step
            await self._progress.wait_until_over(step)
            async with self._ending:
                await self._end(step)
            self._admit()
        log.info("run_finished updates=%d: the coordinator saves the model now, and ends the run", self.updates)

    async def leave(self) -> None:
        """Hand this peer's share of the step to a stage-mate, or end the step with them. Nothing comes in any more."""
        await self._gate.drained()
        while True:
            async with self._ending:
                step = self.step
                if await self._handover.hand_over(step):
                    return self._group.leave()
            await self._changed.wait_for(lambda left=step: self.step > left)  # type: ignore[misc]

    async def handle_rewind(self, caller: str, call: RewindCall, tensors: Sequence[memoryview]) -> Reply:
        """A stage had lost all its peers, and the caller has taken it over from a snapshot."""
        target = Origin(call.step, call.updates, call.born)
        if call.step > self.step and target != self._rewind_to:
            view = await self._look_again([call.lost_stage])
            others = [peer for peer in view.serving(call.lost_stage) if peer.peer_id != caller]
            known = view.peer(caller)
            if known is None or known.stage != call.lost_stage or call.lost_stage == self._stage:
                raise NotServing("only a peer that has taken over another stage rewinds the run")
            if any(peer.step < call.step for peer in others):
                raise NotServing(f"stage {call.lost_stage} has not lost its peers: {len(others)} others serve it")
            if call.step > self.step + MAX_STEPS_OF_REWIND:
                raise InvalidMessage(f"the run is in step {self.step} and cannot go on in {call.step}")
            if call.updates > self.updates:
                raise InvalidMessage(f"the run has made {self.updates} updates and cannot go back to {call.updates}")
            if self._rewind_to is None or call.step > self._rewind_to.step:
                self._rewind_to = target
                self._changed.notify()
        return Reply(RewindReply(step=self.step).model_dump())

    async def _rewind(self) -> None:
        target = self._rewind_to
        assert target is not None
        log.warning(
            "run_rewound stage=%d updates=%d to=%d step=%d", self._stage, self.updates, target.updates, target.step
        )
        self._metrics.rewinds.inc()
        self._gate.close()
        self._metrics.lost_samples.inc(self._trainer.num_samples)
        async with self._ending:
            state = await self._snapshot_of(target) if target.updates else None
            if state is not None:
                await self._take_over(state, target.step, target)
            else:
                await self.begin(target, None)
        kept = [report for report in self.reports if report.updates <= target.updates]  # not told to all yet, maybe
        self.reports.clear()
        self.reports.extend(kept)
        self._admit()

    async def _snapshot_of(self, target: Origin) -> StageState:
        kept = await anyio.to_thread.run_sync(self._donor.kept_state, self._stage, target.born)
        if kept is not None:
            return kept
        # This peer has come after the snapshot. Stage-mates have it, or guards in the stage before, or one of them has
        # moved elsewhere with it.
        view = await self._look_again(range(self._manifest.stages.count))
        call = StateIndexCall(manifest=self._hash, of_stage=self._stage, born=target.born)
        keepers = [peer.peer_id for peer in view.peers if peer.peer_id != self._transport.peer_id]
        return await fetch_state(
            self._transport, keepers, call, max_bytes=self._max_state_bytes(), updates=target.updates, rng=self._rng
        )

    def _max_state_bytes(self) -> int:
        return max_state_bytes(self._manifest, self._stage)

    async def _end(self, step: int) -> None:
        self._gate.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_next_stage)
            await self._gate.drained()
            gradients, samples = await self._compute.run(Priority.STEP, self._share)
            settlement = await self._group.settle(gradients, samples)
            tasks.cancel_scope.cancel()
        if settlement.verdict is Verdict.COMMIT:
            await self._commit(settlement)
        else:
            self._metrics.resyncs.labels("left_behind").inc()
            self._metrics.lost_samples.inc(samples)
            await self._download(list(settlement.holders), min_step=step + 1)

    def _share(self) -> tuple[list[torch.Tensor], int]:
        return self._trainer.mean_gradients(), self._trainer.num_samples

    async def _commit(self, settlement: Settlement) -> None:
        step = self.step
        ledger = self._progress.ledger
        samples, loss_sum = ledger.samples(step), ledger.loss_sum(step)
        counted = b"" if self._leases is None else self._leases.end_step(step)
        self._donor.retain_update(settlement.gradients, settlement.lineage, counted)
        result = await self._compute.run(Priority.STEP, lambda: self._trainer.apply(settlement.gradients))
        if result.skipped:
            log.error("update_skipped step=%d reason=the averaged gradient is not finite", step)
        seconds = time.monotonic() - self._began
        loss = loss_sum / samples if samples else 0.0
        updates = self.updates + 1
        if self._stage == 0:
            report = StepReport(step=step, updates=updates, samples=samples, loss=loss, seconds=seconds)
            self.reports.append(report)
            if settlement.samples != samples:
                log.warning("samples_differ step=%d counted=%d averaged=%d", step, samples, settlement.samples)
        self._metrics.loss.set(loss)
        log.info(
            "step_done updates=%d loss=%.4f samples=%d seconds=%.2f grad_norm=%.3g lr=%.3g",
            updates, loss, settlement.samples, seconds, result.grad_norm, result.learning_rate,
        )  # fmt: skip
        self._enter(step + 1, settlement.lineage, self.origin, counted)

    def _enter(self, step: int, lineage: str, origin: Origin, ledger: bytes) -> None:
        self.step = step
        self.origin = origin
        if self._rewind_to is not None and self._rewind_to.step <= step:
            self._rewind_to = None  # a newer one stays
        self._began = time.monotonic()
        self._runner.forget_step()
        self._handover.enter(step)
        self._metrics.global_step.set(self.updates)
        self._group.enter(step, lineage)
        self._progress.enter(step)
        self._donor.enter(step, lineage, origin, ledger)

    def _admit(self) -> None:
        self._gate.open(self.step)
        self._changed.notify()

    async def _download(self, donors: list[str], min_step: int, tries: int = DOWNLOAD_TRIES) -> None:
        """Take over the state of a stage-mate, asking for a while.

        Raises:
            CallError: nobody gave it
        """
        call = StateIndexCall(manifest=self._hash, of_stage=self._stage, min_step=min_step)
        view = self._view()
        for attempt in range(1, tries + 1):
            try:
                begin = time.monotonic()
                max_step = last_credible_step(peer.step for peer in view.peers if peer.state is PeerState.SERVING)
                state = await fetch_state(
                    self._transport,
                    donors,
                    call,
                    max_bytes=self._max_state_bytes(),
                    max_step=max_step,
                    rng=self._rng,
                )
                num_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
                self.download_bytes_per_s = num_bytes / (time.monotonic() - begin)
                await self._take_over(state, state.step, state.origin)
                return
            except CallError as error:
                if attempt == tries:
                    raise
                log.warning("state_not_found stage=%d step=%d reason=%s", self._stage, min_step, error)
                await anyio.sleep(RESYNC_PAUSE_S)
                view = await self._look_again(range(self._manifest.stages.count))
                serving = [peer.peer_id for peer in view.serving(self._stage)]
                donors = [peer_id for peer_id in serving if peer_id != self._transport.peer_id] or donors

    async def _take_over(self, state: StageState, step: int, origin: Origin) -> None:
        await self._begin_to_read(step, origin, state.ledger)
        await self._compute.run(Priority.STEP, lambda: self._trainer.load_state(state.tensors, state.updates))
        self._enter(step, state.lineage, origin, state.ledger)

    async def _begin_to_read(self, step: int, origin: Origin, ledger: bytes) -> None:
        if self._leases is not None:
            await self._leases.begin(step, origin, ledger)

    async def _replay(self, donors: list[str]) -> bool:
        """Apply the updates that stage-mates made since this peer's state. Returns whether there was any."""
        before = self.step
        shapes = [parameter.shape for parameter in self._trainer.module.parameters()]
        max_bytes = 4 * sum(shape.numel() for shape in shapes)
        while True:
            call = StateIndexCall(manifest=self._hash, of_stage=self._stage, kind="update", min_step=self.step)
            try:
                update = await fetch_state(self._transport, donors, call, max_bytes=max_bytes, rng=self._rng)
                gradients = list(update.tensors.values())
                # Their digest is one of bytes: as another type, the same bytes are other gradients.
                fits = all(gradient.dtype == torch.float32 for gradient in gradients)
                if not fits or [gradient.shape for gradient in gradients] != shapes or update.origin != self.origin:
                    raise InvalidMessage("an update that does not fit this stage")
                # The next barrier compares lineages alone: the right one must not come with other gradients.
                if await anyio.to_thread.run_sync(checksum, self._group.lineage, gradients) != update.lineage:
                    raise InvalidMessage("an update that is not the one of its lineage")
            except CallError as error:
                log.info("replayed steps=%d until=%d reason=%s", self.step - before, self.step, error)
                return self.step > before
            await self._begin_to_read(self.step + 1, self.origin, update.ledger)
            await self._compute.run(Priority.STEP, lambda gradients=gradients: self._trainer.apply(gradients))  # type: ignore[misc]
            self._enter(self.step + 1, update.lineage, self.origin, update.ledger)

    async def _tell_next_stage(self) -> None:
        """Spread the news of a full step: who has no more traffic would not hear of it."""
        if not self._trainer.spec.is_last:
            peers = [peer.peer_id for peer in self._view().serving(self._stage + 1)]
            await self._gossip.tell(self._rng.sample(peers, min(PEERS_TOLD, len(peers))))

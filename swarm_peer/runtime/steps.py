"""From one global step to the next: wait until it is full, drain, average, apply; or download the state."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable

import anyio
import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.agreement import Verdict
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.averaging import checksum
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.gossip import Gossip
from swarm_peer.runtime.handover import GradientHandover
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.stage_group import Settlement, StageGroup
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.runtime.state_transfer import StageState, StateDonor, fetch_state
from swarm_peer.runtime.transport import Transport
from swarm_peer.wire.records import StepReport

log = logging.getLogger(__name__)

# Peers of the next stage that each peer tells of a full step; they tell their stage-mates at the barrier.
PEERS_TOLD = 4
# Pause before the state is asked for again, when no stage-mate gave it.
RESYNC_PAUSE_S = 1.0


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
        transport: Transport,
        gossip: Gossip,
        view: Callable[[], SwarmView],
        metrics: PeerMetrics,
        changed: Signal,
        rng: random.Random,
    ):
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
        self._transport = transport
        self._gossip = gossip
        self._view = view
        self._metrics = metrics
        self._changed = changed
        self._rng = rng
        self._stage = trainer.spec.index
        self._began = time.monotonic()
        self._ending = anyio.Lock()  # held while the step ends, or while this peer's share of it is handed over
        self.step = 0
        self.reports: deque[StepReport] = deque(maxlen=32)

    @property
    def finished(self) -> bool:
        """Whether the run's last global step is done."""
        return self.step >= self._manifest.training.steps

    async def join(self, donors: list[str]) -> None:
        """Take over the newest state of stage-mates, or begin with the run's initial weights if there are none."""
        if donors:
            await self._download(donors, min_step=0)
        else:
            # Of other versions of torch, the initial weights may be others: stage-mates compare their lineages.
            state = await self._compute.run(Priority.STEP, self._trainer.state)
            self._enter(0, await anyio.to_thread.run_sync(checksum, self._hash, list(state.values())))

    async def catch_up(self, stage_mates: list[str]) -> None:
        """Make this peer known to its stage-mates, take over their state if they went on meanwhile, and serve."""
        newest = await self._gossip.greet(self._stage, stage_mates)
        if newest > self.step:
            await self._download(stage_mates, min_step=self.step + 1)
        self._admit()

    async def run(self) -> None:
        """Finish global steps until the run's last."""
        while not self.finished:
            step = self.step
            await self._progress.wait_until_over(step)
            async with self._ending:
                await self._end(step)
            self._admit()
        log.info("run_finished steps=%d", self.step)

    async def leave(self) -> None:
        """Hand this peer's share of the step to a stage-mate, or end the step with them. Nothing comes in any more."""
        await self._gate.drained()
        while True:
            async with self._ending:
                step = self.step
                if await self._handover.hand_over(step):
                    return self._group.leave()
            await self._changed.wait_for(lambda left=step: self.step > left)  # type: ignore[misc]

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
        result = await self._compute.run(Priority.STEP, lambda: self._trainer.apply(settlement.gradients))
        if result.skipped:
            log.error("update_skipped step=%d reason=the averaged gradient is not finite", step)
        seconds = time.monotonic() - self._began
        loss = loss_sum / samples if samples else 0.0
        if self._stage == 0:
            self.reports.append(StepReport(step=step + 1, samples=samples, loss=loss, seconds=seconds))
            if settlement.samples != samples:
                log.warning("samples_differ step=%d counted=%d averaged=%d", step, samples, settlement.samples)
        self._metrics.loss.set(loss)
        log.info(
            "step_done step=%d loss=%.4f samples=%d seconds=%.2f grad_norm=%.3g lr=%.3g",
            step + 1, loss, settlement.samples, seconds, result.grad_norm, result.learning_rate,
        )  # fmt: skip
        self._enter(step + 1, settlement.lineage)

    def _enter(self, step: int, lineage: str) -> None:
        self.step = step
        self._began = time.monotonic()
        self._runner.forget_step()
        self._metrics.global_step.set(step)
        self._group.enter(step, lineage)
        self._donor.step = step
        self._progress.enter(step)

    def _admit(self) -> None:
        self._gate.open(self.step)
        self._changed.notify()

    async def _download(self, donors: list[str], min_step: int) -> None:
        """Take over the state of a stage-mate, asking until somebody gives it."""
        max_bytes = 2 * sum(t.numel() * t.element_size() for t in self._trainer.state_template().values()) + 2**20
        while True:
            self._rng.shuffle(donors)
            try:
                state = await fetch_state(
                    self._transport,
                    donors,
                    manifest_hash=self._hash,
                    stage=self._stage,
                    min_step=min_step,
                    max_bytes=max_bytes,
                )
                await self._compute.run(Priority.STEP, lambda state=state: self._load(state))  # type: ignore[misc]
                return self._enter(state.step, state.lineage)
            except CallError as error:
                log.warning("state_not_found stage=%d step=%d reason=%s", self._stage, min_step, error)
                await anyio.sleep(RESYNC_PAUSE_S)
                serving = [peer.peer_id for peer in self._view().serving(self._stage)]
                donors = [peer_id for peer_id in serving if peer_id != self._transport.peer_id] or donors

    def _load(self, state: StageState) -> None:
        self._trainer.load_state(state.tensors, state.step)

    async def _tell_next_stage(self) -> None:
        """Spread the news of a full step: who has no more traffic would not hear of it."""
        if not self._trainer.spec.is_last:
            peers = [peer.peer_id for peer in self._view().serving(self._stage + 1)]
            await self._gossip.tell(self._rng.sample(peers, min(PEERS_TOLD, len(peers))))

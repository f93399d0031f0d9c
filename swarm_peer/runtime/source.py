"""Stage 0: draws samples, keeps microbatches in flight, and counts those whose gradient came back."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, StepClosed
from swarm_peer.policy.ledger import StepCount
from swarm_peer.policy.ranges import MAX_RANGES, SampleId
from swarm_peer.policy.recovery import Origin
from swarm_peer.policy.view import SwarmView
from swarm_peer.policy.window import InFlightWindow
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.gossip import Gossip
from swarm_peer.runtime.leases import SliceLeases
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.next_stage import Microbatch
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.wire.codecs import encode_tokens
from swarm_peer.wire.records import Progress, Validation

log = logging.getLogger(__name__)

# A microbatch that fails this often, each time after all tries of a hop, is dropped: it is itself to blame.
MAX_LAUNCHES = 20
# Pause before a failed microbatch is launched again; the later stages were already tried with backoff.
RELAUNCH_PAUSE_S = 0.5
# Pause between exchanges of counts while others finish the step.
IDLE_PAUSE_S = 0.1


# Told of each microbatch that counted: (step, tokens of shape (B, T+1), which samples they are)
CountedHook = Callable[[int, torch.Tensor, Sequence[SampleId]], None]


@dataclass(slots=True, eq=False)
class _Batch:
    """Samples that travel together, through as many launches as it takes."""

    tokens_BS: torch.Tensor
    samples: tuple[SampleId, ...]
    generation: int  # of the leases that the samples were read under
    claimed_step: int | None = None  # the step whose global batch has room reserved for it
    id: bytes = b""  # the same for all launches within a step: who has counted it knows it again
    launches: int = 0


class MicrobatchSource:
    """Belongs to the event loop's thread.

    Attributes:
        counted: hook that is told each counted batch: (step, tokens of shape (B, T+1), their samples); for tests
    """

    def __init__(
        self,
        manifest: RunManifest,
        me: str,
        leases: SliceLeases,
        validation: np.ndarray,
        runner: StageRunner,
        gate: StepGate,
        progress: ProgressBook,
        gossip: Gossip,
        view: Callable[[], SwarmView],
        metrics: PeerMetrics,
        changed: Signal,
        origin: Callable[[], Origin],
        hop_timeout_s: float,
        counted: CountedHook | None = None,
    ):
        self._manifest = manifest
        self._me = me
        self._leases = leases
        self._validation = validation
        self._runner = runner
        self._gate = gate
        self._progress = progress
        self._gossip = gossip
        self._view = view
        self._metrics = metrics
        self._changed = changed
        self._origin = origin
        self._timeout_s = hop_timeout_s
        self._counted_hook = counted
        self._window = InFlightWindow(manifest.limits.max_in_flight)
        self._waiting: list[_Batch] = []  # to be launched again
        self._vacated: list[int] = []  # for each reserved place that its batch has lost, the step
        self._in_flight = 0
        self._validated_step = -1
        self.current = Progress(step=0, samples=0, claimed=0, loss_sum=0.0)
        self.validations: deque[Validation] = deque(maxlen=8)
        self.stopping = False

    def stop(self) -> None:
        """Launch nothing more; what is in flight is finished."""
        self.stopping = True
        self._changed.notify()

    async def run(self) -> None:
        """Launch microbatches until `stop`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._leases.run)
            tasks.start_soon(self._tell_when_idle)
            while True:
                await self._changed.wait_for(lambda: self.stopping or self._may_launch())
                if self.stopping:
                    break
                step = self._gate.step
                if self._validation_is_due(step):
                    self._validated_step = step
                    await self._validate(step)
                    continue
                batch = self._take_waiting(step) if self._waiting else await self._draw()
                if batch.generation != self._leases.generation:
                    continue  # others may read these slices now; what of them has not counted is read again
                if step != self._gate.step:  # it ended while samples were read
                    self._waiting.append(batch)
                    continue
                self._claim(batch, step)
                self._in_flight += 1
                self._metrics.in_flight.set(self._in_flight)
                tasks.start_soon(self._train, batch, step)
            await self._changed.wait_for(lambda: self._in_flight == 0)
            tasks.cancel_scope.cancel()

    async def _tell_when_idle(self) -> None:
        """At the end of a step the last counts have no call to ride on: exchange them within stage 0."""

        def is_idle() -> bool:
            step = self._gate.step
            over = self._updates(step) >= self._manifest.training.steps or self._progress.ledger.is_full(step)
            return self._gate.is_open and not over and self._in_flight == 0 and not self._may_launch()

        while True:
            await self._changed.wait_for(is_idle)
            await self._gossip.tell(peer.peer_id for peer in self._view().serving(0))
            await anyio.sleep(IDLE_PAUSE_S)
            self._changed.notify()  # somebody's patience may have ended meanwhile

    def _may_launch(self) -> bool:
        step = self._gate.step
        if not self._gate.is_open:
            return False
        if step == 0 and self._view().fewest_serving() < self._manifest.stages.peers_to_start:
            return False
        if self._validation_is_due(step):
            return True
        self._metrics.window.set(self._window.size())
        if self._updates(step) >= self._manifest.training.steps or self._in_flight >= self._window.size():
            return False
        if self._progress.ledger.is_full(step):
            return False
        if step in self._vacated or any(batch.claimed_step == step for batch in self._waiting):
            return True
        live = self._progress.talkative((peer.peer_id for peer in self._view().serving(0)), 2 * self._timeout_s)
        return self._progress.ledger.may_claim(step, self._me, live, self._manifest.training.microbatch_size)

    def _take_waiting(self, step: int) -> _Batch:
        """Those first that have a place in this global batch: the others might never get one, and keep them waiting."""
        batch = next((batch for batch in self._waiting if batch.claimed_step == step), self._waiting[0])
        self._waiting.remove(batch)
        return batch

    async def _draw(self) -> _Batch:
        samples = await self._leases.draw(self._manifest.training.microbatch_size)
        # Not before the wait: these would pass for an older generation's then, and nobody would read them again.
        generation = self._leases.generation
        tokens_BS = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        return _Batch(tokens_BS, tuple(sample.id for sample in samples), generation)

    def _claim(self, batch: _Batch, step: int) -> None:
        batch.launches += 1
        if batch.claimed_step != step:
            batch.claimed_step = step
            batch.id = os.urandom(16)
            if step in self._vacated:
                self._vacated.remove(step)
            else:
                self._count(step, claimed=len(batch.tokens_BS))

    def _count(self, step: int, samples: Sequence[SampleId] = (), claimed: int = 0, loss_sum: float = 0.0) -> None:
        own = self._progress.ledger.count_of(step, self._me)
        ranges = self._leases.count(samples, own)
        if len(ranges) > MAX_RANGES:
            log.error("samples_not_recorded ranges=%d reason=at most %d go in a step", len(ranges), MAX_RANGES)
            ranges = ranges[:MAX_RANGES]
        grown = StepCount(own.samples + len(samples), own.claimed + claimed, own.loss_sum + loss_sum, ranges)
        self.current = self._progress.count_own(step, grown)

    async def _train(self, batch: _Batch, step: int) -> None:
        begin = time.perf_counter()
        outcome = "counted"
        try:
            async with self._gate.enter(step):
                microbatch = _microbatch(batch.id, batch.tokens_BS, step, "train")
                result = await self._runner.run(microbatch, None, anyio.current_time() + self._timeout_s)
                if batch.generation == self._leases.generation:  # not of a line of updates that was given up
                    self._count(step, batch.samples, loss_sum=result.loss_sum)
                    if self._counted_hook is not None:
                        self._counted_hook(step, batch.tokens_BS, batch.samples)
            seconds = time.perf_counter() - begin
            self._metrics.round_trip_seconds.observe(seconds)
            if speed := self._runner.samples_per_s:
                compute_s = len(batch.tokens_BS) / speed
                self._window.observe(max(seconds - compute_s, 0.0), compute_s, time.monotonic())
        except StepClosed as error:
            outcome = "step_closed"
            self._gate.newest_asked = max(self._gate.newest_asked, error.step or 0)
            if self._gate.step == step and not self._progress.ledger.is_full(step):
                # Somebody knows of counts that this peer has not heard of: whose author told them and died, perhaps.
                await self._gossip.tell(peer.peer_id for peer in self._view().serving(1))
                await anyio.sleep(RELAUNCH_PAUSE_S)
            self._waiting.append(batch)
        except CallError as error:
            outcome = error.code
            await self._launch_again(batch, step, error)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
            self._metrics.microbatches.labels("train", outcome).inc()
            self._changed.notify()

    async def _launch_again(self, batch: _Batch, step: int, error: CallError) -> None:
        log.warning("microbatch_failed launches=%d reason=%s: %s", batch.launches, error.code, error)
        if batch.launches >= MAX_LAUNCHES:
            self._metrics.lost_samples.inc(len(batch.tokens_BS))
            log.error("microbatch_dropped launches=%d reason=%s", batch.launches, error)
            if batch.generation == self._leases.generation:
                self._leases.give_up(batch.samples)
            # Another takes its place in the global batch, which would stay unfilled otherwise.
            self._vacated = [*(known for known in self._vacated if known >= step), step]
            return
        await anyio.sleep(RELAUNCH_PAUSE_S)
        self._waiting.append(batch)

    def _updates(self, step: int) -> int:
        return self._origin().updates_at(step)

    def _validation_is_due(self, step: int) -> bool:
        every, updates = self._manifest.training.validation_every, self._updates(step)
        at_end = updates == self._manifest.training.steps
        return bool(every) and step > self._validated_step and (updates % every == 0 or at_end)

    async def _validate(self, step: int) -> None:
        """Compute this peer's share of the validation loss, before its training microbatches of the step."""
        peers = sorted({peer.peer_id for peer in self._view().serving(0)} | {self._me})
        share = torch.from_numpy(self._validation[peers.index(self._me) :: len(peers)].copy())
        losses: list[tuple[int, float]] = []
        room = anyio.Semaphore(self._manifest.limits.max_in_flight)

        async def evaluate(tokens_BS: torch.Tensor) -> None:
            try:
                async with room, self._gate.enter(step):
                    microbatch = _microbatch(os.urandom(16), tokens_BS, step, "evaluate")
                    result = await self._runner.run(microbatch, None, anyio.current_time() + self._timeout_s)
                losses.append((len(tokens_BS), result.loss_sum))
            except CallError as error:
                # The step may end before a slow peer has done its share: the mean is then over fewer samples.
                self._metrics.microbatches.labels("evaluate", error.code).inc()
                log.info("validation_incomplete step=%d reason=%s", step, error)

        async with anyio.create_task_group() as tasks:
            # Of an empty share, split makes one empty microbatch.
            for tokens_BS in share.split(self._manifest.training.microbatch_size) if len(share) else ():
                tasks.start_soon(evaluate, tokens_BS)
        if losses:
            samples, loss_sum = sum(count for count, _ in losses), sum(loss for _, loss in losses)
            updates = self._updates(step)
            self.validations.append(Validation(step=step, updates=updates, samples=samples, loss_sum=loss_sum))
        self._changed.notify()


def _microbatch(microbatch_id: bytes, tokens_BS: torch.Tensor, step: int, mode: str) -> Microbatch:
    return Microbatch(microbatch_id, step, mode, len(tokens_BS), encode_tokens(tokens_BS))

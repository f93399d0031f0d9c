"""The launcher of stage 0: draws samples, keeps microbatches in flight, and counts those whose gradient came back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.errors import CallError, NotFinite, RoundClosed, UserError
from swarm_peer.policy.data.ranges import MAX_RANGES, SampleId
from swarm_peer.policy.in_flight_window import InFlightWindow
from swarm_peer.policy.progress_counter import RoundCount
from swarm_peer.policy.trouble import Complaint, LaunchRecord, worst
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_client import Microbatch
from swarm_peer.token_marks import num_targets, weight_of
from swarm_peer.wire.codecs import encode_tokens
from swarm_peer.wire.messages import Mode
from swarm_peer.wire.records import Progress, Validation

log = logging.getLogger(__name__)

# A microbatch that has failed this often, each time after all tries of a hop, is dropped: it must be itself to blame.
MAX_LAUNCHES = 20
# Pause before a failed microbatch is launched again. The peers of later stages were tried with backoff already.
RELAUNCH_PAUSE_S = 0.5
# Two stage-0 peers may have no peer in common at later stages, and then no microbatch brings them news of each other.
# Each exchanges counts with some others this often, so long before any of them is taken for silent; and more often from
# when it has launched its own share of a round. If each told all others then, messages would grow with their square.
NEWS_EVERY_S = 5.0
LAST_NEWS_EVERY_S = 0.5
PEERS_TOLD = 2


# Called with each microbatch that has counted: (round, tokens of shape (B, T+1), the names of its samples, its id).
CountedHook = Callable[[int, torch.Tensor, Sequence[SampleId], bytes], None]


@dataclass(slots=True, eq=False, kw_only=True)
class _Batch:
    """Samples that travel together, in as many launches as it takes.

    Attributes:
        generation: the generation of the leases in which the samples were drawn
        claimed: the round whose global batch has room reserved for the batch
        id: the same in all launches within a round, so that a peer which has counted the batch recognises it
        failures: how many launches have failed; those for which the round closed have not
    """

    tokens_BS: torch.Tensor
    samples: tuple[SampleId, ...]
    generation: int
    claimed: ReplicaRound | None = None
    id: bytes = b""
    failures: int = 0


class MicrobatchLauncher:
    """Launches the microbatches of one stage-0 peer and counts them. Belongs to the event loop's thread.

    Attributes:
        current: the newest progress count of this life of the peer
        validations: this peer's shares of the last validation losses
        stopping: whether `stop` has been called, or the data cannot be read
        failure: why the data cannot be read, if so
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        leases: SliceLeases,
        validation: npt.NDArray[np.int32],
        core: ReplicaCore,
        swarm: SwarmAccess,
        counted: CountedHook | None = None,
    ):
        """Make a launcher that has launched nothing.

        Args:
            validation: held-out samples, int32 of shape (N, T+1)
            counted: called with each microbatch that has counted; for tests
        """
        manifest = context.resolved.manifest
        self._context = context
        self._manifest = manifest
        self._life = swarm.progress.author
        self._leases = leases
        self._validation = validation
        self._executor = core.executor
        self._swarm = swarm
        self._progress = swarm.progress
        self._admission = core.admission
        self._rounds = core.rounds
        self._timeout_s = manifest.limits.hop_timeout_s * max(manifest.stages.count - 1, 1)
        self._patience_s = 2 * self._timeout_s  # for a peer of stage 0 that counts nothing
        self._counted_hook = counted
        self._capacity = core.capacity
        self._window = InFlightWindow(core.capacity.microbatches)
        context.metrics.window.set(self._most_in_flight)
        self._waiting: list[_Batch] = []  # to be launched, some of them again
        self._is_drawing = False
        self._in_flight = 0
        self._heard_others: ReplicaRound | None = None  # the round of the last exchange of counts within stage 0
        self._claimed_at_s = context.clock.monotonic_s()
        self._rng = context.random.stream("news")
        self._record = LaunchRecord()
        self._record_generation = 0
        self.current = Progress(round_number=0, samples=0, claimed=0, loss_sum=0.0)
        self.validations: deque[Validation] = deque(maxlen=8)
        self.stopping = False
        self.failure: UserError | None = None

    @property
    def _most_in_flight(self) -> int:
        return min(self._window.size(), self._capacity.microbatches)

    def complaint(self) -> Complaint | None:
        """This peer's trouble in launching microbatches, if it has any."""
        now_s = self._context.clock.monotonic_s()
        return worst((self._record.complaint(now_s), self._leases.complaint(now_s)))

    def stop(self) -> None:
        """Launch no more microbatches. `run` returns when those in flight have finished."""
        self.stopping = True
        self._context.changed.notify()

    async def run(self) -> None:
        """Launch microbatches until `stop`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._leases.run)
            tasks.start_soon(self._exchange_at_end)
            tasks.start_soon(self._exchange_sometimes)
            while True:
                await self._context.changed.wait_for(lambda: self.stopping or self._may_launch())
                if self.stopping:
                    break
                present = self._rounds.current
                if self._validation_is_due():
                    present.validated = True
                    await self._validate(present)
                    continue
                if not self._waiting:
                    # Beside the loop: while a lease is waited for, what has failed is launched again.
                    self._is_drawing = True
                    tasks.start_soon(self._draw)
                    continue
                batch = self._take_waiting(present)
                if batch.generation != self._leases.generation:
                    continue  # other peers may read these slices now, and read again the samples that have not counted
                self._claim(batch, present)
                self._in_flight += 1
                self._context.metrics.in_flight.set(self._in_flight)
                tasks.start_soon(self._train, batch, present)
            await self._context.changed.wait_for(lambda: self._in_flight == 0)
            tasks.cancel_scope.cancel()

    async def _exchange_at_end(self) -> None:
        """Exchange counts within stage 0 at the end of a round: from when this peer has launched its own share.

        It does so with all others then, since it may go on with what they have left; and with all when what it has
        launched is back, since they wait for its last counts.
        """
        while True:
            await self._context.changed.wait_for(lambda: self._is_at_end(self._rounds.current))
            # As it was before the telling: what comes back meanwhile has not been told.
            present, was_idle = self._rounds.current, self._in_flight == 0
            await self._swarm.gossip.tell(self._other_launchers())
            self._heard_others = present
            self._context.changed.notify()  # there may be something to launch now
            while self._is_at_end(present):
                with anyio.move_on_after(LAST_NEWS_EVERY_S) as pause:
                    await self._until_busy_or_idle(present, was_idle)
                if not self._is_at_end(present):
                    break
                is_done, was_idle = self._in_flight == 0 and not was_idle, self._in_flight == 0
                if is_done:
                    await self._swarm.gossip.tell(self._other_launchers())
                elif pause.cancelled_caught:
                    await self._tell_some()
                self._context.changed.notify()  # some peer may have lost its share by its silence meanwhile

    def _is_at_end(self, present: ReplicaRound) -> bool:
        """Whether a round goes on without anything that this peer alone may launch."""
        is_open = present is self._rounds.current and self._admission.is_open
        return is_open and self._wants_samples() and not self._has_own_to_launch()

    async def _until_busy_or_idle(self, present: ReplicaRound, was_idle: bool) -> None:
        def has_changed() -> bool:
            return not self._is_at_end(present) or (self._in_flight == 0) != was_idle

        await self._context.changed.wait_for(has_changed)

    async def _exchange_sometimes(self) -> None:
        """Exchange counts with some other stage-0 peers, all the time."""
        while True:
            await anyio.sleep(NEWS_EVERY_S)
            if self._admission.is_open and self._wants_samples():
                await self._tell_some()

    async def _tell_some(self) -> None:
        others = self._other_launchers()
        await self._swarm.gossip.tell(self._rng.sample(others, min(PEERS_TOLD, len(others))))

    def _other_launchers(self) -> list[str]:
        return [peer.peer_id for peer in self._swarm.view().serving(0) if peer.peer_id != self._life.peer_id]

    def _may_launch(self) -> bool:
        """Whether there is a microbatch to launch, or a validation to compute, in the present round."""
        present = self._rounds.current
        if not self._admission.is_open:
            return False
        if present.number == 0 and self._swarm.view().fewest_serving() < self._manifest.stages.peers_to_start:
            return False
        if self._validation_is_due():
            return True
        if not self._wants_samples() or self._in_flight >= self._most_in_flight:
            return False
        if self._is_drawing and not self._waiting:
            return False
        may_take_left = self._heard_others is present and self._may_claim(present)
        return self._has_own_to_launch() or may_take_left or self._is_left_out(present)

    def _has_own_to_launch(self) -> bool:
        """Whether there is something to launch that no other peer may launch in its place."""
        present = self._rounds.current
        if present.vacated or any(batch.claimed is present for batch in self._waiting):
            return True
        return self._may_claim(present, only_own=True)

    def _may_claim(self, present: ReplicaRound, *, only_own: bool = False) -> bool:
        live = self._progress.active((peer.peer_id for peer in self._swarm.view().serving(0)), self._patience_s)
        size = self._manifest.training.microbatch_size
        return self._progress.counter.may_claim(present.number, self._life, live, size, only_own=only_own)

    def _is_left_out(self, present: ReplicaRound) -> bool:
        """Whether this peer has had no place in a global batch for as long as others wait for one that counts nothing.

        In small rounds they may have taken all places before it begins. So it launches one microbatch beyond them: once
        that counts, the others leave it its share again. They hear of no count of one with too many lives in the round.
        """
        counter, known_as = self._progress.counter, (present.number, self._life)
        has_waited = self._context.clock.monotonic_s() - self._claimed_at_s > self._patience_s
        return has_waited and counter.may_count(*known_as) and not counter.count_of(*known_as).claimed

    def _wants_samples(self) -> bool:
        """Whether the run trains in this round, and its global batch is not full yet."""
        step = self._rounds.step
        is_full = self._progress.counter.is_full(step.round_number)
        return step.optimizer_step < self._manifest.training.steps and not is_full

    def _take_waiting(self, present: ReplicaRound) -> _Batch:
        """Take a waiting batch, first those with a place in this global batch: others may have to wait for one."""
        batch = next((batch for batch in self._waiting if batch.claimed is present), self._waiting[0])
        self._waiting.remove(batch)
        return batch

    async def _draw(self) -> None:
        try:
            samples = await self._leases.draw(self._manifest.training.microbatch_size)
            # The generation is read after the wait. With an older one these samples would be discarded, and no peer
            # would read them again.
            generation = self._leases.generation
            tokens_BS = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
            ids = tuple(sample.id for sample in samples)
            self._waiting.append(_Batch(tokens_BS=tokens_BS, samples=ids, generation=generation))
        except UserError as error:
            # This peer can still hand over what it has computed.
            self.failure = error
            self.stop()
        finally:
            self._is_drawing = False
            self._context.changed.notify()

    def _claim(self, batch: _Batch, present: ReplicaRound) -> None:
        """Give a batch a place in the global batch of the round, unless it has one already."""
        if batch.claimed is not present:
            batch.claimed = present
            self._claimed_at_s = self._context.clock.monotonic_s()
            batch.id = self._context.random.token(16)
            if present.vacated:
                present.vacated -= 1
            else:
                self._count(present.number, claimed=len(batch.tokens_BS))

    def _count(
        self,
        round_number: int,
        samples: Sequence[SampleId] = (),
        claimed: int = 0,
        loss_sum: float = 0.0,
        targets: int = 0,
    ) -> None:
        own = self._progress.counter.count_of(round_number, self._life)
        ranges = self._leases.note_counted(samples, own)
        if len(ranges) > MAX_RANGES:
            log.error("samples_not_recorded ranges=%d reason=at most %d fit into one count", len(ranges), MAX_RANGES)
            ranges = ranges[:MAX_RANGES]
        grown = RoundCount(
            own.samples + len(samples),
            own.claimed + claimed,
            own.loss_sum + loss_sum,
            ranges,
            own.targets + targets,
        )
        self.current = self._progress.count_own(round_number, grown)

    async def _train(self, batch: _Batch, present: ReplicaRound) -> None:
        outcome, reason, later_round = "counted", "", 0
        if batch.generation != self._record_generation:  # the weights may be others than those that have failed
            self._record_generation = batch.generation
            self._record.forget()
        launch = self._record.begin(self._context.clock.monotonic_s())
        try:
            try:
                await self._compute(batch, present)
            except CallError as error:
                # Not the error itself: its traceback holds the pass, and others need that memory during the pauses.
                outcome, reason, later_round = error.code, str(error), getattr(error, "round_number", None) or 0
            if outcome == RoundClosed.code:
                self._admission.saw_round(later_round)
                if self._rounds.current is present and not self._progress.counter.is_full(present.number):
                    # Some peer knows of counts that this one has not heard of. Perhaps their author died after telling.
                    await self._swarm.gossip.tell(peer.peer_id for peer in self._swarm.view().serving(1))
                    await anyio.sleep(RELAUNCH_PAUSE_S)
                self._waiting.append(batch)
            elif outcome == "counted":
                self._record.forget()
            else:
                await self._launch_again(batch, present, f"{outcome}: {reason}", is_finite=outcome != NotFinite.code)
        finally:
            self._record.end(launch)
            self._in_flight -= 1
            self._context.metrics.in_flight.set(self._in_flight)
            self._context.metrics.microbatches.labels("train", outcome).inc()
            self._context.changed.notify()

    async def _compute(self, batch: _Batch, present: ReplicaRound) -> None:
        """Run a batch through all stages, and count it."""
        begin = self._context.clock.monotonic_s()
        async with self._admission.enter(present.number) as entered:
            microbatch = _microbatch(batch.id, batch.tokens_BS, present, "train")
            result = await self._executor.run(entered, microbatch, None, anyio.current_time() + self._timeout_s)
            if batch.generation == self._leases.generation:  # otherwise it belongs to a timeline that was given up
                entered.names += batch.samples
                targets = num_targets(batch.tokens_BS) if self._manifest.data.has_targets else 0
                self._count(present.number, batch.samples, loss_sum=result.loss_sum, targets=targets)
                if self._counted_hook is not None:
                    self._counted_hook(present.number, batch.tokens_BS, batch.samples, batch.id)
        seconds = self._context.clock.monotonic_s() - begin
        self._context.metrics.round_trip_seconds.observe(seconds)
        if speed := self._executor.samples_per_s:
            compute_s = len(batch.tokens_BS) / speed
            self._window.observe(max(seconds - compute_s, 0.0), compute_s, self._context.clock.monotonic_s())
            self._context.metrics.window.set(self._most_in_flight)

    async def _launch_again(self, batch: _Batch, present: ReplicaRound, reason: str, *, is_finite: bool) -> None:
        """Have a batch that has failed launched again after a pause, or drop it if it has failed too often.

        Args:
            is_finite: see LaunchRecord.failed
        """
        view = self._swarm.view()
        if all(view.serving(stage) for stage in range(1, view.num_stages)):
            batch.failures += 1
            if batch.generation == self._leases.generation:
                now_s = self._context.clock.monotonic_s()
                self._record.failed(batch.samples, reason, now_s, is_finite=is_finite)
        else:  # the empty stage is to blame, however long it stays so
            self._record.forget()
        log.warning("microbatch_failed failures=%d reason=%s", batch.failures, reason)
        if batch.failures >= MAX_LAUNCHES:
            lost = f"their microbatch has failed {batch.failures} times: {reason}"
            self._context.metrics.lose(len(batch.tokens_BS), lost, round_number=present.number)
            if batch.generation == self._leases.generation:
                self._leases.give_up(batch.samples)
            # Another batch takes its place. Otherwise the global batch would never be full.
            present.vacated += 1
            return
        await anyio.sleep(RELAUNCH_PAUSE_S)
        self._waiting.append(batch)

    def _validation_is_due(self) -> bool:
        is_due = self._manifest.training.validates_at(self._rounds.step.optimizer_step)
        return is_due and not self._rounds.current.validated

    async def _validate(self, present: ReplicaRound) -> None:
        """Compute this peer's share of the validation loss, before its training microbatches of the round."""
        peers = sorted({peer.peer_id for peer in self._swarm.view().serving(0)} | {self._life.peer_id})
        share = torch.from_numpy(self._validation[peers.index(self._life.peer_id) :: len(peers)].copy())
        losses: list[tuple[int, float]] = []
        room = anyio.Semaphore(self._capacity.microbatches)

        async def evaluate(tokens_BS: torch.Tensor) -> None:
            try:
                async with room, self._admission.enter(present.number) as entered:
                    microbatch = _microbatch(self._context.random.token(16), tokens_BS, present, "evaluate")
                    result = await self._executor.run(entered, microbatch, None, anyio.current_time() + self._timeout_s)
                losses.append((len(tokens_BS), result.loss_sum))
            except CallError as error:
                # The round may end before a slow peer has done its share. Then the mean is over fewer samples.
                self._context.metrics.microbatches.labels("evaluate", error.code).inc()
                log.info("validation_incomplete round=%d reason=%s", present.number, error)

        async with anyio.create_task_group() as tasks:
            # torch.split would make one empty microbatch of an empty share.
            for tokens_BS in torch.split(share, self._manifest.training.microbatch_size) if len(share) else ():
                tasks.start_soon(evaluate, tokens_BS)
        if losses:
            samples, loss_sum = sum(count for count, _ in losses), sum(loss for _, loss in losses)
            step, held_out = present.step, len(self._validation)
            self.validations.append(
                Validation(
                    round_number=step.round_number,
                    optimizer_step=step.optimizer_step,
                    samples=samples,
                    held_out=held_out,
                    # Divided by the number of samples, that of all shares is a mean over the targets of all.
                    loss_sum=loss_sum * (held_out / weight_of(self._validation, self._manifest.data)),
                )
            )
        self._context.changed.notify()


def _microbatch(microbatch_id: bytes, tokens_BS: torch.Tensor, present: ReplicaRound, mode: Mode) -> Microbatch:
    timeline, tokens = present.step.timeline.first_round, encode_tokens(tokens_BS)
    return Microbatch(microbatch_id, present.number, mode, len(tokens_BS), tokens, timeline=timeline)

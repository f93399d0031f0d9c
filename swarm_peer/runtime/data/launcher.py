"""Launches the microbatches of one seat of stage 0, as many as its leader has granted, and has them counted.

Owns what is in flight. Must not know which slices are read (granted_slices.py); the protocol decides what counts, and
when a round is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.errors import CallError, NotFinite, RoundClosed, UserError
from swarm_peer.policy.data.ranges import SampleId, SliceId
from swarm_peer.policy.decay import last_step_of
from swarm_peer.policy.in_flight_window import InFlightWindow
from swarm_peer.policy.trouble import Complaint, LaunchRecord, worst
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.work import OpenRound
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.granted_slices import GrantedSlices, Reading
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch
from swarm_peer.token_marks import num_targets, weight_of
from swarm_peer.wire.codecs import encode_tokens
from swarm_peer.wire.messages import Mode
from swarm_peer.wire.records import Validation

log = logging.getLogger(__name__)

# A microbatch that has failed this often, each time after all tries of a hop, is dropped: it must be itself to blame.
MAX_LAUNCHES = 20
# Pause before a failed microbatch is launched again. The peers of later stages were tried with backoff already.
RELAUNCH_PAUSE_S = 0.5
# Microbatches that are asked for beyond those that can be launched at once, so that none waits for the leader.
ASKED_AHEAD = 1


# Called with each microbatch that has counted: (round, tokens of shape (B, T+1), the names of its samples, its id).
CountedHook = Callable[[int, torch.Tensor, Sequence[SampleId], bytes], None]


@dataclass(slots=True, eq=False, kw_only=True)
class _Batch:
    """Samples that travel together, in as many launches as it takes.

    Attributes:
        restart: of the run, after which the samples were drawn
        drawn_from: the readings of slices that they are of
        place: the round, and how often it was void, in which it has a place among what the leader has granted
        id: the same in all launches within a round, so that a peer which has counted the batch recognises it
        failures: how many launches have failed; those for which the round closed have not
    """

    tokens_BS: torch.Tensor
    samples: tuple[SampleId, ...]
    restart: Restart | None
    drawn_from: Mapping[SliceId, Reading | None]
    place: tuple[int, int] | None = None
    id: bytes = b""
    failures: int = 0


class BatchLauncher:
    """Launches the microbatches of one seat of stage 0. Belongs to the event loop's thread.

    Attributes:
        validations: this seat's shares of the last validation losses
        stopping: whether `stop` has been called, or the data cannot be read
        failure: why the data cannot be read, if so
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        core: ReplicaCore,
        slices: GrantedSlices,
        member: Callable[[], Member | None],
        view: Callable[[], SwarmView],
        validation: npt.NDArray[np.int32],
        agreement: Agreement,
        counted: CountedHook | None = None,
    ):
        """Make a launcher that has launched nothing.

        Args:
            member: the seat's part in the protocol; None while it has no place
            validation: held-out samples, int32 of shape (N, T+1)
            agreement: knows when the run ends, and looks soon at what was done
            counted: called with each microbatch that has counted; for tests
        """
        self.validations: deque[Validation] = deque(maxlen=8)
        self.stopping = False
        self.failure: UserError | None = None
        self._context = context
        self._manifest = context.resolved.manifest
        self._core = core
        self._slices = slices
        self._member = member
        self._view = view
        self._validation = validation
        self._agreement = agreement
        self._counted_hook = counted
        self._timeout_s = self._manifest.limits.hop_timeout_s * max(self._manifest.stages.count - 1, 1)
        self._window = InFlightWindow(core.capacity.microbatches)
        self._waiting: list[_Batch] = []
        self._is_drawing = False
        self._in_flight = 0
        self._record = LaunchRecord()
        # The weights that were validated last, by the timeline and the optimizer step: two rounds may begin with them.
        self._validated = (0, -1)

    @property
    def _size(self) -> int:
        return self._manifest.training.microbatch_size

    @property
    def _most_in_flight(self) -> int:
        return min(self._window.size(), self._core.capacity.microbatches)

    def complaint(self) -> Complaint | None:
        """This peer's trouble in launching microbatches, if it has any."""
        now_s = self._context.clock.monotonic_s()
        return worst((self._record.complaint(now_s), self._slices.complaint(now_s)))

    def stop(self) -> None:
        """Launch no more microbatches. `run` returns when those in flight have finished."""
        self.stopping = True
        self._context.changed.notify()

    async def run(self) -> None:
        """Launch microbatches until `stop`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            while True:
                await self._context.changed.wait_for(lambda: self.stopping or self._is_due())
                if self.stopping:
                    break
                entered = self._core.rounds.current
                if self._validation_is_due():
                    self._validated = _weights_of(entered)
                    await self._validate(entered)
                elif not self._waiting:
                    self._is_drawing = True
                    tasks.start_soon(self._draw)
                elif (batch := self._take_waiting()) is not None:
                    self._in_flight += 1
                    self._context.metrics.in_flight.set(self._in_flight)
                    tasks.start_soon(self._train, batch, entered)
            await self._context.changed.wait_for(lambda: self._in_flight == 0)
            tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        """Read what is granted, and say what this seat could launch, whenever something has changed."""
        told: object = None
        while True:
            self._slices.follow()
            member = self._member()
            if member is not None:
                could = self._most_in_flight + ASKED_AHEAD - self._in_flight
                is_over = self.stopping or self._is_past_end(member, member.log.next_round)
                member.wants_samples = max(0, could * self._size) if not is_over else 0
                present = self._present()
                if present is not None:
                    self._slices.tell_ends(present)
            if self._is_news(told):
                told = self._told()
                self._agreement.look()
                self._context.changed.notify()
            await self._context.changed.wait_for(partial(self._is_news, told))

    def _is_news(self, told: object) -> bool:
        return self._told() != told

    def _told(self) -> object:
        """All that the leader is told, and that it grants."""
        member = self._member()
        if member is None:
            return None
        log = member.log
        return member.granted, member.reads, log.next_round, log.restart, self._in_flight, self._slices.has_ends

    def _present(self) -> OpenRound | None:
        """The round of which microbatches may be launched now."""
        member = self._member()
        working = member.working if member is not None else None
        is_open = self._core.admission.is_open and working is not None
        return working if is_open and working and working.number == self._core.rounds.current.number else None

    def _is_due(self) -> bool:
        """Whether there is a microbatch to launch or to draw, or a validation to compute."""
        member = self._member()
        if member is None or self._waits_for_first_peers():
            return False
        if self._validation_is_due():
            return True
        if (present := self._present()) is None or self._is_past_end(member, present.number):
            return False
        if self._in_flight >= self._most_in_flight or not self._has_room():
            return False
        return bool(self._waiting) or not self._is_drawing

    def _waits_for_first_peers(self) -> bool:
        is_first = self._core.rounds.current.number == 0
        return is_first and self._view().fewest_serving() < self._manifest.stages.peers_to_start

    def _is_past_end(self, member: Member, number: int) -> bool:
        """Whether the run has no optimizer step that a round could make."""
        return member.log.optimizer_step_at(number) >= self._last_step()

    def _last_step(self) -> int:
        """The optimizer step of the run's last weights, as is known by now."""
        return last_step_of(self._manifest.training.steps, self._agreement.core.epoch.word)

    def _has_room(self) -> bool:
        member, place = self._member(), self._place()
        assert member is not None
        return any(batch.place == place for batch in self._waiting) or member.may_launch(self._size)

    def _place(self) -> tuple[int, int]:
        present = self._present()
        assert present is not None
        return present.number, present.voids

    def _take_waiting(self) -> _Batch | None:
        """Take a waiting batch, first those with a place in this round, and give it one; None if it is of no use."""
        member, place = self._member(), self._place()
        assert member is not None
        batch = next((batch for batch in self._waiting if batch.place == place), self._waiting[0])
        self._waiting.remove(batch)
        if self._is_void(batch):
            return None
        if not self._slices.may_launch(batch.samples, batch.drawn_from):
            self._slices.drop(batch.samples, batch.drawn_from)
            self._give_back_place(batch)
            return None
        if batch.place != place:
            member.launched(self._size)
            batch.place, batch.id = place, self._context.random.token(16)
        return batch

    def _give_back_place(self, batch: _Batch) -> None:
        """Let another batch take the place of one that is dropped."""
        present = self._present()
        if present is not None and batch.place == (present.number, present.voids):
            present.computed.claimed -= self._size

    def _is_void(self, batch: _Batch) -> bool:
        """Whether the run has gone back since a batch was drawn, as far as the core knows: slices follow it later."""
        member = self._member()
        return member is None or member.log.restart != batch.restart

    async def _draw(self) -> None:
        try:
            samples = await self._slices.draw(self._size)
            tokens_BS = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
            ids = tuple(sample.id for sample in samples)
            readings = self._slices.readings_of(ids)
            batch = _Batch(tokens_BS=tokens_BS, samples=ids, restart=self._slices.restart, drawn_from=readings)
            self._waiting.append(batch)
        except UserError as error:
            self.failure = error
            self.stop()
        finally:
            self._is_drawing = False
            self._context.changed.notify()

    async def _train(self, batch: _Batch, entered: ReplicaRound) -> None:
        outcome, reason = "counted", ""
        launch = self._record.begin(self._context.clock.monotonic_s())
        try:
            try:
                await self._compute(batch, entered)
            except CallError as error:
                # Not the error itself: its traceback holds the pass, and others need that memory during the pauses.
                outcome, reason = error.code, str(error)
            if outcome == "counted":
                self._record.forget()
            elif outcome == RoundClosed.code:
                self._waiting.append(batch)
            else:
                await self._launch_again(batch, f"{outcome}: {reason}", is_finite=outcome != NotFinite.code)
        finally:
            self._record.end(launch)
            self._in_flight -= 1
            self._context.metrics.in_flight.set(self._in_flight)
            self._context.metrics.microbatches.labels("train", outcome).inc()
            self._agreement.look()
            self._context.changed.notify()

    async def _compute(self, batch: _Batch, entered: ReplicaRound) -> None:
        """Run a batch through all stages, and have it counted.

        Raises:
            RoundClosed: the round is over, or goes on from other heads
            CallError: it has failed
        """
        begin = self._context.clock.monotonic_s()
        async with self._core.admission.enter(entered.number) as inside:
            result = await self._run(batch.id, batch.tokens_BS, inside, "train")
            member = self._member()
            present = member.work.open.get(inside.number) if member is not None else None
            if self._is_void(batch) or present is None:
                raise RoundClosed(f"round {inside.number} is given up", inside.number + 1)
            weight = num_targets(batch.tokens_BS) if self._manifest.data.has_targets else len(batch.samples)
            if not self._slices.counted(
                present,
                batch.samples,
                base=result.base,
                weight=weight,
                loss_sum=result.loss_sum,
                receipt=result.receipt,
            ):
                raise RoundClosed(f"what was computed in round {inside.number} is void", inside.number)
            if self._counted_hook is not None:
                self._counted_hook(inside.number, batch.tokens_BS, batch.samples, batch.id)
        seconds = self._context.clock.monotonic_s() - begin
        self._context.metrics.round_trip_seconds.observe(seconds)
        if speed := self._core.executor.samples_per_s:
            compute_s = len(batch.tokens_BS) / speed
            self._window.observe(max(seconds - compute_s, 0.0), compute_s, self._context.clock.monotonic_s())
            self._context.metrics.window.set(self._most_in_flight)

    async def _run(self, microbatch_id: bytes, tokens_BS: torch.Tensor, inside: ReplicaRound, mode: Mode) -> HopResult:
        timeline, tokens = inside.step.timeline.first_round, encode_tokens(tokens_BS)
        microbatch = Microbatch(microbatch_id, inside.number, mode, len(tokens_BS), tokens, timeline=timeline)
        return await self._core.executor.run(inside, microbatch, None, anyio.current_time() + self._timeout_s)

    async def _launch_again(self, batch: _Batch, reason: str, *, is_finite: bool) -> None:
        """Have a batch that has failed launched again after a pause, or drop it if it has failed too often."""
        view = self._view()
        if all(view.serving(stage) for stage in range(1, view.num_stages)):
            batch.failures += 1
            self._record.failed(batch.samples, reason, self._context.clock.monotonic_s(), is_finite=is_finite)
        else:  # the empty stage is to blame, however long it stays so
            self._record.forget()
        # Once the run is over, later stages may go before the microbatches here have.
        level = logging.INFO if self._context.metrics.run_is_over else logging.WARNING
        log.log(level, "microbatch_failed failures=%d reason=%s", batch.failures, reason)
        present = self._present()
        if batch.failures >= MAX_LAUNCHES and present is not None and not self._is_void(batch):
            lost = f"their microbatch has failed {batch.failures} times: {reason}"
            self._context.metrics.lose(len(batch.tokens_BS), lost, round_number=present.number)
            self._slices.give_up(present, batch.samples)
            self._give_back_place(batch)
            return
        await anyio.sleep(RELAUNCH_PAUSE_S)
        self._waiting.append(batch)

    # --- validation

    def _validation_is_due(self) -> bool:
        if self._member() is None:
            return False
        # Not the round that is worked at: the last weights are of one that nothing is trained in.
        entered = self._core.rounds.current
        is_due = self._manifest.training.validates_at(entered.step.optimizer_step, self._last_step())
        return is_due and self._core.admission.is_open and self._validated != _weights_of(entered)

    async def _validate(self, entered: ReplicaRound) -> None:
        """Compute this seat's share of the validation loss, before its training microbatches of the round."""
        me, step = self._context.identity.peer_id, entered.step.optimizer_step
        peers = sorted({peer.peer_id for peer in self._view().serving(0)} | {me})
        share = torch.from_numpy(self._validation[peers.index(me) :: len(peers)].copy())
        losses = await self._losses(share, entered)
        if losses:
            samples, loss_sum = sum(count for count, _ in losses), sum(loss for _, loss in losses)
            self.validations.append(
                Validation(
                    round_number=entered.number,
                    optimizer_step=step,
                    samples=samples,
                    held_out=len(self._validation),
                    # Divided by the number of samples, that of all shares is a mean over the targets of all.
                    loss_sum=loss_sum * (len(self._validation) / weight_of(self._validation, self._manifest.data)),
                )
            )
        self._context.changed.notify()

    async def _losses(self, share: torch.Tensor, entered: ReplicaRound) -> Sequence[tuple[int, float]]:
        losses: list[tuple[int, float]] = []
        room = anyio.Semaphore(self._core.capacity.microbatches)

        async def evaluate(tokens_BS: torch.Tensor) -> None:
            try:
                async with room, self._core.admission.enter(entered.number) as inside:
                    result = await self._run(self._context.random.token(16), tokens_BS, inside, "evaluate")
                losses.append((len(tokens_BS), result.loss_sum))
            except CallError as error:
                # The round may end before a slow peer has done its share. Then the mean is over fewer samples.
                self._context.metrics.microbatches.labels("evaluate", error.code).inc()
                log.info("validation_incomplete round=%d reason=%s", entered.number, error)

        async with anyio.create_task_group() as tasks:
            # torch.split would make one empty microbatch of an empty share.
            for tokens_BS in torch.split(share, self._size) if len(share) else ():
                tasks.start_soon(evaluate, tokens_BS)
        return losses


def _weights_of(entered: ReplicaRound) -> tuple[int, int]:
    """The timeline and the optimizer step of the weights that a round begins with."""
    return entered.step.timeline.first_round, entered.step.optimizer_step

"""Hands the gradient that a leaving peer has accumulated in this round to a stage-mate, so that no sample is lost.

The gradient travels in chunks. Nothing changes at the receiver until a last call, which names all of it, commits it.
The leaving peer makes that call to one receiver only, and may repeat it there. If its reply is lost for good, the
receiver may have added the gradient, so the leaving peer offers it to nobody else.

Owns both sides of this transfer. Must not know when a round ends: step_loop.py does.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import torch

from swarm_peer.errors import Busy, CallError, CallTimeout, InvalidMessage, NotServing, PeerUnreachable, RoundClosed
from swarm_peer.model.round_strategy import Work
from swarm_peer.policy.data.ranges import MAX_RANGES, merge_ranges, num_windows
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.executor import out_of_memory_fails_hop
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound, Transfer
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.fields import MAX_SAMPLES
from swarm_peer.wire.messages import MAX_COUNTED_IDS, Body, CommitGradientCall, GradientChunkCall

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
CHUNKS_IN_FLIGHT = 4
CALL_TIMEOUT_S = 15.0
# Gradients that one peer takes in at once. Each is as large as its stage.
MAX_TRANSFERS = 2
# Transfers whose gradient was added: a call is known again though rounds have passed since its reply was lost.
MAX_COMMITTED = 256
# For a job of the device thread to end before the gradient is dropped, also when the peer has no time left.
FORGET_TIMEOUT_S = 5.0
# Tries of the call that commits the gradient, since its outcome must be known.
COMMIT_TRIES = 3
# A stage-mate that takes in other gradients is asked again for so long; then this peer ends the round with it.
BUSY_PATIENCE_S = 15.0
BUSY_PAUSE_S = 1.0


class _InDoubt(Exception):
    """The stage-mate does not answer any more, and may have added the gradient to its own or not."""


class _Answer(NamedTuple):
    """How the stage-mates have answered to an offered gradient.

    Attributes:
        mates_end_round: nobody has taken it, but one ends the round or is busy: this peer may end the round with it
        reason: nobody has taken it for this reason
    """

    is_taken: bool = False
    mates_end_round: bool = False
    reason: str = ""


class GradientHandover:
    """Gives this peer's gradient away when it leaves, and adds those of others. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, core: ReplicaCore, swarm: SwarmAccess, barrier: Barrier):
        """Make the part for one replica, whose stage-mates the barrier knows."""
        self._context = context
        self._clock = context.clock
        self._hash = context.resolved.hash
        self._stage = core.stage
        self._trainer = core.trainer
        self._device_thread = core.device_thread
        self._executor = core.executor
        self._rounds = core.rounds
        self._admission = core.admission
        self._transport = swarm.transport
        self._swarm = swarm
        self._is_mate = barrier.is_mate
        self._most_held = barrier.most_brought
        self._metrics = context.metrics
        self._rng = context.random.stream("handover")
        self._shapes = core.trainer.strategy.num_given * core.trainer.shapes
        self._num_bytes = 4 * sum(shape.numel() for shape in self._shapes)
        self._sent: dict[str, Transfer] = {}  # what this peer has sent, by the stage-mate that it sent it to
        self._committing = anyio.Lock()
        self._committed: deque[bytes] = deque(maxlen=MAX_COMMITTED)  # the device thread's, while a commit is under way

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {GradientChunkCall: self.handle_chunk, CommitGradientCall: self.handle_commit}

    # --- the leaving side

    async def hand_over(self, on_gone: Callable[[], None] = lambda: None, *, may_end_round: bool = True) -> bool:
        """Give the gradient of the present round to a stage-mate; nothing may be added to it meanwhile.

        Args:
            on_gone: called when this peer may bring the gradient to no average any more: a stage-mate has it, or may
                have it, or it is lost; also if the caller is cancelled then
            may_end_round: whether this peer can end the round with the stage-mates; else the gradient is lost then

        Returns:
            False if the stage-mates are ending the round, so that this peer has to end it with them
        """
        given = self._rounds.current
        works, pending = await self._device_thread.run(Priority.STEP, partial(self._give_away, given))
        samples = sum(samples for _, samples in works)
        if pending > samples:
            on_gone()
            await self._lose(given, pending, "the round that should bring them to an update could not be ended")
            return True
        if not samples:
            on_gone()
            return True
        answer = await self._offer(given, works, on_gone, may_end=may_end_round)
        if answer.mates_end_round and may_end_round:
            return False
        on_gone()
        if answer.is_taken:
            await self._forget(given, is_counted=True)
        else:
            await self._lose(given, samples, answer.reason)
        return True

    async def _offer(
        self, given: ReplicaRound, works: Sequence[Work], on_gone: Callable[[], None], may_end: bool
    ) -> _Answer:
        """Offer the gradient to one stage-mate after the other."""
        samples, progress = tuple(samples for _, samples in works), self._swarm.progress
        data = await self._context.threads.run(_flatten, [tensor for sums, _ in works for tensor in sums])
        mates, busy, begun_s = await self._mates_to_ask(data), set[str](), self._clock.monotonic_s()
        reason, ending = "there is no stage-mate", set[str]()  # by their last answers
        for mate in mates:
            is_resumed, is_committing = mate in self._sent, False
            sent = self._sent.setdefault(mate, Transfer(self._context.random.token(16), data, set()))
            try:
                if mate in busy:
                    await anyio.sleep(BUSY_PAUSE_S)
                await self._send(mate, given.number, sent)
                is_committing = True
                await self._commit(mate, given, sent.id, data, samples)
            except _InDoubt as error:
                return _Answer(reason=str(error))
            except anyio.get_cancelled_exc_class():  # there is no time left
                if is_committing:
                    on_gone()
                    await self._lose(given, sum(samples), f"{mate} may have taken it over, and there is no time left")
                raise
            except CallError as error:
                log.info("handover_refused peer=%s reason=%s: %s", mate, error.code, error)
                reason = f"no stage-mate took it over, last: {error}"
                ending.discard(mate)
                if isinstance(error, RoundClosed | Busy):
                    ending.add(mate)
                if isinstance(error, RoundClosed) and is_committing and may_end and progress.is_over(given.number):
                    break  # it has all of it, and waits with the others for this peer: it may add it in the next round
                if isinstance(error, Busy) and self._clock.monotonic_s() < begun_s + BUSY_PATIENCE_S:
                    busy.add(mate)
                    mates.append(mate)  # after those that may be free
                elif is_resumed and isinstance(error, InvalidMessage):  # it has not kept what had arrived
                    del self._sent[mate]
                    mates.append(mate)
                continue
            log.info("gradient_handed_over peer=%s round=%d samples=%d", mate, given.number, sum(samples))
            return _Answer(is_taken=True)
        return _Answer(mates_end_round=bool(ending), reason=reason)

    async def _mates_to_ask(self, data: torch.Tensor) -> list[str]:
        """The stage-mates, first those that may have kept most of what this peer has sent them of this gradient."""
        # Where the round ended before all had arrived, a stage-mate may have kept what had.
        for mate, sent in list(self._sent.items()):
            if not await self._context.threads.run(torch.equal, sent.data, data):
                del self._sent[mate]
        mates = self._swarm.stage_mates(self._stage)
        self._rng.shuffle(mates)  # if many leave at once, they should not all turn to the same one
        return sorted(mates, key=lambda mate: len(self._sent[mate].received) if mate in self._sent else 0, reverse=True)

    def _give_away(self, given: ReplicaRound) -> tuple[Sequence[Work], int]:
        """The work to hand over, and the samples that this peer holds: more, if some of them fit no stage-mate's."""
        if lost := self._trainer.discard_if_not_finite():
            given.forget_counted()
            self._metrics.lose(lost, "their gradient is not finite", round_number=given.number)
        works = self._trainer.strategy.give_away()
        return works, self._trainer.strategy.pending_samples

    async def _lose(self, given: ReplicaRound, samples: int, reason: str) -> None:
        self._metrics.lose(samples, reason, round_number=given.number)
        await self._forget(given)

    async def _forget(self, given: ReplicaRound, *, is_counted: bool = False) -> None:
        """Empty the accumulator. Where a stage-mate counts its microbatches now, their replies stay for lost ones."""

        def forget() -> None:
            self._trainer.discard_gradients()
            given.counted.clear()
            if not is_counted:
                given.replies.clear()

        self._sent.clear()
        with anyio.move_on_after(FORGET_TIMEOUT_S, shield=True):
            await self._device_thread.run(Priority.STEP, forget)

    async def _send(self, mate: str, round_number: int, sent: Transfer) -> None:
        view = bytes_of(sent.data)
        room = anyio.Semaphore(CHUNKS_IN_FLIGHT)
        failures: list[CallError] = []

        async def send_chunk(offset: int) -> None:
            call = GradientChunkCall(
                manifest=self._hash, stage=self._stage, round_number=round_number, transfer=sent.id, offset=offset
            )
            await self._transport.call(mate, call, (view[offset : offset + CHUNK_BYTES],), timeout_s=CALL_TIMEOUT_S)
            sent.received.add(offset)

        async def try_chunk(offset: int) -> None:
            try:
                await send_chunk(offset)
            except CallError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()
            finally:
                room.release()

        missing = sorted(set(range(0, len(view), CHUNK_BYTES)) - sent.received)
        for offset in missing[:1]:  # alone: a stage-mate that has no place for it would get the others for nothing
            await send_chunk(offset)
        async with anyio.create_task_group() as tasks:
            for offset in missing[1:]:
                await room.acquire()
                tasks.start_soon(try_chunk, offset)
        if failures:
            raise failures[0]

    async def _commit(
        self, mate: str, given: ReplicaRound, transfer_id: bytes, data: torch.Tensor, samples: tuple[int, ...]
    ) -> None:
        """Have the stage-mate add the gradient to its own."""
        sha256 = await self._context.threads.run(_digest, given.step.history_hash, data)
        call = CommitGradientCall(
            manifest=self._hash,
            stage=self._stage,
            round_number=given.number,
            transfer=transfer_id,
            samples=samples,
            sha256=sha256,
            counted=tuple(given.counted.items())[:MAX_COUNTED_IDS],
            held=merge_ranges(given.held)[:MAX_RANGES] if self._most_held else (),
            counts=self._swarm.progress.signed_counts(),
        )
        reason = ""
        for _ in range(COMMIT_TRIES):
            try:
                await self._transport.call(mate, call, timeout_s=CALL_TIMEOUT_S)
                return
            except (PeerUnreachable, CallTimeout) as error:
                reason = str(error)
            except CallError as error:
                if not reason:
                    raise
                # A refusal says nothing of the call whose reply was lost: the stage-mate may have left the stage since
                # and given away what it held, or have learnt that this peer does not belong to the run any more.
                reason = str(error)
                break
        raise _InDoubt(f"{mate} may have taken it over, and does not say so: {reason}")

    # --- the receiving side

    async def handle_chunk(self, caller: str, call: GradientChunkCall, tensors: Sequence[memoryview]) -> Reply:
        """Take in one part of a stage-mate's gradient."""
        self._check_mate(caller)
        await self._admission.open_soon(call.round_number)
        self._check_round(call.round_number, is_part=True)
        [chunk] = tensors if len(tensors) == 1 else [memoryview(b"")]
        if call.offset % CHUNK_BYTES or chunk.nbytes != min(CHUNK_BYTES, self._num_bytes - call.offset):
            raise InvalidMessage(f"{chunk.nbytes} bytes at {call.offset} of a gradient of {self._num_bytes} bytes")
        transfers = self._rounds.current.transfers
        transfer = transfers.get(caller)
        if transfer is None or transfer.id != call.transfer:
            transfers.pop(caller, None)
            for other in [other for other in transfers if len(transfers) >= MAX_TRANSFERS and self._is_given_up(other)]:
                del transfers[other]
            if len(transfers) >= MAX_TRANSFERS:
                raise Busy("other gradients are being taken over")
            data = torch.empty(self._num_bytes, dtype=torch.uint8)
            transfer = transfers[caller] = Transfer(call.transfer, data, set())
        transfer.round_number = call.round_number
        bytes_of(transfer.data)[call.offset : call.offset + chunk.nbytes] = chunk
        transfer.received.add(call.offset)
        return Reply()

    def _is_given_up(self, giver: str) -> bool:
        """Whether nothing more comes of what a stage-mate has begun to give."""
        transfer = self._rounds.current.transfers[giver]
        return not self._is_mate(giver) or transfer.round_number < self._rounds.current.number - 1

    async def handle_commit(self, caller: str, call: CommitGradientCall, tensors: Sequence[memoryview]) -> Reply:
        """Add a gradient that has arrived whole to this peer's own, once, however often the call is repeated."""
        if self._is_mate(caller):  # one that has left repeats a call that was answered, or is refused below
            await self._admission.open_soon(call.round_number)
        # The reply to a repeated call must not come before the first call has added the gradient.
        async with self._committing:
            if call.transfer not in self._committed:
                await self._commit_once(caller, call)
        return Reply()

    async def _commit_once(self, caller: str, call: CommitGradientCall) -> None:
        self._check_mate(caller)
        self._check_round(call.round_number)
        transfer = self._rounds.current.transfers.get(caller)
        if transfer is None or transfer.id != call.transfer:
            raise InvalidMessage("a gradient of which nothing has arrived")
        if len(transfer.received) * CHUNK_BYTES < self._num_bytes:
            raise InvalidMessage("a gradient of which parts are missing")
        if len(call.samples) != self._trainer.strategy.num_given or not any(call.samples):
            raise InvalidMessage(f"gradients of {call.samples} samples")
        # Half of what this peer can say at the barrier that it brings: its own microbatches still come.
        if self._trainer.strategy.pending_samples + sum(call.samples) > MAX_SAMPLES // 2:
            raise InvalidMessage(f"gradients of {call.samples} samples, beside {self._trainer.num_samples}")
        if sum(samples for _, samples in call.counted) > call.samples[0]:
            raise InvalidMessage(f"microbatches of more than the gradient's {call.samples[0]} samples")
        if (num_held := num_windows(call.held)) > self._most_held:
            raise InvalidMessage(f"gradients said to be of {num_held} samples of a period of at most {self._most_held}")
        # Admitted like a microbatch, since this peer averages only when nothing is inside the round.
        async with self._admission.enter(call.round_number, always=True) as entered:
            entered.transfers.pop(caller, None)  # the caller may have begun another one meanwhile
            # From here on the round cannot end without this gradient, though its samples may be the last ones.
            self._swarm.progress.merge(call.counts)
            add = partial(self._add, caller, transfer.data, call, entered)
            try:
                await self._device_thread.run(Priority.BACKWARD, add)
            except anyio.get_cancelled_exc_class():
                # The connection broke, and the caller repeats its call: there may have been no time to add it.
                if call.transfer not in self._committed:
                    entered.transfers.setdefault(caller, transfer)
                raise
        log.info("gradient_taken_over peer=%s round=%d samples=%d", caller, call.round_number, sum(call.samples))

    def _check_mate(self, caller: str) -> None:
        if not self._is_mate(caller):
            raise NotServing("only announced stage-mates hand over their gradients")

    def _check_round(self, round_number: int, *, is_part: bool = False) -> None:
        step, averaging = self._rounds.step, self._context.resolved.manifest.averaging
        if round_number == step.round_number and self._admission.is_leaving:
            # Not that it ends the round: the caller would wait for that, and so would this peer for the caller.
            raise NotServing("this peer is leaving, too")
        # Parts that arrive as a round of a period ends fit the next one as well, if this one ends without an average.
        averages = averaging.averages_at(step.optimizer_step, begins_timeline=step.begins_timeline)
        is_kept = is_part and self._admission.serves and averaging.mode == "periodic" and not averages
        if round_number != step.round_number or not (self._admission.is_open or is_kept):
            raise RoundClosed(f"round {round_number} is ending here; this peer is in round {step.round_number}")

    def _add(self, giver: str, data: torch.Tensor, call: CommitGradientCall, entered: ReplicaRound) -> None:
        """Check the gradient and add it to this peer's own; in the device thread."""
        # A rewind does not wait for this job, and may have loaded other weights before its turn came.
        if self._trainer.weights_version != entered.step.weights_version:
            raise RoundClosed(f"the weights of round {call.round_number} have changed")
        # After the run was cut in two, its parts may be in rounds of the same number, with different weights.
        if _digest(entered.step.history_hash, data) != call.sha256:
            raise InvalidMessage("a gradient that does not match its hash, or is of other weights")
        values = data.view(torch.float32)
        if not bool(values.isfinite().all()):
            raise InvalidMessage("a gradient that is not finite")
        parts = torch.split(values, [shape.numel() for shape in self._shapes])
        sums = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        count = len(sums) // len(call.samples)
        works = [(sums[i * count : (i + 1) * count], samples) for i, samples in enumerate(call.samples)]
        held = self._trainer.num_samples
        try:
            with out_of_memory_fails_hop():
                self._trainer.strategy.take_in(works)
        except Exception as error:
            # Some parameters may have got their share and others not: the stage-mate offers it to another peer.
            self._executor.lose(entered, held, error)
            raise
        entered.counted.update(call.counted)
        entered.taken_over = merge_ranges([*entered.taken_over, *call.held])
        if len(call.samples) > 1:
            entered.given[giver] = entered.given.get(giver, 0) + call.samples[1]
        # Here, and not when the job is over: the caller may be cut off meanwhile, and repeat its call.
        self._committed.append(call.transfer)


def _digest(history_hash: str, data: torch.Tensor) -> bytes:
    digest = hashlib.sha256(history_hash.encode())
    digest.update(bytes_of(data))
    return digest.digest()


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)

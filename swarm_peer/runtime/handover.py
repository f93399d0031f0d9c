"""A leaving peer hands what it has accumulated in this global step to a stage-mate, so that no sample is lost.

The gradient travels in chunks; nothing changes at the receiver until one last call that names all of it. That call goes
to one receiver only and may be repeated there: if its reply is lost for good, the gradient may have been taken over, so
it is offered to nobody else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import torch

from swarm_peer.errors import Busy, CallError, CallTimeout, InvalidMessage, NotServing, PeerUnreachable, StepClosed
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.runtime.transport import Handler, Reply, Transport
from swarm_peer.wire.messages import MAX_COUNTED_IDS, AdoptCall, Body, GradientChunkCall

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
CHUNKS_IN_FLIGHT = 4
CALL_TIMEOUT_S = 15.0
# Gradients that one peer takes in at once: each is as large as its stage.
MAX_TRANSFERS = 2
# Tries of the last call, whose outcome must be known.
ADOPT_TRIES = 3


class _InDoubt(Exception):
    """Whether a gradient was taken over cannot be found out."""


@dataclass(slots=True)
class _Transfer:
    id: bytes
    step: int
    data: torch.Tensor  # uint8
    received: set[int]


class GradientHandover:
    """Both sides of it. Belongs to the event loop's thread."""

    def __init__(
        self,
        manifest_hash: str,
        stage: int,
        trainer: StageTrainer,
        compute: ComputeThread,
        runner: StageRunner,
        gate: StepGate,
        transport: Transport,
        view: Callable[[], SwarmView],
        metrics: PeerMetrics,
        rng: random.Random,
    ):
        self._hash = manifest_hash
        self._stage = stage
        self._trainer = trainer
        self._compute = compute
        self._runner = runner
        self._gate = gate
        self._transport = transport
        self._view = view
        self._metrics = metrics
        self._rng = rng
        self._num_bytes = 4 * sum(parameter.numel() for parameter in trainer.module.parameters())
        self._transfers: dict[str, _Transfer] = {}  # by caller, each of whom has at most one
        self._adopted: dict[bytes, int] = {}  # transfer -> step
        self._adopting = anyio.Lock()

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {GradientChunkCall: self.handle_chunk, AdoptCall: self.handle_adopt}

    # --- the leaving side

    async def hand_over(self, step: int) -> bool:
        """Give all that is accumulated in `step` to a stage-mate; nothing more may be added meanwhile.

        Returns:
            whether that is settled; if not, all stage-mates are ending the step, and this peer has to end it with them
        """
        sums, samples = await self._compute.run(Priority.STEP, self._trainer.gradient_sums)
        if not samples:
            return True
        mates = [p.peer_id for p in self._view().serving(self._stage) if p.peer_id != self._transport.peer_id]
        self._rng.shuffle(mates)  # where many leave at once, one alone would have to take in all of theirs
        data = _flatten(sums)
        reason, step_is_ending = "there is no stage-mate", False
        for mate in mates:
            transfer_id = os.urandom(16)
            try:
                await self._send(mate, step, transfer_id, data)
                await self._adopt(mate, step, transfer_id, data, samples)
            except _InDoubt as error:
                reason, step_is_ending = str(error), False
                break
            except CallError as error:
                log.info("handover_refused peer=%s reason=%s: %s", mate, error.code, error)
                reason = f"no stage-mate took them over, last: {error}"
                step_is_ending = step_is_ending or isinstance(error, StepClosed)
                continue
            log.info("gradient_handed_over peer=%s step=%d samples=%d", mate, step, samples)
            await self._forget()
            return True
        if step_is_ending:
            return False
        self._metrics.lost_samples.inc(samples)
        log.error("samples_lost samples=%d step=%d reason=%s", samples, step, reason)
        await self._forget()
        return True

    async def _forget(self) -> None:
        await self._compute.run(Priority.STEP, self._trainer.discard_gradients)
        self._runner.forget_step()

    async def _send(self, mate: str, step: int, transfer_id: bytes, data: torch.Tensor) -> None:
        view = memoryview(data.numpy())
        room = anyio.Semaphore(CHUNKS_IN_FLIGHT)
        failures: list[CallError] = []

        async def send_chunk(offset: int) -> None:
            call = GradientChunkCall(
                manifest=self._hash, stage=self._stage, step=step, transfer=transfer_id, offset=offset
            )
            try:
                await self._transport.call(mate, call, (view[offset : offset + CHUNK_BYTES],), timeout_s=CALL_TIMEOUT_S)
            except CallError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()
            finally:
                room.release()

        async with anyio.create_task_group() as tasks:
            for offset in range(0, len(view), CHUNK_BYTES):
                await room.acquire()
                tasks.start_soon(send_chunk, offset)
        if failures:
            raise failures[0]

    async def _adopt(self, mate: str, step: int, transfer_id: bytes, data: torch.Tensor, samples: int) -> None:
        """Have it added there."""
        sha256 = await anyio.to_thread.run_sync(lambda: hashlib.sha256(data.numpy()).digest())
        call = AdoptCall(
            manifest=self._hash,
            stage=self._stage,
            step=step,
            transfer=transfer_id,
            samples=samples,
            sha256=sha256,
            counted=tuple(self._runner.counted.items())[:MAX_COUNTED_IDS],
        )
        for _ in range(ADOPT_TRIES):
            try:
                await self._transport.call(mate, call, timeout_s=CALL_TIMEOUT_S)
                return
            except (PeerUnreachable, CallTimeout) as error:
                reason = str(error)
        raise _InDoubt(f"{mate} may have taken them over, and does not answer any more: {reason}")

    # --- the receiving side

    def enter(self, step: int) -> None:
        """Forget what was begun in earlier steps: it never ends any more, and a gradient is as large as its stage."""
        self._transfers = {peer: known for peer, known in self._transfers.items() if known.step >= step}
        # A repeated call may still come for the one before.
        self._adopted = {known: adopted for known, adopted in self._adopted.items() if adopted >= step - 1}

    async def handle_chunk(self, caller: str, call: GradientChunkCall, tensors: Sequence[memoryview]) -> Reply:
        self._check_mate(caller)
        self._check_step(call.step)
        [chunk] = tensors if len(tensors) == 1 else [memoryview(b"")]
        if call.offset % CHUNK_BYTES or chunk.nbytes != min(CHUNK_BYTES, self._num_bytes - call.offset):
            raise InvalidMessage(f"{chunk.nbytes} bytes at {call.offset} of a gradient of {self._num_bytes} bytes")
        transfer = self._transfers.get(caller)
        if transfer is None or transfer.id != call.transfer:
            self._transfers.pop(caller, None)
            if len(self._transfers) >= MAX_TRANSFERS:
                raise Busy("other gradients are being taken over")
            data = torch.empty(self._num_bytes, dtype=torch.uint8)
            transfer = self._transfers[caller] = _Transfer(call.transfer, call.step, data, set())
        memoryview(transfer.data.numpy())[call.offset : call.offset + chunk.nbytes] = chunk
        transfer.received.add(call.offset)
        return Reply()

    async def handle_adopt(self, caller: str, call: AdoptCall, tensors: Sequence[memoryview]) -> Reply:
        self._check_mate(caller)
        # A repeated call must not be told that all is well before the first one has done it.
        async with self._adopting:
            return await self._adopt_once(caller, call)

    async def _adopt_once(self, caller: str, call: AdoptCall) -> Reply:
        if call.transfer in self._adopted:
            return Reply()
        self._check_step(call.step)
        transfer = self._transfers.get(caller)
        if transfer is None or transfer.id != call.transfer:
            raise InvalidMessage("a gradient of which nothing has arrived")
        if len(transfer.received) * CHUNK_BYTES < self._num_bytes:
            raise InvalidMessage("a gradient of which parts are missing")
        if sum(samples for _, samples in call.counted) > call.samples:
            raise InvalidMessage(f"microbatches of more than the gradient's {call.samples} samples")
        # Inside the gate as a microbatch would be: this peer averages only when nobody is inside.
        async with self._gate.enter(call.step, always=True):
            if call.transfer not in self._adopted:
                del self._transfers[caller]
                self._adopted[call.transfer] = call.step
                try:
                    await self._compute.run(Priority.BACKWARD, lambda: self._add(transfer.data, call))
                except BaseException:
                    del self._adopted[call.transfer]
                    raise
                self._runner.counted.update(call.counted)
        log.info("gradient_taken_over peer=%s step=%d samples=%d", caller, call.step, call.samples)
        return Reply()

    def _check_mate(self, caller: str) -> None:
        peer = self._view().peer(caller)
        if peer is None or peer.stage != self._stage:
            raise NotServing("only announced stage-mates hand over their gradients")

    def _check_step(self, step: int) -> None:
        if step != self._gate.step or not self._gate.is_open:
            raise StepClosed(f"global step {step} is ending here; this peer is in step {self._gate.step}")

    def _add(self, data: torch.Tensor, call: AdoptCall) -> None:
        """In the compute thread."""
        if hashlib.sha256(data.numpy()).digest() != call.sha256:
            raise InvalidMessage("a gradient that does not match its hash")
        values = data.view(torch.float32)
        if not bool(values.isfinite().all()):
            raise InvalidMessage("a gradient that is not finite")
        shapes = [parameter.shape for parameter in self._trainer.module.parameters()]
        parts = values.split([shape.numel() for shape in shapes])
        self._trainer.add_gradients([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], call.samples)


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)

"""A stage's state (weights, optimizer) from peer to peer: in chunks, each tensor checked by its hash.

hivemind's own download is not used: it takes all from one donor, checks nothing, and answers None when nobody does.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import torch

from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.transport import Handler, Reply, Transport, pack_fields, unpack_fields
from swarm_peer.wire.messages import Body, StateChunkCall, StateEntry, StateIndex, StateIndexCall

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
# Chunks asked for at once: enough to fill a link of 1 Gb/s and 100 ms.
CHUNKS_IN_FLIGHT = 4
CALL_TIMEOUT_S = 30.0
# A donor waits this long for the step that it is asked for; the caller asks again if it needs more.
WAIT_FOR_STEP_S = 10.0
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)
}


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of one stage after `step` global steps; `lineage` is the digest of all updates that made it."""

    step: int
    lineage: str
    tensors: Mapping[str, torch.Tensor]


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    step: int
    index: bytes
    tensors: tuple[memoryview, ...]


class StateDonor:
    """Serves this peer's state. Keeps the newest snapshot that was asked for, so that chunks fit together."""

    def __init__(
        self, trainer: StageTrainer, compute: ComputeThread, lineage: Callable[[], str], changed: Signal, stage: int
    ):
        self._trainer = trainer
        self._compute = compute
        self._lineage = lineage
        self._changed = changed
        self._stage = stage
        self._snapshots: dict[int, _Snapshot] = {}
        self._lock = anyio.Lock()
        self.step: int | None = None  # whose state this peer may give away; None while it has none

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {StateIndexCall: self.handle_index, StateChunkCall: self.handle_chunk}

    async def handle_index(self, caller: str, call: StateIndexCall, tensors: Sequence[memoryview]) -> Reply:
        with anyio.move_on_after(WAIT_FOR_STEP_S):
            await self._changed.wait_for(lambda: self.step is not None and self.step >= call.min_step)
        if self.step is None or self.step < call.min_step:
            raise NotServing(f"this peer has the state of step {self.step}, not of {call.min_step}")
        async with self._lock:
            while (step := self.step) not in self._snapshots:
                snapshot = await self._compute.run(Priority.STEP, self._take)
                if snapshot is None:
                    await self._changed.wait_for(lambda left=step: self.step != left)  # type: ignore[misc]
                    continue
                # The one before may still be on its way to somebody.
                newest = sorted(self._snapshots)[-1:]
                self._snapshots = {step: self._snapshots[step] for step in newest} | {snapshot.step: snapshot}
            snapshot = self._snapshots[max(self._snapshots)]
        return Reply(tensors=(memoryview(snapshot.index),))

    async def handle_chunk(self, caller: str, call: StateChunkCall, tensors: Sequence[memoryview]) -> Reply:
        snapshot = self._snapshots.get(call.step)
        if snapshot is None:
            raise NotServing(f"the state of step {call.step} is not kept any more")
        if call.entry >= len(snapshot.tensors):
            raise InvalidMessage(f"tensor {call.entry} of {len(snapshot.tensors)}")
        return Reply(tensors=(snapshot.tensors[call.entry][call.offset : call.offset + call.size],))

    def _take(self) -> _Snapshot | None:
        """In the compute thread. None while the weights are a step ahead of what the event loop knows: the lineage that
        it gives is not theirs then."""
        if self._trainer.step != self.step:
            return None
        state = self._trainer.state()
        entries, parts = [], []
        for name, tensor in state.items():
            data = _as_bytes(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            sha256 = hashlib.sha256(data).digest()
            entries.append(StateEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), sha256=sha256))
            parts.append(data)
        index = StateIndex(stage=self._stage, step=self._trainer.step, lineage=self._lineage(), entries=tuple(entries))
        return _Snapshot(self._trainer.step, pack_fields(index), tuple(parts))


async def fetch_state(
    transport: Transport,
    donors: Sequence[str],
    *,
    manifest_hash: str,
    stage: int,
    min_step: int,
    max_bytes: int,
) -> StageState:
    """Download the state of a stage from the first of `donors` that gives it whole.

    Args:
        min_step: an older state is of no use
        max_bytes: refuse a state that claims to be larger

    Raises:
        CallError: none of them did; says what each answered
    """
    reasons = []
    for donor in donors:
        try:
            return await _fetch_from(transport, donor, manifest_hash, stage, min_step, max_bytes)
        except CallError as error:
            log.warning("state_download_failed donor=%s reason=%s: %s", donor, error.code, error)
            reasons.append(f"{donor}: {error}")
    raise CallError(f"no donor gave the state of stage {stage}: {'; '.join(reasons) or 'there is none'}")


async def _fetch_from(
    transport: Transport, donor: str, manifest_hash: str, stage: int, min_step: int, max_bytes: int
) -> StageState:
    begin = anyio.current_time()
    call = StateIndexCall(manifest=manifest_hash, min_step=min_step)
    reply = await transport.call(donor, call, timeout_s=CALL_TIMEOUT_S)
    if len(reply.tensors) != 1:
        raise InvalidMessage("the state's index is missing")
    index = unpack_fields(StateIndex, reply.tensors[0])
    total_bytes = sum(_num_bytes(entry) for entry in index.entries)
    if index.stage != stage or index.step < min_step or total_bytes > max_bytes:
        raise InvalidMessage(
            f"offered {total_bytes} bytes of stage {index.stage} at step {index.step}; wanted stage {stage} at step "
            f"{min_step} or later, of at most {max_bytes} bytes"
        )
    buffers = [torch.empty(_num_bytes(entry), dtype=torch.uint8) for entry in index.entries]
    room = anyio.Semaphore(CHUNKS_IN_FLIGHT)
    failures: list[CallError] = []

    async def fetch_chunk(entry: int, offset: int, size: int) -> None:
        try:
            chunk_call = StateChunkCall(manifest=manifest_hash, step=index.step, entry=entry, offset=offset, size=size)
            chunk = await transport.call(donor, chunk_call, timeout_s=CALL_TIMEOUT_S)
            if [tensor.nbytes for tensor in chunk.tensors] != [size]:
                raise InvalidMessage(f"a chunk of {size} bytes was asked for")
            memoryview(buffers[entry].numpy())[offset : offset + size] = chunk.tensors[0]
        except CallError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()
        finally:
            room.release()

    async with anyio.create_task_group() as tasks:
        for number, entry in enumerate(index.entries):
            for offset in range(0, _num_bytes(entry), CHUNK_BYTES):
                await room.acquire()
                size = min(CHUNK_BYTES, _num_bytes(entry) - offset)
                tasks.start_soon(fetch_chunk, number, offset, size)
    if failures:
        raise failures[0]
    tensors = await anyio.to_thread.run_sync(_assemble, index, buffers)
    log.info(
        "state_downloaded donor=%s step=%d bytes=%d seconds=%.2f",
        donor, index.step, total_bytes, anyio.current_time() - begin,
    )  # fmt: skip
    return StageState(index.step, index.lineage, tensors)


def _num_bytes(entry: StateEntry) -> int:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidMessage(f"tensor {entry.name:.100} of type {entry.dtype}")
    return math.prod(entry.shape) * dtype.itemsize


def _assemble(index: StateIndex, buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry, buffer in zip(index.entries, buffers, strict=True):
        if hashlib.sha256(memoryview(buffer.numpy())).digest() != entry.sha256:
            raise InvalidMessage(f"tensor {entry.name:.100} does not match its hash")
        tensors[entry.name] = buffer.view(_DTYPES[entry.dtype]).view(entry.shape)
    return tensors

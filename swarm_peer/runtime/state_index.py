"""A stage's state or update as tensors with an index that lists and hashes them (wire/messages.py, StateIndex)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.recovery import FIRST_ORIGIN, Origin
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateEntry, StateIndex

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)
}

# Of a tensor; one without elements has sizes all the same, and torch multiplies them.
MAX_ELEMENTS = 2**40


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of one stage at the beginning of global step `step`.

    Attributes:
        lineage: digest of all updates that made it
        ledger: of stage 0, the samples that these updates have counted
    """

    step: int
    lineage: str
    tensors: Mapping[str, torch.Tensor]
    origin: Origin = FIRST_ORIGIN
    ledger: bytes = b""

    @property
    def updates(self) -> int:
        return self.origin.updates_at(self.step)

    @property
    def born(self) -> int:
        return self.origin.born_at(self.step)


def make_index(
    stage: int, kind: Literal["state", "update"], state: StageState
) -> tuple[StateIndex, tuple[memoryview, ...]]:
    """List and hash tensors; takes a second per gigabyte."""
    entries, parts = [], []
    for name, tensor in state.tensors.items():
        data = _as_bytes(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        chunks = tuple(
            hashlib.sha256(data[start : start + STATE_CHUNK_BYTES]).digest()
            for start in range(0, data.nbytes, STATE_CHUNK_BYTES)
        )
        entries.append(StateEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), chunks=chunks))
        parts.append(data)
    index = StateIndex(
        stage=stage,
        kind=kind,
        step=state.step,
        origin_step=state.origin.step,
        origin_updates=state.origin.updates,
        origin_born=state.origin.born,
        lineage=state.lineage,
        ledger=state.ledger,
        entries=tuple(entries),
    )
    return index, tuple(parts)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def origin_of(index: StateIndex) -> Origin:
    return Origin(index.origin_step, index.origin_updates, index.origin_born)


def num_bytes(entry: StateEntry) -> int:
    """Of the tensor that it describes.

    Raises:
        InvalidMessage: a type or a shape that no state has, or hashes of more or fewer chunks than that
    """
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidMessage(f"tensor {entry.name:.100} of type {entry.dtype}")
    if math.prod(size for size in entry.shape if size) > MAX_ELEMENTS:
        raise InvalidMessage(f"tensor {entry.name:.100} of shape {entry.shape}")
    size = math.prod(entry.shape) * dtype.itemsize
    if len(entry.chunks) != -(-size // STATE_CHUNK_BYTES):
        raise InvalidMessage(f"tensor {entry.name:.100} of {size} bytes with hashes of {len(entry.chunks)} chunks")
    return size


def assemble(index: StateIndex, buffers: Sequence[torch.Tensor]) -> StageState:
    """The state that an index describes, of its tensors' bytes (uint8), which it shares memory with.

    Raises:
        InvalidMessage: a tensor cannot be made of its bytes
    """
    tensors = {}
    for entry, buffer in zip(index.entries, buffers, strict=True):
        try:
            tensors[entry.name] = buffer.view(DTYPES[entry.dtype]).view(entry.shape)
        except RuntimeError as error:
            raise InvalidMessage(f"tensor {entry.name:.100} of shape {entry.shape}: {error}") from error
    return StageState(index.step, index.lineage, tensors, origin_of(index), index.ledger)

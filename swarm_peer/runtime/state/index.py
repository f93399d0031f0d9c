"""A stage's state or update as tensors, and the index that lists and hashes them (wire/messages.py, StateIndex).

Owns how tensors become bytes and chunks. Must not know where states are stored or sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateEntry, StateIndex

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)
}

# The most elements of a tensor. The sizes of an empty tensor are checked, too, since torch multiplies those above 0.
MAX_ELEMENTS = 2**40


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of one stage at the beginning of a round: weights, optimizer, and the entry that they embody.

    The same class holds an update, whose tensors are the averaged gradients that ended the round.

    Attributes:
        history_hash: of the entry of the stage's log that the weights embody, or whose averages these are
        tensors: by name
        ledger: at stage 0, the samples that these updates have counted
        entry: of a snapshot, the entry that names its root, with its certificate, as bytes
    """

    round_number: int
    history_hash: str
    tensors: Mapping[str, torch.Tensor]
    timeline: Timeline = FIRST_TIMELINE
    ledger: bytes = b""
    entry: bytes = b""

    @property
    def optimizer_step(self) -> int:
        """How many updates the weights have had."""
        return self.timeline.optimizer_step_at(self.round_number)

    @property
    def created_at_round(self) -> int:
        """The first round that ever began with these weights."""
        return self.timeline.creation_round(self.round_number)


def make_index(
    stage: int, kind: Literal["state", "update"], state: StageState
) -> tuple[StateIndex, tuple[memoryview, ...]]:
    """Make the index of a state or an update, and give its tensors' bytes. Takes a second per gigabyte."""
    entries, parts = [], []
    for name, tensor in state.tensors.items():
        data = as_bytes(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(StateEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), chunks=hash_chunks(data)))
        parts.append(data)
    index = StateIndex(
        stage=stage,
        kind=kind,
        round_number=state.round_number,
        timeline_first_round=state.timeline.first_round,
        timeline_first_optimizer_step=state.timeline.first_optimizer_step,
        timeline_created_at_round=state.timeline.created_at_round,
        history_hash=state.history_hash,
        ledger=state.ledger,
        entry=state.entry,
        entries=tuple(entries),
    )
    return index, tuple(parts)


def hash_chunks(data: memoryview) -> tuple[bytes, ...]:
    """The hash of each chunk of a tensor's bytes, as an index has them. Takes a second per gigabyte."""
    starts = range(0, data.nbytes, STATE_CHUNK_BYTES)
    return tuple(hashlib.sha256(data[start : start + STATE_CHUNK_BYTES]).digest() for start in starts)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, which may be empty."""
    flat = tensor.contiguous().view(-1)
    return bytes_of(flat) if flat.numel() else memoryview(b"")


def timeline_of(told: StateIndex) -> Timeline:
    """The timeline that a state or an update belongs to."""
    return Timeline(told.timeline_first_round, told.timeline_first_optimizer_step, told.timeline_created_at_round)


def num_bytes(entry: StateEntry) -> int:
    """Size of the tensor that an entry describes, in bytes.

    Raises:
        InvalidMessage: no state has such a type or shape, or the number of hashes does not match the size
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
    """Make the state that an index describes.

    Args:
        buffers: the bytes of each tensor (uint8); the state shares their memory

    Raises:
        InvalidMessage: the bytes do not make a tensor of the type and shape
    """
    tensors = {}
    for entry, buffer in zip(index.entries, buffers, strict=True):
        try:
            tensors[entry.name] = buffer.view(DTYPES[entry.dtype]).view(entry.shape)
        except RuntimeError as error:
            raise InvalidMessage(f"tensor {entry.name:.100} of shape {entry.shape}: {error}") from error
    timeline = timeline_of(index)
    return StageState(index.round_number, index.history_hash, tensors, timeline, index.ledger, index.entry)

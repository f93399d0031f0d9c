"""A state or an update with its index, ready for download: in memory, or in a file that is mapped into memory.

Owns how one is made, written and read. Must not know which are kept, or for whom.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from swarm_peer.policy.step_state import StepState
from swarm_peer.runtime.context import Storage
from swarm_peer.runtime.network.transport import pack_fields
from swarm_peer.runtime.state.index import StageState, as_bytes, assemble, hash_chunks, make_index
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.messages import StateIndex, StateIndexCall


@dataclass(slots=True)
class StoredState:
    """A state or an update that other peers can download.

    Attributes:
        packed: the index as bytes
        key: hash of `packed`, by which other peers ask for its chunks
        used_at: when a peer last asked for it, on the context's clock
    """

    index: StateIndex
    packed: bytes
    key: bytes
    tensors: tuple[memoryview, ...]
    used_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(part.nbytes for part in self.tensors)


class StateSource(Protocol):
    """A replica in this peer that gives its own state away.

    Attributes:
        stored: what peers are downloading, by the hash of its index
    """

    stored: dict[bytes, StoredState]

    @property
    def step(self) -> StepState:
        """Where the replica stands."""
        ...

    async def find(self, call: StateIndexCall) -> StoredState:
        """Find the replica's state or an update that is asked for. Raises NotServing."""
        ...


def make_stored(stage: int, kind: Literal["state", "update"], state: StageState) -> StoredState:
    """Make a state or an update ready for download. Takes a second per gigabyte."""
    index, tensors = make_index(stage, kind, state)
    packed = pack_fields(index)
    return StoredState(index, packed, hashlib.sha256(packed).digest(), tensors)


def read_stored(stored: StoredState) -> StageState | None:
    """Copy a snapshot's tensors out of the file; None if the file is not what was written."""
    buffers = [torch.tensor(np.frombuffer(part, np.uint8)) for part in stored.tensors]
    hashes = [hash_chunks(as_bytes(buffer)) for buffer in buffers]
    if hashes != [entry.chunks for entry in stored.index.entries]:
        return None
    return assemble(stored.index, buffers)


def write_stored(storage: Storage, name: str, stage: int, state: StageState) -> StoredState:
    """Write a snapshot's tensors to a file, and map the file into memory."""
    stored = make_stored(stage, "state", state)
    sizes = [part.nbytes for part in stored.tensors]
    storage.write(name, stored.tensors)
    mapped = storage.map(name) if sum(sizes) else np.empty(0, np.uint8)
    ends = np.cumsum(sizes)
    stored.tensors = tuple(bytes_of(mapped[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    return stored

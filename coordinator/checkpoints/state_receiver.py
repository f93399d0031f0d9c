"""Where the states that peers give lie, and whether each is one of its stage.

All stages of a model together may be larger than this machine's memory. Then they lie on its disk.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence

import anyio
import numpy as np
import torch

from swarm_peer.errors import NoRoom
from swarm_peer.model.checks import check_state
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.host.memory import host_memory
from swarm_peer.runtime.host.scratch import is_in_memory, temporary_folder
from swarm_peer.runtime.state.index import StageState

log = logging.getLogger(__name__)

# Each tensor of a state begins at a multiple of so many bytes in a file: its type may not be viewed elsewhere.
ALIGNMENT = 64


class StateReceiver:
    """Has room for states of a run's stages, and checks them as its peers do. Belongs to the event loop's thread."""

    def __init__(self, resolved: ResolvedManifest, threads: Threads):
        self._resolved = resolved
        self._threads = threads
        self._allocating = anyio.Lock()  # each state finds what the ones before it have left
        self._templates: dict[int, Mapping[str, torch.Tensor]] = {}

    async def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Room for each tensor of a state, in memory or on the disk.

        Raises:
            NoRoom: neither has it
        """
        spaces = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        async with self._allocating:
            room = await self._threads.run(room_for, sum(spaces), self._resolved.num_stages, abandon_on_cancel=True)
        return [space[:size] for space, size in zip(torch.split(room, spaces), sizes, strict=True)]

    async def write(self, part: torch.Tensor, data: memoryview) -> None:
        """Write to a part of an allocated tensor. A disk may be slow to take it."""
        await self._threads.run(np.copyto, part.numpy(), np.frombuffer(data, np.uint8), abandon_on_cancel=True)

    async def check(self, stage: int, state: StageState) -> None:
        """Check a state that somebody gave for a stage. Takes a second per gigabyte, or longer where a disk is slow.

        A checkpoint of states that do not fit could not be gone on from.

        Raises:
            InvalidMessage: by the names, types and shapes of its tensors, or since not all are finite, no peer of the
                stage would take it over
        """
        if stage not in self._templates:
            self._templates[stage] = await self._threads.run(_template, self._resolved, stage)
        await self._threads.run(check_state, state.tensors, self._templates[stage], abandon_on_cancel=True)


def room_for(num_bytes: int, num_states: int) -> torch.Tensor:
    """Room for the bytes of one of several states: uint8, of shape (num_bytes,).

    It is memory, if that has room for all of them beside this one; or else a temporary file, if the disk has room. The
    file has no name, so it goes with the tensor, however this process ends. The caller waits for the disk: it should be
    a worker thread.

    Raises:
        NoRoom: neither has room for this one
    """
    free = host_memory()[0]
    if (num_states + 1) * num_bytes > free:
        try:
            return _room_on_disk(num_bytes)
        except OSError as error:
            if num_bytes > free:  # the system would kill this process as it fills that memory
                raise NoRoom(
                    f"no room for a state of {num_bytes} bytes: {free} bytes of memory are free, and {error}; name a "
                    f"folder with more room in the environment variable TMPDIR"
                ) from error
            log.warning("state_is_in_memory bytes=%d reason=%s", num_bytes, error)
            # Written to now, since the system takes it for free until then: the next state must find less.
            return torch.empty(num_bytes, dtype=torch.uint8).fill_(0)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _room_on_disk(num_bytes: int) -> torch.Tensor:
    folder = temporary_folder()
    if is_in_memory(folder):
        raise OSError(f"{folder} is on no disk")
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it now: a write that found no room later would kill this process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def _template(resolved: ResolvedManifest, stage: int) -> Mapping[str, torch.Tensor]:
    return StageTrainer(resolved, resolved.specs[stage], blank=True).state_template()

"""Where the states that peers give lie, and whether each is one of its stage.

All stages of a model together may be larger than this machine's memory. Then they lie on its disk. Where neither has
room for all, the first one is refused: peers would send it in vain.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.errors import InvalidMessage, NoRoom
from swarm_peer.model.checks import check_state
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.host.memory import host_memory
from swarm_peer.runtime.host.scratch import is_in_memory, temporary_folder
from swarm_peer.runtime.state.index import StageState

log = logging.getLogger(__name__)

# Each tensor of a state begins at a multiple of so many bytes in a file: its type may not be viewed elsewhere.
ALIGNMENT = 64
# Share of the free memory that states may take at most. The system may not give all that it calls free.
MOST_OF_MEMORY = 0.9


class StateReceiver:
    """Has room for states of a run's stages, and checks them as its peers do. Belongs to the event loop's thread.

    Attributes:
        has_met_broken: whether somebody gave a state that holds numbers which are not finite
    """

    def __init__(
        self, resolved: ResolvedManifest, threads: Threads, folder: Path | None = None, *, only_weights: bool = False
    ):
        """Make a receiver that holds nothing.

        Args:
            folder: where the states are written to, or the weights alone; None for a store elsewhere, to which they go
                from this machine's disk, one after the other
        """
        self._resolved = resolved
        self._threads = threads
        self._folder = folder
        self._only_weights = only_weights
        self._allocating = anyio.Lock()  # each state finds what the ones before it have left
        self._building = anyio.Lock()  # states come side by side, and a template takes time and memory to build
        self._held: WeakValueDictionary[int, npt.NDArray[np.uint8]] = WeakValueDictionary()  # by stage
        self._templates: dict[int, Mapping[str, torch.Tensor]] = {}
        self.has_met_broken = False

    def of_stage(self, stage: int) -> StageRoom:
        """Room for the state of a stage."""
        return StageRoom(self, stage)

    async def templates(self) -> list[Mapping[str, torch.Tensor]]:
        """The names, types and shapes of each stage's state."""
        return [await self._template(stage) for stage in range(self._resolved.num_stages)]

    async def allocate(self, stage: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Room for each tensor of a state, in memory or on the disk.

        Raises:
            InvalidMessage: no state of the stage is as large
            NoRoom: neither has room for this state and those of the stages that are to come
        """
        templates = await self.templates()
        spaces, wanted = [_space(size) for size in sizes], [_num_bytes(template) for template in templates]
        num_bytes = sum(spaces)
        if num_bytes > wanted[stage]:
            raise InvalidMessage(f"offered {sum(sizes)} bytes; a state of stage {stage} takes {wanted[stage]}")
        written = max(wanted) if self._folder is None else sum(wanted)
        if self._only_weights:
            written = sum(map(_num_bytes, map(_weights_of, templates)))
        async with self._allocating:
            to_come = sum(size for other, size in enumerate(wanted) if other == stage or other not in self._held)
            room = await self._threads.run(room_for, num_bytes, to_come, written, self._folder, abandon_on_cancel=True)
            self._held[stage] = room
        return [space[:size] for space, size in zip(torch.split(torch.from_numpy(room), spaces), sizes, strict=True)]

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
        template = await self._template(stage)
        try:
            await self._threads.run(check_state, state.tensors, template, abandon_on_cancel=True)
        except InvalidMessage:
            self.has_met_broken |= not await self._threads.run(_are_finite, state.tensors, abandon_on_cancel=True)
            raise

    async def _template(self, stage: int) -> Mapping[str, torch.Tensor]:
        async with self._building:
            if stage not in self._templates:
                self._templates[stage] = await self._threads.run(_template, self._resolved, stage)
            return self._templates[stage]


@dataclass(frozen=True, slots=True)
class StageRoom:
    """A receiver's room for the state of one stage, and its check: see `transfer.Room`."""

    receiver: StateReceiver
    stage: int

    async def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """See StateReceiver.allocate."""
        return await self.receiver.allocate(self.stage, sizes)

    async def write(self, part: torch.Tensor, data: memoryview) -> None:
        """See StateReceiver.write."""
        await self.receiver.write(part, data)

    async def check(self, state: StageState) -> None:
        """See StateReceiver.check."""
        await self.receiver.check(self.stage, state)


def room_for(num_bytes: int, to_come: int, written: int, folder: Path | None) -> npt.NDArray[np.uint8]:
    """Room for the bytes of one of several states, of shape (num_bytes,).

    It is memory, if that has room for all that are to come, and for this one once more; or else a temporary file. The
    file has no name, so it goes with the array, however this process ends. The caller waits for the disk: it should be
    a worker thread.

    Args:
        to_come: bytes of this state and the ones after it
        written: bytes of what is made of the states
        folder: where that is written to; None for the temporary folder. It keeps its room if it is on the same disk

    Raises:
        NoRoom: neither has room for all, and memory not even for those that are to come
    """
    free = host_memory()[0]
    if to_come + num_bytes > free:
        try:
            return _room_on_disk(num_bytes, to_come, written, folder)
        except OSError as error:
            if to_come > MOST_OF_MEMORY * free:  # the system would kill this process as it fills that memory
                raise NoRoom(
                    f"no room for states of {to_come} bytes: {free} bytes of memory are free, and {error}; name a "
                    f"folder with more room in the environment variable TMPDIR"
                ) from error
            log.warning("state_is_in_memory bytes=%d reason=%s", num_bytes, error)
    # Written to now, since the system takes it for free until then: the next state must find less.
    return np.full(num_bytes, 0, np.uint8)


def _room_on_disk(num_bytes: int, to_come: int, written: int, folder: Path | None) -> npt.NDArray[np.uint8]:
    scratch = temporary_folder()
    if is_in_memory(scratch):
        raise OSError(f"{scratch} is on no disk")
    wanted = to_come + (written if folder is None or _disk_of(folder) == _disk_of(scratch) else 0)
    if wanted > (free := shutil.disk_usage(scratch).free):
        raise OSError(f"{free} bytes are free on the disk of {scratch}, of {wanted} for them and what is made of them")
    with tempfile.TemporaryFile(dir=scratch) as file:
        # All of it now: a write that found no room later would kill this process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


def _disk_of(folder: Path) -> int:
    """The number of a folder's disk, also before the folder is made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.stat().st_dev


def _are_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _space(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _num_bytes(template: Mapping[str, torch.Tensor]) -> int:
    return sum(_space(tensor.numel() * tensor.element_size()) for tensor in template.values())


def _weights_of(template: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {name: tensor for name, tensor in template.items() if is_weight(name)}


def _template(resolved: ResolvedManifest, stage: int) -> Mapping[str, torch.Tensor]:
    return StageTrainer(resolved, resolved.specs[stage], hollow=True).state_template()

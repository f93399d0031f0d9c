"""Gives the run's frozen weights to other peers, as far as this machine has them.

Anybody whom the run admits may ask, newcomers without a place among them. Must not know how a peer gets its own part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from safetensors import SafetensorError

from swarm_peer.errors import InvalidMessage, NotServing, first_line
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.runtime.base.base_index import FILE, Base, num_bytes, read_part
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.state.index import hash_chunks
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, BaseChunkCall, BaseIndexCall, Body

log = logging.getLogger(__name__)

# Chunks that are read at once: anybody may ask, and the threads have other work as well.
MOST_READING = 2


class BaseGiver:
    """Answers calls for the index of a base, and for its chunks. Belongs to the event loop's thread.

    Args:
        found: looks which entries are here; returns the file of each, by its number

    Attributes:
        base: None as long as it is not known; nothing is given then
    """

    def __init__(self, *, threads: Threads, found: Callable[[Base], dict[int, Path]], base: Base | None = None):
        self.base = base
        self._threads = threads
        self._look = found
        self._here: dict[int, Path] | None = None
        self._num_changes = 0
        self._reading = anyio.Semaphore(MOST_READING)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {BaseIndexCall: self.handle_index, BaseChunkCall: self.handle_chunk}

    def look_again(self) -> None:
        """Note that more entries may be here by now, or fewer."""
        self._here = None
        self._num_changes += 1

    async def _entries(self, base: Base) -> dict[int, Path]:
        while (here := self._here) is None:
            before = self._num_changes
            found = await self._threads.run(self._look, base)
            if self._num_changes == before:
                self._here = found
        return here

    async def handle_index(self, caller: str, call: BaseIndexCall, tensors: Sequence[memoryview]) -> Reply:
        """Give the index, and say which entries are here.

        Raises:
            NotServing: nothing is here
        """
        if (base := self.base) is None:
            raise NotServing("this peer has nothing of the run's base")
        here = await self._entries(base)
        packed = b"" if call.is_known else base.packed
        return Reply(tensors=(memoryview(packed), memoryview(bits_of(here, len(base.entries)))))

    async def handle_chunk(self, caller: str, call: BaseChunkCall, tensors: Sequence[memoryview]) -> Reply:
        """Give one chunk of an entry, if it is what the index says: nothing else of this machine is for others.

        Raises:
            NotServing: it is not here
            InvalidMessage: there is no such chunk
        """
        base = self.base
        here = {} if base is None else await self._entries(base)
        path = here.get(call.entry)
        if base is None or path is None:
            raise NotServing("this part of the run's base is not here")
        entry = base.entries[call.entry]
        begin = call.chunk * STATE_CHUNK_BYTES
        if call.chunk >= len(entry.chunks):
            raise InvalidMessage(f"chunk {call.chunk} of {len(entry.chunks)}")
        size = min(STATE_CHUNK_BYTES, num_bytes(entry) - begin)
        try:
            async with self._reading:
                data = await self._threads.run(read_part, path, entry, begin, size)
                if await self._threads.run(hash_chunks, data) != entry.chunks[call.chunk : call.chunk + 1]:
                    raise OSError("it holds something else than the run's base")
        except (OSError, SafetensorError) as error:
            log.warning("base_not_given path=%s entry=%s reason=%s", path, entry.name, first_line(error))
            here.pop(call.entry, None)
            raise NotServing("this part of the run's base is not here any more") from error
        return Reply(tensors=(data,))


def entries_in(source: ModelSource, base: Base) -> dict[int, Path]:
    """The entries of a base that are in a folder or in the hub's cache of this machine. May block."""
    found = {}
    files = source.tensors_here()
    for number, entry in enumerate(base.entries):
        path = source.find(entry.name) if entry.dtype == FILE else files.get(entry.name)
        if path is not None:
            found[number] = path
    return found


def bits_of(numbers: dict[int, Path], count: int) -> bytes:
    """A bit for each entry, set for those of these numbers; see BaseIndexCall."""
    bits = bytearray(-(-count // 8))
    for number in numbers:
        bits[number // 8] |= 128 >> number % 8
    return bytes(bits)


def numbers_in(bits: memoryview, count: int) -> frozenset[int]:
    """The numbers whose bits are set.

    Raises:
        InvalidMessage: there are more or fewer bits than entries
    """
    if bits.nbytes != -(-count // 8):
        raise InvalidMessage(f"{bits.nbytes} bytes say which of {count} entries there are")
    return frozenset(number for number in range(count) if bits[number // 8] & 128 >> number % 8)

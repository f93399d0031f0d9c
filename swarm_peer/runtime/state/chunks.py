"""Downloads chunks from several donors at once, and checks each by its hash.

If a donor dies, stalls or lies, the others give the chunks that it owes. Must not know what the chunks are of.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import anyio

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage
from swarm_peer.runtime.network.transport import Reply, Transport
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, Call

# Chunks in flight from each donor: enough to fill a link of 1 Gb/s with a round trip of 100 ms.
CHUNKS_IN_FLIGHT = 4
# A donor that sends nothing for so long is given up. Chunks in flight follow each other over a slow link, so each that
# comes gives the others as long again.
CALL_TIMEOUT_S = 30.0
# Where chunks have to come at some speed, each has so long besides: small ones take a round trip to a busy donor.
CHUNK_S = 2.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        entry: the tensor's number in an index
        name: the tensor's name, for people
        number: of the chunk in the tensor
    """

    entry: int
    name: str
    number: int
    size: int
    sha256: bytes

    @property
    def begin(self) -> int:
        """Where it begins in the tensor's bytes."""
        return self.number * STATE_CHUNK_BYTES


def chunks_of(entry: int, name: str, num_bytes: int, hashes: Iterable[bytes]) -> list[Chunk]:
    """The chunks of a tensor."""
    return [
        Chunk(entry, name, number, min(STATE_CHUNK_BYTES, num_bytes - number * STATE_CHUNK_BYTES), sha256)
        for number, sha256 in enumerate(hashes)
    ]


class Donor:
    """The chunks that one donor owes, and whether it is worth waiting for them.

    Args:
        has: whether it has a chunk, as far as it has told
        patience_s: it is given up when it has sent nothing for so long
    """

    def __init__(self, peer_id: str, has: Callable[[Chunk], bool] = lambda _: True, *, patience_s: float | None = None):
        self.peer_id = peer_id
        self.has = has
        self.patience_s = patience_s or CALL_TIMEOUT_S
        self.is_alive = True
        self._waiting: list[anyio.CancelScope] = []

    async def call(self, transport: Transport, call: Call) -> Reply:
        """Ask it for a chunk.

        Raises:
            CallTimeout: nothing has come from it for too long, neither this chunk nor another one
        """
        patience_s = self.patience_s
        with anyio.CancelScope(deadline=anyio.current_time() + patience_s) as scope:
            self._waiting.append(scope)
            try:
                # A donor that gives the others while it owes this one has CHUNKS_IN_FLIGHT times as long for it.
                reply = await transport.call(self.peer_id, call, timeout_s=patience_s * (CHUNKS_IN_FLIGHT + 1))
            finally:
                self._waiting.remove(scope)
            for waiting in self._waiting:
                waiting.deadline = anyio.current_time() + patience_s
            return reply
        raise CallTimeout(f"{self.peer_id} has sent nothing for {patience_s:.0f} s")


async def download_chunks(
    transport: Transport,
    donors: Sequence[Donor],
    missing: deque[Chunk],
    *,
    ask: Callable[[Chunk], Call],
    write: Callable[[Chunk, memoryview], Awaitable[None]],
    failed: Callable[[str, CallError], None],
    in_flight: int | None = None,
    slowest_bytes_per_s: float | None = None,
) -> None:
    """Download chunks until none is missing, or no donor is left that has one of them, or all of them are too slow.

    Donors that give a chunk just before they would be given up could hold the caller for days.

    Args:
        missing: those that were not downloaded are left in it
        ask: the call for a chunk
        write: takes a chunk whose hash is right
        failed: told why a donor is given up
        in_flight: chunks that each donor owes at once; CHUNKS_IN_FLIGHT if not given
        slowest_bytes_per_s: all donors are given up when they give less together; None for any speed
    """

    def give_up(donor: Donor, error: CallError) -> None:
        if donor.is_alive:
            donor.is_alive = False
            failed(donor.peer_id, error)

    async def take_chunks(donor: Donor) -> None:
        while donor.is_alive and (chunk := _take_first(missing, donor.has)) is not None:
            if slowest_bytes_per_s is not None:
                in_time.deadline += CHUNK_S + chunk.size / slowest_bytes_per_s
            with ExitStack() as unless_written:
                unless_written.callback(missing.append, chunk)
                try:
                    data = await _fetch(transport, donor, chunk, ask(chunk))
                except CallError as error:
                    give_up(donor, error)
                    return
                await write(chunk, data)
                unless_written.pop_all()

    with anyio.CancelScope() as in_time:
        if slowest_bytes_per_s is not None:
            in_time.deadline = anyio.current_time() + CALL_TIMEOUT_S
        # A task that finds no chunk left ends. If another one fails after that, its chunk is still missing: hence the
        # loop.
        while useful := [donor for donor in donors if donor.is_alive and any(map(donor.has, missing))]:
            async with anyio.create_task_group() as tasks:
                for donor in useful:
                    for _ in range(in_flight or CHUNKS_IN_FLIGHT):
                        tasks.start_soon(take_chunks, donor)
    if in_time.cancelled_caught:
        for donor in donors:
            give_up(donor, CallTimeout(f"less than {slowest_bytes_per_s:.0f} bytes/s come from those that have this"))


async def _fetch(transport: Transport, donor: Donor, chunk: Chunk, call: Call) -> memoryview:
    reply = await donor.call(transport, call)
    if [tensor.nbytes for tensor in reply.tensors] != [chunk.size]:
        raise InvalidMessage(f"a chunk of {chunk.size} bytes was asked for")
    if hashlib.sha256(reply.tensors[0]).digest() != chunk.sha256:
        raise InvalidMessage(f"a chunk of {chunk.name:.100} does not match its hash")
    return reply.tensors[0]


def _take_first(missing: deque[Chunk], has: Callable[[Chunk], bool]) -> Chunk | None:
    for position, chunk in enumerate(missing):
        if has(chunk):
            del missing[position]
            return chunk
    return None

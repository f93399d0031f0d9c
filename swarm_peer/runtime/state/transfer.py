"""Downloads a state or an update from several donors at once, chunk by chunk (chunks.py).

hivemind's own download would not do: it takes everything from one donor, checks nothing, and returns None if no donor
answers. Must not know why a state is wanted: states.py and snapshots.py do.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import torch

from swarm_peer.errors import CallError, InvalidMessage, NoRoom, NotServing, forget_frames
from swarm_peer.runtime.network.frame_stream import SLOWEST_BYTES_PER_S
from swarm_peer.runtime.network.transport import Transport, unpack_fields
from swarm_peer.runtime.state.chunks import CALL_TIMEOUT_S, Chunk, Donor, chunks_of, download_chunks
from swarm_peer.runtime.state.index import StageState, assemble, num_bytes, timeline_of
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.messages import StateChunkCall, StateIndex, StateIndexCall

log = logging.getLogger(__name__)

# Donors that one newcomer takes chunks from at once. With more, several newcomers would burden the same donors.
MAX_DONORS = 3
# A donor hashes the whole state before it gives its index.
HASHED_BYTES_PER_S = 2.5e8
# A slower download is given up while there are other donors, since those of one index may all be liars. Where this
# peer's own link is slow, the last donors still are good enough.
HURRIED_BYTES_PER_S = 1e6


class Room(Protocol):
    """Where a state lies while it is downloaded, and from then on."""

    async def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Room for each tensor of a state, by their bytes: uint8, of shape (size,).

        Raises:
            InvalidMessage: what is wanted is too much, so the index lies
            NoRoom: there is none
        """
        ...

    async def write(self, part: torch.Tensor, data: memoryview) -> None:
        """Write to a part of an allocated tensor, which is as long as the data."""
        ...


class Memory:
    """Room in memory, apart for each tensor: an optimizer keeps some of them, and must not keep the others' as well."""

    async def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Room for each tensor of a state."""
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    async def write(self, part: torch.Tensor, data: memoryview) -> None:
        """Write to a part of an allocated tensor."""
        bytes_of(part)[:] = data


MEMORY = Memory()


async def accept_any(index: StateIndex) -> None:
    """Ask for the chunks of any index."""


async def fetch_state(
    transport: Transport,
    donors: Sequence[str],
    call: StateIndexCall,
    *,
    max_bytes: int,
    optimizer_step: int | None = None,
    rng: random.Random,
    take: Callable[[StageState], Awaitable[None]] | None = None,
    room: Room = MEMORY,
    are_holders: bool = False,
    accept: Callable[[StateIndex], Awaitable[None]] = accept_any,
) -> StageState:
    """Download the state or update that `call` asks for.

    Args:
        donors: peers that may have it, in any order
        max_bytes: refuse an index of more bytes
        optimizer_step: refuse an index of weights of another one, if given
        take: takes a whole state over; if it raises InvalidMessage, other donors' states are downloaded
        room: where the state is to lie
        are_holders: whether all donors are asked at once, since few may have it, and these have hashed it before
        accept: raises InvalidMessage for an index of which no chunk is to be asked for

    Raises:
        NoRoom: there was no room for what a donor offered, and no other gave it
        CallError: no donor gave it whole, or none that could be taken over; the message has each donor's answer
    """

    async def check(index: StateIndex) -> None:
        _check_index(index, call, max_bytes, optimizer_step)
        await accept(index)

    waiting = list(donors)
    rng.shuffle(waiting)
    reasons: list[str] = []
    refused: list[str] = []

    def failed(donor: str, error: CallError) -> None:
        if isinstance(error, NoRoom):
            refused.append(str(error))
        # A donor that does not have the state yet, or not any more, has done nothing wrong.
        level = logging.DEBUG if isinstance(error, NotServing) else logging.WARNING
        log.log(level, "download_failed donor=%s reason=%s: %s", donor, error.code, error)
        reasons.append(f"{donor}: {error}")

    while waiting:
        asked, waiting = (waiting, []) if are_holders else (waiting[:MAX_DONORS], waiting[MAX_DONORS:])
        found = await _ask_index(transport, asked, call, 0 if are_holders else max_bytes, check, failed)
        by_age = sorted(found.items(), key=lambda known: _preference(call, *known[1]))
        # A donor that claims to be ahead of all others must not keep this peer from asking them.
        while by_age:
            name, (index, agreeing) = by_age.pop()
            slowest = HURRIED_BYTES_PER_S if by_age or waiting else SLOWEST_BYTES_PER_S
            state = await _download(transport, name, index, agreeing, call.manifest, failed, take, room, slowest)
            if state is not None:
                return state
    if refused:
        raise NoRoom(refused[0])
    raise CallError(f"no donor gave the {call.kind} of stage {call.of_stage}: {_joined(reasons)}")


def _joined(reasons: Sequence[str]) -> str:
    return "; ".join(sorted(reasons)) or "there is none"


def _preference(call: StateIndexCall, index: StateIndex, donors: Sequence[str]) -> tuple[int, int, str]:
    """Sort key of an index: prefer later rounds, and within a round the index that most donors give.

    For a snapshot the round does not count: the run may have begun anew with it, in a later round.
    """
    is_snapshot = call.entry != "" or call.optimizer_step is not None
    return (0 if is_snapshot else index.round_number, len(donors), min(donors))


async def _ask_index(
    transport: Transport,
    donors: Sequence[str],
    call: StateIndexCall,
    hashed_bytes: int,
    check: Callable[[StateIndex], Awaitable[None]],
    failed: Callable[[str, CallError], None],
) -> dict[bytes, tuple[StateIndex, list[str]]]:
    """Ask donors for their index. Returns each index with the donors that gave it, by the index's hash.

    Args:
        hashed_bytes: as much as they may have to hash first
    """
    timeout_s = CALL_TIMEOUT_S + hashed_bytes / HASHED_BYTES_PER_S
    found: dict[bytes, tuple[StateIndex, list[str]]] = {}

    async def ask(donor: str) -> None:
        try:
            reply = await transport.call(donor, call, timeout_s=timeout_s)
            if len(reply.tensors) != 1:
                raise InvalidMessage("the index is missing")
            packed = reply.tensors[0]
            index = unpack_fields(StateIndex, packed)
            await check(index)
            found.setdefault(hashlib.sha256(packed).digest(), (index, []))[1].append(donor)
        except CallError as error:
            failed(donor, error)

    async with anyio.create_task_group() as tasks:
        for donor in donors:
            tasks.start_soon(ask, donor)
    return found


def _check_index(index: StateIndex, call: StateIndexCall, max_bytes: int, optimizer_step: int | None) -> None:
    total_bytes = sum(num_bytes(entry) for entry in index.entries)
    timeline = timeline_of(index)
    claimed = timeline.optimizer_step_at(index.round_number)
    fits = index.round_number >= call.min_round if call.kind == "state" else index.round_number == call.min_round
    if (
        (index.stage, index.kind) != (call.of_stage, call.kind)
        or not fits
        or not timeline.allows_round(index.round_number)
        or total_bytes > max_bytes
    ):
        raise InvalidMessage(
            f"offered {total_bytes} bytes, {index.kind} of stage {index.stage} at round {index.round_number}; wanted "
            f"at most {max_bytes} bytes, {call.kind} of stage {call.of_stage} at round {call.min_round}"
        )
    if optimizer_step not in (None, claimed):
        raise InvalidMessage(
            f"offered weights of optimizer step {claimed}; wanted those of optimizer step {optimizer_step}"
        )


def _chunks_of(index: StateIndex) -> deque[Chunk]:
    return deque(
        chunk
        for number, entry in enumerate(index.entries)
        for chunk in chunks_of(number, entry.name, num_bytes(entry), entry.chunks)
    )


async def _download(
    transport: Transport,
    name: bytes,
    index: StateIndex,
    donors: Sequence[str],
    manifest_hash: str,
    failed: Callable[[str, CallError], None],
    take: Callable[[StageState], Awaitable[None]] | None,
    room: Room,
    slowest_bytes_per_s: float,
) -> StageState | None:
    begin = anyio.current_time()
    sizes = [num_bytes(entry) for entry in index.entries]
    asked = [Donor(donor) for donor in sorted(donors)]

    def give_up(error: CallError) -> None:
        for donor in asked:
            if donor.is_alive:
                failed(donor.peer_id, error)
        forget_frames(error)

    try:
        buffers = await room.allocate(sizes)
    except (NoRoom, InvalidMessage) as error:
        give_up(error)
        return None
    missing = _chunks_of(index)

    def ask(chunk: Chunk) -> StateChunkCall:
        return StateChunkCall(manifest=manifest_hash, index=name, entry=chunk.entry, chunk=chunk.number)

    async def write(chunk: Chunk, data: memoryview) -> None:
        await room.write(buffers[chunk.entry][chunk.begin : chunk.begin + chunk.size], data)

    await download_chunks(
        transport, asked, missing, ask=ask, write=write, failed=failed, slowest_bytes_per_s=slowest_bytes_per_s
    )
    if missing:
        return None
    text = "downloaded kind=%s stage=%d round=%d bytes=%d donors=%d seconds=%.2f"
    log.info(text, index.kind, index.stage, index.round_number, sum(sizes), len(donors), anyio.current_time() - begin)
    try:
        state = assemble(index, buffers)
        if take is not None:
            await take(state)
    except InvalidMessage as error:
        give_up(error)
        return None
    return state

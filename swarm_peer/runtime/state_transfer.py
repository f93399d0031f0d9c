"""Downloads a stage's state or update: from several donors at once, in chunks, each checked by its hash.

A donor that dies, stalls or lies is left, and the others go on with what it owed. hivemind's own download is not used:
it takes all from one donor, checks nothing, and answers None when nobody does.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import torch

from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.policy.position import MAX_STEP
from swarm_peer.runtime.state_index import StageState, assemble, num_bytes, origin_of
from swarm_peer.runtime.transport import Transport, unpack_fields
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateChunkCall, StateIndex, StateIndexCall

log = logging.getLogger(__name__)

# Donors that one newcomer takes chunks from at once; with more, several newcomers would all lean on the same ones.
MAX_DONORS = 3
# Chunks asked of each donor at once: enough to fill a link of 1 Gb/s and 100 ms.
CHUNKS_IN_FLIGHT = 4
CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Chunk:
    entry: int
    number: int
    size: int
    sha256: bytes


async def fetch_state(
    transport: Transport,
    donors: Sequence[str],
    call: StateIndexCall,
    *,
    max_bytes: int,
    max_step: int = MAX_STEP,
    updates: int | None = None,
    rng: random.Random | None = None,
) -> StageState:
    """Download what `call` asks for.

    Args:
        donors: peers that may have it, in any order
        max_bytes: refuse what claims to be larger
        max_step: or to be of a later step
        updates: and what claims another number of them, if it is known how many led to it

    Raises:
        CallError: nobody gave it whole; says what each answered
    """
    check = partial(_check_index, call=call, max_bytes=max_bytes, max_step=max_step, updates=updates)
    waiting = list(donors)
    (rng or random.Random()).shuffle(waiting)
    reasons: list[str] = []

    def failed(donor: str, error: CallError) -> None:
        # Who does not have it yet, or not any more, has done nothing wrong.
        level = logging.DEBUG if isinstance(error, NotServing) else logging.WARNING
        log.log(level, "download_failed donor=%s reason=%s: %s", donor, error.code, error)
        reasons.append(f"{donor}: {error}")

    while waiting:
        asked, waiting = waiting[:MAX_DONORS], waiting[MAX_DONORS:]
        found = await _ask_index(transport, asked, call, check, failed)
        by_age = sorted(found.items(), key=lambda known: _preference(call, *known[1]))
        # Whoever claims to be ahead of all others must not keep them from being asked.
        for name, (index, agreeing) in reversed(by_age):
            state = await _download(transport, name, index, agreeing, call.manifest, failed)
            if state is not None:
                return state
    what = f"{call.kind} of stage {call.of_stage}"
    raise CallError(f"no donor gave the {what}: {'; '.join(sorted(reasons)) or 'there is none'}")


def _preference(call: StateIndexCall, index: StateIndex, donors: Sequence[str]) -> tuple[int, int, str]:
    """The newest state, and of one step what most donors give. The same weights may be there under several steps."""
    return (index.step if call.born is None else call.born, len(donors), min(donors))


async def _ask_index(
    transport: Transport,
    donors: Sequence[str],
    call: StateIndexCall,
    check: Callable[[StateIndex], None],
    failed: Callable[[str, CallError], None],
) -> dict[bytes, tuple[StateIndex, list[str]]]:
    """The indexes that they give, by hash, and who gives which."""
    found: dict[bytes, tuple[StateIndex, list[str]]] = {}

    async def ask(donor: str) -> None:
        try:
            reply = await transport.call(donor, call, timeout_s=CALL_TIMEOUT_S)
            if len(reply.tensors) != 1:
                raise InvalidMessage("the index is missing")
            packed = bytes(reply.tensors[0])
            index = unpack_fields(StateIndex, memoryview(packed))
            check(index)
            found.setdefault(hashlib.sha256(packed).digest(), (index, []))[1].append(donor)
        except CallError as error:
            failed(donor, error)

    async with anyio.create_task_group() as tasks:
        for donor in donors:
            tasks.start_soon(ask, donor)
    return found


def _check_index(index: StateIndex, call: StateIndexCall, max_bytes: int, max_step: int, updates: int | None) -> None:
    total_bytes = sum(num_bytes(entry) for entry in index.entries)
    origin = origin_of(index)
    born, claimed = origin.born_at(index.step), origin.updates_at(index.step)
    fits = index.step >= call.min_step if call.kind == "state" else index.step == call.min_step
    if (
        (index.stage, index.kind) != (call.of_stage, call.kind)
        or not fits
        or not origin.is_possible_at(index.step)
        or call.born not in (None, born)
        or total_bytes > max_bytes
    ):
        raise InvalidMessage(
            f"offered {total_bytes} bytes, {index.kind} of stage {index.stage} at step {index.step}, born in {born}; "
            f"wanted at most {max_bytes} bytes, {call.kind} of stage {call.of_stage} at step {call.min_step}, born in "
            f"{'any step' if call.born is None else call.born}"
        )
    if index.step > max_step:
        raise InvalidMessage(f"offered a state of step {index.step}, and the run cannot be beyond {max_step} yet")
    if updates not in (None, claimed):
        raise InvalidMessage(f"offered what {claimed} updates led to; wanted what {updates} updates led to")


async def _download(
    transport: Transport,
    name: bytes,
    index: StateIndex,
    donors: Sequence[str],
    manifest_hash: str,
    failed: Callable[[str, CallError], None],
) -> StageState | None:
    begin = anyio.current_time()
    sizes = [num_bytes(entry) for entry in index.entries]
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    missing = deque(
        _Chunk(number, chunk, min(STATE_CHUNK_BYTES, sizes[number] - chunk * STATE_CHUNK_BYTES), sha256)
        for number, entry in enumerate(index.entries)
        for chunk, sha256 in enumerate(entry.chunks)
    )
    alive = set(donors)

    async def take_chunks(donor: str) -> None:
        while missing and donor in alive:
            chunk = missing.popleft()
            try:
                call = StateChunkCall(manifest=manifest_hash, index=name, entry=chunk.entry, chunk=chunk.number)
                reply = await transport.call(donor, call, timeout_s=CALL_TIMEOUT_S)
                if [tensor.nbytes for tensor in reply.tensors] != [chunk.size]:
                    raise InvalidMessage(f"a chunk of {chunk.size} bytes was asked for")
                if hashlib.sha256(reply.tensors[0]).digest() != chunk.sha256:
                    raise InvalidMessage(f"a chunk of {index.entries[chunk.entry].name:.100} does not match its hash")
            except CallError as error:
                missing.append(chunk)
                if donor in alive:
                    alive.discard(donor)
                    failed(donor, error)
                return
            offset = chunk.number * STATE_CHUNK_BYTES
            memoryview(buffers[chunk.entry].numpy())[offset : offset + chunk.size] = reply.tensors[0]

    # A worker that finds nothing left may have gone before another one failed: hence the loop.
    while missing and alive:
        async with anyio.create_task_group() as tasks:
            for donor in sorted(alive):
                for _ in range(CHUNKS_IN_FLIGHT):
                    tasks.start_soon(take_chunks, donor)
    if missing:
        return None
    try:
        state = assemble(index, buffers)
    except InvalidMessage as error:
        for donor in sorted(alive):
            failed(donor, error)
        return None
    log.info(
        "downloaded kind=%s stage=%d step=%d bytes=%d donors=%d seconds=%.2f",
        index.kind, index.stage, index.step, sum(sizes), len(donors), anyio.current_time() - begin,
    )  # fmt: skip
    return state

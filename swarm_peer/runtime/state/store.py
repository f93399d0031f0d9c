"""Keeps snapshots of stages in files, and gives them away to other peers.

A snapshot is a stage's state at the beginning of a round, kept so that the run can go back to it. Its tensors have an
index that lists and hashes them (wire/messages.py, StateIndex); both are files, the tensors mapped into memory. Owns
which snapshots are kept. Must not know of training: state_server.py adds the state that is being trained.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.policy.recovery import FIRST_TIMELINE, SnapshotRef, Timeline
from swarm_peer.runtime.context import Clock, Storage, Threads
from swarm_peer.runtime.network.transport import Handler, Reply, pack_fields, unpack_fields
from swarm_peer.runtime.state.index import StageState, assemble, make_index, num_bytes, timeline_of
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.messages import (
    STATE_CHUNK_BYTES,
    Body,
    ListSnapshotsCall,
    ListSnapshotsReply,
    StateChunkCall,
    StateIndex,
    StateIndexCall,
)

log = logging.getLogger(__name__)

# Snapshots of each stage that are kept: a peer may still be downloading the one before the newest.
SNAPSHOTS_KEPT = 2
# Ends the name of the file with a snapshot's index. The file beside it holds the tensors.
INDEX_SUFFIX = ".index"


@dataclass(slots=True)
class StoredState:
    """A state or an update that other peers can download.

    Attributes:
        packed: the index as bytes
        used_at: when a peer last asked for it, on the context's clock
    """

    index: StateIndex
    packed: bytes
    tensors: tuple[memoryview, ...]
    used_at: float = 0.0


class SnapshotStore:
    """Keeps snapshots of any stage as files, and gives them to other peers. Belongs to the event loop's thread.

    Attributes:
        current: this peer's own newest state, without its tensors; None while it has none
    """

    def __init__(self, *, clock: Clock, threads: Threads, storage: Storage):
        """Open the snapshots that are there already: this peer may have kept them before it moved to this stage.

        Args:
            storage: holds the files of snapshots, and no others
        """
        self._clock = clock
        self._threads = threads
        self._storage = storage
        self._stored: dict[bytes, StoredState] = {}  # by the hash of their index
        self._snapshots: dict[SnapshotRef, bytes] = {}  # keys of the snapshots in `_stored`
        self.current: StageState | None = None
        for name in storage.names(INDEX_SUFFIX):
            self._keep(_open_stored(storage, name.removesuffix(INDEX_SUFFIX)))

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {
            StateIndexCall: self.handle_index,
            StateChunkCall: self.handle_chunk,
            ListSnapshotsCall: self.handle_list_snapshots,
        }

    async def store_snapshot(self, stage: int, state: StageState) -> None:
        """Keep a stage's state as a snapshot, and forget the oldest snapshot of that stage."""
        name = _name_of(stage, state.created_at_round)
        stored = await self._threads.run(_write_stored, self._storage, name, stage, state)
        if self.current is not None and self.current.timeline.discarded(state.timeline, state.created_at_round):
            _remove(self._storage, name)
            log.info(
                "snapshot_dropped stage=%d optimizer_step=%d reason=the run has gone back", stage, state.optimizer_step
            )
            return
        self._keep(stored)
        num_bytes = sum(part.nbytes for part in stored.tensors)
        log.info("snapshot_kept stage=%d optimizer_step=%d bytes=%d", stage, state.optimizer_step, num_bytes)
        self._forget_old()

    def _keep(self, stored: StoredState) -> None:
        index, timeline = stored.index, timeline_of(stored.index)
        ref = SnapshotRef(
            index.stage, timeline.creation_round(index.round_number), timeline.optimizer_step_at(index.round_number)
        )
        self._snapshots[ref] = self._remember(stored)

    def snapshots(self) -> list[tuple[SnapshotRef, Timeline]]:
        """Each snapshot that is kept here, and the timeline that it belongs to."""
        return [(ref, timeline_of(self._stored[key].index)) for ref, key in self._snapshots.items()]

    def load_snapshot(self, stage: int, created_at_round: int) -> StageState | None:
        """Copy a snapshot into memory; None if it is not kept here."""
        stored = self._find_snapshot(stage, created_at_round)
        if stored is None:
            return None
        return assemble(stored.index, [torch.tensor(np.frombuffer(part, np.uint8)) for part in stored.tensors])

    def _is_own(self, stage: int) -> bool:
        return False

    def _forget_old(self) -> None:
        """Keep the newest snapshots of each stage.

        A run can go back only to where all stages can. So this peer keeps a snapshot of its own stage for as long as it
        keeps another stage's of the same round.
        """
        for stage in sorted({ref.stage for ref in self._snapshots}, key=self._is_own):
            for oldest in sorted(ref for ref in self._snapshots if ref.stage == stage)[:-SNAPSHOTS_KEPT]:
                paired = any(
                    ref.stage != stage and ref.created_at_round == oldest.created_at_round for ref in self._snapshots
                )
                if not (self._is_own(stage) and paired):
                    self._forget(oldest)

    def _forget(self, ref: SnapshotRef) -> None:
        self._stored.pop(self._snapshots.pop(ref), None)
        _remove(self._storage, _name_of(ref.stage, ref.created_at_round))

    def _forget_given_up(self, timeline: Timeline) -> None:
        for ref, earlier in self.snapshots():
            if timeline.discarded(earlier, ref.created_at_round):
                self._forget(ref)

    def _is_snapshot(self, key: bytes) -> bool:
        return key in self._snapshots.values()

    def _remember(self, stored: StoredState) -> bytes:
        key = hashlib.sha256(stored.packed).digest()
        stored.used_at = self._clock.monotonic_s()
        self._stored[key] = stored
        return key

    async def handle_index(self, caller: str, call: StateIndexCall, tensors: Sequence[memoryview]) -> Reply:
        """Give the index of a state or an update that is kept here."""
        stored = await self._find(call)
        stored.used_at = self._clock.monotonic_s()
        return Reply(tensors=(memoryview(stored.packed),))

    async def _find(self, call: StateIndexCall) -> StoredState:
        stored = None if call.created_at_round is None else self._find_snapshot(call.of_stage, call.created_at_round)
        if stored is None:
            raise NotServing(
                f"no snapshot of stage {call.of_stage} created in round {call.created_at_round} is kept here"
            )
        return stored

    def _find_snapshot(self, stage: int, created_at_round: int) -> StoredState | None:
        for ref, key in self._snapshots.items():
            if (ref.stage, ref.created_at_round) == (stage, created_at_round):
                return self._stored.get(key)
        return None

    async def handle_chunk(self, caller: str, call: StateChunkCall, tensors: Sequence[memoryview]) -> Reply:
        """Give one chunk of a tensor that an index lists."""
        stored = self._stored.get(call.index)
        if stored is None:
            raise NotServing("this is not kept here any more")
        if call.entry >= len(stored.tensors) or call.chunk >= len(stored.index.entries[call.entry].chunks):
            raise InvalidMessage(f"chunk {call.chunk} of tensor {call.entry} of {len(stored.tensors)}")
        stored.used_at = self._clock.monotonic_s()
        start = call.chunk * STATE_CHUNK_BYTES
        return Reply(tensors=(stored.tensors[call.entry][start : start + STATE_CHUNK_BYTES],))

    async def handle_list_snapshots(self, caller: str, call: ListSnapshotsCall, tensors: Sequence[memoryview]) -> Reply:
        """List the snapshots that are kept here, with this peer's round and timeline.

        A peer without a state replies, too: it may have moved here with the last snapshots that are left.
        """
        round_number, timeline = (
            (0, FIRST_TIMELINE) if self.current is None else (self.current.round_number, self.current.timeline)
        )
        if self.current is None and self._snapshots:
            timeline = max(timeline for _, timeline in self.snapshots())
            round_number = max(ref.created_at_round for ref in self._snapshots)
        reply = ListSnapshotsReply(
            round_number=round_number,
            timeline_first_round=timeline.first_round,
            timeline_first_optimizer_step=timeline.first_optimizer_step,
            timeline_created_at_round=timeline.created_at_round,
            snapshots=tuple(sorted(self._snapshots))[-64:],
        )
        return Reply(reply.model_dump())


def _name_of(stage: int, created_at_round: int) -> str:
    """Name of the file with a snapshot's tensors."""
    return f"stage-{stage}-round-{created_at_round}"


def _write_stored(storage: Storage, name: str, stage: int, state: StageState) -> StoredState:
    index, tensors = make_index(stage, "state", state)
    # The old index goes first and the new one comes last, since tensors without an index are not taken for a snapshot.
    storage.remove(name + INDEX_SUFFIX)
    storage.write(name, tensors)
    storage.write(name + INDEX_SUFFIX, [pack_fields(index)])
    return _open_stored(storage, name)


def _open_stored(storage: Storage, name: str) -> StoredState:
    packed = storage.read(name + INDEX_SUFFIX)
    index = unpack_fields(StateIndex, memoryview(packed))
    sizes = [num_bytes(entry) for entry in index.entries]
    mapped = storage.map(name) if sum(sizes) else np.empty(0, np.uint8)
    ends = np.cumsum(sizes)
    parts = tuple(bytes_of(mapped[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    return StoredState(index, packed, parts)


def _remove(storage: Storage, name: str) -> None:
    for file in (name + INDEX_SUFFIX, name):
        storage.remove(file)

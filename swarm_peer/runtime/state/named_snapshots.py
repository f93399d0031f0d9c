"""Keeps snapshots of stages in files, under the names of entries, and gives them and its replicas' states to others.

A snapshot is the state of a stage after one entry of its log, and the next entry's cut names its root. So that entry's
hash is the snapshot's name, and nobody can give another state under it (docs/protocol.md, 'Roots'). Owns which
snapshots are kept. Must not know of training, or who asks for a snapshot and why: snapshots.py does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.model.costs import SNAPSHOTS_KEPT
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed
from swarm_peer.protocol.statements import Snapshot, hash_of
from swarm_peer.runtime.context import Clock, Storage, Threads
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.state.index import StageState, hash_chunks
from swarm_peer.runtime.state.stored import StateSource, StoredState, read_stored, write_stored
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, Body, StateChunkCall, StateIndexCall

log = logging.getLogger(__name__)

# Chunks that are compared with their hashes at once.
MOST_HASHING = 2


@dataclass(frozen=True)
class NamedState:
    """A stage's state, and the entry that names it.

    Attributes:
        committed: the entry with its certificate
        state: with the same as bytes
    """

    committed: Committed
    state: StageState

    @property
    def name(self) -> Snapshot:
        """The name by which peers speak of it."""
        entry = self.committed.entry
        return Snapshot(self.state.optimizer_step, entry.cut.stage, entry.hash, hash_of(entry.cut.base))


@dataclass(frozen=True)
class _Kept:
    """A snapshot in a file.

    Attributes:
        round: that began with it
    """

    stored: StoredState
    round: int


class NamedSnapshots:
    """Keeps snapshots of any stage as files, and gives them to other peers. Belongs to the event loop's thread.

    Attributes:
        sources: the replicas in this peer that give their own states away, by stage
    """

    def __init__(
        self,
        *,
        clock: Clock,
        threads: Threads,
        storage: Storage,
        is_member: Callable[[str], Awaitable[bool]],
        restart: Callable[[], Restart],
    ):
        """Make a store without snapshots.

        Args:
            storage: holds the files of snapshots, and no others
            is_member: whether a caller takes part in the run
            restart: where the run has begun, or begun anew, as far as is known
        """
        self.sources: dict[int, StateSource] = {}
        self._clock = clock
        self._threads = threads
        self._storage = storage
        self._is_member = is_member
        self._restart = restart
        self._kept: dict[Snapshot, _Kept] = {}
        self._writing = anyio.Lock()
        # Anybody may ask for chunks, and the threads have other work as well.
        self._hashing = anyio.Semaphore(MOST_HASHING)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {StateIndexCall: self.handle_index, StateChunkCall: self.handle_chunk}

    # --- which are kept

    @property
    def names(self) -> frozenset[Snapshot]:
        """The snapshots that are kept here, and of no time that the run has gone back from."""
        return frozenset(name for name, kept in self._kept.items() if not self._is_given_up(name, kept.round))

    @property
    def newest_round(self) -> int:
        """The newest round that began with one of them; 0 if there is none."""
        return max((self._kept[name].round for name in self.names), default=0)

    def _is_given_up(self, name: Snapshot, round_number: int) -> bool:
        restart = self._restart()
        return round_number < restart.first_round and name.optimizer_step > restart.optimizer_step

    async def keep(self, named: NamedState) -> None:
        """Keep a snapshot, and forget the oldest ones of its stage.

        Raises:
            OSError: there is no room for it
            ValidationError: it does not fit into an index
        """
        name, round_number = named.name, named.committed.entry.cut.round
        async with self._writing:
            if name in self._kept:
                return
            stored = await self._threads.run(write_stored, self._storage, _file_of(name), name.stage, named.state)
            stored.used_at = self._clock.monotonic_s()
            self._kept[name] = _Kept(stored, round_number)
        if not self._is_given_up(name, round_number):
            text = "snapshot_kept stage=%d optimizer_step=%d bytes=%d"
            log.info(text, name.stage, name.optimizer_step, stored.num_bytes)
        self._forget_old()

    def _forget_old(self) -> None:
        """Keep the newest snapshots of each stage, and none that the run can go back to no more.

        A run can go back only to where all stages can. So this peer keeps a snapshot of its own stage for as long as it
        keeps another stage's of the same step. Those of other stages it keeps as long as it has none of its own that
        are newer, since they may be of a stage that it has just left: the only ones, perhaps. Where the run begins
        anew, one state gets another name.
        """
        for name in [name for name, kept in self._kept.items() if self._is_given_up(name, kept.round)]:
            self.forget(name, "the run has gone back")
        for stage in sorted({name.stage for name in self._kept}, key=self.sources.__contains__):
            for step in self._steps(stage)[:-SNAPSHOTS_KEPT]:
                is_paired = any(name.stage != stage and name.optimizer_step == step for name in self._kept)
                if not (stage in self.sources and is_paired):
                    self._forget_step(stage, step)
        own = sorted({name.optimizer_step for name in self._kept if name.stage in self.sources})
        for name in [name for name in self._kept if name.stage not in self.sources]:
            if len(own) >= SNAPSHOTS_KEPT and name.optimizer_step < own[0]:
                self.forget(name)

    def _steps(self, stage: int) -> list[int]:
        return sorted({name.optimizer_step for name in self._kept if name.stage == stage})

    def _forget_step(self, stage: int, step: int) -> None:
        for name in [name for name in self._kept if (name.stage, name.optimizer_step) == (stage, step)]:
            self.forget(name)

    def forget(self, name: Snapshot, reason: str = "") -> None:
        """Keep a snapshot no longer, if it is kept here."""
        if self._kept.pop(name, None) is None:
            return
        if reason:
            text = "snapshot_dropped stage=%d optimizer_step=%d reason=%s"
            log.info(text, name.stage, name.optimizer_step, reason)
        try:
            self._storage.remove(_file_of(name))
        except OSError as error:
            text = "snapshot_not_removed stage=%d optimizer_step=%d reason=%s: check the disk"
            log.warning(text, name.stage, name.optimizer_step, error)

    def find(self, stage: int, entry: str) -> Snapshot | None:
        """The snapshot of a stage that an entry names; None if it is not kept here."""
        return next((name for name in self.names if (name.stage, name.entry) == (stage, entry)), None)

    async def load(self, name: Snapshot) -> StageState | None:
        """Copy a snapshot into memory; None if it is not kept here, or its file is not what was written."""
        if name not in self.names:
            return None
        stored = self._kept[name].stored
        state = await self._threads.run(read_stored, stored)
        if state is None:
            self._forget_damaged(name, stored)
        return state

    def _forget_damaged(self, name: Snapshot, damaged: StoredState) -> None:
        """Forget a snapshot whose file has changed, unless it has been forgotten or stored anew since."""
        kept = self._kept.get(name)
        if kept is None or kept.stored is not damaged:
            return
        text = "snapshot_damaged stage=%d optimizer_step=%d reason=its file is not what was written: check the disk"
        log.warning(text, name.stage, name.optimizer_step)
        self.forget(name)

    # --- calls of others

    async def handle_index(self, caller: str, call: StateIndexCall, tensors: Sequence[memoryview]) -> Reply:
        """Give the index of a state or an update that is kept here.

        Anybody may have a snapshot, which is a file. A replica's newest state and its updates take memory for as long
        as they are downloaded, so they are for members of the run.

        Raises:
            NotServing: it is not here, or not for the caller
        """
        is_snapshot = call.entry != "" or call.optimizer_step is not None
        stored = self._find_asked(call) if is_snapshot else await self._own(caller, call)
        stored.used_at = self._clock.monotonic_s()
        return Reply(tensors=(memoryview(stored.packed),))

    def _find_asked(self, call: StateIndexCall) -> StoredState:
        found = [
            name
            for name in self.names
            if name.stage == call.of_stage
            and call.entry in ("", name.entry)
            and call.optimizer_step in (None, name.optimizer_step)
            and call.min_round <= self._kept[name].round
        ]
        if not found or call.kind != "state":
            wanted = call.entry or f"optimizer step {call.optimizer_step}"
            raise NotServing(f"no snapshot {wanted} of stage {call.of_stage} is kept here")
        # Where the run has begun anew with a state, the later name is the one of present entries.
        return self._kept[max(found, key=lambda name: self._kept[name].round)].stored

    async def _own(self, caller: str, call: StateIndexCall) -> StoredState:
        if not await self._is_member(caller):
            raise NotServing("this peer knows of no place of yours in the run; snapshots are for everybody")
        source = self.sources.get(call.of_stage)
        if source is None:
            raise NotServing(f"this peer serves stages {sorted(self.sources)}, not {call.of_stage}")
        return await source.find(call)

    async def handle_chunk(self, caller: str, call: StateChunkCall, tensors: Sequence[memoryview]) -> Reply:
        """Give one chunk of a tensor that an index lists.

        Raises:
            NotServing: it is not here any more
            InvalidMessage: there is no such chunk
        """
        # A replica's own state first, which may also be a snapshot: it stays for as long as it is asked for.
        in_memory = (source.stored[call.index] for source in self.sources.values() if call.index in source.stored)
        stored = next(in_memory, None)
        name = None
        if stored is None:
            name = next((name for name, kept in self._kept.items() if kept.stored.key == call.index), None)
            if name is None:
                raise NotServing("this is not kept here any more")
            stored = self._kept[name].stored
        if call.entry >= len(stored.tensors) or call.chunk >= len(stored.index.entries[call.entry].chunks):
            raise InvalidMessage(f"chunk {call.chunk} of tensor {call.entry} of {len(stored.tensors)}")
        stored.used_at = self._clock.monotonic_s()
        start = call.chunk * STATE_CHUNK_BYTES
        chunk = stored.tensors[call.entry][start : start + STATE_CHUNK_BYTES]
        if name is not None:
            async with self._hashing:
                hashes = await self._threads.run(hash_chunks, chunk)
            if hashes != stored.index.entries[call.entry].chunks[call.chunk : call.chunk + 1]:
                self._forget_damaged(name, stored)
                raise NotServing("this is not kept here any more: its file has changed")
        return Reply(tensors=(chunk,))


def _file_of(name: Snapshot) -> str:
    """Name of the file with a snapshot's tensors."""
    return f"stage-{name.stage}-step-{name.optimizer_step}-{name.entry}"

"""Keeps snapshots of stages in files, and gives them away to other peers.

A snapshot is a stage's state at the beginning of a round, kept so that the run can go back to it. Its tensors have an
index that lists and hashes them (wire/messages.py, StateIndex), and are in a file, mapped into memory. Owns which
snapshots are kept. Must not know of training: state_server.py gives the state that is being trained.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.policy.recovery import MOST_LISTED, SNAPSHOTS_KEPT, SnapshotRef, Timeline
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.context import Clock, Storage, Threads
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.state.index import StageState, hash_chunks, timeline_of
from swarm_peer.runtime.state.stored import StateSource, StoredState, read_stored, write_stored
from swarm_peer.wire.messages import (
    STATE_CHUNK_BYTES,
    Body,
    ListSnapshotsCall,
    ListSnapshotsReply,
    StateChunkCall,
    StateIndexCall,
)

log = logging.getLogger(__name__)

# Chunks that are compared with their hashes at once.
MOST_HASHING = 2
GONE_ON = "stage-mates went on without this peer"


class SnapshotStore:
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
    ):
        """Make a store without snapshots.

        Args:
            storage: holds the files of snapshots, and no others
            is_member: whether a caller takes part in the run
        """
        self.sources: dict[int, StateSource] = {}
        self._clock = clock
        self._threads = threads
        self._storage = storage
        self._is_member = is_member
        self._snapshots: dict[SnapshotRef, StoredState] = {}
        self._being_written: dict[object, SnapshotRef] = {}  # without those that have been given up
        # Anybody may ask for chunks, and the threads have other work as well.
        self._hashing = anyio.Semaphore(MOST_HASHING)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {
            StateIndexCall: self.handle_index,
            StateChunkCall: self.handle_chunk,
            ListSnapshotsCall: self.handle_list_snapshots,
        }

    @property
    def _newest_step(self) -> StepState:
        """Where the replica stands that is in the newest round; the phase is EMPTY if none has weights."""
        steps = [source.step for source in self.sources.values() if source.step.phase is not Phase.EMPTY]
        return max(steps, key=lambda step: step.round_number, default=StepState())

    async def store_snapshot(self, stage: int, state: StageState) -> None:
        """Keep a stage's state as a snapshot, and forget the oldest snapshot of that stage."""
        ref = SnapshotRef(stage, state.created_at_round, state.optimizer_step)
        writing = object()
        self._being_written[writing] = ref
        try:
            stored = await self._threads.run(write_stored, self._storage, _name_of(ref), stage, state)
            is_given_up = writing not in self._being_written
        finally:
            self._being_written.pop(writing, None)
        stored.used_at = self._clock.monotonic_s()
        self._snapshots[ref] = stored
        if is_given_up:
            self.forget(ref, GONE_ON)
            return
        log.info("snapshot_kept stage=%d optimizer_step=%d bytes=%d", stage, state.optimizer_step, stored.num_bytes)
        self._forget_old()

    def snapshots(self) -> list[tuple[SnapshotRef, Timeline]]:
        """Each snapshot that is kept here and that the run has not given up, with the timeline that it belongs to."""
        return [
            (ref, timeline_of(stored.index)) for ref, stored in self._snapshots.items() if not self._is_given_up(ref)
        ]

    def _is_given_up(self, ref: SnapshotRef) -> bool:
        earlier = timeline_of(self._snapshots[ref].index)
        return self._newest_step.timeline.discarded(earlier, ref.created_at_round)

    def give_up(self, after: int, until: int) -> None:
        """Forget the snapshots of some steps, also what is being written: the run has gone on from others.

        The copies of other stages' snapshots go, too: they are of the same part of the run.

        Args:
            after: the last optimizer step whose snapshots stay
            until: the last one whose snapshots go
        """
        steps = range(after + 1, until + 1)
        self._being_written = {
            writing: ref for writing, ref in self._being_written.items() if ref.optimizer_step not in steps
        }
        for ref in [known for known in self._snapshots if known.optimizer_step in steps]:
            self.forget(ref, GONE_ON)

    async def load_snapshot(self, ref: SnapshotRef) -> StageState | None:
        """Copy a snapshot into memory; None if it is not kept here, or its file is not what was written."""
        if ref not in self._snapshots or self._is_given_up(ref):
            return None
        stored = self._snapshots[ref]
        state = await self._threads.run(read_stored, stored)
        if state is None:
            self._forget_damaged(ref, stored)
        return state

    def _forget_damaged(self, ref: SnapshotRef, damaged: StoredState) -> None:
        """Forget a snapshot whose file has changed, unless it has been forgotten or stored anew since."""
        if self._snapshots.get(ref) is not damaged:
            return
        text = "snapshot_damaged stage=%d optimizer_step=%d reason=its file is not what was written: check the disk"
        log.warning(text, ref.stage, ref.optimizer_step)
        self.forget(ref)

    def _forget_old(self) -> None:
        """Keep the newest snapshots of each stage, and none that the run can go back to no more.

        A run can go back only to where all stages can. So this peer keeps a snapshot of its own stage for as long as it
        keeps another stage's of the same round. Those of other stages it keeps as long as it has none of its own that
        are newer, since they may be of a stage that it has just left: the only ones, perhaps.
        """
        for ref in [known for known in self._snapshots if self._is_given_up(known)]:
            self.forget(ref, "the run has gone back")
        for stage in sorted({ref.stage for ref in self._snapshots}, key=self.sources.__contains__):
            for oldest in sorted(ref for ref in self._snapshots if ref.stage == stage)[:-SNAPSHOTS_KEPT]:
                paired = any(
                    ref.stage != stage and ref.created_at_round == oldest.created_at_round for ref in self._snapshots
                )
                if not (stage in self.sources and paired):
                    self.forget(oldest)
        own = sorted(ref.created_at_round for ref in self._snapshots if ref.stage in self.sources)
        others = [ref for ref in self._snapshots if ref.stage not in self.sources]
        for ref in others:
            if len(own) >= SNAPSHOTS_KEPT and ref.created_at_round < own[0]:
                self.forget(ref)

    def forget(self, ref: SnapshotRef, reason: str = "") -> None:
        """Keep a snapshot no longer, if it is kept here."""
        if self._snapshots.pop(ref, None) is None:
            return
        if reason:
            text = "snapshot_dropped stage=%d optimizer_step=%d reason=%s"
            log.info(text, ref.stage, ref.optimizer_step, reason)
        try:
            self._storage.remove(_name_of(ref))
        except OSError as error:
            text = "snapshot_not_removed stage=%d optimizer_step=%d reason=%s: check the disk"
            log.warning(text, ref.stage, ref.optimizer_step, error)

    async def handle_index(self, caller: str, call: StateIndexCall, tensors: Sequence[memoryview]) -> Reply:
        """Give the index of a state or an update that is kept here.

        Anybody may have a snapshot, which is a file. A replica's newest state and its updates take memory for as long
        as they are downloaded, so they are for members of the run.
        """
        # Looked up for snapshots, too: so a coordinator that asks for one becomes known here.
        is_member = await self._is_member(caller)
        if call.created_at_round is None and not is_member:
            raise NotServing("no announcement of this peer has been seen here yet; snapshots are for everybody")
        stored = await self._find(call)
        stored.used_at = self._clock.monotonic_s()
        return Reply(tensors=(memoryview(stored.packed),))

    async def _find(self, call: StateIndexCall) -> StoredState:
        if call.created_at_round is None:
            source = self.sources.get(call.of_stage)
            if source is None:
                raise NotServing(f"this peer serves stages {sorted(self.sources)}, not {call.of_stage}")
            return await source.find(call)
        stored = self._find_snapshot(call.of_stage, call.created_at_round)
        if stored is None:
            raise NotServing(
                f"no snapshot of stage {call.of_stage} created in round {call.created_at_round} is kept here"
            )
        return stored

    def _find_snapshot(self, stage: int, created_at_round: int) -> StoredState | None:
        wanted = (ref for ref, _ in self.snapshots() if (ref.stage, ref.created_at_round) == (stage, created_at_round))
        ref = next(wanted, None)
        return None if ref is None else self._snapshots[ref]

    async def handle_chunk(self, caller: str, call: StateChunkCall, tensors: Sequence[memoryview]) -> Reply:
        """Give one chunk of a tensor that an index lists."""
        # A replica's own state first, which may also be a snapshot: it stays for as long as it is asked for.
        in_memory = (source.stored[call.index] for source in self.sources.values() if call.index in source.stored)
        stored = next(in_memory, None)
        ref = None
        if stored is None:
            ref = next((ref for ref, known in self._snapshots.items() if known.key == call.index), None)
            if ref is None:
                raise NotServing("this is not kept here any more")
            stored = self._snapshots[ref]
        if call.entry >= len(stored.tensors) or call.chunk >= len(stored.index.entries[call.entry].chunks):
            raise InvalidMessage(f"chunk {call.chunk} of tensor {call.entry} of {len(stored.tensors)}")
        stored.used_at = self._clock.monotonic_s()
        start = call.chunk * STATE_CHUNK_BYTES
        chunk = stored.tensors[call.entry][start : start + STATE_CHUNK_BYTES]
        if ref is not None:
            async with self._hashing:
                hashes = await self._threads.run(hash_chunks, chunk)
            if hashes != stored.index.entries[call.entry].chunks[call.chunk : call.chunk + 1]:
                self._forget_damaged(ref, stored)
                raise NotServing("this is not kept here any more: its file has changed")
        return Reply(tensors=(chunk,))

    async def handle_list_snapshots(self, caller: str, call: ListSnapshotsCall, tensors: Sequence[memoryview]) -> Reply:
        """List the snapshots that are kept here, with this peer's round and timeline.

        A peer without a state replies, too: it may have moved here with the last snapshots that are left.
        """
        step, known = self._newest_step, self.snapshots()
        round_number, timeline = step.round_number, step.timeline
        if step.phase is Phase.EMPTY and known:
            timeline = max(timeline for _, timeline in known)
            round_number = max(ref.created_at_round for ref, _ in known)
        reply = ListSnapshotsReply(
            round_number=round_number,
            timeline_first_round=timeline.first_round,
            timeline_first_optimizer_step=timeline.first_optimizer_step,
            timeline_created_at_round=timeline.created_at_round,
            snapshots=tuple(sorted(ref for ref, _ in known))[-MOST_LISTED:],
        )
        return Reply(reply.model_dump())


def _name_of(ref: SnapshotRef) -> str:
    """Name of the file with a snapshot's tensors."""
    return f"stage-{ref.stage}-round-{ref.created_at_round}"

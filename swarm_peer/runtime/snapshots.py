"""What a peer gives away of states: its own newest one, the updates after it, and the snapshots that it keeps.

All of them are tensors with an index that lists and hashes them (wire/messages.py, StateIndex). A newcomer downloads a
state and then replays the updates of the steps that passed meanwhile, so those are kept while somebody downloads.
Snapshots for recovery are files, mapped into memory.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import numpy as np
import torch

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.recovery import FIRST_ORIGIN, Kept, Origin
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.state_index import StageState, assemble, make_index, num_bytes, origin_of
from swarm_peer.runtime.transport import Handler, Reply, pack_fields, unpack_fields
from swarm_peer.wire.messages import (
    STATE_CHUNK_BYTES,
    Body,
    KeptCall,
    KeptReply,
    StateChunkCall,
    StateIndex,
    StateIndexCall,
)

log = logging.getLogger(__name__)

# A donor waits this long for the step that it is asked for; the caller asks again if it needs more.
WAIT_FOR_STEP_S = 10.0
# What nobody has asked for in this time is dropped: whoever was downloading it is gone.
RETAIN_S = 60.0
# Averaging costs a peer more bandwidth per step than an update, and a state is as large as three of them: who takes
# more than some steps for it could not keep up with averaging either.
MAX_UPDATES_RETAINED = 16
# Whole states in memory for those who download: one, and a newer one for who cannot do with it.
MAX_STATES_HELD = 2
# A state that so many updates have been made since is caught up with before those are dropped.
MAX_STEPS_BEHIND = MAX_UPDATES_RETAINED // 2
# Of each stage: somebody may still be using the one before.
SNAPSHOTS_KEPT = 2
# Of a file that lists and hashes the tensors in the one beside it.
INDEX_SUFFIX = ".index"


@dataclass(slots=True)
class _Offer:
    """Something that can be downloaded, for `index` describes it."""

    index: StateIndex
    packed: bytes
    tensors: tuple[memoryview, ...]
    used_at: float = field(default_factory=time.monotonic)


class SnapshotKeeper:
    """Keeps snapshots and gives them away. Belongs to the event loop's thread.

    Args:
        folder: of the snapshots' files; those of this peer's life before, in another stage, may be there

    Attributes:
        current: the state that this peer may give away, without its tensors; None while it has none
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._offers: dict[bytes, _Offer] = {}  # by the hash of their index
        self._kept: dict[Kept, bytes] = {}  # offers that are snapshots for recovery
        self.current: StageState | None = None
        for path in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
            offer = _open_offer(path)
            self._keep(offer)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {StateIndexCall: self.handle_index, StateChunkCall: self.handle_chunk, KeptCall: self.handle_kept}

    async def keep(self, stage: int, state: StageState) -> None:
        """Keep a stage's state as a file, and forget the oldest one of that stage."""
        path = self._path(stage, state.born)
        offer = await anyio.to_thread.run_sync(_write_offer, stage, state, path)
        if self.current is not None and self.current.origin.gave_up(state.origin, state.born):
            _remove(path)
            log.info("snapshot_dropped stage=%d updates=%d reason=the run has gone back", stage, state.updates)
            return
        self._keep(offer)
        log.info("snapshot_kept stage=%d updates=%d bytes=%d", stage, state.updates, path.stat().st_size)
        self._forget_old()

    def _keep(self, offer: _Offer) -> None:
        index, origin = offer.index, origin_of(offer.index)
        known = Kept(index.stage, origin.born_at(index.step), origin.updates_at(index.step))
        self._kept[known] = self._offer(offer)

    def _path(self, stage: int, born: int) -> Path:
        return self._folder / f"stage-{stage}-step-{born}"

    def kept(self) -> list[tuple[Kept, Origin]]:
        """Each snapshot that is kept here, and the line that it belongs to."""
        return [(known, origin_of(self._offers[key].index)) for known, key in self._kept.items()]

    def kept_state(self, stage: int, born: int) -> StageState | None:
        """A snapshot that is kept here; its tensors are copies."""
        offer = self._find_kept(stage, born)
        if offer is None:
            return None
        return assemble(offer.index, [torch.tensor(np.frombuffer(part, np.uint8)) for part in offer.tensors])

    def _is_own(self, stage: int) -> bool:
        return False

    def _forget_old(self) -> None:
        """Keep the newest of each stage. A run can go back only to where all stages can: so to each snapshot of another
        stage that is kept, that of the own stage is, too."""
        for stage in sorted({known.stage for known in self._kept}, key=self._is_own):
            for oldest in sorted(known for known in self._kept if known.stage == stage)[:-SNAPSHOTS_KEPT]:
                paired = any(known.stage != stage and known.born == oldest.born for known in self._kept)
                if not (self._is_own(stage) and paired):
                    self._forget(oldest)

    def _forget(self, known: Kept) -> None:
        self._offers.pop(self._kept.pop(known), None)
        _remove(self._path(known.stage, known.born))

    def _forget_given_up(self, origin: Origin) -> None:
        for known, line in self.kept():
            if origin.gave_up(line, known.born):
                self._forget(known)

    def _is_kept(self, key: bytes) -> bool:
        return key in self._kept.values()

    def _offer(self, offer: _Offer) -> bytes:
        key = hashlib.sha256(offer.packed).digest()
        self._offers[key] = offer
        return key

    async def handle_index(self, caller: str, call: StateIndexCall, tensors: Sequence[memoryview]) -> Reply:
        offer = await self._find(call)
        offer.used_at = time.monotonic()
        return Reply(tensors=(memoryview(offer.packed),))

    async def _find(self, call: StateIndexCall) -> _Offer:
        offer = None if call.born is None else self._find_kept(call.of_stage, call.born)
        if offer is None:
            raise NotServing(f"no snapshot of stage {call.of_stage} of step {call.born} is kept here")
        return offer

    def _find_kept(self, stage: int, born: int) -> _Offer | None:
        keys = (key for known, key in self._kept.items() if (known.stage, known.born) == (stage, born))
        return self._offers.get(next(keys, b""))

    async def handle_chunk(self, caller: str, call: StateChunkCall, tensors: Sequence[memoryview]) -> Reply:
        offer = self._offers.get(call.index)
        if offer is None:
            raise NotServing("this is not kept here any more")
        if call.entry >= len(offer.tensors) or call.chunk >= len(offer.index.entries[call.entry].chunks):
            raise InvalidMessage(f"chunk {call.chunk} of tensor {call.entry} of {len(offer.tensors)}")
        offer.used_at = time.monotonic()
        start = call.chunk * STATE_CHUNK_BYTES
        return Reply(tensors=(offer.tensors[call.entry][start : start + STATE_CHUNK_BYTES],))

    async def handle_kept(self, caller: str, call: KeptCall, tensors: Sequence[memoryview]) -> Reply:
        """Also of a peer that has no state yet: it may have moved, with the last snapshots that there are."""
        step, origin = (0, FIRST_ORIGIN) if self.current is None else (self.current.step, self.current.origin)
        if self.current is None and self._kept:
            origin = max(line for _, line in self.kept())
            step = max(known.born for known in self._kept)
        reply = KeptReply(
            step=step,
            origin_step=origin.step,
            origin_updates=origin.updates,
            origin_born=origin.born,
            kept=tuple(sorted(self._kept))[-64:],
        )
        return Reply(reply.model_dump())


class StateDonor(SnapshotKeeper):
    """Gives away this peer's own state and updates as well."""

    def __init__(self, trainer: StageTrainer, compute: ComputeThread, changed: Signal, stage: int, folder: Path):
        super().__init__(folder)
        self._trainer = trainer
        self._compute = compute
        self._changed = changed
        self._stage = stage
        self._lock = anyio.Lock()
        self._updates: dict[int, StageState] = {}  # gradients of the steps that a downloading newcomer misses
        self._update_ids: dict[int, bytes] = {}

    def _is_own(self, stage: int) -> bool:
        return stage == self._stage

    def enter(self, step: int, lineage: str, origin: Origin, ledger: bytes) -> None:
        """The state that the trainer holds now is that of `step`."""
        if self.current is not None and origin != self.current.origin:
            self._updates.clear()
            self._update_ids.clear()
        # A peer that has moved here may come with snapshots of a line that the run has left since.
        self._forget_given_up(origin)
        self.current = StageState(step, lineage, {}, origin, ledger)
        self._drop_unused()
        self._changed.notify()

    def retain_update(self, gradients: Sequence[torch.Tensor], lineage: str, ledger: bytes) -> None:
        """Keep the update that ends the current step, if somebody is downloading the state before it."""
        assert self.current is not None
        self._drop_unused()
        if not self._held():
            self._updates.clear()
            self._update_ids.clear()
            return
        tensors = {f"{number:05d}": gradient.clone() for number, gradient in enumerate(gradients)}
        self._updates[self.current.step] = StageState(self.current.step, lineage, tensors, self.current.origin, ledger)
        while len(self._updates) > MAX_UPDATES_RETAINED:
            oldest = min(self._updates)
            del self._updates[oldest]
            self._offers.pop(self._update_ids.pop(oldest, b""), None)

    async def keep_own(self, step: int) -> bool:
        """Keep a snapshot of this peer's own state, if it is that of `step` now."""
        async with self._lock:
            state = await self._compute.run(Priority.STEP, self._take)
        if state is None or state.step != step:
            return False
        await self.keep(self._stage, state)
        return True

    async def _find(self, call: StateIndexCall) -> _Offer:
        if call.born is not None:
            return await super()._find(call)
        if call.of_stage != self._stage:
            raise NotServing(f"this peer serves stage {self._stage}, not {call.of_stage}")
        return await (self._newest(call.min_step) if call.kind == "state" else self._update(call.min_step))

    def _drop_unused(self) -> None:
        oldest = time.monotonic() - RETAIN_S
        self._offers = {
            key: offer for key, offer in self._offers.items() if offer.used_at >= oldest or self._is_kept(key)
        }

    def _held(self) -> dict[bytes, _Offer]:
        """Whole states in memory."""
        return {
            key: offer for key, offer in self._offers.items() if offer.index.kind == "state" and not self._is_kept(key)
        }

    def _find_held(self, min_step: int) -> _Offer | None:
        """Of as many as may be held, one to be caught up with: a newer one would take one away that is in use."""
        assert self.current is not None
        held = self._held().values()
        if len(held) < MAX_STATES_HELD:
            return None
        origin, oldest = self.current.origin, max(min_step, self.current.step - MAX_STEPS_BEHIND)
        found = [offer for offer in held if offer.index.step >= oldest and origin_of(offer.index) == origin]
        return max(found, key=lambda offer: offer.index.step, default=None)

    def _make_room(self) -> None:
        """For one more: what was not used for longest goes."""
        held = self._held()
        for key in sorted(held, key=lambda key: held[key].used_at, reverse=True)[MAX_STATES_HELD - 1 :]:
            del self._offers[key]

    async def _newest(self, min_step: int) -> _Offer:
        with anyio.move_on_after(WAIT_FOR_STEP_S):
            await self._changed.wait_for(lambda: self.current is not None and self.current.step >= min_step)
        async with self._lock:
            while True:
                if self.current is None or self.current.step < min_step:
                    step = None if self.current is None else self.current.step
                    raise NotServing(f"this peer has the state of step {step}, not of {min_step}")
                step = self.current.step
                for offer in self._offers.values():
                    if (offer.index.stage, offer.index.kind, offer.index.step) == (self._stage, "state", step):
                        return offer
                held = self._find_held(min_step)
                if held is not None:
                    return held
                self._make_room()
                state = await self._compute.run(Priority.STEP, self._take)
                if state is None:
                    await self._changed.wait_for(lambda left=step: self.current and self.current.step != left)  # type: ignore[misc]
                    continue
                offer = await anyio.to_thread.run_sync(_make_offer, self._stage, "state", state)
                self._offer(offer)
                return offer

    async def _update(self, step: int) -> _Offer:
        state = self._updates.get(step)
        if state is None:
            raise NotServing(f"the update of step {step} is not kept here")
        async with self._lock:
            if self._update_ids.get(step) not in self._offers:
                offer = await anyio.to_thread.run_sync(_make_offer, self._stage, "update", state)
                self._update_ids[step] = self._offer(offer)
        offer = self._offers.get(self._update_ids[step])  # type: ignore[assignment]
        if offer is None:
            raise NotServing(f"the update of step {step} is not kept here any more")
        return offer

    def _take(self) -> StageState | None:
        """In the compute thread. None while the weights are an update ahead of what the event loop knows."""
        current = self.current
        if current is None or self._trainer.step != current.updates:
            return None
        return StageState(current.step, current.lineage, self._trainer.state(), current.origin, current.ledger)


def _make_offer(stage: int, kind: Literal["state", "update"], state: StageState) -> _Offer:
    index, tensors = make_index(stage, kind, state)
    return _Offer(index, pack_fields(index), tensors)


def _write_offer(stage: int, state: StageState, path: Path) -> _Offer:
    index, tensors = make_index(stage, "state", state)
    partial = path.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(INDEX_SUFFIX).unlink(missing_ok=True)
    with partial.open("wb") as file:
        for data in tensors:
            file.write(data)
    partial.replace(path)
    # The index last, and gone before: a snapshot without one is none.
    partial.write_bytes(pack_fields(index))
    partial.replace(path.with_suffix(INDEX_SUFFIX))
    return _open_offer(path.with_suffix(INDEX_SUFFIX))


def _open_offer(index_path: Path) -> _Offer:
    packed = index_path.read_bytes()
    index = unpack_fields(StateIndex, memoryview(packed))
    sizes = [num_bytes(entry) for entry in index.entries]
    mapped = np.memmap(index_path.with_suffix(""), np.uint8, "r") if sum(sizes) else np.empty(0, np.uint8)
    ends = np.cumsum(sizes)
    parts = tuple(memoryview(mapped[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    return _Offer(index, packed, parts)


def _remove(path: Path) -> None:
    for file in (path.with_suffix(INDEX_SUFFIX), path):
        file.unlink(missing_ok=True)

"""Gives the state that this peer trains to other peers, and the updates that a newcomer has to apply to it.

A newcomer downloads a state and then applies the updates of the rounds that passed meanwhile, so this peer keeps those
for as long as a state is being downloaded. Owns which states and updates are kept in memory, and for how long.
Must not know when a round ends, or who asks for a state and why. Snapshots are given away by store.py; joining.py is
the other side, which downloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import torch

from swarm_peer.errors import NotServing
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.recovery import Timeline
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import pack_fields
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority
from swarm_peer.runtime.state.index import StageState, make_index, timeline_of
from swarm_peer.runtime.state.store import SnapshotStore, StoredState
from swarm_peer.wire.messages import StateIndexCall

# A peer waits this long for the round that a caller asks for. The caller asks again if that is not enough.
WAIT_FOR_ROUND_S = 10.0
# A state or update is dropped after this long without a request: the peer that was downloading it is gone.
RETAIN_S = 60.0
# A state is as large as three updates, and averaging takes more bandwidth per round than one update does. So a peer
# that needs more rounds than this for a state could not keep up with averaging either.
MAX_UPDATES_RETAINED = 16
# Whole states in memory for peers that download: one, and one newer state, for peers that the first is too old for.
MAX_STATES_HELD = 2
# A held state at most this many rounds old is given away again: there is time to catch up before the updates are
# dropped.
MAX_ROUNDS_BEHIND = MAX_UPDATES_RETAINED // 2


class StateServer(SnapshotStore):
    """Gives this peer's own state, its updates and its snapshots to other peers. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, trainer: StageTrainer, device_thread: DeviceThread):
        super().__init__(clock=context.clock, threads=context.threads, storage=context.storage)
        self._trainer = trainer
        self._device_thread = device_thread
        self._changed = context.changed
        self._stage = trainer.spec.index
        self._lock = anyio.Lock()
        self._updates: dict[int, StageState] = {}  # by round; a newcomer that is downloading needs them next
        self._update_ids: dict[int, bytes] = {}  # hashes of the indexes of updates that were asked for, by round

    def _is_own(self, stage: int) -> bool:
        return stage == self._stage

    def enter(self, round_number: int, history_hash: str, timeline: Timeline, ledger: bytes) -> None:
        """Begin a round with the state that the trainer holds now."""
        if self.current is not None and timeline != self.current.timeline:
            self._updates.clear()
            self._update_ids.clear()
        # A peer that has moved here may have brought snapshots that this timeline has given up.
        self._forget_given_up(timeline)
        self.current = StageState(round_number, history_hash, {}, timeline, ledger)
        self._drop_unused()
        self._changed.notify()

    def retain_update(self, gradients: Sequence[torch.Tensor], history_hash: str, ledger: bytes) -> None:
        """Keep the update that ends the present round, if a peer is downloading an earlier state."""
        assert self.current is not None
        self._drop_unused()
        if not self._held():
            self._updates.clear()
            self._update_ids.clear()
            return
        tensors = {f"{number:05d}": gradient.clone() for number, gradient in enumerate(gradients)}
        self._updates[self.current.round_number] = StageState(
            self.current.round_number, history_hash, tensors, self.current.timeline, ledger
        )
        while len(self._updates) > MAX_UPDATES_RETAINED:
            oldest = min(self._updates)
            del self._updates[oldest]
            self._stored.pop(self._update_ids.pop(oldest, b""), None)

    async def take_snapshot(self, round_number: int) -> bool:
        """Keep a snapshot of this peer's own state. Returns False if the round is over already."""
        async with self._lock:
            state = await self._device_thread.run(Priority.STEP, self._take)
        if state is None or state.round_number != round_number:
            return False
        await self.store_snapshot(self._stage, state)
        return True

    async def _find(self, call: StateIndexCall) -> StoredState:
        if call.created_at_round is not None:
            return await super()._find(call)
        if call.of_stage != self._stage:
            raise NotServing(f"this peer serves stage {self._stage}, not {call.of_stage}")
        return await (self._newest(call.min_round) if call.kind == "state" else self._update(call.min_round))

    def _drop_unused(self) -> None:
        oldest = self._clock.monotonic_s() - RETAIN_S
        self._stored = {
            key: stored for key, stored in self._stored.items() if stored.used_at >= oldest or self._is_snapshot(key)
        }

    def _held(self) -> dict[bytes, StoredState]:
        """The whole states in memory, by the hash of their index."""
        return {
            key: stored
            for key, stored in self._stored.items()
            if stored.index.kind == "state" and not self._is_snapshot(key)
        }

    def _find_held(self, min_round: int) -> StoredState | None:
        """If no more states may be held, the newest one that a newcomer can catch up from.

        Making a still newer one would drop a state that a peer may be downloading.
        """
        assert self.current is not None
        held = self._held().values()
        if len(held) < MAX_STATES_HELD:
            return None
        timeline, oldest = self.current.timeline, max(min_round, self.current.round_number - MAX_ROUNDS_BEHIND)
        found = [
            stored for stored in held if stored.index.round_number >= oldest and timeline_of(stored.index) == timeline
        ]
        return max(found, key=lambda stored: stored.index.round_number, default=None)

    def _make_room(self) -> None:
        """Drop the states that were not used for longest, so that one more may be held."""
        held = self._held()
        for key in sorted(held, key=lambda key: held[key].used_at, reverse=True)[MAX_STATES_HELD - 1 :]:
            del self._stored[key]

    async def _newest(self, min_round: int) -> StoredState:
        with anyio.move_on_after(WAIT_FOR_ROUND_S):
            await self._changed.wait_for(lambda: self.current is not None and self.current.round_number >= min_round)
        async with self._lock:
            while True:
                if self.current is None or self.current.round_number < min_round:
                    round_number = None if self.current is None else self.current.round_number
                    raise NotServing(f"this peer has the state of round {round_number}, not of {min_round}")
                round_number = self.current.round_number
                wanted = (self._stage, "state", round_number)
                for stored in self._stored.values():
                    if (stored.index.stage, stored.index.kind, stored.index.round_number) == wanted:
                        return stored
                held = self._find_held(min_round)
                if held is not None:
                    return held
                self._make_room()
                state = await self._device_thread.run(Priority.STEP, self._take)
                if state is None:
                    await self._wait_until_past(round_number)
                    continue
                stored = await self._threads.run(_make_stored, self._stage, "state", state)
                self._remember(stored)
                return stored

    async def _wait_until_past(self, round_number: int) -> None:
        """Wait until this peer's state is that of another round."""
        await self._changed.wait_for(lambda: self.current is not None and self.current.round_number != round_number)

    async def _update(self, round_number: int) -> StoredState:
        state = self._updates.get(round_number)
        if state is None:
            raise NotServing(f"the update of round {round_number} is not kept here")
        async with self._lock:
            if self._update_ids.get(round_number) not in self._stored:
                stored = await self._threads.run(_make_stored, self._stage, "update", state)
                self._update_ids[round_number] = self._remember(stored)
        kept = self._stored.get(self._update_ids[round_number])
        if kept is None:
            raise NotServing(f"the update of round {round_number} is not kept here any more")
        return kept

    def _take(self) -> StageState | None:
        """Copy this peer's state; in the device thread.

        Returns:
            None while the weights have had an update that the event loop does not know of yet
        """
        current = self.current
        if current is None or self._trainer.optimizer_step != current.optimizer_step:
            return None
        return StageState(
            current.round_number, current.history_hash, self._trainer.state(), current.timeline, current.ledger
        )


def _make_stored(stage: int, kind: Literal["state", "update"], state: StageState) -> StoredState:
    index, tensors = make_index(stage, kind, state)
    return StoredState(index, pack_fields(index), tensors)

"""Gives the state that this peer trains to other peers, and the updates of its newest entries.

A newcomer downloads a state and then applies the updates of the rounds that passed meanwhile. Owns which states are
kept in memory, and for how long; the driver keeps the updates. Must not know when a round ends, or who asks for a state
and why. Snapshots are given away by named_snapshots.py; states.py is the other side, which downloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import anyio
from torch import Tensor

from swarm_peer.errors import NotServing
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState, timeline_of
from swarm_peer.runtime.state.stored import StoredState, make_stored
from swarm_peer.wire.messages import StateIndexCall

# A peer waits this long for the weights of the round that a caller asks for; the caller asks again.
WAIT_FOR_ROUND_S = 10.0
# A state or update is dropped after this long without a request: the peer that was downloading it is gone.
RETAIN_S = 60.0
# A peer that goes on asking could have it held for ever. So a lease ends after the time that the download takes on the
# slowest link with which a peer could take part in averaging, and not before this.
SLOWEST_BYTES_PER_S = 1e6
LEASE_S = 600.0
# How often expired ones are dropped.
EXPIRY_POLL_S = 10.0
# Whole states in memory for peers that download: one, and one newer state, for peers that the first is too old for.
MAX_STATES_HELD = 2
# A held state at most this many rounds old is given away again: a state is as large as three updates, and to catch up
# with fewer rounds is quicker than to download another one.
MAX_ROUNDS_BEHIND = 8


class StateServer:
    """Gives a replica's own state, and the updates of its newest entries. Belongs to the event loop's thread.

    Args:
        kept: the averages that a round's entry names by their digest, with its hash; None if they are not kept

    Attributes:
        stored: what peers are downloading, by the hash of its index
    """

    def __init__(
        self, *, context: PeerContext, core: ReplicaCore, kept: Callable[[int], tuple[str, Sequence[Tensor]] | None]
    ):
        self.stored: dict[bytes, StoredState] = {}
        self._clock = context.clock
        self._threads = context.threads
        self._changed = context.changed
        self._core = core
        self._stage = core.stage
        self._kept = kept
        # Each state and each update is hashed once. A state takes a second for each GB: no update waits for that.
        self._state_lock, self._update_lock = anyio.Lock(), anyio.Lock()
        self._lease_ends: dict[bytes, float] = {}  # by the hash of the index

    @property
    def step(self) -> StepState:
        """Where the replica stands."""
        return self._core.rounds.step

    async def run(self) -> None:
        """Drop what nobody downloads any more, until cancelled: a round may take long."""
        while True:
            await anyio.sleep(EXPIRY_POLL_S)
            self._drop_expired()

    def _drop_expired(self) -> None:
        now = self._clock.monotonic_s()
        self._keep_only(
            key for key, stored in self.stored.items() if now <= min(stored.used_at + RETAIN_S, self._lease_ends[key])
        )

    def _keep_only(self, keys: Iterable[bytes]) -> None:
        self.stored = {key: self.stored[key] for key in keys}
        self._lease_ends = {key: self._lease_ends[key] for key in self.stored}

    async def find(self, call: StateIndexCall) -> StoredState:
        """Find what a peer asks for.

        Raises:
            NotServing: it is not there
        """
        return await (self._newest(call.min_round) if call.kind == "state" else self._update(call.min_round))

    def _held(self) -> dict[bytes, StoredState]:
        """The whole states in memory, by the hash of their index."""
        return {key: stored for key, stored in self.stored.items() if stored.index.kind == "state"}

    def _find_held(self, min_round: int) -> StoredState | None:
        """If no more states may be held, the newest one that a newcomer can catch up from.

        Making a still newer one would drop a state that a peer may be downloading.
        """
        held = self._held().values()
        if len(held) < MAX_STATES_HELD:
            return None
        timeline, oldest = self.step.timeline, max(min_round, self.step.weights_round - MAX_ROUNDS_BEHIND)
        found = [
            stored for stored in held if stored.index.round_number >= oldest and timeline_of(stored.index) == timeline
        ]
        newest = max(found, key=lambda stored: stored.index.round_number, default=None)
        return newest if newest is not None and self._can_be_followed(newest) else None

    def _can_be_followed(self, stored: StoredState) -> bool:
        """Whether a newcomer with this state can get the updates since."""
        since = range(stored.index.round_number, self.step.weights_round)
        return all(self._kept(number) is not None for number in since)

    def _make_room(self) -> None:
        """Drop the states that were not used for longest, so that one more may be held."""
        held = self._held()
        for key in sorted(held, key=lambda key: held[key].used_at, reverse=True)[MAX_STATES_HELD - 1 :]:
            del self.stored[key]

    def _has_round(self, round_number: int) -> bool:
        return self.step.phase is not Phase.EMPTY and self.step.weights_round >= round_number

    async def _newest(self, min_round: int) -> StoredState:
        with anyio.move_on_after(WAIT_FOR_ROUND_S):
            await self._changed.wait_for(lambda: self._has_round(min_round))
        while True:
            present = self._core.rounds.current
            async with self._state_lock:
                stored = await self._make_newest(min_round)
            if stored is not None:
                return stored
            # Without the lock: the round may end only when another peer has got an update.
            await self._changed.wait_for(partial(self._is_past, present))

    def _is_past(self, present: ReplicaRound) -> bool:
        return self._core.rounds.current is not present

    async def _make_newest(self, min_round: int) -> StoredState | None:
        """Make or find a state that is new enough; None while an update is being applied."""
        if not self._has_round(min_round):
            raise NotServing(f"this peer has the weights of round {self.step.weights_round}, not those of {min_round}")
        for stored in self._held().values():
            # In the same round, a peer that catches up may have taken over the weights of another history.
            told = stored.index.round_number, stored.index.history_hash, timeline_of(stored.index)
            if told == (self.step.weights_round, self.step.history_hash, self.step.timeline):
                return stored
        held = self._find_held(min_round)
        if held is not None:
            return held
        self._make_room()
        state = await self._core.device_thread.run(Priority.STEP, self._take)
        if state is None:
            return None
        return self._remember(await self._threads.run(make_stored, self._stage, "state", state))

    async def _update(self, round_number: int) -> StoredState:
        async with self._update_lock:
            found = self._kept(round_number)
            if found is None:
                raise NotServing(f"the update of round {round_number} is not kept here")
            entry, averages = found
            for stored in self.stored.values():
                told = stored.index
                if (told.kind, told.round_number, told.history_hash) == ("update", round_number, entry):
                    return stored
            tensors = {f"{number:05d}": average for number, average in enumerate(averages)}
            state = StageState(round_number, entry, tensors, self.step.timeline)
            made = await self._threads.run(make_stored, self._stage, "update", state)
            self._drop_old_updates()
            return self._remember(made)

    def _drop_old_updates(self) -> None:
        """Drop the updates that the driver does not keep any more: they would take memory beyond its limit."""
        self._keep_only(
            key
            for key, stored in self.stored.items()
            if stored.index.kind == "state" or self._kept(stored.index.round_number) is not None
        )

    def _remember(self, stored: StoredState) -> StoredState:
        stored.used_at = now = self._clock.monotonic_s()
        self.stored[stored.key] = stored
        self._lease_ends[stored.key] = now + max(LEASE_S, stored.num_bytes / SLOWEST_BYTES_PER_S)
        return stored

    def _take(self) -> StageState | None:
        """Copy the replica's state; in the device thread.

        Returns:
            None while the weights are not those of the round, since an update is being applied
        """
        step, trainer = self._core.rounds.current.step, self._core.trainer
        if step.phase is Phase.EMPTY or trainer.weights_version != step.weights_version:
            return None
        return StageState(
            round_number=step.weights_round,
            history_hash=step.history_hash,
            tensors=trainer.state(),
            timeline=step.timeline,
            ledger=step.ledger,
        )

"""Gives the state that this peer trains to other peers, and the updates that a newcomer has to apply to it.

A newcomer downloads a state and then applies the updates of the rounds that passed meanwhile, so this peer keeps those
for as long as a state is being downloaded, and the last ones without an average in any case. Owns which states and
updates are kept in memory, and for how long. Must not know when a round ends, or who asks for a state and why.
Snapshots are given away by snapshot_store.py; joining.py is the other side, which downloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import torch

from swarm_peer.errors import NotServing
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState, timeline_of
from swarm_peer.runtime.state.stored import StoredState, make_stored
from swarm_peer.wire.messages import StateIndexCall

# A peer waits this long for the round that a caller asks for. The caller asks again if that is not enough.
WAIT_FOR_ROUND_S = 10.0
# A state or update is dropped after this long without a request: the peer that was downloading it is gone.
RETAIN_S = 60.0
# A peer that goes on asking could have it held for ever. So a lease ends after the time that the download takes on the
# slowest link with which a peer could take part in averaging, and not before this.
SLOWEST_BYTES_PER_S = 1e6
LEASE_S = 600.0
# How often expired ones are dropped.
EXPIRY_POLL_S = 10.0
# All that is held together takes at most the memory of so many states, or this, if a state is small. It is the updates
# that have to give way: for each state that is not held, the updates of three rounds and more.
MOST_STATES_BYTES = 4
SMALL_BYTES = 2**28
# A state is as large as three updates, and averaging takes more bandwidth per round than one update does. So a peer
# that needs more averages than this for a state could not keep up with averaging either. Rounds without an average are
# small: a peer keeps all of them while a state is being downloaded, and so many while none is, since a peer that was
# left behind takes those over, and no state.
MAX_UPDATES_RETAINED = 16
# Whole states in memory for peers that download: one, and one newer state, for peers that the first is too old for.
MAX_STATES_HELD = 2
# A held state at most this many rounds old is given away again: there is time to catch up before the updates are
# dropped.
MAX_ROUNDS_BEHIND = MAX_UPDATES_RETAINED // 2


class StateServer:
    """Gives a replica's own state and its updates to other peers. Belongs to the event loop's thread.

    Attributes:
        stored: what peers are downloading, by the hash of its index
    """

    def __init__(self, *, context: PeerContext, core: ReplicaCore):
        self.stored: dict[bytes, StoredState] = {}
        # Where updates are delayed, the newest state that a snapshot is due of, and where the replica stood.
        self._complete: tuple[StepState, StageState] | None = None
        self._clock = context.clock
        self._threads = context.threads
        self._changed = context.changed
        self._core = core
        self._stage = core.stage
        # Each state and each update is hashed once. A state takes a second for each GB: no update waits for that.
        self._state_lock, self._update_lock = anyio.Lock(), anyio.Lock()
        self._lease_ends: dict[bytes, float] = {}  # by the hash of the index
        self._updates: dict[int, StageState] = {}  # by round; a newcomer that is downloading needs them next
        self._wanted_until_s = -1.0  # the newest update is kept so long, though nobody downloads a state
        self._update_ids: dict[int, bytes] = {}  # hashes of the indexes of updates that were asked for, by round

    @property
    def step(self) -> StepState:
        """Where the replica stands."""
        return self._core.rounds.step

    async def retain_update(
        self, gradients: Sequence[torch.Tensor], history_hash: str, ledger: bytes, *, is_wanted: bool = False
    ) -> None:
        """Keep the update that ends the present round, if a peer is downloading an earlier state.

        An update without tensors is kept in any case.

        Args:
            is_wanted: whether some stage-mate takes it over, be its download of a state long over
        """
        step = self.step
        if is_wanted:
            self._wanted_until_s = self._clock.monotonic_s() + RETAIN_S
        self._drop_expired()
        if gradients and not self._keeps_updates():
            return
        tensors = await self._threads.run(_copies, gradients) if gradients else {}
        update = StageState(step.round_number, history_hash, tensors, step.timeline, ledger)
        self._updates = {known: state for known, state in self._updates.items() if state.timeline == step.timeline}
        self._updates[step.round_number] = update
        self._make_room_for_all()

    async def run(self) -> None:
        """Drop what nobody downloads any more, until cancelled: a round may take long."""
        while True:
            await anyio.sleep(EXPIRY_POLL_S)
            self._drop_expired()

    def _drop_expired(self) -> None:
        now = self._clock.monotonic_s()
        self.stored = {
            key: stored
            for key, stored in self.stored.items()
            if now <= min(stored.used_at + RETAIN_S, self._lease_ends[key])
        }
        self._lease_ends = {key: self._lease_ends[key] for key in self.stored}
        if not self._keeps_updates():
            self._updates = {number: update for number, update in self._updates.items() if not update.tensors}
            self._update_ids = {
                number: self._update_ids[number] for number in self._update_ids if number in self._updates
            }

    def _keeps_updates(self) -> bool:
        return bool(self._held()) or self._clock.monotonic_s() <= self._wanted_until_s

    def _make_room_for_all(self) -> None:
        """Drop the oldest updates until all that is held fits."""
        states = [stored.num_bytes for stored in self._held().values()]
        most_bytes = max(MOST_STATES_BYTES * max(states, default=0), SMALL_BYTES)
        while len(self._updates) > 1 and (
            self._has_too_many_updates() or sum(states) + self._update_bytes() > most_bytes
        ):
            oldest_round = min(self._updates)
            del self._updates[oldest_round]
            self.stored.pop(self._update_ids.pop(oldest_round, b""), None)

    def _has_too_many_updates(self) -> bool:
        counted = [update for update in self._updates.values() if update.tensors or not self._keeps_updates()]
        return len(counted) > MAX_UPDATES_RETAINED

    def _update_bytes(self) -> int:
        updates = self._updates.values()
        return sum(len(update.ledger) + sum(tensor.nbytes for tensor in update.tensors.values()) for update in updates)

    async def copy_state(self) -> StageState | None:
        """Copy the replica's state; None while it has no weights, or an update is being applied."""
        # Without the lock: neither a commit nor a snapshot waits until the state that a newcomer asks for is hashed.
        return await self._core.device_thread.run(Priority.STEP, self._take)

    async def keep_complete(self) -> None:
        """Copy the state of a round that ends, when the average that ends it is known."""
        step, state = self.step, await self.copy_state()
        if state is not None:
            self._complete = step, state
            self._changed.notify()

    @property
    def has_complete(self) -> bool:
        """Whether `keep_complete` has kept a state that nobody has taken."""
        return self._complete is not None

    def take_complete(self) -> tuple[StepState, StageState] | None:
        """Take what `keep_complete` has kept, if anything: where the replica stood in that round, and the state."""
        complete, self._complete = self._complete, None
        return complete

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
        timeline, oldest = self.step.timeline, max(min_round, self.step.round_number - MAX_ROUNDS_BEHIND)
        found = [
            stored for stored in held if stored.index.round_number >= oldest and timeline_of(stored.index) == timeline
        ]
        return max(found, key=lambda stored: stored.index.round_number, default=None)

    def _make_room(self) -> None:
        """Drop the states that were not used for longest, so that one more may be held."""
        held = self._held()
        for key in sorted(held, key=lambda key: held[key].used_at, reverse=True)[MAX_STATES_HELD - 1 :]:
            del self.stored[key]

    def _has_round(self, round_number: int) -> bool:
        return self.step.phase is not Phase.EMPTY and self.step.round_number >= round_number

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
            raise NotServing(f"this peer is in round {self.step.round_number}, not in {min_round}")
        for stored in self._held().values():
            # In the same round, a peer that catches up may have taken over the weights of another history.
            told = stored.index.round_number, stored.index.history_hash, timeline_of(stored.index)
            if told == (self.step.round_number, self.step.history_hash, self.step.timeline):
                return stored
        held = self._find_held(min_round)
        if held is not None:
            return held
        self._make_room()
        state = await self._core.device_thread.run(Priority.STEP, self._take)
        if state is None:
            return None
        stored = await self._threads.run(make_stored, self._stage, "state", state)
        self._remember(stored)
        self._make_room_for_all()
        return stored

    def _is_voted_on(self, round_number: int) -> bool:
        """Whether the stage-mates vote on the update of a round: it is known in a moment, or they try again."""
        ending = self._core.rounds.current
        return ending.number == round_number and ending.vote is not None and ending.vote.attempt == ending.attempt

    async def _update(self, round_number: int) -> StoredState:
        # A newcomer that took no part in the vote knows its result before the others have applied it.
        with anyio.move_on_after(WAIT_FOR_ROUND_S):
            await self._changed.wait_for(lambda: not self._is_voted_on(round_number))
        state = self._updates.get(round_number)
        if state is None or state.timeline != self.step.timeline:
            raise NotServing(f"the update of round {round_number} is not kept here")
        async with self._update_lock:
            if self._update_ids.get(round_number) not in self.stored:
                stored = await self._threads.run(make_stored, self._stage, "update", state)
                self._update_ids[round_number] = self._remember(stored)
        kept = self.stored.get(self._update_ids[round_number])
        if kept is None:
            raise NotServing(f"the update of round {round_number} is not kept here any more")
        return kept

    def _remember(self, stored: StoredState) -> bytes:
        stored.used_at = now = self._clock.monotonic_s()
        self.stored[stored.key] = stored
        self._lease_ends[stored.key] = now + max(LEASE_S, stored.num_bytes / SLOWEST_BYTES_PER_S)
        return stored.key

    def _take(self) -> StageState | None:
        """Copy the replica's state; in the device thread.

        Returns:
            None while the weights are not those of the round, since an update is being applied
        """
        step, trainer = self._core.rounds.current.step, self._core.trainer
        if step.phase is Phase.EMPTY or trainer.weights_version != step.weights_version:
            return None
        return StageState(
            round_number=step.round_number,
            history_hash=step.history_hash,
            tensors=trainer.state(),
            timeline=step.timeline,
            ledger=step.ledger,
            lineage=step.lineage,
        )


def _copies(gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{number:05d}": gradient.clone() for number, gradient in enumerate(gradients)}

"""The states of a peer, what leads from one to another, and how its stay in a stage ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from swarm_peer.errors import NotServing
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.wire.messages import Body

# The states that each state may be followed by. A stay in a stage goes from JOINING to LEFT; others may take a peer's
# place from it meanwhile, also while it drains for a move, so that it joins again.
TRANSITIONS = {
    PeerState.JOINING: {PeerState.SERVING, PeerState.DRAINING, PeerState.PAUSED},
    PeerState.SERVING: {PeerState.DRAINING, PeerState.JOINING},
    PeerState.DRAINING: {PeerState.SERVING, PeerState.JOINING, PeerState.LEFT, PeerState.PAUSED},
    PeerState.LEFT: {PeerState.JOINING, PeerState.PAUSED},
    PeerState.PAUSED: {PeerState.JOINING, PeerState.LEFT},
}


class Lifecycle:
    """The state of a peer, and the decision how it leaves its stage. Belongs to the event loop's thread.

    Attributes:
        state: as it is announced
        since_s: time at which it entered that state, on the context's clock
        note: the reason, in words, that it does not serve yet; else empty
        stop: set when the peer has to leave its stage
        next_stage: the stage that it serves then; None if it leaves the run, or is paused
        ended: set when the peer leaves the run
        halted: set while it may not serve any stage: its owner has it paused, or it leaves the run
        resumed: set while it may, and once it leaves the run
        pause_note: why its owner has it paused, in words; empty if it is not
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.stop = anyio.Event()
        self.next_stage: int | None = None
        self.ended = anyio.Event()
        self.halted, self.resumed = anyio.Event(), anyio.Event()
        self.resumed.set()
        self.pause_note = ""
        self._set(PeerState.JOINING)

    def _set(self, state: PeerState) -> None:
        self.state, self.since_s, self.note = state, self._clock.monotonic_s(), ""

    def enter(self, state: PeerState) -> None:
        """Enter a state; nothing changes if it is the present one. The note of the state before is cleared."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{state} does not follow {self.state}"
            self._set(state)

    @property
    def has_ended(self) -> bool:
        """Whether the peer leaves the run."""
        return self.ended.is_set()

    def end(self) -> None:
        """Leave for good: the run is over, or its operator says so. It also ends a move."""
        for event in (self.ended, self.halted, self.resumed):
            event.set()
        self._leave()

    def _leave(self) -> None:
        self.next_stage = None
        self.stop.set()

    @property
    def is_paused(self) -> bool:
        """Whether its owner has the peer paused; not once it leaves the run."""
        return bool(self.pause_note) and not self.has_ended

    def pause(self, words: str) -> None:
        """Leave the stage, if the peer is in one, and serve none until `resume`. It also ends a move."""
        if not self.has_ended and not self.pause_note:
            self.halted.set()
            self.resumed = anyio.Event()
            self._leave()
        self.pause_note = words
        if self.state is PeerState.PAUSED:
            self.note = words

    def resume(self) -> None:
        """Serve again. A stage that the peer has begun to leave meanwhile it leaves, to join it anew."""
        self.pause_note = ""
        self.resumed.set()
        if not self.has_ended:
            self.halted = anyio.Event()

    def move(self, stage: int | None) -> bool:
        """Leave the stage for another one, or, if that is None, to join it anew; False if the peer leaves already."""
        if self.stop.is_set():
            return False
        self.next_stage = stage
        self.stop.set()
        return True

    def begin_stay(self) -> None:
        """Begin to join the next stage, unless the peer is to leave that one, too."""
        self.enter(PeerState.JOINING)
        self.next_stage = None
        if not self.halted.is_set():
            self.stop = anyio.Event()

    def explain(self, note: str) -> None:
        """Note why this peer does not serve yet; announcements carry the note."""
        self.note = note


def left_alone(stage: int, optimizer_step: int, snapshot_every: int) -> str:
    """Say what becomes of a run whose stage loses its only peer.

    Args:
        optimizer_step: that the run has come to
        snapshot_every: optimizer steps between two snapshots; 0 for none
    """
    waits = f"nobody else serves stage {stage}, so the run waits until another peer does"
    if not optimizer_step:
        return waits
    newest = optimizer_step // snapshot_every * snapshot_every if snapshot_every else 0
    if not newest:
        return f"{waits}, and goes back to a checkpoint, or to its beginning: it has no snapshot yet"
    return f"{waits}, and goes back to its newest snapshot, of optimizer step {newest} at the latest"


def refusing(calls: Mapping[type[Body], Handler], lifecycle: Lifecycle) -> dict[type[Body], Handler]:
    """The same handlers, which give nothing while the owner has the peer paused: the link is the owner's, too."""

    async def give(handle: Handler, caller: str, call: Any, tensors: Sequence[memoryview]) -> Reply:
        if lifecycle.is_paused:
            raise NotServing(f"this peer is {lifecycle.pause_note}")
        return await handle(caller, call, tensors)

    return {call: partial(give, handle) for call, handle in calls.items()}

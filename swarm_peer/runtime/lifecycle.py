"""The states of a peer, what leads from one to another, and how its stay in a stage ends."""

from __future__ import annotations

import anyio

from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import Clock

# The states that each state may be followed by. A stay in a stage goes from JOINING to LEFT; others may take a peer's
# place from it meanwhile, also while it drains for a move, so that it joins again.
TRANSITIONS = {
    PeerState.JOINING: {PeerState.SERVING, PeerState.DRAINING},
    PeerState.SERVING: {PeerState.DRAINING, PeerState.JOINING},
    PeerState.DRAINING: {PeerState.SERVING, PeerState.JOINING, PeerState.LEFT},
    PeerState.LEFT: {PeerState.JOINING},
}


class Lifecycle:
    """The state of a peer, and the decision how it leaves its stage. Belongs to the event loop's thread.

    Attributes:
        state: as it is announced
        since_s: time at which it entered that state, on the context's clock
        note: the reason, in words, that it does not serve yet; else empty
        stop: set when the peer has to leave its stage
        next_stage: the stage that it serves then; None if it leaves the run
        ended: set when the peer leaves the run
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.stop = anyio.Event()
        self.next_stage: int | None = None
        self.ended = anyio.Event()
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
        self.ended.set()
        self.next_stage = None
        self.stop.set()

    def move(self, stage: int) -> bool:
        """Leave the stage for another one, or to join it anew. Returns False if the peer leaves already."""
        if self.stop.is_set():
            return False
        self.next_stage = stage
        self.stop.set()
        return True

    def begin_stay(self) -> None:
        """Begin to join the next stage, unless the peer is to leave that one, too."""
        self.enter(PeerState.JOINING)
        self.next_stage = None
        if not self.has_ended:
            self.stop = anyio.Event()

    def explain(self, note: str) -> None:
        """Note why this peer does not serve yet; announcements carry the note."""
        self.note = note

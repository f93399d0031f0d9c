"""The states of a peer in one stage, and how it ends there."""

from __future__ import annotations

import anyio

from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import Clock


class Lifecycle:
    """The present state of a peer, and the decision how it ends. Belongs to the event loop's thread.

    Attributes:
        state: as it is announced
        since_s: time at which it entered that state, on the context's clock
        note: the reason, in words, that it does not serve yet; else empty
        stop: set when the peer has to leave its stage
        next_stage: the stage that it joins then; None if it leaves the run
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.stop = anyio.Event()
        self.next_stage: int | None = None
        self.enter(PeerState.JOINING)

    def enter(self, state: PeerState) -> None:
        """Enter a state. The note of the state before is cleared."""
        self.state, self.since_s, self.note = state, self._clock.monotonic_s(), ""

    def end(self) -> None:
        """Leave for good: the run is over, or its operator says so. It also ends a move."""
        self.next_stage = None
        self.stop.set()

    def move(self, stage: int) -> bool:
        """Leave, and join a stage. Returns False if the peer leaves already."""
        if self.stop.is_set():
            return False
        self.next_stage = stage
        self.stop.set()
        return True

    def explain(self, note: str) -> None:
        """Note why this peer does not serve yet; announcements carry the note."""
        self.note = note

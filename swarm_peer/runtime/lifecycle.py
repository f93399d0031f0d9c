"""One life of a peer in one stage: its number, its states, and how it ends."""

from __future__ import annotations

import anyio

from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import Clock


class Lifecycle:
    """The number and the state of a life, and the decision how it ends. Belongs to the event loop's thread.

    Attributes:
        state: as it is announced
        since_s: time at which it entered that state, on the context's clock
        note: the reason, in words, that it does not serve yet; else empty
        stop: set when the peer has to leave its stage
        next_stage: the stage that it joins then; None if it leaves the run
        incarnation: which life of the peer this is (see policy/view.py: Life)
    """

    def __init__(self, clock: Clock, *, last_serial: int = 0):
        """Begin a life.

        Args:
            last_serial: of the announcements of the life before, in this process; 0 if there was none
        """
        self._clock = clock
        # Two lives may begin in the same millisecond, and somebody may set the clock back.
        self.incarnation = max(int(clock.unix_s() * 1000), last_serial + 1)
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

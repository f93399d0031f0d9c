"""The states of a peer, and how it ends or moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio

from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.processes import Restart


class Lifecycle:
    """The present state of a peer, and the decision how it ends. Belongs to the event loop's thread.

    Attributes:
        state: as it is announced
        since_s: time at which it entered that state, on the context's clock
        note: the reason, in words, that it does not serve yet; else empty
        restart: how this process goes on after the peer has left; None if it ends
        stop: set when the peer has to leave
        told_to_end: set when it has to leave for good
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self.restart: Restart | None = None
        self.stop = anyio.Event()
        self.told_to_end = anyio.Event()
        self.enter(PeerState.JOINING)

    @property
    def moves(self) -> bool:
        """Whether the process starts anew in another stage, and was not told to end meanwhile."""
        return self.restart is not None and not self.told_to_end.is_set()

    def enter(self, state: PeerState) -> None:
        """Enter a state. The note of the state before is cleared."""
        self.state, self.since_s, self.note = state, self._clock.monotonic_s(), ""

    def end(self) -> None:
        """Leave for good: the run is over, or its operator says so."""
        self.told_to_end.set()
        self.stop.set()

    def move(self, restart: Restart) -> bool:
        """Leave, and have this process start anew. Returns False if the peer leaves already, and not to come back."""
        if self.stop.is_set():
            return False
        self.restart = restart
        self.stop.set()
        return True

    def explain(self, note: str) -> None:
        """Note why this peer does not serve yet; announcements carry the note."""
        self.note = note

    def finish(self, connected: Sequence[str]) -> None:
        """Settle how the process goes on, now that the peer has left.

        Args:
            connected: addresses of peers that it was connected to, for its next life
        """
        self.restart = replace(self.restart, initial_peers=tuple(connected)) if self.restart and self.moves else None

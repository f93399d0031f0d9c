"""Waits for other peers that end after a while."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_peer.errors import CallError
from swarm_peer.runtime.context import Clock


class Wait:
    """A wait for other peers that ends after `patience_s`, and begins anew once there was no reason to wait."""

    def __init__(self, clock: Clock, patience_s: float):
        self._clock = clock
        self._patience_s = patience_s
        self._since: float | None = None

    def check(self, reasons: Sequence[str]) -> None:
        """Refuse to go on while there are reasons to wait and the time is not over.

        Raises:
            CallError: with the first of the reasons
        """
        if not reasons:
            self._since = None
            return
        now = self._clock.monotonic_s()
        if self._since is None:
            self._since = now
        if now < self._since + self._patience_s:
            raise CallError(reasons[0])

"""How one part of a peer wakes up the parts that wait for something to change."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Condition:
    """Lets tasks of one event loop wait until something holds that other tasks change."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Have all waiting tasks check again. Call it after each change."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked at once and after each `notify`, and must change nothing."""
        while not condition():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()

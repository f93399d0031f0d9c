"""Waking up those who wait for a condition on this peer's state."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Signal:
    """`notify` after each change; `wait_for` looks again at its condition each time. One event loop only."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()

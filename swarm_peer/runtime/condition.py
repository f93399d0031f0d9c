"""How one part of a peer wakes up the parts that wait for something to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Condition:
    """Lets tasks of one event loop wait until something holds that other tasks change."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._is_due = False

    def notify(self) -> None:
        """Have the conditions checked that tasks wait for. Call it after each change."""
        if self._waiting and not self._is_due:
            self._is_due = True
            next(iter(self._waiting)).get_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Wake the tasks whose conditions hold. Most of them wait for something else than what has changed."""
        self._is_due = False
        for future, condition in self._waiting.items():
            if not future.done() and _may_hold(condition):
                future.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked at once and after each `notify`, and must change nothing.

        One that holds for a moment alone may be missed.
        """
        while not condition():
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = condition
            try:
                await future
            finally:
                del self._waiting[future]


def _may_hold(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except Exception:
        return True  # the task that waits checks it once more, and the error is its own

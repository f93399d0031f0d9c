"""Lets microbatches of this peer's global step in, holds those of later steps, and turns away those of earlier ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarm_peer.errors import Busy, NotServing, StepClosed
from swarm_peer.runtime.signal import Signal

# A microbatch of a step further ahead than this is not held: its caller is confused, or this peer is far behind.
MAX_STEPS_HELD = 1


class StepGate:
    """Admission to the current global step. Belongs to the event loop's thread.

    Args:
        capacity: microbatches that may be inside or held at once

    Attributes:
        newest_asked: the newest step that anybody wanted to enter: a hint that this peer is behind
    """

    def __init__(self, capacity: int, changed: Signal):
        self.step = 0
        self.capacity = capacity
        self.admitted = 0
        self.held = 0
        self.newest_asked = 0
        self._open = False
        self._serving = False
        self._left = False
        self._changed = changed
        self.on_open: Callable[[int], None] = lambda step: None  # told that the peer is in a step with its weights

    def open(self, step: int) -> None:
        """Enter `step` and admit its microbatches."""
        self.step = step
        self.on_open(step)
        self._open = self._serving = not self._left
        self._changed.notify()

    def close(self) -> None:
        """Admit no more microbatches of this step; those of the next are held."""
        self._open = False
        self._changed.notify()

    def leave(self) -> None:
        """Admit nothing at all any more, in later steps neither (draining)."""
        self._left = True
        self._open = self._serving = False
        self._changed.notify()

    @asynccontextmanager
    async def enter(self, step: int, *, always: bool = False) -> AsyncIterator[None]:
        """Be inside the step for the duration of the context.

        Args:
            always: also where the gate is full

        Raises:
            StepClosed: this peer is past that step, or has closed it
            Busy: full
            NotServing: draining, or many steps away
        """
        if self.admitted + self.held >= self.capacity and not always:
            raise Busy(f"{self.admitted} microbatches in flight and {self.held} held")
        self.held += 1
        try:
            await self._wait_for(step)
            self.admitted += 1
        finally:
            self.held -= 1
        try:
            yield
        finally:
            self.admitted -= 1
            self._changed.notify()

    async def reach(self, step: int) -> None:
        """Wait for a step without being inside: it may close and end meanwhile, and does not wait for the caller.

        Raises:
            StepClosed: this peer is past that step
            NotServing: draining, or many steps away
        """
        if step > self.newest_asked:
            self.newest_asked = step
            self._changed.notify()
        if step > self.step + MAX_STEPS_HELD:
            raise NotServing(f"this peer is in step {self.step}, too far behind step {step}")
        await self._changed.wait_for(lambda: step <= self.step or not self._serving)
        if not self._serving:
            raise NotServing("not serving, or draining")
        if step < self.step:
            raise self._closed(step)

    async def _wait_for(self, step: int) -> None:
        await self.reach(step)
        if not self._open:
            raise self._closed(step)

    def _closed(self, step: int) -> StepClosed:
        return StepClosed(f"global step {step} is closed here; this peer is in step {self.step}", self.step)

    async def drained(self) -> None:
        """Wait until nobody is inside."""
        await self._changed.wait_for(lambda: self.admitted == 0)

    @property
    def is_open(self) -> bool:
        return self._open

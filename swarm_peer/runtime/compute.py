"""The one thread that uses the device. Backward goes before forward: it frees memory and ends microbatches."""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeVar

import anyio

from swarm_peer.runtime.metrics import PeerMetrics

Result = TypeVar("Result")

# Weight of a new measurement of the time per sample.
_SMOOTHING = 0.1
# A device's first passes load kernels and allocate memory, and may take a hundred times as long as those that follow.
# Of so many, the fastest counts, and nothing is said before: smoothed, a slow one would be felt for forty passes.
_FIRST_PASSES = 3


class Priority(IntEnum):
    """Smaller goes first."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    EVALUATE = 3
    QUERY = 4


class ComputeThread:
    """Runs jobs one at a time, by priority and then by age. `run` belongs to the event loop's thread."""

    def __init__(self, metrics: PeerMetrics):
        self._jobs: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._metrics = metrics
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._trained_at = -math.inf
        self._seconds_per_sample = {Priority.FORWARD: 0.0, Priority.BACKWARD: 0.0}
        self._passes = {Priority.FORWARD: 0, Priority.BACKWARD: 0}
        self._thread.start()

    async def run(self, priority: Priority, job: Callable[[], Result], num_samples: int = 0) -> Result:
        """Run a job in the thread and return its result.

        If the caller is cancelled while the job waits, it is not run; while it runs, it is finished and its result is
        dropped, and the cancellation arrives after that: what a job has changed is never in doubt.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        turn = threading.Lock()  # whoever takes it first decides: the thread that runs the job, or its cancellation
        self._jobs.put((priority, next(self._order), (job, num_samples, loop, future, turn)))
        self._metrics.queue.set(self._jobs.qsize())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not turn.acquire(blocking=False):
                # A cancelled scope of anyio's cancels again and again, and none of that may cut the wait short.
                while not future.done():
                    with suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                        await asyncio.wait([future])
                future.exception()  # its outcome is dropped on purpose
            raise

    @property
    def samples_per_s(self) -> float:
        """Measured throughput of a forward and a backward pass together; 0 before the first few of both are over."""
        if min(self._passes.values()) < _FIRST_PASSES:
            return 0.0
        return 1 / sum(self._seconds_per_sample.values())

    @property
    def idle_s(self) -> float:
        """Seconds since the last forward or backward pass in training."""
        return time.monotonic() - self._trained_at

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the job that runs finish, and end the thread."""
        self._jobs.put((-1, next(self._order), None))
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            priority, _, item = self._jobs.get()
            if item is None:
                return
            job, num_samples, loop, future, turn = item
            if not turn.acquire(blocking=False):
                continue
            begin = time.perf_counter()
            try:
                outcome, error = job(), None
            except Exception as caught:
                outcome, error = None, caught
            self._measure(Priority(priority), time.perf_counter() - begin, num_samples if error is None else 0)
            loop.call_soon_threadsafe(_settle, future, outcome, error)

    def _measure(self, priority: Priority, seconds: float, num_samples: int) -> None:
        self._metrics.device_busy_seconds.inc(seconds)
        self._metrics.queue.set(self._jobs.qsize())
        if priority in self._seconds_per_sample:
            self._trained_at = time.monotonic()
        if priority not in self._seconds_per_sample or not num_samples:
            return
        histogram = self._metrics.forward_seconds if priority is Priority.FORWARD else self._metrics.backward_seconds
        histogram.observe(seconds)
        self._passes[priority] += 1
        known = self._seconds_per_sample[priority] or math.inf
        new = seconds / num_samples
        smoothed = min(known, new) if self._passes[priority] <= _FIRST_PASSES else known + _SMOOTHING * (new - known)
        self._seconds_per_sample[priority] = smoothed


def _settle(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)

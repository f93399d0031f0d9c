"""The one thread that uses the device: runs jobs by priority, and measures how fast they go.

Backward passes go before forward passes, since they free memory and end microbatches. Must not know what the jobs do.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeVar

import anyio
import torch

from swarm_peer.errors import SwarmError, first_line
from swarm_peer.runtime.context import Clock, Threads
from swarm_peer.runtime.host.device_errors import drop_frames, is_fault, is_lost
from swarm_peer.runtime.host.metrics import PeerMetrics

Result = TypeVar("Result")

# Weight of a new measurement in the smoothed time per sample.
_SMOOTHING = 0.1
# A device's first passes load kernels and allocate memory, and may take a hundred times as long as later ones.
# Smoothed, a slow one would distort the throughput for forty passes. So only the fastest of the first passes counts,
# and there is no throughput before they are over.
_FIRST_PASSES = 3


# A device that fails at so many passes of training in a row, for so long, is broken, or has no memory left for a single
# microbatch. Less may be one odd input, or a burst of microbatches that take each other's memory.
_FAILURES_OF_BROKEN = 5
_BROKEN_AFTER_S = 60.0


class Priority(IntEnum):
    """The priority of a job; the smallest value goes first."""

    STEP = 0
    BACKWARD = 1
    FORWARD = 2
    EVALUATE = 3
    QUERY = 4


_PASSES = (Priority.FORWARD, Priority.BACKWARD)


class SpeedMeter:
    """How fast one replica's passes go, smoothed. The device thread measures; any thread may read.

    Args:
        most_samples_per_s: that this peer's link carries, if that is limited
    """

    def __init__(self, metrics: PeerMetrics, most_samples_per_s: float = math.inf):
        self._metrics = metrics
        self._most_samples_per_s = most_samples_per_s
        self._seconds_per_sample = {Priority.FORWARD: 0.0, Priority.BACKWARD: 0.0}
        self._passes = {Priority.FORWARD: 0, Priority.BACKWARD: 0}

    @property
    def samples_per_s(self) -> float:
        """The throughput for others to go by: that of the device, or of the link where that is less; 0 if not known.

        A limited link is known at once. Until the device is measured, it counts alone.
        """
        measured, most = self.device_samples_per_s, self._most_samples_per_s
        return min(measured, most) if measured else 0.0 if math.isinf(most) else most

    @property
    def is_limited(self) -> bool:
        """Whether the device could do more than the link lets through."""
        return self.device_samples_per_s > self._most_samples_per_s

    @property
    def device_samples_per_s(self) -> float:
        """Measured throughput of a forward and a backward pass together; 0 until the first few of both are over."""
        seconds = sum(self._seconds_per_sample.values())
        return 1 / seconds if seconds and min(self._passes.values()) >= _FIRST_PASSES else 0.0

    def observe(self, priority: Priority, seconds: float, num_samples: int) -> None:
        """Take in the time of one forward or backward pass in training."""
        histogram = self._metrics.forward_seconds if priority is Priority.FORWARD else self._metrics.backward_seconds
        histogram.observe(seconds)
        self._passes[priority] += 1
        known = self._seconds_per_sample[priority] or math.inf
        new = seconds / num_samples
        smoothed = min(known, new) if self._passes[priority] <= _FIRST_PASSES else known + _SMOOTHING * (new - known)
        self._seconds_per_sample[priority] = smoothed


class DeviceThread:
    """Runs the jobs of all replicas one at a time, by priority and then by age. `run` belongs to the event loop.

    Args:
        device: that the jobs compute on
    """

    def __init__(self, *, clock: Clock, threads: Threads, metrics: PeerMetrics, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._jobs: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._clock = clock
        self._metrics = metrics
        self._trained_at = -math.inf
        # Seconds of all jobs that have ended, and when the present one began. One tuple, so that it is read at once.
        self._busy: tuple[float, float | None] = (0.0, None)
        # Failures of passes, and since when, since one of that kind ended well: each takes another amount of memory.
        self._failures = dict.fromkeys(_PASSES, (0, 0.0))
        self._broken = asyncio.Event()
        self._failure = ""
        self._join = threads.start(self._work, "device")

    async def run(
        self,
        priority: Priority,
        job: Callable[[], Result],
        num_samples: int = 0,
        speed: SpeedMeter | None = None,
    ) -> Result:
        """Run a job in the thread and return its result.

        Args:
            num_samples: that a forward or backward pass in training computes
            speed: measures that pass

        If the caller is cancelled while the job waits, the job is not run. If the caller is cancelled while the job
        runs, it gets the cancellation only when the job has finished, so the job's effects are never in doubt.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        turn = threading.Lock()  # taken by the device thread when it runs the job, or by a cancellation
        self._jobs.put((priority, next(self._order), (job, num_samples, speed, loop, future, turn)))
        self._metrics.queue.set(self._jobs.qsize())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not turn.acquire(blocking=False):
                # A cancelled scope of anyio cancels its tasks again and again. That must not cut the wait short.
                while not future.done():
                    with suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                        await asyncio.wait([future])
                future.exception()  # retrieved, so that asyncio does not warn: the outcome is dropped on purpose
            raise
        finally:
            # The traceback of a job's exception refers to this frame. If this frame referred to the exception, too, all
            # that has filled the device's memory would stay there until Python collects garbage.
            del future

    async def watch(self) -> None:
        """Raise SwarmError once the device is broken: this peer would go on announcing that it serves."""
        await self._broken.wait()
        raise SwarmError(f"{self._failure}; start the peer again, and see what else uses the device")

    @property
    def idle_s(self) -> float:
        """Seconds since the last forward or backward pass in training."""
        return self._clock.monotonic_s() - self._trained_at

    def busy_s(self) -> float:
        """Seconds that the device has computed so far, the present job's until now included."""
        ended_s, began_s = self._busy
        return ended_s if began_s is None else ended_s + max(0.0, self._clock.monotonic_s() - began_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the present job finish, and end the thread."""
        self._jobs.put((-1, next(self._order), None))
        self._join(timeout_s)

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for the next job and run it. Returns False at the end.

        A method of its own, so that nothing refers to a job that is over, and keeps its replica's weights in memory.
        """
        priority, _, item = self._jobs.get()
        if item is None:
            return False
        job, num_samples, speed, loop, future, turn = item
        if not turn.acquire(blocking=False):
            return True
        begin = self._clock.monotonic_s()
        busy_s, _ = self._busy
        self._busy = (busy_s, begin)
        try:
            if self._device.type == "cuda":
                # Each thread has its own device. Libraries that are not told one would take memory of the first.
                torch.cuda.set_device(self._device)
            outcome, error = job(), None
        except Exception as caught:
            outcome, error = None, drop_frames(caught)
        seconds = self._clock.monotonic_s() - begin
        self._busy = (busy_s + seconds, None)
        self._metrics.device_busy_seconds.inc(seconds)
        self._metrics.queue.set(self._jobs.qsize())
        if priority in _PASSES:
            self._trained_at = begin + seconds
            if speed is not None and num_samples and error is None:
                speed.observe(Priority(priority), seconds, num_samples)
        loop.call_soon_threadsafe(self._settle, priority, future, outcome, error)
        del item, future, error  # as in `run`
        return True

    def _settle(self, priority: Priority, future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
        if priority in _PASSES:
            self._note(priority, error)
        if error is not None and is_lost(error):
            self._failure = f"the device has failed: {first_line(error)}"
            self._broken.set()
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome)

    def _note(self, priority: Priority, error: Exception | None) -> None:
        if error is None:
            self._failures[priority] = 0, 0.0
        elif is_fault(error):
            now_s = self._clock.monotonic_s()
            number, since_s = self._failures[priority]
            number, since_s = number + 1, since_s if number else now_s
            self._failures[priority] = number, since_s
            if number >= _FAILURES_OF_BROKEN and now_s - since_s >= _BROKEN_AFTER_S:
                self._failure = (
                    f"the device has failed at all microbatches for a minute, the last time with: {first_line(error)}"
                )
                self._broken.set()

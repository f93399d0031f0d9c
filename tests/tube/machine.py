"""The machine of a simulated host: its clocks, threads, files and device. A host that is dead does nothing any more."""

from __future__ import annotations

import asyncio
import errno
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio
import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.stage.device_thread import Priority, SpeedMeter

if TYPE_CHECKING:
    from hosts import Host

# Some day of 2033: clocks differ by less than the run tolerates, unless a fault says otherwise.
EPOCH_S = 2_000_000_000.0


@dataclass
class TubeClock:
    """A clock that is ahead of the true time by `skew_s`."""

    loop: asyncio.AbstractEventLoop
    skew_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.loop.time()

    def unix_s(self) -> float:
        return EPOCH_S + self.loop.time() + self.skew_s


@dataclass(frozen=True)
class TubeRandom:
    """Chance that follows from the schedule's seed, tokens included."""

    seed: str
    _tokens: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._tokens.seed(f"{self.seed} tokens")

    def stream(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed} {purpose}")

    def token(self, num_bytes: int) -> bytes:
        return self._tokens.randbytes(num_bytes)


class TubeThreads:
    """Work that takes a moment of virtual time, and then happens at once, also when its caller has gone.

    Attributes:
        longer_s: how much longer it takes
    """

    def __init__(self, host: Host):
        self.longer_s = 0.0
        self._host = host
        self._rng = host.rng("threads")

    async def run(self, function: Callable[..., Any], *args: object, abandon_on_cancel: bool = False) -> Any:
        seconds = self._rng.uniform(0.0001, 0.003) + self.longer_s
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        loop.call_later(seconds, self._work, done, partial(function, *args))
        with anyio.CancelScope(shield=not abandon_on_cancel):
            return await done

    def _work(self, done: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        if not self._host.is_alive:
            return
        try:
            value = function()
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(value)

    def start(self, target: Callable[[], None], name: str) -> Callable[[float], None]:
        raise NotImplementedError("a thread that stays would not be repeatable")


@dataclass
class TubeStorage:
    """Files in memory, whose bytes a fault may change under what is mapped.

    Attributes:
        is_full: writing fails
        has_failed: it has done so, or a fault has changed a file
    """

    files: dict[str, bytearray] = field(default_factory=dict)
    is_full: bool = False
    has_failed: bool = False

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        data = bytearray().join(parts)
        if self.is_full:
            self.has_failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        self.files[name] = data

    def map(self, name: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.files[name], np.uint8)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


@dataclass(eq=False)
class _Job:
    priority: Priority
    function: Callable[[], Any]
    num_samples: int
    speed: SpeedMeter | None
    future: asyncio.Future[Any]
    begun: bool = False
    dropped: bool = False


class TubeDevice:
    """Runs jobs as DeviceThread does, each in a virtual time of its own; takes DeviceThread's place.

    Attributes:
        seconds_per_sample: of a forward and a backward pass together
        step_s: of a job that ends a round: to apply an update, to load or to copy a state
        short_of_memory: passes that fail from now on
    """

    def __init__(self, host: Host, seconds_per_sample: float):
        self._host = host
        self.seconds_per_sample = seconds_per_sample
        self.short_of_memory = 0
        self.step_s = host.rng("step").choice([0.002, 0.002, 0.1, 0.4])
        self._rng = host.rng("device")
        self._jobs: list[tuple[int, int, _Job]] = []
        self._order = itertools.count()
        self._running: _Job | None = None
        self._trained_s = -1e9
        self._busy_s = 0.0

    async def run(
        self,
        priority: Priority,
        job: Callable[[], Any],
        num_samples: int = 0,
        speed: SpeedMeter | None = None,
    ) -> Any:
        loop = asyncio.get_running_loop()
        entry = _Job(priority, job, num_samples, speed, loop.create_future())
        heapq.heappush(self._jobs, (priority, next(self._order), entry))
        self._begin_next()
        try:
            return await asyncio.shield(entry.future)
        except asyncio.CancelledError:
            entry.dropped = not entry.begun
            while entry.begun and not entry.future.done():
                with suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                    await asyncio.wait([entry.future])
            if entry.future.done() and not entry.future.cancelled():
                entry.future.exception()
            raise

    @property
    def idle_s(self) -> float:
        return asyncio.get_running_loop().time() - self._trained_s

    def busy_s(self) -> float:
        return self._busy_s

    async def watch(self) -> None:
        """It never breaks."""

    def stop(self, timeout_s: float = 10.0) -> None:
        """Its jobs end with the host."""

    def die(self) -> None:
        """End what runs and waits."""
        for entry in [self._running, *(entry for _, _, entry in self._jobs)]:
            if entry is not None:
                entry.future.cancel()
        self._jobs.clear()
        self._running = None

    def _begin_next(self) -> None:
        while self._running is None and self._jobs:
            _, _, entry = heapq.heappop(self._jobs)
            if entry.dropped:
                continue
            entry.begun = True
            self._running = entry
            seconds = self._seconds(entry)
            # Its effects are there at some moment while it runs.
            outcome = self._compute(entry) if self._rng.random() < 0.5 else None
            asyncio.get_running_loop().call_later(seconds, self._end, entry, seconds, outcome)

    def _seconds(self, entry: _Job) -> float:
        factor = {Priority.FORWARD: 0.33, Priority.BACKWARD: 0.67, Priority.EVALUATE: 0.33}.get(entry.priority, 0.0)
        samples = entry.num_samples or 1
        fixed = self.step_s if entry.priority is Priority.STEP else 0.002
        return (factor * samples * self.seconds_per_sample + fixed) * self._rng.uniform(0.9, 1.2)

    def _compute(self, entry: _Job) -> tuple[Any, Exception | None]:
        try:
            if self.short_of_memory and entry.priority in (Priority.FORWARD, Priority.BACKWARD):
                self.short_of_memory -= 1
                with self._failing_passes():
                    return entry.function(), None
            return entry.function(), None
        except Exception as error:
            return None, error

    @contextmanager
    def _failing_passes(self) -> Iterator[None]:
        """While the context is open, passes fail: at once, or at their end, when a gradient has been added."""
        is_late = self._rng.random() < 0.5

        def failing(name: str) -> Any:
            original = getattr(StageTrainer, name)

            def fail(*args: Any, **options: Any) -> Any:
                self._host.world.note("out of memory", self._host, name, is_late)
                self._host.world.struck("out_of_memory")
                if is_late:
                    original(*args, **options)
                raise torch.OutOfMemoryError("out of memory")

            return patch.object(StageTrainer, name, fail)

        with failing("forward"), failing("backward"):
            yield

    def _end(self, entry: _Job, seconds: float, outcome: tuple[Any, Exception | None] | None) -> None:
        if self._running is not entry:
            return  # the host is dead
        value, error = outcome or self._compute(entry)
        self._busy_s += seconds
        if entry.priority in (Priority.FORWARD, Priority.BACKWARD):
            self._trained_s = asyncio.get_running_loop().time()
            if entry.speed is not None and entry.num_samples and error is None:
                entry.speed.observe(entry.priority, seconds, entry.num_samples)
        self._running = None
        if not entry.future.done():
            if error is None:
                entry.future.set_result(value)
            else:
                entry.future.set_exception(error)
        self._begin_next()

"""The machine that a peer runs on: its clock, its random numbers, its threads and its files, for a PeerContext."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import numpy.typing as npt

Result = TypeVar("Result")


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """Seconds since the machine started; never goes back."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Seconds since 1970, as far as this machine knows."""
        return time.time()


def local_time(unix_s: float) -> tuple[str, int]:
    """A time on this machine's clocks: the date, and seconds since its midnight."""
    local = time.localtime(unix_s)
    return time.strftime("%Y-%m-%d", local), local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec


@dataclass(frozen=True)
class SystemRandom:
    """Random numbers: streams that a seed determines, and tokens from the machine's entropy."""

    seed: str

    def stream(self, purpose: str) -> random.Random:
        """A generator that the seed and the purpose determine."""
        return random.Random(f"{self.seed} {purpose}")

    def token(self, num_bytes: int) -> bytes:
        """Bytes that nobody can guess."""
        return os.urandom(num_bytes)


class SystemThreads:
    """Threads of this process: anyio's worker threads, and daemon threads for work that is long or may hang."""

    async def run(self, function: Callable[..., Result], *args: object, abandon_on_cancel: bool = False) -> Result:
        """Run a function in a worker thread and return its result."""
        if not abandon_on_cancel:
            return await anyio.to_thread.run_sync(lambda: function(*args))
        # Python 3.14 returns a result that is there already without a turn of the event loop, which others wait for.
        await anyio.lowlevel.checkpoint()
        # The process does not end before anyio's worker threads do, so what may hang has a daemon thread.
        result = Future[Result]()
        result.set_running_or_notify_cancel()  # so that it may be set even if nobody waits for it any more

        def work() -> None:
            try:
                result.set_result(function(*args))
            except BaseException as error:  # raised in the task that waits
                result.set_exception(error)

        self.start(work, "abandonable")
        return await asyncio.wrap_future(result)

    def start(self, target: Callable[[], None], name: str) -> Callable[[float], None]:
        """Start a daemon thread. Returns a function that waits for its end, at most for so many seconds."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread.join


@dataclass(frozen=True)
class FolderStorage:
    """Files in one folder, which the first `write` makes."""

    folder: Path

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file that appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{name}.partial"
        try:
            with partial.open("wb") as file:
                for part in parts:
                    file.write(part)
            partial.replace(self.folder / name)
        finally:
            partial.unlink(missing_ok=True)

    def map(self, name: str) -> npt.NDArray[np.uint8]:
        """A file's bytes, mapped into memory, read-only."""
        return np.memmap(self.folder / name, np.uint8, "r")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

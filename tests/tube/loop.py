"""An event loop whose clock jumps to the next timer, and in which everything happens in the same order each time.

Sets are the trap: their order follows from hashes, and those of tasks, futures and scopes from their addresses. So all
of them get serial numbers for hashes here. Strings need PYTHONHASHSEED, which __main__.py sets.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any, TypeVar

import anyio._backends._asyncio as anyio_asyncio
from anyio._core._eventloop import sniffio  # None if it is not installed

from swarm_peer.runtime.host.processes import is_dropped_by_hivemind

T = TypeVar("T")

# So often the loop goes round without time passing.
MOST_ROUNDS_AT_ONCE = 200
# The host that the present task belongs to: set by Host, inherited by all tasks that its tasks start.
HOST: contextvars.ContextVar[Any] = contextvars.ContextVar("HOST", default=None)
# For what goes on though the host that began it is halted.
OUTSIDE = contextvars.Context()


class NumberedFuture(asyncio.Future[Any]):
    """A future that hashes to a serial number, which it gets when it is first asked for. Most are never asked."""

    _serial: int | None = None

    def __hash__(self) -> int:
        if self._serial is None:
            self._serial = self.get_loop().next_serial()  # type: ignore[attr-defined]
        return self._serial


class NumberedTask(asyncio.Task[Any]):
    """A task that hashes to its serial number, and knows its host."""

    def __init__(self, serial: int, coroutine: Generator[Any, None, Any], **options: Any):
        self._serial = serial
        context = options.get("context")
        self.host = HOST.get() if context is None else context.get(HOST)
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._serial


class NumberedScope(anyio_asyncio.CancelScope):
    """A cancel scope that hashes to its serial number."""

    _serials = itertools.count()

    def __init__(self, *args: Any, **options: Any):
        self._serial = next(self._serials)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._serial


class _Jump(selectors.DefaultSelector):
    """In place of waiting for the next timer, has the clock jump to it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: TubeLoop | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop is not None
        self.loop.jump(timeout)
        return []


class _Halting(deque[asyncio.Handle]):
    """What is to be called next; what belongs to a host that is halted is set aside when its turn comes."""

    def __init__(self, handles: Iterable[asyncio.Handle], loop: TubeLoop):
        super().__init__(handles)
        self._nothing = asyncio.Handle(lambda: None, (), loop)
        self._nothing.cancel()

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        host = handle._context.get(HOST)  # type: ignore[attr-defined]
        if host is None or not host.is_stalled:
            return handle
        host.set_aside.append(handle)
        return self._nothing


class TubeLoop(asyncio.SelectorEventLoop):
    """Virtual time, numbered tasks, and executors that run their functions at once.

    Attributes:
        complaints: what asyncio reports that nobody handles, with the host that it is of
    """

    def __init__(self) -> None:
        selector = _Jump()
        self._now = 0.0
        self._rounds_at_once = 0
        super().__init__(selector)
        selector.loop = self
        self._serials = itertools.count()
        self.tasks: dict[NumberedTask, None] = {}
        self.complaints: list[tuple[Any, str]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._now

    def jump(self, timeout: float | None) -> None:
        """Go on to the next timer, if nothing is to be done before it."""
        if timeout is None:
            raise RuntimeError("every task waits, and no timer will wake any of them")
        self._rounds_at_once = 0 if timeout > 0 else self._rounds_at_once + 1
        # anyio calls a cancelled task again and again until it ends, and it may have to wait for something.
        if timeout > 0 or (self._rounds_at_once > MOST_ROUNDS_AT_ONCE and self._scheduled):  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]

    def halt(self, is_any_halted: bool) -> None:
        """From now on, hosts may be halted; or none is any more. Costs time as long as some are."""
        handles: Iterable[asyncio.Handle] = self._ready  # type: ignore[has-type]
        self._ready = _Halting(handles, self) if is_any_halted else deque(handles)

    def go_on(self, handles: Iterable[asyncio.Handle]) -> None:
        """Call what was set aside while its host was halted."""
        self._ready.extend(handles)

    def create_future(self) -> NumberedFuture:
        return NumberedFuture(loop=self)

    def next_serial(self) -> int:
        return next(self._serials)

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> NumberedTask:
        task = NumberedTask(next(self._serials), coroutine, loop=self, **options)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> Any:
        """hivemind encodes and reduces in executors."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _complain(self, loop: Any, context: dict[str, Any]) -> None:
        if is_dropped_by_hivemind(context):
            return
        task = context.get("task") or context.get("future")
        about = f"{context['message']}: {context.get('exception')!r} {task!r:.300}"
        self.complaints.append((getattr(task, "host", None), about))


def _tell_sniffio(library: str | None) -> None:
    """Tell it which library runs: it would otherwise look for the task, a million times."""
    if sniffio is not None:
        sniffio.thread_local.name = library


def run(function: Callable[[TubeLoop], Awaitable[T]]) -> T:
    """Run a coroutine function in a loop of its own."""
    kept = anyio_asyncio.CancelScope
    anyio_asyncio.CancelScope = NumberedScope  # type: ignore[misc]
    NumberedScope._serials = itertools.count()
    loop = TubeLoop()
    _tell_sniffio("asyncio")
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(function(loop))
    finally:
        anyio_asyncio.CancelScope = kept  # type: ignore[misc]
        asyncio.set_event_loop(None)
        loop.close()
        _tell_sniffio(None)

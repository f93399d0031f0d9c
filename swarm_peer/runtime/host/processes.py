"""Child processes that do not outlive their parent, and the event loop and its signals."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import anyio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
# Texts in the errors that asyncio reports when a peer closes its connection to hivemind.
_HANGING_UP = ("coro=<ControlClient._handler()", "RuntimeError('cannot reuse already awaited coroutine')")
# asyncio reports a future whose error nobody has taken in these words, and a task or a callback in others.
_NOBODY_ASKED = "Future exception was never retrieved"
# The task in which hivemind's client writes to its daemon.
_WRITING = "coro=<ControlClient._write_to_persistent_conn()"


def in_own_session(command: list[str]) -> list[str]:
    """A command that a terminal's Ctrl+C does not reach, where the system has the program for that: each Linux has.

    It becomes the command, under the same process id.
    """
    setsid = shutil.which("setsid")
    return [setsid, *command] if setsid else command


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent dies. To be called at the very beginning of a child process.

    On other systems than Linux it does nothing.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)


def free_memory() -> None:
    """Give memory that nothing refers to any more back to the system. Takes some tens of milliseconds."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc alone keeps freed memory for later, and has it
        libc.malloc_trim(0)


def spare_imports() -> None:
    """Keep the garbage collector off all that has been imported. To be called once, before the event loop runs.

    A full collection visits every object, and would hold up the event loop for a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()


def run_loop(function: Callable[..., Awaitable[T]], *args: object) -> T:
    """Run a coroutine function in an event loop of uvloop. Raises the first error of its task groups on its own."""

    results: list[T] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        # Not returned: when asyncio puts the signal handlers back, it makes a text of the task and of what it returned,
        # and throws it away. For the tensors of all stages that takes a second.
        results.append(await function(*args))

    with first_error():
        anyio.run(run, backend_options={"use_uvloop": True})
    return results[0]


@contextmanager
def first_error() -> Iterator[None]:
    """Have the first error of the task groups within leave them on its own, rather than in a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def is_dropped_by_hivemind(context: dict[str, Any]) -> bool:
    """Whether asyncio reports something that is no error, since hivemind has dropped it on purpose.

    hivemind's client drops its tasks when a peer hangs up. Its averaging drops a future with a timeout when this peer
    ends the averaging round before a silent member's time is over. Its client also fails to write when its daemon ends
    with the program; if the daemon dies before, `SwarmDHT.watch` says so.
    """
    what = f"{context['message']} {context.get('task')} {context.get('exception')!r}"
    error, future = context.get("exception"), context.get("future")
    failed_to_write = isinstance(error, ConnectionError) and _WRITING in repr(future)
    timed_out = isinstance(error, asyncio.TimeoutError) and context["message"] == _NOBODY_ASKED
    return failed_to_write or timed_out or any(words in what for words in _HANGING_UP)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the event loop."""
    if is_dropped_by_hivemind(context):
        log.debug("dropped_by_hivemind message=%s reason=%r", context["message"], context.get("exception"))
    else:
        loop.default_exception_handler(context)


@asynccontextmanager
async def signals_set(event: anyio.Event) -> AsyncIterator[None]:
    """While the context is open, SIGTERM, SIGINT and SIGHUP set the event. A second signal ends the process at once.

    SIGHUP tells of a terminal that was closed, perhaps twice: both the kernel and the shell send it. nohup has a
    program ignore it, and this one does then.
    """

    async def listen(received: AsyncIterator[signal.Signals]) -> None:
        log.info("leaving reason=%s", (await anext(received)).name)
        event.set()
        again = await anext(received)
        while again == signal.SIGHUP:
            again = await anext(received)
        log.warning("leaving_at_once reason=%s", again.name)
        os._exit(128 + again)  # libp2p's daemon ends within seconds of its owner

    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, *hangup) as received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, received)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

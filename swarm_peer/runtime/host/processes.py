"""Child processes that do not outlive their parent, the event loop and its signals, and how a process starts anew."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from pydantic import TypeAdapter

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
# The environment variable that hands a Restart to the process that starts anew. Users do not set it.
_RESTART = "SWARM_RESTART"
# Texts in the errors that asyncio reports when a peer closes its connection to hivemind.
_HANGING_UP = ("coro=<ControlClient._handler()", "RuntimeError('cannot reuse already awaited coroutine')")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The facts that a process keeps when it starts anew as another peer, mostly of another stage.

    Attributes:
        stage: the stage that the new peer serves
        from_stage: the stage that the old peer served
        peer_id: id of the old peer
        run_id: id of the run
        initial_peers: addresses that the old peer was connected to; those on the command line may be gone
        snapshots: folder of the old peer's snapshots, of which there may be no other copies
    """

    stage: int
    from_stage: int
    peer_id: str
    run_id: str | None = None
    initial_peers: tuple[str, ...] = ()
    snapshots: str | None = None


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


def spare_imports() -> None:
    """Keep the garbage collector off all that has been imported. To be called once, before the event loop runs.

    A full collection visits every object, and would hold up the event loop for a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()


def run_loop(function: Callable[..., Awaitable[T]], *args: object) -> T:
    """Run a coroutine function in an event loop of uvloop. Raises the first error of its task groups on its own."""

    async def run() -> T:
        asyncio.get_running_loop().set_exception_handler(_report)
        return await function(*args)

    with first_error():
        return anyio.run(run, backend_options={"use_uvloop": True})


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


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the event loop. hivemind's client drops its tasks when a peer hangs up, which is no error."""
    what = f"{context['message']} {context.get('task')} {context.get('exception')!r}"
    if any(words in what for words in _HANGING_UP):
        log.debug("peer_hung_up reason=%s", what)
    else:
        loop.default_exception_handler(context)


def start_anew(restart: Restart) -> None:
    """Replace this process by a new one of the same command, which serves `restart.stage`. Does not return.

    The averager of the new stage has to be forked before this process computes or uses CUDA. So a peer that changes its
    stage starts anew; only its process id stays.
    """
    os.environ[_RESTART] = TypeAdapter(Restart).dump_json(restart).decode()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def take_restart() -> Restart | None:
    """Take the restart that `start_anew` left in the environment; None after an ordinary start, or the second time."""
    restart = os.environ.pop(_RESTART, None)
    return None if restart is None else TypeAdapter(Restart).validate_json(restart)


@asynccontextmanager
async def signals_set(*events: anyio.Event) -> AsyncIterator[None]:
    """While the context is open, SIGTERM and SIGINT set the events. A second signal ends the process at once."""

    async def listen(received: AsyncIterator[signal.Signals]) -> None:
        log.info("leaving reason=%s", (await anext(received)).name)
        for event in events:
            event.set()
        await anext(received)
        raise KeyboardInterrupt

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, received)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

"""Child processes that never outlive us, the event loop and its signals, and how a process starts anew."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
# From one life of a peer's process to the next; nothing that a user sets.
_RESTART = "SWARM_RESTART"
_HANGING_UP = ("coro=<ControlClient._handler()", "RuntimeError('cannot reuse already awaited coroutine')")


@dataclass(frozen=True, slots=True)
class Restart:
    """What a peer that starts anew knows of its life before.

    Attributes:
        stage: to serve now
        from_stage: that it served
        peer_id: that it had
        run_id: of the run that it is in
        initial_peers: addresses that it was connected to; those on the command line may be gone
        snapshots: folder of those that it keeps: there may be no others of them
    """

    stage: int
    from_stage: int
    peer_id: str
    run_id: str | None = None
    initial_peers: tuple[str, ...] = ()
    snapshots: str | None = None


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel kill this process when its parent dies. To be called first thing in a child.

    Without it, a peer that is killed leaves its DHT, averager and libp2p daemon running, and the swarm goes on using
    them. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def prepare_to_fork() -> None:
    """Have the child share this process's memory for good. To be called right before each fork.

    The garbage collector writes to every object that it looks at, and what is written to is copied. Without this, the
    first full collection in each process, minutes to hours from now, has it hold all imported modules for itself: some
    100 MB in each of a peer's three.
    """
    gc.collect()
    gc.freeze()
    # It finds nothing, and that is what counts: a full collection comes when the objects have grown by a quarter since
    # the last one, and without this, the frozen ones would be among them.
    gc.collect()


def run_loop(function: Callable[..., Any], *args: object) -> Any:
    """Run a coroutine function in an event loop of uvloop; the first error of its task groups is raised bare."""

    async def run() -> Any:
        asyncio.get_running_loop().set_exception_handler(_report)
        return await function(*args)

    try:
        return anyio.run(run, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """hivemind's client drops its tasks when a peer hangs up, which asyncio calls errors."""
    what = f"{context['message']} {context.get('task')} {context.get('exception')!r}"
    if any(words in what for words in _HANGING_UP):
        log.debug("peer_hung_up reason=%s", what)
    else:
        loop.default_exception_handler(context)


def start_anew(restart: Restart) -> None:
    """Replace this process by a new one of the same command, which serves `restart.stage`. Does not return.

    A new averager has to be forked before anything computes and before CUDA, so a peer that changes its stage begins
    from the beginning; its process id stays.
    """
    os.environ[_RESTART] = json.dumps(dataclasses.asdict(restart))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def restarted_with() -> Restart | None:
    """What `start_anew` was given; None after an ordinary start. Once."""
    restart = os.environ.pop(_RESTART, None)
    if restart is None:
        return None
    fields = json.loads(restart)
    return Restart(**fields | {"initial_peers": tuple(fields.get("initial_peers", ()))})


@asynccontextmanager
async def signals_set(*events: anyio.Event) -> AsyncIterator[None]:
    """SIGTERM and SIGINT set the events; a second one ends the process at once."""

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

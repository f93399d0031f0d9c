"""Shows a run in a browser while its coordinator works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from coordinator.dashboard.from_folder import invite_labels, read_history
from coordinator.dashboard.history import History
from coordinator.dashboard.run_page import Facts, RunPage
from coordinator.dashboard.server import showing
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from swarm_peer.runtime.host.machine import SystemClock


@asynccontextmanager
async def shown(
    service: RunService, options: RunOptions, say: Callable[[str], None], *, join: Callable[[], str] = lambda: ""
) -> AsyncIterator[None]:
    """Show the run at `options.dashboard`, if that names a place, while the context is open.

    Args:
        say: told the link
        join: finds the line with which a machine joins; empty if there is none yet

    Raises:
        UserError: this machine cannot listen there
    """
    if options.dashboard is None:
        yield
        return
    page = RunPage(
        watch=service.watch,
        journal=service.journal,
        contributions=service.contributions,
        history=read_history(options.output) if options.resume else History(),
        clock=SystemClock(),
        facts=Facts(
            labels=invite_labels(options.output),
            join=join,
            begun_s=lambda: service.begun_s,
            ended=lambda: service.ended or "",
        ),
    )
    async with showing(page, options.dashboard, say, folder=options.output):
        yield

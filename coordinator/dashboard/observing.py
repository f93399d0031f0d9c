"""Shows a live run on any machine, as an observer: as long as any of its peers lives, coordinator or not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from coordinator.dashboard.from_folder import invite_labels, known_events, read_history
from coordinator.dashboard.history import History
from coordinator.dashboard.run_page import Facts, RunPage
from coordinator.dashboard.server import showing
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.journal import Journal
from coordinator.watch.observer import LiveRun, observe, observe_run
from coordinator.watch.pulse import CoordinatorPulse
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.what_is_trained import training_line
from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.processes import spare_imports
from swarm_peer.runtime.network.assignments import find_end
from swarm_peer.wire.records import CoordinationRecord, TimelineRecord, timeline_key

LOOK_S = 2.0


class Observing:
    """Looks at a live run again and again, and shows what it sees.

    Args:
        place: host and port of the page
        journal, contributions, history: what is known of the run from before, begun already
        labels: see RunPage
        say: told the link
    """

    def __init__(
        self,
        *,
        run: LiveRun,
        place: tuple[str, int],
        journal: Journal,
        contributions: ContributionEstimates,
        history: History,
        labels: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
    ):
        self._run = run
        self._place = place
        self._journal = journal
        self._contributions = contributions
        self._history = history
        self._labels = labels
        self._say = say
        self._watch = RunWatch(run.manifest, SwarmView(run.manifest.stages.count))
        self._pulse = CoordinatorPulse(run.manifest.limits.announcement_s)
        self._silent: Term | None = None
        self._clock = SystemClock()
        self._begun_s: float | None = None
        self._ended = ""

    async def show(self) -> None:
        """Show the run until a signal comes."""
        page = RunPage(
            watch=self._watch,
            journal=self._journal,
            contributions=self._contributions,
            history=self._history,
            clock=self._clock,
            facts=Facts(labels=self._labels, begun_s=lambda: self._begun_s, ended=lambda: self._ended),
        )
        async with anyio.create_task_group() as tasks, showing(page, self._place, self._say):
            tasks.start_soon(self._run.directory.run_polling, range(self._run.manifest.stages.count))
            tasks.start_soon(self._look)
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                await anext(signals)
            tasks.cancel_scope.cancel()

    async def _look(self) -> None:
        while True:
            with suppress(CallError):  # the DHT has logged it
                await self.look_once()
            await anyio.sleep(LOOK_S)

    async def look_once(self) -> None:
        """Take in what the DHT says now.

        Raises:
            CallError: it does not answer
        """
        run, watch = self._run, self._watch
        await observe(run.dht, run.directory.view, watch)
        records = await run.dht.fetch_coordination(run.run_id)
        newest = max(records.items(), default=None, key=lambda said: said[0])
        self._observe_coordinator(self._pulse.living(newest, self._clock.monotonic_s()))
        self._journal.look(watch, self._clock.unix_s())
        self._contributions.look(watch, self._clock.unix_s())
        if self._begun_s is None:
            timelines = await run.dht.fetch(timeline_key(run.run_id), TimelineRecord, run.run_id)
            self._begun_s = next((float(each.begun) for each in timelines.values()), None)
        if not self._ended and (end := await find_end(run.dht, run.run_id)) is not None:
            self._ended = end.reason
            self._journal.tell("ended", f"The run has ended: {end.reason}.", self._clock.unix_s())

    def _observe_coordinator(self, living: tuple[Term, CoordinationRecord] | None) -> None:
        before = self._watch.coordination
        self._watch.observe_coordinator(living)
        text = ""
        if living is not None and living[0] == self._silent:
            self._silent, text = None, f"Coordinator …{living[0].coordinator[-8:]} is heard again."
        elif living is None and before is not None:
            self._silent = before[0]
            text = f"Coordinator …{before[0].coordinator[-8:]} has fallen silent. Training goes on without it."
        if text:
            self._journal.tell("coordinator", text, self._clock.unix_s())


def observe_and_show(
    addresses: Sequence[str], run_id: str | None, place: tuple[str, int], folder: Path | None = None
) -> None:
    """Show a live run until a signal comes.

    Args:
        addresses, run_id: see observe_run
        place: host and port of the page
        folder: of the run, if it is on this machine: it tells of the time before

    Raises:
        UserError: nobody answers, there is no such run, or this machine cannot listen there
    """
    history = History() if folder is None else read_history(folder)
    contributions = ContributionEstimates(folder, is_writer=False)
    contributions.begin(resume=True)

    async def show(run: LiveRun) -> None:
        journal = Journal(is_revoked=run.dht.passes.is_revoked)
        known = [] if folder is None else known_events(folder)
        journal.begin(lifetime_s=run.manifest.limits.announcement_s, now_s=time.time(), known=known)
        labels: Callable[[], Mapping[str, str]] = dict if folder is None else invite_labels(folder)
        observing = Observing(
            run=run,
            place=place,
            journal=journal,
            contributions=contributions,
            history=history,
            labels=labels,
            say=partial(print, flush=True),
        )
        await to_thread.run_sync(training_line, run.manifest)  # what it imports would hold the page up
        await observing.show()

    spare_imports()
    observe_run(addresses, run_id, show)

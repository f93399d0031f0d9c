"""Keeps what the page of one run shows: what is seen of the run now, and what is known of it from before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from coordinator.dashboard.history import History
from coordinator.dashboard.snapshot import Background, events_by_number, make_snapshot
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.journal import Journal
from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.view import PeerView
from swarm_peer.runtime.context import Clock

# A peer that is gone stays on the page for so long, so that those who look see which one it was.
GONE_SHOWN_S = 120.0
MAX_GONE = 100
LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Functions that find what cannot be seen by looking at a run's peers.

    Attributes:
        labels: the label of the invite that each peer came by, as far as it is known
        join: the line with which a machine joins; empty if it is not for those who look
        begun_s: when the run began, in Unix seconds
        ended: why the run is over; empty if it is not
    """

    labels: Callable[[], Mapping[str, str]] = dict
    join: Callable[[], str] = lambda: ""
    begun_s: Callable[[], float | None] = lambda: None
    ended: Callable[[], str] = lambda: ""


NO_FACTS = Facts()


class RunPage:
    """The state of the page of one run. Belongs to the event loop's thread.

    Args:
        watch: what is seen of the run
        history: the curves so far
        facts: what cannot be seen by looking at the peers
    """

    def __init__(
        self,
        *,
        watch: RunWatch,
        journal: Journal,
        contributions: ContributionEstimates,
        history: History,
        clock: Clock,
        facts: Facts = NO_FACTS,
    ):
        self._watch = watch
        self._journal = journal
        self._contributions = contributions
        self._history = history
        self._clock = clock
        self._facts = facts
        self._seen: dict[str, PeerView] = {}
        self._gone: dict[str, tuple[PeerView, float]] = {}  # with the time at which it was missed

    async def run(self) -> None:
        """Take in what is seen of the run, whether or not anybody looks at the page; for ever."""
        while True:
            self.look()
            await anyio.sleep(LOOK_S)

    def look(self) -> None:
        """Take in what is seen of the run now."""
        self._history.add(self._watch.lines, self._watch.returns)
        now_s = self._clock.monotonic_s()
        seen = {peer.peer_id: peer for peer in self._watch.view.peers}
        self._gone |= {peer_id: (peer, now_s) for peer_id, peer in self._seen.items() if peer_id not in seen}
        shown = [
            (peer_id, entry)
            for peer_id, entry in self._gone.items()
            if peer_id not in seen and now_s - entry[1] < GONE_SHOWN_S
        ]
        self._gone = dict(shown[-MAX_GONE:])
        self._seen = seen

    def state(self) -> dict[str, Any]:
        """All that the page shows, in JSON's types."""
        background = Background(
            given=self._contributions.given,
            labels=self._facts.labels(),
            gone=[peer for peer, _ in self._gone.values()],
            begun_s=self._facts.begun_s(),
            join=self._facts.join(),
            ended=self._facts.ended(),
        )
        state = make_snapshot(self._watch, background, self._clock.unix_s())
        state["events"] = events_by_number(list(self._journal.newest), self._journal.num_events)
        state["history"] = self._history.points()
        return state

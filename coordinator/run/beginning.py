"""Where and when a run began, and how far it has come, as its coordinators publish it.

Peers begin there if nothing was computed since. Newcomers that see no other peer learn from it that something was.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.wire.records import TimelineRecord, timeline_key

# Pause between looks at how far the run is, and at the DHT while it does not answer.
LOOK_S = 2.0


class Beginning:
    """The beginning of one run, as one of its coordinators knows it. Belongs to the event loop's thread.

    Args:
        now_s: Unix time, at which the run begins if no other coordinator began it earlier

    Attributes:
        timeline: the run's first timeline
        begun_s: Unix seconds at which the run began, or was resumed
        is_known: whether a record of it, another coordinator's or an own one, has been found in the DHT
        reached: the latest round that a coordinator has seen the run in, and the optimizer step of its weights
        told: what the DHT has taken of that from this coordinator
    """

    def __init__(self, dht: SwarmDHT, run_id: str, now_s: float):
        self._dht = dht
        self._run_id = run_id
        self.timeline = FIRST_TIMELINE
        self.begun_s = int(now_s)
        self.is_known = False
        self.reached = self.told = 0, 0
        self._void = 0, 0  # what was seen up to here was before the run was resumed

    async def find(self) -> None:
        """Find out what another coordinator has published, if the run is under way; wait until the DHT answers."""
        while not await self.learn():  # noqa: ASYNC110 (nobody tells when the DHT answers again)
            await anyio.sleep(LOOK_S)

    async def learn(self) -> bool:
        """Take over what another coordinator has published, if that one knows better; returns whether the DHT answers.

        The run may have been resumed since this coordinator began to watch it.
        """
        try:
            records = await self._dht.fetch(timeline_key(self._run_id), TimelineRecord, self._run_id)
        except CallError:
            return False
        known = records.get(self._run_id)
        self.is_known |= known is not None
        if known is not None and self._is_better(known.timeline(), known.begun):
            if known.timeline() != self.timeline:  # the run was resumed: what it had come to before is void
                self._void, self.reached, self.told = max(self._void, self.reached), (0, 0), (0, 0)
            self.timeline, self.begun_s = known.timeline(), known.begun
        if known is not None and known.timeline() == self.timeline:
            self.reached = max(self.reached, known.reached())
        return True

    def begin_anew(self, timeline: Timeline, now_s: float) -> None:
        """Have the run go on from another timeline, by this coordinator's will: what it had come to is void."""
        self._void, self.reached, self.told = max(self._void, self.reached), (0, 0), (0, 0)
        self.timeline, self.begun_s = timeline, max(int(now_s), self.begun_s + 1)  # others believe the newer one

    def has_begun_after(self, unix_s: float) -> bool:
        """Whether somebody is known to have begun or resumed the run after this time."""
        return self.is_known and self.begun_s > unix_s

    def _is_better(self, timeline: Timeline, begun_s: int) -> bool:
        if timeline == self.timeline:
            return begun_s < self.begun_s  # a coordinator that found no record takes the run for new
        if FIRST_TIMELINE in (timeline, self.timeline):
            return self.timeline == FIRST_TIMELINE
        return begun_s > self.begun_s

    async def follow(self, position: Callable[[], tuple[int, int]], seconds: float) -> None:
        """Note for a while how far the run is; only until its first step, if nobody has been told of one.

        Newcomers must hear of that step: from then on they do not begin anew.

        Args:
            position: the round that this coordinator sees the run in, and its optimizer step
        """
        with anyio.move_on_after(seconds):
            while True:
                await anyio.sleep(LOOK_S)
                self.see(*position())
                if self.reached != (0, 0) and self.told == (0, 0):
                    return

    def see(self, round_number: int, optimizer_step: int) -> None:
        """Note that this coordinator has seen the run in a round."""
        seen = round_number, optimizer_step
        if seen > self._void:
            self.reached = max(self.reached, seen)

    def record(self) -> TimelineRecord:
        """The record that this coordinator publishes."""
        return TimelineRecord(
            first_round=self.timeline.first_round,
            first_optimizer_step=self.timeline.first_optimizer_step,
            begun=self.begun_s,
            reached_round=self.reached[0],
            reached_optimizer_step=self.reached[1],
        )

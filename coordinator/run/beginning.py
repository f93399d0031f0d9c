"""Where and when a run began, and how far it has come, as its coordinators publish it for those who look at the run.

The run's epochs say where it begins: this record follows them. A coordinator that knows no epoch learns from it that
the run has made steps, so that it must not begin it anew.
"""

from __future__ import annotations

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.wire.records import TimelineRecord, timeline_key

# Pause between looks at the DHT while it does not answer.
LOOK_S = 2.0


class Beginning:
    """The beginning of one run, as one of its coordinators knows it. Belongs to the event loop's thread.

    Args:
        now_s: Unix time, at which the run begins as long as nobody has told another

    Attributes:
        timeline: the run's first timeline, or the one that it was resumed with
        begun_s: Unix seconds at which the run began, or was resumed
        reached: the latest round that a coordinator has seen the run in since, and the optimizer step of its weights
    """

    def __init__(self, dht: SwarmDHT, run_id: str, now_s: float):
        self._dht = dht
        self._run_id = run_id
        self.timeline = FIRST_TIMELINE
        self.begun_s = int(now_s)
        self.reached = 0, 0

    async def find(self) -> None:
        """Take over what another coordinator has published, if the run is under way; wait until the DHT answers."""
        while (records := await self._records()) is None:  # noqa: ASYNC110 (nobody tells when it answers again)
            await anyio.sleep(LOOK_S)
        if (known := records.get(self._run_id)) is not None:
            self.timeline, self.begun_s, self.reached = known.timeline(), known.begun, known.reached()

    def follow(self, timeline: Timeline, begun_s: int) -> None:
        """Take over where the run's epochs say that it began, or was resumed: what it had come to before is void.

        Args:
            begun_s: when the newest term of its epochs began, which may be one of the same beginning
        """
        if timeline == self.timeline:
            self.begun_s = min(self.begun_s, begun_s)
        else:
            self.timeline, self.begun_s, self.reached = timeline, begun_s, (0, 0)

    async def learn(self) -> None:
        """Take over how far other coordinators have seen the run come."""
        known = (await self._records() or {}).get(self._run_id)
        if known is not None and known.timeline() == self.timeline:
            self.reached = max(self.reached, known.reached())

    def see(self, round_number: int, optimizer_step: int) -> None:
        """Note that this coordinator has seen the run in a round."""
        if round_number > self.timeline.first_round:
            self.reached = max(self.reached, (round_number, optimizer_step))

    def record(self) -> TimelineRecord:
        """The record that this coordinator publishes."""
        return TimelineRecord(
            first_round=self.timeline.first_round,
            first_optimizer_step=self.timeline.first_optimizer_step,
            begun=self.begun_s,
            reached_round=self.reached[0],
            reached_optimizer_step=self.reached[1],
        )

    async def _records(self) -> dict[str, TimelineRecord] | None:
        """The records of the run; None if the DHT does not answer."""
        try:
            return await self._dht.fetch(timeline_key(self._run_id), TimelineRecord, self._run_id)
        except CallError:
            return None

"""Has a peer obey its owner: looks at clock, files, use of the machine and bytes sent, and says what follows.

The decision is that of policy/owner.py, and the peer acts on it.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from swarm_peer.policy.owner import OwnerPolicy, Pause, Reason, Seen
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.host.identities import KeptFile
from swarm_peer.runtime.host.machine import local_time
from swarm_peer.runtime.host.running_peers import PeerFiles, RunningPeer

log = logging.getLogger(__name__)

# Between two looks at files and clock, and at what else uses the machine, which costs some milliseconds.
LOOK_S = 0.5
LOOK_AT_USE_S = 2.0
# Between two times that the bytes of a day are written down. A process that is killed has sent so much uncounted.
KEEP_S = 5.0
# Between the decision to leave and the last microbatch, a peer sends about as much as in so many seconds before.
ON_THE_WAY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PeerCondition:
    """How a peer is, for its owner.

    Attributes:
        is_at_rest: whether it is paused and holds nothing of any stage
        left_alone: what becomes of the run, where it has left a stage that nobody else serves; else empty
        leaving_bytes: that it still sends if it is told to leave now, at the most
    """

    stage: int
    state: str
    note: str
    is_at_rest: bool
    left_alone: str
    leaving_bytes: int


class UseSight(Protocol):
    """One way to see what else uses the machine."""

    def look(self) -> str:
        """The other use of it now, in words; empty if there is none. May block for a second or two."""
        ...


class DailyCount:
    """The bytes that this peer has sent on one day, which outlive its process."""

    def __init__(self, file: KeptFile):
        self._file = file
        self._kept: tuple[str, int, str] | None = None
        self.day = self.spent_day = ""
        self.sent_bytes = 0
        try:
            kept = json.loads(file.read() or "{}")
            self.day, self.sent_bytes = str(kept.get("day", "")), int(kept.get("sent_bytes", 0))
            self.spent_day = str(kept.get("spent_day", ""))
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("daily_count_unreadable reason=%s: it begins with 0", error)

    def add(self, day: str, num_bytes: int) -> None:
        """Count bytes that were sent on a day."""
        if day != self.day:
            self.day, self.sent_bytes = day, 0
        self.sent_bytes += num_bytes

    def keep(self, spent_day: str) -> None:
        """Write it down, if it is not. May block."""
        self.spent_day = spent_day
        content = (self.day, self.sent_bytes, spent_day)
        if content != self._kept:
            self._kept = content
            self._file.write(json.dumps(dict(zip(("day", "sent_bytes", "spent_day"), content, strict=True))).encode())


class Owner:
    """Tells a peer when its owner wants it paused. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        context: PeerContext,
        policy: OwnerPolicy,
        count: DailyCount,
        sent_bytes: Callable[[], int],
        files: PeerFiles | None,
        sights: Sequence[UseSight] = (),
    ):
        """Make an owner who has not looked yet.

        Args:
            sent_bytes: how many this process has sent so far
            files: through which other shells speak with this peer; None if there are none
        """
        self._context = context
        self._policy = policy
        self._count = count
        self._sent_bytes = sent_bytes
        self._files = files
        self._sights = sights
        self._uses: dict[UseSight, str] = {}
        self._pause: Pause | None = None
        self._counted = 0
        self._sent = deque[tuple[float, int]]()  # lately: when, and how many bytes
        self._kept_s = context.clock.monotonic_s()

    async def run(self, condition: Callable[[], PeerCondition], obey: Callable[[Pause | None], None]) -> None:
        """Look again and again, until cancelled.

        Args:
            condition: of the peer now
            obey: called when it is to pause, for another reason than before, or not any more
        """
        try:
            async with anyio.create_task_group() as tasks:
                for sight in self._sights:
                    tasks.start_soon(self._watch, sight)
                while True:
                    await self._look(condition(), obey)
                    await anyio.sleep(LOOK_S)
        finally:
            self._count_sent(self._local()[0])
            self._count.keep(self._policy.spent_day or "")

    async def _watch(self, sight: UseSight) -> None:
        while True:
            self._uses[sight] = await self._context.threads.run(sight.look, abandon_on_cancel=True)
            await anyio.sleep(LOOK_AT_USE_S)

    async def _look(self, condition: PeerCondition, obey: Callable[[Pause | None], None]) -> None:
        now_s, (today, second) = self._context.clock.monotonic_s(), self._local()
        is_told = False
        if self._files is not None:
            is_told = await self._context.threads.run(self._files.is_told_to_pause)
        self._count_sent(today)
        seen = Seen(
            day=today,
            second=second,
            is_told_to_pause=is_told,
            use=next(filter(None, self._uses.values()), ""),
            sent_bytes=self._count.sent_bytes,
            leaving_bytes=condition.leaving_bytes + (0 if condition.is_at_rest else self._sent_lately(now_s)),
        )
        if (pause := self._policy.decide(now_s, seen)) != self._pause:
            log.info("owner_wants pause=%s", "no" if pause is None else pause.words)
            self._pause = pause
            self._context.metrics.show_pause(
                None if pause is None else pause.reason.value, [each.value for each in Reason]
            )
            obey(pause)
        if self._files is not None:
            about = RunningPeer(
                peer_id=self._context.identity.peer_id,
                name=self._context.options.name or "",
                run=self._context.resolved.manifest.name,
                stage=condition.stage,
                state=condition.state,
                note=condition.note,
                is_at_rest=condition.is_at_rest,
                left_alone=condition.left_alone,
            )
            await self._context.threads.run(self._files.show, about)
        if now_s - self._kept_s >= KEEP_S:
            self._kept_s = now_s
            await self._context.threads.run(self._count.keep, self._policy.spent_day or "")

    def _count_sent(self, today: str) -> None:
        sent_bytes = self._sent_bytes()
        new_bytes, self._counted = sent_bytes - self._counted, sent_bytes
        self._sent.append((self._context.clock.monotonic_s(), new_bytes))
        self._count.add(today, new_bytes)
        self._context.metrics.sent_today_bytes.set(self._count.sent_bytes)

    def _sent_lately(self, now_s: float) -> int:
        while self._sent and self._sent[0][0] < now_s - ON_THE_WAY_S:
            self._sent.popleft()
        return sum(num_bytes for _, num_bytes in self._sent)

    def _local(self) -> tuple[str, int]:
        return local_time(self._context.clock.unix_s())

"""How far each global step has come, as far as this peer knows: signs its own count, checks and merges others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.ledger import StepCount, StepLedger
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.signal import Signal
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import SignedCount
from swarm_peer.wire.records import Progress, open_envelope, parse, seal

# A count for a step further ahead than this is no progress but an attempt to fill our memory.
MAX_STEPS_AHEAD = 2


class ProgressBook:
    """The ledger with its signatures. Belongs to the event loop's thread."""

    def __init__(
        self,
        manifest_hash: str,
        global_batch_size: int,
        identity: Identity,
        is_author: Callable[[str], bool],
        metrics: PeerMetrics,
        changed: Signal,
    ):
        """Args:
        is_author: whether a peer is known to serve stage 0; has the directory look if it is not
        """
        self.ledger = StepLedger(global_batch_size)
        self.step = 0  # the oldest step of interest: this peer's own
        self.newest_step_seen = 0  # that any valid message spoke of
        # Told of others' news: (step, author, its count before)
        self.on_count: Callable[[int, str, StepCount], None] = lambda step, author, before: None
        self._run = manifest_hash
        self._identity = identity
        self._is_author = is_author
        self._metrics = metrics
        self._changed = changed
        self._signed: dict[int, dict[str, bytes]] = {}
        self._entered_at = time.monotonic()
        self._heard_at: dict[str, float] = {}  # when an author's count of this step last grew

    def count_own(self, step: int, count: StepCount) -> Progress:
        """Publish this stage-0 peer's own count on all calls and replies from now on."""
        record = Progress(
            step=step, samples=count.samples, claimed=count.claimed, loss_sum=count.loss_sum, ranges=count.ranges
        )
        if self.ledger.merge(step, self._identity.peer_id, count):
            self._keep(step, self._identity.peer_id, seal(record, self._run, self._identity))
        return record

    def signed_counts(self) -> tuple[SignedCount, ...]:
        """All counts of this peer's step, and of the one before for whoever has not closed it yet."""
        return tuple(
            (author, envelope)
            for step in (self.step - 1, self.step)
            for author, envelope in sorted(self._signed.get(step, {}).items())
        )

    def merge(self, counts: Iterable[SignedCount], *, vouched: bool = False) -> None:
        """Take over what is new of the counts that came with a message.

        Only peers that announce stage 0, or did, are believed. Of one that this peer has not seen yet, counts are
        dropped: they come again with the next message, and the sight of them has the directory look. This peer's own
        counts come back to it when it has started anew within a step: it goes on from them.

        Args:
            vouched: a stage-mate passes them on, who has seen their authors; they may have died since

        Raises:
            InvalidMessage: a count that is malformed or not signed by its author
        """
        for author, envelope in counts:
            if envelope in self._signed_values(author):
                continue
            if author != self._identity.peer_id and not (vouched or self._is_author(author)):
                self._metrics.invalid_messages.labels("count").inc()
                continue
            kind, run, body = open_envelope(envelope, author)
            if kind != Progress.kind or run != self._run:
                raise InvalidMessage(f"a {kind:.20} of run {run:.40} where a progress count was expected")
            record = parse(Progress, body, "progress count")
            # Claims stop at the global batch, give or take what others had not heard of yet.
            if not record.samples <= record.claimed <= 2 * self.ledger.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples, {record.claimed} claimed")
            # Samples that were given up are in the ranges, too.
            windows = sum(item.end - item.start for item in record.ranges)
            if windows > 2 * self.ledger.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples with ranges of {windows}")
            in_reach = self.step - 1 <= record.step <= self.step + MAX_STEPS_AHEAD
            before = self.ledger.count_of(record.step, author)
            if in_reach and self.ledger.merge(record.step, author, record.count()):
                self._keep(record.step, author, envelope)
                self._heard_at[author] = time.monotonic()
                self.on_count(record.step, author, before)

    def talkative(self, peers: Iterable[str], patience_s: float) -> set[str]:
        """Those of `peers` that have made progress of late; at the beginning of a step, all of them.

        Who is announced and never delivers (its data hangs, nobody reaches it) must not keep its share for ever.
        """
        oldest = time.monotonic() - patience_s
        return {peer for peer in peers if max(self._heard_at.get(peer, 0.0), self._entered_at) >= oldest}

    def enter(self, step: int) -> None:
        """Forget what is older than the step before `step`."""
        self.step = step
        self._entered_at = time.monotonic()
        self._heard_at.clear()
        self.ledger.forget_before(step - 1)
        for old in [known for known in self._signed if known < step - 1]:
            del self._signed[old]
        self._changed.notify()

    async def wait_until_over(self, step: int) -> None:
        """Wait until the global batch of `step` is full, or stage-mates are past it."""
        await self._changed.wait_for(lambda: self.ledger.is_full(step) or self.newest_step_seen > step)

    def saw_step(self, step: int) -> None:
        """Note that a stage-mate is in `step`."""
        if step > self.newest_step_seen:
            self.newest_step_seen = step
            self._changed.notify()

    def saw_stranger(self, peer_id: str) -> None:
        """Note that a peer is there which the directory does not know: it looks at its next turn (`is_author`)."""
        self._is_author(peer_id)

    def _signed_values(self, author: str) -> Iterable[bytes]:
        return [counts[author] for counts in self._signed.values() if author in counts]

    def _keep(self, step: int, author: str, envelope: bytes) -> None:
        self._signed.setdefault(step, {})[author] = envelope
        self._changed.notify()

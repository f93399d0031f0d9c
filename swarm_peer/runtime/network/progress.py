"""The progress counts of the current rounds: signs this peer's own count, checks and merges those of other peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.progress_counter import ProgressCounter, RoundCount
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.view import Life
from swarm_peer.runtime.context import PeerContext
from swarm_peer.wire.messages import SignedCount
from swarm_peer.wire.records import Progress, open_envelope, parse, seal

# A count of a round further ahead than this is not honest: it would only fill memory.
MAX_COUNTED_ROUNDS_AHEAD = 2


class ProgressBook:
    """The progress counter of a peer, with a signature for each count. Belongs to the event loop's thread.

    Attributes:
        counter: the counts
        author: this peer in its present life
        newest_round_seen: the newest round that a stage-mate has been in
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        incarnation: int,
        is_author: Callable[[str], bool],
        on_stranger: Callable[[str], None],
        step: Callable[[], StepState] = StepState,
    ):
        """Make a book without counts.

        Args:
            incarnation: which life of this peer counts; 0 for an observer, which counts nothing
            step: returns where this peer's replica stands; an observer has none
            is_author: whether a peer announces stage 0 or has announced it
            on_stranger: called with each peer whose message or count arrived before its announcement was seen
        """
        self.counter = ProgressCounter(context.resolved.manifest.training.global_batch_size)
        self.author = Life(context.identity.peer_id, incarnation)
        self.newest_round_seen = 0
        self._listeners: list[Callable[[int, Life, RoundCount], None]] = []
        self._context = context
        self._run = context.resolved.hash
        self._identity = context.identity
        self._is_author = is_author
        self._on_stranger = on_stranger
        self._signed: dict[int, dict[str, dict[int, bytes]]] = {}  # by round, peer and incarnation
        self._step = step
        self._heard_at: dict[str, float] = {}  # when a count of each peer last grew, in this round

    @property
    def round_number(self) -> int:
        """The round that this peer is in."""
        return self._step().round_number

    def count_own(self, round_number: int, count: RoundCount) -> Progress:
        """Set this stage-0 peer's own count of a round. All calls and replies carry it from now on."""
        record = Progress(
            round_number=round_number,
            samples=count.samples,
            claimed=count.claimed,
            loss_sum=count.loss_sum,
            ranges=count.ranges,
            incarnation=self.author.incarnation,
        )
        if self.counter.merge(round_number, self.author, count):
            self._keep(round_number, self.author, seal(record, self._run, self._identity))
        return record

    def signed_counts(self) -> tuple[SignedCount, ...]:
        """All counts of this peer's round, and of the previous one, which some peers may not have closed yet."""
        return tuple(
            (peer_id, envelope)
            for round_number in (self.round_number - 1, self.round_number)
            for peer_id, lives in sorted(self._signed.get(round_number, {}).items())
            for _, envelope in sorted(lives.items())
        )

    def merge(self, counts: Iterable[SignedCount], *, vouched: bool = False) -> None:
        """Take over the new ones of the counts that came with a message.

        Only peers that announce stage 0 or have announced it are believed. If this peer has not seen the author's
        announcement yet, the count is dropped: it comes again with the next message, and `on_stranger` has the
        directory look for the author. If too many lives of one peer have counted in a round already, those of further
        lives are dropped; a message is not refused for them, since whoever passes them on is not to blame.

        Args:
            vouched: a stage-mate passes the counts on, which has seen the announcements of their authors; this peer
                may never see them, if the authors have died since

        Raises:
            InvalidMessage: a count is malformed, or not signed by its author
        """
        for peer_id, envelope in counts:
            if envelope in self._signed_values(peer_id):
                continue
            if peer_id != self.author.peer_id and not (vouched or self._is_author(peer_id)):
                self._on_stranger(peer_id)
                self._context.metrics.invalid_messages.labels("count").inc()
                continue
            kind, run, body = open_envelope(envelope, peer_id)
            if kind != Progress.kind or run != self._run:
                raise InvalidMessage(f"a {kind:.20} of run {run:.40} where a progress count was expected")
            record = parse(Progress, body, "progress count")
            # Claims stop when the global batch is full. Peers that hear of others' claims late may add a few.
            if not record.samples <= record.claimed <= 2 * self.counter.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples, {record.claimed} claimed")
            # The ranges also hold samples that were given up, so they may exceed the count.
            windows = sum(item.end - item.start for item in record.ranges)
            if windows > 2 * self.counter.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples with ranges of {windows}")
            in_reach = -1 <= record.round_number - self.round_number <= MAX_COUNTED_ROUNDS_AHEAD
            author = Life(peer_id, record.incarnation)
            if not self.counter.may_count(record.round_number, author):
                self._context.metrics.invalid_messages.labels("count").inc()
                continue
            before = self.counter.count_of(record.round_number, author)
            if in_reach and self.counter.merge(record.round_number, author, record.count()):
                self._keep(record.round_number, author, envelope)
                self._heard_at[peer_id] = self._context.clock.monotonic_s()
                for listener in self._listeners:
                    listener(record.round_number, author, before)

    def active(self, peers: Iterable[str], patience_s: float) -> set[str]:
        """The peers whose counts have grown within the last `patience_s`; at the start of a round, all of `peers`.

        Some peer may announce stage 0 and never count anything, since its data cannot be read or no other peer can
        reach it. It must not keep its share of the global batch for ever.
        """
        oldest = self._context.clock.monotonic_s() - patience_s
        return {peer for peer in peers if max(self._heard_at.get(peer, 0.0), self._step().began_s) >= oldest}

    def forget_past(self) -> None:
        """Forget the counts of all rounds before the previous one."""
        self._heard_at.clear()
        oldest = self.round_number - 1
        self.counter.forget_before(oldest)
        self._signed = {known: counts for known, counts in self._signed.items() if known >= oldest}

    async def wait_until_over(self, round_number: int) -> None:
        """Wait until the global batch of the round is full, or a stage-mate is in a later round."""
        await self._context.changed.wait_for(
            lambda: self.counter.is_full(round_number) or self.newest_round_seen > round_number
        )

    def saw_round(self, round_number: int) -> None:
        """Note that a stage-mate is in this round."""
        if round_number > self.newest_round_seen:
            self.newest_round_seen = round_number
            self._context.changed.notify()

    def saw_stranger(self, peer_id: str) -> None:
        """Note that a peer exists which the directory does not know, so that the directory looks for it soon."""
        self._on_stranger(peer_id)

    def add_listener(self, listener: Callable[[int, Life, RoundCount], None]) -> None:
        """Have a function called for each new count that a message brings: (round, author, the author's old count)."""
        self._listeners.append(listener)

    def _signed_values(self, peer_id: str) -> Iterable[bytes]:
        return [envelope for counts in self._signed.values() for envelope in counts.get(peer_id, {}).values()]

    def _keep(self, round_number: int, author: Life, envelope: bytes) -> None:
        self._signed.setdefault(round_number, {}).setdefault(author.peer_id, {})[author.incarnation] = envelope
        self._context.changed.notify()

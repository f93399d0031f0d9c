"""The progress counts of the current rounds: signs this peer's own count, checks and merges those of other peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan, nan
from typing import Protocol

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.progress_counter import ProgressCounter, RoundCount
from swarm_peer.policy.run_progress import MAX_ROUND
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.view import Life
from swarm_peer.runtime.context import PeerContext
from swarm_peer.wire.fields import MAX_LOSS
from swarm_peer.wire.messages import SignedCount
from swarm_peer.wire.peeked_count import peek_count
from swarm_peer.wire.records import Progress, open_envelope, parse, seal

# A count of a round further ahead than this is not honest: it would only fill memory.
MAX_COUNTED_ROUNDS_AHEAD = 2
# Peers whose counts of one round are kept, and bytes of them: counts of honest peers have some hundred bytes each.
MAX_AUTHORS = 1024
MAX_ROUND_BYTES = 4 * 2**20
# Signatures that are checked for one message: some 30 ms. The counts that are left out come again with the next one.
MAX_CHECKED = 256
# Bytes of a count with its author's id that is not long, and of all in one message: half of a header at most. With each
# microbatch go fewer; the counts of a hundred peers fit.
MAX_SHORT_BYTES = 1024
MAX_MESSAGE_BYTES = 2**19
MAX_MICROBATCH_BYTES = 2**16


class Counts(Protocol):
    """The counts that travel with microbatches.

    Attributes:
        author: this peer in its present life
    """

    author: Life

    def signed_counts(self, max_bytes: int) -> tuple[SignedCount, ...]:
        """Counts to send along."""

    def merge(self, counts: Iterable[SignedCount]) -> int:
        """Take counts that came along. Returns how many were left out."""

    def saw_stranger(self, peer_id: str) -> None:
        """Note that a peer exists which the directory does not know."""


class NoCounts:
    """No counts travel with microbatches. Callers that are not known yet are looked for."""

    def __init__(self, author: Life, saw_stranger: Callable[[str], None]):
        self.author = author
        self.saw_stranger = saw_stranger

    def signed_counts(self, max_bytes: int) -> tuple[SignedCount, ...]:
        """None."""
        return ()

    def merge(self, counts: Iterable[SignedCount]) -> int:
        """Take none."""
        return 0


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
        self._counted_timeline = 0  # the first round of the timeline that the counts are of
        self._silent: set[str] = set()  # peers that have counted nothing since they kept a round waiting
        self._looked = 0, set[str](), 0.0  # the last look of `active` in this round: its number, late peers, patience
        self._claimed_s = nan  # when this peer first had a claim in this round
        self._counted_s = nan  # when somebody's first sample counted in it
        self._heard_at: dict[str, float] = {}  # when a count of each peer last grew, in this round
        self._num_messages = 0

    @property
    def round_number(self) -> int:
        """The round that this peer is in."""
        return self._step().round_number

    @property
    def timeline(self) -> int:
        """The first round of the timeline that this peer is on."""
        return self._step().timeline.first_round

    def count_own(self, round_number: int, count: RoundCount) -> Progress:
        """Set this stage-0 peer's own count of a round. All calls and replies carry it from now on."""
        record = Progress(
            round_number=round_number,
            samples=count.samples,
            claimed=count.claimed,
            loss_sum=count.loss_sum,
            ranges=count.ranges,
            targets=count.targets,
            incarnation=self.author.incarnation,
            timeline=self.timeline,
        )
        if self.counter.merge(round_number, self.author, count):
            self._note_times(round_number, count.samples, count.claimed)
            self._keep(round_number, self.author, seal(record, self._run, self._identity))
        return record

    def signed_counts(self, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[SignedCount, ...]:
        """All counts of this peer's round, and of the previous one, which some peers may not have closed yet.

        If they are too long for one message, this peer's own go first, then the short ones, then those longer than any
        honest peer's; where even the short ones have no room together, they take turns.
        """
        counts = [
            (peer_id, envelope)
            for round_number in (self.round_number - 1, self.round_number)
            for peer_id, lives in sorted(self._signed.get(round_number, {}).items())
            for _, envelope in sorted(lives.items())
        ]
        if sum(map(_num_bytes, counts)) <= max_bytes:
            return tuple(counts)
        self._num_messages += 1
        first = self._num_messages * max_bytes // MAX_SHORT_BYTES % len(counts)
        in_turn = sorted(counts[first:] + counts[:first], key=lambda count: _num_bytes(count) > MAX_SHORT_BYTES)
        in_turn.sort(key=lambda count: count[0] != self.author.peer_id)
        chosen = set[SignedCount]()
        for count in in_turn:
            if _num_bytes(count) <= max_bytes:
                max_bytes -= _num_bytes(count)
                chosen.add(count)
        return tuple(count for count in counts if count in chosen)

    def merge(self, counts: Iterable[SignedCount], *, vouched: bool = False) -> int:
        """Take over the new ones of the counts that came with a message.

        Only peers that announce stage 0 or have announced it are believed. If this peer has not seen the author's
        announcement yet, the count is dropped: it comes again with the next message, and `on_stranger` has the
        directory look for the author. If too many lives of one peer, or too many peers, have counted in a round
        already, the counts of further ones are dropped; a message is not refused for them, since whoever passes them on
        is not to blame. A count that is not news is dropped before its signature is checked.

        Args:
            vouched: a stage-mate passes the counts on, which has seen the announcements of their authors; this peer
                may never see them, if the authors have died since

        Returns:
            how many counts were left out because there are too many to check for one message: they may be news

        Raises:
            InvalidMessage: a count is malformed, or not signed by its author
        """
        num_checked = num_left_out = 0
        for peer_id, envelope in counts:
            if envelope in self._signed_values(peer_id):
                continue
            if peer_id != self.author.peer_id and not (vouched or self._is_author(peer_id)):
                self._on_stranger(peer_id)
                self._context.metrics.invalid_messages.labels("count").inc()
                continue
            if not self._may_be_news(peer_id, envelope):
                continue
            if num_checked >= MAX_CHECKED:
                num_left_out += 1
                continue
            num_checked += 1
            kind, run, body = open_envelope(envelope, peer_id)
            if kind != Progress.kind or run != self._run:
                raise InvalidMessage(f"a {kind:.20} of run {run:.40} where a progress count was expected")
            record = parse(Progress, body, "progress count")
            # Claims stop when the global batch is full. Peers that hear of others' claims late may add a few.
            if not record.samples <= record.claimed <= 2 * self.counter.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples, {record.claimed} claimed")
            if abs(record.loss_sum) > MAX_LOSS * record.samples:
                raise InvalidMessage(f"a progress count of {record.samples} samples with losses of {record.loss_sum}")
            # The ranges also hold samples that were given up, so they may exceed the count.
            windows = sum(item.end - item.start for item in record.ranges)
            if windows > 2 * self.counter.global_batch_size:
                raise InvalidMessage(f"a progress count of {record.samples} samples with ranges of {windows}")
            author = Life(peer_id, record.incarnation)
            before = self.counter.count_of(record.round_number, author)
            if self.counter.merge(record.round_number, author, record.count()):
                self._keep(record.round_number, author, envelope)
                self._note_times(record.round_number, record.samples)
                self._heard_at[peer_id] = self._context.clock.monotonic_s()
                if record.samples > before.samples:
                    self._silent.discard(peer_id)
                for listener in self._listeners:
                    listener(record.round_number, author, before)
        return num_left_out

    def _may_be_news(self, peer_id: str, envelope: bytes) -> bool:
        """Whether a count is of a round and timeline that matter, newer than the known one, and has room.

        Raises:
            InvalidMessage: it is malformed
        """
        told = peek_count(envelope)
        author = Life(peer_id, told.incarnation)
        if told.timeline != self.timeline:
            return False
        if not -1 <= told.round_number - self.round_number <= MAX_COUNTED_ROUNDS_AHEAD:
            return False
        if self.counter.knows(told.round_number, author, RoundCount(told.samples, told.claimed)):
            return False
        kept = self._signed.get(told.round_number, {})
        has_room = peer_id in kept or peer_id == self.author.peer_id or len(kept) < MAX_AUTHORS
        if len(envelope) > MAX_SHORT_BYTES and peer_id != self.author.peer_id:
            num_bytes = sum(len(known) for lives in kept.values() for known in lives.values())
            has_room = has_room and num_bytes + len(envelope) <= MAX_ROUND_BYTES
        if not has_room or not self.counter.may_count(told.round_number, author):
            self._context.metrics.invalid_messages.labels("count").inc()
            return False
        return True

    def active(self, peers: Iterable[str], patience_s: float) -> set[str]:
        """The peers whose counts have grown within the last `patience_s`; at the start of a round, nearly all.

        Some peer may announce stage 0 and never count anything, since its data cannot be read or no other peer can
        reach it. It must not keep its share of the global batch for ever, nor have the others wait in each round: if it
        has counted nothing in a round for so long, it is not active before it counts a sample, be it one more than the
        global batch has. The others do not go by what it claims: nothing may come of that. Where this peer has waited
        for so long itself until anything counted, nobody is to blame: a later stage was away.
        """
        known, oldest, began_s = set(peers), self._context.clock.monotonic_s() - patience_s, self._step().began_s
        late = {peer for peer in known if max(self._heard_at.get(peer, 0.0), began_s) < oldest}
        self._looked = self.round_number, late, patience_s
        self._silent = (self._silent & known) | self._to_blame()
        return known - late - self._silent

    def _to_blame(self) -> set[str]:
        """The peers that were late at the last look, and have counted nothing in a round in which others could."""
        round_number, late, patience_s = self._looked
        counted = {life.peer_id for life, count in self.counter.counts(round_number) if count.samples}
        # A difference with nan is not that long: this peer had no claim, or heard of all counts before the round began.
        waited_in_vain = self._counted_s - self._claimed_s >= patience_s
        return late - counted - {self.author.peer_id} if counted and not waited_in_vain else set()

    def _note_times(self, round_number: int, samples: int, claimed: int = 0) -> None:
        if round_number == self.round_number:
            now = self._context.clock.monotonic_s()
            self._claimed_s = now if claimed and isnan(self._claimed_s) else self._claimed_s
            self._counted_s = now if samples and isnan(self._counted_s) else self._counted_s

    def forget_past(self) -> None:
        """Forget the counts of all rounds before the previous one; after a change of the timeline, all."""
        # A peer that counts the last samples of a round does not look for others any more in it.
        self._silent |= self._to_blame() if self.timeline == self._counted_timeline else set()
        self._looked, self._claimed_s, self._counted_s = (self.round_number, set(), 0.0), nan, nan
        self._heard_at.clear()
        oldest = self.round_number - 1 if self.timeline == self._counted_timeline else MAX_ROUND
        self._counted_timeline = self.timeline
        self.counter.forget_before(oldest)
        self._signed = {known: counts for known, counts in self._signed.items() if known >= oldest}

    async def wait_until_over(self, round_number: int) -> None:
        """Wait until the global batch of the round is full, or a stage-mate is in a later round."""
        await self._context.changed.wait_for(lambda: self.is_over(round_number))

    def is_over(self, round_number: int) -> bool:
        """Whether the global batch of the round is full, or a stage-mate is in a later round."""
        return self.counter.is_full(round_number) or self.newest_round_seen > round_number

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


def _num_bytes(count: SignedCount) -> int:
    return len(count[0]) + len(count[1])

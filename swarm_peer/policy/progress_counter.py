"""How many samples of a round's global batch have counted: a grow-only counter for each life of a stage-0 peer.

A sample counts when its gradient has come back to stage 0. Each life of a stage-0 peer owns one count in each round. Of
two counts of one life the larger is kept, so order and repetition do not matter. A peer that returns counts from zero
in its new life; its former counts stay beside the new one, since those samples have counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.policy.view import Life

# Microbatches left to each slower peer at the end of a global batch: about as many as a peer claims before others hear
# of it. With fewer the global batch overshoots; with more it waits for the slowest peer.
RESERVED_MICROBATCHES = 2
# Lives of one peer that may count in one round. Joining takes seconds, so a good peer hardly lives as often, and a bad
# one cannot fill the memory of others.
MAX_LIVES = 8


@dataclass(frozen=True, slots=True)
class RoundCount:
    """The share of one round that one life of a stage-0 peer has.

    Attributes:
        samples: samples whose gradient has come back
        claimed: samples launched, whether counted or still under way; at least `samples`
        loss_sum: sum of the losses of the counted samples, in nats per token
        ranges: the counted samples by name, the ends of slices found meanwhile, and samples that were given up
        targets: the learnt tokens of the counted samples, where these say what is learnt
    """

    samples: int = 0
    claimed: int = 0
    loss_sum: float = 0.0
    ranges: tuple[WindowRange, ...] = ()
    targets: int = 0


class ProgressCounter:
    """The counts of the current and the next rounds, by author: one life of a stage-0 peer."""

    def __init__(self, global_batch_size: int):
        self.global_batch_size = global_batch_size
        self._counts: dict[int, dict[Life, RoundCount]] = {}

    def knows(self, round_number: int, author: Life, count: RoundCount) -> bool:
        """Whether `count` is not later than the known one, so that its signature need not be checked."""
        known = self._counts.get(round_number, {}).get(author)
        return known is not None and (count.samples, count.claimed) <= (known.samples, known.claimed)

    def merge(self, round_number: int, author: Life, count: RoundCount) -> bool:
        """Keep a count if it is news, and return whether it was."""
        if self.knows(round_number, author, count):
            return False
        self._counts.setdefault(round_number, {})[author] = count
        return True

    def may_count(self, round_number: int, author: Life) -> bool:
        """Whether not too many other lives of the author's peer have counted in the round already."""
        known = self._counts.get(round_number, {})
        return author in known or sum(life.peer_id == author.peer_id for life in known) < MAX_LIVES

    def count_of(self, round_number: int, author: Life) -> RoundCount:
        """The newest count of one life of a peer; an empty one if none is known."""
        return self._counts.get(round_number, {}).get(author, RoundCount())

    def counts(self, round_number: int) -> Iterator[tuple[Life, RoundCount]]:
        """Each author's newest count, sorted by peer id and then from the oldest life to the newest."""
        yield from sorted(self._counts.get(round_number, {}).items())

    def ranges_from(self, round_number: int) -> Iterator[WindowRange]:
        """The samples that have counted in the round and in later ones."""
        for counts in (self._counts[known] for known in sorted(self._counts) if known >= round_number):
            for _, count in sorted(counts.items()):
                yield from count.ranges

    def samples(self, round_number: int) -> int:
        """How many samples have counted in the round."""
        return sum(count.samples for _, count in self.counts(round_number))

    def loss_sum(self, round_number: int) -> float:
        """The sum of the losses of the samples that have counted in the round."""
        return sum(count.loss_sum for _, count in self.counts(round_number))

    def mean_loss(self, round_number: int, sequence_length: int) -> float:
        """The mean loss of the targets of the samples that have counted in the round, in nats per token."""
        targets = sum(count.targets for _, count in self.counts(round_number))
        # The loss of a sample is a sum over its targets, divided by the length that all samples have.
        weight = targets / sequence_length if targets else self.samples(round_number)
        return self.loss_sum(round_number) / weight if weight else 0.0

    def is_full(self, round_number: int) -> bool:
        """Whether the whole global batch has counted."""
        return self.samples(round_number) >= self.global_batch_size

    def may_claim(
        self, round_number: int, me: Life, live_peers: Collection[str], num_samples: int, *, only_own: bool = False
    ) -> bool:
        """Whether peer `me` may launch one more microbatch of `num_samples`.

        A peer hears of others' claims a little late. So each live peer has its own share of the global batch; a faster
        peer may then claim what others have left, except for the last RESERVED_MICROBATCHES of each that has claimed
        less. Peers that have claimed equally much take what is left one after the other.

        A peer that has died, or begun another life, counts with its counted samples alone: its microbatches under way
        do not come back. The share is one for all lives of a peer.

        Args:
            only_own: nothing of what others have left, since they were not heard lately
        """
        if not self.may_count(round_number, me):
            return False
        live = sorted({*live_peers, me.peer_id})
        newest = {life.peer_id: life for life, _ in self.counts(round_number)} | {me.peer_id: me}
        charged: dict[str, int] = {}
        for life, count in self.counts(round_number):
            is_alive = life.peer_id in live and life == newest[life.peer_id]
            charged[life.peer_id] = charged.get(life.peer_id, 0) + (count.claimed if is_alive else count.samples)
        remaining = self.global_batch_size - sum(charged.values())
        if remaining <= 0:
            return False
        gone = sum(samples for peer_id, samples in charged.items() if peer_id not in live)
        whole, left_over = divmod(-(-(self.global_batch_size - gone) // num_samples), len(live))
        share = (whole + (live.index(me.peer_id) < left_over)) * num_samples
        own = charged.get(me.peer_id, 0)
        if own < share or only_own:
            return own < share
        num_slower = sum(charged.get(peer_id, 0) < own for peer_id in live)
        num_before = sum(charged.get(peer_id, 0) == own for peer_id in live[: live.index(me.peer_id)])
        return remaining > num_samples * (RESERVED_MICROBATCHES * num_slower + num_before)

    def forget_before(self, round_number: int) -> None:
        """Drop the counts of earlier rounds."""
        for old in [known for known in self._counts if known < round_number]:
            del self._counts[old]

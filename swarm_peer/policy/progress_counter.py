"""How many samples of a round's global batch have counted: a grow-only counter for each stage-0 peer.

A sample counts when its gradient has come back to stage 0. Each stage-0 peer owns one count in each round. Of two
counts of one peer the larger is kept, so order and repetition do not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from swarm_peer.policy.data.ranges import WindowRange

# Microbatches left to each other live peer at the end of a global batch: about as many as a peer claims before others
# hear of it. With fewer the global batch overshoots; with more it waits for the slowest peer.
RESERVED_MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class RoundCount:
    """One stage-0 peer's share of one round.

    Attributes:
        samples: samples whose gradient has come back
        claimed: samples launched, whether counted or still under way; at least `samples`
        loss_sum: sum of the losses of the counted samples, in nats per token
        ranges: the counted samples by name, the ends of slices found meanwhile, and samples that were given up
    """

    samples: int = 0
    claimed: int = 0
    loss_sum: float = 0.0
    ranges: tuple[WindowRange, ...] = ()


class ProgressCounter:
    """The counts of the current and the next rounds, by stage-0 peer."""

    def __init__(self, global_batch_size: int):
        self.global_batch_size = global_batch_size
        self._counts: dict[int, dict[str, RoundCount]] = {}

    def knows(self, round_number: int, peer_id: str, count: RoundCount) -> bool:
        """Whether `count` is not later than the known one, so that its signature need not be checked."""
        known = self._counts.get(round_number, {}).get(peer_id)
        return known is not None and (count.samples, count.claimed) <= (known.samples, known.claimed)

    def merge(self, round_number: int, peer_id: str, count: RoundCount) -> bool:
        """Keep a count if it is news, and return whether it was."""
        if self.knows(round_number, peer_id, count):
            return False
        self._counts.setdefault(round_number, {})[peer_id] = count
        return True

    def count_of(self, round_number: int, peer_id: str) -> RoundCount:
        """The newest count of a peer; an empty one if none is known."""
        return self._counts.get(round_number, {}).get(peer_id, RoundCount())

    def counts(self, round_number: int) -> Iterator[tuple[str, RoundCount]]:
        """Each known peer's newest count, sorted by peer id."""
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

    def is_full(self, round_number: int) -> bool:
        """Whether the whole global batch has counted."""
        return self.samples(round_number) >= self.global_batch_size

    def may_claim(self, round_number: int, me: str, live_peers: Collection[str], num_samples: int) -> bool:
        """Whether peer `me` may launch one more microbatch of `num_samples`.

        A peer hears of others' claims a little late. So each live peer has its own share of the global batch; a faster
        peer may then claim what others have left, except for their last RESERVED_MICROBATCHES.

        A peer that has died counts with its counted samples alone: its microbatches under way do not come back.
        """
        counts = dict(self.counts(round_number))
        live = sorted({*live_peers, me})
        charged = sum(count.claimed if peer in live else count.samples for peer, count in counts.items())
        remaining = self.global_batch_size - charged
        if remaining <= 0:
            return False
        gone = sum(count.samples for peer, count in counts.items() if peer not in live)
        whole, left_over = divmod(-(-(self.global_batch_size - gone) // num_samples), len(live))
        share = (whole + (live.index(me) < left_over)) * num_samples
        if self.count_of(round_number, me).claimed < share:
            return True
        return remaining > RESERVED_MICROBATCHES * num_samples * (len(live) - 1)

    def forget_before(self, round_number: int) -> None:
        """Drop the counts of earlier rounds."""
        for old in [known for known in self._counts if known < round_number]:
            del self._counts[old]

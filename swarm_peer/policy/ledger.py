"""How far a global step has come: a grow-only counter per stage-0 peer.

Progress is counted in one place only: samples whose gradient came back to stage 0. Each stage-0 peer owns one count per
step, and the counts are merged by taking the larger one, so order and repetition do not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from swarm_peer.policy.ranges import WindowRange

# Of what another peer has not claimed yet, as far as is known, so much is left to it: about what it claims while the
# news of it is under way. With less the global batch overshoots, with more it waits for the slowest peer.
RESERVED_MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class StepCount:
    """One stage-0 peer's share of one global step.

    Attributes:
        samples: samples whose gradient came back
        claimed: samples launched, counted or still under way; at least `samples`
        loss_sum: sum of the losses of the counted samples, in nats per token
        ranges: which samples these are, with the ends of slices found meanwhile, and samples that were given up
    """

    samples: int = 0
    claimed: int = 0
    loss_sum: float = 0.0
    ranges: tuple[WindowRange, ...] = ()

    def supersedes(self, other: StepCount) -> bool:
        return (self.samples, self.claimed) > (other.samples, other.claimed)


class StepLedger:
    """Counts of the current and the next global steps, by stage-0 peer."""

    def __init__(self, global_batch_size: int):
        self.global_batch_size = global_batch_size
        self._counts: dict[int, dict[str, StepCount]] = {}

    def knows(self, step: int, peer_id: str, count: StepCount) -> bool:
        """Whether `count` would add nothing (so that its signature need not be checked)."""
        known = self._counts.get(step, {}).get(peer_id)
        return known is not None and not count.supersedes(known)

    def merge(self, step: int, peer_id: str, count: StepCount) -> bool:
        """Take over a count if it is news. Returns whether it was."""
        if self.knows(step, peer_id, count):
            return False
        self._counts.setdefault(step, {})[peer_id] = count
        return True

    def count_of(self, step: int, peer_id: str) -> StepCount:
        return self._counts.get(step, {}).get(peer_id, StepCount())

    def counts(self, step: int) -> Iterator[tuple[str, StepCount]]:
        yield from sorted(self._counts.get(step, {}).items())

    def ranges_from(self, step: int) -> Iterator[WindowRange]:
        """Which samples have counted in `step` and later ones."""
        for counts in (self._counts[known] for known in sorted(self._counts) if known >= step):
            for _, count in sorted(counts.items()):
                yield from count.ranges

    def samples(self, step: int) -> int:
        return sum(count.samples for _, count in self.counts(step))

    def loss_sum(self, step: int) -> float:
        return sum(count.loss_sum for _, count in self.counts(step))

    def is_full(self, step: int) -> bool:
        return self.samples(step) >= self.global_batch_size

    def may_claim(self, step: int, me: str, live_peers: Collection[str], num_samples: int) -> bool:
        """Whether peer `me` may launch one more microbatch of `num_samples`.

        The claims of others are known a little late. So that all together claim the global batch and no more, each live
        peer has its share for itself; a faster one takes over what others leave, but for their last microbatches.

        What a peer had under way when it vanished does not come back: of peers that are not live only the counted
        samples are charged.
        """
        counts = dict(self.counts(step))
        live = sorted({*live_peers, me})
        charged = sum(count.claimed if peer in live else count.samples for peer, count in counts.items())
        remaining = self.global_batch_size - charged
        if remaining <= 0:
            return False
        gone = sum(count.samples for peer, count in counts.items() if peer not in live)
        whole, left_over = divmod(-(-(self.global_batch_size - gone) // num_samples), len(live))
        share = (whole + (live.index(me) < left_over)) * num_samples
        if self.count_of(step, me).claimed < share:
            return True
        return remaining > RESERVED_MICROBATCHES * num_samples * (len(live) - 1)

    def forget_before(self, step: int) -> None:
        for old in [known for known in self._counts if known < step]:
            del self._counts[old]

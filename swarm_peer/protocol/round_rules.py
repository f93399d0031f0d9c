"""How a run's rounds go, as its manifest says: which end with an average, and which counts fill a batch. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_peer.protocol.epochs import MIN_TICKETS, Epoch
from swarm_peer.protocol.log import Close, Done, EpochOf, Most
from swarm_peer.protocol.statements import Seat


@dataclass(frozen=True)
class RoundRules:
    """How a run's rounds go, as its manifest says.

    Attributes:
        batch, unit: samples of a round, and of a microbatch
        targets: the most that a sample can have; 1 where samples are weighed, and not their targets
        lag: 1 where updates are delayed, else 0
        period: rounds from one average to the next
        roots_every: after multiples of so many optimizer steps all members tell the root of their state; 0 for none
        last_step: the run's last optimizer step; None if it has none
    """

    num_stages: int
    batch: int
    unit: int = 1
    targets: int = 1
    lag: int = 0
    period: int = 1
    roots_every: tuple[int, ...] = (1,)
    last_step: int | None = None

    @property
    def most(self) -> Most:
        """The most that one contribution may have."""
        samples = (4 * self.batch + 64 * self.unit) * self.period
        return Most(samples, samples * self.targets)

    def averages(self, number: int) -> bool:
        """Whether a round ends with an average."""
        return (number + 1) % self.period == 0

    def is_rooted(self, optimizer_step: int) -> bool:
        """Whether all members tell the root of the state of an optimizer step: to compare it, or to name a snapshot.

        Within a period, stage-mates have weights of their own.
        """
        due = (optimizer_step % every == 0 for every in self.roots_every if every)
        return any(due) and optimizer_step % self.period == 0

    def fills(self, close: Close, epoch_of: EpochOf) -> bool:
        """Whether counts of seats of stage 0 fill the batch: one of each author, all of this round and one base."""
        counts = [signed.body for signed in close.counts]
        if len({done.author for done in counts}) < len(counts) or len({done.base for done in counts}) > 1:
            return False
        for done in counts:
            epoch = epoch_of(done.epoch)
            if epoch is None or done.round != close.round or done.author not in epoch.roster(0):
                return False
        return sum(self.believed(counts, epoch_of).values()) >= self.batch

    def believed(self, counts: Sequence[Done], epoch_of: EpochOf) -> dict[Seat, int]:
        """The samples of each author's count of a round for which seats of stage 1 have signed.

        Where stage 1 has seats of three tickets, those of a ticket's own seats are believed as far as its part of that
        stage goes, for all of its counts together. Of two, one may be much slower, and no majority says which one lies.
        """
        found, own, most = dict[Seat, int](), dict[Seat, int](), defaultdict[str, int](int)
        votes = {done.author: self._vote_of(done, epoch_of) for done in counts}
        for done in counts:
            others, within = self._acknowledged(done, epoch_of)
            found[done.author] = min(others, done.samples)
            own[done.author] = min(within, done.samples - found[done.author])
            if (epoch := epoch_of(done.epoch)) is not None:
                vote, most_within = votes[done.author], self.most_within_ticket(done.author, epoch)
                most[vote] = max(most[vote], most_within)
        for author, samples in own.items():
            counted = min(samples, most[votes[author]])
            most[votes[author]] -= counted
            found[author] += counted
        return found

    def _vote_of(self, done: Done, epoch_of: EpochOf) -> str:
        epoch = epoch_of(done.epoch)
        return epoch.vote_of(done.author) if epoch is not None else done.author.ticket

    def _acknowledged(self, done: Done, epoch_of: EpochOf) -> tuple[int, int]:
        """The samples that seats of other tickets have signed for, and those of its own.

        The epoch of the count says whose a seat is: it is told anew in each, and a receipt may be of an earlier one.
        """
        told = epoch_of(done.epoch)
        if self.num_stages == 1 or told is None:
            return done.samples if told is not None else 0, 0
        others, own = dict[Seat, int](), dict[Seat, int]()
        for signed in done.receipts:
            receipt, epoch = signed.body, epoch_of(signed.body.epoch)
            if (receipt.caller, receipt.round, receipt.base) != (done.author, done.round, done.base) or epoch is None:
                continue
            if receipt.author in epoch.roster(1):
                is_own = told.is_divided and told.vote_of(receipt.author) == told.vote_of(done.author)
                (own if is_own else others)[receipt.author] = receipt.samples
        return sum(others.values()), sum(own.values())

    def most_within_ticket(self, seat: Seat, epoch: Epoch) -> int:
        """How many samples of a round a seat of stage 0 can count that seats of its own ticket have computed."""
        roster = epoch.roster(1)
        if not epoch.is_divided or len({each.ticket for each in roster}) < MIN_TICKETS:
            return self.batch
        return math.ceil(self.batch * sum(each.ticket == seat.ticket for each in roster) / len(roster))

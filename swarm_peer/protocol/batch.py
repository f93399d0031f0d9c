"""The batch of a round, as the leader of stage 0 sees it: what was counted, when it is full, and who may do what."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm_peer.policy.data.ranges import SliceId
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.grants import Grant, Grants
from swarm_peer.protocol.log import Base, Close, Contribution, Done
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Counted
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext


class Batch:
    """The counts of the open rounds, and what seats were granted for them."""

    def __init__(self, reign: EpochId, context: RoundContext):
        self._context = context
        self._grants = Grants(reign, context.batch, context.unit, context.timing.share_s)
        self._counted: dict[Seat, Counted] = {}

    def adopt(self, reads: Mapping[Seat, Collection[SliceId]]) -> None:
        """Note what seats read by grants of an earlier leader."""
        for seat, slices in sorted(reads.items()):
            self._grants.hold(seat, slices)

    def is_of_others(self, contribution: Contribution) -> bool:
        """Whether a contribution names samples of slices that another seat than its author was granted."""
        return self._grants.are_others(contribution.name.seat, (each.slice_id for each in contribution.samples))

    def take(self, sender: Seat, counted: Counted, member: Member, epoch: Epoch, now_s: float) -> Grant:
        """Note what a seat has done; returns what it may do next."""
        context, ledger, next_round = self._context, member.ledger, member.log.next_round
        assert ledger is not None, "the leader has the stage's state"
        known = self._counted.get(sender)
        if known is None or known.done.body.age <= counted.done.body.age:
            self._counted[sender] = counted
        done = self._counted[sender].done.body
        self._counted = {seat: each for seat, each in self._counted.items() if each.done.body.round >= next_round}
        decided_in = context.decided_in(next_round + context.lag)
        self._grants.follow(epoch.roster(0), ledger, next_round, decided_in, context.decided_in(next_round - 1))
        present = (each.done.body for seat, each in self._counted.items() if seat in epoch.roster(0))
        counts = [count for count in present if count.round == done.round]
        believed = context.believed(counts)
        for count in counts:
            self._grants.note_done(count.author, count.round, count.samples, believed[count.author], now_s)
        return self._grants.grant(sender, counted.wants, ledger, now_s)

    @property
    def counts(self) -> tuple[Signed[Done], ...]:
        """The newest count of each seat, of rounds that are open."""
        return tuple(each.done for each in self._counted.values())

    def close(self, number: int, base: Base, epoch: Epoch) -> Close | None:
        """The close of a round, if what was counted from its base fills the batch.

        The counts of seats that have left are among them, where others have been given their work.
        """
        present = {seat: each for seat, each in self._counted.items() if seat in epoch.roster(0)}
        decided_in = self._context.decided_in(number)
        given = {name.seat for each in present.values() for name in each.guests if name.round == decided_in}
        counts = tuple(
            each.done
            for seat, each in sorted(self._counted.items())
            if (seat in present or seat in given) and (each.done.body.round, each.done.body.base) == (number, base)
        )
        close = Close(number, counts)
        return close if counts and self._context.fills(close) else None

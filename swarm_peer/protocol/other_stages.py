"""Where the other stages of a run stand, as the leader of one knows it."""

from __future__ import annotations

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Base, Committed, Log, base_of, is_lacking
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Head
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.protocol.work import RoundContext


class OtherStages:
    """Where the other stages stand: what this stage's rounds are computed from.

    A stage's leader says so; or most votes of a stage do, whose leader says nothing, or something else.
    """

    def __init__(self, member: Member, context: RoundContext):
        self._member = member
        self._context = context
        # Of each seat of another stage, the heads of its log that it has told, by the round that began with them; each
        # with its entry, where that was told.
        self._told: dict[tuple[int, Seat], dict[int, tuple[str, Committed | None]]] = {}
        self._lacks: tuple[object, float] = (None, 0.0)

    def take(self, sender: Seat, head: Head) -> Committed | None:
        """Note where another stage stands. Returns an entry of this one that shows that entries are gone there."""
        own = self._member.log
        theirs = Log(head.stage, own.restart, head.committed)
        if not theirs.is_valid(own, self._context.epoch_of):
            return None
        # No stage is further ahead than that: it would lack heads of this one.
        near = range(own.next_round - self._context.lag - 2, own.next_round + self._context.lag + 3)
        before, heads = self._told.get((head.stage, sender), {}), theirs.heads()
        entries = {each.entry.cut.round + 1: each for each in head.committed}
        told = {number: (known, entries.get(number)) for number, known in heads.items()}
        # Of the log that was told before, what goes before the first of these heads, and all, if that holds the last.
        ends = [end for end in (min(heads), max(heads)) if before.get(end, ("", None))[0] == heads[end]]
        up_to = max(before) if max(heads) in ends else max(ends, default=-1)
        kept = {number: each for number, each in before.items() if number <= up_to}
        self._told[head.stage, sender] = told | {n: each for n, each in kept.items() if each[1] or n not in told}
        told_near = {key: {n: each for n, each in heads.items() if n in near} for key, heads in self._told.items()}
        self._told = {key: heads for key, heads in told_near.items() if heads}
        lag = self._context.lag
        for committed in reversed(own.committed):
            cut, is_void = committed.entry.cut, theirs.is_contradicted(committed.entry, lag)
            if is_void or is_lacking(theirs, cut.base[head.stage], cut.round - lag):
                return committed
        return None

    def base(self, number: int, epoch: Epoch) -> Base | None:
        """The heads that a round is computed from; None before they are known of all stages."""
        heads = [self._head(stage, number, epoch) for stage in range(self._context.num_stages)]
        found = tuple(head for head in heads if head is not None)
        return found if len(found) == len(heads) else None

    def _head(self, stage: int, number: int, epoch: Epoch) -> str | None:
        log, before = self._member.log, number - self._context.lag
        if before <= log.restart.first_round:
            return base_of(stage, log.restart)
        if stage == log.stage:
            return log.base_of(number, self._context.lag)
        roster = epoch.roster(stage)
        told = {seat: self._told_by(stage, seat, before) for seat in roster}
        if roster and (head := told[roster[0]]) is not None:
            return head
        # The chain of hashes vouches for what others know from before the log that the leader keeps.
        newer = {item for item in self._heads_told(stage, *roster[:1]) if item[0] > before}
        for seat, head in told.items():
            if head is not None and not newer.isdisjoint(self._heads_told(stage, seat)):
                return head
        for head in set(told.values()) - {None}:
            if epoch.is_quorum((seat for seat in roster if told[seat] == head), roster):
                return head
        return None

    def _heads_told(self, stage: int, *seats: Seat) -> set[tuple[int, str]]:
        told = (self._told.get((stage, seat), {}) for seat in seats)
        return {(number, head) for heads in told for number, (head, _) in heads.items()}

    def _told_by(self, stage: int, seat: Seat, number: int) -> str | None:
        """The head that a seat has told; None if that was made from another one than this stage has there."""
        log = self._member.log
        head, entry = self._told.get((stage, seat), {}).get(number, (None, None))
        known = log.head_before(max(number - 1 - self._context.lag, log.restart.first_round))
        if entry is None or known is None:
            return head
        is_ours = entry.entry.cut.base[log.stage :][:1] == (known,)
        return head if is_ours and log.is_older_than(entry.entry, self._context.lag) else None

    def to_show(self, base: Base, counted: Base) -> tuple[Committed, ...] | None:
        """The entries that are in a round's base, and not in that of its counts; None if they are not known."""
        own, entries = self._member.log.stage, dict[str, Committed]()
        for told in self._told.values():
            entries |= {head: entry for head, entry in told.values() if entry is not None}
        missing = [head for stage, head in enumerate(base) if stage != own and head not in counted[stage:][:1]]
        found = tuple(entries[head] for head in missing if head in entries)
        return found if len(found) == len(missing) else None

    def entries(self, epoch: Epoch) -> list[Committed]:
        """Entries of other stages that present seats of these have told."""
        roster = {(stage, seat) for stage in range(self._context.num_stages) for seat in epoch.roster(stage)}
        told = [heads.values() for key, heads in self._told.items() if key in roster]
        return [entry for heads in told for _, entry in heads if entry is not None]

    def named_epochs(self) -> set[EpochId]:
        """The epochs of what this seat may have to show of them."""
        told = (entry for heads in self._told.values() for _, entry in heads.values())
        return {entry.entry.cut.epoch for entry in told if entry is not None}

    def asks(self, number: int, epoch: Epoch, now_s: float) -> list[int]:
        """The stages whose heads were not told for long, so that their members are asked."""
        stages = [stage for stage in range(self._context.num_stages) if self._head(stage, number, epoch) is None]
        lacks = number, tuple((stage, epoch.leader(stage)) for stage in stages)
        if lacks != self._lacks[0]:
            self._lacks = lacks, now_s
        return stages if now_s > self._lacks[1] + self._context.timing.heads_s else []

"""The work of one seat in open rounds, and contributions that others have given it, until an entry holds them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarm_peer.policy.data.ranges import MAX_RANGES, SliceId, WindowRange, merge_ranges, num_windows
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import (
    Base,
    Blamed,
    Close,
    Committed,
    Contribution,
    Cut,
    Done,
    EpochOf,
    HandedOver,
    Have,
    Log,
    Most,
    Name,
    Part,
    Pass,
    Receipt,
)
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.statements import EpochId, Seat, Sign, Signed


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """All that members and leaders of one process share.

    Attributes:
        batch, unit: samples of a round, and of a microbatch
        most: that one contribution may have
        lag: rounds that may be open while an earlier one is not committed, besides the next: 1 for delayed updates
        averages: whether a round ends with an average
        is_rooted: whether all members tell the root of the state of an optimizer step
        fills: whether counts fill the batch of a round
        believed: the samples of each author's count of a round that there are receipts for
        epoch_of: an epoch that was chosen, by its id
        sign: signs as this process's seat
        last_step: the run's last optimizer step; None if it has none
    """

    num_stages: int
    batch: int
    unit: int
    most: Most
    lag: int
    averages: Callable[[int], bool]
    is_rooted: Callable[[int], bool]
    fills: Callable[[Close], bool]
    believed: Callable[[Sequence[Done]], dict[Seat, int]]
    epoch_of: EpochOf
    sign: Sign
    timing: Timing
    last_step: int | None = None

    def may_close(self, close: Close, *logs: Log) -> bool:
        """Whether counts fill the batch of a round, and are of no older epochs than what they can be of.

        A seat that computes in a round has its stage's entry before that. So it is in no older epoch than what that
        entry was computed from, and in older ones few tickets may have been there.

        Args:
            logs: of one stage; the first that keeps such an entry is asked
        """
        number = close.round - 2 - 2 * self.lag
        kept = (each.entry.cut for log in logs for each in log.committed if each.entry.cut.round == number)
        before = next(kept, None)
        is_of_time = before is None or all(count.body.epoch >= before.epoch for count in close.counts)
        return is_of_time and self.fills(close)

    def is_valid(self, log: Log, known: Log) -> bool:
        """Whether all entries of a log were committed, and their rounds over; see Log."""
        return log.is_valid(known, self.epoch_of, lambda close: self.may_close(close, log, known))

    def believes(self, log: Log, committed: Committed) -> bool:
        """Whether an entry of another stage than a log's was committed, as far as that shows."""
        epoch = self.epoch_of(committed.entry.cut.epoch)
        is_of_log = epoch is not None and epoch.restart == log.restart and log.is_older_than(committed.entry, self.lag)
        return is_of_log and self.is_agreed(committed)

    def is_agreed(self, committed: Committed) -> bool:
        """Whether an entry was committed, in an epoch that is known."""
        epoch = self.epoch_of(committed.entry.cut.epoch)
        return epoch is not None and committed.entry.is_agreed(committed.agreement, epoch)

    def is_lost(self, log: Log, evidence: Committed) -> bool:
        """Whether an entry of another stage shows that entries of a log's stage are gone."""
        epoch = self.epoch_of(evidence.entry.cut.epoch)
        return epoch is not None and log.lacks_what_made(evidence, epoch, self.num_stages, self.lag)

    def decided_in(self, number: int) -> int:
        """The round whose entry holds what is computed in a round."""
        while not self.averages(number):
            number += 1
        return number


@dataclass
class Computed:
    """Microbatches that a seat has computed in one round.

    Attributes:
        base: heads of all stages that it was computed from; empty before the first microbatch
        weight: targets
        claimed: samples that it has launched, at stage 0
        samples: as stage 0 knows them
        receipts: of seats of stage 1, at stage 0
        loss_sum: at stage 0
        callers: samples by the seat of stage 0 that has sent them, at stage 1
    """

    base: Base = ()
    weight: int = 0
    claimed: int = 0
    loss_sum: float = 0.0
    samples: list[WindowRange] = field(default_factory=list)
    receipts: dict[Seat, Signed[Receipt]] = field(default_factory=dict)
    callers: dict[Seat, int] = field(default_factory=dict)

    def lacks_receipts(self, me: Seat, number: int) -> bool:
        """Whether all that it has launched was computed, at stage 0, and seats of stage 1 have signed for less."""
        done, receipts = num_windows(self.samples), (signed.body for signed in self.receipts.values())
        fitting = [each.samples for each in receipts if (each.caller, each.round, each.base) == (me, number, self.base)]
        return done >= self.claimed and sum(fitting) < done


@dataclass
class Answer:
    """How a seat stands to the newest cut of a round.

    Attributes:
        said: its own Have or Pass of the cut
        failed: its statement that it has no result; None while it averages, or if it has one
        told: the names that it has told its leader since it is ready; one that has come later may be in no cut
    """

    cut: Cut | None = None
    said: Signed[Have] | Signed[Pass] | None = None
    failed: Signed[Blamed] | None = None
    told: frozenset[Name] | None = None


@dataclass
class OpenRound:
    """A round that is not committed, as one member sees it.

    Attributes:
        voids: how often it has given up what it had computed
        is_void: whether it was computed from other heads than it should have been, and has yet to be given up
        is_drained: whether nothing of it is inside any more
        is_rooted: whether its leader has asked for the root of the state
        root: of the state that it begins with; None until the driver has told it
    """

    number: int
    computed: Computed = field(default_factory=Computed)
    voids: int = 0
    is_void: bool = False
    is_drained: bool = False
    is_rooted: bool = False
    root: str | None = None
    answer: Answer = field(default_factory=Answer)


class Work:
    """All that one seat could bring to the next cuts.

    Attributes:
        open: rounds that are not committed, by number
        guests: contributions that others have given this seat, by name
        given: their authors' statements
        lost: contributions that are in no entry and that this seat brings no more; for the driver to tell
    """

    def __init__(self, me: Seat, context: RoundContext):
        self.open: dict[int, OpenRound] = {}
        self.guests: dict[Name, Contribution] = {}
        self.given: dict[Name, Signed[HandedOver]] = {}
        self.lost: list[Contribution] = []
        self._me = me
        self._context = context
        # Of rounds without an average: the next one that has one holds it.
        self._carried = Computed()

    def decided_in(self, number: int) -> int:
        """The round whose entry holds what is computed in a round."""
        return self._context.decided_in(number)

    def is_over(self, log: Log) -> bool:
        """Whether a log has all updates of the run."""
        return self._context.last_step is not None and log.optimizer_step >= self._context.last_step

    def begins_with_head(self, next_round: int) -> int:
        """The round that begins with the head of the log."""
        return next_round + self._context.lag

    def round(self, number: int) -> OpenRound:
        """A round that is open, or opens now."""
        return self.open.setdefault(number, OpenRound(number))

    @property
    def cuts(self) -> set[str]:
        """The newest cuts of the open rounds, by their hash."""
        return {each.answer.cut.hash for each in self.open.values() if each.answer.cut is not None}

    def admits(self, number: int, base: Base) -> bool:
        """Whether a microbatch that was computed from these heads may be added; from now on, none of others may."""
        present = self.open.get(number)
        if present is None or present.is_drained or present.is_void or (present.computed.base or base) != base:
            return False
        present.computed.base = base
        return True

    def computed(
        self,
        number: int,
        base: Base,
        *,
        weight: int,
        samples: Iterable[WindowRange] = (),
        receipt: Signed[Receipt] | None = None,
        loss_sum: float = 0.0,
        caller: Seat | None = None,
        num_samples: int = 0,
    ) -> bool:
        """A microbatch of an open round was computed, and its gradient is kept; False if it must not be.

        Args:
            samples, receipt, loss_sum: at stage 0
            caller, num_samples: at stage 1: for whom it was computed
        """
        if not self.admits(number, base):
            return False
        made = self.open[number].computed
        made.weight += weight
        made.samples += samples
        made.loss_sum += loss_sum
        if receipt is not None:
            made.receipts[receipt.body.author] = receipt
        if caller is not None:
            made.callers[caller] = made.callers.get(caller, 0) + num_samples
        return True

    def receipt_for(self, caller: Seat, number: int, epoch: Epoch) -> Receipt | None:
        """The receipt of a seat of stage 1 for one of stage 0: how much it has computed for that."""
        made = self.open[number].computed if number in self.open else Computed()
        if not made.base:
            return None
        return Receipt(self._me, epoch.id, caller, number, made.callers.get(caller, 0), made.base)

    def own(self, number: int) -> Contribution | None:
        """This seat's contribution of a round, and of those before it that had no average."""
        made = self.open[number].computed if number in self.open else Computed()
        weight = self._carried.weight + made.weight
        # With more of them, no cut would hold it. The samples of the others are read again.
        samples = merge_ranges([*self._carried.samples, *made.samples])[:MAX_RANGES]
        if not weight and not samples:
            return None
        # In the middle of a period, the entry that will hold it is of other heads.
        base = made.base if self._context.averages(number) else ()
        return Contribution(Name(self._me, self.decided_in(number)), weight, samples, base, made.loss_sum)

    def undecided(self, reads: Iterable[SliceId]) -> tuple[SliceId, ...]:
        """The slices that this seat reads, and those of which it brings something that no entry holds yet."""
        brought = (item for guest in self.guests.values() for item in guest.samples)
        return tuple(sorted({*reads, *(item.slice_id for item in (*self._carried.samples, *brought))}))

    def brings(self, number: int) -> tuple[Contribution, ...]:
        """All contributions that this seat can bring to the average of a round."""
        own = self.own(number)
        guests = (each for name, each in sorted(self.guests.items()) if name.round == number)
        return (*([own] if own is not None else []), *guests)

    def part(self, number: int) -> Part:
        """The same, with what shows that others have given it."""
        brings = self.brings(number)
        self.given = {name: signed for name, signed in self.given.items() if name in self.guests}
        return Part(self._me, brings, tuple(self.given[each.name] for each in brings if each.name in self.given))

    def named_epochs(self) -> set[EpochId]:
        """The epochs of the statements that belong to it."""
        receipts = {each.body.epoch for present in self.open.values() for each in present.computed.receipts.values()}
        return receipts | {each.body.epoch for each in self.given.values()}

    def to_hand_over(self, next_round: int) -> list[Contribution]:
        """All that this seat could bring, for stage-mates to bring in its place."""
        own = (self.own(number) for number in sorted({next_round, *self.open}))
        return [*(each for each in own if each is not None), *self.guests.values()]

    def void(self, number: int) -> None:
        """Give up what was computed in a round: it began from other heads, or the device has lost it."""
        present = self.open[number]
        self._lose(number, present.computed)
        present.computed, present.voids, present.is_void = Computed(), present.voids + 1, False
        present.answer.told = None

    def _lose(self, number: int, made: Computed) -> None:
        if made.weight or made.samples:
            name = Name(self._me, self.decided_in(number))
            self.lost.append(Contribution(name, made.weight, merge_ranges(made.samples), made.base))

    def void_all(self, next_round: int) -> None:
        """Give up what was computed in all rounds that go on here, and in those before that had no average."""
        self._lose(next_round, self._carried)
        self._carried = Computed()
        for number, present in self.open.items():
            if not present.is_drained:
                self.void(number)

    def end_round(self, cut: Cut) -> OpenRound | None:
        """A round is committed. Returns what was known of it."""
        own = self.own(cut.round)
        present = self.open.pop(cut.round, None)
        if cut.averages:
            self._carried = Computed()
            held = [*([own] if own is not None else []), *self.lost]
            held += [self.guests.pop(name) for name in list(self.guests) if name.round <= cut.round]
            self.lost = [each for each in held if each not in cut.brings]
        elif present is not None and present.is_drained:
            self._carried.weight += present.computed.weight
            self._carried.samples += present.computed.samples
        elif present is not None:
            # The others went on without this seat, before its driver had taken this out of the accumulator.
            self._lose(cut.round, present.computed)
        return present

    def give_up(self, next_round: int, log: Log | None = None) -> None:
        """Give up all that was computed in open rounds.

        Args:
            log: that takes the place of the one before, and may hold some of it; None if what others have given this
                seat is given up, too
        """
        for number in sorted({next_round, *self.open}):
            if (own := self.own(number)) is not None:
                self.lost.append(own)
            self._carried = Computed()
        self.open = {}
        if log is None:
            # A leaving seat gives its work to one stage-mate, and to another one only if it heard no answer.
            self.lost += self.guests.values()
            self.guests = {}
        else:
            # Nobody knows the heads that these were computed from: they may be none of this log.
            for name in [name for name, guest in self.guests.items() if not guest.base]:
                self.lost.append(self.guests.pop(name))
            held = {each for committed in log.committed for each in committed.entry.cut.brings}
            self.lost = [each for each in self.lost if each not in held]

"""The log of a stage: entries, their certificates, and what a round is cut of. Pure.

Owns what makes an entry valid. Knows nothing of how one comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import MAX_RANGES, WindowRange, num_windows
from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.statements import EpochId, Seat, Signed, Statement, hash_of

# An epoch that was chosen, by its id; None if it is not known.
EpochOf = Callable[[EpochId], Epoch | None]
# The heads of all stages that a round is computed from.
Base = tuple[str, ...]
# Contributions of others that a member holds, and brings, at most.
MAX_GUESTS = 4


class Name(NamedTuple):
    """The name of a contribution: what a seat has computed in a round."""

    seat: Seat
    round: int


class Most(NamedTuple):
    """The most that one contribution may have.

    Attributes:
        samples: failed work is done again, and a period has several batches
        weight: targets of so many samples
    """

    samples: int
    weight: int


class Contribution(NamedTuple):
    """The gradient that a seat has computed, as the protocol knows it: by its name.

    Attributes:
        name: it is in a cut once, however many members could bring it
        weight: targets that it was computed on
        samples: that it was computed on; stage 0 alone knows them
        base: heads of all stages that what is of its own round was computed from; empty where nothing is
        loss_sum: of the samples of its own round, for people to see; stage 0 alone knows it
    """

    name: Name
    weight: int
    samples: tuple[WindowRange, ...]
    base: Base
    loss_sum: float = 0.0

    def is_within(self, most: Most) -> bool:
        """Whether it has no more weight and samples than a contribution can have."""
        are_ranges = all(0 <= each.start <= each.end for each in self.samples)
        is_short = num_windows(self.samples) <= most.samples and len(self.samples) <= MAX_RANGES
        return are_ranges and is_short and 0 <= self.weight <= most.weight


@dataclass(frozen=True)
class HandedOver(Statement):
    """The author gives its contribution to stage-mates, which may bring it in its place.

    Attributes:
        digest: of its values
    """

    contribution: Contribution
    digest: str


class Part(NamedTuple):
    """A member's part of the update of a round: its own contribution, and those that others have given it.

    Attributes:
        given: of each contribution of another seat, that seat's statement
    """

    seat: Seat
    brings: tuple[Contribution, ...]
    given: tuple[Signed[HandedOver], ...] = ()

    @property
    def weight(self) -> int:
        """Of all that it brings."""
        return sum(each.weight for each in self.brings)

    def is_within(self, number: int, most: Most) -> bool:
        """Whether each contribution is of a round and as small as one can be, and there are no more than can be."""
        is_short = len(self.brings) <= 1 + MAX_GUESTS
        return is_short and all(each.name.round == number and each.is_within(most) for each in self.brings)

    def is_given(self, stage: int, epoch_of: EpochOf) -> bool:
        """Whether seats of the stage have given this one what it brings of others."""
        given = set[Contribution]()
        for signed in self.given:
            author, epoch = signed.body.author, epoch_of(signed.body.epoch)
            if epoch is not None and author in epoch.roster(stage) and author == signed.body.contribution.name.seat:
                given.add(signed.body.contribution)
        return all(each.name.seat == self.seat or each in given for each in self.brings)


@dataclass(frozen=True)
class Blamed(Statement):
    """The author has no result of a cut, and these members of it are to blame."""

    cut: str
    seats: tuple[Seat, ...]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The members of a round, as their leader proposes them.

    Attributes:
        epoch: in which it was made; its roster says whose agreement it needs
        parent: hash of the entry before
        root: of the state that embodies that entry; empty where it is not asked for
        base: the heads of all stages that the round was computed from
        averages: whether its members average what they bring
    """

    stage: int
    round: int
    epoch: EpochId
    attempt: int
    parent: str
    root: str
    base: Base
    averages: bool
    parts: tuple[Part, ...]

    @cached_property
    def hash(self) -> str:
        """The name by which members speak of it."""
        return hash_of(self)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Its members."""
        return tuple(part.seat for part in self.parts)

    @property
    def brings(self) -> tuple[Contribution, ...]:
        """The contributions that it holds."""
        return tuple(each for part in self.parts for each in part.brings)

    @property
    def samples(self) -> tuple[WindowRange, ...]:
        """The samples that it holds."""
        return tuple(item for each in self.brings for item in each.samples)

    def holds(self, mine: Part, told: Collection[Name] | None, ledger: Ledger | None, most: Most) -> bool:
        """Whether it holds all that a member brings and that is of its base, and has it bring nothing else.

        Args:
            told: what the leader has been told of that, if of a part alone
            ledger: at stage 0, where what holds a sample twice is left out
            most: that a contribution may have; one of more is left out
        """
        names = {each.name for each in self.brings}
        due = (each for each in mine.brings if each.base in ((), self.base) and each.name not in names)
        due = (each for each in due if told is None or each.name in told)
        missing = [each for each in due if each.is_within(most)]
        if ledger is not None:
            missing = [each for each in missing if not ledger.repeats([*self.samples, *each.samples])]
        own = next((part.brings for part in self.parts if part.seat == mine.seat), ())
        return not missing and set(own) <= set(mine.brings)

    def is_of(self, counted: Base, shown: Iterable[Entry]) -> bool:
        """Whether it is of the heads that its round's counts were computed from, or of other stages' that are shown."""
        known = {*enumerate(counted), *((each.cut.stage, each.hash) for each in shown)}
        return all(stage == self.stage or (stage, head) in known for stage, head in enumerate(self.base))

    def is_within(self, most: Most) -> bool:
        """Whether no contribution has more weight or samples than a round can have, and each is of this round."""
        return all(part.is_within(self.round, most) for part in self.parts)

    def is_repeating(self, ledger: Ledger) -> bool:
        """Whether it holds a contribution or a sample twice, or one that has counted before."""
        names = [each.name for each in self.brings]
        return len(names) != len(set(names)) or ledger.repeats(self.samples)


@dataclass(frozen=True)
class Have(Statement):
    """The author has the result of a cut.

    Attributes:
        digest: of the update; empty where the cut has none
    """

    cut: str
    digest: str


@dataclass(frozen=True)
class Pass(Statement):
    """The author, who is not ready, agrees that a cut is made without it."""

    cut: str


Agreement = tuple[Signed[Have] | Signed[Pass], ...]


@dataclass(frozen=True)
class Entry:
    """The outcome of one round in one stage.

    Attributes:
        digest: of the update
    """

    cut: Cut
    digest: str

    @cached_property
    def hash(self) -> str:
        """It stands for all entries before it as well, since the cut names its parent."""
        return hash_of(("entry", self.cut.hash, self.digest))

    def is_agreed(self, agreement: Agreement, epoch: Epoch) -> bool:
        """Whether it may be committed: most of the cut have its result; with those left out, a quorum agrees.

        Args:
            epoch: in which the cut was made
        """
        roster = epoch.roster(self.cut.stage)
        if epoch.id != self.cut.epoch or not set(self.cut.seats) <= set(roster):
            return False
        have, agree = set[Seat](), set[Seat]()
        for signed in agreement:
            body = signed.body
            if (body.epoch, body.cut) != (self.cut.epoch, self.cut.hash):
                continue
            if isinstance(body, Have) and body.digest == self.digest and body.author in self.cut.seats:
                have.add(body.author)
            elif isinstance(body, Pass) and body.author not in self.cut.seats:
                agree.add(body.author)
        if not epoch.is_quorum(have, self.cut.seats):
            return False
        return not epoch.is_divided or epoch.is_quorum(have | agree & set(roster), roster)


@dataclass(frozen=True)
class Receipt(Statement):
    """A seat of stage 1 has computed so many samples of a round for one of stage 0.

    Attributes:
        base: the heads of all stages that these were computed from
    """

    caller: Seat
    round: int
    samples: int
    base: Base


@dataclass(frozen=True)
class Done(Statement):
    """A seat of stage 0 has had so many samples of a round computed.

    Attributes:
        voids: how often it has given up what it had, since that was computed from other heads
        base: the heads of all stages that these were computed from
        receipts: the newest of each seat of stage 1
        weight, loss_sum: of these samples, for people to see
    """

    round: int
    voids: int
    samples: int
    base: Base
    receipts: tuple[Signed[Receipt], ...] = ()
    weight: int = 0
    loss_sum: float = 0.0

    @property
    def age(self) -> tuple[int, EpochId, int, int]:
        """By which the newer of two of one author is known."""
        return self.round, self.epoch, self.voids, self.samples


@dataclass(frozen=True)
class Close:
    """The batch of a round is full, as these counts show: nothing more is let into it."""

    round: int
    counts: tuple[Signed[Done], ...]

    @property
    def base(self) -> Base:
        """The heads of all stages that what was counted was computed from, as those who computed it have signed."""
        return next((signed.body.base for signed in self.counts), ())


class Committed(NamedTuple):
    """An entry with what shows that it was committed, and that its round was over."""

    entry: Entry
    agreement: Agreement
    close: Close


# Entries that a log keeps. A member that lacks more takes a state.
KEPT_ENTRIES = 16
# A seat that lacks fewer entries than so many is waited for.
NEAR = 3


def base_of(stage: int, restart: Restart) -> str:
    """The hash that stands in place of an entry before the first one."""
    return hash_of(("base", stage, restart))


class Log:
    """The newest entries of a stage, since the run began, or began anew.

    Args:
        committed: that follow one another; the first follows another one unless it is the first of all

    Attributes:
        restart: where it begins
    """

    def __init__(self, stage: int, restart: Restart, committed: Iterable[Committed] = ()):
        self.stage = stage
        self.restart = restart
        self._committed = list(committed)
        first = self._committed[0].entry.cut if self._committed else None
        self._first_round = restart.first_round if first is None else first.round
        self._before_first = base_of(stage, restart) if first is None else first.parent

    @property
    def committed(self) -> tuple[Committed, ...]:
        """The entries that it keeps, oldest first."""
        return tuple(self._committed)

    def since(self, number: int) -> tuple[Committed, ...]:
        """Those of a round and later ones."""
        return tuple(self._committed[max(0, number - self._first_round) :])

    def after(self, head: str) -> tuple[Committed, ...]:
        """Those after an entry, by its hash; none if it is none of these."""
        return self.since(next((number for number, known in self.heads().items() if known == head), self.next_round))

    @property
    def next_round(self) -> int:
        """The round whose entry comes next."""
        return self._first_round + len(self._committed)

    @property
    def optimizer_step(self) -> int:
        """How many updates the weights have had."""
        return self.optimizer_step_at(self.next_round)

    def optimizer_step_at(self, number: int) -> int:
        """How many updates the weights have had that embody the entry before a round."""
        return self.restart.optimizer_step + number - self.restart.first_round

    @property
    def head(self) -> str:
        """The hash of the newest entry, which stands for all of them."""
        return self._committed[-1].entry.hash if self._committed else self._before_first

    @property
    def is_empty(self) -> bool:
        """Whether there has been no entry yet."""
        return not self._committed

    @property
    def age(self) -> tuple[tuple[EpochId, ...], int]:
        """By which the newer of two is known: the one of a later epoch, as its newest entry has it, or else the longer.

        Where the run key has begun an epoch, some may have gone on in the one before until they heard of it.
        """
        return tuple(committed.entry.cut.epoch for committed in self._committed[-1:]), self.next_round

    def head_before(self, number: int) -> str | None:
        """The head when a round began; None if this log does not reach so far, or keeps no entries of that time."""
        index = number - self._first_round
        if index == 0:
            return self._before_first
        return self._committed[index - 1].entry.hash if 0 < index <= len(self._committed) else None

    def is_near(self, state: str) -> bool:
        """Whether weights that embody an entry lack so few others that its seat is waited for."""
        return state in list(self.heads().values())[-NEAR:]

    def heads(self) -> dict[int, str]:
        """The heads that it knows, by the round that began with them."""
        numbers = range(self._first_round, self.next_round + 1)
        return {number: head for number in numbers if (head := self.head_before(number)) is not None}

    def round_of(self, cut: str) -> int:
        """The round whose entry is of a cut; the newest one's, if none is known to be."""
        found = (each.entry.cut.round for each in self._committed if each.entry.cut.hash == cut)
        return next(found, self.next_round - 1)

    def goes_on_from(self, other: Log) -> bool | None:
        """Whether it begins with all of another log; None if that cannot be seen, since it keeps too few entries."""
        if self.next_round < other.next_round:
            return False
        known = self.head_before(other.next_round)
        return None if known is None else known == other.head

    def base_of(self, number: int, lag: int) -> str | None:
        """The head that a round is computed from; None if it is not known here."""
        first = self.restart.first_round
        return self.head_before(max(number - lag, first)) if number >= first else None

    def lacks_what_made(self, evidence: Committed, epoch: Epoch, num_stages: int, lag: int) -> bool:
        """Whether entries are lost: one of another stage was made from what this log lacks, or contradicts its own.

        Args:
            epoch: in which it was agreed
        """
        cut = evidence.entry.cut
        if cut.stage == self.stage or epoch.restart != self.restart or len(cut.base) != num_stages:
            return False
        # A certificate of an epoch that is over by now proves nothing: few tickets may have been there then.
        if (cut.epoch,) < self.age[0]:
            return False
        is_lost = is_lacking(self, cut.base[self.stage], cut.round - lag) or self.is_contradicted(evidence.entry, lag)
        return is_lost and evidence.entry.is_agreed(evidence.agreement, epoch)

    def is_older_than(self, entry: Entry, lag: int) -> bool:
        """Whether an entry of another stage is of no older epoch than the one of this log that it was computed from.

        All who have gone on from that one were in its epoch or a later one; in older ones few tickets may have been.
        """
        made_from = (each for each in self._committed if each.entry.cut.round == entry.cut.round - 1 - lag)
        return all(each.entry.cut.epoch <= entry.cut.epoch for each in made_from)

    def is_contradicted(self, entry: Entry, lag: int) -> bool:
        """Whether this log was made from other heads than an entry of another stage, of a later epoch, knows."""
        its, head = entry.cut, (entry.hash,)
        older = {each.entry.cut.round: each.entry.cut for each in self._committed if each.entry.cut.epoch < its.epoch}
        same, later = older.get(its.round, its), older.get(its.round + 1 + lag)
        return same.base != its.base or (later is not None and later.base[its.stage : its.stage + 1] != head)

    def is_valid(self, known: Log, epoch_of: EpochOf, fills: Callable[[Close], bool] | None = None) -> bool:
        """Whether each entry follows the one before, and was committed; those that are known need no look.

        Args:
            known: a log of the same restart, perhaps of another stage
            fills: whether counts fill a batch; None for entries that are told without counts
        """
        head, known_heads = self._before_first, set(known.heads().values())
        # A certificate of an epoch before that of a known entry proves nothing any more: few tickets may have been
        # there then. An entry of a later epoch that follows it vouches for it.
        epochs = [committed.entry.cut.epoch for committed in self._committed]
        is_older = known.stage == self.stage and self.head not in known_heads and self.age[0] < known.age[0]
        if is_older or epochs != sorted(epochs):
            return False
        if self._first_round == self.restart.first_round and head != base_of(self.stage, self.restart):
            return False
        if self._first_round < self.restart.first_round:
            return False
        for number, (entry, agreement, close) in enumerate(self._committed, self._first_round):
            cut = entry.cut
            if (cut.stage, cut.round, cut.parent) != (self.stage, number, head):
                return False
            head = entry.hash
            if head in known_heads:
                continue
            epoch = epoch_of(cut.epoch)
            if epoch is None or epoch.restart != self.restart or not entry.is_agreed(agreement, epoch):
                return False
            if close.round != number or not (fills is None or fills(close)):
                return False
        return True

    def append(self, committed: Committed) -> None:
        """Add the entry that comes next."""
        cut = committed.entry.cut
        assert (cut.round, cut.parent, cut.stage) == (self.next_round, self.head, self.stage)
        self._committed.append(committed)
        if len(self._committed) > KEPT_ENTRIES:
            self._before_first = self._committed.pop(0).entry.hash
            self._first_round += 1


def is_lacking(log: Log, head: str, number: int) -> bool:
    """Whether a log shows that it has no entry of this hash before a round."""
    number = max(number, log.restart.first_round)
    known = log.head_before(number)
    return number > log.next_round or (known is not None and known != head)

"""The log of a stage: entries, their certificates, and what a round is cut of. Pure.

Owns what makes an entry valid. Knows nothing of how one comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.statements import EpochId, Seat, Signed, Statement, hash_of


class Name(NamedTuple):
    """The name of a contribution: what a seat has computed in a round."""

    seat: Seat
    round: int


class Contribution(NamedTuple):
    """The gradient that a seat has computed, as the protocol knows it: by its name.

    Attributes:
        name: it is in a cut once, however many members could bring it
        weight: targets that it was computed on
        samples: that it was computed on, by ids
        base: heads of all stages that those of its own round were computed from; empty where there are none
    """

    name: Name
    weight: int
    samples: tuple[str, ...]
    base: tuple[str, ...]


class Part(NamedTuple):
    """A member's part of the update of a round: its own contribution, and those that others have given it."""

    seat: Seat
    brings: tuple[Contribution, ...]

    @property
    def weight(self) -> int:
        """Of all that it brings."""
        return sum(each.weight for each in self.brings)


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
        base: the heads of all stages that the round was computed from
        averages: whether its members average what they bring
        blamed: statements for which both accuser and accused are left out
    """

    stage: int
    round: int
    epoch: EpochId
    attempt: int
    parent: str
    base: tuple[str, ...]
    averages: bool
    parts: tuple[Part, ...]
    blamed: tuple[Signed[Blamed], ...] = ()

    @cached_property
    def hash(self) -> str:
        """The name by which members speak of it."""
        return hash_of(self)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Its members."""
        return tuple(part.seat for part in self.parts)

    @property
    def samples(self) -> frozenset[str]:
        """All that it holds."""
        return frozenset(sample for part in self.parts for each in part.brings for sample in each.samples)


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
        """Whether it may be committed: a quorum of the stage has its result, or agrees to be left out.

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
        if not epoch.is_divided:
            return bool(have)
        return bool(have) and epoch.is_quorum((have | agree) & set(roster), roster)


@dataclass(frozen=True)
class Done(Statement):
    """A seat of stage 0 has had so many samples of a round computed.

    Attributes:
        base: the heads of all stages that these were computed from
    """

    round: int
    samples: int
    base: tuple[str, ...]


@dataclass(frozen=True)
class Close:
    """The batch of a round is full, as these counts show: nothing more is let into it."""

    round: int
    counts: tuple[Signed[Done], ...]


class Committed(NamedTuple):
    """An entry with what shows that it was committed, and that its round was over."""

    entry: Entry
    agreement: Agreement
    close: Close


# An epoch that was chosen, by its id; None if it is not known.
EpochOf = Callable[[EpochId], Epoch | None]


class Log:
    """The entries of a stage since the run began, or began anew.

    Attributes:
        restart: where it begins
    """

    def __init__(self, stage: int, restart: Restart, committed: Iterable[Committed] = ()):
        self.stage = stage
        self.restart = restart
        self._committed = list(committed)

    @property
    def committed(self) -> tuple[Committed, ...]:
        """The entries, oldest first."""
        return tuple(self._committed)

    @property
    def next_round(self) -> int:
        """The round whose entry comes next."""
        return self.restart.first_round + len(self._committed)

    @property
    def base(self) -> str:
        """The hash that stands in place of the first entry's parent."""
        return hash_of(("base", self.stage, self.restart))

    @property
    def head(self) -> str:
        """The hash of the newest entry, which stands for all of them."""
        return self._committed[-1].entry.hash if self._committed else self.base

    @property
    def age(self) -> tuple[int, EpochId | None]:
        """By which the longer log of two is known; of equally long ones that of the later epoch."""
        return self.next_round, self._committed[-1].entry.cut.epoch if self._committed else None

    def is_valid(self, known: set[str], epoch_of: EpochOf, fills: Callable[[Close], bool]) -> bool:
        """Whether each entry follows the one before, and was committed; those that are known need no look."""
        head = self.base
        for number, (entry, agreement, close) in enumerate(self._committed, self.restart.first_round):
            cut = entry.cut
            if (cut.stage, cut.round, cut.parent) != (self.stage, number, head):
                return False
            head = entry.hash
            if head in known:
                continue
            epoch = epoch_of(cut.epoch)
            if epoch is None or close.round != number or not entry.is_agreed(agreement, epoch) or not fills(close):
                return False
        return True

    def heads(self) -> list[str]:
        """The base, and the hash of each entry."""
        return [self.base, *(committed.entry.hash for committed in self._committed)]

    def base_of(self, number: int, lag: int) -> str | None:
        """The head that a round was computed from; None if this log does not reach so far, or begins later."""
        index, heads = number - lag - self.restart.first_round, self.heads()
        return heads[max(index, 0)] if -lag <= index < len(heads) else None

    def append(self, committed: Committed) -> None:
        """Add the entry that comes next."""
        cut = committed.entry.cut
        assert (cut.round, cut.parent, cut.stage) == (self.next_round, self.head, self.stage)
        self._committed.append(committed)

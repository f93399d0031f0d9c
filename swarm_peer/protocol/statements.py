"""Statements that others build on, with their signatures; ids of seats and epochs.

The wire makes sure of a signature before a statement comes here, so `author` is to be believed. Nothing else in it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

# Signatures of its own that a seat keeps.
KEPT_SIGNATURES = 64


class Seat(NamedTuple):
    """One life of one peer in a run; an epoch says in which stages it has places.

    Attributes:
        life: when the process began; a later life of the same peer has a larger number
        ticket: by which its owner was invited
    """

    peer: str
    life: int
    ticket: str


class EpochId(NamedTuple):
    """The id of an epoch; a later one compares as greater.

    Attributes:
        term: grows whenever the run key takes the voters' part
        author: the coordinator that began the term; one that has started again begins another term
        number: of the epoch in its term
    """

    term: int
    author: Seat
    number: int

    def next(self) -> EpochId:
        """The id of the epoch that this one's voters choose."""
        return self._replace(number=self.number + 1)


class Ballot(NamedTuple):
    """One try of one voter to have an epoch chosen; a later one compares as greater."""

    number: int
    proposer: Seat


@dataclass(frozen=True)
class Statement:
    """A claim about an epoch, which its author signs."""

    author: Seat
    epoch: EpochId


@dataclass(frozen=True)
class Join(Statement):
    """The author wants a place in a stage; COORDINATORS in place of a stage for a coordinator's.

    Attributes:
        has_state: whether it has taken over the stage's state; without it, it can only begin a stage that has no seats
    """

    stage: int
    has_state: bool


@dataclass(frozen=True)
class Leave(Statement):
    """The author gives up its place in a stage."""

    stage: int


@dataclass(frozen=True)
class Silent(Statement):
    """The author, a voter, has asked these seats for a sign of life, and heard nothing."""

    seats: frozenset[Seat]


@dataclass(frozen=True)
class Stuck(Statement):
    """The leader of the author's stage does not bring a round to its end."""

    stage: int
    leader: Seat


class Snapshot(NamedTuple):
    """A snapshot that somebody holds: of a stage, after an optimizer step.

    Attributes:
        entry: the hash of the entry whose cut names the root of the state
        base: a hash of the heads of all stages that the entry was computed from: the same at all stages, and another
            one in a part of the run that it has gone back from
    """

    optimizer_step: int
    stage: int
    entry: str
    base: str = ""


@dataclass(frozen=True)
class Offer(Statement):
    """The author holds these snapshots, and has come to a round.

    Attributes:
        optimizer_step: that its weights have
    """

    round: int
    optimizer_step: int
    snapshots: frozenset[Snapshot]


@dataclass(frozen=True)
class Accepted(Statement):
    """The author, a voter of `epoch`, has accepted its successor in a ballot."""

    ballot: Ballot
    successor: str


@dataclass(frozen=True)
class KeySigned:
    """The run key has signed an epoch, by its hash."""

    successor: str


Wish = Join | Leave | Silent | Stuck | Offer
S = TypeVar("S", bound=Statement | KeySigned)


def subject_of(wish: Wish) -> tuple[object, ...]:
    """A name of the thing that a wish is about: a later wish of the same author about it replaces an earlier one."""
    return type(wish), wish.author, getattr(wish, "stage", None)


@dataclass(frozen=True)
class Signed(Generic[S]):
    """A statement with its signature."""

    body: S
    signature: bytes


class Sign(Protocol):
    """Signs a statement as one seat, or with the run key."""

    def __call__(self, body: S, /) -> Signed[S]:
        """The statement with its signature."""


class SignedOnce:
    """Signs what one seat says again and again once for each statement."""

    def __init__(self, sign: Sign):
        self._sign = sign
        self._signed: dict[Statement | KeySigned, object] = {}

    def __call__(self, body: S, /) -> Signed[S]:
        """The statement with its signature."""
        if body not in self._signed:
            if len(self._signed) >= KEPT_SIGNATURES:
                self._signed.clear()
            self._signed[body] = self._sign(body)
        return cast(Signed[S], self._signed[body])


def hash_of(value: object) -> str:
    """A hash of a value that is made of frozen dataclasses, named tuples, strings and numbers, and of no sets."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]

"""Admits microbatches of this peer's round, holds those of the next round, and turns away those of earlier ones.

Owns how many microbatches are inside the round. Must not know what they compute, or why a round ends (the driver).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm_peer.errors import Busy, NotServing, RoundClosed
from swarm_peer.policy.step_state import Phase
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.rounds import ReplicaRound, RoundBook

# Do not hold microbatches of a round further ahead than this: their caller is confused, or this peer is far behind.
MAX_ROUNDS_HELD = 1
# One of so many places, and at least one, is kept free of a caller that holds all others, as long as there is another
# caller.
PLACES_PER_FREE_ONE = 4


def places_of_one(capacity: int, num_callers: int) -> int:
    """How many microbatches one caller may have inside or held, so that it cannot shut out the others."""
    if num_callers < 2:
        return capacity
    return max(capacity - max(capacity // PLACES_PER_FREE_ONE, 1), 1)


class RoundAdmission:
    """Decides which microbatches are inside the present round. Belongs to the event loop's thread.

    Args:
        capacity: microbatches that may be inside or held at once; None on stage 0, which launches no more than that

    Attributes:
        admitted: number of microbatches that are inside the present round, or still inside one that was given up
        held: number of microbatches that wait to get in
    """

    def __init__(self, *, capacity: Capacity | None, rounds: RoundBook, changed: Condition):
        self._capacity = capacity
        self.admitted = 0
        self.held = 0
        self._by_caller: Counter[str] = Counter()  # admitted and held
        self._rounds = rounds
        self._leaving = False
        self._gives_up_inside = False
        self._changed = changed

    @property
    def is_open(self) -> bool:
        """Whether microbatches of the present round may come in."""
        return self._rounds.step.phase is Phase.OPEN and not self._leaving

    @property
    def serves(self) -> bool:
        """Whether this peer has weights and is not draining."""
        return self._rounds.step.phase in (Phase.OPEN, Phase.ENDING) and not self._leaving

    def leave(self) -> None:
        """Admit no more microbatches of any round: this peer is draining."""
        self._leaving = True
        self._changed.notify()

    @asynccontextmanager
    async def enter(self, round_number: int, *, caller: str = "", num_callers: int = 1) -> AsyncIterator[ReplicaRound]:
        """Keep a microbatch inside a round for as long as the context lasts; wait for the round if it comes next.

        Args:
            caller: the peer that sent it; empty for this peer itself
            num_callers: number of peers that send microbatches here

        Returns:
            the round, as the context's value

        Raises:
            RoundClosed: this peer is past that round, or has closed it
            Busy: as many microbatches are inside or held as may be, or as many of this caller
            NotServing: this peer is draining, or far behind that round
        """
        if self._capacity is not None:
            places, own = self._capacity.microbatches, self._by_caller[caller]
            if self.admitted + self.held >= places:
                raise Busy(f"{self.admitted} microbatches in flight and {self.held} held")
            if own >= places_of_one(places, num_callers):
                raise Busy(f"{own} of {places} places are this caller's, and others need some")
        self._by_caller[caller] += 1
        try:
            async with self._inside(round_number) as entered:
                yield entered
        finally:
            self._by_caller[caller] -= 1
            self._by_caller += Counter()  # forget those at zero

    @asynccontextmanager
    async def _inside(self, round_number: int) -> AsyncIterator[ReplicaRound]:
        self.held += 1
        try:
            entered = await self.reach(round_number)
            if not self.is_open:
                raise self._closed(round_number)
        finally:
            self.held -= 1
        self.admitted += 1
        entered.admitted += 1
        try:
            yield entered
        finally:
            self.admitted -= 1
            entered.admitted -= 1
            self._changed.notify()

    async def reach(self, round_number: int) -> ReplicaRound:
        """Wait until a round has begun, without getting in: the round may end without waiting for the caller.

        Raises:
            RoundClosed: this peer is past that round
            NotServing: this peer is draining, or far behind that round
        """
        present = self._rounds.step.round_number
        if round_number > present + MAX_ROUNDS_HELD:
            raise NotServing(f"this peer is in round {present}, too far behind round {round_number}")
        await self._changed.wait_for(lambda: round_number <= self._rounds.step.round_number or not self.serves)
        if not self.serves:
            raise NotServing("not serving, or draining")
        if round_number < self._rounds.step.round_number:
            raise self._closed(round_number)
        return self._rounds.current

    def _closed(self, round_number: int) -> RoundClosed:
        present = self._rounds.step.round_number
        return RoundClosed(f"round {round_number} is closed here; this peer is in round {present}", present)

    def give_up_inside(self) -> None:
        """Wait no longer for the microbatches that are inside: the executor counts none of them any more."""
        self._gives_up_inside = True
        self._changed.notify()

    async def drained(self) -> None:
        """Wait until no microbatch is inside the present round that may still count."""
        present = self._rounds.current
        await self._changed.wait_for(lambda: present.admitted == 0 or self._gives_up_inside)

"""A bounded number of places, of which nobody may hold more than some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from swarm_peer.errors import NoRoom

# Of all places, those that holders of one ticket may have together: holders of another one find some left.
SHARE_OF_TICKET = 0.8


class Places:
    """Gives out a number of places, no more than some of them to each holder, and not all to those of one ticket."""

    def __init__(self, most: int, most_each: int):
        self._most = most
        self._most_each = most_each
        self._held: Counter[Hashable] = Counter()
        self._of_ticket: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """The places that are held now."""
        return self._held.total()

    @contextmanager
    def hold(self, holder: Hashable, ticket: str = "") -> Iterator[None]:
        """Hold a place for the duration of the context.

        Args:
            ticket: by which the holder was invited; empty if by none

        Raises:
            NoRoom: none is free for this holder
        """
        has_share = bool(ticket) and self._of_ticket[ticket] >= SHARE_OF_TICKET * self._most
        if self.num_held >= self._most or self._held[holder] >= self._most_each or has_share:
            raise NoRoom("this node helps too many others already")
        self._held[holder] += 1
        self._of_ticket[ticket] += 1
        try:
            yield
        finally:
            self._held[holder] -= 1
            self._of_ticket[ticket] -= 1
            self._held += Counter()  # drops those without any
            self._of_ticket += Counter()

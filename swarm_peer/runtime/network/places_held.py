"""A bounded number of places, of which nobody may hold more than some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from swarm_peer.errors import NoRoom


class Places:
    """Gives out a number of places, and no more than some of them to each holder."""

    def __init__(self, most: int, most_each: int):
        self._most = most
        self._most_each = most_each
        self._held: Counter[Hashable] = Counter()

    @property
    def num_held(self) -> int:
        """The places that are held now."""
        return self._held.total()

    @contextmanager
    def hold(self, holder: Hashable) -> Iterator[None]:
        """Hold a place for the duration of the context.

        Raises:
            NoRoom: none is free for this holder
        """
        if self.num_held >= self._most or self._held[holder] >= self._most_each:
            raise NoRoom("this node helps too many others already")
        self._held[holder] += 1
        try:
            yield
        finally:
            self._held[holder] -= 1
            self._held += Counter()  # drops those without any

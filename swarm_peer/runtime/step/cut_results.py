"""The averages of cuts, from when one begins until an entry holds the cut. Belongs to one thread."""

from __future__ import annotations

from dataclasses import dataclass

from anyio import CancelScope
from torch import Tensor

from swarm_peer.protocol.log import Cut

# Results of cuts of which none is an entry yet. Of one round there may be many, and the newest becomes the entry: but
# for the one before it, if members had agreed on that.
KEPT_RESULTS = 2


@dataclass
class Averaging:
    """An average that is being made."""

    cut: Cut
    scope: CancelScope


class CutResults:
    """The averages of cuts of which none is an entry yet. Belongs to one thread."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, list[Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, cut: Cut, averages: list[Tensor]) -> None:
        """Hold the averages of a cut, and no more than those of KEPT_RESULTS cuts."""
        self._held[cut.hash] = cut.round, averages
        while len(self._held) > KEPT_RESULTS:
            del self._held[next(iter(self._held))]

    def take(self, cut: Cut) -> list[Tensor] | None:
        """Hand over the averages of a cut that has become an entry, if they are held."""
        held = self._held.pop(cut.hash, None)
        return None if held is None else held[1]

    def forget(self, before: int | None = None) -> None:
        """Drop the averages of the rounds before one, or all."""
        self._held = {name: each for name, each in self._held.items() if before is not None and each[0] >= before}

"""The gradients that this seat can bring to averages, by the names of their contributions. Belongs to one thread.

A name holds one contribution, however often it comes: so a stage-mate that leaves may give its own to several, and
again, and a cut takes each name once (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from swarm_peer.protocol.log import Name

# Means over targets, and their number.
Held: TypeAlias = tuple[list[Tensor], int]


class NamedGradients:
    """Mean gradients with their weights, by name."""

    def __init__(self) -> None:
        self._held: dict[Name, Held] = {}

    @property
    def names(self) -> frozenset[Name]:
        """The contributions that are held."""
        return frozenset(self._held)

    def put(self, name: Name, means: Sequence[Tensor], weight: int) -> None:
        """Hold a contribution: means over targets, CPU and fp32; one of the same name is replaced."""
        self._held[name] = list(means), weight

    def get(self, name: Name) -> Held:
        """A contribution's means and weight.

        Raises:
            KeyError: it is not held
        """
        return self._held[name]

    def drop(self, name: Name) -> None:
        """Hold a contribution no more, if it is held."""
        self._held.pop(name, None)

    def keep(self, names: Collection[Name]) -> None:
        """Drop all contributions but these."""
        self._held = {name: held for name, held in self._held.items() if name in names}

    def forget(self, before: int) -> None:
        """Drop the contributions of rounds before one."""
        self._held = {name: held for name, held in self._held.items() if name.round >= before}


def mean_of(contributions: Sequence[Held], like: Sequence[Tensor]) -> Held:
    """The mean of several contributions over all of their targets, and their number; zeros of none. Any thread.

    Args:
        like: tensors of the shapes of a contribution
    """
    total = sum(weight for _, weight in contributions)
    if len(contributions) == 1:
        return contributions[0]
    sums = [torch.zeros(each.shape) for each in like]
    for means, weight in contributions if total else ():
        for into, mean in zip(sums, means, strict=True):
            into.add_(mean, alpha=weight / total)
    return sums, total

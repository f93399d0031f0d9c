"""The gradients that this seat can bring to averages, by the names of their contributions. Belongs to one thread.

A name holds one contribution, however often it comes: so a stage-mate that leaves may give its own to several, and
again, and a cut takes each name once (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from swarm_peer.protocol.log import Name


class NamedGradients:
    """Mean gradients with their weights, by name."""

    def __init__(self) -> None:
        self._held: dict[Name, tuple[list[Tensor], int]] = {}

    @property
    def names(self) -> frozenset[Name]:
        """The contributions that are held."""
        return frozenset(self._held)

    def put(self, name: Name, means: Sequence[Tensor], weight: int) -> None:
        """Hold a contribution: means over targets, CPU and fp32; one of the same name is replaced."""
        self._held[name] = list(means), weight

    def get(self, name: Name) -> tuple[list[Tensor], int]:
        """A contribution's means and weight, to be given to a stage-mate.

        Raises:
            KeyError: it is not held
        """
        return self._held[name]

    def mean(self, names: Collection[Name], like: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The mean of several contributions over all of their targets, and their number; zeros of none.

        Args:
            like: tensors of the shapes of a contribution

        Raises:
            KeyError: one of them is not held
        """
        held = [self._held[name] for name in names]
        total = sum(weight for _, weight in held)
        if len(held) == 1:
            return held[0]
        if not total:
            return [torch.zeros(each.shape) for each in like], 0
        sums = [torch.zeros(each.shape) for each in like]
        for means, weight in held:
            for into, mean in zip(sums, means, strict=True):
                into.add_(mean, alpha=weight / total)
        return sums, total

    def drop(self, name: Name) -> None:
        """Hold a contribution no more, if it is held."""
        self._held.pop(name, None)

    def keep(self, names: Collection[Name]) -> None:
        """Drop all contributions but these."""
        self._held = {name: held for name, held in self._held.items() if name in names}

    def forget(self, before: int) -> None:
        """Drop the contributions of rounds before one."""
        self._held = {name: held for name, held in self._held.items() if name.round >= before}

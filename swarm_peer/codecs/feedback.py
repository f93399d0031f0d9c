"""Error feedback: what a seat has brought to averages and not yet sent is added to what it brings next.

A try of an average makes a leftover, and the entry that holds the try's cut makes that the seat's: a try that fails, or
another cut of the same round, changes nothing. So each gradient is sent once, or has yet to be sent.

A leftover belongs to one life of a seat and to one history. Where the run goes back, where another log takes the place
of a seat's own, and where its place ends, it is dropped. It is in no state and in no digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_peer.codecs.parts import LARGEST_BROUGHT

# Tries of which none is in an entry yet: as many as the driver keeps results of.
KEPT_TRIES = 2


@dataclass(frozen=True)
class Try:
    """One try of an average.

    Attributes:
        codec: name of the one that its parts travel in
        before: flat leftover that is added to what is brought; None for zeros
        after: flat leftover that the try makes: begins with zeros, and what is lost is added
    """

    codec: str
    before: Tensor | None
    after: Tensor

    def bring(self, values: Tensor, weight: int) -> None:
        """Make of flat means what the seat brings: their sum over all targets, and what is left over.

        A leftover may be too large for others to take: part of it comes from what they have brought themselves.
        """
        values.mul_(weight)
        if self.before is not None:
            values.add_(self.before)
        values.clamp_(-LARGEST_BROUGHT, LARGEST_BROUGHT)

    def keep(self) -> None:
        """Leave what is left over as it is: the members of the cut bring nothing at all."""
        if self.before is not None:
            self.after.copy_(self.before)


class ErrorFeedback:
    """The leftovers of one seat."""

    def __init__(self, num_values: int):
        """Begin without a leftover.

        Args:
            num_values: that it brings
        """
        self._num_values = num_values
        self._leftover: Tensor | None = None
        self._tries: dict[str, tuple[int, Try]] = {}
        self._settled = -1

    @property
    def leftover(self) -> Tensor | None:
        """The values that are added to what the seat brings next, sums over targets; None for zeros."""
        return self._leftover

    @property
    def norm(self) -> float:
        """The largest that the leftover may have: its own, or that of a try that may be in an entry by now."""
        leftovers = [self._leftover, *(tried.after for _, tried in self._tries.values())]
        return max(0.0 if each is None else float(each.norm()) for each in leftovers)

    def begin_try(self, cut: str, round_number: int, codec: str) -> Try:
        """Begin a try of a cut's average, before anything of it is sent."""
        # Of numpy, whose zeros are made as they are used, and not by the event loop.
        begun = Try(codec, self._leftover, torch.from_numpy(np.zeros(self._num_values, np.float32)))
        self._tries[cut] = round_number, begun
        while len(self._tries) > KEPT_TRIES:
            del self._tries[next(iter(self._tries))]
        return begun

    def settle(self, cut: str, round_number: int, is_member: bool) -> bool:
        """Take over the leftover of the cut that has become the entry of a round; each round counts once.

        Args:
            is_member: whether the seat is in the cut

        Returns:
            False if the seat is in it and nothing is known of its try, or no entry was seen of a round with an earlier
            one: part of the leftover may have been sent
        """
        if round_number <= self._settled:
            return True
        self._settled = round_number
        is_unseen = any(earlier < round_number for earlier, _ in self._tries.values())
        tried = self._tries.get(cut)
        if tried is not None:
            self._leftover = tried[1].after
        self._tries = {name: each for name, each in self._tries.items() if each[0] > round_number}
        is_known = tried is not None or not is_member or self._leftover is None
        return is_known and not is_unseen

    def drop(self) -> None:
        """Forget the leftover, and all tries."""
        self._leftover, self._settled = None, -1  # the log that follows may have earlier rounds
        self._tries.clear()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """The values of some tensors, one after the other, in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])

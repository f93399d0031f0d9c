"""Averages what the members of a cut bring, the averager that ships."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from swarm_peer.protocol.log import Cut
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.step.averaging import AveragingFailed, GradientAverager
from swarm_peer.runtime.step.driver_parts import AverageFailed


class CutAverager:
    """An `Averager` of one stage. A cut names the averaging round, so none has members of different cuts."""

    def __init__(self, averager: GradientAverager, threads: Threads):
        self._averager = averager
        self._threads = threads

    async def average(self, cut: Cut, means: Sequence[Tensor], weight: int) -> list[Tensor]:
        """See Averager.

        Raises:
            AverageFailed: a member was lost, or has sent what does not fit
        """
        shares = {part.seat.peer: part.weight for part in cut.parts}
        try:
            averages = await self._averager.average(cut.hash, means, shares)
        except AveragingFailed as error:
            blamed = frozenset(seat for seat in cut.seats if seat.peer in error.blamed)
            raise AverageFailed(str(error), blamed) from error
        # The averager's memory is used again for the next average, while this one is kept for stage-mates.
        return await self._threads.run(_copied, averages)


def _copied(averages: Sequence[Tensor]) -> list[Tensor]:
    return [average.clone() for average in averages]

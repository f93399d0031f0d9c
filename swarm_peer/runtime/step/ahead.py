"""The average that stage-mates begin with before the round whose end it belongs to, where updates are delayed.

It is the first try of that round's averaging, among those who ended the round before together. Owns how far it is. Must
not know whether the stage-mates got the same: settlement.py has them vote, and tries again if it failed for one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import torch

from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.step.averaging import AveragingFailed, GradientAverager

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AheadAverage:
    """One averaging round that runs while microbatches come in.

    Attributes:
        gradients: what this peer brings; CPU, fp32
        shares: its members, with the samples that each brings
        averages: None while it is under way, or if it has failed
        reason: why it failed
    """

    round_number: int
    gradients: Sequence[torch.Tensor]
    shares: Mapping[str, int]
    averages: Sequence[torch.Tensor] | None = None
    reason: str = ""
    is_over: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class AveragingAhead:
    """Averages ahead, one round after the other. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, averager: GradientAverager):
        self._clock = context.clock
        self._changed = context.changed
        self._metrics = context.metrics
        self._averager = averager
        self._newest: AheadAverage | None = None

    def begin(self, round_number: int, gradients: Sequence[torch.Tensor], shares: Mapping[str, int]) -> None:
        """Have `run` average what ends a later round.

        Args:
            gradients: CPU, fp32; not changed
            shares: the members, this peer among them, with the samples that each brings
        """
        if self._newest is not None:
            self._newest.scope.cancel()
        self._newest = AheadAverage(round_number, gradients, shares)
        self._changed.notify()

    async def run(self) -> None:
        """Average what `begin` is given, until cancelled."""
        self._newest = None
        while True:
            await self._changed.wait_for(lambda: self._newest is not None and not self._newest.is_over)
            assert self._newest is not None
            await self._average(self._newest)

    async def _average(self, ahead: AheadAverage) -> None:
        if len(ahead.shares) == 1:
            ahead.averages = ahead.gradients
        else:
            began_s = self._clock.monotonic_s()
            ahead.reason = "a member was lost"
            with ahead.scope:
                try:
                    ahead.averages = await self._averager.average(
                        ahead.gradients, round_number=ahead.round_number, attempt=0, shares=ahead.shares
                    )
                    self._metrics.averaging_seconds.observe(self._clock.monotonic_s() - began_s)
                except AveragingFailed as error:
                    ahead.reason = str(error)
        outcome = "alone" if len(ahead.shares) == 1 else "failed" if ahead.averages is None else "done"
        self._metrics.averaging_rounds.labels(outcome).inc()
        ahead.is_over = True
        self._changed.notify()

    async def result(
        self, round_number: int, present: Mapping[str, int], given: Mapping[str, int]
    ) -> AheadAverage | None:
        """Wait for the average that ends a round.

        Args:
            present: the stage-mates that are there at the round's end, with the samples that they hold by now; without
                a member, it is not waited for
            given: the samples for it that peers have handed to this one as they left

        Returns:
            None if this peer was not there when it began
        """
        ahead = self._newest
        if ahead is None or ahead.round_number != round_number:
            log.info("no_average_ahead round=%d", round_number)
            return None
        if not ahead.shares.keys() <= present.keys():
            ahead.scope.cancel()
        await self._changed.wait_for(lambda: ahead.is_over)
        outsiders = [samples for peer, samples in present.items() if peer not in ahead.shares]
        missed = [peer for peer, samples in given.items() if samples > ahead.shares.get(peer, 0)]
        if any(outsiders) or missed or sum(present.values()) > sum(ahead.shares.values()):
            # A peer that was not in it has come, or has left and handed its part to a member. The sum tells those who
            # do not know the giver, unless another member is gone: then this peer's vote alone has all try again.
            ahead.averages, ahead.reason = None, "stage-mates hold samples that it is not of"
        if ahead.averages is None:
            log.warning("round_failed round=%d attempt=0 reason=%s", round_number, ahead.reason)
        return ahead

    async def give_up(self) -> None:
        """End what is under way. A peer that has missed the end of its round would average twice at once."""
        ahead = self._newest
        if ahead is not None:
            ahead.scope.cancel()
            await self._changed.wait_for(lambda: ahead.is_over)

"""Averages what the members of a cut bring: the averager that ships. With some codecs, part waits for later cuts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from swarm_peer.codecs import NEED_FEEDBACK, PLAIN
from swarm_peer.codecs.feedback import ErrorFeedback, Try
from swarm_peer.policy.decay import last_step_of
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.protocol.log import Cut
from swarm_peer.protocol.statements import EpochId
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.step.averaging import AveragingFailed, GradientAverager
from swarm_peer.runtime.step.driver_parts import AverageFailed

log = logging.getLogger(__name__)


class CutAverager:
    """An `Averager` of one stage. A cut names the averaging round, so none has members of different cuts."""

    def __init__(
        self, *, context: PeerContext, stage: int, averager: GradientAverager, word_at: Callable[[EpochId], str]
    ):
        """Make an averager without anything left over.

        Args:
            word_at: what the run key had said in an epoch
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._stage = stage
        self._averager = averager
        self._word_at = word_at
        has_feedback = self._manifest.averaging.compression in NEED_FEEDBACK
        self._feedback = ErrorFeedback(averager.num_values) if has_feedback else None
        self._restart = BEGINNING

    async def average(self, cut: Cut, means: Sequence[Tensor], weight: int) -> list[Tensor]:
        """See Averager.

        Raises:
            AverageFailed: a member was lost, or has sent what does not fit
        """
        shares = {part.seat.peer: part.weight for part in cut.parts}
        try:
            return await self._averager.average(cut.hash, means, shares, self._try(cut))
        except AveragingFailed as error:
            blamed = frozenset(seat for seat in cut.seats if seat.peer in error.blamed)
            raise AverageFailed(str(error), blamed) from error

    def _try(self, cut: Cut) -> Try | None:
        if self._feedback is None:
            return None
        made = self._restart.optimizer_step + 1 + cut.round - self._restart.first_round
        last_step = last_step_of(self._manifest.training.steps, self._word_at(cut.epoch))
        codec = self._manifest.averaging.codec_at(made, last_step)
        # A member alone sends nothing, and so nothing has to wait.
        return self._feedback.begin_try(cut.hash, cut.round, codec if len(cut.parts) > 1 else PLAIN)

    def begin(self, restart: Restart) -> None:
        """See Averager. Leftovers are dropped: they are of weights that this seat does not go on from."""
        self._restart = restart
        self._drop("this peer leaves, or goes on from another state")

    def settle(self, cut: Cut) -> None:
        """See Averager."""
        if self._feedback is None or not cut.averages:
            return
        is_member = any(seat.peer == self._context.identity.peer_id for seat in cut.seats)
        if not self._feedback.settle(cut.hash, cut.round, is_member):
            self._drop("an average was made of it that this peer does not know")

    def _drop(self, reason: str) -> None:
        if self._feedback is None:
            return
        if norm := self._feedback.norm:
            self._context.metrics.leftovers_dropped.inc()
            log.warning("leftover_dropped stage=%d norm=%.3g reason=%s", self._stage, norm, reason)
        self._feedback.drop()

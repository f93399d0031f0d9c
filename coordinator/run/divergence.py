"""Decides how a run goes on whose weights have diverged: it ends, or goes back to its last good checkpoint, once.

A checkpoint is good if the run has gone on from its weights: then their loss was finite. The weights that broke the run
may well be finite numbers, and stand in the newest checkpoint of all: that one is never good.
"""

from __future__ import annotations

import logging
from math import inf

from coordinator.checkpoints.folder import Checkpoint, Fits
from coordinator.checkpoints.resumed import find_resumed
from coordinator.run.run_options import RunOptions
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import in_words
from swarm_peer.config import RunManifest
from swarm_peer.errors import SwarmError, UserError
from swarm_peer.policy.standstill import NO_UPDATES_S, Standstill
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.runtime.context import Threads

log = logging.getLogger(__name__)

# The reason that peers and coordinators are told begins so.
DIVERGED = "its weights have diverged"


class Diverged(SwarmError):
    """A run has ended, or has to end, since its weights have diverged.

    Attributes:
        reason: that peers and other coordinators are told
        is_told: whether they have been told already
    """

    def __init__(self, optimizer_step: int, why: str, way_on: str, *, is_told: bool = False):
        self.is_told = is_told
        self.reason = f"{DIVERGED} after optimizer step {optimizer_step}"
        super().__init__(f"the run has ended: {self.reason}{f' ({why})' if why else ''}; {way_on}")


class Divergence:
    """Knows which checkpoints of a run are good, and whether it has gone back to one."""

    def __init__(self, *, options: RunOptions, manifest: RunManifest, watch: RunWatch, threads: Threads):
        self._output = options.output
        self._store = options.plan.store
        self._rewinds = options.on_divergence == "rewind"
        self._manifest = manifest
        self._watch = watch
        self._threads = threads
        self._went_back_s = -inf
        self._first_round = 0

    def found(self) -> Standstill | None:
        """That the weights have diverged, and not only before the run went back.

        They may have diverged again before any peer could announce that it was well in between.
        """
        found = self._watch.divergence
        if found is None or found.since_s > self._went_back_s:
            return found
        rounds = found.spokesman.round_number - self._first_round
        has_had_time = rounds == 0 and self._watch.seen_s >= self._went_back_s + NO_UPDATES_S
        return found if rounds > 0 or has_had_time else None

    def went_back(self, timeline: Timeline) -> None:
        """Note that the run goes on from a checkpoint, on this timeline."""
        self._went_back_s, self._first_round = self._watch.seen_s, timeline.first_round

    async def choose(self, found: Standstill, timeline: Timeline, optimizer_step: int, is_of_run: Fits) -> Checkpoint:
        """The checkpoint to go back to.

        Args:
            timeline: the run's first one
            optimizer_step: that of the weights that are broken
            is_of_run: whether a checkpoint is of the run since it was begun or resumed

        Raises:
            Diverged: the run has to end
        """
        await self._set_aside(found, optimizer_step, is_of_run)
        checkpoint = await self._last_good(timeline, optimizer_step, is_of_run)
        if checkpoint is None or not self._rewinds or self._went_back_s > -inf:
            raise Diverged(optimizer_step, in_words(found), _way_on(checkpoint))
        return checkpoint

    async def failure(self, timeline: Timeline, is_of_run: Fits, why: str = "") -> Diverged:
        """The error of a run whose last weights are broken.

        Args:
            why: how this coordinator knows; empty if another one has ended the run for that
        """
        optimizer_step = self._watch.shown_step
        checkpoint = await self._last_good(timeline, optimizer_step, is_of_run)
        return Diverged(optimizer_step, why, _way_on(checkpoint), is_told=not why)

    async def _set_aside(self, found: Standstill, optimizer_step: int, is_of_run: Fits) -> None:
        """Mark the checkpoints of broken weights, so that nobody goes on from them."""
        if self._store is None or found.trouble is not Trouble.DIVERGED:
            return  # weights that get no update are as good as they were

        def is_broken(step: int, round_number: int) -> bool:
            return step >= optimizer_step and is_of_run(step, round_number)

        try:
            await self._threads.run(self._store.set_aside, is_broken, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoints_not_set_aside reason=%s", error)

    async def _last_good(self, timeline: Timeline, before_step: int, is_of_run: Fits) -> Checkpoint | None:
        """The newest checkpoint of the run that it has gone on from; None if there is none, or none can be read."""

        def is_good(step: int, round_number: int) -> bool:
            return step < before_step and is_of_run(step, round_number)

        def find() -> Checkpoint | None:
            newest = None if self._store is None else self._store.newest_that(is_good, self._manifest)
            if newest is None and 0 < timeline.first_optimizer_step < before_step:
                newest = find_resumed(self._output, timeline)
            return newest

        try:
            return await self._threads.run(find, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoints_not_seen reason=%s", error)
            return None


def _way_on(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "there is no good checkpoint of it: begin it anew, with a lower learning rate"
    again = f"go on from it with the same command, --resume {checkpoint.address}, and a lower learning rate"
    return f"its last good checkpoint is of optimizer step {checkpoint.optimizer_step}: {again}"

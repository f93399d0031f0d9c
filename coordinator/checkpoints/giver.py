"""Gives checkpoints to peers, as a peer gives snapshots: where a run goes on from one, or where a stage is lost.

A stage whose peers are gone begins again with a snapshot that other peers keep. If these are gone as well, as when a
provider takes all its machines back at once, the coordinator's checkpoints are what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio

from coordinator.checkpoints.folder import Checkpoint, Fits, one_line
from coordinator.checkpoints.resumed import find_resumed
from coordinator.checkpoints.store import CheckpointStore
from coordinator.config_files import changed_settings
from coordinator.run.context import CoordinatorContext
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.run_progress import MAX_ROUND
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.state.recovery import ROUNDS_BETWEEN_TIMELINES
from swarm_peer.runtime.state.store import SnapshotStore

log = logging.getLogger(__name__)

# Pause between looks at whether all stages have peers.
LOOK_S = 2.0
# Pause before the checkpoints are looked at once more, if none fits or none could be read.
RETRY_S = 60.0


async def _is_member(caller: str) -> bool:
    return False  # there is nothing here but snapshots, which are for everybody


class CheckpointGiver:
    """Gives the states of checkpoints to any peer that asks. Belongs to the event loop's thread."""

    def __init__(self, manifest: RunManifest, context: CoordinatorContext, folder: Path):
        """Make a giver that has nothing to give.

        Args:
            folder: empty, for the states that are given away
        """
        self._manifest = manifest
        self._threads = context.threads
        self._snapshots = SnapshotStore(
            clock=context.clock, threads=context.threads, storage=FolderStorage(folder), is_member=_is_member
        )
        self.dispatcher = CallDispatcher(manifest_hash=manifest.hash, calls=self._snapshots.calls)

    async def resume(self, checkpoint: Checkpoint, known_round: int) -> Timeline:
        """Let a run go on from a checkpoint: give its states as those that the run begins with.

        Args:
            known_round: the last round that the run has seen since, as far as is known

        Returns:
            the new timeline

        Raises:
            UserError: there is no room for its states
        """
        first_round = max(checkpoint.round_number, known_round) + ROUNDS_BETWEEN_TIMELINES
        timeline = Timeline(first_round, checkpoint.optimizer_step, created_at_round=first_round)
        await self.give(checkpoint, timeline)
        _tell_changes(checkpoint, self._manifest)
        return timeline

    async def give(self, checkpoint: Checkpoint, timeline: Timeline) -> None:
        """Give the states of a checkpoint as those that a timeline begins with.

        Raises:
            UserError: there is no room for them
        """
        try:
            await self._give(checkpoint, timeline)
        except OSError as error:
            raise UserError(
                f"the states of {checkpoint.path} do not fit into the temporary folder ({one_line(error)}): make room "
                f"there, or name another one in TMPDIR"
            ) from error
        step, first_round = timeline.first_optimizer_step, timeline.first_round
        log.info("resuming optimizer_step=%d round=%d path=%s", step, first_round, checkpoint.path)

    async def give_again(self, output: Path, timeline: Timeline, store: CheckpointStore | None, fits: Fits) -> None:
        """Give what the run was resumed from: the coordinator that did so may have died before all peers had it.

        Args:
            output: folder of the run
            timeline: the run's first one
            store: where there may be newer checkpoints, which are given when a stage is lost
            fits: whether a checkpoint is of the run
        """

        def find() -> Checkpoint | None:
            checkpoint = find_resumed(output, timeline)
            has_newer = checkpoint is not None and store is not None and store.newest_that(fits, self._manifest)
            return None if has_newer else checkpoint

        try:
            checkpoint = await self._threads.run(find, abandon_on_cancel=True)
            if checkpoint is not None:
                await self.give(checkpoint, timeline)
        except UserError as error:  # its peers may all have what they need
            log.warning("checkpoint_not_given reason=%s", error)

    async def give_when_lost(
        self, store: CheckpointStore, fits: Fits, peers_by_stage: Callable[[], Sequence[int]]
    ) -> None:
        """Give the newest checkpoint whenever a stage has been without peers for a lifetime; until cancelled.

        Args:
            fits: whether a checkpoint is of the run. The store may hold those of other runs of the same manifest, and
                of parts that were given up.
            peers_by_stage: how many peers serve each stage
        """
        patience_s = self._manifest.limits.announcement_s
        while True:
            waited_s = 0.0
            while waited_s < patience_s:
                await anyio.sleep(LOOK_S)
                waited_s = 0.0 if all(peers_by_stage()) else waited_s + LOOK_S
            has_given = False
            while not all(peers_by_stage()):
                has_given = has_given or await self._give_newest(store, fits)
                await anyio.sleep(LOOK_S if has_given else RETRY_S)
            if has_given:
                # The run goes on. When it is lost again, no peer must begin with this before a newer one is given.
                self._snapshots.give_up(-1, MAX_ROUND)

    async def _give_newest(self, store: CheckpointStore, fits: Fits) -> bool:
        """Give the newest checkpoint that fits. Returns whether there is one, and it could be read.

        It gives one at a time: peers judge by its timeline, which begins with it, whether the run has given it up.
        """
        try:
            newest = await self._threads.run(store.newest_that, fits, self._manifest, abandon_on_cancel=True)
            if newest is None:
                return False
            self._snapshots.give_up(-1, MAX_ROUND)  # what was given before, or a part of it
            await self._give(newest, Timeline(newest.round_number, newest.optimizer_step, newest.round_number))
            log.info("checkpoint_given optimizer_step=%d path=%s", newest.optimizer_step, newest.path)
        except (UserError, OSError) as error:
            log.warning("checkpoint_not_given reason=%s", error)
            return False
        return True

    async def _give(self, checkpoint: Checkpoint, timeline: Timeline) -> None:
        for stage in range(self._manifest.stages.count):
            state = await self._threads.run(checkpoint.load_stage, stage)
            state = replace(state, round_number=timeline.first_round, timeline=timeline)
            await self._snapshots.store_snapshot(stage, state)


def _tell_changes(checkpoint: Checkpoint, manifest: RunManifest) -> None:
    """Log what the run does otherwise from now on: the user may have left something out of the command."""
    for key, was, now in changed_settings(checkpoint.manifest, manifest):
        log.warning("setting_changed setting=%s checkpoint=%s now=%s", key, was, now)

"""Gives checkpoints to peers, as a peer gives snapshots: where a run goes on from one, or where a stage is lost.

A stage whose peers are gone begins again with a snapshot that other peers keep. If these are gone as well, as when a
provider takes all its machines back at once, the coordinator's checkpoints are what is left.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from swarm_peer.policy.recovery import (
    FIRST_TIMELINE,
    SnapshotRef,
    Standing,
    Timeline,
    find_standing_by_snapshots,
    find_viable_standing,
)
from swarm_peer.runtime.state.claims import believable, claims_of, is_on_timeline, list_snapshots
from swarm_peer.runtime.state.recovery import ROUNDS_BETWEEN_TIMELINES
from swarm_peer.runtime.state.snapshot_store import SnapshotStore

from coordinator.checkpoints.fetching import newest_position
from coordinator.checkpoints.folder import Checkpoint, Fits, one_line
from coordinator.checkpoints.resumed import find_resumed
from coordinator.checkpoints.store import CheckpointStore
from coordinator.config_files import changed_settings
from coordinator.run.context import CoordinatorContext
from coordinator.watch.run_watch import RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.model.optimizer import learning_rate
from swarm_peer.policy.run_progress import MAX_ROUND
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import timeline_of

log = logging.getLogger(__name__)

# Pause between looks at whether all stages have peers.
LOOK_S = 2.0
# Pause before peers are asked once more where they stand, and the checkpoints are looked at for a better one.
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
        self._given: _Given | None = None
        self._resumed: tuple[Checkpoint, Timeline] | None = None  # what the run was resumed from
        # Checkpoints that could not be given, by their steps and rounds: they wait until the run has gone on, or there
        # is no other.
        self._failed: set[tuple[int, int]] = set()
        self._threads = context.threads
        self._snapshots = SnapshotStore(
            clock=context.clock, threads=context.threads, storage=FolderStorage(folder), is_member=_is_member
        )
        self.dispatcher = CallDispatcher(manifest_hash=manifest.hash, calls=self._snapshots.calls)

    async def resume(self, checkpoint: Checkpoint, known_round: int) -> Timeline:
        """Let a run go on from a checkpoint, or go back to it: give its states as those that the run begins with.

        Args:
            known_round: the last round that the run has seen since, as far as is known

        Returns:
            the new timeline

        Raises:
            UserError: there is no room for its states
        """
        first_round = max(checkpoint.round_number, known_round) + ROUNDS_BETWEEN_TIMELINES
        timeline = Timeline(first_round, checkpoint.optimizer_step, created_at_round=first_round)
        self._give_nothing()  # what a stage may have been lost for is void
        await self.give(checkpoint, timeline)
        return timeline

    async def give(self, checkpoint: Checkpoint, timeline: Timeline) -> None:
        """Give the states of a checkpoint as those that a timeline begins with.

        Raises:
            UserError: there is no room for them
        """
        self._resumed = checkpoint, timeline
        try:
            await self._give(checkpoint, timeline)
        except UserError:  # a file is not as it was written
            self._give_nothing()
            raise
        except OSError as error:
            self._give_nothing()
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

    async def give_when_lost(self, transport: Transport, store: CheckpointStore, fits: Fits, watch: RunWatch) -> None:
        """Give a checkpoint whenever a stage has been without peers for a lifetime; until cancelled.

        It is the newest one of the part of the run that the peers stand on, and is given until all stages have gone
        there: their peers may need it, too. If the peers that are left have not come to it, they go forward (see
        Recovery). A newer one that can be read only later, or is still being written as the stage is lost, takes its
        place while no peer has begun with it.

        Args:
            fits: whether a checkpoint is of the run. The store may hold those of other runs of the same manifest, and
                of parts that were given up.
            watch: sees which stages have peers, and in which round these are
        """
        patience_s = self._manifest.limits.announcement_s
        while True:
            waited_s = 0.0
            while waited_s < patience_s:
                await anyio.sleep(LOOK_S)
                waited_s = 0.0 if all(watch.peers_by_stage()) else waited_s + LOOK_S
            while not _has_gone_on(watch.view, self._given):
                standing = await self._ask_standing(transport, watch.view)
                if self._given is None or standing is not None:
                    await self._give_newest(store, fits, standing, watch.view)
                for _ in range(round(RETRY_S / LOOK_S)):
                    if not _has_gone_on(watch.view, self._given):
                        await anyio.sleep(LOOK_S)
            if self._given is not None:
                # The run goes on. When it is lost again, no peer must begin with this before a newer one is given.
                self._give_nothing()
            self._failed.clear()

    def _give_nothing(self) -> None:
        self._given = None
        self._snapshots.give_up(-1, MAX_ROUND)  # what was given, or a part of it

    async def _ask_standing(self, transport: Transport, view: SwarmView) -> Standing | None:
        """How far the run has come, as peers that join find it (see Recovery): None if no serving peer answers.

        Where none serves, they take a checkpoint to be of any step.
        """
        replies = await list_snapshots(self._manifest.hash, transport, [peer.peer_id for peer in view.peers])
        try:
            claims = claims_of(view, replies)
            believed = believable(claims)
        except CallError as error:
            log.info("standing_unknown reason=%s", error)
            return None
        if claims:
            return find_viable_standing(FIRST_TIMELINE, believed.values(), claims.values())
        left = [(SnapshotRef(*known), timeline_of(reply)) for reply in replies.values() for known in reply.snapshots]
        interval = self._manifest.recovery.snapshot_every
        return find_standing_by_snapshots(FIRST_TIMELINE, left, interval, optimizer_step_seen=MAX_ROUND)

    async def _give_newest(
        self, store: CheckpointStore, fits: Fits, standing: Standing | None, view: SwarmView
    ) -> None:
        """Give the newest checkpoint that fits, if there is one that is not given already, and can be.

        It gives one at a time: peers judge by its timeline, which begins with it, whether the run has given it up.
        """
        while (newest := await self._find_better(store, fits, standing)) is not None:
            self._give_nothing()
            timeline = Timeline(newest.round_number, newest.optimizer_step, newest.round_number)
            if not await self._can_give(newest, timeline):
                self._failed.add((newest.optimizer_step, newest.round_number))
                continue
            log.info("checkpoint_given optimizer_step=%d path=%s", newest.optimizer_step, newest.path)
            # Where peers begin anew is reckoned from the same (see Recovery): a false announcement does not move it.
            reached = newest_position(view).round_number if standing is None else standing.round_number
            last_round = max(newest.round_number, reached)
            self._given = _Given(newest.optimizer_step, newest.round_number, last_round + ROUNDS_BETWEEN_TIMELINES)
            return
        if self._given is not None:
            return
        if self._resumed is None or not self._failed:
            self._failed.clear()
        elif not self._snapshots.snapshots():  # what failed had taken its place
            await self._can_give(*self._resumed)

    async def _find_better(self, store: CheckpointStore, fits: Fits, standing: Standing | None) -> Checkpoint | None:
        """The newest checkpoint that could be given in the place of the present one, if there is one."""

        def is_good(optimizer_step: int, round_number: int) -> bool:
            return fits(optimizer_step, round_number) and _may_hold(standing, optimizer_step, round_number)

        if (given := self._given) is not None and not is_good(given.optimizer_step, given.created_at_round):
            self._give_nothing()
        given_round = -1 if self._given is None else self._given.created_at_round

        def is_better(optimizer_step: int, round_number: int) -> bool:
            is_tried = round_number <= given_round or (optimizer_step, round_number) in self._failed
            return not is_tried and is_good(optimizer_step, round_number)

        try:
            return await self._threads.run(store.newest_that, is_better, self._manifest, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoint_not_given reason=%s", error)
            return None

    async def _can_give(self, checkpoint: Checkpoint, timeline: Timeline) -> bool:
        """Give the states of a checkpoint, and return whether there is room for them and its files are good."""
        try:
            await self._give(checkpoint, timeline)
        except (UserError, OSError) as error:
            self._give_nothing()  # some of its stages
            log.warning("checkpoint_not_given reason=%s", error)
            return False
        return True

    async def _give(self, checkpoint: Checkpoint, timeline: Timeline) -> None:
        for stage in range(self._manifest.stages.count):
            state = await self._threads.run(checkpoint.load_stage, stage, abandon_on_cancel=True)
            state = replace(state, round_number=timeline.first_round, timeline=timeline)
            await self._snapshots.store_snapshot(stage, state)


@dataclass(frozen=True, slots=True)
class _Given:
    """A checkpoint that is given, by its step and round; and the first round of a run that has gone back to it."""

    optimizer_step: int
    created_at_round: int
    next_round: int


def _has_gone_on(view: SwarmView, given: _Given | None) -> bool:
    """Whether all stages have peers again; once a checkpoint is given, peers that have gone back or need not."""
    next_round = 0 if given is None else given.next_round
    return all(any(peer.round_number >= next_round for peer in view.serving(stage)) for stage in range(view.num_stages))


def _may_hold(standing: Standing | None, optimizer_step: int, created_at_round: int) -> bool:
    """Whether weights may be of the timeline that peers stand on, though these have not come to them."""
    own = Timeline(created_at_round, optimizer_step, created_at_round)
    return standing is None or is_on_timeline(own, created_at_round, standing.timeline)


def tell_changes(checkpoint: Checkpoint, manifest: RunManifest) -> None:
    """Log what the run does otherwise from now on: the user may have left something out of the command."""
    for key, was, now in changed_settings(checkpoint.manifest, manifest):
        log.warning("setting_changed setting=%s checkpoint=%s now=%s", key, was, now)
    # It depends on several settings, on training.steps among them, and each of these looks harmless.
    step = checkpoint.optimizer_step
    was, now = learning_rate(checkpoint.manifest, step), learning_rate(manifest, step)
    if was != now:
        text = "setting_changed setting=the learning rate at optimizer step %d checkpoint=%.3g now=%.3g"
        log.warning(text, step, was, now)

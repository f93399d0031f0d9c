"""Gives checkpoints to peers, as snapshots under names: where a run goes on from one, or a stage is lost.

A stage whose peers are gone begins again with a snapshot that other peers keep. If these are gone as well, as when a
provider takes all its machines back at once, the coordinator's checkpoints are what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
from pydantic import ValidationError

from coordinator.checkpoints.folder import Checkpoint, Fits, one_line
from coordinator.checkpoints.names import entries_of, load_named, names_of
from coordinator.checkpoints.resumed import find_resumed
from coordinator.checkpoints.store import CheckpointStore
from coordinator.run.context import CoordinatorContext
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.timeline import Timeline
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.statements import Snapshot
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.wire.agreement import Statements

log = logging.getLogger(__name__)

# Pause between looks at whether a stage is lost, or the run begins anew with a checkpoint.
LOOK_S = 1.0
# Between looks for a checkpoint that was not there, or could not be given.
RETRY_S = 30.0


async def _is_member(caller: str) -> bool:
    return False  # there is nothing here but snapshots, which are for everybody


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Which checkpoints a coordinator may offer.

    Attributes:
        store: where they are; None if there is none
        fits: whether a checkpoint is of the run, and not of a part that was given up
        reached: the round that the run has come to, and its optimizer step
        output: the folder of the run, where it is noted what it was resumed from
    """

    store: CheckpointStore | None
    fits: Fits
    reached: Callable[[], tuple[int, int]]
    output: Path


class CheckpointGiver:
    """Gives the states of checkpoints to any peer that asks for them by name. Belongs to the event loop's thread.

    Attributes:
        snapshots: the states that are given now
        membership: this coordinator's part in the run's epochs; None before it has one
    """

    def __init__(self, *, manifest: RunManifest, context: CoordinatorContext, statements: Statements, folder: Path):
        """Make a giver that has nothing to give.

        Args:
            statements: of this coordinator
            folder: empty, for the states that are given away
        """
        self.membership: Membership | None = None
        self._manifest = manifest
        self._threads = context.threads
        self._clock = context.clock
        self._statements = statements
        self._offered: dict[Snapshot, int] = {}  # with the round that the states begin
        self._damaged = set[tuple[int, int]]()  # optimizer steps and rounds of checkpoints that cannot be given
        self._looked_for: tuple[Restart, bool] | None = None
        self._retry_s = 0.0
        self._unlike = set[tuple[Restart, str]]()  # checkpoints whose states are not those that the run has begun with
        self.snapshots = NamedSnapshots(
            clock=context.clock,
            threads=context.threads,
            storage=FolderStorage(folder),
            is_member=_is_member,
            restart=lambda: BEGINNING if self.membership is None else self.membership.epoch.restart,
        )

    async def give(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Give the states of a checkpoint, and no others any more; returns their names by stage.

        Raises:
            UserError: there is no room for them, or a file is not as it was written
        """
        self._give_nothing()
        self._offered = {}
        return await self._give(checkpoint)

    async def _give(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        try:
            given = await self._give_stages(checkpoint)
        except UserError:  # of half of its stages nobody has any use
            self._give_nothing()
            raise
        log.info("checkpoint_given optimizer_step=%d path=%s", checkpoint.optimizer_step, checkpoint.path)
        return given

    async def _give_stages(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        entries = await self._threads.run(entries_of, checkpoint.entries, checkpoint.round_number, self._statements)
        given = list[str]()
        for stage in range(self._manifest.stages.count):
            known = entries[stage] if entries else None
            state = await self._threads.run(
                load_named, checkpoint, stage, known, self._statements, abandon_on_cancel=True
            )
            try:
                await self.snapshots.keep(state)
            except (OSError, ValidationError) as error:
                raise UserError(
                    f"the states of {checkpoint.path} do not fit into the temporary folder ({one_line(error)}): make "
                    f"room there, or name another one in TMPDIR"
                ) from error
            given.append(state.name.entry)
        return tuple(given)

    def note_saved(self, names: frozenset[Snapshot], round_number: int) -> None:
        """Offer the states of a checkpoint that was saved just now, and no older ones.

        Args:
            round_number: that begins with these states
        """
        self._offered = dict.fromkeys(names, round_number)

    async def run(self, offered: Offered) -> None:
        """Offer checkpoints where a stage is lost, and give those that the run begins anew with; until cancelled."""
        while True:
            if self.membership is not None:
                await self._look(self.membership, offered)
            await anyio.sleep(LOOK_S)

    async def _look(self, membership: Membership, offered: Offered) -> None:
        epoch, now_s = membership.epoch, self._clock.monotonic_s()
        is_lost = bool(epoch.lost)
        has_gone_on = offered.reached()[0] > epoch.restart.first_round
        self._drop_what_is_void(offered.fits)
        if has_gone_on and self._offered and not is_lost:
            self._give_nothing()  # all stages have the states that the run has begun with
        self._tell(membership, offered)
        if (epoch.restart, is_lost) != self._looked_for:
            self._looked_for, self._retry_s = (epoch.restart, is_lost), now_s
        if now_s < self._retry_s:
            return
        self._retry_s = now_s + RETRY_S
        if not has_gone_on and self._lacks(epoch.restart):
            await self._give_beginning(epoch.restart, offered)
        if is_lost and offered.store is not None:
            await self._find_newest(offered.store, offered.fits)
        self._tell(membership, offered)

    def _drop_what_is_void(self, fits: Fits) -> None:
        """Offer no checkpoint of a part that the run has given up."""
        good = {(step, number) for step, number in self._checkpoints if fits(step, number)}
        self._offered = {
            name: number for name, number in self._offered.items() if (name.optimizer_step, number) in good
        }

    @property
    def _checkpoints(self) -> set[tuple[int, int]]:
        return {(name.optimizer_step, number) for name, number in self._offered.items()}

    def _give_nothing(self) -> None:
        for name in self.snapshots.names:
            self.snapshots.forget(name)

    def _tell(self, membership: Membership, offered: Offered) -> None:
        """Say what this coordinator offers, should a stage be lost, and how far the run has come."""
        restart = membership.epoch.restart
        reached = max(offered.reached(), (restart.first_round, restart.optimizer_step))
        membership.holds = (*reached, self.snapshots.names | frozenset(self._offered))

    def _lacks(self, restart: Restart) -> bool:
        """Whether the run has begun with states that are not given here."""
        return any(self.snapshots.find(stage, entry) is None for stage, entry in enumerate(restart.entries))

    async def _give_beginning(self, restart: Restart, offered: Offered) -> None:
        """Give the states that the run has begun with, if a checkpoint here has them: other peers may not."""

        def find() -> Checkpoint | None:
            timeline = Timeline(restart.first_round, restart.optimizer_step, restart.first_round)
            resumed = find_resumed(offered.output, timeline)
            if resumed is not None or offered.store is None:
                return resumed
            return offered.store.newest_that(lambda step, _: step == restart.optimizer_step, self._manifest)

        try:
            checkpoint = await self._threads.run(find, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoints_not_seen reason=%s", error)
            return
        if checkpoint is None:
            self._offer_no_more(restart)
        elif (restart, checkpoint.address) not in self._unlike:
            try:
                if await self._give(checkpoint) != restart.entries:
                    self._give_nothing()
                    self._unlike.add((restart, checkpoint.address))
            except UserError as error:
                log.warning("checkpoint_not_given reason=%s", error)
                self._offer_no_more(restart)

    def _offer_no_more(self, restart: Restart) -> None:
        """Offer none of the states that the run has begun with: this coordinator has had them, and cannot give them.

        The run would begin with them again and again. Of the checkpoints that are left, the newest is offered.
        """
        lacking = {name for name in self._offered if name.entry in restart.entries}
        self._damaged |= {(name.optimizer_step, self._offered[name]) for name in lacking}
        self._offered = {name: number for name, number in self._offered.items() if name not in lacking}

    async def _find_newest(self, store: CheckpointStore, fits: Fits) -> None:
        """Offer the newest checkpoint that peers know by the names of its states."""
        newest = max(self._offered.values(), default=-1)

        def is_better(optimizer_step: int, round_number: int) -> bool:
            is_sound = (optimizer_step, round_number) not in self._damaged
            return is_sound and round_number > newest and fits(optimizer_step, round_number)

        def find() -> tuple[frozenset[Snapshot], int] | None:
            checkpoint = store.newest_that(is_better, self._manifest)
            if checkpoint is None:
                return None
            entries = entries_of(checkpoint.entries, checkpoint.round_number, self._statements)
            return names_of(checkpoint.optimizer_step, entries), checkpoint.round_number

        try:
            found = await self._threads.run(find, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoints_not_seen reason=%s", error)
            return
        if found is not None:
            self.note_saved(*found)

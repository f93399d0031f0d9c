"""Checkpoints of a live run: fetched from its peers every so many steps, and given to them when a run goes on from one.

A checkpoint is made of the snapshots that peers keep anyway (runtime/recovery.py), all of the same number of updates:
no peer waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from coordinator.checkpoint_folder import Checkpoint
from coordinator.checkpoints import CheckpointStore, find_checkpoint
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.recovery import Origin
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.handlers import CallDispatcher
from swarm_peer.runtime.snapshots import SnapshotKeeper
from swarm_peer.runtime.state_index import StageState
from swarm_peer.runtime.state_transfer import fetch_state
from swarm_peer.runtime.transport import Transport
from swarm_peer.wire.messages import StateIndexCall

log = logging.getLogger(__name__)

# Between tries to get a snapshot that its peers are still writing.
RETRY_S = 1.0
# No stage of a run has more.
ANY_STAGE = -1


@dataclass(frozen=True)
class CheckpointPlan:
    """Which checkpoints a run gets, and which it goes on from.

    Attributes:
        store: where they are written; None for nowhere
        every: global steps between them
    """

    store: CheckpointStore | None
    every: int = 0
    resume: Checkpoint | None = None


NO_CHECKPOINTS = CheckpointPlan(None)


def plan_checkpoints(
    manifest: RunManifest, url: str, every: int | None, keep: int, resume: str | None
) -> CheckpointPlan:
    """Check what the user asked for.

    Args:
        every: global steps between checkpoints; every snapshot if None; 0 for no checkpoints

    Raises:
        UserError: peers keep no snapshots at these steps, or there is nothing to resume from
    """
    checkpoint = find_checkpoint(resume) if resume is not None else None
    if checkpoint is not None:
        _check_fits(checkpoint, manifest)
    every = manifest.recovery.snapshot_every if every is None else every
    if not every:
        return CheckpointPlan(None, resume=checkpoint)
    _check_schedule(manifest, every)
    return CheckpointPlan(CheckpointStore(url, keep), every, checkpoint)


def _check_schedule(manifest: RunManifest, every: int) -> None:
    snapshot_every = manifest.recovery.snapshot_every
    if not snapshot_every or every % snapshot_every:
        raise UserError(
            f"--checkpoint-every {every}: checkpoints are made of the snapshots that peers keep every "
            f"recovery.snapshot_every={snapshot_every} global steps; name a multiple of it, or change it"
        )


def _check_fits(checkpoint: Checkpoint, manifest: RunManifest) -> None:
    for section in ("model", "stages"):
        mine, its = getattr(manifest, section), getattr(checkpoint.manifest, section)
        if section == "stages":
            mine, its = (part.model_copy(update={"peers_to_start": 1}) for part in (mine, its))
        if mine != its:
            raise UserError(
                f"--resume {checkpoint.path}: its run has another {section} section than this configuration; resume "
                f"with the configuration that it was made with"
            )
    if checkpoint.updates >= manifest.training.steps:
        raise UserError(
            f"--resume {checkpoint.path}: it has {checkpoint.updates} global steps already, and training.steps is "
            f"{manifest.training.steps}: raise it with --set training.steps=N"
        )


class CheckpointWriter:
    """Writes a checkpoint whenever the run has made so many steps."""

    def __init__(
        self,
        manifest: RunManifest,
        plan: CheckpointPlan,
        finished: Callable[[], int],
        born: Callable[[int], int | None],
        view: Callable[[], SwarmView],
        acts: Callable[[], bool] = lambda: True,
    ):
        """Args:
        finished: how many global steps the run has finished
        born: the global step that the weights of so many updates were first there for; None if that is not known
        acts: whether this coordinator is the one that acts
        """
        assert plan.store is not None
        self._manifest = manifest
        self._store = plan.store
        self._every = plan.every
        self._finished = finished
        self._born = born
        self._view = view
        self._acts = acts
        self._saved = max(finished(), plan.resume.updates if plan.resume else 0) // plan.every * plan.every

    async def run(self, transport: Transport) -> None:
        """For ever."""
        while True:
            due = self._finished() // self._every * self._every
            if due > 0 and due != self._saved and self._acts():
                self._saved = due
                await self._save(transport, due)
            await anyio.sleep(RETRY_S)

    async def _save(self, transport: Transport, updates: int) -> None:
        # Peers keep the last two snapshots, so later than this there is nothing to wait for.
        while self._finished() < updates + 2 * self._manifest.recovery.snapshot_every:
            try:
                born = self._born(updates)  # another one after the run has gone back and come here again
                if born is None and self._finished() >= updates:
                    log.info("checkpoint_left_out updates=%d reason=this coordinator was not there then", updates)
                    return
                if born is None:
                    raise CallError("the run has gone back to before it")
                weights = Origin(born, updates, born)
                states = [await self._fetch(transport, stage, weights) for stage in range(self._manifest.stages.count)]
                await anyio.to_thread.run_sync(self._store.save, updates, self._manifest, states)
                return
            except CallError as error:
                log.info("checkpoint_waits updates=%d reason=%s", updates, error)
            except UserError as error:
                log.error("checkpoint_failed updates=%d reason=%s", updates, error)
                return
            if self._finished() >= self._manifest.training.steps:
                break
            await anyio.sleep(RETRY_S)
        log.error("checkpoint_missed updates=%d reason=the run went on before all stages gave theirs", updates)

    async def _fetch(self, transport: Transport, stage: int, weights: Origin) -> StageState:
        view = self._view()
        # Its own peers first; those of other stages may keep it, too.
        peers = [*view.serving(stage), *(peer for peer in view.peers if peer.stage != stage)]
        call = StateIndexCall(manifest=self._manifest.hash, of_stage=stage, born=weights.born)
        state = await fetch_state(
            transport,
            [peer.peer_id for peer in peers],
            call,
            max_bytes=max_state_bytes(self._manifest, stage),
            updates=weights.updates,
        )
        # Who took it after the run had gone back to these weights has it under a later step and origin than others.
        return replace(state, step=weights.step, origin=weights)


class Resumption:
    """Lets a run go on from a checkpoint, at `origin`: gives the states away.

    Args:
        step: global step to begin with, beyond all that the run has seen
        folder: for the states while they are given away
    """

    def __init__(self, manifest: RunManifest, checkpoint: Checkpoint, step: int, folder: Path):
        self._manifest = manifest
        self._checkpoint = checkpoint
        self.origin = Origin(step, checkpoint.updates, born=step)
        self._keeper = SnapshotKeeper(folder)

    async def prepare(self, transport: Transport) -> None:
        """Answer peers that ask for states from now on."""
        for stage in range(self._manifest.stages.count):
            state = await anyio.to_thread.run_sync(self._checkpoint.load_stage, stage)
            await self._keeper.keep(stage, replace(state, step=self.origin.step, origin=self.origin))
        self._keeper.current = StageState(self.origin.step, "", {}, self.origin)
        await transport.serve(CallDispatcher(self._manifest.hash, ANY_STAGE, self._keeper.calls))
        log.info("resuming updates=%d step=%d path=%s", self.origin.updates, self.origin.step, self._checkpoint.path)

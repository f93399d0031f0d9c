"""Keeps snapshots at regular intervals of updates: of this peer's stage, and copies of the next stage's.

A stage that loses all its peers goes on from the copies that the stage before keeps. Owns when snapshots are taken.
Must not know how they are stored (snapshot_store.py), or how a run goes back to them (recovery.py).
"""

from __future__ import annotations

import itertools
import logging
from functools import partial

import anyio
from pydantic import ValidationError

from swarm_peer.config_errors import describe
from swarm_peer.errors import CallError
from swarm_peer.policy.recovery import SnapshotRef
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.joining import take_snapshot
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.state.state_server import StateServer

log = logging.getLogger(__name__)

# Pause after the first try to copy a snapshot of the next stage, whose peers take it at the same time as this peer
# takes its own. It is doubled after each of the next ones: to write a snapshot takes them some seconds per gigabyte.
GUARD_PAUSE_S = 0.2
# After so many tries in vain the log says so. They go on until the next snapshot is due.
GUARD_TRIES = 7


class SnapshotKeeper:
    """Takes and copies snapshots for as long as it runs. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        swarm: SwarmAccess,
        state_server: StateServer,
        snapshots: SnapshotStore,
    ):
        self._stage = stage
        self._context = context
        self._swarm = swarm
        self._manifest = context.resolved.manifest
        self._next_stage = (stage + 1) % context.resolved.num_stages
        self._state_server = state_server
        self._snapshots = snapshots
        self._take = partial(
            take_snapshot,
            context=context,
            transport=swarm.transport,
            snapshots=snapshots,
            rng=context.random.stream("snapshots"),
        )
        self._last_due: StepState | None = None
        self._failing: Complaint | None = None

    async def run(self) -> None:
        """Keep a snapshot of this stage, and one of the next, every `recovery.snapshot_every` updates."""
        if not self._manifest.recovery.snapshot_every:
            return
        async with anyio.create_task_group() as tasks:
            if self._context.resolved.num_stages > 1:
                tasks.start_soon(self._run_guarding)
            while True:
                await self._context.changed.wait_for(self._snapshot_is_due)
                complete = self._state_server.take_complete()
                self._last_due = self._state_server.step if complete is None else complete[0]
                if complete is not None:
                    await self._store(self._stage, complete[1])
                elif not await self.take_snapshot(self._last_due.round_number):
                    text = "snapshot_missed optimizer_step=%d reason=the round was over already"
                    log.warning(text, self._last_due.optimizer_step)
                    self._complain(f"its snapshot of optimizer step {self._last_due.optimizer_step} came too late")
                self._context.changed.notify()

    def complaint(self) -> Complaint | None:
        """That this peer keeps no snapshots, if the last one has failed."""
        return self._failing

    def _complain(self, words: str) -> None:
        since_s = self._context.clock.monotonic_s() if self._failing is None else self._failing.since_s
        self._failing = Complaint(Trouble.NO_SNAPSHOTS, since_s, words)

    async def take_snapshot(self, round_number: int) -> bool:
        """Keep a snapshot of this peer's own state. Returns False if the round is over already."""
        state = await self._state_server.copy_state()
        if state is None or state.round_number != round_number:
            return False
        await self._store(self._stage, state)
        return True

    async def _store(self, stage: int, state: StageState) -> None:
        """Store a snapshot. One that cannot be stored is left out: the peer trains all the same."""
        try:
            await self._snapshots.store_snapshot(stage, state)
        except OSError as error:
            reason = f"{error}: make room in the temporary folder, or name another one in TMPDIR"
        except ValidationError as error:  # a member may count so that the ledger becomes too long for an index
            reason = describe(error)
        else:
            self._failing = None
            return
        log.error("snapshot_not_stored stage=%d optimizer_step=%d reason=%s", stage, state.optimizer_step, reason)
        self._complain(f"its snapshot of optimizer step {state.optimizer_step} is not stored: {reason}")

    def _snapshot_is_due(self) -> bool:
        step = self._state_server.step
        # Where updates are delayed, the average that ends the round belongs to the state. No round begins with the last
        # weights.
        waits = self._manifest.averaging.mode == "delayed" and step.optimizer_step < self._manifest.training.steps
        if self._state_server.has_complete:
            return True
        if waits or not self._manifest.recovery.snapshots_at(step.optimizer_step):
            return False
        return self._last_due is None or self._last_due.round_number != step.round_number

    def _has_other_snapshot(self, than: StepState | None) -> bool:
        return self._last_due is not than

    async def _run_guarding(self) -> None:
        """After each snapshot of this stage, copy the next stage's snapshot of the same optimizer step."""
        guarded: StepState | None = None
        while True:
            await self._context.changed.wait_for(partial(self._has_other_snapshot, guarded))
            assert self._last_due is not None
            guarded = self._last_due
            wanted = SnapshotRef(self._next_stage, guarded.created_at_round, guarded.optimizer_step)
            for attempt in itertools.count(1):
                if await self._copy(wanted, level=logging.WARNING if attempt == GUARD_TRIES else logging.DEBUG):
                    break
                with anyio.move_on_after(GUARD_PAUSE_S * 2 ** min(attempt - 1, GUARD_TRIES)):
                    await self._context.changed.wait_for(partial(self._has_other_snapshot, guarded))
                    break

    async def _copy(self, wanted: SnapshotRef, *, level: int) -> bool:
        """Copy a snapshot of the next stage. Returns False, and logs it, if no peer gives it."""
        peers = [peer.peer_id for peer in self._swarm.view().serving(wanted.stage)]
        try:
            await self._take(wanted, peers, partial(self._store, wanted.stage))
        except CallError as error:
            text = "snapshot_not_there stage=%d optimizer_step=%d reason=%s"
            log.log(level, text, wanted.stage, wanted.optimizer_step, error)
            return False
        return True

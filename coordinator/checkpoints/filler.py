"""Fills the draft of a checkpoint with states that peers give: what has come stays while the rest is waited for.

Owns how many states are in memory at a time, and what is fetched anew. Must not know when a checkpoint is due:
writer.py does.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from coordinator.checkpoints.draft import CheckpointDraft
from coordinator.checkpoints.state_check import StateCheck
from swarm_peer.errors import CallError, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.recovery import Timeline
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.transfer import fetch_state, is_replaced
from swarm_peer.wire.messages import StateIndexCall

log = logging.getLogger(__name__)

# Pauses between tries to write a file: a network disk may fail for a moment.
SAVE_PAUSES_S = (1.0, 4.0, 10.0)
# States that are downloaded at the same time have so many bytes together, unless one alone has more.
AT_ONCE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Target:
    """The weights that a checkpoint is to have.

    Attributes:
        weights: as the beginning of a timeline
        is_wanted: tells whether this coordinator is still to write it
        is_kept: tells whether peers still keep snapshots of these weights
    """

    weights: Timeline
    is_wanted: Callable[[], bool]
    is_kept: Callable[[], bool]


class DraftFiller:
    """Fills drafts. Belongs to the event loop's thread.

    Args:
        directory: knows the run's peers
        threads: write the files
        rng: chooses among the peers of a stage
    """

    def __init__(self, resolved: ResolvedManifest, *, directory: Directory, threads: Threads, rng: random.Random):
        self._resolved = resolved
        self._directory = directory
        self._threads = threads
        self._rng = rng
        self._check = StateCheck(resolved, threads).check

    async def fill(self, transport: Transport, draft: CheckpointDraft, target: Target) -> None:
        """Bring the states that the draft lacks.

        A stage may be cut in two, and the run go on with the part that the draft's state is not of. So as long as peers
        keep snapshots of these weights, it is asked again in the end whether each state is still one that they give.

        Raises:
            CallError: some states are not there, or not there yet; or the checkpoint is not wanted any more
            UserError: a file could not be written, time and again
        """
        while lacking := draft.lacking():
            failures: dict[int, CallError] = {}
            for stages in self._batches(lacking):
                async with anyio.create_task_group() as tasks:
                    for stage in stages:
                        tasks.start_soon(self._bring, transport, stage, draft, target, failures)
                if not target.is_wanted():
                    raise CallError("the run has gone back, or another coordinator may act")
            if failures:
                raise failures[min(failures)]
            for stage in range(self._resolved.num_stages):
                if target.is_kept() and await self._is_replaced(transport, stage, draft, target.weights):
                    log.info("checkpoint_state_replaced stage=%d round=%d", stage, target.weights.first_round)
                    draft.drop(stage)

    async def patiently(self, target: Target, write: Callable[..., Any], *args: Any) -> Any:
        """Write in a worker thread, and again if it fails for a moment.

        Raises:
            UserError: it fails time and again
            CallError: the checkpoint is not wanted any more
        """
        # A file that is cut off makes no checkpoint, and must not hold up the run's end.
        run = partial(self._threads.run, write, *args, abandon_on_cancel=True)
        for pause_s in SAVE_PAUSES_S:
            try:
                return await run()
            except UserError as error:
                step = target.weights.first_optimizer_step
                text = "checkpoint_not_written optimizer_step=%d tries_again_in_s=%.0f reason=%s"
                log.warning(text, step, pause_s, error)
                await anyio.sleep(pause_s)
                if not target.is_wanted():
                    raise CallError("the run has gone back, or another coordinator may act") from error
        return await run()

    def _batches(self, stages: Sequence[int]) -> Iterator[list[int]]:
        """Stages whose states are in memory at the same time."""
        batch: list[int] = []
        for stage in stages:
            if batch and sum(map(self._max_bytes, [*batch, stage])) > AT_ONCE_BYTES:
                yield batch
                batch = []
            batch.append(stage)
        yield batch

    def _max_bytes(self, stage: int) -> int:
        return max_state_bytes(self._resolved, stage)

    async def _bring(
        self, transport: Transport, stage: int, draft: CheckpointDraft, target: Target, failures: dict[int, CallError]
    ) -> None:
        try:
            state = await self._fetch(transport, stage, target.weights)
            await self.patiently(target, draft.put, stage, state)
        except CallError as error:
            failures[stage] = error

    async def _fetch(self, transport: Transport, stage: int, weights: Timeline) -> StageState:
        state = await fetch_state(
            transport,
            self._donors(stage),
            self._call(stage, weights),
            max_bytes=self._max_bytes(stage),
            optimizer_step=weights.first_optimizer_step,
            rng=self._rng,
            take=partial(self._check, stage),
        )
        return state.at_beginning_of(weights)

    async def _is_replaced(self, transport: Transport, stage: int, draft: CheckpointDraft, weights: Timeline) -> bool:
        return await is_replaced(
            transport,
            self._donors(stage),
            self._call(stage, weights),
            draft.history_hash(stage),
            max_bytes=self._max_bytes(stage),
            optimizer_step=weights.first_optimizer_step,
        )

    def _donors(self, stage: int) -> list[str]:
        """The peers of the stage, and then those of others, which may keep its state, too."""
        view = self._directory.view
        peers = [*view.serving(stage), *(peer for peer in view.peers if peer.stage != stage)]
        return [peer.peer_id for peer in peers]

    def _call(self, stage: int, weights: Timeline) -> StateIndexCall:
        created_at_round = weights.created_at_round
        return StateIndexCall(manifest=self._resolved.hash, of_stage=stage, created_at_round=created_at_round)

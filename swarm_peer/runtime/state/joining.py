"""Downloads the states and updates that this peer takes over: when it joins, falls behind, or goes back.

Owns which peers to ask, and which answers to accept. Must not change anything in this peer: step/step_loop.py loads
what was downloaded. The peers that are asked answer with state_server.py; transfer.py moves the bytes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import anyio
import torch

from swarm_peer.errors import CallError, InvalidMessage
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.recovery import SnapshotRef, Timeline, last_credible_round
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import StageState, extend_history
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.messages import StateIndexCall

log = logging.getLogger(__name__)

# Pause before the next try when no stage-mate gave its state.
RETRY_PAUSE_S = 1.0
DOWNLOAD_TRIES = 30
# Lifetimes of an announcement until a peer that is further is sure to have announced it.
FURTHER_PATIENCE = 2
# Takes a state over; raises InvalidMessage if it cannot.
Take = Callable[[StageState], Awaitable[None]]
# Gets states of one kind until one of them can be taken over. Raises CallError if there is none.
Fetch = Callable[[Take], Awaitable[None]]


class StateDownloads:
    """Downloads states and updates of this peer's stage from other peers. Belongs to the event loop's thread.

    Attributes:
        bytes_per_s: speed of the last download of a state; 0 before the first
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        shapes: Sequence[torch.Size],
        swarm: SwarmAccess,
        snapshots: SnapshotStore,
    ):
        """Make downloads for one stage.

        Args:
            shapes: of the stage's gradients, in the order of its parameters
            snapshots: the snapshots that this peer keeps itself
        """
        self._context = context
        self._hash = context.resolved.hash
        self._rng = context.random.stream("downloads")
        self._max_state_bytes = max_state_bytes(context.resolved, stage)
        self._stage = stage
        self._shapes = list(shapes)
        self._swarm = swarm
        self._snapshots = snapshots
        self._patience_s = FURTHER_PATIENCE * context.resolved.manifest.limits.announcement_s
        self.bytes_per_s = 0.0

    async def take_newest(
        self,
        donors: Sequence[str],
        min_round: int,
        take: Take,
        tries: int = DOWNLOAD_TRIES,
        timeline: Timeline | None = None,
    ) -> None:
        """Download the newest state that a stage-mate gives, and take it over.

        Args:
            donors: peers to ask first; later tries ask the peers that serve the stage by then
            min_round: the earliest round whose state is of use
            take: loads the state; if it raises InvalidMessage, another donor's is downloaded
            timeline: take no state of another one, if given

        Raises:
            CallError: no peer gave such a state, or those that were further have gone
        """

        async def take_timed(state: StageState) -> None:
            seconds = max(self._context.clock.monotonic_s() - tried_s, 1e-9)
            await take(state)
            self.bytes_per_s = sum(tensor.nbytes for tensor in state.tensors.values()) / seconds

        call = StateIndexCall(manifest=self._hash, of_stage=self._stage, min_round=min_round)
        view, donors, first_tried_s = self._swarm.view(), list(donors), self._context.clock.monotonic_s()
        for attempt in range(1, tries + 1):
            tried_s = self._context.clock.monotonic_s()
            try:
                await fetch_state(
                    self._swarm.transport,
                    donors,
                    call,
                    max_bytes=self._max_state_bytes,
                    max_round=_last_credible_round(view.peers),
                    timeline=timeline,
                    rng=self._rng,
                    take=take_timed,
                )
            except CallError as error:
                if attempt == tries:
                    raise
                log.warning("state_not_found stage=%d round=%d reason=%s", self._stage, min_round, error)
                await anyio.sleep(RETRY_PAUSE_S)
                view = await self._swarm.look(range(self._context.resolved.num_stages))
                donors = self._swarm.stage_mates(self._stage) or donors
                # Stage-mates that wait for the same state would be asked in vain, as long as they are here.
                further = any(peer.round_number >= min_round for peer in view.serving(self._stage))
                if not further and self._context.clock.monotonic_s() >= first_tried_s + self._patience_s:
                    raise
            else:
                return

    async def update_after(self, donors: Sequence[str], step: StepState) -> StageState:
        """Download the update that ended a round at the stage-mates: the averages, or nothing where there were none.

        Args:
            step: where this peer stands, at the beginning of that round

        Raises:
            CallError: no peer has the update, it does not continue this peer's history, or the run cannot have come so
                far: one donor alone could go on for ever
        """
        # Its own round says nothing: it comes from donors.
        others = [peer for peer in self._swarm.view().peers if peer.peer_id != self._swarm.transport.peer_id]
        if step.round_number >= _last_credible_round(others):
            raise InvalidMessage(f"the run cannot have come beyond round {step.round_number}")
        call = StateIndexCall(manifest=self._hash, of_stage=self._stage, kind="update", min_round=step.round_number)
        max_bytes = 4 * sum(shape.numel() for shape in self._shapes)
        update = await fetch_state(self._swarm.transport, donors, call, max_bytes=max_bytes, rng=self._rng)
        gradients = list(update.tensors.values())
        # The history hash covers bytes and not types: read as another type, the same bytes are other gradients.
        is_fp32 = all(gradient.dtype == torch.float32 for gradient in gradients)
        # Where updates are delayed, also the first round of a timeline has tensors, though nobody averages in it.
        averages = self._context.resolved.manifest.averaging.averages_at(step.optimizer_step)
        fits = is_fp32 and [gradient.shape for gradient in gradients] == (self._shapes if averages else [])
        if not fits or update.timeline != step.timeline:
            raise InvalidMessage("an update that does not fit this stage")
        # The next barrier compares history hashes and nothing else, so this one must be that of these gradients.
        if await self._context.threads.run(extend_history, step.history_hash, gradients) != update.history_hash:
            raise InvalidMessage("an update that does not belong to its history hash")
        return update

    async def take_snapshot_of(self, timeline: Timeline, take: Take, *, is_further: bool = False) -> None:
        """Take over the snapshot that a timeline begins with: this peer's own, or else one that another peer keeps.

        Args:
            is_further: whether the run goes forward there, to a coordinator's checkpoint

        Raises:
            CallError: no peer gave one that could be taken over
        """
        # With the optimizer step: after the run was cut in two, its parts go through rounds of the same numbers.
        wanted = SnapshotRef(self._stage, timeline.created_at_round, timeline.first_optimizer_step)
        if await take_own_snapshot(wanted, self._snapshots, take):
            return
        take_from = partial(
            take_snapshot,
            wanted,
            take=take,
            context=self._context,
            transport=self._swarm.transport,
            snapshots=self._snapshots,
            rng=self._rng,
        )
        coordinators = await self._swarm.coordinators()
        if is_further:  # no peer should have it, and one that says so may lie
            try:
                await take_from(coordinators)
            except CallError as error:
                log.warning("checkpoint_not_taken optimizer_step=%d reason=%s", wanted.optimizer_step, error)
            else:
                return
        # This peer joined after the snapshot was taken. Peers of this stage and of the one before have it, or peers
        # that have moved elsewhere since, or coordinators in checkpoints: so ask all.
        view = await self._swarm.look(range(self._context.resolved.num_stages))
        others = {*(peer.peer_id for peer in view.peers), *coordinators}
        await take_from(sorted(others - {self._swarm.transport.peer_id}))


def _last_credible_round(peers: Iterable[PeerView]) -> int:
    return last_credible_round(peer.round_number for peer in peers if peer.state is PeerState.SERVING)


async def take_own_snapshot(wanted: SnapshotRef, snapshots: SnapshotStore, take: Take) -> bool:
    """Take over a snapshot that this peer keeps. Returns False if it keeps none that can be taken over."""
    own = await snapshots.load_snapshot(wanted)
    if own is None:
        return False
    try:
        await take(own)
    except InvalidMessage as error:  # this peer copied it while it served another stage, and the giver had lied
        text = "snapshot_refused stage=%d optimizer_step=%d reason=%s"
        log.warning(text, wanted.stage, wanted.optimizer_step, error)
        snapshots.forget(wanted)
        return False
    return True


async def take_snapshot(
    wanted: SnapshotRef,
    holders: Sequence[str],
    take: Take,
    *,
    context: PeerContext,
    transport: Transport,
    snapshots: SnapshotStore,
    rng: random.Random,
) -> None:
    """Take over a snapshot of any stage: this peer's own, or else one that a holder gives away.

    Args:
        holders: other peers that may have it
        take: takes it over; if it raises InvalidMessage, another holder's is downloaded
        snapshots: the snapshots that this peer keeps itself

    Raises:
        CallError: no peer gave one that could be taken over
    """
    if await take_own_snapshot(wanted, snapshots, take):
        return
    call = StateIndexCall(
        manifest=context.resolved.hash, of_stage=wanted.stage, created_at_round=wanted.created_at_round
    )
    await fetch_state(
        transport,
        holders,
        call,
        max_bytes=max_state_bytes(context.resolved, wanted.stage),
        optimizer_step=wanted.optimizer_step,
        rng=rng,
        take=take,
    )

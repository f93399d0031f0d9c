"""The whole model of a live run: the states of all stages at one global step, from the peers that serve them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from statistics import median_low

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, SwarmError
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.position import MAX_STEP, MAX_STEPS_AHEAD, Position, position_of
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.p2p_transport import P2PTransport
from swarm_peer.runtime.state_index import StageState
from swarm_peer.runtime.state_transfer import fetch_state
from swarm_peer.runtime.transport import Transport
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateIndexCall

log = logging.getLogger(__name__)

# Tries to download one stage's state, a second apart; each waits up to 10 s for a step that has not come yet.
STAGE_TRIES = 30
# Rounds of downloading all stages until they are of one step. Later rounds aim at steps further ahead.
ROUNDS = 8


async def fetch_model(
    dht: SwarmDHT, directory: Directory, manifest: RunManifest, metrics: PeerMetrics, min_step: int = 0
) -> list[StageState]:
    """Download the state of each stage, all at the beginning of one global step, which is `min_step` or later.

    Raises:
        SwarmError: a stage's peers did not give theirs, or the run is too fast for it
    """
    async with open_transport(dht, metrics) as transport:
        return await fetch_states(transport, directory, manifest, min_step)


@asynccontextmanager
async def open_transport(dht: SwarmDHT, metrics: PeerMetrics) -> AsyncIterator[P2PTransport]:
    """A transport for downloading states."""
    async with P2PTransport.open(await dht.p2p(), 4 * STATE_CHUNK_BYTES, metrics) as transport:
        yield transport


async def fetch_states(
    transport: Transport, directory: Directory, manifest: RunManifest, min_step: int = 0
) -> list[StageState]:
    """As fetch_model, over an open transport.

    Peers give their newest state, and take it when they are asked. So all stages are asked at once, and those that gave
    an older one than others again. In a run that is faster than this, peers are asked for a step that has not begun:
    they all wait for it, and take it as it begins.
    """
    states: dict[int, StageState] = {}
    for number in range(ROUNDS):
        view = await directory.refresh(range(manifest.stages.count))
        margin = 2 ** max(number - 1, 0) - 1
        target = max(min_step, aim(view, states.values(), manifest.training.steps, margin))
        missing = [stage for stage in range(manifest.stages.count) if _step_of(states.get(stage)) != target]
        states |= await _fetch_all(transport, directory, manifest, missing, target)
        if len({(state.step, state.updates) for state in states.values()}) == 1:
            return [states[stage] for stage in range(manifest.stages.count)]
        log.info("states_differ steps=%s", ",".join(str(states[stage].step) for stage in sorted(states)))
    raise SwarmError(f"the run's stages gave no states of one global step in {ROUNDS} rounds: try again")


def aim(view: SwarmView, states: Iterable[StageState], num_updates: int, margin: int) -> int:
    """The newest global step that is known of, and `margin` more, as far as the run's `num_updates` go.

    Peers wait for the step that they are asked for, so one that lies about its own must not set it: what counts is what
    the middle one of each stage announces, or the lower of two. Who is alone in its stage is believed.

    Args:
        states: that peers have given so far
    """
    stages = [view.serving(stage) for stage in range(view.num_stages)]
    announced = [median_low(map(position_of, peers)) for peers in stages if peers]
    newest = max(announced, default=Position(0, 0))
    given = [Position(state.step, state.updates) for state in states if state.step <= newest.step + MAX_STEPS_AHEAD]
    step, updates = max([newest, *given])
    return min(step + max(min(margin, num_updates - updates), 0), MAX_STEP)


def _step_of(state: StageState | None) -> int:
    return -1 if state is None else state.step


async def _fetch_all(
    transport: Transport, directory: Directory, manifest: RunManifest, stages: list[int], min_step: int
) -> dict[int, StageState]:
    states: dict[int, StageState] = {}
    failures: list[SwarmError] = []

    async def fetch(stage: int) -> None:
        try:
            states[stage] = await _fetch_stage(transport, directory, manifest, stage, min_step)
        except SwarmError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for stage in stages:
            tasks.start_soon(fetch, stage)
    if failures:
        raise failures[0]
    return states


async def _fetch_stage(
    transport: Transport, directory: Directory, manifest: RunManifest, stage: int, min_step: int
) -> StageState:
    call = StateIndexCall(manifest=manifest.hash, of_stage=stage, min_step=min_step)
    for _ in range(STAGE_TRIES):
        try:
            view = await directory.refresh([stage])
            donors = [peer.peer_id for peer in view.serving(stage)]
            return await fetch_state(transport, donors, call, max_bytes=max_state_bytes(manifest, stage))
        except CallError as error:
            log.warning("stage_not_fetched stage=%d step=%d reason=%s", stage, min_step, error)
            await anyio.sleep(1.0)
    raise SwarmError(f"no peer of stage {stage} gave its state of global step {min_step}: see the log for each try")

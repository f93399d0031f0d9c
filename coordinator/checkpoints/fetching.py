"""The whole model of a live run: all stages' states at the beginning of one round, from peers that serve them.

Peers give their newest states to members of the run alone, coordinators among them, and snapshots to everybody.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from statistics import median_low

import anyio

from coordinator.checkpoints.state_receiver import StateReceiver
from swarm_peer.errors import CallError, NoRoom, SwarmError, forget_frames
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.run_progress import MAX_ROUND, MAX_ROUNDS_AHEAD, Position, position_of
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateIndexCall

log = logging.getLogger(__name__)

# Tries to download one stage's state, a second apart; each waits up to 10 s for a round that has not begun yet.
STAGE_TRIES = 30
# Times that stages are downloaded until all states are of one round. Later tries aim at rounds further ahead.
MODEL_TRIES = 8


def open_transport(dht: SwarmDHT, metrics: PeerMetrics) -> AbstractAsyncContextManager[P2PTransport]:
    """A transport for downloading states."""
    return P2PTransport.open(dht.p2p, passes=dht.passes, max_payload_bytes=4 * STATE_CHUNK_BYTES, metrics=metrics)


async def fetch_states(
    transport: Transport,
    directory: Directory,
    resolved: ResolvedManifest,
    receiver: StateReceiver,
    min_round: int = 0,
    rng: random.Random | None = None,
) -> list[StageState]:
    """Download the state of each stage, all at the beginning of one round, which is `min_round` or later.

    Peers copy their newest state when they are asked. So all stages are asked at once, and those whose state is older
    than the others' once more. In a run that is faster than this, peers are asked for a round that has not begun: all
    of them wait for it, and copy their state as it begins.

    Args:
        receiver: gives room for the states, and refuses those that do not fit their stage
        rng: chooses among the peers of a stage

    Raises:
        NoRoom: there is no room for all states
        SwarmError: a stage's peers did not give their state, or the run is too fast
    """
    states: dict[int, StageState] = {}
    rng = rng or random.Random()

    async def fetch(stage: int, target: int) -> None:
        states[stage] = await _fetch_stage(transport, directory, resolved, stage, target, rng, receiver)

    for number in range(MODEL_TRIES):
        view = await directory.refresh(range(resolved.num_stages))
        margin = 2 ** max(number - 1, 0) - 1
        target = max(min_round, aim(view, states.values(), resolved.manifest.training.steps, margin))
        # Those of other rounds go at once: the ones that take their place may need their room.
        states = {stage: state for stage, state in states.items() if state.round_number == target}
        with first_error():
            async with anyio.create_task_group() as tasks:
                for stage in range(resolved.num_stages):
                    if stage not in states:
                        tasks.start_soon(fetch, stage, target)
        if len({(state.round_number, state.optimizer_step) for state in states.values()}) == 1:
            return [states[stage] for stage in range(resolved.num_stages)]
        log.info("states_differ rounds=%s", ",".join(str(states[stage].round_number) for stage in sorted(states)))
    raise SwarmError(f"the run's stages gave no states of one round in {MODEL_TRIES} tries: try again")


def aim(view: SwarmView, states: Iterable[StageState], num_steps: int, margin: int) -> int:
    """The newest round that is known of, and `margin` more, as far as the run's `num_steps` optimizer steps go.

    Peers wait for the round that they are asked for, so one that lies about its own must not set it: the median peer of
    each stage counts, or the lower of two. A peer that is alone in its stage is believed.

    Args:
        states: that peers have given so far
    """
    newest = newest_position(view)
    given = [
        Position(state.round_number, state.optimizer_step)
        for state in states
        if state.round_number <= newest.round_number + MAX_ROUNDS_AHEAD
    ]
    round_number, optimizer_step = max([newest, *given])
    return min(round_number + max(min(margin, num_steps - optimizer_step), 0), MAX_ROUND)


def newest_position(view: SwarmView) -> Position:
    """How far the run has come, by the median peer of each stage."""
    stages = [view.serving(stage) for stage in range(view.num_stages)]
    announced = [median_low(map(position_of, peers)) for peers in stages if peers]
    return max(announced, default=Position(0, 0))


async def fetch_snapshots(
    transport: Transport,
    directory: Directory,
    resolved: ResolvedManifest,
    receiver: StateReceiver,
    rng: random.Random | None = None,
) -> list[StageState]:
    """Download the newest snapshot of each stage, all of the same weights. Peers give them to anybody.

    They keep the last two, and list none, so these are asked for by their optimizer steps.

    Args:
        receiver: gives room for the states, and refuses those that do not fit their stage
        rng: chooses among the peers that hold one

    Raises:
        NoRoom: there is no room for all states
        SwarmError: there are none of all stages, or peers did not give them
    """
    rng = rng or random.Random()
    view = await directory.refresh(range(resolved.num_stages))
    every, reached = resolved.manifest.recovery.snapshot_every, newest_position(view).optimizer_step
    newest = reached // every * every if every else 0
    reason = f"the run has made {reached} optimizer steps"
    for step in (each for each in (newest, newest - every) if each > 0):
        try:
            states = [
                await fetch_state(
                    transport,
                    [peer.peer_id for peer in view.peers],
                    StateIndexCall(manifest=resolved.hash, of_stage=stage, optimizer_step=step),
                    max_bytes=max_state_bytes(resolved, stage),
                    optimizer_step=step,
                    rng=rng,
                    take=receiver.of_stage(stage).check,
                    room=receiver.of_stage(stage),
                    are_holders=True,
                )
                for stage in range(resolved.num_stages)
            ]
        except NoRoom:
            raise
        except CallError as error:
            reason = str(error)
            forget_frames(error)
            continue
        if len({state.round_number for state in states}) == 1:
            return states
        reason = f"those of optimizer step {step} are of several rounds"
    raise SwarmError(
        f"peers hold no snapshots of all stages ({reason}): they take them every recovery.snapshot_every={every} "
        f"optimizer steps; wait for that, or export a checkpoint"
    )


async def _fetch_stage(
    transport: Transport,
    directory: Directory,
    resolved: ResolvedManifest,
    stage: int,
    min_round: int,
    rng: random.Random,
    receiver: StateReceiver,
) -> StageState:
    call = StateIndexCall(manifest=resolved.hash, of_stage=stage, min_round=min_round)
    max_bytes, room = max_state_bytes(resolved, stage), receiver.of_stage(stage)
    for _ in range(STAGE_TRIES):
        try:
            view = await directory.refresh([stage])
            donors = [peer.peer_id for peer in view.serving(stage)]
            return await fetch_state(transport, donors, call, max_bytes=max_bytes, rng=rng, take=room.check, room=room)
        except NoRoom:  # the other stages' peers should not send theirs in vain
            raise
        except CallError as error:
            log.warning("stage_not_fetched stage=%d round=%d reason=%s", stage, min_round, error)
            await anyio.sleep(1.0)
    raise SwarmError(f"no peer of stage {stage} gave its state of round {min_round}: see the log for each try")

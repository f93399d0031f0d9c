"""How a newcomer comes into a stage: it takes over a state that an entry names, and then wishes for a place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import anyio

from swarm_peer.errors import CallError, NotServing
from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.state.states import StageSources

log = logging.getLogger(__name__)

# Between two tries to take over a state. The root of one is named when a round ends, so it may take some.
PAUSE_S = 1.0
# A peer that moves tries for so long to take over a state, while it serves its own stage.
PREPARING_S = 60.0
# The run goes back for a newcomer to a stage without seats. The newcomer says what that takes:
LOST = "it has lost all its peers, and the run waits for snapshots of all stages, or for a coordinator's checkpoint"


async def join(
    agreement: Agreement,
    stage: int,
    sources: StageSources,
    explain: Callable[[str], None] = lambda why: None,
    lacks: Callable[[], str] = lambda: "",
) -> None:
    """Take over the state of a stage, if it has seats, and wait until this peer has a place in it.

    Args:
        explain: told why it takes so long
        lacks: says to whom this peer finds no way that it needs there; as long as there is somebody, it wishes for no
            place, so that no round waits for two that cannot talk
    """
    core, waits_for_run, waits_for_way = agreement.core, False, ""
    while stage not in core.membership.stages:
        epoch = core.epoch
        if words := lacks():
            core.membership.desired -= {stage}
            explain(f"waits to join stage {stage}: {words}")
            if words != waits_for_way:
                log.warning("waiting stage=%d reason=%s", stage, words)
            waits_for_way = words
            await anyio.sleep(PAUSE_S)
            continue
        core.membership.desired |= {stage}
        if stage in core.epoch.lost:
            explain(f"waits to join stage {stage}: {LOST}")
            if not waits_for_run:
                log.warning("waiting stage=%d reason=%s", stage, LOST)
            waits_for_run = True
        # A state of before the run went back is of no use any more.
        if core.epoch.roster(stage) and stage not in core.membership.prepared:
            try:
                await _take_state(agreement, stage, sources)
            except CallError as error:
                explain(f"waits to join stage {stage}: {error}")
                log.info("state_not_taken stage=%d reason=%s", stage, error)
        agreement.look()
        with anyio.move_on_after(PAUSE_S):
            await agreement.changed.wait_for(partial(_has_changed, core, epoch))
    core.membership.desired |= {stage}  # the place may have come while the wish for it was taken back


def _has_changed(core: Core, epoch: Epoch) -> bool:
    return core.epoch is not epoch


async def leave_former_place(agreement: Agreement, stage: int) -> None:
    """Wait until this peer has no place in a stage that it has by a replica which is gone, with its state."""
    core = agreement.core
    core.forget_prepared(stage)
    core.membership.desired -= {stage}
    if stage in core.membership.stages:
        log.info("waiting stage=%d reason=it has left the stage, and the others do not know that yet", stage)
        agreement.look()
        await agreement.changed.wait_for(lambda: stage not in core.membership.stages)


async def prepare(agreement: Agreement, stage: int, sources: StageSources) -> None:
    """Take over the state of a stage, for a place that this peer will wish for later.

    Raises:
        CallError: nobody gives it
    """
    core, tried_s = agreement.core, 0.0
    core.preparing |= {stage}
    try:
        while stage not in core.membership.prepared:
            try:
                await _take_state(agreement, stage, sources)
            except CallError:
                if (tried_s := tried_s + PAUSE_S) > PREPARING_S:
                    raise
                await anyio.sleep(PAUSE_S)
    finally:
        core.preparing -= {stage}


async def _take_state(agreement: Agreement, stage: int, sources: StageSources) -> None:
    core = agreement.core
    agreement.ask_for_log(stage)
    restart = core.epoch.restart
    taken = await sources.state()
    known = core.told.get(stage)
    if known is None or known.restart != restart or core.epoch.restart != restart:
        raise NotServing("the run has gone back meanwhile")
    if stage in core.membership.stages:
        raise NotServing("this peer has its place already, and has other weights by now")
    core.prepare(stage, known, taken.state, (), taken.ledger)

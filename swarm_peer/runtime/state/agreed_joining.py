"""How a newcomer comes into a stage: it takes over a state that an entry names, and then wishes for a place."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from swarm_peer.errors import CallError
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.state.agreed_states import StageSources

log = logging.getLogger(__name__)

# Between two tries to take over a state. The root of one is named when a round ends, so it may take some.
PAUSE_S = 1.0


async def join(
    agreement: Agreement, stage: int, sources: StageSources, explain: Callable[[str], None] = lambda why: None
) -> None:
    """Take over the state of a stage, if it has seats, and wait until this peer has a place in it.

    Args:
        explain: told why it takes so long
    """
    core = agreement.core
    core.membership.desired |= {stage}
    prepared_for = None
    while stage not in core.membership.stages:
        # A state of before the run went back is of no use any more.
        if core.epoch.roster(stage) and prepared_for != core.epoch.restart:
            agreement.ask_for_log(stage)
            restart = core.epoch.restart
            try:
                taken = await sources.state()
            except CallError as error:
                explain(str(error))
                log.info("state_not_taken stage=%d reason=%s", stage, error)
            else:
                known = core.told.get(stage)
                if known is not None and known.restart == restart == core.epoch.restart:
                    core.prepare(stage, known, taken.state, (), taken.ledger)
                    prepared_for = restart
        agreement.look()
        with anyio.move_on_after(PAUSE_S):
            await agreement.changed.wait_for(lambda: stage in core.membership.stages)

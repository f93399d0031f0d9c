"""What the run's coordinators say: which orders mean this peer, whether it follows, and that the run is over."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.wire.records import (
    Assignment,
    CoordinationRecord,
    EndRecord,
    OriginRecord,
    end_key,
    origin_key,
)

log = logging.getLogger(__name__)

# A move takes many times as long, and each look of each peer costs several of them some milliseconds.
POLL_S = 3.0
# A run rarely ends before its steps are done; when they are, it is about to.
LOOK_FOR_END_S = 5.0
LOOK_FOR_DUE_END_S = 1.0


async def wait_for_order(
    me: str,
    stage: int,
    fetch: Callable[[], Awaitable[Mapping[Term, CoordinationRecord]]],
    view: Callable[[], SwarmView],
    serial: Callable[[], int],
) -> Assignment:
    """Wait until the run's coordinator orders this peer to another stage.

    An order is void if it was decided upon an announcement of this peer's life before: it has been played back. So is
    one of an older term than this peer has heard of. And the last peer of a stage stays, whatever it is told.

    Args:
        stage: that this peer serves
        fetch: the orders that are stored; may raise CallError
        serial: of this peer's last announcement
    """
    began, refused = serial(), None
    newest: Term | None = None
    while True:
        await anyio.sleep(POLL_S)
        try:
            known = await fetch()
        except CallError:  # the DHT does not answer; logged
            continue
        newest = max((*known, *([newest] if newest else [])), default=None)
        record = known.get(newest) if newest else None
        for order in record.assignments if record is not None else ():
            if (order.peer, order.from_stage) != (me, stage) or not began <= order.announced <= serial():
                continue
            others = [peer for peer in view().serving(stage) if peer.peer_id != me]
            if others and order.to_stage != stage and order.to_stage < view().num_stages:
                return order
            if order != refused:
                log.warning("order_refused to=%d others=%d reason=%s", order.to_stage, len(others), order.reason)
                refused = order


async def find_end(dht: SwarmDHT, run_id: str) -> EndRecord | None:
    """What the run's key says of the run's end, unless it has let the run go on from a checkpoint since.

    Raises:
        CallError: the DHT does not answer
    """
    end = (await dht.fetch(end_key(run_id), EndRecord, run_id)).get(run_id)
    if end is None:
        return None
    origin = (await dht.fetch(origin_key(run_id), OriginRecord, run_id)).get(run_id)
    return end if origin is None or origin.begun <= end.begun else None


async def wait_for_end(dht: SwarmDHT, run_id: str, is_due: Callable[[], bool]) -> str:
    """Wait until the run is over; returns why.

    Args:
        is_due: whether the run's steps are done
    """
    while True:
        soon = is_due()
        try:
            if (end := await find_end(dht, run_id)) is not None:
                return end.reason
        except CallError:  # the DHT does not answer: those who hold it may be leaving; logged
            soon = True
        await anyio.sleep(LOOK_FOR_DUE_END_S if soon else LOOK_FOR_END_S)

"""The words of the run's coordinators that a peer heeds: assignments to another stage, and the end of the run."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.wire.records import (
    Assignment,
    CoordinationRecord,
    EndRecord,
    TimelineRecord,
    end_key,
    timeline_key,
)

log = logging.getLogger(__name__)

# Pause between looks for assignments: each costs several peers some milliseconds.
POLL_S = 3.0
# Pauses between looks for the end of the run. Before all optimizer steps are done, a run rarely ends.
LOOK_FOR_END_S = 5.0
LOOK_FOR_DUE_END_S = 1.0


class NewestTerm:
    """The newest term that a peer has heard of, in whatever stage it was then."""

    def __init__(self) -> None:
        self._term: Term | None = None

    def record(self, known: Mapping[Term, CoordinationRecord]) -> CoordinationRecord | None:
        """The newest term's record; None if it is not among those that are known now."""
        self._term = max((*known, *([self._term] if self._term else [])), default=None)
        return known.get(self._term) if self._term else None


async def wait_for_assignment(
    *,
    me: str,
    stage: int,
    fetch: Callable[[], Awaitable[Mapping[Term, CoordinationRecord]]],
    newest_term: NewestTerm,
    view: Callable[[], SwarmView],
    since: int,
    serial: Callable[[], int],
) -> Assignment:
    """Wait until the run's coordinator assigns this peer to another stage.

    An assignment is void if the coordinator decided it upon an announcement of an earlier process of this peer:
    somebody has played it back. It is also void if this peer has heard of a later term. And the last peer of a stage
    stays in any case.

    Args:
        me: id of this peer
        stage: the stage that this peer serves
        fetch: fetches the records of all coordinators; may raise CallError
        newest_term: of this peer, for as long as its process lives
        view: the swarm as this peer knows it now
        since: serial number of the announcement that it serves this stage
        serial: that of its last announcement
    """
    refused = None
    while True:
        await anyio.sleep(POLL_S)
        try:
            known = await fetch()
        except CallError:  # the DHT has logged that it does not answer
            continue
        record = newest_term.record(known)
        for assignment in record.assignments if record is not None else ():
            if (assignment.peer, assignment.from_stage) != (me, stage) or not since <= assignment.announced <= serial():
                continue
            others = [peer for peer in view().serving(stage) if peer.peer_id != me]
            if others and assignment.to_stage != stage and assignment.to_stage < view().num_stages:
                return assignment
            if assignment != refused:
                log.warning(
                    "assignment_refused to=%d others=%d reason=%s", assignment.to_stage, len(others), assignment.reason
                )
                refused = assignment


async def find_end(dht: SwarmDHT, run_id: str) -> EndRecord | None:
    """The record of the run key that says the run is over; None if there is none, or if the run was resumed later.

    Raises:
        CallError: the DHT does not answer
    """
    end = (await dht.fetch(end_key(run_id), EndRecord, run_id)).get(run_id)
    if end is None:
        return None
    timeline = (await dht.fetch(timeline_key(run_id), TimelineRecord, run_id)).get(run_id)
    return end if timeline is None or timeline.begun <= end.begun else None


async def wait_for_end(dht: SwarmDHT, run_id: str, is_due: Callable[[], bool]) -> str:
    """Wait until the run is over, and return the reason that its coordinator gives.

    Args:
        is_due: whether all optimizer steps of the run are done, so that the end should come soon
    """
    while True:
        soon = is_due()
        try:
            if (end := await find_end(dht, run_id)) is not None:
                return end.reason
        except CallError:  # the DHT has logged that it does not answer: its peers may be leaving at the end of the run
            soon = True
        await anyio.sleep(LOOK_FOR_DUE_END_S if soon else LOOK_FOR_END_S)

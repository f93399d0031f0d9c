"""How a run ends: its peers and coordinators are told, again and again, until no peer announces itself any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.policy.view import UNDECIDED, PeerState
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import EndRecord, TimelineRecord, end_key, timeline_key

log = logging.getLogger(__name__)

# The reasons that coordinators and operators give.
FINISHED = "it has reached its steps, and its model is saved where its coordinator ran"
ENDED_BY_OPERATOR = "its operator has ended it"
# A peer finishes its microbatches in flight, and hands over its state.
ENDING_S = 60.0
END_POLL_S = 1.0
# No peer may be seen for so long before the run counts as ended: one that moves is gone for a moment and comes back.
NOBODY_S = 2.0
END_LIFETIME_S = 3600.0


class Farewell(NamedTuple):
    """Whether everybody has heard that a run is over, and who is left.

    Attributes:
        is_told: whether the DHT has taken it
        left: the peers that still announced themselves then; 0 if no node answers any more
    """

    is_told: bool
    left: int


async def see_off(
    dht: SwarmDHT,
    directory: Directory,
    manifest: RunManifest,
    run_key: Identity,
    reason: str,
    *,
    begun_s: int,
    least_s: float = 0.0,
    on_left: Callable[[int], None] = lambda _: None,
) -> Farewell:
    """Tell a run's peers and coordinators that they may go, until all peers have gone or have had time enough.

    Args:
        directory: has looked for peers before: where there was none, nobody has to be told
        begun_s: unix seconds at which the run began, if the DHT does not know
        least_s: seconds that are waited in any case. Coordinators do not announce themselves; they hear it as well.
        on_left: called with the number of peers that are left, each time that it changes
    """
    lifetime_s, run_id = manifest.limits.announcement_s, run_key.peer_id
    began_s = answered_s = anyio.current_time()
    is_told, left, gone_since_s = False, -1, began_s
    is_alone = not directory.view.peers
    with anyio.move_on_after(max(ENDING_S, least_s) + lifetime_s):
        while left or not is_told or anyio.current_time() < max(gone_since_s + NOBODY_S, began_s + least_s):
            if is_told and anyio.current_time() - answered_s > lifetime_s:
                log.warning("run_not_seen reason=no node answers any more: all have gone, or the way to them is cut")
                return Farewell(is_told, 0)
            num_answers = dht.num_answers
            with suppress(CallError):
                timeline = (await dht.fetch(timeline_key(run_id), TimelineRecord, run_id)).get(run_id)
                begun = begun_s if timeline is None else timeline.begun
                # Again and again: the nodes that store it may be among those that leave, or not have been within reach.
                is_stored = await end_run_for(dht, run_key, begun, reason)
                # A node that is cut off stores it, too, and tells nobody.
                is_told |= is_stored and (is_alone or dht.num_answers > num_answers)
                view = await directory.refresh([*range(manifest.stages.count), UNDECIDED])
                # A draining peer is about to go, and its last announcement outlives it by up to `lifetime_s`.
                seen = sum(peer.state is not PeerState.DRAINING for peer in view.peers)
                answered_s = anyio.current_time()
                if seen != left:
                    on_left(seen)
                    gone_since_s = answered_s
                left = seen
            await anyio.sleep(END_POLL_S)
    return Farewell(is_told, max(left, 0))


async def end_run_for(dht: SwarmDHT, run_key: Identity, begun: int, reason: str) -> bool:
    """Tell a run's peers and coordinators that they may go; returns whether the DHT has taken it."""
    run_id = run_key.peer_id
    record = EndRecord(reason=reason, begun=begun)
    return await dht.store(end_key(run_id), record, run_id, END_LIFETIME_S, signer=run_key)

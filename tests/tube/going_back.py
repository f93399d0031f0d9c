"""How far a run may go back: no further than to the newest snapshots that the peers left have of all stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hosts import Host
from loop import HOST
from swarm_peer.policy.recovery import Rewind, SnapshotRef, Standing, Timeline
from swarm_peer.runtime.state.claims import is_on_timeline

if TYPE_CHECKING:
    from invariants import Invariants

# Others may not have seen a host that was out of reach so short a time ago, nor it them.
SEEN_S = 60.0


def newest_of_all(hosts: Iterable[Host], timeline: Timeline, num_stages: int) -> int | None:
    """The newest optimizer step on a timeline of which some hosts keep snapshots of all stages; None if there is none.

    Those of a host whose disk has failed do not count.
    """
    stages: dict[SnapshotRef, set[int]] = defaultdict(set)
    for host in hosts:
        if host.peer is None or host.storage.has_failed:
            continue
        for ref, own in host.peer._parts.snapshots.snapshots():
            if is_on_timeline(own, ref.created_at_round, timeline):
                stages[ref._replace(stage=0)].add(ref.stage)
    return max((ref.optimizer_step for ref, held in stages.items() if len(held) == num_stages), default=None)


def check_rewind(watch: Invariants, rewind: Rewind, standing: Standing) -> None:
    """Look at the snapshots that a peer goes back to, unless some host was out of reach lately."""
    tube, now = watch.tube, watch.tube.world.loop.time()
    if any(tube.was_absent(host, now - SEEN_S) for host in tube.world.alive()):
        return
    newest = newest_of_all(tube.peers(), standing.timeline, watch.manifest.stages.count)
    chosen = rewind.optimizer_step
    assert chosen is not None
    if newest is not None and chosen < newest <= standing.optimizer_step:
        tube.violation(f"{HOST.get()} goes back to step {chosen}, and there are snapshots of all stages of {newest}")

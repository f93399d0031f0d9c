"""A live run is exported from its peers' snapshots."""

import pytest
from checkpoint_runs import run as run
from checkpoint_worlds import assert_same
from given_states import Gullible

from coordinator.checkpoints.fetching import fetch_snapshots
from swarm_peer.errors import InvalidMessage, SwarmError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.timeline import FIRST_TIMELINE
from swarm_peer.runtime.host.machine import SystemThreads


async def test_a_live_run_is_exported_from_the_newest_snapshots_of_all_stages(run):
    """Anybody may have these, and they take no memory of the peers."""
    await run.add("a", 0, 60)
    await run.add("b", 1, 50)
    resolved = ResolvedManifest.of(run.manifest)

    class Receiver(Gullible):
        async def check(self, stage, state):
            if not state.tensors:
                raise InvalidMessage("does not fit")

    receiver = Receiver(resolved, SystemThreads())
    with pytest.raises(SwarmError, match=r"no snapshots of all stages .*of stage 0.*snapshot_every=10"):
        await fetch_snapshots(run.network.transport("anybody"), run, resolved, receiver)
    expected = [await run.add("c", 0, 50, FIRST_TIMELINE), await run.add("d", 1, 50, FIRST_TIMELINE)]
    await run.add("liar", 1, 5000)
    await run.add("z", 1, 50, tensors={})
    for stage, state in enumerate(await fetch_snapshots(run.network.transport("anybody"), run, resolved, receiver)):
        assert_same(state, expected[stage])
    assert receiver.num_allocated >= 2, "they may be larger than the memory here"

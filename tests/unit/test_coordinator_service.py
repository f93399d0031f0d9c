"""What the coordinator of a run does when the run's peers or its DHT do not give what they should."""

from coordinator import service
from coordinator.service import RunService
from swarm_peer.config import RunManifest
from swarm_peer.errors import SwarmError
from swarm_peer.policy.recovery import Origin
from swarm_peer.runtime.state_index import StageState
from swarm_peer.wire.identity import Identity

MANIFEST = RunManifest.model_validate(
    {
        "name": "served",
        "model": {"config": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 8, "n_head": 2, "n_layer": 2}},
        "stages": {"count": 1},
        "data": {"sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)


class FakeDHT:
    def __init__(self, folder):
        self.identity = Identity.load_or_create(folder / "identity")


async def test_the_end_is_only_where_the_stages_are_there(tmp_path, monkeypatch):
    """Stage 0 may tell of steps that have not been; and peers may be gone just then."""
    saved = []
    given = [SwarmError("no peer of stage 0"), StageState(9, "x", {}, Origin(7, 0, 0)), StageState(3, "x", {})]

    async def fetch_states(transport, directory, manifest, min_step):
        state = given.pop(0)
        if isinstance(state, SwarmError):
            raise state
        return [state]

    monkeypatch.setattr(service, "fetch_states", fetch_states)
    monkeypatch.setattr(service, "export_states", lambda manifest, states, *_: saved.append(states[0].updates))
    run = RunService(MANIFEST, FakeDHT(tmp_path), tmp_path)
    assert [await run._export(None) for _ in range(3)] == [False, False, True]
    assert saved == [3]

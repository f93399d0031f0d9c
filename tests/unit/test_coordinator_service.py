"""What the coordinator of a run does when the run's peers or its DHT do not give what they should."""

from types import SimpleNamespace

import anyio
import pytest

from coordinator.run import service
from coordinator.run.events import RunEvents
from coordinator.run.service import RunOptions, RunService
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, SwarmError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.recovery import Timeline
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.state.index import StageState
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import Assignment

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 2,
    "tie_word_embeddings": False,
}
MANIFEST = RunManifest.model_validate(
    {
        "name": "served",
        "model": {"config": CONFIG},
        "stages": {"count": 1},
        "data": {"sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)

RESOLVED = ResolvedManifest.of(MANIFEST)


class FakeDHT:
    passes = PassChecker(None, clock=SystemClock())
    metrics = PeerMetrics()
    addresses = ()

    def __init__(self, folder):
        self.identity = Identity.load_or_create(folder / "identity")

    async def fetch(self, *_):
        raise CallError("no answer")

    def dial_by(self, announced):
        pass


async def test_the_end_is_only_where_the_stages_are_there(tmp_path, monkeypatch):
    """Stage 0 may tell of steps that have not been; and peers may be gone just then."""
    saved = []
    given = [SwarmError("no peer of stage 0"), StageState(9, "x", {}, Timeline(7, 0, 0)), StageState(3, "x", {})]

    async def fetch_states(transport, directory, manifest, check, min_round, rng):
        state = given.pop(0)
        if isinstance(state, SwarmError):
            raise state
        return [state]

    monkeypatch.setattr(service, "fetch_states", fetch_states)
    monkeypatch.setattr(service, "export_states", lambda manifest, states, *_: saved.append(states[0].optimizer_step))
    run = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    assert [await run._export(None) for _ in range(3)] == [False, False, True]
    assert saved == [3]


async def test_a_look_without_an_answer_ends_nothing(tmp_path):
    run = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    assert await run._observe() is None
    with anyio.move_on_after(0.05) as scope:
        await run._look_for_end()
    assert scope.cancelled_caught, "asked again"
    assert run.ended is None


class Coordination:
    """Says what is ordered in a term of one's own."""

    def __init__(self):
        self.acts, self.term, self.inherited = True, Term(5, "me"), ()
        self.said = None

    async def assign(self, assignments, reason):
        self.said = assignments


async def test_orders_stand_for_as_long_as_the_term_is_ones_own(tmp_path, monkeypatch):
    """A look that takes too long, and another coordinator that takes over."""
    order = Assignment(peer="p", announced=3, from_stage=0, to_stage=1, reason="")
    made = []

    class Rebalancer:
        def __init__(self, manifest, options, begun_s, inherited):
            self.inherited, self.orders, self.policy = inherited, (), SimpleNamespace(reason="", num_moves=0)
            made.append(self)

        def look(self, *_):
            pass

        def assignments(self):
            return self.orders

    monkeypatch.setattr(service, "Rebalancer", Rebalancer)
    run, coordination = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path)), Coordination()
    await run._rebalance(coordination)
    made[0].orders = (order,)
    for acts in (True, False, True):
        coordination.acts = acts
        await run._rebalance(coordination)
        assert coordination.said == (order,)
    assert len(made) == 1
    coordination.term, coordination.inherited = Term(7, "me"), (order,)
    await run._rebalance(coordination)
    assert [rebalancer.inherited for rebalancer in made] == [(), (order,)]
    assert coordination.said == ()


async def test_no_look_ends_a_coordinator(tmp_path, monkeypatch):
    """A defect that what peers announce brings to light would end each standby as well."""
    watches = []
    run = RunService(
        RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path), events=RunEvents(on_update=watches.append)
    )
    run._directory.addresses = list
    coordination = Coordination()
    coordination.newest = None

    def fail(*_):
        raise IndexError("list index out of range")

    async def fail_soon(*_):
        fail()

    monkeypatch.setattr(run, "_observe", fail_soon)
    monkeypatch.setattr(run, "_rebalance", fail_soon)
    await run._look_at_run(None, coordination)
    assert watches == [run.watch], "what comes after a failure is done"
    monkeypatch.setattr(run.metrics, "update", fail)
    await run._look_at_run(None, coordination)
    counted = {work: run.metrics.look_defects.labels(work)._value.get() for work in ("observe", "rebalance", "show")}
    assert counted == {"observe": 2, "rebalance": 2, "show": 1}

    async def end(*_):
        raise SwarmError("libp2p's daemon has died")

    monkeypatch.setattr(run, "_rebalance", end)
    with pytest.raises(SwarmError, match="daemon"):
        await run._look_at_run(None, coordination)

"""A coordinator of a run whose peers agree: where it begins, goes on and goes back."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import anyio
import pytest
from agreeing import quickly
from memory_transport import MemoryNetwork
from test_coordinator_service import MANIFEST, PEER, RESOLVED, Board

from coordinator.checkpoints.resumed import find_resumed
from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.metrics_file import METRICS, metrics_line
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.run_progress import MAX_ROUNDS_AHEAD
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import BEGINNING, Place
from swarm_peer.protocol.statements import Seat
from swarm_peer.runtime.network.agreement import find_epochs
from swarm_peer.runtime.state.index import StageState
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import StateIndexCall
from swarm_peer.wire.records import TimelineRecord, timeline_key


@pytest.fixture(autouse=True)
def agreed(monkeypatch):
    quickly(monkeypatch)


class Records(Board):
    """A DHT without coordinators."""

    async def fetch_coordination(self, run_id):
        return {}


def state_of(step=2, round_number=2, timeline=FIRST_TIMELINE, **fields):
    tensors = StageTrainer(RESOLVED, RESOLVED.specs[0]).state()
    return StageState(round_number, fields.pop("history", "h"), tensors, timeline, **fields)


@asynccontextmanager
async def begun(folder, network, held=None, **options):
    """A coordinator that has found or begun its run.

    Args:
        held: records of a timeline in the DHT
    """
    records = Records(folder, {})
    run = RunService(RESOLVED, records, RunOptions(output=folder, resume=True, **options))
    records.held |= {timeline_key(run._run_id): each for each in (held or ())}
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    peer_id = run._run_id
    with closing(run._open_files()) as files:
        async with anyio.create_task_group() as tasks:
            giver = await run._agree(network.transport(peer_id), tasks, files, scratch)
            yield SimpleNamespace(run=run, files=files, agreed=giver, peer_id=peer_id)
            tasks.cancel_scope.cancel()
    network.kill(peer_id)


async def told(network, run):
    """The epochs that a newcomer is told."""
    identity = Identity.generate()
    statements = Statements(run.peer_id, identity)
    return await find_epochs(network.transport(identity.peer_id), statements, RESOLVED.hash, [run.peer_id], 5.0)


async def test_a_run_begins_with_an_epoch_that_peers_are_told(tmp_path):
    async with MemoryNetwork() as network, begun(tmp_path, network) as made:
        (first,) = await told(network, made)
        assert (first.is_of_key, first.epoch.restart) == (True, BEGINNING)
        assert made.run.begun_s == first.epoch.id.term
        assert made.run._beginning.timeline == FIRST_TIMELINE
        assert made.run._beginning.record().reached() == (0, 0)
        made.run.watch.observe(SwarmView(1, (PEER,)), {}, 0.0)
        assert (made.run.watch.optimizer_step, made.run.watch.begun_at) == (0, 0)


async def test_a_word_waits_until_each_stage_has_peers(tmp_path):
    """An epoch of the run key takes all stages for begun: one that nobody has served would be lost."""
    async with MemoryNetwork() as network, begun(tmp_path, network) as made:
        assert not made.agreed.is_settled
        agreeing = made.agreed._agreeing
        places = [*agreeing.membership.epoch.places, Place(0, Seat("a", 1, ""))]
        agreeing.agreement.announce_by_key(places, BEGINNING)
        assert made.agreed.is_settled


@pytest.mark.parametrize("reached_round", [0, 7])
async def test_what_another_coordinator_has_published_is_no_run_before_its_first_step(tmp_path, reached_round):
    record = TimelineRecord(first_round=0, first_optimizer_step=0, begun=1, reached_round=reached_round)
    began = False
    async with MemoryNetwork() as network:
        with anyio.move_on_after(5 if reached_round == 0 else 0.5):
            async with begun(tmp_path, network, [record]):
                began = True
    assert began == (reached_round == 0)


async def test_a_run_is_resumed_by_an_epoch_that_names_the_states_of_the_checkpoint(tmp_path):
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    store.save(2, MANIFEST, [state_of()])
    async with MemoryNetwork() as network:
        plan = CheckpointPlan(None, resume=store.newest())
        async with begun(tmp_path, network, plan=plan) as made:
            epoch = (await told(network, made))[-1].epoch
            assert (epoch.restart.first_round, epoch.restart.optimizer_step, len(epoch.restart.entries)) == (3, 2, 1)
            assert made.run._beginning.timeline == Timeline(3, 2, 3)
            assert find_resumed(tmp_path, made.run._beginning.timeline) is not None
            call = StateIndexCall(manifest=RESOLVED.hash, of_stage=0, entry=epoch.restart.entries[0])
            reply = await network.transport("peer").call(made.peer_id, call, timeout_s=5.0)
            assert len(reply.tensors) == 1
        async with begun(tmp_path, network) as made:
            later = (await told(network, made))[-1].epoch
            assert later.restart == epoch.restart, "the next coordinator goes on from there"
            assert later.id.term == epoch.id.term + 1


@pytest.mark.parametrize(("last_round", "is_void"), [(2, True), (3, False)])
async def test_a_successor_goes_on_with_what_is_of_the_run_since_it_was_resumed(tmp_path, last_round, is_void):
    """The coordinator that resumed it has died, and the DHT has forgotten the run."""
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    store.save(2, MANIFEST, [state_of()])
    async with MemoryNetwork() as network:
        async with begun(tmp_path, network, plan=CheckpointPlan(None, resume=store.newest())) as made:
            agreeing = made.agreed._agreeing
            restart = agreeing.membership.epoch.restart
            places = [*agreeing.membership.epoch.places, Place(0, Seat("a", 1, ""))]
            agreeing.agreement.announce_by_key(places, restart)
            await agreeing._keep()
        step = metrics_line(
            optimizer_step=3, round_number=last_round, loss=1.0, samples=2, seconds=1.0, sequence_length=8, peers=[1]
        )
        (tmp_path / METRICS).write_text(json.dumps(step) + "\n")
        async with begun(tmp_path, network) as made:
            assert made.agreed._agreeing.membership.epoch.restart[:3] == restart[:3]
            assert made.run._beginning.record().reached() == ((0, 0) if is_void else (4, 3))
            watch = made.run.watch
            assert watch.optimizer_step == 0, "no peer has told anything yet"
            watch.observe(SwarmView(1, (PEER,)), {}, 0.0)
            assert watch.optimizer_step == (0 if is_void else 3)
            assert watch.begun_at == (2 if is_void else 3)


async def test_a_run_goes_back_by_an_epoch_with_the_same_places(tmp_path):
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    store.save(2, MANIFEST, [state_of()])
    async with MemoryNetwork() as network, begun(tmp_path, network) as made:
        membership = made.agreed._agreeing.membership
        peer = Place(0, Seat("a", 1, ""))
        made.agreed._agreeing.agreement.announce_by_key([*membership.epoch.places, peer], BEGINNING)
        before = membership.epoch
        await made.run._go_back(store.newest(), made.agreed, made.files)
        epoch = membership.epoch
        assert (epoch.places, epoch.begun) == (before.places, (0,))
        assert (epoch.restart.optimizer_step, epoch.id.author) == (2, membership.me)
        assert made.run._beginning.timeline.first_round == epoch.restart.first_round > MAX_ROUNDS_AHEAD
        made.run._follow_epochs()
        assert made.run.begun_s == epoch.id.term

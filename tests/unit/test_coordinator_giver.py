"""A coordinator gives checkpoints by the names of their states: a run goes on from one, with real stages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import anyio
import pytest
from agreed_stages import Hall, has_come_to, quick_stages, resolved_of
from agreeing import RUN, swarm, until

from coordinator.checkpoints import giver
from coordinator.checkpoints.fetching import fetch_snapshots
from coordinator.checkpoints.folder import CheckpointDamaged
from coordinator.checkpoints.giver import CheckpointGiver, Offered
from coordinator.checkpoints.names import entries_of, load_named, names_of
from coordinator.checkpoints.resumed import note_resumed
from coordinator.checkpoints.run_names import RunNames
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan, CheckpointWriter, Duty
from coordinator.run.context import CoordinatorContext
from swarm_peer.errors import InvalidMessage, SwarmError, UserError
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network import agreement
from swarm_peer.runtime.state.snapshots import SnapshotTaker
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity

EVERY = 4


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_stages(monkeypatch)
    monkeypatch.setattr(agreement, "KEY_DECIDES_AFTER", 1 / 30)  # lifetimes of 30 s
    monkeypatch.setattr(giver, "LOOK_S", 0.05)
    monkeypatch.setattr(giver, "RETRY_S", 0.2)


class House:
    """A run of two stages with real trainers, a coordinator, and a store of checkpoints."""

    def __init__(self, some, hall, folder):
        self.some, self.hall, self.folder = some, hall, folder
        self.manifest = hall.resolved.manifest
        self.store = CheckpointStore(str(folder / "checkpoints"))
        self.coordinator = some.coordinator
        self.peers = []
        self.past = []

    @property
    def rigs(self):
        return [self.hall.rigs[peer.identity.peer_id] for peer in self.peers]

    async def begin(self):
        """A peer of each stage begins."""
        self.peers = [self.some.add(Identity.generate(), stage) for stage in (0, 1)]
        await until(self.peers, lambda peer: peer.identity.peer_id in self.hall.rigs)

    def kill(self):
        """All peers are gone at once."""
        self.past = list(self.rigs[0].ended)
        for peer in self.peers:
            self.some.kill(peer)
            del self.hall.rigs[peer.identity.peer_id]

    async def save(self, after=2 * EVERY):
        """Save a checkpoint of the next snapshots after a step; returns it."""

        def held(rig, stage):
            return {name for name in rig.snapshots.names if name.stage == stage and name.optimizer_step > after}

        def both():
            steps = [{name.optimizer_step for name in held(rig, stage)} for stage, rig in enumerate(self.rigs)]
            return steps[0] & steps[1]

        await until(self.peers, lambda _: both(), 60)
        step = max(both())
        found = [next(n for n in held(rig, s) if n.optimizer_step == step) for s, rig in enumerate(self.rigs)]
        states = [await rig.snapshots.load(name) for rig, name in zip(self.rigs, found, strict=True)]
        await anyio.to_thread.run_sync(self.store.save, step, self.manifest, states)
        return self.store.at(step)

    def giver(self, statements=None, name="scratch"):
        giver = CheckpointGiver(
            manifest=self.manifest,
            context=CoordinatorContext(),
            statements=statements or self.coordinator.agreement.statements,
            folder=self.folder / name,
        )
        giver.membership = self.coordinator.core.membership
        self.coordinator.calls.add(None, giver.snapshots.calls)
        return giver

    def offered(self, fits=lambda *_: True, reached=None, store=True):
        def last():
            committed = [each.entry.cut.round for each in self.past]
            return (max(committed, default=-1) + 2, max(committed, default=-1) + 1)

        return Offered(store=self.store if store else None, fits=fits, reached=reached or last, output=self.folder)

    def restart_from(self, checkpoint, entries):
        round_number = max(each.entry.cut.round for each in self.rigs[0].ended)
        return Restart(round_number + 20, checkpoint.optimizer_step, entries)

    async def goes_on(self, condition=lambda restart: restart.entries):
        """Wait until the run has begun anew, and made some rounds that one process makes as well."""
        await until(self.peers, lambda peer: condition(peer.core.epoch.restart), 60)
        restart = self.peers[0].core.epoch.restart
        for stage, peer in enumerate(self.peers):
            await until([peer], partial(has_come_to, stage, restart.first_round + 3), 60)
        await self.hall.check(restart.optimizer_step + 3)
        return restart


def with_house(test):
    """Run a test in a house."""

    def run(tmp_path):
        async def go():
            sections = {"recovery": {"snapshot_every": EVERY}, "averaging": {"compare_weights_every": 0}}
            hall = Hall(resolved_of("sgd", **sections), tmp_path / "peers")
            async with swarm(hall.work, hall.resolved) as some:
                house = House(some, hall, tmp_path)
                await house.begin()
                await test(house)

        anyio.run(go)

    run.__name__ = getattr(test, "__name__", "")
    return run


@with_house
async def test_a_run_that_has_lost_all_its_peers_goes_on_from_a_checkpoint(house):
    """No peer is left that could offer anything; the coordinator alone says how far the run has come."""
    checkpoint = await house.save()
    giver = house.giver()
    house.some.tasks.start_soon(giver.run, house.offered())
    house.kill()
    await house.begin()
    restart = await house.goes_on()
    assert restart.optimizer_step == checkpoint.optimizer_step
    assert restart.first_round > max(each.entry.cut.round for each in house.past)


@with_house
async def test_without_a_checkpoint_a_run_that_has_trained_waits(house):
    await house.save()
    house.some.tasks.start_soon(house.giver().run, house.offered(store=False))
    house.kill()
    await house.begin()
    await until([house.coordinator], lambda each: not each.core.epoch.roster(0) and each.core.epoch.begun, 30)
    with anyio.move_on_after(3):
        await until(house.peers, lambda peer: peer.core.epoch.restart != BEGINNING)
    assert house.coordinator.core.epoch.restart == BEGINNING
    assert not house.coordinator.core.epoch.roster(0)


@with_house
async def test_a_run_is_taken_back_to_a_checkpoint_by_the_run_key(house):
    checkpoint = await house.save()
    giver = house.giver()
    entries = await giver.give(checkpoint)
    names = {each.entry: each for rig in house.rigs for each in rig.snapshots.names}
    assert [names[entry].stage for entry in entries] == [0, 1], "as the stages themselves have named them"
    restart = house.restart_from(checkpoint, entries)
    part = house.coordinator.agreement
    part.announce_by_key(part.core.epoch.places, restart)
    assert (await house.goes_on())[:3] == restart[:3]
    assert house.coordinator.core.epoch.begun == (0, 1), "all have kept their places"


@with_house
async def test_a_run_goes_on_from_a_checkpoint_of_another_run(house):
    checkpoint = await house.save()
    other = Identity.generate()
    giver = house.giver(Statements(other.peer_id, other))
    entries = await giver.give(checkpoint)
    known = {each.entry for rig in house.rigs for each in rig.snapshots.names}
    assert not known & set(entries), "its statements prove nothing here"
    part = house.coordinator.agreement
    restart = house.restart_from(checkpoint, entries)
    part.announce_by_key(part.core.epoch.places, restart)
    assert (await house.goes_on())[:3] == restart[:3]
    again = house.giver(Statements(other.peer_id, other), name="again")
    assert await again.give(checkpoint) == entries, "the names are the same each time"


@with_house
async def test_a_coordinator_that_comes_back_gives_what_the_run_has_begun_with(house):
    """The one before has died before all peers had it."""
    checkpoint = await house.save()
    entries = await house.giver().give(checkpoint)
    restart = house.restart_from(checkpoint, entries)
    part = house.coordinator.agreement
    house.coordinator.calls.add(None, house.giver(name="empty").snapshots.calls)
    for rig in house.rigs:
        for name in rig.snapshots.names:
            rig.snapshots.forget(name)
    part.announce_by_key(part.core.epoch.places, restart)
    await until(house.peers, lambda peer: peer.core.epoch.restart[:3] == restart[:3])
    timeline = Timeline(restart.first_round, restart.optimizer_step, restart.first_round)
    note_resumed(house.folder, checkpoint, timeline)
    giver = house.giver(name="next")
    house.some.tasks.start_soon(giver.run, house.offered(reached=lambda: (0, 0), store=False))
    assert (await house.goes_on())[:3] == restart[:3]


@with_house
async def test_another_checkpoint_of_the_same_step_is_not_what_the_run_has_begun_with(house):
    await house.save()
    giver = house.giver()
    giver.membership = house.giver(name="other").membership
    step = house.store.newest().optimizer_step
    part = house.coordinator.agreement
    part.announce_by_key(part.core.epoch.places, Restart(1000, step, ("x", "y")))
    await giver._look(giver.membership, house.offered(reached=lambda: (0, 0)))
    assert giver.snapshots.names == frozenset()
    giver._retry_s = 0.0
    await giver._look(giver.membership, house.offered(reached=lambda: (0, 0)))
    assert len(giver._unlike) == 1


async def offers_no_more(house, damage):
    """The run would begin with it again and again; an older one is good."""
    checkpoint = await house.save()
    entries = entries_of(checkpoint.entries, checkpoint.round_number, Statements(RUN.peer_id, RUN))
    giver, membership = house.giver(), house.coordinator.core.membership
    giver.membership = membership
    giver.note_saved(names_of(checkpoint.optimizer_step, entries), checkpoint.round_number)
    part = house.coordinator.agreement
    names = tuple(each.entry.hash for each in entries)
    part.announce_by_key(part.core.epoch.places, house.restart_from(checkpoint, names))
    file = next(house.folder.rglob("stage-001.safetensors"))
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data if damage == "changed" else data[:-1])
    await giver._look(membership, house.offered(reached=lambda: (0, 0)))
    assert membership.holds[2] == frozenset()
    assert giver.snapshots.names == frozenset()
    await giver._find_newest(house.store, lambda *_: True)
    assert not giver._offered


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_checkpoint_that_cannot_be_given_is_offered_no_more(tmp_path, damage):
    with_house(partial(offers_no_more, damage=damage))(tmp_path)


@with_house
async def test_what_the_run_has_given_up_is_not_offered(house):
    checkpoint = await house.save()
    entries = entries_of(checkpoint.entries, checkpoint.round_number, Statements(RUN.peer_id, RUN))
    giver, membership = house.giver(), house.coordinator.core.membership
    giver.note_saved(names_of(checkpoint.optimizer_step, entries), checkpoint.round_number)
    await giver._look(membership, house.offered(reached=lambda: (30, 20)))
    assert membership.holds[:2] == (30, 20)
    assert {name.entry for name in membership.holds[2]} == {each.entry.hash for each in entries}
    await giver._look(membership, house.offered(fits=lambda *_: False))
    assert membership.holds[2] == frozenset()


@with_house
async def test_a_state_that_is_not_what_its_entry_names_is_not_given(house):
    checkpoint = await house.save()
    states = [checkpoint.load_stage(stage) for stage in (0, 1)]
    changed = replace(states[1], tensors={name: value + 1 for name, value in states[1].tensors.items()})
    house.store.save(checkpoint.optimizer_step, house.manifest, [states[0], changed])
    damaged = house.store.at(checkpoint.optimizer_step)
    giver = house.giver()
    with pytest.raises(CheckpointDamaged, match="not what its entry names"):
        await giver.give(damaged)


@with_house
async def test_entries_of_stages_that_do_not_fit_together_are_none(house):
    checkpoint = await house.save()
    later = await house.save(after=checkpoint.optimizer_step)
    statements = Statements(RUN.peer_id, RUN)
    number = checkpoint.round_number
    assert len(entries_of(checkpoint.entries, number, statements)) == 2
    assert not entries_of((checkpoint.entries[0], later.entries[1]), number, statements)
    assert not entries_of(checkpoint.entries[::-1], number, statements)
    assert not entries_of(checkpoint.entries, number + 1, statements)
    assert not entries_of((checkpoint.entries[0], b""), number, statements)
    assert load_named(checkpoint, 0, None, statements).name.entry != load_named(later, 0, None, statements).name.entry


@with_house
async def test_without_room_nothing_is_given(house):
    checkpoint = await house.save()
    giver = house.giver()
    (house.folder / "scratch").write_text("in the way")
    with pytest.raises(UserError, match="do not fit into the temporary folder"):
        await giver.give(checkpoint)


@with_house
async def test_of_a_checkpoint_of_which_a_file_is_damaged_nothing_is_offered(house):
    """Half of it would be waited for."""
    checkpoint = await house.save()
    damaged = Path(checkpoint.path) / "stage-001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    giver, membership = house.giver(), house.coordinator.core.membership
    with pytest.raises(CheckpointDamaged):
        await giver.give(checkpoint)
    await giver._look(membership, house.offered())
    assert membership.holds[2] == giver.snapshots.names == frozenset()


@with_house
async def test_a_coordinator_whose_disk_is_full_or_whose_store_does_not_answer_looks_again(house):
    """Its peers may have all that they need."""
    checkpoint = await house.save()
    giver, part = house.giver(), house.coordinator.agreement
    entries = await house.giver(name="other").give(checkpoint)
    restart = house.restart_from(checkpoint, entries)
    part.announce_by_key(part.core.epoch.places, restart)
    offered = house.offered(reached=lambda: (0, 0))
    (house.folder / "scratch").write_text("in the way")
    failures = [UserError("no network")]
    newest_that = house.store.newest_that

    def fail_first(*asked):
        if failures:
            raise failures.pop()
        return newest_that(*asked)

    house.store.newest_that = fail_first
    for _ in range(2):
        await giver._look(giver.membership, offered)
        assert giver._lacks(restart)
        giver._retry_s = 0.0
    assert not failures
    (house.folder / "scratch").unlink()
    await giver._look(giver.membership, offered)
    assert not giver._lacks(restart)


# --- checkpoints that are written


def view_of(house, optimizer_step=0):
    """The peers as they announce themselves."""
    peers = [
        PeerView(
            peer_id=rig.peer.identity.peer_id,
            stage=stage,
            state=PeerState.SERVING,
            round_number=0,
            optimizer_step=optimizer_step,
            samples_per_s=1.0,
            queue=0,
        )
        for stage, rig in enumerate(house.rigs)
    ]
    return SwarmView(2, tuple(peers))


def writer_of(house, names):
    """A writer that saves each checkpoint that is due."""
    return CheckpointWriter(
        house.hall.resolved,
        CheckpointPlan(house.store, EVERY),
        watch=Watch(house),
        directory=SimpleNamespace(view=view_of(house)),
        threads=SystemThreads(),
        rng=Random(0),
        duty=Duty(),
        names=names,
    )


class Watch:
    """Sees the run as its peers do."""

    last_step = 1000

    def __init__(self, house):
        self._house = house
        self.saved = []
        self.work = []

    @property
    def optimizer_step(self):
        return min(rig.trainer.optimizer_step for rig in self._house.rigs)

    def created_at_round(self, step):
        return step if step <= self.optimizer_step else None

    def observe_checkpoint(self, step):
        self.saved.append(step)

    def observe_work(self, samples, weight):
        self.work.append((samples, weight))


def names_in(house, giver):
    part, context = house.coordinator.agreement, house.coordinator.context
    taker = SnapshotTaker(
        context=context,
        threads=context.threads,
        transport=house.coordinator.transport,
        agreement=part,
        snapshots=giver.snapshots,
        holders=tuple,
    )
    return RunNames(taker=taker, giver=giver, statements=part.statements, threads=context.threads)


@with_house
async def test_a_checkpoint_is_made_of_the_snapshots_that_entries_name_and_is_offered(house):
    giver, membership = house.giver(), house.coordinator.core.membership
    writer = writer_of(house, names_in(house, giver))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run, house.coordinator.transport)
        await until(house.peers, lambda _: writer._watch.saved, 60)
        tasks.cancel_scope.cancel()
    assert {weight for _, weight in writer._watch.work} != {0}
    assert all(samples == weight for samples, weight in writer._watch.work), "all tokens of text are learnt"
    checkpoint = house.store.newest()
    statements = Statements(RUN.peer_id, RUN)
    entries = entries_of(checkpoint.entries, checkpoint.round_number, statements)
    await giver._look(membership, house.offered(reached=lambda: (0, 0)))
    assert membership.holds[2] == names_of(checkpoint.optimizer_step, entries) != frozenset()


@with_house
async def test_no_checkpoint_is_made_of_states_that_no_stage_has_committed(house):
    checkpoint = await house.save()
    names = names_in(house, house.giver())
    states = [checkpoint.load_stage(stage) for stage in (0, 1)]
    await names.check(0, states[0])
    await names.check_together(states)
    later = (await house.save(after=checkpoint.optimizer_step)).load_stage(1)
    with pytest.raises(InvalidMessage, match="do not fit together"):
        await names.check_together([states[0], later])
    made_up = load_named(checkpoint, 0, None, Statements(RUN.peer_id, RUN)).state
    with pytest.raises(InvalidMessage, match="which this peer does not know"):
        await names.check(0, made_up)
    with pytest.raises(InvalidMessage, match="not what the entry"):
        await names.check(0, states[1])


@with_house
async def test_a_live_run_is_exported_from_the_last_snapshots_that_peers_keep(house):
    checkpoint = await house.save()
    step, view = checkpoint.optimizer_step, view_of(house)
    transport = house.some.network.transport("anybody")

    async def refresh(stages):
        return view

    directory, resolved = SimpleNamespace(refresh=refresh), house.hall.resolved
    receiver = StateReceiver(resolved, SystemThreads())
    with pytest.raises(SwarmError, match="the run has made 0 optimizer steps"):
        await fetch_snapshots(transport, directory, resolved, receiver)
    for reached in (step + 1, step + EVERY):  # where the newest one is not stored yet
        view = view_of(house, reached)
        states = await fetch_snapshots(transport, directory, resolved, receiver, Random(0))
        assert {state.optimizer_step for state in states} <= {step, step + EVERY}
        assert len({state.round_number for state in states}) == 1

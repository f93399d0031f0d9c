"""Snapshots by the entries that name them: a run goes on from them, and nobody can give another state for one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch
from agreed_stages import Hall, has_come_to, is_member, quick_stages, resolved_of, two_of_each
from agreeing import swarm, until
from contexts import make_context

from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.protocol.log import Close, Committed, Cut, Entry
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.state import snapshots
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.state.roots import root_of
from swarm_peer.runtime.state.snapshots import SnapshotTaker, holdings, named
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import StateChunkCall, StateIndexCall

EVERY = 4
SEAT = Seat("a", 1, "")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_stages(monkeypatch)
    monkeypatch.setattr(snapshots, "GUARD_PAUSE_S", 0.02)


def hall_in(folder, **averaging):
    # States are compared for nothing but their snapshots.
    sections = {"recovery": {"snapshot_every": EVERY}, "averaging": {"compare_weights_every": 0} | averaging}
    return Hall(resolved_of("sgd", **sections), folder)


def steps_held(rig, stage):
    return {name.optimizer_step for name in rig.snapshots.names if name.stage == stage}


def guards(rig, _=None):
    """Whether a peer of stage 0 holds snapshots of both stages of one step."""
    return bool(steps_held(rig, 0) & steps_held(rig, 1))


async def come_back(some, hall, lost, survivors):
    """The peers of stage 1 are gone, and another one begins it again with a snapshot."""
    for peer in lost:
        some.kill(peer)
        del hall.rigs[peer.identity.peer_id]
    newcomer = some.add(Identity.generate(), 1)
    everybody = [*survivors, newcomer]
    await until(everybody, lambda peer: peer.core.epoch.restart != BEGINNING, 60)
    restart = newcomer.core.epoch.restart
    assert len(restart.entries) == 2
    assert restart.optimizer_step % EVERY == 0
    await until([newcomer], lambda peer: hall.rigs[peer.identity.peer_id].snapshots.find(1, restart.entries[1]), 60)
    await until(survivors, partial(has_come_to, 0, restart.first_round + 3), 60)
    await until([newcomer], partial(has_come_to, 1, restart.first_round + 3), 60)
    return restart


def test_a_stage_that_loses_all_its_peers_goes_on_from_copies_of_the_stage_before(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            survivors = [first[0], more[0]]
            await until(survivors[:1], lambda peer: guards(hall.rigs[peer.identity.peer_id]), 60)
            # One of the survivors holds nothing, and takes its own stage's snapshot from the other.
            forgetful = hall.rigs[more[0].identity.peer_id].snapshots
            for name in forgetful.names:
                forgetful.forget(name)
            restart = await come_back(some, hall, [first[1], more[1]], survivors)
            await hall.check(restart.optimizer_step + 3)
            assert sum(len(cut.seats) == 2 for cut in hall.history()[restart.optimizer_step :]) > 0

    anyio.run(run)


@pytest.mark.parametrize(
    "averaging",
    [
        {"mode": "delayed", "eager_updates": False},
        {"mode": "delayed"},
        {"mode": "periodic", "inner_steps": EVERY},
    ],
    ids=["delayed", "eager", "periodic"],
)
def test_a_run_goes_back_in_each_mode_of_averaging(tmp_path, averaging):
    async def run():
        hall = hall_in(tmp_path, **averaging)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            survivors = [first[0], more[0]]
            await until(survivors[:1], lambda peer: guards(hall.rigs[peer.identity.peer_id]), 60)
            restart = await come_back(some, hall, [first[1], more[1]], survivors)
            last = restart.first_round + 2 * EVERY
            for stage, peers in ((0, survivors), (1, [rig.peer for rig in hall.rigs.values() if rig.stage == 1])):
                await until(peers, partial(has_come_to, stage, last), 60)
            await hall.check_replicas(restart.optimizer_step + 1, averaging.get("inner_steps", 1))

    anyio.run(run)


def test_a_run_goes_back_twice(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            peers = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(peers[:1], lambda peer: peer.identity.peer_id in hall.rigs)
            guard = hall.rigs[peers[0].identity.peer_id]
            await until(peers[:1], lambda peer: guards(guard), 60)
            first = await come_back(some, hall, peers[1:], peers[:1])
            newcomer = next(rig.peer for rig in hall.rigs.values() if rig.stage == 1)
            assert all(
                name.optimizer_step <= first.optimizer_step or kept.round >= first.first_round
                for name, kept in guard.snapshots._kept.items()
                if name in guard.snapshots.names
            )
            # Perhaps before another snapshot is due: the state of the restart has another name at both stages by now.
            some.kill(newcomer)
            del hall.rigs[newcomer.identity.peer_id]
            last = some.add(Identity.generate(), 1)
            await until([peers[0], last], lambda peer: peer.core.epoch.restart.first_round > first.first_round, 60)
            restart = last.core.epoch.restart
            assert restart.optimizer_step >= first.optimizer_step
            await until([last], partial(has_come_to, 1, restart.first_round + 2), 60)

    anyio.run(run)


def test_a_run_begins_with_other_snapshots_where_nobody_gives_those_that_were_offered(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "PATIENCE_S", 0.3)

    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            peers = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(peers[:1], lambda peer: peer.identity.peer_id in hall.rigs)
            guard = hall.rigs[peers[0].identity.peer_id]
            await until(peers[:1], lambda peer: len(steps_held(guard, 0) & steps_held(guard, 1)) == 2, 60)
            some.kill(peers[1])
            del hall.rigs[peers[1].identity.peer_id]
            await until(peers[:1], lambda peer: not peer.core.epoch.roster(1))
            offered = guard.snapshots.names
            newest = max(offered)
            # Its file is damaged, which nobody knows before it is asked for.
            [file] = [path for path in guard.folder.iterdir() if newest.entry in path.name]
            file.write_bytes(bytes(file.stat().st_size))
            newcomer = some.add(Identity.generate(), 1)
            await until([newcomer], lambda peer: peer.core.epoch.restart.entries)
            first = newcomer.core.epoch.restart
            assert newest.entry in first.entries
            await until([newcomer], lambda peer: peer.core.epoch.restart != first, 60)
            restart = newcomer.core.epoch.restart
            older = {name.entry for name in offered if name.optimizer_step < newest.optimizer_step}
            assert set(restart.entries) == older
            await until(peers[:1], partial(has_come_to, 0, restart.first_round + 2), 60)
            await until([newcomer], partial(has_come_to, 1, restart.first_round + 2), 60)
            await hall.check(restart.optimizer_step + 2)

    anyio.run(run)


async def taken_at(some, hall, stage):
    """A peer of a stage with a snapshot of it, and the named state."""
    peers = [some.add(Identity.generate(), stage) for stage in (0, 1)]
    await until(peers, lambda peer: peer.identity.peer_id in hall.rigs)
    rig = hall.rigs[peers[stage].identity.peer_id]
    await until([peers[stage]], lambda peer: steps_held(rig, stage), 60)
    name = min(each for each in rig.snapshots.names if each.stage == stage)
    state = await rig.snapshots.load(name)
    return rig, NamedState(rig.peer.agreement.statements.decode(Committed, state.entry), state)


class Giver:
    """A peer that gives whatever it is told to, under any name."""

    def __init__(self, some, folder, restart):
        self.identity = Identity.generate()
        context = make_context(some.resolved, identity=self.identity, folder=folder / self.identity.peer_id)
        self.transport = some.network.transport(self.identity.peer_id)
        self.snapshots = NamedSnapshots(
            clock=context.clock,
            threads=context.threads,
            storage=context.storage,
            is_member=is_member,
            restart=lambda: restart,
        )

    async def give(self, snapshot):
        await self.snapshots.keep(snapshot)
        await self.transport.serve(CallDispatcher(manifest_hash=self.manifest, calls=self.snapshots.calls))


async def giver_of(some, tmp_path, snapshot):
    giver = Giver(some, tmp_path, BEGINNING)
    giver.manifest = some.resolved.hash
    await giver.give(snapshot)
    return giver.identity.peer_id


def taker_of(some, rig, tmp_path, holders):
    """A taker that has the epochs of a rig's peer, and no snapshots of its own."""
    snapshots = NamedSnapshots(
        clock=rig.peer.context.clock,
        threads=rig.peer.context.threads,
        storage=FolderStorage(tmp_path / "taker"),
        is_member=is_member,
        restart=lambda: BEGINNING,
    )
    return SnapshotTaker(
        context=rig.peer.context,
        threads=rig.peer.context.threads,
        transport=rig.peer.transport,
        agreement=rig.peer.agreement,
        snapshots=snapshots,
        holders=lambda: holders,
    )


def with_tensors(state):
    tensors = {name: value.clone() for name, value in state.tensors.items()}
    next(iter(tensors.values())).view(-1)[0] += 1
    return replace(state, tensors=tensors)


LIES = {
    "other weights": with_tensors,
    "the same bytes in other shapes": lambda state: replace(
        state, tensors={name: value.reshape(-1) for name, value in state.tensors.items()}
    ),
    "another ledger": lambda state: replace(state, ledger=b""),
    "no entry": lambda state: replace(state, entry=b""),
    "bytes for an entry": lambda state: replace(state, entry=b"\xc1" * 20),
    "another parent": lambda state: replace(state, history_hash="h" * 32),
    "another round": lambda state: replace(
        state, round_number=state.round_number + 1, timeline=Timeline(1, 0, created_at_round=1)
    ),
    "another step": lambda state: replace(
        state, timeline=Timeline(state.timeline.first_round, state.timeline.first_optimizer_step + EVERY, 0)
    ),
}


def test_nobody_gives_another_state_under_a_name(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 0)
            name = honest.name
            taken = []

            async def take(found):
                taken.append(found)

            for lie in LIES.values():
                liar = await giver_of(some, tmp_path, FalseName(honest.committed, lie(honest.state), name))
                with pytest.raises(CallError, match="no donor gave"):
                    await taker_of(some, rig, tmp_path, [liar]).take(0, name.entry, name.optimizer_step, take)
                assert taken == []
                both = [liar, await giver_of(some, tmp_path, honest)]
                await taker_of(some, rig, tmp_path, both).take(0, name.entry, name.optimizer_step, take)
                assert taken.pop().name == name

    anyio.run(run)


def test_nobody_makes_an_entry_up_for_other_weights(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 1)
            name, other = honest.name, with_tensors(honest.state)
            liars = []

            async def refuse(committed, state, step=name.optimizer_step):
                made_up = named(rig.peer.agreement, state, committed)
                liar = await giver_of(some, tmp_path, FalseName(committed, made_up.state, name))
                liars.append(liar)
                with pytest.raises(CallError, match="no donor gave") as refused:
                    await taker_of(some, rig, tmp_path, [liar]).take(1, name.entry, step, nobody_takes)
                return str(refused.value)

            # Of an epoch that nobody knows, so its certificate says nothing.
            entry = honest.committed.entry
            cut = replace(entry.cut, root=root_of(other.tensors, b""), epoch=EpochId(9, SEAT, 0))
            assert "a snapshot of the name" in await refuse(Committed(Entry(cut, ""), (), Close(cut.round, ())), other)
            assert not some.network.num_calls("state_chunk", liars[0]), "its index has said so"
            # The voters were told that it is of another step.
            earlier = replace(honest.state, timeline=Timeline(1, 0, created_at_round=1))
            assert "not committed at" in await refuse(honest.committed, earlier, earlier.optimizer_step)

    anyio.run(run)


async def nobody_takes(found):
    pytest.fail("it is none")


class FalseName(NamedState):
    """A state under another one's name."""

    def __init__(self, committed, state, name):
        super().__init__(committed, state)
        object.__setattr__(self, "given", name)

    @property
    def name(self):
        return self.given


def test_a_copy_needs_a_certificate_of_a_known_epoch(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 1)
            part, step, entry = rig.peer.agreement, honest.name.optimizer_step, honest.committed.entry

            async def copy(snapshot, like=None):
                giver = await giver_of(some, tmp_path, snapshot)
                return await taker_of(some, rig, tmp_path, [giver]).copy(1, step, [giver], like=like)

            assert (await copy(honest)).name == honest.name
            assert (await copy(honest, honest.committed)).name == honest.name
            unsigned = named(part, honest.state, honest.committed._replace(agreement=()))
            with pytest.raises(CallError, match="not committed at optimizer step"):
                await copy(unsigned)
            elsewhere = Entry(replace(entry.cut, epoch=EpochId(9, entry.cut.epoch.author, 0)), entry.digest)
            with pytest.raises(CallError, match="does not know"):
                await copy(named(part, honest.state, honest.committed._replace(entry=elsewhere)))
            other = Entry(replace(entry.cut, base=("other", "heads")), entry.digest)
            with pytest.raises(CallError, match="another part of the run"):
                await copy(honest, honest.committed._replace(entry=other))

    anyio.run(run)


def test_a_damaged_file_is_not_given_and_is_forgotten(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 1)
            name, manifest = honest.name, some.resolved.hash
            store = rig.snapshots
            call = StateIndexCall(manifest=manifest, of_stage=1, entry=name.entry)
            await store.handle_index("anybody", call, ())
            kept = store._kept[name].stored
            [file] = [path for path in rig.folder.iterdir() if name.entry in path.name]
            file.write_bytes(bytes(file.stat().st_size))
            with pytest.raises(NotServing, match="its file has changed"):
                await store.handle_chunk(
                    "anybody", StateChunkCall(manifest=manifest, index=kept.key, entry=0, chunk=0), ()
                )
            assert name not in store.names
            with pytest.raises(NotServing, match="no snapshot"):
                await store.handle_index("anybody", call, ())
            await store.keep(honest)
            [file] = [path for path in rig.folder.iterdir() if name.entry in path.name]
            file.write_bytes(bytes(file.stat().st_size))
            assert await store.load(name) is None
            assert name not in store.names

    anyio.run(run)


def test_a_state_of_other_weights_than_its_stage_mates_becomes_no_snapshot(tmp_path, caplog):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 1)
            rig.snapshots.forget(honest.name)
            rig.keeper.take(honest.state, "another root")
            await until([rig.peer], lambda _: "its stage-mates have other weights" in caplog.text)
            assert honest.name not in rig.snapshots.names
            rig.keeper.take(replace(honest.state, history_hash="of another log"), honest.committed.entry.cut.root)
            await until([rig.peer], lambda _: "the stage went on from others" in caplog.text)
            rig.keeper.take(replace(honest.state, round_number=honest.state.round_number + 1), "")
            assert rig.keeper._copied is None, "none is due of that step"
            assert rig.keeper.complaint() is None

    anyio.run(run)


class FullDisk(FolderStorage):
    """It has no room until the test says so."""

    has_room = False

    def write(self, name, parts):
        if not FullDisk.has_room:
            raise OSError("no space left on device")
        super().write(name, parts)


def test_a_peer_without_room_for_snapshots_says_so_and_trains_on(tmp_path, monkeypatch):
    monkeypatch.setattr(FullDisk, "has_room", False)

    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            peers = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(peers, lambda peer: peer.identity.peer_id in hall.rigs)
            rig = hall.rigs[peers[1].identity.peer_id]
            rig.snapshots._storage = FullDisk(rig.folder)
            await until(peers[1:], lambda _: rig.keeper.complaint() is not None, 60)
            complaint = rig.keeper.complaint()
            assert complaint.trouble is Trouble.NO_SNAPSHOTS
            assert "make room in the temporary folder" in complaint.words
            assert rig.snapshots.names == frozenset()
            FullDisk.has_room = True
            await until(peers[1:], lambda _: rig.keeper.complaint() is None and rig.snapshots.names, 60)

    anyio.run(run)


def test_a_seat_offers_its_snapshots_and_the_round_that_it_has_come_to(tmp_path):
    async def run():
        hall = hall_in(tmp_path)
        async with swarm(hall.work, hall.resolved) as some:
            rig, honest = await taken_at(some, hall, 1)
            part, membership = rig.peer.agreement, rig.peer.core.membership
            await until([rig.peer], lambda _: honest.name in membership.holds[2])
            at_work = rig.peer.log(1).next_round
            round_, step, names = holdings(part, rig.snapshots, 1)
            assert round_ == at_work + 1, "a round may be open beyond the next"
            assert (step, names) == (at_work, rig.snapshots.names)
            # A coordinator has no log: its snapshots say how far the run has come at least.
            coordinator = some.coordinator.agreement
            assert coordinator.core.membership.holds == (0, 0, frozenset())
            newest = max(rig.snapshots.names)
            told = holdings(coordinator, rig.snapshots, 0)
            assert told == (newest.optimizer_step, newest.optimizer_step, rig.snapshots.names)

    anyio.run(run)


# --- which are kept


def made(stage, step, *, restart=BEGINNING, heads="heads"):
    """A snapshot of a step, named by an entry that nobody has signed."""
    number = restart.first_round + step - restart.optimizer_step
    cut = Cut(
        stage=stage,
        round=number,
        epoch=EpochId(1, SEAT, 0),
        attempt=0,
        parent="parent",
        root="root",
        base=(heads, str(number)),
        averages=True,
        parts=(),
    )
    timeline = Timeline(restart.first_round, restart.optimizer_step, created_at_round=restart.first_round)
    state = StageState(number, "parent", {"weights": torch.full((2,), float(step))}, timeline)
    return NamedState(Committed(Entry(cut, ""), (), Close(number, ())), state)


class Store(NamedSnapshots):
    """A store of one peer, with its files."""

    def __init__(self, folder):
        context = make_context(resolved_of("sgd"), folder=folder)
        self.began, self.folder = BEGINNING, folder
        super().__init__(
            clock=context.clock,
            threads=context.threads,
            storage=context.storage,
            is_member=is_member,
            restart=lambda: self.began,
        )

    async def keep_all(self, *snapshots):
        for snapshot in snapshots:
            await self.keep(snapshot)
        assert len(list(self.folder.iterdir())) == len(self._kept)
        return {(name.stage, name.optimizer_step) for name in self.names}


async def test_the_newest_of_each_stage_are_kept_and_with_each_copy_its_own(tmp_path):
    store = Store(tmp_path)
    store.sources[0] = None
    assert await store.keep_all(made(0, 4), made(1, 4), made(0, 8), made(0, 12)) == {(0, 4), (1, 4), (0, 8), (0, 12)}
    assert await store.keep_all(made(1, 8), made(1, 12)) == {(0, 8), (1, 8), (0, 12), (1, 12)}
    del store.sources[0]
    store.sources[2] = None
    kept = {(0, 8), (1, 8), (0, 12), (1, 12), (2, 16)}
    assert await store.keep_all(made(2, 16)) == kept, "they may be the only ones of stages that it has left"
    assert await store.keep_all(made(2, 20)) == {(2, 16), (2, 20)}


async def test_a_store_without_replicas_keeps_all_stages(tmp_path):
    store = Store(tmp_path)
    snapshots = [made(stage, step) for step in (4, 8, 12) for stage in (0, 1, 2)]
    assert await store.keep_all(*snapshots) == {(stage, step) for step in (8, 12) for stage in (0, 1, 2)}


async def test_what_the_run_has_gone_back_from_is_kept_no_more(tmp_path):
    store, copied = Store(tmp_path), [made(stage, step) for step in (4, 8) for stage in (0, 1)]
    await store.keep_all(*copied)
    store.began = Restart(11, 4, tuple(each.name.entry for each in copied[:2]))
    assert {name.optimizer_step for name in store.names} == {4}
    with pytest.raises(NotServing):
        await store.handle_index("anybody", StateIndexCall(manifest="m" * 32, of_stage=0, optimizer_step=8), ())
    assert store.find(0, copied[2].name.entry) is None
    again = made(0, 4, restart=store.began)
    assert await store.keep_all(again) == {(0, 4), (1, 4)}
    assert {name.entry for name in store.names} == {again.name.entry, *(each.name.entry for each in copied[:2])}
    index = StateIndexCall(manifest="m" * 32, of_stage=0, optimizer_step=4, min_round=5)
    assert (await store.handle_index("anybody", index, ())).tensors[0] == store._kept[again.name].stored.packed
    assert store.newest_round == 11
    assert await store.keep_all(made(0, 8)) == {(0, 4), (1, 4)}, "it came too late"


async def test_the_newest_state_is_for_members_and_snapshots_for_everybody(tmp_path):
    store, snapshot = Store(tmp_path), made(1, 4)
    await store.keep(snapshot)

    async def is_nobody(peer_id):
        return False

    store._is_member = is_nobody
    call = StateIndexCall(manifest="m" * 32, of_stage=1)
    with pytest.raises(NotServing, match="snapshots are for everybody"):
        await store.handle_index("a stranger", call, ())
    named_so = call.model_copy(update={"entry": snapshot.name.entry})
    reply = await store.handle_index("a stranger", named_so, ())
    assert bytes(reply.tensors[0]) == store._kept[snapshot.name].stored.packed
    with pytest.raises(NotServing, match="no snapshot"):
        await store.handle_index("a stranger", named_so.model_copy(update={"of_stage": 0}), ())
    store._is_member = is_member
    with pytest.raises(NotServing, match="serves stages"):
        await store.handle_index("a member", call, ())
    key = store._kept[snapshot.name].stored.key
    with pytest.raises(InvalidMessage, match="chunk 1 of tensor 0"):
        await store.handle_chunk("a", StateChunkCall(manifest="m" * 32, index=key, entry=0, chunk=1), ())

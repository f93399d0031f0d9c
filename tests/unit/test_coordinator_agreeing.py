"""A coordinator begins its run's epochs, goes on with those that are there, and finds them again."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from agreeing import HASH, RUN, quickly
from contexts import FixedRandom, make_context, unparsed
from memory_transport import MemoryNetwork

from coordinator.run import agreeing
from coordinator.run.agreeing import EPOCHS, Agreeing, EpochsFile, KeyContext, Start
from swarm_peer.errors import CallError, UserError
from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Restart
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network.agreement import Agreement, find_epochs
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity

RESOLVED = unparsed(HASH)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(agreeing, "LOOK_S", 0.05)


@dataclass
class SetClock:
    """A clock that somebody has set wrong; its seconds pass all the same."""

    now: float | None

    def monotonic_s(self):
        return time.monotonic()

    def unix_s(self):
        return time.time() if self.now is None else self.now


def context_of(identity=None, now=None, run_key=RUN):
    return KeyContext(
        resolved=RESOLVED,
        identity=identity or Identity.generate(),
        run_key=run_key,
        clock=SetClock(now),
        random=FixedRandom(),
        threads=SystemThreads(),
        changed=Condition(),
    )


@dataclass(eq=False)
class Town:
    """Coordinators and peers of one run.

    Attributes:
        others: ids that each coordinator finds
        is_cut_off: nobody finds any
    """

    network: MemoryNetwork
    tasks: anyio.abc.TaskGroup
    others: set[str]
    is_cut_off: bool = False
    scopes: dict[str, anyio.CancelScope] = field(default_factory=dict)

    async def find(self):
        if self.is_cut_off:
            raise CallError("no answer")
        return self.others

    async def open(self, context, folder, start=None):
        folder.mkdir(exist_ok=True)
        transport = self.network.transport(context.identity.peer_id)
        part = await Agreeing.open(
            context=context, transport=transport, output=folder, find_others=self.find, start=start or Start()
        )
        await self._serve(context.identity, transport, part.agreement.calls, part.run)
        return part

    async def peer(self, *stages, identity=None, life=1):
        """A peer that has heard of the run by coordinators, and wants places."""
        identity = identity or Identity.generate()
        context = make_context(RESOLVED, identity=identity, run_id=RUN.peer_id)
        transport = self.network.transport(identity.peer_id)
        statements = Statements(RUN.peer_id, identity)
        chain = await find_epochs(transport, statements, HASH, self.others, 5.0)
        part = Agreement(context=context, transport=transport, life=life, first=chain)
        part.core.membership.desired = frozenset(stages)
        await self._serve(identity, transport, part.calls, part.run)
        return part

    async def _serve(self, identity, transport, calls, run):
        dispatcher = CallDispatcher(manifest_hash=HASH, calls=calls)
        await transport.serve(dispatcher)
        self.others |= {identity.peer_id}
        self.scopes[identity.peer_id] = scope = anyio.CancelScope()

        async def live():
            with scope:
                await run()

        self.tasks.start_soon(live)

    def kill(self, identity):
        self.network.kill(identity.peer_id)
        self.scopes[identity.peer_id].cancel()


@asynccontextmanager
async def town():
    async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
        yield Town(network, tasks, set())
        tasks.cancel_scope.cancel()


async def until(part, condition, seconds=20):
    changed = part.agreement.changed if isinstance(part, Agreeing) else part.changed
    with anyio.fail_after(seconds):
        await changed.wait_for(condition)


async def test_a_coordinator_begins_a_run_and_peers_join_it(tmp_path):
    async with town() as some:
        context = context_of(now=1000.5)
        part = await some.open(context, tmp_path)
        first = part.membership.epoch
        assert (first.id.term, first.id.number, first.id.author.life) == (1000, 0, 1000500)
        assert (first.roster(COORDINATORS), first.restart) == ((first.id.author,), BEGINNING)


async def test_peers_join_and_their_epochs_are_written_down(tmp_path):
    async with town() as some:
        context = context_of()
        part = await some.open(context, tmp_path)
        assert EpochsFile(tmp_path, RUN.peer_id).read().newest == part.membership.epoch, (
            "before anybody has heard of it"
        )
        peer = await some.peer(0)
        await until(peer, lambda: 0 in peer.core.membership.stages)
        await until(part, lambda: part.membership.epoch.begun == (0,))
        await written(tmp_path, lambda kept: kept.newest.begun == (0,))
        assert EpochsFile(tmp_path, RUN.peer_id).is_of_begun_run


async def test_a_second_coordinator_takes_part_in_the_epochs_that_are_there(tmp_path):
    async with town() as some:
        first = await some.open(context_of(), tmp_path / "a")
        second = await some.open(context_of(), tmp_path / "b", Start(is_under_way=True))
        await until(second, lambda: COORDINATORS in second.membership.stages)
        await until(first, lambda: len(first.membership.epoch.roster(COORDINATORS)) == 2)
        assert second.membership.epoch.id.author == first.membership.me


async def test_where_a_run_is_under_way_no_coordinator_begins_another(tmp_path, caplog):
    async with town() as some:
        with anyio.move_on_after(0.3) as scope:
            await some.open(context_of(), tmp_path, Start(is_under_way=True))
        assert scope.cancelled_caught
        assert not (tmp_path / EPOCHS).exists()
        assert caplog.text.count("epochs_not_told") == 1


async def test_a_coordinator_that_sees_nothing_does_not_begin_a_run(tmp_path):
    async with town() as some:
        some.is_cut_off = True
        with anyio.move_on_after(0.3) as scope:
            await some.open(context_of(), tmp_path)
        assert scope.cancelled_caught


async def test_a_coordinator_that_is_started_again_goes_on_with_its_peers(tmp_path):
    async with town() as some:
        context = context_of()
        part = await some.open(context, tmp_path)
        peers = [await some.peer(0), await some.peer(1)]
        await until(part, lambda: part.membership.epoch.begun == (0, 1))
        for stage, peer in enumerate(peers):
            await until(peer, lambda peer=peer, stage=stage: stage in peer.core.membership.stages)
        term, old = part.membership.epoch.id.term, part.membership.me
        some.kill(context.identity)
        again = await some.open(context_of(context.identity), tmp_path, Start(True, True))
        await until(again, lambda: again.membership.stages == {COORDINATORS})
        assert again.membership.me.life > old.life
        assert again.membership.epoch.id.term == term, "the voters have let it in"
        assert set(again.membership.epoch.seats) == {again.membership.me, *(peer.core.membership.me for peer in peers)}


async def test_a_coordinator_that_is_started_again_goes_on_alone(tmp_path):
    """Its peers are away for now, and the network with them."""
    async with town() as some:
        context = context_of()
        part = await some.open(context, tmp_path)
        await until(await some.peer(0), lambda: part.membership.epoch.begun == (0,))
        await written(tmp_path, lambda kept: kept.newest.begun == (0,))
        epoch = part.membership.epoch
    async with town() as some:
        part = await some.open(context_of(context.identity), tmp_path, Start(True, True))
        assert part.membership.epoch == epoch
        assert part.membership.epoch.id.author.life < part.membership.me.life


@pytest.mark.parametrize("has_left", [False, True])
async def test_of_a_coordinator_that_was_alone_the_next_life_takes_the_place(tmp_path, has_left):
    async with town() as some:
        context = context_of(now=1000.0)
        part = await some.open(context, tmp_path)
        if has_left:
            peer = await some.peer(0)
            await until(part, lambda: part.membership.epoch.begun == (0,))
            peer.core.membership.desired = frozenset()
            await until(part, lambda: len(part.membership.epoch.seats) == 1)
            await written(tmp_path, lambda kept: len(kept.newest.seats) == 1)
    async with town() as some:
        part = await some.open(context_of(context.identity, now=900.0), tmp_path, Start(True, has_left))
        epoch = part.membership.epoch
        assert (epoch.id.term, epoch.id.number, part.membership.stages) == (1001, 0, {COORDINATORS})
        assert epoch.begun == ((0,) if has_left else ())
        assert part.membership.me.life == 1000 * 1000 + 1, "later, whatever the clock says"


async def test_a_note_of_before_any_peer_had_come_is_of_no_use_to_a_run_that_has_trained(tmp_path):
    async with town() as some:
        context = context_of()
        await some.open(context, tmp_path)
        some.kill(context.identity)
        with anyio.move_on_after(0.3) as scope:
            await some.open(context_of(context.identity), tmp_path, Start(True, True))
        assert scope.cancelled_caught


async def test_a_run_that_is_resumed_begins_a_later_term(tmp_path):
    async with town() as some:
        context = context_of(now=1000.0)
        part = await some.open(context, tmp_path / "a")
        peer = await some.peer(0)
        await until(part, lambda: part.membership.epoch.begun == (0,))
        restart = Restart(30, 20, ("a", "b"))
        resumed = await some.open(context_of(now=900.0), tmp_path / "b", Start(resume=restart))
        epoch = resumed.membership.epoch
        assert (epoch.id.term, epoch.begun, resumed.begun_s) == (1001, (), 1001)
        assert epoch.restart == restart._replace(epoch=epoch.id)
        await until(peer, lambda: peer.core.epoch.restart[:3] == restart[:3] and 0 in peer.core.membership.stages)
        await until(part, lambda: part.beginning[:3] == restart[:3])
        await written(tmp_path / "a", lambda kept: kept.beginning[:3] == restart[:3])
        again = await some.open(context_of(now=900.0), tmp_path / "c", Start(resume=restart))
        assert again.membership.epoch.restart[:3] == (31, 20, ("a", "b")), "above all rounds that are known"


async def test_who_is_told_a_later_beginning_believes_it(tmp_path):
    async with town() as some:
        context = context_of(now=1000.0)
        await some.open(context, tmp_path / "a")
        some.kill(context.identity)
        await some.open(context_of(), tmp_path / "b", Start(resume=Restart(30, 20)))
        part = await some.open(context, tmp_path / "a", Start(True))
        assert part.beginning[:3] == (30, 20, ())


async def written(folder, condition):
    file = EpochsFile(folder, RUN.peer_id)
    with anyio.fail_after(10):
        while not condition(file.read()):  # noqa: ASYNC110 (nobody tells when a file has changed)
            await anyio.sleep(0.01)


async def test_a_damaged_note_and_that_of_another_run_are_none(tmp_path):
    async with town() as some:
        await some.open(context_of(), tmp_path)
    path = tmp_path / EPOCHS
    assert EpochsFile(tmp_path, RUN.peer_id).read() is not None
    assert EpochsFile(tmp_path, Identity.generate().peer_id).read() is None
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:-1] + bytes([data[-1] ^ 1]), bytes(len(data)), data * 100_000):
        path.write_bytes(damaged)
        assert EpochsFile(tmp_path, RUN.peer_id).read() is None
    statements = Statements(RUN.peer_id, RUN)
    path.write_bytes(statements.encode((BEGINNING, ())))
    assert EpochsFile(tmp_path, RUN.peer_id).read() is None
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="the epochs of the run"):
        EpochsFile(tmp_path, RUN.peer_id).read()


async def test_a_disk_that_is_full_ends_nothing(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError("disk full")

    monkeypatch.setattr(agreeing, "replace_file", full)
    async with town() as some:
        await some.open(context_of(), tmp_path)
    assert "epochs_not_kept reason=disk full" in caplog.text

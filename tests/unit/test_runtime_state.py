import asyncio
import dataclasses
import gc
import hashlib
import random
import threading
import weakref
from types import MappingProxyType, SimpleNamespace

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch
from contexts import MovedClock, make_context, unparsed
from given_states import GivenStates
from memory_transport import MemoryNetwork

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NoRoom, NotServing, PeerUnreachable
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network.transport import Reply, check_body, pack_fields, unpack_fields
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority
from swarm_peer.runtime.state import index as state_index
from swarm_peer.runtime.state import named_snapshots as snapshots
from swarm_peer.runtime.state import state_server
from swarm_peer.runtime.state import transfer as state_transfer
from swarm_peer.runtime.state.state_server import (
    LEASE_S,
    MAX_ROUNDS_BEHIND,
    MAX_STATES_HELD,
    RETAIN_S,
)
from swarm_peer.runtime.state.stored import make_stored
from swarm_peer.runtime.state.transfer import CALL_TIMEOUT_S, CHUNKS_IN_FLIGHT, MAX_DONORS, Memory, fetch_state
from swarm_peer.wire.messages import (
    StateChunkCall,
    StateEntry,
    StateIndex,
    StateIndexCall,
)

HASH = "0123456789abcdef" * 2
STAGE = 1
CHUNK_BYTES = 16


class FakeTrainer:
    """As much of a StageTrainer as a donor needs."""

    def __init__(self, fill, optimizer_step, stage=STAGE):
        self.optimizer_step = optimizer_step
        self.fill = float(fill)
        self.spec = SimpleNamespace(index=stage)

    @property
    def weights_version(self):
        return self.optimizer_step

    def state(self):
        return {
            "weight": torch.full((5, 7), self.fill),
            "bias": torch.arange(3, dtype=torch.float32) + self.fill,
            "optimizer/step": torch.tensor(self.fill),
            "optimizer/quantized": torch.arange(50, dtype=torch.uint8),
            "half": torch.full((3, 3), self.fill, dtype=torch.float16),
            "empty": torch.zeros(0, 4),
        }


NUM_CHUNKS = sum(
    -(-tensor.numel() * tensor.element_size() // CHUNK_BYTES) for tensor in FakeTrainer(0, 0).state().values()
)


CLOCK = MovedClock()


class Donor:
    """A peer that gives states away; all with the same `fill` and round give the same one."""

    def __init__(self, network, folder, peer_id, fill=1.0, stage=STAGE, round_number=3, timeline=FIRST_TIMELINE):
        self.peer_id = peer_id
        self.stage = stage
        self.trainer = FakeTrainer(fill, timeline.optimizer_step_at(round_number), stage)
        self.folder = folder / peer_id
        context = self.context = make_context(unparsed(HASH), clock=CLOCK, folder=self.folder)
        self.changed = context.changed
        self.device_thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=context.metrics)
        self.donor = GivenStates(context, self.trainer, self.device_thread)
        self.transport = network.transport(peer_id)
        self.enter(round_number, timeline)

    @property
    def round_number(self):
        return self.donor.current.round_number

    def history_hash(self):
        return f"history_hash of {self.trainer.fill}"

    def enter(self, round_number, timeline):
        self.donor.enter(round_number, self.history_hash(), timeline, b"ledger")

    async def __call__(self, caller, op, body, tensors):
        for call, handle in self.donor.calls.items():
            if call.model_fields["op"].default == op:
                return await handle(caller, check_body(call, body), tensors)
        raise AssertionError(op)

    async def goes_on(self, fill):
        """End a round, as a peer does."""
        self.donor.kept[self.round_number] = f"history_hash of {float(fill)}", [torch.full((5, 7), float(fill))]
        self.trainer.optimizer_step += 1
        self.trainer.fill = float(fill)
        self.enter(self.round_number + 1, self.donor.current.timeline)


class World:
    def __init__(self, folder):
        self.folder = folder
        self.network = MemoryNetwork()
        self.donors = []

    async def donor(self, peer_id, **options):
        donor = Donor(self.network, self.folder, peer_id, **options)
        await donor.transport.serve(donor)
        self.donors.append(donor)
        return donor

    async def fetch(
        self,
        *donors,
        max_bytes=10_000,
        stage=STAGE,
        rng=None,
        optimizer_step=None,
        how=MappingProxyType({}),
        **wanted,
    ):
        """Donors are asked in this order."""
        call = StateIndexCall(manifest=HASH, of_stage=stage, **wanted)
        ids = [getattr(donor, "peer_id", donor) for donor in donors]
        me = self.network.transport("me")
        limits = {"max_bytes": max_bytes, "optimizer_step": optimizer_step}
        return await fetch_state(me, ids, call, **limits, rng=rng or InOrder(), **how)

    async def call(self, donor, body):
        return await self.network.transport("me").call(donor.peer_id, body, timeout_s=5.0)

    async def index_of(self, donor, **wanted):
        """The index's name and what it says."""
        reply = await self.call(donor, StateIndexCall(manifest=HASH, of_stage=STAGE, **wanted))
        packed = reply.tensors[0]
        return hashlib.sha256(packed).digest(), unpack_fields(StateIndex, packed)

    def chunks_from(self, donor):
        return self.network.num_calls("state_chunk", donor.peer_id)


class InOrder(random.Random):
    def shuffle(self, items):
        pass


@pytest.fixture
async def world(monkeypatch, tmp_path):
    # A state of many chunks, without many bytes.
    for module in (snapshots, state_index, state_transfer):
        monkeypatch.setattr(module, "STATE_CHUNK_BYTES", CHUNK_BYTES)
    world = World(tmp_path)
    async with world.network:
        yield world
    for donor in world.donors:
        donor.device_thread.stop()


@pytest.fixture
def clock():
    """Moves the donors' time on."""
    yield CLOCK
    CLOCK.passed_s = 0.0


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor), name


def assert_state_of(state, donor):
    """Whole, and all of it the same state."""
    assert_equal(state.tensors, donor.trainer.state())
    assert state.history_hash == donor.history_hash()
    assert (state.round_number, state.optimizer_step) == (donor.round_number, donor.trainer.optimizer_step)
    assert (state.timeline, state.ledger) == (donor.donor.current.timeline, b"ledger")


def changed_index(change):
    """A fault's `tamper` that changes the index of a state."""

    def tamper(reply):
        index = unpack_fields(StateIndex, reply.tensors[0])
        return Reply(reply.body, (memoryview(pack_fields(index.model_copy(update=change(index)))),))

    return tamper


def with_entry(number, **change):
    def change_entries(index):
        entries = list(index.entries)
        entries[number] = entries[number].model_copy(update=change)
        return {"entries": tuple(entries)}

    return change_entries


def chunks(number):
    return tuple(bytes([n % 256]) * 32 for n in range(number))


# --- downloads --------------------------------------------------------------------------------------------------------


async def test_a_state_comes_over_whole(world):
    donor = await world.donor("a", fill=2.5)
    assert_state_of(await world.fetch(donor), donor)
    assert world.network.num_calls("state_chunk") == NUM_CHUNKS > 10


async def test_the_timeline_of_a_rewound_run_comes_over(world):
    donor = await world.donor("a", round_number=20, timeline=Timeline(18, 5, 5))
    state = await world.fetch(donor)
    assert_state_of(state, donor)
    assert (state.round_number, state.optimizer_step) == (20, 7)


async def test_a_later_state_is_welcome(world):
    donor = await world.donor("a", round_number=7)
    assert (await world.fetch(donor, min_round=5)).round_number == 7


async def test_several_donors_each_give_some(world):
    donors = [await world.donor(name) for name in "abcd"]
    assert_state_of(await world.fetch(*donors), donors[0])
    shares = [world.chunks_from(donor) for donor in donors]
    assert sum(shares) == NUM_CHUNKS, "each chunk once"
    assert min(shares[:MAX_DONORS]) >= CHUNKS_IN_FLIGHT
    assert shares[MAX_DONORS:] == [0], "of those that were not asked"


async def test_which_donors_are_asked_is_up_to_chance(world):
    donors = [await world.donor(name) for name in "abcdef"]
    asked = set()
    for seed in range(8):
        world.network.calls.clear()
        await world.fetch(*donors, rng=random.Random(seed))
        asked.add(frozenset(callee for _, callee, op in world.network.calls if op == "state_index"))
    assert len(asked) > 1
    assert {len(some) for some in asked} == {MAX_DONORS}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"op": "state_index", "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "skip": 5, "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "skip": 6, "drop_reply": True}, "a: the stream broke"),
        ({"op": "state_chunk", "skip": 3, "fail": CallTimeout("stalled")}, "a: stalled"),
        ({"op": "state_index", "tamper": lambda reply: Reply()}, "a: the index is missing"),
        ({"op": "state_index", "tamper": lambda reply: Reply({}, (memoryview(b"\xc1"),))}, "StateIndex: no msgpack"),
        ({"op": "state_index", "tamper": lambda reply: Reply({}, (memoryview(b"\x80"),))}, "StateIndex: stage: miss"),
        ({"op": "state_index", "tamper": changed_index(lambda index: {"stage": 0})}, "state of stage 0 at round 3"),
        (
            {"op": "state_index", "tamper": changed_index(lambda index: {"kind": "update"})},
            "update of stage 1 at round",
        ),
        (
            {"op": "state_index", "tamper": changed_index(lambda index: {"round_number": 2})},
            "at round 2; wanted",
        ),
        (
            {"op": "state_index", "tamper": changed_index(lambda index: {"timeline_first_round": 4})},
            "at round 3; wanted",
        ),
        (
            {"op": "state_index", "tamper": changed_index(lambda index: {"timeline_first_optimizer_step": 1})},
            "at round 3; wanted",
        ),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, dtype="object"))}, "weight of type object"),
        (
            {"op": "state_index", "tamper": changed_index(with_entry(0, shape=(3_000, 1), chunks=chunks(750)))},
            "offered 12084 bytes, .* wanted at most 10000 bytes",
        ),
        (
            {"op": "state_index", "tamper": changed_index(with_entry(0, shape=(2**39,) * 8))},
            "weight of shape .549755813888, 549755813888",
        ),
        (
            {"op": "state_index", "tamper": changed_index(with_entry(0, shape=(2**20,)))},
            "weight of 4194304 bytes with hashes of 9 chunks",
        ),
        (
            {"op": "state_index", "tamper": changed_index(with_entry(5, shape=(2**39, 2**39, 0)))},
            "empty of shape .549755813888, 549755813888, 0",
        ),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, chunks=()))}, "weight of 140 .* of 0 chunks"),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, chunks=chunks(10)))}, "hashes of 10 chunks"),
        # What it offers fits, and it does not have it.
        ({"op": "state_index", "tamper": changed_index(with_entry(0, shape=(6, 6)))}, "not kept here any more"),
        ({"op": "state_index", "tamper": changed_index(with_entry(1, chunks=chunks(1)))}, "not kept here any more"),
        ({"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply()}, "a chunk of 16 bytes was asked for"),
        (
            {"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply({}, (reply.tensors[0][1:],))},
            "a chunk of 16 bytes was asked for",
        ),
        (
            {"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply({}, (memoryview(bytes(16)),))},
            "a chunk of weight does not match its hash",
        ),
    ],
)
async def test_when_a_donor_fails_another_one_gives_the_rest(world, monkeypatch, fault, reason):
    monkeypatch.setattr(state_transfer, "CHUNKS_IN_FLIGHT", 1)
    failing, good = await world.donor("a"), await world.donor("b")
    scripted = world.network.fault(to="a", **fault)
    assert_state_of(await world.fetch(failing, good, min_round=3), good)
    assert scripted.fired == 1
    # The same fault with nobody else to ask says what happened.
    again = world.network.fault(to="a", **fault)
    with pytest.raises(CallError, match=f"no donor gave the state of stage 1: .*{reason}"):
        await world.fetch(failing, min_round=3)
    assert again.fired == 1


async def test_a_donor_that_dies_half_way_is_left(world):
    dying, good = await world.donor("a"), await world.donor("b")
    fault = world.network.fault(op="state_chunk", to="a", skip=CHUNKS_IN_FLIGHT, before=anyio.Event(), times=100)
    others = world.network.fault(op="state_chunk", to="b", skip=1, before=anyio.Event(), times=100)
    fetching = asyncio.ensure_future(world.fetch(dying, good))
    await fault.struck.wait()
    await others.struck.wait()
    world.network.kill("a")
    fault.before.set()
    others.before.set()
    assert_state_of(await fetching, good)
    assert world.chunks_from(dying) <= 2 * CHUNKS_IN_FLIGHT, "no more after its death"
    assert world.chunks_from(good) >= NUM_CHUNKS - CHUNKS_IN_FLIGHT


async def test_a_donor_that_lies_in_the_middle_is_left(world):
    liar, good, other = [await world.donor(name) for name in "abc"]
    lie = world.network.fault(
        op="state_chunk", to="a", skip=3, times=100, tamper=lambda reply: Reply({}, (memoryview(bytes(16)),))
    )
    assert_state_of(await world.fetch(liar, good, other), good)
    assert lie.fired >= 1
    assert world.chunks_from(liar) <= 3 + CHUNKS_IN_FLIGHT


async def test_chunks_that_a_donor_owes_are_asked_of_others_that_had_finished(world):
    """The last chunk of all fails when nothing else is left to do."""
    slow, quick = await world.donor("a"), await world.donor("b")
    fault = world.network.fault(op="state_chunk", to="a", before=anyio.Event(), fail=PeerUnreachable("gone"))
    fetching = asyncio.ensure_future(world.fetch(slow, quick))
    await fault.struck.wait()
    while world.network.num_calls("state_chunk") < NUM_CHUNKS:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()
    before = world.chunks_from(quick)
    fault.before.set()
    assert_state_of(await fetching, quick)
    assert world.chunks_from(quick) == before + 1


async def test_more_donors_are_asked_when_the_first_ones_fail(world):
    for name in "abc":
        await world.donor(name)
        world.network.fault(op="state_index", to=name, fail=NotServing("no state"))
    good = await world.donor("d")
    assert_state_of(await world.fetch("a", "b", "c", "d"), good)


async def test_the_newest_state_is_taken_from_those_that_have_it(world):
    old, new, also_new = (
        await world.donor("a"),
        await world.donor("b", round_number=4, fill=2),
        await world.donor("c", round_number=4, fill=2),
    )
    assert_state_of(await world.fetch(old, new, also_new), new)
    assert world.chunks_from(old) == 0
    assert min(world.chunks_from(new), world.chunks_from(also_new)) > 0


async def test_of_states_of_one_round_the_one_of_more_donors_is_taken(world):
    """Some hold other weights than most."""
    odd, good, also_good = await world.donor("c", fill=9), await world.donor("a"), await world.donor("b")
    assert_state_of(await world.fetch(odd, good, also_good), good)
    assert world.chunks_from(odd) == 0


async def test_a_donor_that_claims_to_be_ahead_and_gives_nothing_is_left(world):
    liar, good = await world.donor("a", round_number=900, fill=7), await world.donor("b")
    world.network.fault(op="state_chunk", to="a", times=100, fail=PeerUnreachable("gone"))
    assert_state_of(await world.fetch(liar, good), good)
    assert 0 < world.chunks_from(liar) <= CHUNKS_IN_FLIGHT


async def test_the_size_that_is_refused_is_never_allocated(world, monkeypatch):
    donor = await world.donor("a")
    total = sum(tensor.numel() * tensor.element_size() for tensor in donor.trainer.state().values())
    await world.fetch(donor, max_bytes=total)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CallError, match=f"offered {total} bytes"):
        await world.fetch(donor, max_bytes=total - 1)


async def test_an_index_for_which_there_is_no_room_is_passed_over(world):
    """Who gives it may lie about the sizes."""
    a, b = await world.donor("a", fill=1, round_number=5), await world.donor("b", fill=2)

    class Room(Memory):
        is_full = True

        async def allocate(self, sizes):
            if self.is_full:
                self.is_full = False
                raise NoRoom("no room")
            return await super().allocate(sizes)

    assert_state_of(await world.fetch(a, b, how={"room": Room()}), b)
    with pytest.raises(NoRoom, match="no room"):
        await world.fetch(a, how={"room": Room()})


async def test_a_state_that_nobody_takes_leaves_no_memory_behind(world):
    """It may be as large as this machine's memory, and the next donor's comes right after it."""
    rooms = []

    async def all_gone():
        with anyio.fail_after(10.0):
            while any(room() is not None for room in rooms):  # noqa: ASYNC110 (a worker thread tells nobody)
                await anyio.sleep(0.001)  # it lets go just after it has given its result

    class Room(Memory):
        async def allocate(self, sizes):
            await all_gone()
            # A tensor's own weak reference would end with its wrapper, while views hold its memory.
            room = np.empty(sum(sizes), np.uint8)
            rooms.append(weakref.ref(room))
            return list(torch.split(torch.from_numpy(room), list(sizes)))

    def refuse(state):
        raise InvalidMessage("it does not fit")

    async def take(state):
        await SystemThreads().run(refuse, state)

    donors = [await world.donor(peer_id, fill=fill) for fill, peer_id in enumerate("abc")]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CallError, match="a: it does not fit; b: it does not fit; c: it does not fit"):
            await world.fetch(*donors, how={"take": take, "room": Room()})
        assert len(rooms) == 3
        await all_gone()
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(0,), (2**20, 0, 2**20), (0, *[2**5] * 7)])
async def test_tensors_without_elements_come_over(world, shape):
    donor = await world.donor("a")
    tensors = donor.trainer.state() | {"empty": torch.zeros(0).view(shape)}
    donor.trainer.state = lambda: tensors
    assert (await world.fetch(donor)).tensors["empty"].shape == shape


async def test_a_donor_whose_bytes_make_no_tensor_is_left(world, monkeypatch):
    monkeypatch.setattr(state_index, "MAX_ELEMENTS", 2**100)
    liar, good = await world.donor("a", round_number=4), await world.donor("b")
    name, index = await world.index_of(liar)
    offer = liar.donor.server.stored.pop(name)
    index = index.model_copy(update=with_entry(5, shape=(2**39, 2**39, 0))(index))
    packed = pack_fields(index)
    lie = dataclasses.replace(offer, index=index, packed=packed, key=hashlib.sha256(packed).digest())
    liar.donor.server._remember(lie)
    assert_state_of(await world.fetch(liar, good), good)
    with pytest.raises(CallError, match="no donor gave the state of stage 1: a: tensor empty of shape"):
        await world.fetch(liar)


async def test_no_donor_at_all_is_told(world):
    with pytest.raises(CallError, match="no donor gave the state of stage 1: there is none"):
        await world.fetch()
    with pytest.raises(CallError, match="no donor gave the update of stage 1: there is none"):
        await world.fetch(kind="update")


async def test_each_donor_is_named_with_its_reason(world):
    await world.donor("a", round_number=1)
    world.network.fault(op="state_index", to="a", fail=NotServing("no state"))
    with pytest.raises(CallError, match="a: no state; b: nobody is b"):
        await world.fetch("a", "b")


class Link:
    """One donor's chunks, which come one after the other, each when the test has them come."""

    def __init__(self, world, donor, monkeypatch):
        loop, self.passed_s = asyncio.get_running_loop(), 0.0
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.passed_s)
        self.chunks = [
            world.network.fault(op="state_chunk", to=donor, before=anyio.Event()) for _ in range(NUM_CHUNKS + 1)
        ]

    async def carry(self, number, seconds):
        """One chunk arrives after so long."""
        await self.chunks[number].struck.wait()
        await self.wait(seconds)
        self.chunks[number].before.set()
        await anyio.wait_all_tasks_blocked()

    async def wait(self, seconds):
        self.passed_s += seconds
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()


async def test_a_donor_behind_a_slow_link_has_as_long_for_each_chunk(world, monkeypatch):
    donor = await world.donor("a")
    link = Link(world, "a", monkeypatch)
    fetching = asyncio.ensure_future(world.fetch(donor))
    for number in range(NUM_CHUNKS):
        await link.carry(number, 0.9 * CALL_TIMEOUT_S)
    assert_state_of(await fetching, donor)
    assert world.chunks_from(donor) == NUM_CHUNKS


async def test_a_donor_that_sends_nothing_more_is_left(world, monkeypatch):
    donor = await world.donor("a")
    link = Link(world, "a", monkeypatch)
    fetching = asyncio.ensure_future(world.fetch(donor))
    for number in range(2):
        await link.carry(number, 0.9 * CALL_TIMEOUT_S)
    await link.wait(0.9 * CALL_TIMEOUT_S)
    assert not fetching.done()
    await link.wait(0.2 * CALL_TIMEOUT_S)
    with pytest.raises(CallError, match="a has sent nothing for 30 s"):
        await fetching


async def test_few_chunks_are_asked_for_at_once(world):
    donor, other = await world.donor("a"), await world.donor("b")
    delay = anyio.Event()
    world.network.fault(op="state_chunk", before=delay, times=1000)
    fetching = asyncio.ensure_future(world.fetch(donor, other))
    while world.network.num_calls("state_chunk") == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()
    assert world.chunks_from(donor) == world.chunks_from(other) == CHUNKS_IN_FLIGHT
    delay.set()
    assert_state_of(await fetching, donor)


# --- donors -----------------------------------------------------------------------------------------------------------


async def test_donors_of_the_same_state_make_the_same_index(world):
    a, b, c = await world.donor("a"), await world.donor("b"), await world.donor("c", fill=2)
    names = [(await world.index_of(donor))[0] for donor in (a, b, c)]
    assert names[0] == names[1] != names[2]


async def test_the_index_names_what_it_holds(world):
    donor = await world.donor("a", round_number=20, timeline=Timeline(18, 5, 5))
    _, index = await world.index_of(donor)
    data = donor.trainer.state()["weight"].numpy().tobytes()
    hashes = tuple(hashlib.sha256(data[start : start + CHUNK_BYTES]).digest() for start in range(0, 140, CHUNK_BYTES))
    assert index.entries[0] == StateEntry(name="weight", dtype="float32", shape=(5, 7), chunks=hashes)
    assert (index.stage, index.kind, index.round_number, index.history_hash) == (
        STAGE,
        "state",
        20,
        "history_hash of 1.0",
    )
    assert (index.timeline_first_round, index.timeline_first_optimizer_step, index.ledger) == (18, 5, b"ledger")


async def test_a_download_that_began_before_an_optimizer_step_is_not_torn_by_it(world):
    donor = await world.donor("a", fill=1.0)
    before = donor.trainer.state()
    fault = world.network.fault(op="state_chunk", skip=3, before=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(donor))
    await fault.struck.wait()
    await donor.goes_on(fill=5.0)
    newer = await world.fetch(donor, min_round=4)
    assert_state_of(newer, donor)
    fault.before.set()
    state = await fetching
    assert (state.round_number, state.history_hash) == (3, "history_hash of 1.0")
    assert_equal(state.tensors, before)


async def test_a_state_is_kept_for_as_long_as_peers_download_it(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for fill in range(5):
        clock.passed_s += RETAIN_S - 1
        await donor.goes_on(fill)
        donor.donor.server._drop_expired()
        await world.call(donor, chunk)
    clock.passed_s += RETAIN_S + 1
    donor.donor.server._drop_expired()
    with pytest.raises(NotServing, match="this is not kept here any more"):
        await world.call(donor, chunk)
    assert donor.donor.server.stored == {}


async def test_states_that_nobody_uses_do_not_pile_up(world, clock):
    donor = await world.donor("a")
    for fill in range(20):
        await donor.goes_on(fill)
        await world.fetch(donor)
        clock.passed_s += RETAIN_S / 2
        assert len(donor.donor.server._held()) <= MAX_STATES_HELD


async def test_few_states_are_held_however_often_they_are_asked_for(world):
    donor = await world.donor("a")
    used, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=used, entry=0, chunk=0)
    for fill in range(40):
        await donor.goes_on(fill)
        _, index = await world.index_of(donor, min_round=donor.round_number)
        assert index.round_number == donor.round_number
        assert len(donor.donor.server._held()) <= MAX_STATES_HELD
        await world.call(donor, chunk)
    assert used in donor.donor.server._held(), "the one that somebody downloads is not the one that goes"


async def test_a_newcomer_that_can_catch_up_from_a_held_state_takes_none_away(world):
    donor = await world.donor("a")
    names = []
    for fill in range(MAX_STATES_HELD):
        names.append((await world.index_of(donor))[0])
        await donor.goes_on(fill)
    newest = donor.round_number - 1
    for fill in range(MAX_ROUNDS_BEHIND - 1):
        await donor.goes_on(fill)
    name, index = await world.index_of(donor)
    assert (name, index.round_number) == (names[-1], newest)
    for round_number in range(newest, donor.round_number):
        await world.fetch(donor, kind="update", min_round=round_number)
    assert (await world.index_of(donor, min_round=newest + 1))[1].round_number == donor.round_number
    donor.enter(
        donor.round_number + 4, Timeline(donor.round_number + 4, donor.trainer.optimizer_step, donor.round_number)
    )
    assert (await world.index_of(donor))[1].round_number == donor.round_number, (
        "no state of the timeline before is of use"
    )


async def test_a_state_of_another_history_is_not_given_for_the_newest_of_the_same_round(world):
    """A peer that catches up may take over other weights in the round that it is in."""
    donor = await world.donor("a")
    _, before = await world.index_of(donor)
    donor.trainer.fill = 2.0
    donor.enter(donor.round_number, donor.donor.current.timeline)
    _, index = await world.index_of(donor)
    assert (index.round_number, index.history_hash) == (before.round_number, donor.history_hash())


async def test_weights_that_lack_an_update_are_those_of_the_round_that_began_with_them(world, monkeypatch):
    monkeypatch.setattr(state_server, "WAIT_FOR_ROUND_S", 0.0)
    donor = await world.donor("a")
    name, index = await world.index_of(donor)
    donor.donor.enter(4, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert await world.index_of(donor) == (name, index), "they are the same"
    with pytest.raises(NotServing, match="the weights of round 3, not those of 4"):
        await world.index_of(donor, min_round=4)
    donor.donor.kept[3] = "history_hash of 2.0", [torch.zeros(1)]
    donor.trainer.optimizer_step, donor.trainer.fill = 4, 2.0
    donor.donor.enter(5, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert (await world.index_of(donor, min_round=4))[1].round_number == 4
    donor.donor.kept[4] = "history_hash of 3.0", [torch.zeros(1)]
    donor.trainer.optimizer_step, donor.trainer.fill = 5, 3.0
    donor.donor.enter(6, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert (await world.index_of(donor))[1].round_number == 4, "a newcomer can have the update since"
    del donor.donor.kept[4]
    assert (await world.index_of(donor))[1].round_number == 5


async def test_a_state_that_is_too_old_to_be_caught_up_with_makes_room(world):
    donor = await world.donor("a")
    for fill in range(MAX_STATES_HELD):
        await world.index_of(donor)
        await donor.goes_on(fill)
    for fill in range(MAX_ROUNDS_BEHIND):
        await donor.goes_on(fill)
    assert (await world.index_of(donor))[1].round_number == donor.round_number
    assert len(donor.donor.server._held()) == MAX_STATES_HELD


async def test_a_peer_whose_state_had_to_make_room_downloads_the_next_one(world):
    donor = await world.donor("a")
    fault = world.network.fault(op="state_chunk", times=CHUNKS_IN_FLIGHT, before=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(donor))
    await fault.struck.wait()
    for fill in range(MAX_STATES_HELD):
        await donor.goes_on(fill)
        await world.index_of(donor, min_round=donor.round_number)
    fault.before.set()
    with pytest.raises(CallError, match="not kept here any more"):
        await fetching
    assert_state_of(await world.fetch(donor), donor)


async def test_a_state_serves_all_peers_that_ask_in_a_round(world, monkeypatch):
    donor = await world.donor("a")
    taken = []
    state = donor.trainer.state
    monkeypatch.setattr(donor.trainer, "state", lambda: taken.append(1) or state())
    states = await asyncio.gather(*(world.fetch(donor) for _ in range(3)))
    assert taken == [1]
    for given in states:
        assert_state_of(given, donor)


async def test_a_donor_waits_for_the_round_that_is_asked_for(world):
    donor = await world.donor("a")
    fetching = asyncio.ensure_future(world.fetch(donor, min_round=4))
    await anyio.wait_all_tasks_blocked()
    assert not fetching.done()
    await donor.goes_on(fill=2.0)
    assert_state_of(await fetching, donor)


async def test_a_donor_without_the_state_says_so(world, monkeypatch):
    monkeypatch.setattr(state_server, "WAIT_FOR_ROUND_S", 0.0)
    donor = await world.donor("a")
    with pytest.raises(CallError, match="this peer has the weights of round 3, not those of 9"):
        await world.fetch(donor, min_round=9)
    with pytest.raises(CallError, match=r"this peer serves stages \[1\], not 0"):
        await world.fetch(donor, stage=0)
    donor.donor.forget_state()
    with pytest.raises(CallError, match="this peer has the weights of round 0, not those of 0"):
        await world.fetch(donor)


@pytest.mark.parametrize(("entry", "chunk"), [(6, 0), (2**13 - 1, 0), (0, 9), (0, 2**15 - 1), (5, 0)])
async def test_chunks_that_there_are_not_are_refused(world, entry, chunk):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    with pytest.raises(InvalidMessage, match=f"chunk {chunk} of tensor {entry} of 6"):
        await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=entry, chunk=chunk))
    reply = await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=0, chunk=8))
    assert [tensor.nbytes for tensor in reply.tensors] == [140 - 8 * CHUNK_BYTES], "the last one is shorter"


async def test_a_state_that_is_ahead_of_its_history_hash_is_not_given_away(world):
    """Between the update of the weights and the entry into the next round the two do not belong together."""
    donor = await world.donor("a")
    donor.trainer.optimizer_step, donor.trainer.fill = 4, 5.0  # updated in the device thread
    fetching = asyncio.ensure_future(world.fetch(donor))
    for _ in range(5):
        await donor.device_thread.run(Priority.EVALUATE, lambda: None)
        await anyio.wait_all_tasks_blocked()
    assert world.network.num_calls("state_chunk") == 0
    donor.enter(4, FIRST_TIMELINE)
    assert_state_of(await fetching, donor)


# --- what strangers get, and what members can hold --------------------------------------------------------------------


async def test_a_state_is_not_held_for_ever_whatever_is_asked_of_it(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for fill in range(int(2 * LEASE_S / RETAIN_S) - 1):
        await world.call(donor, chunk)
        clock.passed_s += RETAIN_S / 2
        await donor.goes_on(fill)
        donor.donor.server._drop_expired()
    await world.call(donor, chunk)
    clock.passed_s += RETAIN_S / 2 + 1
    donor.donor.server._drop_expired()
    with pytest.raises(NotServing, match="this is not kept here any more"):
        await world.call(donor, chunk)
    assert donor.donor.server.stored == {}


async def test_a_large_state_is_held_for_as_long_as_its_download_takes(world, clock, monkeypatch):
    donor = await world.donor("a")
    num_bytes = sum(tensor.nbytes for tensor in donor.trainer.state().values())
    monkeypatch.setattr(state_server, "SLOWEST_BYTES_PER_S", num_bytes / (3 * LEASE_S))
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for _ in range(int(6 * LEASE_S / RETAIN_S) - 1):
        await world.call(donor, chunk)
        clock.passed_s += RETAIN_S / 2
        donor.donor.server._drop_expired()
    await world.call(donor, chunk)
    clock.passed_s += RETAIN_S / 2 + 1
    donor.donor.server._drop_expired()
    assert name not in donor.donor.server.stored


async def test_a_state_is_dropped_in_the_middle_of_a_long_round(world, clock, monkeypatch):
    monkeypatch.setattr(state_server, "EXPIRY_POLL_S", 0.0)
    donor = await world.donor("a")
    await world.fetch(donor)
    await donor.goes_on(2.0)
    assert donor.donor.server.stored
    clock.passed_s += RETAIN_S + 1
    expiring = asyncio.ensure_future(donor.donor.server.run())
    while donor.donor.server.stored:  # noqa: ASYNC110
        await asyncio.sleep(0)
    expiring.cancel()


# --- updates ----------------------------------------------------------------------------------------------------------


async def test_an_update_is_given_for_as_long_as_it_is_kept(world):
    donor = await world.donor("a")
    await donor.goes_on(2.0)
    update = await world.fetch(donor, kind="update", min_round=3)
    assert (update.round_number, update.history_hash, update.ledger) == (3, "history_hash of 2.0", b"")
    assert_equal(update.tensors, {"00000": torch.full((5, 7), 2.0)})
    await world.fetch(donor, kind="update", min_round=3)
    assert len(donor.donor.server.stored) == 1, "it is hashed once"
    del donor.donor.kept[3]
    with pytest.raises(CallError, match="the update of round 3 is not kept here"):
        await world.fetch(donor, kind="update", min_round=3)
    await donor.goes_on(3.0)
    await world.fetch(donor, kind="update", min_round=4)
    assert [stored.index.round_number for stored in donor.donor.server.stored.values()] == [4], "it made room"


async def test_strangers_get_nothing_that_takes_memory(world):
    donor = await world.donor("a")
    await world.fetch(donor)
    await donor.goes_on(2.0)
    donor.donor.strangers.add("me")
    held = set(donor.donor.server.stored)
    for wanted in ({}, {"min_round": 4}, {"kind": "update", "min_round": 3}):
        with pytest.raises(CallError, match="this peer knows of no place of yours in the run"):
            await world.fetch(donor, **wanted)
    assert set(donor.donor.server.stored) == held


async def test_no_update_waits_until_a_state_is_hashed(world, monkeypatch):
    """A newcomer that has its state would ask in vain, and download it anew."""
    donor, may_hash = await world.donor("a"), threading.Event()
    await donor.goes_on(2.0)

    def slowly(stage, kind, state):
        assert kind == "update" or may_hash.wait(10)
        return make_stored(stage, kind, state)

    monkeypatch.setattr(state_server, "make_stored", slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.fetch, donor)
        await anyio.wait_all_tasks_blocked()
        assert (await world.fetch(donor, kind="update", min_round=3)).history_hash == "history_hash of 2.0"
        may_hash.set()


async def test_who_waits_for_a_state_holds_up_nobody_who_needs_an_update(world):
    """The round may not be over before the other one has caught up."""
    donor = await world.donor("a")
    await donor.goes_on(2.0)
    donor.trainer.optimizer_step += 1  # an update is being applied
    waiting = asyncio.ensure_future(world.fetch(donor))
    await anyio.wait_all_tasks_blocked()
    assert (await world.fetch(donor, kind="update", min_round=3)).history_hash == "history_hash of 2.0"
    assert not waiting.done()
    donor.trainer.optimizer_step -= 1
    await donor.goes_on(3.0)
    assert (await waiting).history_hash == "history_hash of 3.0"


async def test_an_update_is_there_for_a_second_newcomer_too(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    await donor.goes_on(2.0)
    await world.fetch(donor, kind="update", min_round=3)
    for _ in range(3):  # one whose download takes long
        clock.passed_s += RETAIN_S / 2
        await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0))
        await donor.goes_on(3.0)
    assert (await world.fetch(donor, kind="update", min_round=3)).round_number == 3


@pytest.mark.parametrize("name", ["sgd", "adamw"])
async def test_replayed_updates_make_the_donors_state_bit_by_bit(world, name):
    config = {
        "model_type": "gpt2", "vocab_size": 17, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2,
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    manifest = RunManifest.model_validate(
        {
            "name": "tiny",
            "model": {"config": config},
            "stages": {"count": 2},
            "data": {"sequence_length": 6},
            "training": {"steps": 10, "global_batch_size": 8, "microbatch_size": 2},
            "optimizer": {"name": name, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        }
    )
    spec = ResolvedManifest.of(manifest).specs[STAGE]
    donor = await world.donor("a", round_number=0)
    trainer, newcomer = (
        StageTrainer(ResolvedManifest.of(manifest), spec),
        StageTrainer(ResolvedManifest.of(manifest), spec),
    )
    donor.trainer = donor.donor.core.trainer = trainer
    donor.donor.enter(0, "l", FIRST_TIMELINE, b"")
    random_ = torch.Generator().manual_seed(0)

    async def end_round():
        gradients = [torch.randn(p.shape, generator=random_) for p in trainer.module.parameters()]
        donor.donor.kept[donor.round_number] = f"entry {donor.round_number}", gradients
        trainer.apply(gradients)
        donor.donor.enter(donor.round_number + 1, "l", FIRST_TIMELINE, b"")

    await end_round()
    limit = max_state_bytes(ResolvedManifest.of(manifest), STAGE)
    state = await world.fetch(donor, max_bytes=limit)
    for _ in range(3):
        await end_round()
    newcomer.load_state(state.tensors, state.optimizer_step)
    for round_number in range(state.round_number, donor.round_number):
        update = await world.fetch(donor, max_bytes=limit, kind="update", min_round=round_number)
        newcomer.apply(list(update.tensors.values()))
    assert newcomer.optimizer_step == trainer.optimizer_step == 4
    assert_equal(newcomer.state(), trainer.state())


async def test_who_gives_a_large_state_has_the_time_to_hash_it():
    asked = []

    class Transport:
        async def call(self, donor, call, timeout_s):
            asked.append((donor, timeout_s))
            raise NotServing("it has none")

    call = StateIndexCall(manifest=HASH, of_stage=STAGE)
    for max_bytes in (0, 40 * 10**9):
        with pytest.raises(CallError, match="it has none"):
            await fetch_state(Transport(), ["a"], call, max_bytes=max_bytes, rng=random.Random(0))
    assert asked == [("a", CALL_TIMEOUT_S), ("a", CALL_TIMEOUT_S + 160.0)], "a slow machine hashes a GB in four seconds"

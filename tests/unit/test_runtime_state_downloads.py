"""A state comes over whole, from several donors at once, whatever some of them fail at or lie about."""

import asyncio
import dataclasses
import gc
import hashlib
import random
import weakref

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch
from state_donors import CHUNK_BYTES, HASH, NUM_CHUNKS, STAGE, assert_state_of
from state_donors import world as world

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NoRoom, NotServing, PeerUnreachable
from swarm_peer.policy.timeline import Timeline
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network.transport import Reply, pack_fields, unpack_fields
from swarm_peer.runtime.state import chunks as state_chunks
from swarm_peer.runtime.state import index as state_index
from swarm_peer.runtime.state import transfer
from swarm_peer.runtime.state.chunks import CALL_TIMEOUT_S, CHUNKS_IN_FLIGHT
from swarm_peer.runtime.state.transfer import MAX_DONORS, Memory, fetch_state
from swarm_peer.wire.messages import StateIndex, StateIndexCall


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
    monkeypatch.setattr(state_chunks, "CHUNKS_IN_FLIGHT", 1)
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


async def test_of_an_index_that_is_not_accepted_no_chunk_is_asked_for(world):
    liar, good = await world.donor("a", round_number=900, fill=7), await world.donor("b")

    async def accept(index):
        if index.round_number == 900:
            raise InvalidMessage("no such round")

    assert_state_of(await world.fetch(liar, good, how={"accept": accept}), good)
    assert world.chunks_from(liar) == 0


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


@pytest.fixture
def large_chunks(monkeypatch):
    """A chunk stands for one that takes nearly CALL_TIMEOUT_S on the slowest link."""
    monkeypatch.setattr(transfer, "SLOWEST_BYTES_PER_S", CHUNK_BYTES / CALL_TIMEOUT_S)


@pytest.mark.usefixtures("large_chunks")
async def test_a_donor_behind_a_slow_link_has_as_long_for_each_chunk(world, monkeypatch):
    donor = await world.donor("a")
    link = Link(world, "a", monkeypatch)
    fetching = asyncio.ensure_future(world.fetch(donor))
    for number in range(NUM_CHUNKS):
        await link.carry(number, 0.9 * CALL_TIMEOUT_S)
    assert_state_of(await fetching, donor)
    assert world.chunks_from(donor) == NUM_CHUNKS


@pytest.mark.usefixtures("large_chunks")
async def test_where_this_peers_own_link_is_slow_the_last_donors_give_all(world, monkeypatch):
    newer, older = await world.donor("a", round_number=4, fill=2), await world.donor("b")
    links = [Link(world, name, monkeypatch) for name in "ab"]
    fetching = asyncio.ensure_future(world.fetch(newer, older))
    for number in range(2):
        await links[0].carry(number, 0.9 * CALL_TIMEOUT_S)
    for number in range(NUM_CHUNKS):
        await links[1].carry(number, 0.9 * CALL_TIMEOUT_S)
    assert_state_of(await fetching, older)


async def test_a_donor_that_gives_little_at_a_time_is_left_for_others(world, monkeypatch):
    liar, good = await world.donor("a", round_number=900, fill=7), await world.donor("b")
    link = Link(world, "a", monkeypatch)
    fetching = asyncio.ensure_future(world.fetch(liar, good))
    for number in range(2):
        await link.carry(number, 0.9 * CALL_TIMEOUT_S)
    assert_state_of(await fetching, good)
    assert world.chunks_from(liar) == CHUNKS_IN_FLIGHT + 1


async def test_a_download_that_gets_too_slow_at_its_end_is_not_taken_for_whole(world, monkeypatch):
    donor = await world.donor("a")
    link = Link(world, "a", monkeypatch)
    fetching = asyncio.ensure_future(world.fetch(donor))
    for number in range(NUM_CHUNKS):
        await link.carry(number, 0.9 * CALL_TIMEOUT_S if number > NUM_CHUNKS - CHUNKS_IN_FLIGHT else 0.0)
        if fetching.done():
            break
    with pytest.raises(CallError, match="a: less than 64000 bytes/s"):
        await fetching


@pytest.mark.usefixtures("large_chunks")
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

import asyncio
import hashlib

import anyio
import pytest
import torch
from memory_transport import MemoryNetwork

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NotServing, PeerUnreachable
from swarm_peer.runtime import state_transfer
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.state_transfer import StateDonor, fetch_state
from swarm_peer.runtime.transport import Reply, check_body, pack_fields, unpack_fields
from swarm_peer.wire.messages import StateChunkCall, StateEntry, StateIndex, StateIndexCall

HASH = "0123456789abcdef" * 2
STAGE = 1


class FakeTrainer:
    """As much of a StageTrainer as a donor needs."""

    def __init__(self, fill):
        self.step = 3
        self.fill = float(fill)

    def state(self):
        return {
            "weight": torch.full((5, 7), self.fill),
            "bias": torch.arange(3, dtype=torch.float32) + self.fill,
            "optimizer/step": torch.tensor(self.fill),
            "optimizer/quantized": torch.arange(50, dtype=torch.uint8),
            "half": torch.full((3, 3), self.fill, dtype=torch.float16),
            "empty": torch.zeros(0, 4),
        }


class Donor:
    def __init__(self, network, peer_id, fill=1.0, stage=STAGE, step=3):
        self.peer_id = peer_id
        self.trainer = FakeTrainer(fill)
        self.trainer.step = step
        self.changed = Signal()
        self.compute = ComputeThread(PeerMetrics())
        self.lineage = f"lineage of {fill}"
        self.donor = StateDonor(self.trainer, self.compute, lambda: self.lineage, self.changed, stage)
        self.donor.step = step
        self.transport = network.transport(peer_id)

    async def __call__(self, caller, op, body, tensors):
        if op == "state_index":
            return await self.donor.handle_index(caller, check_body(StateIndexCall, body), tensors)
        return await self.donor.handle_chunk(caller, check_body(StateChunkCall, body), tensors)

    def goes_on(self, fill):
        self.trainer.step += 1
        self.trainer.fill = float(fill)
        self.lineage = f"lineage of {float(fill)}"
        self.donor.step = self.trainer.step
        self.changed.notify()


class World:
    def __init__(self):
        self.network = MemoryNetwork()
        self.donors = []

    async def donor(self, peer_id, **options):
        donor = Donor(self.network, peer_id, **options)
        await donor.transport.serve(donor)
        self.donors.append(donor)
        return donor

    async def fetch(self, *donors, min_step=0, max_bytes=10_000, stage=STAGE):
        return await fetch_state(
            self.network.transport("me"),
            [getattr(donor, "peer_id", donor) for donor in donors],
            manifest_hash=HASH,
            stage=stage,
            min_step=min_step,
            max_bytes=max_bytes,
        )


@pytest.fixture
async def world(monkeypatch):
    # A state of many chunks, without many bytes.
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES", 16)
    world = World()
    async with world.network:
        yield world
    for donor in world.donors:
        donor.compute.stop()


def assert_state_of(state, donor):
    """Whole, and all of it from one donor."""
    expected = donor.trainer.state()
    assert state.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert state.tensors[name].shape == tensor.shape
        assert torch.equal(state.tensors[name], tensor), name
    assert (state.step, state.lineage) == (donor.trainer.step, donor.lineage)


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


# --- downloads --------------------------------------------------------------------------------------------------------


async def test_a_state_comes_over_whole(world):
    donor = await world.donor("a", fill=2.5)
    assert_state_of(await world.fetch(donor), donor)
    assert world.network.num_calls("state_chunk") > 10


async def test_the_first_donor_is_enough(world):
    donor, other = await world.donor("a"), await world.donor("b", fill=9.0)
    assert_state_of(await world.fetch(donor, other), donor)
    assert not any(callee == "b" for _, callee, _ in world.network.calls)


async def test_a_later_state_is_welcome(world):
    donor = await world.donor("a", step=7)
    assert (await world.fetch(donor, min_step=5)).step == 7


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"op": "state_index", "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "skip": 5, "fail": PeerUnreachable("gone")}, "a: gone"),
        ({"op": "state_chunk", "skip": 9, "drop_reply": True}, "a: the stream broke"),
        ({"op": "state_chunk", "skip": 3, "fail": CallTimeout("stalled")}, "a: stalled"),
        ({"op": "state_index", "tamper": lambda reply: Reply()}, "a: the state's index is missing"),
        ({"op": "state_index", "tamper": lambda reply: Reply({}, (memoryview(b"\xc1"),))}, "StateIndex: no msgpack"),
        ({"op": "state_index", "tamper": lambda reply: Reply({}, (memoryview(b"\x80"),))}, "StateIndex: stage: miss"),
        ({"op": "state_index", "tamper": changed_index(lambda index: {"stage": 0})}, "bytes of stage 0 at step 3"),
        ({"op": "state_index", "tamper": changed_index(lambda index: {"step": 2})}, "stage 1 at step 2; wanted"),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, dtype="object"))}, "weight of type object"),
        (
            {"op": "state_index", "tamper": changed_index(with_entry(0, shape=(10_000, 7)))},
            "offered 280084 bytes of stage 1 .* of at most 10000 bytes",
        ),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, shape=(2**39,) * 8))}, "of at most 10000 bytes"),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, shape=(6, 7)))}, "a chunk of .* was asked for"),
        ({"op": "state_index", "tamper": changed_index(with_entry(0, shape=(4, 7)))}, "weight does not match its hash"),
        ({"op": "state_index", "tamper": changed_index(with_entry(1, sha256=bytes(32)))}, "bias does not match its"),
        ({"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply()}, "a chunk of 16 bytes was asked for"),
        (
            {"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply({}, (reply.tensors[0][1:],))},
            "a chunk of 16 bytes was asked for",
        ),
        (
            {"op": "state_chunk", "skip": 4, "tamper": lambda reply: Reply({}, (memoryview(bytes(16)),))},
            "weight does not match its hash",
        ),
    ],
)
async def test_when_a_donor_fails_the_next_one_gives_all(world, fault, reason):
    failing, good = await world.donor("a", fill=1.0), await world.donor("b", fill=2.0)
    scripted = world.network.fault(to="a", **fault)
    assert_state_of(await world.fetch(failing, good, min_step=3), good)
    assert scripted.fired == 1
    # The same fault with nobody else to ask says what happened.
    again = world.network.fault(to="a", **(fault | {"times": 1}))
    with pytest.raises(CallError, match=f"no donor gave the state of stage 1: .*{reason}"):
        await world.fetch(failing, min_step=3)
    assert again.fired == 1


async def test_a_donor_that_dies_half_way_is_replaced(world):
    dying, good = await world.donor("a", fill=1.0), await world.donor("b", fill=2.0)
    fault = world.network.fault(op="state_chunk", to="a", skip=6, after=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(dying, good))
    await fault.struck.wait()
    world.network.kill("a")
    fault.after.set()
    assert_state_of(await fetching, good)


async def test_the_size_that_is_refused_is_never_allocated(world, monkeypatch):
    donor = await world.donor("a")
    total = sum(tensor.numel() * tensor.element_size() for tensor in donor.trainer.state().values())
    await world.fetch(donor, max_bytes=total)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CallError, match=f"offered {total} bytes"):
        await world.fetch(donor, max_bytes=total - 1)


async def test_no_donor_at_all_is_told(world):
    with pytest.raises(CallError, match="no donor gave the state of stage 1: there is none"):
        await world.fetch()


async def test_each_donor_is_named_with_its_reason(world):
    await world.donor("a", step=1)
    world.network.fault(op="state_index", to="a", fail=NotServing("no state"))
    with pytest.raises(CallError, match="a: no state; b: nobody is b"):
        await world.fetch("a", "b")


async def test_few_chunks_are_asked_for_at_once(world):
    donor = await world.donor("a")
    delay = anyio.Event()
    world.network.fault(op="state_chunk", before=delay, times=1000)
    fetching = asyncio.ensure_future(world.fetch(donor))
    while world.network.num_calls("state_chunk") == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await anyio.wait_all_tasks_blocked()
    assert world.network.num_calls("state_chunk") == state_transfer.CHUNKS_IN_FLIGHT
    delay.set()
    assert_state_of(await fetching, donor)


# --- donors -----------------------------------------------------------------------------------------------------------


async def test_a_download_that_began_before_a_step_is_not_torn_by_it(world):
    donor = await world.donor("a", fill=1.0)
    before = donor.trainer.state()
    fault = world.network.fault(op="state_chunk", skip=3, before=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(donor))
    await fault.struck.wait()
    donor.goes_on(fill=5.0)
    newer = await world.fetch(donor, min_step=4)
    assert_state_of(newer, donor)
    fault.before.set()
    state = await fetching
    assert (state.step, state.lineage) == (3, "lineage of 1.0")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors.items())


async def test_a_snapshot_that_is_two_steps_old_is_given_up(world):
    donor = await world.donor("a")
    chunk = StateChunkCall(manifest=HASH, step=3, entry=0, offset=0, size=8)
    await world.fetch(donor)
    for fill in (2.0, 3.0):
        donor.goes_on(fill)
        assert_state_of(await world.fetch(donor, min_step=donor.trainer.step), donor)
    me = world.network.transport("me")
    with pytest.raises(NotServing, match="the state of step 3 is not kept any more"):
        await me.call("a", chunk, timeout_s=5.0)
    await me.call("a", chunk.model_copy(update={"step": 4}), timeout_s=5.0)


async def test_a_snapshot_serves_all_who_ask_in_a_step(world, monkeypatch):
    donor = await world.donor("a")
    taken = []
    state = donor.trainer.state
    monkeypatch.setattr(donor.trainer, "state", lambda: taken.append(1) or state())
    states = await asyncio.gather(*(world.fetch(donor) for _ in range(3)))
    assert taken == [1]
    for given in states:
        assert_state_of(given, donor)


async def test_a_donor_waits_for_the_step_that_is_asked_for(world):
    donor = await world.donor("a")
    fetching = asyncio.ensure_future(world.fetch(donor, min_step=4))
    await anyio.wait_all_tasks_blocked()
    assert not fetching.done()
    donor.goes_on(fill=2.0)
    assert_state_of(await fetching, donor)


async def test_a_donor_without_the_state_says_so(world, monkeypatch):
    monkeypatch.setattr(state_transfer, "WAIT_FOR_STEP_S", 0.0)
    donor = await world.donor("a")
    with pytest.raises(CallError, match="this peer has the state of step 3, not of 9"):
        await world.fetch(donor, min_step=9)
    donor.donor.step = None
    with pytest.raises(CallError, match="this peer has the state of step None, not of 0"):
        await world.fetch(donor)


@pytest.mark.parametrize("entry", [6, 99_999])
async def test_chunks_of_tensors_that_there_are_not_are_refused(world, entry):
    donor = await world.donor("a")
    await world.fetch(donor)
    call = StateChunkCall(manifest=HASH, step=3, entry=entry, offset=0, size=8)
    with pytest.raises(InvalidMessage, match=f"tensor {entry} of 6"):
        await world.network.transport("me").call("a", call, timeout_s=5.0)


async def test_chunks_beyond_the_end_are_empty(world):
    donor = await world.donor("a")
    await world.fetch(donor)
    call = StateChunkCall(manifest=HASH, step=3, entry=0, offset=10**12, size=8)
    reply = await world.network.transport("me").call("a", call, timeout_s=5.0)
    assert [tensor.nbytes for tensor in reply.tensors] == [0]


async def test_the_index_names_what_it_holds(world):
    donor = await world.donor("a")
    call = StateIndexCall(manifest=HASH, min_step=0)
    reply = await world.network.transport("me").call("a", call, timeout_s=5.0)
    index = unpack_fields(StateIndex, reply.tensors[0])
    weight = donor.trainer.state()["weight"]
    digest = hashlib.sha256(weight.numpy().tobytes()).digest()
    assert index.entries[0] == StateEntry(name="weight", dtype="float32", shape=(5, 7), sha256=digest)


async def test_a_state_that_is_ahead_of_its_lineage_is_not_given_away(world):
    """Between the update of the weights and the entry into the next step the two do not belong together."""
    donor = await world.donor("a")
    donor.trainer.step, donor.trainer.fill = 4, 5.0  # updated in the compute thread
    fetching = asyncio.ensure_future(world.fetch(donor))
    for _ in range(5):
        await donor.compute.run(Priority.EVALUATE, lambda: None)
        await anyio.wait_all_tasks_blocked()
    assert world.network.num_calls("state_chunk") == 0
    donor.lineage = "lineage of 5.0"
    donor.donor.step = 4
    donor.changed.notify()
    assert_state_of(await fetching, donor)

"""Peers that give away the state of one stage, of many chunks without many bytes, and who asks them for it."""

import hashlib
import random
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from contexts import MovedClock, make_context, unparsed
from given_states import GivenStates
from memory_transport import MemoryNetwork

from swarm_peer.policy.timeline import FIRST_TIMELINE
from swarm_peer.runtime.network.transport import check_body, unpack_fields
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.state import chunks as state_chunks
from swarm_peer.runtime.state import index as state_index
from swarm_peer.runtime.state import named_snapshots as snapshots
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.messages import StateIndex, StateIndexCall

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
    for module in (snapshots, state_index, state_chunks):
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

"""A tiny swarm in one process, through whose stages microbatches go, without averaging and rounds."""

import asyncio
import threading
import time

import anyio
import pytest
import torch
from contexts import ReadClock, begin_round, dispatcher, make_context
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_transport import MemoryNetwork
from tiny_models import GPT2

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import Microbatch, StageClient
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.wire.codecs import encode_tokens
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MicrobatchCall

LENGTH, HIDDEN, VOCABULARY, SAMPLES = 6, 8, 17, 2


def make_manifest(num_stages=2, **sections):
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": 3, "n_head": 2}
    config = GPT2 | sizes
    content = {
        "name": "tiny",
        "model": {"config": config},
        "stages": {"count": num_stages},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 10, "global_batch_size": 8, "microbatch_size": SAMPLES},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "limits": {"hop_tries": 2},
    }
    return RunManifest.model_validate(content | sections)


class AnyWork:
    """Every microbatch counts, and there are no receipts."""

    def __init__(self, stage):
        self.stage = stage
        self.counted = []
        self.lost = []

    def head(self, number):
        return f"head {self.stage} of {number}"

    def admit(self, number, base):
        pass

    def count(self, number, base, weight, num_samples, caller):
        self.counted.append((number, base, weight, num_samples, caller))

    def lose(self, number):
        self.lost.append(number)

    def encode_receipt(self, receipt):
        return b""

    def decode_receipt(self, data, author):
        return None


class Peer:
    """One peer of a tiny swarm, without averaging and rounds."""

    def __init__(self, swarm, name, stage, capacity=8, replies_kept=4, speed=1.0):
        manifest = swarm.manifest
        self.name, self.stage, self.speed = name, stage, speed
        self.incarnation = 0
        identity = Identity(Ed25519PrivateKey.from_private_bytes(name.encode() * 32))
        context = self.context = make_context(swarm.resolved, identity=identity, clock=swarm.clock)
        self.trainer = StageTrainer(swarm.resolved, swarm.resolved.specs[stage])
        self.metrics = context.metrics
        self.device_thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=self.metrics)
        self.meter = SpeedMeter(self.metrics)
        self.rounds = RoundBook(context.changed)
        self.capacity = Capacity(capacity)
        self.admission = RoundAdmission(capacity=self.capacity, rounds=self.rounds, changed=context.changed)
        self.peer_id = identity.peer_id
        self.transport = swarm.network.transport(self.peer_id)
        self.work = AnyWork(stage)
        self.next_stage = None
        if not self.trainer.spec.is_last:
            self.next_stage = StageClient(
                context=context, stage=stage + 1, transport=self.transport, view=swarm.view, work=self.work
            )
        self.executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.device_thread,
            speed=self.meter,
            next_stage=self.next_stage,
            capacity=self.capacity,
            replies_kept=replies_kept,
            work=self.work,
        )
        core = ReplicaCore(
            trainer=self.trainer,
            capacity=self.capacity,
            device_thread=self.device_thread,
            speed=self.meter,
            rounds=self.rounds,
            admission=self.admission,
            executor=self.executor,
            time=None,
        )
        handler = StageServer(
            context=context,
            core=core,
            view=swarm.view,
            serves=lambda *who: swarm.serves(*who),
            saw_stranger=lambda: swarm.strangers.append(name),
            work=self.work,
        )
        self.dispatcher = dispatcher(manifest.hash, stage, handler.calls)
        self.open(0)

    def open(self, round_number):
        begin_round(self.rounds, round_number, weights_version=self.trainer.weights_version)

    async def run(self, microbatch, timeout_s=20.0):
        return await self.executor.run(self.rounds.current, microbatch, None, anyio.current_time() + timeout_s)

    def gradients(self):
        return self.trainer.mean_gradients()

    def metric(self, name, *labels):
        metric = getattr(self.metrics, name)
        return (metric.labels(*labels) if labels else metric)._value.get()

    async def occupy(self):
        """Occupy the device thread until the event that is returned is set."""
        release, running, loop = threading.Event(), anyio.Event(), asyncio.get_running_loop()

        def job():
            loop.call_soon_threadsafe(running.set)
            assert release.wait(10)

        self.occupied = asyncio.ensure_future(self.device_thread.run(Priority.STEP, job))
        await running.wait()
        return release


class Swarm:
    def __init__(self, manifest):
        self.manifest = manifest
        self.resolved = ResolvedManifest.of(manifest)
        self.clock = ReadClock(time.monotonic)
        self.network = MemoryNetwork()
        self.peers = []
        self.strangers = []  # that the directory was to look for

    async def add(self, name, stage, **options):
        peer = Peer(self, name, stage, **options)
        await peer.transport.serve(peer.dispatcher)
        self.peers.append(peer)
        return peer

    def view(self):
        views = [
            PeerView(
                peer_id=peer.peer_id,
                stage=peer.stage,
                state=PeerState.SERVING,
                round_number=0,
                samples_per_s=peer.speed,
                incarnation=peer.incarnation,
            )
            for peer in self.peers
        ]
        return SwarmView(self.manifest.stages.count, tuple(views))

    def ids(self, stage):
        return {peer.peer_id for peer in self.view().serving(stage)}

    def serves(self, peer_id, stage):
        return peer_id in self.ids(stage)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        await self.network.__aexit__(*error)
        for peer in self.peers:
            peer.device_thread.stop()
            assert peer.admission.admitted == peer.admission.held == 0 or error[0], "somebody has stayed inside"


@pytest.fixture
async def swarm():
    async with Swarm(make_manifest()) as swarm:
        yield swarm


@pytest.fixture
async def pair(swarm):
    return await swarm.add("a", 0), await swarm.add("b", 1)


async def until(condition):
    """Let others go on until a condition holds that nobody gives notice of."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def tokens(seed=0):
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def make_microbatch(seed=0, round_number=0, mode="train"):
    return Microbatch(bytes([seed]) * 16, round_number, mode, SAMPLES, encode_tokens(tokens(seed)), timeline=0)


def reference(manifest, seeds=(0,)):
    """Loss sum and mean gradients by stage of the same microbatches in one process."""
    trainers = [StageTrainer(ResolvedManifest.of(manifest), spec) for spec in ResolvedManifest.of(manifest).specs]
    loss_sum = 0.0
    for seed in seeds:
        passes, gradient = [], None
        for trainer in trainers:
            passes.append(trainer.forward(tokens(seed), passes[-1].output if passes else None))
        for trainer, forward_pass in zip(trainers[::-1], passes[::-1], strict=True):
            gradient = trainer.backward(forward_pass, gradient)
        loss_sum += float(passes[-1].output.sum())
    return loss_sum, [trainer.mean_gradients() for trainer in trainers]


def assert_equal(gradients, expected):
    assert len(gradients) == len(expected) > 0
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, other)


def make_call(swarm, number=0, **change):
    fields = {
        "manifest": swarm.manifest.hash,
        "round_number": 0,
        "stage": 1,
        "microbatch": bytes([number]) * 16,
        "timeline": 0,
        "mode": "train",
        "num_samples": SAMPLES,
        "length": LENGTH,
        "timeout_s": 20.0,
        "base": ("head 0 of 0",),
    }
    return MicrobatchCall.model_construct(**fields | change)


def make_tensors(tokens_BS=None, hidden_BTD=None):
    hidden_BTD = torch.zeros(SAMPLES, LENGTH, HIDDEN) if hidden_BTD is None else hidden_BTD
    raw_hidden = memoryview(hidden_BTD.view(-1).view(torch.uint8).numpy())
    return (encode_tokens(tokens() if tokens_BS is None else tokens_BS), raw_hidden)


def with_value(tensor, value):
    tensor.view(-1)[3] = value
    return tensor

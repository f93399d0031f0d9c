import asyncio
import gc
import threading
import time
import weakref
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
import torch
from contexts import ReadClock, begin_round, dispatcher, make_context
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_transport import MemoryNetwork

from swarm_peer.config import RunManifest
from swarm_peer.errors import (
    Busy,
    CallError,
    CallTimeout,
    HopFailed,
    InvalidMessage,
    NotFinite,
    NotServing,
    PeerUnreachable,
    RoundClosed,
)
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.view import Life, PeerState, PeerView, SwarmView
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.runtime.stage import executor as executor_module
from swarm_peer.runtime.stage import stage_client
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch, StageClient, time_of_callee
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.wire.codecs import encode, encode_tokens, encoded_bytes
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MicrobatchCall

LENGTH, HIDDEN, VOCABULARY, SAMPLES = 6, 8, 17, 2


def make_manifest(num_stages=2, **sections):
    config = {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": HIDDEN,
        "n_layer": 3,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
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


# --- a microbatch's trip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3])
async def test_a_microbatch_is_computed_as_in_one_process(num_stages):
    async with Swarm(make_manifest(num_stages)) as swarm:
        peers = [await swarm.add("abc"[stage], stage) for stage in range(num_stages)]
        results = [await peers[0].run(make_microbatch(seed)) for seed in (0, 1)]
        loss_sum, gradients = reference(swarm.manifest, (0, 1))
        assert sum(result.loss_sum for result in results) == pytest.approx(loss_sum, abs=1e-6)
        for peer, expected in zip(peers, gradients, strict=True):
            assert peer.trainer.num_samples == 2 * SAMPLES
            assert_equal(peer.gradients(), expected)
        assert results[0].grad is None, "there is nobody before stage 0"
        heads = tuple(f"head {stage} of 0" for stage in range(num_stages))
        assert results[0].base == heads, "what it was computed from"
        for stage, peer in enumerate(peers):
            caller = peers[stage - 1].peer_id
            assert peer.work.counted == ([(0, heads, SAMPLES, SAMPLES, caller)] * 2 if stage else [])


async def test_a_hop_may_take_as_long_as_a_manifest_may_say():
    async with Swarm(make_manifest(3, limits={"hop_tries": 2, "hop_timeout_s": 86400.0})) as swarm:
        first, *_ = [await swarm.add("abc"[stage], stage) for stage in range(3)]
        result = await first.run(make_microbatch(), timeout_s=1e9)
        assert result.loss_sum == pytest.approx(reference(swarm.manifest)[0], abs=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3, 10, 100, 256])
def test_the_last_one_of_many_stages_has_time_as_well(num_stages):
    hop_timeout_s = 60.0
    timeout_s = hop_timeout_s * (num_stages - 1)
    for stage in range(1, num_stages):
        before_s, timeout_s = timeout_s, time_of_callee(timeout_s, num_stages - stage)
        assert before_s - timeout_s >= stage_client.WAY_BACK_S
    assert timeout_s > 0.9 * hop_timeout_s


async def test_evaluation_leaves_no_trace(swarm, pair):
    first, last = pair
    result = await first.run(make_microbatch(mode="evaluate"))
    assert result.loss_sum == pytest.approx(reference(swarm.manifest)[0], abs=1e-6)
    assert result.grad is None
    assert first.trainer.num_samples == last.trainer.num_samples == 0
    assert not any(gradient.any() for gradient in last.gradients())


# --- counted once -----------------------------------------------------------------------------------------------------


async def test_a_microbatch_whose_reply_was_lost_is_counted_once(swarm, pair):
    first, last = pair
    fault = swarm.network.fault(op="microbatch", drop_reply=True)
    result = await first.run(make_microbatch())
    assert fault.fired == 1
    assert swarm.network.num_calls("microbatch", last.peer_id) == 2
    assert last.metric("duplicates", "answered") == 1
    loss_sum, gradients = reference(swarm.manifest)
    assert result.loss_sum == pytest.approx(loss_sum, abs=1e-6)
    assert [peer.trainer.num_samples for peer in pair] == [SAMPLES, SAMPLES]
    for peer, expected in zip(pair, gradients, strict=True):
        assert_equal(peer.gradients(), expected)


async def test_a_peer_that_stays_unreachable_is_replaced_and_avoided(swarm, pair):
    first, last = pair
    other = await swarm.add("c", 1)
    fault = swarm.network.fault(op="microbatch", drop_reply=True, times=2)
    await first.run(make_microbatch())
    assert fault.fired == 2
    assert first.trainer.num_samples == SAMPLES
    # The lost one may have counted it: a duplicate at worst, and within each peer never more than once.
    assert (last.trainer.num_samples, other.trainer.num_samples) == (SAMPLES, SAMPLES)
    assert first.metric("retries", "unreachable") == 1
    called = [callee for _, callee, _ in swarm.network.calls]
    assert called[0] == called[1] != called[2]
    await first.run(make_microbatch(1))
    assert swarm.network.calls[-1][1] == called[2], "the other is avoided for now"


async def test_a_peer_that_is_asked_again_learns_how_little_time_is_left(swarm, pair, monkeypatch):
    """A caller that gave up before it would have another peer count what this one counts."""
    first, _ = pair
    call, told, seconds = first.transport.call, [], iter((0.0, 0.0, 15.0))
    now = anyio.current_time()
    monkeypatch.setattr(stage_client, "anyio", SimpleNamespace(current_time=lambda: now + next(seconds)))

    async def break_once(peer_id, body, tensors, *, timeout_s):
        told.append((body.timeout_s, timeout_s))
        if len(told) == 1:
            raise PeerUnreachable("the stream broke after 15 seconds")
        return await call(peer_id, body, tensors, timeout_s=timeout_s)

    monkeypatch.setattr(first.transport, "call", break_once)
    await first.executor.run(first.rounds.current, make_microbatch(), None, now + 20.0)
    assert told == [pytest.approx((19.0, 20.0)), pytest.approx((4.0, 5.0))]


async def test_a_microbatch_that_comes_again_while_it_runs_is_counted_once(swarm, pair):
    first, last = pair
    release = await last.occupy()
    send = [first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0) for _ in range(3)]
    calls = [asyncio.ensure_future(call) for call in send]
    await anyio.wait_all_tasks_blocked()
    release.set()
    replies = await asyncio.gather(*calls)
    assert last.trainer.num_samples == SAMPLES
    assert last.metric("duplicates", "answered") == 2
    assert len({bytes(reply.tensors[0]) for reply in replies}) == 1


@pytest.mark.parametrize("state", ["full", "ending", "draining"])
async def test_a_lost_reply_is_given_again_by_a_peer_that_admits_nothing_more(swarm, state):
    """Or its caller would have another peer count the microbatch, too."""
    first, last = await swarm.add("a", 0), await swarm.add("b", 1, capacity=1)
    ask = partial(first.transport.call, last.peer_id, tensors=make_tensors(), timeout_s=20.0)
    before = await ask(make_call(swarm))
    held = asyncio.ensure_future(ask(make_call(swarm, 1, round_number=1)))
    await until(lambda: last.admission.held)
    if state == "ending":
        last.rounds.enter(Phase.ENDING)
    elif state == "draining":
        last.admission.leave()
    with pytest.raises((Busy, NotServing)):
        await ask(make_call(swarm, 2))
    again = await ask(make_call(swarm))
    assert bytes(again.tensors[0]) == bytes(before.tensors[0])
    assert last.metric("duplicates", "answered") == 1
    last.admission.leave()
    with pytest.raises(NotServing):
        await held


async def test_a_reply_that_is_not_kept_any_more_is_computed_again_and_not_counted_again(swarm):
    first, last = await swarm.add("a", 0), await swarm.add("b", 1, replies_kept=1)
    replies = [
        await first.transport.call(last.peer_id, make_call(swarm, number), make_tensors(), timeout_s=20.0)
        for number in (0, 1, 0)
    ]
    assert bytes(replies[2].tensors[0]) == bytes(replies[0].tensors[0])
    assert last.metric("duplicates", "computed") == 1
    assert last.trainer.num_samples == 2 * SAMPLES
    await first.transport.call(last.peer_id, make_call(swarm, 1), make_tensors(), timeout_s=20.0)
    assert last.trainer.num_samples == 2 * SAMPLES


async def test_in_the_next_round_an_id_counts_anew(swarm, pair):
    first, last = pair
    await first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0)
    last.trainer.discard_gradients()
    last.rounds.current.forget_counted()
    await first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0)
    assert last.trainer.num_samples == SAMPLES


async def test_a_call_that_is_cancelled_before_its_turn_is_not_counted(swarm, pair):
    first, last = pair
    release = await last.occupy()
    running = asyncio.ensure_future(first.run(make_microbatch()))
    await until(lambda: last.admission.admitted)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await anyio.wait_all_tasks_blocked()
    assert last.admission.admitted == 0, "the callee was told"
    release.set()
    await last.device_thread.run(Priority.EVALUATE, lambda: None)
    assert first.trainer.num_samples == last.trainer.num_samples == 0
    assert last.metric("microbatches", "train", "done") == 0
    await first.run(make_microbatch())
    assert_equal(last.gradients(), reference(swarm.manifest)[1][1])


async def test_a_call_that_is_cancelled_on_its_way_is_not_counted(swarm, pair):
    first, last = pair
    fault = swarm.network.fault(op="microbatch", before=anyio.Event())
    running = asyncio.ensure_future(first.run(make_microbatch()))
    await fault.struck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert first.trainer.num_samples == last.trainer.num_samples == 0


async def test_a_call_whose_reply_nobody_waits_for_any_more_can_be_asked_for_again(swarm, pair):
    first, last = pair
    fault = swarm.network.fault(op="microbatch", after=anyio.Event())
    running = asyncio.ensure_future(first.run(make_microbatch()))
    await fault.struck.wait()
    await until(lambda: last.trainer.num_samples and not last.admission.admitted)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert first.trainer.num_samples == 0
    await first.run(make_microbatch())
    assert [peer.trainer.num_samples for peer in pair] == [SAMPLES, SAMPLES]


async def test_nobody_is_inside_while_a_cancelled_job_still_runs(swarm, pair):
    """Or a round could be closed with gradients that are still being added."""
    first, last = pair
    backward, running, release = last.trainer.backward, threading.Event(), threading.Event()

    def slow_backward(*arguments, **options):
        running.set()
        assert release.wait(10)
        return backward(*arguments, **options)

    last.trainer.backward = slow_backward
    call = first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0)
    calling = asyncio.ensure_future(call)
    await anyio.to_thread.run_sync(running.wait)
    drained = asyncio.ensure_future(last.admission.drained())
    calling.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not drained.done()
    release.set()
    await drained
    assert last.trainer.num_samples == SAMPLES
    assert last.executor.counted_reply(last.rounds.current, make_call(swarm).microbatch) is not None


async def test_a_microbatch_whose_time_is_over_while_it_is_counted_is_replied_to(swarm, pair):
    """Or its caller would have another peer count it, too."""
    first, last = pair
    backward = last.trainer.backward

    def slow_backward(*arguments, **options):
        time.sleep(0.5)
        return backward(*arguments, **options)

    last.trainer.backward = slow_backward
    call = make_call(swarm, timeout_s=0.4)
    reply = await first.transport.call(last.peer_id, call, make_tensors(), timeout_s=20.0)
    assert len(reply.tensors) == 1
    assert last.trainer.num_samples == SAMPLES
    assert last.metric("microbatches", "train", "done") == 1


# --- what goes wrong --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("change", "tensors", "error", "message"),
    [
        ({"manifest": "f" * 32}, make_tensors(), InvalidMessage, "call for the run with manifest ffff"),
        ({"stage": 2}, make_tensors(), NotServing, "this peer serves stage 1, not 2"),
        ({"round_number": 1.5}, make_tensors(), InvalidMessage, "round_number"),
        ({"microbatch": b"short"}, make_tensors(), InvalidMessage, "microbatch"),
        ({"timeout_s": float("inf")}, make_tensors(), InvalidMessage, "timeout_s"),
        ({"base": ("h" * 65,)}, make_tensors(), InvalidMessage, "base"),
        ({"num_samples": 3}, make_tensors(), InvalidMessage, "microbatch of 3 samples; at most 2 are allowed"),
        ({"num_samples": 1}, make_tensors(), InvalidMessage, "were expected"),
        ({}, (), InvalidMessage, r"tensors of \[\] bytes"),
        ({}, make_tensors()[:1], InvalidMessage, "were expected"),
        ({}, make_tensors()[::-1], InvalidMessage, "were expected"),
        ({}, (*make_tensors(), memoryview(b"")), InvalidMessage, "were expected"),
        ({}, make_tensors(hidden_BTD=torch.zeros(SAMPLES, LENGTH, HIDDEN + 1)), InvalidMessage, "were expected"),
        ({}, make_tensors(with_value(tokens(), VOCABULARY)), InvalidMessage, "outside of the vocabulary"),
        ({}, make_tensors(with_value(tokens(), -1)), InvalidMessage, "outside of the vocabulary"),
        (
            {},
            make_tensors(hidden_BTD=with_value(torch.zeros(SAMPLES, LENGTH, HIDDEN), float("nan"))),
            InvalidMessage,
            "non-finite",
        ),
        (
            {},
            make_tensors(hidden_BTD=with_value(torch.zeros(SAMPLES, LENGTH, HIDDEN), float("inf"))),
            InvalidMessage,
            "non-finite",
        ),
        ({"round_number": 5}, make_tensors(), NotServing, "too far behind round 5"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_malformed_microbatches_are_refused_and_change_nothing(swarm, pair, change, tensors, error, message):
    first, last = pair
    before = last.trainer.state()
    with pytest.raises(error, match=message) as caught:
        await first.transport.call(last.peer_id, make_call(swarm, **change), tensors, timeout_s=20.0)
    assert type(caught.value) is error
    assert last.trainer.num_samples == 0
    assert last.admission.admitted == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in last.trainer.state().items())
    result = await first.run(make_microbatch())
    assert result.loss_sum == pytest.approx(reference(swarm.manifest)[0], abs=1e-6), "it serves on"


async def test_unknown_operations_and_fields_are_refused(swarm, pair):
    _, last = pair
    fields = make_call(swarm).model_dump()
    with pytest.raises(InvalidMessage, match="surplus: unknown key"):
        await last.dispatcher("caller", "microbatch", fields | {"surplus": 1}, make_tensors())
    with pytest.raises(InvalidMessage, match="unknown operation 'eval'"):
        await last.dispatcher("caller", "eval", {}, ())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
async def test_a_gradient_that_is_not_finite_or_too_large_is_a_failed_hop_and_not_counted(swarm, pair, value):
    first, _ = pair

    def poison(reply):
        torch.frombuffer(reply.tensors[0], dtype=torch.float32)[5] = value
        return reply

    fault = swarm.network.fault(op="microbatch", tamper=poison)
    with pytest.raises(HopFailed, match="the next stage returned a gradient that cannot be used"):
        await first.run(make_microbatch())
    assert fault.fired == 1
    assert first.trainer.num_samples == 0
    assert not any(gradient.any() for gradient in first.gradients())
    assert first.metric("invalid_messages", "gradient") == 1


@pytest.mark.parametrize("value", [float("nan"), 3e38])
async def test_a_peer_that_returns_gradients_that_cannot_be_used_is_avoided_ever_longer(swarm, pair, value):
    first, last = pair
    now = 0.0
    first.next_stage._clock = ReadClock(lambda: now)

    def poison(reply):
        torch.frombuffer(reply.tensors[0], dtype=torch.float32)[5] = value
        return reply

    swarm.network.fault(op="microbatch", tamper=poison, times=3)
    for seed in range(3):
        with pytest.raises(HopFailed, match="cannot be used"):
            await first.run(make_microbatch(seed))
        pause_s = 2**seed
        now += 0.9 * pause_s
        assert first.next_stage._refused.avoided(now) == {Life(last.peer_id)}, "though its reply came in time"
        now += 0.2 * pause_s
        assert not first.next_stage._refused.avoided(now)
    await first.run(make_microbatch(3))
    assert first.trainer.num_samples == SAMPLES


@pytest.mark.parametrize("is_gone_for_a_while", [False, True])
async def test_a_peer_in_a_new_life_is_not_avoided_for_what_its_former_one_did(swarm, pair, is_gone_for_a_while):
    first, last = pair
    await swarm.add("c", 1)
    swarm.network.fault(op="microbatch", to=last.peer_id, fail=CallTimeout("stalled"))
    for seed in range(3):
        await first.run(make_microbatch(seed))
    assert first.next_stage._backoff.avoided(0.0) == {Life(last.peer_id)}
    if is_gone_for_a_while:
        swarm.peers.remove(last)
        await first.run(make_microbatch(3))
        swarm.peers.append(last)
    assert last.trainer.num_samples == 0
    last.incarnation = 7
    for seed in range(4, 8):
        await first.run(make_microbatch(seed))
    assert last.trainer.num_samples > 0


def cut_gradient(reply):
    reply.tensors = (reply.tensors[0][:-4],)
    return reply


def drop_gradient(reply):
    reply.tensors = ()
    return reply


def nan_loss(reply):
    reply.body["loss_sum"] = float("nan")
    return reply


def largest_loss(reply):
    reply.body["loss_sum"] = 1e30
    return reply


def forge_heads(reply):
    reply.body["base"] = ("forged",) * 257
    return reply


@pytest.mark.parametrize("tamper", [cut_gradient, drop_gradient, nan_loss, largest_loss, forge_heads])
async def test_a_peer_that_replies_nonsense_is_replaced_and_avoided(swarm, pair, tamper):
    first, _ = pair
    await swarm.add("c", 1)
    fault = swarm.network.fault(op="microbatch", tamper=tamper)
    await first.run(make_microbatch())
    assert fault.fired == 1
    assert first.trainer.num_samples == SAMPLES
    assert first.metric("retries", "invalid") == 1
    assert len({callee for _, callee, _ in swarm.network.calls}) == 2
    assert first.next_stage._backoff.avoided(0.0) == {Life(swarm.network.calls[0][1])}


async def test_a_busy_peer_is_passed_over_and_not_blamed(swarm):
    first = await swarm.add("a", 0)
    full = [await swarm.add(name, 1, capacity=0) for name in "bc"]
    free = await swarm.add("d", 1)
    for number in range(6):
        await first.run(make_microbatch(number))
    assert free.trainer.num_samples == 6 * SAMPLES
    assert first.metric("retries", "busy") >= 2, "they were asked"
    assert not any(peer.trainer.num_samples for peer in full)
    assert first.next_stage._backoff.avoided(0.0) == frozenset()
    called = {callee for _, callee, _ in swarm.network.calls}
    assert called == {peer.peer_id for peer in [*full, free]}


async def test_a_busy_peer_is_not_asked_again_for_the_same_microbatch(swarm):
    first = await swarm.add("a", 0)
    full = await swarm.add("b", 1, capacity=0, speed=1000.0)
    free = await swarm.add("c", 1, speed=1.0)
    await first.run(make_microbatch(0))
    await first.run(make_microbatch(1))
    called = [callee for _, callee, _ in swarm.network.calls]
    assert full.peer_id in called
    assert called.count(free.peer_id) == 2
    assert called.count(full.peer_id) <= 2


async def test_a_closed_round_ends_the_tries(swarm, pair):
    first, last = pair
    await swarm.add("c", 1)
    for peer in swarm.peers[1:]:
        peer.open(3)
    with pytest.raises(RoundClosed) as caught:
        await first.run(make_microbatch(round_number=0))
    assert caught.value.round_number == 3
    assert len(swarm.network.calls) == 1
    assert last.trainer.num_samples == first.trainer.num_samples == 0


@pytest.mark.parametrize(("its", "behind"), [(4, "caller"), (12, "callee")])
async def test_a_round_of_the_same_number_on_another_timeline_is_another_round(swarm, pair, its, behind):
    """Both parts of a run that was cut in two may come to it, with different weights."""
    first, last = pair
    begin_round(last.rounds, 16, timeline=Timeline(8, 3, 3), weights_version=last.trainer.weights_version)
    microbatch = replace(make_microbatch(round_number=16), timeline=its)
    first.open(16)
    with pytest.raises(RoundClosed) as caught:
        await first.run(microbatch)
    assert caught.value.round_number == 16 + (behind == "caller"), "it names a later round to whoever is behind"
    assert last.trainer.num_samples == 0
    await first.run(replace(microbatch, timeline=8))
    assert last.trainer.num_samples == SAMPLES


async def test_a_microbatch_that_waits_while_a_rewind_changes_the_weights_is_not_counted(swarm, pair):
    """Its round is over: its gradient would join the accumulator of the round that the rewind begins."""
    first, last = pair
    release = await last.occupy()
    running = asyncio.ensure_future(first.run(make_microbatch()))
    await until(lambda: last.admission.admitted)
    rewinding = asyncio.ensure_future(last.device_thread.run(Priority.STEP, last.trainer.restart))
    await anyio.wait_all_tasks_blocked()
    release.set()
    await rewinding
    with pytest.raises(RoundClosed):
        await running
    assert first.trainer.num_samples == last.trainer.num_samples == 0


async def test_tries_are_bounded(swarm, pair):
    first, _ = pair
    await swarm.add("c", 1)
    fault = swarm.network.fault(op="microbatch", fail=CallTimeout("stalled"), times=100)
    with pytest.raises(HopFailed, match=r"^timeout: stalled \(stage 1, failed tries: 2\)$"):
        await first.run(make_microbatch())
    assert fault.fired == 2
    assert first.trainer.num_samples == 0


async def test_time_is_bounded(swarm, pair):
    first, _ = pair
    with pytest.raises(HopFailed, match="out of time"):
        await first.run(make_microbatch(), timeout_s=0.0)
    assert swarm.network.calls == []


async def test_a_stage_without_peers_is_a_failed_hop(swarm):
    first = await swarm.add("a", 0)
    with pytest.raises(HopFailed, match="no peer serves the stage, and then out of time"):
        await first.next_stage.send(make_microbatch(), None, anyio.current_time() + 0.02)


async def test_a_leaving_peer_does_not_wait_for_a_stage_without_peers(swarm):
    """Where all peers of a swarm leave at once, nobody comes any more."""
    peer = await swarm.add("a", 0)
    peer.next_stage.stop_waiting()
    with pytest.raises(HopFailed, match=r"no peer serves the stage \(stage 1, failed tries: 0\)"):
        await peer.run(make_microbatch())


async def test_the_callee_gives_up_when_its_caller_does(swarm, pair):
    first, last = pair
    call = make_call(swarm, round_number=1, timeout_s=0.01)  # held until round 1, which does not come
    with pytest.raises(CallTimeout, match="not done within"):
        await first.transport.call(last.peer_id, call, make_tensors(), timeout_s=20.0)
    assert last.admission.held == 0
    assert last.metric("microbatches", "train", "failed") == 1


async def test_a_callee_that_dies_is_replaced(swarm, pair):
    first, last = pair
    other = await swarm.add("c", 1)
    release, release_other = await last.occupy(), await other.occupy()
    running = asyncio.ensure_future(first.run(make_microbatch()))
    await until(lambda: last.admission.admitted or other.admission.admitted)
    dying, surviving = (last, other) if last.admission.admitted else (other, last)
    swarm.network.kill(dying.peer_id)
    await until(lambda: dying.admission.admitted == 0)
    release.set()
    release_other.set()
    await running
    assert surviving.trainer.num_samples == first.trainer.num_samples == SAMPLES
    assert dying.trainer.num_samples == 0


async def test_a_failure_behind_a_peer_is_not_blamed_on_it():
    async with Swarm(make_manifest(3, limits={"hop_tries": 1})) as swarm:
        first, middle, last = [await swarm.add("abc"[stage], stage) for stage in range(3)]
        fault = swarm.network.fault(op="microbatch", to=last.peer_id, fail=CallTimeout("stalled"))
        with pytest.raises(
            HopFailed, match=r"^timeout: stalled \(stage 2, failed tries: 1\) \(stage 1, failed tries: 1\)$"
        ):
            await first.run(make_microbatch())
        assert fault.fired == 1
        assert middle.next_stage._backoff.avoided(0.0) == {Life(last.peer_id)}
        assert first.next_stage._backoff.avoided(0.0) == frozenset()
        assert [peer.trainer.num_samples for peer in swarm.peers] == [0, 0, 0]


@pytest.mark.parametrize(("codec", "value"), [("fp16", float("inf")), ("none", float("nan")), ("none", 2.0**37)])
async def test_activations_that_nobody_could_use_are_a_failed_hop(codec, value):
    """Were they sent, the next stage would take this peer for one that sends nonsense."""
    async with Swarm(make_manifest(wire={"activations": codec})) as swarm:
        first, _ = await swarm.add("a", 0), await swarm.add("b", 1)
        with torch.no_grad():
            for module in first.trainer.module.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.weight.fill_(value)
        with pytest.raises(NotFinite, match="what this stage computed cannot be sent"):
            await first.run(make_microbatch())
        assert first.trainer.num_samples == 0
        assert swarm.network.calls == []


async def test_a_loss_that_is_not_finite_is_a_failed_hop_and_not_counted(swarm, pair):
    first, last = pair
    with torch.no_grad():
        last.trainer.module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(CallError, match="the loss is not finite") as caught:
        await first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0)
    assert type(caught.value) is NotFinite
    assert last.trainer.num_samples == 0


@pytest.mark.parametrize(("well", "expected"), [(False, NotFinite), (True, HopFailed)])
async def test_numbers_that_no_peer_has_finite_are_told_to_the_first_stage(well, expected):
    """One peer of the stage that fails otherwise may have finite ones: the weights are not to blame yet."""
    async with Swarm(make_manifest(3, limits={"hop_tries": 2})) as swarm:
        first, _ = await swarm.add("a", 0), await swarm.add("b", 1)
        for peer_id in "cd":
            last = await swarm.add(peer_id, 2)
            with torch.no_grad():
                last.trainer.module.lm_head.weight.fill_(float("nan"))
        if well:
            swarm.network.fault(op="microbatch", to=last.peer_id, fail=CallTimeout("stalled"), times=100)
        with pytest.raises(HopFailed) as caught:
            await first.run(make_microbatch())
        assert type(caught.value) is expected


@pytest.mark.parametrize("gradients", ["blockwise_8bit", "int4_hadamard"])
async def test_codecs_of_the_manifest_are_used_on_the_wire(gradients):
    wire = {"activations": "bf16", "gradients": gradients}
    async with Swarm(make_manifest(wire=wire)) as swarm:
        first, last = await swarm.add("a", 0), await swarm.add("b", 1)
        hidden = encode(torch.zeros(SAMPLES, LENGTH, HIDDEN), "bf16")
        tensors = (encode_tokens(tokens()), hidden)
        reply = await first.transport.call(last.peer_id, make_call(swarm), tensors, timeout_s=20.0)
        assert reply.tensors[0].nbytes == encoded_bytes((SAMPLES, LENGTH, HIDDEN), gradients)
        result = await first.run(make_microbatch(1))
        assert result.loss_sum == pytest.approx(reference(swarm.manifest, (1,))[0], rel=1e-2)


async def test_a_full_peer_says_so(swarm):
    first, last = await swarm.add("a", 0), await swarm.add("b", 1, capacity=0)
    with pytest.raises(Busy):
        await first.transport.call(last.peer_id, make_call(swarm), make_tensors(), timeout_s=20.0)
    assert last.metric("microbatches", "train", "busy") == 1


@pytest.mark.parametrize("mode", ["train", "evaluate", "score"])
async def test_a_stranger_is_told_to_come_again_and_nothing_is_computed_for_it(swarm, pair, mode):
    """A peer of the same stage, too: only the stage before sends microbatches."""
    _, last = pair
    mate = await swarm.add("c", 1)
    stranger = swarm.network.transport(Identity.generate().peer_id)
    for transport in (stranger, mate.transport):
        for number in range(20):
            call = make_call(swarm, mode=mode, microbatch=bytes([number]) * 16)
            with pytest.raises(Busy, match="no announcement of this peer for stage 0 has been seen here yet"):
                await transport.call(last.peer_id, call, make_tensors(), timeout_s=20.0)
    assert last.trainer.num_samples == 0
    assert last.metric("microbatches", mode, "stranger") == 40
    assert len(swarm.strangers) == 40, "the directory looks for them"


async def test_a_peer_whose_announcement_comes_late_loses_nothing_and_blames_nobody(swarm, pair):
    """It has just joined, moved or begun a new life, and the stage after it has not seen that yet."""
    first, last = pair
    swarm.serves = lambda peer_id, stage: len(swarm.strangers) >= 3
    await first.run(make_microbatch())
    assert swarm.strangers == [last.name] * 3
    assert first.trainer.num_samples == last.trainer.num_samples == SAMPLES
    now = first.next_stage._clock.monotonic_s()
    assert not first.next_stage._backoff.avoided(now)


async def test_one_caller_does_not_shut_out_another(swarm):
    first, second = await swarm.add("a", 0), await swarm.add("b", 0)
    last = await swarm.add("c", 1)
    held = [
        asyncio.ensure_future(
            first.transport.call(
                last.peer_id,
                make_call(swarm, microbatch=bytes([number]) * 16, round_number=1),
                make_tensors(),
                timeout_s=20.0,
            )
        )
        for number in range(20)
    ]
    await anyio.wait_all_tasks_blocked()
    assert last.admission.held == 6, "and two of eight places are kept for others"
    await second.run(make_microbatch(30))
    assert last.trainer.num_samples == SAMPLES
    last.open(1)
    outcomes = await asyncio.gather(*held, return_exceptions=True)
    assert sum(isinstance(outcome, Busy) for outcome in outcomes) == 14
    assert sum(isinstance(outcome, Reply) for outcome in outcomes) == 6
    assert not last.admission._by_caller


async def test_a_gradient_that_is_not_finite_on_its_way_out_empties_the_accumulator(swarm, pair, monkeypatch):
    first, last = pair
    await first.run(make_microbatch(0))
    backward = last.trainer.backward
    monkeypatch.setattr(last.trainer, "backward", lambda *args, **options: backward(*args, **options) * float("nan"))
    with pytest.raises(HopFailed, match="cannot be sent"):
        await first.run(make_microbatch(1))
    assert last.trainer.num_samples == 0
    assert not any(gradient.any() for gradient in last.gradients())
    assert set(last.work.lost) == {last.rounds.current.number}, "each try"
    assert last.rounds.current.counted == {}


@pytest.mark.parametrize(
    "function", ["model.training.check_norm", "model.training.limit_norm", "runtime.stage.executor.encode"]
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
async def test_a_device_that_fails_around_a_backward_pass_empties_the_accumulator(
    swarm, pair, monkeypatch, function, error
):
    """What is in there is counted by nobody, or is counted and not there any more."""
    peer = pair[0] if function.endswith("check_norm") else pair[1]
    await pair[0].run(make_microbatch(0))

    def fail(*args):
        raise error("no memory")

    passed = peer.executor._forward(peer.rounds.current, make_microbatch(1), make_tensors()[1] if peer.stage else None)
    result = HopResult(1.0, encode(torch.zeros(SAMPLES, LENGTH, HIDDEN), "none"))
    monkeypatch.setattr(f"swarm_peer.{function}", fail)
    with pytest.raises(HopFailed if error is torch.OutOfMemoryError else error):
        peer.executor._backward(peer.rounds.current, make_microbatch(1), passed, result)
    assert peer.trainer.num_samples == 0
    assert not any(gradient.any() for gradient in peer.gradients())
    assert peer.rounds.current.counted == {}
    assert peer.work.lost == [peer.rounds.current.number]


async def test_a_peer_whose_device_has_no_memory_to_send_what_it_computed_goes_on(swarm, pair, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("swarm_peer.runtime.stage.executor.encode", fail)
        with pytest.raises(HopFailed, match="ran out of device memory"):
            await pair[0].run(make_microbatch())
    await pair[0].run(make_microbatch())
    assert [peer.trainer.num_samples for peer in pair] == [SAMPLES, SAMPLES]


@pytest.mark.parametrize("function", ["forward", "backward"])
async def test_a_pass_without_memory_holds_none_when_the_next_job_begins(swarm, pair, monkeypatch, function):
    """Nobody has handled its error by then: the event loop may be busy."""
    made, seen = [], []
    thread = pair[0].device_thread

    def fail(*args, **options):
        activations = torch.zeros(3)
        made.append(weakref.ref(activations))
        thread._jobs.put((Priority.STEP, -1, (look, 0, None, loop, loop.create_future(), threading.Lock())))
        raise torch.OutOfMemoryError("no memory")

    def look():
        seen.extend(activations() for activations in made)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(pair[0].trainer, function, fail)
    gc.disable()  # what is held in a circle would be gone by chance
    try:
        with pytest.raises(HopFailed):
            await pair[0].run(make_microbatch())
        await thread.run(Priority.STEP, lambda: None)
    finally:
        gc.enable()
    assert seen == [None]


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(("error", "left"), [(torch.OutOfMemoryError, 2), (HopFailed, 8)])
async def test_a_peer_that_runs_out_of_memory_takes_fewer_microbatches(swarm, pair, monkeypatch, function, error, left):
    """And its callers, which are told of that failure alone, take as many as before."""
    first, last = pair

    def fail(*args, **options):
        raise error("no memory")

    monkeypatch.setattr(last.trainer, function, fail)
    async with AsyncExitStack() as others:
        for _ in range(2):
            await others.enter_async_context(last.admission.enter(0))
        with pytest.raises(HopFailed):
            await first.run(make_microbatch())
    assert [peer.capacity.microbatches for peer in pair] == [8, left]


async def test_tokens_that_find_no_memory_fail_their_hop(swarm, pair, monkeypatch):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(executor_module, "decode_tokens", fail)
    with pytest.raises(HopFailed):
        await pair[0].run(make_microbatch())


async def test_a_peer_that_has_run_out_of_memory_is_busy_sooner(swarm, pair):
    last = pair[1]
    for _ in range(3):
        last.capacity.ran_out(inside=2)
    async with last.admission.enter(0, caller="one"):
        with pytest.raises(Busy):
            async with last.admission.enter(0, caller="another"):
                pass

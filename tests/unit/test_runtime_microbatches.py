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
from swarm_peer.policy.progress_counter import RoundCount
from swarm_peer.runtime.network.gossip import Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.runtime.step.handover import GradientHandover

from swarm_peer.config import RunManifest
from swarm_peer.errors import (
    Busy,
    CallError,
    CallTimeout,
    HopFailed,
    InvalidMessage,
    NotAdmitted,
    NotFinite,
    NotServing,
    PeerUnreachable,
    RoundClosed,
)
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import SampleId, WindowRange, ranges_of
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
from swarm_peer.runtime.stage.rounds import RoundBook, Transfer
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch, StageClient, time_of_callee
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.step import handover as handover_module
from swarm_peer.wire.codecs import bytes_of, encode, encode_tokens, encoded_bytes
from swarm_peer.wire.fields import MAX_SAMPLES
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MAX_COUNTS, CommitGradientCall, GradientChunkCall, MicrobatchCall

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
        self.progress = ProgressBook(
            context=context,
            incarnation=1,
            is_author=lambda author: author in swarm.ids(0),
            on_stranger=swarm.strangers.append,
            step=lambda: self.rounds.step,
        )
        self.next_stage = None
        if not self.trainer.spec.is_last:
            self.next_stage = StageClient(
                context=context, stage=stage + 1, transport=self.transport, progress=self.progress, view=swarm.view
            )
        self.executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.device_thread,
            speed=self.meter,
            next_stage=self.next_stage,
            capacity=self.capacity,
            replies_kept=replies_kept,
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
        barrier = Barrier(
            context=context,
            stage=stage,
            rounds=self.rounds,
            transport=self.transport,
            progress=self.progress,
            view=swarm.view,
            on_other_timeline=self.admission.saw_other_timeline,
        )
        handler = StageServer(
            context=context, core=core, progress=self.progress, view=swarm.view, serves=lambda *who: swarm.serves(*who)
        )
        gossip = Gossip(
            manifest_hash=manifest.hash,
            transport=self.transport,
            progress=self.progress,
            welcome=barrier.welcome,
            drop=lambda peer, serial: None,
        )
        access = SwarmAccess(
            transport=self.transport,
            progress=self.progress,
            gossip=gossip,
            view=swarm.view,
            look=None,
            coordinators=None,
            beginning=None,
        )
        self.handover = GradientHandover(context=context, core=core, swarm=access, barrier=barrier)
        calls = handler.calls | barrier.calls | gossip.calls | self.handover.calls
        self.dispatcher = dispatcher(manifest.hash, stage, calls)
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


async def test_progress_rides_on_calls_and_replies(swarm, pair):
    first, last = pair
    other = await swarm.add("c", 0)
    other.progress.count_own(0, RoundCount(4, 4, 9.0))
    first.progress.count_own(0, RoundCount(2, 4, 5.0))
    last.progress.merge(other.progress.signed_counts())
    await first.run(make_microbatch())
    assert last.progress.counter.samples(0) == 6
    assert first.progress.counter.samples(0) == 6


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
        "counts": (),
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
        ({"counts": (("x", b"y"),)}, make_tensors(), None, "counts of strangers are dropped"),
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
    call = first.transport.call(last.peer_id, make_call(swarm, **change), tensors, timeout_s=20.0)
    if error is None:
        await call
        assert last.progress.counter.samples(0) == 0
        return
    with pytest.raises(error, match=message) as caught:
        await call
    assert type(caught.value) is error
    assert last.trainer.num_samples == 0
    assert last.admission.admitted == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in last.trainer.state().items())
    result = await first.run(make_microbatch())
    assert result.loss_sum == pytest.approx(reference(swarm.manifest)[0], abs=1e-6), "it serves on"


async def test_forged_counts_are_refused_before_anything_is_computed(swarm, pair):
    first, last = pair
    forged = make_call(swarm, counts=((first.peer_id, b"forged"),))
    with pytest.raises(InvalidMessage, match="no msgpack"):
        await first.transport.call(last.peer_id, forged, make_tensors(), timeout_s=20.0)
    assert last.trainer.num_samples == 0


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


def forge_counts(reply):
    reply.body["counts"] = ((Identity.generate().peer_id, b"forged"),) * (MAX_COUNTS + 1)
    return reply


@pytest.mark.parametrize("tamper", [cut_gradient, drop_gradient, nan_loss, largest_loss, forge_counts])
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
    assert last.admission.met_other_timeline
    assert not last.admission.is_behind
    assert last.trainer.num_samples == 0
    await first.run(replace(microbatch, timeline=8))
    assert last.trainer.num_samples == SAMPLES


@pytest.mark.parametrize("round_number", [15, 40])
@pytest.mark.parametrize(("timeline", "is_noticed"), [(8, False), (4, True)])
async def test_another_timeline_is_noticed_in_whatever_round_it_is(swarm, pair, round_number, timeline, is_noticed):
    """Where it does not get in: who is alone in its stage has no stage-mates to tell it."""
    first, last = pair
    begin_round(last.rounds, 16, timeline=Timeline(8, 3, 3), weights_version=last.trainer.weights_version)
    first.open(round_number)
    # The caller of a later round is asked to come again, which it need not do here.
    with pytest.raises((RoundClosed, HopFailed)):
        await first.run(replace(make_microbatch(round_number=round_number), timeline=timeline), timeout_s=0.5)
    assert last.admission.met_other_timeline == is_noticed


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


async def test_a_gradient_that_waits_while_a_rewind_changes_the_weights_is_not_added(swarm):
    """The leaving peer is told that its round is over."""
    _, leaving, staying = await group_of_two(swarm)
    release = await staying.occupy()
    handing_over = asyncio.ensure_future(leaving.handover.hand_over())
    await until(lambda: staying.admission.admitted)
    rewinding = asyncio.ensure_future(staying.device_thread.run(Priority.STEP, staying.trainer.restart))
    await anyio.wait_all_tasks_blocked()
    release.set()
    await rewinding
    assert not await handing_over, "as where all stage-mates are ending the round"
    assert staying.trainer.num_samples == 0


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
    assert set(swarm.strangers) == {stranger.peer_id, mate.peer_id}, "the directory looks for them"


async def test_a_peer_whose_announcement_comes_late_loses_nothing_and_blames_nobody(swarm, pair):
    """It has just joined, moved or begun a new life, and the stage after it has not seen that yet."""
    first, last = pair
    swarm.serves = lambda peer_id, stage: len(swarm.strangers) >= 3
    await first.run(make_microbatch())
    assert swarm.strangers == [first.peer_id] * 3
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
    assert last.metric("lost_samples") == SAMPLES
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
    assert peer.metric("lost_samples") == SAMPLES


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


# --- a leaving peer's share -------------------------------------------------------------------------------------------


async def group_of_two(swarm):
    """One peer of stage 0 and two of stage 1, each of which has counted one microbatch."""
    first = await swarm.add("a", 0)
    leaving, staying = await swarm.add("b", 1), await swarm.add("c", 1)
    for seed, last in ((0, leaving), (1, staying)):
        await first.transport.call(last.peer_id, make_call(swarm, seed), make_tensors(tokens(seed)), timeout_s=20.0)
    return first, leaving, staying


def last_stage_sums(manifest, seeds):
    trainer = StageTrainer(ResolvedManifest.of(manifest), ResolvedManifest.of(manifest).specs[1])
    for seed in seeds:
        trainer.backward(trainer.forward(tokens(seed), torch.zeros(SAMPLES, LENGTH, HIDDEN)))
    return trainer.gradient_sums()[0]


async def test_a_leaving_peers_share_is_added_to_a_stage_mates(swarm):
    first, leaving, staying = await group_of_two(swarm)
    assert await leaving.handover.hand_over()
    assert leaving.trainer.num_samples == 0
    assert staying.trainer.num_samples == 2 * SAMPLES
    assert_equal(staying.trainer.gradient_sums()[0], last_stage_sums(swarm.manifest, (1, 0)))
    assert await leaving.handover.hand_over(), "there is nothing left to hand over"
    assert staying.trainer.num_samples == 2 * SAMPLES

    # What the leaving peer has counted comes again, because its reply was lost: to itself, and to its stage-mate.
    sums = staying.trainer.gradient_sums()[0]
    for called in (leaving, staying):
        reply = await first.transport.call(called.peer_id, make_call(swarm, 0), make_tensors(tokens(0)), timeout_s=20.0)
        assert reply.tensors[0].nbytes
    assert leaving.trainer.num_samples == 0
    assert staying.trainer.num_samples == 2 * SAMPLES
    assert_equal(staying.trainer.gradient_sums()[0], sums)


async def test_who_takes_a_share_over_knows_how_much_of_it_belongs_to_the_round_before():
    """Where updates are delayed, the average that ends the round may be under way without it."""
    async with Swarm(make_manifest(averaging={"mode": "delayed"})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        strategy = leaving.trainer.strategy
        strategy.contribution(leaving.gradients(), SAMPLES)  # held back for the next round
        strategy.end_round(leaving.gradients())
        leaving.open(1)
        staying.open(1)
        assert await leaving.handover.hand_over()
        assert staying.rounds.current.given == {leaving.peer_id: SAMPLES}
        assert staying.trainer.strategy.pending_samples == 2 * SAMPLES


async def test_a_microbatch_that_a_share_brings_while_it_is_computed_is_added_once(swarm, monkeypatch):
    """Its caller was not answered by the leaving peer, and has tried the one that takes the share over."""
    first, leaving, staying = await group_of_two(swarm)
    backward = staying.executor._backward

    def backward_later(entered, *arguments):
        staying.trainer.strategy.take_in([leaving.trainer.gradient_sums()])
        entered.counted.update(leaving.rounds.current.counted)
        return backward(entered, *arguments)

    monkeypatch.setattr(staying.executor, "_backward", backward_later)
    reply = await first.transport.call(staying.peer_id, make_call(swarm, 0), make_tensors(tokens(0)), timeout_s=20.0)
    assert reply.tensors[0].nbytes
    assert staying.trainer.num_samples == 2 * SAMPLES
    assert_equal(staying.trainer.gradient_sums()[0], last_stage_sums(swarm.manifest, (1, 0)))


async def test_counts_that_nobody_knows_come_with_a_share(swarm):
    """If the leaving peer of stage 0 dies right afterwards, its samples are read by nobody else."""
    leaving, staying, _ = await swarm.add("a", 0), await swarm.add("d", 0), await swarm.add("b", 1)
    await leaving.run(make_microbatch())
    leaving.progress.count_own(0, RoundCount(samples=SAMPLES, claimed=SAMPLES))
    assert staying.progress.counter.samples(0) == 0
    assert await leaving.handover.hand_over()
    assert staying.trainer.num_samples == staying.progress.counter.samples(0) == SAMPLES


async def test_a_share_whose_last_reply_is_lost_is_added_once(swarm):
    _, leaving, staying = await group_of_two(swarm)
    fault = swarm.network.fault(op="commit_gradient", drop_reply=True, times=2)
    assert await leaving.handover.hand_over()
    assert fault.fired == 2
    assert staying.trainer.num_samples == 2 * SAMPLES
    assert leaving.metric("lost_samples") == 0


async def test_a_share_whose_connection_breaks_before_it_is_added_is_kept(swarm):
    """The receiver's device was busy; the giver connects again."""
    _, leaving, staying = await group_of_two(swarm)
    is_busy = threading.Event()
    job = asyncio.ensure_future(staying.device_thread.run(Priority.STEP, is_busy.wait))
    fault = swarm.network.fault(op="commit_gradient", drop_reply=True)
    handling = staying.handover._commit_once

    async def broken(caller, call):
        staying.handover._commit_once = handling
        adding = asyncio.ensure_future(handling(caller, call))
        await until(lambda: staying.admission.admitted)
        await anyio.wait_all_tasks_blocked()
        adding.cancel()
        await asyncio.wait([adding])
        is_busy.set()

    staying.handover._commit_once = broken
    assert await leaving.handover.hand_over()
    await job
    assert fault.fired == 1
    assert staying.trainer.num_samples == 2 * SAMPLES
    assert leaving.metric("lost_samples") == 0


async def test_a_share_that_may_have_been_taken_over_is_offered_to_nobody_else(swarm):
    _, leaving, _ = await group_of_two(swarm)
    await swarm.add("d", 1)
    swarm.network.fault(op="commit_gradient", drop_reply=True, times=100)
    assert await leaving.handover.hand_over()
    assert sum(peer.trainer.num_samples for peer in swarm.peers if peer.stage == 1) == 2 * SAMPLES
    assert leaving.trainer.num_samples == 0
    assert leaving.metric("lost_samples") == SAMPLES, "in doubt, it is reported"


@pytest.mark.parametrize(
    "refusal", [NotAdmitted("revoked"), InvalidMessage("nothing has arrived"), RoundClosed("late")]
)
async def test_a_refusal_does_not_tell_that_a_share_was_not_added_before(swarm, refusal):
    """The receiver may have learnt meanwhile that the giver was revoked, or have restarted."""
    _, leaving, _ = await group_of_two(swarm)
    await swarm.add("d", 1)
    swarm.network.fault(op="commit_gradient", drop_reply=True)
    swarm.network.fault(op="commit_gradient", fail=refusal)
    assert await leaving.handover.hand_over()
    assert sum(peer.trainer.num_samples for peer in swarm.peers if peer.stage == 1) == 2 * SAMPLES
    assert leaving.trainer.num_samples == 0
    assert leaving.metric("lost_samples") == SAMPLES, "in doubt, it is reported"


@pytest.mark.parametrize("moves_away", [False, True])
async def test_a_share_whose_last_reply_is_lost_is_added_once_whatever_its_receiver_does_meanwhile(
    swarm, moves_away, monkeypatch
):
    _, leaving, staying = await group_of_two(swarm)
    other = await swarm.add("d", 1)
    monkeypatch.setattr(leaving.handover._rng, "shuffle", lambda mates: mates.sort(key=staying.peer_id.__ne__))
    fault = swarm.network.fault(op="commit_gradient", drop_reply=True, after=anyio.Event())
    handing_over = asyncio.ensure_future(leaving.handover.hand_over())
    await until(lambda: staying.trainer.num_samples == 2 * SAMPLES and not staying.admission.admitted)
    if moves_away:
        await staying.dispatcher.remove(1)
    else:
        for round_number in range(1, 4):
            staying.open(round_number)
    fault.after.set()
    assert await handing_over
    assert swarm.network.num_calls("commit_gradient") == 2
    assert other.trainer.num_samples == leaving.trainer.num_samples == 0
    assert leaving.metric("lost_samples") == SAMPLES * moves_away, "in doubt, it is reported"


@pytest.mark.parametrize(
    ("op", "kept", "taken"),
    [("gradient_chunk", SAMPLES, 0), ("commit_gradient", 0, SAMPLES)],
    ids=["sending", "committing"],
)
async def test_a_peer_without_time_keeps_its_share_only_if_nobody_can_have_taken_it(swarm, op, kept, taken):
    """It may end the round together with the others yet, and would bring its share to their average."""
    _, leaving, staying = await group_of_two(swarm)
    fault = swarm.network.fault(op=op, after=anyio.Event())
    gone = []
    handing_over = asyncio.ensure_future(leaving.handover.hand_over(on_gone=lambda: gone.append(op)))
    await until(lambda: fault.fired and staying.trainer.num_samples == SAMPLES + taken)
    handing_over.cancel()
    await asyncio.wait([handing_over])
    assert leaving.trainer.num_samples == kept
    assert gone == [op] * (not kept)
    assert staying.trainer.num_samples == SAMPLES + taken
    assert leaving.metric("lost_samples") == SAMPLES - kept


async def test_a_share_goes_to_another_stage_mate_when_one_dies(swarm):
    _, leaving, _ = await group_of_two(swarm)
    await swarm.add("d", 1)
    fault = swarm.network.fault(op="gradient_chunk", fail=PeerUnreachable("gone"))
    assert await leaving.handover.hand_over()
    assert fault.fired == 1
    assert sum(peer.trainer.num_samples for peer in swarm.peers if peer.stage == 1) == 2 * SAMPLES


async def test_stage_mates_are_asked_in_any_order(swarm):
    _, leaving, _ = await group_of_two(swarm)
    for name in "defg":
        await swarm.add(name, 1)
    asked = []
    call = leaving.transport.call

    async def record(peer, body, tensors=(), *, timeout_s):
        if body.op == "gradient_chunk" and (not asked or asked[-1] != peer):
            asked.append(peer)
            raise NotServing("another one, please")
        return await call(peer, body, tensors, timeout_s=timeout_s)

    leaving.transport.call = record
    assert await leaving.handover.hand_over()
    assert sorted(asked) == sorted(swarm.ids(1) - {leaving.peer_id})
    assert asked != sorted(asked)


async def test_a_share_of_a_round_that_ends_stays_with_its_peer(swarm):
    _, leaving, staying = await group_of_two(swarm)
    staying.rounds.enter(Phase.ENDING)
    assert not await leaving.handover.hand_over(), "it has to end the round together with the others"
    assert (leaving.trainer.num_samples, staying.trainer.num_samples) == (SAMPLES, SAMPLES)


async def test_a_stage_mate_that_has_yet_to_make_the_last_update_is_waited_for(swarm):
    """It would take another round otherwise, at whose end the same may happen."""
    _, leaving, staying = await group_of_two(swarm)
    staying.rounds.enter(Phase.ENDING)

    def begin(peer):
        peer.rounds.begin(replace(peer.rounds.step, round_number=1))
        peer.rounds.enter(Phase.OPEN)

    begin(leaving)
    call = leaving.transport.call

    async def begin_after(peer, body, tensors=(), *, timeout_s):
        asyncio.get_running_loop().call_later(0.01, begin, staying)
        return await call(peer, body, tensors, timeout_s=timeout_s)

    leaving.transport.call = begin_after
    assert await leaving.handover.hand_over()
    assert (leaving.trainer.num_samples, staying.trainer.num_samples) == (0, 2 * SAMPLES)


async def test_it_is_waited_for_too_if_it_has_all_of_the_difference_already():
    """Then it is not asked to take anything in, but to add what it has."""
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        ops = []
        call = leaving.transport.call

        def begin(peer):
            peer.rounds.begin(replace(peer.rounds.step, round_number=1), keeps_transfers=True)
            peer.rounds.enter(Phase.OPEN)

        async def end_or_begin(peer, body, tensors=(), *, timeout_s):
            ops.append(body.op)
            if leaving.rounds.current.number == 0:
                staying.rounds.enter(Phase.ENDING)
            else:
                asyncio.get_running_loop().call_later(0.01, begin, staying)
            return await call(peer, body, tensors, timeout_s=timeout_s)

        leaving.transport.call = end_or_begin
        leaving.handover._sent[staying.peer_id] = transfer = arrived_whole(leaving)
        staying.rounds.current.transfers[leaving.peer_id] = transfer
        assert not await leaving.handover.hand_over()
        begin(leaving)
        assert await leaving.handover.hand_over()
        assert ops == ["commit_gradient"] * 2
        assert staying.trainer.strategy.pending_samples == 2 * SAMPLES


@pytest.mark.parametrize("averaging", [{"mode": "periodic", "inner_steps": 2}, {"mode": "synchronous"}])
async def test_what_arrives_while_a_round_of_a_period_ends_is_kept_for_the_next_one(monkeypatch, averaging):
    """Over a slow link nothing may arrive in time otherwise, round after round."""
    monkeypatch.setattr(handover_module, "CHUNK_BYTES", 512)
    async with Swarm(make_manifest(averaging=averaging)) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        staying.rounds.enter(Phase.ENDING)
        assert not await leaving.handover.hand_over(), "it cannot be added to a round that ends"
        transfers = staying.rounds.current.transfers
        if averaging["mode"] == "synchronous":
            assert not transfers, "the average at the end of the round is of what has been added"
        else:
            size = len(transfers[leaving.peer_id].data)
            assert transfers[leaving.peer_id].received == set(range(0, size, 512))


async def test_a_difference_is_sent_to_one_stage_mate_alone_while_all_wait_for_the_leaving_peer(monkeypatch):
    monkeypatch.setattr(handover_module, "CHUNK_BYTES", 512)
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        others = [staying, *[await swarm.add(name, 1) for name in "de"]]
        for peer in others:
            peer.rounds.enter(Phase.ENDING)
        leaving.progress.saw_round(1)
        assert not await leaving.handover.hand_over()
        assert sorted(len(peer.rounds.current.transfers) for peer in others) == [0, 0, 1]


async def test_a_stage_mate_that_ends_its_round_early_keeps_no_other_one_from_taking_a_difference(monkeypatch):
    """It may have been told of a later round by a lie."""
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        other = await swarm.add("d", 1)
        monkeypatch.setattr(leaving.handover._rng, "shuffle", lambda mates: mates.sort(key=other.peer_id.__eq__))
        staying.rounds.enter(Phase.ENDING)
        assert await leaving.handover.hand_over()
        assert other.trainer.strategy.pending_samples == SAMPLES


async def test_who_leaves_as_well_takes_no_parts_while_its_round_ends():
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        staying.admission.leave()
        staying.rounds.enter(Phase.ENDING)
        assert not await leaving.handover.hand_over()
        assert not staying.rounds.current.transfers


async def test_commits_for_a_later_round_hold_up_no_other_ones():
    async with Swarm(make_manifest()) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        liar = await swarm.add("d", 1)
        early = CommitGradientCall(
            manifest=swarm.manifest.hash,
            stage=1,
            round_number=1,
            transfer=bytes(16),
            samples=(1,),
            sha256=bytes(32),
            counted=(),
            counts=(),
        )
        call = leaving.transport.call
        lies = []

        async def end_first(peer, body, tensors=(), *, timeout_s):
            if peer == liar.peer_id:
                raise NotServing("it takes nothing")
            if body.op == "commit_gradient":
                staying.rounds.enter(Phase.ENDING)
                lies.append(asyncio.ensure_future(liar.transport.call(staying.peer_id, early, timeout_s=60.0)))
                await asyncio.sleep(0.01)
            return await call(peer, body, tensors, timeout_s=timeout_s)

        leaving.transport.call = end_first
        with anyio.fail_after(2):
            assert not await leaving.handover.hand_over(), "it is told at once that the round ends"
        [lie] = lies
        assert not lie.done(), "it still waits for its round"
        lie.cancel()


def arrived_whole(leaving):
    """What has been sent of a peer's work: all of it."""
    works = leaving.trainer.strategy.give_away()
    data = handover_module._flatten([tensor for sums, _ in works for tensor in sums])
    return Transfer(bytes(16), data, set(range(0, len(data), handover_module.CHUNK_BYTES)))


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_difference_may_arrive_in_several_rounds_of_a_period(monkeypatch, is_kept):
    """A stage's difference may take longer than a round is open."""
    monkeypatch.setattr(handover_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(handover_module, "CHUNKS_IN_FLIGHT", 1)
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        arrived = []
        call = leaving.transport.call

        async def two_arrive(peer, body, tensors=(), *, timeout_s):
            if body.op == "gradient_chunk":
                arrived.append(body.offset)
                if staying.rounds.current.number == 0 and len(arrived) == 3:
                    staying.rounds.enter(Phase.ENDING)
                    raise RoundClosed("it was so when this part arrived")
            return await call(peer, body, tensors, timeout_s=timeout_s)

        leaving.transport.call = two_arrive
        assert not await leaving.handover.hand_over()
        assert arrived == [0, 512, 1024]
        for peer in (leaving, staying):
            trainer = peer.trainer
            trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
            trainer.apply(())
            step = replace(peer.rounds.step, round_number=1, weights_version=trainer.weights_version)
            peer.rounds.begin(step, keeps_transfers=is_kept and trainer.strategy.is_in_period)
            peer.rounds.enter(Phase.OPEN)
        arrived.clear()
        assert await leaving.handover.hand_over()
        assert arrived[0] == 1024
        assert arrived.count(0) == arrived.count(512) == (not is_kept)
        assert staying.trainer.strategy.pending_samples == 2 * SAMPLES
        assert leaving.metric("lost_samples") == 0


async def test_what_is_under_way_as_its_peer_gives_up_is_lost_with_the_rest_or_fails(swarm):
    """Else it would be counted here and reported by nobody, and its caller would count it as well."""
    first, leaving, _ = await group_of_two(swarm)
    release = await leaving.occupy()
    call = first.transport.call(leaving.peer_id, make_call(swarm, 7), make_tensors(tokens(7)), timeout_s=20.0)
    calling = asyncio.ensure_future(call)
    await until(lambda: leaving.admission.admitted == 1)
    giving_up = asyncio.ensure_future(leaving.device_thread.run(Priority.STEP, leaving.executor.give_up))
    release.set()
    assert await giving_up == SAMPLES
    with pytest.raises(NotServing, match="this peer leaves"):
        await calling
    assert leaving.trainer.num_samples == SAMPLES


async def test_a_transfer_goes_on_where_most_has_arrived(swarm, monkeypatch):
    """Else each round would begin at another stage-mate."""
    monkeypatch.setattr(handover_module, "CHUNK_BYTES", 512)
    monkeypatch.setattr(handover_module, "CHUNKS_IN_FLIGHT", 1)
    _, leaving, staying = await group_of_two(swarm)
    other = await swarm.add("d", 1)
    data = handover_module._flatten(leaving.trainer.gradient_sums()[0])
    for mate, received in ((other, set()), (staying, {0, 512})):
        leaving.handover._sent[mate.peer_id] = Transfer(bytes(16), data, received)
        mate.rounds.enter(Phase.ENDING)
    monkeypatch.setattr(leaving.handover._rng, "shuffle", lambda mates: mates.sort(key=staying.peer_id.__eq__))
    asked = []
    call = leaving.transport.call

    async def record(peer, body, tensors=(), *, timeout_s):
        asked.append((peer, body.offset))
        return await call(peer, body, tensors, timeout_s=timeout_s)

    leaving.transport.call = record
    assert not await leaving.handover.hand_over()
    assert asked == [(staying.peer_id, 1024), (other.peer_id, 0)]


async def test_what_was_given_up_half_way_takes_nobodys_place(swarm):
    _, leaving, staying = await group_of_two(swarm)
    silent, gone = await swarm.add("d", 1), await swarm.add("e", 1)
    data = handover_module._flatten(leaving.trainer.gradient_sums()[0])
    present = staying.rounds.current
    call = GradientChunkCall(
        manifest=swarm.manifest.hash, stage=1, round_number=present.number, transfer=bytes(16), offset=0
    )

    async def send():
        present.transfers.pop(leaving.peer_id, None)
        chunk = bytes_of(data)[: handover_module.CHUNK_BYTES]
        await leaving.transport.call(staying.peer_id, call, (chunk,), timeout_s=5.0)

    for other in (silent, gone):
        present.transfers[other.peer_id] = Transfer(bytes(16), data, set(), present.number)
    for _ in range(2):
        with pytest.raises(Busy):
            await send()
        present.transfers[silent.peer_id].round_number -= 1
    await send()
    assert present.transfers.keys() == {leaving.peer_id, gone.peer_id}
    present.transfers[silent.peer_id] = Transfer(bytes(16), data, set(), present.number)
    staying.handover._is_mate = lambda peer_id: peer_id != gone.peer_id
    await send()
    assert present.transfers.keys() == {leaving.peer_id, silent.peer_id}


@pytest.mark.parametrize("is_free_in_time", [True, False])
async def test_a_stage_mate_that_takes_in_other_gradients_is_asked_again(swarm, monkeypatch, is_free_in_time):
    """As where a spot market takes three machines of a stage back at once."""
    monkeypatch.setattr(handover_module, "BUSY_PAUSE_S", 0.0)
    monkeypatch.setattr(handover_module, "BUSY_PATIENCE_S", 60.0 if is_free_in_time else 0.0)
    monkeypatch.setattr(handover_module, "CHUNK_BYTES", 1024)
    _, leaving, staying = await group_of_two(swarm)
    num_chunks = -(-leaving.handover._num_bytes // 1024)
    transfers, asked = staying.rounds.current.transfers, []
    for name in "de":
        other = await swarm.add(name, 1)
        other.admission.leave()
        transfers[other.peer_id] = Transfer(bytes(16), torch.empty(0), set())
    call = leaving.transport.call

    async def record(peer, body, tensors=(), *, timeout_s):
        if peer == staying.peer_id:
            asked.append(body.op)
            if len(asked) == 3:
                transfers.popitem()
        return await call(peer, body, tensors, timeout_s=timeout_s)

    leaving.transport.call = record
    assert await leaving.handover.hand_over() == is_free_in_time, "else it ends the round with its stage-mates"
    refused, taken = (2, num_chunks) if is_free_in_time else (1, 0)
    assert asked == ["gradient_chunk"] * (refused + taken) + ["commit_gradient"] * is_free_in_time
    assert (leaving.trainer.num_samples, staying.trainer.num_samples) == (
        (0, 2 * SAMPLES) if is_free_in_time else (SAMPLES, SAMPLES)
    )
    assert leaving.metric("lost_samples") == 0


async def test_a_stage_mate_that_was_busy_and_then_leaves_ends_no_round_either(swarm, monkeypatch):
    monkeypatch.setattr(handover_module, "BUSY_PAUSE_S", 0.0)
    _, leaving, _ = await group_of_two(swarm)
    swarm.network.fault(op="gradient_chunk", fail=Busy("two others are here"))
    swarm.network.fault(op="gradient_chunk", fail=NotServing("leaving, too"))
    assert await leaving.handover.hand_over()
    assert leaving.metric("lost_samples") == SAMPLES


async def test_of_a_round_that_could_not_be_ended_nothing_is_handed_over_and_all_is_reported():
    """Its stage-mates would take the gradient that it has held back for that of the round before."""
    async with Swarm(make_manifest(averaging={"mode": "delayed"})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        strategy = leaving.trainer.strategy
        strategy.contribution(leaving.trainer.mean_gradients(), SAMPLES)
        strategy.contribution([], 3)
        assert strategy.pending_samples == SAMPLES + 3
        assert await leaving.handover.hand_over(may_end_round=False)
        assert leaving.metric("lost_samples") == SAMPLES + 3
        assert not swarm.network.num_calls("gradient_chunk")
        assert staying.trainer.strategy.pending_samples == SAMPLES


async def test_stage_mates_that_leave_at_once_do_not_wait_for_each_other(swarm):
    """As at Ctrl+C on a machine that has both: no round ends any more."""
    _, leaving, staying = await group_of_two(swarm)
    staying.admission.leave()
    assert await leaving.handover.hand_over()
    assert leaving.metric("lost_samples") == SAMPLES


async def test_a_share_of_a_round_that_its_peer_cannot_end_is_lost_at_once(swarm):
    _, leaving, staying = await group_of_two(swarm)
    staying.rounds.enter(Phase.ENDING)
    assert await leaving.handover.hand_over(may_end_round=False)
    assert leaving.metric("lost_samples") == SAMPLES
    assert (leaving.trainer.num_samples, staying.trainer.num_samples) == (0, SAMPLES)


async def test_a_share_whose_peer_died_half_way_is_forgotten_with_its_round(swarm, monkeypatch):
    """It is as large as the stage."""
    _, leaving, staying = await group_of_two(swarm)
    fault = swarm.network.fault(op="commit_gradient", fail=NotServing("gone"))
    assert await leaving.handover.hand_over()
    assert fault.fired == 1
    ended = staying.rounds.current
    assert (len(ended.transfers), len(ended.replies)) == (1, 1)
    staying.open(1)
    assert staying.rounds.previous is ended
    assert not ended.transfers
    assert not ended.replies, "the gradients that were kept for callers are as large"


@pytest.mark.parametrize(("mode", "kept"), [("synchronous", 0), ("delayed", SAMPLES), ("periodic", SAMPLES)])
async def test_of_a_share_that_is_not_finite_what_was_computed_in_rounds_before_is_handed_over(mode, kept):
    async with Swarm(make_manifest(averaging={"mode": mode, "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        for peer in (leaving, staying):
            trainer = peer.trainer
            own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
            trainer.apply(own)
            peer.open(1)
        for parameter in leaving.trainer.module.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        leaving.trainer.num_samples = SAMPLES
        leaving.rounds.current.counted[bytes(16)] = SAMPLES
        assert await leaving.handover.hand_over()
        assert leaving.metric("lost_samples") == SAMPLES
        assert staying.trainer.strategy.pending_samples == 2 * kept
        assert not staying.rounds.current.counted


async def test_who_takes_a_period_of_a_stage_mate_over_brings_its_samples():
    async with Swarm(make_manifest(averaging={"mode": "periodic", "inner_steps": 2})) as swarm:
        _, leaving, staying = await group_of_two(swarm)
        for peer in (leaving, staying):  # as at stage 0
            peer.handover._most_held = 4
        leaving.rounds.current.earlier = ranges_of([SampleId(0, 1, 0), SampleId(0, 2, 0)])
        leaving.rounds.current.names.append(SampleId(0, 1, 1))
        leaving.rounds.current.taken_over = ranges_of([SampleId(0, 3, 0)])  # of one that has left before it
        assert await leaving.handover.hand_over()
        expected = (WindowRange(0, 1, 0, 2), WindowRange(0, 2, 0, 1), WindowRange(0, 3, 0, 1))
        assert staying.rounds.current.held == expected
        assert staying.trainer.num_samples == SAMPLES


async def test_without_a_stage_mate_the_share_is_lost_and_reported(swarm, pair):
    first, last = pair
    await first.run(make_microbatch())
    assert await last.handover.hand_over()
    assert last.metric("lost_samples") == SAMPLES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": (0,)}, "gradients of"),
        ({"samples": (SAMPLES, SAMPLES)}, "gradients of"),
        ({"samples": (MAX_SAMPLES - 1,)}, "gradients of"),
        ({"sha256": bytes(32)}, "does not match its hash"),
        ({"transfer": bytes(16)}, "nothing has arrived"),
        ({"counted": ((bytes(16), SAMPLES + 1),)}, "more than the gradient"),
        ({"held": (WindowRange(0, 0, 0, 1),)}, "said to be of 1 samples of a period of at most 0"),
    ],
)
async def test_a_share_that_cannot_be_right_is_refused(swarm, change, message, monkeypatch):
    _, leaving, staying = await group_of_two(swarm)
    call = leaving.transport.call

    async def tamper(peer, body, tensors=(), *, timeout_s):
        if body.op == "commit_gradient":
            body = body.model_copy(update=change)
        return await call(peer, body, tensors, timeout_s=timeout_s)

    monkeypatch.setattr(leaving.transport, "call", tamper)
    assert await leaving.handover.hand_over()
    assert staying.trainer.num_samples == SAMPLES
    assert_equal(staying.trainer.gradient_sums()[0], last_stage_sums(swarm.manifest, (1,)))
    assert leaving.metric("lost_samples") == SAMPLES


async def test_a_share_is_handed_over_though_a_microbatch_inside_does_not_end(swarm):
    """It is in neither peer's gradient when it ends after all."""
    _, leaving, staying = await group_of_two(swarm)
    present, late = leaving.rounds.current, make_microbatch(2)
    passed = leaving.executor._forward(present, late, make_tensors(tokens(2))[1])
    async with leaving.admission.enter(0):
        leaving.admission.leave()
        assert leaving.executor.give_up() == SAMPLES
        leaving.admission.give_up_inside()
        await leaving.admission.drained()
        assert await leaving.handover.hand_over()
        with pytest.raises(NotServing, match="hands nothing over any more"):
            leaving.executor._backward(present, late, passed, HopResult(1.0))
    assert (leaving.trainer.num_samples, staying.trainer.num_samples) == (0, 2 * SAMPLES)
    assert_equal(staying.trainer.gradient_sums()[0], last_stage_sums(swarm.manifest, (1, 0)))
    assert not any(gradient.any() for gradient in leaving.gradients())


async def test_a_share_that_is_added_half_way_is_in_no_gradient(swarm, monkeypatch):
    """The leaving peer offers it to others, and what the device has taken of it would be there twice."""
    _, leaving, staying = await group_of_two(swarm)
    other = await swarm.add("d", 1)

    def take_in_half(given):
        next(staying.trainer.module.parameters()).grad += 1.0
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(staying.trainer.strategy, "take_in", take_in_half)
    monkeypatch.setattr(leaving.handover._rng, "shuffle", lambda mates: mates.sort(key=staying.peer_id.__ne__))
    assert await leaving.handover.hand_over()
    assert staying.trainer.num_samples == 0
    assert not any(gradient.any() for gradient in staying.gradients())
    assert staying.metric("lost_samples") == SAMPLES
    assert staying.rounds.current.counted == {}
    assert_equal(other.trainer.gradient_sums()[0], last_stage_sums(swarm.manifest, (0,)))


async def test_a_share_of_other_weights_is_refused(swarm):
    """The run may have been cut in two, and both parts are in a round of the same number."""
    _, leaving, staying = await group_of_two(swarm)
    begin_round(staying.rounds, 0, weights_version=staying.trainer.weights_version, history_hash="another")
    assert await leaving.handover.hand_over()
    assert staying.trainer.num_samples == SAMPLES
    assert leaving.metric("lost_samples") == SAMPLES


async def test_a_stranger_hands_nothing_over(swarm):
    first, _, staying = await group_of_two(swarm)
    call = CommitGradientCall(
        manifest=swarm.manifest.hash,
        stage=1,
        round_number=0,
        transfer=bytes(16),
        samples=(2,),
        sha256=bytes(32),
        counted=(),
    )
    with pytest.raises(NotServing, match="only announced stage-mates"):
        await first.transport.call(staying.peer_id, call, timeout_s=20.0)

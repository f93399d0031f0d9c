"""Evaluation and sampling through the pipeline of a live run: what peers answer, and what a coordinator asks."""

import asyncio
import random
import time

import anyio
import numpy as np
import pytest
import torch
from tiny_swarms import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Swarm,
    make_manifest,
    make_microbatch,
    reference,
    tokens,
    until,
    with_value,
)
from transformers import AutoModelForCausalLM

from coordinator.query.live_model import LiveModel
from coordinator.query.sampling import Sampling
from swarm_peer.errors import Busy, CallTimeout, HopFailed, InvalidMessage, NotServing, RoundClosed, SwarmError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.stage import stage_server as handlers
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.executor import IDLE_S, LONGEST_QUERY_PAUSE_S, QUERY_SHARE, query_pause_s
from swarm_peer.runtime.stage.stage_server import MAX_QUERIES, MAX_QUERIES_OF_ONE
from swarm_peer.wire.codecs import encode_tokens
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MicrobatchCall

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
UPDATES = 40  # optimizer steps beyond the number of the round, so that the two are told apart


class Fixture:
    """A pipeline of one peer a stage, and a live model that queries it."""

    def __init__(self, swarm, patience_s=20.0):
        self.swarm = swarm
        self.announced = None  # a round that is older than the peers' own
        self.lies = {}  # the rounds that some peers announce instead of their own, by name
        transport = swarm.network.transport("observer")
        self.model = LiveModel(
            ResolvedManifest.of(swarm.manifest),
            identity=Identity.generate(),
            transport=transport,
            look=self.look,
            rng=random.Random(0),
            patience_s=patience_s,
        )
        self.transport = transport

    async def look(self, stages):
        def view(peer):
            round_number = peer.rounds.step.round_number if self.announced is None else self.announced
            round_number = self.lies.get(peer.name, round_number)
            return PeerView(
                peer_id=peer.peer_id,
                stage=peer.stage,
                state=PeerState.SERVING,
                round_number=round_number,
                samples_per_s=1.0,
                queue=0,
                optimizer_step=round_number + UPDATES,
            )

        return SwarmView(self.swarm.manifest.stages.count, tuple(view(peer) for peer in self.swarm.peers))

    async def start(self):
        for stage in range(self.swarm.manifest.stages.count):
            await self.swarm.add("abc"[stage], stage)
        return self

    def plain_model(self):
        """The Hugging Face model of the same weights."""
        model = AutoModelForCausalLM.from_config(parse_model_config(self.swarm.manifest.model.config))
        state = {}
        for peer in self.swarm.peers:
            state |= peer.trainer.module.state_dict()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert all(name.endswith((".attn.bias", ".masked_bias")) for name in missing)
        return model.eval()

    def plain_loss(self, samples_NS):
        samples_NS = torch.from_numpy(samples_NS).long()
        with torch.no_grad():
            logits_NTV = self.plain_model()(samples_NS[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits_NTV.flatten(0, 1), samples_NS[:, 1:].flatten()))

    def advance(self, *stages):
        """The peers of these stages, or all of them, end their round."""
        for peer in self.swarm.peers:
            if not stages or peer.stage in stages:
                peer.rounds.enter(Phase.ENDING)
                generator = torch.Generator().manual_seed(peer.trainer.optimizer_step)
                parameters = peer.trainer.module.parameters()
                peer.trainer.apply([torch.randn(p.shape, generator=generator) for p in parameters])
                peer.open(peer.rounds.step.round_number + 1)

    def call(self, stage=0, **change):
        fields = {
            "manifest": self.swarm.manifest.hash,
            "round_number": 0,
            "mode": "score",
            "stage": stage,
            "microbatch": bytes(16),
            "timeline": None,
            "num_samples": SAMPLES,
            "length": LENGTH,
            "timeout_s": 20.0,
            "base": (),
        }
        return MicrobatchCall.model_construct(**fields | change)

    async def send(self, call, *tensors, sender=None):
        """Send a query, to stage 0 as an observer does, or to a later stage as the one before hands it on."""
        if sender is None:
            sender = self.transport if call.stage == 0 else self.swarm.peers[call.stage - 1].transport
        callee = self.swarm.peers[call.stage].peer_id
        return await sender.call(callee, call, tensors, timeout_s=20.0)


@pytest.fixture
async def run():
    async with Swarm(make_manifest()) as swarm:
        yield await Fixture(swarm).start()


def samples(count):
    return torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(7)).int().numpy()


def hidden(length=LENGTH):
    return memoryview(torch.zeros(SAMPLES, length, HIDDEN).view(-1).view(torch.uint8).numpy())


# --- equal to the single process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_answers_are_those_of_the_single_process(family, num_stages):
    sections = {"model": {"config": LLAMA}} if family == "llama" else {}
    async with Swarm(make_manifest(num_stages, **sections)) as swarm:
        run = await Fixture(swarm).start()
        plain = run.plain_model()

        result = await run.model.evaluate(samples(5))
        assert result.loss == pytest.approx(run.plain_loss(samples(5)), abs=1e-5)
        assert result.perplexity == pytest.approx(np.exp(result.loss))
        assert (result.samples, result.tokens_per_sample) == (5, LENGTH)
        assert result.optimizer_step == result.oldest_optimizer_step == UPDATES

        for length in (1, 3, LENGTH, LENGTH + 4):
            prefix = tokens(1).flatten()[:length].tolist()
            with torch.no_grad():
                expected_V = plain(torch.tensor([prefix[-LENGTH:]])).logits[0, -1]
            assert torch.allclose(await run.model.logits(prefix), expected_V, atol=1e-5)

        sampling = Sampling(num_tokens=LENGTH + 2, temperature=0.0, top_k=0)
        written = [token async for token in run.model.generate([3, 1], sampling)]
        prefix = [3, 1]
        for token in written:
            with torch.no_grad():
                assert token == int(plain(torch.tensor([prefix[-LENGTH:]])).logits[0, -1].argmax())
            prefix.append(token)
        assert len(prefix) == 2 + LENGTH + 2
        assert not any(peer.trainer.num_samples or peer.rounds.current.counted for peer in swarm.peers), (
            "nothing is counted"
        )


@pytest.mark.parametrize("codec", ["fp16", "bf16", "blockwise_8bit"])
async def test_the_runs_codecs_are_used(codec):
    async with Swarm(make_manifest(wire={"activations": codec, "gradients": codec})) as swarm:
        run = await Fixture(swarm).start()
        result = await run.model.evaluate(samples(2))
        assert result.loss == pytest.approx(run.plain_loss(samples(2)), rel=1e-2)
        with torch.no_grad():
            expected_V = run.plain_model()(torch.tensor([[5, 2]])).logits[0, -1]
        assert torch.allclose(await run.model.logits([5, 2]), expected_V, atol=2e-2)


# --- hostile and unlucky ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "change", "tensors", "error", "message"),
    [
        (0, {"mode": "train"}, (encode_tokens(tokens()),), InvalidMessage, "stage 0 answers queries alone"),
        (0, {"mode": "evaluate"}, (encode_tokens(tokens()),), InvalidMessage, "stage 0 answers queries alone"),
        (0, {"mode": "backward"}, (encode_tokens(tokens()),), InvalidMessage, "mode"),
        (0, {}, (encode_tokens(tokens()), hidden()), InvalidMessage, "were expected"),
        (0, {}, (), InvalidMessage, "were expected"),
        (0, {}, (encode_tokens(tokens()[:, 1:]),), InvalidMessage, "were expected"),
        (0, {"mode": "predict"}, (encode_tokens(tokens()),), InvalidMessage, "were expected"),
        (0, {"length": 0}, (encode_tokens(tokens()[:, :1]),), InvalidMessage, "length"),
        (0, {"length": LENGTH + 1}, (memoryview(bytes(4 * SAMPLES * (LENGTH + 2))),), InvalidMessage, "7 tokens"),
        (0, {"num_samples": SAMPLES + 1}, (memoryview(bytes(12 * (LENGTH + 1))),), InvalidMessage, "3 samples"),
        (0, {}, (encode_tokens(with_value(tokens(), VOCABULARY)),), InvalidMessage, "vocabulary"),
        (0, {"mode": "predict"}, (encode_tokens(with_value(tokens()[:, 1:].clone(), -1)),), InvalidMessage, "vocabul"),
        (0, {"round_number": 5}, (encode_tokens(tokens()),), NotServing, "too far behind round 5"),
        (0, {"base": ("head",) * 257}, (encode_tokens(tokens()),), InvalidMessage, "base"),
        (1, {}, (encode_tokens(tokens()),), InvalidMessage, "were expected"),
        (1, {"length": 3}, (encode_tokens(tokens()[:, :4]), hidden()), InvalidMessage, "were expected"),
        (
            1,
            {"mode": "train", "length": 3, "timeline": 0},
            (encode_tokens(tokens()[:, :4]), hidden(3)),
            InvalidMessage,
            "3 tokens",
        ),
        (
            1,
            {"mode": "evaluate", "length": 3, "timeline": 0},
            (encode_tokens(tokens()[:, :4]), hidden(3)),
            InvalidMessage,
            "3 tok",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_malformed_queries_are_refused_and_change_nothing(run, stage, change, tensors, error, message):
    before = [peer.trainer.state() for peer in run.swarm.peers]
    with pytest.raises(error, match=message) as caught:
        await run.send(run.call(stage, **change), *tensors)
    assert type(caught.value) is error
    for peer, state in zip(run.swarm.peers, before, strict=True):
        assert peer.trainer.num_samples == 0
        assert all(torch.equal(tensor, state[name]) for name, tensor in peer.trainer.state().items())
    for _ in range(MAX_QUERIES + 1):
        await run.send(run.call(), encode_tokens(tokens()))


async def test_replies_with_logits_are_bounded(run, monkeypatch):
    monkeypatch.setattr(handlers, "MAX_LOGITS_BYTES", 4 * VOCABULARY)
    with pytest.raises(InvalidMessage, match="logits for 2 samples are more than 68 bytes"):
        await run.send(run.call(mode="predict"), encode_tokens(tokens()[:, 1:]))
    call = run.call(mode="predict", num_samples=1)
    assert (await run.send(call, encode_tokens(tokens()[:1, 1:]))).tensors[0].nbytes == 4 * VOCABULARY


def cut(reply):
    reply.tensors = (reply.tensors[0][:-4],)
    return reply


def poison(reply):
    torch.frombuffer(reply.tensors[0], dtype=torch.float32)[0] = float("nan")
    return reply


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("tamper", [cut, poison])
async def test_logits_that_cannot_be_right_are_asked_for_again(run, tamper, stage):
    expected_V = await run.model.logits([1, 2])
    fault = run.swarm.network.fault(op="microbatch", to=run.swarm.peers[stage].peer_id, tamper=tamper)
    assert torch.equal(await run.model.logits([1, 2]), expected_V)
    assert fault.fired == 1


async def test_a_pipeline_that_gives_no_answer_is_given_up(run):
    run.model._patience_s = 0.1
    run.swarm.network.fault(op="microbatch", fail=CallTimeout("stalled"), times=100)
    with pytest.raises(SwarmError, match="the run gave no answer within 0 s, last: timeout: stalled"):
        await run.model.evaluate(samples(3))


async def test_a_stage_without_peers_is_named():
    async with Swarm(make_manifest()) as swarm:
        await swarm.add("a", 0)
        with pytest.raises(SwarmError, match="nobody serves stage 1 of the run"):
            await Fixture(swarm, patience_s=0.0).model.evaluate(samples(1))


# --- training is not disturbed ----------------------------------------------------------------------------------------


async def test_a_peer_holds_few_queries_of_each_caller_and_trains_beside_them(run):
    first, last = run.swarm.peers
    release = await first.occupy()
    observers = [run.swarm.network.transport(f"observer {number}") for number in range(3)]
    queries = []
    for observer in observers[:2]:
        for _ in range(MAX_QUERIES_OF_ONE):
            sending = run.send(run.call(), encode_tokens(tokens()), sender=observer)
            queries.append(asyncio.ensure_future(sending))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Busy, match="2 queries of this caller are under way"):
            await run.send(run.call(), encode_tokens(tokens()), sender=observer)
    with pytest.raises(Busy, match="0 queries of this caller are under way, 4 of all"):
        await run.send(run.call(), encode_tokens(tokens()), sender=observers[2])
    assert first.metric("microbatches", "score", "busy") == 3
    assert first.admission.admitted == first.admission.held == 0, "they take no room of the run's"
    training = asyncio.ensure_future(first.run(make_microbatch()))
    release.set()
    await training
    assert [peer.trainer.num_samples for peer in (first, last)] == [SAMPLES, SAMPLES]
    for reply in await asyncio.gather(*queries):
        assert reply.body["loss_sum"] == pytest.approx(reference(run.swarm.manifest)[0], abs=1e-6)
    await run.send(run.call(), encode_tokens(tokens()))


async def test_more_queries_than_a_peer_holds_are_all_answered(run):
    result = await run.model.evaluate(samples(20))
    assert result.loss == pytest.approx(run.plain_loss(samples(20)), abs=1e-5)


async def test_queries_go_after_everything_else(run):
    first, _ = run.swarm.peers
    order = []
    for name in ("forward", "evaluate"):
        method = getattr(first.trainer, name)
        setattr(first.trainer, name, lambda *a, name=name, method=method: (order.append(name), method(*a))[1])
    release = await first.occupy()
    query = asyncio.ensure_future(run.send(run.call(), encode_tokens(tokens())))
    await anyio.wait_all_tasks_blocked()
    training = asyncio.ensure_future(first.run(make_microbatch()))
    await anyio.wait_all_tasks_blocked()
    release.set()
    await asyncio.gather(query, training)
    assert order == ["forward", "evaluate"]


def test_queries_leave_the_device_to_training():
    assert query_pause_s(0.5, idle_s=0.0) == pytest.approx(0.5 * (1 / QUERY_SHARE - 1))
    assert query_pause_s(60.0, idle_s=0.0) == LONGEST_QUERY_PAUSE_S, "its caller does not wait for ever"
    assert query_pause_s(0.5, idle_s=IDLE_S) == 0.0


async def test_queries_take_their_share_and_no_more(run):
    first, _ = run.swarm.peers
    await first.run(make_microbatch())
    evaluate = first.trainer.evaluate
    began = []

    def slow_evaluate(*arguments):
        began.append(time.monotonic())
        time.sleep(0.02)
        return evaluate(*arguments)

    first.trainer.evaluate = slow_evaluate
    await run.model.evaluate(samples(4))
    assert began[1] - began[0] >= 0.02 / QUERY_SHARE

    first.device_thread._trained_at -= IDLE_S
    first.executor._query_seconds = 100.0
    await run.model.evaluate(samples(2))


async def test_a_round_ends_without_its_queries(run):
    first, _ = run.swarm.peers
    release = await first.occupy()
    query = asyncio.ensure_future(run.send(run.call(), encode_tokens(tokens())))
    await anyio.wait_all_tasks_blocked()
    first.rounds.enter(Phase.ENDING)
    await first.admission.drained()
    applied = asyncio.ensure_future(
        first.device_thread.run(Priority.STEP, lambda: first.trainer.apply(first.trainer.mean_gradients()))
    )
    await anyio.wait_all_tasks_blocked()
    release.set()
    await applied
    with pytest.raises(RoundClosed, match="the weights of round 0 have changed") as caught:
        await query
    assert caught.value.round_number == 1


async def test_a_round_that_ends_answers_while_it_has_its_weights(run):
    """On a busy stage a query's turn comes when the microbatches are done, and the later stages have closed by then."""
    for peer in run.swarm.peers:
        peer.rounds.enter(Phase.ENDING)
    result = await run.model.evaluate(samples(3))
    assert result.loss == pytest.approx(run.plain_loss(samples(3)), abs=1e-5)
    assert result.optimizer_step == UPDATES


async def test_a_query_that_fails_is_not_held_against_a_peer_that_trains_well(run):
    first, last = run.swarm.peers
    fault = run.swarm.network.fault(op="microbatch", to=last.peer_id, fail=CallTimeout("starved"), times=2)
    with pytest.raises(HopFailed, match="starved"):
        await run.send(run.call(), encode_tokens(tokens()))
    assert fault.fired == 2
    assert first.next_stage._backoff.avoided(0.0) == frozenset()
    await first.run(make_microbatch())


async def test_a_leaving_peer_answers_no_queries(run):
    run.swarm.peers[0].admission.leave()
    with pytest.raises(NotServing):
        await run.send(run.call(), encode_tokens(tokens()))


# --- the round moves on -----------------------------------------------------------------------------------------------


async def test_announcements_may_be_old(run):
    for _ in range(3):
        run.advance()
    run.announced = 1
    result = await run.model.evaluate(samples(3))
    assert result.loss == pytest.approx(run.plain_loss(samples(3)), abs=1e-5)
    assert result.optimizer_step == result.oldest_optimizer_step == UPDATES + 3


@pytest.mark.parametrize("lies", [{"c": 2**39}, {"c": 0}, {"c": 2**39, "d": 2**39, "e": 7}, {"c": 0, "d": 2**39}])
async def test_rounds_that_half_of_the_peers_make_up_keep_nobody_from_asking(run, lies):
    for name in "cdefg"[: 2 * len(lies) - 1]:
        await run.swarm.add(name, 0)
    for _ in range(3):
        run.advance()
    run.lies = lies
    result = await run.model.evaluate(samples(3))
    assert result.loss == pytest.approx(run.plain_loss(samples(3)), abs=1e-5)
    assert result.optimizer_step == result.oldest_optimizer_step == UPDATES + 3
    failed = [peer.name for peer in run.swarm.peers if peer.metric("microbatches", "score", "not_serving")]
    assert not failed, "nobody was asked for a round that there is not"


async def test_all_stages_answer_with_the_same_round(run):
    run.advance(1)  # the last stage is ahead
    answer = asyncio.ensure_future(run.model.evaluate(samples(2)))
    await until(lambda: run.swarm.network.num_calls("microbatch", run.swarm.peers[0].peer_id) == 2)
    await anyio.wait_all_tasks_blocked()
    assert not answer.done(), "stage 0 holds the queries of its next round"
    run.advance(0)
    result = await answer
    assert result.loss == pytest.approx(run.plain_loss(samples(2)), abs=1e-5)
    assert result.optimizer_step == UPDATES + 1


async def test_an_evaluation_that_the_end_of_a_round_interrupts_is_of_one_round(run):
    answered = 0

    def step_in_between(reply):
        nonlocal answered
        answered += 1
        if answered == 2:
            run.advance()
        return reply

    run.swarm.network.fault(op="microbatch", to=run.swarm.peers[0].peer_id, tamper=step_in_between, times=100)
    result = await run.model.evaluate(samples(9))
    assert result.loss == pytest.approx(run.plain_loss(samples(9)), abs=1e-5)
    assert (result.oldest_optimizer_step, result.optimizer_step) == (UPDATES + 1, UPDATES + 1)


async def test_an_evaluation_of_a_run_with_short_rounds_says_which_it_met(run):
    def step_on(reply):
        run.advance()
        return reply

    run.swarm.network.fault(op="microbatch", to=run.swarm.peers[0].peer_id, tamper=step_on, times=1000)
    result = await run.model.evaluate(samples(5))
    assert result.oldest_optimizer_step < result.optimizer_step
    assert 0 < result.loss < 100


async def test_a_wrong_round_is_found_out(run):
    run.model._step = 500
    result = await run.model.evaluate(samples(1))
    assert result.optimizer_step == UPDATES

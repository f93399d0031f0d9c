"""A microbatch goes through all stages, and comes to what one process computes."""

import pytest
import torch
from tiny_swarms import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    Swarm,
    assert_equal,
    make_call,
    make_manifest,
    make_microbatch,
    reference,
    tokens,
)
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.runtime.stage import stage_client
from swarm_peer.runtime.stage.stage_client import time_of_callee
from swarm_peer.wire.codecs import encode, encode_tokens, encoded_bytes


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

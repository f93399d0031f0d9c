"""Numbers that are not finite, or too large, are a failed hop and are not counted."""

import pytest
import torch
from contexts import ReadClock
from tiny_swarms import SAMPLES, Swarm, make_call, make_manifest, make_microbatch, make_tensors
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.errors import CallError, CallTimeout, HopFailed, NotFinite
from swarm_peer.policy.view import Life


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

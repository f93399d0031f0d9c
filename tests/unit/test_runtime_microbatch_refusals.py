"""What a peer refuses to compute: what is malformed, a stranger's microbatches, and more than it has room for."""

import asyncio

import anyio
import pytest
import torch
from tiny_swarms import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    VOCABULARY,
    make_call,
    make_microbatch,
    make_tensors,
    reference,
    tokens,
    with_value,
)
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.errors import Busy, InvalidMessage, NotServing
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.wire.identity import Identity


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

"""A device that fails or has no memory left costs a hop, and neither what was counted nor the peer."""

import asyncio
import gc
import threading
import weakref
from contextlib import AsyncExitStack

import pytest
import torch
from tiny_swarms import HIDDEN, LENGTH, SAMPLES, make_microbatch, make_tensors
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.errors import Busy, HopFailed
from swarm_peer.runtime.stage import executor as executor_module
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.stage_client import HopResult
from swarm_peer.wire.codecs import encode


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

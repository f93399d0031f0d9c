"""Which peers are asked for a microbatch, which are avoided, and when a hop is given up."""

import asyncio

import anyio
import pytest
from tiny_swarms import SAMPLES, Swarm, make_call, make_manifest, make_microbatch, make_tensors, until
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.errors import CallTimeout, HopFailed, RoundClosed
from swarm_peer.policy.view import Life


@pytest.mark.parametrize("is_gone_for_a_while", [False, True])
async def test_a_peer_in_a_new_life_is_not_avoided_for_what_its_former_one_did(swarm, pair, is_gone_for_a_while):
    first, last = pair
    await swarm.add("c", 1)
    last.speed = 1e9  # so it is asked first
    swarm.network.fault(op="microbatch", to=last.peer_id, fail=CallTimeout("stalled"))
    await first.run(make_microbatch(0))
    assert first.next_stage._backoff.avoided(0.0) == {Life(last.peer_id)}
    if is_gone_for_a_while:
        swarm.peers.remove(last)
        await first.run(make_microbatch(1))
        swarm.peers.append(last)
    assert last.trainer.num_samples == 0
    last.incarnation = 7
    await first.run(make_microbatch(2))
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
    assert not any(each.num_outstanding for each in first.next_stage._router._candidates.values()), "all is done"
    assert not any(peer.trainer.num_samples for peer in full)
    assert first.next_stage._backoff.avoided(0.0) == frozenset()
    called = {callee for _, callee, _ in swarm.network.calls}
    assert called == {peer.peer_id for peer in [*full, free]}


async def test_a_microbatch_is_outstanding_once_at_a_peer_however_often_it_is_tried_there(swarm):
    first = await swarm.add("a", 0)
    full = await swarm.add("b", 1, capacity=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run, make_microbatch(0))
        await until(lambda: first.metric("retries", "busy") >= 3)
        assert first.next_stage._router._candidates[full.peer_id].num_outstanding == SAMPLES
        tasks.cancel_scope.cancel()
    assert first.next_stage._router._candidates[full.peer_id].num_outstanding == 0


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

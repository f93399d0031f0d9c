"""A microbatch is counted once, whatever is lost, cancelled or asked for again, and in its own round."""

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from contexts import begin_round
from tiny_swarms import SAMPLES, assert_equal, make_call, make_microbatch, make_tensors, reference, until
from tiny_swarms import pair as pair
from tiny_swarms import swarm as swarm

from swarm_peer.errors import Busy, NotServing, PeerUnreachable, RoundClosed
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.timeline import Timeline
from swarm_peer.runtime.stage import stage_client
from swarm_peer.runtime.stage.device_thread import Priority


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

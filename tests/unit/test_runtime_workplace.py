"""Real stages whose rounds are agreed make the updates of one process, with hivemind's all-reduce."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import pytest
from agreed_stages import Hall, has_come_to, quick_stages, resolved_of, two_of_each
from agreeing import swarm, until

from swarm_peer.runtime.step import averaging, workplace


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_stages(monkeypatch)


# AdamW divides by what is nearly zero at first, which makes more of the order of sums. So does Muon, in 16 bits.
@pytest.mark.parametrize(("optimizer", "atol"), [("sgd", 1e-5), ("adamw", 1e-3), ("muon", 1e-3)])
def test_agreed_rounds_make_the_updates_of_one_process(optimizer, atol):
    async def run():
        hall = Hall(resolved_of(optimizer))
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, start + 4), 60)
            await hall.check(start + 4, atol)
            assert any(len(cut.seats) == 2 for cut in hall.cuts())

    anyio.run(run)


def test_nothing_of_the_size_of_a_gradient_is_computed_on_the_event_loop(monkeypatch):
    threads = {"mean_of": set(), "_copied": set()}
    for module, name in ((workplace, "mean_of"), (averaging, "_copied")):
        original = getattr(module, name)

        def noted(*args, original=original, name=name):
            threads[name].add(threading.get_ident())
            return original(*args)

        monkeypatch.setattr(module, name, noted)

    async def run():
        hall = Hall(resolved_of("sgd"))
        async with swarm(hall.work, hall.resolved) as some:
            first, _ = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            await until(first[:1], partial(has_come_to, 0, start + 2), 60)

    anyio.run(run)
    assert all(found and threading.get_ident() not in found for found in threads.values())


@pytest.mark.parametrize("stage", [0, 1])
def test_who_leaves_in_order_costs_no_sample(stage):
    async def run():
        hall = Hall(resolved_of("sgd"))
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            await until([more[stage]], partial(has_come_to, stage, start + 2), 60)
            leaver = hall.rigs[more[stage].identity.peer_id]
            await leaver.leave()
            await until([first[stage]], lambda peer: len(peer.core.epoch.roster(stage)) == 1, 60)
            del hall.rigs[more[stage].identity.peer_id]
            some.kill(more[stage])
            start = first[0].log(0).next_round
            for number in (0, 1):
                await until([first[number]], partial(has_come_to, number, start + 3), 60)
            await hall.check(start + 3)
            assert any(len(cut.seats) == 2 for cut in hall.cuts())

    anyio.run(run)

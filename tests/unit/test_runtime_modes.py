"""Real stages whose rounds are agreed make, in each mode of averaging, the updates of replicas in one process."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import torch
from agreed_stages import VALIDATION, Hall, has_come_to, quick_stages, resolved_of, two_of_each
from agreeing import HASH, swarm, until
from tiny_models import LENGTH
from tiny_swarms import until as let_go_on_until

from swarm_peer.codecs.sparse import TOPK_2BIT
from swarm_peer.policy.step_state import Phase
from swarm_peer.protocol.log import Log
from swarm_peer.runtime.state.roots import root_of
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import StateIndexCall

PERIOD = 4
DELAYED = {"mode": "delayed", "eager_updates": False}
EAGER = {"mode": "delayed"}
PERIODIC = {"mode": "periodic", "inner_steps": PERIOD}
TOPK = {"compression": "topk_2bit", "dense_share": 0.0}
SIGN = {"compression": "sign", "dense_share": 0.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_stages(monkeypatch)


def hall_of(averaging, data=None, peers_to_start=1, **training):
    sections = {"averaging": averaging, "training": training, "recovery": {"snapshot_every": 0}}
    sections["stages"] = {"count": 2, "peers_to_start": peers_to_start}
    return Hall(resolved_of(**sections, **({"data": data} if data else {})))


def period_of(averaging):
    return averaging.get("inner_steps", 1)


RECORDS = {"dataset": "json", "files": ["of-a-test.jsonl"], "format": "prompt_completion", "sequence_length": LENGTH}


@pytest.mark.parametrize("averaging", [{}, PERIODIC], ids=["synchronous", "periodic"])
def test_averages_are_weighted_by_targets(averaging):
    async def run():
        hall = hall_of(averaging, data=RECORDS)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, start + 2 * PERIOD), 60)
            weights = {each.weight for cut in hall.cuts(1) for each in cut.brings}
            assert max(weights) > LENGTH
            await hall.check_replicas(start, period_of(averaging))

    anyio.run(run)


@pytest.fixture
def few_kept(monkeypatch):
    """Stages have 900 to 5,000 values, and a chunk is a member's whole share of them."""
    monkeypatch.setattr(TOPK_2BIT, "_kept", 32)


@pytest.mark.parametrize(
    "averaging",
    [
        pytest.param(TOPK, id="topk"),
        pytest.param(SIGN, id="sign", marks=pytest.mark.slow),
        pytest.param(TOPK | DELAYED, id="topk-delayed"),
        pytest.param(TOPK | EAGER, id="topk-eager", marks=pytest.mark.slow),
        pytest.param(TOPK | PERIODIC, id="topk-periodic", marks=pytest.mark.slow),
    ],
)
def test_what_averages_leave_over_comes_later(averaging, few_kept):
    async def run():
        hall = hall_of(averaging)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, start + 1 + PERIOD), 60)
            for rig in hall.rigs.values():
                assert rig.driver._averager._feedback.norm > 0
            await hall.check_replicas(start, period_of(averaging))

    anyio.run(run)


def drops(rig):
    return rig.peer.context.metrics.leftovers_dropped._value.get()


def test_what_is_left_over_goes_with_who_leaves_and_with_a_log_that_gives_way(few_kept):
    async def run():
        hall = hall_of(TOPK)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, first[0].log(0).next_round + 2), 60)
            leaver, other = (hall.rigs[peer.identity.peer_id] for peer in (more[0], more[1]))
            await leaver.leave()
            assert not drops(leaver), "averages that still have it take what it has left over"
            with anyio.fail_after(60):
                await let_go_on_until(lambda: leaver.driver.member is None and leaver.driver._served is None)
            await other.driver._give_up()
            assert drops(leaver) == drops(other) == 1

    anyio.run(run)


@pytest.mark.parametrize("averaging", [DELAYED, EAGER, PERIODIC], ids=["delayed", "eager", "periodic"])
def test_agreed_rounds_make_the_updates_of_replicas_in_one_process(averaging):
    async def run():
        hall = hall_of(averaging)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            start = first[0].log(0).next_round
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, start + 2 * PERIOD), 60)
            await hall.check_replicas(start, period_of(averaging))

    anyio.run(run)


def has_all_updates(rig, steps, _):
    member = rig.driver.member
    has_ended = member is not None and member.log.optimizer_step == steps
    return has_ended and rig.driver._weights[1] == member.log.head


def is_at_work(stage, period, peer):
    """Whether a peer has computed something in the second round of a period, or in any round but the first ones."""
    member = peer.core.members.get(stage)
    if member is None or member.log.next_round < period or member.log.next_round % period != (1 if period > 1 else 0):
        return False
    present = member.work.open.get(member.log.next_round)
    return present is not None and present.computed.weight > 0 and len(peer.core.epoch.roster(stage)) == 2


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("averaging", [DELAYED, EAGER, PERIODIC], ids=["delayed", "eager", "periodic"])
def test_who_leaves_gives_all_that_it_has_computed(averaging, stage):
    period = period_of(averaging)

    async def run():
        hall = hall_of(averaging)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            await until([more[stage]], lambda _: any(len(cut.seats) == 2 for cut in hall.cuts()), 60)
            await until([more[stage]], partial(is_at_work, stage, period), 60)
            leaver = hall.rigs[more[stage].identity.peer_id]
            number = leaver.driver.member.log.next_round
            given = await leaver.leave()
            assert given
            if period > 1:
                assert {each.round for each in hall.mate_of(leaver).driver.member.work.guests} == {number + 2}
            some.kill(more[stage])
            del hall.rigs[more[stage].identity.peer_id]
            await until([first[stage]], lambda peer: len(peer.core.epoch.roster(stage)) == 1, 60)
            start = first[0].log(0).next_round
            for each in (0, 1):
                await until([first[each]], partial(has_come_to, each, start + period + 3), 60)
            brought = [(part.seat, each) for cut in hall.cuts(stage) for part in cut.parts for each in part.brings]
            by = {seat.peer for seat, each in brought if each.name.seat.peer == leaver.peer.identity.peer_id}
            if period > 1:  # else it may have been in the cut itself, as the last thing that it did
                assert first[stage].identity.peer_id in by
            await hall.check_replicas(start, period)

    anyio.run(run)


def test_a_newcomer_in_the_middle_of_a_period_begins_with_the_outer_weights():
    async def run():
        hall = hall_of(PERIODIC | {"inner_steps": 8})
        async with swarm(hall.work, hall.resolved) as some:
            first, _ = await two_of_each(some, hall)
            for _ in range(5):
                newcomer = some.add(Identity.generate(), 1)
                await until([newcomer], lambda peer: 1 in peer.core.members, 60)
                rig = hall.rigs[newcomer.identity.peer_id]
                await until([newcomer], lambda peer, rig=rig: rig.workplace.computed, 60)
                if min(rig.workplace.computed) % 8 not in (0, 7):
                    break
            else:
                pytest.fail("nobody has come in the middle of a period")
            start = first[0].log(0).next_round
            for each in (0, 1):
                await until([first[each]], partial(has_come_to, each, start + 16), 60)
            await until([newcomer], partial(has_come_to, 1, start + 16), 60)
            await hall.check_replicas(start, 8)

    anyio.run(run)


def test_work_on_a_log_that_another_takes_the_place_of_is_given_up():
    async def run():
        hall = hall_of(PERIODIC)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            rig, member = hall.rigs[more[1].identity.peer_id], more[1].stage(1)
            strategy = rig.trainer.strategy
            await until([more[1]], lambda peer: strategy._weight and is_at_work(1, PERIOD, peer), 60)
            member._replace_log(Log(1, member.log.restart, member.log.committed))
            more[1].changed.notify()
            await until([more[1]], lambda _: rig.driver._followed.log is member.log, 60)
            assert strategy._weight == 0
            assert [each for each in member.work.lost if each.weight]
            until_round = member.log.next_round + 2 * PERIOD
            for peer in (first[1], more[1]):
                await until([peer], partial(has_come_to, 1, until_round), 60)
            mate = hall.rigs[first[1].identity.peer_id]
            await until([more[1]], lambda _: rig.driver._weights == mate.driver._weights, 60)
            assert root_of(rig.trainer.state(), b"") == root_of(mate.trainer.state(), b"")

    anyio.run(run)


@torch.no_grad()
def round_otherwise(trainer):
    """Have a stage's shared weights be a bit others than its stage-mates', as on another device."""
    # `data`: a microbatch may be between its two passes, which autograd would notice.
    for weights in (*trainer.trained.values(), *trainer.strategy.weights()):
        weights.data.mul_(1 + 1e-5)


@pytest.mark.parametrize("averaging", [{}, DELAYED, EAGER, PERIODIC], ids=["sync", "delayed", "eager", "periodic"])
def test_a_seat_whose_device_rounds_otherwise_adopts_the_weights_of_its_stage_mates(averaging):
    async def run():
        hall = hall_of(averaging)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            await until([more[1]], partial(has_come_to, 1, PERIOD + 2), 60)
            rig, mate = (hall.rigs[peer.identity.peer_id] for peer in (more[1], first[1]))
            round_otherwise(rig.trainer)

            def are_alike(_):
                at = rig.driver._weights, rig.rounds.step.phase
                is_same = at == (mate.driver._weights, Phase.OPEN) == (mate.driver._weights, mate.rounds.step.phase)
                return is_same and root_of(rig.trainer.state(), b"") == root_of(mate.trainer.state(), b"")

            assert root_of(rig.trainer.state(), b"") != root_of(mate.trainer.state(), b"")
            await until([more[1]], are_alike, 60)
            start, me = more[1].log(1).next_round, more[1].stage(1).me

            def counts(_):  # for some rounds, nobody waits for those that were late
                return any(each.name.seat == me for cut in hall.cuts(1) if cut.round >= start for each in cut.brings)

            await until([first[1]], counts, 60)

    anyio.run(run)


@pytest.mark.parametrize("averaging", [DELAYED, EAGER, PERIODIC], ids=["delayed", "eager", "periodic"])
def test_a_run_ends_with_all_its_updates_and_validates_the_last_weights(averaging):
    steps = 4 * PERIOD

    async def run():
        hall = hall_of(averaging, steps=steps, validation_every=2 * PERIOD, peers_to_start=2)
        async with swarm(hall.work, hall.resolved) as some:
            first, more = await two_of_each(some, hall)
            rigs = [hall.rigs[peer.identity.peer_id] for peer in (*first, *more)]
            for rig in rigs:
                await until([rig.peer], partial(has_all_updates, rig, steps), 60)
            for rig in rigs[::2]:
                await until([rig.peer], lambda _, rig=rig: rig.has_validated(steps), 60)
            assert all(rig.trainer.optimizer_step == steps for rig in rigs)
            assert max(max(rig.workplace.computed) for rig in rigs) == steps - 1, "nothing is computed beyond it"
            for rig in rigs:
                index = (await rig.state_server.find(StateIndexCall(manifest=HASH, of_stage=rig.stage))).index
                assert index.round_number == steps, "its optimizer step follows from the round"
            await hall.check_replicas(steps, period_of(averaging))
            validated = [each for rig in rigs[::2] for each in rig.launcher.validations if each.optimizer_step == steps]
            assert sum(each.samples for each in validated) == len(VALIDATION)
            mean = sum(each.loss_sum for each in validated) / len(VALIDATION)
            assert mean == pytest.approx(hall.validation_loss(rigs[0], rigs[1]), rel=1e-5)

    anyio.run(run)

"""Members that agree make the updates of one process, while they come, go and fail."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest
import torch
from agreeing import BATCH, quickly, swarm, until
from contexts import MovedClock
from driving import At, Hall, Others, Shop, rounds_of

from swarm_peer.errors import NotServing
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Log, Name, base_of
from swarm_peer.protocol.statements import Seat
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.state.states import Taken
from swarm_peer.runtime.step import driver as driver_module
from swarm_peer.runtime.step.cut_results import Averaging
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.named_gradients import NamedGradients, mean_of
from swarm_peer.wire.identity import Identity


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 0.02)


@pytest.mark.parametrize(("mode", "lag"), [("synchronous", 0), ("delayed", 1)])
def test_members_make_the_updates_of_one_process(mode, lag):
    async def run():
        hall = Hall()
        async with swarm(hall.work, mode=mode) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (0, 0, 1, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset())
            start = first[0].log(0).next_round
            for stage in (0, 1):
                peers = [each for each in [*first, *more] if stage in each.core.membership.stages]
                await until(peers, rounds_of(stage, start + 6))
            assert hall.check(lag) >= 8 * (start + 5)
            assert hall.num_compared > 1
            assert max(len(cut.seats) for cut in hall.cuts(0)) == 3

    anyio.run(run)


def test_who_leaves_gives_its_work_to_several_and_it_counts_once():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (0, 0, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset())
            leaver = hall.rig(more[0])
            add = leaver.shop.add

            def add_and_pause(sample):
                add(sample)
                # Amid a round: else it might be over before all is given.
                hall.is_paused |= sum(rig.shop.count for rig in hall.rigs.values() if rig.stage == 0) < BATCH - 1

            leaver.shop.add = add_and_pause
            await until([more[0]], lambda _: hall.is_paused)
            await leaver.leave(hall.rigs)
            some.kill(more[0])
            hall.is_paused = False
            await until(first[:1], lambda peer: len(peer.core.epoch.roster(0)) == 2)
            start = first[0].log(0).next_round
            await until(first[:1], rounds_of(0, start + 3))
            given = {
                each.name
                for cut in hall.cuts(0)
                for part in cut.parts
                for each in part.brings
                if each.name.seat != part.seat
            }
            assert len(given) == 1
            hall.check()

    anyio.run(run)


def test_who_leaves_gives_nothing_that_its_device_has_just_lost():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            leaver, lost = hall.rig(first[1]), []
            add = leaver.shop.add

            def add_the_last(sample):
                hall.is_paused = True  # amid the round
                add(sample)

            async def drain(number):
                leaver.driver.member.work.open[number].is_void = True

            leaver.shop.add, leaver.driver._lost = add_the_last, lost.extend
            await until(first[1:], lambda _: hall.is_paused and leaver.driver.member.to_hand_over())
            leaver.shop.drain = drain
            assert await leaver.driver.leave() == []
            assert leaver.driver.gradients.names == frozenset()
            assert [each.name.seat for each in lost] == [leaver.driver.member.me]

    anyio.run(run)


def test_a_member_that_is_silent_in_an_average_is_left_out_and_takes_the_update_after():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (1, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset())
            silent = more[1].identity.peer_id
            hall.board.silent.add(silent)
            start = first[0].log(0).next_round
            await until([first[1], more[0]], rounds_of(1, start + 2))
            hall.board.silent.clear()
            await until([more[1]], rounds_of(1, start + 6))
            last = hall.rig(more[1])
            others = hall.rig(more[0])
            await until([more[1], more[0]], lambda _: last.driver._weights == others.driver._weights)
            assert torch.equal(last.shop.weights, others.shop.weights)

    anyio.run(run)


class Nobody:
    """Nobody gives anything."""

    async def update(self, committed):
        raise NotServing("nobody has it")

    async def state(self):
        raise NotServing("nobody is there")


def test_a_seat_that_is_left_alone_without_the_state_gives_up_its_place():
    """The run can go back only once the stage is empty."""

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            left = some.add(Identity.generate(), 1)
            await until([left], lambda peer: peer.core.membership.stages != frozenset())
            rig = hall.rig(left)
            rig.driver._sources = Nobody()
            hall.board.silent.add(left.identity.peer_id)
            await until([left], lambda _: rig.driver.complaint())
            assert len(left.core.epoch.roster(1)) == 2
            some.kill(first[1])
            await until(first[:1], lambda peer: not peer.core.epoch.roster(1))

    anyio.run(run)


class Lagging:
    """A core with one seat of stage 1, which has a stage-mate, and lacks the update of the last entry.

    Attributes:
        resigned: the stages whose places it was told to give up
    """

    def __init__(self):
        entry = SimpleNamespace(cut=SimpleNamespace(averages=True), hash="new")
        log = SimpleNamespace(restart=BEGINNING, next_round=5, head="new", heads=lambda: {4: "old", 5: "new"})
        log.after = lambda head: [SimpleNamespace(entry=entry)] if head == "old" else []
        self.state, self.is_behind, self.log, self.ledger = "old", True, log, None
        self.members, self.epoch, self.resigned = {1: self}, SimpleNamespace(roster=lambda stage: "ab"), []
        self.resign = self.resigned.append
        self.work = SimpleNamespace(void_all=lambda number: None, guests=())
        self.prepared = []
        self.prepare = lambda *state: self.prepared.append(state)

    def reached(self, state, ledger=None):
        self.state, self.is_behind = state, state != "new"


class AsFar(Nobody):
    """Stage-mates that lack what this seat lacks."""

    async def state(self):
        return Taken("old", {}, "old", None)


def driver_of(core, sources=None, clock=None, shop=None, average=None):
    """A driver of a seat in stage 1 that is told everything by hand."""
    return RoundDriver(
        agreement=SimpleNamespace(core=core, changed=Condition(), look=lambda: None),
        stage=1,
        workplace=shop or Shop(),
        averager=At(average),
        sources=sources,
        clock=clock or MovedClock(),
    )


def test_a_seat_whose_stage_mates_lack_the_same_update_gives_up_its_place():
    """They would take over each other's states for ever, and the run go back never."""

    async def run():
        core, clock = Lagging(), MovedClock(now=100.0)
        driver = driver_of(core, AsFar(), clock)
        await driver._try(driver._catch_up)
        assert driver.complaint().trouble is Trouble.NO_STATE
        clock.now += driver_module.PATIENCE_S + 1
        await driver._try(driver._catch_up)
        assert core.resigned == [1]

    anyio.run(run)


class Growing(Nobody):
    """Stage-mates that make an entry more while an update travels, and whose log then begins with the first of some."""

    def __init__(self, core, kept):
        self.taken = []
        self.core, self.kept = core, kept
        core.log.heads = lambda: dict(enumerate(["old", "newer"]))
        core.log.after = lambda head: self._entries("newer") if head == "old" else []

    def _entries(self, name):
        return [SimpleNamespace(entry=SimpleNamespace(cut=SimpleNamespace(averages=True), hash=name))]

    async def update(self, committed):
        self.taken.append(committed.entry.hash)
        self.core.log.heads = lambda: dict(enumerate(self.kept))
        self.core.log.after = lambda head: self._entries("new") if head == "newer" else []
        return []

    async def state(self):
        self.taken.append("state")
        return Taken("new", {}, "new", None)


@pytest.mark.parametrize(
    ("kept", "taken"),
    [
        (("old", "newer", "new"), ["newer", "new"]),
        # The weights cannot be brought further than to the next one: nothing tells to which entry they belong.
        (("newer", "new"), ["newer", "state"]),
    ],
)
def test_a_seat_takes_the_updates_of_entries_that_come_while_others_travel(kept, taken):
    """A state is older than these where rounds are quicker than its download: the seat would never catch up."""

    async def run():
        core = Lagging()
        mates = Growing(core, kept)
        driver = driver_of(core, mates, MovedClock(now=100.0))
        driver._weights = (BEGINNING, "old")
        await driver._try(driver._catch_up)
        assert (core.state, mates.taken, driver.complaint()) == ("new", taken, None)

    anyio.run(run)


def told_by(core):
    """A driver of this core, and the list of what it tells to be lost."""
    told = []

    def tell(lost):
        told.extend(lost)
        lost.clear()

    agreement = SimpleNamespace(core=core, changed=Condition())
    parts = {"workplace": Shop(), "averager": At(None), "sources": Nobody(), "clock": MovedClock(now=100.0)}
    return RoundDriver(agreement=agreement, stage=1, lost=tell, **parts), told


def test_a_seat_that_has_another_place_before_its_driver_looks_tells_what_the_first_one_loses():
    async def run():
        core, former = Lagging(), Lagging()
        driver, told = told_by(core)
        driver._weights, driver._served = (BEGINNING, "old"), former
        former.work = SimpleNamespace(lost=[], give_up=lambda number: former.work.lost.append(number))
        former.work.is_over = lambda log: True
        assert not driver._is_other(core, BEGINNING)
        assert driver._is_other(former, BEGINNING)
        assert driver._next() == driver._leave_place
        await driver._try(driver._next())
        assert told == [former.log.next_round]
        assert driver._next() == driver._begin

    anyio.run(run)


def test_a_seat_tells_what_it_brought_to_an_entry_that_its_stage_mates_have_another_for():
    async def run():
        def log_of(entry, *parts):
            brings = [each for part in parts for each in part.brings]
            cut = SimpleNamespace(round=0, parent=base_of(1, BEGINNING), parts=parts, brings=brings)
            return Log(1, BEGINNING, [SimpleNamespace(entry=SimpleNamespace(hash=entry, cut=cut))])

        core = Lagging()
        driver, told = told_by(core)
        core.me, core.work.lost = "me", []
        core.log = log_of("of the side that was put out", SimpleNamespace(seat="me", brings=["mine"]))
        await driver._try(driver._begin)
        core.log = log_of("of the others", SimpleNamespace(seat="mate", brings=["theirs"]))
        assert driver._next() == driver._give_up
        await driver._try(driver._give_up)
        driver._tell_lost()
        assert told == ["mine"]

    anyio.run(run)


@pytest.mark.parametrize(
    ("state", "is_lost", "weights", "is_kept"),
    [
        ("new", False, "new", True),
        ("old", False, "old", False),
        ("new", True, "new", False),
        ("new", False, "old", False),
    ],
)
def test_a_seat_that_is_put_out_comes_back_with_the_newest_weights(state, is_lost, weights, is_kept):
    """Whether it knows a leader, without which it is not behind, or not."""
    core, kept = Lagging(), []
    sources = SimpleNamespace(keep_weights=lambda: kept.append(weights))
    driver, core.is_lost = driver_of(core, sources, MovedClock(now=100.0)), is_lost
    core.state, core.is_behind, driver._weights = state, False, (BEGINNING, weights)
    driver.keep_weights(core)
    assert core.prepared == ([(1, core.log, "new", (), None)] if is_kept else [])
    assert kept == (["new"] if is_kept else [])


def test_a_seat_that_is_put_out_while_it_asks_for_an_update_takes_no_state():
    """It may have taken one for its next place meanwhile."""

    class Slow(Nobody):
        async def update(self, committed):
            core.members = {1: Lagging()}
            return await super().update(committed)

        async def state(self):
            raise AssertionError("its place is gone")

    async def run():
        driver = driver_of(core, Slow(), MovedClock(now=100.0))
        driver._weights = (BEGINNING, "old")
        await driver._try(driver._catch_up)
        assert driver.complaint() is None

    core = Lagging()
    anyio.run(run)


def test_a_seat_that_has_caught_up_since_has_its_time_for_the_next_state_that_it_lacks():
    async def run():
        core, clock = Lagging(), MovedClock(now=100.0)
        driver = driver_of(core, Nobody(), clock)
        driver._weights = (BEGINNING, "old")
        await driver._try(driver._catch_up)
        clock.now = 101.0
        await driver._try(driver._catch_up)
        words = "waits for weights: nobody is there"
        assert driver.complaint() == Complaint(Trouble.NO_STATE, 100.0, words)
        driver._sources = Others(
            {"mate": SimpleNamespace(stage=1, driver=SimpleNamespace(updates={"new": []}))}, None, 1
        )
        await driver._try(driver._catch_up)
        assert (core.state, driver.complaint()) == ("new", None)
        clock.now, core.is_behind, core.state, driver._sources = 4000.0, True, "old", Nobody()
        await driver._try(driver._catch_up)
        assert core.resigned == []
        clock.now += driver_module.PATIENCE_S + 1
        await driver._try(driver._catch_up)
        assert core.resigned == [1]

    anyio.run(run)


def test_weights_that_are_far_from_a_seats_own_are_not_asked_for_without_pause(monkeypatch):
    async def run():
        hall = Hall()
        async with swarm(hall.work, compare_weights_every=1) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (1, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset())
            monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 1000.0)
            odd = hall.rig(more[1])

            async def other_root(standing):
                return "of other weights"

            odd.shop.root = other_root
            await until([more[1]], lambda _: odd.driver.complaint())
            assert "far from this peer's" in odd.driver.complaint().words
            start = more[0].log(1).next_round
            await until([first[1], more[0]], rounds_of(1, start + 2))
            assert odd.num_refused == 1

    anyio.run(run)


def test_a_leader_that_dies_leaves_the_others_going_on():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset())
            some.kill(first[0])
            hall.rigs.pop(first[0].identity.peer_id)
            await until(more[:1], lambda peer: peer.core.epoch.leader(0) == peer.core.membership.me)
            start = more[0].log(0).next_round
            await until(more[:1], rounds_of(0, start + 3))
            await until(more[1:], rounds_of(1, start + 3))

    anyio.run(run)


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_cut_that_is_given_up_while_its_values_are_added_is_not_averaged(is_given_up):
    """A thread goes on to its end, and is waited for."""
    averaged = []

    class SlowShop(Shop):
        async def mean(self, contributions):
            if is_given_up:
                driver._averaging.scope.cancel()
            return [torch.zeros(3)], 1

    async def average(cut, means, weight):
        averaged.append(cut)
        return means

    member = SimpleNamespace(me="me", averaged=lambda cut, digest: None)
    driver = driver_of(SimpleNamespace(members={1: member}), shop=SlowShop(), average=average)

    async def run():
        cut = SimpleNamespace(hash="cut", round=4, averages=True, parts=[SimpleNamespace(seat="me", brings=())])
        driver._averaging = Averaging(cut, anyio.CancelScope())
        await driver._average_cut(driver._averaging)
        assert averaged == ([] if is_given_up else [cut])

    anyio.run(run)


def test_of_a_round_that_is_cut_again_and_again_only_the_newest_results_are_kept():
    async def run():
        told = []
        member = SimpleNamespace(me="me", averaged=lambda cut, digest: told.append(cut.hash))
        driver = driver_of(SimpleNamespace(members={1: member}))
        for attempt in range(5):
            part = SimpleNamespace(seat="me", brings=())
            cut = SimpleNamespace(hash=f"cut {attempt}", round=4, attempt=attempt, averages=False, parts=[part])
            await driver._average_cut(Averaging(cut, anyio.CancelScope()))
        assert len(told) == 5
        assert list(driver._results._held) == ["cut 3", "cut 4"]

    anyio.run(run)


def test_contributions_are_held_by_name():
    held = NamedGradients()
    a, b = (Name(Seat(peer, 1, ""), 4) for peer in "ab")
    held.put(a, [torch.tensor([1.0, 3.0])], 1)
    held.put(a, [torch.tensor([2.0, 4.0])], 1)
    held.put(b, [torch.tensor([4.0, 0.0])], 3)
    like = [torch.empty(2, device="meta")]
    means, weight = mean_of([held.get(a)], like)
    assert weight == 1
    assert torch.equal(means[0], torch.tensor([2.0, 4.0])), "one alone is not rounded"
    means, weight = mean_of([held.get(a), held.get(b)], like)
    assert weight == 4
    assert torch.equal(means[0], torch.tensor([3.5, 1.0]))
    means, weight = mean_of([], like)
    assert (weight, means[0].tolist()) == (0, [0.0, 0.0])
    held.forget(5)
    assert held.names == frozenset()

"""Members that agree make the updates of one process, while they come, go and fail."""

from __future__ import annotations

import hashlib
from functools import partial
from random import Random
from types import SimpleNamespace

import anyio
import pytest
import torch
from agreeing import BATCH, HASH, quickly, swarm, until
from contexts import MovedClock

from swarm_peer.errors import Busy, InvalidMessage, NotServing
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId, WindowRange
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.grants import Reads
from swarm_peer.protocol.log import Contribution, HandedOver, Log, Name, base_of
from swarm_peer.protocol.statements import Seat, Signed
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.state.states import Taken
from swarm_peer.runtime.step import driver as driver_module
from swarm_peer.runtime.step import giving
from swarm_peer.runtime.step.cut_results import Averaging
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.driver_parts import AverageFailed
from swarm_peer.runtime.step.giving import Giving
from swarm_peer.runtime.step.named_gradients import NamedGradients, mean_of
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import GiveCall

RATE = 0.25
NUM_SLICES = 4
SLICE = 1000


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 0.02)


def gradient(sample, weights):
    """What a sample makes of some weights."""
    generator = torch.Generator().manual_seed(hash(sample) % 2**31)
    return torch.randn(3, generator=generator) + 0.5 * weights


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:32]


class Shop:
    """Weights of three values, and what was computed with them."""

    def __init__(self):
        self.weights = torch.zeros(3)
        self.round = None
        self.sums, self.count = torch.zeros(3), 0

    def open(self, number, standing):
        self.round = number

    def close(self):
        self.round = None

    def fall_behind(self):
        self.close()

    async def drain(self, number):
        assert self.round is None

    def add(self, sample):
        self.sums += gradient(sample, self.weights)
        self.count += 1

    async def contribution(self, number):
        found = [self.sums / self.count], self.count
        await self.discard()
        return found

    async def discard(self):
        self.sums, self.count = torch.zeros(3), 0

    async def give_up(self):
        await self.discard()

    async def try_own(self, means):
        pass

    async def apply(self, averages, word):
        for average in averages:
            self.weights = self.weights - RATE * average

    async def root(self, standing):
        return digest(self.weights)

    async def digest(self, averages):
        return digest(averages[0])

    async def mean(self, contributions):
        return mean_of(contributions, [torch.empty(3, device="meta")])


class Board:
    """Members of a cut lay their parts on it, and each adds them up in the same order.

    Attributes:
        silent: peers that lay nothing on it
    """

    def __init__(self):
        self.parts = {}
        self.silent = set()
        self.changed = Condition()

    def at(self, seat):
        return partial(self._average, seat)

    async def _average(self, seat, cut, means, weight):
        parts = self.parts.setdefault(cut.hash, {})
        if seat.peer not in self.silent:
            parts[seat] = [mean * weight for mean in means], weight
        self.changed.notify()
        with anyio.move_on_after(0.5):
            await self.changed.wait_for(lambda: set(parts) >= set(cut.seats))
        if missing := frozenset(cut.seats) - set(parts):
            raise AverageFailed("somebody is silent", missing)
        total = sum(weight for _, weight in parts.values())
        ordered = [parts[each][0][0] for each in sorted(cut.seats)]
        return [sum(ordered[1:], ordered[0]) / max(total, 1)]


class At:
    """An averager of one seat."""

    def __init__(self, average):
        self.average = average

    def begin(self, restart):
        pass

    def settle(self, cut):
        pass


class Others:
    """Takes over what a seat lacks from the others' workshops."""

    def __init__(self, rigs, own, stage):
        self.rigs, self.own, self.stage = rigs, own, stage

    def _mates(self):
        return [rig for rig in self.rigs.values() if rig is not self.own and rig.stage == self.stage]

    async def update(self, committed):
        for rig in self._mates():
            if (found := rig.driver.updates.get(committed.entry.hash)) is not None:
                return found
        raise NotServing("nobody has it")

    async def state(self):
        log = self.own.driver.member.log
        for rig in self._mates():
            member = rig.driver.member
            if member is not None and member.state == log.head and rig.driver._weights[1] in log.heads().values():
                self.own.shop.weights = rig.shop.weights.clone()
                ledger = member.ledger.copy() if member.ledger is not None else None
                return Taken(rig.driver._weights[1], dict(rig.driver.updates), member.state, ledger)
        raise NotServing("nobody is there")

    async def begin(self, restart):
        assert not restart.entries
        self.own.shop.weights = torch.zeros(3)
        return Ledger(NUM_SLICES) if self.stage == 0 else None

    async def adopt(self, root):
        self.own.num_refused += 1
        return False


class Rig:
    """One peer with its workshop."""

    def __init__(self, peer, stage, board, rigs):
        self.peer, self.stage, self.shop = peer, stage, Shop()
        self.ended = []
        self.num_refused = 0
        self.driver = RoundDriver(
            agreement=peer.agreement,
            stage=stage,
            workplace=self.shop,
            averager=At(board.at(peer.core.membership.me)),
            sources=Others(rigs, self, stage),
            clock=peer.context.clock,
            ended=self.ended.append,
        )
        self.giving = Giving(
            context=peer.context,
            agreement=peer.agreement,
            transport=peer.transport,
            driver=self.driver,
            stage=stage,
            shapes=[torch.Size((3,))],
        )
        peer.calls.add(stage, self.giving.calls)
        self.next_window = {}
        self.is_leaving = False

    def take_over(self, rigs, other, state):
        rig = rigs.get(other.identity.peer_id)
        if rig is None or rig.driver._weights[1] != state:
            return False
        self.shop.weights = rig.shop.weights.clone()
        return True

    def launch(self, rigs, random):
        """Compute a microbatch of one sample, if one may be."""
        first = self.driver.member
        if first is None or first.ledger is None or self.is_leaving:
            return
        first.wants_samples = 2
        first.reads = Reads(first.reads.slices, 1 - len(first.reads.slices), first.granted)
        working = first.working
        if working is None or self.shop.round != working.number or not first.may_launch(1):
            return
        number, slice_id = working.number, first.granted.slices[0]
        mates = [rig for rig in rigs.values() if rig.stage == 1 and rig.shop.round == number and not rig.is_leaving]
        mates = [rig for rig in mates if rig.driver.member is not None and rig.driver.member.working is not None]
        if not mates:
            return
        mate = random.choice(mates)
        left = first.ledger.uncounted(slice_id).next_window
        window = self.next_window[slice_id] = max(left, self.next_window.get(slice_id, 0))
        sample, base = SampleId(*slice_id, window), (first.base(number), mate.driver.member.base(number))
        epoch = mate.peer.core.epoch
        if not (mate.driver.member.work.admits(number, base) and first.work.admits(number, base)):
            return
        mate.shop.add(sample)
        mate.driver.member.work.computed(number, base, weight=1, caller=first.me, num_samples=1)
        receipt = mate.driver.member.receipt_for(first.me, number, epoch)
        first.launched(1)
        self.shop.add(sample)
        samples = [WindowRange(*sample, window + 1)]
        first.work.computed(number, base, weight=1, samples=samples, receipt=receipt)
        self.next_window[slice_id] = window + 1
        first.reads = Reads(tuple({*first.reads.slices, slice_id}), 0, first.granted)
        self.peer.agreement.look()

    async def leave(self, rigs, num_mates=2):
        """Hand everything over, to several stage-mates, and give up the place."""
        self.is_leaving = True
        held = await self.driver.leave()
        mates = [rig for rig in rigs.values() if rig.stage == self.stage and rig is not self and rig.driver.member]
        assert not await self.giving.give(held, [mate.peer.identity.peer_id for mate in mates], num_mates)
        self.peer.core.membership.desired = frozenset()
        self.peer.agreement.look()


class Hall:
    """Peers of two stages, with workshops."""

    def __init__(self):
        self.rigs = {}
        self.board = Board()
        self.random = Random(1)
        self.num_compared = 0
        self.is_paused = False

    async def work(self, own, others):
        if not (stages := own.core.membership.desired - {-1}):
            return
        (stage,) = stages
        rig = self.rigs[own.identity.peer_id] = Rig(own, stage, self.board, self.rigs)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.driver.run)
            tasks.start_soon(rig.giving.run)
            while True:
                own.prepare([each for each in others if each is not own], partial(rig.take_over, self.rigs))
                if stage == 0 and not self.is_paused:
                    rig.launch(self.rigs, self.random)
                await anyio.sleep(0.001)

    def rig(self, peer):
        return self.rigs[peer.identity.peer_id]

    def cuts(self, stage):
        """The cuts of a stage, by round; all members have the same."""
        found = {}
        for rig in self.rigs.values():
            for committed in rig.ended if rig.stage == stage else ():
                cut = committed.entry.cut
                assert found.setdefault(cut.round, committed).entry.hash == committed.entry.hash
        return [found[number].entry.cut for number in sorted(found)]

    def check(self, lag=0):
        """All have the weights that one process makes of the samples that have counted, in both stages."""
        weights, by_head, seen = [torch.zeros(3)], {}, set()
        for ours, theirs in zip(self.cuts(0), self.cuts(1), strict=False):
            samples = [SampleId(*i.slice_id, w) for i in ours.samples for w in range(i.start, i.end)]
            assert not seen & set(samples), "nothing counts twice"
            seen |= set(samples)
            weight = [sum(each.weight for each in cut.brings) for cut in (ours, theirs)]
            assert weight == [len(samples)] * 2
            begins_with = weights[max(len(weights) - 1 - lag, 0)]
            mean = torch.stack([gradient(sample, begins_with) for sample in samples]).mean(0)
            weights.append(weights[-1] - RATE * mean)
            by_head[ours.parent] = by_head[theirs.parent] = weights[-1]
        for rig in self.rigs.values():
            for committed in rig.ended[-1:]:
                expected = by_head.get(committed.entry.cut.parent)
                if expected is not None and rig.driver._weights[1] == committed.entry.hash:
                    torch.testing.assert_close(rig.shop.weights, expected, rtol=1e-4, atol=1e-5)
                    self.num_compared += 1
        return len(seen)


def rounds_of(stage, count):
    return lambda peer: stage in peer.core.members and peer.log(stage).next_round >= count


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


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(giving, "CHUNK_BYTES", 8)


def given_by(rig, *, weight=2, values=(1.0, 2.0, 3.0), digest=None, name=None):
    """A contribution of a rig, with its statement and its chunks."""
    member, part = rig.driver.member, rig.peer.agreement
    data = bytes_of(torch.tensor(values))
    contribution = Contribution(name or Name(member.me, member.log.next_round + 1), weight, (), ())
    body = HandedOver(member.me, part.core.epoch.id, contribution, digest or giving._digest(data))
    statement = memoryview(part.statements.encode(part.statements.sign(body)))
    return contribution, statement, data


async def two_mates(some, hall):
    """Rigs of two seats of stage 1, in a run that begins no further round."""
    first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
    await until(first, lambda peer: peer.core.membership.stages != frozenset())
    more = some.add(Identity.generate(), 1)
    await until([more], lambda peer: peer.core.membership.stages != frozenset())
    await until([first[1]], lambda peer: len(peer.core.epoch.roster(1)) == 2)
    hall.is_paused = True
    peers = *first, more  # of which one may be a round behind the others
    logs = [hall.rig(peer).driver.member.log for peer in peers]
    await until(peers, lambda _: len({log.next_round for log in logs}) == 1)
    return hall.rig(first[1]), hall.rig(more)


def call_of(offset, data):
    return GiveCall(manifest=HASH, stage=1, offset=offset, num_bytes=len(data))


def test_a_contribution_comes_in_chunks_in_any_order_and_again(small_chunks):
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller = giver.peer.identity.peer_id
            contribution, statement, data = given_by(giver)
            for offset in (8, 8, 0, 0, 8):
                await taker.giving.handle(caller, call_of(offset, data), (statement, data[offset : offset + 8]))
            assert taker.driver.member.work.guests == {contribution.name: contribution}
            means, weight = taker.driver.gradients.get(contribution.name)
            assert (means[0].tolist(), weight) == ([1.0, 2.0, 3.0], 2)

    anyio.run(run)


def test_a_contribution_that_comes_before_its_taker_has_begun_is_held():
    """The core has its place, and names it, while the device has yet to end the work of the place before."""

    async def run():
        hall, is_idle = Hall(), anyio.Event()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            contribution, statement, data = given_by(giver)
            before = Name(giver.driver.member.me, contribution.name.round + 1)
            taker.driver.gradients.put(before, [torch.zeros(3)], 1)
            taker.driver.gradients.put(contribution.name, [torch.zeros(3)], 1)
            taker.giving._signed[contribution.name] = taker.peer.agreement.statements.decode(
                Signed[HandedOver], bytes(statement)
            )
            discard, taker.shop.discard = taker.shop.discard, is_idle.wait
            taker.driver._served = None
            taker.peer.changed.notify()
            await taker.giving.handle(giver.peer.identity.peer_id, call_of(0, data), (statement, data))
            taker.shop.discard = discard
            is_idle.set()
            await until([taker.peer], lambda _: taker.driver._served is taker.driver.member)
            assert taker.driver.gradients.names == {contribution.name} == taker.driver.member.work.guests.keys()
            assert taker.driver.gradients.get(contribution.name)[0][0].tolist() == [1.0, 2.0, 3.0]

    anyio.run(run)


def test_a_contribution_whose_round_ends_meanwhile_is_given_all_the_same():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            contribution, _, _ = given_by(giver)
            giver.driver.gradients.put(contribution.name, [torch.tensor([1.0, 2.0, 3.0])], 2)

            def mates():
                yield "somebody who is gone"
                giver.driver.gradients.drop(contribution.name)
                yield taker.peer.identity.peer_id

            assert not await giver.giving.give([contribution], mates(), enough=1)
            assert contribution.name in taker.driver.gradients.names

    anyio.run(run)


def test_a_contribution_whose_round_is_over_does_not_keep_others_from_being_given():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            due, _, _ = given_by(giver)
            over, _, _ = given_by(giver, name=Name(giver.driver.member.me, -1))
            for each in (over, due):
                giver.driver.gradients.put(each.name, [torch.tensor([1.0, 2.0, 3.0])], 2)
            assert await giver.giving.give([over, due], [taker.peer.identity.peer_id], enough=1) == [over]
            assert due.name in taker.driver.gradients.names

    anyio.run(run)


def test_what_its_author_has_not_given_is_refused():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, member = giver.peer.identity.peer_id, giver.driver.member

            async def give(given, error, match, by=caller, offset=0, cut=None):
                _, statement, data = given
                with pytest.raises(error, match=match):
                    await taker.giving.handle(by, call_of(offset, data), (statement, data[:cut]))

            await give(given_by(giver), NotServing, "from stage-mate to stage-mate", by="a stranger")
            await give(given_by(giver, digest="d" * 32), InvalidMessage, "has not signed")
            await give(given_by(giver, values=(float("nan"), 0.0, 0.0)), InvalidMessage, "not finite")
            await give(given_by(giver, values=(0.0, -3e38, 0.0)), InvalidMessage, "too large")
            await give(given_by(giver, values=(0.0, 0.0)), InvalidMessage, "a contribution of 8 bytes")
            await give(given_by(giver), InvalidMessage, "are no chunk", cut=4)
            await give(given_by(giver), InvalidMessage, "are no chunk", offset=4)
            await give(given_by(giver, weight=-1), InvalidMessage, "not its author's")
            others = Name(taker.driver.member.me, member.log.next_round + 1)
            await give(given_by(giver, name=others), InvalidMessage, "not its author's")
            await give(given_by(giver, name=Name(member.me, -1)), NotServing, "is over here")
            assert taker.driver.member.work.guests == {}

    anyio.run(run)


def test_a_seat_holds_only_so_many_contributions_of_others(small_chunks, monkeypatch):
    monkeypatch.setattr(giving, "MAX_GUESTS", 1)

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, me = giver.peer.identity.peer_id, giver.driver.member.me
            next_round = taker.driver.member.log.next_round
            _, statement, data = given_by(giver, name=Name(me, next_round))
            for offset in (0, 8):
                await taker.giving.handle(caller, call_of(offset, data), (statement, data[offset : offset + 8]))
            _, statement, data = given_by(giver, name=Name(me, next_round + 1))
            with pytest.raises(Busy, match="contributions of others"):
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))
            _, statement, data = given_by(giver, name=Name(me, next_round + 9))
            with pytest.raises(NotServing, match="far from beginning"):
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))

    anyio.run(run)


def test_a_giver_has_one_place_for_what_arrives(small_chunks):
    """With first chunks alone it would keep those of others away."""

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, me = giver.peer.identity.peer_id, giver.driver.member.me
            next_round = taker.driver.member.log.next_round
            given = [given_by(giver, name=Name(me, next_round + later)) for later in (0, 1)]
            for _, statement, data in given:
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))
            assert len(taker.giving._arriving) == 1
            last, statement, data = given[-1]
            await taker.giving.handle(caller, call_of(8, data), (statement, data[8:]))
            assert taker.driver.member.work.guests == {last.name: last}

    anyio.run(run)


@pytest.mark.parametrize("what", ["giver", "round"])
def test_half_of_a_contribution_is_dropped_when_its_giver_or_its_round_is_gone(small_chunks, what):
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            number = taker.driver.member.log.next_round
            _, statement, data = given_by(giver, name=Name(giver.driver.member.me, number))
            await taker.giving.handle(giver.peer.identity.peer_id, call_of(0, data), (statement, data[:8]))
            assert len(taker.giving._arriving) == 1
            if what == "giver":
                giver.peer.core.membership.desired = frozenset()
                giver.peer.agreement.look()
            else:
                hall.is_paused = False
            await until([taker.peer], lambda _: not taker.giving._arriving)

    anyio.run(run)

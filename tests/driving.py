"""Drivers of seats in one stage, whose gradients are known by sample: what tests of `runtime/step` have in common."""

from __future__ import annotations

import hashlib
from functools import partial
from random import Random

import anyio
import torch

from swarm_peer.errors import NotServing
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId, WindowRange
from swarm_peer.protocol.grants import Reads
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.state.states import Taken
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.driver_parts import AverageFailed
from swarm_peer.runtime.step.giving import Giving
from swarm_peer.runtime.step.named_gradients import mean_of

RATE = 0.25
NUM_SLICES = 4
SLICE = 1000


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

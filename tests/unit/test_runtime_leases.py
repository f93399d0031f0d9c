"""Slices leased among the peers of stage 0, over an in-memory network, with real threads that read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext

import anyio
import pytest
from contexts import FixedRandom, MovedClock, begin_counting, dispatcher, make_context, unparsed
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from made_up_slices import FakeReader
from memory_transport import MemoryNetwork

from swarm_peer.errors import InvalidMessage, NotServing, PeerUnreachable
from swarm_peer.policy.data.ranges import SampleId, SliceId, WindowRange, merge_ranges, ranges_of
from swarm_peer.policy.data.sample_ledger import MAX_UNHELD_EMPTY, SampleLedger
from swarm_peer.policy.progress_counter import RoundCount
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.data import leases as leases_module
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.data.reading_mates import PATIENCE
from swarm_peer.runtime.network import progress as progress_module
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.ledger_codec import decode_ledger, encode_ledger
from swarm_peer.wire.messages import MAX_FACTS, LeaseCall, LeaseReply

RUN = "0123456789abcdef" * 2
ANNOUNCEMENT_S = 10.0
GLOBAL_BATCH = 10_000


class Peer:
    """What a stage-0 peer has that reads data."""

    def __init__(self, swarm: Swarm, name: str, reader: FakeReader, incarnation: int = 1):
        self.swarm, self.name = swarm, name
        identity = Identity(Ed25519PrivateKey.from_private_bytes(name.encode() * 32))
        self.peer_id = identity.peer_id
        self.context = make_context(
            unparsed(RUN, global_batch_size=GLOBAL_BATCH, announcement_s=ANNOUNCEMENT_S),
            identity=identity,
            clock=swarm.clock,
            random=FixedRandom(name),
        )
        self.metrics, self.changed = self.context.metrics, self.context.changed
        self.transport = swarm.network.transport(self.peer_id)
        self.progress = ProgressBook(
            context=self.context,
            incarnation=incarnation,
            is_author=lambda author: True,
            on_stranger=lambda author: None,
        )
        self.pool = SamplePool(context=self.context, reader=reader)  # type: ignore[arg-type]
        self.hidden: set[str] = set()  # peers that this one does not see
        self.leases = SliceLeases(
            context=self.context,
            reader=reader,  # type: ignore[arg-type]
            pool=self.pool,
            transport=self.transport,
            progress=self.progress,
            view=self.view,
            on_other_timeline=lambda: self.other_timelines.append(1),
        )
        self.other_timelines: list[int] = []
        self.state = PeerState.SERVING
        self.task: asyncio.Task[None] | None = None

    def view(self) -> SwarmView:
        peers = [peer for peer in self.swarm.announced if peer.name not in self.hidden]
        return SwarmView(1, tuple(PeerView(peer_id=peer.peer_id, stage=0, state=peer.state) for peer in peers))

    def start(self) -> None:
        self.task = asyncio.create_task(self.leases.run())

    @property
    def ledger(self) -> SampleLedger:
        assert self.leases._ledger is not None
        return self.leases._ledger

    @property
    def leased(self) -> list[SliceId]:
        return self.ledger.leases(self.peer_id)

    async def has_leased(self, count: int) -> list[SliceId]:
        await until(lambda: len(self.leases._held) >= count)
        return sorted(self.leases._held)

    async def draw(self, count: int = 1) -> list[SampleId]:
        return [sample.id for sample in await self.leases.draw(count)]

    def count(self, samples: list[SampleId]) -> None:
        own = self.progress.counter.count_of(self.progress.round_number, self.progress.author)
        total = own.samples + len(samples)
        self.progress.count_own(
            self.progress.round_number, RoundCount(total, total, 0.0, self.leases.note_counted(samples, own))
        )

    def tell(self, other: Peer) -> None:
        other.progress.merge(self.progress.signed_counts(), vouched=True)

    @property
    def repeated(self) -> float:
        return float(self.metrics.repeated_samples._value.get())


async def begin(leases: SliceLeases, round_number: int, timeline: Timeline, data: bytes) -> None:
    leases.begin(round_number, timeline, await leases.read_ledger(data))


class Swarm:
    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock
        self.network = MemoryNetwork()
        self.peers: list[Peer] = []
        self.announced: list[Peer] = []
        # If a dead peer has told the end of a slice in this round, the next owner finds the end itself, a little later.
        self.has_heirs = False

    async def add(
        self, name: str, *lengths: int, ledger: bytes = b"", round_number: int = 0, incarnation: int = 1
    ) -> Peer:
        peer = Peer(self, name, FakeReader(*lengths), incarnation)
        begin_counting(peer.progress, round_number)
        await begin(peer.leases, round_number, FIRST_TIMELINE, ledger)
        await peer.transport.serve(dispatcher(RUN, 0, peer.leases.calls))
        self.peers.append(peer)
        self.announced.append(peer)
        for other in self.peers:
            other.tell(peer)
        peer.start()
        return peer

    def kill(self, peer: Peer, is_noticed: bool = True) -> None:
        assert peer.task is not None
        peer.task.cancel()
        self.network.kill(peer.peer_id)
        self.peers.remove(peer)
        if is_noticed:
            self.announced.remove(peer)

    def end_round(self) -> None:
        for peer in self.peers:
            for other in self.peers:
                peer.tell(other)
        ledgers = {peer.leases.end_round(peer.progress.round_number, {}) for peer in self.peers}
        assert len(ledgers) == 1 or self.has_heirs, "stage-mates give newcomers the same bytes"
        for peer in self.peers:
            assert peer.repeated == 0
            begin_counting(peer.progress, peer.progress.round_number + 1)
            peer.changed.notify()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock(now=1000.0)
    monkeypatch.setattr(leases_module, "RETRY_S", 0.01)
    return clock


@pytest.fixture
async def swarm(clock: MovedClock) -> AsyncIterator[Swarm]:
    swarm = Swarm(clock)
    async with swarm.network:
        yield swarm
        for peer in swarm.peers:
            assert peer.task is not None
            assert not peer.task.done(), "it failed"
            peer.task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no one event for what many peers do)
        await anyio.sleep(0.002)


def windows_of(slice_id: SliceId, count: int) -> set[SampleId]:
    return {SampleId(*slice_id, window) for window in range(count)}


async def test_who_is_alone_asks_nobody_and_goes_through_the_data_pass_after_pass(swarm: Swarm) -> None:
    lengths = [3, 0, 5, 4]
    peer = await swarm.add("a", *lengths)
    for _ in range(2):
        drawn = [await peer.draw(4) for _ in range(3)]
        for samples in drawn:
            peer.count(samples)
        swarm.end_round()
        assert sorted(sample[1:] for samples in drawn for sample in samples) == [
            (index, window) for index, length in enumerate(lengths) for window in range(length)
        ]
    finished = [peer.ledger.is_finished(SliceId(1, index)) for index in range(len(lengths))]
    assert peer.ledger.current_pass == 2 or sum(finished) >= 2
    assert swarm.network.calls == []


async def test_stage_mates_read_different_slices(swarm: Swarm) -> None:
    peers = [await swarm.add(name, *[500] * 24) for name in "abc"]
    leased = [set(await peer.has_leased(8)) for peer in peers]
    assert len(set.union(*leased)) == 24


async def test_where_slices_are_few_many_stage_mates_read_the_same_pass(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeReader, "at_a_time", 2)
    leased = []
    for name in "abcdefghijkl":
        peer = await swarm.add(name, *[500] * 24)
        leased += await peer.has_leased(2)
    assert sorted(leased) == [SliceId(0, index) for index in range(24)]


async def test_a_pass_is_covered_and_no_sample_counts_twice(swarm: Swarm) -> None:
    lengths = [random.Random(i).randrange(12) for i in range(30)]
    for name in "abc":
        await swarm.add(name, *lengths)
    counted: set[SampleId] = set()
    steps = 0
    while any(peer.ledger.current_pass == 0 for peer in swarm.peers):
        for peer in swarm.peers:
            samples = await peer.draw(5)
            assert not counted & set(samples)
            counted.update(samples)
            peer.count(samples)
        swarm.end_round()
        steps += 1
        assert steps < 100
    of_pass_0 = {sample for sample in counted if sample.pass_number == 0}
    assert of_pass_0 == {SampleId(0, i, w) for i, length in enumerate(lengths) for w in range(length)}


async def test_what_a_dead_stage_mate_told_a_single_survivor_is_respected(swarm: Swarm, clock: MovedClock) -> None:
    a, b, c = [await swarm.add(name, *[10] * 12) for name in "abc"]
    samples = await c.draw(20)
    c.count(samples)
    c.tell(b)
    swarm.kill(c)
    clock.now += PATIENCE * ANNOUNCEMENT_S + 1
    rest: set[SampleId] = set()
    while len(rest) < 120 - 20:
        for peer in (a, b):
            with anyio.move_on_after(2.0):
                drawn = await peer.draw(1)
                peer.count(drawn)
                assert not rest & set(drawn)
                rest.update(sample for sample in drawn if sample.pass_number == 0)
    assert not rest & set(samples)
    while {peer.ledger.current_pass for peer in swarm.peers} != {1}:  # the ends of slices come with later counts
        for peer in (a, b):
            peer.count(await peer.draw(1))
        swarm.end_round()


async def test_leases_of_a_peer_that_vanished_are_respected_for_a_while(swarm: Swarm, clock: MovedClock) -> None:
    a = await swarm.add("a", *[10] * 4)
    theirs = await a.has_leased(4)
    b = await swarm.add("b", *[10] * 4)
    first = await b.has_leased(4)
    assert all(slice_id.pass_number > 0 for slice_id in first), "it reads ahead"
    swarm.kill(a)
    b.leases._let_go(first[0])
    await b.has_leased(5)
    assert not set(theirs) & set(b.leased)
    clock.now += PATIENCE * ANNOUNCEMENT_S + 1
    await until(lambda: set(theirs) <= set(b.leased))


async def test_leases_of_a_peer_that_said_goodbye_are_free_at_once(swarm: Swarm) -> None:
    a = await swarm.add("a", *[10] * 4)
    theirs = await a.has_leased(4)
    b = await swarm.add("b", *[10] * 4)
    swarm.kill(a)
    b.leases.forget(a.peer_id)
    await until(lambda: set(theirs) <= set(b.leased))


async def test_as_long_as_a_stage_mate_does_not_answer_nothing_is_leased(swarm: Swarm) -> None:
    fault = swarm.network.fault(op="lease", times=10**6, fail=PeerUnreachable("no way"))
    a = await swarm.add("a", *[500] * 20)
    await a.has_leased(8)
    b = await swarm.add("b", *[500] * 20)
    await until(lambda: fault.fired > 3)
    assert b.leases._held == set()
    assert b.pool.is_read_out
    fault.times = fault.fired
    await b.has_leased(8)


async def test_hearsay_is_corrected(swarm: Swarm) -> None:
    """A stage-mate that asked and gave up leaves others believing that it leases a slice."""
    a = await swarm.add("a", *[500] * 9)
    mine = await a.has_leased(8)
    [free] = {SliceId(0, index) for index in range(9)} - set(mine)
    b = await swarm.add("b", *[500] * 9)
    assert await b.has_leased(1) == [free]
    b.leases._let_go(free)
    b.ledger.release(b.peer_id, [free])
    assert a.ledger.owner(free) == b.peer_id
    for slice_id in mine[:2]:
        a.leases._let_go(slice_id)  # it wants others now
    await until(lambda: a.ledger.owner(free) == a.peer_id or b.ledger.owner(free) == b.peer_id)


async def test_two_that_did_not_know_of_each_other(swarm: Swarm) -> None:
    a = await swarm.add("a", *[200] * 3)
    b = Peer(swarm, "b", FakeReader(*[200] * 3))
    a.hidden.add("b")
    b.hidden.add("a")
    await begin(b.leases, 0, FIRST_TIMELINE, b"")
    await b.transport.serve(dispatcher(RUN, 0, b.leases.calls))
    swarm.peers.append(b)
    swarm.announced.append(b)
    b.start()
    await a.has_leased(3)
    await b.has_leased(3)
    in_flight, counted = await a.draw(1), await a.draw(10)
    theirs = await b.draw(20)
    b.count(theirs)
    a.count(counted)
    contested = {sample.slice_id for sample in theirs}
    b.tell(a)
    assert in_flight[0].slice_id in a.leased or in_flight[0].slice_id not in contested
    assert not (contested - {in_flight[0].slice_id}) & set(a.leased), "it stops to read them"
    a.count(in_flight)
    assert not contested & set(a.leased), "nothing is on its way any more"
    a.hidden.clear()
    b.hidden.clear()
    a.tell(b)
    again = a.leases.end_round(0, {})
    assert a.repeated == len({*in_flight, *counted} & set(theirs))
    assert decode_ledger(again, 3).uncounted(theirs[0].slice_id).next_window > 0


async def test_to_begin_anew_is_to_read_what_has_not_counted(swarm: Swarm) -> None:
    peer = await swarm.add("a", 30)
    before = await peer.draw(10)
    peer.count(before)
    after_step = peer.leases.end_round(0, {})
    generation = peer.leases.generation
    drawn = await peer.draw(5)
    await begin(peer.leases, 1, FIRST_TIMELINE, after_step)
    begin_counting(peer.progress, 1)
    assert peer.leases.generation > generation
    again = await peer.draw(5)
    assert again == drawn, "in the ledger that it goes on from they have not counted"
    await begin(peer.leases, 0, FIRST_TIMELINE, b"")
    assert sorted(await peer.draw(30)) == sorted(windows_of(SliceId(0, 0), 30))


async def test_a_newcomer_goes_on_from_the_ledger_that_it_is_given(swarm: Swarm) -> None:
    a = await swarm.add("a", 30)
    a.count(await a.draw(12))
    ledger = a.leases.end_round(0, {})
    swarm.kill(a)
    b = await swarm.add("b", 30, ledger=ledger, round_number=1)
    assert sorted(await b.draw(18)) == [SampleId(0, 0, window) for window in range(12, 30)]


@pytest.mark.parametrize("counts_more", [True, False])
@pytest.mark.parametrize("num_missed", [1, 2, 3])
async def test_what_a_peer_counted_in_a_round_that_ended_without_it_is_told_once(
    swarm: Swarm, num_missed: int, counts_more: bool
) -> None:
    """Its stage-mate ends rounds without knowing of it; then it takes over the ledger, at once or round by round."""
    a, b = await swarm.add("a", *[50] * 3), await swarm.add("b", *[50] * 3)
    counted = await a.draw(4)
    a.count(counted)
    ledgers = []
    for number in range(num_missed):
        ledgers.append(b.leases.end_round(number, {}))
        begin_counting(b.progress, number + 1)
    round_by_round, at_once = list(enumerate(ledgers)), [(num_missed - 1, ledgers[-1])]
    for number, data in round_by_round if num_missed == 2 else at_once:
        await begin(a.leases, number + 1, FIRST_TIMELINE, data)
        begin_counting(a.progress, number + 1)
    drawn = await a.draw(30)
    assert not set(drawn) & set(counted), "it reads them no more"
    if counts_more:
        a.count(drawn)
    a.tell(b)
    assert b.leases.end_round(num_missed, {}) == a.leases.end_round(num_missed, {})
    assert b.ledger.lacking(ranges_of(counted)) == []
    begin_counting(a.progress, num_missed + 1)
    a.count(await a.draw(1))
    a.leases.end_round(num_missed + 1, {})
    assert (a.repeated, b.repeated) == (0, 0)


async def test_what_a_peer_still_holds_is_not_read_again_though_the_ledger_that_it_is_given_lacks_it(
    swarm: Swarm,
) -> None:
    """Stage-mates hear at once of the round that ended without it, and of those before when it brings its work."""
    a, b = await swarm.add("a", 50), await swarm.add("b", 50)
    before, missed = await a.draw(4), await a.draw(3)
    a.count(before)
    a.leases.end_round(0, {})
    begin_counting(a.progress, 1)
    a.count(missed)
    for number in range(2):
        ledger = b.leases.end_round(number, {})
        begin_counting(b.progress, number + 1)
    a.leases.begin(2, FIRST_TIMELINE, await a.leases.read_ledger(ledger), ranges_of([*before, *missed]))
    begin_counting(a.progress, 2)
    later = await a.draw(43)
    assert not set(later) & {*before, *missed}
    a.count(later[:1])
    a.tell(b)
    for peer in (a, b):
        peer.leases.end_round(2, {})
    assert b.ledger.lacking(ranges_of(missed)) == []
    for peer in (a, b):
        begin_counting(peer.progress, 3)
        peer.leases.end_round(3, {a.peer_id: merge_ranges(ranges_of([*before, *missed, *later[:1]]))})
    assert b.ledger.lacking(ranges_of(before)) == []
    assert (a.repeated, b.repeated) == (0, 0)


async def test_what_stage_mates_have_brought_to_an_average_is_not_read_again_though_they_told_nobody(
    swarm: Swarm,
) -> None:
    """They ended rounds without this peer, and die. Meanwhile it has begun to read what they had leased."""
    a = await swarm.add("a", *[50] * 3)
    unheard = [SampleId(0, 0, window) for window in range(4, 9)]
    held = await a.has_leased(3)
    assert SliceId(0, 0) in held
    brought = ranges_of(unheard)
    claims_the_end = [item._replace(is_last=True) for item in brought]
    own = await a.draw(5)
    a.count(own)
    a.leases.end_round(0, {a.peer_id: ranges_of(own), "12D3KooWMate": (*claims_the_end, WindowRange(0, 99, 0, 1))})
    assert a.ledger.lacking([*brought, *ranges_of(own)]) == []
    assert a.repeated == 0
    assert not a.ledger.is_finished(SliceId(0, 0)), "nobody but who reads a slice knows its end"
    assert SliceId(0, 0) not in a.leased, "it stops to read it, and leases it anew"
    assert {sample.slice_id for sample in own} - {SliceId(0, 0)} <= set(a.leased), "its own are no news"
    begin_counting(a.progress, 1)
    left = [await a.draw(1) for _ in range(150 - len({*unheard, *own}))]
    assert not {sample for drawn in left for sample in drawn} & {*unheard, *own}


async def test_who_has_gone_back_does_not_listen_to_who_has_not(swarm: Swarm) -> None:
    """Samples that counted in the timeline that is given up are to be read again."""
    a = await swarm.add("a", *[10] * 3)
    b = await swarm.add("b", *[10] * 3)
    of_a = await a.draw(10)
    a.count(of_a)
    swarm.end_round()
    nothing = encode_ledger(SampleLedger(3))
    await begin(b.leases, 6, Timeline(6, 0, 0), nothing)
    begin_counting(b.progress, 6, Timeline(6, 0, 0))
    a.tell(b)
    await anyio.sleep(0.05)
    assert b.leases._held == set(), "it waits for its stage-mate"
    await begin(a.leases, 6, Timeline(6, 0, 0), nothing)
    begin_counting(a.progress, 6, Timeline(6, 0, 0))
    read: set[SampleId] = set()
    while not set(of_a) <= read:
        for peer in (a, b):
            drawn = await peer.draw(1)
            assert not read & set(drawn)
            read.update(drawn)
            peer.count(drawn)


async def test_who_goes_back_reads_again_what_the_round_that_was_open_had_counted(swarm: Swarm) -> None:
    peer = await swarm.add("a", 30)
    peer.count(await peer.draw(10))
    await begin(peer.leases, 6, Timeline(6, 0, 0), b"")
    begin_counting(peer.progress, 6, Timeline(6, 0, 0))
    assert sorted(await peer.draw(30)) == sorted(windows_of(SliceId(0, 0), 30))


async def test_samples_given_up_pass_for_counted(swarm: Swarm) -> None:
    peer = await swarm.add("a", 6)
    samples = await peer.draw(6)
    peer.leases.give_up(samples[:2])
    await until(lambda: peer.pool.is_read_out or len(peer.leased) > 1)
    peer.count(samples[2:])
    swarm.end_round()
    assert peer.ledger.current_pass == 1
    assert peer.progress.counter.count_of(0, peer.progress.author).samples == 4


async def test_however_many_samples_are_given_up_others_take_the_count(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL_BATCH", 8)
    a, b = [await swarm.add(name, *[30] * 8) for name in "ab"]
    given_up, counted = await a.draw(20), await a.draw(8)
    a.leases.give_up(given_up)
    for sample in counted:
        a.count([sample])
    a.tell(b)
    for _ in range(2):
        swarm.end_round()
        a.count(await a.draw(1))
    swarm.end_round()
    for peer in (a, b):
        entered = {SampleId(*r.slice_id, w) for r in peer.ledger.facts() for w in range(r.start, r.end)}
        assert {*given_up, *counted} <= entered


async def test_a_count_that_comes_while_the_next_round_is_settled_is_entered(swarm: Swarm) -> None:
    a, b = [await swarm.add(name, *[10] * 20) for name in "ab"]
    late = await b.draw(4)
    b.count(late)
    a.leases.end_round(0, {})
    begin_counting(a.progress, 1)
    a.leases.end_round(1, {})
    b.tell(a)
    assert set(late) <= {SampleId(*r.slice_id, w) for r in a.ledger.facts() for w in range(r.start, r.end)}
    assert a.repeated == 0


async def test_what_has_counted_and_the_giver_of_a_state_has_not_heard_of_is_not_read_again(swarm: Swarm) -> None:
    a, b = [await swarm.add(name, *[30] * 4) for name in "ab"]
    counted = await a.draw(12)
    a.count(counted)
    not_heard = b.leases.end_round(0, {})
    swarm.kill(b)
    await begin(a.leases, 1, FIRST_TIMELINE, not_heard)
    begin_counting(a.progress, 1)
    a.changed.notify()
    assert not set(counted) & set(await a.draw(60))
    assert a.repeated == 0


async def test_who_has_gone_back_does_not_hear_the_pass_of_the_timeline_that_was_given_up(swarm: Swarm) -> None:
    a, *mates = [await swarm.add(name, *[500] * 40) for name in "abc"]
    await a.has_leased(8)
    answered = anyio.Event()

    def of_a_later_pass(reply):  # type: ignore[no-untyped-def]
        reply.body["current_pass"] = 1
        return reply

    faults = [
        swarm.network.fault(op="lease", to=peer.peer_id, after=answered, tamper=of_a_later_pass) for peer in mates
    ]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.leases._ask, {peer.peer_id for peer in mates}, [SliceId(0, 5)])
        await until(lambda: sum(fault.fired for fault in faults) == 2)
        await begin(a.leases, 6, Timeline(6, 0, 0), b"")
        answered.set()
    assert a.leases._mates._passes == {}


async def test_counts_that_come_late_are_entered(swarm: Swarm) -> None:
    a = await swarm.add("a", *[10] * 20)
    b = await swarm.add("b", *[10] * 20)
    b.count(await b.draw(3))
    b.tell(a)
    late = await b.draw(4)
    b.count(late)
    a.leases.end_round(0, {})
    begin_counting(a.progress, 1)
    b.tell(a)
    assert set(late) <= {SampleId(*r.slice_id, w) for r in a.ledger.facts() for w in range(r.start, r.end)}
    assert a.repeated == 0
    a.progress.merge(b.progress.signed_counts())
    assert a.repeated == 0


async def test_what_comes_with_a_lease_stays_known_when_the_round_is_over(swarm: Swarm) -> None:
    """Whoever told it may be gone then, and be the only one that had heard of it."""
    b = await swarm.add("b", *[10] * 20)
    b.ledger.note([WindowRange(0, index, 0, 3) for index in range(20) if SliceId(0, index) not in b.leased])
    a = await swarm.add("a", *[10] * 20)
    leased = await a.has_leased(1)
    swarm.kill(b)
    a.leases.end_round(0, {})
    assert {WindowRange(*slice_id, 0, 3) for slice_id in leased} <= set(a.ledger.facts())


async def test_a_peer_that_returns_reads_nothing_that_its_former_life_has_counted(swarm: Swarm) -> None:
    a = await swarm.add("a", *[10] * 12)
    former = await swarm.add("b", *[10] * 12)
    of_former = await former.draw(20)
    former.count(of_former)
    former.tell(a)
    swarm.kill(former)
    b = await swarm.add("b", *[10] * 12, incarnation=2)
    drawn = [await b.draw(1) for _ in range(30)]
    for samples in drawn:
        b.count(samples)
    of_new = {sample for samples in drawn for sample in samples}
    assert not of_new & set(of_former)
    swarm.end_round()
    counted = {SampleId(*r.slice_id, w) for r in a.ledger.facts() for w in range(r.start, r.end)}
    assert of_new | set(of_former) <= counted


async def test_no_slice_is_leased_before_all_counts_that_came_with_the_answer_are_known(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    a = await swarm.add("a", *[10] * 100)
    counted: set[SampleId] = set()
    for name in "bcef":
        dead = await swarm.add(name, *[10] * 100)
        drawn = await dead.draw(10)
        dead.count(drawn)
        dead.tell(a)
        counted.update(drawn)
        swarm.kill(dead)
    monkeypatch.setattr(progress_module, "MAX_CHECKED", 1)
    d = await swarm.add("d", *[10] * 100)
    assert not counted & set(await d.draw(30))
    assert "more counts than can be checked at once" in caplog.text
    swarm.end_round()


async def test_what_a_former_life_tells_late_is_not_read_again(swarm: Swarm) -> None:
    a = await swarm.add("a", *[200] * 3, incarnation=2)
    held = (await a.has_leased(3))[0]
    former = ProgressBook(
        context=a.context, incarnation=1, is_author=lambda author: True, on_stranger=lambda author: None
    )
    of_other = WindowRange(7, 0, 0, 4)
    former.count_own(0, RoundCount(4, 4, 0.0, (of_other,)))
    a.progress.merge(former.signed_counts())
    assert held in a.leased, "it counted of a slice that this life does not hold"
    former.count_own(0, RoundCount(8, 8, 0.0, (WindowRange(*held, 0, 4), of_other)))
    a.progress.merge(former.signed_counts())
    assert held not in a.leased
    read: set[SampleId] = set()
    while not any(sample.slice_id == held for sample in read):
        read.update(await a.draw(1))
    assert not read & windows_of(held, 4)
    a.count(sorted(read))
    a.leases.end_round(0, {})
    assert a.repeated == 0


async def test_ends_that_a_former_life_claims_are_weighed_like_those_of_a_stage_mate(swarm: Swarm) -> None:
    a = await swarm.add("a", *[500] * 64, incarnation=2)
    former = ProgressBook(
        context=a.context, incarnation=1, is_author=lambda author: True, on_stranger=lambda author: None
    )
    held = set(await a.has_leased(8))
    ends = [SliceId(0, index) for index in range(64) if SliceId(0, index) not in held]
    former.count_own(0, RoundCount(0, 1, 0.0, tuple(WindowRange(*slice_id, 0, 0, True) for slice_id in ends)))
    a.progress.merge(former.signed_counts())
    a.leases.end_round(0, {})
    assert sum(a.ledger.is_finished(slice_id) for slice_id in ends) == MAX_UNHELD_EMPTY


async def test_what_counts_twice_is_noted(swarm: Swarm) -> None:
    a = await swarm.add("a", 10)
    samples = await a.draw(4)
    a.count(samples)
    a.leases.end_round(0, {})
    begin_counting(a.progress, 1)
    own = a.progress.counter.count_of(1, a.progress.author)
    a.progress.count_own(1, RoundCount(own.samples + 2, 2, 0.0, ranges_of(samples[:2])))
    a.leases.end_round(1, {})
    assert a.repeated == 2


async def test_ranges_that_no_count_can_have_are_refused(swarm: Swarm) -> None:
    a = await swarm.add("a", *[10] * 3)
    b = await swarm.add("b", *[10] * 3)
    b.progress.count_own(0, RoundCount(1, 1, 0.0, (WindowRange(0, 0, 0, 3 * GLOBAL_BATCH),)))
    with pytest.raises(InvalidMessage, match="a progress count of 1 samples with ranges of 30000"):
        b.tell(a)
    assert list(a.progress.counter.ranges_from(0)) == []


async def test_no_stage_mate_ends_a_pass_that_is_not_read(swarm: Swarm) -> None:
    a, b = [await swarm.add(name, *[500] * 64) for name in "ab"]
    of_a, of_b = [set(await peer.has_leased(8)) for peer in (a, b)]
    lie = tuple(WindowRange(0, index, 0, 0, True) for index in range(64))
    b.progress.count_own(0, RoundCount(0, 1, 0.0, lie))
    b.tell(a)
    a.leases.end_round(0, {})
    ended = {SliceId(0, index) for index in range(64) if a.ledger.is_finished(SliceId(0, index))}
    assert of_b < ended
    assert not of_a & ended
    assert len(ended) == len(of_b) + MAX_UNHELD_EMPTY
    b.progress.count_own(0, RoundCount(1, 1, 0.0, lie))
    b.tell(a)  # late
    assert ended == {SliceId(0, index) for index in range(64) if a.ledger.is_finished(SliceId(0, index))}


async def test_only_stage_mates_lease(swarm: Swarm) -> None:
    a = await swarm.add("a", *[10] * 20)
    stranger = swarm.network.transport("stranger")
    call = LeaseCall(manifest=RUN, timeline_first_round=0, slices=(SliceId(0, 0),), believed=(), counts=())
    with pytest.raises(NotServing, match="does not know the caller"):
        await stranger.call(a.peer_id, call, timeout_s=5)
    a.leases.welcome("stranger")
    reply = await stranger.call(a.peer_id, call, timeout_s=5)
    refused = LeaseReply.model_validate(reply.body).refused
    assert refused == (((SliceId(0, 0)), a.peer_id),) or a.ledger.owner(SliceId(0, 0)) == "stranger"


async def test_who_is_asked_from_another_timeline_learns_of_it(swarm: Swarm) -> None:
    """Without leases it sends nothing to the next stage, and nobody else shows it the timeline."""
    a = await swarm.add("a", *[10] * 20)
    a.leases.welcome("ahead")
    await begin(a.leases, 5, Timeline(5, 5, 5), b"")
    for caller, first_round, heard in (("stranger", 9, []), ("ahead", 5, []), ("ahead", 9, [1]), ("ahead", 0, [1, 1])):
        call = LeaseCall(manifest=RUN, timeline_first_round=first_round, slices=(), believed=(), counts=())
        refused = caller == "stranger" or first_round != 5
        with pytest.raises(NotServing) if refused else nullcontext():
            await a.leases.handle_lease(caller, call, ())
        assert a.other_timelines == heard


async def test_a_stage_mate_cannot_fill_memory_with_leases(swarm: Swarm) -> None:
    a = await swarm.add("a", *[500] * 100)
    a.leases.welcome("glutton")
    for pass_number in range(100, 200):
        for first in (0, 50):
            names = tuple(SliceId(pass_number, first + index) for index in range(50))
            call = LeaseCall(manifest=RUN, timeline_first_round=0, slices=names, believed=(), counts=())
            reply = await a.leases.handle_lease("glutton", call, ())
            assert LeaseReply.model_validate(reply.body).refused == ()
    assert len(a.ledger.leases("glutton")) <= MAX_FACTS + 50


async def test_no_stage_mate_can_end_many_passes_at_once(swarm: Swarm) -> None:
    def exaggerate(reply):  # type: ignore[no-untyped-def]
        reply.body["current_pass"] = 1 << 30
        return reply

    await swarm.add("a", *[500] * 20)
    fault = swarm.network.fault(op="lease", tamper=exaggerate)
    b = await swarm.add("b", *[500] * 20)
    await until(lambda: fault.fired == 1)
    await b.has_leased(8)
    assert b.ledger.current_pass <= 1


async def test_one_stage_mate_of_several_cannot_end_a_pass(swarm: Swarm) -> None:
    def exaggerate(reply):  # type: ignore[no-untyped-def]
        reply.body["current_pass"] = 1 << 30
        return reply

    a, b, c = [await swarm.add(name, *[500] * 40) for name in "abc"]
    await a.has_leased(8)
    slices = [SliceId(0, 5)]
    swarm.network.fault(op="lease", to=b.peer_id, tamper=exaggerate, times=10**6)
    for _ in range(3):
        await a.leases._ask({b.peer_id, c.peer_id}, slices)
        assert a.ledger.current_pass == 0
    swarm.network.fault(op="lease", to=c.peer_id, tamper=exaggerate, times=10**6)
    await a.leases._ask({b.peer_id, c.peer_id}, slices)
    assert a.ledger.current_pass > 0


async def test_a_pass_that_is_over_ends_though_the_first_stage_mate_asked_refuses_all_of_it(swarm: Swarm) -> None:
    """It is the only one that says so, and one is not enough; the others were not asked then."""
    peers = [await swarm.add(name, *[500] * 40) for name in "abcd"]
    behind = max(peers, key=lambda peer: peer.peer_id)
    for peer in peers:
        if peer is not behind:
            peer.ledger.begin_pass(2)
    for slice_id in await behind.has_leased(8):
        behind.leases._let_go(slice_id)
    behind.ledger.release(behind.peer_id)
    behind.changed.notify()
    with anyio.fail_after(10):
        await until(lambda: behind.ledger.current_pass == 2 and len(behind.leases._held) == 8)


async def test_those_that_lack_the_end_of_a_slice_learn_it_from_the_only_one_that_is_a_pass_ahead(swarm: Swarm) -> None:
    """They do not believe it alone that the pass is over, and it refuses the slice for ever."""
    peers = [await swarm.add(name, *[500] * 4) for name in "abc"]
    ahead, *behind = sorted(peers, key=lambda peer: peer.peer_id)
    ends = [WindowRange(0, index, 0, 500, True) for index in range(4)]
    ahead.ledger.add(ends)
    for peer in behind:
        peer.ledger.add([*ends[:3], WindowRange(0, 3, 0, 500)])
    assert [peer.ledger.current_pass for peer in (ahead, *behind)] == [1, 0, 0]
    assert await behind[0].leases._ask({ahead.peer_id}, [SliceId(0, 3)]) == []
    behind[0].leases.end_round(0, {})
    assert behind[0].ledger.current_pass == 1


async def test_a_slice_whose_end_nobody_tells_is_passed_over_until_the_round_ends(swarm: Swarm) -> None:
    """A stage-mate refuses it, as one of a pass that is over. It may have taken over a ledger without these ends."""
    a, b, c = [await swarm.add(name, *[500] * 4) for name in "abc"]
    for peer in (a, b, c):
        peer.task.cancel()
    for slice_id in sorted(a.leases._held):
        a.leases._let_go(slice_id)
    for peer in (a, b, c):
        a.ledger.release(peer.peer_id)
    a.ledger.add([*(WindowRange(0, index, 0, 500, True) for index in range(3)), WindowRange(0, 3, 0, 500)])
    b.ledger.begin_pass(1)
    unfinished = SliceId(0, 3)
    assert a.ledger.wanted(a.peer_id, 4, {a.peer_id}) == [unfinished]
    assert await a.leases._ask({b.peer_id}, [unfinished]) == []
    assert [slice_id.pass_number for slice_id in a.ledger.wanted(a.peer_id, 4, {a.peer_id})] == [1] * 4
    assert await a.leases._ask({b.peer_id}, [SliceId(1, 0)]) == [SliceId(1, 0)]
    a.leases.end_round(0, {})
    assert a.ledger.wanted(a.peer_id, 4, {a.peer_id}) == [unfinished]
    for peer in (a, b, c):
        peer.start()


async def test_a_stage_mate_cannot_fill_memory_with_facts(swarm: Swarm) -> None:
    begins = iter(range(0, 10**9, 4 * MAX_FACTS))

    def tell_more(reply):  # type: ignore[no-untyped-def]
        first = next(begins)
        reply.body["facts"] = tuple((0, 5, first + 2 * n, first + 2 * n + 1, False) for n in range(MAX_FACTS // 2))
        reply.body["refused"] = ()
        return reply

    a, b = [await swarm.add(name, *[500] * 40) for name in "ab"]
    await a.has_leased(8)
    a.leases._told = ()
    swarm.network.fault(op="lease", to=b.peer_id, tamper=tell_more, times=10**6)
    answers = [await a.leases._ask({b.peer_id}, [SliceId(0, 5)]) for _ in range(4)]
    assert answers == [[SliceId(0, 5)]] * 2 + [[]] * 2, "without all facts, samples that have counted would be read"
    assert len(a.leases._told) == MAX_FACTS


async def test_what_nobody_has_asked_for_is_not_believed(swarm: Swarm) -> None:
    def tell_more(reply):  # type: ignore[no-untyped-def]
        reply.body["facts"] = tuple((0, index, 0, 0, True) for index in range(40))
        reply.body["refused"] = tuple(((9, index), c.peer_id) for index in range(40))
        return reply

    a, b, c = [await swarm.add(name, *[500] * 40) for name in "abc"]
    await a.has_leased(8)
    a.leases._told = ()
    fault = swarm.network.fault(op="lease", to=b.peer_id, tamper=tell_more)
    await a.leases._ask({b.peer_id}, [SliceId(0, 5), SliceId(0, 6)])
    assert fault.fired == 1
    assert a.leases._told == (WindowRange(0, 5, 0, 0, True), WindowRange(0, 6, 0, 0, True))
    assert not any(a.ledger.owner(SliceId(9, index)) for index in range(40))


async def test_a_ledger_of_other_data_is_refused(swarm: Swarm) -> None:
    with pytest.raises(InvalidMessage, match="of 4 slices, where the data here has 5"):
        await swarm.add("a", *[10] * 5, ledger=encode_ledger(SampleLedger(4)))


@pytest.mark.parametrize("seed", range(6))
async def test_a_swarm_that_comes_and_goes(swarm: Swarm, clock: MovedClock, seed: int) -> None:
    """Peers join, leave, die and fail to hear of each other's last counts: nothing that survivors know counts twice."""
    rng = random.Random(seed)
    lengths = [rng.randrange(9) for _ in range(25)]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    await swarm.add(next(names), *lengths)
    counted: dict[SampleId, str] = {}
    on_the_way: dict[Peer, list[SampleId]] = {}

    async def draw(peer: Peer) -> None:
        with anyio.move_on_after(0.5):
            samples = await peer.draw(rng.randint(1, 4))
            on_the_way.setdefault(peer, []).extend(samples)

    def count(peer: Peer) -> None:
        samples = on_the_way.pop(peer, [])
        for sample in samples:
            assert sample not in counted, f"{sample} counted by {counted[sample]} and {peer.name}"
            counted[sample] = peer.name
        if samples:
            peer.count(samples)

    def knows(sample: SampleId) -> bool:
        over = [sample.pass_number < peer.ledger.current_pass for peer in swarm.peers]
        ranges = [r for peer in swarm.peers for r in (*peer.ledger.counted(sample.slice_id),
                  *peer.progress.counter.ranges_from(0))]  # fmt: skip
        return any(over) or any(r.slice_id == sample.slice_id and r.start <= sample.window < r.end for r in ranges)

    for _ in range(120):
        peer, dice = rng.choice(swarm.peers), rng.random()
        if dice < 0.4:
            await draw(peer)
        elif dice < 0.7:
            count(peer)
        elif dice < 0.8:
            peer.tell(rng.choice(swarm.peers))
        elif dice < 0.9:
            for other in list(on_the_way):
                if other in swarm.peers:
                    count(other)
            swarm.end_round()
        elif dice < 0.95 and len(swarm.peers) < 4:
            donor = swarm.peers[0]
            await swarm.add(
                next(names), *lengths, ledger=encode_ledger(donor.ledger), round_number=donor.progress.round_number
            )
        elif len(swarm.peers) > 1:
            swarm.kill(peer)
            on_the_way.pop(peer, None)
            clock.now += rng.choice([0.0, PATIENCE * ANNOUNCEMENT_S + 1])
            swarm.has_heirs = True
            counted = {sample: name for sample, name in counted.items() if knows(sample)}
    assert len(counted) > 20

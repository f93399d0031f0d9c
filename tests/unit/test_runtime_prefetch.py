"""The pool of samples that are read ahead, by real worker threads, from slices that are made up."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from contexts import FixedRandom, ReadClock, make_context, unparsed
from made_up_slices import FakeReader

from swarm_peer.config import RunManifest
from swarm_peer.errors import HubFailed, UserError
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId, SliceId, Uncounted, WindowRange, ranges_of
from swarm_peer.policy.trouble import Trouble
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.data import prefetch as samples
from swarm_peer.runtime.data.prefetch import SAMPLES_AHEAD, WINDOWS_AT_A_TIME, Sample, SamplePool
from swarm_peer.runtime.data.slices import ALL_WINDOWS, OPEN_SLICES, SliceReader
from swarm_peer.runtime.host.machine import SystemThreads

DEADLINE_S = 50


class HeldThreads(SystemThreads):
    """Worker threads that begin as many calls as a test allows."""

    def __init__(self) -> None:
        self.asked = 0
        self.allowed: float = 0
        self.changed = Condition()

    def allow(self, calls: float = math.inf) -> None:
        self.allowed = calls
        self.changed.notify()

    async def has_been_asked(self) -> None:
        await self.changed.wait_for(lambda: self.asked > 0)

    async def run(self, *args, **options):  # type: ignore[no-untyped-def]
        self.asked += 1
        self.changed.notify()
        await self.changed.wait_for(lambda: self.allowed > 0)
        self.allowed -= 1
        return await super().run(*args, **options)


@asynccontextmanager
async def pool_of(
    reader: FakeReader | SliceReader, threads: SystemThreads | None = None, seed: int = 0
) -> AsyncIterator[SamplePool]:
    each_failure_a_second_later = ReadClock(itertools.count().__next__)
    context = make_context(
        unparsed("0" * 32),
        clock=each_failure_a_second_later,
        random=FixedRandom(seed),
        threads=threads or SystemThreads(),
    )
    pool = SamplePool(context=context, reader=reader)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.run)
        with anyio.fail_after(DEADLINE_S):
            yield pool
        tasks.cancel_scope.cancel()


def is_read_out(pool: SamplePool) -> bool:
    """Whether no leased slice has more to read at present."""
    return pool._unread.keys() <= pool._resting


async def until(pool: SamplePool, condition: Callable[[], bool]) -> None:
    await pool._changed.wait_for(condition)


def ids(some: list[Sample]) -> list[SampleId]:
    for sample in some:
        assert sample.tokens.tolist() == list(sample.id), "the tokens are those of the sample"
    return [sample.id for sample in some]


async def test_samples_of_open_slices_come_mixed_and_in_order() -> None:
    async with pool_of(FakeReader(*[30] * OPEN_SLICES)) as pool:
        assert pool.num_wanted(1) == OPEN_SLICES
        for index in range(OPEN_SLICES):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        first = ids(await pool.next_samples(100))
        rest = ids(await pool.next_samples(30 * OPEN_SLICES - 100))
        assert sorted(first + rest) == [SampleId(0, i, w) for i in range(OPEN_SLICES) for w in range(30)]
        for index in range(OPEN_SLICES):
            windows = [sample.window for sample in first + rest if sample.slice_index == index]
            assert windows == sorted(windows)
        assert len(ranges_of(first)) == OPEN_SLICES, "one range of each slice"
        assert len({sample.slice_index for sample in first[:20]}) > OPEN_SLICES / 2


async def test_ends_are_told_and_make_room_for_leases() -> None:
    async with pool_of(FakeReader(2, 0, 3)) as pool:
        assert is_read_out(pool)
        for index in range(3):
            pool.add_lease(SliceId(4, index), ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        assert pool.num_wanted(1) == OPEN_SLICES
        assert sorted(pool.take_ends()) == [WindowRange(4, i, n, n, True) for i, n in enumerate((2, 0, 3))]
        assert pool.take_ends() == []
        assert len(await pool.next_samples(5)) == 5, "what was read is still there"


async def test_of_a_slice_that_had_been_begun_the_rest_is_given_out() -> None:
    async with pool_of(FakeReader(10)) as pool:
        pool.add_lease(SliceId(0, 0), Uncounted(((1, 3),), 8))
        assert [sample.window for sample in ids(await pool.next_samples(4))] == [1, 2, 8, 9]
        await until(pool, lambda: is_read_out(pool))
        assert pool.take_ends() == [WindowRange(0, 0, 10, 10, True)]


async def test_an_older_pass_is_read_first() -> None:
    reader = FakeReader(40, 40)
    threads = HeldThreads()
    async with pool_of(reader, threads) as pool:
        pool.add_lease(SliceId(1, 0), ALL_WINDOWS)
        await threads.has_been_asked()
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        pool.add_lease(SliceId(0, 1), ALL_WINDOWS)
        threads.allow()
        await until(pool, lambda: is_read_out(pool))
        passes = [sample.pass_number for sample in reader.read]
        assert passes == [1] * WINDOWS_AT_A_TIME + [0] * 80 + [1] * (40 - WINDOWS_AT_A_TIME)
        given = ids(await pool.next_samples(120))
        assert [sample.pass_number for sample in given] == [0] * 80 + [1] * 40


async def test_no_more_is_read_ahead_than_fits() -> None:
    reader = FakeReader(10 * SAMPLES_AHEAD)
    threads = HeldThreads()
    threads.allow()
    async with pool_of(reader, threads) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        for taken in range(0, 5 * SAMPLES_AHEAD, 60):
            await pool._stock.wait_for(lambda: pool._num_ready() >= SAMPLES_AHEAD)
            assert len(reader.read) < taken + SAMPLES_AHEAD + WINDOWS_AT_A_TIME
            assert threads.asked * WINDOWS_AT_A_TIME == len(reader.read), "it does not read"
            await pool.next_samples(60)
        large = await pool.next_samples(2 * SAMPLES_AHEAD)
        assert len(large) == 2 * SAMPLES_AHEAD, "but what is asked for is read"


async def test_a_full_pool_goes_on_when_there_is_room() -> None:
    async with pool_of(FakeReader(SAMPLES_AHEAD + 1)) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await pool._stock.wait_for(lambda: pool._num_ready() >= SAMPLES_AHEAD)
        await pool.next_samples(1)
        await until(pool, lambda: is_read_out(pool))


async def test_a_full_pool_goes_on_when_a_slice_is_lost() -> None:
    length = SAMPLES_AHEAD - WINDOWS_AT_A_TIME
    async with pool_of(FakeReader(length, length)) as pool:
        for index in range(2):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        await pool._stock.wait_for(lambda: pool._num_ready() >= SAMPLES_AHEAD)
        pool.drop(SliceId(0, 0))
        await until(pool, lambda: is_read_out(pool))


async def test_a_task_that_is_cancelled_has_taken_nothing() -> None:
    threads = HeldThreads()
    async with pool_of(FakeReader(20), threads) as pool:
        tasks = [asyncio.create_task(pool.next_samples(8)) for _ in range(3)]
        await pool._stock.wait_for(lambda: len(pool._awaited) == 3)
        for task in tasks[:2]:
            task.cancel()
        threads.allow()
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        assert ids(await tasks[2]) == [SampleId(0, 0, window) for window in range(8)]
        results = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert pool._awaited == [], "nobody waits any more"
        assert ids(await pool.next_samples(12)) == [SampleId(0, 0, window) for window in range(8, 20)]


async def test_several_tasks_may_wait() -> None:
    counts = (8, 2 * SAMPLES_AHEAD, 4, 2 * SAMPLES_AHEAD)
    async with pool_of(FakeReader(sum(counts))) as pool:
        tasks = [asyncio.create_task(pool.next_samples(count)) for count in counts]
        await pool._stock.wait_for(lambda: len(pool._awaited) == len(counts))
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        given = [ids(some) for some in await asyncio.gather(*tasks)]
        assert tuple(len(some) for some in given) == counts
        assert sorted(itertools.chain(*given)) == [SampleId(0, 0, window) for window in range(sum(counts))]


async def test_who_waits_for_few_does_not_wait_for_what_others_want() -> None:
    threads = HeldThreads()
    async with pool_of(FakeReader(24), threads) as pool:
        many, few = (asyncio.create_task(pool.next_samples(WINDOWS_AT_A_TIME + more)) for more in (1, 0))
        await pool._stock.wait_for(lambda: len(pool._awaited) == 2)
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        threads.allow(1)
        await few
        assert not many.done()
        threads.allow()
        await many


async def test_who_waits_gets_what_is_leased_later() -> None:
    async with pool_of(FakeReader(3, 3)) as pool:
        task = asyncio.create_task(pool.next_samples(5))
        await pool._stock.wait_for(lambda: len(pool._awaited) == 1)
        pool.add_lease(SliceId(0, 1), ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        assert not task.done()
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        assert len(await task) == 5


async def test_samples_of_a_lost_lease_are_let_go() -> None:
    async with pool_of(FakeReader(20, 20)) as pool:
        for index in range(2):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        taken = [sample for sample in ids(await pool.next_samples(10)) if sample.slice_index == 1]
        pool.drop(SliceId(0, 0))
        left = ids(await pool.next_samples(20 - len(taken)))
        assert [sample.window for sample in taken + left] == list(range(20))
        assert {sample.slice_index for sample in left} == {1}
        await until(pool, lambda: is_read_out(pool))
        pool.drop(SliceId(0, 7))


async def test_a_slice_lost_while_it_is_read_can_be_leased_again() -> None:
    threads = HeldThreads()
    async with pool_of(FakeReader(20), threads) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await threads.has_been_asked()
        pool.drop(SliceId(0, 0))
        assert is_read_out(pool)
        pool.add_lease(SliceId(0, 0), Uncounted((), 2))
        threads.allow()
        assert [sample.window for sample in ids(await pool.next_samples(18))] == list(range(2, 20))
        await until(pool, lambda: is_read_out(pool))
        assert len(pool.take_ends()) == 1


async def test_of_a_slice_lost_while_it_is_read_neither_samples_nor_the_end_are_kept() -> None:
    threads = HeldThreads()
    async with pool_of(FakeReader(3, 5), threads) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await threads.has_been_asked()
        pool.drop(SliceId(0, 0))
        pool.add_lease(SliceId(0, 1), ALL_WINDOWS)
        threads.allow()
        assert ids(await pool.next_samples(5)) == [SampleId(0, 1, window) for window in range(5)]
        assert pool.take_ends() == [WindowRange(0, 1, 5, 5, True)]


async def test_an_error_of_reading_is_raised_each_time() -> None:
    reader = FakeReader(20)
    reader.errors[SampleId(0, 0, 0)] = UserError("cannot read data.files")
    threads = HeldThreads()
    threads.allow()
    async with pool_of(reader, threads) as pool:
        waiting = asyncio.create_task(pool.next_samples(8))
        await pool._stock.wait_for(lambda: len(pool._awaited) == 1)
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        for attempt in (waiting, pool.next_samples(8)):
            with pytest.raises(UserError, match=r"cannot read data\.files"):
                await attempt
        assert pool.take_ends() == []
        assert threads.asked == 1, "it reads no more"


@pytest.mark.parametrize("error", [UserError("bad row"), HubFailed("bad row")])
async def test_a_slice_that_is_broken_ends_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: UserError
) -> None:
    """Otherwise it would take all peers of stage 0 away, one after the other."""
    reader = broken_slice(monkeypatch, error)
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), Uncounted((), 3))
        for index in range(1, 20):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        expected = [SampleId(0, 0, 3), SampleId(0, 0, 4), *(SampleId(0, i, n) for i in range(1, 20) for n in range(90))]
        assert sorted(ids(await pool.next_samples(len(expected)))) == expected
        await until(pool, lambda: is_read_out(pool))
        assert WindowRange(0, 0, 5, 5, True) in pool.take_ends()
        now_s = pool._clock.monotonic_s()
        complaint = pool.complaint(now_s)
        assert complaint is not None
        assert complaint.trouble is Trouble.DATA_UNREAD
        assert "slice 0" in complaint.words
        assert "bad row" in complaint.words
        assert pool.complaint(now_s + samples.CUT_TOLD_S) is None
    assert "slice_cut_short slice=(0, 0) windows=5 reason=bad row" in caplog.text


async def test_a_slice_that_can_be_read_again_after_all_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a while to find out that others can be read."""
    reader = broken_slice(monkeypatch, UserError("bad row"))
    can_read_others = SamplePool._can_read_others

    async def come_back(pool: SamplePool, slice_id: SliceId) -> bool:
        reader.errors.clear()
        return await can_read_others(pool, slice_id)

    monkeypatch.setattr(SamplePool, "_can_read_others", come_back)
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        assert len(await pool.next_samples(90)) == 90
        await until(pool, lambda: is_read_out(pool))
        assert pool.take_ends() == [WindowRange(0, 0, 90, 90, True)]


async def test_a_slice_that_another_peer_could_read_further_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of(broken_slice(monkeypatch, UserError("bad row"))) as pool:
        pool.add_lease(SliceId(0, 0), Uncounted((), 6))
        for index in range(1, 20):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        await until(pool, lambda: pool._error is not None)
        assert all(item.slice_index for item in pool.take_ends())


async def test_where_nothing_else_can_be_read_no_slice_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is broken, or gone. The slices that are open fail one after the other, by what they have in buffers."""
    reader = broken_slice(monkeypatch, UserError("bad row"))
    reader.errors |= {SampleId(0, index, 9 * index): UserError("bad row") for index in range(1, 8)}
    async with pool_of(reader) as pool:
        for index in range(8):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        await pool._stock.wait_for(lambda: pool._num_ready() > 0)
        reader.disk_error = UserError("gone")
        await until(pool, lambda: pool._error is not None)
        assert await pool.next_samples(pool._num_ready()), "what was read before is good"
        with pytest.raises(UserError, match=r"bad row|gone"):
            await pool.next_samples(1)
        assert pool.take_ends() == []


async def test_where_the_data_is_one_broken_file_later_passes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices have their documents of that file, up to the broken place."""
    reader = broken_slice(monkeypatch, UserError("bad row"))
    reader.errors |= {SampleId(0, index, 5): UserError("bad row") for index in range(20)}
    left = [SliceId(pass_number, index) for pass_number in (0, 1) for index in range(20)]
    async with pool_of(reader) as pool:
        given = set[SampleId]()
        while SampleId(1, 19, 0) not in given:
            for _ in range(pool.num_wanted(1)):
                if left and (left[0].pass_number == 0 or is_read_out(pool)):
                    pool.add_lease(left.pop(0), ALL_WINDOWS)
            with anyio.move_on_after(0.01):
                given.update(ids(await pool.next_samples(1)))
        ends = {item for item in pool.take_ends() if item.pass_number == 0}
        assert ends == {WindowRange(0, index, 5, 5, True) for index in range(20)}


async def test_a_slice_that_is_read_further_has_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = broken_slice(monkeypatch, UserError("slow disk"))
    windows, tries = reader.windows, itertools.count(1)

    def some_more(slice_id: SliceId) -> Iterator[np.ndarray]:
        reader.errors = {SampleId(0, 0, 5 * next(tries)): UserError("slow disk")}
        return windows(slice_id)

    monkeypatch.setattr(reader, "windows", some_more)
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        assert len(await pool.next_samples(90)) == 90
    assert next(tries) > 90 / 5


def broken_slice(monkeypatch: pytest.MonkeyPatch, error: UserError) -> FakeReader:
    """A reader of long slices, the first of which cannot be read after five windows."""
    monkeypatch.setattr(samples, "HUB_PAUSE_S", 0.0)
    monkeypatch.setattr(samples, "HUB_PATIENCE_S", 3.0)
    monkeypatch.setattr(samples, "FILE_PATIENCE_S", 3.0)
    reader = FakeReader(*[90] * 20)
    reader.errors[SampleId(0, 0, 5)] = error
    return reader


async def test_reading_goes_on_where_the_hub_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all peers of stage 0 would leave at the same time."""
    monkeypatch.setattr(samples, "HUB_PAUSE_S", 0.0)
    reader = FakeReader(20)
    failing = SampleId(0, 0, 5)
    reader.errors[failing] = HubFailed("503")
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), Uncounted(((2, 3),), 4))
        first = await pool.next_samples(2)
        del reader.errors[failing]
        assert ids(first + await pool.next_samples(15)) == [SampleId(0, 0, n) for n in (2, *range(4, 20))]
        await until(pool, lambda: is_read_out(pool))
        assert pool.take_ends() == [WindowRange(0, 0, 20, 20, True)]


async def test_other_slices_are_read_while_the_hub_fails_at_one() -> None:
    reader = FakeReader(20, 20)
    reader.errors[SampleId(0, 0, 0)] = HubFailed("this file cannot be read")
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        pool.add_lease(SliceId(0, 1), ALL_WINDOWS)
        assert ids(await pool.next_samples(20)) == [SampleId(0, 1, n) for n in range(20)]


async def test_data_that_cannot_be_read_is_complained_of() -> None:
    """Whether other data can be read meanwhile, or there is nothing to train on."""
    reader = FakeReader(20, 20)
    reader.errors[SampleId(0, 0, 0)] = HubFailed("503 of the hub")
    async with pool_of(reader) as pool:
        assert pool.complaint(0.0) is None
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        pool.add_lease(SliceId(0, 1), ALL_WINDOWS)
        await pool.next_samples(20)
        await until(pool, lambda: bool(pool._resting))
        complaint = pool.complaint(pool._clock.monotonic_s())
        assert complaint is not None
        assert complaint.trouble is Trouble.DATA_UNREAD
        waiting = asyncio.ensure_future(pool.next_samples(1))
        await anyio.wait_all_tasks_blocked()
        complaint = pool.complaint(pool._clock.monotonic_s())
        assert complaint is not None
        assert (complaint.trouble, complaint.words) == (
            Trouble.NO_DATA,
            "its training data cannot be read: 503 of the hub",
        )
        waiting.cancel()
        await anyio.wait_all_tasks_blocked()
        complaint = pool.complaint(pool._clock.monotonic_s())
        assert complaint is not None
        assert complaint.trouble is Trouble.DATA_UNREAD


async def test_a_long_wait_for_samples_is_complained_of_without_an_error() -> None:
    """All slices may be leased to others, or a disk may hang."""
    async with pool_of(FakeReader(20)) as pool:
        waiting = asyncio.ensure_future(pool.next_samples(1))
        await anyio.wait_all_tasks_blocked()
        since_s = pool._waits_since_s
        assert since_s is not None
        assert pool.complaint(since_s + samples.LONG_WAIT_S - 1) is None
        complaint = pool.complaint(since_s + samples.LONG_WAIT_S)
        assert complaint is not None
        assert (complaint.trouble, complaint.since_s) == (Trouble.NO_DATA, since_s)
        assert "no part of the data is left" in complaint.words
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await waiting
        assert pool.complaint(since_s + 10_000.0) is None


async def test_slices_at_which_the_hub_fails_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeReader, "at_a_time", 2)
    reader = FakeReader(20, 20, 20)
    async with pool_of(reader) as pool:
        for index in (0, 1):
            reader.errors[SampleId(0, index, 0)] = HubFailed("this file cannot be read")
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        await until(pool, lambda: pool.num_wanted(1) == 2)


async def test_later_passes_are_read_while_the_hub_fails_at_this_one() -> None:
    reader = FakeReader(20)
    reader.errors[SampleId(0, 0, 0)] = HubFailed("this file cannot be read")
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        pool.add_lease(SliceId(1, 0), ALL_WINDOWS)
        assert ids(await pool.next_samples(20)) == [SampleId(1, 0, n) for n in range(20)]


async def test_a_hub_that_fails_for_long_ends_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "HUB_PAUSE_S", 0.0)
    monkeypatch.setattr(samples, "HUB_PATIENCE_S", 3.0)
    reader = FakeReader(20)
    reader.errors[SampleId(0, 0, 0)] = HubFailed("there is no such data set")
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        with pytest.raises(HubFailed, match="no such data set"):
            await pool.next_samples(1)


async def test_an_error_that_nobody_foresaw_is_told_as_one_line(caplog: pytest.LogCaptureFixture) -> None:
    reader = FakeReader(20)
    reader.errors[SampleId(0, 0, 0)] = ValueError("a\nb")
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await until(pool, lambda: pool._error is not None)
        with pytest.raises(UserError, match=r"^cannot read the data: a; the log") as caught:
            await pool.next_samples(1)
        assert isinstance(caught.value.__cause__, ValueError)
    assert "reading_failed" in caplog.text


async def test_data_without_any_sample_is_an_error() -> None:
    async with pool_of(FakeReader(0, 0, 0)) as pool:
        for index in (1, 0):
            pool.add_lease(SliceId(0, index), ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        pool.add_lease(SliceId(1, 1), ALL_WINDOWS)
        with pytest.raises(UserError, match="no text"):
            await pool.next_samples(1)


async def test_slices_that_have_counted_before_are_not_empty() -> None:
    async with pool_of(FakeReader(5, 0)) as pool:
        for number in range(4):
            pool.add_lease(SliceId(number, 0), Uncounted((), 5))
            pool.add_lease(SliceId(number, 1), ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        pool.add_lease(SliceId(9, 0), ALL_WINDOWS)
        assert len(await pool.next_samples(5)) == 5


async def test_a_long_slice_is_not_empty_before_it_is_read_out() -> None:
    async with pool_of(FakeReader(20, 0, 0)) as pool:
        for slice_id in (SliceId(0, 1), SliceId(0, 2)):
            pool.add_lease(slice_id, ALL_WINDOWS)
        await until(pool, lambda: is_read_out(pool))
        for index in range(3):
            pool.add_lease(SliceId(1, index), ALL_WINDOWS)
        assert len(await pool.next_samples(20)) == 20


async def test_slices_are_closed_when_the_pool_ends() -> None:
    reader = FakeReader(2 * SAMPLES_AHEAD)
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        await pool._stock.wait_for(lambda: pool._num_ready() >= SAMPLES_AHEAD)
        assert reader.being_read == [SliceId(0, 0)]
    assert reader.being_read == []


class HangingReader(FakeReader):
    """Before the first window its reader hangs until the test releases it."""

    def __init__(self, *lengths: int):
        super().__init__(*lengths)
        self.thread: threading.Thread | None = None
        self.hangs, self.release = threading.Event(), threading.Event()

    def windows(self, slice_id: SliceId) -> Iterator[np.ndarray]:
        self.thread = threading.current_thread()
        self.hangs.set()
        assert self.release.wait(DEADLINE_S)
        yield from super().windows(slice_id)


async def test_the_end_of_the_pool_does_not_wait_for_a_read_that_hangs() -> None:
    reader = HangingReader(20)
    async with pool_of(reader) as pool:
        pool.add_lease(SliceId(0, 0), ALL_WINDOWS)
        assert await asyncio.to_thread(reader.hangs.wait, DEADLINE_S)
    assert reader.thread is not None
    assert reader.being_read == [], "the read still hangs"
    reader.release.set()
    await asyncio.to_thread(reader.thread.join, DEADLINE_S)
    assert len(reader.read) == WINDOWS_AT_A_TIME
    assert pool._num_ready() == 0
    gc.collect()  # frees the cancelled task
    assert reader.being_read == []


# --- with real slices and a ledger


def manifest(folder: Path) -> RunManifest:
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(f"{i}:{j}" for j in range(40)) for i in range(400)))
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {"model_type": "gpt2", "vocab_size": 256}},
            "stages": {"count": 2},
            "data": {"sequence_length": 32, "dataset": "text", "files": [str(path)], "shuffle_buffer": 64},
            "training": {"steps": 1, "global_batch_size": 1, "microbatch_size": 1},
            "optimizer": {"learning_rate": 0.1},
        }
    )


async def test_two_peers_one_of_which_restarts_cover_a_pass_without_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SAMPLES_AHEAD", 16)
    run = manifest(tmp_path)
    reader = SliceReader(manifest=run)
    ledger = Ledger(await asyncio.to_thread(reader.num_slices))
    leases: dict[SliceId, str] = {}
    expected = {
        (index, window): tokens.tobytes()
        for index in range(ledger.num_slices)
        for window, tokens in reader.open(SliceId(0, index))
    }
    seen: dict[tuple[int, int], bytes] = {}

    async def keep_leasing(name: str, pool: SamplePool) -> None:
        while True:
            passes = range(ledger.current_pass, ledger.current_pass + 1 + is_read_out(pool))
            free = (each for number in passes for each in ledger.unfinished(number) if each not in leases)
            for slice_id in list(itertools.islice(free, pool.num_wanted(1))):
                leases[slice_id] = name
                pool.add_lease(slice_id, ledger.uncounted(slice_id))
            left_over = pool.num_wanted(1)
            await until(pool, lambda left_over=left_over: pool.num_wanted(1) > left_over or is_read_out(pool))

    @asynccontextmanager
    async def peer(name: str) -> AsyncIterator[SamplePool]:
        async with pool_of(SliceReader(manifest=run)) as pool, anyio.create_task_group() as tasks:
            tasks.start_soon(keep_leasing, name, pool)
            yield pool
            tasks.cancel_scope.cancel()
        for slice_id in [each for each, owner in leases.items() if owner == name]:
            del leases[slice_id]

    async def count(pool: SamplePool) -> None:
        counted = await pool.next_samples(8)
        assert ledger.add([*ranges_of(sample.id for sample in counted), *pool.take_ends()]) == 0
        for sample in counted:
            if sample.id.pass_number == 0:
                seen[sample.id[1:]] = sample.tokens.tobytes()

    async with peer("a") as steady:
        async with peer("b") as other:
            for _ in range(20):
                await count(steady)
                await count(other)
        async with peer("b") as other:
            while ledger.current_pass == 0:
                await count(steady)
                await count(other)
    assert seen == expected

"""Averaging rounds: right, bitwise the same for all members, and failed rather than partial, whatever is sent."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from contexts import dispatcher, make_context, unparsed
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from memory_transport import MemoryNetwork, MemoryTransport

from swarm_peer.codecs import CODECS, find_codec, parts
from swarm_peer.config import AveragingSection
from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.runtime.step import all_reduce, averaging, hivemind_all_reduce
from swarm_peer.runtime.step.all_reduce import FEWEST_IN_FLIGHT, MOST_IN_FLIGHT, AllReduce, Brought
from swarm_peer.runtime.step.averaging import AveragingFailed, GradientAverager
from swarm_peer.wire.codecs import bytes_of, encoded_bytes
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import AveragePartCall

SHAPES = [torch.Size((300, 70)), torch.Size((7,)), torch.Size((1, 33))]
SAMPLES = (1, 3, 0)
# By tensor: one of 7 numbers may by chance be off by much more than all of its block, whose error is 0.2.
TOLERANCE = {
    "none": 1e-6,
    "fp16": 1e-3,
    "bf16": 1e-2,
    "blockwise_8bit": 0.03,
    "int5_hadamard": 0.3,
    "int4_hadamard": 0.6,
}
HASH = "m" * 32


@functools.cache
def gradients_of(number: int, round_number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * round_number + number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Members:
    """Three peers of one stage on a network without wires."""

    def __init__(
        self, network: MemoryNetwork, codec: str = "none", chunk_timeout_s: float = 10.0, kind: str = "hivemind"
    ):
        self.network = network
        self.averagers: list[GradientAverager] = []
        self.transports = []
        resolved = unparsed(HASH)
        section = AveragingSection.model_validate(
            {"all_reduce": kind, "compression": codec, "round_timeout_s": 20, "chunk_timeout_s": chunk_timeout_s}
        )
        resolved = replace(resolved, manifest=resolved.manifest.model_copy(update={"averaging": section}))
        for _ in SAMPLES:
            identity = Identity.generate()
            transport = network.transport(identity.peer_id)
            context = make_context(resolved, identity=identity)
            self.averagers.append(GradientAverager(context=context, stage=0, shapes=SHAPES, transport=transport))
            self.transports.append(transport)
        self.ids = [transport.peer_id for transport in self.transports]

    async def serve(self) -> None:
        for transport, averager in zip(self.transports, self.averagers, strict=True):
            await transport.serve(dispatcher(HASH, 0, averager.calls))

    async def take_part(
        self, number: int, round_number: int = 0, shares: dict[str, int] | None = None
    ) -> list[torch.Tensor] | str:
        """The averages that a member comes to, or why it failed."""
        try:
            averages = await self.averagers[number].average(
                str(round_number),
                gradients_of(number, round_number),
                dict(zip(self.ids, SAMPLES, strict=True)) if shares is None else shares,
            )
        except AveragingFailed as error:
            return str(error)
        return [tensor.clone() for tensor in averages]

    async def average(self, round_number: int, who: list[int]) -> list[list[torch.Tensor] | str]:
        """The outcomes of those who take part in a round of all three; empty for others."""
        outcomes: list[list[torch.Tensor] | str] = [""] * len(SAMPLES)

        async def take_part(number: int) -> None:
            outcomes[number] = await self.take_part(number, round_number)

        async with anyio.create_task_group() as tasks:
            for number in who:
                tasks.start_soon(take_part, number)
        return outcomes

    async def send(self, to: int, part: int, data: object, group: bytes) -> Reply:
        """Send a part as the last member, which is not in the round by itself."""
        call = AveragePartCall(manifest=HASH, stage=0, group=group, part=part)
        return await self.transports[-1].call(self.ids[to], call, (data,), timeout_s=10)  # type: ignore[arg-type]


@pytest.fixture(params=["hivemind", "streamed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def members(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[Members]:
    codec, _, chunk_timeout_s = getattr(request, "param", "none").partition(":")
    async with MemoryNetwork() as network:
        started = Members(network, codec, float(chunk_timeout_s or 10), kind)
        await started.serve()
        yield started


@pytest.fixture
def short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "START_TIMEOUT_S", 0.05)


def check_equals_mean(outcomes: list[list[torch.Tensor] | str], round_number: int, tolerance: float) -> None:
    first = outcomes[0]
    assert not isinstance(first, str), first
    for other in outcomes[1:]:
        assert not isinstance(other, str), other
        assert all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True)), "bitwise the same"
    for index, average in enumerate(first):
        expected = sum(n * gradients_of(peer, round_number)[index] for peer, n in enumerate(SAMPLES)) / sum(SAMPLES)
        assert float((average - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("part_values", [2**18, 1000])
@pytest.mark.parametrize("members", TOLERANCE, indirect=True)
async def test_all_members_get_the_weighted_mean(
    members: Members, part_values: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_PART_VALUES", part_values)
    tolerance = TOLERANCE[request.node.callspec.params["members"]]
    for round_number in range(3):
        check_equals_mean(await members.average(round_number, [0, 1, 2]), round_number, tolerance)


@pytest.mark.parametrize("members", ["fp16"], indirect=True)
async def test_means_that_are_smaller_than_any_fp16_are_averaged_all_the_same(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = gradients_of
    small = functools.cache(lambda *which: [1e-8 * tensor for tensor in large(*which)])
    monkeypatch.setitem(globals(), "gradients_of", small)
    check_equals_mean(await members.average(0, [0, 1, 2]), 0, tolerance=0.01)


async def test_members_are_added_in_the_order_of_their_ids_whoever_sends_first(members: Members) -> None:
    shares = dict(zip(members.ids, (3, 7, 11), strict=True))
    expected = [torch.zeros(shape) for shape in SHAPES]
    for peer in sorted(shares):
        for total, gradient in zip(expected, gradients_of(members.ids.index(peer), 0), strict=True):
            total.add_(gradient, alpha=shares[peer])
    outcomes: list[list[torch.Tensor] | str] = []

    async def take_part(number: int) -> None:
        outcomes.append(await members.take_part(number, shares=shares))

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number)
    for averages in outcomes:
        assert not isinstance(averages, str), averages
        assert all(torch.equal(own, total / 21) for own, total in zip(averages, expected, strict=True))


async def test_without_any_samples_the_average_is_the_plain_mean(members: Members) -> None:
    nothing = dict.fromkeys(members.ids, 0)
    outcomes: list[list[torch.Tensor] | str] = []

    async def take_part(number: int) -> None:
        outcomes.append(await members.take_part(number, shares=nothing))

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number)
    expected = sum(gradients_of(peer, 0)[0] for peer in range(3)) / 3
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
        torch.testing.assert_close(outcome[0], expected)


@pytest.mark.parametrize("members", ["none:0.3"], indirect=True)
async def test_a_member_that_comes_later_is_waited_for_and_one_that_does_not_come_fails_the_round(
    members: Members,
) -> None:
    part = members.network.fault(op="average_part", to=members.ids[2], before=anyio.Event())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(members.average, 0, [0, 1])
        await part.struck.wait()
        await anyio.sleep(0.1)
        assert part.before is not None
        part.before.set()
        tasks.cancel_scope.cancel()
    check_equals_mean(await members.average(1, [0, 1, 2]), 1, TOLERANCE["none"])
    assert any(f"{members.ids[1]} sent no part" in str(outcome) for outcome in await members.average(2, [0, 2]))
    check_equals_mean(await members.average(3, [2, 1, 0]), 3, TOLERANCE["none"])


class NarrowLink:
    """Carries the calls of one transport to each callee one after the other; notes how many are on their way."""

    def __init__(self, transport: MemoryTransport, seconds: float):
        self.on_their_way: list[int] = []
        self._call = transport.call
        self._seconds = seconds
        self._links: dict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._sent = Counter[str]()
        transport.call = self.call  # type: ignore[method-assign]

    async def call(self, peer_id: str, *args: Any, **options: Any) -> Reply:
        self._sent[peer_id] += 1
        self.on_their_way.append(self._sent[peer_id])
        async with self._links[peer_id]:
            await anyio.sleep(self._seconds)
        try:
            return await self._call(peer_id, *args, **options)
        finally:
            self._sent[peer_id] -= 1


@pytest.mark.parametrize(
    ("queue_s", "at_once"), [(0.0, {FEWEST_IN_FLIGHT}), (1e6, set(range(FEWEST_IN_FLIGHT + 1, MOST_IN_FLIGHT + 1)))]
)
async def test_no_more_is_under_way_than_a_link_carries_in_a_short_time(
    members: Members, queue_s: float, at_once: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_PART_VALUES", 128)
    monkeypatch.setattr(all_reduce, "QUEUE_S", queue_s)
    links = [NarrowLink(transport, seconds=0.005) for transport in members.transports]
    check_equals_mean(await members.average(0, [0, 1, 2]), 0, TOLERANCE["none"])
    for link in links:
        assert link.on_their_way[0] == 1
        assert len(link.on_their_way) > 80
        assert max(link.on_their_way) in at_once


@pytest.mark.parametrize(
    ("in_flight", "seconds", "then"),
    [(2, 0.1, 8), (8, 0.5, 8), (8, 4.0, 4), (4, 2.0, 4), (2, 1.0, 4), (8, 60.0, 2), (2, 60.0, 2), (3, 0.0, 8)],
)
def test_a_link_of_two_parts_a_second_has_four_on_their_way(in_flight: int, seconds: float, then: int) -> None:
    assert all_reduce.parts_to_send(in_flight, seconds) == then


async def test_a_member_that_dies_fails_the_round_at_once(members: Members) -> None:
    blocked = members.network.fault(op="average_part", to=members.ids[1], before=anyio.Event(), times=2)
    outcomes: dict[int, list[torch.Tensor] | str] = {}

    async def take_part(number: int) -> None:
        outcomes[number] = await members.take_part(number)

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_part, 0)
            tasks.start_soon(take_part, 2)
            await blocked.struck.wait()
            members.network.kill(members.ids[1])
            assert blocked.before is not None
            blocked.before.set()
    assert all(members.ids[1] in str(outcome) for outcome in outcomes.values())


@pytest.mark.parametrize("members", ["none:0.2"], indirect=True)
async def test_a_member_that_stalls_fails_the_round_rather_than_leaving_its_part_as_it_was(members: Members) -> None:
    """hivemind would go on with the local values of the parts that it was to average."""
    fault = members.network.fault(op="average_part", to=members.ids[1], times=99, after=anyio.Event())
    outcomes = await members.average(0, [0, 1, 2])
    assert fault.fired
    assert all(isinstance(outcomes[number], str) for number in (0, 2)), "no partial averages"


async def test_members_that_disagree_about_the_shares_fail(members: Members, short_start: None) -> None:
    lie = dict(zip(members.ids, (1, 3, 99), strict=True))
    outcomes: dict[int, list[torch.Tensor] | str] = {}

    async def take_part(number: int) -> None:
        outcomes[number] = await members.take_part(number, shares=lie if number == 2 else None)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number)
    assert all(isinstance(outcome, str) for outcome in outcomes.values())


NAN = bytes_of(torch.full((10_000,), float("nan")))
HUGE = bytes_of(torch.full((10_000,), -3e38))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda reply: Reply(), "0 averages of one part"),
        (lambda reply: Reply(tensors=(*reply.tensors, *reply.tensors)), "2 averages of one part"),
        (lambda reply: Reply(tensors=(reply.tensors[0][:-4],)), "bytes"),
        (lambda reply: Reply(tensors=(NAN[: reply.tensors[0].nbytes],)), "non-finite"),
    ],
)
async def test_an_average_that_does_not_fit_fails_the_round(members: Members, tamper, reason) -> None:  # type: ignore[no-untyped-def]
    members.network.fault(op="average_part", to=members.ids[0], tamper=tamper)
    outcomes = await members.average(0, [0, 1, 2])
    assert any(reason in outcome for outcome in outcomes if isinstance(outcome, str)), outcomes


@pytest.mark.parametrize("members", ["none:1"], indirect=True)
async def test_all_blame_the_member_that_is_slow_and_not_the_first_one_to_notice(members: Members) -> None:
    call = members.transports[2].call

    async def slowly(*args: Any, **options: Any) -> Reply:
        await anyio.sleep(10)
        return await call(*args, **options)

    members.transports[2].call = slowly  # type: ignore[method-assign]
    blamed: dict[int, frozenset[str]] = {}

    async def take_part(number: int) -> None:
        with pytest.raises(AveragingFailed) as failed:
            await members.averagers[number].average("0", gradients_of(number, 0), dict.fromkeys(members.ids, 1))
        blamed[number] = failed.value.blamed

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number)
            await anyio.sleep(0.05)
    assert [blamed[0], blamed[1]] == [{members.ids[2]}] * 2


def hand_parts_over_slowly(members: Members, seconds: float) -> None:
    """The last member sends one part after the other."""
    NarrowLink(members.transports[2], seconds)


def give_averages_slowly(members: Members, seconds: float) -> None:
    """The last member gives one average after the other."""
    for transport in members.transports[:2]:
        transport.call = partial(answered_slowly, transport.call, members.ids[2], seconds, anyio.Lock())  # type: ignore[method-assign]


async def answered_slowly(
    call: Callable[..., Awaitable[Reply]], slow: str, seconds: float, one: anyio.Lock, to: str, *args: Any, **how: Any
) -> Reply:
    reply = await call(to, *args, **how)
    if to == slow:
        async with one:
            await anyio.sleep(seconds)
    return reply


@pytest.mark.parametrize("trickle", [hand_parts_over_slowly, give_averages_slowly])
async def test_an_average_that_takes_too_long_fails_for_the_member_that_holds_the_others_up(
    members: Members, trickle: Callable[[Members, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_PART_VALUES", 1000)
    for averager in members.averagers:
        averager._section = averager._section.model_copy(update={"round_timeout_s": 1.0})
    trickle(members, 0.3)
    blamed: dict[int, frozenset[str]] = {}

    async def take_part(number: int) -> None:
        expected = suppress(AveragingFailed) if number == 2 else pytest.raises(AveragingFailed, match="not done within")
        with expected as failed:
            await members.averagers[number].average("0", gradients_of(number, 0), dict.fromkeys(members.ids, 1))
        if failed is not None:
            blamed[number] = failed.value.blamed

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number)
    assert [blamed[0], blamed[1]] == [{members.ids[2]}] * 2


@pytest.mark.parametrize("kind", ["streamed"])
async def test_an_average_waits_for_the_threads_of_one_that_was_given_up(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_adding, may_add, added = anyio.Event(), threading.Event(), []
    mean, fill, loop = AllReduce._mean, GradientAverager._fill, asyncio.get_running_loop()

    def late_mean(self: AllReduce, *args: Any) -> memoryview:
        if not added:
            added.append(self)
            loop.call_soon_threadsafe(is_adding.set)
            may_add.wait(10)
        return mean(self, *args)

    filled = []

    def counted_fill(self: GradientAverager, *args: Any) -> None:
        filled.append(self)
        fill(self, *args)

    monkeypatch.setattr(AllReduce, "_mean", late_mean)
    monkeypatch.setattr(GradientAverager, "_fill", counted_fill)
    outcomes: list[list[torch.Tensor] | str] = [""] * 3

    scopes = [anyio.CancelScope() for _ in range(6)]

    async def take_part(number: int, round_number: int) -> None:
        with scopes[3 * round_number + number]:
            outcomes[number] = await members.take_part(number, round_number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(take_part, number, 0)
        await is_adding.wait()
        for number in range(3):
            scopes[number].cancel()
            tasks.start_soon(take_part, number, 1)
        with anyio.move_on_after(0.2):  # all begin, if they do not wait
            while len(filled) < 6:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        num_filled = len(filled)
        may_add.set()
    assert num_filled < 6
    check_equals_mean(outcomes, 1, TOLERANCE["none"])


async def test_members_wait_for_one_that_has_begun_and_gets_ready_slowly(
    members: Members, short_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, others_wait = GradientAverager._fill, threading.Event()

    def late_fill(self: GradientAverager, *args: Any) -> None:
        if self is members.averagers[0]:
            others_wait.wait(10)
        fill(self, *args)

    monkeypatch.setattr(GradientAverager, "_fill", late_fill)
    outcomes: list[list[torch.Tensor] | str] = []

    async def average() -> None:
        outcomes.extend(await members.average(0, [0, 1, 2]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(average)
        while members.network.num_calls("average_part", members.ids[0]) < 2:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await anyio.sleep(2 * averaging.START_TIMEOUT_S)
        others_wait.set()
    check_equals_mean(outcomes, 0, TOLERANCE["none"])


class CountingThreads:
    """Runs in the event loop what was meant for threads, and notes what that is."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def run(self, function: Callable[..., Any], *args: object, abandon_on_cancel: bool = False) -> Any:
        self.asked.append(function.__name__)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return function(*args)

    def start(self, target: Callable[[], None], name: str) -> Callable[[float], None]:
        raise NotImplementedError


async def test_a_part_that_comes_while_a_failed_round_ends_starts_no_average() -> None:
    """anyio may never cancel what starts in a group that ends, and the round would not end then."""
    is_ending, may_end = anyio.Event(), anyio.Event()

    async def send(member: str, group: bytes, part: int, data: memoryview) -> memoryview:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                is_ending.set()
                await may_end.wait()

    threads = CountingThreads()
    brought = Brought(values=torch.ones(8), weights={"a": 1.0, "b": 1.0}, total=2.0, codec="none")
    ending = AllReduce(group=b"group", brought=brought, timeout_s=60, threads=threads, me="a", send=send)
    outcomes = []

    async def run() -> None:
        outcomes.append(await ending.run(60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        ending.fail("b is gone", "b")
        await is_ending.wait()
        tasks.start_soon(expect_not_serving, ending.take("b", 0, (bytes_of(torch.ones(4)),)))
        with anyio.move_on_after(1):
            await anyio.wait_all_tasks_blocked()
        may_end.set()
    assert "_mean" not in threads.asked
    assert outcomes == ["b is gone"]


async def expect_not_serving(part: Awaitable[memoryview]) -> None:
    with pytest.raises(NotServing, match="b is gone"):
        await part


async def open_round(members: Members, tasks: anyio.abc.TaskGroup) -> tuple[bytes, list[list[torch.Tensor] | str]]:
    """Members 0 and 1 begin a round that waits for the last one. Returns its group and, later, their outcomes."""
    outcomes: list[list[torch.Tensor] | str] = []
    call = members.network.fault(op="average_part", to=members.ids[2], before=anyio.Event(), times=100)

    async def take_part(number: int) -> None:
        outcomes.append(await members.take_part(number))

    for number in range(2):
        tasks.start_soon(take_part, number)
    await call.struck.wait()
    rounds = members.averagers[0]._rounds
    await members.averagers[0]._changed.wait_for(lambda: bool(rounds))
    [group] = rounds
    return group, outcomes


@pytest.mark.parametrize(
    ("part", "data", "reason"),
    [
        (0, b"", "0 bytes"),
        (0, bytes(4), "4 bytes"),
        (0, bytes(2**20), "1048576 bytes"),
        (0, bytes(NAN), "non-finite"),
        (0, bytes(HUGE), "values beyond"),
        (1, bytes(4), "not averaged here"),
        (2**32 - 1, bytes(4), "not averaged here"),
    ],
)
async def test_a_part_that_does_not_fit_is_refused_and_fails_the_round(
    members: Members, part: int, data: bytes, reason: str
) -> None:
    async with anyio.create_task_group() as tasks:
        group, outcomes = await open_round(members, tasks)
        length = members.averagers[0]._rounds[group]._lengths[0]
        sent = data[: 4 * length] if len(data) == len(NAN) else data
        with pytest.raises(InvalidMessage, match=reason):
            await members.send(0, part, memoryview(bytearray(sent)), group)
        with anyio.fail_after(3):
            while not outcomes:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert members.ids[2] in str(outcomes[0]), "all members know who it was"
        tasks.cancel_scope.cancel()


async def test_a_part_may_come_once(members: Members) -> None:
    async with anyio.create_task_group() as tasks:
        group, _ = await open_round(members, tasks)
        data = bytes_of(torch.zeros(members.averagers[0]._rounds[group]._lengths[0]))
        failures = []

        async def send() -> None:
            try:
                await members.send(0, 0, data, group)
            except CallError as error:
                failures.append(type(error))

        async with anyio.create_task_group() as twice:
            twice.start_soon(send)
            twice.start_soon(send)
        assert sorted(failures, key=str) == [InvalidMessage, NotServing]
        tasks.cancel_scope.cancel()


async def test_strangers_and_unknown_rounds_are_refused(members: Members, short_start: None) -> None:
    async with anyio.create_task_group() as tasks:
        group, outcomes = await open_round(members, tasks)
        stranger = members.network.transport(Identity.generate().peer_id)
        for name, error in ((group, InvalidMessage), (bytes(32), NotServing)):
            call = AveragePartCall(manifest=HASH, stage=0, group=name, part=0)
            with pytest.raises(error):
                await stranger.call(members.ids[0], call, (memoryview(bytes(4)),), timeout_s=10)
        assert not outcomes, "the round goes on"
        tasks.cancel_scope.cancel()


def held_bytes() -> int:
    """Memory of all tensors that the garbage collector knows of; those of other tests that have none are left out."""
    tensors = [known for known in gc.get_objects() if type(known) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# A round that is to end well must not fail where a busy machine holds a member up.
@pytest.mark.parametrize(
    ("members", "end"), [("none:20", "done"), ("none:0.2", "failed"), ("none:20", "cancelled")], indirect=["members"]
)
async def test_a_round_leaves_nothing_behind(members: Members, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_PART_VALUES", 1000)
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    tasks_before = asyncio.all_tasks()
    assert all(gradients_of(number, 0) for number in range(3)), "made before anything is measured"
    gc.collect()
    bytes_before = held_bytes()
    gc.disable()
    try:
        if end == "done":
            assert len(await members.average(0, [0, 1, 2])) == 3
        elif end == "failed":
            assert all(isinstance(outcome, str) for outcome in await members.average(0, [0, 1]))
        else:
            async with anyio.create_task_group() as tasks:
                await open_round(members, tasks)
                tasks.cancel_scope.cancel()
        await anyio.sleep(0.1)
        assert not {task for task in asyncio.all_tasks() - tasks_before if "memory_transport" not in repr(task)}
        assert held_bytes() - bytes_before <= 10 * 4000, "some parts at most, of 22 a member"
    finally:
        gc.enable()
    gc.collect()
    assert not complaints


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_averaged_is_finite_whatever_a_sender_has_quantised(codec: str) -> None:
    length, rng = 300, random.Random(1)
    size = encoded_bytes((length,), codec)
    for _ in range(20):
        data = bytearray(rng.randbytes(size))
        for wrong in (size - 1, size + 1, 0, 4 * length + 1):
            with pytest.raises(InvalidMessage, match="bytes"):
                all_reduce.decode_values(memoryview(bytearray(wrong)), length, find_codec(codec))
        with suppress(InvalidMessage):
            part = all_reduce.decode_values(memoryview(data), length, find_codec(codec))
            assert part.shape == (length,)
            assert part.isfinite().all()


@pytest.mark.parametrize("codec", TOLERANCE)
@pytest.mark.parametrize("group", [b"", bytes(32)])
def test_hivemind_gets_plain_numbers_whatever_a_sender_has_quantised(codec: str, group: bytes) -> None:
    """Its own quantised codecs read past the end of their tables, where a sender's indices lead them."""
    length, rng = 300, random.Random(1)
    size = encoded_bytes((length,), codec)
    for _ in range(20):
        data = bytearray(rng.randbytes(size))
        for wrong in (size - 1, size + 1, 0, 4 * length + 1):
            with pytest.raises(InvalidMessage, match="bytes"):
                hivemind_all_reduce._decode(memoryview(bytearray(wrong)), length, find_codec(codec), 1.0, group)
        try:
            part = hivemind_all_reduce._decode(memoryview(data), length, find_codec(codec), 1.0, group).tensor_part
        except InvalidMessage as error:
            refused = str(error)
        else:
            refused = ""
            assert part.compression == runtime_pb2.CompressionType.NONE
            assert (list(part.size), len(part.buffer)) == ([length], 4 * length)
            assert deserialize_torch_tensor(part).isfinite().all()
        assert refused in ("", f"tensor of shape ({length},) holds non-finite numbers")


@pytest.mark.parametrize("members", ["none", "blockwise_8bit", "int4_hadamard"], indirect=True)
async def test_a_member_whose_numbers_are_finite_and_their_sum_is_not_is_blamed(members: Members) -> None:
    codec = find_codec(members.averagers[0]._section.compression)
    blamed = []

    async def take_part(number: int) -> None:
        with pytest.raises(AveragingFailed) as failed:
            await members.averagers[number].average("0", gradients_of(number, 0), shares)
        blamed.append(failed.value.blamed)

    async def lie(to: int) -> None:
        data = codec.encode(torch.full((members.averagers[to]._rounds[group]._lengths[0],), 1e36))
        with pytest.raises(InvalidMessage, match="values beyond"):
            await members.send(to, 0, bytes_of(data), group)

    shares = dict(zip(members.ids, SAMPLES, strict=True))
    members.network.fault(op="average_part", to=members.ids[2], before=anyio.Event(), times=100)
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(take_part, number)
        rounds = members.averagers[1]._rounds
        await members.averagers[1]._changed.wait_for(lambda: bool(rounds))
        [group] = rounds
        await anyio.wait_all_tasks_blocked()
        for number in range(2):
            tasks.start_soon(lie, number)
    assert blamed == [{members.ids[2]}] * 2


@pytest.mark.parametrize("members", TOLERANCE, indirect=True)
async def test_the_largest_numbers_that_are_taken_have_an_average(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = [torch.full(shape, 0.5 * parts.LARGEST_SUM / sum(SAMPLES)) for shape in SHAPES]
    monkeypatch.setitem(globals(), "gradients_of", lambda number, round_number: largest)
    for outcome in await members.average(0, [0, 1, 2]):
        assert not isinstance(outcome, str), outcome
        assert all(bool(average.isfinite().all()) for average in outcome)


@pytest.mark.parametrize(("num_members", "most"), [(2, 2**19), (16, 2**18), (64, 2**16), (1000, 4194)])
def test_the_more_members_the_smaller_are_parts(num_members, most):
    assert 0.9 * most < parts.part_values(10**9, num_members) <= most
    assert parts.part_values(5, num_members) == -(-5 // num_members)


@pytest.mark.parametrize("num_members", [1, 2, 3, 16])
@pytest.mark.parametrize("num_values", [1, 7, 4097, 10**6 + 1, 3 * 2**19])
def test_no_member_averages_more_than_a_part_more_than_its_share(num_values, num_members):
    length = parts.part_values(num_values, num_members)
    num_parts = -(-num_values // length)
    assert -(-num_parts // num_members) * length < num_values / num_members + length

"""hivemind's butterfly all-reduce among the members of one averaging round, driven from outside of hivemind.

hivemind's runner decides which member averages which part, and when a member counts as lost. Parts come and go through
the round's `take` and `send`: each is checked before hivemind sees it, and weighs what the cut says of its sender.
The result is bitwise the same for every member.

Owns hivemind's runner and its tasks, which stay in here. Must not know how parts travel: averaging.py does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import TensorPartReducer
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from swarm_peer.codecs.base import Codec
from swarm_peer.codecs.parts import encode_part, part_values
from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.step.all_reduce import FEWEST_IN_FLIGHT, AveragingRound, Brought, decode_values, parts_to_send
from swarm_peer.wire.codecs import bytes_of, rounding_seed

log = logging.getLogger(__name__)

# hivemind's tasks of a round that is given up end within this time.
CLEANUP_S = 1.0


class HivemindAllReduce(AveragingRound):
    """One averaging round of some members at this peer. Belongs to the event loop's thread."""

    def _prepare(self, brought: Brought) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        members = list(self._weights)
        num_values = part_values(len(brought.values), len(members))
        self._views = torch.split(brought.values, num_values)
        self._runner = _ExactAllReduce(
            self.exchange,
            self.fail,
            p2p=SimpleNamespace(peer_id=PeerID.from_base58(self._me)),
            servicer_type=AllReduceRunner,
            prefix=None,
            group_id=self._group,
            tensors=self._views,
            weight=self._weights[self._me],
            ordered_peer_ids=tuple(PeerID.from_base58(member) for member in members),
            peer_fractions=(1 / len(members),) * len(members),
            sender_timeout=self._timeout_s,
            reducer_timeout=2 * self._timeout_s,
            part_size_bytes=4 * num_values,
        )
        self._lengths = [len(part) for part in self._runner.parts_for_local_averaging]
        own_index = members.index(self._me)
        self._reducer = _ExactReducer(
            self._lengths, len(members), own_index, self._codec, self._threads, (self._group, self._me)
        )
        self._runner.tensor_part_reducer.finished.set()  # it would complain that nothing came
        self._runner.tensor_part_reducer = self._reducer
        self._arrived: dict[str, dict[int, Any]] = {peer: {} for peer in members if peer != self._me}
        self._done: dict[str, int] = dict.fromkeys(self._arrived, 0)  # averages that are ready for each sender

    async def run(self, timeout_s: float) -> str | None:
        """Average. Returns why it failed, if it did; after that, no task of it is left."""
        for sender in self._arrived if self._lengths else ():
            self._start(self._pump(sender))
        self._start(_replace_by_averages(self._views, self._runner))
        try:
            with anyio.move_on_after(timeout_s):
                await self._changed.wait_for(
                    lambda: self._failure is not None or all(task.done() for task in self._tasks)
                )
            if not all(task.done() for task in self._tasks):
                self._fail_for_time(timeout_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()
        return self._failure

    async def take(self, sender: str, part: int, tensors: Sequence[memoryview]) -> memoryview:
        """Check a part that has come, and wait for its average.

        Raises:
            InvalidMessage: the sender is no member, or the part does not fit or has come before
            NotServing: the averaging round was given up
        """
        self._claim(sender, part, tensors, self._done)
        try:
            weight, length = self._weights[sender], self._lengths[part]
            data, codec, group = tensors[0], self._codec, self._group
            message = await self._threads.run(_decode, data, length, codec, weight, group, self._largest)
        except InvalidMessage as error:
            self.fail(f"{sender}: {error}", sender)
            raise
        if not self._over:
            self._arrived[sender][part] = message
        self._changed.notify()
        await self._changed.wait_for(lambda: self._over or self._done[sender] > part)
        if self._done[sender] <= part:
            raise NotServing(f"this averaging round was given up: {self._failure}")
        return await self._reducer.take(part)

    def _start(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine as asyncio's task: hivemind's generators do not bear anyio's repeated cancellation."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"{error!r:.200}")
        self._changed.notify()

    async def _pump(self, sender: str) -> None:
        """Hand a member's parts to hivemind, in their order, and note which averages are ready for that member."""

        arrived = self._arrived[sender]

        async def parts() -> AsyncIterator[Any]:
            for part in range(len(self._lengths)):
                await self._changed.wait_for(partial(arrived.__contains__, part))
                yield arrived.pop(part)

        context = SimpleNamespace(remote_id=PeerID.from_base58(sender))
        async with aclosing(self._runner.rpc_aggregate_part(parts(), context)) as replies:
            async for reply in replies:
                if reply.code != averaging_pb2.AVERAGED_PART:
                    self.fail(f"{sender} sent no part for too long", sender)
                    return
                self._done[sender] += 1
                self._changed.notify()

    async def exchange(self, member: str, parts: AsyncGenerator[torch.Tensor, None]) -> AsyncIterator[Any]:
        """Send parts to the member that averages them. Yields its averages in their order, as hivemind's messages."""
        replies: deque[tuple[asyncio.Task[Any], float, int]] = deque()  # when each was sent, and as which one under way
        number, room = 0, FEWEST_IN_FLIGHT
        async with aclosing(parts):
            async for part in parts:
                if self._over:
                    return
                task = self._start(self._send_part(member, number, part))
                replies.append((task, anyio.current_time(), len(replies) + 1))
                number += 1
                while len(replies) >= room:
                    reply, sent_s, in_flight = replies.popleft()
                    yield await reply
                    room = parts_to_send(in_flight, anyio.current_time() - sent_s)
        while replies:
            yield await replies.popleft()[0]

    async def _send_part(self, member: str, number: int, part: torch.Tensor) -> Any:
        try:
            seed = rounding_seed(self._group, self._me, member, number)
            data = await self._threads.run(_encoded, part, self._codec, seed)
            data = await self._average_of(member, number, data)
            return await self._threads.run(_decode, data, len(part), self._codec)
        except CallError as error:
            await self._fail_for(member, error)
            # hivemind would lose an exception. It takes this message for the end of the member's averages.
            return averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)

    async def _close(self) -> None:
        """End all tasks, and free what hivemind holds."""
        self.end()
        for task in self._tasks:
            task.cancel()
        _, left = await asyncio.wait(self._tasks, timeout=CLEANUP_S)
        if left:
            log.warning("averaging_tasks_left tasks=%d seconds=%.0f", len(left), CLEANUP_S)
        runner_future = self._runner._future
        if runner_future.done() and not runner_future.cancelled():
            runner_future.exception()  # taken, or asyncio complains
        # hivemind's runner, its exceptions and the frames in their tracebacks hold each other until Python collects
        # garbage, minutes later. So that they do not hold gradients as well, the runner is emptied.
        self._runner.__dict__.clear()
        self._tasks.clear()
        self._arrived.clear()


async def _replace_by_averages(views: Sequence[torch.Tensor], runner: _ExactAllReduce) -> None:
    remaining = iter(views)
    async with aclosing(runner.run()) as averages:
        async for average in averages:
            next(remaining).copy_(average)


class _ExactAllReduce(AllReduceRunner):
    """hivemind's runner, which gives averages rather than differences, and reaches members through an AllReduce.

    If a member does not average its parts in time, hivemind leaves them as they were. Here that fails the round.
    """

    def __init__(
        self,
        exchange: Callable[[str, AsyncGenerator[Any, None]], AsyncIterator[Any]],
        fail: Callable[[str, str], None],
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self._exchange = exchange
        container = self.tensor_part_container
        container.return_deltas = False
        register = container.register_failed_reducer

        def register_failed_reducer(peer_index: int) -> None:
            register(peer_index)
            if container.failed_size:
                member = self.ordered_peer_ids[peer_index].to_base58()
                fail(f"{member} has not averaged its parts in time", member)

        container.register_failed_reducer = register_failed_reducer

    def _get_peer_stub(self, peer: Any) -> Any:
        async def rpc_aggregate_part(parts: AsyncGenerator[torch.Tensor, None]) -> AsyncIterator[Any]:
            return self._exchange(peer.to_base58(), parts)

        return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[torch.Tensor]:
        container = self.tensor_part_container
        # A round that was given up has no parts any more.
        for part in () if container.finished.is_set() else container.get_raw_input_parts(peer_index):
            yield part


class _Average:
    """A part's average, which stays the same when hivemind subtracts the local part from it.

    hivemind works with the difference `average - local`. Each member would round `local + (average - local)`
    differently, so their weights would drift apart.
    """

    def __init__(self, average: torch.Tensor):
        self._average = average

    def __sub__(self, local: torch.Tensor) -> torch.Tensor:
        return self._average


class _ExactReducer(TensorPartReducer):
    """Averages the parts that fall to this member, which takes the averages as the others get them."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_members: int,
        own_index: int,
        codec: Codec,
        threads: Threads,
        names: tuple[bytes, str],
    ):
        """Make a reducer.

        Args:
            names: of this averaging round and of this member, by which averages are rounded
        """
        super().__init__([torch.Size((length,)) for length in lengths], num_members)
        self._names = names
        self._own_index = own_index
        self._codec = codec
        self._threads = threads
        self._encoded: dict[int, asyncio.Future[tuple[memoryview, torch.Tensor]]] = {}
        self._to_take = [num_members - 1] * len(lengths)
        self._added = Condition()

    async def take(self, part: int) -> memoryview:
        """The average of a part that has been averaged, as it travels. Once for each other member."""
        encoded, _ = await self._encoded[part]
        self._to_take[part] -= 1
        if not self._to_take[part]:
            del self._encoded[part]
        return encoded

    async def accumulate_part(self, sender_index: int, part_index: int, *args: Any, **kwargs: Any) -> _Average:
        # In the members' order, whoever's part came first: the last digits of a sum depend on it.
        turn = (part_index, sender_index)
        await self._added.wait_for(lambda: (self.current_part_index, self.current_part_accumulated_from) == turn)
        average = await super().accumulate_part(sender_index, part_index, *args, **kwargs)
        if part_index not in self._encoded:
            self._encoded[part_index] = asyncio.ensure_future(self._encode(part_index, average))
        _, received = await self._encoded[part_index]
        # The others get theirs from `take`: it is encoded once for all of them.
        return _Average(received if sender_index == self._own_index else torch.empty(0))

    def check_current_part_finished(self) -> None:
        super().check_current_part_finished()
        self._added.notify()

    async def _encode(self, part: int, average: torch.Tensor) -> tuple[memoryview, torch.Tensor]:
        """An average as it travels, and as the others read it."""
        seed = rounding_seed(*self._names, part)
        encoded = await self._threads.run(_encoded, average, self._codec, seed)
        if self._codec.is_exact:
            return encoded, average
        return encoded, await self._threads.run(decode_values, encoded, len(average), self._codec)


def _encoded(values: torch.Tensor, codec: Codec, seed: int) -> memoryview:
    """A part or an average as it travels; in a worker thread."""
    return bytes_of(encode_part(values, codec, seed))


def _decode(
    data: memoryview,
    length: int,
    codec: Codec,
    weight: float = 0.0,
    group: bytes = b"",
    largest: float | None = None,
) -> Any:
    """hivemind's message with a part that has come, or without a group with an average; in a worker thread.

    Args:
        largest: value that may be in it; None for any finite one

    Raises:
        InvalidMessage: the data do not fit
    """
    values = decode_values(data, length, codec, largest)
    code = averaging_pb2.PART_FOR_AVERAGING if group else averaging_pb2.AVERAGED_PART
    none = runtime_pb2.CompressionType.NONE
    tensor = runtime_pb2.Tensor(compression=none, buffer=bytes(bytes_of(values)), size=[length], dtype="float32")
    return averaging_pb2.AveragingData(code=code, group_id=group, tensor_part=tensor, weight=weight)

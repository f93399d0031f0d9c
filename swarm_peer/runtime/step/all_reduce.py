"""A butterfly all-reduce among the members of one averaging round: each member averages a share of the values.

The values are cut into parts. A member sends each part to the member that averages it, and its reply is the average.
Threads work on single parts, so that encoding, sending, adding and decoding overlap. All members
read the same bytes, their own averages included, so the result is bitwise the same for every member.

Must not know how parts travel: averaging.py does. hivemind's all-reduce, in hivemind_all_reduce.py, makes the same
averages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import torch
from anyio.abc import TaskGroup

from swarm_peer.codecs import find_codec
from swarm_peer.codecs.base import Codec, is_within
from swarm_peer.codecs.parts import LARGEST_SUM, decode_part, encode_part, mean_of_parts, shares_of
from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Threads
from swarm_peer.wire.codecs import bytes_of, decode, rounding_seed

# Parts on their way to one member: enough that a round trip across the world does not limit a home connection. Over a
# narrow one, about as many as pass within QUEUE_S, but two at least: small calls wait behind them, and a stage-mate
# that does not answer one for some seconds is taken for stalled.
FEWEST_IN_FLIGHT, MOST_IN_FLIGHT = 2, 8
QUEUE_S = 2.0
# In the first moments, members notice a failure at times that say nothing of who caused it.
LEAST_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The values of a member, and how an averaging round adds them.

    Attributes:
        values: all gradients of this peer, flat; they become the averages
        weights: of all members, by which their values are multiplied before they are added
        total: by which the sum is divided
        codec: name of the one that parts and averages travel in
        leftover: of the values' size, to which what the codec loses is added, in the unit of the values; None if it is
            of no interest
    """

    values: torch.Tensor
    weights: Mapping[str, float]
    total: float
    codec: str
    leftover: torch.Tensor | None = None

    @property
    def largest(self) -> float:
        """The largest value that a member may bring: their sum is finite then, and so is all that codecs make of it."""
        return LARGEST_SUM / sum(self.weights.values())


class AveragingRound(ABC):
    """An averaging round, however it averages: it fails once, and takes each part once.

    Attributes:
        blamed: the members for which it has failed
    """

    def __init__(
        self,
        *,
        group: bytes,
        brought: Brought,
        timeout_s: float,
        threads: Threads,
        me: str,
        send: Callable[[str, bytes, int, memoryview], Awaitable[memoryview]],
    ):
        """Prepare an averaging round.

        Args:
            timeout_s: seconds of silence after which a member fails the round
            send: sends (member, group, part, data), and returns the part's average
        """
        self._group, self._me = group, me
        self._weights = dict(sorted(brought.weights.items()))
        self._largest = brought.largest
        self._codec = find_codec(brought.codec)
        self._timeout_s = timeout_s
        self._threads = threads
        self._send = send
        self._begun_s = anyio.current_time()
        self._changed = Condition()
        self._failure: str | None = None
        self.blamed: frozenset[str] = frozenset()
        self._over = False
        self._lengths: list[int] = []  # of the parts that this peer averages
        self._claimed: set[tuple[str, int]] = set()
        self._owed: Counter[str] = Counter()  # averages of parts that were sent to each member
        self._prepare(brought)

    @abstractmethod
    def _prepare(self, brought: Brought) -> None:
        """Cut the values into parts."""

    def fail(self, reason: str, *members: str) -> None:
        """Give the averaging round up. The first reason counts, and none after its end.

        Args:
            members: who are to blame, if anybody
        """
        if self._over:
            return
        if self._failure is None:
            self.blamed = frozenset(members)
        self._failure = self._failure or reason
        self._changed.notify()

    def _fail_for_time(self, timeout_s: float) -> None:
        """Give the averaging round up, since it has taken too long, for the members that hold this peer up.

        These are the ones whose parts are missing where this peer is to go on averaging. It is not all whose parts are
        missing somewhere: members send few parts ahead of the averages. If this peer has all parts, it is those that
        owe it averages.
        """
        others = self._weights.keys() - {self._me}
        for part in range(len(self._lengths)):
            if late := {member for member in others if (member, part) not in self._claimed}:
                break
        else:
            late = set(+self._owed)
        self.fail(f"not done within {timeout_s:.0f} s", *late)

    async def _average_of(self, member: str, part: int, data: memoryview) -> memoryview:
        """Send a part to the member that averages it, and wait for the average."""
        self._owed[member] += 1
        average = await self._send(member, self._group, part, data)
        self._owed[member] -= 1
        return average

    def end(self) -> None:
        """Refuse what is still to come, and what waits for an average."""
        self._over = True
        self._changed.notify()

    async def _fail_for(self, member: str, error: CallError) -> None:
        """Give the averaging round up for a call to a member that has failed.

        A member that has given it up may have waited for another one, and noticed that first. So this peer waits as
        long again, and LEAST_WAIT_S at least, before it blames that member: its own patience with the other one ends
        meanwhile.
        """
        if isinstance(error, NotServing):
            passed_s = anyio.current_time() - self._begun_s
            with anyio.move_on_after(min(max(passed_s, LEAST_WAIT_S), self._timeout_s)):
                await self._changed.wait_for(lambda: self._over or self._failure is not None)
        self.fail(f"{member}: {error}", member)

    def _claim(self, sender: str, part: int, tensors: Sequence[memoryview], senders: Collection[str]) -> None:
        """Check a part that has come, before it is decoded.

        Raises:
            InvalidMessage: the sender is none of these, or the part does not fit or has come before
        """
        if sender not in senders:
            raise InvalidMessage("only members of an averaging round send parts")
        if part >= len(self._lengths) or (sender, part) in self._claimed or len(tensors) != 1:
            reason = f"part {part} of {len(tensors)} tensors is not averaged here, has come before, or is not one"
            self.fail(f"{sender}: {reason}", sender)
            raise InvalidMessage(reason)
        self._claimed.add((sender, part))


class AllReduce(AveragingRound):
    """One averaging round of some members at this peer. Belongs to the event loop's thread."""

    def _prepare(self, brought: Brought) -> None:
        self._total = brought.total
        self._parts = _by_member(self._weights, brought.values)
        self._leftovers = None if brought.leftover is None else _by_member(self._weights, brought.leftover)
        self._num_left = sum(map(len, self._parts.values()))  # parts of which this peer does not have the average yet
        self._own = self._parts.pop(self._me)
        self._lengths = [len(part) for part in self._own]
        self._num_arrived = dict.fromkeys(self._parts, 0)
        # The parts of others that wait to be added, by number and sender; and the averages as they travel, with the
        # number of members that have yet to take them.
        self._arrived: list[dict[str, torch.Tensor]] = [{} for _ in self._own]
        self._averages: dict[int, tuple[memoryview, int]] = {}
        self._tasks: TaskGroup | None = None  # while it runs

    async def run(self, timeout_s: float) -> str | None:
        """Average. Returns why it failed, if it did; after that, no task of it is left."""
        try:
            with anyio.move_on_after(timeout_s) as in_time:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    for member in self._parts:
                        tasks.start_soon(self._exchange, member)
                        tasks.start_soon(self._expect, member)
                    for number in range(len(self._own)):
                        self._average_if_whole(number)
                    try:
                        await self._changed.wait_for(lambda: self._failure is not None or not self._num_left)
                    finally:
                        # A part that comes now starts nothing: anyio may never cancel what starts in a group that ends.
                        self._tasks = None
                    tasks.cancel_scope.cancel()
            if in_time.cancelled_caught:
                self._fail_for_time(timeout_s)
        finally:
            self.end()
            self._arrived.clear()
        return self._failure

    async def take(self, sender: str, part: int, tensors: Sequence[memoryview]) -> memoryview:
        """Check a part that has come, and wait for its average.

        Raises:
            InvalidMessage: the sender is no member, or the part does not fit or has come before
            NotServing: the averaging round was given up
        """
        self._claim(sender, part, tensors, self._parts)
        try:
            length = self._lengths[part]
            values = await self._threads.run(decode_values, tensors[0], length, self._codec, self._largest)
        except InvalidMessage as error:
            self.fail(f"{sender}: {error}", sender)
            raise
        if not self._over:
            self._arrived[part][sender] = values
            self._num_arrived[sender] += 1
            self._average_if_whole(part)
        self._changed.notify()
        await self._changed.wait_for(lambda: self._over or part in self._averages)
        if part not in self._averages:
            raise NotServing(f"this averaging round was given up: {self._failure}")
        average, num_left = self._averages.pop(part)
        if num_left > 1:
            self._averages[part] = average, num_left - 1
        return average

    async def _expect(self, sender: str) -> None:
        """Fail the round if a member sends nothing for too long."""
        for number in range(len(self._own)):
            with anyio.move_on_after(self._timeout_s) as in_time:
                await self._changed.wait_for(partial(self._has_sent, sender, number))
            if in_time.cancelled_caught:
                self.fail(f"{sender} sent no part for too long", sender)
                return

    def _has_sent(self, sender: str, number: int) -> bool:
        return self._num_arrived[sender] > number

    def _average_if_whole(self, number: int) -> None:
        """Begin to average one of this peer's own parts, if the round has begun and all members' have come."""
        if self._tasks is not None and len(self._arrived[number]) == len(self._parts):
            self._tasks.start_soon(self._average, number)

    async def _average(self, number: int) -> None:
        arrived = self._arrived[number]
        seed = rounding_seed(self._group, self._me, number)
        average = await self._threads.run(self._mean, number, arrived, seed)
        self._averages[number] = average, len(self._parts)
        arrived.clear()
        self._has_average()

    def _mean(self, number: int, arrived: Mapping[str, torch.Tensor], seed: int) -> memoryview:
        """Replace this peer's part by the average, as others read it. Returns what they get; in a worker thread."""
        part = self._own[number]
        # In the members' order, whoever's part came first: the last digits of a sum depend on it.
        parts = [part if peer == self._me else arrived[peer] for peer in self._weights]
        mean = mean_of_parts(parts, list(self._weights.values()), self._total)
        encoded = encode_part(mean, self._codec, seed, self._leftover_of(self._me, number), self._total)
        part.copy_(mean if self._codec.is_exact else decode_part(encoded, self._codec, len(part)))
        return bytes_of(encoded)

    def _leftover_of(self, member: str, number: int) -> torch.Tensor | None:
        """Where to note what is lost of a part that a member averages."""
        return None if self._leftovers is None else self._leftovers[member][number]

    async def _exchange(self, member: str) -> None:
        """Send parts to the member that averages them, as many at a time as its link carries."""
        under_way: deque[tuple[anyio.Event, float, int]] = deque()  # when each was sent, and as which one under way
        room = FEWEST_IN_FLIGHT
        async with anyio.create_task_group() as tasks:
            for number, part in enumerate(self._parts[member]):
                while len(under_way) >= room:
                    room = await self._returned(member, *under_way.popleft())
                under_way.append((self._start(tasks, member, number, part), anyio.current_time(), len(under_way) + 1))
            while under_way:
                await self._returned(member, *under_way.popleft())

    async def _returned(self, member: str, is_back: anyio.Event, sent_s: float, in_flight: int) -> int:
        """Wait for an average. Returns how many parts may be on their way to its member."""
        with anyio.move_on_after(2 * self._timeout_s) as in_time:
            await is_back.wait()
        if in_time.cancelled_caught:
            self.fail(f"{member} has not averaged its parts in time", member)
        return parts_to_send(in_flight, anyio.current_time() - sent_s)

    def _start(self, tasks: TaskGroup, member: str, number: int, part: torch.Tensor) -> anyio.Event:
        is_back = anyio.Event()
        tasks.start_soon(self._send_part, member, number, part, is_back)
        return is_back

    async def _send_part(self, member: str, number: int, part: torch.Tensor, is_back: anyio.Event) -> None:
        """Replace a part by its average, which its member makes."""
        seed = rounding_seed(self._group, self._me, member, number)
        try:
            encoded = await self._threads.run(encode_part, part, self._codec, seed, self._leftover_of(member, number))
            data = await self._average_of(member, number, bytes_of(encoded))
            await self._threads.run(_decode_into, data, part, self._codec)
        except CallError as error:
            await self._fail_for(member, error)
            return
        is_back.set()
        self._has_average()

    def _has_average(self) -> None:
        self._num_left -= 1
        self._changed.notify()


def parts_to_send(in_flight: int, seconds: float) -> int:
    """How many parts may be on their way at once, where so many have come back, as averages, in so long a time."""
    return max(FEWEST_IN_FLIGHT, min(MOST_IN_FLIGHT, int(in_flight * QUEUE_S / max(seconds, 1e-3))))


def _by_member(members: Collection[str], values: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """The parts that each member averages; the members are in order."""
    return dict(zip(members, shares_of(values, len(members)), strict=True))


def decode_values(data: memoryview, length: int, codec: Codec, largest: float | None = None) -> torch.Tensor:
    """Decode a part or an average to what its receiver computes with; in a worker thread.

    Args:
        largest: value that may be in it; None for any finite one

    Raises:
        InvalidMessage: the data do not fit
    """
    values = decode(data, (length,), codec.name)
    values = values if codec.scale == 1.0 else values / codec.scale
    if largest is not None and not is_within(values, largest):
        raise InvalidMessage(f"a part with values beyond {largest:.1e}, whose sum with others' may not be finite")
    return values


def _decode_into(data: memoryview, values: torch.Tensor, codec: Codec) -> None:
    values.copy_(decode_values(data, len(values), codec))

"""A simulated network: links with latency, jitter and bandwidth, connections that break, partitions, and calls on top.

Frames of one direction of a connection arrive in their order, as on a stream. A partition holds them back until it
heals, as TCP does; a host that dies resets its connections.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from loop import OUTSIDE

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NotAdmitted, NotServing, PeerUnreachable
from swarm_peer.runtime.network.p2p_transport import CONNECT_TIMEOUT_S
from swarm_peer.runtime.network.transport import CallHandler, Reply, Transport, error_body, error_from_body
from swarm_peer.wire.frames import PREFIX, Frame, FrameType, parse_frame, parse_lengths
from swarm_peer.wire.messages import Body

if TYPE_CHECKING:
    from hosts import Host
    from world import World

MAX_PAYLOAD_BYTES = 64 * 2**20


@dataclass
class Link:
    """One direction between two hosts."""

    latency_s: float
    bytes_per_s: float
    blocked: int = 0  # partitions that hold it back
    free_s: float = 0.0
    last_s: float = 0.0
    held: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)


@dataclass(eq=False)
class Call:
    """A call under way."""

    id: int
    op: str
    frame: Frame
    future: asyncio.Future[Frame]
    is_sent: bool = False
    callee: Host | None = None
    scope: anyio.CancelScope | None = None  # of its handler
    is_cancelled: bool = False


@dataclass(eq=False)
class Connection:
    """From a caller to a callee, with the calls that go over it."""

    caller: Host
    callee: Host | None
    peer_id: str
    is_up: bool = False
    is_over: bool = False
    calls: dict[int, Call] = field(default_factory=dict)


class TubeNetwork:
    """All links and connections of a world."""

    def __init__(self, world: World):
        self._world = world
        self._rng = world.rng("network")
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: dict[tuple[Host, str], Connection] = {}
        self._all: list[Connection] = []
        self._ids = itertools.count(1)
        self.by_peer_id: dict[str, Host] = {}
        self.tampering: list[Tampering] = []
        self._lost: set[Host] = set()  # hosts that are dead, and with them what they had sent and was on its way
        self.on_call: Callable[[Host, str], None] = lambda callee, op: None

    # --- links

    def links(self) -> list[Link]:
        return list(self._links.values())

    def link(self, source: Host, target: Host) -> Link:
        key = (source.name, target.name)
        if key not in self._links:
            rng = self._world.rng(f"link {min(key)} {max(key)}")
            self._links[key] = Link(rng.choice([0.002, 0.02, 0.05, 0.12]), rng.choice([1e6, 1e7, 1e8]))
        return self._links[key]

    def is_blocked(self, source: Host, target: Host) -> bool:
        return self.link(source, target).blocked > 0 or target.is_stalled

    def transmit(self, source: Host, target: Host, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Have something arrive at the other end; later, if the link is held back."""
        link = self.link(source, target)
        if self.is_blocked(source, target):
            link.held.append((num_bytes, arrive))
            return
        loop = self._world.loop
        now = loop.time()
        link.free_s = max(now, link.free_s) + num_bytes / link.bytes_per_s
        at = max(link.free_s + link.latency_s * self._rng.uniform(1.0, 1.5), link.last_s + 1e-6)
        link.last_s = at
        loop.call_at(at, self._arrive, source, target, num_bytes, arrive, now, context=OUTSIDE)

    def _arrive(self, source: Host, target: Host, num_bytes: int, arrive: Callable[[], None], sent_s: float) -> None:
        if source in self._lost and sent_s < source.died_s:
            return
        if self.is_blocked(source, target):
            self.link(source, target).held.append((num_bytes, arrive))
        else:
            arrive()

    def release(self) -> None:
        """Send on what links have held back that are free now."""
        hosts = {host.name: host for host in self._world.hosts}
        for (source, target), link in list(self._links.items()):
            if link.held and not self.is_blocked(hosts[source], hosts[target]):
                held, link.held = link.held, deque()
                for num_bytes, arrive in held:
                    self.transmit(hosts[source], hosts[target], num_bytes, arrive)

    # --- connections

    def connect(self, caller: Host, peer_id: str) -> Connection:
        key = (caller, peer_id)
        known = self._connections.get(key)
        if known is None or known.is_over:
            known = self._connections[key] = Connection(caller, self.by_peer_id.get(peer_id), peer_id)
            self._all.append(known)
            self._dial(known, self._world.loop.time() + CONNECT_TIMEOUT_S)
        return known

    def _dial(self, connection: Connection, deadline_s: float) -> None:
        caller, callee, loop = connection.caller, connection.callee, self._world.loop
        if connection.is_over or not caller.is_alive:
            return
        if callee is None:  # no node of the DHT knows an address
            loop.call_later(0.5, self.fail, connection, PeerUnreachable(f"nobody knows {connection.peer_id}"), True)
        elif self.is_blocked(caller, callee) or self.is_blocked(callee, caller):
            if loop.time() > deadline_s:
                self.fail(connection, PeerUnreachable(f"{connection.peer_id}: no connection in time"), True)
            else:
                loop.call_later(0.5, self._dial, connection, deadline_s)
        else:
            round_trip_s = self.link(caller, callee).latency_s + self.link(callee, caller).latency_s
            loop.call_later(2 * round_trip_s, self._dialled, connection)

    def _dialled(self, connection: Connection) -> None:
        callee = connection.callee
        assert callee is not None
        if connection.is_over or not connection.caller.is_alive:
            return
        if not callee.is_alive or callee.transport is None or callee.transport.handler is None or callee.refuses:
            self.fail(connection, PeerUnreachable(f"{connection.peer_id}: connection refused"), True)
            return
        if self._lets_in(connection):
            callee.do(callee.passes.learn, connection.caller.passes.revocations)
            connection.is_up = True
            for call in connection.calls.values():
                self._send(connection, call)

    def _lets_in(self, connection: Connection) -> bool:
        """Whether the callee takes the caller's pass; a caller that is turned away hears what was revoked."""
        callee, caller = connection.callee, connection.caller
        assert callee is not None
        try:
            callee.passes.check(caller.peer_id, caller.passes.own_pass)
        except NotAdmitted as error:
            refusal = error

            def turn_away() -> None:
                if caller.is_alive:
                    caller.do(caller.passes.learn, callee.passes.revocations)
                self.fail(connection, refusal)

            for call in connection.calls.values():
                self._cancel_handler(call)
            self.transmit(callee, caller, 500, turn_away)
            return False
        return True

    def fail(self, connection: Connection, error: CallError, dialling: bool = False) -> None:
        """End a connection as its caller sees it."""
        if connection.is_over:
            return
        connection.is_over = True
        calls = list(connection.calls.values())
        connection.calls.clear()
        transport = connection.caller.transport
        if dialling and connection.caller.is_alive and transport is not None:
            connection.caller.do(transport.on_unreachable, connection.peer_id)
        for call in calls:
            if not call.future.done():
                call.future.set_exception(type(error)(str(error)))

    def opposite(self, connection: Connection) -> Connection | None:
        """The connection for calls in the other direction, which breaks at the same time, if there is one."""
        found = (
            None if connection.callee is None else self._connections.get((connection.callee, connection.caller.peer_id))
        )
        return None if found is None or found.is_over or not found.is_up else found

    def cut(self, connection: Connection, reason: str, seen_after_s: float = 0.0) -> None:
        """Have a connection break, which its caller sees at once.

        Args:
            seen_after_s: when its callee sees it; until then, what handles its calls goes on
        """
        calls = list(connection.calls.values())
        self.fail(connection, PeerUnreachable(f"{connection.peer_id}: {reason}"))
        for call in calls:
            if seen_after_s:
                self._world.loop.call_later(seen_after_s, self._cancel_handler, call)
            else:
                self._cancel_handler(call)

    def open_connections(self) -> list[Connection]:
        self._all = [known for known in self._all if not known.is_over]
        return self._all

    def died(self, host: Host) -> None:
        """Reset the connections of a host that is dead; the resets travel like anything else it has sent, or alone."""
        if self._rng.random() < 0.5:
            self._lost.add(host)
            for (source, _), link in self._links.items():
                if source == host.name:
                    link.held.clear()
        for connection in list(self.open_connections()):
            if connection.callee is host and connection.caller.is_alive:
                reset = PeerUnreachable(f"{connection.peer_id}: connection reset")
                self.transmit(host, connection.caller, 0, lambda c=connection, e=reset: self.fail(c, e))  # type: ignore[misc]
            elif connection.caller is host:
                calls = list(connection.calls.values())
                connection.is_over = True
                if connection.callee is not None and connection.callee.is_alive:
                    for call in calls:
                        self.transmit(host, connection.callee, 0, lambda c=call: self._cancel_handler(c))  # type: ignore[misc]

    # --- calls

    async def call(self, caller: Host, peer_id: str, body: Body, tensors: Sequence[memoryview]) -> Reply:
        if not caller.is_alive:
            await anyio.sleep_forever()
        fields = body.model_dump()
        op = fields.pop("op")
        call = Call(
            next(self._ids), op, Frame(FrameType.CALL, 0, op, fields, tensors), self._world.loop.create_future()
        )
        connection = self.connect(caller, peer_id)
        connection.calls[call.id] = call
        if connection.is_up:
            self._send(connection, call)
        try:
            answer = await call.future
        finally:
            connection.calls.pop(call.id, None)
            gave_up = not call.future.done() or call.future.cancelled()
            if (
                gave_up
                and call.is_sent
                and caller.is_alive
                and connection.callee is not None
                and not connection.is_over
            ):
                self.transmit(caller, connection.callee, 30, lambda: self._cancel_handler(call))
        if answer.type is FrameType.ERROR:
            raise error_from_body(answer.body)
        return Reply(answer.body or {}, answer.tensors)

    def _send(self, connection: Connection, call: Call) -> None:
        callee = connection.callee
        assert callee is not None
        call.is_sent = True
        data = _pack(call.frame)
        self.transmit(connection.caller, callee, len(data), lambda: self._receive(connection, call, data))

    def _receive(self, connection: Connection, call: Call, data: bytes) -> None:
        callee = connection.callee
        assert callee is not None
        if not callee.is_alive:
            if connection.caller.is_alive:
                reset = PeerUnreachable(f"{connection.peer_id}: connection reset")
                self.transmit(callee, connection.caller, 0, lambda: self.fail(connection, reset))
            return
        if call.is_cancelled or connection.is_over or not self._lets_in(connection):
            return
        self._world.note("call", connection.caller.name, callee.name, call.op)
        self.on_call(callee, call.op)
        tampering = self._tampering(call, connection.caller, callee)
        callee.spawn(self._handle(connection, call, data, tampering), "handler")
        if tampering is not None and tampering.kind == "repeat":
            again = Call(next(self._ids), call.op, call.frame, self._world.loop.create_future())
            again.is_cancelled = True  # nobody waits for its reply
            self._world.loop.call_later(
                tampering.seconds, lambda: callee.spawn(self._handle(connection, again, data, None), "handler")
            )

    def _tampering(self, call: Call, caller: Host, callee: Host) -> Tampering | None:
        found = next((script for script in self.tampering if script.strikes(call.op, caller, callee)), None)
        if found is not None and not (found.is_one_fault and found.has_struck):
            self._world.struck(found.kind)
            found.has_struck = True
        return found

    async def _handle(self, connection: Connection, call: Call, data: bytes, tampering: Tampering | None) -> None:
        callee, caller = connection.callee, connection.caller
        assert callee is not None
        if not callee.is_alive:
            return
        transport = callee.transport
        assert transport is not None
        transport.handling += 1
        try:
            with anyio.CancelScope() as scope:
                call.callee, call.scope = callee, scope
                answer = await self._answer(callee, caller.peer_id, _unpack(data))
            if scope.cancel_called or not callee.is_alive or call.is_cancelled:
                return
            if tampering is not None and tampering.kind == "delay":
                with anyio.CancelScope() as scope:
                    call.scope = scope
                    await anyio.sleep(tampering.seconds)
        finally:
            transport.handling -= 1
            transport.idle.set()
        if tampering is not None and tampering.kind == "lose":
            self.cut(connection, "connection lost before the reply")
            return
        if tampering is not None and tampering.kind == "garbage":
            answer = tampering.garble(answer, call.op)
        if callee.is_alive:
            reply = _pack(answer)
            self.transmit(callee, caller, len(reply), lambda: self._reply(call, reply))

    async def _answer(self, callee: Host, caller_id: str, frame: Frame) -> Frame:
        transport = callee.transport
        assert transport is not None
        try:
            if transport.handler is None:
                raise NotServing("this peer is on its way to another stage")
            reply = await transport.handler(caller_id, frame.op, frame.body or {}, frame.tensors)
            return Frame(FrameType.REPLY, 0, "", reply.body, reply.tensors)
        except CallError as error:
            return Frame(FrameType.ERROR, 0, "", error_body(error))
        except Exception as error:
            self._world.violation(f"{callee.name}: the handler of {frame.op} failed: {error!r}", error)
            return Frame(FrameType.ERROR, 0, "", error_body(CallError("internal error")))

    def _reply(self, call: Call, data: bytes) -> None:
        if not call.future.done():
            call.future.set_result(_unpack(data))

    def _cancel_handler(self, call: Call) -> None:
        call.is_cancelled = True
        if call.callee is not None and call.scope is not None:
            call.callee.do(self._world.loop.call_soon, call.scope.cancel)


@dataclass(eq=False)
class Tampering:
    """What goes wrong with the next calls that match, `times` times.

    Attributes:
        kind: "lose" the reply with its connection, "delay" it, "repeat" the call, or send "garbage" for a reply
        op: None for any
        to: name of the callee; None for any
        is_one_fault: all its strikes count as one fault
    """

    kind: str
    op: str | None
    to: str | None
    times: int
    seconds: float
    rng: random.Random
    is_one_fault: bool = False
    has_struck: bool = False

    def strikes(self, op: str, caller: Host, callee: Host) -> bool:
        if self.op not in (None, op) or self.to not in (None, callee.name) or not self.times:
            return False
        self.times -= 1
        return True

    def garble(self, answer: Frame, op: str) -> Frame:
        """A reply that can be told to be none: fields that do not fit, tensors too short, or values not finite.

        Chunks of states have hashes, so theirs may be any values.
        """
        kind = self.rng.randrange(3)
        if kind == 0 or (not answer.tensors and not answer.body):
            return Frame(answer.type, 0, "", {"garbage": True}, answer.tensors)
        if not answer.tensors:
            return Frame(answer.type, 0, "", dict.fromkeys(answer.body or {}, "garbage"), ())
        if kind == 1:
            return Frame(
                answer.type, 0, "", answer.body, tuple(tensor[: len(tensor) // 2] for tensor in answer.tensors)
            )
        if op == "state_chunk":
            wrong = (bytes([tensor[0] ^ 1]) + bytes(tensor[1:]) for tensor in answer.tensors)
            return Frame(answer.type, 0, "", answer.body, tuple(map(memoryview, wrong)))
        not_finite = b"\xff" * max(map(len, answer.tensors))  # NaN in all of our number formats
        return Frame(
            answer.type, 0, "", answer.body, tuple(memoryview(not_finite)[: len(tensor)] for tensor in answer.tensors)
        )


class TubeTransport(Transport):
    """Calls of one host."""

    def __init__(self, network: TubeNetwork, host: Host):
        self.peer_id = host.peer_id
        self.handler: CallHandler | None = None
        self.on_unreachable: Callable[[str], None] = lambda peer_id: None
        self.handling = 0
        self.idle = anyio.Event()
        self._network = network
        self._host = host

    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        try:
            with anyio.fail_after(timeout_s):
                return await self._network.call(self._host, peer_id, body, tensors)
        except TimeoutError:
            raise CallTimeout(f"{peer_id} did not answer within {timeout_s:.1f} s") from None

    async def serve(
        self,
        handler: CallHandler,
        on_unreachable: Callable[[str], None] = lambda peer_id: None,
        is_member: Callable[[str], bool] = lambda peer_id: True,
    ) -> None:
        self.handler, self.on_unreachable = handler, on_unreachable

    async def answered(self) -> None:
        while self.handling:
            self.idle = anyio.Event()
            await self.idle.wait()


def _pack(frame: Frame) -> bytes:
    return frame.head() + b"".join(bytes(tensor) for tensor in frame.tensors)


def _unpack(data: bytes) -> Frame:
    header_bytes, payload_bytes = parse_lengths(data[: PREFIX.size], MAX_PAYLOAD_BYTES)
    payload = bytearray(data[PREFIX.size + header_bytes :])
    if len(payload) != payload_bytes:
        raise InvalidMessage("a frame that was cut off")
    return parse_frame(data[PREFIX.size : PREFIX.size + header_bytes], memoryview(payload))

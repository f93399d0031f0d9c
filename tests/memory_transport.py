"""The transport without a network: calls go from peer to peer of one process, with faults as a script has them.

What travels is packed into frames and read back as on a stream, so that what could not travel does not. A handler runs
in a task of its own, as it would on another machine: its caller does not wait for it to take notice of a cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import anyio

from swarm_peer.errors import CallError, CallTimeout, PeerUnreachable
from swarm_peer.runtime.network.transport import CallHandler, Reply, Transport, error_body, error_from_body
from swarm_peer.wire.frames import PREFIX, Frame, FrameType, parse_frame, parse_lengths
from swarm_peer.wire.messages import Body

MAX_PAYLOAD_BYTES = 64 * 2**20


@dataclass(eq=False)
class Fault:
    """What goes wrong with the calls that it matches, as often as `times`.

    Attributes:
        fail: the call is not delivered, and raises this
        before: awaited before the call is delivered
        drop_reply: the handler runs, and its reply is lost with the connection
        after: awaited when the handler has replied, before its reply is delivered
        tamper: returns what arrives in place of a reply
        fired: how often it has struck so far
        struck: set when it does for the first time
    """

    op: str | None = None
    to: str | None = None
    times: int = 1
    skip: int = 0
    fail: CallError | None = None
    before: anyio.Event | None = None
    drop_reply: bool = False
    after: anyio.Event | None = None
    tamper: Callable[[Reply], Reply] | None = None
    fired: int = 0
    struck: anyio.Event = field(default_factory=anyio.Event)

    def strikes(self, op: str, to: str) -> bool:
        if self.op not in (None, op) or self.to not in (None, to) or self.fired >= self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.fired += 1
        self.struck.set()
        return True


class MemoryNetwork:
    """Peers that can call each other. Its context ends what their handlers still do, and fails on their defects.

    Attributes:
        calls: (caller, callee, op) of each call, in order
        defects: what handlers raised that is no CallError
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.defects: list[Exception] = []
        self._handlers: dict[str, CallHandler] = {}
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dead: dict[str, anyio.Event] = {}

    async def __aenter__(self) -> MemoryNetwork:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if error is None:
            assert not self.defects, f"handlers failed: {self.defects}"

    def transport(self, peer_id: str) -> MemoryTransport:
        return MemoryTransport(self, peer_id)

    def fault(self, **script: Any) -> Fault:
        """Have something go wrong; see Fault. Of several that match a call, the first strikes."""
        fault = Fault(**script)
        self._faults.append(fault)
        return fault

    def kill(self, peer_id: str) -> None:
        """The peer is gone: what is under way with it breaks off, and nobody reaches it any more."""
        self._handlers.pop(peer_id, None)
        if peer_id in self._dead:
            self._dead[peer_id].set()

    def num_calls(self, op: str, to: str | None = None) -> int:
        return sum(called == op and to in (None, callee) for _, callee, called in self.calls)

    async def call(self, caller: str, callee: str, body: Body, tensors: Sequence[memoryview]) -> Reply:
        fields = body.model_dump()
        op = fields.pop("op")
        frame = _through_the_wire(Frame(FrameType.CALL, 1, op, fields, tensors))
        self.calls.append((caller, callee, op))
        fault = next((fault for fault in self._faults if fault.strikes(op, callee)), Fault())
        if fault.before is not None:
            await fault.before.wait()
        if fault.fail is not None:
            raise fault.fail
        if callee not in self._handlers:
            raise PeerUnreachable(f"nobody is {callee}")
        answer = await self._run_task(callee, partial(self._handle, self._handlers[callee], caller, frame))
        if fault.after is not None:
            await fault.after.wait()
        if fault.drop_reply:
            raise PeerUnreachable("the stream broke")
        answer = _through_the_wire(answer)
        if answer.type is FrameType.ERROR:
            raise error_from_body(answer.body)
        reply = Reply(answer.body or {}, answer.tensors)
        return reply if fault.tamper is None else fault.tamper(reply)

    async def _run_task(self, callee: str, handle: Callable[[], Coroutine[Any, Any, Frame]]) -> Frame:
        """Run a handler; cancel it if the caller is cancelled or the callee dies."""
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                result = await handle()
                if not answer.done():
                    answer.set_result(result)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        dead = self._dead.setdefault(callee, anyio.Event())
        death = asyncio.create_task(dead.wait())
        try:
            await asyncio.wait([answer, death], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise PeerUnreachable(f"{callee} died")
            return answer.result()
        finally:
            answer.cancel()
            death.cancel()
            scope.cancel()

    async def _handle(self, handler: CallHandler, caller: str, frame: Frame) -> Frame:
        try:
            reply = await handler(caller, frame.op, frame.body or {}, frame.tensors)
            return Frame(FrameType.REPLY, frame.call_id, "", reply.body, reply.tensors)
        except CallError as error:
            return Frame(FrameType.ERROR, frame.call_id, "", error_body(error))
        except Exception as error:
            self.defects.append(error)
            return Frame(FrameType.ERROR, frame.call_id, "", error_body(CallError("internal error")))


class MemoryTransport(Transport):
    def __init__(self, network: MemoryNetwork, peer_id: str):
        self.peer_id = peer_id
        self.network = network

    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        try:
            with anyio.fail_after(timeout_s):
                return await self.network.call(self.peer_id, peer_id, body, tensors)
        except TimeoutError:
            raise CallTimeout(f"{peer_id} did not answer within {timeout_s:.1f} s") from None

    async def answered(self) -> None:
        """Replies arrive as soon as they are made."""

    async def serve(self, handler: CallHandler) -> None:
        assert self.peer_id not in self.network._handlers, "once"
        self.network._handlers[self.peer_id] = handler


def _through_the_wire(frame: Frame) -> Frame:
    head = frame.head()
    header_bytes, payload_bytes = parse_lengths(head[: PREFIX.size], MAX_PAYLOAD_BYTES)
    assert header_bytes == len(head) - PREFIX.size
    payload = bytearray(b"".join(frame.tensors))
    assert len(payload) == payload_bytes
    return parse_frame(head[PREFIX.size :], memoryview(payload))

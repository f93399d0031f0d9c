"""Calls over long-lived raw libp2p streams: one stream per (caller, callee), many calls interleaved on it.

The streams are raw ones rather than hivemind's RPC: unary calls cost six times the CPU per byte and are bounded at
4 MiB, and every new stream starts with a window of 256 KB. Exceptions of hivemind and libp2p end here.

The memory that one caller can take of this peer is bounded, and all strangers together take no more than one caller,
since identities cost nothing. This peer does not read calls that would exceed that until there is room. A frame that
has begun is always finished, in bounded time: half a frame would break all other calls on its stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress

import anyio
from anyio.abc import TaskGroup, TaskStatus
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NotAdmitted, NotServing, PeerUnreachable
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.exchanged import Exchanged, ExchangedRecord
from swarm_peer.runtime.network.frame_stream import FrameStream, num_bytes_of, on_network
from swarm_peer.runtime.network.link import Link
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.transport import CallHandler, Reply, Transport, error_body, error_from_body
from swarm_peer.wire.frames import Frame, FrameType, revocations_in
from swarm_peer.wire.messages import PROTOCOL, Body
from swarm_peer.wire.passes import MAX_PASS_BYTES
from swarm_peer.wire.records import MAX_STORED_BYTES

log = logging.getLogger(__name__)

# libp2p gives up dialling after about this long; a peer in the same city takes milliseconds.
CONNECT_TIMEOUT_S = 10.0
# An honest caller has one stream, and briefly a second one after it has lost the first. The oldest is cut for a third.
MAX_STREAMS_PER_CALLER = 2
# A caller that is not let in is told so in reply to its first call.
FIRST_CALL = 0
HELLO_TIMEOUT_S = 10.0
# A caller that is turned away has so long to read why.
FAREWELL_S = 2.0
# A pass and a list of revocations. Anybody may send as much, before anything is known of him.
MAX_HELLO_BYTES = MAX_PASS_BYTES + MAX_STORED_BYTES + 1024
# Over all streams of a caller. Honest callers stay far below: a peer holds `limits.max_in_flight` microbatches, by
# default 16.
MAX_CALLS_PER_CALLER = 64
# In payloads of the greatest length; shorter ones may be more.
MAX_PAYLOADS_PER_CALLER = 16


class _Connection:
    """The caller's side of a stream to one callee. Calls may begin before the callee is dialled."""

    def __init__(self, tasks: TaskGroup):
        self._tasks = tasks
        self._ids = itertools.count(FIRST_CALL)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._stream: FrameStream | None = None
        self._dialled = anyio.Event()

    async def call(self, body: Body, tensors: Sequence[memoryview]) -> Reply:
        """Send a call and wait for its reply. If cancelled, tell the callee."""
        call_id = next(self._ids)
        fields = body.model_dump()
        head = Frame(FrameType.CALL, call_id, fields.pop("op"), fields, tensors).head()
        reply = self._pending[call_id] = asyncio.get_running_loop().create_future()

        async def deliver() -> None:
            """Write the call, and a CANCEL if the caller gives up; the caller itself does not wait for this."""
            await self._dialled.wait()
            with suppress(PeerUnreachable):  # the stream is closed then, and `end` fails the call
                if self._stream is not None and await self._stream.send(head, tensors, lambda: not reply.done()):
                    await asyncio.wait([reply])
                    if reply.cancelled():
                        await self._stream.send(Frame(FrameType.CANCEL, call_id).head())

        self._tasks.start_soon(deliver)
        try:
            frame = await reply
        finally:
            del self._pending[call_id]
        if frame.type is FrameType.ERROR:
            raise error_from_body(frame.body)
        return Reply(frame.body or {}, frame.tensors)

    async def hand_out_replies(self, stream: FrameStream, hello: bytes, passes: PassChecker) -> None:
        """Say hello, and give each reply to the call that waits for it. Ends only by raising why the stream ends."""
        await stream.send(hello)
        self._stream = stream
        self._dialled.set()
        while True:
            frame = await stream.read_head()
            await stream.read_tensors(frame)
            if frame.type is FrameType.HELLO:  # this peer is not let in
                passes.learn(revocations_in(frame))
                refusal = await stream.read_head()
                raise error_from_body(refusal.body)
            reply = self._pending.get(frame.call_id)
            if reply is not None and not reply.done() and frame.type in (FrameType.REPLY, FrameType.ERROR):
                reply.set_result(frame)

    def end(self, reason: CallError) -> None:
        """Fail all calls that still wait for a reply."""
        self._dialled.set()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(reason)


class _Room:
    """Calls and their bytes that may be under way at once."""

    def __init__(self, max_bytes: int):
        self._num_calls = 0
        self._free_bytes = max_bytes
        self._changed = Condition()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until there is room for one more call, and hold its place for the duration of the context."""
        await self._changed.wait_for(lambda: self._num_calls < MAX_CALLS_PER_CALLER and num_bytes <= self._free_bytes)
        self._num_calls += 1
        self._free_bytes -= num_bytes
        try:
            yield
        finally:
            self._num_calls -= 1
            self._free_bytes += num_bytes
            self._changed.notify()


class _Caller:
    """The calls of one caller that are under way at this peer, over all its streams.

    Attributes:
        streams: cancels the handlers of each stream, the oldest first
        calls: cancels each call, by stream and call id
    """

    def __init__(self, peer_id: str, max_bytes: int):
        self.peer_id = peer_id
        self.streams: list[anyio.CancelScope] = []
        self.calls: dict[tuple[FrameStream, int], anyio.CancelScope] = {}
        self.room = _Room(max_bytes)
        self._changed = Condition()

    def cancel_calls(self, stream: FrameStream) -> None:
        """Cancel the calls that came on a stream."""
        for (of_stream, _), scope in self.calls.items():
            if of_stream is stream:
                scope.cancel()

    async def answered(self) -> None:
        """Wait until none of its calls is under way."""
        await self._changed.wait_for(lambda: not self.calls)

    @asynccontextmanager
    async def under_way(
        self, call: tuple[FrameStream, int], room: _Room, num_bytes: int
    ) -> AsyncIterator[anyio.CancelScope]:
        """Wait until there is room for one more call, and hold its place for the duration of the context.

        Yields:
            the scope that cancels the call
        """
        async with room.hold(num_bytes):
            scope = self.calls[call] = anyio.CancelScope()
            try:
                yield scope
            finally:
                del self.calls[call]
                self._changed.notify()


class P2PTransport(Transport):
    """Calls through the libp2p daemon of the DHT, under its identity. Made by `open`."""

    def __init__(
        self,
        *,
        p2p: P2P,
        max_payload_bytes: int,
        metrics: PeerMetrics,
        tasks: TaskGroup,
        passes: PassChecker,
        link: Link | None = None,
    ):
        self._p2p = p2p
        self._passes = passes
        self._on_unreachable: Callable[[str], None] = lambda peer_id: None
        self.peer_id = p2p.peer_id.to_base58()
        self._max_payload_bytes = max_payload_bytes
        self._metrics = metrics
        self._link = link or Link()
        self._exchanged = ExchangedRecord(anyio.current_time)
        self._tasks = tasks
        self._connections: dict[str, _Connection] = {}
        self._callers: dict[str, _Caller] = {}
        self._is_member: Callable[[str], bool] = lambda peer_id: True
        self._room_of_strangers = _Room(MAX_PAYLOADS_PER_CALLER * max_payload_bytes)
        self._handler: CallHandler | None = None
        self._is_listening = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        p2p: P2P,
        *,
        passes: PassChecker,
        max_payload_bytes: int,
        metrics: PeerMetrics,
        link: Link | None = None,
    ) -> AsyncIterator[P2PTransport]:
        """Open a transport. When the context ends, its streams close and its handlers are cancelled.

        Args:
            p2p: client of the daemon, for this event loop
            passes: who is answered
            max_payload_bytes: most bytes of tensors in a frame that arrives
            link: that the calls may take; None for all that there is
        """
        async with anyio.create_task_group() as tasks:
            try:
                yield cls(
                    p2p=p2p,
                    max_payload_bytes=max_payload_bytes,
                    metrics=metrics,
                    tasks=tasks,
                    passes=passes,
                    link=link,
                )
            finally:
                tasks.cancel_scope.cancel()

    async def serve(
        self,
        handler: CallHandler,
        on_unreachable: Callable[[str], None] = lambda peer_id: None,
        is_member: Callable[[str], bool] = lambda peer_id: True,
    ) -> None:
        """Answer calls from now on; see Transport."""
        self._handler, self._on_unreachable, self._is_member = handler, on_unreachable, is_member
        if not self._is_listening:
            self._is_listening = True
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)

    def busiest(self, most: int) -> Sequence[Exchanged]:
        """The peers with which this one exchanges most."""
        return self._exchanged.busiest(most)

    async def answered(self) -> None:
        """Wait until this peer has written its replies to all calls that are under way."""
        while busy := [caller for caller in self._callers.values() if caller.calls]:
            await busy[0].answered()

    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        """Call a peer and wait for its reply; see Transport. Dials the peer if there is no connection to it."""
        connection = self._connections.get(peer_id)
        if connection is None:
            callee = PeerID.from_base58(peer_id)
            connection = self._connections[peer_id] = _Connection(self._tasks)
            self._tasks.start_soon(self._run_connection, peer_id, callee, connection)
        try:
            with anyio.fail_after(timeout_s):
                began_s = anyio.current_time()
                reply = await connection.call(body, tensors)
                num_bytes = num_bytes_of(tensors) + num_bytes_of(reply.tensors)
                self._exchanged.called(peer_id, anyio.current_time() - began_s, num_bytes)
                return reply
        except TimeoutError:
            raise CallTimeout(f"{peer_id} did not answer within {timeout_s:.1f} s") from None

    async def _run_connection(self, peer_id: str, callee: PeerID, connection: _Connection) -> None:
        """Dial a peer, and hand out replies until the stream ends."""
        reason: CallError = PeerUnreachable("the transport was closed")
        dialled = False
        try:
            # Nothing but hivemind's client runs in here, and what it raises for a daemon's garbage has no common class.
            with on_network(CONNECT_TIMEOUT_S, errors=(Exception,)):
                _, reader, writer = await self._p2p.call_binary_stream_handler(callee, PROTOCOL)
            dialled = True
            with closing(self._make_stream(reader, writer)) as stream:
                await connection.hand_out_replies(stream, self._hello(self._passes.own_pass), self._passes)
        except CallError as error:
            if isinstance(error, InvalidMessage):
                self._metrics.invalid_messages.labels("frame").inc()
            # A new exception: the traceback of `error` would keep hivemind's sockets open until garbage is collected.
            reason = type(error)(f"{peer_id}: {error}")
            if not dialled:
                self._on_unreachable(peer_id)
        finally:
            # No await between these two: no call may find a connection that has ended.
            del self._connections[peer_id]
            connection.end(reason)

    async def _accept(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one inbound stream. hivemind calls this in a task of its own; a task of this transport serves it."""
        stream = self._make_stream(reader, writer)
        if self._tasks.cancel_scope.cancel_called:  # hivemind's client lives longer than this transport
            stream.close()
            return
        self._tasks.start_soon(self._serve_stream, info.peer_id.to_base58(), stream)

    def _hello(self, shown: bytes) -> bytes:
        body = {"pass": shown, "revocations": self._passes.revocations}
        return Frame(FrameType.HELLO, 0, "", body).head()

    def _make_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> FrameStream:
        return FrameStream(
            reader=reader,
            writer=writer,
            max_payload_bytes=self._max_payload_bytes,
            metrics=self._metrics,
            link=self._link,
        )

    async def _serve_stream(self, peer_id: str, stream: FrameStream) -> None:
        caller = self._callers.setdefault(peer_id, _Caller(peer_id, MAX_PAYLOADS_PER_CALLER * self._max_payload_bytes))
        try:
            async with anyio.create_task_group() as handlers:
                caller.streams.append(handlers.cancel_scope)
                for oldest in caller.streams[:-MAX_STREAMS_PER_CALLER]:
                    oldest.cancel()
                try:
                    shown = await self._welcome(peer_id, stream)
                    await self._read_calls(caller, stream, handlers, shown)
                except InvalidMessage as error:
                    self._metrics.invalid_messages.labels("frame").inc()
                    log.warning("stream_cut peer=%s reason=%s", peer_id, error)
                except PeerUnreachable as error:
                    log.debug("stream_ended peer=%s reason=%s", peer_id, error)
                except NotAdmitted as error:
                    log.debug("turned_away peer=%s reason=%s", peer_id, error)
                    caller.cancel_calls(stream)
                    await self._turn_away(stream, error)
                # No caller can receive the replies of the handlers that are still running.
                handlers.cancel_scope.cancel()
        finally:
            stream.close()
            caller.streams.remove(handlers.cancel_scope)
            if not caller.streams:
                del self._callers[peer_id]

    async def _welcome(self, peer_id: str, stream: FrameStream) -> bytes:
        """Read the first frame of a stream, in which its caller shows its pass; returns the pass.

        Raises:
            InvalidMessage: the frame is another one
            NotAdmitted: the caller may not take part
            PeerUnreachable: none came in time
        """
        with on_network(HELLO_TIMEOUT_S):
            frame = await stream.read_head(MAX_HELLO_BYTES)
        told, shown = revocations_in(frame), (frame.body or {}).get("pass")
        if not isinstance(shown, bytes):
            raise InvalidMessage("the first frame of a stream shows no pass")
        self._passes.check(peer_id, shown)  # to check what a stranger says of others would cost more
        self._passes.learn(told)
        return shown

    async def _turn_away(self, stream: FrameStream, error: NotAdmitted) -> None:
        """Tell a caller why it may not take part."""
        self._metrics.invalid_messages.labels("pass").inc()
        refusal = Frame(FrameType.ERROR, FIRST_CALL, "", error_body(error))
        with suppress(PeerUnreachable):
            # A member leaves by what the run's operator has signed, and not by the word of this peer.
            await stream.send(self._hello(b"") + refusal.head())
            # To close at once would reset the stream, with the refusal that is still on its way.
            await stream.closed_by_other_end(FAREWELL_S)

    async def _read_calls(self, caller: _Caller, stream: FrameStream, handlers: TaskGroup, shown: bytes) -> None:
        """Read frames and start a handler for each call, while the caller's pass holds. Ends only by raising."""
        while True:
            frame = await stream.read_head()
            call = caller.calls.get((stream, frame.call_id))
            if frame.type is FrameType.CALL and call is None:
                self._passes.check(caller.peer_id, shown)
                await handlers.start(self._answer, caller, stream, frame)
            elif frame.type is FrameType.CANCEL and not frame.tensors:
                if call is not None:  # otherwise the CANCEL and the reply have crossed
                    call.cancel()
            else:
                raise InvalidMessage(f"{frame.type.name} {frame.call_id} is out of place")

    async def _answer(
        self, caller: _Caller, stream: FrameStream, frame: Frame, *, task_status: TaskStatus[None]
    ) -> None:
        """Read the tensors of a call and answer it. Reports as started once the stream's next frame can be read."""
        room = caller.room if self._is_member(caller.peer_id) else self._room_of_strangers
        async with caller.under_way((stream, frame.call_id), room, num_bytes_of(frame.tensors)) as scope:
            await stream.read_tensors(frame)
            task_status.started()
            try:
                with scope:
                    head, tensors = await self._run_handler(caller.peer_id, frame)
                if not scope.cancel_called:
                    await stream.send(head, tensors, lambda: not scope.cancel_called)
                    self._exchanged.answered(caller.peer_id, num_bytes_of(frame.tensors) + num_bytes_of(tensors))
            except PeerUnreachable as error:
                self._metrics.lost_replies.inc()
                log.debug("reply_lost peer=%s op=%.40r reason=%s", caller.peer_id, frame.op, error)

    async def _run_handler(self, peer_id: str, frame: Frame) -> tuple[bytes, Sequence[memoryview]]:
        """Answer a call, also if its handler fails. Returns the head and the tensors of the reply's frame."""
        try:
            if self._handler is None:
                raise NotServing("this peer is on its way to another stage")
            reply = await self._handler(peer_id, frame.op, frame.body or {}, frame.tensors)
            return Frame(FrameType.REPLY, frame.call_id, "", reply.body, reply.tensors).head(), reply.tensors
        except CallError as error:
            if isinstance(error, InvalidMessage):
                self._metrics.invalid_messages.labels("body").inc()
                log.warning("invalid_message peer=%s op=%.40r reason=%s", peer_id, frame.op, error)
            answer = error_body(error)
        except Exception:
            # A defect of this program must not end the peer, nor show internals to the caller.
            self._metrics.handler_defects.inc()
            log.exception("handler_failed peer=%s op=%.40r", peer_id, frame.op)
            answer = error_body(CallError("internal error"))
        return Frame(FrameType.ERROR, frame.call_id, "", answer).head(), ()

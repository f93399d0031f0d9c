"""Calls over long-lived raw libp2p streams: one stream per (caller, callee), many calls interleaved on it.

Raw streams rather than hivemind's RPC: unary calls cost six times the CPU per byte and are bounded at 4 MiB, and every
fresh stream starts with a 256 KB window. hivemind's and libp2p's exceptions end here.

What a caller can make this peer hold is bounded; what goes beyond is held back unread. A frame that has begun passes
whole, for half a frame would cost all other calls on its stream, and in bounded time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress

import anyio
import numpy as np
from anyio.abc import TaskGroup, TaskStatus
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, PeerUnreachable
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.transport import CallHandler, Reply, Transport, error_body, error_from_body
from swarm_peer.wire.messages import PREFIX, PROTOCOL, Body, Frame, FrameType, parse_frame, parse_lengths

log = logging.getLogger(__name__)

# libp2p gives up dialling after about this long; a peer in the same city takes milliseconds.
CONNECT_TIMEOUT_S = 10.0
# A frame that has begun has this long, and what its bytes take on the slowest link that is of any use.
FRAME_TIMEOUT_S = 30.0
SLOWEST_BYTES_PER_S = 64e3
# An honest caller has one stream, and a second when it has lost the first and we don't know yet: the oldest one goes.
MAX_STREAMS_PER_CALLER = 2
# Over all its streams. Honest callers stay far below: a peer holds `limits.max_in_flight` microbatches, by default 8.
MAX_CALLS_PER_CALLER = 64
MAX_PAYLOADS_PER_CALLER = 16  # of the longest kind; more if they are shorter
# Read and write in pieces of this size, so that no copy of a whole tensor piles up in asyncio's buffers.
PIECE_BYTES = 1 << 18

# TimeoutError is an OSError; RuntimeError is uvloop's, for a socket that has been closed.
_BROKEN = (OSError, EOFError, P2PDaemonError, RuntimeError)


def _num_bytes(tensors: Sequence[memoryview]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _on_network(timeout_s: float, tensors: Sequence[memoryview] = ()) -> Iterator[None]:
    """Map what goes wrong on a stream to PeerUnreachable, also that it takes longer than it may with its tensors."""
    timeout_s += _num_bytes(tensors) / SLOWEST_BYTES_PER_S
    try:
        with anyio.fail_after(timeout_s):
            yield
    except _BROKEN as error:
        raise PeerUnreachable(f"{error!r:.200} within {timeout_s:.0f} s") from error


class _Stream:
    """One end of a stream: frames in, and whole frames out. PeerUnreachable when it ends, breaks or stalls."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_payload_bytes: int, metrics: PeerMetrics
    ):
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self._max_payload_bytes = max_payload_bytes
        self._metrics = metrics

    async def read_head(self) -> Frame:
        """Wait for the next frame; what its tensors hold is still to be read."""
        with _on_network(math.inf):
            prefix = await self._reader.readexactly(PREFIX.size)
        header_bytes, payload_bytes = parse_lengths(prefix, self._max_payload_bytes)
        with _on_network(FRAME_TIMEOUT_S):
            header = await self._reader.readexactly(header_bytes)
        self._metrics.received_bytes.inc(PREFIX.size + header_bytes)
        # Unlike a bytearray's, this memory is taken as it is filled: to promise much and send nothing pins nothing.
        return parse_frame(header, memoryview(np.empty(payload_bytes, np.uint8)))

    async def read_tensors(self, frame: Frame) -> None:
        with _on_network(FRAME_TIMEOUT_S, frame.tensors):
            for tensor in frame.tensors:
                for start in range(0, tensor.nbytes, PIECE_BYTES):
                    piece = tensor[start : start + PIECE_BYTES]
                    piece[:] = await self._reader.readexactly(piece.nbytes)
        self._metrics.received_bytes.inc(_num_bytes(frame.tensors))

    async def send(
        self, head: bytes, tensors: Sequence[memoryview] = (), wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Write a frame whole, or close the stream. If it is not wanted when its turn comes, return False instead."""
        async with self._turn:
            if not wanted():
                return False
            with ExitStack() as unless_whole, _on_network(FRAME_TIMEOUT_S, tensors):
                unless_whole.callback(self.close)
                self._writer.write(head)
                for tensor in tensors:
                    for start in range(0, tensor.nbytes, PIECE_BYTES):
                        self._writer.write(tensor[start : start + PIECE_BYTES])
                        await self._writer.drain()
                await self._writer.drain()
                unless_whole.pop_all()
        self._metrics.sent_bytes.inc(len(head) + _num_bytes(tensors))
        return True

    def close(self) -> None:
        """At once: a close that writes what is buffered waits for ever for a peer that does not read."""
        self._writer.transport.abort()


class _Connection:
    """The caller's side of a stream to one callee. Calls can be made before it is dialled."""

    def __init__(self, tasks: TaskGroup):
        self._tasks = tasks
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._stream: _Stream | None = None
        self._dialled = anyio.Event()

    async def call(self, body: Body, tensors: Sequence[memoryview]) -> Reply:
        call_id = next(self._ids)
        fields = body.model_dump()
        head = Frame(FrameType.CALL, call_id, fields.pop("op"), fields, tensors).head()
        reply = self._pending[call_id] = asyncio.get_running_loop().create_future()

        async def deliver() -> None:
            """Write the call, and a CANCEL if its caller gives up, which waits for neither."""
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

    async def hand_out_replies(self, stream: _Stream) -> None:
        """Until the stream ends, and it raises why."""
        self._stream = stream
        self._dialled.set()
        while True:
            frame = await stream.read_head()
            await stream.read_tensors(frame)
            reply = self._pending.get(frame.call_id)
            if reply is not None and not reply.done() and frame.type in (FrameType.REPLY, FrameType.ERROR):
                reply.set_result(frame)

    def end(self, reason: CallError) -> None:
        """Fail whatever is still waiting."""
        self._dialled.set()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(reason)


class _Caller:
    """What one caller has under way here, over all its streams."""

    def __init__(self, peer_id: str, max_bytes: int):
        self.peer_id = peer_id
        self.streams: list[anyio.CancelScope] = []
        self.calls: dict[tuple[_Stream, int], anyio.CancelScope] = {}
        self._free_bytes = max_bytes
        self.changed = Signal()

    @asynccontextmanager
    async def room(self, call: tuple[_Stream, int], num_bytes: int) -> AsyncIterator[anyio.CancelScope]:
        """Wait until one more call fits, and hold its place; the scope cancels it."""
        await self.changed.wait_for(lambda: len(self.calls) < MAX_CALLS_PER_CALLER and num_bytes <= self._free_bytes)
        scope = self.calls[call] = anyio.CancelScope()
        self._free_bytes -= num_bytes
        try:
            yield scope
        finally:
            del self.calls[call]
            self._free_bytes += num_bytes
            self.changed.notify()


class P2PTransport(Transport):
    """Calls over the libp2p daemon that the DHT runs, under its identity. Made by `open`."""

    def __init__(self, p2p: P2P, max_payload_bytes: int, metrics: PeerMetrics, tasks: TaskGroup):
        self._p2p = p2p
        self.peer_id = p2p.peer_id.to_base58()
        self._max_payload_bytes = max_payload_bytes
        self._metrics = metrics
        self._tasks = tasks
        self._connections: dict[str, _Connection] = {}
        self._callers: dict[str, _Caller] = {}
        self._handler: CallHandler | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, p2p: P2P, max_payload_bytes: int, metrics: PeerMetrics) -> AsyncIterator[P2PTransport]:
        """Open a transport; its streams close and its handlers end with the context.

        Args:
            p2p: the daemon's client, in this event loop
            max_payload_bytes: longest frame to accept
        """
        async with anyio.create_task_group() as tasks:
            try:
                yield cls(p2p, max_payload_bytes, metrics, tasks)
            finally:
                tasks.cancel_scope.cancel()

    async def serve(self, handler: CallHandler) -> None:
        self._handler = handler
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)

    async def answered(self) -> None:
        while calls := [caller for caller in self._callers.values() if caller.calls]:
            await calls[0].changed.wait_for(lambda caller=calls[0]: not caller.calls)  # type: ignore[misc]

    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        connection = self._connections.get(peer_id)
        if connection is None:
            callee = PeerID.from_base58(peer_id)
            connection = self._connections[peer_id] = _Connection(self._tasks)
            self._tasks.start_soon(self._run_connection, peer_id, callee, connection)
        try:
            with anyio.fail_after(timeout_s):
                return await connection.call(body, tensors)
        except TimeoutError:
            raise CallTimeout(f"{peer_id} did not answer within {timeout_s:.1f} s") from None

    async def _run_connection(self, peer_id: str, callee: PeerID, connection: _Connection) -> None:
        """Dial, and hand out replies until the stream ends."""
        reason: CallError = PeerUnreachable("the transport was closed")
        dialled = False
        try:
            with _on_network(CONNECT_TIMEOUT_S):
                _, reader, writer = await self._p2p.call_binary_stream_handler(callee, PROTOCOL)
            dialled = True
            with closing(_Stream(reader, writer, self._max_payload_bytes, self._metrics)) as stream:
                await connection.hand_out_replies(stream)
        except CallError as error:
            if isinstance(error, InvalidMessage):
                self._metrics.invalid_messages.labels("frame").inc()
            # A new one: with its traceback, `error` would keep hivemind's sockets open until the garbage is collected.
            reason = type(error)(f"{peer_id}: {error}")
            if not dialled:
                self.unreachable(peer_id)
        finally:
            # In one go: no call may find a connection that has ended.
            del self._connections[peer_id]
            connection.end(reason)

    async def _accept(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one inbound stream. hivemind runs this in a task of its own; ours is moved into our task group."""
        stream = _Stream(reader, writer, self._max_payload_bytes, self._metrics)
        self._tasks.start_soon(self._serve_stream, info.peer_id.to_base58(), stream)

    async def _serve_stream(self, peer_id: str, stream: _Stream) -> None:
        caller = self._callers.setdefault(peer_id, _Caller(peer_id, MAX_PAYLOADS_PER_CALLER * self._max_payload_bytes))
        try:
            async with anyio.create_task_group() as handlers:
                caller.streams.append(handlers.cancel_scope)
                for oldest in caller.streams[:-MAX_STREAMS_PER_CALLER]:
                    oldest.cancel()
                try:
                    await self._read_calls(caller, stream, handlers)
                except InvalidMessage as error:
                    self._metrics.invalid_messages.labels("frame").inc()
                    log.warning("stream_cut peer=%s reason=%s", peer_id, error)
                except PeerUnreachable as error:
                    log.debug("stream_ended peer=%s reason=%s", peer_id, error)
                # Nobody can receive the replies of what is still running.
                handlers.cancel_scope.cancel()
        finally:
            stream.close()
            caller.streams.remove(handlers.cancel_scope)
            if not caller.streams:
                del self._callers[peer_id]

    async def _read_calls(self, caller: _Caller, stream: _Stream, handlers: TaskGroup) -> None:
        while True:
            frame = await stream.read_head()
            call = caller.calls.get((stream, frame.call_id))
            if frame.type is FrameType.CALL and call is None:
                await handlers.start(self._answer, caller, stream, frame)
            elif frame.type is FrameType.CANCEL and not frame.tensors:
                if call is not None:  # otherwise it crossed the reply
                    call.cancel()
            else:
                raise InvalidMessage(f"{frame.type.name} {frame.call_id} is out of place")

    async def _answer(self, caller: _Caller, stream: _Stream, frame: Frame, *, task_status: TaskStatus[None]) -> None:
        """Read a call and answer it. Has started when the stream's next frame can be read."""
        async with caller.room((stream, frame.call_id), _num_bytes(frame.tensors)) as scope:
            await stream.read_tensors(frame)
            task_status.started()
            try:
                with scope:
                    head, tensors = await self._run_handler(caller.peer_id, frame)
                if not scope.cancel_called:
                    await stream.send(head, tensors, lambda: not scope.cancel_called)
            except PeerUnreachable as error:
                self._metrics.lost_replies.inc()
                log.debug("reply_lost peer=%s op=%.40r reason=%s", caller.peer_id, frame.op, error)

    async def _run_handler(self, peer_id: str, frame: Frame) -> tuple[bytes, Sequence[memoryview]]:
        """Returns the reply's head and tensors."""
        try:
            assert self._handler is not None, "streams come in only after serve()"
            reply = await self._handler(peer_id, frame.op, frame.body or {}, frame.tensors)
            return Frame(FrameType.REPLY, frame.call_id, "", reply.body, reply.tensors).head(), reply.tensors
        except CallError as error:
            if isinstance(error, InvalidMessage):
                self._metrics.invalid_messages.labels("body").inc()
                log.warning("invalid_message peer=%s op=%.40r reason=%s", peer_id, frame.op, error)
            answer = error_body(error)
        except Exception:
            # A defect of ours must not take the peer down, nor show its insides to the caller.
            self._metrics.handler_defects.inc()
            log.exception("handler_failed peer=%s op=%.40r", peer_id, frame.op)
            answer = error_body(CallError("internal error"))
        return Frame(FrameType.ERROR, frame.call_id, "", answer).head(), ()

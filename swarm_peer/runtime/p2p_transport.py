"""Calls over long-lived raw libp2p streams: one stream per (caller, callee), many calls interleaved on it.

Raw streams rather than hivemind's RPC: unary calls cost six times the CPU per byte and are bounded at 4 MiB, and every
fresh stream starts with a 256 KB window. hivemind's and libp2p's exceptions end here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, DispatchFailure, P2PDaemonError

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, PeerUnreachable
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.transport import CallHandler, Reply, Transport, error_body, error_from_body
from swarm_peer.wire.messages import PREFIX, PROTOCOL, Body, Frame, FrameType, parse_frame, parse_lengths

log = logging.getLogger(__name__)

# libp2p gives up dialling after about this long; a peer in the same city takes milliseconds.
CONNECT_TIMEOUT_S = 10.0
# A callee that does not take its reply within this time has stalled; its stream is cut.
REPLY_WRITE_TIMEOUT_S = 60.0
# Calls that one caller may have under way here. Honest ones stay far below; more are held back unread.
MAX_CALLS_PER_STREAM = 64
# Read and write in pieces of this size, so that no copy of a whole tensor piles up in asyncio's buffers.
PIECE_BYTES = 1 << 18

_BROKEN = (OSError, EOFError, asyncio.IncompleteReadError, ControlFailure, DispatchFailure, P2PDaemonError)


async def _read_frame(reader: asyncio.StreamReader, max_payload_bytes: int, metrics: PeerMetrics) -> Frame:
    prefix = await reader.readexactly(PREFIX.size)
    header_bytes, payload_bytes = parse_lengths(prefix, max_payload_bytes)
    header = await reader.readexactly(header_bytes)
    payload = memoryview(bytearray(payload_bytes))
    filled = 0
    while filled < payload_bytes:
        piece = await reader.read(min(PIECE_BYTES, payload_bytes - filled))
        if not piece:
            raise EOFError(f"the stream ended after {filled} of {payload_bytes} bytes")
        payload[filled : filled + len(piece)] = piece
        filled += len(piece)
    metrics.received_bytes.inc(PREFIX.size + header_bytes + payload_bytes)
    return parse_frame(header, payload)


class _Stream:
    """One end of a stream: whole frames out, one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, metrics: PeerMetrics):
        self.reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()
        self._metrics = metrics
        self.broken = False

    async def send(self, frame: Frame) -> None:
        """Write a frame. If it is cut short by cancellation the stream is unusable, and is closed."""
        head = frame.head()
        async with self._lock:
            if self.broken:
                raise PeerUnreachable("the stream broke")
            try:
                self._writer.write(head)
                for tensor in frame.tensors:
                    for start in range(0, tensor.nbytes, PIECE_BYTES):
                        self._writer.write(tensor[start : start + PIECE_BYTES])
                        await self._writer.drain()
                await self._writer.drain()
            except RuntimeError as error:  # uvloop: the transport was closed meanwhile
                self.close()
                raise PeerUnreachable("the stream broke") from error
            except BaseException:
                self.close()
                raise
        self._metrics.sent_bytes.inc(len(head) + sum(tensor.nbytes for tensor in frame.tensors))

    def close(self) -> None:
        self.broken = True
        with suppress(OSError, RuntimeError):
            self._writer.close()


class _Connection:
    """The caller's side of a stream to one callee."""

    def __init__(self, stream: _Stream):
        self.stream = stream
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Frame]] = {}

    async def call(self, body: Body, tensors: Sequence[memoryview]) -> Reply:
        call_id = next(self._ids)
        fields = body.model_dump()
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            await self.stream.send(Frame(FrameType.CALL, call_id, fields.pop("op"), fields, tensors))
            frame = await future
        except asyncio.CancelledError:
            if not self.stream.broken:
                with anyio.CancelScope(shield=True), anyio.move_on_after(1.0), suppress(CallError, *_BROKEN):
                    await self.stream.send(Frame(FrameType.CANCEL, call_id))
            raise
        finally:
            del self._pending[call_id]
        if frame.type is FrameType.ERROR:
            raise error_from_body(frame.body)
        return Reply(frame.body or {}, frame.tensors)

    async def read_replies(self, max_payload_bytes: int, metrics: PeerMetrics) -> None:
        """Hand out replies until the stream ends; then fail whatever is still waiting."""
        reason: Exception = PeerUnreachable("the stream was closed")
        try:
            while True:
                frame = await _read_frame(self.stream.reader, max_payload_bytes, metrics)
                future = self._pending.get(frame.call_id)
                if future is not None and not future.done() and frame.type in (FrameType.REPLY, FrameType.ERROR):
                    future.set_result(frame)
        except InvalidMessage as error:
            metrics.invalid_messages.labels("frame").inc()
            reason = error
        except _BROKEN as error:
            reason = PeerUnreachable(f"the stream broke: {error!r:.100}")
        finally:
            self.stream.close()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(reason)


class P2PTransport(Transport):
    """Calls over the libp2p daemon that the DHT runs, under its identity. Made by `open`."""

    def __init__(self, p2p: P2P, max_payload_bytes: int, metrics: PeerMetrics, tasks: anyio.abc.TaskGroup):
        self._p2p = p2p
        self.peer_id = p2p.peer_id.to_base58()
        self._max_payload_bytes = max_payload_bytes
        self._metrics = metrics
        self._tasks = tasks
        self._connections: dict[str, _Connection] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self._streams: set[_Stream] = set()
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
            transport = cls(p2p, max_payload_bytes, metrics, tasks)
            try:
                yield transport
            finally:
                tasks.cancel_scope.cancel()
                for stream in [*transport._streams, *(c.stream for c in transport._connections.values())]:
                    stream.close()

    async def serve(self, handler: CallHandler) -> None:
        self._handler = handler
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)

    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        try:
            with anyio.fail_after(timeout_s):
                connection = await self._connect(peer_id)
                return await connection.call(body, tensors)
        except TimeoutError:
            raise CallTimeout(f"{peer_id} did not answer within {timeout_s:.1f} s") from None
        except _BROKEN as error:
            raise PeerUnreachable(f"cannot reach {peer_id}: {error!r:.200}") from error

    async def _connect(self, peer_id: str) -> _Connection:
        async with self._dialling.setdefault(peer_id, asyncio.Lock()):
            known = self._connections.get(peer_id)
            if known is not None and not known.stream.broken:
                return known
            with anyio.move_on_after(CONNECT_TIMEOUT_S) as scope:
                _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), PROTOCOL)
            if scope.cancelled_caught:
                raise PeerUnreachable(f"no connection to {peer_id} within {CONNECT_TIMEOUT_S:.0f} s")
            connection = _Connection(_Stream(reader, writer, self._metrics))
            self._connections[peer_id] = connection
            self._tasks.start_soon(connection.read_replies, self._max_payload_bytes, self._metrics)
            return connection

    async def _accept(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one inbound stream. hivemind runs this in a task of its own; ours is moved into our task group."""
        self._tasks.start_soon(self._serve_stream, info.peer_id.to_base58(), _Stream(reader, writer, self._metrics))

    async def _serve_stream(self, caller: str, stream: _Stream) -> None:
        calls: dict[int, anyio.CancelScope] = {}
        room = asyncio.Semaphore(MAX_CALLS_PER_STREAM)
        self._streams.add(stream)
        try:
            async with anyio.create_task_group() as handlers:
                try:
                    while True:
                        frame = await _read_frame(stream.reader, self._max_payload_bytes, self._metrics)
                        if frame.type is FrameType.CANCEL and frame.call_id in calls:
                            calls[frame.call_id].cancel()
                        elif frame.type is FrameType.CALL and frame.call_id not in calls:
                            await room.acquire()
                            calls[frame.call_id] = anyio.CancelScope()
                            handlers.start_soon(self._answer, caller, stream, frame, calls, room)
                except InvalidMessage as error:
                    self._metrics.invalid_messages.labels("frame").inc()
                    log.warning("stream_cut peer=%s reason=%s", caller, error)
                except _BROKEN:
                    log.debug("stream_ended peer=%s", caller)
                # Nobody can receive the replies of what is still running.
                handlers.cancel_scope.cancel()
        finally:
            self._streams.discard(stream)
            stream.close()

    async def _answer(
        self,
        caller: str,
        stream: _Stream,
        frame: Frame,
        calls: dict[int, anyio.CancelScope],
        room: asyncio.Semaphore,
    ) -> None:
        try:
            with calls[frame.call_id]:
                answer = await self._run_handler(caller, frame)
                with anyio.fail_after(REPLY_WRITE_TIMEOUT_S):
                    await stream.send(answer)
        except (TimeoutError, CallError, *_BROKEN) as error:
            self._metrics.lost_replies.inc()
            log.debug("reply_lost peer=%s op=%s reason=%r", caller, frame.op, error)
            stream.close()
        finally:
            del calls[frame.call_id]
            room.release()

    async def _run_handler(self, caller: str, frame: Frame) -> Frame:
        try:
            assert self._handler is not None, "streams come in only after serve()"
            reply = await self._handler(caller, frame.op, frame.body or {}, frame.tensors)
            return Frame(FrameType.REPLY, frame.call_id, "", reply.body, reply.tensors)
        except CallError as error:
            if isinstance(error, InvalidMessage):
                self._metrics.invalid_messages.labels("body").inc()
                log.warning("invalid_message peer=%s op=%s reason=%s", caller, frame.op[:40], error)
            return Frame(FrameType.ERROR, frame.call_id, "", error_body(error))
        except Exception:
            # A defect of ours must not take the peer down, nor show its insides to the caller.
            self._metrics.handler_defects.inc()
            log.exception("handler_failed peer=%s op=%s", caller, frame.op[:40])
            return Frame(FrameType.ERROR, frame.call_id, "", error_body(CallError("internal error")))

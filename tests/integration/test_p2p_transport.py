"""Calls over libp2p between two daemons, of whose peers one lies, stalls or gives up."""

from __future__ import annotations

import functools
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from hivemind.p2p import P2P, PeerID

from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NotAdmitted, PeerUnreachable
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.network import frame_stream, p2p_transport
from swarm_peer.runtime.network.link import Link
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.wire.frames import PREFIX, Frame, FrameType, parse_frame
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import PROTOCOL, Body
from swarm_peer.wire.passes import Invite, Revocations
from swarm_peer.wire.records import seal

MAX_PAYLOAD_BYTES = 2**20
EVERYBODY = PassChecker(None, clock=SystemClock())
HELLO = Frame(FrameType.HELLO, 0, "", {"pass": b"", "revocations": b""})
# More than the sockets and libp2p's windows take in on the way: it is not written before its reader reads.
LARGE = memoryview(bytes(64 * 2**20))
# A test that waits this long has failed: nothing else here takes a second.
PATIENCE_S = 20


def on_uvloop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in the event loop that peers have."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def in_time() -> None:
            with anyio.fail_after(PATIENCE_S):
                await test(**fixtures)

        run_loop(in_time)

    return run


class Say(Body):
    op: str


class Service:
    """A handler: `echo` gives back what came, `large` much, `wait` nothing before `go`, `defect` what cannot travel.

    Attributes:
        begun: how often each operation has been called
        ended: and how often it has returned or was cancelled
    """

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.changed = Condition()
        self.go = anyio.Event()

    async def __call__(self, caller: str, op: str, body: dict[str, Any], tensors: Sequence[memoryview]) -> Reply:
        self.begun[op] += 1
        self.changed.notify()
        try:
            if op == "wait":
                await self.go.wait()
            if op == "defect":
                return Reply({"what": object()})
            return Reply({}, (LARGE,) if op == "large" else tensors)
        finally:
            self.ended[op] += 1
            self.changed.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.changed.wait_for(condition)


class RawStream:
    """A stream whose one end says what it likes."""

    def __init__(self, info: Any, reader: Any, writer: Any):
        self.reader = reader
        self.writer = writer

    async def write(self, *frames: Frame | bytes) -> None:
        for frame in frames:
            self.writer.write(frame if isinstance(frame, bytes) else on_the_wire(frame))
            await self.writer.drain()

    async def read(self) -> Frame:
        header_bytes, payload_bytes = PREFIX.unpack(await self.reader.readexactly(PREFIX.size))
        return await self.read_rest(header_bytes, payload_bytes)

    async def read_rest(self, header_bytes: int, payload_bytes: int) -> Frame:
        header = await self.reader.readexactly(header_bytes)
        return parse_frame(header, memoryview(await self.reader.readexactly(payload_bytes)))

    async def ended(self) -> None:
        assert await self.reader.read() == b""


def on_the_wire(frame: Frame) -> bytes:
    return frame.head() + b"".join(frame.tensors)


def call(op: str, call_id: int, num_bytes: int = 0) -> Frame:
    return Frame(FrameType.CALL, call_id, op, {}, (memoryview(bytes(num_bytes)),) if num_bytes else ())


def cancel(call_id: int) -> Frame:
    return Frame(FrameType.CANCEL, call_id)


def held(transport: P2PTransport) -> int:
    """What a transport keeps of streams, callers, callees and calls."""
    return sum(len(value) for value in vars(transport).values() if isinstance(value, dict | set))


async def eventually(condition: Callable[[], bool]) -> None:
    """For what nobody tells of."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.01)


@asynccontextmanager
async def daemon(*others: P2P) -> AsyncIterator[P2P]:
    peers = [address for other in others for address in await other.get_visible_maddrs()]
    p2p = await P2P.create(initial_peers=peers or None, nat_port_map=False, auto_nat=False, use_relay=False)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_bytes(kind: str) -> int:
    """What this process uses (VmRSS), or has used at most (VmHWM)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].removesuffix("kB")) * 1024


class Callee:
    """A transport that serves, and a daemon that calls it."""

    def __init__(self, transport: P2PTransport, metrics: PeerMetrics, service: Service, caller: P2P):
        self.transport = transport
        self.metrics = metrics
        self.service = service
        self.caller = caller

    async def raw_stream(self, caller: P2P | None = None, hello: Frame = HELLO) -> RawStream:
        peer_id = PeerID.from_base58(self.transport.peer_id)
        stream = RawStream(*await (caller or self.caller).call_binary_stream_handler(peer_id, PROTOCOL))
        await stream.write(hello)
        return stream

    async def still_serves(self) -> bool:
        stream = await self.raw_stream()
        await stream.write(call("echo", 0, 100))
        return (await stream.read()).type is FrameType.REPLY


@asynccontextmanager
async def serving(max_payload_bytes: int = MAX_PAYLOAD_BYTES, passes: PassChecker = EVERYBODY) -> AsyncIterator[Callee]:
    metrics, service = PeerMetrics(), Service()
    async with (
        daemon() as p2p,
        daemon(p2p) as caller,
        P2PTransport.open(p2p, passes=passes, max_payload_bytes=max_payload_bytes, metrics=metrics) as transport,
    ):
        await transport.serve(service)
        yield Callee(transport, metrics, service, caller)


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[P2PTransport, str, Callable[[], Awaitable[RawStream]]]]:
    """A transport, the id of a callee, and the streams that the callee accepts, their first frames read."""
    send, receive = anyio.create_memory_object_stream[RawStream](10)

    async def accept(*ends: Any) -> None:
        stream = RawStream(*ends)
        assert (await stream.read()).type is FrameType.HELLO
        send.send_nowait(stream)

    async with (
        send,
        receive,
        daemon() as callee,
        daemon(callee) as p2p,
        P2PTransport.open(
            p2p, passes=EVERYBODY, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=PeerMetrics()
        ) as transport,
    ):
        await callee.add_binary_stream_handler(PROTOCOL, accept)
        yield transport, callee.peer_id.to_base58(), receive.receive


# --- what one caller can make a callee hold ---------------------------------------------------------------------------


@on_uvloop
async def test_a_caller_that_comes_back_is_served_and_its_oldest_stream_ends() -> None:
    async with serving() as callee:
        service, streams = callee.service, []
        for number in range(3):
            streams.append(await callee.raw_stream())
            await streams[-1].write(call("wait", 0))
            await service.until(lambda number=number: service.begun["wait"] == number + 1)  # type: ignore[misc]
        await streams[0].ended()
        await service.until(lambda: service.ended["wait"] == 1)
        service.go.set()
        assert [(await stream.read()).type for stream in streams[1:]] == [FrameType.REPLY] * 2


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [("MAX_PAYLOADS_PER_CALLER", MAX_PAYLOAD_BYTES), ("MAX_CALLS_PER_CALLER", 10)]
)
@on_uvloop
async def test_calls_beyond_a_callers_share_wait_unread(
    limit: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_transport, limit, 3)
    async with serving() as callee, anyio.create_task_group() as tasks:
        service = callee.service
        streams = [await callee.raw_stream(), await callee.raw_stream()]
        for stream in streams:
            tasks.start_soon(stream.write, call("wait", 0, num_bytes), call("wait", 1, num_bytes))
        await service.until(lambda: service.begun["wait"] == 3)
        with anyio.move_on_after(0.5) as waited:
            await service.until(lambda: service.begun["wait"] > 3)
        assert waited.cancelled_caught, "the fourth call was let in"
        service.go.set()
        for stream in streams:
            assert {(await stream.read()).call_id for _ in range(2)} == {0, 1}


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [("MAX_PAYLOADS_PER_CALLER", MAX_PAYLOAD_BYTES), ("MAX_CALLS_PER_CALLER", 10)]
)
@on_uvloop
async def test_all_strangers_together_get_the_room_of_one_caller(
    limit: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_transport, limit, 3)
    members: set[str] = set()
    async with serving() as callee, anyio.create_task_group() as tasks:
        service = callee.service
        await callee.transport.serve(service, is_member=members.__contains__)
        async with daemon(callee.transport._p2p) as other, daemon(callee.transport._p2p) as member:
            strangers = [await callee.raw_stream(), await callee.raw_stream(other)]
            for stream in strangers:
                tasks.start_soon(stream.write, call("wait", 0, num_bytes), call("wait", 1, num_bytes))
            await service.until(lambda: service.begun["wait"] == 3)
            with anyio.move_on_after(0.5) as waited:
                await service.until(lambda: service.begun["wait"] > 3)
            assert waited.cancelled_caught, "the fourth call was let in"
            members.add(member.peer_id.to_base58())
            stream = await callee.raw_stream(member)
            await stream.write(call("echo", 0, num_bytes))
            assert (await stream.read()).type is FrameType.REPLY
            service.go.set()
            for stream in strangers:
                assert {(await stream.read()).call_id for _ in range(2)} == {0, 1}


FULL = on_the_wire(call("echo", 0, MAX_PAYLOAD_BYTES))


@on_uvloop
async def test_a_frame_that_stalls_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_stream, "FRAME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(frame_stream, "SLOWEST_BYTES_PER_S", 10 * MAX_PAYLOAD_BYTES)
    async with serving() as callee:
        for sent in (PREFIX.size, PREFIX.size + 3, len(FULL) - MAX_PAYLOAD_BYTES, len(FULL) - 1):
            stream = await callee.raw_stream()
            await stream.write(FULL[:sent])
            await stream.ended()
            assert await callee.still_serves(), sent


@on_uvloop
async def test_a_slow_link_has_longer_for_a_longer_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_stream, "FRAME_TIMEOUT_S", 0.1)
    async with serving() as callee:
        stream = await callee.raw_stream()
        for start in range(0, len(FULL), len(FULL) // 4):
            await anyio.sleep(0.1)
            await stream.write(FULL[start : start + len(FULL) // 4])
        assert (await stream.read()).type is FrameType.REPLY


@on_uvloop
async def test_a_mere_promise_to_send_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_stream, "FRAME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(frame_stream, "SLOWEST_BYTES_PER_S", 2**40)
    async with serving(max_payload_bytes=2**28) as callee:
        CLEAR_REFS.write_text("5")  # noqa: ASYNC240 (no disk: it sets the peak to what is in use)
        before = memory_bytes("VmRSS")
        stream = await callee.raw_stream()
        await stream.write(call("echo", 0, 2**28).head(), bytes(1000))
        await stream.ended()
        assert memory_bytes("VmHWM") - before < 2**26


@on_uvloop
async def test_a_caller_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_stream, "FRAME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(frame_stream, "SLOWEST_BYTES_PER_S", 2**30)
    async with serving() as callee:
        stream = await callee.raw_stream()
        await stream.write(call("large", 0), call("large", 1))
        await eventually(lambda: callee.metrics.lost_replies._value.get() > 0)
        await eventually(lambda: held(callee.transport) == 0)
        assert await callee.still_serves()


HOSTILE = {
    "too long": PREFIX.pack(10, MAX_PAYLOAD_BYTES + 1),
    "header too long": PREFIX.pack(2**30, 0),
    "no msgpack": PREFIX.pack(4, 0) + struct.pack("!I", 0xC1C1C1C1),
    "no call": PREFIX.pack(1, 0) + b"\x90",
    "the same id twice": on_the_wire(call("wait", 7)) + on_the_wire(call("wait", 7)),
    "cancel with a payload": on_the_wire(Frame(FrameType.CANCEL, 1, tensors=(memoryview(on_the_wire(cancel(1))),))),
    "reply from a caller": on_the_wire(Frame(FrameType.REPLY, 1)),
    "error from a caller": on_the_wire(Frame(FrameType.ERROR, 1)),
}


@on_uvloop
async def test_a_frame_out_of_place_ends_its_stream() -> None:
    async with serving() as callee:
        for number, (name, data) in enumerate(HOSTILE.items(), 1):
            stream = await callee.raw_stream()
            await stream.write(data)
            await stream.ended()
            assert callee.metrics.invalid_messages.labels("frame")._value.get() == number, name
            assert await callee.still_serves(), name


@on_uvloop
async def test_a_reply_that_cannot_travel_is_a_defect_of_one_call(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        serving() as callee,
        P2PTransport.open(
            callee.caller, passes=EVERYBODY, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=PeerMetrics()
        ) as transport,
    ):
        with pytest.raises(CallError, match="internal error"):
            await transport.call(callee.transport.peer_id, Say(op="defect"), timeout_s=10)
        assert callee.metrics.handler_defects._value.get() == 1
        await transport.call(callee.transport.peer_id, Say(op="echo"), timeout_s=10)


@on_uvloop
async def test_what_is_exchanged_with_each_neighbour_is_counted() -> None:
    async with (
        serving() as callee,
        P2PTransport.open(
            callee.caller, passes=EVERYBODY, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=PeerMetrics()
        ) as transport,
    ):
        peer_id = callee.transport.peer_id
        assert transport.busiest(6) == ()
        began_s = time.monotonic()
        for _ in range(3):
            await transport.call(peer_id, Say(op="echo"), (memoryview(bytes(1000)),), timeout_s=10)  # both ways
        [found] = transport.busiest(6)
        seconds = time.monotonic() - began_s
        assert found.peer_id == peer_id
        assert 0 <= found.round_trip_s <= seconds + 0.001, "the clock of an event loop counts milliseconds"
        assert found.bytes_per_s > 0
        assert callee.transport.busiest(6) == (), "it has called nobody"


LONG_HELLO = Frame(FrameType.HELLO, 0, "", {"pass": b"", "revocations": bytes(2**15)})


@pytest.mark.parametrize("first", [call("echo", 0), LONG_HELLO], ids=["call", "long"])
@on_uvloop
async def test_a_stream_begins_with_a_pass(first: Frame) -> None:
    async with serving() as callee:
        peer_id = PeerID.from_base58(callee.transport.peer_id)
        stream = RawStream(*await callee.caller.call_binary_stream_handler(peer_id, PROTOCOL))
        await stream.write(first)
        await stream.ended()
        assert callee.metrics.invalid_messages.labels("frame")._value.get() == 1
        assert not callee.service.begun


RUN_KEY = Identity.generate()
INVITE = Invite.issue(RUN_KEY, (), label="friends", expires=2**39, at_once=9)


@asynccontextmanager
async def caller_with(
    own_pass: bytes, callee: Callee
) -> AsyncIterator[tuple[PassChecker, Callable[[], Awaitable[Reply]]]]:
    """Its checker, and a call of the callee."""
    passes = PassChecker(RUN_KEY.peer_id, clock=SystemClock(), own_pass=own_pass)
    options: dict[str, Any] = {"max_payload_bytes": MAX_PAYLOAD_BYTES, "metrics": PeerMetrics()}
    async with P2PTransport.open(callee.caller, passes=passes, **options) as transport:
        yield passes, lambda: transport.call(callee.transport.peer_id, Say(op="echo"), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("whose", ["nobody's", "another's"])
@on_uvloop
async def test_who_shows_no_pass_is_told_so_and_not_served(whose: str) -> None:
    async with serving(passes=PassChecker(RUN_KEY.peer_id, clock=SystemClock())) as callee:
        own_pass = INVITE.pass_for(callee.transport.peer_id) if whose == "another's" else b""
        async with caller_with(own_pass, callee) as (_, echo):
            with pytest.raises(NotAdmitted):
                await echo()
        assert not callee.service.begun
        assert callee.metrics.invalid_messages.labels("pass")._value.get() == 1


@on_uvloop
async def test_a_stranger_keeps_no_stream_though_it_calls_nothing() -> None:
    async with serving(passes=PassChecker(RUN_KEY.peer_id, clock=SystemClock())) as callee:
        stream = await callee.raw_stream()
        assert [(await stream.read()).type for _ in range(2)] == [FrameType.HELLO, FrameType.ERROR]
        await stream.ended()


@on_uvloop
async def test_a_pass_holds_until_it_is_revoked_also_on_a_stream_that_is_open() -> None:
    checker = PassChecker(RUN_KEY.peer_id, clock=SystemClock())
    async with serving(passes=checker) as callee:
        me = callee.caller.peer_id.to_base58()
        async with caller_with(INVITE.pass_for(me), callee) as (passes, echo):
            await echo()
            revoked = Revocations(serial=1, tickets=(INVITE.key.peer_id,), peers=())
            checker.learn(seal(revoked, RUN_KEY.peer_id, RUN_KEY))
            with pytest.raises(CallError):
                await echo()
            assert callee.service.begun["echo"] == 1
            with pytest.raises(NotAdmitted, match="revoked"):  # by what the run key has signed
                passes.check_own(me)


@on_uvloop
async def test_the_running_calls_of_a_revoked_caller_end_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_transport, "FAREWELL_S", float("inf"))
    checker = PassChecker(RUN_KEY.peer_id, clock=SystemClock())
    async with serving(passes=checker) as callee:
        shown = INVITE.pass_for(callee.caller.peer_id.to_base58())
        stream = await callee.raw_stream(hello=Frame(FrameType.HELLO, 0, "", {"pass": shown, "revocations": b""}))
        await stream.write(call("wait", 0))
        await callee.service.until(lambda: callee.service.begun["wait"] == 1)
        checker.learn(seal(Revocations(serial=1, tickets=(INVITE.key.peer_id,), peers=()), RUN_KEY.peer_id, RUN_KEY))
        await stream.write(call("echo", 1))
        await callee.service.until(lambda: callee.service.ended["wait"] == 1)
        stream.writer.close()
    assert not callee.service.begun["echo"]


# --- calls that are given up ------------------------------------------------------------------------------------------


@on_uvloop
async def test_a_stream_to_a_transport_that_is_closed_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """hivemind's client goes on taking streams for it, until the peer has left the DHT."""
    async with daemon() as p2p, daemon(p2p) as caller:
        metrics, service = PeerMetrics(), Service()
        async with P2PTransport.open(
            p2p, passes=EVERYBODY, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=metrics
        ) as transport:
            await transport.serve(service)
        callee = PeerID.from_base58(transport.peer_id)
        _, reader, _ = await caller.call_binary_stream_handler(callee, PROTOCOL)
        with suppress(ConnectionError):
            assert await reader.read() == b""
    assert "Traceback" not in caplog.text
    assert not service.begun


@on_uvloop
async def test_a_cancelled_call_ends_its_handler_and_no_other() -> None:
    async with serving() as callee:
        service, stream = callee.service, await callee.raw_stream()
        await stream.write(call("wait", 1), call("wait", 2), cancel(1), cancel(5))
        await service.until(lambda: service.ended["wait"] == 1)
        service.go.set()
        assert (await stream.read()).call_id == 2


@on_uvloop
async def test_a_reply_that_has_begun_is_finished_and_one_that_has_not_is_dropped() -> None:
    async with serving() as callee:
        service, stream = callee.service, await callee.raw_stream()
        await stream.write(call("large", 1))
        lengths = PREFIX.unpack(await stream.reader.readexactly(PREFIX.size))
        await stream.write(call("echo", 2))
        await service.until(lambda: service.ended["echo"] == 1)
        await stream.write(cancel(1), cancel(2), call("wait", 3))
        await service.until(lambda: service.begun["wait"] == 1)  # so both CANCELs have been read
        large = await stream.read_rest(*lengths)
        assert (large.type, large.call_id, large.tensors[0].nbytes) == (FrameType.REPLY, 1, LARGE.nbytes)
        service.go.set()
        assert (await stream.read()).call_id == 3


@on_uvloop
async def test_a_caller_gives_up_in_time_and_costs_its_neighbours_nothing() -> None:
    replies: list[Reply] = []
    async with calling() as (transport, callee, accept), anyio.create_task_group() as tasks:

        async def neighbour() -> None:
            replies.append(await transport.call(callee, Say(op="neighbour"), timeout_s=PATIENCE_S))

        tasks.start_soon(neighbour)
        stream = await accept()
        first = await stream.read()
        begin = anyio.current_time()
        with pytest.raises(CallTimeout):  # while its frame is being written
            await transport.call(callee, Say(op="large"), (LARGE,), timeout_s=0.3)
        with pytest.raises(CallTimeout):  # while it waits for its turn
            await transport.call(callee, Say(op="late"), timeout_s=0.1)
        assert anyio.current_time() - begin < 2
        large, then = await stream.read(), await stream.read()
        assert (large.op, large.tensors[0].nbytes) == ("large", LARGE.nbytes)
        assert (then.type, then.call_id) == (FrameType.CANCEL, large.call_id)
        await stream.write(Frame(FrameType.REPLY, first.call_id, "", {"answer": 1}))
    assert [reply.body for reply in replies] == [{"answer": 1}]


# --- connections ------------------------------------------------------------------------------------------------------


@on_uvloop
async def test_calls_at_once_share_a_stream_and_it_is_dialled_anew_when_it_has_broken() -> None:
    async with calling() as (transport, callee, accept):
        for _ in range(2):
            failures: list[PeerUnreachable] = []

            async def fail(failures: list[PeerUnreachable] = failures) -> None:
                with pytest.raises(PeerUnreachable) as error:
                    await transport.call(callee, Say(op="echo"), timeout_s=PATIENCE_S)
                failures.append(error.value)

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(fail)
                stream = await accept()
                assert sorted([(await stream.read()).call_id for _ in range(5)]) == [0, 1, 2, 3, 4]
                stream.writer.close()
            assert len(failures) == 5
            assert held(transport) == 0


@on_uvloop
async def test_nothing_is_kept_of_peers_that_cannot_be_reached() -> None:
    async with calling() as (transport, _, _):
        for _ in range(3):
            nobody = Identity.generate().peer_id
            with pytest.raises(PeerUnreachable, match=nobody):
                await transport.call(nobody, Say(op="echo"), timeout_s=PATIENCE_S)
        assert held(transport) == 0


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (on_the_wire(Frame(FrameType.REPLY, 0, tensors=(memoryview(bytes(100)),)))[:-1], PeerUnreachable),
        (PREFIX.pack(1, 0) + b"\x90", InvalidMessage),
    ],
    ids=["stalls", "no reply"],
)
@on_uvloop
async def test_a_callee_whose_reply_is_none_is_left(
    reply: bytes, error: type[CallError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_stream, "FRAME_TIMEOUT_S", 0.1)
    async with calling() as (transport, callee, accept), anyio.create_task_group() as tasks:

        async def answer() -> None:
            stream = await accept()
            await stream.read()
            await stream.write(reply)
            await stream.ended()

        tasks.start_soon(answer)
        with pytest.raises(error, match=callee):
            await transport.call(callee, Say(op="echo"), timeout_s=PATIENCE_S / 2)
        assert held(transport) == 0


# --- what an owner lends of the link ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["upload", "download"])
@on_uvloop
async def test_a_limited_link_carries_so_much_and_small_calls_do_not_wait_for_all_of_it(direction: str) -> None:
    mbps, num_calls, num_bytes = 32.0, 12, MAX_PAYLOAD_BYTES
    clock = SystemClock()
    link = Link.of(*((mbps, None) if direction == "upload" else (None, mbps)), clock=clock)
    took_s: list[float] = []
    async with (
        serving() as callee,
        P2PTransport.open(
            callee.caller, passes=EVERYBODY, max_payload_bytes=num_bytes, metrics=PeerMetrics(), link=link
        ) as transport,
    ):
        peer_id, tensors = callee.transport.peer_id, (memoryview(bytes(num_bytes)),)

        async def say(op: str, tensors: Sequence[memoryview] = ()) -> None:
            await transport.call(peer_id, Say(op=op), tensors, timeout_s=PATIENCE_S)

        async def ask_again_and_again() -> None:
            while True:
                began_s = clock.monotonic_s()
                await say("echo")
                took_s.append(clock.monotonic_s() - began_s)
                await anyio.sleep(0.05)

        await say("echo")
        began_s, before = clock.monotonic_s(), link.sent_bytes if direction == "upload" else link.received_bytes
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_again_and_again)
            async with anyio.create_task_group() as calls:
                for _ in range(num_calls):
                    calls.start_soon(say, "echo", tensors)  # it comes back as it went
            tasks.cancel_scope.cancel()
        seconds = clock.monotonic_s() - began_s
        carried = (link.sent_bytes if direction == "upload" else link.received_bytes) - before
    assert carried >= num_calls * num_bytes
    assert 0.85 * mbps < carried * 8 / 1e6 / seconds < 1.05 * mbps
    one_frame_s = num_bytes * 8 / (mbps * 1e6)
    # Nobody's frames are written in less time than one frame's, and a call waits for one there.
    assert sorted(took_s)[len(took_s) // 2] < 2 * one_frame_s
    assert max(took_s) < seconds / 3

"""A member tells its time and sends bytes; whoever measures the way to it says what was seen, and why not."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest
from contexts import MovedClock, ReadClock
from memory_transport import MemoryNetwork

from swarm_peer.errors import CallTimeout, InvalidMessage
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.lifecycle import refusing
from swarm_peer.runtime.network import probing
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.probing import ProbeGiver, Prober
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.wire.messages import MAX_PROBE_BYTES, ProbeReply

HASH = "0" * 32


async def measured(script=lambda network: None, calls=None, times=1):
    """Measure the way to a member whose clock is ten seconds ahead; returns what was seen the last time."""
    async with MemoryNetwork() as network:
        giver = ProbeGiver(MovedClock(passed_s=10.0))
        dispatcher = CallDispatcher(manifest_hash=HASH, calls=giver.calls if calls is None else calls)
        await network.transport("member").serve(dispatcher)
        script(network)
        prober = Prober(transport=network.transport("me"), manifest_hash=HASH, clock=MovedClock())
        for _ in range(times):
            way = await prober.measure("member", is_direct=True)
        return way


def test_time_and_bytes_are_measured():
    way = anyio.run(measured)
    assert way.is_reached
    assert way.is_direct
    assert way.clock_off_s == pytest.approx(10.0, abs=0.5)
    assert 0.0 <= way.round_trip_s < 1.0
    assert min(way.up_bytes_per_s, way.down_bytes_per_s) > 1e6
    assert way.reason == ""


def test_who_measures_again_at_once_learns_the_clock_alone():
    way = anyio.run(lambda: measured(times=2))
    assert way.is_reached
    assert way.clock_off_s == pytest.approx(10.0, abs=0.5)
    assert (way.up_bytes_per_s, way.down_bytes_per_s) == (None, None)
    assert "measured enough links" in way.reason


def test_a_member_that_is_gone_is_not_reached():
    way = anyio.run(lambda: measured(lambda network: network.kill("member")))
    assert (way.is_reached, way.clock_off_s) == (False, None)
    assert "nobody is member" in way.reason


def test_a_member_of_another_version_is_reached():
    way = anyio.run(lambda: measured(calls={}))
    assert (way.is_reached, way.round_trip_s) == (True, None)


def test_a_member_that_its_owner_has_paused_spends_nothing():
    lifecycle = SimpleNamespace(is_paused=True, pause_note="paused until 22:00 (hours)")
    way = anyio.run(lambda: measured(calls=refusing(ProbeGiver(SystemClock()).calls, lifecycle)))
    assert (way.is_reached, way.round_trip_s, way.up_bytes_per_s) == (True, None, None)
    assert "paused until 22:00" in way.reason


def test_a_link_that_carries_nothing_is_told_from_a_member_that_is_gone():
    def script(network):
        network.fault(op="probe", skip=probing.NUM_PINGS + 1, times=9, fail=CallTimeout("too slow"))

    way = anyio.run(lambda: measured(script))
    assert (way.is_reached, way.up_bytes_per_s, way.down_bytes_per_s) == (True, 0.0, 0.0)


@pytest.mark.parametrize("reply", [Reply({"unix_s": -1.0}), Reply({}), Reply({"unix_s": 1.0}, (memoryview(b"x"),))])
def test_a_wrong_answer_is_none(reply):
    way = anyio.run(lambda: measured(lambda network: network.fault(op="probe", tamper=lambda _: reply)))
    assert way.is_reached
    assert way.clock_off_s is None
    assert way.reason


def test_nobody_asks_for_more_than_is_measured():
    async def ask():
        giver = ProbeGiver(SystemClock())
        await CallDispatcher(manifest_hash=HASH, calls=giver.calls)(
            "me", "probe", {"manifest": HASH, "num_bytes": MAX_PROBE_BYTES + 1}, ()
        )

    with pytest.raises(InvalidMessage, match="num_bytes"):
        anyio.run(ask)


def test_a_slow_link_is_measured_by_its_first_bytes(monkeypatch):
    monkeypatch.setattr(probing, "QUICK_S", 0.0)
    asked = []

    def script(network):
        network.fault(op="probe", times=100, tamper=lambda reply: asked.append(len(reply.tensors)) or reply)

    way = anyio.run(lambda: measured(script))
    assert way.down_bytes_per_s > 0
    assert len(asked) == 1 + probing.NUM_PINGS + 2, "one call with bytes each way"


class TimedTransport:
    """Answers each call after the time that is given for it."""

    def __init__(self, passed_s):
        self.now_s = 0.0
        self._passed_s = list(passed_s)

    async def call(self, peer_id, call, tensors, *, timeout_s):
        self.now_s += self._passed_s.pop(0)
        sent = (memoryview(bytes(call.num_bytes)),) if call.num_bytes else ()
        return Reply(ProbeReply(unix_s=self.now_s).model_dump(), sent)


@pytest.mark.anyio
async def test_a_round_trip_slower_than_the_bytes_makes_no_link_fast():
    pings_s = [0.1, *[0.06] * probing.NUM_PINGS]
    transport = TimedTransport([*pings_s, 0.05, 2.0, 0.05, 2.0])
    clock = ReadClock(lambda: transport.now_s)
    way = await Prober(transport=transport, manifest_hash=HASH, clock=clock).measure("member", is_direct=True)
    assert way.round_trip_s == pytest.approx(0.06)
    fastest = pytest.approx(2 * probing.FIRST_BYTES / 0.05)
    assert way.up_bytes_per_s == fastest
    assert way.down_bytes_per_s == fastest


@pytest.mark.anyio
async def test_a_far_member_is_not_taken_for_a_slow_link():
    transport = TimedTransport([0.3] * (1 + probing.NUM_PINGS) + [0.35, 0.8, 0.35, 0.8])
    clock = ReadClock(lambda: transport.now_s)
    way = await Prober(transport=transport, manifest_hash=HASH, clock=clock).measure("member", is_direct=True)
    assert way.up_bytes_per_s == pytest.approx((MAX_PROBE_BYTES - probing.FIRST_BYTES) / 0.5)

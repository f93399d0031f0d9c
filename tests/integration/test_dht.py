"""Real nodes of the DHT, one of them hostile."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from coordinator.watch.observer import open_node
from swarm_peer.errors import NotAdmitted, PeerUnreachable, SwarmError
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.pacing import LARGEST_RATE, SO_MAX_PACING_RATE, copy_of, opened, sockets_of
from swarm_peer.runtime.network import dht
from swarm_peer.runtime.network.bootstrap import Entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.guarded_p2p import MOST_KEYS, GuardedP2P
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.reachability import PROTOCOL, Reachability, Sight
from swarm_peer.runtime.network.record_storage import RecordStorage
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite, Revocations
from swarm_peer.wire.records import MAX_STORED_BYTES, EndRecord, ManifestRecord, end_key, seal

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
LIFETIME_S = 3600.0


async def test_members_tell_each_other_how_they_are_reached_and_strangers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_nobody(_: Reachability) -> list[Sight]:
        return []

    # A node answers one question of a peer at a time, and each node asks by itself as soon as it is connected.
    monkeypatch.setattr(Reachability, "_ask_some", ask_nobody)
    invite = Invite.issue(Identity.load_or_create(tmp_path / "run"), (), label="a", expires=2**31, at_once=9)
    async with (
        open_node(tmp_path / "run", Entrance((), invite), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses), invite), LOOPBACK) as peer,
    ):
        callee = PeerID.from_base58(run.identity.peer_id)
        (address,) = (address.rpartition("/p2p/")[0] for address in peer.addresses)
        port = int(address.rpartition("/")[2])
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            asker = Reachability(peer.p2p, [address, f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"], ())
            assert await asker._ask(callee) == Sight("/ip4/127.0.0.1", (port,))
        peer.p2p.passes = PassChecker(invite.run_id, clock=SystemClock())
        with pytest.raises(PeerUnreachable):
            await asker._ask(callee)


async def test_a_look_finds_what_was_stored_before_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_key = Identity.load_or_create(tmp_path / "run")
    run_id, key = run_key.peer_id, end_key(run_key.peer_id)
    invite = Invite.issue(run_key, (), label="a", expires=2**31, at_once=9)
    async with (
        open_node(tmp_path / "run", Entrance((), invite), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses), invite), LOOPBACK) as peer,
    ):
        monkeypatch.setattr(peer._node.protocol.storage, "get", lambda key: None)  # it finds what other nodes have
        ask, asked = peer._node.protocol.call_find, list[Any]()
        has_answer, may_end, is_second, may_ask = anyio.Event(), anyio.Event(), anyio.Event(), anyio.Event()

        async def ask_in_turn(*args: Any) -> Any:
            asked.append(args)
            if len(asked) > 1:
                is_second.set()
                await may_ask.wait()
            answer = await ask(*args)
            has_answer.set()
            if len(asked) == 1:
                await may_end.wait()
            return answer

        assert await run.store(key, EndRecord(reason="old", begun=1), run_id, LIFETIME_S, signer=run_key)
        monkeypatch.setattr(peer._node.protocol, "call_find", ask_in_turn)
        first = asyncio.create_task(peer.fetch(key, EndRecord, run_id))
        await has_answer.wait()
        assert await run.store(key, EndRecord(reason="new", begun=1), run_id, LIFETIME_S, signer=run_key)
        second = asyncio.create_task(peer.fetch(key, EndRecord, run_id))
        await is_second.wait()
        may_end.set()
        assert (await first)[run_id].reason == "old"
        may_ask.set()
        assert (await second)[run_id].reason == "new"


async def test_a_revoked_peer_is_told_though_nobody_answers_it(tmp_path: Path) -> None:
    run_key = Identity.load_or_create(tmp_path / "run")
    invite = Invite.issue(run_key, (), label="a", expires=2**31, at_once=9)
    async with (
        open_node(tmp_path / "run", Entrance((), invite), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses), invite), LOOPBACK) as peer,
        P2PTransport.open(peer.p2p, passes=peer.passes, max_payload_bytes=2**20, metrics=PeerMetrics()) as transport,
    ):
        me = peer.identity.peer_id
        await transport.serve(lambda *call: pytest.fail("nobody calls"))
        record = Revocations(serial=1, tickets=(), peers=(me,))
        run.passes.learn(seal(record, run_key.peer_id, run_key))
        await peer.learn_revocations(run_key.peer_id)
        peer.passes.check_own(me)  # it has heard nothing
        await run.p2p.tell_revocations(me)
        with pytest.raises(NotAdmitted, match="revoked"):
            peer.passes.check_own(me)


async def test_the_record_of_one_that_was_revoked_does_not_hide_those_of_others(tmp_path: Path) -> None:
    """A node hands out all that it has under a key, and may not know of the revocation yet."""
    run_key = Identity.load_or_create(tmp_path / "run")
    invite = Invite.issue(run_key, (), label="a", expires=2**31, at_once=9)
    key = end_key(run_key.peer_id)
    async with (
        open_node(tmp_path / "run", Entrance((), invite), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses), invite), LOOPBACK) as peer,
        open_node(tmp_path / "third", Entrance(tuple(run.addresses), invite), LOOPBACK) as third,
    ):

        async def given() -> set[str]:
            """The authors of the records that the third node takes of those that the run's node gives."""
            key_id = DHTID.generate(source=key)
            answer = await third._node.protocol.call_find(run.p2p.peer_id, [key_id])
            found, _ = answer[key_id]
            return {author for author, _ in found.value.items()}

        for node in (run, peer):
            assert await node.store(key, EndRecord(begun=1, reason="done"), run_key.peer_id, 60.0)
        assert await given() == {run.identity.peer_id, peer.identity.peer_id}
        record = Revocations(serial=1, tickets=(), peers=(peer.identity.peer_id,))
        third.passes.learn(seal(record, run_key.peer_id, run_key))
        assert await given() == {run.identity.peer_id}


async def test_a_peer_is_dialled_where_it_announces_itself(tmp_path: Path) -> None:
    """libp2p has heard of no address of it."""
    async with (
        open_node(tmp_path / "one", Entrance(), LOOPBACK) as one,
        open_node(tmp_path / "other", Entrance(), LOOPBACK) as other,
    ):
        other_id = PeerID.from_base58(other.identity.peer_id)
        with pytest.raises(P2PDaemonError):
            await one.p2p.call_binary_stream_handler(other_id, PROTOCOL)
        one.dial_by(lambda peer_id: other.addresses, lambda peer_id: True, lambda peer_id: False)
        *_, writer = await one.p2p.call_binary_stream_handler(other_id, PROTOCOL)
        writer.close()


async def test_an_initial_peer_that_is_busy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits in proportion, so that nobody waits for seconds."""
    monkeypatch.setattr(dht, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(dht, "FIRST_CALL_TIMEOUT_S", 10.0)
    answer_ping, called = DHTProtocol.rpc_ping, asyncio.Event()

    async def answer_late(self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        if not called.is_set():  # the initial peer, which asks its caller back
            called.set()
            await anyio.sleep(2 * dht.CALL_TIMEOUT_S)
        return await answer_ping(self, request, context)

    answer_late.__annotations__ = answer_ping.__annotations__  # hivemind reads the types of messages there
    monkeypatch.setattr(DHTProtocol, "rpc_ping", answer_late)
    monkeypatch.setattr(DHTProtocol, "_rpc_handlers", None)
    async with (
        open_node(tmp_path / "busy", Entrance(), LOOPBACK) as busy,
        open_node(tmp_path / "peer", Entrance(tuple(busy.addresses)), LOOPBACK) as peer,
    ):
        assert peer._node.protocol.wait_timeout == dht.CALL_TIMEOUT_S, "others can be asked later on"


async def test_a_hostile_node_keeps_nobodys_records_out(tmp_path: Path) -> None:
    async with (
        open_node(tmp_path / "run", Entrance(), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses)), LOOPBACK) as peer,
    ):
        p2p = await P2P.create(initial_peers=run.addresses, host_maddrs=LOOPBACK, nat_port_map=False, auto_nat=False)
        hostile = await DHTNode.create(p2p=p2p, initial_peers=run.addresses)
        run_id = run.identity.peer_id
        key = end_key(run_id)

        async def end(reason: str) -> None:
            await run.store(key, EndRecord(reason=reason, begun=1), run_id, LIFETIME_S)

        async def heard(node: SwarmDHT) -> str | None:
            records = await node.fetch(key, EndRecord, run_id)
            return records[run_id].reason if run_id in records else None

        await end("first")
        assert await heard(peer) == "first"
        entry = (await hostile.get(key, latest=True)).value[run_id]
        later = get_dht_time() + 10 * LIFETIME_S
        assert not await hostile.store(key, entry.value, later, subkey=run_id)
        for expiration in (later, math.inf):
            assert not await hostile.store(key, b"x", expiration)
            assert not await hostile.store(key, os.urandom(10_000), expiration, subkey=os.urandom(8))
        await end("second")  # hivemind says that it failed: the hostile node has not taken it
        assert await heard(peer) == await heard(run) == "second"
        everywhere = [DHTID.generate(source=number) for number in range(MOST_KEYS[dht_pb2.FindRequest] + 1)]
        assert await hostile.protocol.call_find(run.p2p.peer_id, everywhere[1:]) is not None
        assert await hostile.protocol.call_find(run.p2p.peer_id, everywhere) is None
        assert isinstance(run._node.protocol.storage, RecordStorage)
        await hostile.shutdown()
        await p2p.shutdown()


async def test_the_largest_record_can_be_stored_again_and_again(tmp_path: Path) -> None:
    async with open_node(tmp_path / "run", Entrance(), LOOPBACK) as node:
        run_id = node.identity.peer_id
        record = ManifestRecord(manifest="x" * (MAX_STORED_BYTES - 250))
        for _ in range(50):
            assert await node.store("largest", record, run_id, LIFETIME_S)
        assert await node.fetch("largest", ManifestRecord, run_id) == {run_id: record}


async def test_a_node_leaves_nothing_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with open_node(tmp_path / "run", Entrance(), LOOPBACK) as node:
        await node.store("manifests", ManifestRecord(manifest="{}"), node.identity.peer_id, LIFETIME_S)
        daemon = node.p2p._child.pid
        os.kill(daemon, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_peer_learns_that_its_daemon_has_died(tmp_path: Path) -> None:
    async with open_node(tmp_path / "run", Entrance(), LOOPBACK) as node:
        node.p2p._child.kill()
        with pytest.raises(SwarmError, match="daemon has died"), anyio.fail_after(5):
            await node.watch()


def largest_rates(pid: int) -> set[int]:
    """Of the TCP sockets of a process that are connected to others."""
    rates = set()
    with opened(pid) as process:
        for descriptor in sockets_of(pid).values():
            if (copy := copy_of(process, descriptor)) is not None:
                with copy, suppress(OSError):  # one that listens has no peer
                    if copy.family == socket.AF_INET and copy.getpeername():
                        rate = copy.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
                        rates.add(int.from_bytes(rate, sys.byteorder))
    return rates


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone paces")
async def test_the_connections_of_nodes_are_paced(tmp_path: Path) -> None:
    async with (
        open_node(tmp_path / "one", Entrance(), LOOPBACK) as one,
        open_node(tmp_path / "other", Entrance(tuple(one.addresses)), LOOPBACK) as other,
    ):
        try:
            largest_rates(one.p2p._child.pid)
        except PermissionError:  # as in a container
            pytest.skip("this system gives nobody the sockets of a child")
        for node in (one, other):
            pid = node.p2p._child.pid
            await until(lambda pid=pid: largest_rates(pid) == {LARGEST_RATE}, "the connections are paced", 10)


async def test_a_daemon_that_does_not_start_in_time_is_ended() -> None:
    with pytest.raises(P2PDaemonError, match="failed to start"):
        await GuardedP2P.create(host_maddrs=LOOPBACK, startup_timeout=0.001)


async def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait for what another process does: there is nothing to wait on but its effects."""
    try:
        with anyio.fail_after(timeout_s):
            while not condition():  # noqa: ASYNC110
                await anyio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {timeout_s:.0f} s") from None


def stop(daemon: int) -> None:
    os.kill(daemon, signal.SIGSTOP)
    # On a busy machine it may still answer for a moment.
    os.waitid(os.P_PID, daemon, os.WSTOPPED)


async def test_nodes_that_have_lost_each_other_find_each_other_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht, "REJOIN_S", 0.1)
    async with (
        open_node(tmp_path / "run", Entrance(), LOOPBACK) as run,
        open_node(tmp_path / "peer", Entrance(tuple(run.addresses)), LOOPBACK) as peer,
    ):
        run_id = run.identity.peer_id

        def knows(node: SwarmDHT) -> int:
            return len(node._node.protocol.routing_table.peer_id_to_uid)

        for node in (run, peer):
            # Longer than the pause between looks, or the routing table would be empty before anybody has looked.
            node._node.protocol.wait_timeout = 1.0
        await until(lambda: knows(run) and knows(peer), "the meeting of the nodes", 5)
        daemon = peer.p2p._child.pid
        stop(daemon)
        try:
            for node in (run, peer):
                await node.fetch("manifests", ManifestRecord, run_id)
            await until(lambda: not knows(run) and not knows(peer), "the nodes' loss of each other", 10)
        finally:
            os.kill(daemon, signal.SIGCONT)
        await until(lambda: knows(run) and knows(peer), "the nodes' second meeting", 10)
        record = ManifestRecord(manifest="{}")
        await peer.store("manifests", record, peer.identity.peer_id, LIFETIME_S)
        assert await run.fetch("manifests", ManifestRecord, None) == {peer.identity.peer_id: record}


async def test_a_request_asks_few_nodes_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counting(name: str) -> None:
        call = getattr(DHTProtocol, name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            asked[name] += 1
            return await call(*args, **kwargs)

        monkeypatch.setattr(DHTProtocol, name, counted)

    counting("call_find")  # before there are nodes: each keeps the method that it finds, and wraps it
    counting("call_store")
    async with AsyncExitStack() as opened:
        nodes = [await opened.enter_async_context(open_node(tmp_path / "0", Entrance(), LOOPBACK))]
        for number in range(1, 2 * dht.NODES_ASKED):
            node = open_node(tmp_path / str(number), Entrance(tuple(nodes[0].addresses)), LOOPBACK)
            nodes.append(await opened.enter_async_context(node))
        author = nodes[3].identity.peer_id
        for number in range(2):
            record = ManifestRecord(manifest=f"{number}")
            asked.clear()
            await nodes[3].store("manifests", record, author, LIFETIME_S + number)
            # Those that are asked at the same time may be one or two too many.
            assert 0 < asked["call_find"] <= dht.NODES_ASKED + 3
            assert 0 < asked["call_store"] <= nodes[3]._node.num_replicas
            for node in nodes:
                asked.clear()
                assert await node.fetch("manifests", ManifestRecord, None) == {author: record}
                assert 0 < asked["call_find"] <= dht.NODES_ASKED + 3
                assert not asked["call_store"]

"""Ways to nodes that cannot be dialled: what is asked and answered, who helps whom, and what a relay carries."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager, suppress
from unittest.mock import AsyncMock

import anyio
import msgpack
import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st
from tiny_swarms import until

from swarm_peer.errors import CallError, InvalidMessage, NotAdmitted, PeerUnreachable
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.carrying import Ends, Rate, carry
from swarm_peer.runtime.network.meetings import (
    HELPED,
    HELPER,
    MOST_MET_EACH,
    MOST_TOLD_EACH,
    Meetings,
    seen_at,
)
from swarm_peer.runtime.network.own_pipes import Carrier
from swarm_peer.wire.help import MAX_ADDRESSES, HelpAnswer, HelpRequest
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.packing import unpack

ANYTHING = st.one_of(
    st.binary(max_size=64),
    st.recursive(st.integers(-(2**63), 2**63) | st.text() | st.binary() | st.booleans(), st.lists).map(msgpack.packb),
)
# Ids in order, since of two that look for each other the lower one goes on.
A, B, HELP = sorted(Identity.generate().peer_id for _ in range(3))
SEEN = {A: "/ip4/11.0.0.2/tcp/7", B: "/ip4/11.0.0.3/tcp/8", HELP: "/ip4/11.0.0.1/tcp/9"}


@given(ANYTHING)
def test_whatever_comes_is_a_request_or_refused(data):
    with suppress(InvalidMessage):
        assert HelpRequest.parse(unpack(data, "help")).other


@given(ANYTHING)
def test_whatever_comes_is_an_answer_or_refused(data):
    with suppress(CallError):
        assert HelpAnswer.parse(unpack(data, "help")).refusal == ""


@pytest.mark.parametrize(
    "address",
    ["/dns4/example.org/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/Q/p2p-circuit", "/ip4/1.2.3.4/udp/7", 7, "/ip4/" + 200 * "1"],
)
def test_an_address_that_could_mean_anything_else_is_refused(address):
    with pytest.raises(InvalidMessage):
        HelpAnswer.parse(("", b"", (address,), 0))
    with pytest.raises(InvalidMessage):
        HelpAnswer.parse(("", b"", ("/ip4/1.2.3.4/tcp/1",) * (MAX_ADDRESSES + 1), 0))


def test_requests_and_answers_are_read_as_they_are_written():
    request = HelpRequest(b"pass", True, A, b"its", (SEEN[A],), 7)
    assert HelpRequest.parse(unpack(msgpack.packb(request.values()), "help")) == request
    answer = HelpAnswer("", b"pass", (SEEN[B],), 7)
    assert HelpAnswer.parse(unpack(msgpack.packb(answer.values()), "help")) == answer
    with pytest.raises(PeerUnreachable, match="no place"):
        HelpAnswer.parse(("no place", b"", (), 0))


def test_a_node_that_comes_through_a_relay_is_seen_nowhere():
    assert seen_at(["/ip4/127.0.0.1/tcp/9", SEEN[A] + "/p2p/" + A]) == (SEEN[A],)


class Passes:
    """Admits all but some."""

    def __init__(self, me, strangers):
        self.own_pass = me.encode()
        self.strangers = strangers

    def check_told(self, peer_id, shown):
        self.check(peer_id, shown)

    def check(self, peer_id, shown):
        if peer_id in self.strangers or shown != peer_id.encode():
            raise NotAdmitted(f"{peer_id} is a stranger")


class Net:
    """Daemons that are connected to some others, and their streams.

    Attributes:
        opens: whether two that dial each other at the same time connect
        links: who is connected to whom
        dialled: the addresses that each daemon has dialled
    """

    def __init__(self, opens=True, strangers=()):
        self.opens = opens
        self.strangers = strangers
        self.links = {frozenset((A, HELP)), frozenset((B, HELP))}
        self.nodes = {}
        self.handlers = {}
        self.dialled = {A: [], B: [], HELP: []}
        self.carried_at = {}

    def client(self, me):
        return Client(self, me)

    @asynccontextmanager
    async def running(self, relay_bytes_per_s=1e6):
        """The three nodes, whose daemons accept connections of TCP that say who they are."""
        async with anyio.create_task_group() as tasks:
            for me in (A, B, HELP):
                server = await asyncio.start_server(self.door_of(me), "127.0.0.1", 0)
                client = self.client(me)
                self.nodes[me] = Meetings(
                    p2p=client,
                    door=server.sockets[0].getsockname(),
                    relay_bytes_per_s=relay_bytes_per_s,
                    metrics=PeerMetrics(),
                    own_addresses=lambda me=me: [f"/ip4/192.168.0.{2 + (me == B)}/tcp/7", "/ip4/127.0.0.1/tcp/7"],
                )
                tasks.start_soon(self.nodes[me].run)
            await anyio.wait_all_tasks_blocked()
            yield self.nodes
            tasks.cancel_scope.cancel()

    def door_of(self, me):
        async def accept(reader, writer):
            other = (await reader.readline()).decode().strip()
            self.links.add(frozenset((me, other)))
            self.carried_at[me, other] = f"/ip4/127.0.0.1/tcp/{writer.get_extra_info('peername')[1]}"
            writer.write(await reader.readline())  # an echo, for who looks whether bytes go both ways
            if not await reader.read(1):
                self.links.discard(frozenset((me, other)))
                writer.close()

        return accept


class Client:
    """What GuardedP2P gives to Meetings."""

    def __init__(self, net, me):
        self.net, self.me = net, me
        self.peer_id = PeerID.from_base58(me)
        self.passes = Passes(me, net.strangers)
        self.opened = []
        self.can_be_dialled = {HELP: True}.get
        self.announced = {HELP: [SEEN[HELP]]}.get
        self.has_left = lambda name: False
        self.initial = frozenset()
        self.may_carry = lambda: True
        self.num_carried = 0
        self.redialled = []

    async def disconnect(self, other):
        self.redialled.append("disconnect")
        for _, writer in self.opened + self.net.nodes[other]._p2p.opened:
            writer.close()
        self.opened.clear()
        self.net.nodes[other]._p2p.opened.clear()
        self.net.links.discard(frozenset((self.me, other)))

    async def dial(self, other):
        self.redialled.append("dial")

    def carried(self, num_bytes):
        self.num_carried += num_bytes

    async def handle_streams(self, name, handler):
        self.net.handlers[self.me, name] = handler

    async def connections(self):
        others = [other for link in self.net.links if self.me in link for other in link - {self.me}]
        return {other: [self.net.carried_at.get((self.me, other), SEEN[other])] for other in others}

    async def open_stream(self, other, protocol):
        if frozenset((self.me, other)) not in self.net.links:
            raise OSError("routing: not found")
        mine, its = socket.socketpair()
        self.net.handlers[other, protocol](self.me, SEEN[self.me], *await asyncio.open_connection(sock=its))
        return await asyncio.open_connection(sock=mine)

    async def connect(self, other, addresses):
        self.net.dialled[self.me] += addresses
        for address in addresses:
            if address.startswith("/ip4/127.0.0.1/"):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split("/")[4]))
                writer.write(f"{self.me}\nhello\n".encode())
                self.opened.append((reader, writer))
                assert await reader.readline() == b"hello\n"
                self.net.carried_at[self.me, other] = address
                return
        if not (self.net.opens and SEEN[self.me] in self.net.dialled[other] and SEEN[other] in addresses):
            await anyio.sleep_forever()
        self.net.links.add(frozenset((self.me, other)))


async def test_two_behind_routers_dial_each_other_where_a_third_one_sees_them():
    net = Net()
    async with net.running() as nodes:
        await nodes[A].reach(B, ["/ip4/192.168.0.3/tcp/7"])
        assert frozenset((A, B)) in net.links
        assert SEEN[B] in net.dialled[A]
        assert SEEN[A] in net.dialled[B]
        assert not nodes[A].carriers


@pytest.mark.parametrize("mode", ["asks", "both ask"])
async def test_where_that_fails_a_third_one_carries_their_connection(mode, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)
    net = Net(opens=False)
    async with net.running() as nodes:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nodes[A].reach, B, [])
            if mode == "both ask":
                tasks.start_soon(nodes[B].reach, A, [])
        assert frozenset((A, B)) in net.links
        await until(lambda: nodes[A].carriers and nodes[B].carriers)
        carrier = Carrier(HELP, 1000000)
        assert (nodes[A].carriers, nodes[B].carriers) == ({B: carrier}, {A: carrier}), "one connection is enough"
        assert nodes[HELP]._p2p.num_carried > len("hello\nhello\n")
        opened = nodes[A]._p2p.opened + nodes[B]._p2p.opened
        assert len(opened) == 1
        opened[0][1].close()
        await until(lambda: not (nodes[A].carriers or nodes[B].carriers or nodes[HELP]._relays.num_held))


@pytest.fixture(autouse=True)
def closed_routers(monkeypatch):
    """No connection that both ends begin comes about, unless a test has one made."""

    async def punch(port, addresses):
        await anyio.sleep_forever()

    monkeypatch.setattr("swarm_peer.runtime.network.meetings.punch", punch)


def punched_by(monkeypatch, punch):
    """Have connections that both ends begin made by `punch`, which takes a node's addresses."""
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.punch", lambda port, addresses: punch(tuple(addresses)))
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)


async def test_a_carried_connection_gives_way_to_one_that_both_begin(monkeypatch, caplog):
    ends = dict(zip((A, B), socket.socketpair(), strict=True))
    punched = set()

    async def punch(addresses):
        punched.add(addresses)
        return Ends(*await asyncio.open_connection(sock=ends[B if addresses == ("/ip4/11.0.0.2/tcp/7",) else A]))

    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)
    net = Net(opens=False)
    async with net.running() as nodes:
        await nodes[B].reach(A, [])
        await until(lambda: nodes[A].carriers and nodes[B].carriers)
        punched_by(monkeypatch, punch)
        await nodes[B]._improve()
        assert not punched, "the other one begins"
        caplog.set_level("INFO")
        await nodes[A]._improve()
        assert punched == {("/ip4/11.0.0.2/tcp/7",), ("/ip4/11.0.0.3/tcp/8",)}
        assert "to=direct, from both ends" in caplog.text
        await until(lambda: frozenset((A, B)) in net.links and not (nodes[A].carriers or nodes[B].carriers))
        assert not nodes[HELP]._relays.num_held
        await nodes[A]._improve()
        assert len(punched) == 2, "there is nothing to improve"
        nodes[A]._p2p.opened[0][1].close()
        await until(lambda: frozenset((A, B)) not in net.links)


@pytest.mark.parametrize("asks", [0, 1])
async def test_where_nobody_carries_it_both_ends_begin_a_connection(asks, monkeypatch, caplog):
    ends = dict(zip((A, B), socket.socketpair(), strict=True))

    async def punch(addresses):
        return Ends(*await asyncio.open_connection(sock=ends[B if addresses == (SEEN[A],) else A]))

    punched_by(monkeypatch, punch)
    net = Net(opens=False)
    one, other = (A, B)[asks], (B, A)[asks]
    async with net.running(relay_bytes_per_s=0) as nodes:
        caplog.set_level("INFO")
        await nodes[one].reach(other, [])
        assert frozenset((A, B)) in net.links
        assert f"way_found peer={other} way=direct, from both ends" in caplog.text
        assert not nodes[A].carriers
        assert not nodes[B].carriers
        assert not nodes[A]._p2p.redialled


async def test_a_carried_connection_stays_where_nothing_better_is_found(monkeypatch):
    async def punch(addresses):
        await anyio.sleep_forever()

    punched_by(monkeypatch, punch)
    net = Net(opens=False)
    async with net.running() as nodes:
        await nodes[A].reach(B, [])
        await until(lambda: nodes[A].carriers and nodes[B].carriers)
        await nodes[A]._improve()
        assert nodes[A].carriers
        assert nodes[B].carriers
        assert not nodes[A]._p2p.redialled


async def test_a_defect_while_a_better_way_is_looked_for_ends_no_ways(monkeypatch, caplog):
    async def punch(addresses):
        raise OSError("no descriptor is free")

    punched_by(monkeypatch, punch)
    net = Net(opens=False)
    async with net.running() as nodes:
        await nodes[A].reach(B, [])
        await until(lambda: nodes[A].carriers and nodes[B].carriers)
        await nodes[A]._improve()
        assert "no descriptor is free" in caplog.text
        assert nodes[A]._metrics.handler_defects._value.get() == 1
        assert nodes[A].carriers


async def test_an_owner_may_have_nothing_carried(monkeypatch, caplog):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.GOODBYE_HEARD_S", 0.0)
    net = Net(opens=False)
    caplog.set_level("INFO")
    async with net.running(relay_bytes_per_s=0) as nodes:
        await nodes[A].reach(B, [])
        await until(lambda: "relay nothing" in caplog.text)
        assert frozenset((A, B)) not in net.links
        await nodes[A].reach(B, [])
        assert caplog.text.count("no_way") == 1, "it is not tried again at once"


async def test_nothing_is_said_of_the_way_to_a_peer_whose_goodbye_comes_later(monkeypatch, caplog):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.GOODBYE_HEARD_S", 0.0)
    net, asked = Net(opens=False), []
    caplog.set_level("INFO")
    async with net.running(relay_bytes_per_s=0) as nodes:
        nodes[A]._p2p.has_left = lambda name: asked.append(name) or True
        await nodes[A].reach(B, [])
        await until(lambda: asked)
        assert asked == [B]
        assert "no_way" not in caplog.text


@pytest.mark.parametrize("is_relay", [False, True])
async def test_a_stranger_is_refused_as_a_client_and_as_a_target(is_relay):
    net = Net(strangers=(A,))
    async with net.running() as nodes:
        with pytest.raises(CallError):  # the helper closes the stream
            await nodes[A]._ask(HELP, HELPER, HelpRequest(A.encode(), is_relay, B))
        with pytest.raises(PeerUnreachable, match="is a stranger"):  # the stranger is connected, and would answer
            await nodes[B]._ask(HELP, HELPER, HelpRequest(B.encode(), is_relay, A))
        with pytest.raises(CallError):  # by the word of a member that lets it in
            await nodes[HELP]._ask(B, HELPED, HelpRequest(HELP.encode(), is_relay, A, A.encode()))
        assert frozenset((A, B)) not in net.links
        assert not nodes[B].carriers
        assert not net.dialled[B]


async def test_nobody_takes_more_than_some_of_a_helpers_places():
    net = Net()
    async with net.running() as nodes:
        with ExitStack() as held:
            for _ in range(MOST_MET_EACH):
                held.enter_context(nodes[HELP]._met.hold(A))
            with pytest.raises(PeerUnreachable, match="too many"):
                await nodes[A]._ask(HELP, HELPER, HelpRequest(A.encode(), False, B))
            await nodes[B].reach(A, [])
        assert frozenset((A, B)) in net.links, "there is room for others"


async def test_what_one_has_others_told_takes_no_place_of_another():
    """A member has the helper tell B of it again and again; B has places for others that the helper tells of."""
    net = Net()
    async with net.running() as nodes:
        with ExitStack() as held:
            for _ in range(MOST_TOLD_EACH):
                held.enter_context(nodes[B]._told.hold((HELP, "somebody")))
            await nodes[A].reach(B, [])
        assert frozenset((A, B)) in net.links


async def test_nobody_is_believed_in_whom_a_carried_connection_leads_to(monkeypatch):
    """HELP says that A is at the other end, and it is itself: no carrier of A is noted, and a direct way stays."""
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.CONNECT_S", 0.1)
    net = Net()
    async with net.running() as nodes:
        answer, ends = await nodes[HELP]._ask(B, HELPED, HelpRequest(HELP.encode(), True, A, A.encode(), (), 1))
        assert answer.shown == B.encode()
        ends.writer.write(f"{HELP}\nhello\n".encode())
        assert await ends.reader.readline() == b"hello\n"
        assert not nodes[B].carriers
        ends.writer.close()


async def test_what_was_in_vain_is_forgotten_once_a_node_announces_itself_no_more(monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.IMPROVE_S", 0.01)
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.01)
    net = Net(opens=False)
    async with net.running(relay_bytes_per_s=0.0) as nodes:
        nodes[A]._p2p.announced = {HELP: [SEEN[HELP]], B: [SEEN[B]]}.get
        await nodes[A].reach(B, [])
        await nodes[A]._improve()
        nodes[A]._forget()
        assert (nodes[A]._failures[B], B in nodes[A]._not_before_s) == (1, True)
        nodes[A]._p2p.announced = {HELP: [SEEN[HELP]]}.get
        await until(lambda: not (nodes[A]._failures or nodes[A]._not_before_s))


async def test_strangers_are_asked_for_no_help():
    net = Net()
    async with net.running() as nodes:
        nodes[A]._p2p.announced = {}.get
        assert await nodes[A]._helpers(B) == []
        nodes[A]._p2p.initial = frozenset([HELP])
        assert await nodes[A]._helpers(B) == [HELP]


@pytest.mark.parametrize("fault", [PeerUnreachable("no answer"), OSError("no descriptor is free")])
async def test_a_daemon_that_fails_once_ends_one_search_alone(fault, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.AGAIN_S", (0.0,))
    net = Net()
    async with net.running() as nodes:
        connections = nodes[A]._p2p.connections
        nodes[A]._p2p.connections = AsyncMock(side_effect=fault)
        await nodes[A].reach(B, [])
        nodes[A]._p2p.connections = connections
        await nodes[A].reach(B, [])
        assert frozenset((A, B)) in net.links


async def test_bytes_pass_both_ways_at_a_rate_and_one_end_ends_both():
    (left, left_far), (right, right_far) = socket.socketpair(), socket.socketpair()
    ends = [Ends(*await asyncio.open_connection(sock=each)) for each in (left, left_far, right, right_far)]
    taken = []
    rate = Rate(100e3, taken.append)
    async with anyio.create_task_group() as tasks:
        begun_s = anyio.current_time()
        tasks.start_soon(carry, ends[1], ends[2], rate)
        ends[0].writer.write(bytes(50_000))
        ends[3].writer.write(b"back")
        assert await ends[3].reader.readexactly(50_000) == bytes(50_000)
        assert await ends[0].reader.readexactly(4) == b"back"
        assert anyio.current_time() - begun_s > 0.2
        ends[0].writer.close()
        assert await ends[3].reader.read() == b""
    assert sum(taken) == 50_004
    ends[3].writer.close()


async def test_a_carried_connection_gives_way_to_a_direct_one_and_not_again_and_again(monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.network.meetings.PUNCH_S", 0.1)
    net = Net(opens=False)
    async with net.running() as nodes:
        await nodes[A].reach(B, [])
        await nodes[A]._improve()
        assert not nodes[A]._p2p.redialled, "nobody can dial it"
        nodes[A]._p2p.can_be_dialled = {HELP: True, B: True}.get
        await until(lambda: B in nodes[A].carriers)
        await nodes[A]._improve()
        await nodes[A]._improve()
        assert nodes[A]._p2p.redialled == ["disconnect", "dial"]

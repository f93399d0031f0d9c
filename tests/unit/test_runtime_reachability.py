"""What a node concludes from what others see of it, and which ports of a machine are chosen."""

import errno
import socket
import sys
from subprocess import PIPE, Popen
from types import SimpleNamespace

import anyio
import msgpack
import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.addresses import EVERYWHERE
from swarm_peer.errors import InvalidMessage, UserError
from swarm_peer.runtime.host import ports
from swarm_peer.runtime.host.ports import usable, with_ports
from swarm_peer.runtime.network import reachability
from swarm_peer.runtime.network.peer_addresses import best_first
from swarm_peer.runtime.network.reachability import Reachability, Sight, Ways, parse_sight, ways_to
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.packing import unpack

LOOPBACK, HOME, CLOUD = "/ip4/127.0.0.1/tcp/7", "/ip4/192.168.1.5/tcp/7", "/ip4/11.0.0.5/tcp/7"
NAME = "/dns4/me.example.org/tcp/9"
SIX_HOST = "2600::7"
SIX, SEEN_BY_SIX = f"/ip6/{SIX_HOST}/tcp/7", Sight(f"/ip6/{SIX_HOST}", ())


def sees(host, *open_ports):
    return Sight(f"/ip4/{host}", open_ports)


@pytest.mark.parametrize(
    ("own", "announced", "sights", "expected"),
    [
        ([LOOPBACK, HOME], [], [], Ways((HOME,))),
        ([LOOPBACK], [], [], Ways((LOOPBACK,))),
        ([LOOPBACK, HOME], [], [sees("127.0.0.1", 7)], Ways((HOME,))),
        ([LOOPBACK, HOME, CLOUD], [], [], Ways((CLOUD, HOME))),
        # A port that the router forwards, one that it does not, and another one.
        ([LOOPBACK, HOME], [], [sees("11.0.0.9", 7)], Ways(("/ip4/11.0.0.9/tcp/7", HOME), True)),
        ([LOOPBACK, HOME], [], [sees("11.0.0.9")], Ways((HOME,), False, ("11.0.0.9:7",))),
        ([LOOPBACK, HOME], [], [sees("11.0.0.9", 8)], Ways((HOME,), False, ("11.0.0.9:7",))),
        # A neighbour at home sees the private address, which says nothing of the world outside.
        ([LOOPBACK, HOME], [], [sees("192.168.1.5", 7)], Ways((HOME,), True)),
        ([LOOPBACK, HOME], [], [sees("192.168.1.5", 7), sees("11.0.0.9")], Ways((HOME,), False, ("11.0.0.9:7",))),
        # One of three lies.
        (
            [HOME],
            [],
            [sees("11.0.0.9", 7), sees("12.0.0.1", 7), sees("11.0.0.9", 7)],
            Ways(("/ip4/11.0.0.9/tcp/7", HOME), True),
        ),
        # Of two, one lies, and nobody knows which.
        ([HOME], [], [sees("11.0.0.9", 7), sees("12.0.0.1", 7)], Ways((HOME,))),
        # Some peers dial by IPv6, where the router lets nothing through, and others by IPv4, where it does.
        (
            [HOME, SIX],
            [],
            [SEEN_BY_SIX] * 3 + [sees("11.0.0.9", 7)] * 2,
            Ways(("/ip4/11.0.0.9/tcp/7", SIX, HOME), True),
        ),
        (
            [HOME, SIX],
            [],
            [SEEN_BY_SIX] * 2 + [sees("11.0.0.9", 7)] * 2,
            Ways(("/ip4/11.0.0.9/tcp/7", SIX, HOME), True),
        ),
        (
            [HOME, SIX],
            [],
            [SEEN_BY_SIX] * 2 + [sees("11.0.0.9")] * 2,
            Ways((SIX, HOME), False, (f"{SIX_HOST}:7", "11.0.0.9:7")),
        ),
        # The other way round: callers without IPv6 do not reach it.
        (
            [HOME, SIX],
            [],
            [sees("11.0.0.9")] * 3 + [Sight(f"/ip6/{SIX_HOST}", (7,))] * 2,
            Ways((SIX, HOME), False, ("11.0.0.9:7",)),
        ),
        # A single one dials by IPv4.
        (
            [HOME, SIX],
            [],
            [sees("11.0.0.9")] + [Sight(f"/ip6/{SIX_HOST}", (7,))] * 3,
            Ways((SIX, HOME), False, ("11.0.0.9:7",)),
        ),
        ([HOME, SIX], [], [sees("11.0.0.9", 7)] + [Sight(f"/ip6/{SIX_HOST}", (7,))] * 3, Ways((SIX, HOME), True)),
        # Two lie of another protocol: what most see comes first.
        (
            [HOME],
            [],
            [Sight(f"/ip6/{SIX_HOST}", (7,))] * 2 + [sees("11.0.0.9", 7)] * 3,
            Ways(("/ip4/11.0.0.9/tcp/7", SIX, HOME), True),
        ),
        # One lies of another protocol.
        ([HOME], [], [SEEN_BY_SIX] + [sees("11.0.0.9", 7)] * 2, Ways(("/ip4/11.0.0.9/tcp/7", HOME), True)),
        # The operator has named an address.
        ([NAME], [NAME], [], Ways((NAME,))),
        ([NAME], [NAME], [sees("11.0.0.9", 9)], Ways((NAME,), True)),
        ([NAME], [NAME], [sees("11.0.0.9")], Ways((NAME,), False, ("11.0.0.9:9",))),
    ],
)
def test_what_others_see_tells_how_they_reach_a_node(own, announced, sights, expected):
    assert ways_to(own, announced, sights) == expected


@given(
    st.one_of(
        st.binary(max_size=64),
        st.recursive(st.integers(-(2**63), 2**63) | st.text() | st.binary(), st.lists).map(msgpack.packb),
    )
)
def test_an_answer_is_a_sight_or_refused(data):
    try:
        sight = parse_sight(unpack(data, "reach"))
    except InvalidMessage:
        return
    assert sight.host.startswith("/ip")


class FakeP2P:
    """A client of libp2p that is connected to some peers."""

    def __init__(self, *peers):
        self.peers = [SimpleNamespace(peer_id=PeerID.from_base58(peer)) for peer in peers]
        self.peer_id = PeerID.from_base58(Identity.generate().peer_id)
        self.looks = 0

    async def add_binary_stream_handler(self, *_):
        pass

    async def get_visible_maddrs(self, latest):
        return [f"{HOME}/p2p/{self.peer_id.to_base58()}"]

    async def list_peers(self):
        self.looks += 1
        return self.peers


async def test_newcomers_are_asked_until_one_of_them_sees_the_node_from_outside(monkeypatch):
    neighbour, far, later = (Identity.generate().peer_id for _ in range(3))
    asked = []

    async def ask(_, peer_id):
        asked.append(peer_id.to_base58())
        return sees("192.168.1.5", 7) if asked[-1] == neighbour else sees("11.0.0.9", 7)

    monkeypatch.setattr(Reachability, "_ask", ask)
    monkeypatch.setattr(reachability, "LOOK_S", 0.001)
    p2p = FakeP2P()
    node = Reachability(p2p, [HOME], ())
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.run)
            for newcomer, expected in ((neighbour, (HOME,)), (far, ("/ip4/11.0.0.9/tcp/7", HOME))):
                p2p.peers = [*p2p.peers, *FakeP2P(newcomer).peers]
                while newcomer not in asked or node.ways.addresses != expected:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            p2p.peers = [*p2p.peers, *FakeP2P(later).peers]
            enough = p2p.looks + 3
            while p2p.looks < enough:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert later not in asked


@pytest.mark.parametrize(("wanted", "warnings"), [("/ip4/0.0.0.0/tcp/7", 1), ("/ip4/0.0.0.0/tcp/0", 0)])
async def test_only_a_port_that_stays_is_to_be_forwarded(wanted, warnings, caplog):
    node = await Reachability.begin(FakeP2P(), (), [wanted])
    node._conclude([sees("11.0.0.9")])
    assert node.ways.is_reachable is False
    assert caplog.text.count("not_reachable") == warnings


# No announcement has room for it.
LONG = f"/ip6/2a00::1%{1500 * 'x'}/tcp/1"


def test_a_sight_is_read_as_it_is_written():
    assert parse_sight(("/ip4/11.0.0.9/tcp/4001", (7, 8))) == sees("11.0.0.9", 7, 8)
    for host in ("/ip4/11.0.0.9/tcp/1/p2p/Q/p2p-circuit", "/dns4/me.example.org/tcp/1", "/ip4/::1", "11.0.0.9", LONG):
        with pytest.raises(InvalidMessage):
            parse_sight((host, ()))


@pytest.fixture
def first():
    """The first of some ports that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chosen(first):
    return with_ports(["/ip4/127.0.0.1"], first)


WAITING = """
import sys
from swarm_peer.runtime.host.ports import with_ports
with with_ports(["/ip4/127.0.0.1"], int(sys.argv[1])) as (address,):
    print(address, flush=True)
    sys.stdin.read()
"""


def test_each_process_gets_a_port_of_its_own_and_the_same_one_again(first):
    command = [sys.executable, "-c", WAITING, str(first)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout.readline().strip() == f"/ip4/127.0.0.1/tcp/{first}"
        with chosen(first) as (address,):
            assert not address.endswith(f"/{first}")
        other.stdin.close()
    with chosen(first) as (address,):
        assert address.endswith(f"/{first}")


def test_a_port_that_is_taken_is_passed_over_unless_it_is_named(first, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with pytest.raises(UserError, match="cannot listen on"), with_ports([f"/ip4/127.0.0.1/tcp/{first}"], 1):
            pass
        with chosen(first) as (address,):
            assert not address.endswith(f"/{first}")
        monkeypatch.setattr(ports, "MAX_PORTS", 1)
        with pytest.raises(UserError, match="no port from"), chosen(first):
            pass


def test_addresses_of_both_families_get_one_port(first):
    both = ["/ip4/127.0.0.1", "/ip6/::1"]
    with with_ports(both, first) as addresses:
        (port,) = {address.rpartition("/")[2] for address in addresses}
        assert addresses == [f"{address}/tcp/{port}" for address in both]
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(("::1", first))
        taken.listen()
        with with_ports(both, first) as addresses:
            assert not any(address.endswith(f"/{first}") for address in addresses), "it is taken at one of them"
        with with_ports(["/ip4/127.0.0.1"], first) as addresses:
            assert addresses == [f"/ip4/127.0.0.1/tcp/{first}"]
        with pytest.raises(UserError, match="cannot listen on /ip6/::1"), with_ports([f"/ip6/::1/tcp/{first}"], 1):
            pass
    with with_ports(["/ip4/127.0.0.1", f"/ip6/::1/tcp/{first}"], first + 1) as addresses:
        assert addresses[1] == f"/ip6/::1/tcp/{first}"


def test_a_system_without_ip6_listens_as_if_there_were_none(monkeypatch):
    assert usable(EVERYWHERE) == list(EVERYWHERE)
    make = socket.socket

    def refuse(family=socket.AF_INET, *args):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *args)

    monkeypatch.setattr(socket, "socket", refuse)
    assert usable(EVERYWHERE) == ["/ip4/0.0.0.0"]
    assert usable(["/ip4/0.0.0.0/tcp/5", "/ip6/::/tcp/5"]) == ["/ip4/0.0.0.0/tcp/5"]
    # One that somebody has named alone fails by name.
    assert usable(["/ip6/::"]) == ["/ip6/::"]
    assert usable(["/ip4/0.0.0.0", "/ip6/::1"]) == ["/ip4/0.0.0.0", "/ip6/::1"]


def test_an_announcement_names_addresses_of_each_kind_first():
    many = [f"/ip6/2a00::{number}/tcp/7" for number in range(1, 6)]
    assert best_first([HOME, *many, "/ip6/fd00::1/tcp/7"]) == [many[0], HOME, "/ip6/fd00::1/tcp/7", *many[1:]]
    assert best_first([LOOPBACK, HOME, CLOUD]) == [CLOUD, LOOPBACK, HOME]

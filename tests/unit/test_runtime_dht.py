"""What each node of the DHT checks before it stores it, and addresses."""

import asyncio
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import AsyncMock

import anyio
import pytest
from hivemind.dht import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from test_wire_places import manifest

from swarm_peer.errors import UserError
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network import guarded_p2p
from swarm_peer.runtime.network.dht import REJOIN_TRIES, SwarmDHT, key_id_of
from swarm_peer.runtime.network.guarded_p2p import GuardedP2P
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.peer_addresses import GREETING, is_dialable, is_tcp_address, listening, resolved
from swarm_peer.runtime.network.reachability import Ways
from swarm_peer.runtime.network.record_validator import SignedRecordValidator, place_of
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite
from swarm_peer.wire.places import LONGEST_LIFETIME_S, RecordPlaces
from swarm_peer.wire.records import MAX_STORED_BYTES, EndRecord, ManifestRecord, Progress, end_key, seal

ME, OTHER = Identity.generate(), Identity.generate()
EVERYBODY = PassChecker(None, clock=SystemClock())
MANIFEST = manifest()
KEY = DHTID.generate(source=end_key(ME.peer_id)).to_bytes()
END = EndRecord(reason="done", begun=1_790_000_000)
pack = MSGPackSerializer.dumps


def stored(record=END, signer=ME, key=KEY, lifetime_s=3600.0, **changes):
    expiration = get_dht_time() + lifetime_s
    value = pack([seal(record, "run", signer, place_of(key, expiration)), b""])
    fields = {"key": key, "subkey": pack(signer.peer_id), "value": value, "expiration_time": expiration}
    return DHTRecord(**fields | changes)


async def test_a_record_without_its_authors_pass_is_neither_stored_nor_read():
    invite = Invite.issue(OTHER, (), label="friends", expires=2**39, at_once=9)
    passes = PassChecker(OTHER.peer_id, clock=SystemClock())
    validator = SignedRecordValidator(SystemClock(), passes)
    expiration = get_dht_time() + 60
    envelope = seal(END, "run", ME, place_of(KEY, expiration))
    of_me, of_another = invite.pass_for(ME.peer_id), invite.pass_for(OTHER.peer_id)
    for shown, is_let_in in ((b"", False), (of_another, False), (of_me, True)):
        value = [envelope, shown]
        assert validator.validate(stored(value=pack(value), expiration_time=expiration)) is is_let_in
        found = SimpleNamespace(value={ME.peer_id: (value, expiration)})
        dht = SwarmDHT(
            node=SimpleNamespace(p2p=None, get=AsyncMock(return_value=found)),
            identity=ME,
            metrics=PeerMetrics(),
            ways=lambda: Ways(()),
            clock=SystemClock(),
            places=validator.places,
            passes=passes,
        )
        assert list(await dht.fetch(end_key(ME.peer_id), EndRecord, "run")) == [ME.peer_id] * is_let_in


def test_nobody_is_taken_for_present_by_a_record_that_another_has_made_up():
    """Members know each other's passes. Otherwise one could keep the place of a peer that has gone, and others out."""
    invite = Invite.issue(OTHER, (), label="friends", expires=2**39, at_once=1)
    passes = PassChecker(OTHER.peer_id, clock=SystemClock())
    validator = SignedRecordValidator(SystemClock(), passes)
    expiration = get_dht_time() + 60
    for signer, is_let_in in ((Identity.generate(), False), (ME, True)):
        envelope = seal(END, "run", signer, place_of(KEY, expiration))
        value = pack([envelope, invite.pass_for(ME.peer_id)])
        assert validator.validate(stored(value=value, expiration_time=expiration)) is is_let_in
        assert bool(passes.members()) is is_let_in


def test_a_record_that_its_author_has_signed_for_its_place_is_stored():
    assert SignedRecordValidator(SystemClock(), EVERYBODY).validate(stored())


@pytest.mark.parametrize(
    "record",
    [
        stored(subkey=pack(None)),  # a plain value: it would replace all records of the key
        stored(subkey=b""),
        stored(subkey=pack(b"raw")),
        stored(subkey=pack("nobody")),
        stored(subkey=pack(OTHER.peer_id)),
        stored(value=pack([b"x", b""])),
        stored(value=b"\xc1"),
        stored(value=pack([seal(END, "run", ME), b""])),  # signed for no place
        stored(expiration_time=get_dht_time() + 7200.0),  # somebody else has stored it again, for longer
        stored(key=DHTID.generate(source="elsewhere").to_bytes(), value=stored().value),
        stored(lifetime_s=2 * LONGEST_LIFETIME_S),
        stored(lifetime_s=math.inf),
        stored(lifetime_s=math.nan),
        stored(Progress(round_number=1, samples=2)),  # a part of another record
        stored(ManifestRecord.model_construct(manifest="x" * MAX_STORED_BYTES)),
    ],
)
def test_anything_else_is_not(record):
    assert not SignedRecordValidator(SystemClock(), EVERYBODY).validate(record)


async def test_initial_peers_are_those_where_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as open_, socket.socket() as closed, ThreadPoolExecutor(1) as pool:
        closed.bind(("127.0.0.1", 0))  # and does not listen

        def greet(*words: bytes) -> None:
            for word in words:
                connection, _ = open_.accept()
                with connection:
                    connection.sendall(word)

        ports = open_.getsockname()[1], closed.getsockname()[1]
        here, nowhere = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{ME.peer_id}" for port in ports)
        greeted = pool.submit(greet, GREETING, b"SSH-2.0", b"")
        no_name = f"/dns4/{'x' * 70}/tcp/1/p2p/{ME.peer_id}"
        other = f"/ip4/127.0.0.1/udp/1/quic/p2p/{ME.peer_id}"
        assert await listening([nowhere, here, no_name, other]) == [here, other]
        assert await listening([nowhere, no_name]) == []
        assert [await listening([here]) for _ in range(2)] == [[], []], "it is somebody else"
        greeted.result()


async def test_a_name_of_both_families_is_tried_at_both(monkeypatch):
    """The first one is silent, as where a router lets nothing through."""

    async def greet(stream):
        async with stream:
            await stream.send(GREETING)

    async def find(name, port, **_):
        families = ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
        return [(family, socket.SOCK_STREAM, 6, "", (host, port)) for family, host in families]

    with socket.socket(socket.AF_INET6) as silent:
        silent.bind(("::1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        # Nobody accepts its connections, and as soon as its queue is full, none is made.
        waiting = [socket.socket(socket.AF_INET6) for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("::1", port))
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener,
            anyio.create_task_group() as tasks,
        ):
            monkeypatch.setattr("anyio._core._sockets.getaddrinfo", find)
            tasks.start_soon(listener.serve, greet)
            address = f"/dns/both.example.org/tcp/{port}/p2p/{ME.peer_id}"
            assert await listening([address]) == [address]
            tasks.cancel_scope.cancel()
        for each in waiting:
            each.close()


@pytest.mark.parametrize("host", ["ip4/1.2.3.4", "ip6/::1", "dns4/peer-1.example.org", "dns/a"])
def test_addresses_of_a_peer(host):
    assert is_tcp_address(f"/{host}/tcp/31337/p2p/{ME.peer_id}", ME.peer_id)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/unix/x y/p2p/ME",
        "/unix/x/p2p/ME",
        "/ip4/1.2.3.4/tcp/ 1/p2p/ME",
        "/ip4/1.2.3.4/tcp/1/p2p/OTHER",
        "/ip4/1.2.3.4,/ip4/1.2.3.4/tcp/1/p2p/ME",
        "/ip4/1.2.3.4/udp/1/quic/p2p/ME",
        "/ip4/1.2.3.4/tcp/1/p2p/ME\n",
        "/ip4/1.2.3.4/tcp/1/p2p/ME/p2p-circuit",
    ],
)
def test_what_is_no_plain_address_of_a_peer(address):
    assert not is_tcp_address(address.replace("ME", ME.peer_id).replace("OTHER", OTHER.peer_id), ME.peer_id)


@pytest.mark.parametrize(
    ("host", "elsewhere", "on_loopback"),
    [
        ("ip4/1.2.3.4", True, True),
        ("ip4/10.1.2.3", True, True),
        ("ip6/2600::1", True, True),
        ("dns/peer-1.example.org", True, True),
        ("ip4/127.0.0.1", False, True),
        ("ip4/127.9.9.9", False, True),
        ("ip6/::1", False, True),
        ("ip6/::ffff:127.0.0.1", False, True),
        ("ip4/0.0.0.0", False, False),
        ("ip6/::", False, False),
        ("ip6/::ffff:0.0.0.0", False, False),
        ("ip4/224.0.0.1", False, False),
        ("ip6/ff02::1", False, False),
        ("ip4/169.254.169.254", False, False),
        ("ip6/fe80::1", False, False),
        ("ip6/::ffff:169.254.169.254", False, False),
        ("ip4/255.255.255.255", False, False),
    ],
)
def test_addresses_that_are_dialled(host, elsewhere, on_loopback):
    address = f"/{host}/tcp/22/p2p/{ME.peer_id}"
    for own, expected in (
        (["/ip4/10.0.0.5/tcp/1", "/ip4/127.0.0.1/tcp/1"], elsewhere),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], on_loopback),
    ):
        assert is_dialable(address, own) is expected


async def test_a_name_is_resolved_before_it_is_dialled(monkeypatch):
    async def getaddrinfo(name, port, *, family, type):
        assert name == "peer.example.org"
        hosts = {socket.AF_INET: ["1.2.3.4", "1.2.3.4"], socket.AF_INET6: ["fe80::1%eth0"]}
        found = [host for kind, of_kind in hosts.items() if family in (kind, socket.AF_UNSPEC) for host in of_kind]
        return [(None, type, 0, "", (host, 0)) for host in found]

    monkeypatch.setattr(anyio, "getaddrinfo", getaddrinfo)
    rest = f"tcp/5/p2p/{ME.peer_id}"
    both = [f"/ip4/1.2.3.4/{rest}", f"/ip6/fe80::1/{rest}"]
    assert await resolved(f"/dns/peer.example.org/{rest}") == both
    assert [await resolved(f"/dns{kind}/peer.example.org/{rest}") for kind in (4, 6)] == [[each] for each in both]
    assert await resolved(f"/ip4/1.2.3.4/{rest}") == both[:1]


@pytest.mark.parametrize(("own", "dialled"), [("/ip4/10.0.0.5/tcp/1", False), ("/ip4/127.0.0.1/tcp/1", True)])
async def test_a_name_that_leads_to_this_machine_is_not_dialled(own, dialled):
    p2p = object.__new__(GuardedP2P)
    p2p._terminate = lambda: None  # hivemind's __del__ calls it, and there is nothing to end
    p2p._visible_maddrs, p2p._client = [own], SimpleNamespace(connect=AsyncMock())
    p2p.announced = lambda peer_id: [f"/dns4/localhost/tcp/22/p2p/{peer_id}"]
    await p2p.dial(OTHER.peer_id)
    to = [str(address) for call in p2p._client.connect.await_args_list for address in call.args[1]]
    assert to == ["/ip4/127.0.0.1/tcp/22"] * dialled


async def test_a_daemon_without_a_place_for_its_sockets_says_so(monkeypatch):
    monkeypatch.setattr(guarded_p2p, "SOCKETS", "/nowhere")
    with pytest.raises(UserError, match=r"^/nowhere cannot be written to, and libp2p's daemon keeps its sockets there"):
        await GuardedP2P.create(host_maddrs=[])


async def test_a_call_that_is_given_up_just_as_its_answer_comes_leaves_the_others_theirs(monkeypatch):
    """hivemind's reader of all answers and requests would end, and this node be deaf and dumb in the DHT for good."""
    control = ControlClient(None, _initialized_with_create=True)
    no_process = 2**22 + 1  # more than Linux has
    client, child = SimpleNamespace(control=control), SimpleNamespace(pid=no_process)
    started = SimpleNamespace(_client=client, _child=child, handle_streams=AsyncMock())
    monkeypatch.setattr(P2P, "create", AsyncMock(return_value=started))
    assert await GuardedP2P.create(host_maddrs=[]) is started
    answers = asyncio.StreamReader()
    reading = asyncio.ensure_future(control._read_from_persistent_conn(answers))
    peer = PeerID.from_base58(OTHER.peer_id)
    given_up, other = (asyncio.ensure_future(control.call_unary_handler(peer, "ping", b"")) for _ in range(2))
    await asyncio.sleep(0)
    for call_id in control._pending_calls:
        answer = p2pd_pb2.CallUnaryResponse(response=b"pong")
        message = p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes, callUnaryResponse=answer)
        answers.feed_data(bytes([message.ByteSize()]) + message.SerializeToString())
    given_up.cancel()  # the answers have come, and the reader has not looked yet
    answers.feed_eof()
    await reading
    assert await other == b"pong"
    assert given_up.cancelled()


@pytest.mark.parametrize("field", ["value", "subkey"])
def test_a_long_value_is_not_unpacked(field, monkeypatch):
    monkeypatch.setattr(MSGPackSerializer, "loads", lambda data: pytest.fail("unpacked"))
    assert not SignedRecordValidator(SystemClock(), EVERYBODY).validate(
        stored(**{field: b"\x80" * 2 * MAX_STORED_BYTES})
    )


async def test_whoever_stores_a_record_that_no_node_keeps_is_told():
    validator = SignedRecordValidator(SystemClock(), EVERYBODY)
    dht = SwarmDHT(
        node=SimpleNamespace(p2p=None),
        identity=ME,
        metrics=PeerMetrics(),
        ways=lambda: Ways(()),
        clock=SystemClock(),
        places=validator.places,
        passes=EVERYBODY,
    )
    large = ManifestRecord.model_construct(manifest="x" * MAX_STORED_BYTES)
    with pytest.raises(UserError, match=r"the manifest has \d+ bytes: at most"):
        await dht.store("anywhere", large, ME.peer_id, 60.0)
    with pytest.raises(UserError, match="the DHT does not store the end under anywhere: to be kept for"):
        await dht.store("anywhere", END, ME.peer_id, 2 * LONGEST_LIFETIME_S)
    dht.keep_run(ME.peer_id, MANIFEST)
    with pytest.raises(UserError, match="the DHT does not store the end under anywhere: a key that run"):
        await dht.store("anywhere", END, ME.peer_id, 60.0)
    assert not validator.validate(stored(key=DHTID.generate(source="anywhere").to_bytes()))
    assert validator.validate(_of_run())


def _of_run():
    expiration = get_dht_time() + 60.0
    return stored(value=pack([seal(END, ME.peer_id, ME, place_of(KEY, expiration)), b""]), expiration_time=expiration)


@pytest.mark.parametrize("author", [ME, OTHER], ids=["its own", "the run key's"])
async def test_a_record_of_an_earlier_process_is_outlasted(author):
    """Its clock was ahead. A standby has another key of its own, and signs with the run's as well."""
    run, shown = author.peer_id, {}
    key_id, expires = key_id_of("end"), get_dht_time() + 3000.0

    async def get(key, **options):
        return SimpleNamespace(
            value={author.peer_id: ([seal(END, run, author, place_of(key_id, expires)), b""], expires)}
        )

    async def store(key, value, expiration, **options):
        shown[key] = expiration
        return True

    dht = SwarmDHT(
        node=SimpleNamespace(p2p=None, get=get, store=store),
        identity=ME,
        metrics=PeerMetrics(),
        ways=lambda: Ways(()),
        clock=SystemClock(),
        places=RecordPlaces(key_id=key_id_of),
        passes=EVERYBODY,
    )
    assert await dht.fetch("end", EndRecord, run) == {author.peer_id: END}
    await dht.store("end", END, run, 60.0, signer=author)
    assert expires < shown["end"] < expires + 1


class Cut(Exception):
    """The last look is over."""


async def calls_to_lost_peers(monkeypatch, *, present, num_looks, back_after=None):
    """The looks at which a node calls each of two peers that it has met and lost, by what is left in its table.

    Args:
        present: another peer, which stays; none if the node itself is cut off
        back_after: from this look on, the lost ones answer
    """
    lost = [PeerID.from_base58(Identity.generate().peer_id) for _ in range(2)]
    table = dict.fromkeys([*lost, *present], 1)
    called: dict[PeerID, list[int]] = {peer: [] for peer in lost}
    look = 0

    async def call_ping(peer):
        called[peer].append(look)
        if peer is lost[0]:
            raise AssertionError("hivemind takes no such id of a node")
        if back_after is not None and look >= back_after:
            table[peer] = 1

    async def sleep(_):
        nonlocal look
        look += 1
        for peer in lost if look == 1 else ():
            del table[peer]
        if look > num_looks:
            raise Cut

    protocol = SimpleNamespace(routing_table=SimpleNamespace(peer_id_to_uid=table), call_ping=call_ping)
    dht = SwarmDHT(
        node=SimpleNamespace(p2p=None, protocol=protocol),
        identity=ME,
        metrics=PeerMetrics(),
        ways=lambda: Ways(()),
        clock=SystemClock(),
        places=None,
        passes=EVERYBODY,
    )
    monkeypatch.setattr(anyio, "sleep", sleep)
    with pytest.raises(Cut):
        await dht._rejoin()
    return [called[peer] for peer in lost]


async def test_a_node_that_is_cut_off_looks_for_the_others_until_it_finds_them(monkeypatch):
    night = 10 * REJOIN_TRIES
    looks, until_back = await calls_to_lost_peers(monkeypatch, present=[], num_looks=night + 9, back_after=night)
    assert until_back == list(range(1, night + 1))
    assert looks[:night] == until_back, "one that answers nonsense ends nothing"


async def test_a_peer_that_is_gone_while_others_are_there_is_called_more_and_more_rarely(monkeypatch):
    other = PeerID.from_base58(OTHER.peer_id)
    for looks in await calls_to_lost_peers(monkeypatch, present=[other], num_looks=4 * REJOIN_TRIES):
        assert looks == [*range(1, REJOIN_TRIES + 1), 2 * REJOIN_TRIES, 3 * REJOIN_TRIES, 4 * REJOIN_TRIES]


async def test_a_job_of_the_node_that_ends_before_it_is_told(caplog):
    dht = SwarmDHT(
        node=SimpleNamespace(p2p=None, cache_refresh_task=None, shutdown=AsyncMock()),
        identity=ME,
        metrics=PeerMetrics(),
        ways=lambda: Ways(()),
        clock=SystemClock(),
        places=None,
        passes=EVERYBODY,
    )

    async def fails():
        raise RuntimeError("a defect")

    dht._go_on(fails(), asyncio.sleep(1000))
    await asyncio.gather(*(job for job in dht._tasks if "fails" in repr(job.get_coro())), return_exceptions=True)
    await asyncio.sleep(0)  # the loop tells of ends in its next turn
    assert "fails" in caplog.text
    assert "RuntimeError: a defect" in caplog.text
    await dht._close()
    assert dht.metrics.handler_defects._value.get() == 1, "what is cancelled with the node is no defect"

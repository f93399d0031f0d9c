"""What a hostile member can bring about with what it gives a node of the DHT, or asks of it."""

import math
import struct
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgpack
import pytest
from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode, _SearchState
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time, timed_storage
from test_runtime_dht import EVERYBODY, KEY, ME, OTHER, stored

from swarm_peer.errors import InvalidMessage
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.network import record_storage, record_validator
from swarm_peer.runtime.network.guarded_p2p import MOST_KEYS, check_size
from swarm_peer.runtime.network.record_storage import (
    ASKED_WITHIN_S,
    MAX_ASKED,
    KeepingNode,
    RecordSerializer,
    keep_records,
)
from swarm_peer.runtime.network.record_validator import SignedRecordValidator

KEY_ID = DHTID.from_bytes(KEY)
PEERS = [PeerID.from_base58(identity.peer_id) for identity in (ME, OTHER)]
CONTEXT = SimpleNamespace(remote_id=None)


async def make_node() -> DHTProtocol:
    return (await make_keeping_node()).protocol


async def make_keeping_node() -> KeepingNode:
    validator = SignedRecordValidator(SystemClock(), EVERYBODY)
    node = KeepingNode(_initialized_with_create=True)
    node.protocol = await DHTProtocol.create(None, DHTID.generate(), 20, 5, 5, 3.0, client_mode=True)
    node.protocol.record_validator = validator
    keep_records(node, validator)
    return node


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_node_keeps_what_it_stores_though_others_are_nearer(monkeypatch, is_taken):
    """They may go all at once."""

    async def store_on_others(self, key, value, expiration_time, subkey=None, **kwargs):
        return is_taken

    monkeypatch.setattr(DHTNode, "store", store_on_others)
    node = await make_keeping_node()
    expiration = get_dht_time() + 60
    assert await node.store("a key", [b"record", b"pass"], expiration, subkey="author") is is_taken
    kept = node.protocol.storage.get(DHTID.generate(source="a key"))
    assert kept.value.data["author"] == (MSGPackSerializer.dumps([b"record", b"pass"]), expiration)


def dictionary(*records, maxsize=math.inf, latest=None) -> bytes:
    """Records as hivemind packs them together."""
    items = [
        [MSGPackSerializer.loads(record.subkey), record.value, record.expiration_time]
        if hasattr(record, "subkey")
        else record
        for record in records
    ]
    latest = max(item[2] for item in items) if latest is None else latest
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([maxsize, latest, items])))


async def store(node, record, *, tag=None, value=None, in_cache=False):
    request = dht_pb2.StoreRequest(
        keys=[KEY],
        subkeys=[record.subkey if tag is None else tag],
        values=[record.value if value is None else value],
        expiration_time=[record.expiration_time],
        in_cache=[in_cache],
    )
    return (await node.rpc_store(request, CONTEXT)).store_ok


async def given(node):
    """The authors of the records that a node gives for the key, with their expiry."""
    (result,) = (await node.rpc_find(dht_pb2.FindRequest(keys=[KEY]), CONTEXT)).results
    found = MSGPackSerializer.loads(result.value) if result.value else None
    return {} if found is None else {author: expiration for author, (_, expiration) in found.items()}


async def found_by(node, value: bytes, expiration_time: float):
    """What a node's search takes of another's answer, and whether it looks no further."""
    result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=expiration_time)
    answer = dht_pb2.FindResponse(results=[result])
    node.get_stub = lambda peer: SimpleNamespace(rpc_find=AsyncMock(return_value=answer))
    search = _SearchState(KEY_ID, sufficient_expiration_time=math.inf)
    candidate, _ = ((await node.call_find(PEERS[0], [KEY_ID])) or {}).get(KEY_ID, (None, ()))
    search.add_candidate(candidate, source_node_id=None)
    is_over = search.finished
    search.finish_search()
    found = await search.future
    return set(found.value if found else ()), is_over


async def test_nodes_take_and_give_records():
    node = await make_node()
    assert await store(node, stored()) == [True]
    assert await store(node, stored(signer=OTHER)) == [True]
    assert set(await given(node)) == {ME.peer_id, OTHER.peer_id}
    of_both = dictionary(stored(), stored(signer=OTHER))
    assert await found_by(node, of_both, get_dht_time() + 60) == ({ME.peer_id, OTHER.peer_id}, False)
    finder = await make_node()
    assert await found_by(finder, of_both, get_dht_time() + 60)
    assert set(await given(finder)) == {ME.peer_id, OTHER.peer_id}, "what a node has found it gives to others"
    another = await make_node()
    assert await store(another, stored(), tag=b"", value=of_both) == [True]
    assert set(await given(another)) == {ME.peer_id, OTHER.peer_id}


async def test_answers_of_other_nodes_are_counted():
    """Where none comes, a search finds what the node keeps itself."""
    node = await make_keeping_node()
    empty = dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)])
    for answer, num_answers in ((AsyncMock(side_effect=OSError("no route")), 0), (AsyncMock(return_value=empty), 1)):
        node.protocol.get_stub = lambda peer, answer=answer: SimpleNamespace(rpc_find=answer)
        await node.protocol.call_find(PEERS[0], [KEY_ID])
        assert node.num_answers == num_answers


async def test_a_peer_that_names_itself_ever_nearer_nodes_is_not_asked_for_ever(monkeypatch):
    """hivemind's search goes on for as long as it hears of nearer nodes."""
    node, now_s = await make_node(), 100.0
    monkeypatch.setattr(record_storage, "anyio", SimpleNamespace(current_time=lambda: now_s))
    result = dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND,
        nearest_node_ids=[DHTID.generate().to_bytes() for _ in range(50)],
        nearest_peer_ids=50 * [PEERS[0].to_bytes()],
    )
    asked = AsyncMock(return_value=dht_pb2.FindResponse(results=[result]))
    node.get_stub = lambda peer: SimpleNamespace(rpc_find=asked)
    answers = [await node.call_find(PEERS[0], [KEY_ID]) for _ in range(MAX_ASKED + 9)]
    assert asked.await_count == MAX_ASKED
    assert answers[MAX_ASKED:] == 9 * [None]
    assert len(answers[0][KEY_ID][1]) == node.bucket_size, "more are not looked at"
    assert await node.call_find(PEERS[1], [KEY_ID])
    assert await node.call_find(PEERS[0], [DHTID.generate()])
    now_s += ASKED_WITHIN_S
    assert await node.call_find(PEERS[0], [KEY_ID])


async def test_a_record_of_a_clock_ahead_hides_nothing_once_the_run_is_known():
    """A node takes it before it knows its run, and all that its author stores later expires earlier."""
    node = await make_node()
    assert await store(node, stored(lifetime_s=3600.0)) == [True]
    places = node.record_validator.places
    places.longest_s = lambda key: 60.0
    assert await given(node) == {}
    assert await store(node, stored(lifetime_s=30.0)) == [True]
    assert set(await given(node)) == {ME.peer_id}


async def test_no_answer_ends_a_search():
    """A search for the latest records would end with one that never expires."""
    for latest, expiration in ((math.inf, math.inf), (None, math.inf), (math.nan, math.inf)):
        value = dictionary(stored(), latest=latest)
        assert await found_by(await make_node(), value, expiration) == ({ME.peer_id}, False)


@pytest.mark.parametrize("maxsize", ["x", math.nan, 1, [], -1])
async def test_no_answer_limits_or_breaks_a_search(maxsize):
    value = dictionary(stored(), stored(signer=OTHER), maxsize=maxsize)
    assert await found_by(await make_node(), value, get_dht_time()) == ({ME.peer_id, OTHER.peer_id}, False)


async def test_records_that_expire_just_after_they_were_checked_do_not_break_a_search(monkeypatch):
    node, value = await make_node(), dictionary(stored())
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: get_dht_time() + 7200.0)
    await found_by(node, value, get_dht_time() + 60)
    assert await given(node) == {}


async def test_a_record_that_has_expired_is_not_found_again():
    expired = stored(lifetime_s=-1.0)
    assert not SignedRecordValidator(SystemClock(), EVERYBODY).validate(expired)
    for others in ((), ([ME.peer_id, expired.value, math.nan],), ([ME.peer_id, expired.value, math.inf],)):
        found, _ = await found_by(await make_node(), dictionary(expired, *others), get_dht_time() + 60)
        assert found == set()


async def test_an_earlier_record_does_not_end_a_later_one_of_its_author():
    """hivemind would have the later one expire with the earlier one."""
    node = await make_node()
    earlier, later = stored(lifetime_s=5.0), stored(lifetime_s=60.0)
    await store(node, later)
    await store(node, earlier)
    search = _SearchState(KEY_ID, sufficient_expiration_time=math.inf)
    search.add_candidate(node.storage.get(KEY_ID), source_node_id=None)
    found = node.serializer.loads(dictionary(earlier))
    search.add_candidate(ValueWithExpiration(found, get_dht_time() + 5), source_node_id=None)
    records = node.storage.get(KEY_ID).value
    assert records.key_to_heap[ME.peer_id].expiration_time == later.expiration_time
    assert len(records.expiration_heap) == 1


async def test_nobodys_cached_record_hides_those_of_others():
    node = await make_node()
    await store(node, stored(lifetime_s=60.0))
    assert await store(node, stored(signer=OTHER, lifetime_s=90.0), in_cache=True) == [False]
    assert set(await given(node)) == {ME.peer_id}


@pytest.mark.parametrize(
    "value",
    [
        b"\xdd" + struct.pack(">I", 2**20) + b"\x80" * 2**20,
        msgpack.packb(msgpack.ExtType(0x50, b"\xdd" + struct.pack(">I", 2**20) + b"\x80" * 2**20)),
        b"\xdd" + struct.pack(">I", 2**18) + b"\xd4\x01\x00" * 2**18,
    ],
)
async def test_records_are_bounded_before_they_are_unpacked(value):
    node = await make_node()
    tracemalloc.start()
    with suppress(Exception):
        await store(node, stored(), tag=b"", value=value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


def test_dictionaries_in_dictionaries_are_not_unpacked():
    inner = b"\x00" * 2**20
    for _ in range(100):
        inner = b"\xc9" + struct.pack(">I", len(inner)) + b"\x40" + inner
    tracemalloc.start()
    assert not SignedRecordValidator(SystemClock(), EVERYBODY).validate(stored(value=inner[-15000:]))
    with pytest.raises(InvalidMessage):
        RecordSerializer.loads(inner)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


async def test_a_node_judges_few_records_that_turn_out_invalid(monkeypatch):
    monkeypatch.setattr(record_validator, "MOST_INVALID", 3)
    node = await make_node()
    judged = []
    monkeypatch.setattr(node.record_validator, "validate", lambda record: judged.append(record))
    records = [[f"{number}", b"x", get_dht_time() + 60] for number in range(10)]
    assert await store(node, stored(), tag=b"", value=dictionary(*records)) == [False]
    assert len(judged) == 3


@pytest.mark.parametrize("request_type", MOST_KEYS)
def test_a_request_for_many_keys_is_refused(request_type):
    """A node would put all records of a key into its answer as often as the key is named."""
    check_size(request_type(keys=[KEY] * MOST_KEYS[request_type]))
    with pytest.raises(InvalidMessage, match="keys"):
        check_size(request_type(keys=[KEY] * (MOST_KEYS[request_type] + 1)))
    check_size(dht_pb2.PingRequest())


async def test_a_peer_has_one_place_in_the_routing_table_and_takes_nobodys():
    node = await make_node()
    first, second, third = (DHTID.generate() for _ in range(3))
    table = node.routing_table
    await node.update_routing_table(first, PEERS[0])
    await node.update_routing_table(second, PEERS[1])
    for taken in (first, node.node_id):
        await node.update_routing_table(taken, PEERS[1])
        assert table.uid_to_peer_id == {first: PEERS[0], second: PEERS[1]}
    await node.update_routing_table(third, PEERS[1])
    assert table.uid_to_peer_id == {first: PEERS[0], third: PEERS[1]}
    await node.update_routing_table(first, PEERS[0], responded=False)
    assert table.uid_to_peer_id == {third: PEERS[1]}

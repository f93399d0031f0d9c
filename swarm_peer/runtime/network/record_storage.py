"""Bounds what others can do to a node of the DHT: hivemind believes whatever they say of themselves and of records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

import anyio
import msgpack
from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from swarm_peer.errors import InvalidMessage
from swarm_peer.runtime.network.record_validator import SignedRecordValidator, judge_one_by_one
from swarm_peer.wire.packing import unpack

# hivemind's extension type for all records of a key.
DICTIONARY_TYPE = 0x50
# The first bytes of extension types in msgpack.
_EXTENSIONS = frozenset(bytes([first]) for first in (0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))
# Questions for the records of a key that go to one peer within so many seconds. Polls ask a few times.
MAX_ASKED, ASKED_WITHIN_S = 64, 10.0
# A request, or an answer, has half of it at most.
MAX_DICTIONARY_BYTES = 4 * 2**20


class RecordDictionary(DictionaryDHTValue):  # type: ignore[misc]
    """The records of a key, by author."""

    def store(self, key: str, value: bytes, expiration_time: float) -> bool:
        """Keep a record, if it lasts longer than the author's known one.

        An earlier one changes nothing. In hivemind, the later one would expire with it, so that anybody could remove
        records by storing earlier ones again.
        """
        known = self.data.get(key)
        if known is not None and not known.expiration_time < expiration_time:
            return False
        return bool(super().store(key, value, expiration_time))


class RecordSerializer(MSGPackSerializer):  # type: ignore[misc]
    """Reads all records of a key that another node sends, and bounds them before it builds anything."""

    _ext_types = MSGPackSerializer._ext_types | {RecordDictionary: DICTIONARY_TYPE}

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """All records of a key, one of them, or the id of an author.

        The sender's word on how many records go, and how long they last together, counts for nothing.

        Raises:
            InvalidMessage: the bytes stand for none of these
        """
        if data[:1] not in _EXTENSIONS:
            return unpack(data, "record")
        try:
            return msgpack.unpackb(data, ext_hook=_dictionary)
        except (ValueError, msgpack.UnpackException) as error:
            raise InvalidMessage(f"records: no msgpack ({error!s:.100})") from error


def _dictionary(code: int, data: bytes) -> RecordDictionary:
    match unpack(data, "records", max_bytes=MAX_DICTIONARY_BYTES):
        case [_, _, tuple() as items] if code == DICTIONARY_TYPE:
            pass
        case _:
            raise InvalidMessage("records: not [size, expiry, items]")
    found = RecordDictionary()
    with found.freeze():
        for item in items:
            match item:
                case [str() as author, bytes() as value, float() as expiration] if math.isfinite(expiration):
                    found.store(author, value, expiration)
                case _:
                    raise InvalidMessage("records: not [author, record, expiry]")
    return found


class RecordStorage(DHTLocalStorage):  # type: ignore[misc]
    """The records that a node keeps, by key.

    Args:
        latest_expiration: when a record under a key's id may expire at the latest, as of now
    """

    def __init__(self, latest_expiration: Callable[[bytes], float]):
        super().__init__()
        self._latest_expiration = latest_expiration

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """Give the records of a key, and forget those that would last too long.

        Before it knew its run, or while its own clock was wrong, this node may have taken records of a clock that is
        ahead. They would hide all that their author stores until they expire.
        """
        found = super().get(key)
        if found is None:
            return None
        latest = self._latest_expiration(bytes(key.to_bytes()))
        with found.value.freeze():
            for author, (_, expiration) in list(found.value.items()):
                if expiration > latest:
                    del found.value[author]
        if not found.value:
            del self[key]
            return None
        return found

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Keep a record; see RecordDictionary."""
        if self.get(key) is not None:
            return bool(super().store_subkey(key, subkey, value, expiration_time))
        records = RecordDictionary()
        return records.store(subkey, value, expiration_time) and bool(self.store(key, records, expiration_time))


class NoCache(DHTLocalStorage):  # type: ignore[misc]
    """Keeps nothing: whatever a node has cached hides all that it stores under the key, if that expires earlier."""

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: str | None = None) -> bool:
        """Keep nothing."""
        return False

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Keep nothing."""
        return False


class KeepingNode(DHTNode):  # type: ignore[misc]
    """A node that keeps what it stores itself, too.

    Otherwise the nodes nearest to the key alone would: where these go all at once, no newcomer found the run of a
    coordinator that lives on, until it stores its records again.

    Attributes:
        num_answers: how often other nodes have answered. Where none does, hivemind gives what this node keeps itself.
    """

    num_answers = 0

    async def store(self, key: str, value: Any, expiration_time: float, *, subkey: str, **kwargs: object) -> bool:
        """Store a valid record on the nearest nodes, and here. Returns whether one of the nearest ones has taken it."""
        stored = bool(await super().store(key, value, expiration_time, subkey, **kwargs))
        packed = self.protocol.serializer.dumps(value)
        self.protocol.storage.store_subkey(DHTID.generate(source=key), subkey, packed, expiration_time)
        return stored


def keep_records(node: KeepingNode, validator: SignedRecordValidator) -> None:
    """Have a node keep valid records alone, and believe nothing else of what it is given."""
    protocol: DHTProtocol = node.protocol
    judge_one_by_one(protocol, validator)
    protocol.serializer = RecordSerializer
    protocol.cache = NoCache()
    early, protocol.storage = protocol.storage, RecordStorage(validator.latest_expiration)
    for key_id, (records, _) in early.items():
        for author, (value, expiration) in records.items():
            protocol.storage.store_subkey(key_id, author, value, expiration)
    call_find, update_routing_table = protocol.call_find, protocol.update_routing_table
    asked, window_ends_s = Counter[tuple[PeerID, DHTID]](), 0.0

    def may_ask(peer: PeerID, keys: Collection[DHTID]) -> bool:
        """Whether a peer has not been asked for these keys all the time.

        A search goes on for as long as it hears of nearer nodes, and a peer may name itself any number of them.
        """
        nonlocal window_ends_s
        if (now_s := anyio.current_time()) >= window_ends_s:
            asked.clear()
            window_ends_s = now_s + ASKED_WITHIN_S
        asked.update((peer, key) for key in keys)
        return all(asked[peer, key] <= MAX_ASKED for key in keys)

    async def find(peer: PeerID, keys: Collection[DHTID]) -> Any:
        """Ask a node for records, and keep them: a newcomer finds the run also where only one member is left."""
        answer = await call_find(peer, keys) if may_ask(peer, keys) else None
        node.num_answers += answer is not None
        return answer and {
            key: (given and keep(key, given.value), dict(islice(nearest.items(), protocol.bucket_size)))
            for key, (given, nearest) in answer.items()
        }

    def keep(key_id: DHTID, found: RecordDictionary) -> ValueWithExpiration:
        """Keep records, and have them last as long as they say themselves: what never expires would end a search."""
        with found.freeze():  # if all expire at this moment, hivemind finds that out later
            records = list(found.items())
        for author, (value, expiration) in records:
            protocol.storage.store_subkey(key_id, author, value, expiration)
        return ValueWithExpiration(found, max(expiration for _, (_, expiration) in records))

    async def update(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Keep one node of each peer, and nobody in the place of another: a peer may name itself any nodes."""
        table = protocol.routing_table
        if responded and node_id is not None:
            if node_id == protocol.node_id or table.get(node_id=node_id, default=peer_id) != peer_id:
                return
            if table.get(peer_id=peer_id, default=node_id) != node_id:  # it has started anew
                del table[table[peer_id]]
        await update_routing_table(node_id, peer_id, responded)

    protocol.call_find, protocol.update_routing_table = find, update

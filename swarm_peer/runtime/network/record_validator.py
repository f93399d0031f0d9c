"""Checks each record that another node wants stored here; hivemind asks before it stores one."""

from __future__ import annotations

import struct

from hivemind.dht import DHTID
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.wire.packing import unpack
from swarm_peer.wire.passes import MAX_PASS_BYTES
from swarm_peer.wire.places import RecordPlaces
from swarm_peer.wire.records import MAX_STORED_BYTES

# An author as msgpack: longer values are not unpacked at all.
MAX_AUTHOR_BYTES = 128
# Once so many records that a node gives for a key have turned out invalid, this one drops the rest: some 60 ms.
MOST_INVALID = 256


class SignedRecordValidator(RecordValidatorBase):
    """Lets a node store nothing but its run's signed records, each under its key and its author's id.

    Every node runs it. Any other value would be in the way of records: a plain value replaces all records of its key,
    and a record does not replace a value that expires later.
    """

    def __init__(self, clock: Clock, passes: PassChecker):
        self._clock = clock
        self.passes = passes
        self.places = RecordPlaces(key_id=key_id_of)

    def validate(self, record: DHTRecord) -> bool:
        """Whether the value is a record that belongs here, signed for this place by the member that it stands under."""
        longest = MAX_STORED_BYTES + MAX_PASS_BYTES + MAX_AUTHOR_BYTES
        if len(record.subkey) > MAX_AUTHOR_BYTES or len(record.value) > longest:
            return False
        try:
            author, (envelope, shown) = unpack(record.subkey, "author"), unpack(record.value, "record")
            place = place_of(record.key, record.expiration_time)
            self.places.check(record.key, author, envelope, place, record.expiration_time - self._clock.unix_s())
            self.passes.check(author, shown)  # after the signature: it counts the author as present
        except Exception:  # in hivemind any exception would end the request for all records of the key
            return False
        return True

    def latest_expiration(self, key: bytes) -> float:
        """When a record under a key may expire at the latest, in unix time."""
        return self._clock.unix_s() + self.places.longest_s(key)


def judge_one_by_one(protocol: DHTProtocol, validator: SignedRecordValidator) -> None:
    """Have a node drop the invalid ones of the records that it is given for a key, where hivemind drops all of them.

    A record becomes invalid while others keep it, when its pass expires or is revoked.
    """

    def validate(key: bytes, found: DictionaryDHTValue) -> bool:
        """Take the invalid records out; whether any is left."""
        num_invalid = 0
        with found.freeze():
            for author, (value, expiration) in list(found.items()):
                record = DHTRecord(key, protocol.serializer.dumps(author), value, expiration)
                if num_invalid >= MOST_INVALID or not validator.validate(record):
                    num_invalid += 1
                    del found[author]
        return bool(found)

    protocol._validate_dictionary = validate


def key_id_of(key: str) -> bytes:
    """The id of a key in the DHT."""
    return bytes(DHTID.generate(source=key).to_bytes())


def place_of(key: bytes, expiration: float) -> bytes:
    """The place of a record in the DHT, which its signature covers."""
    return key + struct.pack(">d", expiration)

"""What hostile msgpack costs to refuse, and what hostile bodies cost after it."""

from __future__ import annotations

import gc
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from swarm_peer.errors import InvalidMessage
from swarm_peer.runtime.network.transport import check_body, pack_fields, unpack_fields
from swarm_peer.wire.frames import MAX_HEADER_BYTES
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES
from swarm_peer.wire.messages import MAX_STATE_TENSORS, MicrobatchCall, StateIndex
from swarm_peer.wire.packing import MAX_ITEMS, MAX_KEYS, unpack
from swarm_peer.wire.records import MAX_RECORD_BYTES, Announcement, ProgressRecord, parse

# The most that a message of any kind may cost, in times of what `plain_work` costs: 4 ms on two cores of a cloud VM.
# Not in seconds: a virtual machine with busy neighbours is up to seven times as slow from one second to the next.
MOST_COST = 13
MOST_BYTES = 32e6


def plain_work() -> None:
    """Allocate and copy as parsing a message does."""
    msgpack.unpackb(msgpack.packb([b"12345678"] * 60_000))


def cpu_seconds(action: Callable[[], Any]) -> float:
    """Of this process alone: other programs do not count."""
    began = time.process_time()
    action()
    return time.process_time() - began


def assert_cheap(action: Callable[[], Any], refused: str | None) -> None:
    """Run it, which must take no more time and memory than any message may, and be refused with this text, if any."""

    def run() -> None:
        if refused is None:
            action()
        else:
            with pytest.raises(InvalidMessage, match=refused):
                action()

    seconds, plain = [], []
    gc.disable()  # it visits at times of its own, and goes through all that the other tests have imported
    try:
        for _ in range(10):
            plain.append(cpu_seconds(plain_work))
            seconds.append(cpu_seconds(run))
            if len(plain) > 2 and min(seconds) < MOST_COST * min(plain):
                break
    finally:
        gc.enable()
    assert min(seconds) < MOST_COST * min(plain)
    tracemalloc.start()
    try:
        run()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def array(*items: bytes) -> bytes:
    return b"\xdd" + struct.pack("!I", len(items)) + b"".join(items)


def filled(item: bytes) -> bytes:
    """As many of these as fit into the longest header, in arrays of arrays."""
    inner = array(*[item] * 8000)
    return array(*[inner] * max(1, (MAX_HEADER_BYTES - 5) // len(inner)))


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        # Each of a thousand arrays, one in the other, announces as many values as there are bytes.
        (b"".join(b"\xdd" + struct.pack("!I", 500_000) for _ in range(1000)).ljust(2**19, b"\xc0"), "x: no msgpack"),
        (b"".join(b"\xdd" + struct.pack("!I", MAX_ITEMS) for _ in range(1000)).ljust(2**20, b"\xc0"), "no msgpack"),
        (b"\xdd\xff\xff\xff\xff", "no msgpack"),
        (b"\xdf\xff\xff\xff\xff", "no msgpack"),
        (b"\xc6\xff\xff\xff\xff", "no msgpack"),
        (b"\x91" * 2**20, "no msgpack"),
        (filled(b"\x80"), "more than 32768 arrays and dictionaries"),
        (filled(b"\x81\xa0\x80"), "more than 32768"),
        (filled(b"\x91\xc0"), "more than 32768"),
        (filled(b"\xd4\x01\x00"), "an extension type 1"),
        (filled(b"\xa2ab"), None),
        (filled(b"\xa2\xc3\xa9"), None),
        (filled(b"\xd6\xff\0\0\0\1"), None),
        (msgpack.packb({f"{number:06}": None for number in range(110_000)}), "exceeds max_map_len"),
        (array(*[b"\xc0"] * (MAX_ITEMS + 1)), "exceeds max_array_len"),
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (b"\xc0\xc0", "extra data"),
    ],
)
def test_no_msgpack_costs_much(data: bytes, refused: str | None) -> None:
    assert_cheap(lambda: unpack(data, "x"), refused)


def test_what_is_unpacked() -> None:
    value = {"a": (1, -1, 1.5, None, True, "ä", b"b"), "b": {"c": ((), {})}}
    assert unpack(msgpack.packb(value), "x") == unpack(memoryview(msgpack.packb(value)), "x") == value


def test_all_bodies_have_few_fields() -> None:
    assert all(len(schema.model_fields) <= MAX_KEYS for schema in (MicrobatchCall, StateIndex, Announcement))


def index(**change: Any) -> dict[str, Any]:
    entry = {"name": "layers.10.attention.weight", "dtype": "float32", "shape": (2048, 2048), "chunks": (bytes(32),)}
    fields: dict[str, Any] = dict.fromkeys(
        ("stage", "round_number", "timeline_first_round", "timeline_first_optimizer_step", "timeline_created_at_round"),
        0,
    )
    return fields | {"kind": "state", "history_hash": "", "ledger": b"", "entries": (entry,) * 1000} | change


def test_the_index_of_a_large_state_with_a_long_ledger_is_accepted() -> None:
    data = memoryview(msgpack.packb(index(ledger=bytes(MAX_LEDGER_BYTES))))
    assert_cheap(lambda: unpack_fields(StateIndex, data), None)
    state = unpack_fields(StateIndex, data)
    assert unpack_fields(StateIndex, memoryview(pack_fields(state))) == state


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        (index(entries=({},) * 30_000), "entries.0.name: missing"),
        (index(entries=(dict.fromkeys("abcdefgh", 1),) * 30_000), "unknown key"),
        (index(entries=tuple(index()["entries"][0] for _ in range(MAX_STATE_TENSORS + 1))), "entries: Tuple should"),
        (index(entries=({"name": "x" * 500},) * 9_000), "bytes beside those of plain bytes; at most 1048576 go"),
        (index(ledger=("ab",) * 2_000_000), "bytes beside those of plain bytes"),
        ({f"{number:05}": b"x" * 50 for number in range(80_000)}, "80000 fields"),
        (("ab",) * 2_000_000, "no msgpack"),
    ],
)
def test_no_index_costs_much(fields: Any, refused: str) -> None:
    data = memoryview(msgpack.packb(fields))
    assert_cheap(lambda: unpack_fields(StateIndex, data), refused)


def test_a_body_is_refused_at_its_first_wrong_element() -> None:
    fields = {"manifest": "h" * 32, "round_number": 0, "stage": 1, "base": (1,) * 8000}
    assert_cheap(lambda: check_body(MicrobatchCall, fields), "base")
    body = msgpack.packb({"current": {}, "finished": ((0,),) * 10_000, "validations": ()})
    assert len(body) < MAX_RECORD_BYTES
    assert_cheap(lambda: parse(ProgressRecord, body, "progress"), "finished")

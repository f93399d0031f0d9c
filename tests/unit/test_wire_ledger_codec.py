"""The ledger of a run's data as bytes."""

import msgpack
import pytest
from any_ledgers import NUM_SLICES, any_range, ledger_of
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ledger import MAX_PASSES_AHEAD, Ledger
from swarm_peer.policy.data.ranges import SliceId, WindowRange
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES, encode_ledger, read_ledger

any_ledger = st.builds(ledger_of, st.lists(any_range, max_size=20))


def test_a_pass_of_many_slices() -> None:
    ledger = Ledger(30_000)
    ledger.add(WindowRange(0, index, 0, 1000, True) for index in range(29_998))
    data = encode_ledger(ledger)
    assert len(data) < 12 * 30_000
    assert read_ledger(data, 30_000).to_tuple() == ledger.to_tuple()


def test_no_bytes_are_a_ledger_in_which_nothing_has_counted() -> None:
    assert read_ledger(b"", 3).to_tuple() == Ledger(3).to_tuple()


@given(any_ledger)
def test_bytes_go_there_and_back(ledger: Ledger) -> None:
    data = encode_ledger(ledger)
    back = read_ledger(data, NUM_SLICES)
    assert back.to_tuple() == ledger.to_tuple()
    assert encode_ledger(back) == data
    for slice_id in [SliceId(p, index) for p in range(4) for index in range(NUM_SLICES)]:
        assert back.is_finished(slice_id) == ledger.is_finished(slice_id)
        assert back.uncounted(slice_id) == ledger.uncounted(slice_id)


BAD_LEDGERS = [
    None,
    7,
    "ledger",
    [],
    [4, 0],
    [4, 0, [], []],
    {"num_slices": 4},
    [4, -1, []],
    [4, 1 << 60, []],
    ["4", 0, []],
    [0, 0, []],
    [1 << 60, 0, []],
    [4, 0, [[0, 0, 0, 1]]],
    [4, 0, [[0, 0, 0, 1, 1]]],
    [4, 0, [[0, 0, 1, 0, False]]],
    [4, 0, [[0, 0, -1, 0, False]]],
    [4, 0, [[0, 0, 0, 1 << 60, False]]],
    [4, 0, [[0, 4, 0, 1, False]]],
    [4, 0, [[0, 0.0, 0, 1, False]]],
    [4, 1, [[0, 0, 0, 1, False]]],
    [4, 0, [[MAX_PASSES_AHEAD, 0, 0, 1, False]]],
    [4, 0, [[0, 1, 0, 1, False], [0, 0, 0, 1, False]]],
    [4, 0, [[1, 0, 0, 1, False], [0, 1, 0, 1, False]]],
    [4, 0, [[0, 0, 2, 3, False], [0, 0, 0, 1, False]]],
    [4, 0, [[0, 0, 0, 2, False], [0, 0, 2, 3, False]]],
    [4, 0, [[0, 0, 5, 5, True], [0, 0, 5, 5, True]]],
    [4, 0, [[0, 0, 5, 5, True], [0, 0, 6, 7, False]]],
    [4, 0, ["abcde"]],
    [4, 0, b"abcde"],
]


@pytest.mark.parametrize("value", BAD_LEDGERS)
def test_no_ledger(value: object) -> None:
    with pytest.raises(InvalidMessage, match=r"^data ledger: "):
        read_ledger(msgpack.packb(value), 4)


def test_a_ledger_has_no_more_facts_than_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_peer.policy.data.ledger.MAX_SPARE_FACTS", 3)
    ranges = [[0, 0, 2 * n, 2 * n + 1, False] for n in range(12)]
    ledger = read_ledger(msgpack.packb([4, 0, ranges[:-1]]), 4)
    assert not any(ledger.is_finished(SliceId(0, index)) for index in range(4))
    with pytest.raises(InvalidMessage, match="12 facts: at most 11 go with 4 slices"):
        read_ledger(msgpack.packb([4, 0, ranges]), 4)


def nested(depth: int) -> bytes:
    return b"\x93\x04\x00" + b"\x91" * depth + b"\x00"


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x94\x04", nested(10), nested(900), nested(100_000), bytes(MAX_LEDGER_BYTES + 1), "text"]
)
def test_no_msgpack(data: object) -> None:
    with pytest.raises(InvalidMessage, match=r"^data ledger: "):
        read_ledger(data, 4)


@given(st.binary(max_size=60), st.integers(0, 30), st.integers(0, 255))
def test_any_bytes_are_a_ledger_or_an_invalid_message(noise: bytes, position: int, value: int) -> None:
    data = bytearray(encode_ledger(ledger_of([WindowRange(0, 0, 0, 3, True), WindowRange(1, 2, 3, 9)])))
    data[position % len(data)] = value
    for candidate in (noise, bytes(data)):
        try:
            assert read_ledger(candidate, NUM_SLICES).num_slices == NUM_SLICES
        except InvalidMessage:
            continue


def test_a_ledger_of_other_data_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="of 4 slices, where the data here has 5"):
        read_ledger(encode_ledger(Ledger(4)), 5)

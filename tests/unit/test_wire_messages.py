import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.errors import ERROR_BY_CODE, CallError, InvalidMessage, RoundClosed
from swarm_peer.runtime.network.transport import check_body, error_body, error_from_body, pack_fields, unpack_fields
from swarm_peer.wire.frames import MAX_HEADER_BYTES, MAX_TENSORS, PREFIX, Frame, FrameType, parse_frame, parse_lengths
from swarm_peer.wire.messages import (
    MAX_LEDGER_BYTES,
    MicrobatchCall,
    MicrobatchReply,
    StateChunkCall,
    StateEntry,
    StateIndex,
)

HASH = "0123456789abcdef" * 2

fields = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(
    Frame,
    st.sampled_from(FrameType),
    st.integers(0, 2**63),
    st.text(max_size=20),
    st.none() | st.dictionaries(st.text(max_size=10), fields, max_size=4),
    st.lists(st.binary(max_size=100).map(memoryview), max_size=MAX_TENSORS),
)


def on_the_wire(frame):
    return frame.head() + b"".join(frame.tensors)


def read(data, max_payload_bytes=10_000):
    """As the transport reads a stream that ends."""
    if len(data) < PREFIX.size:
        raise EOFError
    header_bytes, payload_bytes = parse_lengths(data[: PREFIX.size], max_payload_bytes)
    end = PREFIX.size + header_bytes
    if len(data) < end + payload_bytes:
        raise EOFError
    return parse_frame(data[PREFIX.size : end], memoryview(bytearray(data[end : end + payload_bytes])))


# --- frames -----------------------------------------------------------------------------------------------------------


@given(frames)
def test_frames_survive_the_wire(frame):
    again = read(on_the_wire(frame))
    assert (again.type, again.call_id, again.op, again.body) == (frame.type, frame.call_id, frame.op, frame.body)
    assert [bytes(tensor) for tensor in again.tensors] == [bytes(tensor) for tensor in frame.tensors]


def test_tensors_are_views_of_the_payload():
    payload = memoryview(bytearray(b"abcdef"))
    frame = parse_frame(msgpack.packb([0, 1, "op", None, [2, 0, 4]]), payload)
    payload[0] = ord("x")
    assert [bytes(tensor) for tensor in frame.tensors] == [b"xb", b"", b"cdef"]


@given(frames, st.data())
def test_a_frame_that_was_cut_off_is_noticed(frame, data):
    whole = on_the_wire(frame)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(EOFError):
        read(whole[:length])


@given(frames, st.data())
def test_a_header_that_was_cut_off_is_refused(frame, data):
    header = frame.head()[PREFIX.size :]
    payload = memoryview(b"".join(frame.tensors))
    with pytest.raises(InvalidMessage):
        parse_frame(header[: data.draw(st.integers(0, len(header) - 1))], payload)


@given(st.binary(max_size=300), st.binary(max_size=20))
def test_garbage_headers_are_refused_or_fit_their_payload(header, payload):
    try:
        frame = parse_frame(header, memoryview(payload))
    except InvalidMessage:
        return
    assert sum(tensor.nbytes for tensor in frame.tensors) == len(payload)


@given(fields, st.binary(max_size=8))
def test_headers_of_another_form_are_refused_or_fit_their_payload(header, payload):
    try:
        frame = parse_frame(msgpack.packb(header), memoryview(payload))
    except InvalidMessage:
        return
    assert sum(tensor.nbytes for tensor in frame.tensors) == len(payload)


@pytest.mark.parametrize(
    "header",
    [
        [4, 1, "op", None, []],
        [-1, 1, "op", None, []],
        ["0", 1, "op", None, []],
        [0, "1", "op", None, []],
        [0, 1, b"op", None, []],
        [0, 1, "op", [], []],
        [0, 1, "op", None, None],
        [0, 1, "op", None, [3]],
        [0, 1, "op", None, [5]],
        [0, 1, "op", None, [2**63]],
        [0, 1, "op", None, [5, -1]],
        [0, 1, "op", None, [4.0]],
        [0, 1, "op", None, ["4"]],
        [0, 1, "op", None, [4] + [0] * MAX_TENSORS],
        [0, 1, "op", None],
        [0, 1, "op", None, [4], 0],
        {},
        None,
        7,
    ],
    ids=str,
)
def test_headers_that_are_wrong_are_refused(header):
    with pytest.raises(InvalidMessage, match=r"header is not \[type, id, op, body, sizes that add up to the payload\]"):
        parse_frame(msgpack.packb(header), memoryview(b"abcd"))


@pytest.mark.parametrize("header", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000 + b"\xc0", b"\x81\x90\x00"])
def test_headers_that_are_no_msgpack_are_refused(header):
    with pytest.raises(InvalidMessage, match="header: no msgpack"):
        parse_frame(header, memoryview(b""))


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes", "fits"),
    [
        (MAX_HEADER_BYTES, 1000, True),
        (0, 0, True),
        (MAX_HEADER_BYTES + 1, 0, False),
        (0, 1001, False),
        (2**32 - 1, 0, False),
        (0, 2**64 - 1, False),
    ],
)
def test_lengths_are_bounded_before_anything_is_allocated(header_bytes, payload_bytes, fits):
    prefix = struct.pack("!IQ", header_bytes, payload_bytes)
    if fits:
        assert parse_lengths(prefix, 1000) == (header_bytes, payload_bytes)
    else:
        with pytest.raises(InvalidMessage, match=f"frame of {header_bytes} \\+ {payload_bytes} bytes; at most"):
            parse_lengths(prefix, 1000)


# --- bodies -----------------------------------------------------------------------------------------------------------

CALL = MicrobatchCall(
    manifest=HASH,
    round_number=4,
    stage=1,
    microbatch=b"i" * 16,
    timeline=0,
    mode="train",
    num_samples=2,
    length=8,
    timeout_s=1.5,
    base=("head",),
)


def as_received(body):
    frame = read(on_the_wire(Frame(FrameType.CALL, 1, "op", body)))
    return frame.body


def test_bodies_survive_the_wire():
    assert check_body(MicrobatchCall, as_received(CALL.model_dump())) == CALL
    index = StateIndex(
        stage=1,
        kind="update",
        round_number=2,
        timeline_first_round=1,
        timeline_first_optimizer_step=0,
        timeline_created_at_round=0,
        history_hash="l",
        ledger=b"\0",
        entries=(StateEntry(name="w", dtype="float32", shape=(2, 3), chunks=(bytes(32),)),),
    )
    assert unpack_fields(StateIndex, memoryview(pack_fields(index))) == index


@pytest.mark.parametrize(
    "change",
    [
        {"surplus": 1},
        {"manifest": HASH[:-1]},
        {"round_number": -1},
        {"round_number": 2**40},
        {"round_number": "4"},
        {"mode": "train", "stage": 0},
        {"mode": "evaluate", "stage": 0},
        {"stage": 256},
        {"microbatch": b"i" * 15},
        {"microbatch": b"i" * 17},
        {"microbatch": "i" * 16},
        {"mode": "test"},
        {"num_samples": 0},
        {"num_samples": 2**20},
        {"length": 0},
        {"length": 2**20 + 1},
        {"timeout_s": 0.0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": 86401.0},
        {"timeline": None},
        {"timeline": -1},
        {"base": ("",)},
        {"base": ("h" * 65,)},
        {"base": ("h",) * 257},
    ],
    ids=lambda change: str(change)[:40],
)
def test_calls_that_are_wrong_are_refused(change):
    with pytest.raises(InvalidMessage, match=f"MicrobatchCall: {next(iter(change))}"):
        check_body(MicrobatchCall, as_received(CALL.model_dump() | change))


@pytest.mark.parametrize("mode", ["score", "predict"])
def test_queries_may_begin_at_stage_0(mode):
    body = CALL.model_dump() | {"stage": 0, "mode": mode}
    assert check_body(MicrobatchCall, as_received(body)).stage == 0


@pytest.mark.parametrize("name", sorted(MicrobatchCall.model_fields.keys() - {"op", "base"}))
def test_calls_that_lack_something_are_refused(name):
    body = CALL.model_dump()
    del body[name]
    with pytest.raises(InvalidMessage, match=f"{name}: missing"):
        check_body(MicrobatchCall, body)


@pytest.mark.parametrize("loss_sum", [float("nan"), float("inf"), 1e16, -1e30, None, "1"])
def test_replies_with_a_loss_that_cannot_be_are_refused(loss_sum):
    with pytest.raises(InvalidMessage, match="MicrobatchReply: loss_sum"):
        check_body(MicrobatchReply, {"loss_sum": loss_sum, "samples_per_s": 1.0})


@pytest.mark.parametrize("change", [{"index": bytes(31)}, {"entry": 2**13}, {"chunk": -1}, {"chunk": 2**15}])
def test_calls_for_chunks_that_are_wrong_are_refused(change):
    call = {"manifest": HASH, "index": bytes(32), "entry": 0, "chunk": 0}
    check_body(StateChunkCall, call)
    with pytest.raises(InvalidMessage, match=next(iter(change))):
        check_body(StateChunkCall, call | change)


def test_a_ledger_is_bounded():
    index = {
        "stage": 0,
        "kind": "state",
        "round_number": 0,
        "timeline_first_round": 0,
        "timeline_first_optimizer_step": 0,
        "timeline_created_at_round": 0,
        "history_hash": "",
        "entries": (),
    }
    check_body(StateIndex, index | {"ledger": bytes(MAX_LEDGER_BYTES)})
    with pytest.raises(InvalidMessage, match="ledger"):
        check_body(StateIndex, index | {"ledger": bytes(MAX_LEDGER_BYTES + 1)})


def test_a_body_may_be_missing():
    with pytest.raises(InvalidMessage, match="loss_sum: missing"):
        check_body(MicrobatchReply, None)


def test_bodies_with_keys_that_are_no_names_are_refused():
    with pytest.raises(InvalidMessage):
        check_body(MicrobatchReply, {b"loss_sum": 1, "loss_sum": 2})


@given(st.binary(max_size=100))
def test_garbage_in_place_of_an_index_is_refused(data):
    with pytest.raises(InvalidMessage):
        unpack_fields(StateIndex, memoryview(data))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error_class", ERROR_BY_CODE.values())
def test_errors_survive_the_wire(error_class):
    again = error_from_body(as_received(error_body(error_class("what happened"))))
    assert type(again) is error_class
    assert str(again) == "what happened"


def test_the_round_of_a_closed_round_travels():
    again = error_from_body(as_received(error_body(RoundClosed("closed", 7))))
    assert isinstance(again, RoundClosed)
    assert again.round_number == 7


@pytest.mark.parametrize("round_number", [-1, 2**40, 2**63])
def test_a_round_that_cannot_be_does_not_travel(round_number):
    """Who asks for it next would fail to make the call."""
    error = error_from_body({"code": "round_closed", "message": "m", "round_number": round_number})
    assert isinstance(error, RoundClosed)
    assert error.round_number is None


def test_an_unknown_code_is_some_failed_call():
    assert type(error_from_body({"code": "new", "message": "m", "round_number": None})) is CallError


@pytest.mark.parametrize("body", [None, {}, {"code": 1, "message": "m", "round_number": None}, {"code": "busy"}])
def test_errors_that_are_none_are_refused(body):
    assert isinstance(error_from_body(body), InvalidMessage)


def test_long_messages_are_cut():
    assert len(error_body(CallError("x" * 10_000))["message"]) == 500
    assert len(str(error_from_body({"code": "busy", "message": "x" * 10_000, "round_number": None}))) == 500
    closed = error_from_body({"code": "round_closed", "message": "x" * 10_000, "round_number": 1})
    assert len(str(closed)) == 500

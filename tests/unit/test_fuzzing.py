"""Whatever others send is accepted or refused, and costs little: hostile messages for all that reads bytes or records.

Each case follows from its number, which a failure names. `make test` runs SWARM_FUZZ_CASES of them, 800 by default;
`SWARM_FUZZ_CASES=1000000 SWARM_FUZZ_FIRST=0 .venv/bin/pytest tests/unit/test_fuzzing.py --timeout 0` runs a night's
worth.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack
import pytest
from test_wire_places import COORDINATOR, GOOD, HASH, PEER, RUN, RUN_KEY, key_id, manifest
from test_wire_records import ASSIGNMENT, RECORDS

from coordinator.watch.run_watch import RunWatch
from swarm_peer.codecs import CODECS
from swarm_peer.errors import CallError, InvalidMessage, NotAdmitted, UserError
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.policy.placement.live_rebalancer import LiveRebalancer
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import choose_stage
from swarm_peer.policy.view import PeerState, PeerView, SwarmView, fault_of
from swarm_peer.runtime.base.base_index import Base
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.transport import AnyBody, check_body, error_from_body, unpack_fields
from swarm_peer.runtime.state.index import num_bytes, timeline_of
from swarm_peer.wire import ledger_codec
from swarm_peer.wire.codecs import decode, decode_tokens, encoded_bytes
from swarm_peer.wire.frames import FrameType, parse_frame, parse_lengths
from swarm_peer.wire.identity import Identity, is_peer_id
from swarm_peer.wire.ledger_codec import encode_ledger
from swarm_peer.wire.messages import (
    AgreeCall,
    AveragePartCall,
    BaseChunkCall,
    BaseIndex,
    BaseIndexCall,
    Body,
    GiveCall,
    MicrobatchCall,
    MicrobatchReply,
    ProbeCall,
    ProbeReply,
    StateChunkCall,
    StateEntry,
    StateIndex,
    StateIndexCall,
)
from swarm_peer.wire.packing import unpack
from swarm_peer.wire.passes import INVITE_PREFIX, Invite, PassRecord, Revocations, RevocationsRecord, open_pass
from swarm_peer.wire.places import RecordPlaces
from swarm_peer.wire.records import (
    Announcement,
    Progress,
    ProgressRecord,
    Record,
    RoundReport,
    Validation,
    _signed_bytes,
    parse,
    seal,
    unseal,
)

NUM_CASES = int(os.environ.get("SWARM_FUZZ_CASES", "800"))
FIRST_CASE = int(os.environ.get("SWARM_FUZZ_FIRST", "0"))
MOST_CPU_S = 0.05
MOST_BYTES = 32 * 2**20

# No message that is read at once is longer, but for a state's index with a ledger and tensors.
MOST_SENT_BYTES = 2**20

MANIFEST = manifest()
IN_ROUND = {"manifest": HASH, "stage": 1, "round_number": 1}
TIMELINE = dict.fromkeys(
    ("timeline_first_round", "timeline_first_optimizer_step", "timeline_created_at_round", "round_number"), 0
)
INDEX = StateIndex(
    stage=1,
    kind="state",
    history_hash="x",
    entries=(
        StateEntry(name="w", dtype="float32", shape=(1024, 1024), chunks=(bytes(32),)),
        StateEntry(name="b", dtype="bfloat16", shape=(0,), chunks=()),
    ),
    **TIMELINE,
)
BASE = BaseIndex(
    tensors=(StateEntry(name="w", dtype="BF16", shape=(1024, 1024), chunks=(bytes(32),)),),
    files=(StateEntry(name="config.json", dtype="file", shape=(9,), chunks=(bytes(32),)),),
)
BODIES: tuple[Body, ...] = (
    MicrobatchCall(
        **IN_ROUND,
        mode="train",
        timeline=0,
        microbatch=bytes(16),
        num_samples=2,
        length=8,
        timeout_s=1.5,
        base=("head",),
    ),
    MicrobatchReply(loss_sum=1.0, samples_per_s=2.0, base=("head", "other"), receipt=b"receipt"),
    AveragePartCall(manifest=HASH, stage=1, group=bytes(32), part=0),
    AgreeCall(manifest=HASH),
    GiveCall(manifest=HASH, stage=1, offset=0, num_bytes=4),
    StateIndexCall(manifest=HASH, of_stage=1),
    INDEX,
    StateChunkCall(manifest=HASH, index=bytes(32), entry=0, chunk=0),
    BaseIndexCall(manifest=HASH),
    BASE,
    BaseChunkCall(manifest=HASH, entry=0, chunk=0),
    ProbeCall(manifest=HASH, num_bytes=8),
    ProbeReply(unix_s=1.5),
)
ALL_RECORDS: tuple[Record, ...] = (
    *RECORDS,
    ASSIGNMENT,
    RoundReport(round_number=1, optimizer_step=1, samples=8, loss=2.5, seconds=1.5),
    Validation(round_number=2, optimizer_step=1, samples=4, held_out=8, loss_sum=11.0),
    Progress(round_number=1, samples=2),
)
INVITE_AT = ["/ip4/1.2.3.4/tcp/1", f"/ip4/1.2.3.4/tcp/1/p2p/{RUN_KEY.peer_id}", f"/ip6/2::1/tcp/1/p2p/{PEER.peer_id}"]
INVITE = Invite.issue(RUN_KEY, INVITE_AT, label="friends", expires=2**39, at_once=2)
REVOKED = Revocations(serial=1, tickets=(INVITE.key.peer_id,), peers=(COORDINATOR.peer_id,))
PASSES: tuple[Record, ...] = (
    INVITE.opened_ticket(),
    PassRecord(peer=PEER.peer_id),
    REVOKED,
    RevocationsRecord(revocations=seal(REVOKED, RUN, RUN_KEY)),
)


# --- hostile values and bytes -----------------------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 254, 255, 256, 2**20, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1e-30, -0.0, 1e30, 0.5)
TEXTS = ("", "x", "serving", "state", "float32", "\0", "ä" * 40, "x" * 300, "12D3KooW", "NaN")


# Values whose few bytes become many.
SMALL = (b"\x80", b"\x90", b"\x91\xc0", b"\x81\xa0\xc0", b"\xd4\1\0", b"\xa2ab", b"\xd6\xff\0\0\0\1")


# How often a value may be repeated: seldom so often that a message is as long as it may be.
MANY = (2, 3, 70, 70, 70, 1100, 1100, 9000, 40_000)


class Chance(random.Random):
    """The chances of one case. Its repetitions together stay within what one message can hold."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._room = MANY[-1]

    def many(self) -> int:
        """How often to repeat a value."""
        times = self.choice([times for times in MANY if times <= self._room] or [1])
        self._room //= times
        return times


def odd_value(rng: Chance, depth: int = 0) -> Any:
    match rng.randrange(12):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice(FLOATS)
        case 5:
            return rng.choice(TEXTS)
        case 6:
            return rng.randbytes(rng.choice((0, 1, 16, 32, 33, 3000)))
        case 7:
            return rng.choice((None, True, False))
        case 8 if depth < 3:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(6))]
        case 9 if depth < 3:
            return {rng.choice(TEXTS[:7]): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case 10 if depth < 2:
            return [odd_value(rng, 3)] * rng.many()
        case 11:
            nested: Any = 1
            for _ in range(rng.choice((10, 200, 500))):
                nested = [nested]
            return nested
        case _:
            return rng.randrange(2**16)


def changed(value: Any, rng: Chance) -> Any:
    """The same value with an odd one somewhere in it, or with something too little or too much."""
    if rng.random() < 0.25 or not isinstance(value, (dict, list, tuple)) or not value:
        return odd_value(rng)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {name: known for name, known in value.items() if name != key}
            case 1:
                return value | {f"unknown{number}": None for number in range(rng.many())}
            case _:
                return value | {key: changed(value[key], rng)}
    items, place = list(value), rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            del items[place]
        case 1:
            items = (items * rng.many())[: MANY[-1]]
        case _:
            items[place] = changed(items[place], rng)
    return items


def mangled(data: bytes, rng: Chance) -> bytes:
    """The same bytes, with an accident or an attack."""
    place = rng.randrange(len(data) + 1)
    match rng.randrange(9):
        case 0:
            return data[:place]
        case 1:
            return data + rng.randbytes(rng.choice((1, 8, 1000)))
        case 2:
            return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place + rng.randrange(9) :]
        case 3:  # announces far more than there is
            length = struct.pack("!I", rng.choice((2**32 - 1, 2**31, 500_000, 30_000)))
            return data[:place] + rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + length + data[place:]
        case 4:
            deep = struct.pack("!BI", 0xDD, rng.choice((1, 30_000, 900_000)))
            return data[:place] + deep * rng.many() + data[place:]
        case 5:
            small = rng.choice(
                (b"\x80", b"\x90", b"\x91\xc0", b"\x81\xa0\xc0", b"\xd4\1\0", b"\xa2ab", b"\xd6\xff\0\0\0\1")
            )
            num = 3 * rng.many()
            return data[:place] + struct.pack("!BI", 0xDD, num) + small * num + data[place:]
        case 6:
            return rng.randbytes(rng.choice((0, 1, 5, 100, 5000)))
        case 7:
            flipped = bytearray(data)
            for _ in range(rng.randrange(1, 9) if data else 0):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case _:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def packed(fields: Mapping[str, Any] | tuple[Any, ...] | list[Any], rng: Chance) -> bytes:
    """These fields as a hostile sender would pack them."""
    value: Any = fields
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = changed(value, rng)
    data: bytes = msgpack.packb(value)
    return (mangled(data, rng) if rng.random() < 0.3 else data)[:MOST_SENT_BYTES]


# --- what reads them --------------------------------------------------------------------------------------------------


def read_frame(rng: Chance) -> Iterator[Callable[[], Any]]:
    body = rng.choice(BODIES).model_dump()
    kind, call_id, op, sizes = rng.choice(list(FrameType)), 1, body.pop("op", ""), (2, 3)
    header = packed([int(kind), call_id, op, body, sizes], rng)
    yield partial(parse_lengths, struct.pack("!IQ", len(header), rng.choice(NUMBERS[:14]) % 2**64), 2**24)
    if len(header) <= 2**20:
        yield partial(parse_frame, header, memoryview(bytearray(5)))


def read_error(rng: Chance) -> Iterator[Callable[[], Any]]:
    code = rng.choice(("busy", "round_closed", "invalid", "x"))
    data = packed({"code": code, "message": "m", "round_number": 3}, rng)

    def read() -> None:
        assert isinstance(error_from_body(unpack(data, "error")), CallError)

    yield read


def read_body(rng: Chance) -> Iterator[Callable[[], Any]]:
    valid = rng.choice(BODIES)
    data = packed(valid.model_dump(), rng)
    yield lambda: use(check_body(type(valid), unpack(data, "body")))


def read_index(rng: Chance) -> Iterator[Callable[[], Any]]:
    data = memoryview(packed(INDEX.model_dump(), rng))
    yield lambda: use(unpack_fields(StateIndex, data))


def read_base(rng: Chance) -> Iterator[Callable[[], Any]]:
    data = packed(BASE.model_dump(), rng)
    yield lambda: Base.read(data, hashlib.sha256(data).hexdigest())


def use(body: AnyBody) -> None:
    """What peers do with a body that fits its schema, as far as that is pure."""
    match body:
        case StateIndex():
            sum(num_bytes(entry) for entry in body.entries)
            timeline_of(body).optimizer_step_at(body.round_number)
            timeline_of(body).creation_round(body.round_number)


def signed(record: Record, body: bytes, run: str, rng: Chance, author: Identity = PEER) -> bytes:
    """An envelope whose signature is right, unless the envelope is mangled."""
    envelope = msgpack.packb([record.kind, run, body, author.sign(_signed_bytes(record.kind, run, body))])
    return mangled(envelope, rng) if rng.random() < 0.2 else bytes(envelope)


def read_record(rng: Chance) -> Iterator[Callable[[], Any]]:
    valid = rng.choice(ALL_RECORDS)
    envelope = signed(valid, packed(valid.model_dump(), rng), HASH, rng)
    yield lambda: unseal(type(valid), envelope, HASH, PEER.peer_id)


def read_pass(rng: Chance) -> Iterator[Callable[[], Any]]:
    checker = PassChecker(RUN, clock=SystemClock())
    keys = {PassRecord.kind: INVITE.key}
    ticket, shown, revoked = (
        signed(record, packed(record.model_dump(), rng), RUN, rng, keys.get(record.kind, RUN_KEY))
        for record in PASSES[:3]
    )
    data = msgpack.packb([ticket, shown])
    yield lambda: open_pass(mangled(data, rng) if rng.random() < 0.2 else data, RUN)
    yield lambda: checker.learn(revoked)
    with suppress(NotAdmitted):
        checker.check(PEER.peer_id, data)
    with suppress(UserError):
        Invite.parse(INVITE.text()[: rng.randrange(400)] + rng.choice(("", "A", "-", "ä", "=")))
    with suppress(UserError):
        inside = base64.urlsafe_b64decode(INVITE.text().removeprefix(INVITE_PREFIX) + "==")
        Invite.parse(INVITE_PREFIX + base64.urlsafe_b64encode(mangled(inside, rng)).decode().rstrip("="))


PLACES = RecordPlaces(key_id=key_id)
PLACES.keep_run(RUN, MANIFEST)


def read_stored(rng: Chance) -> Iterator[Callable[[], Any]]:
    key, record, run, author = rng.choice(GOOD)
    body = packed(record.model_dump(), rng)
    envelope = msgpack.packb([record.kind, run, body, author.sign(_signed_bytes(record.kind, run, body, b"p"))])
    data = mangled(envelope, rng) if rng.random() < 0.3 else envelope
    name = rng.choice((author.peer_id, RUN_KEY.peer_id, "nobody", *TEXTS))
    lifetime_s = rng.choice((60.0, *FLOATS))
    yield lambda: PLACES.check(key_id(key), name, data, b"p", lifetime_s)


def read_peer_id(rng: Chance) -> Iterator[Callable[[], Any]]:
    text = mangled(PEER.peer_id.encode(), rng).decode(errors="replace")
    yield lambda: is_peer_id(text)


LEDGER = Ledger(64)
LEDGER.add([WindowRange(0, index, 0, 5, index % 2 == 0) for index in range(20)])


def read_ledger(rng: Chance) -> Iterator[Callable[[], Any]]:
    fields = unpack(encode_ledger(LEDGER), "ledger")
    data = packed(fields, rng)
    yield lambda: ledger_codec.read_ledger(data, 64)


def read_tensor(rng: Chance) -> Iterator[Callable[[], Any]]:
    codec, shape = rng.choice(list(CODECS)), (2, rng.choice((0, 1, 3, 300)))
    exact = encoded_bytes(shape, codec)
    length = exact if rng.random() < 0.5 else max(0, exact + rng.choice((-256, -4, -1, 1, 4, 5, 256)))
    data = memoryview(bytearray(rng.randbytes(length)))

    def read() -> None:
        values = decode(data, shape, codec)
        assert length == exact, "no codec reads past the end of what has come"
        assert values.isfinite().all()

    yield read
    yield lambda: decode_tokens(data, (2, length // 8), rng.choice((1, 256, 2**31 - 1)))


PARAMS = RebalancingParameters(
    stage_costs=(1e9, 3e15),
    state_bytes=(1e9, 2e9),
    min_replicas=(1, 1),
    overhead_s=20.0,
)


def read_announcements(rng: Chance) -> Iterator[Callable[[], Any]]:
    """What hostile announcements that fit their schema do to the decisions of coordinator and newcomers."""
    peers = [
        PeerView(peer_id=name, stage=stage, state=PeerState.SERVING, samples_per_s=5.0, movable=True, since_s=0.0)
        for name, stage in zip("abcd", (0, 0, 0, 1), strict=True)
    ]
    valid = next(record for record in ALL_RECORDS if isinstance(record, Announcement)).model_dump()

    def read(number: int) -> None:
        valid["state"] = rng.choice(("serving", "joining", "draining"))
        # One field at a time, or few would pass the schema.
        hostile = valid | {rng.choice(list(valid)): rng.choice((*NUMBERS, *FLOATS, *FLOATS))}
        found = parse(Announcement, msgpack.packb(hostile), "announcement").view(f"liar{number}", 100.0)
        if fault_of(found, 2) is None:
            peers.append(found)

    for number in range(3):
        yield partial(read, number)

    def decide() -> None:
        view = SwarmView(2, tuple(peers))
        choose_stage(view, PARAMS.stage_costs, "me", 0.0)
        policy = LiveRebalancer(PARAMS, announcement_s=10.0, begun_s=0.0)
        for now_s in (100.0, 130.0, 200.0, 300.0):
            policy.look(view, rng.choice((0.0, 8.0, 1e12)), rng.choice((0.0, 1e-9, 5.0)), now_s)
            view = SwarmView(2, tuple(replace(peer, announced=int(now_s)) for peer in view.peers))

    yield decide


def read_reports(rng: Chance) -> Iterator[Callable[[], Any]]:
    """What hostile reports of stage 0 do to the run's watch."""
    view = SwarmView(
        2, tuple(PeerView(peer_id=name, stage=int(name > "c"), state=PeerState.SERVING) for name in "abcd")
    )
    watch = RunWatch(MANIFEST, view)
    valid = next(record for record in ALL_RECORDS if isinstance(record, ProgressRecord)).model_dump()
    told: dict[str, ProgressRecord] = {}

    def read(name: str) -> None:
        hostile = valid | {"finished": (valid["finished"][0] | {rng.choice(("samples", "loss", "seconds")): number()},)}
        shares = (valid["validations"][0] | {"samples": rng.choice((0, 1)), "loss_sum": number(), "round_number": 2},)
        told[name] = parse(ProgressRecord, msgpack.packb(hostile | {"validations": shares}), "progress")

    def number() -> float:
        return rng.choice((*FLOATS, *NUMBERS, 2.0))

    for name in "abc":
        yield partial(read, name)

    def observe() -> None:
        for now_s in (1.0, 100.0):
            watch.observe(view, told, now_s)
        watch.delivered()

    yield observe


@dataclass(frozen=True)
class Target:
    """What reads something of others: it makes the steps of one case."""

    make: Callable[[Chance], Iterator[Callable[[], Any]]]
    share: int
    most_cpu_s: float = MOST_CPU_S


TARGETS = (
    Target(read_frame, 3),
    Target(read_error, 1),
    Target(read_body, 5),
    Target(read_index, 2),
    Target(read_base, 2),
    Target(read_record, 5),
    Target(read_stored, 3),
    Target(read_pass, 2),
    Target(read_peer_id, 1),
    # In a worker thread: as long as all that a run has counted.
    Target(read_ledger, 2, most_cpu_s=1.0),
    Target(read_tensor, 1),
    Target(read_announcements, 2),
    Target(read_reports, 2),
)


def run_case(number: int, is_traced: bool = False) -> tuple[int, int, float]:
    """Run a case. Returns how many of its steps were accepted, how many refused, and the longest one's CPU time.

    The time is a share of what the case may take.
    """
    rng = Chance(number)
    target = rng.choices(TARGETS, [target.share for target in TARGETS])[0]
    accepted = refused = 0
    longest_s = 0.0
    for step in target.make(rng):
        text, began = "", time.process_time()
        if is_traced:  # the message itself is here already
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
        try:
            step()
            accepted += 1
        except InvalidMessage as error:
            refused += 1
            text = str(error)
        assert len(text) < 1000, "an error is for people, and goes back to the sender"
        longest_s = max(longest_s, time.process_time() - began)
        if is_traced:
            assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES, f"memory of case {number}"
    return accepted, refused, longest_s / target.most_cpu_s


def check_case(number: int) -> tuple[int, int]:
    try:
        accepted, refused, share = run_case(number)
        for _ in range(3):  # collections of garbage come at times of their own
            if share >= 1:
                *_, share = run_case(number)
        assert share < 1, f"{share:.1f} times the CPU time that it may take"
    except Exception as error:
        raise AssertionError(f"case {number}: {type(error).__name__}: {error!s:.500}") from error
    return accepted, refused


def test_whatever_comes_is_accepted_or_refused_at_little_cost() -> None:
    accepted = refused = 0
    for number in range(FIRST_CASE, FIRST_CASE + NUM_CASES):
        its_accepted, its_refused = check_case(number)
        accepted, refused = accepted + its_accepted, refused + its_refused
    assert accepted > NUM_CASES / 10, "many get past the schema, to what comes after it"
    assert refused > NUM_CASES / 10


def test_whatever_comes_takes_little_memory() -> None:
    for number in range(500):  # modules that are imported when they are first needed are no message's
        run_case(number)
    tracemalloc.start()
    try:
        for number in range(FIRST_CASE, FIRST_CASE + NUM_CASES // 10):
            run_case(number, is_traced=True)
    finally:
        tracemalloc.stop()


def test_all_messages_and_records_are_among_the_valid_ones() -> None:
    def leaves(base: type) -> set[type]:
        below = {leaf for subclass in base.__subclasses__() for leaf in leaves(subclass)}
        return below or {base}

    ours = {schema for schema in leaves(Body) | leaves(Record) if schema.__module__.startswith("swarm_peer.wire")}
    assert ours - {StateEntry} == {type(value) for value in (*BODIES, *ALL_RECORDS, *PASSES)}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.make.__name__)
def test_a_target_of_every_kind_is_reached(target: Target) -> None:
    assert all(callable(step) for step in target.make(Chance(1)))

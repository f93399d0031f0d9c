import math

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, TimeShares
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import (
    MAX_ASSIGNMENTS,
    MAX_RECORD_BYTES,
    MAX_STORED_BYTES,
    Announcement,
    Assignment,
    CoordinationRecord,
    EndRecord,
    ManifestRecord,
    Progress,
    ProgressRecord,
    RoundReport,
    TimelineRecord,
    Validation,
    Warrant,
    _signed_bytes,
    seal,
    stage_key,
    unseal,
)

RUN = "0123456789abcdef" * 2
ME = Identity(Ed25519PrivateKey.from_private_bytes(b"m" * 32))
OTHER = Identity(Ed25519PrivateKey.from_private_bytes(b"o" * 32))
PROGRESS = Progress(round_number=3, samples=8)
VALIDATION = Validation(round_number=0, optimizer_step=0, samples=4, held_out=8, loss_sum=11.0)
ANNOUNCEMENT = Announcement(
    serial=7,
    stage=1,
    state="serving",
    round_number=3,
    optimizer_step=2,
    movable=True,
    note="waits",
    samples_per_s=2.5,
    queue=4,
    version="0.1.0",
    device="cpu",
    state_s=1.5,
    memory_bytes=1 << 30,
    too_large=(1, 3),
    bandwidth_bytes_per_s=5e6,
    moved_from=0,
    incarnation=5,
    time_shares=(60, 25, 5),
    metrics_address="10.0.0.7:9464",
    trouble="failing",
    trouble_s=2.5,
)
ASSIGNMENT = Assignment(peer="a", announced=7, from_stage=0, to_stage=1, reason="stage 1 is slow")
RECORDS = [
    PROGRESS,
    ANNOUNCEMENT,
    ManifestRecord(manifest='{"name":"x"}'),
    EndRecord(reason="done", begun=1_790_000_000),
    TimelineRecord(first_round=9, first_optimizer_step=5, begun=1_790_000_000),
    CoordinationRecord(warrant=b"w", beat=3, assignments=(ASSIGNMENT,), reason="stage 1 is slow"),
    Warrant(coordinator="a", term=2),
    ProgressRecord(
        current=PROGRESS,
        finished=(RoundReport(round_number=1, optimizer_step=1, samples=8, loss=2.5, seconds=1.5),),
        validations=(VALIDATION,),
    ),
]


def sealed_fields(fields, record_type=Progress, identity=ME):
    """An envelope with a good signature, whatever is in it."""
    body = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    signature = identity.sign(_signed_bytes(record_type.kind, RUN, body))
    return msgpack.packb([record_type.kind, RUN, body, signature])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_records_survive_their_envelope(record):
    assert unseal(type(record), seal(record, RUN, ME), RUN, ME.peer_id) == record


def test_records_become_what_policies_use():
    assert ANNOUNCEMENT.model_copy(update={"moving_to": 0}).view("a", 10.0) == PeerView(
        peer_id="a",
        stage=1,
        state=PeerState.SERVING,
        round_number=3,
        samples_per_s=2.5,
        queue=4,
        optimizer_step=2,
        movable=True,
        note="waits",
        memory_bytes=1 << 30,
        too_large=(1, 3),
        bandwidth_bytes_per_s=5e6,
        since_s=8.5,
        moved_from=0,
        moving_to=0,
        announced=7,
        incarnation=5,
        device=ANNOUNCEMENT.device,
        version=ANNOUNCEMENT.version,
        time_shares=TimeShares(computing=60, ending=25, joining=5),
        metrics_address="10.0.0.7:9464",
        trouble=Trouble.FAILING,
        trouble_since_s=7.5,
    )


@pytest.mark.parametrize(
    "shares", [(60, 30, 11), (-1, 0, 0), (101, 0, 0), (0.5, 0, 0), (1, 2), (1, 2, 3, 4), "abc", (True, 0, 0)]
)
def test_shares_of_time_that_cannot_be_are_refused(shares):
    fields = ANNOUNCEMENT.model_dump() | {"time_shares": shares}
    with pytest.raises(InvalidMessage, match="time_shares"):
        unseal(Announcement, sealed_fields(fields, Announcement), RUN, ME.peer_id)


@pytest.mark.parametrize("address", ["", "10.0.0.7:9464", "[2001:db8::1]:80", "127.0.0.1:65535"])
def test_metrics_are_announced_by_ip_address_and_port(address):
    announced = ANNOUNCEMENT.model_copy(update={"metrics_address": address})
    assert unseal(Announcement, seal(announced, RUN, ME), RUN, ME.peer_id).view("a", 10.0).metrics_address == address


@pytest.mark.parametrize(
    "address",
    [
        *(
            "10.0.0.7",
            ":9464",
            "10.0.0.7:",
            "10.0.0.7:0",
            "10.0.0.7:65536",
            "10.0.0.7:+80",
            "10.0.0.7:080",
            "10.0.0.7:x",
        ),
        *("host.example:80", "10.0.0.7:80/metrics", "user@10.0.0.7:80", "10.0.0.07:80", "167772167:80", "10.0.0.7:80 "),
        *("2001:db8::1:80", "[10.0.0.7]:80", "[fe80::1%eth0]:80", "http://10.0.0.7:80", "10.0.0.7:8\u0660", "x" * 65),
    ],
)
def test_other_places_of_metrics_are_refused(address):
    fields = ANNOUNCEMENT.model_dump() | {"metrics_address": address}
    with pytest.raises(InvalidMessage, match="metrics_address"):
        unseal(Announcement, sealed_fields(fields, Announcement), RUN, ME.peer_id)


def test_a_peer_may_announce_that_it_has_left():
    left = ANNOUNCEMENT.model_copy(update={"state": "left"})
    assert unseal(Announcement, seal(left, RUN, ME), RUN, ME.peer_id).view("a", 10.0).state is PeerState.LEFT


def test_undecided_peers_have_a_key_of_their_own():
    assert len({stage_key(RUN, stage) for stage in (-1, 0, 1, 11)}) == 4


def test_any_flipped_bit_is_noticed():
    envelope = seal(PROGRESS, RUN, ME)
    for position in range(len(envelope)):
        tampered = envelope[:position] + bytes([envelope[position] ^ 1]) + envelope[position + 1 :]
        with pytest.raises(InvalidMessage):
            unseal(Progress, tampered, RUN, ME.peer_id)


def test_a_record_that_was_cut_or_continued_is_refused():
    envelope = seal(PROGRESS, RUN, ME)
    for length in range(len(envelope)):
        with pytest.raises(InvalidMessage):
            unseal(Progress, envelope[:length], RUN, ME.peer_id)
    with pytest.raises(InvalidMessage, match="no msgpack"):
        unseal(Progress, envelope + b"\0", RUN, ME.peer_id)


def test_a_record_of_another_author_is_refused():
    with pytest.raises(InvalidMessage, match="the signature does not match"):
        unseal(Progress, seal(PROGRESS, RUN, OTHER), RUN, ME.peer_id)
    with pytest.raises(InvalidMessage, match="the signature does not match"):
        unseal(Progress, seal(PROGRESS, RUN, ME), RUN, "nobody")


def test_a_record_of_another_run_is_refused():
    with pytest.raises(InvalidMessage, match=f"progress of run other, expected progress of run {RUN}"):
        unseal(Progress, seal(PROGRESS, "other", ME), RUN, ME.peer_id)


def test_a_record_of_another_kind_is_refused():
    report = RoundReport(round_number=1, optimizer_step=1, samples=2, loss=0.5, seconds=1.0)
    with pytest.raises(InvalidMessage, match=r"report of run .*, expected progress of run"):
        unseal(Progress, seal(report, RUN, ME), RUN, ME.peer_id)


def test_kind_and_run_cannot_be_changed_after_signing():
    kind, run, body, signature = msgpack.unpackb(seal(EndRecord(reason="x", begun=1), "other", ME))
    for changed in ([kind, RUN, body, signature], ["manifest", run, body, signature]):
        with pytest.raises(InvalidMessage, match="the signature does not match"):
            unseal(EndRecord, msgpack.packb(changed), RUN, ME.peer_id)


@pytest.mark.parametrize(
    "change",
    [
        {"surplus": 1},
        {"samples": None},
        {"samples": -1},
        {"samples": 2**40},
        {"samples": 1.0},
        {"samples": "1"},
        {"samples": True},
        {"round_number": -1},
        {"round_number": 2**40},
        {"loss_sum": math.nan},
        {"loss_sum": math.inf},
        {"loss_sum": -math.inf},
        {"loss_sum": "1"},
    ],
    ids=str,
)
def test_a_signature_does_not_make_up_for_fields_that_are_wrong(change):
    fields = VALIDATION.model_dump()
    assert unseal(Validation, sealed_fields(fields, Validation), RUN, ME.peer_id) == VALIDATION
    name = next(iter(change))
    with pytest.raises(InvalidMessage, match=f"^validation of {ME.peer_id}: {name}: "):
        unseal(Validation, sealed_fields(fields | change, Validation), RUN, ME.peer_id)


@pytest.mark.parametrize("name", ["round_number", "samples"])
def test_missing_fields_are_refused(name):
    fields = PROGRESS.model_dump()
    del fields[name]
    with pytest.raises(InvalidMessage, match=f"{name}: missing"):
        unseal(Progress, sealed_fields(fields), RUN, ME.peer_id)


@pytest.mark.parametrize(
    "change",
    [
        {"samples_per_s": math.nan},
        {"samples_per_s": math.inf},
        {"samples_per_s": -1.0},
        {"stage": -2},
        {"stage": 256},
        {"state": "serving\n"},
        {"state": "gone"},
        {"version": "x" * 33},
        {"device": "x" * 65},
        {"queue": -1},
        {"serial": -1},
        {"incarnation": 1.0},
    ],
    ids=str,
)
def test_announcements_are_checked(change):
    envelope = sealed_fields(ANNOUNCEMENT.model_dump() | change, Announcement)
    with pytest.raises(InvalidMessage, match=next(iter(change))):
        unseal(Announcement, envelope, RUN, ME.peer_id)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xc0", b"\x90", b"\x01", b"\x81\xc0\x01", b"\x81\x01\x01", b"\x81"])
def test_bodies_that_are_no_map_of_fields_are_refused(body):
    with pytest.raises(InvalidMessage, match="progress of"):
        unseal(Progress, sealed_fields(body), RUN, ME.peer_id)


@pytest.mark.parametrize(
    "data", [None, 7, "text", b"", b"\xc1", msgpack.packb([1, 2, 3, 4]), msgpack.packb(["progress", RUN, b""])]
)
def test_what_is_no_envelope_is_refused(data):
    with pytest.raises(InvalidMessage, match=f"record of {ME.peer_id}: "):
        unseal(Progress, data, RUN, ME.peer_id)


def test_a_record_that_is_too_large_is_refused_unread():
    large = seal(ManifestRecord.model_construct(manifest="x" * MAX_RECORD_BYTES), RUN, ME)
    assert len(large) > MAX_RECORD_BYTES
    with pytest.raises(InvalidMessage, match=f"not an envelope of at most {MAX_RECORD_BYTES} bytes"):
        unseal(ManifestRecord, large, RUN, ME.peer_id)


def test_long_lists_are_refused():
    report = RoundReport(round_number=1, optimizer_step=1, samples=1, loss=1.0, seconds=1.0)
    record = ProgressRecord.model_construct(current=PROGRESS, finished=(report,) * 65, validations=())
    with pytest.raises(InvalidMessage, match="finished"):
        unseal(ProgressRecord, seal(record, RUN, ME), RUN, ME.peer_id)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(data):
    for envelope in (data, sealed_fields(data)):
        with pytest.raises(InvalidMessage):
            unseal(Progress, envelope, RUN, ME.peer_id)


def test_the_complaint_about_hostile_text_is_short():
    with pytest.raises(InvalidMessage) as caught:
        unseal(Progress, seal(PROGRESS, "r" * 10_000, ME), RUN, ME.peer_id)
    assert len(str(caught.value)) < 400
    with pytest.raises(InvalidMessage) as caught:
        unseal(Progress, sealed_fields(PROGRESS.model_dump() | {"samples": "x" * 10_000}), RUN, ME.peer_id)
    assert len(str(caught.value)) < 400


WARRANT = seal(Warrant(coordinator=OTHER.peer_id, term=3), ME.peer_id, ME)


def test_a_coordinator_acts_by_a_warrant_of_the_run_key():
    record = CoordinationRecord(warrant=WARRANT, beat=0)
    assert record.term(ME.peer_id, OTHER.peer_id) == Term(3, OTHER.peer_id)


@pytest.mark.parametrize(
    ("warrant", "author", "complaint"),
    [
        (WARRANT, ME.peer_id, "a warrant of"),  # another one's
        (b"", OTHER.peer_id, "no msgpack"),
        (seal(Warrant(coordinator=OTHER.peer_id, term=3), ME.peer_id, OTHER), OTHER.peer_id, "signature"),
        (seal(Warrant(coordinator=OTHER.peer_id, term=3), RUN, ME), OTHER.peer_id, "of run"),  # of another run
        (seal(EndRecord(reason="done", begun=1_790_000_000), ME.peer_id, ME), OTHER.peer_id, "expected warrant"),
    ],
)
def test_warrants_are_checked(warrant, author, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        CoordinationRecord(warrant=warrant, beat=0).term(ME.peer_id, author)


def test_all_orders_fit_into_a_record():
    order = Assignment(peer="p" * 52, announced=2**41, from_stage=254, to_stage=255, reason="r" * 300)
    record = CoordinationRecord(warrant=WARRANT, beat=2**39, assignments=(order,) * MAX_ASSIGNMENTS, reason="r" * 300)
    assert len(seal(record, ME.peer_id, ME)) < MAX_STORED_BYTES

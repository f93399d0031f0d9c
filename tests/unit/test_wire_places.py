"""Which records a node of the DHT keeps, under which keys and whose."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from test_wire_records import ANNOUNCEMENT

from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.places import LONGEST_LIFETIME_S, MOST_MANIFESTS, RecordPlaces
from swarm_peer.wire.records import (
    MANIFESTS_KEY,
    MAX_STORED_BYTES,
    CoordinationRecord,
    EndRecord,
    ManifestRecord,
    Progress,
    ProgressRecord,
    Record,
    TimelineRecord,
    Warrant,
    coordination_key,
    end_key,
    progress_key,
    seal,
    stage_key,
    timeline_key,
)

RUN_KEY, COORDINATOR, PEER = Identity.generate(), Identity.generate(), Identity.generate()
RUN = RUN_KEY.peer_id


def manifest(steps: int = 10) -> RunManifest:
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3}},
            "stages": {"count": 2},
            "data": {"sequence_length": 12},
            "training": {"steps": steps, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
    )


HASH = manifest().hash
PROGRESS = Progress(round_number=1, samples=2)
WARRANT = seal(Warrant(coordinator=COORDINATOR.peer_id, term=3), RUN, RUN_KEY)
COORDINATION = CoordinationRecord(warrant=WARRANT, beat=1)
GOOD: list[tuple[str, Record, str, Identity]] = [
    (MANIFESTS_KEY, ManifestRecord(manifest=manifest().canonical_json().decode()), RUN, RUN_KEY),
    (timeline_key(RUN), TimelineRecord(first_round=0, first_optimizer_step=0, begun=1), RUN, RUN_KEY),
    (end_key(RUN), EndRecord(begun=1, reason="done"), RUN, RUN_KEY),
    (coordination_key(RUN), COORDINATION, RUN, COORDINATOR),
    (stage_key(HASH, -1), ANNOUNCEMENT, HASH, PEER),
    (stage_key(HASH, 1), ANNOUNCEMENT, HASH, PEER),
    (progress_key(HASH), ProgressRecord(current=PROGRESS, finished=(), validations=()), HASH, PEER),
]


def key_id(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def check(places: RecordPlaces, key: str, record: Record, run: str, author: Identity, lifetime_s: float = 60.0) -> None:
    places.check(key_id(key), author.peer_id, seal(record, run, author, b"place"), b"place", lifetime_s)


@pytest.fixture
def places() -> RecordPlaces:
    places = RecordPlaces(key_id=key_id)
    places.keep_run(RUN, manifest())
    return places


@pytest.mark.parametrize("entry", GOOD, ids=lambda entry: entry[1].kind)
def test_the_records_of_the_run_are_kept(places: RecordPlaces, entry: Any) -> None:
    check(places, *entry)


OTHER = manifest(11).hash


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (("anything", ANNOUNCEMENT, HASH, PEER), "a key that run .* does not have"),
        ((stage_key(HASH, 2), ANNOUNCEMENT, HASH, PEER), "a key that run"),
        ((stage_key(OTHER, 0), ANNOUNCEMENT, OTHER, PEER), "a key that run"),
        ((end_key(PEER.peer_id), EndRecord(begun=1, reason=""), PEER.peer_id, PEER), "a key that run"),
        ((stage_key(HASH, 0), ANNOUNCEMENT, OTHER, PEER), "of run .* where a announcement of run .* belongs"),
        ((stage_key(HASH, 0), GOOD[-1][1], HASH, PEER), "a progress_record of run .* where a announcement"),
        ((MANIFESTS_KEY, GOOD[0][1], PEER.peer_id, PEER), "where a manifest of run"),
        ((MANIFESTS_KEY, GOOD[0][1], RUN, PEER), "the key of run .* signs it"),
        ((end_key(RUN), GOOD[2][1], RUN, COORDINATOR), "the key of run .* signs it"),
        ((coordination_key(RUN), COORDINATION, RUN, PEER), "a warrant of"),
        ((coordination_key(RUN), CoordinationRecord(warrant=b"", beat=1), RUN, COORDINATOR), "no msgpack"),
        ((stage_key(HASH, 0), PROGRESS, HASH, PEER), "a progress, which is not stored"),
        ((*GOOD[0], 2 * LONGEST_LIFETIME_S), "to be kept for"),
        ((*GOOD[0], float("nan")), "to be kept for"),
        ((*GOOD[4], 61.0), "to be kept for 61 s; at most 60 s"),  # an announcement, of a clock that is ahead
        ((*GOOD[-1], 3630.0), "to be kept for 3630 s; at most 60 s"),
        ((end_key(RUN), EndRecord.model_construct(begun=1, reason="x" * MAX_STORED_BYTES), RUN, RUN_KEY), "at most"),
    ],
)
def test_no_record_stands_where_it_does_not_belong(places: RecordPlaces, entry: Any, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        check(places, *entry)


def test_a_node_that_does_not_know_its_run_yet_keeps_what_is_signed() -> None:
    places = RecordPlaces(key_id=key_id)
    check(places, "anything", ANNOUNCEMENT, OTHER, PEER)
    with pytest.raises(InvalidMessage, match="which is not stored"):
        check(places, "anything", PROGRESS, OTHER, PEER)
    envelope = seal(ANNOUNCEMENT, OTHER, PEER, b"elsewhere")
    with pytest.raises(InvalidMessage, match="signature"):
        places.check(key_id("anything"), PEER.peer_id, envelope, b"place", 60.0)


def test_a_manifest_that_the_run_key_publishes_anew_is_learned_and_few_are_kept(places: RecordPlaces) -> None:
    news = [manifest(steps) for steps in range(11, 11 + MOST_MANIFESTS)]
    for new in news:
        check(places, MANIFESTS_KEY, ManifestRecord(manifest=new.canonical_json().decode()), RUN, RUN_KEY)
        check(places, stage_key(new.hash, 0), ANNOUNCEMENT, new.hash, PEER)
    oldest, *kept = (new.hash for new in news)
    with pytest.raises(InvalidMessage, match="a key that run"):
        check(places, stage_key(oldest, 0), ANNOUNCEMENT, oldest, PEER)
    for known in kept:
        check(places, stage_key(known, 0), ANNOUNCEMENT, known, PEER)
    check(places, MANIFESTS_KEY, ManifestRecord(manifest="{}"), RUN, RUN_KEY)  # of another version


def test_a_node_keeps_its_own_run_however_many_manifests_are_shown_again(places: RecordPlaces) -> None:
    for steps in (*range(11, 31), 10, *range(11, 31)):
        shown = ManifestRecord(manifest=manifest(steps).canonical_json().decode())
        check(places, MANIFESTS_KEY, shown, RUN, RUN_KEY)
        check(places, stage_key(HASH, 0), ANNOUNCEMENT, HASH, PEER)
        check(places, progress_key(HASH), GOOD[-1][1], HASH, PEER)
    newest = manifest(30)
    places.keep_run(RUN, newest)  # and by now it serves another one
    for steps in range(11, 30):
        shown = ManifestRecord(manifest=manifest(steps).canonical_json().decode())
        check(places, MANIFESTS_KEY, shown, RUN, RUN_KEY)
    check(places, stage_key(newest.hash, 0), ANNOUNCEMENT, newest.hash, PEER)
    with pytest.raises(InvalidMessage, match="a key that run"):
        check(places, stage_key(HASH, 0), ANNOUNCEMENT, HASH, PEER)


def test_a_record_takes_the_place_of_one_that_was_stored_while_the_clock_was_ahead() -> None:
    """The one that expires later stays: a coordinator's signs of life would not be seen for an hour."""
    places, now = RecordPlaces(key_id=str.encode), 1e9
    places.keep_run(RUN, manifest())
    key, day = coordination_key(RUN).encode(), 24 * 3600.0
    assert places.expiration(key, PEER.peer_id, now + 3000, day) == now + 3000 + day
    first, second = (places.expiration(key, PEER.peer_id, now + second, day) for second in (1, 2))
    assert now + 3000 + day < first < second < now + 3001 + day
    places.check_lifetime(key, second - now - 2)
    assert places.expiration(key, COORDINATOR.peer_id, now, day) == now + day, "each author has its own"
    assert places.expiration(key, PEER.peer_id, now + 3100, day) == now + 3100 + day


def test_a_record_that_other_clocks_might_refuse_is_outlasted_a_little_later() -> None:
    places, now, day = RecordPlaces(key_id=str.encode), 1e9, 24 * 3600.0
    places.keep_run(RUN, manifest())
    key = coordination_key(RUN).encode()
    ahead = places.expiration(key, PEER.peer_id, now + 3599, day)
    assert places.expiration(key, PEER.peer_id, now, day) == now + day
    assert ahead < places.expiration(key, PEER.peer_id, now + 60, day) < ahead + 1


def test_a_record_that_lasts_too_long_is_not_outlasted() -> None:
    """Nodes forget it, and would refuse another one."""
    places, now = RecordPlaces(key_id=str.encode), 1e9
    places.keep_run(RUN, manifest())
    key = stage_key(HASH, 0).encode()
    places.expiration(key, PEER.peer_id, now + 3600, 10.0)
    assert places.expiration(key, PEER.peer_id, now, 10.0) == now + 10


def test_a_record_of_another_life_is_outlasted() -> None:
    places, now = RecordPlaces(key_id=str.encode), 1e9
    places.note(b"key", PEER.peer_id, now + 50)
    assert now + 50 < places.expiration(b"key", PEER.peer_id, now, 10.0) < now + 51

"""Which records may stand under which keys of the DHT, and whose they must be.

A node that knows its run stores that run's records alone. Otherwise anybody could have it keep any number of keys. The
run's key signs what names the run, its warrants say who coordinates it, and peers announce themselves under the run's
manifest. Before a node knows its run, it stores what is signed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from pydantic import ValidationError

from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.view import UNDECIDED
from swarm_peer.wire.passes import RevocationsRecord, revocations_key
from swarm_peer.wire.records import (
    MANIFESTS_KEY,
    MAX_STORED_BYTES,
    Announcement,
    CoordinationRecord,
    EndRecord,
    ManifestRecord,
    ProgressRecord,
    TimelineRecord,
    coordination_key,
    end_key,
    open_envelope,
    parse,
    progress_key,
    stage_key,
    timeline_key,
)

STORED_KINDS = frozenset(
    record_type.kind
    for record_type in (
        ManifestRecord,
        TimelineRecord,
        EndRecord,
        RevocationsRecord,
        Announcement,
        CoordinationRecord,
        ProgressRecord,
    )
)
# The longest lifetime of a record is a day; the hour is for clocks that differ.
LONGEST_LIFETIME_S = 25 * 3600.0
# Clocks may differ by so much. An announcement lasts for `limits.announcement_s` by its author's clock, and this much
# longer by another one at most. Otherwise a peer whose clock is an hour ahead would seem present an hour after its
# death.
CLOCK_TOLERANCE_S = 30.0
# Of two records of one author under a key, nodes keep the one that expires later. Any time between the two would do.
AFTER_S = 0.001
# Clocks of peers that join differ by so much at most.
JOINING_TOLERANCE_S = 3.0
# Manifests of one run whose records are kept, this node's own included: the run's key may have published it anew, with
# more optimizer steps.
MOST_MANIFESTS = 4
# Their author is the run's key.
_KINDS_OF_THE_RUN_KEY = (ManifestRecord.kind, TimelineRecord.kind, EndRecord.kind, RevocationsRecord.kind)


class _Place(NamedTuple):
    """The kind and the run of the records under a key, and how long each may last."""

    kind: str
    run: str
    longest_s: float = LONGEST_LIFETIME_S


class RecordPlaces:
    """Says of each record whether this node keeps it, and when its own expire. Belongs to the event loop's thread.

    Args:
        key_id: the id in the DHT of a key
    """

    def __init__(self, *, key_id: Callable[[str], bytes]):
        self._key_id = key_id
        self._newest: dict[tuple[bytes, str], float] = {}  # when a record expires, by key and author
        self._run_id: str | None = None
        self._own = ""  # hash of this node's manifest
        # The places under each key: of records that the run's key signs or warrants, and of those of each of the run's
        # manifests, by its hash, the newest last.
        self._of_run: dict[bytes, _Place] = {}
        self._of_manifests: dict[str, dict[bytes, _Place]] = {}

    def keep_run(self, run_id: str, manifest: RunManifest) -> None:
        """Keep the records of this run alone, from now on."""
        self._run_id, self._own = run_id, manifest.hash
        keys = {
            MANIFESTS_KEY: ManifestRecord.kind,
            timeline_key(run_id): TimelineRecord.kind,
            end_key(run_id): EndRecord.kind,
            revocations_key(run_id): RevocationsRecord.kind,
            coordination_key(run_id): CoordinationRecord.kind,
        }
        self._of_run = {self._key_id(key): _Place(kind, run_id) for key, kind in keys.items()}
        self._keep_manifest(manifest)

    def _keep_manifest(self, manifest: RunManifest) -> None:
        stages = range(UNDECIDED, manifest.stages.count)
        keys = {stage_key(manifest.hash, stage): Announcement.kind for stage in stages}
        keys[progress_key(manifest.hash)] = ProgressRecord.kind
        longest_s = manifest.limits.announcement_s + CLOCK_TOLERANCE_S
        self._of_manifests[manifest.hash] = {
            self._key_id(key): _Place(kind, manifest.hash, longest_s) for key, kind in keys.items()
        }
        # Anybody may show old manifests again. The node's own has to stay: else it could not announce itself.
        learned = [known for known in self._of_manifests if known != self._own]
        for oldest in learned[: 1 - MOST_MANIFESTS]:
            del self._of_manifests[oldest]

    def check(self, key: bytes, author: str, envelope: bytes, place: bytes, lifetime_s: float) -> None:
        """Check that a record may stand under a key, for so long, as this author's.

        Args:
            key: the key's id
            place: what the signature must cover besides the record

        Raises:
            InvalidMessage: it may not, with the reason
        """
        # Before anything is built of it, and before its signature is checked.
        if not isinstance(envelope, bytes) or len(envelope) > MAX_STORED_BYTES:
            raise InvalidMessage(f"not an envelope of at most {MAX_STORED_BYTES} bytes")
        self.check_lifetime(key, lifetime_s)
        right = self._place(key)
        if self._run_id is not None and right is None:
            raise InvalidMessage(f"a key that run {self._run_id} does not have")
        kind, run, body = open_envelope(envelope, author, place)
        if kind not in STORED_KINDS:
            raise InvalidMessage(f"a {kind:.20}, which is not stored")
        if self._run_id is None or right is None:
            return
        if (kind, run) != (right.kind, right.run):
            raise InvalidMessage(f"a {kind:.20} of run {run:.60} where a {right.kind} of run {right.run} belongs")
        if kind in _KINDS_OF_THE_RUN_KEY and author != self._run_id:
            raise InvalidMessage(f"a {kind} of {author:.60}; the key of run {self._run_id} signs it")
        if kind == CoordinationRecord.kind:
            parse(CoordinationRecord, body, kind).term(self._run_id, author)
        elif kind == ManifestRecord.kind:
            self._learn(parse(ManifestRecord, body, kind))

    def check_lifetime(self, key: bytes, lifetime_s: float) -> None:
        """Check that a record under a key has not expired, and does not last too long from now on.

        Raises:
            InvalidMessage: it is shown again after its time; or its author's clock is ahead, or it is to be found after
                its author has gone
        """
        longest_s = self.longest_s(key)
        if lifetime_s <= 0.0:
            raise InvalidMessage("its time is over")
        if not lifetime_s <= longest_s:
            raise InvalidMessage(f"to be kept for {lifetime_s:.0f} s; at most {longest_s:.0f} s go")

    def expiration(self, key: bytes, author: str, now_s: float, lifetime_s: float) -> float:
        """When a record that is stored now is to expire: after the author's last one, which would hide it.

        That one may have been stored while this clock was ahead. If it lasts too long, nodes have not kept it.
        """
        wanted, newest = now_s + lifetime_s, self._newest.get((key, author), 0.0)
        latest = now_s + self.longest_s(key)
        if wanted <= newest <= latest - JOINING_TOLERANCE_S:
            wanted = newest + AFTER_S
        self._newest[key, author] = wanted if newest > latest else max(wanted, newest)
        return wanted

    def note(self, key: bytes, author: str, expiration: float) -> None:
        """Note a record that an earlier process with this author's key may have stored."""
        self._newest[key, author] = max(expiration, self._newest.get((key, author), 0.0))

    def longest_s(self, key: bytes) -> float:
        """How long a record under a key may last from now on."""
        place = self._place(key)
        return LONGEST_LIFETIME_S if place is None else place.longest_s

    def _place(self, key: bytes) -> _Place | None:
        found = (places[key] for places in (self._of_run, *self._of_manifests.values()) if key in places)
        return next(found, None)

    def _learn(self, record: ManifestRecord) -> None:
        """Keep the records of a manifest that the run's key has published anew."""
        if hashlib.sha256(record.manifest.encode()).hexdigest()[:32] in self._of_manifests:
            return
        try:
            self._keep_manifest(RunManifest.model_validate_json(record.manifest))
        except ValidationError:
            return  # of a version of this program that this one does not understand

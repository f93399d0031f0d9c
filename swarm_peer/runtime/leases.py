"""What stage 0 reads, and what of it has counted: leases slices of the data among stage-mates, and keeps the ledger.

The protocol, and why no sample counts twice, stand in policy/data_ledger.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import anyio

from swarm_peer.errors import CallError, NotServing
from swarm_peer.policy.data_ledger import MAX_UNHELD_EMPTY, DataLedger, arbiter
from swarm_peer.policy.ledger import StepCount
from swarm_peer.policy.ranges import SampleId, SliceId, WindowRange, merge_ranges, ranges_of
from swarm_peer.policy.recovery import Origin
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.data import SliceReader
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.samples import Sample, SamplePool
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.transport import Handler, Reply, Transport, check_body
from swarm_peer.wire.ledger_codec import decode_ledger, encode_ledger
from swarm_peer.wire.messages import MAX_FACTS, MAX_SLICES_ASKED, Body, LeaseCall, LeaseReply

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
# Pause before slices are asked for again that nobody gave: somebody did not answer, or others wanted the same ones.
RETRY_S = 0.5
# In announcement lifetimes: how long the leases of a peer that is gone without a word are respected. It may be alive,
# and merely out of this peer's reach.
PATIENCE = 2
# Stage-mates that must say that a pass is over, where there are so many.
PASS_WITNESSES = 2


class SliceLeases:
    """Belongs to the event loop's thread.

    Args:
        reader: of the samples in the pool
        announcement_s: how long an announcement is valid

    Attributes:
        generation: samples drawn in another one are not to be used any more: somebody else may read their slices now
    """

    def __init__(
        self,
        manifest_hash: str,
        reader: SliceReader,
        pool: SamplePool,
        transport: Transport,
        progress: ProgressBook,
        view: Callable[[], SwarmView],
        announcement_s: float,
        metrics: PeerMetrics,
        changed: Signal,
    ):
        self._hash = manifest_hash
        self._reader = reader
        self._pool = pool
        self._transport = transport
        self._me = transport.peer_id
        self._progress = progress
        self._view = view
        self._patience_s = PATIENCE * announcement_s
        self._metrics = metrics
        self._changed = changed
        self.generation = 0
        self._ledger: DataLedger | None = None
        self._held: set[SliceId] = set()  # the pool reads them, or gives out what it has read of them
        self._contested: set[SliceId] = set()  # of these: somebody else counts samples of them, too
        self._asking: set[SliceId] = set()
        self._drawn: set[SampleId] = set()  # on their way, not counted yet
        self._given_up: list[SampleId] = []
        self._told: tuple[WindowRange, ...] = ()  # facts from stage-mates, not in the ledger yet
        self._began = 0
        self._line = 0  # the global step that the line of updates began with
        self._ended = -1  # the newest step whose counts are in the ledger
        self._passes: dict[str, int] = {}  # that stage-mates last said they are in
        self._seen: dict[str, float] = {}  # when a stage-mate was last known to be there
        progress.on_count = self._heard

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {LeaseCall: self.handle_lease}

    # --- the ledger

    async def begin(self, step: int, origin: Origin, data: bytes) -> None:
        """Go on from a ledger, which belongs to the state that begins `step`; empty bytes are one of nothing counted.

        Args:
            origin: of the line of updates that the state belongs to

        Raises:
            UserError: the training data cannot be read
            InvalidMessage: no ledger, or one of other data
        """
        num_slices = await anyio.to_thread.run_sync(self._reader.num_slices, abandon_on_cancel=True)
        ledger = DataLedger(num_slices)
        if data:
            ledger = await anyio.to_thread.run_sync(decode_ledger, data, num_slices)
        for slice_id in self._held:
            self._pool.drop(slice_id)
        self._held.clear()
        self._contested.clear()
        self._drawn.clear()
        self._given_up.clear()
        self._pool.take_ends()
        self._told = ()
        self._passes.clear()
        self._ledger = ledger
        self._began, self._ended = step, step - 1
        self._line = origin.step
        self.generation += 1
        self._changed.notify()

    def end_step(self, step: int) -> bytes:
        """Enter what all have counted in `step`; returns the ledger."""
        ledger = self._known()
        counts = self._progress.ledger.counts(step)
        repeated = sum(ledger.add(self._credible(author, count.ranges)) for author, count in counts)
        self._note_repeated(step, repeated)
        ledger.add(self._told)
        self._told = ()
        self._ended = step
        for slice_id in [known for known in self._held if ledger.is_finished(known)]:
            self._let_go(slice_id)
        return encode_ledger(ledger)

    def _heard(self, step: int, author: str, before: StepCount) -> None:
        """A stage-mate has counted something."""
        if self._ledger is None:
            return
        ranges = self._progress.ledger.count_of(step, author).ranges
        if step == self._ended:
            # Of one step they may be many, and what each may tell must not add up.
            news = self._credible(author, ranges, max_empty=0)
            repeated = self._ledger.add(news) - sum(item.end - item.start for item in before.ranges)
            if step >= self._began:  # otherwise it may have been in the ledger that this peer began with
                self._note_repeated(step, repeated)
        if author == self._me:
            return
        counted_from = {item.slice_id for item in set(ranges) - set(before.ranges) if item.start < item.end}
        for slice_id in counted_from & self._held - self._contested:
            # It counted before it died, and another peer says so only now; or neither could know of the other.
            log.warning("slice_contested slice=%s author=%s", tuple(slice_id), author)
            self._contested.add(slice_id)
            self._pool.drop(slice_id)
            self._release_contested()

    def _credible(
        self, author: str, ranges: Iterable[WindowRange], max_empty: int = MAX_UNHELD_EMPTY
    ) -> Iterable[WindowRange]:
        return ranges if author == self._me else self._known().credible(author, ranges, self._held, max_empty)

    def _note_repeated(self, step: int, num_samples: int) -> None:
        if num_samples > 0:
            self._metrics.repeated_samples.inc(num_samples)
            log.warning("samples_repeated step=%d samples=%d", step, num_samples)

    def _known(self) -> DataLedger:
        if self._ledger is None:
            raise NotServing("this peer has no state yet")
        return self._ledger

    # --- samples

    async def draw(self, count: int) -> list[Sample]:
        """Wait for samples to train on, for as long as it takes.

        Raises:
            UserError: the training data cannot be read
        """
        samples = await self._pool.next_samples(count)
        self._drawn.update(sample.id for sample in samples)
        return samples

    def count(self, samples: Iterable[SampleId], before: StepCount) -> tuple[WindowRange, ...]:
        """The ranges of this peer's count, once these samples have counted as well."""
        counted = [*samples, *self._given_up]
        self._given_up.clear()
        self._drawn.difference_update(counted)
        self._release_contested()
        return merge_ranges([*before.ranges, *ranges_of(counted), *self._pool.take_ends()])

    def give_up(self, samples: Iterable[SampleId]) -> None:
        """These do not go through the model. They pass for counted: their slice would never be finished otherwise."""
        self._given_up += samples

    # --- leases

    async def run(self) -> None:
        """Lease slices, so that there are samples; for ever."""
        self._pool.start()
        try:
            while True:
                await self._changed.wait_for(lambda: self._ledger is not None and self._pool.wants_leases > 0)
                if not await self._lease():
                    await anyio.sleep(RETRY_S)
        finally:
            self._pool.stop()

    def forget(self, peer_id: str) -> None:
        """A stage-mate has said goodbye: its slices are free."""
        self._seen.pop(peer_id, None)
        if self._ledger is not None:
            self._ledger.release(peer_id)

    async def _lease(self) -> bool:
        """Ask for slices. Returns whether there were any."""
        ledger, generation = self._known(), self.generation
        count = min(self._pool.wants_leases, MAX_SLICES_ASKED)
        wanted = ledger.wanted(self._me, count, self._live(), run_ahead=self._pool.is_read_out)
        mates = set(self._present())
        first = arbiter({*mates, self._me}) if wanted else self._me
        self._asking = set(wanted)
        try:
            if first != self._me:
                wanted = await self._ask({first}, wanted)
            live = self._live()
            asked = [slice_id for slice_id in wanted if ledger.grant(slice_id, self._me, live).granted]
            kept = await self._ask(mates - {first}, asked) if asked else []
        finally:
            self._asking = set()
        if generation != self.generation:
            return False
        ledger.release(self._me, set(asked) - set(kept))
        pending = [*self._progress.ledger.ranges_from(self._progress.step), *self._told, *ranges_of(self._drawn)]
        for slice_id in kept:
            self._held.add(slice_id)
            self._pool.add_lease(slice_id, ledger.uncounted(slice_id, pending))
        return bool(kept)

    async def _ask(self, mates: Collection[str], wanted: Sequence[SliceId]) -> list[SliceId]:
        """Those of the slices that none of these stage-mates refuses."""
        ledger, refused = self._known(), set[SliceId]()

        async def ask(peer_id: str) -> None:
            call = LeaseCall(
                manifest=self._hash,
                line=self._line,
                slices=tuple(wanted),
                believed=tuple(ledger.leases(peer_id)[:MAX_FACTS]),
                counts=self._progress.signed_counts(),
            )
            try:
                reply = await self._transport.call(peer_id, call, timeout_s=TIMEOUT_S)
                answer = check_body(LeaseReply, reply.body)
                self._progress.merge(answer.counts, vouched=True)
            except CallError as error:
                log.info("lease_not_answered peer=%s reason=%s: %s", peer_id, error.code, error)
                refused.update(wanted)
                return
            self._note_pass(ledger, peer_id, answer.current_pass)
            ledger.release(peer_id, answer.corrections)
            for slice_id, owner in answer.refused:
                refused.add(slice_id)
                if owner is not None and owner != self._me and owner in self._live():
                    ledger.note_lease(slice_id, owner)
            if ledger is self._ledger:
                self._told = merge_ranges([*self._told, *(item for item in answer.facts if item.slice_id in wanted)])

        async with anyio.create_task_group() as tasks:
            for peer_id in sorted(mates):
                tasks.start_soon(ask, peer_id)
        return [slice_id for slice_id in wanted if slice_id not in refused]

    def _note_pass(self, ledger: DataLedger, peer_id: str, current_pass: int) -> None:
        """A stage-mate may have heard of the end of a pass before; one alone of several is not believed."""
        self._passes[peer_id] = current_pass
        mates = self._present()
        ahead = [mate for mate in mates if self._passes.get(mate, 0) > ledger.current_pass]
        if ahead and len(ahead) >= min(PASS_WITNESSES, len(mates)):
            ledger.begin_pass(ledger.current_pass + 1)  # more than one it cannot have missed
            self._passes = {mate: self._passes[mate] for mate in ahead}

    async def handle_lease(self, caller: str, call: LeaseCall, tensors: Sequence[memoryview]) -> Reply:
        ledger = self._known()
        if call.line != self._line:
            raise NotServing(f"this peer goes on from step {self._line}, where other samples have counted")
        if caller not in self._live():
            raise NotServing("only peers of stage 0 read the data, and this one does not know the caller")
        self._seen[caller] = time.monotonic()
        self._progress.merge(call.counts, vouched=True)
        live, refused, facts = self._live(), [], list[WindowRange]()
        for slice_id in dict.fromkeys(call.slices):
            known = merge_ranges(
                [*ledger.counted(slice_id), *(item for item in self._told if item.slice_id == slice_id)]
            )
            has_room = len(facts) + len(known) <= MAX_FACTS
            grant = ledger.grant(slice_id, caller, live) if has_room else None
            if grant is None or not grant.granted:
                refused.append((slice_id, None if grant is None else grant.owner))
            facts += known if has_room else ()
        reply = LeaseReply(
            refused=tuple(refused),
            facts=tuple(facts),
            current_pass=ledger.current_pass,
            corrections=tuple(ledger.corrections(self._me, set(call.believed) - self._asking)),
            counts=self._progress.signed_counts(),
        )
        return Reply(reply.model_dump())

    def welcome(self, peer_id: str) -> None:
        """A stage-mate has made itself known, before its announcement was seen."""
        self._seen[peer_id] = time.monotonic()

    def _present(self) -> list[str]:
        """Stage-mates that may be reading."""
        reading = (PeerState.SERVING, PeerState.DRAINING)
        peers = [peer.peer_id for peer in self._view().in_stage(0) if peer.state in reading]
        return [peer_id for peer_id in peers if peer_id != self._me]

    def _live(self) -> set[str]:
        """Whose leases are respected: this peer's, and those of stage-mates that were there of late."""
        now = time.monotonic()
        self._seen.update((peer_id, now) for peer_id in self._present())
        self._seen = {peer_id: at for peer_id, at in self._seen.items() if now - at <= self._patience_s}
        return {self._me, *self._seen}

    def _let_go(self, slice_id: SliceId) -> None:
        self._pool.drop(slice_id)
        self._held.discard(slice_id)
        self._contested.discard(slice_id)

    def _release_contested(self) -> None:
        """Give up the contested slices of which nothing is on its way any more."""
        busy = {sample.slice_id for sample in self._drawn}
        for slice_id in self._contested - busy:
            self._let_go(slice_id)
            self._known().release(self._me, [slice_id])

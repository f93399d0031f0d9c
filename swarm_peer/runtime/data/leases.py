"""Stage 0 divides the data among its peers: each leases slices from its stage-mates, and keeps the sample ledger.

policy/data/sample_ledger.py describes the protocol, and why no sample counts twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import anyio

from swarm_peer.errors import Busy, CallError, NotServing
from swarm_peer.policy.data.ranges import MAX_RANGES, SampleId, SliceId, WindowRange, merge_ranges, ranges_of
from swarm_peer.policy.data.sample_ledger import MAX_UNHELD_EMPTY, SampleLedger, arbiter
from swarm_peer.policy.progress_counter import RoundCount
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.trouble import Complaint
from swarm_peer.policy.view import Life, SwarmView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.prefetch import Sample, SamplePool
from swarm_peer.runtime.data.reading_mates import ReadingMates
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.transport import Handler, Reply, Transport, check_body
from swarm_peer.wire.ledger_codec import decode_ledger, encode_ledger
from swarm_peer.wire.messages import MAX_FACTS, MAX_SLICES_ASKED, Body, LeaseCall, LeaseReply

log = logging.getLogger(__name__)

# Deadline for the answer to a request for leases.
TIMEOUT_S = 5.0
# Pause after a request that gave no slice: some stage-mate did not answer, or others wanted the same slices.
RETRY_S = 0.5


class SliceLeases:
    """The slices that this stage-0 peer leases, and its sample ledger. Belongs to the event loop's thread.

    Attributes:
        generation: grows whenever this peer begins anew from a ledger. Samples drawn in an earlier generation must not
            be used: other peers may read their slices now
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        reader: SliceReader,
        pool: SamplePool,
        transport: Transport,
        progress: ProgressBook,
        view: Callable[[], SwarmView],
        on_other_timeline: Callable[[], None],
    ):
        """Make an object that leases nothing and has no ledger before `begin`.

        Args:
            reader: the reader that the pool reads with
            on_other_timeline: called when a stage-mate asks from another timeline than this peer's
        """
        self._context = context
        self._reader = reader
        self._pool = pool
        self._transport = transport
        self._me = transport.peer_id
        self._progress = progress
        self._on_other_timeline = on_other_timeline
        self._mates = ReadingMates(
            me=transport.peer_id,
            clock=context.clock,
            announcement_s=context.resolved.manifest.limits.announcement_s,
            view=view,
        )
        self.generation = 0
        self._ledger: SampleLedger | None = None
        self._held: set[SliceId] = set()  # the pool reads them, or still has samples of them
        self._contested: set[SliceId] = set()  # held slices of which another peer counts samples, too
        self._asking: set[SliceId] = set()  # slices that this peer is asking stage-mates for
        self._drawn: set[SampleId] = set()  # samples in flight, which have not counted yet
        self._given_up: list[SampleId] = []  # to be added to the next count
        self._told: tuple[WindowRange, ...] = ()  # facts from stage-mates, not in the ledger yet
        self._unnamed: tuple[WindowRange, ...] = ()  # counted here, in rounds that stage-mates ended without them
        self._began = 0  # the round that this generation began in
        self._timeline_first_round = 0
        self._ended = -1  # the newest round whose counts are in the ledger
        progress.add_listener(self._heard)

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The handler of stage-mates' requests for leases."""
        return {LeaseCall: self.handle_lease}

    # --- the ledger

    async def read_ledger(self, data: bytes) -> SampleLedger:
        """Decode the ledger of a state; no bytes are one in which nothing has counted yet.

        Raises:
            UserError: the training data cannot be read
            InvalidMessage: it is no ledger, or a ledger of other training data
        """
        num_slices = await self._context.threads.run(self._reader.num_slices, abandon_on_cancel=True)
        if not data:
            return SampleLedger(num_slices)
        return await self._context.threads.run(decode_ledger, data, num_slices)

    def begin(
        self, round_number: int, timeline: Timeline, ledger: SampleLedger, held: Sequence[WindowRange] = ()
    ) -> None:
        """Begin anew from the ledger of a state that has been taken over, without leases.

        Args:
            round_number: the round that the state begins
            timeline: the timeline that the state belongs to
            held: samples whose work this peer keeps, of which the peer that gave the state may not have heard
        """
        goes_on = self._ledger is not None and timeline.first_round == self._timeline_first_round
        # Rounds that stage-mates ended without this peer: of what it counted in them, they may not have heard.
        missed = self._progress.counter.count_of(self._ended + 1, self._progress.author).ranges
        unnamed = ledger.lacking([*self._unnamed, *missed]) if goes_on else []
        for slice_id in self._held:
            self._pool.drop(slice_id)
        self._held.clear()
        self._contested.clear()
        self._drawn.clear()
        self._given_up.clear()
        self._unnamed = ranges_of(unnamed)
        self._pool.take_ends()
        self._told = ()
        self._mates.forget_passes()
        self._ledger = ledger
        ledger.note(ranges_of(set(ledger.lacking(held)).difference(unnamed)))
        self._began, self._ended = round_number, round_number - 1
        if goes_on:  # whoever gave the state may not have heard of all that this peer knows to have counted
            for author, count in self._progress.counter.counts(self._ended):
                ledger.add(self._credible(author, count.ranges))
            # Peers still tell each other the counts of the round before. This peer's count of the next one, in which
            # it has not trained yet, tells of earlier ones.
            self._given_up = ledger.lacking(self._unnamed)
            if self._given_up:
                ranges = self.note_counted((), RoundCount())[:MAX_RANGES]
                self._progress.count_own(round_number, RoundCount(ranges=ranges))
        self._timeline_first_round = timeline.first_round
        self.generation += 1
        self._context.changed.notify()

    def end_round(self, round_number: int, brought: Mapping[str, Sequence[WindowRange]]) -> bytes:
        """Add the samples that all peers have counted in a round to the ledger. Returns the encoded ledger.

        Args:
            brought: if a period has ended with this round, the samples in its average, by the peers that brought them.
                Where stage-mates ended rounds without each other, this peer has not heard of all of them
        """
        ledger = self._known()
        counts = self._progress.counter.counts(round_number)
        repeated = sum(ledger.add(self._credible(author, count.ranges)) for author, count in counts)
        self._context.metrics.repeat(repeated, round_number=round_number)
        ledger.add(self._told)
        for author, ranges in brought.items():
            news = ledger.note(ranges)
            self._contest(news if author != self._me else (), author)
        self._told = self._unnamed = ()
        ledger.passed_over.clear()
        self._ended = round_number
        for slice_id in [known for known in self._held if ledger.is_finished(known)]:
            self._let_go(slice_id)
        return encode_ledger(ledger)

    def _heard(self, round_number: int, author: Life, before: RoundCount) -> None:
        """Take note of a count that another peer has sent, or of a former life of this peer."""
        if self._ledger is None:
            return
        ranges = self._progress.counter.count_of(round_number, author).ranges
        # Those of the round before come while this round's update is applied; earlier ones may be of another timeline.
        if self._began - 1 <= round_number <= self._ended:
            # One author may send many counts of a round. Each could otherwise have more slices believed empty.
            news = self._credible(author, ranges, max_empty=0)
            repeated = self._ledger.add(news) - sum(item.end - item.start for item in before.ranges)
            if round_number >= self._began:  # otherwise they may have been in the ledger that `begin` was given
                self._context.metrics.repeat(repeated, round_number=round_number)
        if author == self._progress.author:
            return
        news = set(ranges) - set(before.ranges)
        self._contest({item.slice_id for item in news if item.start < item.end}, author.peer_id)

    def _contest(self, counted_from: Collection[SliceId], author: str) -> None:
        """Stop reading slices of which another peer has counted samples.

        It counted before it died, and another peer says so only now; or neither peer knew of the other.
        """
        for slice_id in self._held.intersection(counted_from) - self._contested:
            log.warning("slice_contested slice=%s author=%s", tuple(slice_id), author)
            self._contested.add(slice_id)
            self._pool.drop(slice_id)
            self._release_contested()

    def _credible(
        self, author: Life, ranges: Iterable[WindowRange], max_empty: int = MAX_UNHELD_EMPTY
    ) -> Iterable[WindowRange]:
        """The ranges of a count without the ends of slices that its author cannot know.

        A former life of this peer is weighed like another peer, so that all stage-mates believe the same of it.
        """
        if author == self._progress.author:
            return ranges
        return self._known().credible(author.peer_id, ranges, self._held, max_empty)

    def _known(self) -> SampleLedger:
        """The ledger. Raises NotServing before there is one."""
        if self._ledger is None:
            raise NotServing("this peer has no state yet")
        return self._ledger

    # --- samples

    async def draw(self, count: int) -> list[Sample]:
        """Wait for samples to train on, and take them. Raises UserError if the training data cannot be read."""
        samples = await self._pool.next_samples(count)
        self._drawn.update(sample.id for sample in samples)
        return samples

    def complaint(self, now_s: float) -> Complaint | None:
        """This peer's trouble in reading the data, if it has any."""
        return self._pool.complaint(now_s)

    def note_counted(self, samples: Iterable[SampleId], before: RoundCount) -> tuple[WindowRange, ...]:
        """Note that samples of this peer have counted.

        Args:
            before: this peer's count of the round so far

        Returns:
            the ranges of its count from now on: also the samples given up and the ends of slices found meanwhile
        """
        # A peer counts no more samples than a global batch has, and others take no count with twice as many windows.
        num_given_up = sum(item.end - item.start for item in before.ranges) - before.samples
        room = max(0, self._progress.counter.global_batch_size - num_given_up)
        counted = [*samples, *self._given_up[:room]]
        del self._given_up[:room]
        self._drawn.difference_update(counted)
        self._release_contested()
        return merge_ranges([*before.ranges, *ranges_of(counted), *self._pool.take_ends()])

    def give_up(self, samples: Iterable[SampleId]) -> None:
        """Let samples that no peer trains on pass for counted. Otherwise their slices would never be finished."""
        self._given_up += samples

    # --- leases

    async def run(self) -> None:
        """Run the pool and lease slices as it needs them, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pool.run)
            while True:
                await self._context.changed.wait_for(self._needs_leases)
                if not await self._lease():
                    await anyio.sleep(RETRY_S)

    def _needs_leases(self) -> bool:
        return self._ledger is not None and self._num_wanted() > 0

    def _num_wanted(self) -> int:
        return self._pool.num_wanted(len(self._mates.live()))

    def forget(self, peer_id: str) -> None:
        """Free the slices of a stage-mate that has said goodbye."""
        self._mates.forget(peer_id)
        if self._ledger is not None:
            self._ledger.release(peer_id)

    async def _lease(self) -> bool:
        """Ask stage-mates for slices. Returns whether this peer got any."""
        ledger, generation = self._known(), self.generation
        self._mates.note_present()
        count = min(self._num_wanted(), MAX_SLICES_ASKED)
        wanted = ledger.wanted(self._me, count, self._mates.live(), run_ahead=self._pool.is_read_out)
        mates = set(self._mates.present())
        first = arbiter({*mates, self._me}) if wanted else self._me
        self._asking = set(wanted)
        try:
            if first != self._me:
                wanted = await self._ask({first}, wanted)
            live = self._mates.live()
            asked = [slice_id for slice_id in wanted if ledger.grant(slice_id, self._me, live).granted]
            # The first one refuses all of a pass that is over, and others have to say so as well.
            is_behind = self._mates.lacks_witnesses(ledger)
            kept = await self._ask(mates - {first}, asked) if asked or is_behind else []
        finally:
            self._asking = set()
        if generation != self.generation:
            return False
        ledger.release(self._me, set(asked) - set(kept))
        pending = [
            *self._progress.counter.ranges_from(self._progress.round_number),
            *self._told,
            *ranges_of(self._drawn),
        ]
        for slice_id in kept:
            self._held.add(slice_id)
            self._pool.add_lease(slice_id, ledger.uncounted(slice_id, pending))
        return bool(kept)

    async def _ask(self, mates: Collection[str], wanted: Sequence[SliceId]) -> list[SliceId]:
        """Ask stage-mates for slices. Returns the slices that none of them refuses."""
        ledger, refused = self._known(), set[SliceId]()

        async def ask(peer_id: str) -> None:
            call = LeaseCall(
                manifest=self._context.resolved.hash,
                timeline_first_round=self._timeline_first_round,
                slices=tuple(wanted),
                believed=tuple(ledger.leases(peer_id)[:MAX_FACTS]),
                counts=self._progress.signed_counts(),
            )
            try:
                reply = await self._transport.call(peer_id, call, timeout_s=TIMEOUT_S)
                answer = check_body(LeaseReply, reply.body)
                if self._progress.merge(answer.counts, vouched=True):
                    # Without all counts, this peer might read samples that have counted. The others come next time.
                    raise Busy("more counts than can be checked at once")
            except CallError as error:
                log.info("lease_not_answered peer=%s reason=%s: %s", peer_id, error.code, error)
                refused.update(wanted)
                return
            self._mates.note_present()
            if ledger is self._ledger:  # otherwise the answer is of a timeline that was given up
                self._mates.note_pass(peer_id, answer.current_pass, ledger)
            ledger.release(peer_id, answer.corrections)
            for slice_id, owner in answer.refused:
                refused.add(slice_id)
                if slice_id in wanted and owner is not None and owner != self._me and owner in self._mates.live():
                    ledger.note_lease(slice_id, owner)
            over = {each for each, owner in answer.refused if owner is None and each.pass_number < answer.current_pass}
            ledger.pass_over(over.intersection(wanted).difference(item.slice_id for item in answer.facts))
            if ledger is self._ledger:
                told = merge_ranges([*self._told, *(item for item in answer.facts if item.slice_id in wanted)])
                if len(told) > MAX_FACTS:  # more than good stage-mates tell in a round: without them, nothing is read
                    log.warning("lease_facts_refused peer=%s facts=%d", peer_id, len(told))
                    refused.update(wanted)
                else:
                    self._told = told

        async with anyio.create_task_group() as tasks:
            for peer_id in sorted(mates):
                tasks.start_soon(ask, peer_id)
        return [slice_id for slice_id in wanted if slice_id not in refused]

    async def handle_lease(self, caller: str, call: LeaseCall, tensors: Sequence[memoryview]) -> Reply:
        """Grant or refuse slices to a stage-mate, and tell it the facts about them.

        Raises:
            NotServing: this peer has no ledger yet, is on another timeline, or does not know the caller as a stage-mate
        """
        ledger = self._known()
        self._mates.note_present()
        if caller not in self._mates.live():
            raise NotServing("only peers of stage 0 read the data, and this one does not know the caller")
        if call.timeline_first_round != self._timeline_first_round:
            # Without leases this peer sends nothing to the next stage, which would tell it of the other timeline.
            self._on_other_timeline()
            raise NotServing(
                f"this peer is on the timeline that begins with round {self._timeline_first_round}, in which other "
                f"samples have counted"
            )
        self._mates.welcome(caller)
        self._progress.merge(call.counts, vouched=True)
        if len(ledger.leases(caller)) > MAX_FACTS:
            # More than could ever be corrected. The caller itself refuses to others what it really leases.
            ledger.release(caller)
        live, refused, facts = self._mates.live(), [], list[WindowRange]()
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
        """Note a stage-mate that has greeted this peer. Its announcement may not have been seen yet."""
        self._mates.welcome(peer_id)

    def _let_go(self, slice_id: SliceId) -> None:
        """Stop reading a slice."""
        self._pool.drop(slice_id)
        self._held.discard(slice_id)
        self._contested.discard(slice_id)

    def _release_contested(self) -> None:
        """Give up the leases of contested slices of which no sample is in flight any more."""
        busy = {sample.slice_id for sample in self._drawn}
        for slice_id in self._contested - busy:
            self._let_go(slice_id)
            self._known().release(self._me, [slice_id])

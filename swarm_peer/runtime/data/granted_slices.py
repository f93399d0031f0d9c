"""Reads the slices of the data that the leader of stage 0 grants this seat, and says what has come of their samples.

Owns which slices this seat reads, and which of their samples are in flight. The protocol decides what counts: whatever
this seat has read and no entry holds is read again, by whoever is granted the slice next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from swarm_peer.policy.data.ranges import SampleId, SliceId, WindowRange, ranges_of
from swarm_peer.policy.trouble import Complaint
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.grants import Reads
from swarm_peer.protocol.log import Base, Receipt
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import EpochId, Signed
from swarm_peer.protocol.work import OpenRound
from swarm_peer.runtime.data.prefetch import Sample, SamplePool


@dataclass(eq=False)
class Reading:
    """A slice that this seat reads. The same slice may be granted again later: that is another reading.

    Attributes:
        in_flight: windows that were drawn, and have neither counted nor been given up
        end: its end, once that is found and has yet to be told
        is_read: whether all of it was read
    """

    in_flight: set[int] = field(default_factory=set)
    end: WindowRange | None = None
    is_read: bool = False


class GrantedSlices:
    """The slices that one seat of stage 0 reads. Belongs to the event loop's thread.

    Args:
        member: the seat's part in the protocol; None while it has no place
        num_readers: how many peers read this data

    Attributes:
        restart: of the run, which these slices are read after; samples that were drawn after an earlier one are void
    """

    def __init__(self, *, pool: SamplePool, member: Callable[[], Member | None], num_readers: Callable[[], int]):
        self.restart: Restart | None = None
        self._pool = pool
        self._member = member
        self._num_readers = num_readers
        self._held: dict[SliceId, Reading] = {}
        self._follows: Member | None = None  # whose grants these are
        self._seen: tuple[EpochId, int] | None = None

    def follow(self) -> None:
        """Read what is granted, and put away what is through; to be called whenever the core may have gone on."""
        member = self._member()
        if member is None or member.ledger is None:
            return
        if member is not self._follows or member.log.restart != self.restart:
            self._begin(member)  # others were granted what this seat read in a place that it has lost
        self._note_ends()
        granted = member.granted
        if granted is not None and granted.reign == member.reign:
            for slice_id in self._held.keys() - set(granted.slices):
                self._put_away(slice_id)  # another seat reads it
            if self._seen != (granted.reign, granted.number):
                self._seen = granted.reign, granted.number
                for slice_id in granted.slices:
                    if slice_id not in self._held and not member.ledger.is_finished(slice_id):
                        self._held[slice_id] = Reading()
                        self._pool.add_lease(slice_id, member.ledger.uncounted(slice_id))
        undecided = {item.slice_id for each in member.work.open.values() for item in each.computed.samples}
        for slice_id, reading in list(self._held.items()):
            # Entries hold what was read of it, or that is void, and to be read again.
            is_over = self._is_through(slice_id) and reading.end is None and slice_id not in undecided
            if member.ledger.is_finished(slice_id) or is_over:
                self._put_away(slice_id)
        member.reads = Reads(tuple(sorted(self._held)), self._pool.num_wanted(self._num_readers()), granted)

    def _begin(self, member: Member) -> None:
        for slice_id in list(self._held):
            self._put_away(slice_id)
        self._pool.take_ends()
        self._follows, self.restart, self._seen = member, member.log.restart, None

    def _put_away(self, slice_id: SliceId) -> None:
        del self._held[slice_id]
        self._pool.drop(slice_id)

    def _note_ends(self) -> None:
        for end in self._pool.take_ends():
            if (reading := self._held.get(end.slice_id)) is not None:
                reading.end, reading.is_read = end, True

    # --- samples

    async def draw(self, count: int) -> list[Sample]:
        """Wait for samples, and take them.

        Raises:
            UserError: the data cannot be read
        """
        samples = await self._pool.next_samples(count)
        for sample in samples:
            if (reading := self._held.get(sample.id.slice_id)) is not None:
                reading.in_flight.add(sample.id.window)
        return samples

    def readings_of(self, samples: Iterable[SampleId]) -> dict[SliceId, Reading | None]:
        """How this seat reads the slices of samples now; None of a slice that it does not read."""
        return {each.slice_id: self._held.get(each.slice_id) for each in samples}

    def may_launch(self, samples: Iterable[SampleId], drawn_from: Mapping[SliceId, Reading | None]) -> bool:
        """Whether samples that were drawn are of use: this seat has read on in all their slices, and none has counted.

        One that somebody else has read, or that this seat reads again, would cost the whole contribution that names it.
        """
        member, samples = self._member(), list(samples)
        if member is None or member.ledger is None or member is not self._follows:
            return False
        return self.readings_of(samples) == drawn_from and not member.ledger.num_counted(ranges_of(samples))

    def drop(self, samples: Iterable[SampleId], drawn_from: Mapping[SliceId, Reading | None]) -> None:
        """Be through with samples that were drawn. The next reader of their slices reads those that no entry holds."""
        for sample in samples:
            if (reading := drawn_from.get(sample.slice_id)) is not None:
                reading.in_flight.discard(sample.window)

    def counted(
        self,
        present: OpenRound,
        samples: Iterable[SampleId],
        *,
        base: Base,
        weight: int,
        loss_sum: float = 0.0,
        receipt: Signed[Receipt] | None = None,
    ) -> bool:
        """A microbatch came back. Returns False if it is of no use: its round is over, or it has another base.

        Args:
            receipt: of the seat of stage 1; None in a run of one stage
        """
        member, samples = self._member(), list(samples)
        if member is None:
            return False
        ranges = (*ranges_of(samples), *self._ends())
        work = member.work
        if not work.computed(present.number, base, weight=weight, samples=ranges, receipt=receipt, loss_sum=loss_sum):
            return False
        self.drop(samples, self._held)
        self._told(ranges)
        return True

    def give_up(self, present: OpenRound, samples: Iterable[SampleId]) -> None:
        """A microbatch has failed too often: its samples count as read, so that nobody tries them for ever."""
        member, samples = self._member(), list(samples)
        if member is not None:
            member.work.computed(present.number, present.computed.base, weight=0, samples=ranges_of(samples))
        self.drop(samples, self._held)

    def tell_ends(self, present: OpenRound) -> None:
        """Tell ends of slices that no sample goes with: those of empty slices, or found late."""
        member, ends = self._member(), self._ends()
        if member is None or not ends:
            return
        if member.work.computed(present.number, present.computed.base, weight=0, samples=ends):
            self._told(ends)

    @property
    def has_ends(self) -> bool:
        """Whether ends of slices wait to be told."""
        return bool(self._ends())

    def _ends(self) -> tuple[WindowRange, ...]:
        """The ends of slices that this seat is through with: nobody else needs to read them."""
        self._note_ends()
        return tuple(
            each.end for slice_id, each in self._held.items() if each.end is not None and self._is_through(slice_id)
        )

    def _is_through(self, slice_id: SliceId) -> bool:
        """Whether all of a slice was read, and nothing of it is in flight or waits to be drawn."""
        reading = self._held[slice_id]
        return reading.is_read and not reading.in_flight and not self._pool.num_ready(slice_id)

    def _told(self, ranges: Iterable[WindowRange]) -> None:
        for item in ranges:
            if item.is_last and (reading := self._held.get(item.slice_id)) is not None:
                reading.end = None

    def complaint(self, now_s: float) -> Complaint | None:
        """This peer's trouble in reading, if it has any."""
        return self._pool.complaint(now_s)

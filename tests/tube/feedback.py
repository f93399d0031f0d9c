"""What must hold where averages travel in few bits, and what that leaves over is brought to later ones.

A seat brings what its newest average has left over, if that is in the log that it goes on from since the run last began
or began anew; otherwise nothing. It may lose that, if it says so. An average, and what it leaves over at each member,
are bitwise those of one process, `averaged`; and an update is that of the gradients and of all that was left over
before, less what is left over now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from hosts import Host
from invariants import Invariants, members_of
from loop import HOST
from records import Place
from wrapping import after, around

from swarm_peer.codecs import find_codec, sparse
from swarm_peer.codecs.feedback import Try, flat
from swarm_peer.codecs.parts import averaged
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Cut, Entry
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import Seat
from swarm_peer.runtime.replica import Replica
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver import RoundDriver

# The first optimizer steps are averaged in 8 bit: some five of the thousand that a run of the tube would make.
FEW_BITS = {"compression": "topk_2bit", "dense_share": 0.005}
# A stage has 900 to 5,000 values. As of whole chunks, a quarter of the values travels.
CHUNK_VALUES, KEPT = 256, 64


@dataclass
class Tried:
    """One try of a cut's average at one seat.

    Attributes:
        host: of the seat
        begun: of which `after` grows until the average is made
        drops: how often the seat had told by then that it has lost what was left over
        brought: its values, once they are known
    """

    host: Host
    begun: Try
    drops: float
    brought: torch.Tensor | None = None


class FeedbackInvariants(Invariants):
    """Watches a tube whose run has averages of few bits."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._tries: dict[tuple[int, Seat, str], Tried] = {}  # by stage, seat and cut
        self._of_try: dict[int, Tried] = {}  # by the id of what it has begun
        # What entries have left over at their members, as it was when they came to be; and their averages.
        self._left: dict[Place, dict[Seat, torch.Tensor]] = {}
        self._averages: dict[Place, torch.Tensor] = {}
        self._former: set[tuple[int, Seat]] = set()  # stages with seats that have left them in order

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), ExitStack() as stack:
            stack.enter_context(patch.object(sparse, "CHUNK_SIZE", CHUNK_VALUES))
            stack.enter_context(patch.object(sparse.TOPK_2BIT, "_kept", KEPT))
            stack.enter_context(around(CutAverager, "_try", self._trying))
            stack.enter_context(after(Try, "bring", self._brought))
            stack.enter_context(around(Replica, "close", self._closing))
            yield

    # --- what a seat brings

    def _trying(self, call: Any, averager: CutAverager, cut: Cut) -> Try:
        begun: Try = call(cut)
        host, stage, seat = HOST.get(), averager._stage, HOST.get().seat
        self._tries[stage, seat, cut.hash] = self._of_try[id(begun)] = Tried(host, begun, _drops(host))
        self._former.discard((stage, seat))
        newest = self._newest_with(stage, cut.parent, seat)
        left = None if newest is None else self._left[stage, newest.hash][seat]
        if begun.before is None or not begun.before.any():
            self._check_told(host, stage, newest)
        elif left is None or not torch.equal(begun.before, left):
            source = "any average since the run began" if newest is None else self._said((stage, newest.hash))
            self.tube.violation(
                f"{host} brings to round {cut.round} of stage {stage} other than is left over from {source}"
            )
        return begun

    async def _closing(self, call: Any, replica: Replica) -> None:
        """A peer has left a stage: nothing of what it had left over is sent any more."""
        await call()
        host, stage = HOST.get(), replica.stage
        if self.tube.is_over or stage in members_of(host):  # those who vote did not answer it
            return
        self._former.add((stage, host.seat))
        entries = [place for place, left in self._left.items() if place[0] == stage and host.seat in left]
        self._check_told(host, stage, self.records.entries[entries[-1]] if entries else None)

    def _check_told(self, host: Host, stage: int, entry: Entry | None) -> None:
        """What an average has left over at a peer is lost: the peer has told so since."""
        assert host.seat is not None, "it has had a place"
        if entry is None or not self._left[stage, entry.hash][host.seat].any():
            return
        if _drops(host) <= self._tries[stage, host.seat, entry.cut.hash].drops:
            said = self._said((stage, entry.hash))
            self.tube.violation(f"{host} has lost what {said} has left over, and has not told so")

    def _newest_with(self, stage: int, head: str, seat: Seat) -> Entry | None:
        """The newest average with a seat, of the entries up to one since the run last began or began anew."""
        while (entry := self.records.entries.get((stage, head))) is not None:
            if entry.cut.averages and seat in entry.cut.seats:
                return entry
            head = entry.cut.parent
        return None

    def _brought(self, begun: Try, values: torch.Tensor, _: int) -> None:
        self._of_try[id(begun)].brought = values.clone()

    # --- what an average makes of it

    def _appending(self, member: Member, committed: Committed) -> None:
        place, cut = (member.stage, committed.entry.hash), committed.entry.cut
        super()._appending(member, committed)
        if not cut.averages or place in self._left:
            return
        tries = {seat: self._tries[member.stage, seat, cut.hash] for seat in cut.seats}
        self._left[place] = {seat: tried.begun.after.clone() for seat, tried in tries.items()}
        self._averages[place], expected = self._average_of(cut, tries)
        for seat, left in self._left[place].items():
            host = tries[seat].host
            if (member.stage, seat) in self._former:
                self._check_told(host, member.stage, committed.entry)
            if not torch.equal(left, expected[seat]):
                error = float((left - expected[seat]).abs().max())
                self.tube.violation(
                    f"{host} has left over other values than one process, by {error:.2g}: {self._said(place)}"
                )

    def _average_of(self, cut: Cut, tries: dict[Seat, Tried]) -> tuple[torch.Tensor, dict[Seat, torch.Tensor]]:
        """The average of one process, and what it leaves over at each member."""
        total = sum(part.weight for part in cut.parts)
        zeros = {seat: torch.zeros_like(tried.begun.after) for seat, tried in tries.items()}
        if not total:
            before = {seat: _values(tried.begun.before, zeros[seat]) for seat, tried in tries.items()}
            return next(iter(zeros.values())), before
        brought = {seat.peer: tried.brought for seat, tried in tries.items() if tried.brought is not None}
        codec = find_codec(next(iter(tries.values())).begun.codec)
        average = averaged(brought, total, codec, {seat.peer: zero for seat, zero in zeros.items()})
        return average, zeros

    async def _applied(self, call: Any, driver: RoundDriver) -> None:
        member = driver.member
        committed = driver._due(member) if member is not None else None
        if member is not None and committed is not None and committed.entry.cut.averages:
            place = member.stage, committed.entry.hash
            if not torch.equal(flat(driver.updates[committed.entry.hash]), self._averages[place]):
                self.tube.violation(f"{HOST.get()} has another average than one process: {self._said(place)}")
        await super()._applied(call, driver)

    def _compare(self, place: Place, entry: Entry, restart: Restart, gradients: Sequence[torch.Tensor]) -> None:
        """An update is that of these gradients and of what was left over before, less what is left over now."""
        change = torch.zeros(sum(gradient.numel() for gradient in gradients), dtype=torch.float64)
        for seat, left in self._left[place].items():
            before = self._tries[place[0], seat, entry.cut.hash].begun.before
            change += _values(before, torch.zeros_like(left)).double() - left.double()
        change /= max(sum(part.weight for part in entry.cut.parts), 1)
        parts = torch.split(change.float(), [gradient.numel() for gradient in gradients])
        sent = [gradient + part.view_as(gradient) for gradient, part in zip(gradients, parts, strict=True)]
        super()._compare(place, entry, restart, sent)


def _drops(host: Host) -> float:
    dropped: float = host.metrics.leftovers_dropped._value.get()
    return dropped


def _values(leftover: torch.Tensor | None, zeros: torch.Tensor) -> torch.Tensor:
    return zeros if leftover is None else leftover

"""One seat's part in the rounds of one stage, as a member: what it computes, says and takes over.

Its driver computes, averages and applies; the properties here say what it shall do, and it says when it has done that.
The leader's part stands in leader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.log import (
    Blamed,
    Close,
    Committed,
    Contribution,
    Cut,
    Done,
    EpochOf,
    Have,
    Log,
    Name,
    Part,
    Pass,
)
from swarm_peer.protocol.messages import Blame, Body, Counted, Entries, Ready, Said, Status, Timing
from swarm_peer.protocol.statements import EpochId, Seat, Sign, Signed


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """All that members and leaders of one process share.

    Attributes:
        lag: rounds that may be open while an earlier one is not committed, besides the next: 1 for delayed updates
        averages: whether a round ends with an average
        fills: whether counts fill the batch of a round
        epoch_of: an epoch that was chosen, by its id
        sign: signs as this process's seat
    """

    num_stages: int
    lag: int
    averages: Callable[[int], bool]
    fills: Callable[[Close], bool]
    epoch_of: EpochOf
    sign: Sign
    timing: Timing


@dataclass
class OpenRound:
    """A round that is not committed, as one member sees it.

    Attributes:
        samples: that it has computed, by id
        base: heads of all stages that they were computed from; None before the first
        is_drained: whether nothing of it is inside any more
        cut: the newest one
        result: its own Have or Pass of that cut
        failed: its statement that it has no result; None while it averages, or if it has one
    """

    number: int
    samples: list[str] = field(default_factory=list)
    base: tuple[str, ...] | None = None
    is_drained: bool = False
    cut: Cut | None = None
    said: Signed[Have] | Signed[Pass] | None = None
    failed: Signed[Blamed] | None = None


class Member:
    """One seat's part in the rounds of one stage, as a member.

    Args:
        log, state: those that a newcomer has taken over

    Attributes:
        log: the stage's
        state: the hash of the entry that the weights embody; none where they have yet to be taken over
        is_lost: whether entries of the stage are gone for good, so that this seat has to leave it
        guests: contributions that others have given this seat, by name
        reign: the epoch since which the leader leads whose log this seat follows; None while it asks for that log
        carried: samples of rounds without an average, which the next one with an average holds
        lost: samples that are in no entry and that this seat brings no more
    """

    def __init__(
        self, *, me: Seat, stage: int, restart: Restart, context: RoundContext, log: Log | None = None, state: str = ""
    ):
        self.me = me
        self.stage = stage
        self.log = log or Log(stage, restart)
        self.state = state
        self.is_lost = False
        self._context = context
        self.guests: dict[Name, Contribution] = {}
        self.carried: list[str] = []
        self.closes: dict[int, Close] = {}
        self.reign: EpochId | None = None
        self._newest_reign: EpochId | None = None
        self.lost: list[str] = []
        self.open: dict[int, OpenRound] = {}

    # --- what the driver shall do

    @property
    def working(self) -> OpenRound | None:
        """The round of which microbatches may be let in; None if there is none at present."""
        if self.reign is None or self.state != self.log.head:
            return None
        number = self.log.next_round
        for _ in range(self._context.lag):
            present = self.open.get(number)
            if present is not None and present.cut is not None and self.me in present.cut.seats:
                number += 1
        if number in self.closes:
            return None
        return self.open.setdefault(number, OpenRound(number))

    @property
    def draining(self) -> OpenRound | None:
        """The round that is closed, and of which microbatches may still be inside."""
        found = (round_ for number, round_ in sorted(self.open.items()) if number in self.closes)
        return next((round_ for round_ in found if not round_.is_drained), None)

    @property
    def averaging(self) -> Cut | None:
        """The cut to average now."""
        present = self.open.get(self.log.next_round)
        cut = present.cut if present is not None else None
        if present is None or cut is None or self.me not in cut.seats or self.state != cut.parent:
            return None
        return cut if present.said is None and present.failed is None else None

    # --- what the driver says

    def base(self, number: int) -> str:
        """The head that microbatches of an open round are computed from."""
        found = self.log.base_of(number, self._context.lag)
        assert found is not None, "a round is open once it has a base"
        return found

    def computed(self, number: int, samples: Iterable[str], base: tuple[str, ...]) -> bool:
        """Samples of an open round were computed, and their gradients are kept; False if they must not be."""
        present = self.open.get(number)
        if present is None or present.is_drained or (present.base or base) != base:
            return False
        present.base = base
        present.samples += samples
        return True

    def drained(self, number: int) -> None:
        """Nothing of a closed round is inside any more."""
        if (present := self.open.get(number)) is not None and number in self.closes:
            present.is_drained = True

    def averaged(self, cut: Cut, digest: str) -> None:
        """The driver has the result of a cut."""
        if cut == self.averaging:
            self.open[cut.round].said = self._context.sign(Have(self.me, cut.epoch, cut.hash, digest))

    def failed(self, cut: Cut, blamed: frozenset[Seat]) -> None:
        """The driver could not average a cut."""
        if cut == self.averaging:
            seats = tuple(sorted(blamed & set(cut.seats)))
            self.open[cut.round].failed = self._context.sign(Blamed(self.me, cut.epoch, cut.hash, seats))

    def reached(self, state: str) -> None:
        """The weights embody an entry now, or the base of the log."""
        self.state = state

    def take_guest(self, contribution: Contribution) -> bool:
        """Keep a contribution that a leaver has given this seat, under its name. May come again."""
        if contribution.name.round < self.log.next_round or contribution.name.seat == self.me:
            return False
        self.guests[contribution.name] = contribution
        return True

    def to_hand_over(self) -> list[Contribution]:
        """All that this seat could bring, for stage-mates to bring in its place."""
        number = self.log.next_round
        while not self._context.averages(number):
            number += 1
        present = self.open.get(self.log.next_round)
        own = (*self.carried, *(present.samples if present is not None else ()))
        kept = [each for name, each in self.guests.items() if name.seat != self.me]
        base = (present.base if present is not None else None) or ()
        return [*([Contribution(Name(self.me, number), len(own), own, base)] if own else []), *kept]

    # --- what it hears of its leader

    def close_of(self, number: int) -> Close | None:
        """The close of a round; None if this seat does not know it to be over."""
        index = number - self.log.restart.first_round
        if 0 <= index < len(self.log.committed):
            return self.log.committed[index].close
        return self.closes.get(number)

    def take_close(self, close: Close) -> bool:
        """Close a round, if these counts fill its batch. Returns whether it is closed."""
        if close.round in self.closes:
            return True
        if close.round < self.log.next_round or not self._context.fills(close):
            return False
        self.closes[close.round] = close
        self.open.setdefault(close.round, OpenRound(close.round))
        return True

    def take_base(self, number: int, base: tuple[str, ...]) -> None:
        """Give up what was computed in an open round from other heads than its own."""
        present = self.open.get(number)
        if present is None or number in self.closes or present.base in (None, base):
            return
        if base[self.stage] == self.base(number):
            self.lost += present.samples
            present.samples, present.base = [], None

    def take_cut(self, cut: Cut) -> None:
        """Be in a cut, or agree to be left out."""
        if (cut.round, cut.parent) != (self.log.next_round, self.log.head) or cut.round not in self.closes:
            return
        present = self.open.setdefault(cut.round, OpenRound(cut.round))
        if present.cut is not None and (cut.epoch, cut.attempt) <= (present.cut.epoch, present.cut.attempt):
            return
        own = next((part for part in cut.parts if part.seat == self.me), None)
        mine = self.part_of(cut.round)
        if own is None:
            may_pass = not self._is_ready(present) or self._is_left_out_rightly(present, cut)
            present.cut, present.said, present.failed = cut, None, None
            if may_pass:
                present.said = self._context.sign(Pass(self.me, cut.epoch, cut.hash))
        elif mine is not None and set(own.brings) <= set(mine.brings) and self._is_of_base(own, cut):
            present.cut, present.said, present.failed = cut, None, None

    def _is_of_base(self, part: Part, cut: Cut) -> bool:
        is_ours = cut.base[self.stage] == self.base(cut.round)
        return is_ours and all(each.base in ((), cut.base) for each in part.brings)

    def _is_left_out_rightly(self, present: OpenRound, cut: Cut) -> bool:
        """Whether a seat that is ready agrees to be left out: it was too slow, or its accuser is left out as well."""
        was_slow = present.cut is not None and self.me in present.cut.seats and present.said is None
        accusers = {signed.body.author for signed in cut.blamed if self.me in signed.body.seats}
        return was_slow or bool(accusers - set(cut.seats))

    def log_of(self, committed: tuple[Committed, ...]) -> Log | None:
        """A log that somebody tells; None if it is none, or rests on epochs that this seat does not know."""
        log = Log(self.stage, self.log.restart, committed)
        return log if log.is_valid(set(self.log.heads()), self._context.epoch_of, self._context.fills) else None

    def take_commit(self, committed: Committed) -> bool:
        """Follow an entry that comes next. Returns False if the log has to be asked for."""
        entry, agreement, close = committed
        cut = entry.cut
        if cut.round < self.log.next_round:
            return True
        if (cut.round, cut.parent) != (self.log.next_round, self.log.head):
            return False
        epoch = self._context.epoch_of(cut.epoch)
        if (
            epoch is None
            or not entry.is_agreed(agreement, epoch)
            or close.round != cut.round
            or not self._context.fills(close)
        ):
            return False
        self._append(committed)
        return True

    def take_entries(self, entries: Entries) -> None:
        """Follow the log of the leader, unless it lacks what this seat has, and nobody has gone on without that."""
        reign = entries.reign
        if self._newest_reign is not None and reign < self._newest_reign:
            return
        theirs, known = self.log_of(entries.committed), self.log.heads()
        if theirs is None:
            return
        if theirs.heads()[: len(known)] == known:
            for committed in entries.committed[len(known) - 1 :]:
                self._append(committed)
        elif theirs.committed and theirs.committed[-1].entry.cut.epoch >= reign:
            if reign == self._newest_reign and theirs.next_round <= self.log.next_round:
                return
            self._give_up_open()
            self.log = theirs
        elif reign != self._newest_reign:
            return  # it says again where it stands
        self.reign = self._newest_reign = reign
        if entries.lost is not None:
            self.look_whether_lost(entries.lost)

    def look_whether_lost(self, evidence: Committed) -> bool:
        """Note that entries of this stage are gone, if an entry of another was computed from one that its log lacks."""
        cut = evidence.entry.cut
        epoch = self._context.epoch_of(cut.epoch)
        if epoch is None or cut.stage == self.stage or cut.round < self.log.restart.first_round:
            return self.is_lost
        if evidence.entry.is_agreed(evidence.agreement, epoch):
            self.is_lost |= self.log.base_of(cut.round, self._context.lag) != cut.base[self.stage]
        return self.is_lost

    def take_log(self, log: Log, reign: EpochId) -> None:
        """As the leader of the stage, take another member's log for the stage's, which is at least as long."""
        known = self.log.heads()
        if log.heads()[: len(known)] == known:
            for committed in log.committed[len(known) - 1 :]:
                self._append(committed)
        else:
            self._give_up_open()
            self.log = Log(self.stage, log.restart, log.committed)
        self.reign = self._newest_reign = reign

    def _append(self, committed: Committed) -> None:
        entry = committed.entry
        present = self.open.pop(entry.cut.round, None)
        self.carried += present.samples if present is not None else []
        self.log.append(committed)
        if entry.cut.averages:
            counted, self.lost, self.carried = entry.cut.samples, self.lost + self.carried, []
            past = [name for name in self.guests if name.round < self.log.next_round]
            self.lost += [sample for name in past for sample in self.guests.pop(name).samples]
            self.lost = [sample for sample in self.lost if sample not in counted]
        said = present.said.body if present is not None and present.said is not None else None
        if isinstance(said, Have) and (said.cut, said.digest) == (entry.cut.hash, entry.digest):
            # The driver has the update, and applies it before it does anything else.
            self.state = entry.hash
        self.closes.pop(entry.cut.round, None)

    def _give_up_open(self) -> None:
        self.lost += [*self.carried, *(sample for present in self.open.values() for sample in present.samples)]
        self.open, self.carried = {}, []

    def begin_anew(self, restart: Restart) -> None:
        """Go back with the run: all that belonged to the time before is void."""
        self._give_up_open()
        self.log, self.state, self.reign = Log(self.stage, restart), "", None
        self.guests, self.closes, self.is_lost = {}, {}, False

    # --- what it says

    def _is_ready(self, present: OpenRound) -> bool:
        return present.is_drained and self.state == self.log.head

    def part_of(self, number: int) -> Part | None:
        """All that this seat brings to a round; None while it is not ready."""
        present = self.open.get(number)
        if present is None or not self._is_ready(present):
            return None
        if not self._context.averages(number):
            return Part(self.me, ())
        own = (*self.carried, *present.samples)
        brings = [Contribution(Name(self.me, number), len(own), own, present.base or ())] if own else []
        return Part(self.me, (*brings, *(each for name, each in self.guests.items() if name.round == number)))

    def sayings(self, epoch: Epoch) -> list[Body]:
        """All that its leader should hear, and may not have heard yet."""
        if self.reign is None or self.state != self.log.head:
            return [self.status()]
        present = self.open.get(self.log.next_round)
        said = list[Body]()
        if present is not None and present.said is not None:
            said.append(Said(self.stage, present.said))
        if present is not None and present.failed is not None:
            said.append(Blame(self.stage, present.failed))
        for number in sorted(self.open):
            if (part := self.part_of(number)) is not None:
                said.append(Ready(self.stage, number, self.log.head, part))
        if self.stage == 0 and (working := self.working) is not None and working.base is not None:
            done = Done(self.me, epoch.id, working.number, len(working.samples), working.base)
            said.append(Counted(self._context.sign(done)))
        return said

    def status(self) -> Status:
        """Where this seat stands."""
        present = self.open.get(self.log.next_round)
        said = () if present is None or present.cut is None or present.said is None else ((present.cut, present.said),)
        return Status(self.stage, self.log.committed, self.state, tuple(self.closes.values()), said)

"""One seat's part in the rounds of one stage, as a member: what it computes, says and takes over.

Its driver computes, averages and applies; the properties here say what it shall do, and it says when it has done that.
The leader's part stands in leader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SliceId, WindowRange, merge_ranges, num_windows
from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.grants import Grant, Wants
from swarm_peer.protocol.log import (
    Base,
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
    Receipt,
    is_lacking,
)
from swarm_peer.protocol.messages import Blame, Body, Counted, Entries, Head, Ready, Said, Status, Timing
from swarm_peer.protocol.statements import EpochId, S, Seat, Sign, Signed

# Entries that a member tells of its log. A leader that lacks more takes a state.
TOLD_ENTRIES = 4
# Cuts that a leader may make of one round before each further one is no sign of life any more.
MAX_FAIR_CUTS = 3
# Statements that are remembered with their signatures.
MAX_SIGNED = 64


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """All that members and leaders of one process share.

    Attributes:
        batch, unit: samples of a round, and of a microbatch
        lag: rounds that may be open while an earlier one is not committed, besides the next: 1 for delayed updates
        averages: whether a round ends with an average
        is_rooted: whether all members tell the root of the state that a round begins with
        fills: whether counts fill the batch of a round
        believed: the samples of a count that there are receipts for
        epoch_of: an epoch that was chosen, by its id
        sign: signs as this process's seat
    """

    num_stages: int
    batch: int
    unit: int
    lag: int
    averages: Callable[[int], bool]
    is_rooted: Callable[[int], bool]
    fills: Callable[[Close], bool]
    believed: Callable[[Done], int]
    epoch_of: EpochOf
    sign: Sign
    timing: Timing

    def decided_in(self, number: int) -> int:
        """The round whose entry holds what is computed in a round."""
        while not self.averages(number):
            number += 1
        return number


@dataclass
class Computed:
    """What a seat has computed in one round.

    Attributes:
        base: heads of all stages that it was computed from; empty before the first microbatch
        weight: targets
        samples: as stage 0 knows them
        receipts: of seats of stage 1, at stage 0
        callers: samples by the seat of stage 0 that has sent them, at stage 1
    """

    base: Base = ()
    weight: int = 0
    samples: list[WindowRange] = field(default_factory=list)
    receipts: dict[Seat, Signed[Receipt]] = field(default_factory=dict)
    callers: dict[Seat, int] = field(default_factory=dict)


@dataclass
class OpenRound:
    """A round that is not committed, as one member sees it.

    Attributes:
        claimed: samples that it has launched
        voids: how often it has given up what it had computed
        is_drained: whether nothing of it is inside any more
        root: of the state that it begins with; None until the driver has told it
        cut: the newest one
        num_fair_cuts: cuts that it was in, or agreed to be left out of
        said: its own Have or Pass of that cut
        failed: its statement that it has no result; None while it averages, or if it has one
    """

    number: int
    computed: Computed = field(default_factory=Computed)
    claimed: int = 0
    voids: int = 0
    is_drained: bool = False
    is_rooted: bool = False
    root: str | None = None
    cut: Cut | None = None
    num_fair_cuts: int = 0
    said: Signed[Have] | Signed[Pass] | None = None
    failed: Signed[Blamed] | None = None


class Member:
    """One seat's part in the rounds of one stage, as a member.

    Args:
        log, state, ledger: those that a newcomer has taken over

    Attributes:
        log: the stage's
        state: the hash of the entry that the weights embody; empty where they have yet to be taken over
        ledger: of the data, as the state has it; None at other stages than 0, and without a state
        is_lost: whether entries of the stage are gone for good, so that this seat has to leave it
        guests: contributions that others have given this seat, by name
        reign: the epoch since which the leader leads whose log this seat follows; None while it asks for that log
        granted: what it may read and launch, at stage 0
        reads: slices that it reads, or has read in rounds that are open; the driver's
        wants_slices, wants_samples: how many more it would read, and launch; the driver's
        lost: contributions that are in no entry and that this seat brings no more; for the driver to tell
    """

    def __init__(
        self,
        *,
        me: Seat,
        stage: int,
        restart: Restart,
        context: RoundContext,
        log: Log | None = None,
        state: str = "",
        ledger: Ledger | None = None,
    ):
        self.me = me
        self.stage = stage
        self.log = log or Log(stage, restart)
        self.state = state
        self.ledger = ledger
        self.is_lost = False
        self._context = context
        self.guests: dict[Name, Contribution] = {}
        self.carried = Computed()
        self.closes: dict[int, Close] = {}
        self.reign: EpochId | None = None
        self._newest_reign: EpochId | None = None
        self.granted: Grant | None = None
        self.reads: tuple[SliceId, ...] = ()
        self.wants_slices = 0
        self.wants_samples = 0
        self.lost: list[Contribution] = []
        self.open: dict[int, OpenRound] = {}
        self._signed: dict[object, object] = {}

    # --- what the driver shall do

    @property
    def is_behind(self) -> bool:
        """Whether the weights have yet to be brought to the head of the log."""
        return self.reign is not None and self.state != self.log.head

    @property
    def working(self) -> OpenRound | None:
        """The round of which microbatches may be let in; None if there is none at present."""
        if self.reign is None or self.is_behind:
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
    def rooting(self) -> OpenRound | None:
        """The round for which the root of the present state is asked."""
        present = self.open.get(self.log.next_round)
        if present is None or self.is_behind or present.root is not None or not self._is_rooted(present):
            return None
        return present if present.is_drained else None

    @property
    def adopting(self) -> Cut | None:
        """The cut that this seat is left out of since it is of another state than its own; None if there is none.

        The driver takes that state, and compares: devices that differ round differently. One that is far from its own
        is a lie.
        """
        present = self.open.get(self.log.next_round)
        cut = present.cut if present is not None else None
        if present is None or cut is None or self.is_behind or present.said is not None or self.me in cut.seats:
            return None
        return cut if present.root is not None and cut.root not in ("", present.root) else None

    @property
    def averaging(self) -> Cut | None:
        """The cut to average now."""
        present = self.open.get(self.log.next_round)
        cut = present.cut if present is not None else None
        if present is None or cut is None or self.me not in cut.seats or self.state != cut.parent:
            return None
        return cut if present.said is None and present.failed is None else None

    def may_launch(self, num_samples: int) -> bool:
        """Whether the leader has granted so many more samples of the round that is worked at."""
        present, granted = self.working, self.granted
        if present is None or granted is None or granted.round != present.number:
            return False
        return present.claimed + num_samples <= granted.up_to

    # --- what the driver says

    def base(self, number: int) -> str:
        """The head that microbatches of an open round are computed from."""
        found = self.log.base_of(number, self._context.lag)
        assert found is not None, "a round is open once it has a base"
        return found

    def launched(self, num_samples: int) -> None:
        """A microbatch was launched in the round that is worked at."""
        if (present := self.working) is not None:
            present.claimed += num_samples

    def computed(
        self,
        number: int,
        base: Base,
        *,
        weight: int,
        samples: Iterable[WindowRange] = (),
        receipt: Signed[Receipt] | None = None,
        caller: Seat | None = None,
        num_samples: int = 0,
    ) -> bool:
        """A microbatch of an open round was computed, and its gradient is kept; False if it must not be.

        Args:
            samples, receipt: at stage 0
            caller, num_samples: at stage 1: for whom it was computed
        """
        present = self.open.get(number)
        if present is None or present.is_drained or (present.computed.base or base) != base:
            return False
        made = present.computed
        made.base = base
        made.weight += weight
        made.samples += samples
        if receipt is not None:
            made.receipts[receipt.body.author] = receipt
        if caller is not None:
            made.callers[caller] = made.callers.get(caller, 0) + num_samples
        return True

    def receipt_for(self, caller: Seat, number: int, epoch: Epoch) -> Signed[Receipt] | None:
        """What this seat of stage 1 signs for a caller of stage 0: how much it has computed for that."""
        present = self.open.get(number)
        if present is None or not present.computed.base:
            return None
        made = present.computed
        num_samples = made.callers.get(caller, 0)
        return self._sign(Receipt(self.me, epoch.id, caller, number, num_samples, made.base))

    def drained(self, number: int) -> None:
        """Nothing of a closed round is inside any more."""
        if (present := self.open.get(number)) is not None and number in self.closes:
            present.is_drained = True

    def rooted(self, state: str, root: str) -> None:
        """The driver knows the root of the state that embodies an entry."""
        present = self.open.get(self.log.next_round)
        if present is not None and state == self.log.head == self.state:
            present.root = root

    def adopted(self, cut: Cut) -> None:
        """The weights are those of a cut's root now."""
        if cut == self.adopting:
            present = self.open[cut.round]
            present.root = cut.root
            self._agree_to(cut, present)

    def averaged(self, cut: Cut, digest: str) -> None:
        """The driver has the result of a cut."""
        if cut == self.averaging:
            self.open[cut.round].said = self._sign(Have(self.me, cut.epoch, cut.hash, digest))

    def failed(self, cut: Cut, blamed: frozenset[Seat]) -> None:
        """The driver could not average a cut."""
        if cut == self.averaging:
            seats = tuple(sorted(blamed & set(cut.seats)))
            self.open[cut.round].failed = self._sign(Blamed(self.me, cut.epoch, cut.hash, seats))

    def reached(self, state: str, ledger: Ledger | None = None) -> None:
        """The weights embody an entry now, or the base of the log.

        Args:
            ledger: that came with the state; None if the entries between were applied
        """
        if ledger is not None:
            self.ledger = ledger
        elif self.ledger is not None:
            rounds = {head: number for number, head in self.log.heads().items()}
            for committed in self.log.since(rounds.get(self.state, self.log.next_round)):
                if self.state == state:
                    break
                self._apply(committed)
            self.ledger = self.ledger if self.state == state else None
        self.state = state

    def take_guest(self, contribution: Contribution) -> bool:
        """Keep a contribution that a leaver has given this seat, under its name. May come again."""
        if contribution.name.round < self.log.next_round or contribution.name.seat == self.me:
            return False
        self.guests[contribution.name] = contribution
        return True

    def to_hand_over(self) -> list[Contribution]:
        """All that this seat could bring, for stage-mates to bring in its place."""
        own = (self._own(number) for number in sorted({self.log.next_round, *self.open}))
        kept = [each for name, each in self.guests.items() if name.seat != self.me]
        return [*(each for each in own if each is not None), *kept]

    # --- what it hears of its leader

    def take_grant(self, grant: Grant) -> None:
        """Note what the leader of stage 0 grants."""
        known = self.granted
        if grant.reign == self.reign and (
            known is None
            or known.reign != grant.reign
            or (known.number, known.round, known.up_to) <= (grant.number, grant.round, grant.up_to)
        ):
            self.granted = grant

    def close_of(self, number: int) -> Close | None:
        """The close of a round; None if this seat does not know it to be over."""
        found = next(iter(self.log.since(number)), None)
        return found.close if found is not None and found.close.round == number else self.closes.get(number)

    def take_close(self, close: Close) -> bool:
        """Close a round, if these counts fill its batch. Returns whether it is closed."""
        if close.round in self.closes:
            return True
        if close.round < self.log.next_round or not self._context.fills(close):
            return False
        self.closes[close.round] = close
        self.open.setdefault(close.round, OpenRound(close.round))
        return True

    def take_base(self, number: int, base: Base, is_rooted: bool) -> None:
        """Give up what was computed in an open round from other heads than its own."""
        present = self.open.get(number)
        if present is None or number in self.closes:
            return
        present.is_rooted |= is_rooted
        if present.computed.base not in ((), base) and base[self.stage] == self.base(number):
            made, name = present.computed, Name(self.me, self._context.decided_in(number))
            self.lost.append(Contribution(name, made.weight, merge_ranges(made.samples), made.base))
            present.computed, present.claimed, present.voids = Computed(), 0, present.voids + 1

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
                self._agree_to(cut, present)
        elif mine is not None and set(own.brings) <= set(mine.brings) and self._is_sound(cut, present):
            present.cut, present.said, present.failed = cut, None, None
            present.num_fair_cuts += 1

    def _agree_to(self, cut: Cut, present: OpenRound) -> None:
        present.said = self._sign(Pass(self.me, cut.epoch, cut.hash))
        present.num_fair_cuts += 1

    def _is_sound(self, cut: Cut, present: OpenRound) -> bool:
        """Whether a cut is of the heads that this seat knows, and holds nothing that has counted."""
        is_ours = cut.base[self.stage] == self.base(cut.round) and cut.root in ("", present.root or cut.root)
        is_repeating = self.ledger is not None and cut.is_repeating(self.ledger)
        return is_ours and not is_repeating and all(each.base in ((), cut.base) for each in cut.brings)

    def _is_left_out_rightly(self, present: OpenRound, cut: Cut) -> bool:
        """Whether a seat that is ready agrees to be left out: it was too slow, or its accuser is left out as well."""
        was_slow = present.cut is not None and self.me in present.cut.seats and present.said is None
        accusers = {signed.body.author for signed in cut.blamed if self.me in signed.body.seats}
        return was_slow or bool(accusers - set(cut.seats))

    def log_of(self, committed: tuple[Committed, ...]) -> Log | None:
        """A log that somebody tells; None if it is none, or rests on epochs that this seat does not know."""
        log = Log(self.stage, self.log.restart, committed)
        return log if log.is_valid(self.log, self._context.epoch_of, self._context.fills) else None

    def take_commit(self, committed: Committed) -> bool:
        """Follow an entry that comes next. Returns False if the log has to be asked for."""
        if committed.entry.cut.round < self.log.next_round:
            return True
        theirs = self.log_of((committed,))
        if theirs is None or committed.entry.cut.parent != self.log.head:
            return False
        self._append(committed)
        return True

    def take_entries(self, entries: Entries) -> None:
        """Follow the log of the leader, unless it lacks what this seat has, and nobody has gone on without that."""
        reign = entries.reign
        if self._newest_reign is not None and reign < self._newest_reign:
            return
        theirs = self.log_of(entries.committed)
        if theirs is None:
            return
        if theirs.goes_on_from(self.log):
            for committed in theirs.since(self.log.next_round):
                self._append(committed)
        elif theirs.goes_on_from(self.log) is None or (
            theirs.committed and theirs.committed[-1].entry.cut.epoch >= reign
        ):
            if reign == self._newest_reign and theirs.next_round <= self.log.next_round:
                return
            self._replace_log(theirs)
        elif reign != self._newest_reign:
            return  # it says again where it stands
        self.reign = self._newest_reign = reign
        if entries.lost is not None:
            self.look_whether_lost(entries.lost)

    def look_whether_lost(self, evidence: Committed) -> bool:
        """Note that entries of this stage are gone, if an entry of another was computed from one that its log lacks."""
        cut = evidence.entry.cut
        epoch, lag = self._context.epoch_of(cut.epoch), self._context.lag
        if epoch is None or cut.stage == self.stage or epoch.restart != self.log.restart:
            return self.is_lost
        if evidence.entry.is_agreed(evidence.agreement, epoch):
            self.is_lost |= is_lacking(self.log, cut.base[self.stage], cut.round - lag)
        return self.is_lost

    def take_log(self, log: Log, reign: EpochId) -> None:
        """As the leader of the stage, take another member's log for the stage's, which is at least as long."""
        if log.goes_on_from(self.log):
            for committed in log.since(self.log.next_round):
                self._append(committed)
        else:
            self._replace_log(Log(self.stage, log.restart, log.committed))
        self.reign = self._newest_reign = reign

    def _append(self, committed: Committed) -> None:
        entry = committed.entry
        cut = entry.cut
        own = self._own(cut.round)
        present = self.open.pop(cut.round, None)
        self.log.append(committed)
        self.closes.pop(cut.round, None)
        if cut.averages:
            self.carried = Computed()
            held = [*([own] if own is not None else []), *self.lost]
            held += [self.guests.pop(name) for name in list(self.guests) if name.round <= cut.round]
            self.lost = [each for each in held if each not in cut.brings]
        elif present is not None:
            self.carried.weight += present.computed.weight
            self.carried.samples += present.computed.samples
        said = present.said.body if present is not None and present.said is not None else None
        if present is not None and present.root is not None and cut.root not in ("", present.root):
            self.state = ""  # its weights are others than the stage's
        elif isinstance(said, Have) and (said.cut, said.digest) == (cut.hash, entry.digest):
            # The driver has the update, and applies it before it does anything else.
            self._apply(committed)

    def _apply(self, committed: Committed) -> None:
        self.state = committed.entry.hash
        if self.ledger is not None:
            self.ledger.add(committed.entry.cut.samples)

    def _replace_log(self, log: Log) -> None:
        self._give_up_all()
        self.log = log
        named = {each for committed in log.committed for each in committed.entry.cut.brings}
        self.lost = [each for each in self.lost if each not in named]

    def _give_up_all(self) -> None:
        for number in sorted({self.log.next_round, *self.open}):
            if (own := self._own(number)) is not None:
                self.lost.append(own)
            self.carried = Computed()
        self.open = {}

    def begin_anew(self, restart: Restart) -> None:
        """Go back with the run: all that belonged to the time before is void."""
        self._give_up_all()
        self.lost += self.guests.values()
        self.log, self.state, self.ledger, self.reign = Log(self.stage, restart), "", None, None
        self.guests, self.closes, self.is_lost, self.granted = {}, {}, False, None

    # --- what it says

    def _sign(self, body: S) -> Signed[S]:
        """The statement, signed once: it is said again and again."""
        if body not in self._signed:
            if len(self._signed) >= MAX_SIGNED:
                self._signed.clear()
            self._signed[body] = self._context.sign(body)
        return cast(Signed[S], self._signed[body])

    def _is_rooted(self, present: OpenRound) -> bool:
        return present.is_rooted or self._context.is_rooted(present.number)

    def _is_ready(self, present: OpenRound) -> bool:
        has_root = present.root is not None or not self._is_rooted(present)
        return present.is_drained and not self.is_behind and has_root

    def _own(self, number: int) -> Contribution | None:
        """What this seat has computed in a round, and in those before it that had no average."""
        present = self.open.get(number)
        made = present.computed if present is not None else Computed()
        weight, samples = self.carried.weight + made.weight, merge_ranges([*self.carried.samples, *made.samples])
        if not weight and not samples:
            return None
        name = Name(self.me, self._context.decided_in(number))
        return Contribution(name, weight, samples, made.base)

    def part_of(self, number: int) -> Part | None:
        """All that this seat brings to a round; None while it is not ready."""
        present = self.open.get(number)
        if present is None or not self._is_ready(present):
            return None
        if not self._context.averages(number):
            return Part(self.me, ())
        own = self._own(number)
        guests = (each for name, each in sorted(self.guests.items()) if name.round == number)
        return Part(self.me, (*([own] if own is not None else []), *guests))

    def sayings(self, epoch: Epoch) -> list[Body]:
        """All that its leader should hear, and may not have heard yet."""
        if self.reign is None or self.is_behind:
            return [self.status()]
        present = self.open.get(self.log.next_round)
        said = list[Body]()
        if present is not None and present.said is not None:
            said.append(Said(self.stage, present.said))
        if present is not None and present.failed is not None:
            said.append(Blame(self.stage, present.failed))
        for number in sorted(self.open):
            if (part := self.part_of(number)) is not None:
                root = self.open[number].root or "" if number == self.log.next_round else ""
                said.append(Ready(self.stage, number, self.log.head, root, part))
        if self.stage == 0 and (working := self.working) is not None:
            said.append(self._counted(working, epoch))
        return said

    def _counted(self, working: OpenRound, epoch: Epoch) -> Counted:
        made, number = working.computed, working.number
        receipts = tuple(receipt for _, receipt in sorted(made.receipts.items()))
        samples = num_windows(made.samples)
        done = Done(self.me, epoch.id, number, working.voids, samples, made.base, receipts)
        granted = self.granted
        seen = granted.number if granted is not None and granted.reign == self.reign else 0
        wants = Wants(seen, self.reads, self.wants_slices, number, working.claimed, self.wants_samples, working.voids)
        guests = tuple(sorted(name for name in self.guests if name.round == self._context.decided_in(number)))
        return Counted(self._sign(done), wants, guests)

    def head(self) -> Head:
        """Where the stage stands, for the leaders of others."""
        return Head(self.stage, self.log.committed[-1 - 2 * self._context.lag :])

    def status(self) -> Status:
        """Where this seat stands."""
        present = self.open.get(self.log.next_round)
        said = () if present is None or present.cut is None or present.said is None else ((present.cut, present.said),)
        newest = self.log.committed[-TOLD_ENTRIES:]
        return Status(self.stage, newest, self.state, tuple(self.closes.values()), said, self.reads)

    @property
    def waits_for(self) -> object:
        """What this seat waits for its leader to do next; None if it has work of its own to do."""
        if self.reign is None:
            return "log", self.state
        present, working = self.open.get(self.log.next_round), self.working
        if self.stage == 0 and working is not None and self.wants_samples and not self.may_launch(1):
            done = num_windows(working.computed.samples)
            return ("grant", working.number, done) if done >= working.claimed else None
        if present is None or self.is_behind or not self._is_ready(present):
            return None
        return "round", present.number, min(present.num_fair_cuts, MAX_FAIR_CUTS)

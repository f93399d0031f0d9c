"""One seat's part in the rounds of one stage, as a member: what it computes, says and takes over.

Its driver computes, averages and applies; the properties here say what it shall do, and it says when it has done that.
The leader's part stands in leader.py.
"""

from __future__ import annotations

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import num_windows
from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.grants import Grant, Reads, Wants
from swarm_peer.protocol.log import (
    Base,
    Blamed,
    Close,
    Committed,
    Contribution,
    Cut,
    Done,
    HandedOver,
    Have,
    Log,
    Part,
    Pass,
    Receipt,
)
from swarm_peer.protocol.messages import Blame, Body, Counted, Entries, Head, Ready, Said, Status, that_fit
from swarm_peer.protocol.statements import EpochId, Seat, Signed, SignedOnce
from swarm_peer.protocol.work import Answer, OpenRound, RoundContext, Work

# Entries that a member tells of its log: a leader that lacks more takes a state.
TOLD_ENTRIES = 4


class Member:
    """One seat's part in the rounds of one stage, as a member.

    Args:
        log, state, ledger: those that a newcomer has taken over

    Attributes:
        log: the stage's
        state: the hash of the entry that the weights embody; empty where they have yet to be taken over
        ledger: of the data, as the state has it; None at other stages than 0, and without a state
        is_lost: whether entries of the stage, or its state, are gone for good, so that this seat has to leave it
        work: what it could bring to the next cuts
        reign: the epoch since which the leader leads whose log this seat follows; None while it asks for that log
        granted: what it may read and launch, at stage 0
        reads: what the driver reads
        wants_samples: how many more samples the driver would launch
        num_voids: how often it had to give up what it had computed, since its leader told of other heads
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
        self.work = Work(me, context)
        self.closes: dict[int, Close] = {}
        self.reign: EpochId | None = None
        self._newest_reign: EpochId | None = None
        self.granted: Grant | None = None
        self.reads = Reads()
        self.wants_samples = 0
        self.num_voids = 0
        self._signed = SignedOnce(context.sign)
        self._lagged_in = -1  # the last round in which it was behind: it says so when it is so no more

    # --- what the driver shall do

    @property
    def is_behind(self) -> bool:
        """Whether the weights have yet to be brought to the head of the log."""
        return self.reign is not None and self.state != self.log.head

    @property
    def knows_log(self) -> bool:
        """Whether this seat can tell others the stage's log."""
        return self.reign is not None and not self.is_lost

    @property
    def working(self) -> OpenRound | None:
        """The round of which microbatches may be let in; None if there is none at present."""
        if self.reign is None or self.is_behind:
            return None
        number = self.log.next_round
        for _ in range(self._context.lag):
            present = self.work.open.get(number)
            if present is not None and present.answer.cut is not None and self.me in present.answer.cut.seats:
                number += 1
        if number in self.closes or self.work.round(number).is_void:
            return None
        return self.work.round(number)

    @property
    def voiding(self) -> OpenRound | None:
        """The round whose work the driver has to give up, and then to say so."""
        return next((present for _, present in sorted(self.work.open.items()) if present.is_void), None)

    @property
    def draining(self) -> OpenRound | None:
        """The round that is closed, and of which microbatches may still be inside."""
        found = (round_ for number, round_ in sorted(self.work.open.items()) if number in self.closes)
        return next((round_ for round_ in found if not round_.is_drained), None)

    @property
    def rooting(self) -> OpenRound | None:
        """The round for which the root of the present state is asked."""
        present = self.work.open.get(self.log.next_round)
        is_told = present is None or present.root is not None or not self._is_rooted(present)
        return None if is_told or self.state != self.log.head or not present or not present.is_drained else present

    @property
    def adopting(self) -> Cut | None:
        """The cut that this seat is left out of since it is of another state than its own; None if there is none.

        The driver takes that state, and compares: devices that differ round differently. One that is far from its own
        is a lie.
        """
        present = self.work.open.get(self.log.next_round)
        cut = present.answer.cut if present is not None else None
        if present is None or cut is None or self.is_behind or present.answer.said is not None or self.me in cut.seats:
            return None
        return cut if present.root is not None and cut.root not in ("", present.root) else None

    @property
    def averaging(self) -> Cut | None:
        """The cut to average now."""
        present = self.work.open.get(self.log.next_round)
        cut = present.answer.cut if present is not None else None
        if present is None or cut is None or self.me not in cut.seats or self.state != cut.parent:
            return None
        return cut if present.answer.said is None and present.answer.failed is None else None

    def may_launch(self, num_samples: int) -> bool:
        """Whether the leader has granted so many more samples of the round that is worked at."""
        present, granted = self.working, self.granted
        if present is None or granted is None or granted.round != present.number:
            return False
        return present.computed.claimed + num_samples <= min(granted.up_to, 2 * self._context.batch)

    # --- what the driver says

    def base(self, number: int) -> str:
        """The head that microbatches of an open round are computed from."""
        found = self.known_base(number)
        assert found is not None, "a round is open once it has a base"
        return found

    def known_base(self, number: int) -> str | None:
        """The same of any round; None if it is not known yet, or any more."""
        return self.log.base_of(number, self._context.lag)

    def launched(self, num_samples: int) -> None:
        """A microbatch was launched in the round that is worked at."""
        if (present := self.working) is not None:
            present.computed.claimed += num_samples

    def receipt_for(self, caller: Seat, number: int, epoch: Epoch) -> Signed[Receipt] | None:
        """This seat of stage 1 signs how much it has computed for a caller of stage 0."""
        receipt = self.work.receipt_for(caller, number, epoch)
        return self._signed(receipt) if receipt is not None else None

    def drained(self, number: int) -> None:
        """Nothing of a closed round is inside any more."""
        if (present := self.work.open.get(number)) is not None and number in self.closes:
            present.is_drained = True

    def rooted(self, state: str, root: str) -> None:
        """The driver knows the root of the state that embodies an entry."""
        present = self.work.open.get(self.log.next_round)
        if present is not None and state == self.log.head == self.state:
            present.root = root

    def adopted(self, cut: Cut) -> None:
        """The weights are those of a cut's root now."""
        if cut == self.adopting:
            present = self.work.open[cut.round]
            present.root = cut.root
            self._agree_to(cut, present)

    def averaged(self, cut: Cut, digest: str) -> None:
        """The driver has the result of a cut."""
        if cut == self.averaging:
            self.work.open[cut.round].answer.said = self._signed(Have(self.me, cut.epoch, cut.hash, digest))

    def failed(self, cut: Cut, blamed: frozenset[Seat]) -> None:
        """The driver could not average a cut."""
        if cut == self.averaging:
            seats = tuple(sorted(blamed & set(cut.seats)))
            self.work.open[cut.round].answer.failed = self._signed(Blamed(self.me, cut.epoch, cut.hash, seats))

    def reached(self, state: str, ledger: Ledger | None = None) -> None:
        """The weights embody an entry now, or the base of the log.

        Args:
            ledger: that came with the state; None if the entries between were applied
        """
        if ledger is not None:
            self.ledger = ledger
        elif self.ledger is not None:
            for committed in self.log.after(self.state):
                if self.state == state:
                    break
                self._apply(committed)
            self.ledger = self.ledger if self.state == state else None
        self.state = state

    def take_guest(self, given: Signed[HandedOver]) -> bool:
        """Keep a contribution that its author has given this seat, under its name. May come again."""
        contribution = given.body.contribution
        is_due = contribution.name.round >= self.log.next_round and contribution.name.seat != self.me
        if is_due:
            self.work.guests[contribution.name], self.work.given[contribution.name] = contribution, given
        return is_due

    def to_hand_over(self) -> list[Contribution]:
        """All that this seat could bring, for stage-mates to bring in its place."""
        return self.work.to_hand_over(self.log.next_round)

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

    def take_close(self, close: Close, *, is_of_leader: bool = False) -> bool:
        """Close a round, if these counts fill its batch: those of the stage's leader, if any. Returns whether it is."""
        known = self.closes.get(close.round)
        if known is not None and (known.base == close.base or not is_of_leader):
            return True
        is_near = 0 <= close.round - self.log.next_round <= self._context.lag
        if not is_near or not self._context.may_close(close, self.log):
            return known is not None
        self.closes[close.round] = close
        self.work.round(close.round)
        return True

    def take_base(self, number: int, base: Base, is_rooted: bool) -> None:
        """Give up what was computed in an open round from other heads than its own."""
        present = self.work.open.get(number)
        if present is None or number in self.closes:
            return
        present.is_rooted |= is_rooted
        if len(base) != self._context.num_stages:
            return
        if present.computed.base not in ((), base) and base[self.stage] == self.base(number) and not present.is_void:
            present.is_void = True
            self.num_voids += 1

    def voided(self, number: int) -> None:
        """The driver has given up what it had computed in a round, and nothing of it is inside any more."""
        if (present := self.work.open.get(number)) is not None and present.is_void:
            self.work.void(number)

    def take_cut(
        self, cut: Cut, shown: tuple[Committed, ...] = (), *, is_late: bool = True, was_slow: bool = True
    ) -> None:
        """Be in a cut, or agree to be left out.

        Args:
            shown: entries of other stages that are in its base, and not in that of the round's counts
            is_late: whether a seat that is not ready has had its time, so that it agrees
            was_slow: the same of one that has no result of the cut before
        """
        is_late |= self.is_behind and not self.work.brings(cut.round)
        if (cut.round, cut.parent) != (self.log.next_round, self.log.head) or cut.round not in self.closes:
            return
        present = self.work.round(cut.round)
        before = present.answer.cut
        is_known = before is not None and cut.hash == before.hash
        if is_known and self.me not in cut.seats and present.answer.said is None:
            if is_late and not self._is_ready(present):
                self._agree_to(cut, present)
            return
        if before is not None and (cut.epoch, cut.attempt) <= (before.epoch, before.attempt):
            return
        own = next((part for part in cut.parts if part.seat == self.me), None)
        mine = self.part_of(cut.round)
        newest = [each for each in shown if each.entry.cut.round == cut.round - 1 - self._context.lag]
        agreed = [each.entry for each in newest if self._context.believes(self.log, each)]
        if own is None:
            was_slow &= before is not None and self.me in before.seats and present.answer.said is None
            may_pass = (is_late and not self._is_ready(present)) or was_slow
            present.answer.cut, present.answer.said, present.answer.failed = cut, None, None
            if may_pass:
                self._agree_to(cut, present)
        elif mine is not None and self._is_sound(cut, mine, present) and cut.is_of(self.closes[cut.round].base, agreed):
            present.answer.cut, present.answer.said, present.answer.failed = cut, None, None

    def _agree_to(self, cut: Cut, present: OpenRound) -> None:
        present.answer.said = self._signed(Pass(self.me, cut.epoch, cut.hash))

    def _is_sound(self, cut: Cut, mine: Part, present: OpenRound) -> bool:
        """Whether a cut is of the heads that this seat knows, and holds what it brings and nothing that has counted."""
        is_full = cut.holds(mine, present.answer.told, self.ledger, self._context.most)
        has_base = len(cut.base) == self._context.num_stages and cut.averages == self._context.averages(cut.round)
        are_given = all(part.is_given(self.stage, self._context.epoch_of) for part in cut.parts)
        if not (is_full and has_base and are_given and cut.is_within(self._context.most)):
            return False
        is_ours = cut.base[self.stage] == self.base(cut.round) and present.root in (None, cut.root)
        is_repeating = self.ledger is not None and cut.is_repeating(self.ledger)
        return is_ours and not is_repeating and all(each.base in ((), cut.base) for each in cut.brings)

    def log_of(self, committed: tuple[Committed, ...]) -> Log | None:
        """A log that somebody tells; None if it is none, or rests on epochs that this seat does not know."""
        log = Log(self.stage, self.log.restart, committed)
        return log if self._context.is_valid(log, self.log) else None

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
        elif theirs.age > self.log.age:
            if reign == self._newest_reign and theirs.next_round <= self.log.next_round:
                return
            self._replace_log(theirs)
        elif reign != self._newest_reign:
            return  # it says again where it stands
        self.reign = self._newest_reign = reign
        if entries.lost is not None:
            self.look_whether_lost(entries.lost)

    def look_whether_lost(self, evidence: Committed) -> bool:
        """Note that entries of this stage are gone, if one of another stage shows that. Returns whether it does."""
        is_shown = self._context.is_lost(self.log, evidence)
        self.is_lost |= is_shown
        return is_shown

    def take_log(self, log: Log, reign: EpochId) -> None:
        """As the leader of the stage, take another member's log for the stage's, which is no older."""
        if log.goes_on_from(self.log):
            for committed in log.since(self.log.next_round):
                self._append(committed)
        else:
            self._replace_log(Log(self.stage, log.restart, log.committed))
        self.reign = self._newest_reign = reign

    def _append(self, committed: Committed) -> None:
        entry = committed.entry
        cut = entry.cut
        present = self.work.end_round(cut)
        self.log.append(committed)
        self.closes.pop(cut.round, None)
        said = present.answer.said.body if present is not None and present.answer.said is not None else None
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
        self.work.give_up(self.log.next_round, log)
        self.log, self.closes, self.granted = log, {}, None

    def begin_anew(self, restart: Restart) -> None:
        """Go back with the run: all that belonged to the time before is void."""
        self.work.give_up(self.log.next_round)
        self.log, self.state, self.ledger = Log(self.stage, restart), "", None
        self.reign = self._newest_reign = None
        self.closes, self.is_lost, self.granted = {}, False, None

    # --- what it says

    def _is_rooted(self, present: OpenRound) -> bool:
        return present.is_rooted or self._context.is_rooted(self.log.optimizer_step_at(present.number))

    def _is_ready(self, present: OpenRound) -> bool:
        has_root = present.root is not None or not self._is_rooted(present)
        return present.is_drained and not present.is_void and not self.is_behind and has_root

    def part_of(self, number: int) -> Part | None:
        """All that this seat brings to a round; None while it is not ready."""
        present = self.work.open.get(number)
        if present is None or not self._is_ready(present):
            return None
        return self.work.part(number) if self._context.averages(number) else Part(self.me, ())

    def sayings(self, epoch: Epoch) -> list[Body]:
        """All that its leader should hear, and may not have heard yet."""
        present = self.work.open.get(self.log.next_round) if self.reign is not None else None
        answer = present.answer if present is not None else Answer()
        said: list[Body] = [Said(self.stage, answer.said)] if answer.said is not None else []
        if self.reign is None or self.is_behind:
            self._lagged_in = self._lagged_in if self.log.is_near(self.state) else self.log.next_round
            return [self.status(), *said]
        said += [self.status()] if self._lagged_in == self.log.next_round else []
        said += [Blame(self.stage, answer.failed)] if answer.failed is not None else []
        for number in sorted(self.work.open):
            if (part := self.part_of(number)) is not None:
                present = self.work.open[number]
                if present.answer.told is None:
                    present.answer.told = frozenset(each.name for each in part.brings)
                root = present.root or "" if number == self.log.next_round else ""
                said.append(Ready(self.stage, number, self.log.head, root, part))
        if self.stage == 0 and (working := self.working) is not None:
            said.append(self._counted(working, epoch))
        return said

    def _counted(self, working: OpenRound, epoch: Epoch) -> Counted:
        made, number = working.computed, working.number
        may_launch_more = made.claimed < 2 * self._context.batch or self._context.num_stages == 1
        if not may_launch_more and made.lacks_receipts(self.me, number):
            # It may launch no more, and what others have lost of it would keep the round open for ever.
            working.is_void = True
        receipts = tuple(receipt for _, receipt in sorted(made.receipts.items()))
        done_so_far = working.voids, num_windows(made.samples), made.base, receipts, made.weight, made.loss_sum
        done = Done(self.me, epoch.id, number, *done_so_far)
        reads, granted = self.reads, self.reads.grant
        seen = granted.number if granted is not None and granted.reign == self.reign else 0
        wants = Wants(seen, reads.slices, reads.wanted, number, made.claimed, self.wants_samples, working.voids)
        guests = tuple(sorted(name for name in self.work.guests if name.round == self._context.decided_in(number)))
        return Counted(self._signed(done), wants, guests)

    def head(self) -> Head:
        """Where the stage stands, for the leaders of others: entries without the counts that closed their rounds."""
        newest = self.log.committed[-2 - 2 * self._context.lag :]
        told = [each._replace(close=Close(each.close.round, ())) for each in newest]
        return Head(self.stage, that_fit(told, self._context.epoch_of))

    def entries(self) -> Entries:
        """The log as this seat has it, for a newcomer."""
        assert self.reign is not None, "the log is known"
        return Entries(self.stage, self.reign, that_fit(self.log.committed, self._context.epoch_of), None)

    def status(self) -> Status:
        """Where this seat stands."""
        present = self.work.open.get(self.log.next_round)
        cut, statement = (None, None) if present is None else (present.answer.cut, present.answer.said)
        said = () if cut is None or statement is None else ((cut, statement),)
        newest = that_fit(self.log.committed[-TOLD_ENTRIES:], self._context.epoch_of)
        reads = self.work.undecided(self.reads.slices)
        return Status(self.stage, newest, self.state, tuple(self.closes.values()), said, reads)

    @property
    def is_waiting(self) -> bool:
        """Whether all that this seat can do waits for its leader."""
        if self.reign is None:
            return True
        present, working = self.work.open.get(self.log.next_round), self.working
        if self.stage == 0 and working is not None:
            done = num_windows(working.computed.samples)
            lacks_grant = self.wants_samples and not self.may_launch(1) and done >= working.computed.claimed
            return bool(lacks_grant) or done >= self._context.batch
        if working is not None:
            return False
        return present is not None and not self.is_behind and self._is_ready(present)

"""One seat's part in the rounds of a stage that it leads: it learns the log, closes, cuts and commits.

It decides nothing that its members do not sign. The member's part of the same seat stands in member.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import partial

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.attempts import Attempt, Round, next_try
from swarm_peer.protocol.batch import Batch
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import (
    MAX_GUESTS,
    Base,
    Close,
    Committed,
    Contribution,
    Cut,
    Entry,
    Have,
    Log,
    Name,
    Part,
    Pass,
)
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import (
    Begin,
    Blame,
    Body,
    Commit,
    Counted,
    Cutting,
    Entries,
    Granted,
    Head,
    Ready,
    Rounds,
    Status,
    epochs_in,
    that_fit,
)
from swarm_peer.protocol.other_stages import OtherStages
from swarm_peer.protocol.patience import Patience
from swarm_peer.protocol.signed_entries import signed_entries
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext

# A seat that lacks much is waited for in one of so many rounds: where these are quicker than what it lacks can travel,
# it would never come near.
FAR_WAITED_EVERY = 8
# Entries of other stages that wait to be judged: more than a leader hears of from one tick to the next.
MOST_TOLD = 64


class Leader:
    """One seat's part in the rounds of a stage that it leads.

    Args:
        member: of the same seat
        reign: the epoch since which it leads

    Attributes:
        round: the one that comes next
        others: where the other stages stand
        batch: of the open rounds, at stage 0
        evidence: an entry of another stage, which was computed from one that this stage has lost
        root_until_s: until when all rounds begin with roots, since a newcomer has asked for one
        resigns: whether another seat should lead, since a newer log than its own has come too late
    """

    def __init__(self, *, member: Member, reign: EpochId, context: RoundContext):
        self.reign = reign
        self._member = member
        self._context = context
        self._timing = context.timing
        self._since_s: float | None = None
        self._statuses: dict[Seat, Status] = {}
        self.is_synced = False
        self.round = Round(member.log.next_round)
        # A later round's, of members that are ahead, where updates are delayed.
        self._early: dict[Seat, Ready] = {}
        self.others = OtherStages(member, context)
        self.batch = Batch(reign, context)
        self.evidence: Committed | None = None
        self._told = deque[Committed](maxlen=MOST_TOLD)
        self._refused = set[str]()
        # When seats have said last that they lack more than the newest entries.
        self._far: dict[Seat, float] = {}
        self.root_until_s = 0.0
        self.resigns = False
        self._patience = Patience()

    # --- what it hears

    def take_status(self, sender: Seat, status: Status, now_s: float) -> Body | None:
        """Note where a member stands, or tell it the log."""
        self._statuses[sender] = status
        if not self.is_synced:
            return None
        self._far.pop(sender, None)
        if not self._member.log.is_near(status.state):
            self._far[sender] = now_s
        theirs = self._member.log_of(status.committed)
        if theirs is not None and theirs.age > self._member.log.age and not self._has_committed:
            # A log that does not go on from its own needs a new reign: it has told members its own already.
            self.resigns |= not theirs.goes_on_from(self._member.log)
            if not self.resigns:
                self._follow(theirs)
        self._take_closes(status)
        self.round.learning.add(sender)
        return self.entries(theirs.next_round if theirs is not None else self._member.log.next_round)

    def take_counted(self, sender: Seat, counted: Counted, epoch: Epoch, now_s: float) -> Body | None:
        """Note what a seat of stage 0 has done, and say what it may do next."""
        if not self.is_synced or self._member.is_behind or self._member.ledger is None:
            return None
        # Nobody is further than its leader, but by what an earlier leader has committed.
        if max(counted.done.body.round, counted.wants.round) > self._member.log.next_round + self._context.lag + 1:
            return None
        return Granted(self.batch.take(sender, counted, self._member, epoch, now_s))

    def take_ready(self, sender: Seat, ready: Ready, now_s: float) -> Body | None:
        """Note what a member brings, or tell it the log."""
        log, present = self._member.log, self.round
        if not self.is_synced:
            return None
        if (ready.round, ready.head) != (log.next_round, log.head):
            if ready.round > log.next_round:
                self._early[sender] = ready
                return None
            return self.entries(ready.round)
        present.first_ready_s = present.first_ready_s if present.ready else now_s
        present.ready[sender] = ready
        return None

    def take_said(self, sender: Seat, statement: Signed[Have] | Signed[Pass]) -> Body | None:
        """Note that a member has the result of the cut, or agrees to be left out."""
        present = self.round.attempt
        if not self.is_synced:
            return None
        if present is None or statement.body.cut != present.cut.hash:
            return self.entries(self._member.log.round_of(statement.body.cut))
        present.said[sender] = statement
        return None

    def take_blame(self, sender: Seat, blame: Blame) -> None:
        """Note that a member has no result, and whom it blames."""
        present = self.round.attempt
        if present is not None and blame.statement.body.cut == present.cut.hash and sender in present.cut.seats:
            present.blamed[sender] = blame.statement

    # --- what it does

    def entries(self, since: int) -> Entries:
        """The log, for members that have it up to a round."""
        log = self._member.log
        told = that_fit(log.since(min(since, log.next_round - 1)), self._context.epoch_of)
        return Entries(log.stage, self.reign, told, self.evidence)

    def is_awaited(self, seat: Seat, body: Body) -> bool:
        """Whether a member has yet to show that it has heard something."""
        present = self.round
        attempt = present.attempt
        has_spoken = attempt is not None and bool({seat} & (attempt.said.keys() | attempt.blamed.keys()))
        if isinstance(body, Close):
            has_heard = seat in present.ready and (seat not in present.learning or has_spoken)
            return body.round != present.number or not has_heard
        return not (isinstance(body, Cutting) and has_spoken)

    def asks_for_heads(self, epoch: Epoch, now_s: float) -> list[int]:
        """The stages whose members are asked for their head."""
        return self.others.asks(self._member.log.next_round, epoch, now_s) if self.is_synced else []

    def take_head(self, sender: Seat, head: Head) -> Committed | None:
        """Note where another stage stands. Returns an entry of this one that shows that entries are gone there."""
        found = self.others.take(sender, head)
        for committed in head.committed:
            self.take_evidence(committed)
        return found if self.is_synced else None

    def take_evidence(self, committed: Committed) -> None:
        """Note an entry of another stage: it may have been computed from one that this stage has lost."""
        self._told.append(committed)

    def named_epochs(self) -> set[EpochId]:
        """The epochs of all that this seat may have to show as a leader."""
        present = self.round.attempt
        own: list[Rounds] = [Close(0, self.batch.counts), self.entries(self._member.log.next_round)]
        own += [Cutting(present.cut, present.shown)] if present is not None else []
        told = (*own, *self._statuses.values(), *self.round.ready.values(), *self._early.values())
        return self.others.named_epochs().union(*(epochs_in(body) for body in told))

    @property
    def _has_committed(self) -> bool:
        committed = self._member.log.committed
        return bool(committed) and committed[-1].entry.cut.epoch >= self.reign

    def tick(self, now_s: float, epoch: Epoch, has_lease: bool) -> list[Body]:
        """Go on as far as what was heard allows; returns what all members should hear."""
        if self._since_s is None:
            self._since_s = now_s
        if not self.is_synced:
            self._sync(now_s, epoch)
            return [self._news()] if self.is_synced else []
        roster = epoch.roster(self._member.stage)
        if len(roster) == 1:
            self.resigns = False  # nobody else can lead
        if not has_lease or self.resigns:
            return []
        if not self._has_committed and self._commit_what_is_signed(epoch):
            return [self._news()]
        # Until this reign's first entry, a leader may need what seats had signed that have left.
        needed = {*roster, *(s for s, each in self._statuses.items() if each.said and not self._has_committed)}
        self._statuses = {seat: each for seat, each in self._statuses.items() if seat in needed}
        if self.round.number != self._member.log.next_round:
            self._begin_round(now_s)
        # This seat may have heard of some while it had another log.
        for told in (*self._told, *self.others.entries(epoch)):
            self.evidence = told if self._member.look_whether_lost(told) else self.evidence
        self._told.clear()
        if self.evidence is not None or self._member.is_lost:
            return [self._news()]
        present = self.round
        base = self.others.base(present.number, epoch)
        if self._member.stage == 0:
            self._close(epoch)
        if present.number not in self._member.closes:
            is_rooted = now_s < self.root_until_s
            return [] if base is None else [Begin(self._member.stage, present.number, base, is_rooted)]
        said: list[Body] = [self._member.closes[present.number]]
        if present.attempt is None:
            self._cut_when_ready(now_s, epoch, base)
        else:
            if (committed := self._agreed(now_s, epoch, present.attempt)) is not None:
                self._patience.end_round(epoch, roster, present.late, present.attempt.left_out)
                self._member.take_commit(committed)
                return [Commit(committed)]
            self._cut_again_after_failure(now_s, epoch, base, present.attempt)
        attempt = self.round.attempt
        return [*said, *([Cutting(attempt.cut, attempt.shown)] if attempt is not None else [])]

    def _news(self) -> Entries:
        """The log, for all whose status was heard."""
        logs = [self._member.log_of(status.committed) for status in self._statuses.values()]
        return self.entries(min((log.next_round for log in logs if log is not None), default=0))

    def _begin_round(self, now_s: float) -> None:
        self.round = Round(self._member.log.next_round)
        early, self._early = self._early, {}
        for sender, ready in early.items():
            self.take_ready(sender, ready, now_s)

    def _close(self, epoch: Epoch) -> None:
        for number in range(self.round.number, self.round.number + self._context.lag + 1):
            base = self.others.base(number, epoch)
            if base is not None and (close := self.batch.close(number, base, epoch)) is not None:
                self._member.take_close(close)

    # --- the log

    def _sync(self, now_s: float, epoch: Epoch) -> None:
        """Take the newest log that a member has, and the entry that a quorum has signed already."""
        roster = epoch.roster(self._member.stage)
        self._statuses[self._member.me] = self._member.status()
        if not self._has_heard_enough(now_s, epoch, roster):
            return
        logs = [self._member.log_of(status.committed) for status in self._statuses.values()]
        self._follow(max(filter(None, logs), key=lambda log: log.age))
        self._commit_what_is_signed(epoch)
        self.batch.adopt({seat: status.reads for seat, status in self._statuses.items() if seat in roster})
        self.is_synced = True
        self.round = Round(self._member.log.next_round)

    def _has_heard_enough(self, now_s: float, epoch: Epoch, roster: tuple[Seat, ...]) -> bool:
        """Whether all members have said where they stand, or the others had their time.

        They have more where members have signed something for the open round: its entry may have been committed, and
        other stages may have gone on from that.
        """
        if set(roster) <= set(self._statuses):
            return True
        assert self._since_s is not None
        has_signed = any(status.said for status in self._statuses.values())
        heard = epoch.is_quorum(set(roster) & set(self._statuses), roster) and not has_signed
        return now_s >= self._since_s + (self._timing.status_s if heard else self._timing.synced_s)

    def _take_closes(self, *statuses: Status) -> None:
        """Close rounds as members know them to be closed, if they were computed from heads of this seat's log."""
        stage = self._member.stage
        for close in (close for status in statuses for close in status.closes):
            if close.base[stage : stage + 1] == (self._member.known_base(close.round),):
                self._member.take_close(close)

    def _commit_what_is_signed(self, epoch: Epoch) -> bool:
        """Follow the entry of the open round that enough members have signed already. Returns whether there is one.

        Not one with which the stage would be lost, as others have gone on without it.
        """
        self._take_closes(*self._statuses.values())
        log, told = self._member.log, self.others.entries(epoch)
        for committed in signed_entries(log, self._statuses.values(), self._member.closes.values(), self._context):
            if committed.entry.hash in self._refused:
                continue
            longer = Log(log.stage, log.restart, (*log.committed, committed))
            if any(self._context.is_lost(longer, each) for each in (*self._told, *told)):
                self._refused.add(committed.entry.hash)
            elif self._member.take_commit(committed):
                self.round = Round(log.next_round)
                return True
        return False

    def _follow(self, log: Log) -> None:
        """Take a member's log for the stage's."""
        self._member.take_log(log, self.reign)
        self.round = Round(self._member.log.next_round)

    # --- cuts

    def _cut_when_ready(self, now_s: float, epoch: Epoch, base: Base | None) -> None:
        present = self.round
        roster = epoch.roster(self._member.stage)
        present.ready = {seat: ready for seat, ready in present.ready.items() if seat in roster}
        # A seat that lacks much takes a state, which the next entry has to name first.
        self._far = {seat: s for seat, s in self._far.items() if now_s < s + 2 * self._timing.resend_s}
        far = set(self._far) if present.number % FAR_WAITED_EVERY else set()
        missing = self._patience.waited_for(epoch, roster) - set(present.ready) - far
        # Those who are not waited for may be ready in a moment, and then they do not agree to be left out, as those do
        # that lack much.
        has_most = not epoch.is_divided or epoch.is_quorum(present.ready.keys() | far, roster)
        if present.ready and ((has_most and not missing) or now_s >= present.first_ready_s + self._timing.ready_s):
            present.late |= missing
            kept = set(present.ready) - self._patience.left_out(epoch, present.ready)
            kept = kept if epoch.is_quorum(kept, roster) else set(present.ready)
            absent = frozenset(set(present.ready) - kept)
            present.culprits = ((absent,),) if absent else ()
            self._cut(now_s, epoch, base, sorted(kept), 0)

    def _cut(
        self,
        now_s: float,
        epoch: Epoch,
        base: Base | None,
        seats: list[Seat],
        attempt: int,
        left_out: Collection[Seat] = (),
    ) -> None:
        present, log = self.round, self._member.log
        shown = None if base is None else self.others.to_show(base, self._member.closes[present.number].base)
        if base is None or shown is None:
            return
        root = self._root(epoch, {seat: present.ready[seat].root for seat in seats})
        # A seat with another root has other weights, and takes the stage's.
        seats = sorted(seat for seat in seats if present.ready[seat].root in ("", root))
        cut = Cut(
            stage=log.stage,
            round=present.number,
            epoch=epoch.id,
            attempt=attempt,
            parent=log.head,
            root=root,
            base=base,
            averages=self._context.averages(present.number),
            parts=self._parts(seats, base),
        )
        present.attempt = Attempt(cut, shown, now_s, left_out=left_out)
        present.tried |= set(seats)

    def _root(self, epoch: Epoch, told: dict[Seat, str]) -> str:
        """The root that most votes tell, of two the leader's own; empty if nobody tells one."""
        votes = {root: {epoch.vote_of(seat) for seat in told if told[seat] == root} for root in told.values() if root}
        own = told.get(self._member.me)
        return max(votes, key=lambda root: (len(votes[root]), root == own, root), default="")

    def _parts(self, seats: list[Seat], base: Base) -> tuple[Part, ...]:
        """The parts of a cut: each name is in one of them, and no sample is there twice."""
        ready, ledger, stage = self.round.ready, self._member.ledger, self._member.stage
        given = {signed.body.contribution: signed for seat in seats for signed in ready[seat].part.given}
        offered = [(seat, each) for seat in seats for each in ready[seat].part.brings]
        # Of two that name a sample, the seat that was granted it has read it. And a seat that still has its own
        # contribution brings it: others may have been given a part of it.
        offered.sort(key=lambda pair: (self.batch.is_of_others(pair[1]), pair[1].name.seat != pair[0]))
        brings: dict[Seat, list[Contribution]] = {seat: [] for seat in seats}
        names, samples = set[Name](), list[WindowRange]()
        for seat, each in offered:
            alone = Part(seat, (each,), (given[each],) if each in given else ())
            is_within = alone.is_within(self.round.number, self._context.most) and len(brings[seat]) <= MAX_GUESTS
            if each.name in names or each.base not in ((), base) or not is_within:
                continue
            if not alone.is_given(stage, self._context.epoch_of):
                continue
            if ledger is not None and ledger.repeats([*samples, *each.samples]):
                continue
            names.add(each.name)
            samples += each.samples
            brings[seat].append(each)
        return tuple(
            Part(seat, tuple(own), tuple(given[each] for each in own if each in given and each.name.seat != seat))
            for seat, own in brings.items()
        )

    def _agreed(self, now_s: float, epoch: Epoch, present: Attempt) -> Committed | None:
        """The entry, once most members of the cut have the same result, and the others spoke or had their time."""
        cut, agreement = present.cut, tuple(present.said.values())
        have = {seat: s.body.digest for seat, s in present.said.items() if isinstance(s.body, Have)}
        if (origin := self._context.epoch_of(cut.epoch)) is None:
            return None
        entries = [Entry(cut, digest) for digest in sorted(set(have.values()))]
        entry = next((each for each in entries if each.is_agreed(agreement, origin)), None)
        if entry is None:
            return None
        if present.most_s is None:
            present.most_s = now_s
        silent = {seat for seat in cut.seats if have.get(seat) != entry.digest} - present.blamed.keys()
        others = self._patience.waited_for(epoch, silent)
        others_s = max(self._timing.others_s, present.most_s - present.since_s)
        if others and now_s < present.most_s + others_s:
            return None
        self.round.late |= others
        return Committed(entry, agreement, self._member.closes[cut.round])

    def _cut_again_after_failure(self, now_s: float, epoch: Epoch, base: Base | None, attempt: Attempt) -> None:
        present, roster = self.round, epoch.roster(self._member.stage)
        more = self._come_since(attempt.cut) & set(roster)
        may_agree = (set(roster) - present.ready.keys()) | present.late
        failure = attempt.failure(now_s, epoch, self._timing, has_more=bool(more), may_agree=may_agree)
        if failure is None:
            return
        present.late |= failure.late
        present.tried |= more
        weights = {seat: present.ready[seat].part.weight for seat in roster if seat in present.ready}
        order = partial(self._patience.last_left_out, epoch)
        chosen = next_try(epoch, attempt, failure, weights, more, present.culprits, order)
        if chosen is None:
            self.round = Round(present.number)
            return
        self._cut(now_s, epoch, base, sorted(chosen.seats), attempt.cut.attempt + 1, chosen.left_out)
        if present.attempt is not attempt:
            present.culprits = chosen.culprits

    def _come_since(self, cut: Cut) -> set[Seat]:
        """The seats that have become ready since a cut was made, and so do not agree that it is made without them."""
        ready, present = self.round.ready, self.round
        return {seat for seat in ready.keys() - present.tried if not cut.root or ready[seat].root in ("", cut.root)}

"""One seat's part in the rounds of a stage that it leads: it learns the log, closes, cuts and commits.

It decides nothing that its members do not sign. The member's part of the same seat stands in member.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import (
    Blamed,
    Close,
    Committed,
    Contribution,
    Cut,
    Done,
    Entry,
    Have,
    Log,
    Name,
    Part,
    Pass,
)
from swarm_peer.protocol.member import Member, RoundContext
from swarm_peer.protocol.messages import (
    Begin,
    Blame,
    Body,
    Commit,
    Cutting,
    Entries,
    Head,
    Ready,
    Status,
)
from swarm_peer.protocol.statements import EpochId, Seat, Signed

# Attempts to average a round before one member's work is taken alone.
MAX_TRIES = 3


@dataclass
class Round:
    """The round that comes next, as the leader sees it."""

    number: int
    ready: dict[Seat, Part] = field(default_factory=dict)
    first_ready_s: float = 0.0
    cut: Cut | None = None
    cut_s: float = 0.0
    said: dict[Seat, Signed[Have] | Signed[Pass]] = field(default_factory=dict)
    blamed: dict[Seat, Signed[Blamed]] = field(default_factory=dict)


class Leader:
    """One seat's part in the rounds of a stage that it leads.

    Args:
        member: of the same seat
        reign: the epoch since which it leads
    """

    def __init__(self, *, member: Member, reign: EpochId, context: RoundContext):
        self.reign = reign
        self._member = member
        self._context = context
        self._timing = context.timing
        self._since_s: float | None = None
        self._statuses: dict[Seat, Status] = {}
        self.is_synced = False
        self._round = Round(member.log.next_round)
        self._done: dict[Seat, Signed[Done]] = {}
        # A later round's, of members that are ahead, where updates are delayed.
        self._early: dict[Seat, Ready] = {}
        # Of each other stage, the leader that told it, and what rounds were computed from.
        self._heads: dict[int, tuple[Seat, dict[int, str]]] = {}
        self.evidence: Committed | None = None

    # --- what it hears

    def take_status(self, sender: Seat, status: Status) -> Body | None:
        """Note where a member stands, or tell it the log."""
        for close in status.closes:
            self._member.take_close(close)
        self._statuses[sender] = status
        if not self.is_synced:
            return None
        theirs = self._member.log_of(status.committed)
        if theirs is not None and theirs.age > self._member.log.age and not self._has_committed:
            self._follow(theirs)
        return self.entries()

    def take_done(self, done: Signed[Done]) -> None:
        """Note what a seat of stage 0 has done."""
        known = self._done.get(done.body.author)
        if known is None or (known.body.round, known.body.samples) <= (done.body.round, done.body.samples):
            self._done[done.body.author] = done

    def take_ready(self, sender: Seat, ready: Ready, now_s: float) -> Body | None:
        """Note what a member brings, or tell it the log."""
        log, present = self._member.log, self._round
        if not self.is_synced:
            return None
        if (ready.round, ready.head) != (log.next_round, log.head):
            if ready.round > log.next_round:
                self._early[sender] = ready
                return None
            return self.entries()
        present.first_ready_s = present.first_ready_s if present.ready else now_s
        present.ready[sender] = ready.part
        return None

    def take_said(self, sender: Seat, statement: Signed[Have] | Signed[Pass]) -> Body | None:
        """Note that a member has the result of the cut, or agrees to be left out."""
        cut = self._round.cut
        if not self.is_synced:
            return None
        if cut is None or statement.body.cut != cut.hash:
            return self.entries()
        self._round.said[sender] = statement
        return None

    def take_blame(self, sender: Seat, blame: Blame) -> None:
        """Note that a member has no result, and whom it blames."""
        cut = self._round.cut
        if cut is not None and blame.statement.body.cut == cut.hash and sender in cut.seats:
            self._round.blamed[sender] = blame.statement

    # --- what it does

    def entries(self) -> Entries:
        """The log, for members."""
        return Entries(self._member.stage, self.reign, self._member.log.committed, self.evidence)

    def head(self) -> Head:
        """Where the stage stands, for the leaders of others."""
        log, lag = self._member.log, self._context.lag
        bases = ((number, log.base_of(number, lag)) for number in range(log.next_round - 2, log.next_round + lag + 1))
        return Head(log.stage, log.next_round, tuple((number, base) for number, base in bases if base is not None))

    def take_head(self, sender: Seat, head: Head) -> Committed | None:
        """Note where another stage stands. Returns the newest entry of this one, if entries seem to be gone there."""
        self._heads[head.stage] = sender, dict(head.bases)
        committed = self._member.log.committed
        if not self.is_synced or not committed:
            return None
        cut = committed[-1].entry.cut
        known = self._heads[head.stage][1]
        is_fine = cut.round < head.bases[0][0] or known.get(cut.round) == cut.base[head.stage] if head.bases else False
        return None if is_fine else committed[-1]

    def take_evidence(self, committed: Committed) -> None:
        """Note that an entry of another stage was computed from one that this stage has lost."""
        if self.is_synced and self._member.look_whether_lost(committed):
            self.evidence = committed

    def _base(self, number: int, epoch: Epoch) -> tuple[str, ...] | None:
        """The heads that a round was computed from, as the leaders of all stages have told; None before they have."""
        bases = list[str]()
        for stage in range(self._context.num_stages):
            sender, known = self._heads.get(stage, (None, {}))
            if stage == self._member.stage:
                sender, known = epoch.leader(stage), dict(self.head().bases)
            if sender is None or sender != epoch.leader(stage) or number not in known:
                return None
            bases.append(known[number])
        return tuple(bases)

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
            return [self.entries()] if self.is_synced else []
        if not has_lease:
            return []
        if self._round.number != self._member.log.next_round:
            self._begin_round(now_s)
        if self.evidence is not None:
            return [self.entries()]
        if self._member.stage == 0:
            self._close(epoch)
        present = self._round
        if present.number not in self._member.closes:
            base = self._base(present.number, epoch)
            return [] if base is None else [Begin(self._member.stage, present.number, base)]
        said: list[Body] = [self._member.closes[present.number]]
        if present.cut is None:
            self._cut_when_ready(now_s, epoch)
        else:
            if (committed := self._agreed(now_s, epoch)) is not None:
                self._member.take_commit(committed)
                return [Commit(committed)]
            self._cut_again_after_failure(now_s, epoch)
        return [*said, *([Cutting(present.cut)] if present.cut is not None else [])]

    def _begin_round(self, now_s: float) -> None:
        self._round = Round(self._member.log.next_round)
        early, self._early = self._early, {}
        for sender, ready in early.items():
            self.take_ready(sender, ready, now_s)

    def _close(self, epoch: Epoch) -> None:
        counts = tuple(
            done for seat, done in sorted(self._done.items()) if done.body.epoch == epoch.id and seat in epoch.roster(0)
        )
        for number in sorted({done.body.round for done in counts}):
            close = Close(number, tuple(done for done in counts if done.body.round == number))
            self._member.take_close(close)

    # --- the log

    def _sync(self, now_s: float, epoch: Epoch) -> None:
        """Take the longest log that a member has, and the entry that a quorum has signed already."""
        roster = epoch.roster(self._member.stage)
        self._statuses[self._member.me] = self._member.status()
        assert self._since_s is not None
        is_complete = set(roster) <= set(self._statuses)
        if not is_complete and now_s < self._since_s + self._timing.status_s:
            return
        logs = [self._member.log_of(status.committed) for status in self._statuses.values()]
        longest = max(filter(None, logs), key=lambda log: log.age)
        self._follow(longest)
        for committed in self._signed_already():
            if self._member.take_commit(committed):
                break
        self.is_synced = True
        self._round = Round(self._member.log.next_round)

    def _follow(self, log: Log) -> None:
        """Take a member's log for the stage's."""
        self._member.take_log(log, self.reign)
        self._round = Round(self._member.log.next_round)

    def _signed_already(self) -> list[Committed]:
        """Entries that follow from what members have signed for the cut of the open round."""
        said: dict[tuple[Cut, str], list[Signed[Have] | Signed[Pass]]] = {}
        for status in self._statuses.values():
            for cut, statement in status.said:
                if isinstance(statement.body, Have):
                    said.setdefault((cut, statement.body.digest), []).append(statement)
        for (cut, _), statements in said.items():
            for status in self._statuses.values():
                statements += [s for c, s in status.said if c == cut and isinstance(s.body, Pass)]
        close = self._member.closes.get(self._member.log.next_round)
        if close is None:
            return []
        found = [Committed(Entry(cut, digest), tuple(each), close) for (cut, digest), each in said.items()]
        # In a run of few tickets one statement is enough, but not where others of the cut may have another result.
        return [each for each in found if 2 * len(each.agreement) > len(each.entry.cut.parts)]

    # --- cuts

    def _cut_when_ready(self, now_s: float, epoch: Epoch) -> None:
        present = self._round
        roster = epoch.roster(self._member.stage)
        present.ready = {seat: part for seat, part in present.ready.items() if seat in roster}
        if not present.ready:
            return
        waits = now_s < present.first_ready_s + self._timing.ready_s
        if set(roster) <= set(present.ready) or not waits:
            self._cut(now_s, epoch, list(present.ready), 0)

    def _cut(
        self, now_s: float, epoch: Epoch, seats: list[Seat], attempt: int, blamed: tuple[Signed[Blamed], ...] = ()
    ) -> None:
        present, log = self._round, self._member.log
        if (base := self._base(present.number, epoch)) is None:
            return
        offered = [(seat, each) for seat in sorted(seats) for each in present.ready[seat].brings]
        # A seat that still has its own contribution brings it: others may have been given a part of it.
        offered.sort(key=lambda pair: pair[1].name.seat != pair[0])
        brings: dict[Seat, list[Contribution]] = {seat: [] for seat in sorted(seats)}
        taken = set[Name]()
        for seat, each in offered:
            if each.name not in taken and each.base in ((), base):
                taken.add(each.name)
                brings[seat].append(each)
        present.cut = Cut(
            stage=log.stage,
            round=present.number,
            epoch=epoch.id,
            attempt=attempt,
            parent=log.head,
            base=base,
            averages=self._context.averages(present.number),
            parts=tuple(Part(seat, tuple(each)) for seat, each in brings.items()),
            blamed=blamed,
        )
        present.cut_s, present.said, present.blamed = now_s, {}, {}

    def _agreed(self, now_s: float, epoch: Epoch) -> Committed | None:
        """The entry, once all members of the cut have the same result, or a quorum has and the others have had time."""
        present = self._round
        cut = present.cut
        assert cut is not None
        digests = Counter(s.body.digest for s in present.said.values() if isinstance(s.body, Have))
        if not digests:
            return None
        digest, count = max(digests.items(), key=lambda item: (item[1], item[0]))
        is_late = now_s > present.cut_s + self._timing.average_s or bool(present.blamed)
        if count < len(cut.parts) and not (is_late and 2 * count > len(cut.parts)):
            return None
        entry, agreement = Entry(cut, digest), tuple(present.said.values())
        origin = self._context.epoch_of(cut.epoch)
        close = self._member.closes[cut.round]
        return Committed(entry, agreement, close) if origin is not None and entry.is_agreed(agreement, origin) else None

    def _cut_again_after_failure(self, now_s: float, epoch: Epoch) -> None:
        """Try again without those that said nothing, or without accuser and accused; then with all once more."""
        present = self._round
        cut = present.cut
        assert cut is not None
        roster = set(epoch.roster(self._member.stage))
        gone = set(cut.seats) - roster
        silent = {seat for seat in cut.seats if seat not in present.said and seat not in present.blamed} - gone
        is_late = now_s > present.cut_s + self._timing.average_s
        if not gone and not is_late and not (present.blamed and not silent):
            return
        ready, attempt = set(present.ready) & roster, cut.attempt + 1
        blamed: tuple[Signed[Blamed], ...] = ()
        left = set(cut.seats) & ready - (silent if is_late else set())
        if not gone and not silent:
            blamed = self._most_named()
            left -= {seat for signed in blamed for seat in (signed.body.author, *signed.body.seats)}
        if attempt % MAX_TRIES == 0 or not left:
            blamed, left = (), ready
            if not epoch.is_divided and ready:
                left = {max(ready, key=lambda seat: (present.ready[seat].weight, seat))}
        if left:
            self._cut(now_s, epoch, sorted(left), attempt, blamed)
        else:
            self._round = Round(present.number)

    def _most_named(self) -> tuple[Signed[Blamed], ...]:
        """The accusation between the two seats of which most accusations are: a liar is one of them."""
        pairs = Counter(
            frozenset({author, accused})
            for author, signed in self._round.blamed.items()
            for accused in signed.body.seats
        )
        if not pairs:
            return ()
        worst = max(pairs.items(), key=lambda item: (item[1], sorted(item[0])))[0]
        for author, signed in sorted(self._round.blamed.items()):
            if author in worst and worst <= {author, *signed.body.seats}:
                # The others whom it accuses stay.
                return (signed,)
        return ()

"""One peer's part in agreement: its membership, and a member's and perhaps a leader's part in each stage it serves.

Owns which message goes where, and what follows from an epoch for the rounds. The driver polls `members`, and says what
it has done; time comes with `receive` and `tick`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.protocol.epochs import Certified, Epoch
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Close, Log
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import (
    Begin,
    Blame,
    Body,
    Commit,
    Counted,
    Cutting,
    Entries,
    Evidence,
    Granted,
    Head,
    Message,
    Ready,
    Recall,
    Rounds,
    Said,
    Sent,
    Status,
    WantHead,
    WantRoot,
    epochs_in,
)
from swarm_peer.protocol.patience import Waits
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.protocol.work import RoundContext

# After a question for a root, all rounds that begin within so long tell it: the state may be copied in any of them.
ROOTED_S = 5.0
# A seat that is not ready, or has no result, agrees to be left out after this share of ready_s, or of average_s, on its
# own clock.
PATIENT = 0.8


def _news_of(body: Body) -> object:
    """The part of it that a leader should hear at once; the rest it hears when all is repeated.

    How many samples a seat could launch changes all the time. It matters once the seat has launched what it may, and
    that is news.
    """
    if not isinstance(body, Counted):
        return body
    return replace(body, wants=replace(body.wants, samples=min(body.wants.samples, 1)))


class Core:
    """One peer's part in agreement.

    Attributes:
        membership: who is in the run
        members: this peer's parts in the stages that it serves
        preparing: stages whose state this peer takes over, for a place that it will wish for later
        told: the newest log of each stage that it wants to serve and has no place in, as somebody there has it
        leaders: its parts in those that it leads
    """

    def __init__(self, *, membership: Membership, context: RoundContext):
        self.membership = membership
        self.members: dict[int, Member] = {}
        self.preparing: frozenset[int] = frozenset()
        self.told: dict[int, Log] = {}
        self._context = context
        self.leaders: dict[int, Leader] = {}
        self._led_by: dict[int, Seat | None] = {}
        self._epoch: Epoch | None = None
        self._next_resend_s = 0.0
        # By stage, what it has said of it last as a leader or as a member, and where it has told that the stage stands.
        self._spoken: dict[int, list[object]] = {}
        self._told_heads: dict[int, Head] = {}
        self._waits: dict[int, Waits] = {}
        # By stage, when the close of a round, or a cut, by its hash, was known here.
        self._known_s: dict[tuple[int, int | str], float] = {}
        self._prepared: dict[int, tuple[Log, str, Ledger | None]] = {}
        membership.known.named = self._named_epochs

    def _named_epochs(self) -> set[EpochId]:
        """The epochs of all that this peer may have to show others."""
        own = (epochs_in(each.status()) | each.work.named_epochs() for each in self.members.values())
        logs = (*self.told.values(), *(log for log, *_ in self._prepared.values()))
        theirs = (epochs_in(Entries(log.stage, self.epoch.id, log.committed, None)) for log in logs)
        return set().union(*own, *theirs, *(leader.named_epochs() for leader in self.leaders.values()))

    def prepare(
        self, stage: int, log: Log, state: str, epochs: Iterable[Certified], ledger: Ledger | None = None
    ) -> None:
        """Note that the state of a stage that this peer wants to serve has been taken over, and its log.

        Args:
            epochs: that the log's entries were agreed in, from one that the run key has signed
        """
        # First of all: these epochs may say that this peer has its place.
        self._prepared[stage] = log, state, ledger
        self.membership.prepared |= {stage}
        self.membership.learn(epochs)
        self._drop_void_states()
        self._follow_epoch()

    def forget_prepared(self, stage: int) -> None:
        """Note that the state of a stage that had been taken over is gone."""
        self._prepared.pop(stage, None)
        self.membership.prepared -= {stage}

    def resign(self, stage: int) -> None:
        """Give up the place in a stage that has lost the state which it should begin anew with."""
        if (member := self.members.get(stage)) is not None:
            member.is_lost = True

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that this peer knows."""
        return self.membership.epoch

    def word_at(self, epoch_id: EpochId) -> str:
        """The word that the run key had said in an epoch; where that is forgotten, the one that it has said by now."""
        return (self.membership.epoch_of(epoch_id) or self.epoch).word

    # --- inputs

    def receive(self, now_s: float, message: Message) -> list[Sent]:
        """Take a message of another peer; returns what to send."""
        sent = self.membership.receive(now_s, message)
        self._follow_epoch()
        if message.epoch == self.epoch.id and isinstance(message.body, Rounds):
            answers = self._handle(now_s, message.sender, message.body)
            sent += [(message.sender.peer, self._message(body)) for body in answers]
        return sent

    def tick(self, now_s: float) -> list[Sent]:
        """Do what is due; returns what to send."""
        sent = self.membership.tick(now_s)
        self._follow_epoch()
        resends = now_s >= self._next_resend_s
        if resends:
            self._next_resend_s = now_s + self.membership.timing.resend_s
        self.membership.resigned = frozenset(stage for stage, member in self.members.items() if member.is_lost)
        self._note_known(now_s)
        self.membership.stuck = frozenset(stage for stage in self.members if self._is_stuck(stage, now_s))
        for stage in sorted(self.members):
            sent += self._lead(now_s, stage, resends)
            sent += self._speak(stage, resends)
        return sent

    def _is_stuck(self, stage: int, now_s: float) -> bool:
        """Whether the leader of a stage has had its member here wait for long, or resigns, where it is this peer."""
        leader, own = self.epoch.leader(stage), self.leaders.get(stage)
        if (waits := self._waits.get(stage)) is None or waits.leader != leader:
            waits = self._waits[stage] = Waits(now_s, leader)
        return own.resigns if own else waits.look(now_s, self.members[stage], self.membership.timing)

    # --- what follows from an epoch

    def _follow_epoch(self) -> None:
        epoch = self.epoch
        if epoch is self._epoch:
            return
        before, self._epoch = self._epoch, epoch
        mine = self.membership.stages
        self._drop_void_states()
        for stage in [stage for stage in self.members if stage not in mine]:
            del self.members[stage]
            self.leaders.pop(stage, None)
            self._waits.pop(stage, None)
        for stage in sorted(mine - {-1}):
            if stage not in self.members:
                log, state, ledger = self._prepared.pop(stage, (None, "", None))
                self.members[stage] = Member(
                    me=self.membership.me,
                    stage=stage,
                    restart=epoch.restart,
                    context=self._context,
                    log=log,
                    state=state,
                    ledger=ledger,
                )
                self.membership.prepared -= {stage}
                self._led_by.pop(stage, None)
            member = self.members[stage]
            if member.log.restart != epoch.restart:
                member.begin_anew(epoch.restart)
                self._led_by.pop(stage, None)
            leader = epoch.leader(stage)
            if before is None or self._led_by.get(stage) != leader or before.leader(stage) != leader:
                self._led_by[stage] = leader
                member.reign = None
                self.leaders.pop(stage, None)
                if leader == self.membership.me:
                    self.leaders[stage] = Leader(member=member, reign=epoch.id, context=self._context)

    def _drop_void_states(self) -> None:
        """Forget states of before the run went back."""
        restart = self.epoch.restart
        for stage in [stage for stage, (log, *_) in self._prepared.items() if log.restart != restart]:
            del self._prepared[stage]
            self.membership.prepared -= {stage}

    # --- messages

    def _handle(self, now_s: float, sender: Seat, body: Rounds) -> Iterable[Body]:
        """Act on a message about rounds; anything else than what stands here has no effect."""
        unknown = [past for past in epochs_in(body) if self.membership.epoch_of(past) is None]
        asks = [Recall(max(unknown))] if unknown else []
        if unknown and not isinstance(body, Status):
            return asks
        if isinstance(body, Close):
            return self._handle_close(sender, body)
        if isinstance(body, Head):
            return self._handle_head(sender, body)
        if isinstance(body, Evidence):
            for leader in self.leaders.values():
                leader.take_evidence(body.committed)
            return []
        if isinstance(body, WantHead | WantRoot):
            if isinstance(body, WantRoot) and (wanted := self.leaders.get(body.stage)) is not None:
                wanted.root_until_s = now_s + ROOTED_S
            asked = [self.members[body.stage]] if body.stage in self.members else []
            return [each.head() if isinstance(body, WantHead) else each.entries() for each in asked if each.knows_log]
        if isinstance(body, Counted | Granted):
            return self._handle_batch(now_s, sender, body)
        stage = body.cut.stage if isinstance(body, Cutting) else None
        stage = body.committed.entry.cut.stage if isinstance(body, Commit) else stage
        stage = body.stage if isinstance(body, Begin | Status | Entries | Ready | Said | Blame) else stage
        assert stage is not None
        if sender not in self.epoch.roster(stage):
            return []
        if isinstance(body, Begin | Cutting | Commit | Entries):
            return self._handle_as_member(now_s, sender, stage, body)
        return [*asks, *self._handle_as_leader(now_s, sender, stage, body)]

    def _handle_batch(self, now_s: float, sender: Seat, body: Counted | Granted) -> Iterable[Body]:
        leader, member = self.leaders.get(0), self.members.get(0)
        if isinstance(body, Granted):
            if member is not None and sender == self.epoch.leader(0):
                member.take_grant(body.grant)
        elif leader is not None and sender in self.epoch.roster(0):
            done = body.done.body
            is_told_now = (done.author, done.epoch) == (sender, self.epoch.id)
            answer = leader.take_counted(sender, body, self.epoch, now_s) if is_told_now else None
            return [answer] if answer is not None else []
        return []

    def _handle_close(self, sender: Seat, close: Close) -> Iterable[Body]:
        for stage, member in self.members.items():
            if sender in self._stage_leaders() and member.reign is not None:
                member.take_close(close, is_of_leader=sender == self.epoch.leader(stage))
        return []

    def _handle_head(self, sender: Seat, head: Head) -> Iterable[Body]:
        """Note where another stage stands, and tell its leader what it lacks."""
        if sender not in self.epoch.roster(head.stage):
            return
        for stage, leader in self.leaders.items():
            if stage != head.stage and (evidence := leader.take_head(sender, head)) is not None:
                yield Evidence(evidence)
        next_round = head.committed[-1].entry.cut.round + 1 if head.committed else self.epoch.restart.first_round
        closes = (member.close_of(next_round) for member in self.members.values())
        yield from [close for close in closes if close is not None][:1]

    def _handle_as_member(
        self, now_s: float, sender: Seat, stage: int, body: Begin | Cutting | Commit | Entries
    ) -> Iterable[Body]:
        member = self.members.get(stage)
        if member is None and isinstance(body, Entries) and stage in self.membership.desired | self.preparing:
            self._note_told(stage, body)
        if member is None or sender != self.epoch.leader(stage) or sender == self.membership.me:
            return []
        if isinstance(body, Entries):
            if self._is_reign(stage, body.reign):
                member.take_entries(body)
        elif member.reign is not None and isinstance(body, Begin):
            member.take_base(body.round, body.base, body.is_rooted)
        elif member.reign is not None and isinstance(body, Cutting):
            timing, cuts = self.membership.timing, member.work.cuts
            is_late = self._is_known_for(now_s, stage, body.cut.round, timing.ready_s)
            was_slow = all(self._is_known_for(now_s, stage, cut, timing.average_s) for cut in cuts)
            member.take_cut(body.cut, body.shown, is_late=is_late, was_slow=was_slow)
        elif member.reign is not None and isinstance(body, Commit) and not member.take_commit(body.committed):
            return [member.status()]
        return []

    def _is_reign(self, stage: int, reign: EpochId) -> bool:
        """Whether the leader of a stage can have led since an epoch, as far as its chain is known here."""
        leader = self.epoch.leader(stage)
        known = {each.epoch.id: each.epoch.leader(stage) for each in self.membership.known.chain}
        return reign <= self.epoch.id and known.get(reign, leader) == leader

    def _is_known_for(self, now_s: float, stage: int, what: int | str, seconds: float) -> bool:
        """Whether this peer has known a close or a cut for so long that others need not wait for it."""
        since_s = self._known_s.get((stage, what))
        return since_s is not None and now_s >= since_s + PATIENT * seconds

    def _note_known(self, now_s: float) -> None:
        known = set[tuple[int, int | str]]()
        for stage, member in self.members.items():
            known |= {(stage, number) for number in member.closes} | {(stage, cut) for cut in member.work.cuts}
        self._known_s = {key: self._known_s.get(key, now_s) for key in known}

    def _note_told(self, stage: int, entries: Entries) -> None:
        """Note the log of a stage that this peer wants to serve, if it is newer than what is known of it."""
        restart = self.epoch.restart
        known = self.told.get(stage, Log(stage, restart))
        known = known if known.restart == restart else Log(stage, restart)
        log = Log(stage, restart, entries.committed)
        if log.age >= known.age and self._context.is_valid(log, known):
            self.told[stage] = log

    def _handle_as_leader(
        self, now_s: float, sender: Seat, stage: int, body: Status | Ready | Said | Blame
    ) -> Iterable[Body]:
        leader = self.leaders.get(stage)
        if leader is None:
            return []
        answer: Body | None = None
        if isinstance(body, Status):
            answer = leader.take_status(sender, body, now_s)
        elif isinstance(body, Ready) and body.part.seat == sender:
            answer = leader.take_ready(sender, body, now_s)
        elif isinstance(body, Said) and body.statement.body.author == sender:
            answer = leader.take_said(sender, body.statement)
        elif isinstance(body, Blame) and body.statement.body.author == sender:
            leader.take_blame(sender, body)
        return [answer] if answer is not None else []

    # --- what this peer says by itself

    def _lead(self, now_s: float, stage: int, resends: bool) -> list[Sent]:
        leader, member = self.leaders.get(stage), self.members[stage]
        if leader is None:
            return []
        self._hear_itself(now_s, leader, member)
        said = leader.tick(now_s, self.epoch, self.membership.has_lease(now_s))
        for own in said:
            if isinstance(own, Cutting):
                member.take_cut(own.cut, own.shown)
            elif isinstance(own, Begin):
                member.take_base(own.round, own.base, own.is_rooted)
            elif isinstance(own, Close):
                self._handle_close(self.membership.me, own)
        before, self._spoken[stage] = self._spoken.get(stage, []), list(said)
        sent = list[Sent]()
        for body in said:
            sent += self._to_members(stage, leader, body, is_new=body not in before, resends=resends)
        head = member.head()
        if leader.is_synced and (resends or head != self._told_heads.get(stage)):
            self._told_heads[stage] = head
            sent += self._to_leaders(stage, head)
        for other_stage in leader.asks_for_heads(self.epoch, now_s) if resends else ():
            sent += self._to_seats(self.epoch.roster(other_stage), WantHead(other_stage))
        return sent

    def _hear_itself(self, now_s: float, leader: Leader, member: Member) -> None:
        """A leader is a member of its stage as well."""
        me = self.membership.me
        for own in member.sayings(self.epoch):
            if isinstance(own, Counted):
                answer = leader.take_counted(me, own, self.epoch, now_s)
                if isinstance(answer, Granted):
                    member.take_grant(answer.grant)
            elif isinstance(own, Ready):
                leader.take_ready(me, own, now_s)
            elif isinstance(own, Said):
                leader.take_said(me, own.statement)
            elif isinstance(own, Blame):
                leader.take_blame(me, own)

    def _to_members(self, stage: int, leader: Leader, body: Body, *, is_new: bool, resends: bool) -> list[Sent]:
        """A leader says this to its members, and the end of a round to the leaders of other stages as well."""
        members = self.epoch.roster(stage)
        told = [seat for seat in members if is_new or (resends and leader.is_awaited(seat, body))]
        if stage == 0 and isinstance(body, Close) and (is_new or resends):
            told += [seat for seat in self._stage_leaders() if seat not in members]
        return self._to_seats(told, body)

    def _to_leaders(self, stage: int, head: Head) -> list[Sent]:
        for other_stage, other in self.leaders.items():
            if other_stage != stage and (evidence := other.take_head(self.membership.me, head)) is not None:
                self.leaders[stage].take_evidence(evidence)
        return self._to_seats(self._stage_leaders(), head)

    def _to_seats(self, seats: Iterable[Seat], body: Body) -> list[Sent]:
        return [(seat.peer, self._message(body)) for seat in seats if seat != self.membership.me]

    def _speak(self, stage: int, resends: bool) -> list[Sent]:
        leader = self.epoch.leader(stage)
        if leader is None or leader == self.membership.me:
            return []
        said = self.members[stage].sayings(self.epoch)
        before, news = self._spoken.get(stage, []), [_news_of(body) for body in said]
        self._spoken[stage] = news
        told = [body for body, own in zip(said, news, strict=True) if resends or own not in before]
        return [(leader.peer, self._message(body)) for body in told]

    def _stage_leaders(self) -> list[Seat]:
        leaders = (self.epoch.leader(stage) for stage in range(self.membership.rules.num_stages))
        return list(dict.fromkeys(seat for seat in leaders if seat is not None))

    def _message(self, body: Body) -> Message:
        return Message(self.membership.me, self.epoch.id, body)

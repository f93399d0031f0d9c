"""One seat's part in the run's epochs: it wishes, watches, votes, and follows the newest one.

Owns how voters agree on the next epoch (single-decree Paxos for each number), and who is believed to be silent. Epochs
themselves stand in epochs.py. Knows nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from swarm_peer.protocol.epochs import (
    COORDINATORS,
    Certified,
    Epoch,
    Place,
    Restart,
    Rules,
    is_sound,
    next_epoch,
)
from swarm_peer.protocol.heard_wishes import HeardWishes
from swarm_peer.protocol.known_epochs import KnownEpochs
from swarm_peer.protocol.messages import (
    Accept,
    Alive,
    Body,
    Fetch,
    Message,
    Missing,
    News,
    Prepare,
    Probe,
    Promise,
    Recall,
    Sent,
    Timing,
    Vote,
    Wanted,
    Wishes,
)
from swarm_peer.protocol.statements import (
    Accepted,
    Ballot,
    EpochId,
    Join,
    KeySigned,
    Leave,
    Offer,
    Seat,
    Sign,
    Signed,
    Silent,
    Snapshot,
    Stuck,
    Wish,
)

# Numbers of ballots grow no faster with time than these. One beyond all numbers would end all epochs.
FIRST_BALLOTS = 64
BALLOTS_PER_S = 200
NO_BALLOT = Ballot(0, Seat("", 0, ""))


class Membership:
    """One seat's part in the run's epochs.

    Args:
        first: an epoch that the run key has signed
        random: for pauses alone
        sign: signs a statement as this seat
        sign_as_key: signs one with the run key; None if this process does not hold it
        has_ticket: whether a seat was invited by the ticket that it names

    Attributes:
        desired: stages in which this seat wants a place; COORDINATORS among them for a coordinator
        prepared: those whose state it has taken over
        resigned: those that it gives up its place in, whether desired or not
        holds: its snapshots, its round and its optimizer step, to offer when a stage is lost
        stuck: stages whose leaders do not bring a round to its end
        known: the epochs that it has followed
        acquaintances: ids of peers of the run, from wherever; one of them after the other is told the epoch, so that
            two sides that do not know each other any more meet
    """

    def __init__(
        self,
        *,
        me: Seat,
        first: Certified,
        rules: Rules,
        timing: Timing,
        random: Random,
        sign: Sign,
        sign_as_key: Sign | None = None,
        has_ticket: Callable[[Seat], bool] = lambda seat: True,
    ):
        self.me = me
        self.desired: frozenset[int] = frozenset()
        self.prepared: frozenset[int] = frozenset()
        self.resigned: frozenset[int] = frozenset()
        self.holds: tuple[int, int, frozenset[Snapshot]] = (0, 0, frozenset())
        self.stuck: frozenset[int] = frozenset()
        self.acquaintances: tuple[str, ...] = ()
        self.rules = rules
        self.timing = timing
        self._random = random
        self._sign = sign
        self._sign_as_key = sign_as_key
        self._has_ticket = has_ticket
        self.known = KnownEpochs(first, sign_as_key)
        self._now_s = 0.0
        self._ticked_s: float | None = None
        self._out: list[Sent] = []
        self._heard_s, self._probed_s = dict[Seat, float](), dict[Seat, float]()
        self._next_alive_s = self._next_resend_s = self._heard_anybody_s = 0.0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Forget all that was about the epoch before."""
        self._since_s = self._wanted_since_s = self._now_s
        self._watched = self.epoch.watched_by(self.me, self.rules.num_stages)
        self._wishes = HeardWishes()
        self.stuck = frozenset()  # of the leaders before
        self._probed_s = {seat: at_s for seat, at_s in self._probed_s.items() if seat in self.epoch.seats}
        self._promised = self._ballot = NO_BALLOT
        self._accepted: tuple[Ballot, Wishes] | None = None
        self._promises: dict[Seat, tuple[Ballot, Wishes] | None] = {}
        self._proposed: tuple[Epoch, Wishes] | None = None
        self._votes: dict[Seat, Signed[Accepted]] = {}
        self._propose_s: float | None = None
        self._heard_s = {seat: self._heard_s.get(seat, self._now_s) for seat in self.epoch.seats}

    # --- what others ask

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that this seat knows."""
        return self.known.newest

    def epoch_of(self, epoch_id: EpochId) -> Epoch | None:
        """An epoch that this seat knows to have been chosen, and has not forgotten, by its id."""
        return self.known.epoch_of(epoch_id)

    @property
    def stages(self) -> frozenset[int]:
        """The stages in which this seat has a place."""
        return self.epoch.stages_of(self.me)

    def has_lease(self, now_s: float) -> bool:
        """Whether a quorum of voters has been heard of lately, so that a leader may go on."""
        return self._hears_quorum(now_s - self.timing.lease_s)

    @property
    def lacks_voters(self) -> bool:
        """Whether this seat needs those who vote, and has heard of less than a quorum of them lately.

        Voters and leaders need them all the time, and others while they wish for something.
        """
        epoch = self.epoch
        leads = any(epoch.leader(stage) == self.me for stage in self.stages)
        needs = leads or self.me in self._wishes.authors() or self.me in epoch.wished_of
        return needs and not self._hears_quorum(self._now_s - self.timing.silent_s)

    def unheard_voters(self, since_s: float) -> list[Seat]:
        """The other voters that have not been heard of since some time."""
        return [seat for seat in self.epoch.voters if seat != self.me and self._heard_s.get(seat, -1.0) <= since_s]

    def _hears_quorum(self, since_s: float, *, had_votes: bool = False) -> bool:
        """Whether most voters have been heard of, or, with `had_votes`, have been earlier lives of this process."""
        missing = {seat for seat in self.unheard_voters(since_s) if not (had_votes and seat.peer == self.me.peer)}
        return self.epoch.is_quorum(set(self.epoch.voters) - missing, self.epoch.voters)

    # --- inputs

    def suspect(self, peer: str) -> None:
        """Note that a peer cannot be reached: it is asked for a sign of life now, and not once it has been silent.

        If it cannot be reached again as that question is repeated, it has had its time.
        """
        for seat in {each for each in (*self._watched, *self._probed_s) if each.peer == peer}:
            if (asked_s := min(self._probed_s.get(seat, self._now_s), self._now_s)) == self._now_s:
                self._next_resend_s = self._now_s
            is_gone = self._now_s >= asked_s + self.timing.resend_s
            self._probed_s[seat] = min(asked_s, self._now_s - self.timing.probe_s) if is_gone else asked_s

    def receive(self, now_s: float, message: Message) -> list[Sent]:
        """Take a message of another peer; returns what to send."""
        self._now_s = now_s
        sender, body = message.sender, message.body
        if isinstance(body, News):
            self.learn(body.epochs)
        elif isinstance(body, Recall):
            self._tell(sender.peer, self.known.up_to(body.past))
        elif message.epoch < self.epoch.id or isinstance(body, Fetch):
            self._tell(sender.peer, self.known.since(message.epoch))
        elif message.epoch > self.epoch.id:
            self._send(sender.peer, Fetch())
        else:
            self._heard_anybody_s = now_s
            if sender in self.epoch.seats:
                self._heard_s[sender] = now_s
                self._probed_s.pop(sender, None)
            self._handle(sender, body)
        return self._take_out()

    def tick(self, now_s: float) -> list[Sent]:
        """Do what is due; returns what to send. To be called at least every half second."""
        self._now_s = now_s
        if self._ticked_s is None or now_s > self._ticked_s + self.timing.silent_s:
            # This process begins, or stood still: that it has heard nobody says nothing about the others.
            self._since_s, self._heard_s = now_s, dict.fromkeys(self._heard_s, now_s)
        self._ticked_s = now_s
        if now_s >= self._next_alive_s:
            self._next_alive_s = now_s + self.timing.alive_s
            for seat in self._watched:
                self._send(seat.peer, Alive())
            if self.acquaintances:
                self._send(self._random.choice(self.acquaintances), Alive())
        self._watch()
        wanted = self._wanted()
        if now_s >= self._next_resend_s or any(map(self._wishes.is_new, wanted)):
            self._next_resend_s = now_s + self.timing.resend_s
            self._wish(wanted)
            self._repeat_ballot()
        self._look_whether_to_propose()
        self._look_whether_the_key_decides()
        return self._take_out()

    def _handle(self, sender: Seat, body: Body) -> None:
        """Act on a message of this epoch; anything that is not for this seat's part in it has no effect."""
        is_voter = self.me in self.epoch.voters
        match body:
            case Probe():
                self._send(sender.peer, Alive())
            case Missing(seats) if is_voter:
                # The word of others says less than what this voter has not heard itself.
                later_s = self._now_s + self.timing.silent_s - self.timing.probe_s
                for seat in sorted(seats & set(self.epoch.seats) - {self.me}):
                    self._probed_s.setdefault(seat, later_s)
            case Wanted(wish) if self.me in self.epoch.wished_of and self._may_wish(wish.body):
                if wish.body.author != self.me:
                    self._wishes.hear(wish, self._now_s)
            case Prepare(ballot) if is_voter and sender == ballot.proposer and sender in self.epoch.voters:
                self._handle_prepare(ballot)
            case Promise(ballot, accepted) if ballot == self._ballot and sender in self.epoch.voters:
                self._handle_promise(sender, accepted)
            case Accept(ballot, wishes) if is_voter and sender == ballot.proposer and sender in self.epoch.voters:
                self._handle_accept(ballot, wishes)
            case Vote(accepted) if accepted.body.author == sender and sender in self.epoch.voters:
                self._handle_vote(accepted)

    # --- who is there

    def _watch(self) -> None:
        """Look for seats that are silent: a voter asks them, and others have voters ask.

        Before the run key decides, everybody is asked.
        """
        silent_s = self._now_s - self.timing.silent_s
        asks_all = self._sign_as_key is not None and not self._hears_quorum(silent_s)
        watched = self.epoch.seats if asks_all else self._watched
        for seat in self._unheard(silent_s):
            if seat in watched:
                self._probed_s.setdefault(seat, self._now_s)

    def _unheard(self, since_s: float) -> list[Seat]:
        return [seat for seat in self.epoch.seats if seat != self.me and self._heard_s.get(seat, 0.0) < since_s]

    def _silent(self) -> frozenset[Seat]:
        """Seats that have had time enough to answer, and have not."""
        since_s = self._now_s - self.timing.probe_s
        return frozenset(seat for seat, at_s in self._probed_s.items() if at_s < since_s and seat != self.me)

    # --- wishes

    def _wanted(self) -> list[Wish]:
        """The wishes that this seat has now."""
        epoch, mine = self.epoch, self.stages
        own: list[Wish] = []
        own += [Join(self.me, epoch.id, stage, stage in self.prepared) for stage in sorted(self.desired - mine)]
        own += [Leave(self.me, epoch.id, stage) for stage in sorted(mine - (self.desired - self.resigned))]
        for stage in sorted(self.stuck & mine):
            if (leader := epoch.leader(stage)) is not None:
                own.append(Stuck(self.me, epoch.id, stage, leader))
        if self.desired and epoch.lost:
            own.append(Offer(self.me, epoch.id, *self.holds))
        silent = Silent(self.me, epoch.id, self._silent())
        if self.me in epoch.voters and (silent.seats or self._wishes.accuses(self.me)):
            own.append(silent)
        return own

    def _wish(self, own: Iterable[Wish]) -> None:
        """Send what this seat wishes to all voters, and ask those that it has not heard of."""
        epoch = self.epoch
        for wish in own:
            self._send_all(epoch.wished_of, Wanted(self._wishes.renew(wish, self._sign, self._now_s)))
        if own:  # nobody answers a wish
            for seat in self.unheard_voters(self._now_s - self.timing.alive_s):
                self._send(seat.peer, Probe())
        if self._sign_as_key is not None:
            # The key decides what voters do not choose though it is wished: so it makes sure that they know it.
            for signed in self._wishes.signed:
                if signed.body.author != self.me:
                    self._send_all(epoch.voters, Wanted(signed))
        if self.me in epoch.voters or self._sign_as_key is not None:
            for seat in self._probed_s:
                self._send(seat.peer, Probe())
        # Other voters may not watch them. Nobody repeats what others have said.
        if missing := frozenset(self._probed_s) & set(self._watched):
            self._send_all(epoch.voters, Missing(missing))
        self._wishes.lapse(self._now_s, self.timing.resend_s)

    def _waits_for_offers(self) -> bool:
        """Whether a stage is lost, and some seats may yet say which snapshots they hold."""
        is_early = self._now_s < self._since_s + self.timing.offers_s
        could = {*self.epoch.seats, *self._wishes.authors(Join)}
        return bool(self.epoch.lost) and is_early and not self._wishes.authors(Offer) >= could

    # --- Paxos, for the next number

    def _look_whether_to_propose(self) -> None:
        """Propose when wishes are there that change the epoch, and voters of lower ranks have had their time."""
        voters = self.epoch.voters
        if self.me not in voters or self._waits_for_offers():
            return
        if next_epoch(self.epoch, self._wishes.bodies, self.rules) is None and self._accepted is None:
            return
        if self._propose_s is None:
            pause_s = self.timing.propose_s * (1 + voters.index(self.me) * (2 + self._random.random()))
            self._propose_s = self._now_s + pause_s
        if self._now_s < self._propose_s:
            return
        self._propose_s = self._now_s + self.timing.retry_s * (1 + self._random.random())
        self._ballot = Ballot(max(self._promised.number, self._ballot.number) + 1, self.me)
        self._promises, self._proposed, self._votes = {}, None, {}
        self._send_all(voters, Prepare(self._ballot))
        self._handle_prepare(self._ballot)

    def _repeat_ballot(self) -> None:
        """Ask the voters again that have not answered: they may not have heard of this epoch before."""
        if not self._promises or self._promised != self._ballot:
            return
        asked = Prepare(self._ballot) if self._proposed is None else Accept(self._ballot, self._proposed[1])
        answered = self._promises if self._proposed is None else self._votes
        self._send_all([seat for seat in self.epoch.voters if seat not in answered], asked)

    def _handle_prepare(self, ballot: Ballot) -> None:
        most = FIRST_BALLOTS + BALLOTS_PER_S * (self._now_s - self._since_s)
        if ballot < self._promised or ballot.number > most:
            return
        self._promised = ballot
        if ballot.proposer == self.me:
            self._handle_promise(self.me, self._accepted)
        else:
            self._send(ballot.proposer.peer, Promise(ballot, self._accepted))

    def _handle_promise(self, sender: Seat, accepted: tuple[Ballot, Wishes] | None) -> None:
        if self._proposed is not None:
            return
        self._promises[sender] = accepted
        if not self.epoch.is_quorum(self._promises, self.epoch.voters):
            return
        known = [value for value in self._promises.values() if value is not None]
        wishes = max(known, key=lambda value: value[0])[1] if known else tuple(self._wishes.signed)
        successor = next_epoch(self.epoch, [signed.body for signed in wishes], self.rules)
        if successor is None:
            return
        self._proposed = successor, wishes
        self._send_all(self.epoch.voters, Accept(self._ballot, wishes))
        self._handle_accept(self._ballot, wishes)

    def _handle_accept(self, ballot: Ballot, wishes: Wishes) -> None:
        if ballot < self._promised or (successor := self._acceptable(wishes)) is None:
            return
        self._promised, self._accepted = ballot, (ballot, wishes)
        vote = self._sign(Accepted(self.me, self.epoch.id, ballot, successor.hash))
        if ballot.proposer == self.me:
            self._handle_vote(vote)
        else:
            self._send(ballot.proposer.peer, Vote(vote))

    def _may_wish(self, wish: Wish) -> bool:
        """Whether a wish is about this epoch, and its author has a place, or a ticket for one."""
        needs_ticket = isinstance(wish, Join) or wish.author not in self.epoch.seats
        return is_sound(wish, self.epoch, self.rules) and (not needs_ticket or self._has_ticket(wish.author))

    def _acceptable(self, wishes: Wishes) -> Epoch | None:
        """The epoch that these wishes make; None if they make none, or go back further than need be.

        Not for ever: another voter may have accepted them before it heard of the offers that this one has heard of.
        """
        bodies = [signed.body for signed in wishes]
        if not all(map(self._may_wish, bodies)):
            return None
        successor = next_epoch(self.epoch, bodies, self.rules)
        if successor is None or successor.restart == self.epoch.restart:
            return successor
        if self._now_s > self._since_s + self.timing.relent_s:
            return successor
        offers = [wish for wish in self._wishes.bodies if isinstance(wish, Offer)]
        best = next_epoch(self.epoch, [*bodies, *offers], self.rules)
        goes_as_far = best is None or successor.restart.optimizer_step >= best.restart.optimizer_step
        return successor if goes_as_far else None

    def _handle_vote(self, accepted: Signed[Accepted]) -> None:
        body, asked = accepted.body, self._proposed
        if asked is None or (body.epoch, body.ballot, body.successor) != (self.epoch.id, self._ballot, asked[0].hash):
            return
        self._votes[body.author] = accepted
        if self.epoch.is_quorum(self._votes, self.epoch.voters):
            self._announce(Certified(asked[0], tuple(self._votes.values())))

    # --- the run key

    def announce_by_key(self, places: Iterable[Place], restart: Restart, least_term: int = 0) -> list[Sent]:
        """Have the run go on from a restart, with these places, in a term of the run key; returns what to send."""
        places, new_id = tuple(places), EpochId(max(self.epoch.id.term + 1, least_term), self.me, 0)
        begun = tuple(sorted({place.stage for place in places} - {COORDINATORS}))
        self._announce_as_key(Epoch(new_id, places, restart._replace(epoch=new_id), begun, self.epoch.word))
        return self._take_out()

    def say_by_key(self, word: str, least_term: int = 0) -> list[Sent]:
        """Tell all seats a word, in a term of the run key in which nothing else changes; returns what to send."""
        new_id = EpochId(max(self.epoch.id.term + 1, least_term), self.me, 0)
        successor = next_epoch(self.epoch, (), self.rules, new_id=new_id)
        assert successor is not None
        self._announce_as_key(replace(successor, word=word))
        return self._take_out()

    def _announce_as_key(self, epoch: Epoch) -> None:
        assert self._sign_as_key is not None
        self._announce(Certified(epoch, (self._sign_as_key(KeySigned(epoch.hash)),)))

    def _look_whether_the_key_decides(self) -> None:
        """Make an epoch of a new term where voters are gone for long, or choose none, if this process has the run key.

        One that hears nobody, where somebody has a seat, is cut off itself, or nobody is there to go on.
        """
        if self._sign_as_key is None or not self.desired:
            return
        silent_s = self._now_s - self.timing.silent_s
        others = {seat for seat in self.epoch.seats if seat != self.me}
        if others and self._heard_anybody_s < silent_s:
            return
        coordinators = [seat.peer for seat in self.epoch.roster(COORDINATORS)]
        rank = coordinators.index(self.me.peer) if self.me.peer in coordinators else len(coordinators)
        wait_s = self.timing.key_s * (1 + rank)
        if not self._hears_quorum(silent_s) and self._hears_quorum(silent_s, had_votes=True):
            wait_s = self.timing.silent_s  # of those that lack, all are gone for certain
        if next_epoch(self.epoch, self._wishes.bodies, self.rules) is None:
            self._wanted_since_s = self._now_s
        is_blocked = self._now_s >= self._wanted_since_s + wait_s
        if self._now_s < self._since_s + wait_s or (self._hears_quorum(self._now_s - wait_s) and not is_blocked):
            return
        unheard = self._unheard(silent_s)
        for seat in unheard:
            self._probed_s.setdefault(seat, self._now_s)
        silent = self._silent() & set(unheard)
        if len(silent) < len(unheard):
            return  # they may yet answer
        new_id = EpochId(self.epoch.id.term + 1, self.me, 0)
        successor = next_epoch(self.epoch, self._wishes.bodies, self.rules, new_id=new_id, silent=silent)
        assert successor is not None
        self._announce_as_key(successor)

    # --- news

    def _announce(self, certified: Certified) -> None:
        """Follow an epoch that was chosen just now, and tell everybody in it or in the one before, and who wish."""
        before, wish = self.epoch, sorted(self._wishes.authors())
        self.learn([certified])
        for seat in dict.fromkeys((*before.seats, *self.epoch.seats, *wish)):
            if seat != self.me:
                self._tell(seat.peer, self.known.since(before.id))

    def learn(self, epochs: Iterable[Certified]) -> None:
        """Follow each of these epochs that is certified and newer; remember those that are older."""
        if self.known.learn(epochs):
            self._begin_epoch()
            if anchor := self.known.to_anchor:
                self._send_all(self.epoch.seats, News(anchor))

    def _tell(self, peer: str, epochs: tuple[Certified, ...]) -> None:
        if epochs:
            self._send(peer, News(epochs))

    # --- sending

    def _send_all(self, seats: Iterable[Seat], body: Body) -> None:
        for seat in (each for each in seats if each != self.me):
            self._send(seat.peer, body)

    def _send(self, peer: str, body: Body) -> None:
        self._out.append((peer, Message(self.me, self.epoch.id, body)))

    def _take_out(self) -> list[Sent]:
        out, self._out = self._out, []
        return out

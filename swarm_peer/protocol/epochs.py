"""Epochs: who has a place in the run, who votes, who leads, and where the run begins anew. Pure.

Owns how an epoch follows from its parent and a set of wishes. Knows nothing of how voters agree on that set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from swarm_peer.protocol.statements import (
    Accepted,
    EpochId,
    Join,
    KeySigned,
    Leave,
    Offer,
    Seat,
    Signed,
    Silent,
    Stuck,
    Wish,
    hash_of,
)

# In place of a stage: coordinators and standbys have places, and vote.
COORDINATORS = -1
# Voters of an epoch. More of them make each epoch dearer, and fewer are gone sooner.
MAX_VOTERS = 7
MAX_ROUND = 1 << 40
# A seat may be further than most others by less than so many rounds.
ROUNDS_APART = 64
# Epochs that are kept for seats that have missed some; besides, all since the newest one that the run key has signed,
# from which a newcomer can check those that follow.
KEPT_EPOCHS = 64
# With fewer tickets no majority of them could outvote a liar, so each peer has a vote of its own.
MIN_TICKETS = 3


class Place(NamedTuple):
    """A seat's place in one stage."""

    stage: int
    seat: Seat


class Restart(NamedTuple):
    """Where the run has begun, or begun anew.

    Attributes:
        first_round: round that follows; above all rounds of the time before
        optimizer_step: that the weights have then
        entries: for each stage, the hash of the entry that names the snapshot; empty for the initial weights
        epoch: that has begun it: two sides of a run may choose the same rounds and snapshots, and go on otherwise; None
            for a run's first epoch
    """

    first_round: int
    optimizer_step: int
    entries: tuple[str, ...] = ()
    epoch: EpochId | None = None


# The initial weights.
BEGINNING = Restart(0, 0)


@dataclass(frozen=True)
class Rules:
    """The part of a run's manifest that the protocol needs.

    Attributes:
        num_stages: of the model
        begin_anew_steps: a run that has made at most so many optimizer steps begins with the initial weights again, if
            there are no snapshots
        period: rounds from one average to the next
    """

    num_stages: int
    begin_anew_steps: int
    period: int = 1

    def restart(self, after_round: int, optimizer_step: int, entries: tuple[str, ...] = ()) -> Restart:
        """A restart whose rounds are above another one. Periods end in the rounds that they would have ended in."""
        first_round = after_round + 1
        first_round += (optimizer_step - first_round) % self.period
        return Restart(first_round, optimizer_step, entries)


@dataclass(frozen=True)
class Epoch:
    """One list of the seats of a run, agreed once.

    Attributes:
        places: oldest first, of all stages and of coordinators
        begun: stages that have had a seat since the restart
        word: that the run key has said, which nobody reads here; it stays said in the epochs that follow
    """

    id: EpochId
    places: tuple[Place, ...] = ()
    restart: Restart = BEGINNING
    begun: tuple[int, ...] = ()
    word: str = ""

    @cached_property
    def hash(self) -> str:
        """The name by which voters and the run key sign it."""
        return hash_of(self)

    def roster(self, stage: int) -> tuple[Seat, ...]:
        """The seats of a stage, oldest first; of COORDINATORS the coordinators."""
        return self._rosters.get(stage, ())

    @cached_property
    def _rosters(self) -> dict[int, tuple[Seat, ...]]:
        stages = {place.stage for place in self.places}
        return {stage: tuple(place.seat for place in self.places if place.stage == stage) for stage in stages}

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """All seats, each once, oldest first."""
        return tuple(dict.fromkeys(place.seat for place in self.places))

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """The stages that have begun and have no seat left."""
        return tuple(stage for stage in self.begun if not self.roster(stage))

    def leader(self, stage: int) -> Seat | None:
        """The seat that leads a stage; None if the stage has none."""
        return next(iter(self.roster(stage)), None)

    def stages_of(self, seat: Seat) -> frozenset[int]:
        """The stages in which a seat has a place."""
        return frozenset(place.stage for place in self.places if place.seat == seat)

    def watched_by(self, me: Seat, num_stages: int) -> list[Seat]:
        """Seats that one hears of, and that hear of it.

        Voters watch voters and leaders, that of the coordinators too, and these them; leaders watch their members, and
        these them.
        """
        watched = dict[Seat, None]()
        if me in self.voters:
            watched |= dict.fromkeys(self.voters)
            leaders = (self.leader(stage) for stage in (COORDINATORS, *range(num_stages)))
            watched |= dict.fromkeys(seat for seat in leaders if seat is not None)
        for stage in self.stages_of(me):
            leader = self.leader(stage)
            if leader == me:
                watched |= dict.fromkeys((*self.roster(stage), *self.voters))
            elif leader is not None:
                watched[leader] = None
        watched.pop(me, None)
        return list(watched)

    @cached_property
    def is_divided(self) -> bool:
        """Whether there are tickets enough for their majority to outvote one of them."""
        return len({seat.ticket for seat in self.seats}) >= MIN_TICKETS

    def vote_of(self, seat: Seat) -> str:
        """Seats of the same vote have one vote together: those of a ticket, or else those of a peer."""
        return seat.ticket if self.is_divided else seat.peer

    @cached_property
    def voters(self) -> tuple[Seat, ...]:
        """Those who choose the next epoch: coordinators, then the oldest seats, one for each vote.

        They are an odd number: of an even one, all but one can do without as many, and a smaller majority decides. So a
        run of one peer goes on without its coordinator.
        """
        first_of = dict[str, Seat]()
        for seat in (*self.roster(COORDINATORS), *self.seats):
            first_of.setdefault(self.vote_of(seat), seat)
        found = tuple(first_of.values())[:MAX_VOTERS]
        if len(found) % 2:
            return found
        return found[1:] if self.roster(COORDINATORS) else found[:-1]

    @cached_property
    def wished_of(self) -> tuple[Seat, ...]:
        """Those who hear of all wishes: voters, and coordinators, which may decide by the run key."""
        return tuple(dict.fromkeys((*self.voters, *self.roster(COORDINATORS))))

    def is_quorum(self, seats: Iterable[Seat], of: Iterable[Seat]) -> bool:
        """Whether some seats have more than half of the votes that all of them have."""
        votes = {self.vote_of(seat) for seat in of}
        return 2 * len(votes & {self.vote_of(seat) for seat in seats}) > len(votes)


@dataclass(frozen=True)
class Certified:
    """An epoch with what shows that it was chosen: statements of voters of its parent, or one of the run key."""

    epoch: Epoch
    certificate: tuple[Signed[Accepted] | Signed[KeySigned], ...]

    @property
    def is_of_key(self) -> bool:
        """Whether the run key has signed it."""
        return any(isinstance(s.body, KeySigned) and s.body.successor == self.epoch.hash for s in self.certificate)

    def follows(self, parent: Epoch) -> bool:
        """Whether the voters of the parent have chosen it: a quorum of them, in one ballot."""
        if self.epoch.id != parent.id.next():
            return False
        authors = defaultdict(set)
        for signed in self.certificate:
            body = signed.body
            if isinstance(body, Accepted) and (body.epoch, body.successor) == (parent.id, self.epoch.hash):
                authors[body.ballot].add(body.author)
        voters = parent.voters
        return any(parent.is_quorum(found & set(voters), voters) for found in authors.values())


def rank_of(chain: Sequence[Certified]) -> tuple[EpochId, EpochId]:
    """By which a newcomer knows the newest of several chains: by the newest epoch of the run key, then by the last.

    A seat that was the only voter once can make up epochs with any number after that one.
    """
    return max(each.epoch.id for each in chain if each.is_of_key), chain[-1].epoch.id


def without_old(chain: list[Certified], kept: int) -> list[Certified]:
    """The epochs of a chain that others may need, in their order: from the last that the run key has signed on."""
    newest_of_key = max((index for index, each in enumerate(chain) if each.is_of_key), default=0)
    return chain[min(newest_of_key, max(0, len(chain) - kept)) :]


def next_epoch(
    epoch: Epoch,
    wishes: Iterable[Wish],
    rules: Rules,
    *,
    new_id: EpochId | None = None,
    silent: frozenset[Seat] = frozenset(),
) -> Epoch | None:
    """The epoch that follows from these wishes; None if they change nothing.

    Args:
        new_id: the next number of the same term if None
        silent: seats that are put out by word of the run key
    """
    sound = {wish for wish in wishes if is_sound(wish, epoch, rules)}
    is_of_key = new_id is not None
    if not sound and not is_of_key:
        return None
    new_id = new_id or epoch.id.next()
    joins = _joins(sound)
    places = _without_the_gone(epoch, sound, joins, silent)
    places = _without_lead_of_the_stuck(epoch, places, sound)
    restart, begun = epoch.restart, set(epoch.begun)
    if is_of_key and begun:
        # The holder of the run key may know an old epoch: other stages may have begun since.
        begun = set(range(rules.num_stages))
    for wish in joins:
        others = any(place.stage == wish.stage for place in places)
        # Nobody can say of the only seat of a stage whether it has the state; where tickets vote, it is not believed.
        has_state = wish.has_state and (others or not epoch.is_divided)
        if wish.stage != COORDINATORS and not has_state:
            if others:
                continue
            if wish.stage in begun:
                if (begins := choose_restart(epoch, sound, rules)) is None:
                    continue
                restart, begun = begins._replace(epoch=new_id), {place.stage for place in places} - {COORDINATORS}
        if Place(wish.stage, wish.author) not in places:
            places.append(Place(wish.stage, wish.author))
            begun |= {wish.stage} - {COORDINATORS}
    if (tuple(places), restart) == (epoch.places, epoch.restart) and not is_of_key:
        return None
    return Epoch(new_id, tuple(places), restart, tuple(sorted(begun)), epoch.word)


def is_sound(wish: Wish, epoch: Epoch, rules: Rules) -> bool:
    """Whether a wish is about this epoch, and of somebody who may wish so."""
    if wish.epoch != epoch.id:
        return False
    match wish:
        case Join():
            newest = max((seat.life for seat in epoch.seats if seat.peer == wish.author.peer), default=wish.author.life)
            return COORDINATORS <= wish.stage < rules.num_stages and wish.author.life >= newest
        case Leave():
            return Place(wish.stage, wish.author) in epoch.places
        case Silent():
            return wish.author in epoch.voters and wish.seats <= set(epoch.seats)
        case Stuck():
            roster = epoch.roster(wish.stage)
            return wish.author in roster and wish.leader == roster[0]
        case Offer():
            are_sound = all(0 <= s.stage < rules.num_stages and s.entry for s in wish.snapshots)
            # Also of one without a place: who has left its stage to take over the lost one may hold the only snapshots.
            return are_sound and 0 <= wish.round < MAX_ROUND


def choose_restart(epoch: Epoch, wishes: Iterable[Wish], rules: Rules) -> Restart | None:
    """Where to begin anew: the newest step of which somebody offers a snapshot of every stage; None if there is none.

    The snapshots are of one base, so that the stages fit together; of several bases, the one of most holders. Where all
    that is told of the run is a few steps, it may begin with the initial weights.
    """
    offers = [wish for wish in wishes if isinstance(wish, Offer)]
    if not offers:
        return None
    told = _told_by_most(epoch, {offer: offer.round for offer in offers})
    after_round = max(epoch.restart.first_round, min(max(offer.round for offer in offers), told + ROUNDS_APART))
    times = {(snapshot.optimizer_step, snapshot.base) for offer in offers for snapshot in offer.snapshots}
    complete = list[tuple[int, int, str, tuple[str, ...]]]()
    for step, base in times:
        found = [_most_held(stage, step, base, offers) for stage in range(rules.num_stages)]
        if all(entry for _, entry in found):
            complete.append((step, min(num for num, _ in found), base, tuple(entry for _, entry in found)))
    if complete:
        step, _, _, entries = max(complete)
        return rules.restart(after_round, step, entries)
    come_to = _told_by_most(epoch, {offer: offer.optimizer_step for offer in offers})
    return rules.restart(after_round, 0) if come_to <= rules.begin_anew_steps else None


def _told_by_most(epoch: Epoch, told: dict[Offer, int]) -> int:
    """The largest number that is told, where nobody is feared to lie; else one that most votes have come to."""
    numbers = sorted(set(told.values()), reverse=True)
    if not epoch.is_divided:
        return numbers[0]
    authors = [offer.author for offer in told]
    reached = (n for n in numbers if epoch.is_quorum([offer.author for offer in told if told[offer] >= n], authors))
    return next(reached)


def _most_held(stage: int, step: int, base: str, offers: Iterable[Offer]) -> tuple[int, str]:
    """The entry by which most holders know a stage's snapshot, and their number; an empty one if nobody holds any."""
    holders = defaultdict(set)
    for offer in offers:
        for snapshot in offer.snapshots:
            if (snapshot.stage, snapshot.optimizer_step, snapshot.base) == (stage, step, base):
                holders[snapshot.entry].add(offer.author)
    return max(((len(authors), entry) for entry, authors in holders.items()), default=(0, ""))


def _joins(wishes: Iterable[Wish]) -> list[Join]:
    """Those who join, in an order that all know; of several lives of one peer the last one."""
    joins = [wish for wish in wishes if isinstance(wish, Join)]
    lives = dict[str, int]()
    for join in joins:
        lives[join.author.peer] = max(join.author.life, lives.get(join.author.peer, join.author.life))
    return sorted(
        (join for join in joins if join.author.life == lives[join.author.peer]),
        key=lambda join: (join.stage, join.author),
    )


def _without_the_gone(
    epoch: Epoch, wishes: Iterable[Wish], joins: Iterable[Join], silent: frozenset[Seat]
) -> list[Place]:
    accusers = defaultdict[Seat, set[Seat]](set)
    left, lives = set[Place](), {join.author.peer: join.author.life for join in joins}
    for wish in wishes:
        if isinstance(wish, Leave):
            left.add(Place(wish.stage, wish.author))
        elif isinstance(wish, Silent):
            for seat in wish.seats:
                accusers[seat].add(wish.author)
    gone = silent | {seat for seat, by in accusers.items() if epoch.is_quorum(by, epoch.voters)}
    return [
        place
        for place in epoch.places
        if place not in left
        and place.seat not in gone
        # An older life of a peer that has come back.
        and place.seat.life >= lives.get(place.seat.peer, place.seat.life)
    ]


def _without_lead_of_the_stuck(epoch: Epoch, places: list[Place], wishes: Iterable[Wish]) -> list[Place]:
    accusers = defaultdict[Place, set[Seat]](set)
    for wish in wishes:
        if isinstance(wish, Stuck):
            accusers[Place(wish.stage, wish.leader)].add(wish.author)
    stuck = [
        place
        for place, by in accusers.items()
        if place in places and (place.seat in by or epoch.is_quorum(by, set(epoch.roster(place.stage)) - {place.seat}))
    ]
    return [place for place in places if place not in stuck] + sorted(stuck)

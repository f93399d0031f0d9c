"""A member that lies, and was alone as the run began: it makes certificates of the epochs of that time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checks import Violation
from cluster import Process
from liars import FAR, Liar
from world import World

from swarm_peer.protocol.epochs import COORDINATORS, MIN_TICKETS, Certified, Epoch, Place, Restart, rank_of
from swarm_peer.protocol.log import Close, Committed, Contribution, Done, Entry, Have, Name, Part
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Commit, Cutting, Entries, Head, Message, News, Sent, Status
from swarm_peer.protocol.statements import Accepted, Ballot, EpochId, Seat

# When the others come.
OTHERS_AT_S = 8.0
LIES = 0.2


class WasAlone(Liar):
    """What it alone could agree on once, it makes up now: entries, counts that close rounds, and later epochs."""

    def __init__(self, world: World, process: Process):
        super().__init__(world, process)
        # Epochs of its making, with the seat that it had then.
        self._alone: dict[EpochId, tuple[Epoch, Seat]] = {}
        # Since where the run has begun, or begun anew, the others have agreed.
        self._agreed_since: Restart | None = None

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        core = self.process.core
        assert core is not None
        epoch = core.epoch
        if any(epoch.roster(stage) == (self.me,) for stage in core.members):
            self._alone.setdefault(epoch.id, (epoch, self.me))
        if not self._alone or self.world.random.random() > LIES or not self._have_others_agreed():
            return [message]
        old, seat = self.world.random.choice(list(self._alone.values()))
        bodies: list[Any] = []
        for member in core.members.values():
            if member.log.committed:
                bodies += self._of_round(member, old, seat, message)
        if old.voters == (seat,):
            bodies.append(News((*core.membership.known.up_to(old.id), *self._epochs_after(old, seat))))
        return [message, *(replace(message, body=body) for body in bodies)]

    def _have_others_agreed(self) -> bool:
        """Whether the others of each stage have an entry of three tickets, whose epoch the run key's holder knows.

        Before that they believe what it says: it was the only voter, and the key signs what its holder hears first.
        """
        assert self.process.core is not None
        restart = self.process.core.epoch.restart
        if self._agreed_since != restart:
            others = [p.core for p in self.world.processes.values() if p.core is not None and p is not self.process]
            logs = [
                core.members[stage].log for core in others for stage in core.membership.stages & core.members.keys()
            ]
            newest = [(log.stage, each.entry.cut) for log in logs for each in log.committed[-1:]]
            epochs = [(stage, self.world.epochs[cut.epoch]) for stage, cut in newest]
            tickets = [{seat.ticket for seat in epoch.roster(stage)} for stage, epoch in epochs]
            are_there = all(core.membership.stages == core.membership.desired for core in others) and len(others) > 3
            known = self.world.processes["c0"].core
            are_there &= known is not None and all(known.membership.epoch_of(e.id) == e for _, e in epochs)
            has_all = are_there and len(newest) == len(logs) and all(log.restart == restart for log in logs)
            if not has_all or not all(len(each) >= MIN_TICKETS for each in tickets):
                return False
            self._agreed_since = restart
        return True

    def _of_round(self, member: Member, old: Epoch, seat: Seat, message: Message) -> list[Any]:
        random = self.world.random
        index = random.randrange(len(member.log.committed))
        true = member.log.committed[index]
        number, parent = true.entry.cut.round, true.entry.cut.parent
        if random.random() < 0.5:
            index, number, parent = index + 1, number + 1, true.entry.hash
        base = list(true.entry.cut.base)
        if random.random() < 0.5 and base:
            base[member.stage] = parent
        samples = random.choice((0, self.world.rounds.batch, FAR))
        done = Done(seat, old.id, number, random.choice((0, 1 << 20)), samples, tuple(base))
        close = random.choice((Close(number, (self.sign(done),)), replace(true.close, round=number)))
        part = Part(seat, (Contribution(Name(seat, number), 1, (), tuple(base)),))
        made = replace(
            true.entry.cut, epoch=old.id, round=number, parent=parent, base=tuple(base), parts=(part,), root=""
        )
        entry = Entry(made, "mine")
        own = Committed(entry, (self.sign(Have(seat, old.id, made.hash, "mine")),), close)
        log, reign = (*member.log.committed[:index], own), member.reign or message.epoch
        cut = replace(made, epoch=message.epoch, round=number + 1, parent=entry.hash)
        return random.sample(
            (
                close,
                Commit(own),
                Entries(member.stage, random.choice((reign, old.id)), log, None),
                Head(member.stage, (own,)),
                Head(member.stage, log),
                Status(member.stage, log, own.entry.hash, (close,), (), ()),
                Status(member.stage, log, parent, (), ((made, *own.agreement),), ()),
                Cutting(cut, shown=(own,)),
            ),
            3,
        )

    def _epochs_after(self, old: Epoch, seat: Seat) -> list[Certified]:
        made = list[Certified]()
        for _ in range(self.world.random.randrange(1, 12)):
            places = self.world.random.choice(((Place(0, seat),), old.places))
            epoch = replace(old, id=old.id.next(), places=places)
            accepted = Accepted(seat, old.id, Ballot(1, seat), epoch.hash)
            made.append(Certified(epoch, (self.sign(accepted),)))
            old = epoch
        return made


class WorldBegunAlone(World):
    """A schedule whose first member is alone for a while; then others come, of three tickets a stage, and it lies."""

    def __init__(self, seed: int, num_faults: int = 3):
        self._liar: WasAlone | None = None
        super().__init__(seed, num_faults=num_faults)
        self._liar = WasAlone(self, self.processes["p00"])

    def _add_processes(self) -> None:
        self._add("c0", "operator", frozenset({COORDINATORS}), has_key=True)
        self._add(
            "p00", "t00", frozenset(range(self.rules.num_stages)) if self.random.random() < 0.5 else frozenset({0})
        )
        others = [(f"p{stage}{n}", stage) for stage in range(self.rules.num_stages) for n in range(3 + (not stage))]

        def add_others() -> None:
            for name, stage in others:
                if name != "p00":
                    self._add(name, f"t{name}", frozenset({stage}))

        self._at(OTHERS_AT_S, add_others)
        if self.random.random() < 0.7:
            # It leads no stage then, and can sign as the seat that it had all the same.
            self._at(OTHERS_AT_S + 12.0, lambda: self.start(self.processes["p00"]))

    def start(self, process: Process) -> None:
        """See Cluster: a newcomer begins with what most of the run key's signatures vouch for, as the runtime does."""
        super().start(process)
        assert process.core is not None
        chains = [each.core.membership.known.chain for each in self.processes.values() if each.core is not None]
        process.core.membership.learn(max(chains, key=rank_of))

    def send(self, process: Process, sent: list[Sent]) -> None:
        """See World: what the liar sends is changed."""
        liar = self._liar
        if liar is not None and process is liar.process and process.core is not None:
            told = [(target, each) for target, each in sent if target != process.peer]
            sent = [(target, message) for target, each in told for message in liar.sent(each)]
        super().send(process, sent)


def run(seed: int, num_faults: int = 3) -> WorldBegunAlone:
    """Run one schedule.

    Raises:
        Violation: an invariant is broken; or the run has gone back, though the liar has led no stage since it lies
    """
    world = WorldBegunAlone(seed, num_faults)
    world.run()
    has_led = world.processes["p00"].life == 1
    if not has_led and not num_faults and any(epoch.restart.first_round for epoch in world.epochs.values()):
        raise Violation("the run has gone back")
    return world

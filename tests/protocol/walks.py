"""Walks through a few rounds: a small swarm without time, whose messages come in any order.

Finer than world.py: a walk chooses what comes next, so that rare orders of few messages come up. Epochs are made by the
run key, without voters; ballots.py looks at how voters choose one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from cluster import Cluster, Process

from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place, next_epoch
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Message, News, Said, Sent, Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat, Signed

NEVER_S = 1e9
# Nothing happens by itself but what a leader or a member does in its rounds.
TIMING = Timing(
    alive_s=NEVER_S,
    silent_s=NEVER_S,
    propose_s=NEVER_S,
    lease_s=NEVER_S,
    key_s=NEVER_S,
    stuck_s=NEVER_S,
    share_s=NEVER_S,
    average_s=10.0,
)
# Messages that may be on their way; of more, some are lost.
MAX_FLYING = 60


class Walk(Cluster):
    """A small swarm, of which others say what happens next.

    Attributes:
        flying: messages on their way, with the ids of those that they go to
    """

    def __init__(
        self, random: Random, rounds: RoundRules, num_members: int, make: Callable[..., Membership] = Membership
    ):
        super().__init__(random, rounds, TIMING, num_slices=4, make=make)
        self.flying: list[tuple[str, Message]] = []
        coordinator = Seat("c", 1, "operator")
        places = [Place(COORDINATORS, coordinator)]
        for stage in range(rounds.num_stages):
            for number in range(num_members):
                peer = f"p{stage}{number}"
                # In half of the walks each has a ticket of its own.
                ticket = peer if random.random() < 0.5 else f"t{number}"
                self.processes[peer] = Process(peer, ticket, frozenset({stage}))
                places.append(Place(stage, Seat(peer, 1, ticket)))
        epoch = Epoch(EpochId(1, coordinator, 0), tuple(places), begun=tuple(range(rounds.num_stages)))
        self.first = self.newest = self._signed(epoch)
        for process in self.processes.values():
            self.start(process)

    def _signed(self, epoch: Epoch) -> Certified:
        return Certified(epoch, (Signed(KeySigned(epoch.hash), b"key"),))

    def send(self, process: Process, sent: list[Sent]) -> None:
        """Put messages on their way."""
        for target, message in sent:
            if target in self.processes and (process.peer, target) not in self.cut:
                self.flying.append((target, message))
        while len(self.flying) > MAX_FLYING:
            self.flying.pop(self.random.randrange(len(self.flying)))

    @property
    def living(self) -> list[Process]:
        """The processes that have not crashed."""
        return [process for process in self.processes.values() if process.core is not None]

    # --- what can happen next

    def deliver(self, index: int, *, again: bool = False) -> None:
        """A message arrives, and may come again."""
        target, message = self.flying[index]
        if not again:
            self.flying[index] = self.flying[-1]
            self.flying.pop()
        if self.processes[target].core is not None:
            self.receive(self.processes[target], message)

    def lose(self, index: int) -> None:
        """A message is lost."""
        self.flying.pop(index)

    def wait(self, process: Process, seconds: float) -> None:
        """Time passes for a process, and it does what is due."""
        process.offset_s += seconds
        self.tick(process)

    def crash(self, process: Process, *, loses: bool) -> None:
        """A process ends, perhaps with what it has sent just now."""
        process.core = None
        if loses:
            self.flying = [(to, message) for to, message in self.flying if message.sender.peer != process.peer]

    def mute(self, process: Process) -> None:
        """The stage-mates of a process hear nothing of it any more; the others do, and it hears all."""
        mates = (mate.peer for mate in self.processes.values() if mate.stages == process.stages)
        self.cut |= {(process.peer, mate) for mate in mates}
        self.flying = [(to, each) for to, each in self.flying if (each.sender.peer, to) not in self.cut]

    def put_out(self, process: Process) -> None:
        """An epoch without a process is made, and all hear of it in time."""
        epoch = self.newest.epoch
        silent = frozenset(seat for seat in epoch.seats if seat.peer == process.peer)
        new_id = EpochId(epoch.id.term + 1, epoch.id.author, 0)
        successor = next_epoch(epoch, [], self.rules, new_id=new_id, silent=silent)
        assert successor is not None
        self.newest = self._signed(successor)
        news = Message(epoch.id.author, successor.id, News((self.newest,)))
        self.flying += [(each.peer, news) for each in self.living]

    def is_spare(self, process: Process) -> bool:
        """Whether its stages have others in the newest epoch."""
        epoch = self.newest.epoch
        rosters = [epoch.roster(stage) for stage in range(self.rules.num_stages)]
        return all({seat.peer for seat in roster} != {process.peer} for roster in rosters)

    def look(self) -> None:
        """Look at what has been agreed so far."""
        self.checks.at_the_end()

    def end(self) -> None:
        """Have all messages arrive for a while, and look at what was agreed.

        Where a stage has lost what others have computed from, it says so, and the run would go back.
        """
        for _ in range(8):
            for process in self.living:
                self.wait(process, 1.2)
            while self.flying:
                self.deliver(0)
        members = [member for process in self.living if process.core for member in process.core.members.values()]
        self.checks.at_the_end(has_lost=any(member.is_lost for member in members))


def walk(seed: int, make: Callable[..., Membership] = Membership, *, num_steps: int = 900) -> Walk:
    """One walk that follows from a seed.

    Raises:
        Violation: an invariant is broken
    """
    random = Random(seed)
    rounds = RoundRules(
        num_stages=random.choice((1, 2, 2)),
        batch=random.choice((1, 2)),
        lag=random.choice((0, 0, 1)),
        roots_every=(random.choice((1, 3)),),
    )
    walk = Walk(random, rounds, random.choice((2, 3, 3)), make)
    faults = {random.randrange(num_steps // 10, num_steps) for _ in range(random.choice((0, 1, 1, 2, 3)))}
    muted: dict[int, Process] = {}
    waits_to_mute = False
    for step in range(num_steps):
        if step in faults and (process := _any_spare(walk, random)) is not None:
            kind = random.choice(("crash", "leave", "cut off", "mute", "mute"))
            walk.count(kind)
            waits_to_mute |= kind == "mute"
            if kind != "mute":
                _end(walk, process, kind, random)
        # The most dangerous moment: a leader commits what nobody else hears of, and goes on.
        if waits_to_mute and (found := _about_to_commit(walk)) is not None:
            walk.mute(found)
            waits_to_mute = False
            muted[step + random.randrange(10, 300)] = found
        if step in muted and muted[step].core is not None and walk.is_spare(muted[step]):
            _end(walk, muted[step], "crash", random)
        chance = random.random()
        if walk.flying and chance < 0.7:
            walk.deliver(random.randrange(len(walk.flying)), again=random.random() < 0.1)
        elif walk.flying and chance < 0.73:
            walk.lose(random.randrange(len(walk.flying)))
        else:
            walk.wait(random.choice(walk.living), random.choice((0.6, 0.6, 0.6, 4.0, 12.0)))
    walk.end()
    return walk


def _about_to_commit(walk: Walk) -> Process | None:
    """A leader that is being told of the result of its cut."""
    told = (walk.processes[to] for to, message in walk.flying if isinstance(message.body, Said))
    return next((each for each in told if each.core is not None and walk.is_spare(each)), None)


def _any_spare(walk: Walk, random: Random) -> Process | None:
    spare = [process for process in walk.living if walk.is_spare(process)]
    leaders = [each for each in spare if each.core is not None and each.core.leaders]
    found = leaders if leaders and random.random() < 0.7 else spare
    return random.choice(found) if found else None


def _end(walk: Walk, process: Process, kind: str, random: Random) -> None:
    if kind == "leave":
        walk.driver.leave(process)
    if kind == "crash":
        walk.crash(process, loses=random.random() < 0.6)
    walk.put_out(process)

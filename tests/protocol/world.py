"""Schedules for the protocol's core: peers that exchange messages over a bad network, and crash, from a seed.

Everything that happens follows from the seed. The invariants are those of docs/protocol.md; each is looked at after
every event that could break it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from checks import Checks, Violation
from driver import Driver

from swarm_peer.protocol.core import Core, RoundRules
from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place, Rules, choose_restart
from swarm_peer.protocol.member import RoundContext
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Message, Sent, Timing
from swarm_peer.protocol.statements import EpochId, KeySigned, Offer, Seat, Sign, Signed

TICK_S = 0.5
# Each schedule has one of these sets of faults.
FLAVOURS = (
    ("crash", "midway", "restart", "halves", "one link", "one way", "heal", "stall", "leave"),
    ("midway", "midway", "midway", "restart"),
    ("leave", "leave", "stall", "midway", "restart"),
)
# Kinds of messages before which processes crash; the entry that few have heard of is the most dangerous one.
TRAPS = ("Commit", "Commit", "Commit", "Cutting", "Close", "Ready", "Said", "Entries", "Accept", "News")
# Faults come before, and then none; what has to come true then has this long.
CALM_AT_S = 60.0
END_S = 220.0


@dataclass
class Process:
    """One process: it crashes and starts again with a new life."""

    peer: str
    ticket: str
    stages: frozenset[int]
    has_key: bool = False
    life: int = 0
    core: Core | None = None
    stateless_since_s: dict[int, float] = field(default_factory=dict)
    rate: float = 1.0
    offset_s: float = 0.0
    stalled_until_s: float = 0.0
    waiting: list[Message] = field(default_factory=list)
    leaves: bool = False
    # It crashes instead of sending the n-th message of this kind from now on; None if it does not.
    trap: tuple[str, int] | None = None

    def clock(self, now_s: float) -> float:
        """What its own clock shows."""
        return self.offset_s + now_s * self.rate


@dataclass
class Network:
    """What happens to messages: loss, repeats, delays in no order, cuts of links one way or both."""

    random: Random
    loss: float
    repeats: float
    slowest_s: float
    cut: set[tuple[str, str]] = field(default_factory=set)
    is_calm: bool = False

    def deliveries(self, source: str, target: str) -> Iterator[float]:
        """After how long a message arrives, as often as it does."""
        if (source, target) in self.cut:
            return
        if self.is_calm:
            yield 0.02 + 0.05 * self.random.random()
            return
        if self.random.random() >= self.loss:
            yield self.random.choice((0.02, 0.1, 0.5, self.slowest_s)) * self.random.random()
        if self.random.random() < self.repeats:
            yield 5.0 * self.random.random()


class World:
    """One schedule.

    Attributes:
        epochs: every epoch that anybody has followed, by id
        counts: of what happened, by kind
    """

    def __init__(self, seed: int, make: Callable[..., Membership] = Membership, *, num_faults: int | None = None):
        self.random = Random(seed)
        self._make = make
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.counts: dict[str, int] = {}
        self.epochs: dict[EpochId, Epoch] = {}
        self.rules = Rules(num_stages=self.random.choice((1, 2, 3)), begin_anew_steps=5)
        self.rounds = RoundRules(
            batch=self.random.choice((1, 4, 10)),
            lag=self.random.choice((0, 0, 1)),
            period=self.random.choice((1, 1, 3)),
        )
        if self.rounds.period > 1:
            self.rounds = replace(self.rounds, lag=0)
        self.driver = Driver(self)
        self.checks = Checks(self)
        self.has_checkpoints = self.random.random() < 0.5
        # Hasty voters propose at once, all together, and again after a moment.
        is_hasty = self.random.random() < 0.5
        self.timing = Timing(key_s=20.0, average_s=12.0)
        if is_hasty:
            self.timing = replace(self.timing, propose_s=0.0, retry_s=0.2)
        self.network = Network(
            Random(self.random.random()),
            loss=self.random.choice((0.0, 0.05, 0.3)),
            repeats=self.random.choice((0.0, 0.05, 0.2)),
            slowest_s=self.random.choice((0.5, 2.0, 6.0)),
        )
        self.processes: dict[str, Process] = {}
        self._add_processes()
        self._kinds = self.random.choice(FLAVOURS)
        num_faults = self.random.randrange(0, 12) if num_faults is None else num_faults
        for _ in range(num_faults):
            self._at(2.0 + (CALM_AT_S - 4.0) * self.random.random(), self._strike)
        self._at(CALM_AT_S, self._calm)

    def _add_processes(self) -> None:
        has_tickets = self.random.random() < 0.6
        self.first: Certified | None = None
        for number in range(self.random.choice((1, 1, 2))):
            self._add(f"c{number}", "operator", frozenset({COORDINATORS}), has_key=True)
        per_stage = self.random.choice((1, 2, 3, 4) if self.rules.num_stages == 1 else (1, 2, 2, 3))
        for stage in range(self.rules.num_stages):
            for number in range(per_stage):
                name = f"p{stage}{number}"
                ticket = f"t{self.random.randrange(5)}" if has_tickets else "all"
                self._add(name, ticket, frozenset({stage}))

    def _add(self, peer: str, ticket: str, stages: frozenset[int], has_key: bool = False) -> None:
        process = Process(peer, ticket, stages, has_key)
        process.rate = self.random.choice((1.0, 1.0, 0.97, 1.03))
        process.offset_s = self.random.choice((0.0, 1e6))
        self.processes[peer] = process
        if self.first is None:
            seat = Seat(peer, 1, ticket)
            epoch = Epoch(EpochId(1, seat, 0), (Place(COORDINATORS, seat),))
            self.first = Certified(epoch, (Signed(KeySigned(epoch.hash), b"key"),))
        self.start(process)
        self._at(TICK_S * self.random.random(), lambda: self._tick(process))

    # --- events

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._numbers), action))

    def count(self, kind: str) -> None:
        """Note that something has happened."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def run(self) -> None:
        """Run the schedule to its end.

        Raises:
            Violation: an invariant is broken
        """
        while self._queue and self.now_s < END_S:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self._check_progress()

    def start(self, process: Process) -> None:
        """Begin a new life of a process."""
        process.life += 1
        seat = Seat(process.peer, process.life, process.ticket)
        sign = lambda body: Signed(body, seat.peer.encode())  # noqa: E731
        assert self.first is not None
        membership = self._make(
            me=seat,
            first=self.first,
            rules=self.rules,
            timing=self.timing,
            random=Random(f"{self.random.random()}"),
            sign=sign,
            sign_as_key=(lambda body: Signed(body, b"key")) if process.has_key else None,
        )
        membership.desired = process.stages
        membership.acquaintances = tuple(sorted(self.processes))
        process.core = self.make_core(membership, sign)
        process.waiting, process.leaves, process.stateless_since_s = [], False, {}
        process.trap = None

    def make_core(self, membership: Membership, sign: Sign) -> Core:
        """The core of a process; planted mistakes make another one."""
        context = RoundContext(
            num_stages=self.rules.num_stages,
            lag=self.rounds.lag,
            averages=self.rounds.averages,
            fills=lambda close: self.rounds.fills(close, membership.epoch_of),
            epoch_of=membership.epoch_of,
            sign=sign,
            timing=self.timing,
        )
        return Core(membership=membership, context=context)

    def _tick(self, process: Process) -> None:
        self._at(self.now_s + TICK_S * (0.9 + 0.2 * self.random.random()), lambda: self._tick(process))
        if process.core is None or self.now_s < process.stalled_until_s:
            return
        waiting, process.waiting = process.waiting, []
        for message in waiting:
            if process.core is not None:
                self._receive(process, message)
        if process.core is None:
            return
        self.driver.go_on(process)
        self._send(process, process.core.tick(process.clock(self.now_s)))
        if process.core is not None:
            self._check(process)

    def _send(self, process: Process, sent: list[Sent]) -> None:
        for target, message in sent:
            if process.trap is not None and type(message.body).__name__ == process.trap[0]:
                kind, left = process.trap
                process.trap = kind, left - 1
                if left == 1:
                    process.core, process.trap = None, None
                    self.count(f"crashed before a {kind}")
                    return
            if target not in self.processes:
                continue
            for delay_s in self.network.deliveries(process.peer, target):
                self._at(self.now_s + delay_s, lambda t=target, m=message: self._arrive(t, m))

    def _arrive(self, target: str, message: Message) -> None:
        process = self.processes[target]
        if process.core is None or (message.sender.peer, target) in self.network.cut:
            return
        if self.now_s < process.stalled_until_s:
            process.waiting.append(message)
        else:
            self._receive(process, message)

    def _receive(self, process: Process, message: Message) -> None:
        assert process.core is not None
        self.count(type(message.body).__name__)
        self._send(process, process.core.receive(process.clock(self.now_s), message))
        if process.core is not None:
            self._check(process)

    # --- faults

    def _strike(self) -> None:
        kind = self.random.choice(self._kinds)
        process = self.processes[self.random.choice(sorted(self.processes))]
        if kind == "midway" and self.random.random() < 0.7:
            process = self._leading() or process
        self.count(kind)
        peers = sorted(self.processes)
        match kind:
            case "crash":
                process.core = None
            case "midway":
                process.trap = self.random.choice(TRAPS), self.random.choice((1, 2, 2, 3))
            case "restart":
                self.start(process)
            case "halves":
                side = {peer for peer in peers if self.random.random() < 0.5}
                self.network.cut = {(a, b) for a in peers for b in peers if (a in side) != (b in side)}
            case "one link":
                other = self.random.choice(peers)
                self.network.cut |= {(process.peer, other), (other, process.peer)}
            case "one way":
                self.network.cut |= {(process.peer, other) for other in peers if self.random.random() < 0.7}
            case "heal":
                self.network.cut = set()
            case "stall":
                process.stalled_until_s = self.now_s + 15.0 * self.random.random()
            case "leave" if process.core is not None:
                self.driver.leave(process)

    def _leading(self) -> Process | None:
        """A process that leads a stage."""
        stages = range(self.rules.num_stages)
        leading = [
            process
            for _, process in sorted(self.processes.items())
            if process.core is not None
            and any(process.core.epoch.leader(s) == process.core.membership.me for s in stages)
        ]
        return self.random.choice(leading) if leading else None

    def _calm(self) -> None:
        """From now on there are no faults, and most crashed processes are started again."""
        self.network.cut, self.network.is_calm = set(), True
        self.checks.calm()
        for process in self.processes.values():
            process.stalled_until_s, process.trap = 0.0, None
            if process.core is None and (process.has_key or self.random.random() < 0.7):
                self.start(process)

    # --- invariants

    def _check(self, process: Process) -> None:
        """One epoch for each id; nobody has two lives at once; and all that holds of rounds."""
        assert process.core is not None
        epoch = process.core.epoch
        if self.epochs.setdefault(epoch.id, epoch) != epoch:
            raise Violation(f"two epochs of {epoch.id}: {self.epochs[epoch.id]} and {epoch}")
        lives = {seat.peer for seat in epoch.seats}
        if len(lives) != len(epoch.seats):
            raise Violation(f"two lives of one peer in {epoch}")
        self.checks.look(process)

    def _check_progress(self) -> None:
        """All that live and want places have them, and nobody else has, if somebody can still decide that."""
        cores = {process.peer: process.core for process in self.processes.values() if process.core is not None}
        newest = max((core.epoch for core in cores.values()), key=lambda epoch: epoch.id)
        living = [core.membership.me for core in cores.values() if core.membership.desired]
        has_key = any(self.processes[seat.peer].has_key for seat in living)
        if not has_key and not newest.is_quorum(set(living) & set(newest.voters), newest.voters):
            self.count("nobody can decide")
            return
        if len(living) == 1 and set(newest.seats) - set(living):
            self.count("one is alone")  # it cannot tell whether the others are gone, or it is cut off itself
            return
        if behind := [peer for peer, core in cores.items() if core.epoch.id != newest.id and core.membership.desired]:
            raise Violation(f"{behind} have not heard of {newest.id}")
        lost = {stage for stage in newest.begun if not newest.roster(stage)}
        wanted = {(stage, core.membership.me) for core in cores.values() for stage in core.membership.desired}
        if lost and self._restart_for(newest, cores.values()) is None:
            self.count("no snapshots")
            return
        if (found := {tuple(place) for place in newest.places}) != wanted:
            raise Violation(f"places missing: {wanted - found}, places too many: {found - wanted}, in {newest}")
        if all(newest.roster(stage) for stage in range(self.rules.num_stages)):
            self.checks.rounds_since_calm(newest)
        else:
            self.count("a stage without anybody")
        self.checks.at_the_end()

    def _restart_for(self, epoch: Epoch, cores: Iterable[Core]) -> object:
        offers = [
            Offer(core.membership.me, epoch.id, *core.membership.holds)
            for core in cores
            if core.membership.me in epoch.seats
        ]
        return choose_restart(epoch, offers, self.rules)


def run(seed: int, make: Callable[..., Membership] = Membership) -> World:
    """Run one schedule.

    Raises:
        Violation: an invariant is broken
    """
    world = World(seed, make)
    world.run()
    return world

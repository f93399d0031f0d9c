"""Schedules for the protocol's core: peers that exchange messages over a bad network, and crash, from a seed.

Everything that happens follows from the seed. The invariants are those of docs/protocol.md; each is looked at after
every event that could break it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from checks import Violation
from cluster import Cluster, Process

from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import COORDINATORS, KEPT_EPOCHS, Epoch, choose_restart
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Message, Sent, Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import Offer

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
# A leader may be deposed at any time, that one as well: then so long until all have heard of it.
HEARD_S = 10.0


@dataclass
class Network:
    """What happens to messages: loss, repeats, delays in no order, cuts of links one way or both."""

    random: Random
    cut: set[tuple[str, str]]
    loss: float
    repeats: float
    slowest_s: float
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


class World(Cluster):
    """One schedule."""

    def __init__(
        self,
        seed: int,
        make: Callable[..., Membership] = Membership,
        *,
        num_faults: int | None = None,
        kept: int = KEPT_EPOCHS,
    ):
        random = Random(seed)
        rounds = RoundRules(
            num_stages=random.choice((1, 2, 3)),
            batch=random.choice((1, 4, 10)),
            roots_every=(random.choice((1, 4)),),
            lag=random.choice((0, 0, 1)),
            period=random.choice((1, 1, 3)),
        )
        if rounds.period > 1:
            rounds = replace(rounds, lag=0)
        timing = Timing(key_s=20.0, average_s=12.0, share_s=15.0, heads_s=6.0, stuck_s=25.0)
        if random.random() < 0.5:
            # Hasty voters propose at once, all together, and again after a moment.
            timing = replace(timing, propose_s=0.0, retry_s=0.2)
        super().__init__(random, rounds, timing, num_slices=random.choice((2, 5, 12)), make=make, kept=kept)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.network = Network(
            Random(random.random()),
            self.cut,
            loss=random.choice((0.0, 0.05, 0.3)),
            repeats=random.choice((0.0, 0.05, 0.2)),
            slowest_s=random.choice((0.5, 2.0, 6.0)),
        )
        self._add_processes()
        self._kinds = self.random.choice(FLAVOURS)
        num_faults = self.random.randrange(0, 12) if num_faults is None else num_faults
        for _ in range(num_faults):
            self._at(2.0 + (CALM_AT_S - 4.0) * self.random.random(), self._strike)
        self._at(CALM_AT_S, self._calm)

    def _add_processes(self) -> None:
        has_tickets = self.random.random() < 0.6
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
        if len(self.processes) == 1:
            self.begin(peer, ticket)
        self.start(process)
        self._at(TICK_S * self.random.random(), lambda: self._tick(process))

    # --- events

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._numbers), action))

    def run(self) -> None:
        """Run the schedule to its end.

        Raises:
            Violation: an invariant is broken
        """
        while self._queue and (self.now_s < END_S or (self.now_s < END_S + HEARD_S and self._is_changing())):
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self._check_progress()

    def _is_changing(self) -> bool:
        """Whether some have heard of an epoch that others have yet to hear of."""
        return len({process.core.epoch.id for process in self.processes.values() if process.core is not None}) > 1

    def _tick(self, process: Process) -> None:
        self._at(self.now_s + TICK_S * (0.9 + 0.2 * self.random.random()), lambda: self._tick(process))
        if process.core is None or self.now_s < process.stalled_until_s:
            return
        waiting, process.waiting = process.waiting, []
        for message in waiting:
            if process.core is not None:
                self.receive(process, message)
        if process.core is not None:
            self.tick(process)

    def send(self, process: Process, sent: list[Sent]) -> None:
        """Put messages on their way; the process may crash instead."""
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
        if process.core is None or (message.sender.peer, target) in self.cut:
            return
        if self.now_s < process.stalled_until_s:
            process.waiting.append(message)
        else:
            self.receive(process, message)

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
                self.cut.clear()
                self.cut |= {(a, b) for a in peers for b in peers if (a in side) != (b in side)}
            case "one link":
                other = self.random.choice(peers)
                self.cut |= {(process.peer, other), (other, process.peer)}
            case "one way":
                self.cut |= {(process.peer, other) for other in peers if self.random.random() < 0.7}
            case "heal":
                self.cut.clear()
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
        self.cut.clear()
        self.network.is_calm = True
        self.checks.calm()
        for process in self.processes.values():
            process.stalled_until_s, process.trap = 0.0, None
            if process.core is None and (process.has_key or self.random.random() < 0.7):
                self.start(process)

    # --- invariants

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
            Offer(core.membership.me, epoch.id, *core.membership.holds) for core in cores if core.membership.desired
        ]
        return choose_restart(epoch, offers, self.rules)


def run(seed: int, make: Callable[..., Membership] = Membership, *, kept: int = KEPT_EPOCHS) -> World:
    """Run one schedule.

    Args:
        kept: epochs that nobody needs, and seats remember all the same

    Raises:
        Violation: an invariant is broken
    """
    world = World(seed, make, kept=kept)
    world.run()
    return world

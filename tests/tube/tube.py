"""One schedule, run: a swarm of real peers and coordinators on simulated hosts, its faults, and its invariants."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from adapters import AdapterInvariants
from calm import ROUNDS_TO_LEARN, ROUNDS_TOGETHER, check_calm, check_lost, has_checkpoint, newest_of_all
from eager import EagerInvariants
from faults import KINDS, may_stay, serving
from feedback import FeedbackInvariants
from finish import FinishInvariants, FinishPeriodicInvariants
from honest import HonestInvariants
from hosted import run_coordinator, run_peer, run_stranger
from hosts import INVITE, RUN_KEY, Host, identity_of, invite_of
from invariants import Invariants, members_of
from liars import HONEST, LIES, Liar
from loop import TubeLoop
from manifests import make_manifest
from network import Link
from periodic import PeriodicInvariants
from schedule import Event, Schedule
from short import ShortInvariants
from standing import note_standing
from stores import FailingStore
from world import World

from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.decay_file import DecayFile, DecayNote
from coordinator.run.invites import InviteBook
from coordinator.watch.ending import ENDED_BY_OPERATOR, end_run_for
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.protocol.epochs import COORDINATORS
from swarm_peer.runtime.network.agreement import BEGIN_ANEW_INTERVALS
from swarm_peer.wire.passes import Invite

# Once faults have ceased, so many optimizer steps must follow in so much virtual time.
STEPS_AFTER = 3
# With a short text, a peer reads some 120 slices ahead, with two samples each. It may have two samples of each round.
ROUNDS_OF_LEASES = 160
# The time that a peer has to leave, once it is told to.
GRACES_S = (4.0, 12.0)
# By then, a peer that is started has found the run, or has given up.
STARTING_S = 15.0
BOUND_S = 400.0
# Of two stage-mates, one may have ended so many rounds that the other has still to end.
ROUNDS_APART = 2
# A run that was ended is over, and everybody gone, after this time.
ENDING_S = 90.0
# Virtual time between collections of garbage.
COLLECT_S = 30.0
# A fault that has not ended so long after the last ones began is cut off.
MOST_LONGER_S = 60.0
# What faults have led to may show late: in this share of schedules the swarm is left alone as it is for a while.
QUIET_SHARE, QUIET_S = 0.125, 60.0

WATCHES: dict[str, type[Invariants]] = {
    "periodic": PeriodicInvariants,
    "delayed": Invariants,
    "eager": EagerInvariants,
    "adapters": AdapterInvariants,
    "feedback": FeedbackInvariants,
    "short": ShortInvariants,
    "finish": FinishInvariants,
    "finish-delayed": FinishInvariants,
    "finish-periodic": FinishPeriodicInvariants,
    "lost": Invariants,
    "lost-delayed": Invariants,
    "lost-periodic": PeriodicInvariants,
    "liar": HonestInvariants,
}
# Where one member lies, of those that begin, the first lie and the others are struck by faults: so many of each stage
# are left to a majority. Newcomers join so long after the lie has begun.
MAY_LIE = 6
NEWCOMERS_AFTER_S = (10.0, 90.0)


@dataclass(frozen=True)
class Absence:
    """Hosts that were gone or out of reach, so that others may have counted upon them, or not seen them.

    Attributes:
        at_s: when it began or ended, in virtual time
        stages: which they served then
    """

    at_s: float
    hosts: tuple[Host, ...]
    stages: frozenset[int]


class Unstruck(Exception):
    """A fault that waited for something has found nothing."""


class Tube:
    """A swarm under a schedule."""

    def __init__(self, schedule: Schedule, loop: TubeLoop, folder: Path):
        self.schedule = schedule
        self.world = World(loop, schedule.chance)
        self.num_stages = schedule.stages
        self.most_peers = 10 if schedule.has_liar else 8
        self.liar: Liar | None = None
        self.lies = ExitStack()
        self._one_fault = anyio.Lock()
        self.checkpoint_failure: str | None = None
        self.lost = False
        self._operator: Host | None = None
        self.resolved = ResolvedManifest.of(make_manifest(schedule.stages, schedule.mode, schedule.chance))
        watch = WATCHES.get(schedule.mode, Invariants)
        self.invariants = watch(self, self.resolved)
        self._folder = folder
        self._run_key = RUN_KEY
        self._numbers = itertools.count()
        self._lives: dict[str, int] = {}
        self._committed: dict[int, set[int]] = {stage: set() for stage in range(schedule.stages)}
        self._faults: anyio.CancelScope | None = None
        self.stores: list[tuple[Host, FailingStore]] = []
        self._revoked: set[str] = set()
        self.world.on_violation = self._cut_short
        self._callees: list[tuple[str | None, asyncio.Future[Host]]] = []
        self._absences: list[Absence] = []
        self._cut_until: dict[Host, float] = {}  # until then it did not reach some other host
        self.is_over = False

    # --- what faults and invariants ask

    def struck(self, kind: str, *about: object) -> None:
        self.world.note("strikes", kind, *about)
        self.world.struck(kind)

    def violation(self, what: str) -> None:
        if not self.world.violations:
            note_standing(self.world)
        self.world.violation(what)

    def _cut_short(self) -> None:
        """After the first violation, nothing more is to be seen."""
        if self._faults is not None:
            self._faults.cancel()

    def committed(self, stage: int, round_number: int) -> None:
        self.world.note("commit", stage, round_number)
        self._committed[stage].add(round_number)

    def peers(self) -> list[Host]:
        """The peers that are to stay, but for those that lie."""
        alive = [host for host in self.world.alive() if host.name.startswith("p") and not host.ended.is_set()]
        alive = [host for host in alive if host not in self.world.liars]
        return [host for host in alive if host.peer_id not in self._revoked]

    def _revoked_peers(self) -> list[Host]:
        return [host for host in self.world.alive() if host.peer_id in self._revoked]

    def coordinators(self) -> list[Host]:
        return [host for host in self.world.alive() if host.name.startswith("c")]

    def any_host(self, rng: random.Random) -> Host | None:
        alive = [host for host in self.world.alive() if self.may_fail(host)]
        return rng.choice(alive) if alive else None

    def may_fail(self, host: Host) -> bool:
        """Whether a fault may strike a host. Where one member lies, the majorities of all stages are spared."""
        number = host.name.partition("'")[0].removeprefix("p")
        return not self.schedule.has_liar or not number.isdigit() or int(number) >= MAY_LIE

    def any_peer(self, rng: random.Random) -> Host | None:
        alive = [host for host in self.peers() if self.may_fail(host)]
        return rng.choice(alive) if alive else None

    def expendables(self) -> list[Host]:
        """Peers that may go: as many stay as there are stages, and each keeps one stage's state or another's."""
        peers = self.peers()
        return [peer for peer in peers if self.may_fail(peer)] if len(peers) > self.num_stages else []

    def expendable(self, rng: random.Random) -> Host | None:
        return rng.choice(peers) if (peers := self.expendables()) else None

    @staticmethod
    def stage_of(host: Host) -> int | None:
        replica = None if host.peer is None else host.peer._replica
        return None if replica is None else replica.stage

    def check_not_emptied(self, mover: Host, stage: int, looked_s: float) -> None:
        """A peer that moves leaves others in its stage, unless it or one of them was absent a short time ago.

        It may not have heard yet that another one was revoked.
        """
        alive = (*self.peers(), *self._revoked_peers())
        others = [host for host in alive if self.stage_of(host) == stage and may_stay(host)]
        since = self.world.loop.time() - looked_s
        excused = any(
            absence.at_s > since
            and (
                stage in absence.stages or any(host is mover or self.stage_of(host) == stage for host in absence.hosts)
            )
            for absence in self._absences
        )
        if not others and not excused and not self.is_over:
            self.violation(f"a move has emptied stage {stage}")

    def was_absent(self, host: Host, since_s: float) -> bool:
        """Whether a host was gone or out of reach at some time since then, or will be."""
        return any(host in absence.hosts and absence.at_s > since_s for absence in self._absences)

    def gone(self, *hosts: Host, in_s: float = 0.0) -> None:
        """Note that others may count upon hosts that are not there, or do not see them."""
        stages = frozenset(stage for host in hosts if (stage := self.stage_of(host)) is not None)
        self._absences.append(Absence(self.world.loop.time() + in_s, hosts, stages))

    def _cut(self, host: Host, seconds: float) -> None:
        self._cut_until[host] = max(self._cut_until.get(host, 0.0), self.world.loop.time() + seconds)

    async def next_callee(self, op: str | None) -> Host:
        """Wait for the next call of an operation. Returns the peer that it has come to."""
        future = self.world.loop.create_future()
        self._callees.append((op, future))
        callee: Host = await future
        return callee

    # --- hosts

    def start_peer(self, rng: random.Random, name: str | None = None) -> Host:
        name = name or f"p{next(self._numbers)}"
        stage = "auto" if rng.random() < 0.8 else str(rng.randrange(self.num_stages))
        stage = str(int(name[1:]) % self.num_stages) if self.schedule.has_liar else stage
        host = self._make_host(name, rng.choice([0.1, 0.2, 0.4]), rng.uniform(-0.3, 0.3))
        host.stage = stage
        host.grace_s = rng.choice(GRACES_S)
        host.start(partial(run_peer, host, self._run_key, self.resolved, stage, host.grace_s))
        return host

    def _make_host(self, name: str, seconds_per_sample: float, skew_s: float) -> Host:
        life = self._lives[name] = self._lives.get(name, -1) + 1
        identity = self._run_key if name == "c0" else identity_of(name)
        full_name = name if not life else f"{name}'{life}"
        host = Host(
            self.world,
            full_name,
            identity,
            skew_s=skew_s,
            seconds_per_sample=seconds_per_sample,
            invite=self._invite_of(name),
        )
        self.world.hosts.append(host)
        self.world.note("start", full_name)
        return host

    def _invite_of(self, name: str) -> Invite:
        """Where one member lies, each peer has come by a ticket of its own, but for some liars."""
        if not self.schedule.has_liar or not name.startswith("p"):
            return INVITE
        return invite_of(f"ticket of {Liar.owner_of(name, self.schedule.lie)}")

    def start_coordinator(self, name: str) -> Host:
        host = self._make_host(name, 1.0, 0.0)
        output = self._folder / name
        output.mkdir(exist_ok=True)
        store = FailingStore(self, str(self._folder / f"{name}-checkpoints"))
        self.stores.append((host, store))
        snapshot_every = self.resolved.manifest.recovery.snapshot_every
        plan = CheckpointPlan(store, {2: 4}.get(snapshot_every, snapshot_every))
        standby = name != "c0" or self._lives[name] > 0
        host.start(partial(run_coordinator, host, self._run_key, self.resolved, output, plan, standby))
        return host

    def start_coordinator_again(self, victim: Host) -> None:
        self.start_coordinator(victim.name.partition("'")[0])

    async def come_back(self, victim: Host, rng: random.Random) -> None:
        """Some time after a peer has gone, it comes back, or another one comes, or nobody."""
        self.gone(victim)
        who = rng.choice(["same", "other", "other", "nobody"])
        await anyio.sleep(rng.choice([0.5, 3.0, 10.0, 20.0]))
        if victim.is_alive or len(self.peers()) >= self.most_peers or self._faults_are_over:
            return
        if who == "nobody" and len(self.peers()) > self.num_stages:
            return
        if who != "same" or self.start_again(victim, rng) is None:
            self.start_peer(rng)

    def start_again(self, victim: Host, rng: random.Random) -> Host | None:
        """Start a peer that has gone, unless there are enough, or two faults had struck it and it is back already.

        Its identity is a locked file, so it does not come back twice.
        """
        name = victim.name.partition("'")[0]
        is_back = any(host.is_alive and host.name.partition("'")[0] == name for host in self.peers())
        if is_back or len(self.peers()) >= self.most_peers or self._faults_are_over:
            return None
        return self.start_peer(rng, name)

    def ask_for_decay(self, steps: int) -> None:
        """The operator has the learning rate decay, by the folders of all coordinators."""
        for name in {host.name.partition("'")[0] for host in self.coordinators()}:
            DecayFile(self._folder / name).write(DecayNote(steps=steps))

    def revoke(self, victim: Host) -> None:
        """The operator lets a peer take part no more, by the folder of the run's first coordinator."""
        InviteBook(self._folder / "c0").revoke(self._run_key, victim.peer_id)
        self._revoked.add(victim.peer_id)

    async def stall(self, host: Host, seconds: float) -> None:
        self.gone(host)
        self._cut(host, seconds)
        host.halt()
        await anyio.sleep(seconds)
        host.go_on()

    def out_of_sight(self, host: Host, seconds: float) -> None:
        """Note that others may take a host for gone from now on, for so long."""
        self.gone(host)
        self.gone(host, in_s=seconds)
        self._cut(host, seconds)

    async def block(
        self, pairs: Sequence[tuple[Host, Host]], seconds: float, later_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Hold back what goes from the first host of each pair to the second.

        Args:
            later_s: by how much later each link carries again; what was lost is sent anew ever more seldom
        """

        async def hold_back(link: Link, seconds: float) -> None:
            link.blocked += 1
            await anyio.sleep(seconds)
            link.blocked -= 1
            self.world.network.release()

        all_seconds = [seconds + later_s() for _ in pairs]
        hosts = tuple(dict.fromkeys(host for pair in pairs for host in pair))
        self.gone(*hosts, in_s=max(all_seconds))
        for host in hosts:
            self._cut(host, max(all_seconds))
        async with anyio.create_task_group() as tasks:
            for (source, target), of_link in zip(pairs, all_seconds, strict=True):
                tasks.start_soon(hold_back, self.world.network.link(source, target), of_link)

    async def visit_as_stranger(self, seconds: float) -> None:
        """Call all peers as one who takes no part: nothing is computed for it, and it gets no newest state."""
        host = self._make_host(f"x{next(self._numbers)}", 1.0, 0.0)
        host.start(partial(run_stranger, host, self, seconds))
        await anyio.sleep(seconds + 10.0)

    # --- the schedule

    async def run(self) -> None:
        """Run the schedule to its end."""
        self._faults_are_over = False
        self.world.network.on_call = self._called
        rng = self.world.rng("shape")
        self.start_coordinator("c0")
        await anyio.sleep(1.0)
        for number in range(self.schedule.standbys):
            self.start_coordinator(f"c{number + 1}")
        for _ in range(self.schedule.peers):
            self.start_peer(rng)
            await anyio.sleep(rng.choice([0.0, 0.3, 2.0]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collect_garbage)
            if self.schedule.has_liar:
                tasks.start_soon(self._lie)
                tasks.start_soon(self._bring_newcomers, rng)
            await self._strike_all()
            if self.world.rng("quiet").random() < QUIET_SHARE:
                await anyio.sleep(QUIET_S)
            tasks.cancel_scope.cancel()
        self._faults_are_over = True
        self._calm()
        if not (self.world.violations or self._operator):
            await self._recover()
        if not self.world.violations:
            await self._end()
        has_lied = self.schedule.lie == HONEST or (self.liar is not None and self.liar.told)
        if not has_lied and not self.world.violations:
            self.violation(f"no lie was told: {self.schedule.lie}")
        for host in self.world.alive():
            host.die()
        await anyio.sleep(1.0)

    async def _lie(self) -> None:
        """Have one member begin to lie."""
        await anyio.sleep(self.schedule.first_s - self.world.loop.time())
        if self.schedule.lie == HONEST:
            return
        self.liar = LIES[self.schedule.lie](self)
        while not self.liar.begin():  # noqa: ASYNC110  # a clock that jumps costs nothing
            await anyio.sleep(1.0)
        self.lies.enter_context(self.liar.lying())

    async def _bring_newcomers(self, rng: random.Random) -> None:
        for after_s in NEWCOMERS_AFTER_S:
            await anyio.sleep(self.schedule.first_s + after_s - self.world.loop.time())
            self.start_peer(rng)

    async def _collect_garbage(self) -> None:
        while True:
            await anyio.sleep(COLLECT_S)
            gc.collect(1)

    def _called(self, callee: Host, op: str) -> None:
        for entry in list(self._callees):
            if entry[0] in (None, op) and callee in self.peers():
                self._callees.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(callee)

    async def _strike_all(self) -> None:
        """Have all faults strike and end, or be cut off."""
        async with anyio.create_task_group() as faults:
            self._faults = faults.cancel_scope
            for event in self.schedule.events:
                faults.start_soon(self._strike, event)
            await anyio.sleep(self.schedule.first_s + self.schedule.faults_s - self.world.loop.time())
            for _, future in self._callees:
                if not future.done():
                    future.set_exception(Unstruck())
            faults.cancel_scope.deadline = self.world.loop.time() + MOST_LONGER_S

    async def _strike(self, event: Event) -> None:
        await anyio.sleep(max(event.at_s - self.world.loop.time(), 0.0))  # many peers take a while to start
        if self.schedule.has_liar:
            await self._one_fault.acquire()
        self.world.note("event", event.number, event.kind)
        try:
            await KINDS[event.kind][0](self, self.world.rng(f"event {event.number}"))
        except Unstruck:
            return  # no such call came
        finally:
            if self.schedule.has_liar:
                self._one_fault.release()

    def _calm(self) -> None:
        """Faults cease."""
        self.world.note("calm")
        now = self.world.loop.time()
        self._cut_until = {host: min(until_s, now) for host, until_s in self._cut_until.items()}
        self._absences = [replace(absence, at_s=min(absence.at_s, now)) for absence in self._absences]
        self.world.network.tampering.clear()
        self.checkpoint_failure = None
        for _, store in self.stores:
            store.unanswered = 0.0
        for host in self.world.hosts:
            host.go_on()
            host.refuses = False
            host.threads.longer_s = 0.0
            host.device.short_of_memory = 0
            if host.node is not None:
                host.node.failing.clear()
            host.storage.is_full = False
            host.clock.skew_s = host.skew_s
            host.orders.clear()
        for link in self.world.network.links():
            link.blocked = 0
        self.world.network.release()

    async def _recover(self) -> None:
        """Faults have ceased: the run goes on, or comes to its end."""
        if self.invariants.finished_s is not None:
            await self._leave()
            return
        rng = self.world.rng("recovery")
        # Those that find nobody give up: where all hosts were dead, newcomers were on their way to nobody.
        with anyio.move_on_after(STARTING_S):
            while any(host.peer is None for host in self.peers()):  # noqa: ASYNC110  # a clock that jumps costs nothing
                await anyio.sleep(1.0)
        while not self._can_serve_all_stages():
            self.start_peer(rng)
        if not self.coordinators() or (self._revoked_peers() and not self.world.host("c0").is_alive):
            self.start_coordinator("c0")
        began = {stage: len(rounds) for stage, rounds in self._committed.items()}
        self.invariants.note_calm()
        # Two passes are some 35 steps, and up to 50 may be left to the last one.
        bound_s = 2 * BOUND_S if self.schedule.mode == "short" or self.schedule.finishes else BOUND_S
        deadline = self.world.loop.time() + bound_s
        while not self._has_recovered(began):
            await anyio.sleep(1.0)
            if self.world.violations:
                return
            if self.world.loop.time() > deadline + (bound_s if self._is_slow(began) else 0.0):
                if self._is_lost() and not self._has_checkpoint():
                    self.lost = True
                    self.world.note("lost")
                    return
                done = {stage: len(rounds) - began[stage] for stage, rounds in self._committed.items()}
                left = f"{done} by stage, revoked and still there {self._revoked_peers()}"
                wanted = "end" if self.schedule.finishes else f"{STEPS_AFTER} steps, or no whole pass,"
                self.violation(f"no {wanted} in {bound_s:.0f} s without faults: {left}")
                return
        if self.schedule.finishes:
            await self._leave()
            return
        await self._gather(deadline + BOUND_S)
        acting = self._acting()
        # At the end of a period, and of the next, peers learn what both parts of a stage had read while it was cut.
        await self._go_on(ROUNDS_TO_LEARN, BOUND_S)
        acting &= self._acting()
        await self._stay_together(acting, rng)

    async def _stay_together(self, acting: set[tuple[Host, Term | None]], rng: random.Random) -> None:
        self.invariants.note_ends()
        since, lost = frozenset(self.invariants.ends.values()), Counter(self.invariants.records.samples_lost)
        moves_of, begun_s = Counter(self.invariants.records.moves_of), self.world.loop.time()
        await self._go_on(ROUNDS_TOGETHER - ROUNDS_TO_LEARN, BOUND_S)
        self.invariants.note_ends()
        round_s = (self.world.loop.time() - begun_s) / (ROUNDS_TOGETHER - ROUNDS_TO_LEARN)
        act_still = {host for host, _ in acting & self._acting()}
        stores = [(host, store) for host, store in self.stores if host in act_still]
        if self.world.violations:
            return
        check_calm(self.invariants, self.peers(), stores, round_s)
        moved = self.invariants.records.moves_of - moves_of
        check_lost(self.invariants, since, lost, {*moved, *(host.name for host in self.world.liars)})
        if not self.world.violations:
            await self._leave_in_order(rng)

    def _acting(self) -> set[tuple[Host, Term | None]]:
        """The coordinators that act and see all peers, with their terms.

        A node of the DHT leaves others alone for a while that it did not reach, so a coordinator may miss some.
        """
        present, acting = {host.peer_id for host in self.peers()}, set[tuple[Host, Term | None]]()
        for host, _ in self.stores:
            service, coordination = host.service, host.coordination
            if host.is_alive and service is not None and coordination is not None and coordination.acts:
                sees_all = present <= {peer.peer_id for peer in service.watch.view.peers}
                acting |= {(host, coordination.term)} if sees_all else set()
        return acting

    async def _leave_in_order(self, rng: random.Random) -> None:
        """A peer with stage-mates that is told to leave, and has time for it, hands over what it has."""
        mated = [host for host in self.peers() if host.grace_s == max(GRACES_S) and self._mates(host)]
        if not mated:
            return
        leaver = rng.choice(mated)
        lost = self.invariants.records.samples_lost[leaver.name]
        self.world.note("leaves in order", leaver)
        leaver.ended.set()
        with anyio.move_on_after(BOUND_S):
            while leaver.is_alive:  # noqa: ASYNC110  # a clock that jumps costs nothing
                await anyio.sleep(1.0)
        if (after := self.invariants.records.samples_lost[leaver.name]) != lost:
            self.violation(f"{leaver} left in order, and lost samples: {lost} became {after}")

    def _mates(self, host: Host) -> list[Host]:
        """The others that serve a peer's stage."""
        stage = _stage_served(host)
        return [
            other for other in self.peers() if stage is not None and other is not host and _stage_served(other) == stage
        ]

    def _is_slow(self, began: Mapping[int, int]) -> bool:
        """Whether rounds go on, and are too few for a peer with a small share of each to go through what it leases."""
        rounds = min(len(rounds) - began[stage] for stage, rounds in self._committed.items())
        return self.schedule.mode == "short" and STEPS_AFTER <= rounds < ROUNDS_OF_LEASES

    def _has_recovered(self, began: Mapping[int, int]) -> bool:
        """Whether the run has ended, or each stage has made enough steps since faults ceased, and the revoked went.

        Args:
            began: steps by stage as they ceased
        """
        if self.schedule.finishes:
            return self.invariants.finished_s is not None
        has_stepped = all(len(rounds) >= began[stage] + STEPS_AFTER for stage, rounds in self._committed.items())
        return has_stepped and self.invariants.has_gone_on() and not self._revoked_peers()

    async def _leave(self) -> None:
        """The model is saved: who was there goes without an operator, unless it could not hear that the run is over."""
        finished_s = self.invariants.finished_s
        assert finished_s is not None
        cut_since = {host for host, until_s in self._cut_until.items() if until_s > finished_s}
        if any(host.name.startswith("c") for host in cut_since):
            return
        while left := [host for host in self.invariants.at_finish if host.is_alive and host not in cut_since]:
            await anyio.sleep(1.0)
            if self.world.loop.time() > finished_s + ENDING_S:
                self.violation(f"{left} have not gone though the model was saved {ENDING_S:.0f} s ago")
                return

    async def _gather(self, deadline: float) -> None:
        """Every peer that is left gets to where the others are, and a coordinator acts."""
        while stragglers := self._stragglers():
            await anyio.sleep(1.0)
            if self.world.violations:
                return
            if self.world.loop.time() > deadline:
                self.violation(f"{BOUND_S:.0f} s after the run went on without faults: {'; '.join(stragglers)}")
                return

    async def _go_on(self, num_rounds: int, seconds: float) -> None:
        """Wait until each stage has gone through some rounds more, now that its peers are together.

        Peers that do not see a stage-mate for a moment do not know what it has claimed: the rounds count from then on.
        """
        wanted = {stage: len(rounds) + num_rounds for stage, rounds in self._committed.items()}
        deadline = self.world.loop.time() + seconds
        while any(len(rounds) < wanted[stage] for stage, rounds in self._committed.items()):
            await anyio.sleep(1.0)
            if self.world.violations:
                return
            if any(self._unseen_mates(host) for host in self.peers()):
                wanted = {stage: len(rounds) + num_rounds for stage, rounds in self._committed.items()}
            if self.world.loop.time() > deadline:
                self.violation(f"the peers are together, and make no {num_rounds} steps in {seconds:.0f} s")
                return

    def _stragglers(self) -> list[str]:
        """What is wrong with the peers that do not serve, or are not where others of their stage are."""
        found = list[str]()
        coordinations = [host.coordination for host in self.coordinators()]
        acting = [each for each in coordinations if each is not None and each.acts]
        if len(acting) != 1:
            found.append(f"{len(acting) or 'no'} coordinators act")
        honest = [host for host in self.world.alive() if host not in self.world.liars]
        epochs = {host.agreement.core.epoch for host in honest if host.agreement is not None}
        newest = max(epochs, key=lambda epoch: epoch.id)
        if len(epochs) > 1:
            found.append(f"{len(epochs)} epochs are the newest to somebody")
        seats = {host.seat for host in (*self.peers(), *self.coordinators(), *self.world.liars)}
        if gone := [seat.peer for seat in newest.seats if seat not in seats]:
            found.append(f"{gone} have places and are gone")
        placed = newest.roster(COORDINATORS)
        found += [f"{host} has no place" for host in self.coordinators() if host.seat not in placed]
        rounds = {stage: max(numbers, default=0) for stage, numbers in self._committed.items()}
        for host in self.peers():
            replica = None if host.peer is None else host.peer._replica
            member = None if replica is None else members_of(host).get(replica.stage)
            if replica is None or member is None or not serving(host):
                found.append(f"{host} does not serve")
            elif unseen := self._unseen_mates(host):
                found.append(f"{host} does not see {unseen}")  # after a cut a node leaves others alone for a while
            elif member.is_behind or member.log.next_round <= rounds[replica.stage] - ROUNDS_APART:
                found.append(f"{host} is in round {member.log.next_round} of stage {replica.stage}, or behind")
        return found

    def _unseen_mates(self, host: Host) -> list[Host]:
        """Those who serve a peer's stage, and whose announcements it does not see."""
        stage = _stage_served(host)
        if host.peer is None or stage is None:
            return []
        seen = {peer.peer_id for peer in host.peer._directory.view.serving(stage)}
        return [other for other in self.peers() if _stage_served(other) == stage and other.peer_id not in seen]

    def _can_serve_all_stages(self) -> bool:
        """Whether there are enough peers that may move for the stages to which none is bound."""
        wanted = [host.stage for host in self.peers()]
        return len(set(wanted) - {"auto"}) + wanted.count("auto") >= self.num_stages

    def _is_lost(self) -> bool:
        """Whether only a checkpoint could help: a stage has no peer, and not all stages have snapshots that are left.

        A run that has made few updates begins anew by itself, and is not lost.
        """
        epochs = [host.agreement.core.epoch for host in self.world.alive() if host.agreement is not None]
        epoch = max(epochs, key=lambda each: each.id, default=None)
        if epoch is None or all(epoch.roster(stage) for stage in epoch.begun):
            return False
        memberships = [host.agreement.core.membership for host in self.world.alive() if host.agreement is not None]
        furthest = max(membership.holds[1] for membership in memberships)
        is_new = furthest <= BEGIN_ANEW_INTERVALS * self.resolved.manifest.recovery.snapshot_every
        return not is_new and newest_of_all(self.invariants, self.world.alive()) is None

    def _has_checkpoint(self) -> bool:
        """Whether a coordinator has a checkpoint from which a lost stage could go on."""
        self.invariants.note_ends()
        ends = self.invariants.ends.values()
        alive = [store for host, store in self.stores if host.is_alive]
        return any(has_checkpoint(self.invariants, store, place) for store in alive for place in ends)

    def tell_end(self) -> None:
        """The operator ends the run: everybody is told so, from now on."""
        if self._operator is None:
            self._operator = Host(self.world, "operator", identity_of("operator"), seconds_per_sample=1.0)
            self.world.hosts.append(self._operator)
            self._operator.spawn(self._tell_end(self._operator, self._operator.join_dht()), "main")

    async def _end(self) -> None:
        """The run is over: everybody goes, and nothing is left."""
        self.tell_end()
        assert self._operator is not None
        deadline = self.world.loop.time() + ENDING_S
        while len(self.world.alive()) > 1 and self.world.loop.time() < deadline:  # noqa: ASYNC110
            await anyio.sleep(1.0)
        self._operator.die()
        for host in self.world.alive():
            if host not in self.world.liars:
                self.violation(f"{host.name} has not gone though the run was ended")
            host.die()
        await anyio.sleep(150.0)
        self.invariants.check_shares()
        for _, store in self.stores:
            self.invariants.check_checkpoint(store)
        gc.collect()
        await anyio.sleep(1.0)
        mine = asyncio.current_task()
        for task in list(self.world.loop.tasks):
            if task is not mine:
                self.violation(f"a task is left over: {task!r:.300}")
        for host, complaint in self.world.loop.complaints:
            if host is None or (host.has_ended and host not in self.world.liars):
                self.violation(f"{host}: {complaint}")
        for host in [each for each in self.world.hosts if each not in self.world.liars]:
            if defects := host.metrics.handler_defects._value.get():
                self.violation(f"{host}: {defects} handlers failed")

    async def _tell_end(self, operator: Host, dht: Any) -> None:
        self.is_over = True  # everybody goes, and those that know it first do not ask who stays
        while True:
            begun = int(operator.clock.unix_s())
            await end_run_for(dht, self._run_key, begun, ENDED_BY_OPERATOR)
            await anyio.sleep(2.0)


def _stage_served(host: Host) -> int | None:
    """The stage that a peer says it serves."""
    replica = None if host.peer is None else host.peer._replica
    return replica.stage if replica is not None and serving(host) else None

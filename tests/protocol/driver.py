"""A stand-in for the driver: microbatches, averages, states and handovers, without tensors.

What is computed is known by sample; a state is the hash of the entry that it embodies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS
from swarm_peer.protocol.log import Cut, Log
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import Seat, Snapshot, hash_of

if TYPE_CHECKING:
    from world import Process, World

SNAPSHOT_EVERY = 4
# A seat that finds no state for so long leaves its stage.
STATELESS_S = 25.0
PART_TIMEOUT_S = 5.0


class Driver:
    """Does for every process what its core asks for.

    Attributes:
        made: by stage, seat and sample, the base that the seat has computed the sample from
    """

    def __init__(self, world: World):
        self.world = world
        self.random = world.random
        self.made: dict[tuple[int, Seat, str], tuple[str, ...]] = {}
        self._numbers = itertools.count()
        self._started: dict[str, dict[Seat, float]] = {}
        self._results: set[str] = set()
        # By (stage, head), the optimizer step of what embodies it, and what was a snapshot of which round.
        self.steps: dict[str, int] = {}

    def _others(self, process: Process, stage: int) -> Iterator[tuple[Process, Member]]:
        """Members of a stage that a process reaches, and that reach it."""
        cut = self.world.network.cut
        for other in self.world.processes.values():
            is_linked = (process.peer, other.peer) not in cut and (other.peer, process.peer) not in cut
            if other.core is not None and is_linked and self.world.now_s >= other.stalled_until_s:
                member = other.core.members.get(stage)
                if member is not None:
                    yield other, member

    def go_on(self, process: Process) -> None:
        """Do what a process's core asks for."""
        core = process.core
        assert core is not None
        self._keep_snapshots(process)
        self._prepare(process)
        for stage, member in core.members.items():
            if member.reign is not None and member.state != member.log.head:
                self._take_state(process, stage, member)
                continue
            process.stateless_since_s.pop(stage, None)
            if (present := member.draining) is not None and self.random.random() < 0.5:
                member.drained(present.number)
            if (cut := member.averaging) is not None:
                self._average(process, member, cut)
            if stage == 0 and self.random.random() < 0.8:
                self._train(process, member)

    # --- states

    def _prepare(self, process: Process) -> None:
        """A newcomer takes over a state before it joins, and what comes after that until it has its place."""
        core = process.core
        assert core is not None
        for stage in core.membership.desired - core.membership.stages - {COORDINATORS}:
            for other, mate in self._others(process, stage):
                assert other.core is not None
                is_current = mate.log.restart == core.epoch.restart and mate.reign is not None
                if is_current and mate.state == mate.log.head and self.random.random() < 0.5:
                    log = Log(stage, mate.log.restart, mate.log.committed)
                    core.prepare(stage, log, mate.state, other.core.membership.chain)

    def step_of(self, member: Member) -> int:
        """Optimizer steps of a member's log."""
        updates = sum(committed.entry.cut.averages for committed in member.log.committed)
        return member.log.restart.optimizer_step + updates

    def _keep_snapshots(self, process: Process) -> None:
        core = process.core
        assert core is not None
        world = self.world
        held = set(core.membership.holds[2])
        round_, step = core.membership.holds[:2]
        if COORDINATORS in core.membership.stages:
            stages = range(world.rules.num_stages) if world.has_checkpoints else ()
        else:
            stages = tuple({each % world.rules.num_stages for own in core.members for each in (own, own + 1)})
        for stage in stages:
            for _, member in self._others(process, stage):
                if member.log.restart != core.epoch.restart or member.state != member.log.head:
                    continue
                step_of = self.step_of(member)
                round_, step = max(round_, member.log.next_round), max(step, step_of)
                if step_of and step_of % SNAPSHOT_EVERY == 0 and world.rounds.averages(member.log.next_round - 1):
                    held.add(Snapshot(step_of, stage, member.log.head))
        newest = {}
        for snapshot in sorted(held):
            newest.setdefault(snapshot.stage, []).append(snapshot)
        kept = frozenset(s for each in newest.values() for s in each[-2:])
        core.membership.holds = round_, step, kept

    def _take_state(self, process: Process, stage: int, member: Member) -> None:
        restart = member.log.restart
        is_there = any(
            other is not process and mate.state == member.log.head for other, mate in self._others(process, stage)
        )
        if member.log.head == member.log.base:
            held = {
                snapshot.entry
                for other in self.world.processes.values()
                if other.core is not None
                for snapshot in other.core.membership.holds[2]
            }
            is_there |= not restart.entries or restart.entries[stage] in held
        # Entries without an update change no shared weights.
        heads = member.log.heads()
        if member.state in heads:
            later = member.log.committed[heads.index(member.state) :]
            is_there |= all(not committed.entry.cut.averages for committed in later)
        if is_there and self.random.random() < 0.5:
            member.reached(member.log.head)
        since_s = process.stateless_since_s.setdefault(stage, self.world.now_s)
        if self.world.now_s > since_s + STATELESS_S:
            assert process.core is not None
            self.world.count("gave up its stage")
            self.world.start(process)

    # --- microbatches

    def _train(self, process: Process, first: Member) -> None:
        working = first.working
        if working is None:
            return
        path = [first]
        for stage in range(1, self.world.rules.num_stages):
            fits = [
                member
                for other, member in self._others(process, stage)
                if other.core is not None
                and process.core is not None
                and other.core.epoch.id == process.core.epoch.id
                and member.working is not None
                and member.working.number == working.number
            ]
            if not fits:
                return
            path.append(self.random.choice(fits))
        sample = f"s{next(self._numbers)}"
        base = tuple(member.base(working.number) for member in path)
        for member in reversed(path):
            if self.random.random() < 0.03 or not member.computed(working.number, [sample], base):
                return
            self.made[member.stage, member.me, sample] = base
        self.world.count("samples")

    # --- averages

    def _average(self, process: Process, member: Member, cut: Cut) -> None:
        now_s = self.world.now_s
        started = self._started.setdefault(cut.hash, {})
        since_s = started.setdefault(member.me, now_s)
        reached = {mate.me for _, mate in self._others(process, cut.stage)} | {member.me}
        is_complete = set(cut.seats) <= started.keys() & reached
        digest = hash_of(("update", cut.parts)) if cut.averages else ""
        if is_complete or (cut.hash in self._results and self.random.random() < 0.3):
            chance = self.random.random()
            if chance < 0.6:
                self._results.add(cut.hash)
                member.averaged(cut, digest)
            elif chance < 0.63 and len(cut.seats) > 1:
                others = [seat for seat in cut.seats if seat != member.me]
                member.failed(cut, frozenset({self.random.choice(others)}))
        elif now_s > since_s + PART_TIMEOUT_S:
            member.failed(cut, frozenset(set(cut.seats) - (started.keys() & reached)))

    # --- leaving

    def leave(self, process: Process) -> None:
        """A process hands its work to some stage-mates, perhaps to two, and wishes to leave."""
        core = process.core
        assert core is not None
        for stage, member in core.members.items():
            mates = [mate for other, mate in self._others(process, stage) if other is not process]
            for mate in self.random.sample(mates, min(len(mates), 2)):
                for contribution in member.to_hand_over():
                    if self.random.random() < 0.8 and mate.take_guest(contribution):
                        self.world.count("handed over")
                        for sample in contribution.samples:
                            seat = contribution.name.seat
                            if (made := self.made.get((stage, seat, sample))) is not None:
                                self.made[stage, mate.me, sample] = made
        if self.random.random() < 0.6:
            core.membership.desired = frozenset()
            process.leaves = True


__all__ = ["BEGINNING", "Driver"]

"""The invariants of docs/protocol.md that are about rounds, looked at while a schedule runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.log import Contribution, Log, Name
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import EpochId

if TYPE_CHECKING:
    from world import Process, World

ROUNDS_TO_COME = 3


class Violation(AssertionError):
    """The core broke one of its promises."""


class Checks:
    """Looks at members' logs."""

    def __init__(self, world: World):
        self.world = world
        self._longest: dict[tuple[int, Restart, EpochId], list[str]] = {}
        self._seen: dict[int, str] = {}
        self._at_calm: set[str] = set()

    def look(self, process: Process) -> None:
        """Look at what has changed in a process."""
        assert process.core is not None
        for stage, member in process.core.members.items():
            if member.reign is None or self._seen.get(id(member)) == member.log.head:
                continue
            self._seen[id(member)] = member.log.head
            self._one_history(stage, member)
            self._nothing_twice(member)

    def _one_history(self, stage: int, member: Member) -> None:
        assert member.reign is not None
        key = stage, member.log.restart, member.reign
        heads = member.log.heads()
        known = self._longest.setdefault(key, heads)
        shorter, longer = sorted((known, heads), key=len)
        if longer[: len(shorter)] != shorter:
            raise Violation(f"two histories of stage {stage} under {member.reign}: {known} and {heads}")
        self._longest[key] = longer

    def _nothing_twice(self, member: Member) -> None:
        names, samples = set[Name](), set[str]()
        for committed in member.log.committed:
            cut = committed.entry.cut
            counted = sum(signed.body.samples for signed in committed.close.counts)
            if counted < self.world.rounds.batch or committed.close.round != cut.round:
                raise Violation(f"round {cut.round} was closed with {counted} samples")
            brought = [each for part in cut.parts for each in part.brings]
            if len(seats := [part.seat for part in cut.parts]) != len(set(seats)):
                raise Violation(f"a member twice in {cut}")
            for each in brought:
                if each.name in names:
                    raise Violation(f"{each.name} counts twice in stage {member.stage}")
                names.add(each.name)
                if twice := samples & set(each.samples):
                    raise Violation(f"{twice} count twice in stage {member.stage}")
                samples |= set(each.samples)

    def calm(self) -> None:
        """Faults have ceased."""
        for process in self.world.processes.values():
            for member in (process.core.members if process.core is not None else {}).values():
                self._at_calm |= set(member.log.heads())

    def _newest_logs(self, epoch: Epoch) -> dict[int, Member]:
        newest = dict[int, Member]()
        for process in self.world.processes.values():
            if process.core is None or process.core.epoch.id != epoch.id:
                continue
            for stage, member in process.core.members.items():
                if stage not in newest or member.log.next_round > newest[stage].log.next_round:
                    newest[stage] = member
        return newest

    def rounds_since_calm(self, epoch: Epoch) -> None:
        """Rounds have been committed since faults ceased, and all members follow."""
        newest = self._newest_logs(epoch)
        for stage, member in newest.items():
            made = len(set(member.log.heads()) - self._at_calm)
            if made < ROUNDS_TO_COME:
                raise Violation(f"{made} rounds of stage {stage} since faults ceased, in {epoch.id}")
            self.world.counts["rounds"] = self.world.counts.get("rounds", 0) + len(member.log.committed)
        for process in self.world.processes.values():
            for stage, member in (process.core.members if process.core is not None else {}).items():
                if (
                    process.core is not None
                    and process.core.membership.desired
                    and member.log.next_round < newest[stage].log.next_round - 2
                ):
                    raise Violation(f"{member.me} is left behind in stage {stage}")

    def at_the_end(self) -> None:
        """Each sample that counts was computed from the weights that its round begins with, at every stage."""
        world = self.world
        if world.rounds.period > 1:
            return
        newest = max((p.core.epoch for p in world.processes.values() if p.core is not None), key=lambda e: e.id)
        logs = {stage: member.log for stage, member in self._newest_logs(newest).items()}
        for stage, log in logs.items():
            for committed in log.committed:
                cut = committed.entry.cut
                for each in (each for part in cut.parts for each in part.brings):
                    self._made_from(stage, each, {other: self._base(logs[other], cut.round) for other in logs})

    def _base(self, log: Log, number: int) -> str:
        heads = log.heads()
        return heads[max(0, min(len(heads) - 1, number - self.world.rounds.lag - log.restart.first_round))]

    def _made_from(self, stage: int, contribution: Contribution, base: dict[int, str]) -> None:
        for sample in contribution.samples:
            made = self.world.driver.made.get((stage, contribution.name.seat, sample))
            if made is None:
                raise Violation(f"{contribution.name} holds {sample}, which it has not computed")
            if wrong := [other for other in base if made[other] != base[other]]:
                raise Violation(f"{sample} of {contribution.name} in stage {stage} has another base of {wrong}")

"""The invariants of docs/protocol.md that are about rounds, looked at while a schedule runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.protocol.log import Committed, Contribution, Cut, Log, Name
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import EpochId

if TYPE_CHECKING:
    from cluster import Cluster, Process

ROUNDS_TO_COME = 3


class Violation(AssertionError):
    """The core broke one of its promises."""


class Checks:
    """Looks at members' logs."""

    def __init__(self, world: Cluster):
        self.world = world
        self._heads: dict[tuple[int, Restart, EpochId], dict[int, str]] = {}
        self._entries: dict[str, Committed] = {}
        self._seen: dict[int, str] = {}
        self._words: dict[str, str] = {}
        self._at_calm: set[str] = set()

    def look(self, process: Process) -> None:
        """Look at what has changed in a process."""
        assert process.core is not None
        for stage, member in process.core.members.items():
            if member.reign is None or self._seen.get(id(member)) == member.log.head:
                continue
            self._seen[id(member)] = member.log.head
            self._one_history(stage, member)
            for committed in member.log.committed:
                entry, word = committed.entry, process.core.word_at(committed.entry.cut.epoch)
                if self._words.setdefault(entry.hash, word) != word:
                    raise Violation(
                        f"by {process.peer} the word of {entry.cut.epoch} was {word!r}, and not so by others"
                    )
                if self._entries.setdefault(committed.entry.hash, committed) is committed:
                    self._sound(committed)

    def _one_history(self, stage: int, member: Member) -> None:
        assert member.reign is not None
        known = self._heads.setdefault((stage, member.log.restart, member.reign), {})
        heads = member.log.heads()
        if any(known.get(number, head) != head for number, head in heads.items()):
            raise Violation(f"two histories of stage {stage} under {member.reign}: {known} and {heads}")
        known.update(heads)

    def _sound(self, committed: Committed) -> None:
        cut = committed.entry.cut
        counted = sum(signed.body.samples for signed in committed.close.counts)
        if counted < self.world.rounds.batch or committed.close.round != cut.round:
            raise Violation(f"round {cut.round} was closed with {counted} samples")
        if len(cut.seats) != len(set(cut.seats)):
            raise Violation(f"a member twice in {cut}")
        rosters = [epoch.roster(cut.stage) for epoch in self.world.epochs.values()]
        if unknown := [each for each in cut.brings if not any(each.name.seat in roster for roster in rosters)]:
            raise Violation(f"work of seats that never had a place: {unknown}")

    def _chain(self, log: Log) -> Iterator[Cut]:
        """The cuts of a log and of all entries before, newest first."""
        head = log.head
        while head in self._entries:
            yield (cut := self._entries[head].entry.cut)
            head = cut.parent

    def _nothing_twice(self, log: Log) -> None:
        names, samples = set[Name](), set[SampleId]()
        for cut in self._chain(log):
            for each in cut.brings:
                if each.name in names:
                    raise Violation(f"{each.name} counts twice in stage {log.stage}")
                names.add(each.name)
                for sample in samples_in(each) if log.stage == 0 else ():
                    if sample in samples:
                        raise Violation(f"{sample} counts twice")
                    samples.add(sample)

    def calm(self) -> None:
        """Faults have ceased."""
        for process in self.world.processes.values():
            for member in (process.core.members if process.core is not None else {}).values():
                self._at_calm |= set(member.log.heads().values())

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
            made = len(set(member.log.heads().values()) - self._at_calm)
            if made < ROUNDS_TO_COME:
                raise Violation(f"{made} rounds of stage {stage} since faults ceased, in {epoch.id}")
            self.world.counts["rounds"] = self.world.counts.get("rounds", 0) + member.log.optimizer_step
        for process in self.world.processes.values():
            for stage, member in (process.core.members if process.core is not None else {}).items():
                if (
                    process.core is not None
                    and process.core.membership.desired
                    and member.log.next_round < newest[stage].log.next_round - 2
                ):
                    raise Violation(f"{member.me} is left behind in stage {stage}")

    def at_the_end(self, has_lost: bool = False) -> None:
        """Nothing counts twice, and each sample was computed from what its round begins with, at every stage.

        Args:
            has_lost: whether a stage has lost entries, so that the run has yet to go back
        """
        world = self.world
        newest = max((p.core.epoch for p in world.processes.values() if p.core is not None), key=lambda e: e.id)
        logs = {stage: member.log for stage, member in self._newest_logs(newest).items()}
        for log in logs.values():
            self._nothing_twice(log)
        if world.rounds.period > 1 or has_lost:
            return
        heads = {stage: self._heads_of(log) for stage, log in logs.items()}
        for stage, log in logs.items():
            for cut in self._chain(log):
                number = max(cut.round - world.rounds.lag, log.restart.first_round)
                base = {other: known[number] for other, known in heads.items() if number in known}
                for each in cut.brings:
                    self._made_from(stage, each, base)

    def _heads_of(self, log: Log) -> dict[int, str]:
        """The heads that rounds began with."""
        return {log.next_round: log.head} | {cut.round: cut.parent for cut in self._chain(log)}

    def _made_from(self, stage: int, contribution: Contribution, base: dict[int, str]) -> None:
        for sample in samples_in(contribution):
            made = self.world.driver.made.get((stage, *contribution.name, sample))
            if made is None:
                raise Violation(f"{contribution.name} holds {sample}, which it has not computed")
            if wrong := [other for other in base if made[other] != base[other]]:
                raise Violation(f"{sample} of {contribution.name} in stage {stage} has another base of {wrong}")


def samples_in(contribution: Contribution) -> Iterator[SampleId]:
    """The samples of a contribution."""
    for item in contribution.samples:
        yield from (SampleId(*item.slice_id, window) for window in range(item.start, item.end))

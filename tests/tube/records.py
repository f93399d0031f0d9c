"""What was seen of a run: its microbatches, what seats have computed, the entries of all stages, and their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Contribution, Entry, Name

State = dict[str, torch.Tensor]
# A stage where an entry has come to be: the entry's hash, or what stands in its place before the first one.
Place = tuple[int, str]


@dataclass(frozen=True)
class Work:
    """What a seat has computed for a round.

    Attributes:
        ids: its microbatches
        means: of their gradients over targets
    """

    ids: tuple[bytes, ...]
    means: tuple[torch.Tensor, ...]


@dataclass
class Records:
    """What was seen.

    Attributes:
        microbatches: tokens (B, T+1) and names of samples, by id
        computed: whose accumulators have held a microbatch, by its id: stages with the names of contributions
        works: what each contribution is of, by stage
        entries: all that any seat has followed
        roster_sizes: of the seats that had a place as the cut of an entry was made
        restart_of: where the run had begun, or begun anew, before an entry
        word_of: what the run key had said in an entry's epoch
        newest_word: what it has said by now
        weights: of a stage, after an entry or before the first one
        bases: where the run began, by what stands in place of an entry before the first one
        told_lost: names of the contributions that seats have reported lost, by stage
        samples_lost: those that processes have reported lost, by host
        takers: the hosts that have taken a contribution of a leaving seat
        opened: rounds that each host has opened, in a row since it has come or the run has gone back, by stage
    """

    microbatches: dict[bytes, tuple[torch.Tensor, tuple[SampleId, ...]]] = field(default_factory=dict)
    computed: dict[bytes, set[tuple[int, Name]]] = field(default_factory=dict)
    works: dict[tuple[int, Contribution], Work] = field(default_factory=dict)
    entries: dict[Place, Entry] = field(default_factory=dict)
    roster_sizes: dict[Place, int] = field(default_factory=dict)
    restart_of: dict[Place, Restart] = field(default_factory=dict)
    word_of: dict[Place, str] = field(default_factory=dict)
    newest_word: str = ""
    weights: dict[Place, State] = field(default_factory=dict)
    bases: dict[Place, Restart] = field(default_factory=dict)
    told_lost: set[tuple[int, Name]] = field(default_factory=set)
    samples_lost: Counter[str] = field(default_factory=Counter)
    takers: dict[tuple[int, Name], set[str]] = field(default_factory=dict)
    opened: Counter[tuple[str, int]] = field(default_factory=Counter)
    moves_of: Counter[str] = field(default_factory=Counter)
    rewinds: int = 0
    doubled: int = 0
    checked: int = 0
    validated: int = 0
    passes: int = 0
    _ledgers: dict[str, Ledger] = field(default_factory=dict)

    def parent(self, place: Place) -> Place | None:
        """What came before: the entry before, or the one whose state the run went back to; None at its beginning."""
        stage = place[0]
        if place in self.entries:
            return stage, self.entries[place].cut.parent
        restart = self.bases[place]
        # The entry that names a snapshot is the one after it.
        return (stage, self.entries[stage, restart.entries[stage]].cut.parent) if restart.entries else None

    def line(self, place: Place) -> Iterator[Entry]:
        """The entries that have led to a place, the newest first."""
        at: Place | None = place
        while at is not None:
            if at in self.entries:
                yield self.entries[at]
            at = self.parent(at)

    def ids_of(self, stage: int, entry: Entry) -> tuple[bytes, ...]:
        """The microbatches of an entry; one that two seats of a later stage have computed stands there twice."""
        return tuple(sorted(each for work in self.works_of(stage, entry) for each in work.ids))

    def works_of(self, stage: int, entry: Entry) -> list[Work]:
        """What the contributions of an entry are of."""
        return [self.works[stage, each] for each in entry.cut.brings]

    def size(self, ids: Iterable[bytes]) -> int:
        """How many samples microbatches are of."""
        return sum(len(self.microbatches[each][0]) for each in ids)

    def mean(self, stage: int, entry: Entry, zeros: list[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over samples of what the contributions of an entry are; zeros where they are of none."""
        total = sum(each.weight for each in entry.cut.brings)
        sums = [zero.clone() for zero in zeros]
        for each in entry.cut.brings if total else ():
            for into, mean in zip(sums, self.works[stage, each].means, strict=True):
                into += mean * (each.weight / total)
        return sums

    def names(self, ids: Iterable[bytes]) -> Iterator[SampleId]:
        """The samples of microbatches."""
        for each in ids:
            yield from self.microbatches[each][1]

    def ledger(self, head: str, num_slices: int) -> Ledger:
        """What all entries of stage 0 up to one hold."""
        path = list[str]()
        at: Place | None = (0, head)
        while at is not None and at[1] not in self._ledgers:
            path.append(at[1])
            at = self.parent(at)
        ledger = Ledger(num_slices) if at is None else self._ledgers[at[1]]
        for each in reversed(path):
            ledger = ledger.copy()
            if (0, each) in self.entries:
                ledger.add(self.entries[0, each].cut.samples)
            self._ledgers[each] = ledger
        return ledger

    def sizes(self, place: Place, most: int) -> list[int]:
        """How many samples each of the last updates holds that have led to a place."""
        return [self.size(self.ids_of(place[0], entry)) for entry in islice(self.line(place), most)]


def same_weights(one: State, other: State) -> bool:
    """Whether two states hold bitwise the same."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

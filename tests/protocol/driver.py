"""A stand-in for the driver: microbatches, averages, states and handovers, without tensors.

What is computed is known by sample; a state is the hash of the entry that it embodies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId, SliceId, WindowRange, num_windows
from swarm_peer.protocol.epochs import COORDINATORS, Certified, Restart
from swarm_peer.protocol.grants import Reads
from swarm_peer.protocol.known_epochs import KnownEpochs
from swarm_peer.protocol.log import Cut, HandedOver, Log
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Entries, epochs_in
from swarm_peer.protocol.statements import Seat, Signed, Snapshot, hash_of
from swarm_peer.protocol.work import OpenRound

if TYPE_CHECKING:
    from cluster import Cluster, Process

SNAPSHOT_EVERY = 4
# A seat that finds no state for so long leaves its stage.
STATELESS_S = 25.0
PART_TIMEOUT_S = 5.0


@dataclass
class Reader:
    """A slice that a seat reads.

    Attributes:
        left: windows to come
        last_round: in which one of its windows was computed
    """

    left: list[int]
    num_windows: int
    last_round: int


@dataclass
class Reading:
    """What one seat of stage 0 reads.

    Attributes:
        failed: samples whose microbatch has failed, with the round and its void that has room for them
        seen: the newest grant that it has acted on
    """

    readers: dict[SliceId, Reader] = field(default_factory=dict)
    failed: list[tuple[SampleId, tuple[int, int]]] = field(default_factory=list)
    seen: object = None


class Driver:
    """Does for every process what its core asks for.

    Attributes:
        made: by stage, seat, round and sample, the base that the seat has computed the sample from
        ledgers: of stage 0, by the entry that they are after
        roots: of states that honest seats have had
        fails: the chance that a seat finds a mate to blame as it averages
    """

    def __init__(self, world: Cluster):
        self.world = world
        self.random = world.random
        self.made: dict[tuple[int, Seat, int, SampleId], tuple[str, ...]] = {}
        self.ledgers: dict[str, object] = {}
        self.roots: set[str] = set()
        self.fails = 0.03
        self._reading: dict[tuple[Seat, Restart], Reading] = {}
        self._started: dict[str, dict[Seat, float]] = {}
        self._results: set[str] = set()

    def _others(self, process: Process, stage: int) -> Iterator[tuple[Process, Member]]:
        """Members of a stage that a process reaches, and that reach it."""
        cut = self.world.cut
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
        if self.random.random() < 0.3:
            self._keep_snapshots(process)
        self._prepare(process)
        for stage, member in core.members.items():
            if member.is_behind:
                self._take_state(process, stage, member)
                continue
            process.stateless_since_s.pop(stage, None)
            if (void := member.voiding) is not None and self.random.random() < 0.5:
                member.voided(void.number)
            if (present := member.draining) is not None and self.random.random() < 0.5:
                member.drained(present.number)
            if member.rooting is not None:
                # What embodies an entry is the same everywhere, but for a few whose devices round otherwise.
                other = member.me.peer if self.random.random() < 0.05 else ""
                root = hash_of(("root", member.state, other))
                self.roots.add(root)
                member.rooted(member.state, root)
            if (other_root := member.adopting) is not None and other_root.root in self.roots:
                member.adopted(other_root)
            if (cut := member.averaging) is not None:
                self._average(process, member, cut)
            if stage == 0 and member.ledger is not None and self.random.random() < 0.8:
                reading = self._read(member)
                for _ in range(self.random.randrange(3)):
                    self._train(process, member, reading)

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
                    ledger = mate.ledger.copy() if mate.ledger is not None else None
                    core.prepare(stage, log, mate.state, self._epochs_of(log, other.core.membership.known), ledger)

    def _epochs_of(self, log: Log, known: KnownEpochs) -> list[Certified]:
        """The epochs that a log's entries rest on, as one who has it knows them."""
        named = {known.newest.id, *epochs_in(Entries(log.stage, known.newest.id, log.committed, None))}
        return [each for past in sorted(named) for each in known.up_to(past)]

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
                if stage == 0 and member.state not in self.ledgers:
                    if member.ledger is None:
                        continue
                    self.ledgers[member.state] = member.ledger.to_tuple()
                step_of = member.log.optimizer_step
                round_, step = max(round_, member.log.next_round), max(step, step_of)
                if step_of and step_of % SNAPSHOT_EVERY == 0 and world.rounds.averages(member.log.next_round - 1):
                    newest = [committed.entry.cut.base for committed in member.log.committed[-1:]]
                    held.add(Snapshot(step_of, stage, member.log.head, hash_of((member.log.restart, newest))))
        newest = {}
        for snapshot in sorted(held):
            newest.setdefault(snapshot.stage, []).append(snapshot)
        kept = frozenset(s for each in newest.values() for s in each[-2:])
        core.membership.holds = round_, step, kept

    def _take_state(self, process: Process, stage: int, member: Member) -> None:
        restart, head = member.log.restart, member.log.head
        mates = [mate for _, mate in self._others(process, stage) if mate is not member and mate.state == head]
        ledger: Ledger | None = None
        if mates and mates[0].ledger is not None:
            ledger = mates[0].ledger.copy()
        is_there = bool(mates)
        if not is_there and member.log.is_empty:
            held = {
                snapshot.entry
                for other in self.world.processes.values()
                if other.core is not None
                for snapshot in other.core.membership.holds[2]
            }
            is_there = not restart.entries or restart.entries[stage] in held
            if stage == 0 and is_there:
                fresh = Ledger(self.world.num_slices)
                ledger = Ledger.from_tuple(self.ledgers[restart.entries[0]]) if restart.entries else fresh
        if not is_there:
            # Entries without an update change no shared weights.
            rounds = {each: number for number, each in member.log.heads().items()}
            later = member.log.since(rounds.get(member.state, member.log.next_round))
            is_there = bool(later) and all(not committed.entry.cut.averages for committed in later)
        if is_there and self.random.random() < 0.5:
            member.reached(head, ledger)
        since_s = process.stateless_since_s.setdefault(stage, self.world.now_s)
        if self.world.now_s > since_s + STATELESS_S:
            assert process.core is not None
            self.world.count("gave up its stage")
            self.world.start(process)

    # --- data

    def num_windows(self, slice_id: SliceId) -> int:
        """How many windows a slice has; some have none."""
        return Random(f"{slice_id}").choice((0, 1, 3, 8, 8))

    def _read(self, member: Member) -> Reading:
        """Open the slices that are granted, and put away those that are through."""
        reading = self._reading.setdefault((member.me, member.log.restart), Reading())
        granted, ledger = member.granted, member.ledger
        assert ledger is not None
        if granted is not None and granted.reign == member.reign:
            for slice_id in [slice_id for slice_id in reading.readers if slice_id not in granted.slices]:
                del reading.readers[slice_id]
            if reading.seen != (granted.reign, granted.number):
                reading.seen = granted.reign, granted.number
                for slice_id in granted.slices:
                    if slice_id not in reading.readers and not ledger.is_finished(slice_id):
                        reading.readers[slice_id] = self._open(slice_id, ledger, member.log.next_round)
        for slice_id, reader in list(reading.readers.items()):
            if not reader.left and reader.last_round < member.log.next_round:
                del reading.readers[slice_id]
        wanted = max(0, 2 - sum(bool(reader.left) for reader in reading.readers.values()))
        member.reads = Reads(tuple(sorted(reading.readers)), wanted, granted)
        member.wants_samples = self.random.choice((1, 2, 4))
        return reading

    def _open(self, slice_id: SliceId, ledger: Ledger, number: int) -> Reader:
        num_windows, left = self.num_windows(slice_id), ledger.uncounted(slice_id)
        gaps = [window for start, end in left.gaps for window in range(start, end)]
        return Reader([*gaps, *range(left.next_window, num_windows)], num_windows, number)

    # --- microbatches

    def _train(self, process: Process, first: Member, reading: Reading) -> None:
        working = first.working
        if working is None:
            return
        room = working.number, working.voids
        if reading.failed:
            reading.failed.sort(key=lambda each: each[1] != room)
            sample, had_room = reading.failed[0]
            has_room = had_room == room
        else:
            found = [slice_id for slice_id, reader in reading.readers.items() if reader.left]
            sample, has_room = None, False
            if not found:
                self._tell_ends(first, working, reading)
                return
        if not has_room and not first.may_launch(1):
            return
        if not has_room:
            first.launched(1)
        if sample is None:
            slice_id = self.random.choice(found)
            sample = SampleId(*slice_id, reading.readers[slice_id].left.pop(0))
        else:
            reading.failed.pop(0)
        if not self._compute(process, first, working, sample, reading):
            reading.failed.append((sample, room))

    def _tell_ends(self, first: Member, working: OpenRound, reading: Reading) -> None:
        """Slices without windows end all the same, and others were known but for their ends."""
        for slice_id, reader in reading.readers.items():
            if not reader.left and reader.num_windows == 0 and reader.last_round <= working.number:
                end = WindowRange(*slice_id, 0, 0, True)
                if first.work.computed(working.number, working.computed.base, weight=0, samples=[end]):
                    reader.last_round = working.number + 1

    def _compute(self, process: Process, first: Member, working: OpenRound, sample: SampleId, reading: Reading) -> bool:
        path, epochs = [first], [process.core.epoch if process.core is not None else None]
        for stage in range(1, self.world.rules.num_stages):
            fits = [
                (other, member)
                for other, member in self._others(process, stage)
                if other.core is not None
                and process.core is not None
                and other.core.epoch.id == process.core.epoch.id
                and member.working is not None
                and member.working.number == working.number
                and (stage != 1 or not self._is_used_up(process, first, member, working))
            ]
            if not fits:
                return False
            other, member = self.choose(path[-1].me.peer, stage, working.number, fits)
            path.append(member)
            epochs.append(other.core.epoch if other.core is not None else None)
        base = tuple(member.base(working.number) for member in path)
        reader = reading.readers.get(sample.slice_id)
        is_last = reader is not None and sample.window + 1 == reader.num_windows
        samples = [WindowRange(*sample, sample.window + 1, is_last)]
        receipt = None
        for member, epoch in reversed(list(zip(path, epochs, strict=True))):
            caller = first.me if member.stage == 1 else None
            given = {"weight": 1, "samples": samples, "receipt": receipt, "caller": caller, "num_samples": 1}
            if self.random.random() < 0.03 or not member.work.computed(working.number, base, **given):
                return False
            self.made[member.stage, member.me, working.number, sample] = base
            if member.stage == 1 and epoch is not None:
                receipt = member.receipt_for(first.me, working.number, epoch)
        if reader is not None:
            reader.last_round = working.number
        self.world.count("samples")
        return True

    def choose(
        self, caller: str, stage: int, number: int, fits: list[tuple[Process, Member]]
    ) -> tuple[Process, Member]:
        """Where a caller sends a microbatch of a round, of those that would take it: anywhere."""
        return self.random.choice(fits)

    def _is_used_up(self, process: Process, first: Member, other: Member, working: OpenRound) -> bool:
        """Whether what another seat of a peer's own ticket computes would not count any more."""
        assert process.core is not None
        if other.me.ticket != first.me.ticket:
            return False
        receipts = [each.body for each in working.computed.receipts.values()]
        own = sum(each.samples for each in receipts if each.author.ticket == first.me.ticket)
        others = sum(each.samples for each in receipts) - own
        # A seat that has lost its work signs for less than has been computed; one whose reply was lost, for more.
        counted = min(own, num_windows(working.computed.samples) - others)
        return counted + 1 > self.world.rounds.most_within_ticket(first.me, process.core.epoch)

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
            elif chance < 0.6 + self.fails and len(cut.seats) > 1:
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
                    given = member.work.given.get(contribution.name)
                    if given is None:
                        body = HandedOver(member.me, core.epoch.id, contribution, "")
                        given = Signed(body, process.peer.encode())
                    if self.random.random() < 0.8 and mate.take_guest(given):
                        self.world.count("handed over")
        if self.random.random() < 0.6:
            core.membership.desired = frozenset()
            process.leaves = True

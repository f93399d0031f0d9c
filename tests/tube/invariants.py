"""What must hold, at every commit and at the end, and how it is seen: by wrapping a few methods of the real classes."""

from __future__ import annotations

import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from going_back import check_rewind
from hosts import Host
from loop import HOST
from with_weights import check_ledger, check_lineage

import swarm_peer.runtime.mover as mover_module
from coordinator.checkpoints.folder import CheckpointDamaged
from coordinator.checkpoints.store import CheckpointStore
from coordinator.run.coordination import Coordination
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.recovery import SnapshotRef, Timeline
from swarm_peer.policy.step_state import StepState
from swarm_peer.policy.view import Life, PeerState
from swarm_peer.policy.voting import AveragingVote
from swarm_peer.runtime.data.launcher import MicrobatchLauncher
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.state.recovery import Recovery
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.state.stored import StoredState, read_stored
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.round_reports import RoundReports, num_read_again
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop

if TYPE_CHECKING:
    from tube import Tube

TOLERANCE = 1e-5
# Gradients that are kept: those of the newest rounds of a few timelines.
MOST_COMPUTED = 4
# A stage-mate that died, or left to join anew, so long ago may still have been counted upon.
LOOKED_S = 25.0

State = dict[str, torch.Tensor]
# A stage at the beginning of a round: (stage, first round of its timeline, round, history hash).
Place = tuple[int, int, int, str]


# The stage whose weights a peer takes over, while it may still serve another one.
TAKING_OVER: ContextVar[int | None] = ContextVar("TAKING_OVER", default=None)


@dataclass
class Beginning:
    """A stage's weights as a round begins.

    Attributes:
        lineage: of these weights (policy/lineage.py)
        parent: where the update began that led here; None for the beginning of a timeline
        ids: microbatches in that update, sorted; those that failed hops had counted on two peers, twice
    """

    state: State
    timeline: Timeline
    optimizer_step: int
    lineage: bytes
    parent: Place | None = None
    ids: tuple[bytes, ...] | None = None


@dataclass
class Records:
    """What was seen.

    Attributes:
        microbatches: tokens (B, T+1), names of samples and the launcher's life, by id
        counted: the samples that a life of a peer has counted, by (timeline, round, life)
        brought: the microbatches that a peer had counted as it settled a round, by (stage, timeline, round, peer)
        shares: those whose gradient was finite; twice, if a leaving peer had counted one, too
        again: the microbatches that a leaving peer and the receiver of its gradient have both counted
        made: whose shares are in an update, by its place
        averagings: the newest averaging round of a peer and its members, by (stage, timeline, round, peer)
        votes: a peer's votes, by (stage, timeline, round, peer)
        unheard: members that gave a peer no vote though it asked, by (stage, timeline, round, try, peer)
        histories: the history hash with which an averaging round began, by its stage, round, try, members and lives
        given: gradients of leaving peers that were added, by (stage, timeline, round, giver, hash)
        without: rounds of stages in which some peer did without another that has held it up
        settled: rounds in a row that a peer has ended with its stage-mates, by host, stage and first round
        told_lost: samples that peers have reported lost, and that are not read again, by their stage then
        told_by: those that a process has reported lost, by its host and round
        gone_back: those that peers gave up as they went back, by stage, timeline and round
        died: samples that the peers of a stage held as they died, by stage
        of_the_dead: those that lives which have died since had brought, by stage
        own_work: the microbatches that a life of a peer has brought to updates of a stage, by the step before each
        own_timelines: the first round of the timeline that the newest of them was on
        stayed: the peers that were still there as faults had ceased, with their stages
        ends: where the furthest of them stood in each stage
    """

    microbatches: dict[bytes, tuple[torch.Tensor, tuple[SampleId, ...], Life]] = field(default_factory=dict)
    counted: dict[tuple[int, int, Any], set[SampleId]] = field(default_factory=dict)
    brought: dict[tuple[int, int, int, str], dict[bytes, int]] = field(default_factory=dict)
    shares: dict[tuple[int, int, int, str], list[bytes]] = field(default_factory=dict)
    again: dict[tuple[int, int, int, str], list[bytes]] = field(default_factory=dict)
    made: dict[Place, set[str]] = field(default_factory=dict)
    beginnings: dict[Place, Beginning] = field(default_factory=dict)
    averagings: dict[tuple[int, int, int, str], tuple[int, set[str]]] = field(default_factory=dict)
    votes: dict[tuple[int, int, int, str], list[AveragingVote]] = field(default_factory=dict)
    unheard: dict[tuple[int, int, int, int, str], set[str]] = field(default_factory=dict)
    histories: dict[tuple[Any, ...], str] = field(default_factory=dict)
    given: set[tuple[int, int, int, str, bytes]] = field(default_factory=set)
    without: set[tuple[int, int]] = field(default_factory=set)
    settled: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    told_lost: Counter[int | None] = field(default_factory=Counter)
    told_by: Counter[tuple[str, int]] = field(default_factory=Counter)
    gone_back: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    died: Counter[int] = field(default_factory=Counter)
    of_the_dead: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    own_work: dict[tuple[str, int], dict[int, set[bytes]]] = field(default_factory=lambda: defaultdict(dict))
    own_timelines: dict[tuple[str, int], int] = field(default_factory=dict)
    stayed: set[tuple[str, int]] = field(default_factory=set)
    ends: dict[int, Place] = field(default_factory=dict)
    moves_of: Counter[str] = field(default_factory=Counter)
    rewinds: int = 0
    forks: int = 0
    doubled: int = 0
    checked: int = 0
    validated: int = 0
    passes: int = 0


class Invariants:
    """Watches a tube.

    Attributes:
        tube: that is watched
        manifest: of its run
        finished_s: when a coordinator first had saved the model; None if none has
        at_finish: the peers that were there then
        num_slices: of a pass over the data; None before anybody has read it
    """

    def __init__(self, tube: Tube, resolved: ResolvedManifest):
        self.tube = tube
        self.manifest = resolved.manifest
        self._resolved = resolved
        self.records = Records()
        self.finished_s: float | None = None
        self.at_finish: list[Host] = []
        self.num_slices: int | None = None
        self._tokens: dict[SampleId, torch.Tensor] = {}
        self._terms: dict[str, dict[Term, Any]] = {}  # that a process has heard of, by its host
        self._both: list[bytes] = []  # counted by the giver and the receiver of the gradient that is being added
        # By the ledger's id: with the ledger, so that the id stays its own, the samples counted on its grounds.
        self._of_ledger: dict[int, tuple[Any, set[SampleId]]] = {}
        self._reference = [StageTrainer(resolved, spec, blank=True) for spec in resolved.specs]
        self._computed: dict[tuple[int | bytes, ...], list[list[torch.Tensor]]] = {}  # see `_gradients`

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the context is open, look at what peers do."""
        looks: tuple[tuple[Callable[..., Any], type, str, Callable[..., Any]], ...] = (
            (after, MicrobatchLauncher, "_claim", self._claimed),
            (before, MicrobatchLauncher, "_count", self._counted),
            (before, GradientHandover, "_add", self._adding),
            (after, GradientHandover, "_add", self._added),
            (before, StageGroup, "settle", self._settling),
            (around, StageGroup, "_average", self._averaged),
            (around, StageGroup, "_ask_vote", self._asked),
            (around, StepLoop, "_commit", self._committed),
            (around, StepLoop, "_take_over", self._taken_over),
            (around, StepLoop, "_replay", self._replayed),
            (after, StepLoop, "_begin_round", self._begun),
            (around, SnapshotStore, "store_snapshot", self._kept),
            (around, Mover, "_move", self._moved),
            (before, Peer, "_join_anew", lambda *_: self.tube.gone(HOST.get())),
            (after, Peer, "_describe", self._described),
            (before, Host, "die", self._dying),
            (before, PeerMetrics, "lose", self._lost_some),
            (before, RoundReports, "lose", self._went_back),
            (before, Recovery, "_rewind", lambda _, rewind, standing, believed: check_rewind(self, rewind, standing)),
            (before, Coordination, "run", self._coordinating),
        )
        with ExitStack() as stack:
            for wrap, owner, name, look in looks:  # one after the other: some methods are looked at twice
                stack.enter_context(wrap(owner, name, look))
            stack.enter_context(self._watching_orders())
            yield

    def note_calm(self) -> None:
        """Note where the run stands as faults cease."""

    def has_gone_on(self) -> bool:
        """Whether the run has gone on since faults ceased, apart from the optimizer steps that it has made."""
        return True

    def note_ends(self) -> None:
        """Note where all peers stand, now that no fault strikes any more."""
        for host in self.tube.peers():
            replica = None if host.peer is None else host.peer._replica
            if replica is None:
                continue
            self.records.stayed.add((host.peer_id, replica.stage))
            if not replica.has_weights:  # it has come as the run ended
                continue
            step = replica.step
            place = (replica.stage, step.timeline.first_round, step.round_number, step.history_hash)
            self.records.ends[replica.stage] = max(place, self.records.ends.get(replica.stage, place))

    def shared(self, state: State) -> State:
        """The part of a stage's state that stage-mates hold alike."""
        return state

    # --- what is seen

    def _claimed(self, launcher: Any, batch: Any, present: Any) -> None:
        self.records.microbatches.setdefault(batch.id, (batch.tokens_BS, batch.samples, launcher._life))
        for name, tokens in zip(batch.samples, batch.tokens_BS, strict=True):
            if not torch.equal(self._tokens.setdefault(name, tokens), tokens):
                self.tube.violation(f"{HOST.get()} launches {name} with other tokens than that name had before")

    def _counted(
        self,
        launcher: Any,
        round_number: int,
        samples: Sequence[SampleId] = (),
        claimed: int = 0,
        loss_sum: float = 0.0,
        targets: int = 0,
    ) -> None:
        """A peer counts a sample once, for as long as it goes on from the same ledger."""
        _, known = self._of_ledger.setdefault(id(launcher._leases._ledger), (launcher._leases._ledger, set()))
        if twice := known.intersection(samples):
            self.tube.violation(f"{HOST.get()} counts {len(twice)} samples twice, such as {sorted(twice)[:2]}")
        known.update(samples)
        place = (launcher._rounds.step.timeline.first_round, round_number, launcher._life)
        self.records.counted.setdefault(place, set()).update(samples)

    def _adding(self, handover: Any, giver: str, data: Any, call: Any, entered: Any) -> None:
        self._both = [each for each, _ in call.counted if each in entered.counted]

    def _added(self, handover: Any, giver: str, data: Any, call: Any, entered: Any) -> None:
        """A leaving peer's gradient is added once, by whomever; who has nothing else may give it on."""
        key = (handover._stage, entered.step.timeline.first_round, entered.number, giver, call.sha256)
        if key in self.records.given:
            self.tube.violation(f"{HOST.get()} adds a gradient of round {entered.number} that was added before")
        self.records.given.add(key)
        twice = [*self._both, *self.records.again.pop((*key[:3], giver), ())]  # the giver may have held some twice
        self.records.again.setdefault((*key[:3], handover._transport.peer_id), []).extend(twice)

    def _described(self, peer: Any) -> None:
        """A peer that says it serves has weights."""
        replica = peer._replica
        if peer._lifecycle.state is PeerState.SERVING and replica is not None and not replica.has_weights:
            self.tube.violation(f"{HOST.get()} announces that it serves stage {replica.stage}, and has no weights")

    def _dying(self, host: Host) -> None:
        replica = None if host.peer is None else host.peer._replica
        if host.is_alive and replica is not None:
            self.records.died[replica.stage] += replica.parts.core.trainer.strategy.pending_samples
        for (stage, _, _, peer), ids in self.records.brought.items():
            if peer == host.peer_id:
                self.records.of_the_dead[stage].update(ids)

    def _lost_some(self, metrics: Any, samples: int, reason: str, *, round_number: int) -> None:
        stage = TAKING_OVER.get()
        self.records.told_by[HOST.get().name, round_number] += samples
        self.records.told_lost[self.tube.stage_of(HOST.get()) if stage is None else stage] += samples

    def _went_back(
        self, reports: RoundReports, samples: int, step: StepState, timeline: Timeline, held_back: int = 0
    ) -> None:
        place = (reports._stage, step.timeline.first_round, step.round_number)
        self.records.gone_back[place] += num_read_again(samples, step, timeline, held_back)

    def _coordinating(self, coordination: Coordination) -> None:
        HOST.get().coordination = coordination

    def _watching_orders(self) -> Any:
        """A peer obeys the newest term that it has heard of, in whatever stage it was then."""
        original: Any = mover_module.wait_for_assignment  # type: ignore[attr-defined]

        @functools.wraps(original)
        async def wrapped(*, fetch: Any, **options: Any) -> Any:
            heard = self._terms.setdefault(HOST.get().name, {})

            async def fetch_and_note() -> Any:
                found = await fetch()
                heard.update(found)
                return found

            assignment = await original(fetch=fetch_and_note, **options)
            newest = max(heard)
            if assignment not in heard[newest].assignments:
                self.tube.violation(f"{HOST.get()} obeys an order that is not of term {newest.number}, the newest")
            if assignment.from_stage != options["stage"] or assignment.announced < options["since"]:
                self.tube.violation(f"{HOST.get()} obeys an order for an earlier stay in {assignment.from_stage}")
            return assignment

        return patch.object(mover_module, "wait_for_assignment", wrapped)

    def _settling(self, group: Any, ending: Any, gradients: Any, samples: int, upcoming: Any = None) -> None:
        step = ending.step
        place = (group._stage, step.timeline.first_round, step.round_number, group._me)
        self.records.brought[place] = dict(ending.counted)
        self.records.shares[place] = [*ending.counted, *self.records.again.get(place, ())] if samples else []
        names = Counter(
            (author, name)
            for each in ending.counted
            for _, samples_of, author in [self.records.microbatches[each]]
            for name in samples_of
        )
        if names and max(names.values()) > 1:
            self.tube.violation(f"{HOST.get()} brings samples to round {ending.number} under two names")
        if group._stage == 0:
            counted = self.records.counted.get((*place[1:3], group._barrier._progress.author), set())
            lost = counted - {name for _, name in names}
            if len(lost) > self.records.told_by[HOST.get().name, ending.number]:
                self.tube.violation(f"{HOST.get()} has counted {len(lost)} samples that its gradient does not hold")

    async def _averaged(
        self, call: Any, group: Any, ending: Any, gradients: Any, attempt: int, members: Any
    ) -> tuple[Any, Any]:
        step = ending.step
        mine = (group._stage, step.timeline.first_round, step.round_number, group._me)
        self.records.averagings[mine] = attempt, set(members)
        # If all have died, the run may begin anew at round 0 of the same timeline.
        lives = tuple(sorted(host.name for host in self.tube.world.alive() if host.peer_id in members))
        vote, result = await call(ending, gradients, attempt, members)
        self.records.votes.setdefault(mine, []).append(vote)
        if vote.checksum is not None and len(members) > 1:
            key = (*mine[:3], attempt, tuple(sorted(members.items())), lives)
            if self.records.histories.setdefault(key, step.history_hash) != step.history_hash:
                self.tube.violation(f"{HOST.get()} averages round {step.round_number} with peers of other weights")
        if vote.checksum is not None:
            own = len(members) == 1 or attempt >= self._resolved.manifest.averaging.max_tries
            place = (group._stage, step.timeline.first_round, step.round_number + 1, vote.checksum)
            self.records.made[place] = {group._me} if own else set(members)
        return vote, result

    async def _asked(
        self, call: Any, group: Any, peer_id: str, round_number: int, attempt: int, votes: dict[str, AveragingVote]
    ) -> None:
        try:
            await call(peer_id, round_number, attempt, votes)
        finally:
            if peer_id not in votes:
                mine = (group._stage, group._rounds.step.timeline.first_round, round_number, attempt, group._me)
                self.records.unheard.setdefault(mine, set()).add(peer_id)

    def _check_votes(self, mine: tuple[int, int, int, str], checksum: str) -> None:
        """A result is committed when all members have voted for it; after the last try, when all have voted."""
        attempt, members = self.records.averagings[mine]
        is_last = attempt >= self._resolved.manifest.averaging.max_tries
        for other in members - self.records.unheard.get((*mine[:3], attempt, mine[3]), set()):
            votes = [vote for vote in self.records.votes.get((*mine[:3], other), []) if vote.attempt >= attempt]
            if not votes or not (is_last or any(vote.checksum == checksum or vote.abstains for vote in votes)):
                self.tube.violation(f"{HOST.get()} commits round {mine[2]} of stage {mine[0]} against another's vote")

    async def _taken_over(self, call: Any, loop: Any, state: Any, **options: Any) -> None:
        """Who takes over weights reports what it had brought to updates that have not led to them."""
        metrics, strategy = loop._context.metrics, loop._trainer.strategy
        pending, before = strategy.pending_samples, metrics.lost_samples._value.get()
        own = dict(self.records.own_work[HOST.get().name, loop._stage])
        with _taking_over(loop._stage):
            await call(state, **options)
        place = (loop._stage, state.timeline.first_round, state.round_number, state.history_hash)
        told = metrics.lost_samples._value.get() - before
        pending -= strategy.pending_samples  # it may go on with some of what it had accumulated
        held = {each for _, ids in self.history(place) for each in ids}
        # What a rewind has given up is read again; a peer that served another stage meanwhile may have missed several.
        since = self.records.own_timelines.get((HOST.get().name, loop._stage), 0)
        passed = {begun.timeline for _, begun in self.line(place) if begun.timeline.first_round > since}
        end = min((timeline.first_optimizer_step for timeline in passed), default=None)
        early = {each for made_at, ids in own.items() if end is None or made_at < end for each in ids}
        # Who comes back to a stage may be given a state of before it left: the updates since then may come yet.
        ahead = {each for made_at, ids in own.items() if made_at >= state.optimizer_step for each in ids}
        is_behind = not passed and early - ahead <= held
        lacking = early - held - (ahead if is_behind else set())
        if self.size(lacking) + pending > told:
            self.tube.violation(
                f"{HOST.get()} goes on from weights that lack {self.size(lacking) + pending} samples of its own, and "
                f"reports {told:.0f} lost"
            )
        kept = {made_at: held.intersection(ids) for made_at, ids in own.items() if made_at < state.optimizer_step}
        self.records.own_work[HOST.get().name, loop._stage] = kept

    async def _replayed(self, call: Any, loop: Any, *args: Any, **options: Any) -> Any:
        """Who applies the updates that stage-mates made without it reports what it had itself."""
        metrics, strategy = loop._context.metrics, loop._trainer.strategy
        pending, before = strategy.pending_samples, metrics.lost_samples._value.get()
        with _taking_over(loop._stage):
            result = await call(*args, **options)
        told, lost = metrics.lost_samples._value.get() - before, pending - strategy.pending_samples
        if lost > told:
            self.tube.violation(f"{HOST.get()} drops {lost} samples for the updates of others, and reports {told:.0f}")
        return result

    async def commit(self, call: Any, loop: Any, settlement: Any) -> None:
        """Have a peer commit a round, and count how many it has ended with its stage-mates in a row."""
        step = loop.step
        row = (HOST.get().name, loop._stage, step.timeline.first_round)
        settled = self.records.settled[row]
        await call(settlement)
        if loop.step.round_number == step.round_number + 1:  # and it has not taken over a state at once
            self.records.settled[row] = settled + 1

    async def _committed(self, call: Any, loop: Any, settlement: Any) -> None:
        step, stage = loop.step, loop._stage
        mine = (stage, step.timeline.first_round, step.round_number, loop._group._me)
        self._check_votes(mine, settlement.history_hash)
        if late := loop._rounds.current.counted.keys() - self.records.brought[mine]:
            self.tube.violation(f"{HOST.get()} has counted {len(late)} microbatches after it brought its gradient")
        parent = (stage, step.timeline.first_round, step.round_number, step.history_hash)
        if any(map(loop._group._barrier._mates.is_left_out, loop._group._barrier._mates._announced)):
            self.records.without.add((stage, step.round_number))
        await self.commit(call, loop, settlement)
        own = self.records.own_work[HOST.get().name, stage]
        own[step.optimizer_step] = set(self.records.shares[mine])
        self.records.own_timelines[HOST.get().name, stage] = step.timeline.first_round
        place = (stage, step.timeline.first_round, step.round_number + 1, settlement.history_hash)
        beginning = self.records.beginnings[place]
        ids = tuple(sorted(each for share in self.shares_in(place) for each in share))
        if beginning.ids is None:
            beginning.parent, beginning.ids = parent, ids
            self.records.doubled += len(ids) - len(set(ids))
            self.tube.committed(stage, step.round_number)
            self._check_update(place, beginning)
            if loop.step.round_number == place[2] and loop.step.history_hash == place[3]:
                check_ledger(self, place, loop.step.ledger, "round")
        elif beginning.ids != ids and not self._are_begun_anew(beginning.ids, ids):
            self.tube.violation(f"an update of round {step.round_number} of stage {stage} is of different microbatches")

    def _are_begun_anew(self, known: Sequence[bytes], ids: Sequence[bytes]) -> bool:
        """Whether all samples are the same and all microbatches others: if all peers die, a run may begin anew."""
        return set(known).isdisjoint(ids) and self._rows_of(known) == self._rows_of(ids)

    def _rows_of(self, ids: Iterable[bytes]) -> list[list[int]]:
        return sorted(row.tolist() for each in ids for row in self.records.microbatches[each][0])

    def shares_in(self, place: Place) -> Iterator[list[bytes]]:
        """The microbatches of each member of the average that led to a place."""
        stage, first_round, number, _ = place
        for peer_id in self.records.made[place]:
            yield self.records.shares[(stage, first_round, number - 1, peer_id)]

    def _begun(
        self, loop: Any, round_number: int, history_hash: str, timeline: Timeline, ledger: bytes, lineage: bytes
    ) -> None:
        place = (loop._stage, timeline.first_round, round_number, history_hash)
        if round_number == timeline.first_round and not timeline.first_optimizer_step:
            self.records.own_work[HOST.get().name, loop._stage].clear()
        # By a stage-mate's state or update, perhaps: a peer that is left behind keeps no snapshots, or gives them up.
        self.records.settled[(HOST.get().name, loop._stage, timeline.first_round)] = 0
        if loop._leases is not None:
            self.num_slices = loop._leases._reader.num_slices()
        state = loop._trainer.state()
        known = self.records.beginnings.get(place)
        if known is None:
            optimizer_step = timeline.optimizer_step_at(round_number)
            self.records.beginnings[place] = Beginning(state, timeline, optimizer_step, lineage)
            self._check_first(place, state, timeline)
        elif not same_weights(self.shared(known.state), self.shared(state)):
            self.tube.violation(f"{HOST.get()} holds other weights than its stage-mates at {place[:3]}")
        check_lineage(self, place, lineage, "state")
        if known is not None:
            check_ledger(self, place, ledger, "state")
        if loop._trainer.optimizer_step != timeline.optimizer_step_at(round_number):
            self.tube.violation(f"{HOST.get()}: {loop._trainer.optimizer_step} updates at {place[:3]}, {timeline}")

    def _check_first(self, place: Place, state: State, timeline: Timeline) -> None:
        """The first weights of a timeline are those that were created in its round of creation."""
        stage, _, round_number, history_hash = place
        if round_number != timeline.first_round or timeline.first_round == 0:
            return
        self.records.rewinds += 1
        if timeline.first_optimizer_step == 0:
            return
        created = [
            beginning
            for (of_stage, _, number, digest), beginning in self.records.beginnings.items()
            if (of_stage, number, digest) == (stage, timeline.created_at_round, history_hash)
        ]
        if not any(same_weights(self.shared(beginning.state), self.shared(state)) for beginning in created):
            self.tube.violation(f"timeline {timeline} begins with weights that stage {stage} never had")

    async def _moved(self, call: Any, mover: Any, replica: Any, stage: int) -> bool:
        moved = await call(replica, stage)
        if moved:
            self.records.moves_of[HOST.get().name] += 1
            self.tube.world.note("move", HOST.get(), replica.stage, stage)
            self.tube.check_not_emptied(HOST.get(), replica.stage, LOOKED_S)
        return bool(moved)

    # --- what must hold

    def _beginning_of(self, stage: int, timeline: Timeline, round_number: int) -> Beginning | None:
        """A stage's weights in a round, if no fork makes them uncertain."""
        found = [
            beginning
            for (of_stage, first_round, number, _), beginning in self.records.beginnings.items()
            if (of_stage, first_round, number) == (stage, timeline.first_round, round_number)
        ]
        return found[0] if len(found) == 1 else None

    def _check_update(self, place: Place, beginning: Beginning) -> None:
        """An update is the one that a single process makes of the same microbatches, from the same weights."""
        stage, _, number, _ = place
        if beginning.parent is None or beginning.ids is None:
            return
        stages = [self._beginning_of(each, beginning.timeline, number - 1) for each in range(len(self._reference))]
        if stages[stage] is None or any(known is None for known in stages):
            self.records.forks += 1
            return
        self._compare(place, self._gradients(stages, beginning.ids)[stage], beginning)

    def _gradients(self, stages: Sequence[Beginning | None], ids: tuple[bytes, ...]) -> list[list[torch.Tensor]]:
        """The mean gradients of each stage that one process has of microbatches, with these weights.

        Kept for a while: all stages have the same microbatches in a round, as long as none fails.
        """
        key: tuple[int | bytes, ...] = (*map(id, stages), *ids)
        if key not in self._computed:
            for trainer, known in zip(self._reference, stages, strict=True):
                assert known is not None
                trainer.load_state(known.state, known.optimizer_step)
            if ids:
                train(self._reference, torch.cat([self.records.microbatches[each][0] for each in ids]))
            self._computed[key] = [trainer.mean_gradients() for trainer in self._reference]
            if len(self._computed) > MOST_COMPUTED:
                del self._computed[next(iter(self._computed))]
        return self._computed[key]

    def _compare(
        self, place: Place, gradients: list[torch.Tensor], beginning: Beginning, others: State | None = None
    ) -> None:
        """An update is the one that a process makes of these gradients, with the state from before it.

        Args:
            others: entries in place of that state's own
        """
        assert beginning.parent is not None
        trainer, begun = self._reference[place[0]], self.records.beginnings[beginning.parent]
        trainer.load_state(begun.state | (others or {}), begun.optimizer_step)
        trainer.apply(gradients)
        self.records.checked += 1
        for name, value in self.shared(trainer.state()).items():
            error = float((value - beginning.state[name]).abs().max()) if value.numel() else 0.0
            if not error <= TOLERANCE:
                self.tube.violation(
                    f"the update of round {place[2] - 1} of stage {place[0]} ({len(beginning.ids or ())} microbatches) "
                    f"is not that of one process: {name} differs by {error:.2g}"
                )
                return

    async def _kept(self, call: Any, store: Any, stage: int, state: Any) -> None:
        """A peer's snapshot holds the weights that its stage had at the beginning of the snapshot's round."""
        seen = list(store._snapshots.values())
        await call(stage, state)
        if HOST.get().peer is None:
            return  # a coordinator gives a checkpoint away, which `check_checkpoint` looks at
        for ref, stored in store._snapshots.items():
            if not any(stored is each for each in seen):
                self._check_snapshot(HOST.get(), ref, stored)

    def _check_snapshot(self, host: Host, ref: SnapshotRef, stored: StoredState) -> None:
        kept = read_stored(stored)
        if kept is None:
            if not host.storage.has_failed:
                self.tube.violation(f"{host} takes {ref} for damaged, and no fault has changed its file")
            return
        place = (ref.stage, kept.timeline.first_round, kept.round_number, kept.history_hash)
        begun = self.records.beginnings.get(place)
        if begun is not None:
            check_lineage(self, place, kept.lineage, "snapshot")
            check_ledger(self, place, kept.ledger, "snapshot")
        if begun is None or not same_weights(self.shared(begun.state), self.shared(dict(kept.tensors))):
            self.tube.violation(
                f"{host} keeps a snapshot of round {kept.round_number} with weights that stage {ref.stage} did not "
                f"have then"
            )

    def check_checkpoint(self, store: CheckpointStore) -> None:
        """The newest checkpoint that is called good can be read, and holds what the run has had."""
        try:
            checkpoint = store.newest(self._resolved.manifest)
        except UserError:
            return  # all are damaged, and it says so
        for stage in range(0 if checkpoint is None else len(self._reference)):
            assert checkpoint is not None
            try:
                saved = checkpoint.load_stage(stage)
            except CheckpointDamaged as error:
                self.tube.violation(f"a checkpoint that is called good cannot be read: {error.reason}")
                return
            if not any(
                (of_stage, digest) == (stage, saved.history_hash)
                and beginning.timeline.creation_round(number) == saved.created_at_round
                and beginning.optimizer_step == checkpoint.optimizer_step
                and same_weights(self.shared(beginning.state), self.shared(dict(saved.tensors)))
                for (of_stage, _, number, digest), beginning in self.records.beginnings.items()
            ):
                self.tube.violation(
                    f"the checkpoint of step {checkpoint.optimizer_step} holds weights that stage {stage} never had"
                )

    def check_samples(self) -> None:
        """No sample counts twice on the way to the newest weights of stage 0.

        A later stage may count one again: if a hop fails after it has counted a microbatch, its gradient stays there.
        """
        for stage in range(len(self._reference)):
            ends = [place for place in self.records.beginnings if place[0] == stage]
            if not ends:
                continue
            newest = max(ends, key=lambda place: (place[2], place[1]))
            names: Counter[SampleId] = Counter()
            for _, ids in self.history(newest):
                # Stage 0 counts a microbatch once. At a later one, failed hops may have had it counted by two peers.
                for each in ids if stage == 0 else set(ids):
                    names.update(self.records.microbatches[each][1])
            twice = [name for name, count in names.items() if count > 1]
            self.records.doubled += len(twice)
            # While stage 0 is cut in two, a sample may count on both sides; who hears of it later says so.
            told = sum(host.metrics.repeated_samples._value.get() for host in self.tube.world.hosts)
            if len(twice) > told and stage == 0:
                self.tube.violation(f"stage {stage}: {len(twice)} samples count twice, such as {twice[:3]}")

    def check_shares(self) -> None:
        """The updates of a later stage hold stage 0's microbatches, but for those that peers have reported lost."""
        for stage in range(1, len(self._reference)):
            in_line = self._lacking_in_line(stage)
            told = self.records.told_lost[stage] + self.records.told_lost[None] + self.gone_back_in_vain(stage)
            self._check_lacking(stage, in_line, told)
            # Of two that updated weights differently in the same round, each may lack the same one.
            lacking = set(in_line)
            for (of_stage, _, number, _), first in list(self.records.beginnings.items()):
                other = None if of_stage or first.ids is None else self._beginning_of(stage, first.timeline, number)
                if other is not None and other.ids is not None and first.ids is not None:
                    lacking.update(set(first.ids).difference(other.ids))
            # Rewinds have given some of these up before anybody knew that they lacked there.
            given_up = sum(samples for (of, _, _), samples in self.records.gone_back.items() if of == stage)
            told = self.records.told_lost[stage] + self.records.told_lost[None] + given_up
            self._check_lacking(stage, lacking, told)

    def _check_lacking(self, stage: int, lacking: set[bytes], told: int) -> None:
        unreported = self.brought_by_gone(stage) | self._held_apart(stage)
        missing, died = self.size(lacking - unreported), self.records.died[stage]
        if missing > told + died:
            self.tube.violation(
                f"the updates of stage {stage} lack {missing} samples; its peers held {died} as they died, and {told} "
                f"were reported lost"
            )

    def brought_by_gone(self, stage: int) -> set[bytes]:
        """What peers brought before they died or left the stage: they report nothing of rounds ended without them."""
        brought = set(self.records.of_the_dead[stage])
        for (of_stage, _, _, peer), ids in self.records.brought.items():
            if of_stage == stage and (peer, stage) not in self.records.stayed:
                brought.update(ids)
        return brought

    def _held_apart(self, stage: int) -> set[bytes]:
        """What the weights of the peers that are there hold: who has gone on alone tells as it meets the others."""
        replicas = [host.peer._replica for host in self.tube.peers() if host.peer is not None]
        steps = [replica.step for replica in replicas if replica is not None and replica.stage == stage]
        places = [(stage, step.timeline.first_round, step.round_number, step.history_hash) for step in steps]
        known = [place for place in places if place in self.records.beginnings]
        return {each for place in known for _, ids in self.history(place) for each in ids}

    def size(self, ids: Iterable[bytes]) -> int:
        """How many samples microbatches are of."""
        return sum(len(self.records.microbatches[each][0]) for each in ids)

    def names(self, ids: Iterable[bytes]) -> Iterator[SampleId]:
        """The samples of microbatches."""
        for each in ids:
            yield from self.records.microbatches[each][1]

    def _lacking_in_line(self, stage: int) -> set[bytes]:
        """The microbatches that have led to the newest weights of stage 0, and not to those of a later stage."""
        if not {0, stage} <= self.records.ends.keys():
            return set()
        first, later = (dict(self.history(self.records.ends[each])) for each in (0, stage))
        held = {each for ids in later.values() for each in ids}
        return {each for number, ids in first.items() if number in later for each in ids} - held

    def gone_back_in_vain(self, stage: int) -> int:
        """The samples that peers gave up, to be read again, of rounds that the run has ended without them after all."""
        if stage not in self.records.ends:
            return 0
        made_from = {begun.parent[1:3] for _, begun in self.line(self.records.ends[stage]) if begun.parent is not None}
        newest: dict[int, int] = {}  # round of each timeline, from which an update was made that has led to the end
        for first_round, number in sorted(made_from):
            newest[first_round] = number
        return sum(
            samples
            for (of_stage, first_round, number), samples in self.records.gone_back.items()
            if of_stage == stage and newest.get(first_round, -1) >= number
        )

    def reported_lost(self) -> int:
        """The samples that all peers have reported lost."""
        return int(sum(host.metrics.lost_samples._value.get() for host in self.tube.world.hosts))

    def check_snapshots(self) -> None:
        """Who has made so many updates in a row that there was a snapshot among them has one; and it still is one."""
        least = 2 * self._resolved.manifest.recovery.snapshot_every
        for host in self.tube.peers():
            replica = None if host.peer is None else host.peer._replica
            if host.peer is None:
                continue
            for ref, stored in host.peer._parts.snapshots._snapshots.items():
                self._check_snapshot(host, ref, stored)
            if replica is None or host.storage.has_failed:
                continue
            settled = self.records.settled[(host.name, replica.stage, replica.step.timeline.first_round)]
            if settled >= least and not host.peer._parts.snapshots.snapshots():
                self.tube.violation(f"{host} has settled {settled} rounds in a row, and keeps no snapshot")

    def history(self, place: Place) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """The rounds that ended with the updates that have led to a place, and the microbatches of each."""
        for (_, _, number, _), beginning in self.line(place):
            if beginning.parent is not None and beginning.ids is not None:
                yield number, beginning.ids

    def forked(self) -> dict[Place, tuple[bytes, ...]]:
        """The updates of stage 0 in rounds of which there are several, and the microbatches of each.

        Halves of the stage have gone on without each other, and one gives its updates up.
        """
        beginnings = self.records.beginnings.items()
        made = {place: begun.ids for place, begun in beginnings if place[0] == 0 and begun.ids is not None}
        num_of_round = Counter(place[1:3] for place in made)
        return {place: ids for place, ids in made.items() if num_of_round[place[1:3]] > 1}

    def line(self, place: Place) -> Iterator[tuple[Place, Beginning]]:
        """All that has led to a place, the newest first."""
        while True:
            beginning = self.records.beginnings[place]
            yield place, beginning
            if beginning.parent is not None and beginning.ids is not None:
                place = beginning.parent
                continue
            timeline = beginning.timeline
            if place[2] != timeline.first_round or not timeline.first_optimizer_step:
                return
            earlier = [
                known
                for known in self.records.beginnings
                if (known[0], known[2], known[3]) == (place[0], timeline.created_at_round, place[3]) and known != place
            ]
            if not earlier:
                return
            place = earlier[0]


def train(stages: list[StageTrainer], tokens_BS: torch.Tensor) -> None:
    """Forward and backward through all stages, in one process."""
    passes, hidden = [], None
    for trainer in stages:
        passes.append(trainer.forward(tokens_BS, hidden))
        hidden = passes[-1].output
    gradient = None
    for trainer, done in zip(reversed(stages), reversed(passes), strict=True):
        gradient = trainer.backward(done, gradient)


def same_weights(one: State, other: State) -> bool:
    """Whether two states hold bitwise the same."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def before(owner: type, name: str, look: Callable[..., None]) -> Any:
    """Have `look` see each call of a method, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        look(self, *args, **options)
        return original(self, *args, **options)

    return patch.object(owner, name, wrapped)


def after(owner: type, name: str, look: Callable[..., None]) -> Any:
    """Have `look` see each call of a method when it is over, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        look(self, *args, **options)
        return result

    return patch.object(owner, name, wrapped)


def around(owner: type, name: str, call: Callable[..., Any]) -> Any:
    """Have `call` run in place of a method, coroutine function or not, and give it the method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return call(functools.partial(original, self), self, *args, **options)

    @functools.wraps(original)
    async def async_wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return await call(functools.partial(original, self), self, *args, **options)

    return patch.object(owner, name, async_wrapped if inspect.iscoroutinefunction(original) else wrapped)


@contextmanager
def _taking_over(stage: int) -> Iterator[None]:
    token = TAKING_OVER.set(stage)
    try:
        yield
    finally:
        TAKING_OVER.reset(token)

"""What must hold at every entry and at the end, and how it is seen: by wrapping a few methods of the real classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from hosts import Host
from loop import HOST
from records import Place, Records, State, Work, same_weights
from wrapping import after, around, before

import swarm_peer.runtime.mover as mover_module
from coordinator.checkpoints.folder import CheckpointDamaged
from coordinator.checkpoints.store import CheckpointStore
from coordinator.run.coordination import Coordination
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import shared_entries
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.policy.decay import decay_in
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.view import PeerState
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Contribution, Entry, Name, base_of
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.data.launcher import BatchLauncher
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.state.states import StageSources
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.driver_parts import SeatWeights
from swarm_peer.runtime.step.giving import Giving
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.runtime.step.workplace import StageWorkplace
from swarm_peer.wire.ledger_codec import read_ledger

if TYPE_CHECKING:
    from tube import Tube

TOLERANCE = 1e-5
# Gradients that are kept: those of the newest rounds.
MOST_COMPUTED = 4
# A stage-mate that died, or left, so long ago may still have been counted upon.
LOOKED_S = 25.0
# What updates may hold, by what they should: each peer of stage 0 may have one microbatch more in flight.
LEAST, MOST = 0.8, 1.6


class Invariants:
    """Watches a tube.

    Attributes:
        tube: that is watched
        manifest: of its run
        records: what was seen
        finished_s: when a coordinator first had saved the model; None if none has
        at_finish: the peers that were there then
        num_slices: of a pass over the data; 0 before anybody has read it
        ends: the places that the longest logs of all stages had come to, once nothing is to follow
        entries: where one member lies, see Outcome
        sizes: the least and the most that updates may hold, by what they should
    """

    sizes = LEAST, MOST

    def __init__(self, tube: Tube, resolved: ResolvedManifest):
        self.tube = tube
        self.manifest = resolved.manifest
        self._resolved = resolved
        self.records = Records()
        self.finished_s: float | None = None
        self.at_finish: list[Host] = []
        self.num_slices = 0
        self.ends: dict[int, Place] = {}
        self.entries: list[tuple[float, int, dict[str, int]]] = []
        self._tokens: dict[SampleId, torch.Tensor] = {}
        self._terms: dict[str, dict[Term, Any]] = {}  # that a process has heard of, by its host
        self._reference = [StageTrainer(resolved, spec, blank=True) for spec in resolved.specs]
        self._computed: dict[tuple[Any, ...], list[list[torch.Tensor]]] = {}  # see `_gradients`

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the context is open, look at what peers do."""
        looks: tuple[tuple[Callable[..., Any], type, str, Callable[..., Any]], ...] = (
            (around, BatchLauncher, "_take_waiting", self._launching),
            (after, StageExecutor, "_backward", self._computed_one),
            (around, RoundDriver, "_hold", self._held),
            (around, RoundDriver, "_apply", self._applied),
            (before, StageWorkplace, "open", self._opened),
            (before, Member, "_append", self._appending),
            (after, Giving, "_take", self._taken),
            (after, StageSources, "__init__", self._reads),
            (before, RoundReports, "lose", self._lost),
            (around, NamedSnapshots, "keep", self._kept),
            (around, Mover, "_move", self._moved),
            (after, Peer, "_describe", self._described),
            (before, Coordination, "run", self._coordinating),
        )
        with ExitStack() as stack:
            for wrap, owner, name, look in looks:
                stack.enter_context(wrap(owner, name, look))
            stack.enter_context(self._watching_orders())
            yield

    def note_calm(self) -> None:
        """Note where the run stands as faults cease."""

    def has_gone_on(self) -> bool:
        """Whether the run has gone on since faults ceased, apart from the optimizer steps that it has made."""
        return True

    def note_ends(self) -> None:
        """Note where all stages stand, now that nothing more is to follow."""
        for host in self.tube.peers():
            for stage, member in members_of(host).items():
                if member.reign is not None and (stage not in self.ends or self._is_later(member, self.ends[stage])):
                    self.ends[stage] = stage, member.log.head

    def _is_later(self, member: Member, place: Place) -> bool:
        entry = self.records.entries.get(place)
        return entry is None or member.log.next_round > entry.cut.round + 1

    def shared(self, state: State) -> State:
        """The part of a stage's state that stage-mates hold alike."""
        return shared_entries(state)

    # --- what is seen

    def _reads(self, sources: StageSources, **about: Any) -> None:
        self.num_slices = about["num_slices"] or self.num_slices

    def _launching(self, call: Any, launcher: BatchLauncher) -> Any:
        if (batch := call()) is None:
            return None
        self.records.microbatches.setdefault(batch.id, (batch.tokens_BS, batch.samples))
        for name, tokens in zip(batch.samples, batch.tokens_BS, strict=True):
            if not torch.equal(self._tokens.setdefault(name, tokens), tokens):
                self.tube.violation(f"{HOST.get()} launches {name} with other tokens than that name had before")
        return batch

    def _computed_one(self, executor: StageExecutor, entered: Any, microbatch: Any, *_: Any) -> None:
        if microbatch.id in entered.counted:
            me = executor._work._agreement.core.membership.me
            member = executor._work._agreement.core.members.get(executor._trainer.spec.index)
            number = entered.number if member is None else member.work.decided_in(entered.number)
            place = executor._trainer.spec.index, Name(me, number)
            self.records.computed.setdefault(microbatch.id, set()).add(place)

    async def _held(self, call: Any, driver: RoundDriver, member: Member, number: int) -> None:
        """A contribution is of as many samples as the gradient that comes with its name, and of the same."""
        own, known = member.work.own(number), driver.gradients.names
        await call(member, number)
        if own is None or own.name in known or own.name not in driver.gradients.names:
            return
        if has_gone_back(member, number):
            return
        self._note_work(member.stage, own, held_in(driver, number), driver)

    def _note_work(self, stage: int, own: Contribution, ids: tuple[bytes, ...], driver: RoundDriver) -> None:
        means, _ = driver.gradients.get(own.name)
        self.records.works[stage, own] = Work(ids, tuple(mean.clone() for mean in means))
        held = self.records.size(ids)
        if held != own.weight:
            self.tube.violation(f"{HOST.get()} brings {own.weight} samples to {own.name.round}, and holds {held}")
        named = {
            SampleId(item.pass_number, item.slice_index, window)
            for item in own.samples
            for window in range(item.start, item.end)
        }
        names = list(self.records.names(ids))
        if stage == 0 and (len(set(names)) < len(names) or not set(names) <= named):
            self.tube.violation(f"{HOST.get()} brings samples twice to {own.name.round}, or some that it does not name")

    def _taken(self, giving: Giving, arrived: Any) -> None:
        key = giving._stage, arrived.given.body.contribution.name
        self.records.takers.setdefault(key, set()).add(HOST.get().name)

    def _lost(self, reports: RoundReports, lost: list[Contribution]) -> None:
        self.records.told_lost |= {(reports._stage, each.name) for each in lost}
        self.records.samples_lost[HOST.get().name] += sum(each.weight for each in lost)

    def _described(self, peer: Peer) -> None:
        """A peer that says it serves has weights."""
        replica = peer._replica
        if peer._lifecycle.state is PeerState.SERVING and replica is not None and replica.step.phase is Phase.EMPTY:
            self.tube.violation(f"{HOST.get()} announces that it serves stage {replica.stage}, and has no weights")

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

    async def _moved(self, call: Any, mover: Mover, replica: Any, stage: int) -> bool:
        moved = await call(replica, stage)
        if moved:
            self.records.moves_of[HOST.get().name] += 1
            self.tube.world.note("move", HOST.get(), replica.stage, stage)
            self.tube.check_not_emptied(HOST.get(), replica.stage, LOOKED_S)
        return bool(moved)

    # --- entries

    def _appending(self, member: Member, committed: Committed) -> None:
        """A stage has one history, and what an entry of stage 0 holds has not counted before."""
        entry, stage = committed.entry, member.stage
        self._note_restart(stage, member.log.restart)
        if (stage, entry.hash) not in self.records.entries:
            self.records.entries[stage, entry.hash] = entry
            self.records.restart_of[stage, entry.hash] = member.log.restart
            epoch = HOST.get().agreement.core.membership.epoch_of(entry.cut.epoch)
            self.records.roster_sizes[stage, entry.hash] = len(epoch.roster(stage)) if epoch is not None else 0
            self.records.word_of[stage, entry.hash] = epoch.word if epoch is not None else ""
            self.records.newest_word = self.records.newest_word or self.records.word_of[stage, entry.hash]
            self._check_entry(stage, entry)
            self.tube.committed(stage, entry.cut.round)
        for host in self.tube.peers():
            other = members_of(host).get(stage)
            if other is None or other is member or other.reign is None or host.epoch_id != HOST.get().epoch_id:
                continue
            head = other.log.head_before(entry.cut.round + 1)
            if head not in (None, entry.hash) and other.reign == member.reign:
                self.tube.violation(f"{HOST.get()} and {host} have two histories of stage {stage} in {entry.cut.round}")

    def _check_entry(self, stage: int, entry: Entry) -> None:
        if unknown := [each.name for each in entry.cut.brings if (stage, each) not in self.records.works]:
            self.tube.violation(
                f"the entry of round {entry.cut.round} of stage {stage} holds {unknown}, which nobody has"
            )
            return
        ids = self.records.ids_of(stage, entry)
        self.records.doubled += len(ids) - len(set(ids))
        if stage == 0 and self.records.ledger(entry.cut.parent, self.num_slices).repeats(entry.cut.samples):
            self.tube.violation(f"the entry of round {entry.cut.round} holds samples that have counted before")

    def _note_restart(self, stage: int, restart: Restart) -> None:
        base = stage, base_of(stage, restart)
        if base not in self.records.bases:
            self.records.bases[base] = restart
            self.records.rewinds += stage == 0 and restart.first_round > 0

    # --- weights

    async def _applied(self, call: Any, driver: RoundDriver) -> None:
        member = driver.member
        committed = driver._due(member) if member is not None else None
        await call()
        if member is None or committed is None or driver._weights[1] != committed.entry.hash:
            return
        place = member.stage, committed.entry.hash
        is_new = place not in self.records.weights
        self._check_weights(place, trainer_of(driver._workplace), member.log.restart)
        if is_new:
            self._check_update(place, committed.entry, member.log.restart)

    def _opened(self, workplace: StageWorkplace, number: int, standing: SeatWeights) -> None:
        """A round begins with the weights and the ledger of the entry that it says."""
        stage, restart = workplace._core.stage, standing.restart
        self._note_restart(stage, restart)
        place = stage, standing.entry
        if place not in self.records.weights and place not in self.records.bases:
            self.tube.violation(f"{HOST.get()} begins round {number} with an entry that nobody has come to")
            return
        self._check_weights(place, workplace._trainer, restart)
        self.records.opened[HOST.get().name, stage] += 1
        if stage == 0:
            expected = self.records.ledger(standing.entry, self.num_slices)
            if standing.ledger is None or standing.ledger.to_tuple() != expected.to_tuple():
                self.tube.violation(f"{HOST.get()} begins round {number} with a ledger that is not that of the entries")

    def _check_weights(self, place: Place, trainer: StageTrainer, restart: Restart) -> None:
        state = trainer.state()
        known = self.records.weights.get(place)
        if known is None:
            self.records.weights[place] = state
            if place in self.records.bases:
                self._check_first(place, state)
        elif not same_weights(self.shared(known), self.shared(state)):
            self.tube.violation(f"{HOST.get()} holds other weights than its stage-mates at {self._said(place)}")
        if trainer.optimizer_step != (step := self._step_from(place, restart)):
            self.tube.violation(f"{HOST.get()} is at step {trainer.optimizer_step}, not {step}: {self._said(place)}")

    def _said(self, place: Place) -> str:
        entry = self.records.entries.get(place)
        return f"the beginning of stage {place[0]}" if entry is None else f"round {entry.cut.round} of stage {place[0]}"

    def step_at(self, place: Place) -> int:
        """The optimizer step of a stage's weights."""
        restart = self.records.restart_of.get(place) or self.records.bases[place]
        return self._step_from(place, restart)

    def _step_from(self, place: Place, restart: Restart) -> int:
        entry = self.records.entries.get(place)
        return restart.optimizer_step + (0 if entry is None else entry.cut.round + 1 - restart.first_round)

    def _check_first(self, place: Place, state: State) -> None:
        """Where the run goes back, it begins with the weights of the entry that is named."""
        before_it = self.records.parent(place)
        if before_it is None:
            trainer = self._reference[place[0]]
            trainer.restart()
            if not same_weights(self.shared(trainer.state()), self.shared(state)):
                self.tube.violation(
                    f"{HOST.get()} begins with other weights than the initial ones: {self._said(place)}"
                )
        elif before_it not in self.records.weights:
            self.tube.violation(f"the run goes back to an entry of stage {place[0]} that nobody has come to")
        elif not same_weights(self.shared(self.records.weights[before_it]), self.shared(state)):
            self.tube.violation(f"the run goes back to weights that stage {place[0]} never had")

    def _check_update(self, place: Place, entry: Entry, restart: Restart) -> None:
        """An update is the one that a single process makes of the same microbatches, from the same weights."""
        bases = [(stage, head) for stage, head in enumerate(entry.cut.base)]
        if unknown := [base for base in bases if base not in self.records.weights]:
            self.tube.violation(f"{self._said(place)} is computed from heads that nobody has come to: {unknown}")
            return
        self._compare(place, entry, restart, self._gradients(bases, self.records.ids_of(place[0], entry))[place[0]])

    def _zeros(self, stage: int) -> list[torch.Tensor]:
        return [torch.zeros(parameter.shape) for parameter in self._reference[stage].trained.values()]

    def _gradients(self, bases: Sequence[Place], ids: tuple[bytes, ...]) -> list[list[torch.Tensor]]:
        """The mean gradients of each stage that one process has of microbatches, with these weights.

        Kept for a while: all stages have the same microbatches in a round, as long as none fails.
        """
        key = (*bases, ids)
        if key not in self._computed:
            for trainer, base in zip(self._reference, bases, strict=True):
                trainer.load_state(self.records.weights[base], 0)
            if ids:
                train(self._reference, torch.cat([self.records.microbatches[each][0] for each in ids]))
            self._computed[key] = [trainer.mean_gradients() for trainer in self._reference]
            if len(self._computed) > MOST_COMPUTED:
                del self._computed[next(iter(self._computed))]
        return self._computed[key]

    def _compare(self, place: Place, entry: Entry, restart: Restart, gradients: Sequence[torch.Tensor]) -> None:
        """An update is the one that a process makes of these gradients, with the state from before it."""
        trainer, before_it = self._reference[place[0]], (place[0], entry.cut.parent)
        trainer.load_state(self.records.weights[before_it], self._step_from(place, restart) - 1)
        trainer.decay = decay_in(self.records.word_of[place])
        trainer.apply(gradients)
        self.records.checked += 1
        for name, value in self.shared(trainer.state()).items():
            error = float((value - self.records.weights[place][name]).abs().max()) if value.numel() else 0.0
            if not error <= TOLERANCE:
                num_ids = len(self.records.ids_of(place[0], entry))
                text = f"the update of {self._said(place)} ({num_ids} microbatches) is not that of one process"
                self.tube.violation(f"{text}: {name} differs by {error:.2g}")
                return

    # --- snapshots and checkpoints

    async def _kept(self, call: Any, store: NamedSnapshots, named: NamedState) -> None:
        """A snapshot holds the weights and the ledger of the entry before the one that names it."""
        await call(named)
        entry, state, stage = named.committed.entry, named.state, named.name.stage
        if entry.cut.parent != state.history_hash or named.name.optimizer_step != state.optimizer_step:
            self.tube.violation(f"{HOST.get()} keeps a snapshot of another entry than its name says")
        self._check_kept(stage, state, f"{HOST.get()} keeps a snapshot")
        if stage == 0 and state.ledger:
            expected = self.records.ledger(state.history_hash, self.num_slices)
            if read_ledger(state.ledger, self.num_slices).to_tuple() != expected.to_tuple():
                self.tube.violation(f"{HOST.get()} keeps a snapshot with a ledger that is not that of the entries")

    def _check_kept(self, stage: int, state: StageState, what: str) -> None:
        place = stage, state.history_hash
        known = self.records.weights.get(place)
        if known is None or not same_weights(self.shared(known), self.shared(dict(state.tensors))):
            self.tube.violation(
                f"{what} of round {state.round_number} with weights that stage {stage} did not have then"
            )
        elif state.optimizer_step != self.step_at(place):
            self.tube.violation(f"{what} of step {state.optimizer_step}, which is of {self.step_at(place)}")

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
            self._check_kept(stage, saved, "a checkpoint")

    # --- at the end

    def check_shares(self) -> None:
        """The entries of a later stage hold stage 0's microbatches, but for those that peers have reported lost."""
        if 0 not in self.ends:
            return
        first = {entry.cut.round: entry for entry in self.records.line(self.ends[0])}
        for stage, end in sorted(self.ends.items()):
            for later in self.records.line(end) if stage else ():
                if (entry := first.get(later.cut.round)) is not None:
                    self._check_share(stage, entry, later)

    def _check_share(self, stage: int, first: Entry, later: Entry) -> None:
        held, names = set(self.records.ids_of(stage, later)), {each.name for each in later.cut.brings}
        for each in sorted(set(self.records.ids_of(0, first)) - held):
            seats = [name for of_stage, name in self.records.computed.get(each, ()) if of_stage == stage]
            if not seats:
                self.tube.violation(f"no peer of stage {stage} has computed a microbatch of round {first.cut.round}")
            elif not any(self._is_excused(stage, name, is_held=name in names) for name in seats):
                text = f"round {later.cut.round} of stage {stage} lacks {self.records.size([each])} samples"
                self.tube.violation(f"{text} of {seats}, and nobody has reported them lost")

    def _is_excused(self, stage: int, name: Name, *, is_held: bool) -> bool:
        """Whether work was reported lost, or will be at the next step, or nobody is left who could."""
        members = [members_of(host).get(stage) for host in self.tube.world.alive()]
        if (stage, name) in self.records.told_lost or any(
            name == each.name for member in members if member is not None for each in member.work.lost
        ):
            return True
        alive = {host.name for host in self.tube.world.alive()}
        is_there = any(host.seat == name.seat for host in self.tube.world.alive())
        takers = self.records.takers.get((stage, name), set())
        return not is_held and not (takers <= alive if takers else is_there)


def members_of(host: Host) -> dict[int, Member]:
    """A peer's parts in the rounds of the stages in which it has a place."""
    return {} if host.agreement is None else host.agreement.core.members


def rounds_of(driver: RoundDriver) -> Any:
    """The rounds of the replica that a driver is of."""
    workplace: Any = driver._workplace
    return workplace._core.rounds


def has_gone_back(member: Member, number: int) -> bool:
    """Whether the run has gone back from a round whose work is held: nobody takes that any more."""
    return number < member.log.restart.first_round


def held_in(driver: RoundDriver, number: int) -> tuple[bytes, ...]:
    """The microbatches of a round that a replica's accumulator held."""
    current = rounds_of(driver).current
    return tuple(sorted(current.counted)) if current.number == number else ()


def trainer_of(workplace: Any) -> StageTrainer:
    """The trainer of a workplace."""
    trainer: StageTrainer = workplace._trainer
    return trainer


def train(stages: list[StageTrainer], tokens_BS: torch.Tensor) -> None:
    """Forward and backward through all stages, in one process."""
    passes, hidden = [], None
    for trainer in stages:
        passes.append(trainer.forward(tokens_BS, hidden))
        hidden = passes[-1].output
    gradient = None
    for trainer, done in zip(reversed(stages), reversed(passes), strict=True):
        gradient = trainer.backward(done, gradient)

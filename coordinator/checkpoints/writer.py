"""Checkpoints of a live run, fetched from its peers every so many steps. giver.py gives them back.

A checkpoint is made of the snapshots that peers keep anyway, all of the same optimizer step: no peer waits for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio

from coordinator.checkpoints.folder import Checkpoint
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.store import KEPT_CHECKPOINTS, CheckpointStore, find_checkpoint
from coordinator.run.coordinator_options import CheckpointOptions
from coordinator.watch.promises import Promises
from coordinator.watch.run_file import CHECKPOINTS
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import who_is
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, InvalidMessage, NoRoom, SwarmError, UserError, forget_frames
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.messages import StateIndexCall

log = logging.getLogger(__name__)

# Between tries to get a snapshot that its peers are still writing.
SNAPSHOT_RETRY_S = 1.0
# Pauses between tries to find room for a checkpoint, and to write it: a network disk may fail for a moment, and the DHT
# may not show for a moment which coordinator acts.
SAVE_PAUSES_S = (1.0, 4.0, 10.0)


@dataclass(frozen=True)
class CheckpointPlan:
    """Which checkpoints a run gets, and which it goes on from.

    Attributes:
        store: where they are written; None for nowhere
        every: optimizer steps between them
    """

    store: CheckpointStore | None
    every: int = 0
    resume: Checkpoint | None = None


NO_CHECKPOINTS = CheckpointPlan(None)

# Settings on which it depends what a stage's state holds.
KEPT_STATES: dict[str, Callable[[RunManifest], str]] = {
    "averaging.mode": lambda manifest: manifest.averaging.mode,
    "optimizer.name": lambda manifest: manifest.optimizer.name,
}


def plan_checkpoints(manifest: RunManifest, output: Path, options: CheckpointOptions) -> CheckpointPlan:
    """Check the checkpoints that a user asked for.

    Raises:
        UserError: peers keep no snapshots at these steps, nothing is written where an option says where or how many,
            or there is nothing to resume from
    """
    checkpoint = find_checkpoint(options.resume) if options.resume is not None else None
    if checkpoint is not None:
        _check_fits(checkpoint, manifest)
    snapshot_every = manifest.recovery.snapshot_every
    every = snapshot_every if options.checkpoint_every is None else options.checkpoint_every
    if not every:
        _check_nothing_to_write(options)
        return CheckpointPlan(None, resume=checkpoint)
    if not snapshot_every or every % snapshot_every:
        raise UserError(
            f"--checkpoint-every {every}: checkpoints are made of the snapshots that peers keep every "
            f"recovery.snapshot_every={snapshot_every} optimizer steps; name a multiple of it, or change it"
        )
    url = options.checkpoints or str(output / CHECKPOINTS)
    return CheckpointPlan(CheckpointStore(url, options.keep_checkpoints or KEPT_CHECKPOINTS), every, checkpoint)


def _check_nothing_to_write(options: CheckpointOptions) -> None:
    reason = "no checkpoint is written with --checkpoint-every 0: give another number"
    if options.checkpoint_every is None:
        reason = "checkpoints are made of peers' snapshots, and recovery.snapshot_every=0 has them keep none: change it"
    given = {"--checkpoints": options.checkpoints, "--keep-checkpoints": options.keep_checkpoints}
    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} {value}: {reason}, or leave {option} out")


def _check_fits(checkpoint: Checkpoint, manifest: RunManifest) -> None:
    for section in ("model", "stages"):
        mine, its = getattr(manifest, section), getattr(checkpoint.manifest, section)
        if section == "stages":
            mine, its = (part.model_copy(update={"peers_to_start": 1}) for part in (mine, its))
        if mine != its:
            raise UserError(
                f"--resume {checkpoint.path}: its run has another {section} section than this configuration; resume "
                f"with the configuration that it was made with"
            )
    for setting, of in KEPT_STATES.items():
        chosen, its = of(manifest), of(checkpoint.manifest)
        if chosen != its:
            raise UserError(
                f"--resume {checkpoint.path}: its run has {setting} {its} and this configuration {chosen}; peers keep "
                f"other states then: resume with --set {setting}={its}"
            )
    momentum = checkpoint.manifest.optimizer.momentum
    if manifest.optimizer.name == "sgd" and momentum and not manifest.optimizer.momentum:
        raise UserError(
            f"--resume {checkpoint.path}: its states hold a momentum, and peers keep none with optimizer.momentum 0: "
            f"resume with --set optimizer.momentum={momentum}"
        )
    if checkpoint.optimizer_step >= manifest.training.steps:
        raise UserError(
            f"--resume {checkpoint.path}: it has {checkpoint.optimizer_step} optimizer steps, and training.steps is "
            f"{manifest.training.steps}: raise it with --set training.steps=N"
        )


@dataclass(frozen=True, kw_only=True)
class Duty:
    """Which checkpoints a coordinator has to write, and whom it tells of them.

    Attributes:
        acts: whether it is the one that acts
        is_led_by_other: whether another one is known to act, whose duty the checkpoints are
        begun_at: the optimizer step that the run had come to when this coordinator began
        tell: told in a sentence of each checkpoint that is saved, or not
        promises: told of each that should be there, and why it is not
    """

    acts: Callable[[], bool] = lambda: True
    is_led_by_other: Callable[[], bool] = lambda: False
    begun_at: int = 0
    tell: Callable[[str], None] = lambda _: None
    promises: Promises = field(default_factory=Promises)


class Names(Protocol):
    """Tells by their names which states are of the run: each snapshot carries the entry that names it."""

    async def check(self, stage: int, state: StageState) -> None:
        """Check a snapshot. Raises InvalidMessage if the stage has not committed it."""
        ...

    async def check_together(self, states: Sequence[StageState]) -> None:
        """Check that snapshots of all stages are of one part of the run. Raises InvalidMessage."""
        ...

    async def saved(self, states: Sequence[StageState]) -> tuple[int, int]:
        """Take note that a checkpoint of these states is saved. Returns the samples of their update, and its weight."""
        ...


class CheckpointWriter:
    """Writes a checkpoint each time that the run has made `plan.every` more optimizer steps.

    Args:
        watch: tells how many optimizer steps the run has made, and in which rounds
        directory: knows the run's peers
        threads: write the files
        rng: chooses among the peers of a stage
        duty: of this coordinator
        names: tell which states are of the run
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        plan: CheckpointPlan,
        *,
        watch: RunWatch,
        directory: Directory,
        threads: Threads,
        rng: random.Random,
        duty: Duty,
        names: Names,
    ):
        assert plan.store is not None
        self._resolved = resolved
        self._manifest = resolved.manifest
        self._store = plan.store
        self._every = plan.every
        self._watch = watch
        self._directory = directory
        self._duty = duty
        self._names = names
        self._acts = duty.acts
        self._receiver = StateReceiver(resolved, threads, plan.store.local_folder)
        self._threads = threads
        self._rng = rng
        self._tell = duty.tell
        self._promises = duty.promises
        self._saving = anyio.Lock()
        # Optimizer steps, and the rounds that began with them, whose checkpoint this writer has saved or tried to save.
        self._done: set[tuple[int, int | None]] = set()
        self._inherited_round = -1
        # Up to here, others had to save checkpoints; and the optimizer step that the run had come to at the last look.
        self._inherited_step, self._seen_step = duty.begun_at, duty.begun_at

    async def run(self, transport: Transport) -> None:
        """Write checkpoints for ever."""
        has_acted = False
        while True:
            acts = self._watch.optimizer_step > 0 and self._acts()
            if acts and not has_acted:
                # An earlier process or another coordinator had to save the checkpoints up to here.
                self._inherited_round = self._last_due()[1] or -1
            has_acted = acts
            self._note_due()
            if (key := self._next_due()) is not None:
                self._done.add(key)
                async with self._saving:
                    await self._save_unless_inherited(transport, *key)
                if self._watch.created_at_round(key[0]) != key[1]:
                    self._done.discard(key)  # due once more if the run goes on with these weights after all
            await anyio.sleep(SNAPSHOT_RETRY_S)

    async def finish(self) -> None:
        """Wait until no checkpoint is being written or due."""
        self._note_due()
        while self._next_due() is not None:  # noqa: ASYNC110 (`run` writes it at its next look)
            await anyio.sleep(SNAPSHOT_RETRY_S)
        async with self._saving:
            pass

    def _note_due(self) -> None:
        """Promise the checkpoints of the steps since the last look; some may have gone by while one was written."""
        seen, self._seen_step = self._seen_step, self._watch.optimizer_step
        if self._duty.is_led_by_other():
            self._inherited_step = max(self._inherited_step, self._seen_step)
        if self._seen_step < seen:
            self._promises.went_back(self._seen_step)
        for due in range((seen // self._every + 1) * self._every, self._seen_step + 1, self._every):
            if self._watch.created_at_round(due) is not None:
                self._wait(due, "the run makes steps faster than this machine writes checkpoints")

    def _wait(self, optimizer_step: int, reason: object) -> None:
        if optimizer_step > self._inherited_step:
            self._promises.checkpoint_due(optimizer_step, self._why(reason))

    def _why(self, reason: object) -> str:
        """Why a checkpoint is not there: the word of a peer that cannot keep snapshots, of which they are made."""
        without = [peer for peer in self._directory.view.peers if peer.trouble is Trouble.NO_SNAPSHOTS]
        return f"{who_is(without[0])} says: {without[0].note}" if without else str(reason)

    def _last_due(self) -> tuple[int, int | None]:
        """The last optimizer step that a checkpoint is written of; and the round that began with it, if it is known."""
        due = self._watch.optimizer_step // self._every * self._every
        return due, self._watch.created_at_round(due)

    def _next_due(self) -> tuple[int, int | None] | None:
        """The step of the checkpoint to write now, and its round: peers keep the snapshot before the newest as well."""
        due, created_at_round = self._last_due()
        before = due - self._every
        for step, round_number in ((before, self._watch.created_at_round(before)), (due, created_at_round)):
            is_kept = step == due or (self._inherited_step < step and self._may_be_kept(step))
            # The round is not known of a step that was due before this process looked, or long ago.
            is_known = step > 0 and round_number is not None
            if is_kept and is_known and (step, round_number) not in self._done and self._acts():
                return step, round_number
        return None

    def _may_be_kept(self, optimizer_step: int) -> bool:
        """Whether peers may still keep the snapshot of a step: they keep their last two."""
        return self._watch.optimizer_step < optimizer_step + 2 * self._manifest.recovery.snapshot_every

    def _is_inherited(self, created_at_round: int | None) -> bool:
        return created_at_round is not None and created_at_round <= self._inherited_round

    async def _save_unless_inherited(
        self, transport: Transport, optimizer_step: int, created_at_round: int | None
    ) -> None:
        """Save a checkpoint that is due, if no earlier process and no other coordinator has put it into the store."""
        if self._is_inherited(created_at_round) and await self._is_saved(optimizer_step, created_at_round):
            self._watch.observe_checkpoint(optimizer_step)
            self._promises.checkpoint_saved(optimizer_step)
        else:
            await self._save(transport, optimizer_step)

    async def _is_saved(self, optimizer_step: int, created_at_round: int | None) -> bool:
        def fits(step: int, round_number: int) -> bool:
            return (step, round_number) == (optimizer_step, created_at_round)

        try:
            found = await self._threads.run(self._store.newest_that, fits, self._manifest, abandon_on_cancel=True)
        except UserError as error:
            log.warning("checkpoints_not_seen reason=%s", error)
            return False
        return found is not None

    async def _save(self, transport: Transport, optimizer_step: int) -> None:
        stages = list(range(self._manifest.stages.count))
        told, pauses = "", iter(SAVE_PAUSES_S)  # why it waits
        is_newest = optimizer_step == self._last_due()[0]
        while self._may_be_kept(optimizer_step):
            try:
                if not self._acts():
                    raise CallError("another coordinator may act")
                # It is another round after the run has gone back and come to this step again.
                created_at_round = self._watch.created_at_round(optimizer_step)
                if created_at_round is None:
                    # Checkpoints of the steps up to this one become due again: none must wait for it.
                    has_gone_back = self._watch.optimizer_step < optimizer_step
                    why = "the run has gone back" if has_gone_back else "this coordinator was not there then"
                    log.info("checkpoint_left_out optimizer_step=%d reason=%s", optimizer_step, why)
                    self._promises.checkpoint_saved(optimizer_step)  # nobody wants it
                    return
                weights = Timeline(created_at_round, optimizer_step, created_at_round)
                states = await self._fetch_all(transport, stages, weights)
                await self._write(weights, states)
                if not self._is_last(optimizer_step):
                    self._watch.observe_work(*await self._names.saved(states))
                del states
                self._done.add((optimizer_step, created_at_round))
                self._tell(f"The checkpoint of optimizer step {optimizer_step} is saved.")
                self._promises.checkpoint_saved(optimizer_step)
                self._watch.observe_checkpoint(optimizer_step)
                return
            except CallError as error:
                if str(error) != told:
                    log.info("checkpoint_waits optimizer_step=%d reason=%s", optimizer_step, error)
                told = str(error)
                forget_frames(error)
                self._wait(optimizer_step, told)
                if not is_newest:  # the newest one must not wait
                    break
                pause_s = next(pauses, None) if isinstance(error, NoRoom) else SNAPSHOT_RETRY_S
                if pause_s is None:
                    self._failed(optimizer_step, error)
                    return
            except UserError as error:
                forget_frames(error)
                self._failed(optimizer_step, error)
                return
            if optimizer_step < self._watch.last_step <= self._watch.optimizer_step:
                break  # the run stands still after its last step alone
            await anyio.sleep(pause_s)
        if optimizer_step <= self._inherited_step or not self._acts():
            self._promises.checkpoint_saved(optimizer_step)
            text = "checkpoint_left_out optimizer_step=%d reason=another coordinator or process had to save it"
            log.info(text, optimizer_step)
            return
        text = "checkpoint_missed optimizer_step=%d reason=the run went on before all stages had given theirs: "
        text += "if it takes this machine long to fetch them, set recovery.snapshot_every higher in the next run"
        log.error(text, optimizer_step)
        missed = f"the run went on before all stages had given theirs; {told}" if told else "the run went on too soon"
        self._promises.checkpoint_failed(optimizer_step, self._why(missed))
        self._tell(f"The checkpoint of optimizer step {optimizer_step} was missed: the run went on too soon.")

    def _failed(self, optimizer_step: int, error: SwarmError) -> None:
        log.error("checkpoint_failed optimizer_step=%d reason=%s", optimizer_step, error)
        if optimizer_step > self._inherited_step:
            self._promises.checkpoint_failed(optimizer_step, error)
        self._tell(f"The checkpoint of optimizer step {optimizer_step} could not be saved: {error}.")

    async def _fetch_all(self, transport: Transport, stages: list[int], weights: Timeline) -> list[StageState]:
        """The states of all stages.

        Args:
            stages: in the order to ask for them. One that is not there is asked for first the next time, so that others
                are not downloaded in vain. Those that have come are not kept until then, since the run may go on with
                another part's of the same round
        """
        states: dict[int, StageState] = {}
        for stage in list(stages):
            stages.remove(stage)
            stages.insert(0, stage)
            states[stage] = await self._fetch(transport, stage, weights)
        found = [states[stage] for stage in sorted(states)]
        if not self._is_last(weights.first_optimizer_step):
            await self._names.check_together(found)
        return found

    def _is_last(self, optimizer_step: int) -> bool:
        """Whether no round begins with the weights of a step, so that no entry names them."""
        return optimizer_step >= self._watch.last_step

    async def _write(self, weights: Timeline, states: Sequence[StageState]) -> None:
        """Put the states of all stages into the store.

        Raises:
            UserError: it fails time and again
            CallError: the run has gone back meanwhile, or another coordinator may act, time and again
        """
        optimizer_step = weights.first_optimizer_step
        for pause_s in (*SAVE_PAUSES_S, None):
            # To fetch the states has taken minutes, perhaps, and so do pauses.
            if self._watch.created_at_round(optimizer_step) != weights.created_at_round:
                raise CallError("the run has gone back")
            try:
                # The DHT may only be slow to show this coordinator that it acts: it keeps the states for a while.
                if not self._acts():
                    raise CallError("another coordinator may act")
                # A save that is cut off makes no checkpoint, and must not hold up the run's end.
                await self._threads.run(
                    self._store.save, optimizer_step, self._manifest, states, abandon_on_cancel=True
                )
                return
            except (CallError, UserError) as error:
                forget_frames(error)
                if pause_s is None:
                    raise
                text = "checkpoint_not_written optimizer_step=%d tries_again_in_s=%.0f reason=%s"
                log.warning(text, optimizer_step, pause_s, error)
                await anyio.sleep(pause_s)

    async def _fetch(self, transport: Transport, stage: int, weights: Timeline) -> StageState:
        view = self._directory.view
        # Peers of the stage first; peers of other stages may keep its state, too.
        peers = [*view.serving(stage), *(peer for peer in view.peers if peer.stage != stage)]
        donors = [peer.peer_id for peer in peers]
        # The weights of the last step, which no entry names, are given as those of a replica.
        is_named = not self._is_last(weights.first_optimizer_step)
        call = StateIndexCall(
            manifest=self._resolved.hash,
            of_stage=stage,
            min_round=weights.created_at_round,
            optimizer_step=weights.first_optimizer_step if is_named else None,
        )
        optimizer_step, max_bytes = weights.first_optimizer_step, max_state_bytes(self._resolved, stage)
        room = self._receiver.of_stage(stage)

        async def take(state: StageState) -> None:
            await room.check(state)
            if state.round_number != weights.created_at_round:
                raise InvalidMessage(f"a state of round {state.round_number}; wanted {weights.created_at_round}")
            if is_named:
                await self._names.check(stage, state)

        return await fetch_state(
            transport,
            donors,
            call,
            max_bytes=max_bytes,
            optimizer_step=optimizer_step,
            rng=self._rng,
            take=take,
            room=room,
            are_holders=is_named,
        )

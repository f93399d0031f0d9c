"""A coordinator's part in what its run agrees on: epochs, and the checkpoints that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from coordinator.checkpoints.folder import Checkpoint, Fits
from coordinator.checkpoints.giver import CheckpointGiver, Offered
from coordinator.checkpoints.run_names import RunNames
from coordinator.run.agreeing import Agreeing, FindOthers, KeyContext, Start
from coordinator.run.context import CoordinatorContext
from coordinator.run.run_options import RunOptions
from coordinator.run.shared_base import base_giver
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.decay import Decay, decay_in, last_step_of
from swarm_peer.policy.run_progress import MAX_ROUNDS_AHEAD
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import Epoch, Restart
from swarm_peer.runtime.network.agreement import rules_of
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.electorate import Electorate
from swarm_peer.runtime.network.probing import ProbeGiver
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.snapshots import SnapshotTaker
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A coordinator's surroundings, as they are before it knows its run's epochs.

    Attributes:
        scratch: a folder for the states that are given away
        find_others: finds those who may know the run's epochs
    """

    resolved: ResolvedManifest
    dht: SwarmDHT
    run_key: Identity
    context: CoordinatorContext
    options: RunOptions
    scratch: Path
    find_others: FindOthers


class AgreedRun:
    """This coordinator's part in its run. Belongs to the event loop's thread. Made by `open`.

    Attributes:
        dispatcher: answers the calls of others
        names: tell which states of the run may become checkpoints
    """

    def __init__(self, *, around: Surroundings, giver: CheckpointGiver, agreeing: Agreeing, taker: SnapshotTaker):
        manifest = around.resolved.manifest
        self._rules = rules_of(manifest)
        self._lag = manifest.averaging.rounds_ahead
        self._last_step = manifest.training.steps
        self._options = around.options
        self._giver = giver
        self._agreeing = agreeing
        self._clock = around.context.clock
        self._electorate = Electorate(around.dht.identity.peer_id)
        self.names = RunNames(
            taker=taker, giver=giver, statements=agreeing.agreement.statements, threads=around.context.threads
        )
        base = base_giver(around.resolved, around.options.base, around.context.threads, around.options.cache_dir)
        probes = ProbeGiver(around.context.clock)
        calls = giver.snapshots.calls | agreeing.agreement.calls | base.calls | probes.calls
        self.dispatcher = CallDispatcher(manifest_hash=around.resolved.hash, calls=calls)
        giver.membership = agreeing.membership

    @classmethod
    async def open(
        cls, around: Surroundings, transport: Transport, *, is_under_way: bool, last_round: int
    ) -> AgreedRun:
        """Find the run's epochs or begin them, from a checkpoint where the run is resumed.

        Args:
            is_under_way: somebody has begun the run
            last_round: that the run has made, as far as its folder tells; -1 for none

        Raises:
            UserError: the file of epochs cannot be read, or there is no room for the checkpoint's states
        """
        context = KeyContext.of(around.resolved, around.dht, around.run_key, around.context)
        giver = CheckpointGiver(
            manifest=around.resolved.manifest,
            context=around.context,
            statements=Statements(context.run_id, context.identity),
            folder=around.scratch,
        )
        resume = None
        if (checkpoint := around.options.plan.resume) is not None:
            after_round = max(checkpoint.round_number, last_round)
            entries = await giver.give(checkpoint)
            resume = rules_of(around.resolved.manifest).restart(after_round, checkpoint.optimizer_step, entries)
        has_trained = last_round >= 0
        agreeing = await Agreeing.open(
            context=context,
            transport=transport,
            output=around.options.output,
            find_others=around.find_others,
            start=Start(is_under_way or has_trained or around.options.standby, has_trained, resume),
        )
        taker = SnapshotTaker(
            context=context,
            threads=context.threads,
            transport=transport,
            agreement=agreeing.agreement,
            snapshots=giver.snapshots,
            holders=tuple,
        )
        return cls(around=around, giver=giver, agreeing=agreeing, taker=taker)

    @property
    def timeline(self) -> Timeline:
        """Where the run was begun or resumed."""
        restart = self._agreeing.beginning
        return Timeline(restart.first_round, restart.optimizer_step, restart.first_round)

    @property
    def begun_s(self) -> int:
        """Unix seconds at which that was, roughly."""
        return self._agreeing.begun_s

    def waits_for(self, view: SwarmView) -> str:
        """For whom of those who vote on its epochs the run waits; empty if for nobody. To be asked again and again.

        Args:
            view: the run's peers
        """
        membership, now_s = self._agreeing.membership, self._clock.monotonic_s()
        return self._electorate.look(membership.epoch, view, now_s, lacks_voters=membership.lacks_voters)

    async def run(self, fits: Fits, reached: Callable[[], tuple[int, int]]) -> None:
        """Take part in agreement, and give checkpoints where they are wanted, until cancelled.

        Args:
            fits: whether a checkpoint is of the run, and not of a part that was given up
            reached: the last round that the run has made, and its optimizer step
        """

        def open_round() -> tuple[int, int]:
            last_round, optimizer_step = reached()
            return last_round + 1 + self._lag, optimizer_step

        offered = Offered(store=self._options.plan.store, fits=fits, reached=open_round, output=self._options.output)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._agreeing.run)
            tasks.start_soon(self._giver.run, offered)

    async def resume(self, checkpoint: Checkpoint, known_round: int) -> Timeline:
        """Have the run go back to a checkpoint, by the run key. A decay that it has said stays said.

        Args:
            known_round: the last round that the run has come to, as far as peers have announced it

        Returns:
            the new timeline

        Raises:
            UserError: there is no room for its states
        """
        names = await self._giver.give(checkpoint)
        known_round = max(known_round, checkpoint.round_number)
        # Peers may have come further since, and their snapshots of that time must not seem to be of the new rounds.
        reached = max(known_round + MAX_ROUNDS_AHEAD + self._lag, self._epoch.restart.first_round)
        self._agreeing.go_on_from(self._rules.restart(reached, checkpoint.optimizer_step, names))
        return self.timeline

    @property
    def _epoch(self) -> Epoch:
        return self._agreeing.membership.epoch

    @property
    def restart(self) -> Restart:
        """Where the run has begun, or begun anew, by its newest epoch."""
        return self._epoch.restart

    @property
    def is_settled(self) -> bool:
        """Whether each stage has peers, and those are there who vote: an epoch with a word has nothing else new."""
        has_all = all(self._epoch.roster(stage) for stage in range(self._rules.num_stages))
        return has_all and not self._agreeing.membership.lacks_voters

    def say_decay(self, decay: Decay) -> None:
        """Have the run decay, by the run key."""
        self._agreeing.say(decay.word)

    @property
    def decay(self) -> Decay | None:
        """The decay that the run key has said; None if it has said none, or the run has begun anew without it."""
        return decay_in(self._epoch.word)

    @property
    def last_step(self) -> int:
        """The optimizer step of the run's last weights."""
        return last_step_of(self._last_step, self._epoch.word)

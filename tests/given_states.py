"""What a peer gives away, for tests, and who takes it: one replica's state and updates, and all stages' snapshots."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from contexts import begin_round
from swarm_peer.runtime.state.snapshot_keeper import SnapshotKeeper
from swarm_peer.runtime.state.snapshot_store import SnapshotStore

from coordinator.checkpoints.state_receiver import StateReceiver
from swarm_peer.policy.step_state import StepState
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state.state_server import StateServer


class GivenStates:
    """The state server of one replica, whose rounds are what a test says, and the snapshots of its peer.

    Attributes of the snapshot store can be had from it directly.

    Attributes:
        strangers: callers that take no part in the run
    """

    def __init__(self, context, trainer, device_thread, store=None):
        self.rounds = RoundBook(context.changed)
        self.core = SimpleNamespace(
            stage=trainer.spec.index, trainer=trainer, device_thread=device_thread, rounds=self.rounds
        )
        self.server = StateServer(context=context, core=self.core)
        self.strangers = set()
        self.store = store or SnapshotStore(
            clock=context.clock, threads=context.threads, storage=context.storage, is_member=self.is_member
        )
        self.store.sources = {trainer.spec.index: self.server}

    async def is_member(self, caller):
        return caller not in self.strangers

    def __getattr__(self, name):
        return getattr(self.store, name)

    @property
    def current(self):
        return self.rounds.step

    def enter(self, round_number, history_hash, timeline, ledger):
        """Begin a round with the trainer's weights."""
        begin_round(
            self.rounds,
            round_number,
            history_hash=history_hash,
            timeline=timeline,
            ledger=ledger,
            weights_version=self.core.trainer.weights_version,
        )

    def forget_state(self):
        """Be a replica without weights."""
        self.rounds.step = StepState()

    async def take_snapshot(self, round_number):
        keeper = SimpleNamespace(_state_server=self.server, _snapshots=self.store, _stage=self.core.stage)
        keeper._store = partial(SnapshotKeeper._store, keeper)
        keeper._complain = lambda words: None
        return await SnapshotKeeper.take_snapshot(keeper, round_number)


class Gullible(StateReceiver):
    """Believes whatever state it gets, since tests make states up.

    Attributes:
        num_allocated: states for which it has given room
    """

    num_allocated = 0

    async def templates(self):
        """Tell of states that are large enough for whatever a test gives."""
        return [{"all": torch.empty(2**20, device="meta")}] * self._resolved.num_stages

    async def allocate(self, stage, sizes):
        self.num_allocated += 1
        return await super().allocate(stage, sizes)

    async def check(self, stage, state):
        """Believe it."""

"""What a peer gives away, for tests, and who takes it: one replica's state and updates, and all stages' snapshots."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from contexts import begin_round

from coordinator.checkpoints.state_receiver import StateReceiver
from swarm_peer.policy.step_state import StepState
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.runtime.state.state_server import StateServer


class GivenStates:
    """The state server of one replica, whose rounds are what a test says, and the snapshots of its peer.

    Attributes:
        kept: the averages that its driver keeps, with their entry, by round
        strangers: callers that take no part in the run
    """

    def __init__(self, context, trainer, device_thread):
        self.rounds = RoundBook(context.changed)
        self.core = SimpleNamespace(
            stage=trainer.spec.index, trainer=trainer, device_thread=device_thread, rounds=self.rounds
        )
        self.kept = {}
        self.server = StateServer(context=context, core=self.core, kept=self.kept.get)
        self.strangers = set()
        self.store = NamedSnapshots(
            clock=context.clock,
            threads=context.threads,
            storage=context.storage,
            is_member=self.is_member,
            restart=lambda: BEGINNING,
        )
        self.store.sources[trainer.spec.index] = self.server

    async def is_member(self, caller):
        return caller not in self.strangers

    @property
    def calls(self):
        return self.store.calls

    @property
    def current(self):
        return self.rounds.step

    def enter(self, round_number, history_hash, timeline, ledger, lag=0):
        """Begin a round with the trainer's weights, which have yet to have so many updates of earlier rounds."""
        begin_round(
            self.rounds,
            round_number,
            history_hash=history_hash,
            timeline=timeline,
            ledger=ledger,
            lag=lag,
            weights_version=self.core.trainer.weights_version,
        )

    def forget_state(self):
        """Be a replica without weights."""
        self.rounds.step = StepState()


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

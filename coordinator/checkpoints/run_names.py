"""Which snapshots of a run may become a checkpoint, by the entries that they carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.checkpoints.giver import CheckpointGiver
from coordinator.checkpoints.names import entries_of, names_of
from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ranges import num_windows
from swarm_peer.protocol.log import Committed
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.snapshots import SnapshotTaker
from swarm_peer.wire.agreement import Statements


class SavedWork(NamedTuple):
    """The samples of an update, and their targets where samples say what is learnt, else samples again."""

    samples: int
    weight: int


class RunNames:
    """Checks states for a CheckpointWriter, and has those of each checkpoint offered to peers."""

    def __init__(self, *, taker: SnapshotTaker, giver: CheckpointGiver, statements: Statements, threads: Threads):
        self._taker = taker
        self._giver = giver
        self._statements = statements
        self._threads = threads

    async def check(self, stage: int, state: StageState) -> None:
        """Check a snapshot that somebody gives.

        Raises:
            InvalidMessage: it is not one that the stage has committed
        """
        await self._taker.check(stage, state, is_certified=True)

    async def check_together(self, states: Sequence[StageState]) -> None:
        """Check that snapshots of all stages are of one round, and of one part of the run.

        Raises:
            InvalidMessage: they are not
        """
        if not await self._entries_of(states):
            raise InvalidMessage("the states of the stages do not fit together")

    async def saved(self, states: Sequence[StageState]) -> SavedWork:
        """Offer the states of a checkpoint that was saved just now, should a stage be lost.

        Returns:
            what the update was made of that made these weights
        """
        entries = await self._entries_of(states)
        self._giver.note_saved(names_of(states[0].optimizer_step, entries), states[0].round_number)
        cuts = [each.entry.cut for each in entries[:1]]  # stage 0 alone knows the samples
        weights = (each.weight for cut in cuts for each in cut.brings)
        return SavedWork(sum(num_windows(cut.samples) for cut in cuts), sum(weights))

    async def _entries_of(self, states: Sequence[StageState]) -> list[Committed]:
        entries = [state.entry for state in states]
        return await self._threads.run(entries_of, entries, states[0].round_number, self._statements)

"""Takes over the states and updates that this seat lacks.

A state is believed if an entry of the stage's log names its root, whoever gives it; an update, if an entry names its
digest (docs/protocol.md, 'Coming, moving, going').
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import torch
from torch import Tensor

from swarm_peer.errors import InvalidMessage
from swarm_peer.model.round_strategy import shared_entries
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.step_state import Phase
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Log
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedState
from swarm_peer.runtime.state.roots import digest_of, root_of
from swarm_peer.runtime.state.snapshots import SnapshotTaker
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.ledger_codec import read_ledger
from swarm_peer.wire.messages import StateIndexCall

log = logging.getLogger(__name__)

# Pause between two questions for a longer log.
ASK_S = 1.0
# Relative distance of two states of the same updates. Unlike devices come 3e-3 apart with each microbatch in bf16.
MOST_APART = 0.05


@dataclass(frozen=True, kw_only=True)
class StageMates:
    """The ways in which a seat hears of its stage.

    Attributes:
        donors: ids of those who have a place in it
        newest_log: its log as it is known now, which goes on while a state is downloaded
        ask_for_log: asks for what is newer, and for the root of a coming state
    """

    donors: Callable[[], Sequence[str]]
    newest_log: Callable[[], Log | None]
    ask_for_log: Callable[[], None]


@dataclass(frozen=True)
class Taken:
    """A state that was taken over.

    Attributes:
        weights: the entry that the weights embody now
        updates: the averages of entries after that, by their hashes, where updates are delayed
        state: the last of these entries
        ledger: after that entry, at stage 0
    """

    weights: str
    updates: dict[str, list[Tensor]]
    state: str
    ledger: Ledger | None


class StageSources:
    """Takes over what one seat lacks: see `Sources`. Belongs to the event loop's thread.

    Args:
        snapshots: takes over the one that the run begins anew with
        num_slices: of the data, at stage 0; None at others

    Attributes:
        bytes_per_s: speed of the last download of a state; 0 if there was none
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        transport: Transport,
        trainer: StageTrainer,
        core: ReplicaCore,
        mates: StageMates,
        num_slices: int | None,
        snapshots: SnapshotTaker,
    ):
        self.bytes_per_s = 0.0
        self._context = context
        self._transport = transport
        self._trainer = trainer
        self._core = core
        self._stage = core.stage
        self._mates = mates
        self._num_slices = num_slices
        self._snapshots = snapshots
        self._rng = context.random.stream("states")

    async def update(self, committed: Committed) -> list[Tensor]:
        """The averages of an entry, checked by its digest.

        Raises:
            CallError: nobody gives them
        """
        entry = committed.entry
        call = StateIndexCall(
            manifest=self._context.resolved.hash, of_stage=self._stage, kind="update", min_round=entry.cut.round
        )
        shapes = [parameter.shape for parameter in self._trainer.trained.values()]
        max_bytes = 4 * sum(shape.numel() for shape in shapes)
        found = await fetch_state(self._transport, self._mates.donors(), call, max_bytes=max_bytes, rng=self._rng)
        averages = list(found.tensors.values())
        # The digest covers bytes and not types: read as another type, the same bytes are other averages.
        fits = all(average.dtype == torch.float32 for average in averages)
        if not fits or [average.shape for average in averages] != shapes:
            raise InvalidMessage("an update that does not fit this stage")
        if await self._context.threads.run(digest_of, averages) != entry.digest:
            raise InvalidMessage(f"an update that is not the one of round {entry.cut.round}")
        return averages

    async def state(self) -> Taken:
        """Have the weights become those of a stage-mate, at an entry of the log.

        Raises:
            CallError: nobody gives one that an entry names
        """
        self._mates.ask_for_log()
        with anyio.move_on_after(ASK_S):
            await self._context.changed.wait_for(lambda: self._mates.newest_log() is not None)
        if (known := self._mates.newest_log()) is not None and known.is_empty:
            # No entry names a root yet. The weights that the run has begun with need none.
            return Taken(known.head, {}, known.head, await self.begin(known.restart))
        taken: list[Taken] = []

        async def take(state: StageState) -> None:
            taken[:] = [await self._take(state)]

        await self._fetch(take)
        if self._core.rounds.step.phase is not Phase.EMPTY:
            self._context.metrics.resyncs.labels("left_behind").inc()
        return taken[0]

    async def _fetch(self, take: Callable[[StageState], Awaitable[None]]) -> None:
        call = StateIndexCall(manifest=self._context.resolved.hash, of_stage=self._stage)
        max_bytes, began_s = max_state_bytes(self._context.resolved, self._stage), self._context.clock.monotonic_s()

        async def take_timed(state: StageState) -> None:
            seconds = self._context.clock.monotonic_s() - began_s
            num_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
            self.bytes_per_s = num_bytes / max(seconds, 1e-3)
            await take(state)

        await fetch_state(
            self._transport, self._mates.donors(), call, max_bytes=max_bytes, rng=self._rng, take=take_timed
        )

    async def _take(self, state: StageState) -> Taken:
        """Take a state over, if it is what an entry says.

        Raises:
            InvalidMessage: it is not, or no entry names its root
        """
        entry = state.history_hash
        if (known := await self._log_beyond(entry)) is None:
            raise InvalidMessage(f"a state of {entry[:40]!r}, which is no entry of the stage's log")
        rounds = {head: number for number, head in known.heads().items()}
        root = known.since(rounds[entry])[0].entry.cut.root
        if not root:
            raise InvalidMessage("the entry after this state names no root")
        if root != await self._context.threads.run(root_of, dict(state.tensors), state.ledger):
            raise InvalidMessage("a state of another root than the one that the next entry names")
        ledger = read_ledger(state.ledger, self._num_slices) if self._num_slices is not None else None
        step = known.restart.optimizer_step + rounds[entry] - known.restart.first_round
        await self._load(state, step)
        return Taken(entry, {}, entry, ledger)

    async def _log_beyond(self, entry: str) -> Log | None:
        """Wait for the log to go on from an entry: the next one may name the root. Returns None if it is not in it."""
        while True:
            known = self._mates.newest_log()
            number = next((each for each, head in known.heads().items() if head == entry), None) if known else None
            if known is None or number is None or known.is_empty or known.since(number):
                return known if known is not None and number is not None and known.since(number) else None
            self._mates.ask_for_log()
            with anyio.move_on_after(ASK_S):
                await self._context.changed.wait_for(partial(self._is_past, known))

    def _is_past(self, known: Log) -> bool:
        newest = self._mates.newest_log()
        return newest is None or (newest.restart, newest.next_round) != (known.restart, known.next_round)

    async def _load(self, state: StageState, optimizer_step: int) -> None:
        load = partial(self._trainer.load_state, state.tensors, optimizer_step)
        await self._core.device_thread.run(Priority.STEP, load)

    async def adopt(self, root: str) -> bool:
        """Have the weights become those of a root, if they are as close to this seat's as unlike devices are.

        Returns:
            whether they are

        Raises:
            CallError: nobody gives them
        """
        adopted: list[bool] = []

        async def take(state: StageState) -> None:
            if await self._context.threads.run(root_of, dict(state.tensors), state.ledger) != root:
                raise InvalidMessage("a state of another root than the one that is asked for")
            own = await self._core.device_thread.run(Priority.STEP, self._trainer.state)
            is_close = await self._context.threads.run(_are_close, state.tensors, own)
            adopted[:] = [is_close]
            if is_close:
                await self._core.device_thread.run(Priority.STEP, partial(self._trainer.adopt, state.tensors))
            else:
                log.error("root_refused stage=%d reason=its weights are far from this peer's", self._stage)

        await self._fetch(take)
        self._context.metrics.resyncs.labels("other_weights").inc(adopted[0])
        return adopted[0]

    async def begin(self, restart: Restart) -> Ledger | None:
        """Have the weights become those that the run begins with.

        Returns:
            the ledger, at stage 0

        Raises:
            CallError: the run begins with a snapshot, which nobody gives
        """
        ledger: list[Ledger] = []

        async def take(named: NamedState) -> None:
            if self._num_slices is not None:
                ledger[:] = [read_ledger(named.state.ledger, self._num_slices)]
            await self._load(named.state, restart.optimizer_step)

        if restart.entries:
            await self._snapshots.take(self._stage, restart.entries[self._stage], restart.optimizer_step, take)
        else:
            await self._core.device_thread.run(Priority.STEP, self._trainer.restart)
            ledger = [Ledger(self._num_slices)] if self._num_slices is not None else []
        if self._core.rounds.step.phase is not Phase.EMPTY:
            self._context.metrics.rewinds.inc()
        return ledger[0] if ledger else None


def _are_close(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    """Whether two states differ by no more than devices that round otherwise make of the same updates."""
    theirs, ours = shared_entries(theirs), shared_entries(ours)
    if theirs.keys() != ours.keys():
        return False
    for name, own in ours.items():
        their = theirs[name]
        if own.shape != their.shape:
            return False
        distance = torch.linalg.vector_norm(their.double() - own.double())
        if not bool(distance <= MOST_APART * torch.linalg.vector_norm(own.double()) + 1e-12):
            return False
    return True

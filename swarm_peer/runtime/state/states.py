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

from swarm_peer.errors import InvalidMessage, NotServing
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
from swarm_peer.wire.messages import StateIndex, StateIndexCall

log = logging.getLogger(__name__)

# Pause between two questions for a longer log.
ASK_S = 1.0
# Relative distance of two states of the same updates. Unlike devices come 3e-3 apart with each microbatch in bf16.
MOST_APART = 0.05
# A state that was downloaded waits for so long for the log to come to its entry, and for the next one, which names its
# root: that of the round that went on as it was copied.
LOG_S, NAMED_S = 5.0, 120.0


@dataclass(frozen=True, kw_only=True)
class StageMates:
    """The ways in which a seat hears of its stage.

    Attributes:
        donors: ids of those who have a place in it
        newest_log: its log as it is known now, which goes on while a state is downloaded
        ask_for_log: asks for what is newer, and for the root of a coming state
        fears_lies: whether the word of one stage-mate is not enough: there are tickets enough to outvote a liar
    """

    donors: Callable[[], Sequence[str]]
    newest_log: Callable[[], Log | None]
    ask_for_log: Callable[[], None]
    fears_lies: Callable[[], bool]


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
        # Grows with each call that is to change the weights, or to keep them: downloads of before must not change them.
        self._turn = 0
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

        async def accept(index: StateIndex) -> None:
            if index.history_hash != entry.hash:
                raise InvalidMessage(f"the update of the entry {index.history_hash[:40]!r}; wanted {entry.hash}")

        async def check(update: StageState) -> None:
            averages = list(update.tensors.values())
            # The digest covers bytes and not types: read as another type, the same bytes are other averages.
            fits = all(average.dtype == torch.float32 for average in averages)
            if not fits or [average.shape for average in averages] != shapes:
                raise InvalidMessage("an update that does not fit this stage")
            if await self._context.threads.run(digest_of, averages) != entry.digest:
                raise InvalidMessage(f"an update that is not the one of round {entry.cut.round}")

        found = await fetch_state(
            self._transport, self._mates.donors(), call, max_bytes=max_bytes, rng=self._rng, take=check, accept=accept
        )
        return list(found.tensors.values())

    async def state(self) -> Taken:
        """Have the weights become those of a stage-mate, at an entry of the log.

        Raises:
            CallError: nobody gives one that an entry names
        """
        turn = self._begin_turn()
        await self._wait_for_log(lambda: self._mates.newest_log() is not None, LOG_S)
        self._check_turn(turn)
        if (known := self._mates.newest_log()) is not None and known.is_empty:
            # No entry names a root yet. The weights that the run has begun with need none.
            return Taken(known.head, {}, known.head, await self.begin(known.restart))
        taken: list[Taken] = []

        async def take(state: StageState) -> None:
            taken[:] = [await self._take(state, turn)]

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

        async def accept(index: StateIndex) -> None:
            await self._wait_for_log(lambda: self._log_with(index.history_hash) is not None, LOG_S)
            if self._mates.newest_log() is not None and self._log_with(index.history_hash) is None:
                raise _of_no_entry(index.history_hash)

        await fetch_state(
            self._transport,
            self._mates.donors(),
            call,
            max_bytes=max_bytes,
            rng=self._rng,
            take=take_timed,
            accept=accept,
        )

    async def _take(self, state: StageState, turn: int) -> Taken:
        """Take a state over, if it is what an entry says.

        Raises:
            InvalidMessage: it is not, or no entry names its root
        """
        entry = state.history_hash
        known, named = await self._naming(entry)
        if self._mates.fears_lies() and not (named and named.entry.cut.root):
            raise InvalidMessage("the entry after this state does not name its root")
        root = await self._context.threads.run(root_of, dict(state.tensors), state.ledger)
        if named and named.entry.cut.root not in ("", root):
            raise InvalidMessage("a state of another root than the one that the next entry names")
        ledger = read_ledger(state.ledger, self._num_slices) if self._num_slices is not None else None
        number = next(number for number, head in known.heads().items() if head == entry)
        await self._load(state, known.optimizer_step_at(number), turn)
        return Taken(entry, {}, entry, ledger)

    async def _naming(self, entry: str) -> tuple[Log, Committed | None]:
        """Wait for the log that holds the entry that a state embodies, and where lies are feared for the next entry.

        Raises:
            InvalidMessage: there is none in time
        """
        await self._wait_for_log(lambda: self._log_with(entry) is not None, LOG_S)
        if self._mates.fears_lies():
            await self._wait_for_log(lambda: self._is_named(entry), NAMED_S)
        if (known := self._log_with(entry)) is None:
            raise _of_no_entry(entry)
        return known, self._after(known, entry)

    async def _wait_for_log(self, has_come: Callable[[], bool], seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not has_come():
                self._mates.ask_for_log()
                with anyio.move_on_after(ASK_S):
                    await self._context.changed.wait_for(has_come)

    def _is_named(self, entry: str) -> bool:
        """Whether the log has gone on from an entry, or does not hold it any more."""
        known = self._log_with(entry)
        return known is None or self._after(known, entry) is not None

    def _log_with(self, entry: str) -> Log | None:
        known = self._mates.newest_log()
        return known if known is not None and entry in known.heads().values() else None

    @staticmethod
    def _after(known: Log, entry: str) -> Committed | None:
        return next((each for each in known.committed if each.entry.cut.parent == entry), None)

    def keep_weights(self) -> None:
        """Have the weights stay as they are: calls that are under way change them no more."""
        self._begin_turn()

    def _begin_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _check_turn(self, turn: int) -> None:
        """Raise NotServing if somebody else has begun to change the weights since."""
        if turn != self._turn:
            raise NotServing("this replica takes other weights by now")

    async def _load(self, state: StageState, optimizer_step: int, turn: int) -> None:
        self._check_turn(turn)
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
        turn = self._begin_turn()

        async def take(state: StageState) -> None:
            if await self._context.threads.run(root_of, dict(state.tensors), state.ledger) != root:
                raise InvalidMessage("a state of another root than the one that is asked for")
            own = await self._core.device_thread.run(Priority.STEP, self._trainer.state)
            is_close = await self._context.threads.run(_are_close, state.tensors, own)
            adopted[:] = [is_close]
            if is_close:
                self._check_turn(turn)
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
        turn, before = self._begin_turn(), self._trainer.optimizer_step

        async def take(named: NamedState) -> None:
            if self._num_slices is not None:
                ledger[:] = [read_ledger(named.state.ledger, self._num_slices)]
            await self._load(named.state, restart.optimizer_step, turn)

        if restart.entries:
            await self._snapshots.take(self._stage, restart.entries[self._stage], restart.optimizer_step, take)
        else:
            await self._core.device_thread.run(Priority.STEP, self._trainer.restart)
            ledger = [Ledger(self._num_slices)] if self._num_slices is not None else []
        if self._core.rounds.step.phase is not Phase.EMPTY:
            text, back = "run_rewound stage=%d optimizer_step=%d to=%d round=%d", restart.optimizer_step
            log.warning(text, self._stage, before, back, restart.first_round)
            self._context.metrics.rewinds.inc()
        return ledger[0] if ledger else None


def _of_no_entry(claimed: str) -> InvalidMessage:
    return InvalidMessage(f"a state of {claimed[:40]!r}, which is no entry of the stage's log")


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

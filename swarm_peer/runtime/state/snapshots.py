"""Takes and copies snapshots of agreed rounds, and offers them for when a stage is lost.

Owns which states become snapshots, under which names, and how one that another peer gives is checked. Must not know how
they are stored (named_snapshots.py), or how the run goes back to them (protocol/epochs.py).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import anyio
from pydantic import ValidationError

from swarm_peer.config_errors import describe
from swarm_peer.errors import CallError, InvalidMessage
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.protocol.log import Close, Committed, Log
from swarm_peer.protocol.statements import Snapshot
from swarm_peer.runtime.context import PeerContext, Threads
from swarm_peer.runtime.network.agreement import Agreement, AgreementContext
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.state.roots import root_of
from swarm_peer.runtime.state.transfer import accept_any, fetch_state
from swarm_peer.wire.messages import StateIndex, StateIndexCall

log = logging.getLogger(__name__)

# Pause after the first try to copy a snapshot of the next stage, whose peers take it at the same time as this peer
# takes its own. It is doubled after each of the next ones: to write a snapshot takes them some seconds per gigabyte.
GUARD_PAUSE_S = 0.2
# After so many tries in vain the log says so. They go on until the next snapshot is due.
GUARD_TRIES = 7
# The run begins anew with another snapshot, if one that it should begin with was given by nobody for so long.
PATIENCE_S = 180.0

# Takes a snapshot over; raises InvalidMessage if it cannot.
Take = Callable[[NamedState], Awaitable[None]]


def named(agreement: Agreement, state: StageState, committed: Committed) -> NamedState:
    """A state with the entry that names it. The close goes: that the round was over says nothing about its root."""
    proof = committed._replace(close=Close(committed.close.round, ()))
    return NamedState(proof, replace(state, entry=agreement.statements.encode(proof)))


class SnapshotTaker:
    """Takes snapshots of any stage from this peer's store, or from peers that have them. Belongs to the event loop.

    Args:
        snapshots: those that this peer keeps itself
        holders: ids of all peers that may have one, those of coordinators and of peers that have moved among them
    """

    def __init__(
        self,
        *,
        context: AgreementContext,
        threads: Threads,
        transport: Transport,
        agreement: Agreement,
        snapshots: NamedSnapshots,
        holders: Callable[[], Sequence[str]],
    ):
        self._snapshots = snapshots
        self._holders = holders
        self._context = context
        self._threads = threads
        self._transport = transport
        self._agreement = agreement
        self._rng = context.random.stream("snapshots")
        # The snapshot that nobody gave last, and since when.
        self._lacks: tuple[str, float] = ("", 0.0)

    async def take(self, stage: int, entry: str, optimizer_step: int, take: Take) -> None:
        """Take over the snapshot that an entry names: this peer's own, or else one that somebody gives.

        Args:
            take: takes it over; if it raises InvalidMessage, another holder's is downloaded

        Raises:
            CallError: nobody gave one that could be taken over
        """

        async def accept(offered: StateIndex | StageState) -> None:
            committed = await self._threads.run(self._agreement.statements.decode, Committed, offered.entry)
            if committed.entry.hash != entry:
                raise InvalidMessage(f"a snapshot of the name {committed.entry.hash}; wanted {entry[:40]}")

        async def check(state: StageState) -> NamedState:
            await accept(state)
            found = await self.check(stage, state)
            await take(found)
            return found

        async def take_given(state: StageState) -> None:
            await self._keep(await check(state))

        if (own := self._snapshots.find(stage, entry)) is not None:
            state = await self._snapshots.load(own)
            try:
                if state is not None:
                    await check(state)
                    return
            except InvalidMessage as error:
                log.warning("snapshot_refused stage=%d optimizer_step=%d reason=%s", stage, optimizer_step, error)
                self._snapshots.forget(own)
        call = StateIndexCall(manifest=self._context.resolved.hash, of_stage=stage, entry=entry)
        try:
            await self._fetch(call, optimizer_step, self._holders(), take_given, accept)
        except CallError:
            self._note_lack(stage, entry)
            raise

    async def _keep(self, found: NamedState) -> None:
        """Keep a snapshot that the run begins anew with: perhaps nobody but its giver had it."""
        try:
            await self._snapshots.keep(found)
        except OSError as error:
            text = "snapshot_not_stored stage=%d optimizer_step=%d reason=%s"
            log.warning(text, found.name.stage, found.name.optimizer_step, error)

    def _note_lack(self, stage: int, entry: str) -> None:
        """Have the run begin anew with another snapshot, if nobody has given this one for long.

        Those who offered it are gone, or have lied. The stage has to be empty for that.
        """
        now_s = self._context.clock.monotonic_s()
        if self._lacks[0] != entry:
            self._lacks = entry, now_s
        elif now_s >= self._lacks[1] + PATIENCE_S:
            log.error("snapshot_lost stage=%d entry=%s reason=nobody has given it for %.0f s", stage, entry, PATIENCE_S)
            self._agreement.core.resign(stage)
            self._lacks = "", 0.0

    async def copy(
        self, stage: int, optimizer_step: int, holders: Sequence[str], *, like: Committed | None = None
    ) -> NamedState:
        """Take the snapshot of a stage of some optimizer step, whatever its name is.

        Args:
            holders: ids of peers that may have it
            like: the entry that names a snapshot of this step at another stage, if one is known: take none of another
                time

        Raises:
            CallError: nobody gave one whose certificate is good
        """
        copied: list[NamedState] = []

        async def check(state: StageState) -> None:
            found = await self.check(stage, state, is_certified=True)
            cut = found.committed.entry.cut
            if like is not None and (cut.round, cut.base) != (like.entry.cut.round, like.entry.cut.base):
                raise InvalidMessage(f"a snapshot of round {cut.round} of another part of the run")
            copied[:] = [found]

        call = StateIndexCall(
            manifest=self._context.resolved.hash,
            of_stage=stage,
            min_round=like.entry.cut.round if like is not None else 0,
            optimizer_step=optimizer_step,
        )
        await self._fetch(call, optimizer_step, holders, check)
        return copied[0]

    async def _fetch(
        self,
        call: StateIndexCall,
        optimizer_step: int,
        holders: Sequence[str],
        take: Callable[[StageState], Awaitable[None]],
        accept: Callable[[StateIndex], Awaitable[None]] = accept_any,
    ) -> None:
        await fetch_state(
            self._transport,
            [holder for holder in holders if holder != self._transport.peer_id],
            call,
            max_bytes=max_state_bytes(self._context.resolved, call.of_stage),
            optimizer_step=optimizer_step,
            rng=self._rng,
            take=take,
            are_holders=True,
            accept=accept,
        )

    async def check(self, stage: int, state: StageState, *, is_certified: bool = False) -> NamedState:
        """A snapshot that somebody gives, or that was read from a file, if it is what its entry says.

        Args:
            is_certified: whether its certificate must be known to be good. A name that voters have chosen is enough

        Raises:
            InvalidMessage: it is not
        """
        threads = self._threads
        committed = await threads.run(self._agreement.statements.decode, Committed, state.entry)
        cut = committed.entry.cut
        fits = cut.stage == stage and (cut.round, cut.parent) == (state.round_number, state.history_hash)
        if not fits or not cut.root or await threads.run(root_of, dict(state.tensors), state.ledger) != cut.root:
            raise InvalidMessage(f"a state that is not what the entry of round {cut.round} of stage {cut.stage} names")
        epoch = self._agreement.core.membership.epoch_of(cut.epoch)
        if epoch is None and is_certified:
            raise InvalidMessage(f"a snapshot of epoch {cut.epoch.number}, which this peer does not know")
        if epoch is not None:
            claimed = Log(stage, epoch.restart).optimizer_step_at(cut.round)
            if claimed != state.optimizer_step or not committed.entry.is_agreed(committed.agreement, epoch):
                raise InvalidMessage(f"a snapshot whose entry was not committed at optimizer step {claimed}")
        return NamedState(committed, state)


def holdings(agreement: Agreement, snapshots: NamedSnapshots, lag: int) -> tuple[int, int, frozenset[Snapshot]]:
    """The offer of this peer when a stage is lost: the round and the optimizer step that it has come to, its snapshots.

    Args:
        lag: rounds that may be open beyond the next
    """
    core, names = agreement.core, snapshots.names
    logs = [member.log for member in core.members.values()]
    before_round, before_step, _ = core.membership.holds
    steps = [each.optimizer_step for each in logs] or [before_step]
    rounds = (each.next_round + lag for each in logs)
    # Rounds are counted once, also where the run goes back.
    newest_round = max([before_round, snapshots.newest_round, *rounds])
    return newest_round, max([*steps, *(name.optimizer_step for name in names)]), names


async def offer_snapshots(agreement: Agreement, snapshots: NamedSnapshots, lag: int) -> None:
    """Keep up to date what this peer offers when a stage is lost, until cancelled."""
    find, membership = partial(holdings, agreement, snapshots, lag), agreement.core.membership
    while True:
        await agreement.changed.wait_for(lambda: find() != membership.holds)
        membership.holds = find()


@dataclass(frozen=True)
class _Copied:
    """A copy of this stage's state, which has no name yet."""

    state: StageState
    root: str


class SnapshotKeeper:
    """Takes snapshots of one replica, and copies those of the next stage. Belongs to the event loop's thread."""

    def __init__(
        self, *, context: PeerContext, stage: int, agreement: Agreement, snapshots: NamedSnapshots, taker: SnapshotTaker
    ):
        self._context = context
        self._stage = stage
        self._next_stage = (stage + 1) % context.resolved.num_stages
        self._agreement = agreement
        self._snapshots = snapshots
        self._taker = taker
        self._recovery = context.resolved.manifest.recovery
        self._copied: _Copied | None = None
        self._to_store: NamedState | None = None
        self._failing: Complaint | None = None

    def take(self, state: StageState, root: str) -> None:
        """Note a copy of the replica's state, of which a snapshot may be due; it gets its name from the next entry."""
        if self._recovery.snapshots_at(state.optimizer_step):
            self._copied = _Copied(state, root)

    async def run(self) -> None:
        """Keep a snapshot of this stage, and one of the next, every `recovery.snapshot_every` updates."""
        async with anyio.create_task_group() as tasks:
            lag = self._context.resolved.manifest.averaging.rounds_ahead
            tasks.start_soon(offer_snapshots, self._agreement, self._snapshots, lag)
            tasks.start_soon(self._run_storing)
            if self._next_stage != self._stage:
                tasks.start_soon(self._run_guarding)
            while True:
                await self._context.changed.wait_for(self._is_decided)
                self._name()

    def complaint(self) -> Complaint | None:
        """That this peer keeps no snapshots, if the last one has failed."""
        return self._failing

    # --- this stage's

    @property
    def _log(self) -> Log | None:
        member = self._agreement.core.members.get(self._stage)
        return member.log if member is not None else None

    def _is_decided(self) -> bool:
        """Whether the round is over that began with the state which was copied."""
        stage_log, copied = self._log, self._copied
        if stage_log is None or copied is None:
            return False
        is_void = stage_log.restart.first_round != copied.state.timeline.first_round
        return is_void or stage_log.next_round > copied.state.round_number

    def _name(self) -> None:
        stage_log, copied = self._log, self._copied
        self._copied = None
        if stage_log is None or copied is None:
            return
        state = copied.state
        committed = next((each for each in stage_log.committed if each.entry.cut.parent == state.history_hash), None)
        if committed is None or committed.entry.cut.root != copied.root:
            reason = "the stage went on from others" if committed is None else "its stage-mates have other weights"
            text = "snapshot_not_stored stage=%d optimizer_step=%d reason=%s"
            log.warning(text, self._stage, state.optimizer_step, reason)
            return
        if self._to_store is not None:
            text = "snapshot_missed stage=%d optimizer_step=%d reason=the one before is still being written"
            log.warning(text, self._stage, self._to_store.state.optimizer_step)
        self._to_store = named(self._agreement, state, committed)
        self._context.changed.notify()

    async def _run_storing(self) -> None:
        while True:
            await self._context.changed.wait_for(lambda: self._to_store is not None)
            to_store, self._to_store = self._to_store, None
            if to_store is not None:
                await self._store(to_store)

    async def _store(self, snapshot: NamedState) -> None:
        """Store a snapshot. One that cannot be stored is left out: the peer trains all the same."""
        name = snapshot.name
        try:
            await self._snapshots.keep(snapshot)
        except OSError as error:
            reason = f"{error}: make room in the temporary folder, or name another one in TMPDIR"
        except ValidationError as error:  # the ledger, or the entry, may be too long for an index
            reason = describe(error)
        else:
            self._failing = None
            self._context.changed.notify()
            return
        log.error("snapshot_not_stored stage=%d optimizer_step=%d reason=%s", name.stage, name.optimizer_step, reason)
        since_s = self._context.clock.monotonic_s() if self._failing is None else self._failing.since_s
        words = f"its snapshot of optimizer step {name.optimizer_step} is not stored: {reason}"
        self._failing = Complaint(Trouble.NO_SNAPSHOTS, since_s, words)

    # --- the next stage's

    def _due(self) -> tuple[int, Committed] | None:
        """The newest entry of this stage that names a snapshot, with its optimizer step; None if there is none."""
        stage_log = self._log
        for committed in reversed(stage_log.committed if stage_log is not None else ()):
            step = stage_log.optimizer_step_at(committed.entry.cut.round) if stage_log is not None else 0
            if self._recovery.snapshots_at(step):
                return step, committed
        return None

    def _is_due_besides(self, guarded: str) -> bool:
        due = self._due()
        return due is not None and due[1].entry.hash != guarded

    async def _run_guarding(self) -> None:
        """After each snapshot of this stage, copy the next stage's snapshot of the same optimizer step."""
        guarded = ""
        while True:
            await self._context.changed.wait_for(partial(self._is_due_besides, guarded))
            if (due := self._due()) is None:
                continue
            step, committed = due
            guarded = committed.entry.hash
            for attempt in itertools.count(1):
                if await self._copy(step, committed, logging.WARNING if attempt == GUARD_TRIES else logging.DEBUG):
                    break
                with anyio.move_on_after(GUARD_PAUSE_S * 2 ** min(attempt - 1, GUARD_TRIES)):
                    await self._context.changed.wait_for(partial(self._is_due_besides, guarded))
                    break

    async def _copy(self, optimizer_step: int, like: Committed, level: int) -> bool:
        """Copy a snapshot of the next stage. Returns False, and logs it, if no peer gives it."""
        holders = [seat.peer for seat in self._agreement.core.epoch.roster(self._next_stage)]
        try:
            snapshot = await self._taker.copy(self._next_stage, optimizer_step, holders, like=like)
        except CallError as error:
            text = "snapshot_not_there stage=%d optimizer_step=%d reason=%s"
            log.log(level, text, self._next_stage, optimizer_step, error)
            return False
        await self._store(snapshot)
        return True

"""For stages that lose all their peers: keeps snapshots, finds one to begin with, and takes the run back to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.recovery import (
    Claim,
    Kept,
    Origin,
    choose_mover,
    choose_rewind,
    credible,
    find_standing,
    find_standing_by_snapshots,
    missed,
)
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.snapshots import StateDonor
from swarm_peer.runtime.state_index import StageState
from swarm_peer.runtime.state_transfer import fetch_state
from swarm_peer.runtime.transport import Transport, check_body
from swarm_peer.wire.messages import KeptCall, KeptReply, RewindCall, RewindReply, StateIndexCall

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
# Pause between tries, and between reminders to peers that have not gone back yet.
PAUSE_S = 2.0
# Tries to get another stage's snapshot from its peers, who take it at the same time as we take ours.
GUARD_TRIES = 6
# Pause after the first try; doubled each time.
GUARD_PAUSE_S = 0.2
# A rewound run's global steps begin so much above the newest one known: who was a step ahead is behind it, too.
STEPS_BETWEEN_LINES = 4
# Lifetimes of an announcement that a stage is without peers before one comes by itself: a coordinator is quicker, and
# knows better whom to send.
RESCUE_PATIENCE = 2
# Lifetimes of an announcement that another peer has to take the same stage over. If it comes later, nothing is lost:
# both find the same start.
RIVAL_PATIENCE = 4
# And that a peer has to announce itself again which could not be reached. It may be there, behind a closed port.
UNREACHED_PATIENCE = 4
# And that a peer which joins a lost stage has until another one moves there: it downloads a snapshot first.
JOINER_PATIENCE = 20
# Updates that may be given up where there is no snapshot yet, in intervals between snapshots.
INTERVALS_FROM_SCRATCH = 2


@dataclass(frozen=True, slots=True)
class Start:
    """Where a peer begins that finds no stage-mate.

    Attributes:
        state: of its stage; None for the run's initial weights
        rewound: the other stages have to go back to it
    """

    origin: Origin
    state: StageState | None
    rewound: bool
    reason: str


class _Wait:
    """For other peers to do something: for so long at most, beginning anew when there was nobody to wait for."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._since: float | None = None

    def check(self, reasons: Sequence[str]) -> None:
        """Raises CallError: there are reasons to wait; says the first"""
        if not reasons:
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._since + self._patience_s:
            raise CallError(reasons[0])


class Recovery:
    """Belongs to the event loop's thread.

    Args:
        first_origin: where the run began, by word of the run key
        unreached: peers that have announced themselves of late, could not be reached, and are not in the view for that
        look: looks up who announces some stages now
    """

    def __init__(
        self,
        manifest: RunManifest,
        stage: int,
        run_id: str,
        transport: Transport,
        donor: StateDonor,
        view: Callable[[], SwarmView],
        look: Callable[[Sequence[int]], Awaitable[SwarmView]],
        first_origin: Callable[[], Awaitable[Origin]],
        unreached: Callable[[], Sequence[PeerView]],
        changed: Signal,
    ):
        self._manifest = manifest
        self._hash = manifest.hash
        self._stage = stage
        self._run_id = run_id
        self._transport = transport
        self._me = transport.peer_id
        self._donor = donor
        self._view = view
        self._look = look
        self._first_origin = first_origin
        self._unreached = unreached
        self._changed = changed
        self._kept_last: StageState | None = None  # without its tensors
        self._for_rivals = _Wait(RIVAL_PATIENCE * manifest.limits.announcement_s)
        self._for_unreached = _Wait(UNREACHED_PATIENCE * manifest.limits.announcement_s)

    async def find_start(self) -> Start:
        """Where to begin, now that nobody serves this peer's stage.

        Raises:
            CallError: it has to wait; says for what
        """
        view = self._view()
        missing = missed(view, self._stage, self._unreached())
        self._for_unreached.check([f"peer {peer} cannot be reached, and may announce itself again" for peer in missing])
        first = await self._first_origin()
        # A coordinator that goes on from a checkpoint gives it away.
        asked = [peer.peer_id for peer in view.peers] + [self._run_id] * bool(first.updates)
        replies = await self._ask_kept(asked)
        claims = _claims_of(view, replies)
        believed = credible(claims)
        liars = claims.keys() - believed.keys()
        if liars:
            log.warning("claims_not_believed peers=%s", ",".join(sorted(liars)))
        if claims and not believed:
            raise CallError(f"what the {len(claims)} serving peers say of their steps cannot be")
        if claims:
            standing = find_standing(first, believed.values())
        else:
            left = [(Kept(*known), _line_of(reply)) for reply in replies.values() for known in reply.kept]
            standing = find_standing_by_snapshots(
                first, [*left, *self._donor.kept()], self._manifest.recovery.snapshot_every
            )
        origin = standing.origin
        kept = {
            peer_id: [Kept(*known) for known in reply.kept if _is_on_line(_line_of(reply), known[1], origin)]
            for peer_id, reply in replies.items()
            if peer_id not in liars
        }
        # This peer may have moved here with the only snapshot that there is.
        kept[self._me] = [known for known, line in self._donor.kept() if _is_on_line(line, known.born, origin)]
        if standing.step <= origin.step:
            wanted = Kept(self._stage, origin.born, origin.updates)
            holders = sorted(peer for peer, snapshots in kept.items() if wanted in snapshots)
            state = await self._fetch(wanted, holders) if origin.updates else None
            return Start(origin, state, False, "nothing was computed since the run's beginning")
        # Where nobody serves any stage, the first one to do so says what all others go on from.
        peers = view.in_stage(self._stage) if claims else view.peers
        rivals = [peer for peer in peers if peer.state is PeerState.JOINING and peer.peer_id < self._me]
        self._for_rivals.check([f"peer {peer.peer_id} is taking stage {peer.stage} over" for peer in rivals])
        rewind = choose_rewind(
            kept,
            self._manifest.stages.count,
            self._stage,
            standing.updates,
            INTERVALS_FROM_SCRATCH * self._manifest.recovery.snapshot_every,
        )
        if rewind.updates is None:
            raise CallError(rewind.reason)
        wanted = Kept(self._stage, rewind.born, rewind.updates)
        state = await self._fetch(wanted, rewind.holders) if rewind.updates else None
        start = Origin(standing.step + STEPS_BETWEEN_LINES, rewind.updates, rewind.born)
        return Start(start, state, True, rewind.reason)

    async def _ask_kept(self, peers: Sequence[str]) -> dict[str, KeptReply]:
        replies: dict[str, KeptReply] = {}

        async def ask(peer_id: str) -> None:
            try:
                reply = await self._transport.call(peer_id, KeptCall(manifest=self._hash), timeout_s=CALL_TIMEOUT_S)
                replies[peer_id] = check_body(KeptReply, reply.body)
            except CallError as error:
                log.info("snapshots_unknown peer=%s reason=%s: %s", peer_id, error.code, error)

        async with anyio.create_task_group() as tasks:
            for peer_id in sorted(set(peers) - {self._me}):
                tasks.start_soon(ask, peer_id)
        return replies

    async def _fetch(self, wanted: Kept, holders: Sequence[str]) -> StageState:
        own = await anyio.to_thread.run_sync(self._donor.kept_state, wanted.stage, wanted.born)
        if own is not None:
            return own
        call = StateIndexCall(manifest=self._hash, of_stage=wanted.stage, born=wanted.born)
        return await fetch_state(
            self._transport,
            holders,
            call,
            max_bytes=max_state_bytes(self._manifest, wanted.stage),
            updates=wanted.updates,
        )

    async def have_all_go_back(self, origin: Origin) -> None:
        """Tell all peers of other stages that the run goes on from `origin`, until none is left before it."""
        call = RewindCall(
            manifest=self._hash,
            lost_stage=self._stage,
            step=origin.step,
            updates=origin.updates,
            born=origin.born,
        )
        told: set[str] = set()

        async def tell(peer_id: str) -> None:
            try:
                reply = await self._transport.call(peer_id, call, timeout_s=CALL_TIMEOUT_S)
                check_body(RewindReply, reply.body)
                told.add(peer_id)
            except CallError as error:
                log.warning("rewind_refused peer=%s reason=%s: %s", peer_id, error.code, error)

        while True:
            view = await self._look(range(self._manifest.stages.count))
            behind = [
                peer
                for peer in view.peers
                if peer.stage != self._stage and peer.state is PeerState.SERVING and peer.step < origin.step
            ]
            others = {peer.peer_id for peer in behind} - told
            if not others:
                return
            async with anyio.create_task_group() as tasks:
                for peer_id in sorted(others):
                    tasks.start_soon(tell, peer_id)
            await anyio.sleep(PAUSE_S)

    async def run_snapshots(self) -> None:
        """Keep a snapshot of this stage, and one of the next, every so many updates."""
        every = self._manifest.recovery.snapshot_every
        if not every:
            return
        async with anyio.create_task_group() as tasks:
            if self._manifest.stages.count > 1:
                tasks.start_soon(self._run_guarding)
            while True:
                await self._changed.wait_for(lambda: self._snapshot_is_due(every))
                self._kept_last = current = self._donor.current
                assert current is not None
                if not await self._donor.keep_own(current.step):
                    log.warning("snapshot_missed updates=%d reason=the step was over already", current.updates)
                self._changed.notify()

    def _snapshot_is_due(self, every: int) -> bool:
        current = self._donor.current
        if current is None or not current.updates or current.updates % every:
            return False
        return self._kept_last is None or self._kept_last.step != current.step

    async def _run_guarding(self) -> None:
        """Whenever this peer has kept its own state, keep the next stage's of the same step."""
        stage = (self._stage + 1) % self._manifest.stages.count
        guarded: StageState | None = None
        while True:
            await self._changed.wait_for(lambda seen=guarded: self._kept_last is not seen)  # type: ignore[misc]
            assert self._kept_last is not None
            guarded = self._kept_last
            for attempt in range(GUARD_TRIES):
                peers = [peer.peer_id for peer in self._view().serving(stage)]
                try:
                    wanted = Kept(stage, guarded.born, guarded.updates)
                    await self._donor.keep(stage, await self._fetch(wanted, peers))
                    break
                except CallError as error:
                    # The first tries come while the others are still taking theirs.
                    level = logging.WARNING if attempt == GUARD_TRIES - 1 else logging.DEBUG
                    log.log(level, "snapshot_not_there stage=%d updates=%d reason=%s", stage, guarded.updates, error)
                with anyio.move_on_after(GUARD_PAUSE_S * 2**attempt):
                    await self._changed.wait_for(lambda seen=guarded: self._kept_last is not seen)  # type: ignore[misc]
                    break

    async def watch_stages(self) -> int:
        """Wait until a stage has no peers left and this one is chosen to move there; returns the stage."""
        patience_s = self._manifest.limits.announcement_s
        empty_since: dict[int, float] = {}
        joining_since: dict[str, float] = {}
        reported: dict[int, str] = {}
        while True:
            await anyio.sleep(patience_s / 4)
            view = await self._look(range(self._manifest.stages.count))
            now = time.monotonic()
            empty = [stage for stage in range(view.num_stages) if not view.serving(stage)]
            empty_since = {stage: empty_since.get(stage, now) for stage in empty}
            reported = {stage: reason for stage, reason in reported.items() if stage in empty}
            joining = [peer.peer_id for peer in view.peers if peer.state is PeerState.JOINING and peer.stage in empty]
            joining_since = {peer_id: joining_since.get(peer_id, now) for peer_id in joining}
            stuck = [peer_id for peer_id in joining if now >= joining_since[peer_id] + JOINER_PATIENCE * patience_s]
            movable = [peer.peer_id for peer in view.peers if peer.movable]
            for stage in empty:
                if now < empty_since[stage] + RESCUE_PATIENCE * patience_s:
                    continue
                mover = choose_mover(view, stage, movable, stuck)
                if reported.get(stage) != mover.reason:
                    log.warning("stage_lost stage=%d mover=%s reason=%s", stage, mover.peer_id, mover.reason)
                    reported[stage] = mover.reason
                if mover.peer_id == self._me:
                    return stage


def _line_of(reply: KeptReply) -> Origin:
    return Origin(reply.origin_step, reply.origin_updates, reply.origin_born)


def _claims_of(view: SwarmView, replies: Mapping[str, KeptReply]) -> dict[str, Claim]:
    """What serving peers say of themselves.

    Raises:
        CallError: there are some, and none of them replied
    """
    serving = [peer for peer in view.peers if peer.state is PeerState.SERVING]
    claims = {
        peer.peer_id: Claim(peer.stage, replies[peer.peer_id].step, _line_of(replies[peer.peer_id]))
        for peer in serving
        if peer.peer_id in replies
    }
    if serving and not claims:
        raise CallError(f"none of the {len(serving)} serving peers can be reached")
    return claims


def _is_on_line(line: Origin, born: int, origin: Origin) -> bool:
    """Whether weights of `line` belong to what `origin` goes on from: who has not gone back yet has others, too, and
    who has gone back further than most has those from before that."""
    return line == origin or born <= max(origin.born, line.born if line > origin else 0)

"""Moves this peer from one stage to another: because the coordinator says so, or to take over a stage without peers.

Owns whether this peer may move, and the replica that is prepared while the present one serves. Neither opens the
present replica nor closes it: peer.py does, once the lifecycle says where to go.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, HubFailed, SwarmError, UserError, first_line
from swarm_peer.model.costs import forward_flops
from swarm_peer.model.traffic import stage_traffic
from swarm_peer.policy.placement.rebalancing import choose_stage
from swarm_peer.policy.view import ANNOUNCEMENTS_PER_LIFETIME, UNDECIDED, PeerState
from swarm_peer.runtime.assembly import PeerParts
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.host.device_errors import is_out_of_memory
from swarm_peer.runtime.host.preparation import free_device_memory, has_room_beside, microbatch_capacity
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.network.assignments import NewestTerm, wait_for_assignment
from swarm_peer.runtime.replica import Replica, check_data
from swarm_peer.runtime.state.joining import prepare
from swarm_peer.runtime.state.rescue import watch_stages
from swarm_peer.wire.records import MAX_UNREACHED

log = logging.getLogger(__name__)

# When the hub has failed as often at moves, it is this machine that has no access to it: others are asked to move.
MOST_HUB_FAILURES = 5


class Mover:
    """Decides whether and how this peer moves. Belongs to the event loop's thread.

    Attributes:
        movable: whether the coordinator may move this peer
        moving_to: the stage that this peer prepares to move to, or leaves its own for; UNDECIDED if none
    """

    def __init__(self, *, parts: PeerParts, lifecycle: Lifecycle, counted: CountedHook | None):
        """Make a mover that has nothing prepared.

        Args:
            counted: told of each microbatch that the peer counts at stage 0; for tests
        """
        self._parts = parts
        self._context = parts.context
        self._directory = parts.directory
        self._lifecycle = lifecycle
        self._counted = counted
        self._prepared: Replica | None = None
        self._newest_term = NewestTerm()
        self.movable = parts.context.options.stage == "auto"
        self.moving_to = UNDECIDED
        self._failed: set[int] = set()  # stages that it could not get the state of, since it serves its own
        self._num_hub_failures = 0

    @property
    def unreached(self) -> tuple[str, ...]:
        """Peers to whom no way was found, as this peer announces them."""
        return tuple(sorted(self._parts.ways.without)[:MAX_UNREACHED])

    def take_prepared(self) -> Replica | None:
        """Give the replica of the stage that this peer moves to, if it has been prepared. Its move is over then."""
        prepared, self._prepared = self._prepared, None
        self.moving_to = UNDECIDED
        self._failed.clear()
        self._num_hub_failures = 0
        return prepared

    async def obey(self, replica: Replica, since: int) -> None:
        """Move when the run's coordinator says so. Returns once this peer moves, or may not move any more.

        Args:
            since: serial number of the announcement that this peer serves its stage
        """

        async def assigned() -> int:
            assignment = await wait_for_assignment(
                me=self._context.identity.peer_id,
                stage=replica.stage,
                fetch=lambda: self._parts.dht.fetch_coordination(self._context.run_id),
                newest_term=self._newest_term,
                view=lambda: self._directory.view,
                since=since,
                serial=lambda: self._directory.serial,
            )
            log.warning("assigned stage=%d reason=%s", assignment.to_stage, assignment.reason)
            return assignment.to_stage

        await self._move_to(replica, assigned, lambda: self.movable)

    async def rescue(self, replica: Replica) -> None:
        """Move to a stage that has lost all its peers, if this peer is the one chosen to take it over."""
        lost = partial(watch_stages, self._context, self._directory.refresh_surely)
        await self._move_to(replica, lost, lambda: True)

    async def keep_ways(self, replica: Replica) -> None:
        """Leave a stage in which this peer lacks somebody that it needs (policy/placement/ways.py). To be cancelled.

        It goes where it lacks nobody, if it may choose and knows such a stage. Else it waits as a newcomer to this one.
        """
        context, lifecycle, ways = self._context, self._lifecycle, self._parts.ways
        while True:
            await anyio.sleep(context.resolved.manifest.limits.announcement_s / ANNOUNCEMENTS_PER_LIFETIME)
            await ways.lacks(replica.stage)
            serves = lifecycle.state is PeerState.SERVING and self.moving_to == UNDECIDED
            if serves and (because := ways.gives_way(replica.stage)) and await self._may_leave(replica):
                log.warning("gives_way stage=%d reason=%s", replica.stage, ways.in_words(because))
                lifecycle.move(await self._better_stage(replica.stage))
            elif lifecycle.state is PeerState.JOINING and ways.lacks_for_long(replica.stage):
                stage = await self._better_stage(replica.stage)
                if stage is not None:
                    lifecycle.move(stage)

    async def _better_stage(self, stage: int) -> int | None:
        """Another stage in which this peer lacks nobody, as far as it knows; None without one, or a right to move."""
        if not self.movable:
            return None
        context, me = self._context, self._context.identity.peer_id
        view = await self._directory.refresh_surely([*range(context.resolved.num_stages), UNDECIDED])
        view = self._parts.ways.complete(view)
        costs, traffic = forward_flops(context.resolved), stage_traffic(context.resolved)
        choice = choose_stage(view, costs, me, context.clock.monotonic_s(), traffic)
        if choice.lacks or choice.stage == stage:
            return None
        try:
            manifest = await self._parts.base.manifest()
            check = partial(self._check, choice.stage, manifest)
            await self._context.threads.run(check, abandon_on_cancel=True)
        except (CallError, UserError) as error:
            log.info("stage_not_taken stage=%d reason=%s", choice.stage, error)
            return None
        log.info("stage_decided stage=%d reason=%s", choice.stage, choice.reason)
        return choice.stage

    async def _move_to(
        self, replica: Replica, next_stage: Callable[[], Awaitable[int]], may_go: Callable[[], bool]
    ) -> None:
        try:
            while may_go() and not await self._move(replica, await next_stage()):
                # A replica that was prepared in vain holds memory until the garbage collector comes.
                await self._context.threads.run(free_device_memory, self._parts.device)
        finally:
            if self._lifecycle.next_stage is None:
                self.moving_to = UNDECIDED  # the peer may have lost its place meanwhile, so that it joins again

    async def _move(self, replica: Replica, stage: int) -> bool:
        """Move to another stage, unless this peer is the last of its own, or cannot serve the other one.

        Returns:
            whether it moves
        """
        if words := await self._parts.ways.explain(stage):
            log.info("move_waits stage=%d reason=%s", stage, words)
            return False
        try:
            manifest = await self._parts.base.manifest()
            check = partial(self._check, stage, manifest)
            await self._context.threads.run(check, abandon_on_cancel=True)  # it may wait for the hub
            prepared = await self._prepare(replica, stage)
        except CallError as error:
            self._stay_for_now(replica, stage, error)
            return False
        except UserError as error:
            if isinstance(error, HubFailed) and self._num_hub_failures < MOST_HUB_FAILURES:
                self._num_hub_failures += 1
                self._stay_for_now(replica, stage, error)
                return False
            log.warning("move_refused stage=%d reason=%s: this peer stays where it is from now on", stage, error)
            self.movable, self.moving_to = False, UNDECIDED
            self._lifecycle.explain(f"cannot serve stage {stage}: {error}")
            await self._directory.announce()
            return False
        self.moving_to = stage
        if not (await self._may_leave(replica) and self._lifecycle.move(stage)):
            self.moving_to = UNDECIDED
            return False
        self._prepared = prepared
        log.warning("moving from=%d to=%d prepared=%s", replica.stage, stage, prepared is not None)
        return True

    def _stay_for_now(self, replica: Replica, stage: int, error: SwarmError) -> None:
        log.warning("move_failed stage=%d reason=%s: this peer stays in stage %d", stage, error, replica.stage)
        self.moving_to = UNDECIDED
        self._failed.add(stage)

    def _check(self, stage: int, manifest: RunManifest) -> None:
        """Raise UserError if this machine cannot read the stage's data, or has no memory for it."""
        resolved, options = self._context.resolved, self._context.options
        microbatch_capacity(resolved, resolved.specs[stage], self._parts.device, options.max_memory)
        if stage == 0:
            check_data(manifest, resolved, options)

    async def _prepare(self, replica: Replica, stage: int) -> Replica | None:
        """Open a replica of another stage and have it get its state, while the present one serves.

        Returns:
            None if the present replica has to close first, for a reason that is logged

        Raises:
            CallError: no peer of the stage gave its state
            UserError: this machine cannot read the stage's data
        """
        resolved, max_memory = self._context.resolved, self._context.options.max_memory
        self._parts.agreement.core.forget_prepared(stage)  # of a move that came to nothing: its replica is gone
        view = await self._directory.refresh_surely([stage])
        room = await self._context.threads.run(
            has_room_beside, resolved, replica.stage, stage, self._parts.device, max_memory
        )
        if not view.serving(stage) or not room:
            reason = "there is no memory for both stages" if view.serving(stage) else "nobody there gives its state"
            log.info("move_closes_first from=%d to=%d reason=%s", replica.stage, stage, reason)
            await self._parts.base.source(stage, waits=False)
            return None
        if stage not in self._failed:
            # The coordinator waits for as long as it sees this: a download may take long. It is to wait no longer for
            # one that fails again and again.
            self.moving_to = stage
            await self._directory.announce()
        await self._parts.base.source(stage, waits=False)
        try:
            prepared = await Replica.open(self._parts, stage, self._counted)
            await prepare(self._parts.agreement, stage, prepared.parts.sources)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # `has_room_beside` estimates. The present replica is as it was.
            log.warning("move_closes_first from=%d to=%d reason=%s", replica.stage, stage, first_line(error))
            return None
        return prepared

    async def _may_leave(self, replica: Replica) -> bool:
        """Announce that this peer drains, and look whether others serve its stage; if not, take it back."""
        if self._lifecycle.stop.is_set():
            return False  # it was told to end meanwhile
        self._lifecycle.enter(PeerState.DRAINING)
        # Announced first, looked up second: of two peers that leave at once, at least one sees that the other does.
        await self._directory.announce()
        await self._directory.refresh_surely([replica.stage])
        if replica.stage_mates():
            return True
        if not self._lifecycle.stop.is_set():
            # Not if it was told to end meanwhile: then it must not announce that it serves.
            log.warning("stays stage=%d reason=nobody else serves it any more", replica.stage)
            self.moving_to = UNDECIDED
            self._lifecycle.enter(PeerState.SERVING)
            await self._directory.announce()
        return False

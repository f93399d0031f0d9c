"""The barrier at the end of a round in one stage: stage-mates wait until all are ready to average.

Each peer asks its stage-mates until they, too, have finished their microbatches of the round. That also spreads the
progress counts, and shows which stage-mates are alive, what each brings, and whether they hold the same weights: by the
history hash, and every `averaging.compare_weights_every` optimizer steps by a digest of the weights themselves.

Each call is short: a callee that is not ready yet says so, and its caller asks again. So a caller can tell a stage-mate
that has stalled from one that still computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import anyio

from swarm_peer.errors import CallError, InvalidMessage, NotServing, OtherTimeline, PeerUnreachable, RoundClosed
from swarm_peer.policy.data.ranges import num_windows
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.transport import Handler, Reply, Transport, check_body
from swarm_peer.runtime.stage.rounds import ReplicaRound, RoundBook
from swarm_peer.runtime.step.averaging import START_TIMEOUT_S
from swarm_peer.runtime.step.outcome import LeftBehind
from swarm_peer.runtime.step.stage_mates import StageMates
from swarm_peer.wire.messages import Body, ReadyCall, ReadyReply

log = logging.getLogger(__name__)

# A callee that is not ready keeps a call for so long before it says that it is not.
POLL_S = 2.0
# A stage-mate whose answer takes this much longer has stalled, and is left out.
STALL_S = 8.0
# Least time from one call to a stage-mate to the next: one that says at once that it is not ready must not keep this
# peer busy.
PAUSE_S = 0.05
# Waits, of `timeout_s` each, for stage-mates that are more than this side and behind, while none of their rounds ends.
MAX_WAITS = 2
# A peer that has waited for so long, and for longer than the round took until then, says so: a microbatch that
# stage-mates still compute takes no longer than a round.
LONG_WAIT_S = 60.0
MOST_NAMED = 3


class Barrier:
    """Waits for this peer's stage-mates, and tells them when this peer is ready. Belongs to the event loop's thread.

    Attributes:
        timeout_s: how long a stage-mate that is not ready is waited for
        most_brought: samples that one peer of stage 0 may say it brings to the average of a period. Peers that hear of
            each other's claims late count a few too many, and more than twice the global batches is a lie
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        rounds: RoundBook,
        transport: Transport,
        progress: ProgressBook,
        view: Callable[[], SwarmView],
        on_other_timeline: Callable[[], None],
    ):
        """Make a barrier for the stage-mates in the view.

        Args:
            on_other_timeline: called when a stage-mate shows that it is on another timeline
        """
        manifest = context.resolved.manifest
        limits, averaging = manifest.limits, manifest.averaging
        self._hash = context.resolved.hash
        self._max_tries = averaging.max_tries
        is_told = averaging.mode == "periodic" and stage == 0
        self.most_brought = 2 * manifest.training.global_batch_size * averaging.steps_per_average if is_told else 0
        self._stage = stage
        self._rounds = rounds
        self._me = transport.peer_id
        self._transport = transport
        self._progress = progress
        self._view = view
        self._on_other_timeline = on_other_timeline
        self._clock = context.clock
        self._waits: tuple[ReplicaRound, float, set[str]] | None = None  # for whom, since when
        self._changed = context.changed
        self.timeout_s = limits.hop_timeout_s * manifest.stages.count + 2 * START_TIMEOUT_S + averaging.round_timeout_s
        self._mates = StageMates(
            clock=context.clock,
            stage=stage,
            announcement_s=limits.announcement_s,
            barrier_timeout_s=self.timeout_s,
            view=view,
        )

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {ReadyCall: self.handle_ready}

    def is_mate(self, peer_id: str) -> bool:
        """Whether a peer announces this stage, or has announced it a short time ago."""
        self._mates.refresh()
        return self._mates.is_known(peer_id)

    def complaint(self) -> Complaint | None:
        """That this peer waits for stage-mates for too long, if it does."""
        if self._waits is None:
            return None
        ending, since_s, waited_for = self._waits
        if ending is not self._rounds.current or self._rounds.step.phase is not Phase.ENDING or not waited_for:
            return None
        if self._clock.monotonic_s() - since_s < max(LONG_WAIT_S, since_s - ending.step.began_s):
            return None
        named = ", ".join(f"…{peer_id[-8:]}" for peer_id in sorted(waited_for)[:MOST_NAMED])
        words = f"it waits for {len(waited_for)} of its stage at the end of round {ending.number}: {named}"
        return Complaint(Trouble.NO_MATES, since_s, words)

    def welcome(self, peer_id: str) -> None:
        """Expect a stage-mate that has made itself known, until its announcement is sure to be in the view.

        Raises:
            NotServing: this peer has seen no announcement of it for this stage; it may ask again soon
        """
        if not self.is_mate(peer_id):
            self._progress.saw_stranger(peer_id)
            raise NotServing(f"no announcement of this peer for stage {self._stage} has been seen here yet")
        self._mates.welcome(peer_id)

    async def gather(self, ending: ReplicaRound, attempt: int) -> dict[str, ReadyReply]:
        """Wait until all stage-mates are ready for an averaging round, or until one asks about a later try.

        Returns:
            the reply of each peer that is ready, this peer included; stage-mates that do not answer are left out; of
            this peer alone, if a later try is asked about

        Raises:
            LeftBehind: this peer has to follow stage-mates that are in a later round
        """
        self._mates.refresh()
        members = {self._me: _own_reply(ending, attempt)}
        ahead: list[str] = []
        asked = {self._me}
        waited_for: set[str] = set()
        patience = _Patience()
        self._waits = ending, self._clock.monotonic_s(), waited_for

        async def ask(peer_id: str) -> None:
            waited_for.add(peer_id)
            await self._ask_ready(peer_id, ending, attempt, members, ahead)
            waited_for.remove(peer_id)

        async def look_for_later_try(scope: anyio.CancelScope) -> None:
            await self._changed.wait_for(lambda: ending.asked_attempt > attempt)
            scope.cancel()

        while ending.asked_attempt <= attempt and (to_ask := self._mates.expected() - asked):
            asked |= to_ask
            async with anyio.create_task_group() as looking:
                looking.start_soon(look_for_later_try, looking.cancel_scope)
                async with anyio.create_task_group() as tasks:
                    # All microbatches in flight end within this time. Do not wait any longer for a stage-mate.
                    tasks.cancel_scope.deadline = anyio.current_time() + self.timeout_s
                    for peer_id in sorted(to_ask):
                        tasks.start_soon(ask, peer_id)
                looking.cancel_scope.cancel()
            if tasks.cancel_scope.cancelled_caught:
                log.warning("barrier_timeout round=%d ready=%d asked=%d", ending.number, len(members), len(asked))
                if patience.lasts(self._outnumbering(waited_for, len(members), ending.number), len(members)):
                    asked -= waited_for
                else:
                    for peer_id in sorted(waited_for):
                        self._mates.was_late(peer_id, ending.number)
                waited_for.clear()
        if ending.asked_attempt > attempt:  # not all have been heard, so nothing follows from what they say
            return {self._me: members[self._me]}
        # A minority that is ahead may lie, or has gone on by itself. The vote at the end of the next round tells it
        # that most peers hold other weights. Half of the peers are enough: of two, either one may have given up the
        # other. But if most of the other stages are ahead, too, it has gone on with the run.
        if ahead and (len(ahead) >= len(members) or self._has_left(ending.number)):
            raise LeftBehind(sorted(ahead))
        if ahead:
            log.warning("some_are_ahead round=%d ready=%d ahead=%d", ending.number, len(members), len(ahead))
        return members

    def _has_left(self, round_number: int) -> bool:
        """Whether most peers of the other stages have gone through the next round as well."""
        others = [peer for peer in self._view().peers if peer.stage != self._stage and peer.state is PeerState.SERVING]
        return 2 * sum(peer.round_number > round_number + 1 for peer in others) > len(others)

    def _outnumbering(self, late: Collection[str], num_ready: int, round_number: int) -> dict[str, int]:
        """The rounds of stage-mates that are behind and more than those that are ready, unless the run is here as well.

        They do not follow a minority that has gone on by itself. It waits until they come to its round, where it takes
        over their weights; if it went on, and is faster, the two would never meet.
        """
        view = self._view()
        behind = {
            peer.peer_id: peer.round_number
            for peer in view.serving(self._stage)
            if peer.peer_id in late and peer.round_number < round_number
        }
        others = [peer for peer in view.peers if peer.stage != self._stage and peer.state is PeerState.SERVING]
        run_is_here = 2 * sum(peer.round_number >= round_number for peer in others) > len(others)
        return behind if len(behind) > num_ready and not run_is_here else {}

    async def _ask_ready(
        self, peer_id: str, ending: ReplicaRound, attempt: int, members: dict[str, ReadyReply], ahead: list[str]
    ) -> None:
        on_trial = self._mates.begin_trial(peer_id, ending.number)
        has_dialled_again = False
        while True:
            begin = anyio.current_time()
            body = ReadyCall(
                manifest=self._hash,
                stage=self._stage,
                round_number=ending.number,
                timeline=ending.step.timeline.first_round,
                attempt=attempt,
                counts=self._progress.signed_counts(),
            )
            try:
                reply = await self._transport.call(peer_id, body, timeout_s=POLL_S + STALL_S)
                answer = check_body(ReadyReply, reply.body)
                self._check_brings(answer)
                num_left_out = self._progress.merge(answer.counts, vouched=True)
            except RoundClosed:
                ahead.append(peer_id)
                return
            except CallError as error:
                if isinstance(error, PeerUnreachable) and not has_dialled_again:
                    # The connection may have broken, and not the stage-mate: each would go on without the other.
                    has_dialled_again = True
                    log.info("stage_mate_dialled_again peer=%s round=%d reason=%s", peer_id, ending.number, error)
                    continue
                log.info("stage_mate_left_out peer=%s reason=%s: %s", peer_id, error.code, error)
                if isinstance(error, OtherTimeline):
                    self._on_other_timeline()
                if isinstance(error, PeerUnreachable):
                    self._mates.was_unreachable(peer_id)
                return
            # All counts of the round must be known before it is settled: ask for those that were left out.
            if answer.attempt is not None and not num_left_out:
                members[peer_id] = answer
                self._mates.was_ready(peer_id)
                return
            if answer.does_without:
                self._mates.does_without(peer_id, ending.number)
            if on_trial:
                log.warning("stage_mate_left_out peer=%s reason=it says that it is ready, and is not", peer_id)
                return
            await anyio.sleep_until(begin + PAUSE_S)

    async def handle_ready(self, caller: str, call: ReadyCall, tensors: Sequence[memoryview]) -> Reply:
        """Say whether this peer is ready for the caller's averaging round, after a short wait for it."""
        is_mate = self.is_mate(caller)
        self._check_timeline(call, is_mate)
        self._progress.merge(call.counts, vouched=is_mate)
        if is_mate:
            # One round ahead is enough for this peer to look for itself; a false number does not last beyond that.
            self._progress.saw_round(min(call.round_number, self._rounds.step.round_number + 1))
        else:
            self._progress.saw_stranger(caller)
        if is_mate and not self._rounds.is_past(call.round_number):
            # Before the wait, since this peer may become ready during it and must not go on without the caller.
            self._mates.welcome(caller)
            self._mates.says_ready(caller, call.round_number)
            present = self._rounds.current
            if present.number == call.round_number and call.attempt > present.asked_attempt:
                # The caller's earlier try has failed. This peer may wait at its barrier for somebody who has gone on.
                present.asked_attempt = min(call.attempt, self._max_tries)
                self._changed.notify()

        def is_ready() -> bool:
            # A peer that this barrier does without would average with members that do not expect it: it asks again.
            present = self._rounds.current
            has_come = present.attempt is not None and present.attempt >= call.attempt
            is_expected = is_mate and not self._mates.is_left_out(caller)
            return is_expected and present.number == call.round_number and has_come

        def has_left() -> bool:
            return self._rounds.step.phase is Phase.LEFT

        with anyio.move_on_after(POLL_S):
            await self._changed.wait_for(lambda: has_left() or self._rounds.is_past(call.round_number) or is_ready())
        if has_left():
            raise NotServing("this peer has left")
        self._check_timeline(call, is_mate)
        asked = self._rounds.find(call.round_number)
        # A round without an average ends for a peer as soon as it knows that all are ready, and others still ask.
        has_settled = asked is not None and caller in asked.settled_with
        if self._rounds.is_past(call.round_number) and not has_settled:
            raise self._rounds.refusal(call.round_number)
        told = asked if asked is not None and has_settled else self._rounds.current
        is_at_barrier = told.number == call.round_number and told.attempt is not None
        reply = ReadyReply(
            attempt=told.attempt if has_settled or is_ready() else None,
            history_hash=told.step.history_hash,
            weights_digest=told.weights_digest,
            samples=told.samples,
            next_samples=told.next_samples,
            # One that is not ready at all holds the caller up as any other does.
            does_without=is_at_barrier and is_mate and self._mates.is_left_out(caller),
            brings=told.brings,
            counts=self._progress.signed_counts(),
        )
        return Reply(reply.model_dump())

    def _check_brings(self, answer: ReadyReply) -> None:
        """Refuse a stage-mate that says it brings more samples than it can: nobody would read them any more."""
        num_brought = num_windows(answer.brings)
        if num_brought > self.most_brought:
            raise InvalidMessage(f"{num_brought} samples where a period has at most {self.most_brought}")

    def _check_timeline(self, call: ReadyCall, is_mate: bool) -> None:
        """Refuse a stage-mate that is on another timeline: it holds other weights, whatever round it is in.

        Neither goes through rounds to meet the other. Recovery decides which of the timelines the run goes on with.
        """
        own = self._rounds.step
        if own.phase is not Phase.EMPTY and call.timeline != own.timeline.first_round:
            if is_mate:
                self._on_other_timeline()
            raise OtherTimeline(f"this peer is on the timeline that begins with round {own.timeline.first_round}")


class _Patience:
    """How long a barrier waits for stage-mates that outnumber this side: as long as most rounds go on."""

    def __init__(self) -> None:
        self._furthest: dict[str, int] = {}
        self._waits_left = 0
        self._has_waited = False

    def lasts(self, behind: dict[str, int], num_ready: int) -> bool:
        """Whether to wait once more for those that are behind, by their rounds, and more than those that are ready."""
        # A few that lie about their rounds must not keep this side waiting for others that hang.
        num_grown = sum(number > self._furthest.get(peer_id, -1) for peer_id, number in behind.items())
        for peer_id, number in behind.items():
            self._furthest[peer_id] = max(number, self._furthest.get(peer_id, -1))
        self._waits_left = MAX_WAITS if num_grown > num_ready else self._waits_left - 1
        # Those that have just come to this side's round get the time for it.
        has_waited, self._has_waited = self._has_waited, bool(behind)
        return (bool(behind) or has_waited) and self._waits_left > 0


def _own_reply(ending: ReplicaRound, attempt: int) -> ReadyReply:
    return ReadyReply(
        attempt=attempt,
        history_hash=ending.step.history_hash,
        weights_digest=ending.weights_digest,
        samples=ending.samples,
        next_samples=ending.next_samples,
        brings=ending.brings,
        counts=(),
    )

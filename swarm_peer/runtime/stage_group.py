"""The end of a global step within one stage: wait for the stage-mates, average, and make sure that all hold the same.

Three rounds of calls among stage-mates, the first and the last of them over our own transport:

1. ready: each asks each of the others until it has finished its microbatches of the step too. It is the barrier, it
   spreads the progress counts, and it finds out who is alive and who has the same weights.
2. the averaging round, over hivemind, among those that were ready.
3. vote: each asks each of the others what came of the round there; policy/agreement.py decides what follows.

Each call is short: a callee that is not there yet says so, and is asked again. So a peer that has stalled is told from
one that still computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, NotServing, PeerUnreachable, StepClosed
from swarm_peer.policy.agreement import Agreement, Verdict, Vote, agree
from swarm_peer.policy.health import PeerHealth
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.averaging import START_TIMEOUT_S, AveragingFailed, GradientAverager, checksum
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.transport import Handler, Reply, Transport, check_body
from swarm_peer.wire.messages import Body, ReadyCall, ReadyReply, VoteCall, VoteReply

log = logging.getLogger(__name__)

# How long a callee that is not ready keeps a call before it answers so.
POLL_S = 2.0
# A stage-mate that does not answer for this long beyond that has stalled, and is left out.
STALL_S = 8.0
# In announcement lifetimes: how long a stage-mate that is in the view no more is known. It may be out of it for a
# moment: it could not be dialled once, or the DHT was late.
PATIENCE = 2


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a global step ended for this peer.

    Attributes:
        verdict: COMMIT, with the gradients to apply; or RESYNC, with the peers that hold the state to download
        lineage: digest of all updates up to this one
        samples: samples in the gradients
    """

    verdict: Verdict
    gradients: Sequence[torch.Tensor] = ()
    lineage: str = ""
    samples: int = 0
    holders: tuple[str, ...] = ()
    reason: str = ""


class _LeftBehind(Exception):
    """Stage-mates (`holders`), at least as many as are ready here, are in a later step already."""

    def __init__(self, holders: list[str]):
        super().__init__(holders)
        self.holders = holders


class StageGroup:
    """This peer among its stage-mates. Belongs to the event loop's thread."""

    def __init__(
        self,
        manifest: RunManifest,
        stage: int,
        transport: Transport,
        averager: GradientAverager,
        progress: ProgressBook,
        view: Callable[[], SwarmView],
        metrics: PeerMetrics,
        changed: Signal,
    ):
        self._manifest = manifest
        self._hash = manifest.hash
        self._stage = stage
        self._me = transport.peer_id
        self._transport = transport
        self._averager = averager
        self._progress = progress
        self._view = view
        self._metrics = metrics
        self._changed = changed
        limits, averaging = manifest.limits, manifest.averaging
        self._barrier_timeout_s = (
            limits.hop_timeout_s * manifest.stages.count + 2 * START_TIMEOUT_S + averaging.round_timeout_s
        )
        self._step = 0
        self._lineage = ""
        self._samples = 0  # that this peer brings to the round
        self._ready_attempt: int | None = None  # of this step; None while microbatches are still running
        self._announced: dict[str, float] = {}  # stage-mates, with the time they were last in the view
        self._welcomed: dict[str, float] = {}  # those that made themselves known, with the time of it
        # Of those that held up a barrier: left out of some of the next ones, until they say that they are ready.
        self._health = PeerHealth(2 * self._barrier_timeout_s, 64 * self._barrier_timeout_s)
        self._left = False
        self._votes: dict[int, Vote] = {}  # this peer's newest vote of this step and of the one before

    @property
    def calls(self) -> dict[type[Body], Handler]:
        return {ReadyCall: self.handle_ready, VoteCall: self.handle_vote}

    @property
    def lineage(self) -> str:
        return self._lineage

    def enter(self, step: int, lineage: str) -> None:
        """Begin a step, with weights that `lineage` is the digest of."""
        self._step, self._lineage = step, lineage
        self._ready_attempt = None
        self._note_announced()
        self._votes = {known: vote for known, vote in self._votes.items() if known >= step - 1}
        self._changed.notify()

    def leave(self) -> None:
        """Take part in no more rounds; stage-mates that wait for this peer are told so."""
        self._left = True
        self._changed.notify()

    def welcome(self, peer_id: str) -> None:
        """Expect a stage-mate that has made itself known, until its announcement is sure to have been seen.

        Raises:
            NotServing: it announces this stage nowhere, as far as this peer has seen; it may ask again soon
        """
        if not self._is_stage_mate(peer_id):
            self._progress.saw_stranger(peer_id)
            raise NotServing(f"no announcement of this peer for stage {self._stage} has been seen here yet")
        self._welcomed[peer_id] = time.monotonic()

    async def settle(self, gradients: Sequence[torch.Tensor], samples: int) -> Settlement:
        """End this step together with the stage-mates.

        Args:
            gradients: this peer's means, CPU and fp32
            samples: how many samples they are the mean of; may be 0
        """
        step, attempt = self._step, 0
        self._samples = samples
        while True:
            self._ready_attempt = attempt
            self._changed.notify()
            try:
                members = await self._gather_ready(attempt)
            except _LeftBehind as behind:
                return self._resync(behind.holders, f"{len(behind.holders)} stage-mates have left step {step}")
            by_lineage = agree(
                self._me, {peer: Vote(0, reply.lineage) for peer, reply in members.items()}, may_retry=False
            )
            if by_lineage.verdict is Verdict.RESYNC:
                return self._resync(by_lineage.holders, "other stage-mates hold different weights")
            peers = set(by_lineage.holders)
            newest = max(reply.attempt or 0 for reply in members.values())
            if newest > attempt:
                attempt = newest
                continue
            shares = {peer: members[peer].samples for peer in peers}
            vote, result = await self._average(gradients, samples, attempt, shares)
            self._votes[step] = vote
            self._changed.notify()
            votes = await self._gather_votes(step, attempt, peers)
            agreement = agree(self._me, votes, may_retry=attempt < self._manifest.averaging.max_tries)
            if agreement.verdict is Verdict.COMMIT:
                assert vote.checksum is not None
                if len(agreement.holders) < len(votes):
                    log.warning("round_disputed step=%d reason=%s", step, agreement.reason)
                return Settlement(Verdict.COMMIT, result, vote.checksum, vote.samples, reason=agreement.reason)
            if agreement.verdict is Verdict.RESYNC:
                return self._resync(agreement.holders, agreement.reason)
            self._log_retry(agreement, step, attempt)
            attempt += 1

    def _resync(self, holders: Sequence[str], reason: str) -> Settlement:
        log.warning("resync_needed step=%d reason=%s", self._step, reason)
        return Settlement(Verdict.RESYNC, holders=tuple(holders), reason=reason)

    def _log_retry(self, agreement: Agreement, step: int, attempt: int) -> None:
        log.warning("round_retried step=%d attempt=%d reason=%s", step, attempt, agreement.reason)

    async def _average(
        self, gradients: Sequence[torch.Tensor], samples: int, attempt: int, members: Mapping[str, int]
    ) -> tuple[Vote, Sequence[torch.Tensor]]:
        """Run one round and return this peer's vote on it, with the averages.

        Args:
            members: of the round, with the samples of each
        """
        last_try = attempt >= self._manifest.averaging.max_tries
        if len(members) == 1 or last_try:
            # Alone, or averaging does not work among these peers: each offers its own gradients, and the vote takes
            # those of the most samples for all. Work is lost then, but nobody goes on with weights of its own.
            outcome = "alone" if len(members) == 1 else "given_up"
            self._metrics.averaging_rounds.labels(outcome).inc()
            digest = await anyio.to_thread.run_sync(checksum, self._lineage, gradients)
            return Vote(attempt, digest, samples), gradients
        begin = time.perf_counter()
        try:
            averages = await self._averager.average(
                gradients, samples, step=self._step, attempt=attempt, members=sorted(members)
            )
        except AveragingFailed as error:
            self._metrics.averaging_rounds.labels("failed").inc()
            log.warning("round_failed step=%d attempt=%d reason=%s", self._step, attempt, error)
            return Vote(attempt, None), ()
        self._metrics.averaging_seconds.observe(time.perf_counter() - begin)
        self._metrics.averaging_rounds.labels("done").inc()
        digest = await anyio.to_thread.run_sync(checksum, self._lineage, averages)
        return Vote(attempt, digest, sum(members.values())), averages

    async def _gather_ready(self, attempt: int) -> dict[str, ReadyReply]:
        """Who is ready for the round, this peer included. Those that do not answer are left out."""
        members = {self._me: ReadyReply(attempt=attempt, lineage=self._lineage, samples=self._samples, counts=())}
        ahead: list[str] = []
        asked = {self._me}
        while to_ask := self._stage_mates() - asked:
            asked |= to_ask
            async with anyio.create_task_group() as tasks:
                # What a stage-mate has in flight ends within this time; who still says no then is not waited for.
                tasks.cancel_scope.deadline = anyio.current_time() + self._barrier_timeout_s
                for peer_id in sorted(to_ask):
                    tasks.start_soon(self._ask_ready, peer_id, attempt, members, ahead)
            if tasks.cancel_scope.cancelled_caught:
                log.warning("barrier_timeout step=%d ready=%d asked=%d", self._step, len(members), len(asked))
                for peer_id in to_ask - members.keys():
                    self._health.failed(peer_id, time.monotonic())
        # Fewer than are ready here may lie, or have gone on by themselves: the vote at the end of the next step tells
        # them that their weights are not those of most. Of two, either one may have given up the other.
        if len(ahead) >= len(members):
            raise _LeftBehind(sorted(ahead))
        if ahead:
            log.warning("some_are_ahead step=%d ready=%d ahead=%d", self._step, len(members), len(ahead))
        return members

    def _note_announced(self) -> None:
        now = time.monotonic()
        oldest = now - PATIENCE * self._manifest.limits.announcement_s
        self._announced = {peer_id: seen for peer_id, seen in self._announced.items() if seen >= oldest}
        self._announced.update((peer.peer_id, now) for peer in self._view().in_stage(self._stage))

    def _is_stage_mate(self, peer_id: str) -> bool:
        """Whether a peer announces this stage, or did of late."""
        self._note_announced()
        return peer_id in self._announced

    def _stage_mates(self) -> set[str]:
        oldest = time.monotonic() - self._manifest.limits.announcement_s
        self._welcomed = {peer_id: since for peer_id, since in self._welcomed.items() if since >= oldest}
        # One that drains may have to end this step with the others.
        present = (PeerState.SERVING, PeerState.DRAINING)
        known = {peer.peer_id for peer in self._view().in_stage(self._stage) if peer.state in present}
        return (known | self._welcomed.keys()) - self._health.avoided(time.monotonic())

    async def _ask_ready(self, peer_id: str, attempt: int, members: dict[str, ReadyReply], ahead: list[str]) -> None:
        while True:
            body = ReadyCall(
                manifest=self._hash,
                stage=self._stage,
                step=self._step,
                attempt=attempt,
                counts=self._progress.signed_counts(),
            )
            try:
                reply = await self._transport.call(peer_id, body, timeout_s=POLL_S + STALL_S)
                answer = check_body(ReadyReply, reply.body)
                self._progress.merge(answer.counts, vouched=True)
            except StepClosed:
                ahead.append(peer_id)
                return
            except CallError as error:
                log.info("stage_mate_left_out peer=%s reason=%s: %s", peer_id, error.code, error)
                if isinstance(error, PeerUnreachable):
                    self._welcomed.pop(peer_id, None)  # each step would dial it, and wait for that
                return
            if answer.attempt is not None:
                members[peer_id] = answer
                self._health.succeeded(peer_id)
                return

    async def _gather_votes(self, step: int, attempt: int, peers: set[str]) -> dict[str, Vote]:
        votes = {self._me: self._votes[step]}
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + self._barrier_timeout_s
            for peer_id in sorted(peers - {self._me}):
                tasks.start_soon(self._ask_vote, peer_id, step, attempt, votes)
        return votes

    async def _ask_vote(self, peer_id: str, step: int, attempt: int, votes: dict[str, Vote]) -> None:
        body = VoteCall(manifest=self._hash, stage=self._stage, step=step, attempt=attempt)
        while True:
            try:
                reply = await self._transport.call(peer_id, body, timeout_s=POLL_S + STALL_S)
                answer = check_body(VoteReply, reply.body)
            except CallError as error:
                log.info("vote_missing peer=%s reason=%s: %s", peer_id, error.code, error)
                return
            if answer.attempt is not None:
                votes[peer_id] = Vote(answer.attempt, answer.checksum, answer.samples)
                return

    async def handle_ready(self, caller: str, call: ReadyCall, tensors: Sequence[memoryview]) -> Reply:
        is_mate = self._is_stage_mate(caller)
        self._progress.merge(call.counts, vouched=is_mate)
        if is_mate:
            # No further than it takes to have this peer look for itself: a false step must not outlive that.
            self._progress.saw_step(min(call.step, self._step + 1))
        else:
            self._progress.saw_stranger(caller)
        if is_mate and call.step >= self._step:
            # Before the wait: this peer may become ready in it, and must not go on without the caller.
            self.welcome(caller)
            self._health.succeeded(caller)

        def is_ready() -> bool:
            # A stranger is never told so, lest it average with members that do not expect it: it asks again.
            return is_mate and self._is_ready(call)

        with anyio.move_on_after(POLL_S):
            await self._changed.wait_for(lambda: self._left or call.step < self._step or is_ready())
        if self._left:
            raise NotServing("this peer has left")
        if call.step < self._step:
            raise StepClosed(f"global step {call.step} is over in this stage", self._step)
        attempt = self._ready_attempt if is_ready() else None
        counts = self._progress.signed_counts()
        reply = ReadyReply(attempt=attempt, lineage=self._lineage, samples=self._samples, counts=counts)
        return Reply(reply.model_dump())

    def _is_ready(self, call: ReadyCall) -> bool:
        return self._step == call.step and self._ready_attempt is not None and self._ready_attempt >= call.attempt

    async def handle_vote(self, caller: str, call: VoteCall, tensors: Sequence[memoryview]) -> Reply:
        def known() -> Vote | None:
            vote = self._votes.get(call.step)
            return vote if vote is not None and vote.attempt >= call.attempt else None

        with anyio.move_on_after(POLL_S):
            await self._changed.wait_for(lambda: known() is not None or call.step < self._step)
        vote = known()
        if vote is not None:
            reply = VoteReply(attempt=vote.attempt, checksum=vote.checksum, samples=vote.samples)
            return Reply(reply.model_dump())
        if call.step < self._step:
            raise StepClosed(f"global step {call.step} is over in this stage", self._step)
        return Reply(VoteReply(attempt=None).model_dump())

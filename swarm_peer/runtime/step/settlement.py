"""The end of a round in one stage: stage-mates wait for each other, average their gradients, and vote on the result.

1. The barrier: barrier.py.
2. The averaging round, with hivemind's all-reduce, among the peers that are ready.
3. The vote: each peer asks the others for their result; policy/voting.py decides what follows from the votes.

Must not know where the gradients come from, or how they are applied: step_loop.py does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

import anyio
import torch

from swarm_peer.errors import CallError
from swarm_peer.model.round_strategy import Work
from swarm_peer.policy.data.ranges import MAX_RANGES, WindowRange, merge_ranges, num_windows
from swarm_peer.policy.trouble import Complaint
from swarm_peer.policy.voting import AveragingVote, HeldWeights, Verdict, agree, choose_weights
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import Handler, Reply, Transport, check_body
from swarm_peer.runtime.stage.rounds import ReplicaRound, RoundBook
from swarm_peer.runtime.state.index import extend_history
from swarm_peer.runtime.step.ahead import AveragingAhead
from swarm_peer.runtime.step.averaging import AveragingFailed, GradientAverager
from swarm_peer.runtime.step.barrier import PAUSE_S, POLL_S, STALL_S, Barrier
from swarm_peer.runtime.step.outcome import LeftBehind, Settlement, resync, resync_weights
from swarm_peer.wire.messages import Body, ReadyReply, VoteCall, VoteReply

log = logging.getLogger(__name__)


class StageGroup:
    """Ends rounds together with this peer's stage-mates. Belongs to the event loop's thread.

    Attributes:
        ahead: averages what ends the next round, where updates are delayed; to be run
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        rounds: RoundBook,
        transport: Transport,
        averager: GradientAverager,
        barrier: Barrier,
        digest_weights: Callable[[], Awaitable[str]],
        device: torch.device,
    ):
        """Make a group.

        Args:
            digest_weights: computes a digest of this peer's weights
            device: that it computes the weights on
        """
        manifest = context.resolved.manifest
        self._clock = context.clock
        self._threads = context.threads
        self._manifest = manifest
        self._hash = context.resolved.hash
        self._stage = stage
        self._rounds = rounds
        self._me = transport.peer_id
        self._transport = transport
        self._averager = averager
        self._barrier = barrier
        self.ahead = AveragingAhead(context=context, averager=averager)
        self._metrics = context.metrics
        self._changed = context.changed
        self._digest_weights = digest_weights
        self._device = device

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {VoteCall: self.handle_vote}

    def complaint(self) -> Complaint | None:
        """This peer's trouble in ending the round, if it has any."""
        return self._barrier.complaint()

    async def settle(
        self, ending: ReplicaRound, gradients: Sequence[torch.Tensor], samples: int, upcoming: Work | None = None
    ) -> Settlement:
        """End a round together with the stage-mates.

        Args:
            gradients: means over this peer's samples, CPU and fp32; in a round without an average, what ends it, if
                anything: stage-mates of one history bring the same
            samples: number of these samples; may be 0
            upcoming: such means that are averaged from now on, and end the next round
        """
        ending.samples = samples
        ending.next_samples = 0 if upcoming is None else upcoming[1]
        averaging = self._manifest.averaging
        if averaging.mode == "periodic" and averaging.averages_at(ending.step.optimizer_step):
            ending.brings = self._named(ending)
        if averaging.compares_weights_at(ending.step.optimizer_step):
            ending.weights_digest = await self._digest_weights()
        members: dict[str, ReadyReply] = {}
        settlement = await self._settle(ending, gradients, members)
        # A newcomer, too: the others expect its part, though it took none in the average that ended this round.
        has_abstained = ending.attempt == 0 and ending.vote is not None and ending.vote.abstains
        if upcoming is not None and (settlement.verdict is Verdict.COMMIT or has_abstained):
            shares = {peer: reply.next_samples for peer, reply in members.items()}
            self.ahead.begin(ending.number + 1, upcoming[0], shares)
        return settlement

    async def _settle(
        self, ending: ReplicaRound, gradients: Sequence[torch.Tensor], agreed: dict[str, ReadyReply]
    ) -> Settlement:
        """As `settle`; notes in `agreed` with whom."""
        attempt = 0
        step = ending.step
        averages = self._manifest.averaging.averages_at(step.optimizer_step, begins_timeline=step.begins_timeline)
        while True:
            ending.attempt = attempt
            self._changed.notify()
            try:
                members = await self._barrier.gather(ending, attempt)
            except LeftBehind as behind:
                return resync(ending, behind.holders, f"{len(behind.holders)} stage-mates have left it behind")
            if ending.asked_attempt > attempt:
                attempt = ending.asked_attempt
                continue
            by_weights = choose_weights(self._me, {peer: _held(reply) for peer, reply in members.items()})
            if by_weights.verdict is Verdict.RESYNC:
                if members[by_weights.holders[0]].history_hash == ending.step.history_hash:
                    every = self._manifest.averaging.compare_weights_every
                    return resync_weights(ending, by_weights.holders, self._device, every)
                return resync(ending, by_weights.holders, "other stage-mates hold different weights")
            peers = set(by_weights.holders)
            newest = max(reply.attempt or 0 for reply in members.values())
            if newest > attempt:
                attempt = newest
                continue
            shares = {peer: members[peer].samples for peer in peers}
            agreed.clear()
            agreed.update((peer, members[peer]) for peer in peers)
            if not averages:
                # Those whose weights differ, too: that is what they have to hear.
                ending.settled_with = frozenset(members)
                history_hash = await self._threads.run(extend_history, ending.step.history_hash, gradients)
                return Settlement(Verdict.COMMIT, gradients, history_hash, sum(shares.values()))
            vote, result = await self._average(ending, gradients, attempt, shares)
            ending.vote = vote
            self._changed.notify()
            votes = await self._gather_votes(ending, attempt, peers)
            agreement = agree(self._me, votes, may_retry=attempt < self._manifest.averaging.max_tries)
            if agreement.verdict is Verdict.COMMIT:
                assert vote.checksum is not None
                num_abstaining = sum(other.abstains for other in votes.values())
                if len(agreement.holders) + num_abstaining < len(votes):
                    log.warning("round_disputed round=%d reason=%s", ending.number, agreement.reason)
                is_wanted = num_abstaining > 0
                # After the last try, what one of them has brought is all that the weights get.
                bringers = agreement.holders if attempt >= self._manifest.averaging.max_tries else sorted(peers)
                brought = {peer: members[peer].brings for peer in bringers}
                if self._me in brought:  # with what it has twice
                    brought[self._me] = ending.held
                return Settlement(Verdict.COMMIT, result, vote.checksum, vote.samples, brought, is_wanted=is_wanted)
            if agreement.verdict is Verdict.RESYNC:
                return resync(ending, agreement.holders, agreement.reason)
            log.warning("round_retried round=%d attempt=%d reason=%s", ending.number, attempt, agreement.reason)
            attempt += 1

    def _named(self, ending: ReplicaRound) -> tuple[WindowRange, ...]:
        """The samples that this peer brings to the average of a period, as it tells stage-mates."""
        named = merge_ranges(ending.held)
        if (num_named := num_windows(named)) > self._barrier.most_brought:  # who has left has lied of what it gave
            text = "taken_over_samples_not_believed samples=%d reason=a period has at most %d"
            log.warning(text, num_named, self._barrier.most_brought)
            ending.taken_over = ()
            named = merge_ranges(ending.held)
        if len(named) > MAX_RANGES:
            text = "samples_not_told ranges=%d reason=at most %d fit into one answer"
            log.error(text, len(named), MAX_RANGES)
        return named[:MAX_RANGES]

    async def _average(
        self, ending: ReplicaRound, gradients: Sequence[torch.Tensor], attempt: int, members: Mapping[str, int]
    ) -> tuple[AveragingVote, Sequence[torch.Tensor]]:
        """Run one averaging round.

        Args:
            members: its members, with the number of samples that each brings

        Returns:
            this peer's vote on the result, and the averages; without any if the averaging round has failed
        """
        history_hash = ending.step.history_hash
        if attempt == 0 and self._manifest.averaging.mode == "delayed":
            ahead = await self.ahead.result(ending.number, members, ending.given)
            if ahead is None or ahead.averages is None:
                return AveragingVote(attempt, None, abstains=ahead is None), ()
            digest = await self._threads.run(extend_history, history_hash, ahead.averages)
            return AveragingVote(attempt, digest, sum(ahead.shares.values())), ahead.averages
        await self.ahead.give_up()
        last_try = attempt >= self._manifest.averaging.max_tries
        if len(members) == 1 or last_try:
            # If averaging does not work among these peers, each offers its own gradients, and the vote chooses those of
            # the most samples for all. That loses the others' work, but no peer goes on with weights of its own.
            outcome = "alone" if len(members) == 1 else "given_up"
            self._metrics.averaging_rounds.labels(outcome).inc()
            digest = await self._threads.run(extend_history, history_hash, gradients)
            return AveragingVote(attempt, digest, ending.samples), gradients
        begin = self._clock.monotonic_s()
        try:
            averages = await self._averager.average(
                gradients, round_number=ending.number, attempt=attempt, shares=members
            )
        except AveragingFailed as error:
            self._metrics.averaging_rounds.labels("failed").inc()
            log.warning("round_failed round=%d attempt=%d reason=%s", ending.number, attempt, error)
            return AveragingVote(attempt, None), ()
        self._metrics.averaging_seconds.observe(self._clock.monotonic_s() - begin)
        self._metrics.averaging_rounds.labels("done").inc()
        digest = await self._threads.run(extend_history, history_hash, averages)
        return AveragingVote(attempt, digest, sum(members.values())), averages

    async def _gather_votes(self, ending: ReplicaRound, attempt: int, peers: set[str]) -> dict[str, AveragingVote]:
        assert ending.vote is not None
        votes = {self._me: ending.vote}
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + self._barrier.timeout_s
            for peer_id in sorted(peers - {self._me}):
                tasks.start_soon(self._ask_vote, peer_id, ending.number, attempt, votes)
        return votes

    async def _ask_vote(self, peer_id: str, round_number: int, attempt: int, votes: dict[str, AveragingVote]) -> None:
        body = VoteCall(manifest=self._hash, stage=self._stage, round_number=round_number, attempt=attempt)
        while True:
            begin = anyio.current_time()
            try:
                reply = await self._transport.call(peer_id, body, timeout_s=POLL_S + STALL_S)
                answer = check_body(VoteReply, reply.body)
            except CallError as error:
                log.info("vote_missing peer=%s reason=%s: %s", peer_id, error.code, error)
                return
            if answer.attempt is not None:
                votes[peer_id] = AveragingVote(answer.attempt, answer.checksum, answer.samples, answer.abstains)
                return
            await anyio.sleep_until(begin + PAUSE_S)

    async def handle_vote(self, caller: str, call: VoteCall, tensors: Sequence[memoryview]) -> Reply:
        """Give this peer's vote on an averaging round, after a short wait for it."""

        def known() -> AveragingVote | None:
            asked = self._rounds.find(call.round_number)
            vote = None if asked is None else asked.vote
            if vote is not None and vote.attempt >= call.attempt:
                return vote
            present = self._rounds.current
            if present is asked and present.attempt is not None and present.attempt > call.attempt:
                # This peer has gone on to a later try, and votes on that alone.
                return AveragingVote(call.attempt, None)
            return None

        with anyio.move_on_after(POLL_S):
            await self._changed.wait_for(lambda: known() is not None or self._rounds.is_past(call.round_number))
        vote = known()
        if vote is not None:
            reply = VoteReply.model_validate(asdict(vote))
            return Reply(reply.model_dump())
        if self._rounds.is_past(call.round_number):
            raise self._rounds.refusal(call.round_number)
        return Reply(VoteReply(attempt=None).model_dump())


def _held(reply: ReadyReply) -> HeldWeights:
    """The weights of a member. Where updates are delayed, other weights cost it the work of two rounds."""
    return HeldWeights(reply.history_hash, reply.weights_digest, reply.samples + reply.next_samples)

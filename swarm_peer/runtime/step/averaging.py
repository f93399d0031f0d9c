"""Averaging among stage-mates: rounds of an all-reduce whose parts travel as calls.

Must not know whether the members held the same weights and got the same averages: the protocol checks that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import anyio
import torch

from swarm_peer.codecs.feedback import Try
from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import Handler, Reply, Transport
from swarm_peer.runtime.step.all_reduce import AllReduce, Brought
from swarm_peer.runtime.step.hivemind_all_reduce import HivemindAllReduce
from swarm_peer.wire.messages import AveragePartCall, Body

# Members begin within milliseconds of each other, but a busy machine may take longer.
START_TIMEOUT_S = 5.0


class AveragingFailed(Exception):
    """An averaging round did not begin or did not finish, so there are no averages.

    Attributes:
        blamed: ids of the members for which it has failed, as far as that is known
    """

    def __init__(self, reason: str, blamed: frozenset[str] = frozenset()):
        super().__init__(reason)
        self.blamed = blamed


class GradientAverager:
    """Averages one stage's gradients with its stage-mates. Belongs to the event loop's thread.

    Attributes:
        num_values: of all gradients together
    """

    def __init__(self, *, context: PeerContext, stage: int, shapes: Sequence[torch.Size], transport: Transport):
        """Make an averager that is in no averaging round.

        Args:
            shapes: of the gradients
        """
        self._threads = context.threads
        self._clock = context.clock
        self._metrics = context.metrics
        self._section = context.resolved.manifest.averaging
        self._hash = context.resolved.hash
        self._stage = stage
        self._transport = transport
        self._shapes = list(shapes)
        self.num_values = sum(shape.numel() for shape in shapes)
        self._values = torch.zeros(self.num_values)
        # Worker threads of an averaging round that was given up write into these to their end.
        self._values_free = anyio.Lock()
        # Those under way, by group: one, but for a moment.
        self._rounds: dict[bytes, AllReduce | HivemindAllReduce] = {}
        self._changed = Condition()

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {AveragePartCall: self.handle_part}

    async def average(
        self,
        name: str,
        gradients: Sequence[torch.Tensor],
        shares: Mapping[str, int],
        feedback: Try | None = None,
    ) -> list[torch.Tensor]:
        """Run one averaging round. It fails unless all members give the same name and shares.

        Args:
            gradients: CPU, fp32; not changed
            shares: for each member, this peer among them, what its gradients weigh; some may be 0
            feedback: what is added to the gradients, and where to note what is left over; None where all is sent

        Returns:
            the weighted means, or plain means if all shares are 0; in new memory

        Raises:
            AveragingFailed: the averaging round did not begin in time, a member was lost or sent what does not fit
        """
        if len(shares) == 1 and feedback is None:
            self._metrics.averaging_rounds.labels("alone").inc()
            return await self._threads.run(_copied, gradients)
        async with self._values_free:
            await self._average(name, gradients, shares, feedback)
            return await self._threads.run(_copied, self._views_of(self._values))

    async def _average(
        self, name: str, gradients: Sequence[torch.Tensor], shares: Mapping[str, int], feedback: Try | None
    ) -> None:
        """Make the averages of this peer's values."""
        began_s = self._clock.monotonic_s()
        named = f"{self._hash}/{self._stage}/{name}/{sorted(shares.items())}"
        group = hashlib.sha256(named.encode()).digest()
        brought = self._brought(shares, feedback)
        is_streamed = feedback is not None or self._section.all_reduce == "streamed"
        make = AllReduce if is_streamed else HivemindAllReduce
        averaging_round = make(
            group=group,
            brought=brought,
            timeout_s=self._section.chunk_timeout_s,
            threads=self._threads,
            me=self._transport.peer_id,
            send=self._send,
        )
        # The parts of members that are ready before this one wait in it.
        self._rounds[group] = averaging_round
        self._changed.notify()
        try:
            await self._threads.run(self._fill, gradients, shares, feedback)
            reason = await averaging_round.run(self._section.round_timeout_s)
        finally:
            averaging_round.end()
            del self._rounds[group]
        if reason is not None:
            self._metrics.averaging_rounds.labels("failed").inc()
            raise AveragingFailed(reason, averaging_round.blamed)
        self._metrics.averaging_seconds.observe(self._clock.monotonic_s() - began_s)
        self._metrics.averaging_rounds.labels("done").inc()

    def _fill(self, gradients: Sequence[torch.Tensor], shares: Mapping[str, int], feedback: Try | None) -> None:
        """Fill this peer's values with what it brings; in a worker thread."""
        for mine, gradient in zip(self._views_of(self._values), gradients, strict=True):
            mine.copy_(gradient)
        if feedback is not None and any(shares.values()):
            feedback.bring(self._values, shares[self._transport.peer_id])
        elif feedback is not None:
            feedback.keep()

    def _brought(self, shares: Mapping[str, int], feedback: Try | None) -> Brought:
        """The values of this member, which `_fill` fills, and how the round adds them."""
        total = sum(shares.values())
        codec = self._section.compression if feedback is None else feedback.codec
        if feedback is not None and total:
            ones = dict.fromkeys(shares, 1.0)
            return Brought(values=self._values, weights=ones, total=total, codec=codec, leftover=feedback.after)
        # With no samples at all, the mean of the zeros that everybody brings is as good as any.
        weights = {peer: float(share) if total else 1.0 for peer, share in shares.items()}
        return Brought(values=self._values, weights=weights, total=total or len(shares), codec=codec)

    def _views_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(values, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    async def _send(self, member: str, group: bytes, part: int, data: memoryview) -> memoryview:
        """Send a part to the member that averages it. Returns the average, encoded."""
        call = AveragePartCall(manifest=self._hash, stage=self._stage, group=group, part=part)
        reply = await self._transport.call(member, call, (data,), timeout_s=self._section.round_timeout_s)
        if len(reply.tensors) != 1:
            raise InvalidMessage(f"{len(reply.tensors)} averages of one part")
        return reply.tensors[0]

    async def handle_part(self, caller: str, call: AveragePartCall, tensors: Sequence[memoryview]) -> Reply:
        """Add one part of a member's gradients to the others'. The reply has their average."""
        with anyio.move_on_after(START_TIMEOUT_S):  # members begin an averaging round one after the other
            await self._changed.wait_for(lambda: call.group in self._rounds)
        averaging_round = self._rounds.get(call.group)
        if averaging_round is None:
            raise NotServing("this averaging round is over here, or has not begun")
        return Reply(tensors=(await averaging_round.take(caller, call.part, tensors),))


def _copied(averages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [average.clone() for average in averages]

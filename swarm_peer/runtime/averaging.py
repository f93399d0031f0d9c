"""hivemind's averaging as one awaitable round, with a result that is bitwise the same for every member.

hivemind and its futures stay in here. What a round must be checked for (who took part, whether all got the same) is
stage_group.py's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, AsyncIterator  # noqa: UP035  # hivemind knows a stream by typing's name alone

import anyio
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException, TensorPartReducer
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from hivemind.dht import DHT
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import achain, anext, as_aiter, azip, enter_asynchronously

from swarm_peer.config import AveragingSection
from swarm_peer.errors import SwarmError
from swarm_peer.runtime.processes import die_with_parent, prepare_to_fork

log = logging.getLogger(__name__)

# Members come from the barrier within milliseconds of each other; a busy machine may take longer.
START_TIMEOUT_S = 5.0
START_POLL_S = 0.005
# What is left of a failed round is as large as the stage, and a garbage collector that counts objects would let it lie
# for a dozen rounds. After this long, hivemind's tasks of the round have ended.
COLLECT_AFTER_S = 1.0


class AveragingFailed(Exception):
    """A round did not come about or broke off; the buffers hold nothing of use."""


class _Average:
    """A part's average, in the place where hivemind subtracts the local part from it to send the difference.

    `local + (average - local)` is rounded differently by each member, so weights would drift apart. Sending the average
    itself keeps all members bitwise equal.
    """

    def __init__(self, average: torch.Tensor):
        self._average = average

    def __sub__(self, local: torch.Tensor) -> torch.Tensor:
        return self._average


class _ExactReducer(TensorPartReducer):
    """Args:
    own_index: this member's place among the senders; what it keeps itself does not go over the wire
    """

    def __init__(self, part_shapes: Sequence[torch.Size], num_senders: int, own_index: int, codec: CompressionBase):
        super().__init__(part_shapes, num_senders)
        self._own_index = own_index
        self._codec = codec

    async def accumulate_part(self, sender_index: int, *args: Any, **kwargs: Any) -> _Average:
        average = await super().accumulate_part(sender_index, *args, **kwargs)
        if sender_index == self._own_index and not isinstance(self._codec, NoCompression):
            # The others receive it through the codec, so this member must take it through the codec as well.
            average = deserialize_torch_tensor(serialize_torch_tensor(average, self._codec.compression_type))
        return _Average(average)


class _ExactAllReduce(AllReduceRunner):
    def __init__(self, *, compression: CompressionBase, **kwargs: Any):
        super().__init__(compression=compression, **kwargs)
        self.tensor_part_container.return_deltas = False
        self.tensor_part_reducer = _ExactReducer(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            self.sender_peer_ids.index(self.peer_id),
            compression,
        )


class _AveragerProcess(DecentralizedAverager):
    """Runs in a process of its own; the underscored coroutines are called there, by name, through hivemind's pipe."""

    def start(self) -> None:
        prepare_to_fork()
        super().start()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        super().run()

    async def _run_round(
        self, group_id: bytes, members: Sequence[str], weight: float, timeout_s: float, future: MPFuture
    ) -> None:
        """hivemind's all-reduce without its matchmaking: the members have met at the barrier already."""
        try:
            group = GroupInfo(group_id, tuple(PeerID.from_base58(member) for member in members), ())
            with self._register_allreduce_group(group):
                async with enter_asynchronously(self.get_tensors()) as tensors:
                    await asyncio.wait_for(self._average_in(group, tensors, weight), timeout_s)
            outcome = None
        except Exception as error:  # handed to the peer's process, where it is a failed round
            outcome = AveragingFailed(repr(error)[:200])
            # hivemind's runner and its exceptions hold each other, and the runner holds tensors.
            asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)
        with suppress(concurrent.futures.InvalidStateError):  # the peer has given the round up
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

    async def _average_in(self, group: GroupInfo, tensors: Sequence[torch.Tensor], weight: float) -> None:
        options = dict(self.allreduce_kwargs)
        del options["min_vector_size"]
        runner = _ExactAllReduce(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            tensor_infos=self.tensor_infos,
            group_id=group.group_id,
            ordered_peer_ids=group.peer_ids,
            peer_fractions=(1 / group.group_size,) * group.group_size,
            weight=weight,
            **options,
        )
        self._running_groups[group.group_id].set_result(runner)
        async for tensor, average in azip(as_aiter(*tensors), runner):
            tensor.copy_(average)
        # hivemind goes on without the parts of members that it lost, and calls it a success.
        if runner.banned_senders or runner.tensor_part_container.failed_size:
            raise AllreduceException(f"parts of {len(runner.banned_senders)} members are missing")

    async def _shutdown(self, timeout: float | None) -> None:
        # hivemind keeps futures of runners here and takes them for runners; what runs still ends with the process.
        self._running_groups.clear()
        await super()._shutdown(timeout)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """As hivemind's, but that a member may be later than the others."""
        request = await anext(stream)
        end = time.monotonic() + START_TIMEOUT_S
        while request.group_id not in self._running_groups and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(START_POLL_S)
        group = self._running_groups.get(request.group_id)
        if group is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        async for message in (await group).rpc_aggregate_part(achain(as_aiter(request), stream), context):
            yield message


def _codec(name: str) -> CompressionBase:
    if name == "blockwise_8bit":
        import bitsandbytes  # noqa: F401  # in this process, so that the averager's does not spend seconds on it in a round

        return BlockwiseQuantization()
    return Float16Compression() if name == "fp16" else NoCompression()


class GradientAverager:
    """Averages one stage's gradients with its stage-mates.

    Made in the main thread, before CUDA is used (it forks); kept for the life of the process, because stopping an
    averager while a DHT request is in flight can make the DHT process burn a core.
    """

    def __init__(self, shapes: Sequence[torch.Size], dht: DHT, prefix: str, section: AveragingSection):
        """Args:
        prefix: the same for all peers of a stage of a run, and theirs alone; without dots
        """
        self._buffers = [torch.zeros(shape) for shape in shapes]
        self._section = section
        self._process = _AveragerProcess(
            self._buffers,
            dht,
            start=True,
            prefix=prefix,
            target_group_size=2,
            allreduce_timeout=section.round_timeout_s,
            next_chunk_timeout=section.chunk_timeout_s,
            compression=_codec(section.compression),
            allow_state_sharing=False,
            shutdown_timeout=2.0,
        )

    async def average(
        self, gradients: Sequence[torch.Tensor], weight: float, *, step: int, attempt: int, members: Sequence[str]
    ) -> list[torch.Tensor]:
        """Run one round with these members, who all name the same ones.

        Args:
            gradients: CPU, fp32; not changed
            weight: of these gradients in the mean, their number of samples; may be 0
            members: peer ids, this peer's own among them

        Returns:
            The averages, valid until the next round.

        Raises:
            AveragingFailed
        """
        ordered = sorted(members)
        name = f"{self._process.prefix}/{step}/{attempt}/{','.join(ordered)}"
        group_id = hashlib.sha256(name.encode()).digest()[:20]
        timeout_s = self._section.round_timeout_s
        future = MPFuture()  # of this event loop
        round_arguments = [group_id, ordered, weight, timeout_s]
        try:
            await anyio.to_thread.run_sync(self._begin, gradients, round_arguments, future)
            with anyio.fail_after(timeout_s + START_TIMEOUT_S):
                await future
        except AveragingFailed:
            raise
        except Exception as error:  # whatever hivemind's pipe and process may raise is a failed round
            raise AveragingFailed(repr(error)[:200]) from error
        return self._buffers

    def _begin(self, gradients: Sequence[torch.Tensor], round_arguments: list[Any], future: MPFuture) -> None:
        """In a thread: it copies, and waits for the averager's lock."""
        with self._process.get_tensors():
            for buffer, gradient in zip(self._buffers, gradients, strict=True):
                buffer.copy_(gradient)
        self._process._outer_pipe.send(("_run_round", round_arguments, {"future": future}))

    async def watch(self) -> None:
        """Return only by raising, when the averager's process has died."""
        await anyio.wait_readable(self._process.sentinel)
        raise SwarmError("the averaging process has died: start the peer again (out of memory? see the kernel's log)")

    def shutdown(self) -> None:
        self._process.shutdown()


def checksum(lineage: str, tensors: Sequence[torch.Tensor]) -> str:
    """Digest of averaged gradients and of the line of updates that they continue."""
    digest = hashlib.sha256(lineage.encode())
    for tensor in tensors:
        digest.update(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:32]

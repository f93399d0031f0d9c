"""One averaging round with hivemind, as an awaitable; its result is bitwise the same for every member.

Owns hivemind's averager and its futures, which stay in here. Must not know whether the members held the same weights
and got the same averages: settlement.py checks that.
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
from typing_extensions import assert_never

from swarm_peer.config import AveragingCodec, AveragingSection
from swarm_peer.errors import SwarmError
from swarm_peer.runtime.context import Threads
from swarm_peer.runtime.host.processes import die_with_parent, prepare_to_fork

log = logging.getLogger(__name__)

# Members leave the barrier within milliseconds of each other, but a busy machine may take longer.
START_TIMEOUT_S = 5.0
START_POLL_S = 0.005
# A failed averaging round leaves objects as large as the stage in memory. Python's garbage collector counts objects and
# not bytes, and would keep them for a dozen rounds. So collect them after this long, when hivemind's tasks of it have
# ended.
COLLECT_AFTER_S = 1.0


class AveragingFailed(Exception):
    """An averaging round did not begin or did not finish, so there are no averages."""


class _Average:
    """A part's average, which stays the same when hivemind subtracts the local part from it.

    hivemind sends the difference `average - local`. Each member would round `local + (average - local)` differently, so
    their weights would drift apart. Sending the average itself keeps all members bitwise equal.
    """

    def __init__(self, average: torch.Tensor):
        self._average = average

    def __sub__(self, local: torch.Tensor) -> torch.Tensor:
        return self._average


class _ExactReducer(TensorPartReducer):
    """Gives this member the averages in the form in which the others receive them."""

    def __init__(self, part_shapes: Sequence[torch.Size], num_senders: int, own_index: int, codec: CompressionBase):
        super().__init__(part_shapes, num_senders)
        self._own_index = own_index  # this member's place among the senders
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
    """hivemind's averager, in a process of its own. hivemind calls its coroutines there by name, through a pipe."""

    def start(self) -> None:
        prepare_to_fork()
        super().start()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        super().run()

    async def _run_round(
        self, group_id: bytes, members: Sequence[str], weight: float, timeout_s: float, future: MPFuture
    ) -> None:
        """Run hivemind's all-reduce without its matchmaking, since the members have met at the barrier already."""
        try:
            group = GroupInfo(group_id, tuple(PeerID.from_base58(member) for member in members), ())
            with self._register_allreduce_group(group):
                async with enter_asynchronously(self.get_tensors()) as tensors:
                    await asyncio.wait_for(self._average_in(group, tensors, weight), timeout_s)
            outcome = None
        except Exception as error:  # handed to the peer's process, where it is a failed averaging round
            outcome = AveragingFailed(repr(error)[:200])
            # hivemind's runner and its exceptions hold each other, and the runner holds tensors.
            asyncio.get_running_loop().call_later(COLLECT_AFTER_S, gc.collect)
        with suppress(concurrent.futures.InvalidStateError):  # the peer has given the averaging round up
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
        # hivemind goes on without the parts of members that it has lost, and reports a success.
        if runner.banned_senders or runner.tensor_part_container.failed_size:
            raise AllreduceException(f"parts of {len(runner.banned_senders)} members are missing")

    async def _shutdown(self, timeout: float | None) -> None:
        # hivemind keeps futures of runners here, and takes them for runners. Unfinished ones end with the process.
        self._running_groups.clear()
        await super()._shutdown(timeout)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Do as hivemind does, but wait for the start of an averaging round: members begin it one after the other."""
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


def _codec(name: AveragingCodec) -> CompressionBase:
    match name:
        case "none":
            return NoCompression()
        case "fp16":
            return Float16Compression()
        case "blockwise_8bit":
            import bitsandbytes  # noqa: F401  # takes seconds, so import it before the fork

            return BlockwiseQuantization()
        case _:
            assert_never(name)


class GradientAverager:
    """Averages one stage's gradients with its stage-mates.

    It forks, so make it in the main thread before CUDA is used. Keep it for the life of the process: when an averager
    stops while a DHT request is in flight, the DHT process may use a whole core from then on.
    """

    def __init__(
        self, *, shapes: Sequence[torch.Size], dht: DHT, prefix: str, section: AveragingSection, threads: Threads
    ):
        """Fork the process that averages.

        Args:
            prefix: the same for all peers of one stage of a run, and used by no others; without dots
        """
        self._threads = threads
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
        self,
        gradients: Sequence[torch.Tensor],
        weight: float,
        *,
        round_number: int,
        attempt: int,
        members: Sequence[str],
    ) -> list[torch.Tensor]:
        """Run one averaging round. Each member has to give the same members, round and attempt.

        Args:
            gradients: CPU, fp32; not changed
            weight: of these gradients in the mean: their number of samples; may be 0
            members: peer ids, this peer's own among them

        Returns:
            the averages, valid until the next averaging round

        Raises:
            AveragingFailed: the averaging round did not begin in time, or a member was lost
        """
        ordered = sorted(members)
        name = f"{self._process.prefix}/{round_number}/{attempt}/{','.join(ordered)}"
        group_id = hashlib.sha256(name.encode()).digest()[:20]
        timeout_s = self._section.round_timeout_s
        future = MPFuture()  # of this event loop
        round_arguments = [group_id, ordered, weight, timeout_s]
        try:
            await self._threads.run(self._begin, gradients, round_arguments, future)
            with anyio.fail_after(timeout_s + START_TIMEOUT_S):
                await future
        except AveragingFailed:
            raise
        except Exception as error:  # hivemind's pipe and process may raise any error
            raise AveragingFailed(repr(error)[:200]) from error
        return self._buffers

    def _begin(self, gradients: Sequence[torch.Tensor], round_arguments: list[Any], future: MPFuture) -> None:
        """Start the averaging round; in a worker thread, since it waits for the averager's lock and copies."""
        with self._process.get_tensors():
            for buffer, gradient in zip(self._buffers, gradients, strict=True):
                buffer.copy_(gradient)
        self._process._outer_pipe.send(("_run_round", round_arguments, {"future": future}))

    async def watch(self) -> None:
        """Wait until the averager's process dies.

        Raises:
            SwarmError: it has died
        """
        await anyio.wait_readable(self._process.sentinel)
        raise SwarmError("the averaging process has died: start the peer again (out of memory? see the kernel's log)")

    def shutdown(self) -> None:
        """End the averager's process."""
        self._process.shutdown()

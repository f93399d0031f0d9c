"""hivemind's averaging as one awaitable round, with a result that is bitwise the same for every member.

hivemind and its futures stay in here. What a round must be checked for (who took part, whether all got the same) is
stage_group.py's business.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

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
from hivemind.utils.asyncio import as_aiter, azip

from swarm_peer.config import AveragingSection
from swarm_peer.errors import SwarmError
from swarm_peer.runtime.processes import die_with_parent

log = logging.getLogger(__name__)

_STEP_BITS, _ATTEMPT_BITS = 40, 10


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

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        super().run()

    async def _set_round(self, group_bits: str, group_size: int) -> None:
        matchmaking = self._matchmaking
        matchmaking.group_key_manager.group_bits = group_bits
        matchmaking.target_group_size = group_size
        matchmaking.group_key_manager.target_group_size = group_size
        matchmaking.potential_leaders.target_group_size = group_size

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info: GroupInfo, group_id: bytes | None = None, **kwargs: Any
    ) -> None:
        group_id = group_info.group_id if group_id is None else group_id
        runner = _ExactAllReduce(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **kwargs,
        )
        self._running_groups[group_id].set_result(runner)
        async for tensor, average in azip(as_aiter(*tensors), runner):
            tensor.copy_(average)
        # hivemind goes on without the parts of members that it lost, and calls it a success.
        if runner.banned_senders or runner.tensor_part_container.failed_size:
            raise AllreduceException(f"parts of {len(runner.banned_senders)} members are missing")


def _codec(name: str) -> CompressionBase:
    if name == "blockwise_8bit":
        import bitsandbytes  # noqa: F401  # in this process, so that the averager's does not spend seconds on it in a round

        return BlockwiseQuantization()
    return Float16Compression() if name == "fp16" else NoCompression()


class AveragingFailed(Exception):
    """A round did not come about or broke off; the buffers hold nothing of use."""


def _wait_for(control: Any, timeout_s: float) -> Any:
    """Block on hivemind's future. Whatever it raises (cancelled, timed out, the process's error) is a failed round."""
    try:
        return control.result(timeout_s)
    except (Exception, concurrent.futures.CancelledError) as error:
        raise AveragingFailed(repr(error)[:200]) from error


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
            min_group_size=2,
            min_matchmaking_time=section.matchmaking_s,
            request_timeout=section.matchmaking_s / 2,
            allreduce_timeout=section.round_timeout_s,
            next_chunk_timeout=section.chunk_timeout_s,
            compression=_codec(section.compression),
            allow_state_sharing=False,
            shutdown_timeout=2.0,
        )

    async def average(
        self, gradients: Sequence[torch.Tensor], weight: float, *, step: int, attempt: int, group_size: int
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Run one round. The group is found by (step, attempt): rounds of different steps never meet.

        Args:
            gradients: CPU, fp32; not changed
            weight: of these gradients in the mean, their number of samples; may be 0

        Returns:
            The averages (valid until the next round) and each member's weight by peer id.

        Raises:
            AveragingFailed
        """
        bits = f"{step:0{_STEP_BITS}b}{attempt:0{_ATTEMPT_BITS}b}"
        deadline_s = 2 * self._section.matchmaking_s + self._section.round_timeout_s
        control = await anyio.to_thread.run_sync(self._begin, gradients, weight, bits, group_size)
        try:
            gathered = await anyio.to_thread.run_sync(_wait_for, control, deadline_s, abandon_on_cancel=True)
        except BaseException:
            control.cancel()
            raise
        if not gathered:
            raise AveragingFailed("no group was found")
        try:
            weights = {peer.to_base58(): float(data["weight"]) for peer, data in gathered.items()}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise AveragingFailed(f"a member sent no weight: {error!r:.100}") from error
        if not all(0 <= weight < 2**40 for weight in weights.values()):  # NaN is not, either
            raise AveragingFailed("a member's weight is no number of samples")
        return self._buffers, weights

    def _begin(self, gradients: Sequence[torch.Tensor], weight: float, bits: str, group_size: int) -> Any:
        """In a thread: hivemind's `step` waits for its process."""
        with self._process.get_tensors():
            for buffer, gradient in zip(self._buffers, gradients, strict=True):
                buffer.copy_(gradient)
        self._process._outer_pipe.send(("_set_round", [bits, group_size], {}))
        return self._process.step(
            gather={"weight": weight},
            weight=weight,
            timeout=2 * self._section.matchmaking_s,
            allow_retries=False,
            wait=False,
        )

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

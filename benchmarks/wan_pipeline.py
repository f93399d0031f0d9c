"""Torch's pipelines in a box of links: GPipe or 1F1B over gloo, data-parallel, with devices that sleep.

The stages are torch's PipelineStage, and so are the operations that send and receive. The orders are those of GPipe and
1F1B, with two things in their favour. Receives are posted before the first pass: gloo's sends wait until the other side
has said that it receives, which costs a round trip for each microbatch where torch's schedules receive just in time.
And 1F1B has as many microbatches in flight as memory allows, not just as many as there are stages. GPipe goes through
its microbatches in groups of as many as fit into memory.

Torch has no codecs. For links to carry as many bytes as those of a swarm do, a stage hands only so many numbers on as
the codec makes of all, in fp32, and the next stage takes zeros for the rest; averages likewise. Such pipelines
learn nothing of use, in the same time.

As a program it is one process of a pipeline; `measure_pipeline` starts all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

import torch
from links import Box, LinkOptions, box, enter_namespace
from processes import cpu_seconds
from torch import distributed
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from wan_timeline import FORWARD_SHARE, SpanWriter, compute_little, read_spans, sleeping, summarise_stage
from wan_workload import Workload

from coordinator.run.local_peers import Process
from swarm_peer.codecs import find_codec
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.stage import StageModule
from swarm_peer.model.training import StageTrainer

SCHEDULES = ("gpipe", "1f1b")
WARM_UP_ROUNDS = 1
PORT = 29500
START_TIMEOUT_S = 180.0
# Forward or backward, and the number of the microbatch.
Pass = tuple[str, int]


def passes_of(schedule: str, num_microbatches: int, memory: int, stage: int, num_stages: int) -> list[Pass]:
    """The order of the passes at one stage.

    Args:
        memory: most microbatches that are in flight at the first stage; with 1F1B one is at the last stage, and at
            those between as many more as give each link the same time
    """
    if schedule == "gpipe":
        order: list[Pass] = []
        for begin in range(0, num_microbatches, memory):
            group = range(begin, min(begin + memory, num_microbatches))
            order += [("forward", number) for number in group] + [("backward", number) for number in group]
        return order
    later = (num_stages - 1 - stage) / max(num_stages - 1, 1)
    ahead = min(1 + round((memory - 1) * later), num_microbatches)
    order = [("forward", number) for number in range(ahead)]
    for number in range(num_microbatches):
        order.append(("backward", number))
        if number + ahead < num_microbatches:
            order.append(("forward", number + ahead))
    return order


class PostedSchedule(PipelineScheduleSingle):
    """Runs passes in a given order, with all receives posted before."""

    order: list[Pass]

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        stage, untyped = self._stage, cast(Any, self)
        untyped._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0] if target_mbs else None, loss_kwargs)
        receives = {
            "forward": [_start(stage.get_fwd_recv_ops(number)) for number in range(self._n_microbatches)],
            "backward": [_start(stage.get_bwd_recv_ops(number)) for number in range(self._n_microbatches)],
        }
        sends: list[distributed.Work] = []
        for what, number in self.order:
            for work in receives[what][number]:
                work.wait()
            if what == "forward":
                output = stage.forward_one_chunk(number, arg_mbs[number], kwarg_mbs[number], save_forward_output=False)
                sends += _start(stage.get_fwd_send_ops(number))
                untyped._maybe_compute_loss(stage, output, target_mbs, number, loss_kwargs)
            else:
                loss = untyped._maybe_get_loss(stage, number)
                stage.backward_one_chunk(number, loss=loss, last_backward=number == self._n_microbatches - 1)
                sends += _start(stage.get_bwd_send_ops(number))
        for work in sends:
            work.wait()
        untyped._update_losses(stage, losses)


def _start(operations: Iterable[distributed.P2POp]) -> list[distributed.Work]:
    # One by one: with gloo, a batch is not faster, and the operations of a microbatch are one at most.
    return [operation.op(operation.tensor, operation.peer, operation.group) for operation in operations]


class ThinStage(torch.nn.Module):
    """A stage that takes and gives as many fp32 numbers as the wire codec makes of a microbatch's hidden states."""

    def __init__(self, stage: StageModule, workload: Workload):
        super().__init__()
        self.stage = stage
        self._shape_BTD = (1, workload.sequence_length, workload.width)
        self._num_all = workload.sequence_length * workload.width
        self._num_sent = numbers_of(self._num_all, workload.wire)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Token ids (1, T) at the first stage, else (1, numbers); logits (1, T, V) at the last, else (1, numbers)."""
        if not self.stage.spec.is_first:
            received = torch.nn.functional.pad(received, (0, self._num_all - self._num_sent)).view(self._shape_BTD)
        output: torch.Tensor = self.stage(received)
        return output if self.stage.spec.is_last else output.view(1, -1)[:, : self._num_sent].contiguous()


def numbers_of(count: int, codec: str) -> int:
    """How many fp32 numbers take the bytes that a codec makes of so many."""
    return min(count, round(find_codec(codec).num_bytes(count) / 4))


def loss_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The sum over samples of each sample's mean cross entropy, as StageTrainer accumulates it."""
    losses_N = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    return losses_N / targets_BT.shape[1]


def train(workload: Workload, schedule_name: str, rank: int, spans: SpanWriter) -> None:
    """Train until this process is ended, and write down what takes time."""
    resolved = ResolvedManifest.of(workload.manifest())
    index, replica = rank % workload.num_stages, rank // workload.num_stages
    pipelines = [
        distributed.new_group([number * workload.num_stages + stage for stage in range(workload.num_stages)])
        for number in range(workload.num_peers)
    ]
    mates = [
        distributed.new_group([number * workload.num_stages + stage for number in range(workload.num_peers)])
        for stage in range(workload.num_stages)
    ]
    trainer = StageTrainer(resolved, resolved.specs[index])
    module = ThinStage(trainer.module, workload)
    stage = PipelineStage(module, index, workload.num_stages, trainer.device, group=pipelines[replica])
    num_microbatches = workload.num_microbatches // workload.num_peers
    schedule = PostedSchedule(stage, num_microbatches, loss_fn=loss_sum, scale_grads=False)
    schedule.order = passes_of(schedule_name, num_microbatches, workload.max_in_flight, index, workload.num_stages)
    round_number = 0

    def watch(what: str, share: float) -> None:
        slow = sleeping(share, workload.microbatch_s, getattr(stage, f"{what}_one_chunk"))

        def noted(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.time()
            result = slow(*args, **kwargs)
            spans.note(what, index, round_number, begin_s)
            return result

        setattr(stage, f"{what}_one_chunk", noted)

    watch("forward", FORWARD_SHARE)
    watch("backward", 1 - FORWARD_SHARE)
    shape = (num_microbatches, workload.sequence_length + 1)
    while True:
        tokens_NS = torch.randint(256, shape, generator=torch.Generator().manual_seed(round_number))
        inputs = (tokens_NS[:, :-1],) if trainer.spec.is_first else ()
        targets = tokens_NS[:, 1:] if trainer.spec.is_last else None
        schedule.step(*inputs, target=targets, losses=[], return_outputs=False)
        begin_s = time.time()
        spans.note("barrier", index, round_number, begin_s)
        average(trainer, workload, mates[index])
        spans.note("averaging", index, round_number, begin_s)
        begin_s = time.time()
        trainer.num_samples = num_microbatches
        trainer.apply(trainer.mean_gradients())
        spans.note("commit", index, round_number, begin_s)
        round_number += 1


def average(trainer: StageTrainer, workload: Workload, mates: distributed.ProcessGroup) -> None:
    """Average as many numbers over the pipelines as the averaging codec makes of all gradients."""
    parameters = list(trainer.trained.values())
    for parameter in parameters:
        if parameter.grad is None:  # compute_little() leaves most weights out, but their bytes count
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sums_N = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(sums_N[: numbers_of(len(sums_N), workload.averaging)], group=mates)
    means = torch.split(sums_N / workload.num_peers, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def measure_pipeline(
    workload: Workload, links: LinkOptions, num_rounds: int, seed: int, schedule: str
) -> dict[str, Any]:
    """Run pipelines; returns the figures of their measured rounds."""
    from forks import fork

    num_processes = workload.num_stages * workload.num_peers
    with tempfile.TemporaryDirectory(prefix="swarm-wan-") as name, box(num_processes, links, seed) as network:
        folder = Path(name)
        arguments = json.dumps({"workload": asdict(workload), "schedule": schedule, "host": network.machines[0].ip})
        processes = [
            fork(
                [sys.executable, __file__, arguments, str(rank), machine.namespace, str(folder / f"{rank}.timeline")],
                folder / f"{rank}.log",
                {"GLOO_SOCKET_IFNAME": "wan"},
            )
            for rank, machine in enumerate(network.machines)
        ]
        try:
            round_limit_s = workload.longest_round_s(links.bytes_per_s)
            return watch_pipeline(folder, network, workload, round_limit_s, num_rounds, processes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def watch_pipeline(
    folder: Path,
    network: Box,
    workload: Workload,
    round_limit_s: float,
    num_rounds: int,
    processes: Sequence[Process],
) -> dict[str, Any]:
    """Wait for the measured rounds.

    Raises:
        RuntimeError: a process has ended, or they are not done in time
    """
    first, last = WARM_UP_ROUNDS, WARM_UP_ROUNDS + num_rounds - 1
    ends: dict[int, float] = {}
    sent: dict[int, list[int]] = {}
    cpu_s: dict[int, float] = {}
    deadline = time.monotonic() + START_TIMEOUT_S + (last + 1) * round_limit_s
    while last not in ends:
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise RuntimeError("\n".join(path.read_text()[-500:] for path in sorted(folder.glob("*.log"))))
        time.sleep(0.2)
        for span in read_spans(folder):
            if span.what == "commit" and span.stage == 0 and span.round_number not in ends:
                ends[span.round_number], sent[span.round_number] = span.end_s, network.sent_bytes()
                cpu_s[span.round_number] = cpu_seconds()
    seconds = ends[last] - ends[first - 1]
    spans = [span for span in read_spans(folder) if first <= span.round_number <= last]
    per_s = num_rounds * workload.num_microbatches / seconds
    return {
        "microbatches_per_s": round(per_s, 3),
        "share": round(per_s * workload.microbatch_s / workload.num_peers, 4),
        "rounds": num_rounds,
        "round_s": round(seconds / num_rounds, 3),
        "microbatches_a_round": float(workload.num_microbatches),
        "cores": round((cpu_s[last] - cpu_s[first - 1]) / seconds, 2),
        "stages": [
            summarise_stage([span for span in spans if span.stage == stage], workload.num_peers, seconds)
            for stage in range(workload.num_stages)
        ],
        "sent_bytes_a_round": {
            "peers": [round((new - old) / num_rounds) for new, old in zip(sent[last], sent[first - 1], strict=True)]
        },
    }


def main() -> None:
    """The command line of one process; `measure_pipeline` starts it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", help="workload, schedule and the first process's host, as JSON")
    parser.add_argument("rank", type=int)
    parser.add_argument("namespace")
    parser.add_argument("timeline", type=Path)
    options = parser.parse_args()
    arguments = json.loads(options.arguments)
    workload = Workload(**arguments["workload"])
    enter_namespace(options.namespace)
    torch.set_num_threads(1)
    compute_little()
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments['host']}:{PORT}",
        rank=options.rank,
        world_size=workload.num_stages * workload.num_peers,
        timeout=timedelta(hours=2),  # receives wait from the beginning of their round
    )
    train(workload, arguments["schedule"], options.rank, SpanWriter(options.timeline))


if __name__ == "__main__":
    main()

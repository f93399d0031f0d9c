"""Predicts the rounds of an arm of wan.py, by the planner's model of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from links import LinkOptions
from wan_workload import Workload

from coordinator.planning.peers_file import AVERAGING_GAIN, USUAL_LINK_UTILISATION
from swarm_peer.codecs import find_codec
from swarm_peer.model.traffic import hop_bytes
from swarm_peer.policy.planning.performance_model import Counts, Prediction, Predictor
from swarm_peer.policy.planning.resources import PeerGroup, StageWork
from swarm_peer.policy.stage_memory import StageMemory
from swarm_peer.runtime.host.expected_work import step_settings

# Optimizer steps to the next average, in rounds without one.
NEVER = 10**9
NO_MEMORY = StageMemory(weight_bytes=0.0, weight_gradient_bytes=0.0, optimizer_bytes=0.0, microbatch_bytes=0.0)


def usual_peer(workload: Workload, links: LinkOptions) -> PeerGroup:
    """All peers of a workload, whose devices take what they are told, as the planner takes them."""
    bandwidth = USUAL_LINK_UTILISATION * (links.bytes_per_s or float("inf"))
    return PeerGroup(
        name="peer",
        count=workload.num_stages * workload.num_peers,
        flops_per_s=1.0,
        upload_bytes_per_s=bandwidth,
        download_bytes_per_s=bandwidth,
        averaging_gain=AVERAGING_GAIN,
        latency_s=2 * links.latency_s,
    )


def predict(workload: Workload, groups: Sequence[PeerGroup], counts: Counts) -> Prediction:
    """A round of some peers, as `plan` has it. Optimizers take nothing.

    Where peers average periodically it is one that no average ends, as it is measured.

    Args:
        counts: of each group (columns) in each stage (rows)
    """
    hop = workload.sequence_length, workload.width, workload.wire
    sent, returned = hop_bytes(*hop), hop_bytes(*hop, with_tokens=False)
    last = workload.num_stages - 1
    works = [
        StageWork(
            layers=workload.layers_per_stage,
            parameters=1,
            trained=1,
            flops=workload.microbatch_s,
            activation_bytes=sent if stage < last else 0.0,
            gradient_bytes=returned if stage else 0.0,
            averaging_bytes=find_codec(workload.averaging).num_bytes(numbers),
            memory=NO_MEMORY,
        )
        for stage, numbers in enumerate(workload.num_parameters())
    ]
    settings = step_settings(workload.manifest())
    if workload.averaging_mode == "periodic":
        settings = replace(settings, steps_per_average=NEVER)
    return Predictor(works=works, groups=groups, settings=settings).predict(counts)


def predicted_round_s(workload: Workload, links: LinkOptions) -> float:
    """Seconds of a round of a workload's own peers."""
    return predict(workload, [usual_peer(workload, links)], [[workload.num_peers]] * workload.num_stages).step_s

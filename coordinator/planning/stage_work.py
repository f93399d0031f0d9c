"""The work that stages of a run ask of peers with GPUs, if there were so many stages, or the model were wider."""

from __future__ import annotations

from swarm_peer.config import RunManifest
from swarm_peer.model.costs import BACKWARD_PER_FORWARD, FROZEN_BACKWARD_PER_FORWARD
from swarm_peer.model.families import family_of
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.planning.resources import StageWork
from swarm_peer.runtime.host.expected_work import works_of

# Plans are for GPUs, whose memory holds nothing but what trains.
DEVICE_TYPE = "cuda"
# Codecs that the square-cube table compares, and what people call them.
COMPARED_CODECS: dict[str, str] = {
    "none": "fp32",
    "fp16": "fp16",
    "blockwise_8bit": "8-bit",
    "int4_hadamard": "4-bit",
}


def cut_into(manifest: RunManifest, num_stages: int) -> ResolvedManifest:
    """The run if it had so many stages: cut as the manifest says where it names that number, else evenly.

    Args:
        manifest: its model config is inline (resolve_model)

    Raises:
        UserError: see ResolvedManifest.of
    """
    if num_stages != manifest.stages.count:
        stages = manifest.stages.model_copy(update={"count": num_stages, "layers": None})
        manifest = manifest.model_copy(update={"stages": stages})
    return ResolvedManifest.of(manifest)


def stage_works(manifest: RunManifest, num_stages: int) -> tuple[StageWork, ...]:
    """The work of each stage of a run if it had so many.

    Raises:
        UserError: see cut_into
    """
    return works_of(cut_into(manifest, num_stages), DEVICE_TYPE)


def widened_layer_flops(manifest: RunManifest, factor: int) -> tuple[int, float]:
    """Hidden size, and operations of one sample in the first layer, forward and backward, of a model so much wider."""
    family = family_of(cut_into(manifest, 1).config).widened(factor)
    length = manifest.data.sequence_length
    flops = family.layer_cost(0, length).forward_flops
    backward = BACKWARD_PER_FORWARD if manifest.model.adapter is None else FROZEN_BACKWARD_PER_FORWARD
    flops *= 1 + backward + manifest.model.activation_checkpointing
    return family.config.hidden_size, float(flops * length)

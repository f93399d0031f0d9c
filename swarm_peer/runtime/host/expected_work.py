"""The work of a run's stages as the performance model takes it: model/costs.py's counts, and bytes on the wire.

Shapes: B samples of a microbatch, T tokens, D hidden size.
"""

from __future__ import annotations

from swarm_peer.codecs import find_codec
from swarm_peer.config import RunManifest
from swarm_peer.model.costs import StageCosts, stage_costs
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.traffic import hop_bytes
from swarm_peer.policy.planning.resources import StageWork, StepSettings


def works_of(resolved: ResolvedManifest, device_type: str) -> tuple[StageWork, ...]:
    """The work of each stage of a run, on devices of a type."""
    counted = stage_costs(resolved, device_type)
    return tuple(_stage_work(resolved, spec, costs) for spec, costs in zip(resolved.specs, counted, strict=True))


def _stage_work(resolved: ResolvedManifest, spec: StageSpec, costs: StageCosts) -> StageWork:
    manifest, length, width = resolved.manifest, resolved.manifest.data.sequence_length, resolved.boundary_width
    return StageWork(
        layers=len(spec.layers),
        parameters=costs.parameters,
        trained=costs.trained,
        flops=float(costs.flops * length),
        activation_bytes=0.0 if spec.is_last else hop_bytes(length, width, manifest.wire.activations),
        gradient_bytes=0.0 if spec.is_first else hop_bytes(length, width, manifest.wire.gradients, False),
        averaging_bytes=find_codec(manifest.averaging.compression).num_bytes(costs.trained),
        memory=costs.memory,
        host_bytes=costs.host_bytes,
    )


def step_settings(manifest: RunManifest) -> StepSettings:
    """Give the settings of a manifest that determine the time of a step."""
    training, averaging = manifest.training, manifest.averaging
    return StepSettings(
        global_batch_size=training.global_batch_size,
        microbatch_size=training.microbatch_size,
        max_in_flight=manifest.limits.max_in_flight,
        min_peers=manifest.stages.peers_to_start,
        steps_per_average=averaging.steps_per_average,
        averages_ahead=averaging.mode == "delayed",
    )

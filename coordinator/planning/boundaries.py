"""Boundaries of few values at equal parameters: MLPs as much wider as the layers that write less are smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest


def with_boundary(manifest: RunManifest, layers: Sequence[int], boundary: dict[str, int], multiple: int) -> RunManifest:
    """The run with a boundary, and MLPs of such a width that it trains about as many values.

    Args:
        manifest: without a boundary; its model config is inline (resolve_model)
        layers: of each stage, with the boundary and without
        boundary: as `model.boundary` has it
        multiple: MLPs are a multiple of so many values wide

    Raises:
        UserError: its model cannot have this boundary, or not in this cut
        ValidationError: the manifest cannot
    """
    cut = {"stages": manifest.stages.model_copy(update={"count": len(layers), "layers": tuple(layers)})}
    manifest = manifest.model_copy(update=cut)
    low, high = (num_trained(_with_width(manifest, boundary, width)) for width in (multiple, 2 * multiple))
    width = multiple * (1 + round((num_trained(manifest) - low) / (high - low)))
    return _with_width(manifest, boundary, width)


def num_trained(manifest: RunManifest) -> int:
    """How many values a run trains. Its model config is inline."""
    resolved = ResolvedManifest.of(manifest)
    return sum(resolved.num_trained(spec) for spec in resolved.specs)


def _with_width(manifest: RunManifest, boundary: dict[str, int], width: int) -> RunManifest:
    config = manifest.model.config
    assert isinstance(config, dict), "a name has no width"
    key = "n_inner" if config["model_type"] == "gpt2" else "intermediate_size"
    data: dict[str, Any] = manifest.model_dump()
    data["model"] |= {"boundary": boundary, "config": config | {key: width}}
    return RunManifest.model_validate(data)

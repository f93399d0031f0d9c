"""How many microbatches a peer takes, by its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm_peer.config import load_manifest
from swarm_peer.errors import UserError
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.preparation import microbatch_capacity


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_peer_takes_as_many_microbatches_as_fit_its_memory(device: str) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    limit = resolved.manifest.limits.max_in_flight
    for spec, costs in zip(resolved.specs, stage_costs(resolved, device), strict=True):

        def capacity(memory_bytes: float | None) -> int:
            memory = None if memory_bytes is None else int(memory_bytes)
            return microbatch_capacity(resolved, spec, torch.device(device), memory)  # noqa: B023

        assert (capacity(None), capacity(1e12)) == (limit, limit)
        enough = costs.memory.peak_bytes(limit)
        assert capacity(enough + 1) == limit
        assert capacity(enough - 1) < limit
        assert costs.memory.peak_bytes(capacity(enough - 1)) < enough
        least = costs.memory.peak_bytes(1)
        with pytest.raises(UserError, match=rf"stage {spec.index} needs about {least / 2**30:.1f} GiB; choose a small"):
            capacity(least - 1)

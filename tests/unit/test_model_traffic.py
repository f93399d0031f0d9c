"""Bytes between stages are those that stages send."""

import pytest
from swarm import tiny_manifest

from coordinator.planning.stage_work import stage_works
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.traffic import stage_traffic


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_stage_receives_what_its_neighbours_send(num_stages):
    wire = {"activations": "fp16", "gradients": "int4_hadamard"}
    manifest = tiny_manifest(stages={"count": num_stages}, wire=wire)
    traffic = stage_traffic(ResolvedManifest.of(manifest))
    works = stage_works(manifest, num_stages)
    for stage, (here, work) in enumerate(zip(traffic, works, strict=True)):
        before = works[stage - 1].activation_bytes if stage else 0.0
        after = works[stage + 1].gradient_bytes if stage + 1 < num_stages else 0.0
        assert here == (work.activation_bytes + work.gradient_bytes, before + after)

"""Compares codecs and modes of averaging, for the same peers at the same stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from coordinator.planning.stage_work import stage_works
from swarm_peer.config import AveragingMode, RunManifest
from swarm_peer.policy.planning.performance_model import Prediction, Predictor
from swarm_peer.policy.planning.planner import Plan
from swarm_peer.runtime.host.expected_work import step_settings

# Codecs for slow links, of activations and of gradients, beside the manifest's own.
WIRES: tuple[tuple[str, str], ...] = (
    ("blockwise_8bit", "blockwise_8bit"),
    ("blockwise_8bit", "int4_hadamard"),
    ("int5_hadamard", "int4_hadamard"),
    ("int4_hadamard", "int4_hadamard"),
)
AVERAGING: tuple[str, ...] = ("blockwise_8bit", "topk_2bit")


def link_choices(manifest: RunManifest, made: Plan, prediction: Prediction) -> list[dict[str, Any]]:
    """The throughput with each codec and mode, beginning with the manifest's own: plain values for a report.

    Memory is not looked at again.
    """
    assert made.best is not None
    counts = [stage.peers for stage in prediction.stages]
    rows = []
    for changed in _manifests(manifest):
        works = stage_works(changed, made.best.num_stages)
        samples_per_s = {}
        for mode in get_args(AveragingMode):
            settings = step_settings(_with(changed, "averaging", mode=mode))
            samples_per_s[mode] = Predictor(works=works, groups=made.groups, settings=settings).score(counts)[0]
        ratios = {mode: value / prediction.samples_per_s for mode, value in samples_per_s.items()}
        codecs = {**changed.wire.model_dump(), "averaging": changed.averaging.compression}
        rows.append(codecs | ratios)
    return rows


def _manifests(manifest: RunManifest) -> Iterator[RunManifest]:
    own = manifest.wire.activations, manifest.wire.gradients
    averaged: list[str] = [manifest.averaging.compression]
    averaged += [codec for codec in AVERAGING if codec not in averaged]
    for averaging in averaged:
        changed = _with(manifest, "averaging", compression=averaging)
        yield changed
        for activations, gradients in WIRES:
            if own != (activations, gradients):
                yield _with(changed, "wire", activations=activations, gradients=gradients)


def _with(manifest: RunManifest, section: str, **values: str) -> RunManifest:
    changed = getattr(manifest, section).model_copy(update=values)
    return manifest.model_copy(update={section: changed})

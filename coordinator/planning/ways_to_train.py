"""Compares ways to train by their time to the same loss, for the same peers at the same stages.

A way is when stage-mates average, the codecs of what they send, how many values pass between stages, and the optimizer.
Its time is the steps that it takes, as far as they are known (step_factors.py), over its speed, which is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from operator import itemgetter
from typing import Any, TypeAlias

from pydantic import ValidationError

from coordinator.config_files import changed_settings
from coordinator.planning.boundaries import with_boundary
from coordinator.planning.stage_work import cut_into, stage_works
from coordinator.planning.step_factors import (
    PARTS,
    Interval,
    Part,
    StepFactor,
    Way,
    known_periods,
    relative_steps,
    step_factors,
)
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.planning.performance_model import Prediction, Predictor
from swarm_peer.policy.planning.planner import Plan
from swarm_peer.runtime.host.expected_work import step_settings

# Codecs for slow links, of activations and of gradients.
WIRES: tuple[tuple[str, str], ...] = (
    ("blockwise_8bit", "blockwise_8bit"),
    ("blockwise_8bit", "int4_hadamard"),
    ("int5_hadamard", "int4_hadamard"),
    ("int4_hadamard", "int4_hadamard"),
)
AVERAGING: tuple[str, ...] = ("blockwise_8bit", "topk_2bit", "sign")
# Less than this of a difference is not worth a change.
LITTLE = 0.02
# GPUs multiply matrices fastest whose widths are multiples of this.
MLP_MULTIPLE = 64

# Makes another manifest of one, and leaves what it does not change.
# Raises ValidationError or UserError where that manifest cannot be.
Change: TypeAlias = Callable[[RunManifest], RunManifest]


def compare_ways(manifest: RunManifest, made: Plan, prediction: Prediction) -> list[dict[str, Any]]:
    """Ways to train: the manifest's own first, then those that differ in one part, then the recommended one.

    That is found by one change after the other: each time the one that saves the most time, as long as it saves more
    than LITTLE, and does so at the worse end of what is known. None is recommended if there is no such change.
    Memory is looked at only as far as fewer microbatches in flight make a way slower.

    Returns:
        plain values for a report. `steps` and `time` are relative to the manifest's own way, with the ends of their
        intervals, and None where they are not known
    """
    comparison = _Comparison(manifest, made, prediction)
    best = comparison.best()
    others = [changed for changed in comparison.changed(manifest) if changed != best]
    rows = [comparison.row(each) for each in others]
    rows = [comparison.row(manifest), *sorted(filter(itemgetter("tokens_per_s"), rows), key=_by_time)]
    rows = [row | {"recommended": False} for row in rows]
    return rows if best == manifest else [*rows, comparison.row(best) | {"recommended": True}]


def _by_time(row: dict[str, Any]) -> tuple[bool, float]:
    return row["time"] is None, row["time"] or -row["speed"]


class _Comparison:
    """A manifest with the peers and stages of its plan, and the ways that differ from it."""

    def __init__(self, manifest: RunManifest, made: Plan, prediction: Prediction):
        assert made.best is not None
        self._manifest, self._groups = manifest, made.groups
        self._layers = [work.layers for work in made.best.works]
        self._counts = [stage.peers for stage in prediction.stages]
        self._members = max(map(sum, self._counts))
        self._parameters = sum(work.parameters for work in made.best.works)
        self._hidden_size = cut_into(manifest, 1).hidden_size
        self._changes = list(self._choices())

    def _choices(self) -> Iterator[Change]:
        yield partial(_with, section="optimizer", name="muon")
        if len(self._layers) > 1:
            for activations, gradients in WIRES:
                yield partial(_with, section="wire", activations=activations, gradients=gradients)
            boundaries = (entry.value for entry in step_factors() if entry.part == "boundary")
            shares = dict.fromkeys(value for value in boundaries if value.startswith("d/"))
            for share in shares:
                rank = self._hidden_size // int(share.removeprefix("d/"))
                yield partial(_with_rank, layers=self._layers, rank=rank)
        if self._members > 1:
            for codec in AVERAGING:
                yield partial(_with, section="averaging", compression=codec)
            for mode in _modes(self._way(self._manifest)):
                yield partial(_with_mode, **mode)

    def changed(self, manifest: RunManifest) -> Iterator[RunManifest]:
        """The manifests that differ from this one in one part, and that can be."""
        for change in self._changes:
            with suppress(ValidationError, UserError):
                if (changed := change(manifest)) != manifest:
                    yield changed

    def best(self) -> RunManifest:
        """The manifest to recommend; the own one if no change is known to save time."""
        best, saves = self._manifest, True
        while saves:
            times = [(time, changed) for changed in self.changed(best) if (time := self._time(changed, best))]
            certain = [(time.value, changed) for time, changed in times if time.high < 1 - LITTLE]
            saves = bool(certain)
            _, best = min(certain, key=itemgetter(0), default=(1.0, best))
        return best

    def row(self, manifest: RunManifest) -> dict[str, Any]:
        """One way in plain values."""
        own, way = self._way(self._manifest), self._way(manifest)
        steps, sources = self._steps(manifest, self._manifest)
        changed = changed_settings(self._manifest, manifest)
        rate = self._rate(manifest)
        return {
            "changes": {part: way.parts[part] for part in PARTS if way.parts[part] != own.parts[part]},
            "set": [f"{key}={_yaml(value)}" for key, _, value in changed if value is not None],
            "tokens_per_s": rate * manifest.data.sequence_length,
            "speed": rate / self._rate(self._manifest),
            **_ends("steps", steps),
            **_ends("time", self._time(manifest, self._manifest)),
            "known_from": list(dict.fromkeys(entry.known_from for entry in sources)),
            "sources": list(dict.fromkeys(entry.source for entry in sources)),
        }

    def _time(self, manifest: RunManifest, base: RunManifest) -> Interval | None:
        """The time to a loss, relative to another way's."""
        steps, _ = self._steps(manifest, base)
        if steps is None or not (rate := self._rate(manifest)):
            return None
        slower = self._rate(base) / rate
        return Interval(*(end * slower for end in steps))

    def _rate(self, manifest: RunManifest) -> float:
        """Samples per second."""
        works, settings = stage_works(manifest, len(self._counts)), step_settings(manifest)
        return Predictor(works=works, groups=self._groups, settings=settings).score(self._counts)[0]

    def _steps(self, manifest: RunManifest, base: RunManifest) -> tuple[Interval | None, list[StepFactor]]:
        way, its = self._way(manifest), self._way(base)
        if way != its and manifest.model.pretrained is not None:
            return None, []  # all that is known is of weights that began at random
        return relative_steps(way, its)

    def _way(self, manifest: RunManifest) -> Way:
        averaging, boundary = manifest.averaging, manifest.model.boundary
        is_periodic = averaging.mode == "periodic"
        parts: dict[Part, str] = {
            "mode": f"periodic-{averaging.inner_steps}" if is_periodic else averaging.mode,
            "activations": manifest.wire.activations,
            "gradients": manifest.wire.gradients,
            "averaging": averaging.compression,
            "boundary": "none",
            "optimizer": manifest.optimizer.name,
        }
        if boundary is not None and boundary.rank is not None:
            share, left = divmod(self._hidden_size, boundary.rank)
            parts["boundary"] = f"rank {boundary.rank}" if left else f"d/{share}"
        elif boundary is not None:
            parts["boundary"] = f"maxout {boundary.maxout}"
        outer = averaging.outer_learning_rate, averaging.outer_momentum
        return Way(parts, outer, self._members, self._parameters)


def _modes(way: Way) -> Iterator[dict[str, Any]]:
    """The modes of which something is known, as `averaging` has them."""
    yield {"mode": "synchronous"}
    yield {"mode": "delayed"}
    for value, (rate, momentum) in known_periods(way).items():
        steps = int(value.removeprefix("periodic-"))
        yield {
            "mode": "periodic",
            "inner_steps": steps,
            "outer_learning_rate": rate,
            "outer_momentum": momentum,
        }


def _with(manifest: RunManifest, *, section: str, **values: Any) -> RunManifest:
    data = manifest.model_dump(exclude_unset=True)  # what is not set may have another default beside other values
    data[section] = data.get(section, {}) | values
    return RunManifest.model_validate(data)


def _with_mode(manifest: RunManifest, **values: Any) -> RunManifest:
    """The run with another mode; with longer periods it has whole ones, of its steps and between its snapshots."""
    data = manifest.model_dump()
    data["averaging"] |= values
    period = values.get("inner_steps", 1)
    for section, name in (("training", "steps"), ("training", "validation_every"), ("recovery", "snapshot_every")):
        data[section][name] = ceil(data[section][name] / period) * period
    return RunManifest.model_validate(data)


def _with_rank(manifest: RunManifest, *, layers: Sequence[int], rank: int) -> RunManifest:
    """The run with fewer values between stages, if it has no boundary yet: that cannot be told from its width."""
    if manifest.model.boundary is not None:
        return manifest
    return with_boundary(manifest, layers, {"rank": rank}, MLP_MULTIPLE)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    value, low, high = interval or (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}

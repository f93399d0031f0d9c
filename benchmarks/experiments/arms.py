"""Ways to train, by names such as `periodic-10+muon@0.01`: what each changes in the manifest that all share.

A name is parts with + between them, and perhaps a learning rate after @. Parts that are not named are those of the
reference, `adamw`: data-parallel, with nothing encoded and whole hidden states between stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.config_files import load_manifest
from coordinator.planning.boundaries import with_boundary
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
REFERENCE = "adamw"
# Models by their number of parameters: the demo's, and larger ones of its family.
SIZES: Mapping[str, tuple[str, ...]] = {
    "2M": (),
    "10M": ("model.config.n_embd=384", "model.config.n_layer=6", "stages.count=3"),
    "40M": ("model.config.n_embd=640", "model.config.n_layer=8", "model.config.n_head=10", "stages.count=4"),
}
COMMON = ("training.global_batch_size=16", "training.validation_samples=256", "data.validation_documents=1024")
# The part of the steps in which the learning rate rises.
WARM_UP = 0.1
RATES: Mapping[str, float] = {"adamw": 1e-3, "muon": 2e-2}
PARTS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("optimizer.name=adamw",),
    "muon": ("optimizer.name=muon",),
    "delayed": ("averaging.mode=delayed",),
    "plain-delayed": ("averaging.mode=delayed", "averaging.eager_updates=false"),
    # The outer step of DiLoCo's default, instead of plain means of the members' weights.
    "nesterov": ("averaging.outer_learning_rate=0.7", "averaging.outer_momentum=0.9"),
    "wires-8bit": ("wire={activations: blockwise_8bit, gradients: blockwise_8bit}",),
    "wires-5bit": ("wire={activations: int5_hadamard, gradients: int4_hadamard}",),
    "wires-4bit": ("wire={activations: int4_hadamard, gradients: int4_hadamard}",),
    "gradients-4bit": ("wire={activations: blockwise_8bit, gradients: int4_hadamard}",),
    # Members average, and nothing is encoded: how far other roundings alone turn a training.
    "averages-none": ("averaging.compression=none",),
    "averages-8bit": ("averaging.compression=blockwise_8bit",),
    "averages-4bit": ("averaging.compression=int4_hadamard",),
    "topk_2bit": ("averaging.compression=topk_2bit",),
    "sign": ("averaging.compression=sign",),
}
_PERIODIC, _RANK, _MAXOUT, _MEMBERS = map(re.compile, (r"periodic-(\d+)", r"d/(\d+)", r"maxout-(\d+)", r"x(\d+)"))
# So small models need a fine one, to train as many values as each other.
MLP_MULTIPLE = 4


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        members: of each stage that share a global batch
        averages: whether members average each gradient by a codec that loses nothing for later rounds
        rate: learning rate
        settings: what the parts change, as `--set` takes it
        boundary: d or maxout, and of how many values one passes; None for whole hidden states
    """

    name: str
    members: int
    averages: bool
    rate: float
    settings: tuple[str, ...]
    boundary: tuple[str, int] | None = None

    @classmethod
    def of(cls, name: str) -> Arm:
        """The arm of a name.

        Raises:
            UserError: it names a part that there is none of, or parts that do not fit each other
        """
        text, _, rate = name.partition("@")
        parts, members, boundary = text.split("+"), 2, None
        settings: list[str] = []
        for part in parts:
            if part in PARTS:
                settings += PARTS[part]
            elif found := _PERIODIC.fullmatch(part):
                means = ("averaging.outer_learning_rate=1", "averaging.outer_momentum=0")
                settings = ["averaging.mode=periodic", f"averaging.inner_steps={found[1]}", *means, *settings]
            elif found := _MEMBERS.fullmatch(part):
                members = int(found[1])
            elif found := _RANK.fullmatch(part):
                boundary = ("d", int(found[1]))
            elif found := _MAXOUT.fullmatch(part):
                boundary = ("maxout", int(found[1]))
            else:
                known = ", ".join((*PARTS, "periodic-H", "d/K", "maxout-K", "xMEMBERS"))
                raise UserError(f"arm {name!r}: {part!r} is none of the parts {known}; correct it")
        optimizer = "muon" if "muon" in parts else "adamw"
        averages = any(part.startswith("averages-") for part in parts)
        if averages and sum("averaging." in setting for setting in settings) > 1:
            raise UserError(
                f"arm {name!r}: averages-... are simulated for synchronous averages alone; leave a part out"
            )
        return cls(name, members, averages, float(rate or RATES[optimizer]), tuple(settings), boundary)

    def manifest(self, size: str, seed: int, steps: int, more: Sequence[str] = ()) -> RunManifest:
        """The manifest of a training.

        Args:
            more: settings of all arms, as `--set` takes them

        Raises:
            UserError: settings do not fit each other
        """
        common = (*COMMON, *SIZES[size], *more)
        own = (
            f"seed={seed}",
            f"training.steps={steps}",
            f"training.validation_every={steps}",
            f"schedule.warmup_steps={round(WARM_UP * steps)}",
            "recovery.snapshot_every=0",  # nobody rewinds, and snapshots may not fit into periods
            f"optimizer.learning_rate={self.rate}",
        )
        batch = load_manifest(CONFIG, (*common, "training.microbatch_size=1")).training.global_batch_size
        is_shared = self.averages or any(setting.startswith("averaging.") for setting in self.settings)
        microbatch = f"training.microbatch_size={batch // self.members if is_shared else batch}"
        manifest = load_manifest(CONFIG, (*common, *own, microbatch, *self.settings))
        return manifest if self.boundary is None else self._with_boundary(manifest, *self.boundary)

    def _with_boundary(self, manifest: RunManifest, kind: str, number: int) -> RunManifest:
        """The run with a boundary, cut alike, and with MLPs so wide that as many values are trained."""
        resolved = resolve_manifest(manifest)
        boundary = {"rank": resolved.hidden_size // number} if kind == "d" else {"maxout": number}
        return with_boundary(resolved.manifest, [len(spec.layers) for spec in resolved.specs], boundary, MLP_MULTIPLE)

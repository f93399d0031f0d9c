"""The run that the arms of wan.py train, and its costs: compute, activation bytes and gradient bytes of a round."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from swarm import GPT2, tiny_manifest

from swarm_peer.codecs import find_codec
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.stage import StageModule

AveragingMode = Literal["synchronous", "delayed", "periodic"]
# More than any measurement waits for: runs are stopped, they do not end.
ENDLESS_STEPS = 10**6
# To the next average, where peers average periodically.
INNER_STEPS = 50
# A round that takes so many times as long as its compute and its bytes do together will not end.
SLOWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run and its devices.

    Attributes:
        num_peers: of each stage; pipelines of torch's, which average their gradients
        microbatch_s: a device's time for a microbatch, forward and backward
        num_microbatches: in a global batch
        max_in_flight: most microbatches that a peer holds; a microbatch of torch's pipelines has as much room
        averaging, wire: codecs
    """

    num_stages: int = 4
    num_peers: int = 2
    microbatch_s: float = 0.25
    num_microbatches: int = 256
    max_in_flight: int = 16
    width: int = 32
    layers_per_stage: int = 1
    sequence_length: int = 16
    averaging: str = "none"
    averaging_mode: AveragingMode = "synchronous"
    wire: str = "fp16"

    @property
    def ideal_s(self) -> float:
        """C: how long the devices of a stage compute in a round, if they share the work evenly and never wait."""
        return self.num_microbatches * self.microbatch_s / self.num_peers

    def activation_bytes(self) -> float:
        """X times the bandwidth: what a peer between two others sends in a round, activations and gradients."""
        hop_bytes = find_codec(self.wire).num_bytes(self.sequence_length * self.width)
        return 2 * hop_bytes * self.num_microbatches / self.num_peers

    def averaging_bytes(self) -> float:
        """A times the bandwidth: what a peer of the second stage sends in an averaging round."""
        numbers = self.num_parameters()[min(1, self.num_stages - 1)]
        return 2 * (self.num_peers - 1) / self.num_peers * find_codec(self.averaging).num_bytes(numbers)

    def longest_round_s(self, bytes_per_s: float) -> float:
        """How long to wait for a round over links of such a bandwidth, 0 for no limit."""
        num_bytes = self.activation_bytes() + self.averaging_bytes()
        return SLOWEST * (self.ideal_s + (num_bytes / bytes_per_s if bytes_per_s else 0.0))

    def num_parameters(self) -> list[int]:
        """The weights of each stage."""
        resolved = ResolvedManifest.of(self.manifest())
        modules = [StageModule(resolved.config, spec, resolved.manifest.model) for spec in resolved.specs]
        return [sum(parameter.numel() for parameter in module.parameters()) for module in modules]

    def manifest(self) -> RunManifest:
        """The manifest of the run."""
        model = {
            "n_layer": self.num_stages * self.layers_per_stage,
            "n_embd": self.width,
            "n_positions": self.sequence_length,
            "vocab_size": 256,
        }
        manifest: RunManifest = tiny_manifest(
            name="wan",
            model={"config": GPT2 | model},
            stages={
                "count": self.num_stages,
                "layers": [self.layers_per_stage] * self.num_stages,
                "peers_to_start": self.num_peers,
            },
            data={"sequence_length": self.sequence_length},
            training={
                "steps": ENDLESS_STEPS,
                "global_batch_size": self.num_microbatches,
                "microbatch_size": 1,
                "validation_every": 0,
            },
            wire={"activations": self.wire, "gradients": self.wire},
            averaging={
                "mode": self.averaging_mode,
                "inner_steps": INNER_STEPS,
                "compression": self.averaging,
                "dense_share": 0.0,  # nothing is learnt here, and the first steps are those that are measured
                # An averaging round takes minutes on the slowest of these links, and a part of it long, too.
                "round_timeout_s": 3600,
                "chunk_timeout_s": 300,
            },
            recovery={"snapshot_every": 1000},
            limits={"hop_timeout_s": 60, "announcement_s": 30, "max_in_flight": self.max_in_flight},
        )
        return manifest

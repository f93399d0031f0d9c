"""A run's manifest together with what follows from it: its hash, its parsed model config and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.adapters import adapter_cost, target_names
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.boundary import check_boundary
from swarm_peer.model.families import Cost, family_of
from swarm_peer.model.partition import ModelCosts, StageSpec, boundary_width, cut_stages, model_costs


@dataclass(frozen=True)
class ResolvedManifest:
    """A manifest whose model config is inline, checked and parsed once. Made by `of`.

    Attributes:
        hash: of the manifest; it rides on every call and every announcement
        config: the model's transformers config
        specs: which part of the model each stage holds
    """

    manifest: RunManifest
    hash: str
    config: PretrainedConfig
    specs: tuple[StageSpec, ...]

    @classmethod
    def of(cls, manifest: RunManifest) -> ResolvedManifest:
        """Resolve a manifest as a run publishes it.

        Raises:
            UserError: the model config is not inline, or see parse_model_config, cut_stages, target_names and
                check_boundary
        """
        if not isinstance(manifest.model.config, dict):
            raise UserError("the run's manifest has no inline model config: its coordinator has to publish one")
        config = parse_model_config(manifest.model.config)
        model, stages, length = manifest.model, manifest.stages, manifest.data.sequence_length
        if model.adapter is not None:
            target_names(family_of(config), model.adapter)
        if model.boundary is not None:
            check_boundary(model.boundary, family_of(config))
        specs = cut_stages(config, stages.count, length, stages.layers, model.share_layers, model.boundary)
        return cls(manifest, manifest.hash, config, specs)

    @property
    def inline_config(self) -> dict[str, Any]:
        """The model config as the manifest has it: plain values that `config` was parsed from."""
        assert isinstance(self.manifest.model.config, dict), "`of` takes no other"
        return self.manifest.model.config

    @cached_property
    def costs(self) -> ModelCosts:
        """The costs of the model's parts, with the run's sequences."""
        model = self.manifest.model
        return model_costs(self.config, self.manifest.data.sequence_length, model.share_layers, model.boundary)

    def num_trained(self, spec: StageSpec) -> int:
        """How many values of a stage training changes: all that it holds, or those of its adapters."""
        adapters = self.adapter_cost(spec)
        return self.costs.of(spec).parameters if adapters is None else adapters.parameters

    def adapter_cost(self, spec: StageSpec) -> Cost | None:
        """The cost of a stage's adapters; None if the run trains none."""
        adapter = self.manifest.model.adapter
        return None if adapter is None else adapter_cost(family_of(self.config), adapter, spec.layers)

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has, K."""
        return len(self.specs)

    @property
    def hidden_size(self) -> int:
        """Width of hidden states, D."""
        return int(self.config.hidden_size)

    @property
    def boundary_width(self) -> int:
        """How many values of a token travel between stages, W: all D, if the run has nothing else at boundaries."""
        return boundary_width(self.manifest.model.boundary, self.hidden_size)

    @property
    def vocab_size(self) -> int:
        """How many token ids the model knows, V."""
        return int(self.config.vocab_size)

"""One stage of a model as a torch module, and its initial weights.

A stage holds its own layers only, under the names that the Hugging Face model's state dict gives them, so that the
union of all stages' state dicts is the model's. Knows nothing of optimizers or peers.

Shapes: B samples, T tokens, D hidden size, W values of a token that pass a boundary (D as a rule), V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from swarm_peer.config import ModelSection
from swarm_peer.model.boundary import make_boundary
from swarm_peer.model.families import family_of
from swarm_peer.model.families.base import shapes_only
from swarm_peer.model.gradient_norm import limit_layer_gradient
from swarm_peer.model.losses import token_losses
from swarm_peer.model.parameters import seeded
from swarm_peer.model.partition import StageSpec

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StageModule(nn.Module):
    """The layers of one stage. Parameters are fp32, and on the meta device until initialise() or allocate() makes
    them real.

    Args:
        config: as parse_model_config returns it
        section: the run's model. If it shares layers, one layer, named as the stage's first, is applied once for each
            layer of the stage. Its precision is the autocast type on CUDA devices; others compute in fp32
    """

    def __init__(self, config: PretrainedConfig, spec: StageSpec, section: ModelSection):
        super().__init__()
        self.config = config
        self.spec = spec
        # Nothing passes a boundary behind the last stage, which may write all of the residual stream.
        rank = None if section.boundary is None or spec.is_last else section.boundary.rank
        self.family = family_of(config, rank)
        self.section = section
        self.layer_names = [str(spec.first_layer if section.share_layers else index) for index in spec.layers]
        with shapes_only():
            body = nn.Module()
            if spec.is_first:
                for name, module in self.family.build_embeddings().items():
                    body.add_module(name, module)
            layers = {name: self.family.build_layer(int(name)) for name in dict.fromkeys(self.layer_names)}
            body.add_module(self.family.layers, nn.ModuleDict(layers))
            if spec.is_last:
                body.add_module(self.family.norm, self.family.build_norm())
            self.add_module(self.family.body, body)
            if spec.is_last:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.boundary = make_boundary(section.boundary, self.family, spec)
        # Its frequencies follow from the config and are in no state dict: they are real from the start.
        with torch.device("cpu"):
            self.rotary = self.family.build_rotary()

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        learnt_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        tokens_BT: Tensor | None = None,
        *,
        last_token: bool = False,
    ) -> Tensor:
        """Run the stage.

        Args:
            inputs: tokens_BT (int64) for the first stage, passed_BTW for the others
            targets_BT: token ids (int64) that follow the inputs; for the last stage only
            learnt_BT: which of the targets count; all if None
            positions_BT: of the inputs in their documents, where samples have several
            tokens_BT: what the inputs were made of, for stages but the first whose boundary reads them
            last_token: on the last stage, compute the logits of the last position only

        Returns:
            passed_BTW; on the last stage losses_B, each sample's mean cross entropy in fp32 (what does not count is
            zero, and T stays what the sum is divided by), or logits_BTV if there are no targets
        """
        assert targets_BT is None or self.spec.is_last, "only the last stage computes a loss"
        body = self.get_submodule(self.family.body)
        layers = body.get_submodule(self.family.layers)
        kinds = [self.family.layer_kind(index) for index in self.spec.layers]
        with self._autocast(inputs.device):
            if self.spec.is_first:
                tokens_BT, inputs = inputs, self.family.embed(body, inputs, positions_BT)
            hidden_BTD = self.boundary.enter(inputs, tokens_BT)
            if hidden_BTD is not inputs:
                self._limit(hidden_BTD)
            arguments = {
                kind: self.family.layer_arguments(kind, self.rotary, hidden_BTD, positions_BT) for kind in set(kinds)
            }
            for name, kind in zip(self.layer_names, kinds, strict=True):
                layer = layers.get_submodule(name)
                if self.section.activation_checkpointing and torch.is_grad_enabled():
                    hidden_BTD = checkpoint(layer, hidden_BTD, use_reentrant=False, **arguments[kind])
                else:
                    hidden_BTD = layer(hidden_BTD, **arguments[kind])
                self._limit(hidden_BTD)
            if not self.spec.is_last:
                passed_BTW = self.boundary.leave(hidden_BTD)
                if passed_BTW is not hidden_BTD:
                    self._limit(passed_BTW)
                return passed_BTW
            if last_token:
                hidden_BTD = hidden_BTD[:, -1:]
            hidden_BTD = body.get_submodule(self.family.norm)(hidden_BTD)
            if targets_BT is None:
                return self._logits(hidden_BTD)
            vocab_size = self.config.vocab_size
            losses_N = token_losses(self._logits, hidden_BTD.flatten(0, 1), targets_BT.flatten(), vocab_size)
        losses_BT = losses_N.view_as(targets_BT)
        return (losses_BT if learnt_BT is None else losses_BT.where(learnt_BT, 0.0)).mean(dim=1)

    @property
    def layers(self) -> str:
        """The beginning of the names of layers' parameters; those of embedding, normalisation and head have another."""
        return f"{self.family.body}.{self.family.layers}."

    def _limit(self, hidden: Tensor) -> None:
        """Have its gradient be no larger than what comes before it can take."""
        if hidden.requires_grad:
            hidden.register_hook(  # type: ignore[no-untyped-call]  # torch declares no types here
                partial(limit_layer_gradient, precision=self.section.precision)
            )

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.family.cap_logits(self.lm_head(hidden))

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda" or self.section.precision == "fp32":
            return nullcontext()
        # Its cache keeps a 16-bit copy of each weight until the pass is over, though a checkpointed layer is done with.
        caches = self.section.share_layers or not self.section.activation_checkpointing
        return torch.autocast("cuda", dtype=AUTOCAST_DTYPES[self.section.precision], cache_enabled=caches)


def allocate(module: StageModule) -> None:
    """Make the parameters real, on the CPU, with zeros."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad))


def initialise(module: StageModule, seed: int) -> None:
    """Make the parameters real, on the CPU, with the initial weights that the model's family prescribes.

    Each value depends on the seed and on the parameter's name alone, so that any cut of a model, on any peer, starts
    from the same weights.
    """
    for module_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            values = torch.zeros(parameter.shape)
            if name == "weight":
                if isinstance(owner, (nn.Linear, nn.Embedding, Conv1D)):
                    path = f"{module_name}.{name}"
                    # All that a stage knows passes the matrices of a boundary: they keep its scale.
                    at_boundary = module_name.startswith("boundary.")
                    std = parameter.shape[1] ** -0.5 if at_boundary else module.family.weight_std(path)
                    values.normal_(std=std, generator=seeded(seed, path))
                else:
                    values.fill_(1.0 if isinstance(owner, nn.LayerNorm) else module.family.norm_weight)
            if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
                values[owner.padding_idx] = 0.0
            owner.register_parameter(name, nn.Parameter(values, parameter.requires_grad))

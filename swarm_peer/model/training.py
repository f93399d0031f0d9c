"""Weights, gradient accumulator and optimizer of one stage; the same for one process and for a swarm of peers.

This module knows samples and optimizer steps. It does not know peers, rounds, microbatch ids or deadlines.

Shapes: B samples, T tokens, S = T + 1 token ids (the targets are the inputs moved by one), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from swarm_peer.codecs import find_codec
from swarm_peer.codecs.base import is_within
from swarm_peer.codecs.floats import FP16_SCALE
from swarm_peer.codecs.parts import LARGEST_MEAN
from swarm_peer.errors import RoundClosed
from swarm_peer.model.adapters import add_adapters, clear_adapters, initialise_adapters
from swarm_peer.model.checks import check_float, check_state, check_tokens
from swarm_peer.model.clipping import Clipper
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.frozen_base import keeper
from swarm_peer.model.gradient_norm import (
    MAX_HIDDEN,
    check_hidden,
    check_norm,
    limit_norm,
    max_gradient_norm,
    total_norm,
)
from swarm_peer.model.optimizer import (
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    optimizer_state_template,
    set_learning_rate,
)
from swarm_peer.model.parameters import trained_parameters
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.peft_folder import adapter_source, load_adapters
from swarm_peer.model.pretrained import ModelSource, load_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import STRATEGY_PREFIX, StepResult, shared_entries
from swarm_peer.model.stage import StageModule, allocate, initialise
from swarm_peer.model.strategies import strategy_of
from swarm_peer.policy.decay import Decay
from swarm_peer.token_marks import are_learnt, ids_of, num_targets, positions_in_documents


class StageTrainer:
    """One stage in training, from the run's initial weights on.

    Not thread-safe: all methods are called from one thread, the device thread. Tensors that are passed in may be on
    any device; hidden states and losses are returned on the trainer's own, gradients' means and states on the CPU.
    With dropout in the model's config, results depend on torch's global random state.

    Args:
        resolved: the run's manifest
        spec: one of resolved.specs
        cache_dir: where pretrained weights from the hub are kept
        source: where the pretrained weights are, if elsewhere than the manifest says
        blank: have trained weights of zeros, until load_state() or restart(): where others give the state, making or
            reading the initial ones would be for nothing
        hollow: have no frozen weights either, and compute nothing: for state_template() alone

    Raises:
        UserError: pretrained weights that cannot be read or do not fit

    Attributes:
        trained: the parameters that updates change, by name and in a fixed order: of these alone are accumulator,
            averages, optimizer, states and digests. The others are frozen, alike at all peers of the stage
        optimizer_step: how many updates its weights have had
        num_samples: samples whose gradients are accumulated for the next optimizer step
        num_targets: the targets of these samples, where samples say what is learnt
        decay: of the learning rate, where the run key has had it begin; for the updates that follow
        weights_version: grows with each change of the weights; any thread may read it
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        spec: StageSpec,
        *,
        device: torch.device | str = "cpu",
        cache_dir: Path | None = None,
        source: ModelSource | None = None,
        blank: bool = False,
        hollow: bool = False,
    ):
        manifest = resolved.manifest
        self.manifest = manifest
        self.resolved = resolved
        self.spec = spec
        self.device = torch.device(device)
        self._cache_dir = cache_dir
        self._source = source
        self.optimizer_step = 0
        self.decay: Decay | None = None
        self.num_samples = self.num_targets = 0
        self._has_marks = manifest.data.has_targets
        # The weight of a sample all of whose tokens are learnt.
        self._full_weight = manifest.data.sequence_length if self._has_marks else 1
        # Samples and targets of all passes so far, to tell what work is of that came without its number of samples.
        self._seen = (1, self._full_weight)
        module = self._make_module(blank=blank or hollow, hollow=hollow)
        self.module = module if hollow else module.to(self.device)
        self.trained = trained_parameters(self.module)
        # Adapters are small, and begun anew on another device than at first, DoRA's would differ in their last bits.
        adapts = manifest.model.adapter is not None
        self._initial = {name: value.detach().to("cpu", copy=True) for name, value in self.trained.items() if adapts}
        self.optimizer = make_optimizer(manifest.optimizer, self.trained, self.module.layers)
        self.strategy = strategy_of(manifest.averaging)(self)
        self._clipper = Clipper(manifest.training.max_grad_norm)
        own_scale = FP16_SCALE if manifest.model.precision == "fp16" else 1.0
        self.loss_scale = max(own_scale, find_codec(manifest.wire.gradients).scale)
        # Tells passes before a change of weights from those after it, even at one optimizer step.
        self.weights_version = 0

    def _make_module(self, *, blank: bool = False, hollow: bool = False) -> StageModule:
        """The stage, on the CPU, with the run's initial weights.

        Args:
            blank: zeros will do for what is trained. Frozen weights are real all the same: no state has them
            hollow: frozen weights are not wanted either
        """
        model = self.manifest.model
        module = StageModule(self.resolved.config, self.spec, model)
        whole = model.adapter is None and all(parameter.requires_grad for parameter in module.parameters())
        if blank and whole:
            allocate(module)
        elif model.pretrained is None:
            initialise(module, self.manifest.seed)
        elif not hollow:
            source = self._source or ModelSource(model.pretrained, self._cache_dir)
            load_pretrained(module, module.family, source, keeper(model.base, module.family.layers))
        if not hollow:
            module.boundary.draw(self.manifest.seed)
        if model.adapter is not None:
            add_adapters(module, model.adapter)
            if hollow:
                clear_adapters(module)
            else:
                initialise_adapters(module, self.manifest.seed)
                if (begins := adapter_source(model.adapter, self._cache_dir)) is not None:
                    load_adapters(module, begins)
        return module

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of what is trained, in its order: those of a contribution, and of an average."""
        return [parameter.shape for parameter in self.trained.values()]

    def forward(self, tokens_BS: Tensor, hidden_BTD: Tensor | None = None) -> ForwardPass:
        """Run the stage, and keep what the backward pass needs.

        Args:
            tokens_BS: token ids of any integer type; inputs of the first stage, targets of the last
            hidden_BTD: output of the stage before; None for the first stage

        Raises:
            InvalidMessage: shapes, types or token ids that do not fit
        """
        inputs, others = self._prepare(tokens_BS, hidden_BTD)
        if not self.spec.is_first:
            inputs.requires_grad_()
        self.module.train()
        result = self.module(inputs, **others)
        return ForwardPass(
            output=result.detach(),
            optimizer_step=self.optimizer_step,
            num_targets=num_targets(tokens_BS) if self._has_marks else 0,
            _result=result,
            _hidden_BTD=None if self.spec.is_first else inputs,
            _weights_version=self.weights_version,
        )

    def backward(
        self, forward_pass: ForwardPass, grad_BTD: Tensor | None = None, *, counts: bool = True
    ) -> Tensor | None:
        """Add the gradients of a pass to the accumulator, and count its samples. Once for each pass.

        Accumulated is the sum over samples of the gradients of each sample's loss: the sum over its targets, divided by
        T, however many of them count. Gradients that travel
        between stages are scaled by `loss_scale`, the same at all stages of a run.

        If it fails half-way (out of memory), everything accumulated so far is lost: `num_samples` is 0.

        Args:
            grad_BTD: gradient of `forward_pass.output`; None for the last stage
            counts: whether anything is added; the accumulator may hold the same microbatch already

        Returns:
            gradient of the pass's hidden_BTD, at most as large as the stage before accepts; None for the first stage

        Raises:
            InvalidMessage: the gradient's shape, type or size does not fit; the pass can still go backward
            RoundClosed: the weights have changed since the forward pass
        """
        assert forward_pass._result is not None, "a forward pass goes backward once"
        assert (grad_BTD is None) == self.spec.is_last, "a gradient comes from the next stage, if there is one"
        if forward_pass._weights_version != self.weights_version:
            raise RoundClosed(
                f"this stage has left the weights of optimizer step {forward_pass.optimizer_step} and is at "
                f"{self.optimizer_step}"
            )
        result = forward_pass._result
        largest_norm = max_gradient_norm(self.manifest.model.precision) * self.loss_scale * len(result)
        if grad_BTD is None:
            root_gradient = torch.full_like(result, self.loss_scale)
        else:
            check_float(grad_BTD, result.shape, "gradient")
            check_norm(grad_BTD, largest_norm)
            root_gradient = grad_BTD.detach().to(self.device, result.dtype)
        hidden_BTD, forward_pass._result = forward_pass._hidden_BTD, None
        if counts:
            try:
                torch.autograd.backward(result, root_gradient)
            except Exception:
                # Some parameters may have got their share and others not (out of memory): what is left is no gradient.
                self.discard_gradients()
                raise
            self.num_samples += len(result)
            self.num_targets += forward_pass.num_targets
            self._seen = (self._seen[0] + len(result), self._seen[1] + forward_pass.num_targets)
        elif hidden_BTD is not None:
            torch.autograd.backward(result, root_gradient, inputs=[hidden_BTD])
        if hidden_BTD is None:
            return None
        assert hidden_BTD.grad is not None
        return limit_norm(hidden_BTD.grad, largest_norm)

    @torch.no_grad()
    def evaluate(self, tokens_BS: Tensor, hidden_BTD: Tensor | None = None) -> Tensor:
        """hidden_BTD, or on the last stage losses_B, without dropout and without keeping anything.

        Raises:
            InvalidMessage: shapes, types or token ids that do not fit
        """
        inputs, others = self._prepare(tokens_BS, hidden_BTD)
        with self._evaluating():
            output: Tensor = self.module(inputs, **others)
        return output

    @torch.no_grad()
    def predict(self, tokens_BT: Tensor, hidden_BTD: Tensor | None = None) -> Tensor:
        """hidden_BTD, or on the last stage logits_BV (fp32) of the token that follows; as evaluate().

        Args:
            tokens_BT: of the inputs alone, without what follows them

        Raises:
            InvalidMessage: shapes, types or token ids that do not fit
        """
        following_B1 = torch.zeros_like(tokens_BT[:, :1])  # stands for what is asked for
        inputs, others = self._prepare(torch.cat([tokens_BT, following_B1], dim=1), hidden_BTD)
        with self._evaluating():
            output: Tensor = self.module(inputs, tokens_BT=others["tokens_BT"], last_token=True)
        return output[:, -1].float() if self.spec.is_last else output

    def mean_gradients(self) -> list[Tensor]:
        """The mean of the accumulated gradients over targets: fp32 on the CPU, in the order of `trained`.

        Zeros where nothing is accumulated; weigh it by `weight` when averaging with others.
        """
        if self.weight == 0:
            return [torch.zeros(p.shape) for p in self.trained.values()]
        sums = [
            torch.zeros(p.shape) if p.grad is None else p.grad.to("cpu", torch.float32, copy=True)
            for p in self.trained.values()
        ]
        return [total.div_(self._sum_of_mean) for total in sums]

    @property
    def _sum_of_mean(self) -> float:
        """The accumulator holds the mean gradient times this."""
        return self.weight / self._full_weight * self.loss_scale

    @property
    def weight(self) -> int:
        """The weight of the accumulated gradients in an average: their targets, or samples where all have as many."""
        return self.num_targets if self._has_marks else self.num_samples

    def samples_of(self, weight: int) -> int:
        """How many samples work of this weight is of; about so many where samples have unlike numbers of targets."""
        samples, targets = self._seen
        return max(round(weight * samples / targets), min(weight, 1)) if self._has_marks else weight

    def apply(self, averages: Sequence[Tensor]) -> StepResult:
        """End a round with what stage-mates have averaged, or nothing where they did not, and clear the accumulator.

        Args:
            averages: of the strategy's contributions, in the order of `trained`
        """
        result = self.strategy.end_round(averages)
        self._enter(self.optimizer_step + 1)
        return result

    @torch.no_grad()
    def update(
        self, mean_gradients: Sequence[Tensor], *, keeps_weights: bool = False, is_trial: bool = False
    ) -> StepResult:
        """Clip a gradient and have the optimizer take a step with it; for strategies. The accumulator is emptied.

        A gradient that is not finite, or of no samples, leaves the weights as they are. Stage-mates hold the same one.

        Args:
            mean_gradients: in the order of `trained`; may be none if the weights stay
            keeps_weights: only measure the gradient
            is_trial: it is this replica's own; see Clipper
        """
        parameters = list(self.trained.values())
        fits = [g.shape for g in mean_gradients] == self.shapes
        assert fits or (keeps_weights and not mean_gradients), "gradients of another stage"
        self.discard_gradients()  # the copies take their place
        gradients = [g.to(self.device, torch.float32, copy=True) for g in mean_gradients]
        norm = total_norm(gradients)
        rate = learning_rate(self.manifest, self.optimizer_step, self.decay)
        skipped = not bool(norm.isfinite()) or not bool(norm)  # where all samples were lost, the mean is zero
        if not keeps_weights and not skipped:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self._clipper.clip(parameters, norm, is_trial=is_trial)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.weights_version += 1
        return StepResult(grad_norm=float(norm), learning_rate=rate, skipped=skipped)

    def try_update(self, mean_gradients: Sequence[Tensor]) -> list[Tensor]:
        """Update the weights until `set_weights` takes that back; for strategies. The optimizer's state stays.

        Returns:
            the weights from before, on the CPU, in the order of `trained`
        """
        before = [parameter.detach().to("cpu", copy=True) for parameter in self.trained.values()]
        state = optimizer_state(self.optimizer, self.trained)
        self.update(mean_gradients, is_trial=True)
        load_optimizer_state(self.optimizer, self.trained, state)
        return before

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Change the weights and nothing else; for strategies.

        Args:
            weights: in the order of `trained`
        """
        for parameter, value in zip(self.trained.values(), weights, strict=True):
            parameter.copy_(value)
        self.weights_version += 1

    def discard_if_not_finite(self) -> int:
        """Empty the accumulator if its mean is not finite, or too large to be averaged.

        Returns:
            the samples whose work is lost
        """
        largest = LARGEST_MEAN * self._sum_of_mean
        is_finite = all(p.grad is None or is_within(p.grad, largest) for p in self.trained.values())
        return 0 if is_finite else self.discard_gradients()

    def discard_gradients(self) -> int:
        """Empty the accumulator, and return how many samples it held. Passes can go backward afterwards."""
        self.optimizer.zero_grad(set_to_none=True)
        num_samples, self.num_samples, self.num_targets = self.num_samples, 0, 0
        return num_samples

    def state(self) -> dict[str, Tensor]:
        """Copies, on the CPU, of all that the next steps change: the trained weights and the optimizer's state."""
        weights = zip(self.trained, self.strategy.weights(), strict=True)
        kept = {f"{STRATEGY_PREFIX}{name}": value.clone() for name, value in self.strategy.state().items()}
        copies = {name: value.to("cpu", copy=True) for name, value in weights}
        return copies | optimizer_state(self.optimizer, self.trained) | kept

    def state_template(self) -> dict[str, Tensor]:
        """The entries that state() has after the first step, as tensors on the meta device."""
        weights = {name: torch.empty_like(value, device="meta") for name, value in self.trained.items()}
        kept = {f"{STRATEGY_PREFIX}{name}": value.to("meta") for name, value in self.strategy.state().items()}
        return weights | optimizer_state_template(self.optimizer, self.trained) | kept

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], optimizer_step: int) -> None:
        """Take over a state() of that optimizer step; accumulated gradients are dropped.

        Raises:
            InvalidMessage: names, types, shapes or values that do not fit this stage; nothing has changed then
        """
        check_state(tensors, self.state_template())
        entries = {name: tensors[f"{STRATEGY_PREFIX}{name}"].clone() for name in self.strategy.state()}
        self.strategy.load_state(entries)
        for name, parameter in self.trained.items():
            parameter.copy_(tensors[name])
        self.strategy.begin_from_weights()
        load_optimizer_state(self.optimizer, self.trained, tensors)
        self._enter(optimizer_step)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what stage-mates hold alike of a state() of the same step, from one of them.

        This replica keeps what is its own, with what it has computed in a period.

        Raises:
            InvalidMessage: names, types, shapes or values that do not fit this stage; nothing has changed then
        """
        if len(shared_entries(tensors)) == len(tensors):
            self.load_state(tensors, self.optimizer_step)
            return
        check_state(tensors, self.state_template())
        entries = {name: tensors[f"{STRATEGY_PREFIX}{name}"].clone() for name in self.strategy.state()}
        self.strategy.adopt([tensors[name] for name in self.trained], entries)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin, or go back to, the run's initial weights.

        Raises:
            UserError: pretrained weights that cannot be read or do not fit; nothing has changed then
        """
        initial = self._initial or trained_parameters(self._make_module())
        for name, parameter in self.trained.items():
            parameter.copy_(initial[name])
        self.optimizer = make_optimizer(self.manifest.optimizer, self.trained, self.module.layers)
        self.strategy = strategy_of(self.manifest.averaging)(self)
        self._enter(0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without dropout. A backward pass that recomputes its forward pass may be next, which needs it again."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    def _enter(self, optimizer_step: int) -> None:
        self.discard_gradients()
        self._clipper.forget_trial()
        self.optimizer_step = optimizer_step
        self.weights_version += 1

    def _prepare(self, tokens_BS: Tensor, hidden_BTD: Tensor | None) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The inputs of the module, and its other arguments by their names; checked, on its device."""
        assert (hidden_BTD is None) == self.spec.is_first, "hidden states come from the stage before, if there is one"
        reads_tokens = self.module.boundary.reads_tokens
        looks_up = self.spec.is_first or self.spec.is_last or reads_tokens
        check_tokens(tokens_BS, self.module.config, looks_up=looks_up, has_marks=self._has_marks)
        targets_BT = learnt_BT = positions_BT = None
        if self._has_marks:
            learnt_BT = are_learnt(tokens_BS[:, 1:]).to(self.device) if self.spec.is_last else None
            if self.manifest.data.packing:
                positions_BT = positions_in_documents(tokens_BS[:, :-1].to(self.device))
            tokens_BS = ids_of(tokens_BS)
        if self.spec.is_last:
            targets_BT = tokens_BS[:, 1:].to(self.device, torch.int64)
        tokens_BT = tokens_BS[:, :-1].to(self.device, torch.int64) if hidden_BTD is None or reads_tokens else None
        others = {
            "targets_BT": targets_BT,
            "learnt_BT": learnt_BT,
            "positions_BT": positions_BT,
            "tokens_BT": tokens_BT,
        }
        if hidden_BTD is None:
            assert tokens_BT is not None
            return tokens_BT, others
        check_float(hidden_BTD, (len(tokens_BS), tokens_BS.shape[1] - 1, self.resolved.boundary_width), "hidden state")
        check_hidden(hidden_BTD, MAX_HIDDEN)
        return hidden_BTD.detach().to(self.device, torch.float32), others


def max_state_bytes(resolved: ResolvedManifest, stage: int) -> int:
    """More than any optimizer keeps of a stage: five fp32 values a trained parameter, and room for small entries."""
    return 20 * resolved.num_trained(resolved.specs[stage]) + 2**24

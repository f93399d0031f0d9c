"""The costs of a run's stages at each peer: parameters, compute and memory; for planning, admission and rebalancing.

They are counted from the run's manifest: no weights are made. The memory that libraries keep for themselves (CUDA's
context, MKL's workspaces) is not counted.

Shapes: B samples of a microbatch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_peer.codecs import NEED_FEEDBACK, find_codec
from swarm_peer.codecs.feedback import KEPT_TRIES
from swarm_peer.config import OptimizerSection, RunManifest
from swarm_peer.model.adapters import num_adapted
from swarm_peer.model.boundary import TABLE_DTYPE
from swarm_peer.model.families import Cost, family_of
from swarm_peer.model.frozen_base import END_BYTES, MATRIX_BYTES
from swarm_peer.model.losses import tokens_at_once
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.strategies import strategy_of
from swarm_peer.policy.stage_memory import StageMemory

# Weights, their gradients, means and sums are of this type on every device.
FP32_BYTES = 4.0
# A backward pass costs two forward passes: the gradients of the inputs and those of the weights (Kaplan et al.,
# "Scaling Laws for Neural Language Models", 2020, section 2.1: 6 operations per parameter and token in all).
BACKWARD_PER_FORWARD = 2
# Of a frozen weight there is no gradient; that of its input is one forward pass.
FROZEN_BACKWARD_PER_FORWARD = 1
# Bytes that a GPU's memory moves to make a value of a rounded matrix whole in 16 bits, and to read it again: half a
# byte of NF4, and twice two; one of 8 bit, an fp32 product written and read, and twice two.
DEQUANTISED_BYTES = {"fp32": 0.0, "bf16": 0.0, "int8": 13.0, "nf4": 4.5}
# Operations that training does in 16 bits while the memory of a GPU moves a byte: some 20 on an RTX 3090, 50 on an RTX
# 4090 or A100, 90 on an H100, at 0.3 of their peaks. With 2048 tokens, NF4 takes 5 % more time by that.
OPERATIONS_PER_BYTE = 50
# Bytes per parameter of the optimizer's state: two fp32 values, two of 8 bits with a scale for 256 each, or momentum.
# Muon's is for matrices of layers; the others are AdamW's.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "sgd": 4.0, "muon": 4.0}
# Bytes per value of a matrix while Muon updates it: the mean of gradient and momentum in fp32; and in bf16 its
# orthogonalised copy, the next one, and two products with itself, which are as large where it is square.
MUON_BYTES = 4.0 + 2.0 + 2.0 + 2.0 + 2.0
# At the head's loss: gradients of the logarithms and of the logits, in fp32.
FP32_LOGIT_GRADIENTS = 2
# Gradients inside a layer that its backward pass holds at once, as a share of what the layer keeps for that pass: 0.1
# to 0.4 in all families (most where the MLP is wide), and 0.5 where eager attention sees 1024 tokens.
BACKWARD_SHARE = 0.3
# Of a frozen value of a token, which boundaries of few values look up.
TABLE_BYTES = TABLE_DTYPE.itemsize
# A peer keeps the replies of this many times as many microbatches as it holds at once, for callers that ask again.
REPLIES_KEPT = 2
# Snapshots of each stage that a peer keeps: another may still be downloading the one before the newest.
SNAPSHOTS_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of one stage at each of its peers, apart from transfers.

    Attributes:
        parameters: number of weights, those of adapters included
        trained: number of those that training changes, of which gradients, averages and states are
        flops: compute of one token, forward and backward, recomputation included
        memory: what it takes of the memory that the peer trains in
        host_bytes: what it takes of the machine's memory beside its trainer; on a CPU a part of `memory`
    """

    parameters: int
    trained: int
    flops: float
    memory: StageMemory
    host_bytes: float


def stage_costs(resolved: ResolvedManifest, device_type: str) -> tuple[StageCosts, ...]:
    """Count what each stage of a run costs a peer.

    Args:
        device_type: that the peer computes on, as torch names it. On a "cpu" all is fp32, whatever the manifest says,
            and what a peer keeps beside its trainer shares the trainer's memory.
    """
    return tuple(_stage_costs(_Stage(resolved, spec, device_type)) for spec in resolved.specs)


def forward_flops(resolved: ResolvedManifest) -> list[float]:
    """Compute of one token's forward pass in each stage, by which stages are compared."""
    return [float(resolved.costs.of(spec).forward_flops) for spec in resolved.specs]


def optimizer_bytes(optimizer: OptimizerSection, trained: int, matrices: int) -> float:
    """Bytes of the optimizer's state.

    Args:
        trained: values that training changes
        matrices: those of them in matrices of layers
    """
    if optimizer.name == "muon":
        return OPTIMIZER_BYTES["muon"] * matrices + OPTIMIZER_BYTES["adamw"] * (trained - matrices)
    return 0.0 if optimizer.name == "sgd" and optimizer.momentum == 0 else OPTIMIZER_BYTES[optimizer.name] * trained


class _Stage:
    """One stage, with what its costs are counted from."""

    def __init__(self, resolved: ResolvedManifest, spec: StageSpec, device_type: str):
        self.manifest = resolved.manifest
        self.spec = spec
        self.costs = resolved.costs.at(spec)
        self.on_cpu = device_type == "cpu"
        self.half = not self.on_cpu and self.manifest.model.precision != "fp32"
        self.family = family_of(resolved.config)
        self.length = self.manifest.data.sequence_length
        self.tokens = self.manifest.training.microbatch_size * self.length  # of a microbatch
        self.checkpoints = self.manifest.model.activation_checkpointing
        self.whole = resolved.costs.of(spec)
        self.adapters = resolved.adapter_cost(spec)
        self.trained = resolved.num_trained(spec)
        self.layers = self.costs.layers_of(spec)
        self.optimizer_bytes = optimizer_bytes(
            self.manifest.optimizer, self.trained, 0 if self.adapters else self.layers.matrices
        )
        # Of one gradient, when all of it is there.
        self.largest_trained = (self.adapters or self.layers).largest_parameter
        self.base = self.manifest.model.base
        packs = self.manifest.data.packing  # attention then takes masks, by which no product is left out
        masked = [self.family.is_masked(index, self.length) for index in spec.layers]
        attention = [self.family.attention_flops(index, self.length) for index in spec.layers]
        self.attention_flops = sum(
            flops * (2 if packs and not is_masked else 1) for flops, is_masked in zip(attention, masked, strict=True)
        )
        # Of products with matrices.
        self.matrix_flops = self.whole.forward_flops - sum(attention)
        self.layer_flops = self.layers.forward_flops - sum(attention) + self.attention_flops
        self.hidden_values = self.tokens * resolved.hidden_size
        self.hidden_bytes = FP32_BYTES * self.hidden_values
        # Of what passes a boundary.
        self.passed_values = self.tokens * resolved.boundary_width
        self.boundary = None if resolved.num_stages == 1 else self.manifest.model.boundary
        is_table_kept = self.boundary is not None and self.boundary.rank is not None
        num_frozen = resolved.hidden_size - resolved.boundary_width if is_table_kept else 0
        self.table_bytes = TABLE_BYTES * resolved.vocab_size * num_frozen
        # Of the logits that exist at once.
        self.logit_tokens = min(self.tokens, tokens_at_once(resolved.vocab_size))
        self.logit_bytes = FP32_BYTES * self.logit_tokens * resolved.vocab_size
        self.cap_bytes = self.logit_tokens * self.family.cap_activation_bytes(self.half)
        self.layer_bytes = [self.tokens * self._layer_bytes_per_token(index) for index in spec.layers]

    def _layer_bytes_per_token(self, index: int) -> float:
        kept = self.family.layer_activation_bytes(index, self.length, self.half)
        # GPUs of the last years, which compute in 16 bits, take grouped queries as they are, and so do CPUs.
        copied = 0 if self.on_cpu or self.half else 2 * self.family.copied_key_width(index, self.length)
        if (adapter := self.manifest.model.adapter) is not None:
            # Between an adapter's two products; their inputs are those of the base's, which keeps none.
            copied += num_adapted(self.family, adapter, index) * adapter.rank
        return kept + FP32_BYTES * copied

    @property
    def ends(self) -> list[Cost]:
        """The costs of the ends of the model that it holds."""
        held = ((self.spec.is_first, self.costs.embedding), (self.spec.is_last, self.costs.head))
        return [cost for is_held, cost in held if is_held]

    @property
    def boundary_bytes(self) -> float:
        """Bytes that one microbatch keeps at the boundaries, beside the first layer's input."""
        passed = FP32_BYTES * self.passed_values
        if self.boundary is None:
            return 0.0 if self.spec.is_last else passed
        has_maxout = self.boundary.maxout is not None
        # The values that came are kept beside that input, and maxout's once more, normalised. The matrix before maxout
        # keeps its input and its product.
        entering = 0.0 if self.spec.is_first else passed * (2 if has_maxout else 1)
        leaving = 0.0 if self.spec.is_last else passed + (2 * self.hidden_bytes if has_maxout else 0.0)
        return entering + leaving

    @property
    def recomputes_logits(self) -> bool:
        """Whether a microbatch has more logits than may exist at once."""
        return self.logit_tokens < self.tokens

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights; those of a frozen base in the precision that it is kept in."""
        ends = self.whole.parameters - self.layers.parameters
        kept = self.table_bytes + MATRIX_BYTES[self.base] * self.layers.parameters + END_BYTES[self.base] * ends
        return kept if self.adapters is None else kept + FP32_BYTES * self.trained

    @property
    def flops(self) -> float:
        """Compute of one token, forward and backward, recomputation included.

        Attention has no weights that could be frozen. To make a rounded base whole, once in each pass of a microbatch,
        is counted as the compute of as much time.
        """
        recomputed = self.layer_flops if self.checkpoints else 0
        recomputed += self.costs.head.forward_flops if self.spec.is_last and self.recomputes_logits else 0
        attention = self.attention_flops * (1 + BACKWARD_PER_FORWARD) + recomputed
        if self.adapters is None:
            return self.matrix_flops * (1 + BACKWARD_PER_FORWARD) + attention
        own = self.adapters.forward_flops * (1 + BACKWARD_PER_FORWARD + self.checkpoints)
        made_whole = DEQUANTISED_BYTES[self.base] * self.layers.parameters * (2 + self.checkpoints) / self.tokens
        base = self.matrix_flops * (1 + FROZEN_BACKWARD_PER_FORWARD) + OPERATIONS_PER_BYTE * made_whole
        return base + attention + own

    @property
    def whole_bytes(self) -> float:
        """Bytes of a value of a layer's rounded matrix while it is multiplied with."""
        if self.base == "bf16":
            return self.whole_end_bytes
        product = FP32_BYTES if self.base == "int8" else 0.0
        return product + 2.0 if self.half else FP32_BYTES

    @property
    def whole_end_bytes(self) -> float:
        """Bytes of a value of the head while it is multiplied with: beside a rounded base, it is kept in bf16."""
        if not self.half:
            return FP32_BYTES
        return 0.0 if self.manifest.model.precision == "bf16" else 2.0  # none: it is multiplied with as it is


def _stage_costs(stage: _Stage) -> StageCosts:
    trained = stage.trained
    microbatch_bytes, host_bytes = _microbatch_bytes(stage), _host_bytes(stage)
    return StageCosts(
        parameters=stage.whole.parameters + (0 if stage.adapters is None else trained),
        trained=trained,
        flops=stage.flops,
        memory=StageMemory(
            weight_bytes=stage.weight_bytes,
            weight_gradient_bytes=FP32_BYTES * trained,
            optimizer_bytes=stage.optimizer_bytes,
            host_bytes=host_bytes if stage.on_cpu else 0.0,
            working_bytes=_working_bytes(stage, microbatch_bytes),
            update_bytes=_update_bytes(stage),
            microbatch_bytes=microbatch_bytes,
        ),
        # On a CPU the mean gradients count among what the end of a round takes.
        host_bytes=host_bytes + (0.0 if stage.on_cpu else FP32_BYTES * trained),
    )


def _microbatch_bytes(stage: _Stage) -> float:
    """Memory that one microbatch keeps for its backward pass."""
    spec, wire, half = stage.spec, stage.manifest.wire, stage.half
    kept = stage.hidden_bytes * len(spec.layers) if stage.checkpoints else sum(stage.layer_bytes)
    packs = stage.manifest.data.packing  # each sample has masks of its own then
    masked = {stage.family.layer_kind(i) for i in spec.layers if packs or stage.family.is_masked(i, stage.length)}
    num_masks = len(masked) * (stage.manifest.training.microbatch_size if packs else 1)
    kept += num_masks * (2.0 if half else 4.0) * stage.length**2
    if spec.is_last:
        # The normalisation's input and output, and what leads from its product to the loss.
        kept += stage.hidden_bytes * (1.5 if half else 2.0)
        kept += 0.0 if stage.recomputes_logits else stage.logit_bytes + stage.cap_bytes
    kept += stage.boundary_bytes  # the stage's output among them
    if half:
        # Autocast's copies: each forward pass makes and keeps its own, of the weights that it multiplies with.
        # A base in fewer bits is made whole anew in the backward pass.
        copied = stage.costs.head.parameters if spec.is_last else 0
        copied += 0 if stage.checkpoints else stage.layers.parameters
        own = 0 if stage.adapters is None or stage.checkpoints else stage.trained
        kept += 2.0 * (own + (copied if stage.base == "fp32" else 0))
    codec = find_codec(wire.activations)
    if stage.on_cpu and not codec.is_exact:
        # As they came and as they go; without a codec they are the tensors themselves.
        kept += codec.num_bytes(stage.passed_values) * (2 - spec.is_first - spec.is_last)
    return kept


def _working_bytes(stage: _Stage, microbatch_bytes: float) -> float:
    """Memory that a backward pass adds to what all microbatches keep, at the fullest of its moments."""
    layer_bytes = max(stage.layer_bytes)
    inside = BACKWARD_SHARE * layer_bytes + (layer_bytes if stage.checkpoints else 0.0)
    # A parameter's gradient is whole before it is added to the accumulator; those of a layer that is applied several
    # times are added up beside it until the last of them is there.
    gradients = stage.largest_trained
    if stage.costs.share_layers and len(stage.spec.layers) > 1:
        gradients += stage.layers.parameters
    is_rounded = stage.base != "fp32"  # then a matrix is made whole where it is multiplied with
    whole = stage.whole_bytes * stage.layers.largest_parameter if is_rounded else 0.0
    moments = [inside + FP32_BYTES * gradients + whole]
    if stage.spec.is_last:
        logits = stage.logit_bytes * (FP32_LOGIT_GRADIENTS + (0.5 if stage.half else 0.0))
        head = FP32_BYTES * stage.costs.head.largest_parameter  # its gradient
        if stage.adapters is not None:
            whole_head = stage.whole_end_bytes * stage.costs.head.largest_parameter
            head = stage.logit_bytes + whole_head if is_rounded else 0.0
        if stage.recomputes_logits:
            logits += stage.logit_bytes + stage.cap_bytes
            if stage.adapters is None:
                # The gradients of the chunks before are added up beside all this.
                logits, head = logits + head, stage.logit_bytes + 2 * head
        moments.append(max(logits, head))
    if stage.spec.is_first and stage.adapters is None:
        # The last moment: what the microbatch had kept is gone.
        moments.append(FP32_BYTES * stage.costs.embedding.largest_parameter - microbatch_bytes)
    return max(moments)


def _update_bytes(stage: _Stage) -> float:
    """Memory that the end of a round adds to weights, accumulator (then the copied mean) and optimizer's state."""
    optimizer, trained = stage.manifest.optimizer, stage.trained
    makes_temporaries = optimizer.name in ("adamw", "muon") or (optimizer.name == "sgd" and optimizer.weight_decay > 0)
    is_muon = optimizer.name == "muon"
    of_matrix = MUON_BYTES * stage.layers.largest_parameter if is_muon else 0.0  # one after the other
    if not stage.on_cpu:
        # torch updates all parameters at once, and takes the roots of all second moments, or adds the decay to all.
        at_once = trained - stage.layers.matrices if is_muon else trained
        return max(of_matrix, FP32_BYTES * at_once if makes_temporaries else 0.0)
    # The mean gradients, and two temporaries of one parameter's update.
    ends = [part.largest_parameter for part in stage.ends]
    largest = max(ends, default=0) if is_muon else (stage.adapters or stage.whole).largest_parameter
    temporaries = 2 * FP32_BYTES * largest if makes_temporaries else 0.0
    return FP32_BYTES * trained + max(of_matrix, temporaries)


def state_bytes(manifest: RunManifest, trained: int, optimizer_bytes: float) -> float:
    """Size of a stage's state, as snapshots and checkpoints hold it, where a stage trains so many values.

    Args:
        optimizer_bytes: of the optimizer's state
    """
    strategy = strategy_of(manifest.averaging)
    values = 1 + strategy.kept_values - strategy.unshared_values
    return FP32_BYTES * values * trained + optimizer_bytes


def _host_bytes(stage: _Stage) -> float:
    """Memory that a peer uses beside its trainer."""
    manifest, trained = stage.manifest, stage.trained
    averaging = FP32_BYTES * trained
    if manifest.averaging.compression in NEED_FEEDBACK:
        averaging += (1 + KEPT_TRIES) * FP32_BYTES * trained  # what is left over, and what tries of an average leave
    averaging += 0 if stage.adapters is None else FP32_BYTES * trained  # the initial ones
    kept = strategy_of(manifest.averaging).kept_values * FP32_BYTES * trained
    # One copy: a snapshot that is being written, or for a newcomer.
    state = state_bytes(manifest, trained, stage.optimizer_bytes)
    microbatches = manifest.training.global_batch_size // manifest.training.microbatch_size
    replies = 0 if stage.spec.is_first else min(REPLIES_KEPT * manifest.limits.max_in_flight, microbatches)
    return averaging + kept + state + replies * find_codec(manifest.wire.gradients).num_bytes(stage.passed_values)

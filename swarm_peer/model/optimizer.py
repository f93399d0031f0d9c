"""Learning rate, optimizer, and the optimizer's state as named tensors.

A state entry is called `optimizer/<parameter>/<entry>`. Two peers of a stage that took the same steps hold the same
entries, bit for bit, and a peer that loads them goes on exactly as the one that saved them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarm_peer.config import OptimizerSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.decay import Decay

STATE_PREFIX = "optimizer/"

# The key of a group whose learning rate is a multiple of the schedule's.
RATE_FACTOR = "rate_factor"

# The part of a run's steps that a decay takes, if its configuration says nothing else.
DECAY_SHARE = 0.2

# The parameters that a stage trains, by name: StageTrainer.trained.
Trained = Mapping[str, nn.Parameter]

# bitsandbytes keeps one scale for each block of quantised values (optim/optimizer.py, init_state).
EIGHT_BIT_BLOCK = 256

# bitsandbytes' code books: constants of the library, put back on loading and not part of a state.
CODE_BOOKS = {"qmap1": "dynamic", "qmap2": "udynamic"}


def planned_decay(manifest: RunManifest) -> Decay:
    """The decay of a `wsd` run of which the run key has said nothing else."""
    steps, warmup_steps = manifest.training.steps, manifest.schedule.warmup_steps
    decay_steps = manifest.schedule.decay_steps or min(math.ceil(steps * DECAY_SHARE), max(1, steps - warmup_steps))
    return Decay(steps - decay_steps, decay_steps)


def learning_rate(manifest: RunManifest, optimizer_step: int, decay: Decay | None = None) -> float:
    """The learning rate of the update that weights of this optimizer step get next; the first update has step 0.

    Warm-up rises linearly to the highest rate, which the first step after it has. The decay that follows ends at
    final_fraction of it in the run's last step, and stays there.

    Args:
        decay: of wsd, if the run key has had it begin
    """
    schedule, highest = manifest.schedule, manifest.optimizer.learning_rate
    if optimizer_step < schedule.warmup_steps:
        return highest * (optimizer_step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "wsd":
        begins_at, decay_steps = decay or planned_decay(manifest)
        last_stable = begins_at - 1  # which has the highest rate
    else:
        last_stable, decay_steps = schedule.warmup_steps, manifest.training.steps - 1 - schedule.warmup_steps
    if schedule.name == "constant" or decay_steps < 1:
        return highest
    progress = min(1.0, max(0.0, (optimizer_step - last_stable) / decay_steps))
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else 1 - progress
    return highest * (schedule.final_fraction + (1 - schedule.final_fraction) * left)


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers that are one to everybody else: their groups stand in one list, and their states in one mapping.

    Attributes:
        muon: that of matrices of layers
        adamw: that of all others
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.muon, self.adamw = muon, adamw
        muon.state = adamw.state = self.state
        self._of_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}

    def of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The one that updates a parameter."""
        return self.muon if id(parameter) in self._of_muon else self.adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        self.muon.step()
        self.adamw.step()


def make_optimizer(section: OptimizerSection, trained: Trained, layers: str = "") -> torch.optim.Optimizer:
    """The optimizer of what a stage trains. Matrices decay, vectors (biases, normalisations) do not.

    Args:
        layers: the beginning of the names of layers' parameters, which others have not

    Raises:
        UserError: this version of torch has no such optimizer
    """
    if section.name == "muon":
        of_layers = {name: p for name, p in trained.items() if name.startswith(layers) and p.ndim == 2}
        others = {name: p for name, p in trained.items() if name not in of_layers}
        adamw = make_optimizer(section.model_copy(update={"name": "adamw"}), others)
        return MuonAndAdamW(_make_muon(section, list(of_layers.values())), adamw)
    parameters = list(trained.values())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.learning_rate, momentum=section.momentum)
    if section.name == "adamw":
        return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps)
    from bitsandbytes.optim.adamw import AdamW8bit  # takes seconds to import, and most runs do without

    make: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return make(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps)


def _make_muon(section: OptimizerSection, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"optimizer.name=muon needs torch 2.9 or later, and this is {torch.__version__}: update torch, or train "
            f"with adamw"
        )
    rate = section.matrix_learning_rate or section.learning_rate
    return torch.optim.Muon(
        [{"params": matrices, RATE_FACTOR: rate / section.learning_rate}],
        lr=rate,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Have the next step take place at this rate, or for matrices with a rate of their own at their multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)


def optimizer_state(optimizer: torch.optim.Optimizer, trained: Trained) -> dict[str, Tensor]:
    """CPU copies of the optimizer's state; empty before the first step."""
    entries = {}
    for name, parameter in trained.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is not None and entry not in CODE_BOOKS:
                entries[f"{STATE_PREFIX}{name}/{entry}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
    return entries


def optimizer_state_template(optimizer: torch.optim.Optimizer, trained: Trained) -> dict[str, Tensor]:
    """The entries that optimizer_state() has after the first step, as tensors on the meta device."""
    return {
        f"{STATE_PREFIX}{name}/{entry}": value
        for name, parameter in trained.items()
        for entry, value in _entry_templates(optimizer, parameter).items()
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, trained: Trained, entries: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state by what optimizer_state() returned, also where it was empty.

    The entries must be complete or none, as in optimizer_state_template(): who takes them from others checks that.
    """
    optimizer.state.clear()
    for name, parameter in trained.items():
        templates = _entry_templates(optimizer, parameter)
        if f"{STATE_PREFIX}{name}/{next(iter(templates), '')}" not in entries:
            continue
        state: dict[str, Any] = {}
        for entry in templates:
            value = entries[f"{STATE_PREFIX}{name}/{entry}"].detach().clone()
            if entry != "step":
                state[entry] = value.to(parameter.device)
            else:  # torch counts steps in a tensor on the CPU, bitsandbytes in an int
                state[entry] = value if isinstance(_one_of(optimizer, parameter), torch.optim.AdamW) else int(value)
        if state.get("state1") is not None and state["state1"].dtype == torch.uint8:
            books: dict[str, Tensor] = vars(optimizer)["name2qmap"]
            for entry, kind in CODE_BOOKS.items():
                state[entry] = books[kind] = books[kind].to(parameter.device)
        optimizer.state[parameter] = state


def _one_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of torch's or bitsandbytes' that updates a parameter."""
    return optimizer.of(parameter) if isinstance(optimizer, MuonAndAdamW) else optimizer


def _entry_templates(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    def template(shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    values = template(parameter.shape)
    if isinstance(optimizer, MuonAndAdamW):
        if optimizer.of(parameter) is optimizer.muon:
            return {"momentum_buffer": values}
        optimizer = optimizer.adamw
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": values} if optimizer.defaults["momentum"] else {}
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step": template(()), "exp_avg": values, "exp_avg_sq": values}
    step = template((), torch.int64)
    if parameter.numel() < vars(optimizer)["args"].min_8bit_size:
        return {"step": step, "state1": values, "state2": values}
    quantised = template(parameter.shape, torch.uint8)
    scales = template((math.ceil(parameter.numel() / EIGHT_BIT_BLOCK),))
    return {"step": step, "state1": quantised, "state2": quantised, "absmax1": scales, "absmax2": scales}

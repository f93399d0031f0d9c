"""StageTrainer keeps this of a forward pass, for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class ForwardPass:
    """One forward pass, with all that its backward pass needs.

    Attributes:
        output: hidden_BTD for the next stage; on the last stage losses_B, each sample's loss
        optimizer_step: that of the weights that computed it
        num_targets: the targets of its samples, where samples say what is learnt
    """

    output: Tensor
    optimizer_step: int
    num_targets: int
    _result: Tensor | None  # with its graph; None once it has gone backward
    _hidden_BTD: Tensor | None  # the leaf whose gradient the stage before wants
    _weights_version: int

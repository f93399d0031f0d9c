"""Clips the gradient that updates a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Clipper:
    """Clips the gradients of one replica.

    A trial is an update by the replica's own gradient, until the mean of all replicas' is there. The mean is less noisy
    and so smaller, and clipped less. If each replica clipped its own gradient for itself, trials would be too short
    steps. So it is clipped as if it were as large as the mean will probably be: by how their norms compared last.
    """

    def __init__(self, max_norm: float | None):
        """Clip to a norm, or nothing if it is None."""
        self._max_norm = max_norm
        self._own_norm: Tensor | None = None  # of the last trial's gradient, until the mean comes
        self._mean_by_own: Tensor | float = 1.0

    def forget_trial(self) -> None:
        """Expect no mean for the last trial: other weights have come, and the next mean is of another round."""
        self._own_norm = None

    def clip(self, parameters: Sequence[nn.Parameter], norm: Tensor, *, is_trial: bool) -> None:
        """Clip the parameters' gradients, whose norm is positive and finite.

        Args:
            is_trial: they are this replica's own, and the mean of all will come next
        """
        own_norm, self._own_norm = self._own_norm, norm if is_trial else None
        if not is_trial and own_norm is not None:
            self._mean_by_own = norm / own_norm
        if self._max_norm is not None:
            clipped_as = norm * self._mean_by_own if is_trial else norm
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, clipped_as)

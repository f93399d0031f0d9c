"""What must hold where updates are delayed, and each replica goes on from its own gradient until the average is there.

An update is that of the mean over samples of what the members brought, each from weights of its own. That what a member
brings is of the samples that it has computed is held here, and that it is their gradient in
`tests/integration/test_averaging_modes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from delayed import DelayedInvariants
from invariants import Beginning, Place

Contribution = tuple[list[torch.Tensor], int]


class EagerInvariants(DelayedInvariants):
    """Watches a tube whose updates are delayed, and whose replicas go on from their own gradients."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # What a member brought, by (stage, timeline, round that ended or began meanwhile, peer): to the average that
        # ends the round, and to the one ahead.
        self._brought: dict[tuple[int, int, int, str], Contribution] = {}
        self._brought_ahead: dict[tuple[int, int, int, str], Contribution] = {}

    def _settling(self, group: Any, ending: Any, gradients: Any, samples: int, upcoming: Any = None) -> None:
        super()._settling(group, ending, gradients, samples, upcoming)
        place = (group._stage, ending.step.timeline.first_round, ending.number, group._me)
        self._brought[place] = [tensor.clone() for tensor in gradients], samples
        if upcoming is not None:
            self._brought_ahead[place] = [tensor.clone() for tensor in upcoming[0]], upcoming[1]

    def _contributions(self, place: Place) -> Iterator[Contribution]:
        """What the members of the average that led to a place brought."""
        stage, first_round, number, _ = place
        if place in self._made_ahead:
            for peer_id in self._made_ahead[place]:
                yield self._brought_ahead[(stage, first_round, number - 2, peer_id)]
        else:
            for peer_id in self.records.made[place]:
                yield self._brought[(stage, first_round, number - 1, peer_id)]

    def _check_update(self, place: Place, beginning: Beginning) -> None:
        if beginning.parent is None:
            return
        brought = list(self._contributions(place))
        total = max(sum(samples for _, samples in brought), 1)
        average = [
            torch.stack([tensor * (samples / total) for tensor, (_, samples) in zip(same, brought, strict=True)]).sum(0)
            for same in zip(*(tensors for tensors, _ in brought), strict=True)
        ]
        self._compare(place, average, beginning)

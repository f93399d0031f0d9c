"""How a round ended for one peer: with an average, with an agreement to go on without one, or left behind."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.policy.voting import Verdict
from swarm_peer.runtime.stage.rounds import ReplicaRound

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a round ended for this peer.

    Attributes:
        verdict: COMMIT, with the gradients to apply; or RESYNC, with the peers that hold the state to download
        history_hash: digest of all updates, this one included
        samples: number of samples in the gradients
        brought: the samples of a period that each member of stage 0, this peer included, has brought to its average
        is_wanted: whether a stage-mate took no part, and takes the gradients over
        holders: in case of RESYNC, the peers that hold the state
        cause: in case of RESYNC, the label for metrics
    """

    verdict: Verdict
    gradients: Sequence[torch.Tensor] = ()
    history_hash: str = ""
    samples: int = 0
    brought: Mapping[str, Sequence[WindowRange]] = field(default_factory=dict)
    is_wanted: bool = False
    holders: tuple[str, ...] = ()
    cause: Literal["left_behind", "other_weights"] = "left_behind"


class LeftBehind(Exception):
    """Stage-mates (`holders`) are in a later round already: as many as are ready for this one, or with the run."""

    def __init__(self, holders: list[str]):
        super().__init__(holders)
        self.holders = holders


def resync(ending: ReplicaRound, holders: Sequence[str], reason: str) -> Settlement:
    """Have this peer take over the state of stage-mates."""
    log.warning("resync_needed round=%d reason=%s", ending.number, reason)
    return Settlement(Verdict.RESYNC, holders=tuple(holders))


def resync_weights(
    ending: ReplicaRound, holders: Sequence[str], device: torch.device, compare_weights_every: int
) -> Settlement:
    """Have this peer take over the state of stage-mates whose weights differ after the same updates.

    Args:
        device: that this peer computes the weights on
        compare_weights_every: of the manifest's averaging section
    """
    # PyTorch and its libraries pick their kernels by the device, and the results differ in the last digits.
    log.warning(
        "weights_differ round=%d optimizer_step=%d device=%r torch=%s reason=%d stage-mates hold different weights "
        "after the same updates; if this comes back with each comparison, their devices compute differently: set "
        "averaging.compare_weights_every, which is %d, to 0 for a run without comparisons",
        ending.number,
        ending.step.optimizer_step,
        _describe(device),
        torch.__version__,
        len(holders),
        compare_weights_every,
    )
    behind = resync(ending, holders, "stage-mates hold different weights after the same updates")
    return replace(behind, cause="other_weights")


def _describe(device: torch.device) -> str:
    """Say in words what PyTorch picks its kernels by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"

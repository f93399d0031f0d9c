"""What the stages can take, now and when those have arrived that are on their way.

The throughput of a swarm is that of its least stage: the sum of what its serving peers do, in work per second, over the
stage's cost, in work per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView


@dataclass(frozen=True, slots=True)
class Shift:
    """From `after_s` on, stage `stage` can take `samples_per_s` more, or less."""

    after_s: float
    stage: int
    samples_per_s: float


def work_per_s(peers: Iterable[PeerView], stage_costs: Sequence[float]) -> dict[str, float]:
    """What each peer does: as measured, or as it expects, or like the typical of those that are measured."""
    work = {}
    unmeasured = []
    for peer in peers:
        if peer.samples_per_s > 0 and peer.stage != UNDECIDED:
            work[peer.peer_id] = peer.samples_per_s * stage_costs[peer.stage]
        else:
            unmeasured.append(peer)
    if unmeasured:
        typical = sorted(work.values())[len(work) // 2] if work else 1.0
        for peer in unmeasured:
            work[peer.peer_id] = peer.work_per_s or typical
    return work


def fits(peer: PeerView, stage: int, stage_memory_bytes: Sequence[float]) -> bool:
    """Whether the stage goes into the peer's memory; if either is not known, it does."""
    return not stage_memory_bytes or not peer.memory_bytes or peer.memory_bytes >= stage_memory_bytes[stage]


def serving_capacity(view: SwarmView, work: Mapping[str, float], stage_costs: Sequence[float]) -> list[float]:
    """Samples per second of each stage, of the peers that serve it."""
    capacity = [0.0] * view.num_stages
    for peer in view.peers:
        if peer.state is PeerState.SERVING:
            capacity[peer.stage] += work[peer.peer_id] / stage_costs[peer.stage]
    return capacity


def ideal_capacity(capacity: Sequence[float], stage_costs: Sequence[float]) -> float:
    """Samples per second of each stage, if speed could be shared out at will."""
    return sum(each * cost for each, cost in zip(capacity, stage_costs, strict=True)) / sum(stage_costs)


def discounted_samples(capacity: Sequence[float], shifts: Iterable[Shift], horizon_s: float) -> float:
    """Samples that the swarm does from now on; those in t seconds count by exp(-t / horizon_s).

    What comes later counts less since peers will have come and gone by then, and the stages be others.
    """
    capacity = list(capacity)
    samples, weight = 0.0, 1.0
    for shift in sorted(shifts, key=lambda shift: (shift.after_s, shift.stage, shift.samples_per_s)):
        later = math.exp(-shift.after_s / horizon_s)
        samples += min(capacity) * (weight - later)
        weight = later
        capacity[shift.stage] += shift.samples_per_s
    return (samples + min(capacity) * weight) * horizon_s

"""The capacity of the stages, in samples per second: now, and when all peers that are joining have arrived.

A stage's capacity is the sum of its serving peers' speeds: of each one's work per second, divided by the stage's cost,
in work per sample, or of what its link carries, if that is less. The throughput of a swarm is the capacity of its
slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm_peer.policy.link_limit import Traffic, most_samples_per_s
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of one stage's capacity by `samples_per_s`, `after_s` seconds from now."""

    after_s: float
    stage: int
    samples_per_s: float


# A peer that has been joining for longer may never serve: perhaps it reaches nobody who has its stage's state.
JOINING_PATIENCE_S = 900.0


def work_per_s(peers: Iterable[PeerView], stage_costs: Sequence[float]) -> dict[str, float]:
    """The speed of each peer's device, by id: as measured, or as the peer expects, or else that of the typical peer."""
    work = {}
    unmeasured = []
    for peer in peers:
        if peer.samples_per_s > 0 and peer.stage != UNDECIDED:
            work[peer.peer_id] = measured_work(peer, stage_costs)
        else:
            unmeasured.append(peer)
    if unmeasured:
        typical = sorted(work.values())[len(work) // 2] if work else 1.0
        for peer in unmeasured:
            work[peer.peer_id] = peer.work_per_s or typical
    return work


def measured_work(peer: PeerView, stage_costs: Sequence[float]) -> float:
    """The speed of a peer's device, as announced, however much its link lets through; 0 if not measured."""
    return max(peer.samples_per_s, peer.device_samples_per_s) * stage_costs[peer.stage]


def speed_in(
    peer: PeerView, stage: int, work_per_s: float, stage_costs: Sequence[float], traffic: Traffic = ()
) -> float:
    """Samples per second that a peer does if it serves a stage: as many as its device computes and its link carries."""
    return min(work_per_s / stage_costs[stage], most_samples_per_s(peer, stage, traffic))


def serving_capacity(
    view: SwarmView, work: Mapping[str, float], stage_costs: Sequence[float], traffic: Traffic = ()
) -> list[float]:
    """The capacity of each stage's serving peers."""
    capacity = [0.0] * view.num_stages
    for peer in view.peers:
        if peer.state is PeerState.SERVING:
            capacity[peer.stage] += speed_in(peer, peer.stage, work[peer.peer_id], stage_costs, traffic)
    return capacity


def ideal_capacity(capacity: Sequence[float], stage_costs: Sequence[float]) -> float:
    """The capacity of every stage if the peers' speed could be divided among the stages at will."""
    return sum(each * cost for each, cost in zip(capacity, stage_costs, strict=True)) / sum(stage_costs)


def discounted_samples(capacity: Sequence[float], shifts: Iterable[Shift], horizon_s: float) -> float:
    """Samples that the swarm computes from now on; those in t seconds count exp(-t / horizon_s).

    Later samples count less, since other peers will have come and gone by then.
    """
    capacity = list(capacity)
    samples, weight = 0.0, 1.0
    for shift in sorted(shifts, key=lambda shift: (shift.after_s, shift.stage, shift.samples_per_s)):
        later = math.exp(-shift.after_s / horizon_s)
        samples += min(capacity) * (weight - later)
        weight = later
        capacity[shift.stage] += shift.samples_per_s
    return (samples + min(capacity) * weight) * horizon_s

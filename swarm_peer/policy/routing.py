"""Where a microbatch goes next: interleaved weighted round robin over measured throughput.

SWARM parallelism (Ryabinin et al., ICML 2023), section 3.2 and appendix A: each candidate carries the time by which it
is expected to have finished all that was sent to it; the earliest is chosen and pushed back by the expected duration
of the new microbatch. So a peer twice as fast gets twice as many, interleaved rather than in bursts.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from dataclasses import dataclass

from swarm_peer.policy.view import PeerView

# Weight of a new throughput measurement; the paper's prototype uses the same.
THROUGHPUT_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class Route:
    """The next hop, or None with the reason why there is none."""

    peer_id: str | None
    reason: str


@dataclass(slots=True)
class _Candidate:
    samples_per_s: float  # 0 while nothing is known
    expected_finish: float  # in seconds of work sent so far; only differences between candidates mean anything


class Router:
    """Chooses the peer of the next stage for each microbatch; one instance per stage that is routed to."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._candidates: dict[str, _Candidate] = {}

    def update(self, peers: Iterable[PeerView]) -> None:
        """Take over who serves the stage now. A newcomer enters at the current minimum, so it is tried soon."""
        serving = {peer.peer_id: peer for peer in peers}
        for peer_id in self._candidates.keys() - serving.keys():
            del self._candidates[peer_id]
        start = min((candidate.expected_finish for candidate in self._candidates.values()), default=0.0)
        for peer_id in sorted(serving.keys() - self._candidates.keys()):
            self._candidates[peer_id] = _Candidate(serving[peer_id].samples_per_s, start)

    def observe(self, peer_id: str, samples_per_s: float) -> None:
        """Blend in the throughput that a peer reports with a reply."""
        candidate = self._candidates.get(peer_id)
        if candidate is None or samples_per_s <= 0:
            return
        if candidate.samples_per_s <= 0:
            candidate.samples_per_s = samples_per_s
        else:
            candidate.samples_per_s += THROUGHPUT_SMOOTHING * (samples_per_s - candidate.samples_per_s)

    def choose(self, num_samples: int, avoid: Container[str] = ()) -> Route:
        """Pick the next hop for a microbatch of `num_samples` and charge it with the expected work.

        Args:
            avoid: peers that failed lately or were tried for this microbatch already
        """
        allowed = [peer_id for peer_id in self._candidates if peer_id not in avoid]
        if not allowed:
            known = len(self._candidates)
            return Route(None, "no peer serves the stage" if not known else f"all {known} peers are to be avoided")
        floor = min(self._candidates[peer_id].expected_finish for peer_id in allowed)
        for peer_id, candidate in self._candidates.items():
            if peer_id in avoid:
                # After a spell of being avoided a peer must not get everything until it has caught up with the others.
                candidate.expected_finish = max(candidate.expected_finish, floor)
        chosen = min(allowed, key=lambda peer_id: (self._candidates[peer_id].expected_finish, self._rng.random()))
        speed = self._candidates[chosen].samples_per_s or self._typical_speed()
        self._candidates[chosen].expected_finish += num_samples / speed
        return Route(chosen, f"earliest expected finish at {speed:.3g} samples/s of {len(allowed)} candidates")

    def _typical_speed(self) -> float:
        """The median of the known throughputs: what to expect of a peer that has not been measured."""
        known = sorted(c.samples_per_s for c in self._candidates.values() if c.samples_per_s > 0)
        return known[len(known) // 2] if known else 1.0

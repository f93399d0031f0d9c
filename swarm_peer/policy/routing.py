"""Where a microbatch goes next: interleaved weighted round robin over measured throughput.

Source: SWARM parallelism (Ryabinin et al., ICML 2023), section 3.2 and appendix A. For each candidate the router keeps
the time at which the candidate should have finished all that was sent to it. It chooses the earliest candidate, and
adds the expected duration of the new microbatch to that candidate's time. So a peer twice as fast gets twice as many
microbatches, interleaved rather than in bursts.
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
    incarnation: int
    samples_per_s: float  # 0 while it is not known
    expected_finish: float  # seconds of work sent so far; only differences between candidates have a meaning


class Router:
    """Chooses the next hop for each microbatch, among the peers of one stage."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._candidates: dict[str, _Candidate] = {}

    def update(self, peers: Iterable[PeerView]) -> None:
        """Set the peers that serve the stage now. A newcomer enters at the current minimum, so it is tried soon.

        A peer in a new life is a newcomer.
        """
        serving = {peer.peer_id: peer for peer in peers}
        lives = {peer.life for peer in serving.values()}
        self._candidates = {
            peer_id: candidate
            for peer_id, candidate in self._candidates.items()
            if (peer_id, candidate.incarnation) in lives
        }
        start = min((candidate.expected_finish for candidate in self._candidates.values()), default=0.0)
        for peer_id in sorted(serving.keys() - self._candidates.keys()):
            self._candidates[peer_id] = _Candidate(serving[peer_id].incarnation, serving[peer_id].samples_per_s, start)

    def observe(self, peer_id: str, samples_per_s: float) -> None:
        """Update a peer's throughput with the one that it reports in a reply."""
        candidate = self._candidates.get(peer_id)
        if candidate is None or samples_per_s <= 0:
            return
        if candidate.samples_per_s <= 0:
            candidate.samples_per_s = samples_per_s
        else:
            candidate.samples_per_s += THROUGHPUT_SMOOTHING * (samples_per_s - candidate.samples_per_s)

    def choose(self, num_samples: int, avoid: Container[str] = ()) -> Route:
        """Choose the next hop for a microbatch of `num_samples`, and add the expected work to its time.

        Args:
            avoid: peers that failed recently, or that were tried for this microbatch already
        """
        allowed = [peer_id for peer_id in self._candidates if peer_id not in avoid]
        if not allowed:
            known = len(self._candidates)
            return Route(None, "no peer serves the stage" if not known else f"all {known} peers are to be avoided")
        floor = min(self._candidates[peer_id].expected_finish for peer_id in allowed)
        for peer_id, candidate in self._candidates.items():
            if peer_id in avoid:
                # Else an avoided peer, whose time stands still, would later get all microbatches until it catches up.
                candidate.expected_finish = max(candidate.expected_finish, floor)
        chosen = min(allowed, key=lambda peer_id: (self._candidates[peer_id].expected_finish, self._rng.random()))
        speed = self._candidates[chosen].samples_per_s or self._typical_speed()
        self._candidates[chosen].expected_finish += num_samples / speed
        return Route(chosen, f"earliest expected finish at {speed:.3g} samples/s of {len(allowed)} candidates")

    def _typical_speed(self) -> float:
        """The median of the known throughputs, which is expected of a peer that has not been measured."""
        known = sorted(c.samples_per_s for c in self._candidates.values() if c.samples_per_s > 0)
        return known[len(known) // 2] if known else 1.0

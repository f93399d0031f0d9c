"""Where a microbatch goes next: to the candidate that should be the first to have done it, each caller in its own part.

Source: SWARM parallelism (Ryabinin et al., ICML 2023), section 3.2 and appendix A: the earliest expected finish, by
measured throughput. So a peer twice as fast gets twice as many microbatches, interleaved rather than in bursts.

There, a candidate's finish follows from all that was ever sent to it. Here, it follows from what has not come back yet.
Else a candidate that is slower than measured, or whose caller is faster, has a queue left when all others have done.

There, every caller sends to every candidate. Callers know nothing of each other's microbatches, so now and then several
choose the same candidate at once, and others have nothing to do meanwhile. Here, each caller has as little as possible
to do with the candidates of others (see `parts_of`): two stages of as many equal peers make pairs.

Each round has its own order of the peers, by a hash of its number and their ids. So over the rounds everybody works
with everybody, and all that know the round know the order, without a message. Anybody can work out the order of later
rounds, but nobody can keep its neighbours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from statistics import median_low

from swarm_peer.policy.view import Life, PeerView

# Weight of a new throughput measurement; the paper's prototype uses the same.
THROUGHPUT_SMOOTHING = 0.1
# Measured speeds differ a little even among equal peers. A caller leaves a candidate to others if what it would send
# there is less than this part of its own work, and of the candidate's.
SMALLEST_PART = 0.02
# A peer's speed counts for at most so many times the typical one, and for no less than as small a part of it. Beside a
# speed that a liar has made up, the others would have no length in their stage, and there is no part of nothing.
MOST_TIMES_TYPICAL = 1e4


def parts_of(
    caller: str, callers: Mapping[str, float], callees: Mapping[str, float], round_number: int
) -> dict[str, float]:
    """The part of each callee's time that is for one caller; 0 if the callee is left to other callers.

    Both stages stand side by side, in the order drawn for the round, each as long as the other, and each peer as long
    as its share of its stage's speed. A caller sends to the callees beside it. So each callee gets as much as it can
    do, and there are fewer pairs of caller and callee than peers.

    Args:
        callers, callees: samples/s by peer id; 0 if not measured yet
    """
    places, others = _places(callers, round_number), _places(callees, round_number)
    begin, end = places[caller]
    parts = {}
    for callee, (its_begin, its_end) in others.items():
        common = max(0.0, min(end, its_end) - max(begin, its_begin))
        is_small = common < SMALLEST_PART * min(end - begin, its_end - its_begin)
        parts[callee] = 0.0 if is_small else common / (its_end - its_begin)
    return parts


def num_callers(callee: str, callees: Sequence[PeerView], callers: Sequence[PeerView], round_number: int) -> int:
    """How many callers have a part of a peer in a round; all of them, if it is not in the view."""
    called = {peer.peer_id: peer.samples_per_s for peer in callees}
    if callee not in called:
        return len(callers)
    calling = {peer.peer_id: peer.samples_per_s for peer in callers}
    # The stages stand side by side whichever of them calls.
    return sum(part > 0 for part in parts_of(callee, called, calling, round_number).values())


def _places(speeds: Mapping[str, float], round_number: int) -> dict[str, tuple[float, float]]:
    """Where each peer begins and ends in a round, if the stage is 1 long."""
    known = [speed for speed in speeds.values() if speed > 0]
    typical = median_low(known) if known else 1.0
    slowest, fastest = typical / MOST_TIMES_TYPICAL, typical * MOST_TIMES_TYPICAL
    lengths = {
        peer_id: min(max(speeds[peer_id] or typical, slowest), fastest)
        for peer_id in sorted(speeds, key=partial(_lot, round_number))
    }
    total = sum(lengths.values())
    places, end = {}, 0.0
    for peer_id, length in lengths.items():
        begin, end = end, end + length / total
        places[peer_id] = begin, end
    return places


def _lot(round_number: int, peer_id: str) -> bytes:
    return blake2b(f"{round_number} {peer_id}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Route:
    """The next hop, or None with the reason why there is none."""

    peer_id: str | None
    reason: str


@dataclass(slots=True)
class _Candidate:
    incarnation: int
    samples_per_s: float  # 0 while it is not known
    num_outstanding: int = 0  # samples that were sent to it, and whose microbatches are not done yet
    part: float = 1.0  # the part of its time that is for this caller


class Router:
    """Chooses the next hop for each microbatch, among the peers of one stage."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._candidates: dict[str, _Candidate] = {}
        # The arguments of the last `update`. It is called for each microbatch, and takes 0.3 ms if anything is new and
        # there are 100 peers in each stage.
        self._updated: tuple[int, str, tuple[PeerView, ...], tuple[PeerView, ...]] | None = None

    def update(
        self, peers: Iterable[PeerView], caller: str = "", callers: Sequence[PeerView] = (), round_number: int = 0
    ) -> None:
        """Set the peers that serve the stage now. A peer in a new life is a newcomer.

        Args:
            callers: the peers that send to this stage; if `caller` is not among them, it sends to all peers
            round_number: that of the microbatches that are sent next
        """
        before, self._updated = self._updated, (round_number, caller, tuple(peers), tuple(callers))
        if self._updated == before:
            return
        serving = {peer.peer_id: peer for peer in self._updated[2]}
        lives = {peer.life for peer in serving.values()}
        self._candidates = {
            peer_id: candidate
            for peer_id, candidate in self._candidates.items()
            if (peer_id, candidate.incarnation) in lives
        }
        for peer_id in sorted(serving.keys() - self._candidates.keys()):
            self._candidates[peer_id] = _Candidate(serving[peer_id].incarnation, serving[peer_id].samples_per_s)
        sending = {peer.peer_id: peer.samples_per_s for peer in callers}
        speeds = {peer_id: peer.samples_per_s for peer_id, peer in serving.items()}
        parts = dict.fromkeys(serving, 1.0)
        if caller in sending:
            parts = parts_of(caller, sending, speeds, round_number)
        for peer_id, candidate in self._candidates.items():
            candidate.part = parts[peer_id]

    def observe(self, peer_id: str, samples_per_s: float) -> None:
        """Update a peer's throughput with the one that it reports in a reply."""
        candidate = self._candidates.get(peer_id)
        if candidate is None or samples_per_s <= 0:
            return
        if candidate.samples_per_s <= 0:
            candidate.samples_per_s = samples_per_s
        else:
            candidate.samples_per_s += THROUGHPUT_SMOOTHING * (samples_per_s - candidate.samples_per_s)

    def choose(
        self, num_samples: int, avoid: Container[str] = (), carried: Callable[[str], float] = lambda peer_id: math.inf
    ) -> Route:
        """Choose the next hop for a microbatch of `num_samples`, which is outstanding there until it is `done`.

        If all candidates that have a part for this caller are to be avoided, or the way to them carries less than that
        part, others may get the microbatch.

        Args:
            avoid: peers that failed recently, or that were tried for this microbatch already
            carried: samples/s that the way from the caller to a peer carries
        """
        allowed = [peer_id for peer_id in self._candidates if peer_id not in avoid]
        if not allowed:
            known = len(self._candidates)
            return Route(None, "no peer serves the stage" if not known else f"all {known} peers are to be avoided")
        speeds = {peer_id: self._speed(self._candidates[peer_id]) for peer_id in allowed}
        own = [peer_id for peer_id in allowed if self._candidates[peer_id].part and carried(peer_id) >= speeds[peer_id]]
        if not own:
            speeds = {peer_id: min(speeds[peer_id], carried(peer_id)) for peer_id in allowed}
        allowed = own or allowed

        def finish_s(peer_id: str) -> float:
            return (self._candidates[peer_id].num_outstanding + num_samples) / speeds[peer_id]

        chosen = min(allowed, key=lambda peer_id: (finish_s(peer_id), self._rng.random()))
        self._candidates[chosen].num_outstanding += num_samples
        reason = f"earliest expected finish at {speeds[chosen]:.3g} samples/s of {len(allowed)} candidates"
        return Route(chosen, reason)

    def done(self, peer: Life, num_samples: int) -> None:
        """Note that a microbatch is done that was sent to a peer, there or, after failures, elsewhere."""
        candidate = self._candidates.get(peer.peer_id)
        if candidate is not None and candidate.incarnation == peer.incarnation:
            # It may have been out of view meanwhile, and begun anew.
            candidate.num_outstanding = max(0, candidate.num_outstanding - num_samples)

    def _speed(self, candidate: _Candidate) -> float:
        """The samples/s that a candidate has for this caller."""
        return (candidate.samples_per_s or self._typical_speed()) * (candidate.part or 1.0)

    def _typical_speed(self) -> float:
        """The median of the known throughputs, which is expected of a peer that has not been measured."""
        known = sorted(c.samples_per_s for c in self._candidates.values() if c.samples_per_s > 0)
        return known[len(known) // 2] if known else 1.0

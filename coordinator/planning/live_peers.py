"""The peers of a live run as the planner takes them, and prices that an operator names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, log10
from typing import Any

from coordinator.planning.peers_file import AVERAGING_GAIN, distinct, reached_bytes_per_s
from coordinator.planning.stage_work import stage_works
from coordinator.watch.observer import LiveRun, observe_run
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.placement.capacity import measured_work
from swarm_peer.policy.placement.ways import missing_ways
from swarm_peer.policy.planning.resources import PeerGroup
from swarm_peer.policy.view import PeerView, SwarmView

# Live peers whose speeds agree to so many digits are one group.
SPEED_DIGITS = 2


@dataclass(frozen=True, slots=True, order=True)
class LivePeers:
    """Assumptions on a live run's peers, beside the speed that they announce."""

    memory_bytes: float = inf
    upload_bytes_per_s: float = inf
    download_bytes_per_s: float = inf
    averaging_gain: float = AVERAGING_GAIN
    latency_s: float = 0.0
    is_closed: bool = False

    @classmethod
    def of(cls, memory_gb: float, upload_mbps: float, download_mbps: float, latency_ms: float) -> LivePeers:
        """The assumptions in the units of `plan`; links are used as far as they usually are."""
        upload, download = reached_bytes_per_s(upload_mbps), reached_bytes_per_s(download_mbps)
        return cls(memory_gb * 1e9, upload, download, latency_s=latency_ms / 1e3)


def read_live_run(initial_peers: Sequence[str], run_id: str | None) -> tuple[RunManifest, SwarmView]:
    """The manifest of a live run, and the peers that take part in it.

    Raises:
        UserError: nobody answers, or there is no such run
    """

    async def look(run: LiveRun) -> tuple[RunManifest, SwarmView]:
        return run.manifest, await run.directory.refresh(range(run.manifest.stages.count))

    return observe_run(initial_peers, run_id, look)


def live_groups(manifest: RunManifest, view: SwarmView, assumed: LivePeers) -> list[PeerGroup]:
    """The peers of a live run by their measured speed; peers that are not measured yet are taken for typical ones.

    Raises:
        UserError: there are none, or none is measured
    """
    works = stage_works(manifest, manifest.stages.count)
    peers = [peer for peer in view.peers if 0 <= peer.stage < len(works)]
    flops = [work.flops for work in works]
    measured = sorted(measured_work(peer, flops) for peer in peers if peer.samples_per_s > 0)
    if not measured:
        raise UserError(
            f"none of the {len(peers)} peers of run {manifest.name} has measured its speed: wait until they train"
        )
    typical = measured[len(measured) // 2]
    missing = missing_ways(peers)
    kinds = Counter(
        (_rounded(measured_work(peer, flops) or typical), _known(peer, assumed, is_closed=peer.peer_id in missing))
        for peer in peers
    )
    groups = [
        PeerGroup(name=f"live, {speed / 1e12:.2g} TFLOP/s", count=number, flops_per_s=speed, **asdict(known))
        for (speed, known), number in sorted(kinds.items(), reverse=True)
    ]
    return distinct(groups)


def _known(peer: PeerView, assumed: LivePeers, *, is_closed: bool) -> LivePeers:
    """The assumptions on a peer, less what its owner keeps of the machine."""
    up = min(peer.upload_bytes_per_s or inf, assumed.upload_bytes_per_s)
    down = min(peer.download_bytes_per_s or inf, assumed.download_bytes_per_s)
    is_lent = (up, down) != (assumed.upload_bytes_per_s, assumed.download_bytes_per_s)
    return replace(
        assumed,
        is_closed=is_closed,
        memory_bytes=peer.memory_bytes or assumed.memory_bytes,
        upload_bytes_per_s=up,
        download_bytes_per_s=down,
        # A link that is lent in part has no gaps that averages could fill.
        averaging_gain=1.0 if is_lent else assumed.averaging_gain,
    )


def _rounded(value: float) -> float:
    return round(value, SPEED_DIGITS - 1 - int(log10(value)))


def with_prices(
    groups: Iterable[PeerGroup], dollars_per_hour: float | None, dollars_per_gb: float | None
) -> list[PeerGroup]:
    """The same groups at other prices, where some are given."""
    prices: dict[str, Any] = {}
    if dollars_per_hour is not None:
        prices["dollars_per_hour"] = dollars_per_hour
    if dollars_per_gb is not None:
        prices["dollars_per_sent_byte"] = dollars_per_gb / 1e9
    return [replace(group, **prices) for group in groups]

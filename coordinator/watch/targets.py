"""The metrics of a run's peers as targets for Prometheus' HTTP service discovery. Fetches nothing itself."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TypedDict

from swarm_peer.policy.view import SwarmView


class TargetGroup(TypedDict):
    """One peer, as Prometheus reads it: addresses to scrape, and labels for its relabelling."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(view: SwarmView, *, is_local: bool) -> list[TargetGroup]:
    """The peers that say where they show their metrics.

    A peer may lie, and have Prometheus ask its own machine, or a cloud's metadata service: such addresses are left out.

    Args:
        is_local: the coordinator listens on loopback alone, so the whole swarm is on this machine
    """
    return [
        TargetGroup(
            targets=[peer.metrics_address],
            labels={
                "__meta_swarm_peer": peer.peer_id,
                "__meta_swarm_name": peer.name,
                "__meta_swarm_stage": str(peer.stage),
            },
        )
        for peer in view.peers
        if peer.metrics_address and _may_be_asked(peer.metrics_address, is_local)
    ]


def _may_be_asked(address: str, is_local: bool) -> bool:
    host = ip_address(address.rpartition(":")[0].strip("[]"))
    host = getattr(host, "ipv4_mapped", None) or host
    if host.is_loopback:
        return is_local
    return not (host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved)

"""How much of a stage's work a peer can do whose link is limited.

Averages are left out: in most runs microbatches take the link in turns with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from swarm_peer.policy.view import PeerView


class StageTraffic(NamedTuple):
    """Bytes that one sample makes a peer of a stage send and receive, both ways through the pipeline together."""

    sent_bytes: float
    received_bytes: float

    def samples_per_s(self, upload_bytes_per_s: float, download_bytes_per_s: float) -> float:
        """The samples that pass a link with such directions; 0 stands for a direction without a limit."""
        up = upload_bytes_per_s / self.sent_bytes if upload_bytes_per_s and self.sent_bytes else inf
        down = download_bytes_per_s / self.received_bytes if download_bytes_per_s and self.received_bytes else inf
        return min(up, down)


# The traffic of each stage, or nothing where no link counts.
Traffic = Sequence[StageTraffic]


def most_samples_per_s(peer: PeerView, stage: int, traffic: Traffic) -> float:
    """The samples that pass a peer's link, by its own account, if it serves a stage; inf without a limit."""
    return traffic[stage].samples_per_s(peer.upload_bytes_per_s, peer.download_bytes_per_s) if traffic else inf

"""A way into a live run for one who only looks on: in the DHT, and nothing announced."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.wire.identity import Identity


@contextmanager
def onlooker(addresses: Sequence[str]) -> Iterator[SwarmDHT]:
    """Be in the DHT of these addresses (from read_addresses), with an identity of its own that is then forgotten.

    Raises:
        UserError: nobody answers
    """
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        identity_path = Path(folder) / "identity"
        dht = SwarmDHT.start(
            initial_peers=addresses,
            host_maddrs=("/ip4/0.0.0.0/tcp/0",),
            announce_maddrs=(),
            identity=Identity.load_or_create(identity_path),
            identity_path=identity_path,
            metrics=PeerMetrics(),
        )
        try:
            yield dht
        finally:
            dht.shutdown()

"""Real nodes of the DHT, one of them hostile."""

from __future__ import annotations

import math
import os
from pathlib import Path

import anyio
import pytest
from hivemind.dht import DHT
from hivemind.utils import get_dht_time

from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import MAX_STORED_BYTES, EndRecord, ManifestRecord, end_key

pytestmark = pytest.mark.timeout(120)

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
LIFETIME_S = 3600.0


def start_node(folder: Path, name: str, initial_peers: list[str]) -> SwarmDHT:
    identity = Identity.load_or_create(folder / name)
    return SwarmDHT.start(
        initial_peers=initial_peers, host_maddrs=LOOPBACK, announce_maddrs=[], identity=identity,
        identity_path=folder / name, metrics=PeerMetrics(),
    )  # fmt: skip


def test_a_hostile_node_keeps_nobodys_records_out(tmp_path: Path) -> None:
    run = start_node(tmp_path, "run", [])
    peer = start_node(tmp_path, "peer", run.addresses())
    hostile = DHT(initial_peers=run.addresses(), start=True, host_maddrs=LOOPBACK, nat_port_map=False, auto_nat=False)
    run_id = run.identity.peer_id
    key = end_key(run_id)

    async def end(reason: str) -> None:
        await run.store(key, EndRecord(reason=reason, begun=1), run_id, LIFETIME_S)

    async def heard(node: SwarmDHT) -> str | None:
        records = await node.fetch(key, EndRecord, run_id)
        return records[run_id].reason if run_id in records else None

    async def check() -> None:
        await end("first")
        assert await heard(peer) == "first"
        entry = hostile.get(key, latest=True).value[run_id]
        later = get_dht_time() + 10 * LIFETIME_S
        assert not hostile.store(key, entry.value, later, subkey=run_id)
        for expiration in (later, math.inf):
            assert not hostile.store(key, b"x", expiration)
            assert not hostile.store(key, os.urandom(10_000), expiration, subkey=os.urandom(8))
        await end("second")  # hivemind says that it failed: the hostile node has not taken it
        assert await heard(peer) == await heard(run) == "second"

    try:
        anyio.run(check)
    finally:
        for node in (hostile, peer, run):
            node.shutdown()


def test_the_largest_record_does_not_end_the_dht_process(tmp_path: Path) -> None:
    node = start_node(tmp_path, "run", [])
    run_id = node.identity.peer_id

    async def check() -> None:
        record = ManifestRecord(manifest="x" * (MAX_STORED_BYTES - 250))
        for _ in range(50):
            assert await node.store("largest", record, run_id, LIFETIME_S)
        assert await node.fetch("largest", ManifestRecord, run_id) == {run_id: record}
        assert node.node.is_alive()

    try:
        anyio.run(check, backend_options={"use_uvloop": True})
    finally:
        node.shutdown()

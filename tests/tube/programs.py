"""What runs on the hosts: the real peer, and the real coordinator, over simulated edges."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import torch
from hosts import Host

from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.context import CoordinatorContext
from coordinator.run.serve import LINGER_S
from coordinator.run.service import RunOptions, RunService
from swarm_peer.config import PeerOptions
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.bootstrap import find_manifest
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.startup import choose_first_stage
from swarm_peer.wire.identity import Identity


async def run_peer(host: Host, run_key: Identity, resolved: ResolvedManifest, stage: str, grace_s: float) -> None:
    """What swarm_peer.runtime.startup does, from joining the DHT on."""
    dht = host.join_dht()
    options = PeerOptions(initial_peers=(f"/ip4/10.0.0.1/tcp/1/p2p/{run_key.peer_id}",), stage=stage, grace_s=grace_s)
    run_id, manifest = await find_manifest(dht, options.initial_peers, run_key.peer_id)
    assert manifest.hash == resolved.hash
    context = PeerContext(
        run_id=run_id,
        resolved=resolved,
        identity=host.identity,
        options=options,
        clock=host.clock,
        random=host.random,
        threads=host.threads,
        storage=host.storage,
        metrics=host.metrics,
        changed=Condition(),
    )
    first_stage = await choose_first_stage(context, dht)
    host.peer = Peer(
        context=context,
        dht=dht,
        transport=host.open_transport(),
        device=torch.device("cpu"),
        device_thread=host.device,  # type: ignore[arg-type]
    )
    await host.peer.run(first_stage, host.ended)


async def run_coordinator(
    host: Host, run_key: Identity, resolved: ResolvedManifest, output: Path, plan: CheckpointPlan, standby: bool
) -> None:
    """What coordinator.run.serve does, from joining the DHT on."""

    @asynccontextmanager
    async def open_transport(*_: Any) -> Any:
        yield host.open_transport()

    dht = host.join_dht()
    context = CoordinatorContext(
        clock=host.clock, random=host.random, threads=host.threads, open_transport=open_transport
    )
    options = RunOptions(output=output, resume=True, plan=plan, standby=standby)
    host.service = RunService(resolved, dht, options, run_key=run_key, context=context)

    async def stop() -> None:
        await host.ended.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        if await host.service.run():
            await host.service.end("it has reached its steps, and its model is saved where its coordinator ran")
            await anyio.sleep(LINGER_S)
        tasks.cancel_scope.cancel()

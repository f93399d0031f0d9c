"""What runs on the hosts: the real peer, and the real coordinator, over simulated edges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio
import torch
from hosts import Host
from loop import HOST

from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.context import CoordinatorContext
from coordinator.run.coordination import Coordination
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.ending import ENDED_BY_OPERATOR
from swarm_peer.errors import CallError, SwarmError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.bootstrap import Entrance, find_manifest
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.startup import choose_first_stage
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MicrobatchCall, StateIndexCall
from swarm_peer.wire.records import Assignment

if TYPE_CHECKING:
    from tube import Tube


def obeying_schedules() -> Any:
    """A context in which coordinators order what a schedule has them order, besides what they decide themselves."""
    assign = Coordination.assign

    async def assign_more(coordination: Coordination, assignments: Sequence[Assignment], reason: str) -> None:
        await assign(coordination, [*assignments, *HOST.get().orders], reason)

    return patch.object(Coordination, "assign", assign_more)


async def run_peer(host: Host, run_key: Identity, resolved: ResolvedManifest, stage: str, grace_s: float) -> None:
    """What swarm_peer.runtime.startup does, from joining the DHT on."""
    dht = host.join_dht()
    options = PeerOptions(initial_peers=(f"/ip4/10.0.0.1/tcp/1/p2p/{run_key.peer_id}",), stage=stage, grace_s=grace_s)
    run_id, manifest = await find_manifest(dht, Entrance(options.initial_peers), run_key.peer_id)
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
    device = torch.device("cpu")
    first_stage = await choose_first_stage(context, dht, device)
    host.peer = Peer(
        context=context,
        dht=dht,
        transport=host.open_transport(),
        device=device,
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

    async def coordinate(service: RunService) -> None:
        try:
            if await service.run():
                await service.end()
        except SwarmError:  # if the operator ends it after its last step, it says that it has no model
            if service.ended != ENDED_BY_OPERATOR:
                raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await coordinate(host.service)
        tasks.cancel_scope.cancel()


async def run_stranger(host: Host, tube: Tube, seconds: float) -> None:
    """Have peers compute microbatches and give states, without having announced anything; they do neither."""
    host.join_dht()
    transport, resolved = host.open_transport(), tube.resolved
    manifest = resolved.manifest
    shape = (1, manifest.data.sequence_length, resolved.hidden_size)
    tokens = memoryview(bytes(4 * (manifest.data.sequence_length + 1)))
    hidden = memoryview(bytes(encoded_bytes(shape, manifest.wire.activations)))
    rng = host.rng("stranger")
    with anyio.move_on_after(seconds):
        while True:
            await anyio.sleep(rng.uniform(0.0, 0.5))
            peers = [peer for peer in tube.peers() if peer.peer is not None and tube.stage_of(peer) is not None]
            if not peers:
                continue
            callee = rng.choice(peers)
            stage, step = tube.stage_of(callee), callee.peer._replica.step  # type: ignore[union-attr]
            train = MicrobatchCall(
                manifest=resolved.hash,
                round_number=step.round_number,
                stage=max(stage or 0, 1),
                mode="train",
                timeline=step.timeline.first_round,
                microbatch=rng.randbytes(16),
                num_samples=1,
                length=manifest.data.sequence_length,
                timeout_s=5.0,
            )
            state = StateIndexCall(manifest=resolved.hash, of_stage=stage or 0)
            for call, tensors in ((train, (tokens, hidden)), (state, ())):
                with suppress(CallError):
                    await transport.call(callee.peer_id, call, tensors, timeout_s=5.0)
                    tube.violation(f"{callee.name} has answered a stranger's {call.op}")

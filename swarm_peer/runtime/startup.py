"""From a command line to a running peer: its place in the DHT, its run and its stage."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import torch

from swarm_peer.config import PeerOptions
from swarm_peer.errors import UserError
from swarm_peer.model.costs import forward_flops, safe_stage_memory
from swarm_peer.model.pretrained import check_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.placement.rebalancing import choose_stage
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext, Storage
from swarm_peer.runtime.data.allowed_files import check_data_files
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemRandom, SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics, serve_metrics
from swarm_peer.runtime.host.preparation import choose_device
from swarm_peer.runtime.host.processes import Restart, run_loop, spare_imports, start_anew, take_restart
from swarm_peer.runtime.host.scratch import scratch_folder
from swarm_peer.runtime.network.bootstrap import find_manifest, read_addresses
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.peer import Peer
from swarm_peer.wire.identity import Identity

log = logging.getLogger(__name__)

# How long undecided newcomers wait for each other's announcements before they choose a stage.
CHOOSING_S = 1.5


@dataclass(frozen=True, kw_only=True)
class _Start:
    """The parts of a process that exist before it knows its run and its stage."""

    options: PeerOptions
    addresses: list[str]
    device: torch.device
    dht: SwarmDHT
    metrics: PeerMetrics
    before: Restart | None


def run_peer(options: PeerOptions, counted: CountedHook | None = None) -> None:
    """Run a peer until it is told to stop or the run ends. To be called in the main thread.

    Args:
        counted: told of each microbatch that a stage-0 peer counts

    Raises:
        UserError: the options, the run or this machine do not fit together; the message says what to change
    """
    metrics = PeerMetrics()
    if options.metrics_port is not None:
        log.info("metrics_served port=%d", serve_metrics(metrics.registry, options.metrics_port))
    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    before = take_restart()
    addresses = read_addresses(options.initial_peers)
    if before is not None:
        addresses += before.initial_peers
    with scratch_folder() as folder:
        snapshots = folder / "snapshots"
        if before is not None and before.snapshots is not None:
            Path(before.snapshots).rename(snapshots)
        identity_path = options.identity_path or folder / "identity"
        identity = Identity.load_or_create(identity_path)

        async def run() -> Restart | None:
            async with SwarmDHT.open(
                initial_peers=addresses,
                host_maddrs=options.host_maddrs,
                announce_maddrs=options.announce_maddrs,
                identity=identity,
                identity_path=identity_path,
                metrics=metrics,
            ) as dht:
                log.info("peer_started peer=%s addresses=%s", identity.peer_id, " ".join(dht.addresses))
                start = _Start(
                    options=options, addresses=addresses, device=device, dht=dht, metrics=metrics, before=before
                )
                return await _run_in_swarm(start, FolderStorage(snapshots), counted)

        spare_imports()
        restart = run_loop(run)
        if restart is not None and snapshots.exists():
            kept = Path(tempfile.mkdtemp(prefix="swarm-"))
            restart = replace(restart, snapshots=str(snapshots.rename(kept)))
    if restart is not None:
        start_anew(restart)


async def _run_in_swarm(start: _Start, storage: Storage, counted: CountedHook | None) -> Restart | None:
    """Run the peer. Returns how to start anew, if at all."""
    options, threads = start.options, SystemThreads()
    run_id, resolved, stage = await _choose_run_and_stage(start)
    spec = resolved.specs[stage]
    # Slow work happens in threads: this process is a node of the DHT already.
    await threads.run(check_pretrained, resolved.manifest, options.data_dir)
    if spec.is_first:
        await threads.run(check_data_files, resolved.manifest, options.data_dir)
    log.info("stage_chosen run=%s manifest=%s stage=%d layers=%s", run_id, resolved.hash, stage, list(spec.layers))
    context = PeerContext(
        run_id=run_id,
        resolved=resolved,
        identity=start.dht.identity,
        options=options,
        clock=SystemClock(),
        random=SystemRandom(f"{resolved.manifest.seed} {start.dht.identity.peer_id}"),
        threads=threads,
        storage=storage,
        metrics=start.metrics,
        changed=Condition(),
    )
    trainer = await threads.run(
        lambda: StageTrainer(resolved, spec, device=start.device, cache_dir=options.cache_dir, blank=True)
    )
    peer = Peer(context=context, trainer=trainer, dht=start.dht, counted=counted, before=start.before)
    await peer.run()
    return peer.restart


async def _choose_run_and_stage(start: _Start) -> tuple[str, ResolvedManifest, int]:
    options, before, dht = start.options, start.before, start.dht
    run_id, manifest = await find_manifest(dht, start.addresses, options.run_id if before is None else before.run_id)
    resolved = await anyio.to_thread.run_sync(ResolvedManifest.of, manifest)
    count = manifest.stages.count
    if before is not None:
        return run_id, resolved, before.stage
    if options.stage != "auto":
        if int(options.stage) >= count:
            raise UserError(f"--stage {options.stage}: the run has stages 0 to {count - 1}; name one of them, or auto")
        return run_id, resolved, int(options.stage)
    me = dht.identity.peer_id
    myself = PeerView(peer_id=me, stage=UNDECIDED, state=PeerState.JOINING, memory_bytes=options.max_memory or 0)
    directory = Directory(
        manifest=manifest,
        dht=dht,
        clock=SystemClock(),
        metrics=start.metrics,
        changed=Condition(),
        describe_self=lambda: myself,
        device=options.device,
    )
    await directory.announce()
    await anyio.sleep(CHOOSING_S)
    view = await directory.refresh_surely([*range(count), UNDECIDED])
    choice = choose_stage(view, forward_flops(resolved), me, stage_memory_bytes=safe_stage_memory(resolved))
    log.info("stage_decided stage=%d reason=%s", choice.stage, choice.reason)
    return run_id, resolved, choice.stage

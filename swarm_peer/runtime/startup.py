"""From a command line to a running peer: its place in the DHT, its run and its stage."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import torch

from swarm_peer.codecs import PLAIN
from swarm_peer.config import RunManifest
from swarm_peer.errors import SwarmError, UserError, first_line
from swarm_peer.model.costs import forward_flops
from swarm_peer.model.pretrained import check_begins
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.traffic import stage_traffic
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.diagnosis.finding import Level
from swarm_peer.policy.diagnosis.machine_findings import judge_machine
from swarm_peer.policy.owner import Hours, OwnerPolicy
from swarm_peer.policy.placement.rebalancing import choose_stage
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.launcher import CountedHook
from swarm_peer.runtime.host.connections import count_connections
from swarm_peer.runtime.host.device_errors import is_lost, is_out_of_memory
from swarm_peer.runtime.host.identities import KeptFile, free_identity, state_folder
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemRandom, SystemThreads
from swarm_peer.runtime.host.machine_facts import look_at_machine
from swarm_peer.runtime.host.metrics import PeerMetrics, count_logged_errors, serve_metrics, show_disk
from swarm_peer.runtime.host.other_use import sights_of
from swarm_peer.runtime.host.ports import FIRST_PORT_OF_PEERS
from swarm_peer.runtime.host.preparation import (
    believed_limit,
    check_device,
    claimed_device,
    in_words,
    set_threads,
    stages_too_large,
)
from swarm_peer.runtime.host.processes import run_loop, signals_set, spare_imports
from swarm_peer.runtime.host.running_peers import running_folder, shown
from swarm_peer.runtime.host.scratch import scratch_folder
from swarm_peer.runtime.network.bootstrap import Entrance, find_manifest, read_entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.link import Link
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.owner import DailyCount, Owner
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import STATE_CHUNK_BYTES

log = logging.getLogger(__name__)

# Of a link of which the owner lends a part, connections of others take this share of that at most.
CARRIED_SHARE = 0.25

# How long undecided newcomers wait for each other's announcements before they choose a stage.
CHOOSING_S = 1.5
# Room in a frame for the index of a state, and for headers.
FRAME_SLACK_BYTES = 16 * 2**20


def run_peer(options: PeerOptions, counted: CountedHook | None = None) -> None:
    """Run a peer until it is told to stop or the run ends. To be called in the main thread.

    Args:
        counted: told of each microbatch that the peer counts at stage 0

    Raises:
        UserError: the options, the run or this machine do not fit together; the message says what to change
        SwarmError: the device has failed, or ran out of memory outside of a pass
    """
    metrics = PeerMetrics()
    if options.metrics_port is not None:
        count_logged_errors(metrics.registry)
        port = serve_metrics(metrics.registry, options.metrics_host, options.metrics_port)
        log.info("metrics_served host=%s port=%d", options.metrics_host, port)
        options = options.model_copy(update={"metrics_port": port})
    if options.threads is not None:
        set_threads(options.threads)
    entrance = read_entrance(options.initial_peers)
    _tell_what_is_not_right(options)
    with (
        claimed_device(options.device, state_folder()) as device,
        scratch_folder() as folder,
        ExitStack() as opened,
    ):
        spare_imports()
        show_disk(metrics.registry, "swarm", folder)
        identity_path = options.identity_path or opened.enter_context(free_identity(state_folder(), folder))
        try:
            run_loop(_run, options, metrics, device, entrance, folder, identity_path, counted)
        except (RuntimeError, MemoryError) as error:
            if is_lost(error):
                raise SwarmError(f"the device has failed, start the peer again ({first_line(error)})") from error
            if not is_out_of_memory(error):
                raise
            # Elsewhere than in a pass, which fails alone: weights may be half updated.
            raise SwarmError(
                "the device ran out of memory, and this peer cannot go on: end what else uses the device, or start the "
                f"peer again with a lower --max-memory or for a smaller stage ({first_line(error)})"
            ) from error


def _tell_what_is_not_right(options: PeerOptions) -> None:
    """Log a line for each thing of this machine that keeps the peer from its work, or may do so later."""
    for finding in judge_machine(look_at_machine(options.device, options.cache_dir)):
        if finding.level is not Level.OK:
            log.warning("not_right check=%s reason=%s", finding.check.replace(" ", "_"), finding.text)


async def _run(
    options: PeerOptions,
    metrics: PeerMetrics,
    device: torch.device,
    entrance: Entrance,
    folder: Path,
    identity_path: Path,
    counted: CountedHook | None,
) -> None:
    """Join the DHT and the run, and serve one stage after the other."""
    identity = Identity.load_or_create(identity_path)
    async with _open_dht(options, entrance, identity, identity_path, metrics) as dht:
        if entrance.invite is not None:
            dht.passes.keep_in(KeptFile(state_folder() / f"revocations-{entrance.invite.run_id}"))
        log.info("peer_started peer=%s addresses=%s", identity.peer_id, " ".join(dht.addresses))
        run_id, manifest = await find_manifest(dht, entrance, options.run_id)
        threads = SystemThreads()  # for slow work: this process is a node of the DHT already
        resolved, options, too_large = await threads.run(_examine, manifest, device, options)
        context = PeerContext(
            run_id=run_id,
            resolved=resolved,
            identity=identity,
            options=options,
            clock=SystemClock(),
            random=SystemRandom(f"{manifest.seed} {identity.peer_id}"),
            threads=threads,
            storage=FolderStorage(folder / "snapshots"),
            metrics=metrics,
            changed=Condition(),
            too_large=too_large,
        )
        stage = await choose_first_stage(context, dht, device)
        await threads.run(check_begins, manifest, options.data_dir)
        log.info("stage_chosen run=%s manifest=%s stage=%d", run_id, resolved.hash, stage)
        await _take_part(context, dht, device, stage, counted)


async def _take_part(
    context: PeerContext, dht: SwarmDHT, device: torch.device, stage: int, counted: CountedHook | None
) -> None:
    """Serve a stage, and then others, as long as the owner of the machine lets the peer."""
    options, metrics = context.options, context.metrics
    link = Link.of(options.max_upload_mbps, options.max_download_mbps, context.clock)
    payload_bytes = _max_payload_bytes(context.resolved)
    async with (
        P2PTransport.open(
            dht.p2p, passes=dht.passes, max_payload_bytes=payload_bytes, metrics=metrics, link=link
        ) as transport,
        signals_set(ended := anyio.Event()),
        _owner_of(context, device, link) as owner,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(count_connections, dht.daemon_pid, link.settle)
        dht.p2p.carried = link.carry
        peer = Peer(
            context=context,
            dht=dht,
            transport=transport,
            device=device,
            device_thread=DeviceThread(clock=context.clock, threads=context.threads, metrics=metrics, device=device),
            owner=owner,
            counted=counted,
        )
        dht.p2p.may_carry = lambda: not peer.is_resting
        await peer.run(stage, ended)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _owner_of(context: PeerContext, device: torch.device, link: Link) -> AsyncIterator[Owner]:
    """The owner whom a peer obeys; while the context is open, other shells find the peer."""
    options = context.options
    count = DailyCount(KeptFile(state_folder() / f"sent-{context.identity.peer_id}"))
    per_day = options.max_upload_gb_per_day
    policy = OwnerPolicy(
        hours=None if options.hours is None else Hours.parse(options.hours),
        max_sent_bytes_per_day=None if per_day is None else 1e9 * per_day,
        spent_day=count.spent_day,
    )
    sights = await context.threads.run(sights_of, device) if options.pause_when_busy else ()
    with shown(running_folder(), context.identity.peer_id) as files:
        yield Owner(
            context=context,
            policy=policy,
            count=count,
            sent_bytes=lambda: int(link.sent_bytes),
            files=files,
            sights=sights,
        )


def _open_dht(
    options: PeerOptions, entrance: Entrance, identity: Identity, identity_path: Path, metrics: PeerMetrics
) -> AbstractAsyncContextManager[SwarmDHT]:
    lent = options.max_upload_mbps, options.max_download_mbps
    return SwarmDHT.open(
        initial_peers=entrance.addresses,
        invite=entrance.invite,
        host_maddrs=options.host_maddrs,
        first_port=FIRST_PORT_OF_PEERS,
        announce_maddrs=options.announce_maddrs,
        map_port=options.map_port,
        # Connections of others take both directions of the link that the owner lends, and come last.
        relay_mbps=min([options.relay_mbps, *(CARRIED_SHARE * mbps for mbps in lent if mbps is not None)]),
        identity=identity,
        identity_path=identity_path,
        metrics=metrics,
    )


def _examine(
    manifest: RunManifest, device: torch.device, options: PeerOptions
) -> tuple[ResolvedManifest, PeerOptions, tuple[int, ...]]:
    """The run's manifest with its model's config, the options to go by, and the stages that are too large for the peer.

    Raises:
        UserError: the device cannot be used, or no stage fits into its memory
    """
    check_device(device, manifest.model.precision)
    resolved = ResolvedManifest.of(manifest)
    max_memory = believed_limit(options.max_memory, device)
    believed = options.model_copy(update={"max_memory": max_memory})
    return resolved, believed, stages_too_large(resolved, device, max_memory)


def _max_payload_bytes(resolved: ResolvedManifest) -> int:
    """Most bytes of tensors in a frame that any stage of a run receives."""
    manifest = resolved.manifest
    shape = (manifest.training.microbatch_size, manifest.data.sequence_length, resolved.boundary_width)
    return max(encoded_bytes(shape, PLAIN), STATE_CHUNK_BYTES) + FRAME_SLACK_BYTES


async def choose_first_stage(context: PeerContext, dht: SwarmDHT, device: torch.device) -> int:
    """The stage to begin with: the one that `--stage` names, or the one where a peer is needed most.

    Raises:
        UserError: the run has no such stage
    """
    options, resolved = context.options, context.resolved
    count = resolved.manifest.stages.count
    if options.stage != "auto":
        if int(options.stage) >= count:
            raise UserError(f"--stage {options.stage}: the run has stages 0 to {count - 1}; name one of them, or auto")
        return int(options.stage)
    me = dht.identity.peer_id
    up, down = context.lent_bytes_per_s
    myself = PeerView(
        peer_id=me,
        stage=UNDECIDED,
        state=PeerState.JOINING,
        too_large=context.too_large,
        upload_bytes_per_s=up,
        download_bytes_per_s=down,
    )
    directory = Directory(
        manifest=resolved.manifest,
        dht=dht,
        clock=context.clock,
        metrics=context.metrics,
        changed=context.changed,
        describe_self=lambda: myself,
        device=in_words(device),
    )
    await directory.announce()
    await anyio.sleep(CHOOSING_S)
    view = await directory.refresh_surely([*range(count), UNDECIDED])
    traffic = stage_traffic(resolved)
    choice = choose_stage(view, forward_flops(resolved), me, context.clock.monotonic_s(), traffic)
    log.info("stage_decided stage=%d reason=%s", choice.stage, choice.reason)
    return choice.stage

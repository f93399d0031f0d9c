"""`swarm-peer doctor`: looks at this machine, and at a run from it, and leaves nothing there.

It gathers facts; policy/diagnosis judges them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from math import inf
from pathlib import Path
from statistics import median

import anyio
import torch

from swarm_peer.errors import CallError, UserError
from swarm_peer.model.costs import state_bytes
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.diagnosis.finding import CheckFinding, Level, failure
from swarm_peer.policy.diagnosis.machine_findings import LEAST_ROOM_BYTES, DeviceFacts, judge_disk, judge_machine
from swarm_peer.policy.diagnosis.run_findings import (
    ClockLimits,
    MemberWay,
    NetworkPosition,
    RunFacts,
    StageFit,
    judge_run,
)
from swarm_peer.policy.planning.performance_model import Predictor
from swarm_peer.policy.planning.resources import PeerGroup
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.expected_work import step_settings, works_of
from swarm_peer.runtime.host.identities import free_identity, state_folder
from swarm_peer.runtime.host.machine import SystemClock, SystemThreads
from swarm_peer.runtime.host.machine_facts import look_at_machine, look_at_rooms, look_longer
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.ports import FIRST_PORT_OF_PEERS, PortTaken
from swarm_peer.runtime.host.preparation import set_threads, stages_too_large
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.host.scratch import scratch_folder
from swarm_peer.runtime.network.bootstrap import Entrance, find_manifest, read_entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.guarded_p2p import NobodyAnswers
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.network.peer_addresses import listening, ports_of
from swarm_peer.runtime.network.probing import Prober
from swarm_peer.runtime.network.reachability import Ways
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import MAX_PROBE_BYTES
from swarm_peer.wire.places import CLOCK_TOLERANCE_S, JOINING_TOLERANCE_S

log = logging.getLogger(__name__)

# Members that the way to is measured.
MEMBERS_TRIED = 3
# To hear from members how this machine is reached. They try its port for three seconds.
SIGHT_S = 12.0
LOOK_S = 0.2
# A peer keeps two snapshots of its own stage and two of the next, and writes two more at a time.
SNAPSHOTS_KEPT = 6
# The part of the speed of a matrix product that training reaches; see docs/planning.md on vendors' figures, which a
# product in 16 bits reaches some three quarters of.
TRAINING_SHARE = {"fp32": 0.6, "bf16": 0.4, "fp16": 0.4}
# Bytes of tensors in a frame that arrives here.
MAX_PAYLOAD_BYTES = 2 * MAX_PROBE_BYTES


def examine(options: PeerOptions) -> tuple[CheckFinding, ...]:
    """Look at this machine and, if there is an invite, at its run. Takes half a minute, and some megabytes of traffic.

    Raises:
        UserError: the options are malformed
    """
    if options.threads is not None:
        set_threads(options.threads)
    entrance = read_entrance(options.initial_peers) if options.initial_peers else None
    machine = look_longer(look_at_machine(options.device, options.cache_dir))
    judged = judge_machine(machine)
    if entrance is None or judge_disk(machine.rooms).level is Level.FAILURE:  # libp2p's daemon needs a file for its key
        return judged
    with scratch_folder() as folder, free_identity(state_folder(), folder) as kept:
        try:
            seen = run_loop(_look_at_run, options, entrance, options.identity_path or kept, machine.device)
        except NobodyAnswers:
            asked = ", ".join(each.rpartition("/p2p/")[0] for each in entrance.addresses)
            remedy = "check that this machine is on the network and may dial out by TCP, and that the run is not over"
            return (*judged, failure("run", f"nobody answers at {asked}", remedy))
        except PortTaken as error:
            return (*judged, failure("port", str(error)))
        except UserError as error:  # the message says what to do
            return (*judged, failure("run", str(error)))
    rooms = look_at_rooms(options.cache_dir, max(seen.snapshot_bytes, LEAST_ROOM_BYTES))
    return (*judge_machine(replace(machine, rooms=rooms)), *judge_run(seen.facts))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The facts of a run, and the bytes of snapshots that its peers keep."""

    facts: RunFacts
    snapshot_bytes: int


async def _look_at_run(options: PeerOptions, entrance: Entrance, identity_path: Path, device: DeviceFacts) -> _Seen:
    """Join the DHT for a moment, as a peer of this machine would, without announcing anything."""
    metrics, clock = PeerMetrics(), SystemClock()
    async with SwarmDHT.open(
        initial_peers=entrance.addresses,
        invite=entrance.invite,
        host_maddrs=options.host_maddrs,
        first_port=FIRST_PORT_OF_PEERS,
        announce_maddrs=options.announce_maddrs,
        map_port=options.map_port,
        identity=Identity.load_or_create(identity_path),
        identity_path=identity_path,
        metrics=metrics,
    ) as dht:
        run_id, manifest = await find_manifest(dht, entrance, options.run_id)
        resolved = await SystemThreads().run(ResolvedManifest.of, manifest)
        directory = Directory(manifest=manifest, dht=dht, clock=clock, metrics=metrics, changed=Condition())
        dht.dial_by(directory.addresses_of, directory.can_be_dialled, directory.has_left)
        async with P2PTransport.open(
            dht.p2p, passes=dht.passes, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=metrics
        ) as transport:
            prober = Prober(transport=transport, manifest_hash=manifest.hash, clock=clock)
            members = await _find_members(dht, directory, entrance, run_id, manifest.stages.count)
            ways = [await _measure(prober, peer_id, addresses) for peer_id, addresses in members.items()]
        position = await _find_position(dht)
    facts = _facts_of(resolved, ways, position)
    if not device.error:
        facts = _with_device(facts, resolved, device, options, directory.view)
    return _Seen(facts=facts, snapshot_bytes=_snapshot_bytes(resolved))


async def _find_members(
    dht: SwarmDHT, directory: Directory, entrance: Entrance, run_id: str, num_stages: int
) -> dict[str, list[str]]:
    """Some members, drawn by chance, with the addresses at which they might answer; coordinators last."""
    coordinators = {run_id}
    try:
        await directory.refresh(range(num_stages))
        coordinators |= {term.coordinator for term in await dht.fetch_coordination(run_id)}
    except CallError as error:
        log.info("members_not_found reason=%s", error)
    peers = [peer.peer_id for peer in directory.view.peers]
    given = {address: address.rpartition("/p2p/")[2] for address in entrance.addresses}
    # The run's key names no process where its coordinator has another identity.
    others = sorted(each for each in coordinators if each != run_id or len(coordinators) == 1 or each in given.values())
    chosen = [*random.sample(peers, len(peers)), *others][:MEMBERS_TRIED]
    return {
        peer_id: [*directory.addresses_of(peer_id), *(address for address, its in given.items() if its == peer_id)]
        for peer_id in chosen
        if peer_id != dht.identity.peer_id
    }


async def _measure(prober: Prober, peer_id: str, addresses: Sequence[str]) -> MemberWay:
    return await prober.measure(peer_id, is_direct=bool(await listening(addresses)))


async def _find_position(dht: SwarmDHT) -> NetworkPosition:
    """Where this machine is in the network, once members have said what they see, or some seconds have passed."""
    with anyio.move_on_after(SIGHT_S):
        while not dht.ways.seen_hosts:  # noqa: ASYNC110  # other tasks ask
            await anyio.sleep(LOOK_S)
    return position_of(dht.ways)


def position_of(ways: Ways) -> NetworkPosition:
    """A node's ways, as the checks take them."""
    return NetworkPosition(
        ports=ports_of(ways.addresses),
        own_hosts=ways.own_hosts,
        # A neighbour at home, and this machine itself, see nothing of the router.
        seen_hosts=[host for host in ways.seen_hosts if ip_address(host).is_global],
        is_reachable=ways.is_reachable,
        closed=ways.closed,
    )


def _facts_of(resolved: ResolvedManifest, ways: Sequence[MemberWay], position: NetworkPosition) -> RunFacts:
    manifest = resolved.manifest
    works = works_of(resolved, "cpu")
    boundary = max(max(work.activation_bytes, work.gradient_bytes) for work in works)
    return RunFacts(
        name=manifest.name,
        clocks=ClockLimits(
            tolerance_s=JOINING_TOLERANCE_S,
            ahead_s=CLOCK_TOLERANCE_S,
            behind_s=manifest.limits.announcement_s,
        ),
        position=position,
        ways=ways,
        microbatch_bytes=boundary * manifest.training.microbatch_size,
        hop_timeout_s=manifest.limits.hop_timeout_s,
        num_stages=resolved.num_stages,
        tokens_per_sample=manifest.data.sequence_length,
    )


def _with_device(
    facts: RunFacts, resolved: ResolvedManifest, device: DeviceFacts, options: PeerOptions, view: SwarmView
) -> RunFacts:
    """Add what the device can do in the run."""
    try:
        too_large = stages_too_large(resolved, torch.device(device.device), options.max_memory)
    except UserError as error:
        return replace(facts, too_small=str(error))
    lent = options.max_upload_mbps, options.max_download_mbps
    fits = stage_fits(resolved, view, device, facts.ways, lent)
    return replace(facts, too_large=too_large, fits=[fit for fit in fits if fit.stage not in too_large])


def stage_fits(
    resolved: ResolvedManifest,
    view: SwarmView,
    device: DeviceFacts,
    ways: Sequence[MemberWay],
    lent_mbps: tuple[float | None, float | None] = (None, None),
) -> list[StageFit]:
    """The speed that the performance model expects of a machine in each stage, by itself.

    Args:
        lent_mbps: megabits a second up and down that its owner lends; None for all of the link
    """
    lent_up, lent_down = (inf if mbps is None else mbps * 1e6 / 8 for mbps in lent_mbps)
    works = works_of(resolved, torch.device(device.device).type)
    speed = device.flops_per_s * TRAINING_SHARE[device.precision]
    ups = [way.up_bytes_per_s for way in ways if way.up_bytes_per_s]
    downs = [way.down_bytes_per_s for way in ways if way.down_bytes_per_s]
    me = PeerGroup(
        name="this machine",
        count=1,
        flops_per_s=speed,
        upload_bytes_per_s=min(max(ups, default=inf), lent_up),
        download_bytes_per_s=min(max(downs, default=inf), lent_down),
    )
    settings = step_settings(resolved.manifest)
    rates = Predictor(works=works, groups=(me,), settings=settings).rates()
    found = []
    for stage, (work, (rate,)) in enumerate(zip(works, rates, strict=True)):
        others = [
            peer.samples_per_s
            for peer in view.in_stage(stage)
            if peer.state is PeerState.SERVING and peer.samples_per_s
        ]
        found.append(
            StageFit(
                stage=stage,
                samples_per_s=rate,
                is_linked=rate < 0.99 * speed / work.flops,
                others_samples_per_s=median(others) if others else 0.0,
            )
        )
    return found


def _snapshot_bytes(resolved: ResolvedManifest) -> int:
    """Bytes of all snapshots that a peer of the largest stage keeps."""
    if not resolved.manifest.recovery.snapshot_every:
        return 0
    sizes = (
        state_bytes(resolved.manifest, work.trained, work.memory.optimizer_bytes) for work in works_of(resolved, "cpu")
    )
    return int(SNAPSHOTS_KEPT * max(sizes))

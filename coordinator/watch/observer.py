"""A way into a live run's DHT with nothing announced, and two commands that need no more: `status` and `end`.

Nothing here needs a model: transformers alone would take such a command seconds to import.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import anyio

from coordinator.run.invites import coordinator_invite
from coordinator.watch.ending import ENDED_BY_OPERATOR, see_off
from coordinator.watch.metrics_file import MetricsLine
from coordinator.watch.run_watch import RunWatch
from swarm_peer.addresses import EVERYWHERE
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.identities import free_identity, state_folder
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.network.assignments import find_end
from swarm_peer.runtime.network.bootstrap import Entrance, find_manifest, read_entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.peer_addresses import is_loopback
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import ProgressRecord, progress_key

T = TypeVar("T")

log = logging.getLogger(__name__)


def open_node(
    identity_path: Path,
    entrance: Entrance,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str] = (),
    map_port: bool = False,
    relay_mbps: float = 0.0,
) -> AbstractAsyncContextManager[SwarmDHT]:
    """Join a DHT, or begin one, with the identity in a file, which is made if it is missing.

    Raises:
        UserError: see SwarmDHT.open
    """
    return SwarmDHT.open(
        initial_peers=entrance.addresses,
        invite=entrance.invite,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        map_port=map_port,
        relay_mbps=relay_mbps,
        identity=Identity.load_or_create(identity_path),
        identity_path=identity_path,
        metrics=PeerMetrics(),
    )


@asynccontextmanager
async def temporary_node(entrance: Entrance) -> AsyncIterator[SwarmDHT]:
    """Join a DHT, or begin one on loopback, with an identity of its own that is then forgotten.

    Raises:
        UserError: nobody answers
    """
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        async with _open_anywhere(Path(folder) / "identity", entrance) as dht:
            yield dht


@asynccontextmanager
async def observer_node(entrance: Entrance) -> AsyncIterator[SwarmDHT]:
    """Join a DHT with an identity that this user's observers keep, each time the first one that is free.

    An invite is for so many peers at a time, and each new identity takes a place for a while.

    Raises:
        UserError: nobody answers
    """
    with (
        tempfile.TemporaryDirectory(prefix="swarm-") as scratch,
        free_identity(state_folder(), Path(scratch), "observer") as identity_path,
    ):
        try:
            Identity.load_or_create(identity_path)
        except UserError as error:
            log.warning("identity_not_kept reason=%s", error)
            identity_path = Path(scratch) / "identity"
        async with _open_anywhere(identity_path, entrance) as dht:
            yield dht


def _open_anywhere(identity_path: Path, entrance: Entrance) -> AbstractAsyncContextManager[SwarmDHT]:
    # In a swarm on loopback alone, peers are dialled there; see is_dialable.
    hosts = ("/ip4/127.0.0.1",) if all(map(is_loopback, entrance.addresses)) else EVERYWHERE
    return open_node(identity_path, entrance, [f"{host}/tcp/0" for host in hosts])


def observer_directory(
    manifest: RunManifest, dht: SwarmDHT, metrics: PeerMetrics | None = None, clock: Clock | None = None
) -> Directory:
    """A directory of the run's peers for a process that looks at them and announces nothing itself."""
    directory = Directory(
        manifest=manifest,
        dht=dht,
        clock=clock or SystemClock(),
        metrics=metrics or PeerMetrics(),
        changed=Condition(),
    )
    dht.dial_by(directory.addresses_of, directory.can_be_dialled, directory.has_left)
    return directory


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A live run, and an observer's way to its peers."""

    run_id: str
    manifest: RunManifest
    dht: SwarmDHT
    directory: Directory
    metrics: PeerMetrics


def observe_run(initial_peers: Sequence[str], run_id: str | None, work: Callable[[LiveRun], Awaitable[T]]) -> T:
    """Join the DHT of a live run for as long as `work` takes.

    Args:
        initial_peers: addresses of any of its peers, an invite, or files of them
        run_id: which run, where the addresses lead to several

    Raises:
        UserError: nobody answers, or there is no such run
    """
    return _observe(read_entrance(initial_peers), run_id, work)


def _observe(entrance: Entrance, run_id: str | None, work: Callable[[LiveRun], Awaitable[T]]) -> T:
    async def find_and_work() -> T:
        async with observer_node(entrance) as dht:
            found_id, manifest = await find_manifest(dht, entrance, run_id)
            metrics = PeerMetrics()
            directory = observer_directory(manifest, dht, metrics)
            run = LiveRun(run_id=found_id, manifest=manifest, dht=dht, directory=directory, metrics=metrics)
            return await work(run)

    return run_loop(find_and_work)


async def look_once(run: LiveRun) -> RunWatch:
    """A live run as it is now.

    Raises:
        UserError: it is over, and its peers have gone
        CallError: the DHT does not answer
    """
    manifest = run.manifest
    watch = RunWatch(manifest, SwarmView(manifest.stages.count), waits=False)
    view = await run.directory.refresh(range(manifest.stages.count))
    if not view.peers and (end := await find_end(run.dht, run.run_id)) is not None:
        raise UserError(f"the run is over: {end.reason}")
    await observe(run.dht, view, watch)
    records = await run.dht.fetch_coordination(run.run_id)
    watch.observe_coordinator(max(records.items(), default=None, key=lambda said: said[0]))
    return watch


def end_run(initial_peers: Sequence[str], run_key: Identity, on_left: Callable[[int], None]) -> None:
    """End a live run before its steps: its peers and coordinators go, each as it would upon a signal.

    Args:
        on_left: called with the number of peers that are left, each time that it changes

    Raises:
        UserError: nobody answers, there is no such run, or some of its peers do not go
    """
    entrance = replace(read_entrance(initial_peers), invite=coordinator_invite(run_key))
    _observe(entrance, run_key.peer_id, lambda run: _end(run, run_key, on_left))


async def _end(run: LiveRun, run_key: Identity, on_left: Callable[[int], None]) -> None:
    begun_s = int(time.time())
    with suppress(CallError):  # whether there is anybody to be told
        await run.directory.refresh(range(run.manifest.stages.count))
    farewell = await see_off(
        run.dht, run.directory, run.manifest, run_key, ENDED_BY_OPERATOR, begun_s=begun_s, on_left=on_left
    )
    if not farewell.is_told:
        raise UserError("the run was not ended: the DHT did not take it, or did not answer; see the warnings")
    if farewell.left:
        raise UserError(f"the run was told to end, and {farewell.left} peers still announce themselves: see their logs")


async def observe(dht: SwarmDHT, view: SwarmView, watch: RunWatch) -> list[MetricsLine]:
    """Look once at the progress of the peers in view; returns the lines of newly finished steps.

    Raises:
        CallError: no answer
    """
    manifest = watch.manifest
    progress = await dht.fetch(progress_key(manifest.hash), ProgressRecord, manifest.hash)
    return watch.observe(view, progress, anyio.current_time())

"""A whole run on this machine: the coordinator here, its peers as processes of their own, over real libp2p."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from coordinator.run.service import RunEvents, RunOptions, RunService, check_output
from coordinator.watch.live import LiveView
from coordinator.watch.loggers import LoggerName, open_loggers
from coordinator.watch.observer import temporary_node
from swarm_peer.config import RunManifest
from swarm_peer.errors import Interrupted, SwarmError, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.processes import die_with_parent, run_loop

log = logging.getLogger(__name__)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
# A peer that is told to go finishes what is in flight (10 s) and stops its processes.
PEER_LEAVE_TIMEOUT_S = 25.0
WATCH_PROCESSES_S = 0.5


class Process(Protocol):
    """The part of subprocess.Popen that is used here."""

    @property
    def returncode(self) -> int | None:
        """See subprocess.Popen."""

    def poll(self) -> int | None:
        """See subprocess.Popen."""

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen."""

    def terminate(self) -> None:
        """See subprocess.Popen."""

    def kill(self) -> None:
        """See subprocess.Popen."""


# Starts a peer; takes options of swarm-peer, the file that its output goes to, and its number of compute threads.
Launch = Callable[[Sequence[str], Path, int], Process]


@dataclass(frozen=True)
class LocalPeer:
    """One peer as a child process of this one."""

    name: str
    stage: int | str
    process: Process
    log_file: Path

    def last_words(self) -> str:
        """The last line of its log that is not blank."""
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "(no output)"


def run_local(
    manifest: RunManifest,
    peers_by_stage: Sequence[int],
    device: str,
    options: RunOptions,
    log_to: Sequence[LoggerName] = (),
) -> RunService:
    """Run coordinator and peers until the run has its steps and its model is saved.

    Raises:
        UserError: cannot work as asked
        SwarmError: a peer died
    """
    if len(peers_by_stage) != manifest.stages.count or min(peers_by_stage) < 1:
        raise UserError(
            f"--peers {','.join(map(str, peers_by_stage))}: the run has {manifest.stages.count} stages; name as many "
            f"numbers of at least 1, such as {','.join(['2'] * manifest.stages.count)}"
        )
    stages = manifest.stages.model_copy(update={"peers_to_start": min(peers_by_stage)})
    resolved = ResolvedManifest.of(manifest.model_copy(update={"stages": stages}))
    # A checkpoint is gone on from, and with it the folder's metrics.jsonl; anything else begins anew.
    options = replace(options, resume=options.plan.resume is not None)
    check_output(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    return run_loop(_run, resolved, peers_by_stage, device, options, log_to)


async def _run(
    resolved: ResolvedManifest,
    peers_by_stage: Sequence[int],
    device: str,
    options: RunOptions,
    log_to: Sequence[LoggerName],
) -> RunService:
    manifest, output = resolved.manifest, options.output
    async with temporary_node((), LOOPBACK) as dht:
        with (
            open_loggers(log_to, manifest, output, options.resume) as on_line,
            LiveView(manifest.training.steps) as live,
        ):
            service = RunService(resolved, dht, options, events=RunEvents(on_update=live.update, on_line=on_line))
            peers = LocalPeers(dht.addresses, peers_by_stage, output, device=device, cache_dir=options.cache_dir)
            async with peers.running():
                await _watch(service, peers.peers)
            return service


async def _watch(service: RunService, peers: Sequence[LocalPeer]) -> None:
    async def watch_processes() -> None:
        while True:
            for peer in peers:
                if peer.process.poll() is not None:
                    raise SwarmError(
                        f"peer {peer.name} ended with code {peer.process.returncode}: {peer.last_words()} (see "
                        f"{peer.log_file})"
                    )
            await anyio.sleep(WATCH_PROCESSES_S)

    async def interrupt() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                print("Interrupted: the peers leave now, which can take half a minute.", file=sys.stderr, flush=True)
                raise Interrupted("interrupted")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_processes)
        tasks.start_soon(interrupt)
        await service.run()
        tasks.cancel_scope.cancel()


class LocalPeers:
    """Peers of one run as child processes of this one.

    Args:
        peers_by_stage: how many each stage gets; together they share the cores
        output: folder of the run; the peers' logs go to a folder below it
    """

    def __init__(
        self,
        addresses: Sequence[str],
        peers_by_stage: Sequence[int],
        output: Path,
        *,
        device: str = "cpu",
        cache_dir: Path | None = None,
        launch: Launch | None = None,
    ):
        self.peers: list[LocalPeer] = []
        self._addresses = addresses
        self._peers_by_stage = peers_by_stage
        self._logs = output / "logs"
        self._threads = max(1, (os.cpu_count() or 1) // max(1, sum(peers_by_stage)))
        self._device = device
        self._cache_dir = cache_dir
        self._launch = launch or launch_peer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LocalPeers]:
        """Start the peers; on leaving, have all of them go, by force if they do not."""
        try:
            for stage, count in enumerate(self._peers_by_stage):
                for number in range(count):
                    self.start(stage, f"{stage}.{number}")
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.stop)  # in a thread: leaving peers talk to this process

    def start(self, stage: int | str, name: str, launch: Launch | None = None) -> LocalPeer:
        """Start a peer of a stage, or of the stage that it chooses itself (auto)."""
        self._logs.mkdir(parents=True, exist_ok=True)
        options = [
            *("--stage", str(stage), "--device", self._device),
            *("--host-maddrs", LOOPBACK, "--threads", str(self._threads), "--data-dir", "/"),
            *(("--cache-dir", str(self._cache_dir)) if self._cache_dir else ()),
            *("--initial-peers", *self._addresses),
        ]
        log_file = self._logs / f"peer-{name}.log"
        peer = LocalPeer(name, stage, (launch or self._launch)(options, log_file, self._threads), log_file)
        self.peers.append(peer)
        return peer

    def stop(self) -> None:
        """Stop all peers, stage by stage from the first: a peer's microbatches in flight need the later stages."""
        by_stage = sorted(self.peers, key=lambda peer: str(peer.stage))
        for _, stage_peers in itertools.groupby(by_stage, key=lambda peer: str(peer.stage)):
            leaving = list(stage_peers)
            for peer in leaving:
                if peer.process.poll() is None:
                    peer.process.terminate()
            for peer in leaving:
                try:
                    peer.process.wait(PEER_LEAVE_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    log.warning(
                        "peer_killed peer=%s reason=it did not leave in %.0f s", peer.name, PEER_LEAVE_TIMEOUT_S
                    )
                    peer.process.kill()
                    peer.process.wait()


def launch_peer(
    options: Sequence[str],
    log_file: Path,
    threads: int,
    program: Sequence[str] = (sys.executable, "-m", "swarm_peer.cli"),
) -> Process:
    """Start a program as a child process that dies with this one; the default for `Launch`."""
    parent = os.getpid()
    with log_file.open("wb") as file:
        return subprocess.Popen(
            [*program, *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Idle OpenMP threads must not spin: several peers share the cores.
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
            # Ctrl+C goes to this process alone, which then sees to the peers.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )

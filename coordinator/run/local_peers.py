"""The peers of a run on this machine, as child processes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from swarm_peer.errors import machine_fault
from swarm_peer.runtime.host.processes import die_with_parent

log = logging.getLogger(__name__)

# The program swarm-peer. `python -m` would look for modules in the folder that this program was started in first, and
# take its datasets.py or queue.py for the libraries of these names.
RUN_PEER = "import sys; sys.path[:] = filter(None, sys.path); from swarm_peer.cli import run; run()"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
# A peer that is told to go finishes what is in flight (10 s) and stops its processes.
PEER_LEAVE_TIMEOUT_S = 25.0
# A file takes room on its disk from its first byte on, most often so much.
_BLOCK_BYTES = 4096


class Process(Protocol):
    """The part of subprocess.Popen that is used here."""

    @property
    def pid(self) -> int:
        """See subprocess.Popen."""

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
    """One peer as a child process of this one.

    Attributes:
        place: the name of the first peer that this one stands in for; its own if there was none before it
        device: that it computes on
    """

    name: str
    place: str
    stage: int | str
    device: str
    process: Process
    log_file: Path

    def end(self) -> str | None:
        """How its process has ended, for people; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else "left"

    def last_words(self) -> str:
        """The last line of its log that is not blank."""
        lines = [
            line for line in self.log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        return lines[-1] if lines else "(no output)"

    def disk_fault(self) -> str | None:
        """Why its disk takes nothing more, so that it may have died of that and could not say so; None if it does."""
        try:
            with tempfile.TemporaryFile(dir=self.log_file.parent) as file:
                file.write(bytes(_BLOCK_BYTES))
        except OSError as error:
            return machine_fault(error)
        return None


class LocalPeers:
    """Peers of one run as child processes of this one.

    Args:
        peers_by_stage: how many each stage gets; together they share the cores
        output: folder of the run; the peers' logs go to a folder below it
        devices: that the peers take in turns, so that stage-mates are on different ones where there are several
    """

    def __init__(
        self,
        addresses: Sequence[str],
        peers_by_stage: Sequence[int],
        output: Path,
        *,
        devices: Sequence[str] = ("cpu",),
        cache_dir: Path | None = None,
        launch: Launch | None = None,
    ):
        self.peers: list[LocalPeer] = []
        self._addresses = addresses
        self._peers_by_stage = peers_by_stage
        self._logs = output / "logs"
        self._identities = output / "identities"
        self._threads = max(1, (os.cpu_count() or 1) // max(1, sum(peers_by_stage)))
        self._devices = itertools.cycle(devices)
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

    def start(
        self,
        stage: int | str,
        name: str,
        launch: Launch | None = None,
        place: str | None = None,
        device: str | None = None,
    ) -> LocalPeer:
        """Start a peer of a stage, or of the stage that it chooses itself (auto).

        Args:
            place: see LocalPeer
            device: None for the one whose turn it is
        """
        device = device or next(self._devices)
        self._logs.mkdir(parents=True, exist_ok=True)
        options = [
            *("--stage", str(stage), "--device", device),
            *("--name", name, "--identity-path", str(self._identities / name)),
            *("--host-maddrs", LOOPBACK, "--threads", str(self._threads), "--data-dir", "/"),
            *(("--cache-dir", str(self._cache_dir)) if self._cache_dir else ()),
            *("--initial-peers", *self._addresses),
        ]
        log_file = self._logs / f"peer-{name}.log"
        process = (launch or self._launch)(options, log_file, self._threads)
        peer = LocalPeer(name, place or name, stage, device, process, log_file)
        self.peers.append(peer)
        return peer

    def stand_in(self, dead: LocalPeer) -> LocalPeer:
        """Start a peer in the place of one whose process has ended."""
        number = int(dead.name.removeprefix(dead.place).removeprefix("-") or 1)
        return self.start(dead.stage, f"{dead.place}-{number + 1}", place=dead.place, device=dead.device)

    def stop(self) -> None:
        """Stop all peers, stage by stage from the first: a peer's microbatches in flight need the later stages."""

        def place(peer: LocalPeer) -> tuple[bool, int]:
            return isinstance(peer.stage, str), 0 if isinstance(peer.stage, str) else peer.stage  # `auto` comes last

        for _, stage_peers in itertools.groupby(sorted(self.peers, key=place), key=place):
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
    program: Sequence[str] = (sys.executable, "-c", RUN_PEER),
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

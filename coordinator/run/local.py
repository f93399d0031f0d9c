"""A whole run on this machine: the coordinator here, its peers as processes of their own, over real libp2p."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import anyio
import torch

from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.events import RunEvents
from coordinator.run.local_peers import LocalPeer, LocalPeers
from coordinator.run.run_options import RunOptions, check_not_begun, check_output, lock_folder
from coordinator.run.service import RunService
from coordinator.run.show import shown
from coordinator.watch.live_view import LiveView
from coordinator.watch.loggers import LoggerName, open_loggers
from coordinator.watch.observer import temporary_node
from coordinator.watch.run_file import run_file_written
from coordinator.watch.what_is_trained import training_line
from swarm_peer.config import RunManifest
from swarm_peer.errors import Interrupted, SwarmError, UserError
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.processes import run_loop, spare_imports
from swarm_peer.runtime.network.bootstrap import Entrance

WATCH_PROCESSES_S = 0.5
# A peer that dies earlier, so many times in a row, would die again: it takes up to half a minute to begin its work.
EARLY_S = 60.0
MAX_EARLY_DEATHS = 3
# A peer's own: it cannot work with these options on this machine.
EXIT_CODE_OF_MISTAKES = 2


def run_local(
    manifest: RunManifest,
    peers_by_stage: Sequence[int],
    devices: Sequence[str],
    options: RunOptions,
    log_to: Sequence[LoggerName] = (),
    *,
    restart: bool = True,
) -> RunService:
    """Run coordinator and peers until the run has its steps and its model is saved.

    Args:
        devices: that the peers take in turns
        restart: start another peer in the place of one that dies

    Raises:
        UserError: cannot work as asked, or would begin anew where another run has its folder or its checkpoints
        SwarmError: peers die again and again, or a stage has none left
    """
    check_counts(manifest, peers_by_stage)
    stages = manifest.stages.model_copy(update={"peers_to_start": min(peers_by_stage)})
    # Nobody but this machine reaches its peers.
    resolved = ResolvedManifest.of(manifest.model_copy(update={"stages": stages, "admission": "open"}))
    # A checkpoint is gone on from, and with it the folder's metrics.jsonl; anything else begins anew.
    options = replace(options, resume=options.plan.resume is not None)
    check_output(options.output)
    with closing(lock_folder(options.output)):
        if not options.resume:
            check_not_begun(options.output)
            check_weights(manifest)
            if options.plan.store is not None:
                options.plan.store.check_empty()
        spare_imports()
        return run_loop(_run, resolved, peers_by_stage, devices, options, log_to, restart)


def check_weights(manifest: RunManifest) -> None:
    """Check that a pretrained model's folder has weights, since no peer could begin without them. Raises UserError."""
    if (name := manifest.model.pretrained) is not None and (source := ModelSource(name)).folder is not None:
        source.files_by_tensor()


def check_counts(manifest: RunManifest, peers_by_stage: Sequence[int]) -> Sequence[int]:
    """The numbers of peers, one of at least 1 for each stage. Raises UserError if they are others."""
    if len(peers_by_stage) != manifest.stages.count or min(peers_by_stage) < 1:
        raise UserError(
            f"--peers {','.join(map(str, peers_by_stage))}: the run has {manifest.stages.count} stages; name as many "
            f"numbers of at least 1, such as {','.join(['2'] * manifest.stages.count)}"
        )
    return peers_by_stage


async def _run(
    resolved: ResolvedManifest,
    peers_by_stage: Sequence[int],
    devices: Sequence[str],
    options: RunOptions,
    log_to: Sequence[LoggerName],
    restart: bool,
) -> RunService:
    manifest, output = resolved.manifest, options.output
    async with temporary_node(Entrance()) as dht:
        with (
            run_file_written(output, dht.identity.peer_id, manifest, options.promises),
            open_loggers(log_to, manifest, output, options.resume, options.promises) as on_line,
            LiveView(manifest.training.steps) as live,
        ):
            events = RunEvents(on_update=live.update, on_line=on_line, on_event=live.tell)
            service = RunService(resolved, dht, options, events=events)
            peers = LocalPeers(dht.addresses, peers_by_stage, output, devices=devices, cache_dir=options.cache_dir)
            async with shown(service, options, live.print), peers.running():
                live.print(f"The run trains {training_line(manifest)}.")
                for line in notes_at_start(manifest, options.plan, devices, torch.cuda.device_count()):
                    live.print(line)
                live.print(name_processes(peers.peers, restart=restart))
                await _run_to_its_end(service, PeerWatch(peers=peers, restart=restart, say=live.print))
            return service


async def _run_to_its_end(service: RunService, watch: PeerWatch) -> None:
    async def interrupt() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                print("Interrupted: the peers leave now, which can take half a minute.", file=sys.stderr, flush=True)
                raise Interrupted("interrupted")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        tasks.start_soon(interrupt)
        await service.run()
        tasks.cancel_scope.cancel()


def notes_at_start(manifest: RunManifest, plan: CheckpointPlan, devices: Sequence[str], num_gpus: int) -> list[str]:
    """Lines about what the run does without, and how to have it.

    Args:
        devices: that the peers take
        num_gpus: that this machine has
    """
    notes, every = [], manifest.recovery.snapshot_every
    if num_gpus and set(devices) == {"cpu"}:
        gpus = "a GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        notes.append(f"The peers compute on the CPU; this machine has {gpus}: --device cuda.")
    if plan.store is None and 0 < every < manifest.training.steps:
        notes.append(f"No checkpoints are written; for one every {every} optimizer steps: --checkpoint-every {every}.")
    return notes


def name_processes(peers: Sequence[LocalPeer], *, restart: bool) -> str:
    """The process id of each peer, for those who want to see what happens when a machine dies."""
    named = ", ".join(f"{peer.name} is {peer.process.pid}" for peer in peers)
    fate = "another peer takes its place" if restart else "the run goes on without it"
    return f"Peers by process: {named}. If you kill one (kill -9 {peers[0].process.pid}), {fate}."


class PeerWatch:
    """Has other peers take the places of those that die, and ends the run where that is of no use.

    Args:
        restart: whether others take their places
        say: tells the user, in one line
        now_s: seconds since some fixed moment
    """

    def __init__(
        self,
        *,
        peers: LocalPeers,
        restart: bool,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._peers = peers
        self._restart = restart
        self._say = say
        self._now_s = now_s
        self._started_s: dict[str, float] = {}  # by name of the peer
        self._early_deaths: Counter[str] = Counter()  # by place, in a row

    async def run(self) -> None:
        """Look again and again.

        Raises:
            SwarmError: see look
        """
        while True:
            self.look()
            await anyio.sleep(WATCH_PROCESSES_S)

    def look(self) -> None:
        """Replace the peers that have died since the last look.

        Raises:
            UserError: one has died, and the disk is full
            SwarmError: one cannot work as it was started, died soon after its start too many times in a row, or was the
                last of its stage and is not replaced
        """
        for peer in list(self._peers.peers):
            started_s = self._started_s.setdefault(peer.name, self._now_s())
            if (end := peer.end()) is not None:
                self._follow(peer, end, self._now_s() - started_s)

    def _follow(self, dead: LocalPeer, end: str, lived_s: float) -> None:
        story = f"peer {dead.name} of stage {dead.stage} {end}"
        if dead.process.returncode and dead.process.returncode > 0 and (fault := dead.disk_fault()) is not None:
            raise UserError(f"{story}: {dead.log_file.parent}: {fault}")
        evidence = f"{dead.last_words()} (see {dead.log_file})"
        self._early_deaths[dead.place] = self._early_deaths[dead.place] + 1 if lived_s < EARLY_S else 0
        # Where another one could start, the next one can, too: this one may have found nobody on a busy machine.
        is_first = dead.name == dead.place
        if dead.process.returncode == EXIT_CODE_OF_MISTAKES and (is_first or not self._restart):
            raise SwarmError(f"{story}: {evidence}")
        if self._restart and self._early_deaths[dead.place] >= MAX_EARLY_DEATHS:
            count = f"{MAX_EARLY_DEATHS} peers in a row have not lasted {EARLY_S:.0f} s in its place"
            raise SwarmError(f"{story}, and so the run ends: {count}: {evidence}")
        self._peers.peers.remove(dead)
        is_last = not any(peer.stage == dead.stage for peer in self._peers.peers)
        if self._restart:
            loss = "the run goes back to its last snapshot or its beginning" if is_last else "the run goes on"
            last = ", the last one there" if is_last else ""
            new = self._peers.stand_in(dead)
            self._say(f"P{story[1:]}{last}; peer {new.name} (process {new.process.pid}) takes its place, and {loss}.")
        elif is_last:
            raise SwarmError(f"{story}, the last one there, so the run cannot go on: {evidence}")
        else:
            self._say(f"P{story[1:]}; the run goes on without it.")

"""A real swarm for tests: the coordinator's service here, its peers in processes of their own, over real libp2p."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from forks import fork
from programs import RECORDING_PEER

from coordinator.checkpoints.fetching import open_transport
from coordinator.run.invites import InviteBook, coordinator_invite
from coordinator.run.local_peers import LOOPBACK, Launch, LocalPeer, LocalPeers, Process, launch_peer
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.observer import open_node
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.network.bootstrap import Entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.transfer import fetch_state
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.ledger_codec import read_ledger
from swarm_peer.wire.messages import StateIndexCall

# Threads that wait for each other on cores that peers compute on take a hundred times as long.
torch.set_num_threads(1)

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Sliding and full attention with rotary positions of their own; scaled embeddings, norms around blocks, capped logits.
GEMMA3: dict[str, Any] = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "pad_token_id": None,
}


def tiny_manifest(**sections: Any) -> RunManifest:
    """A run that takes seconds. Sections given replace or extend the defaults' keys."""
    defaults: dict[str, Any] = {
        "name": "test",
        "seed": 1,
        "model": {"config": GPT2},
        "stages": {"count": 2, "peers_to_start": 1},
        "data": {"sequence_length": 31},
        "training": {
            "steps": 5,
            "global_batch_size": 16,
            "microbatch_size": 2,
            "validation_every": 0,
        },
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
        # A coordinator waits for a quarter of a lifetime before it acts, at the end of the shortest run, too.
        "limits": {"hop_timeout_s": 20, "announcement_s": 6},
    }
    for name, section in sections.items():
        defaults[name] = defaults[name] | section if isinstance(section, dict) and name in defaults else section
    return RunManifest.model_validate(defaults)


def without_data_dir(records: Path, fault: str) -> Launch:
    """How peers are started that may read no folder of this machine, and share no cache: as on machines apart."""
    launch = forked_peer(records, fault)

    def start(options: Sequence[str], log_file: Path, threads: int) -> Process:
        at = options.index("--data-dir")
        cache = log_file.parent / "caches" / log_file.stem
        return launch([*options[:at], *options[at + 2 :], "--cache-dir", str(cache)], log_file, threads)

    return start


@dataclass
class SwarmRun:
    """What came of a run.

    Attributes:
        states: by stage, the state of each of its peers
        counted: by global step, the counted microbatches (B, T+1), as stage 0 recorded them
        ids: by global step, the ids of these microbatches
        samples: by global step, which samples these are
        lines: of metrics.jsonl
        fired: what faults wrote down, by name of the peer
    """

    states: list[list[StageState]]
    counted: dict[int, list[torch.Tensor]]
    ids: dict[int, list[bytes]]
    samples: dict[int, list[SampleId]]
    lines: list[dict[str, Any]]
    output: Path
    fired: list[str]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.output / "logs").glob("*.log")))


class SwarmStopped(Exception):
    """Raised by a script that has seen enough: the run need not reach its last step."""


class LiveSwarm:
    """A run under way, for a test's script to act on."""

    def __init__(
        self,
        service: RunService,
        dht: SwarmDHT,
        invite: str,
        running: LocalPeers,
        records: Path,
        launch: Callable[[Path, str], Launch],
    ):
        self.service = service
        self.dht = dht
        self.invite = invite
        self._running = running
        self._records = records
        self._launch = launch
        self._expected_dead: set[str] = set()

    @property
    def optimizer_step(self) -> int:
        return self.service.watch.optimizer_step

    def log(self, name: str) -> str:
        return self._peer(name).log_file.read_text(errors="replace")

    async def reached(self, optimizer_step: int) -> None:
        await self.until(lambda: self.optimizer_step >= optimizer_step, f"step {optimizer_step}")

    async def until(self, condition: Callable[[], object], what: str, timeout_s: float = 400.0) -> None:
        """Wait for what other processes do: there is nothing to wait on but what they write."""
        try:
            with anyio.fail_after(timeout_s):
                while not condition():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(
                f"{what} did not happen within {timeout_s:.0f} s; step {self.optimizer_step}"
            ) from None

    def start(self, stage: int | str, name: str, fault: str = "") -> None:
        self._running.start(stage, name, self._launch(self._records, fault))

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.expect_death(name)
        self._peer(name).process.kill()
        self._peer(name).process.wait()

    def expect_death(self, name: str) -> None:
        self._expected_dead.add(name)

    def signal(self, name: str, number: int) -> None:
        self._peer(name).process.send_signal(number)

    async def leave(self, name: str, timeout_s: float = 25.0) -> None:
        """SIGTERM; it must end with exit code 0."""
        self.expect_death(name)
        process = self._peer(name).process
        process.terminate()
        await self.until(lambda: process.poll() is not None, f"the end of {name}", timeout_s)
        assert process.returncode == 0, self.log(name)[-2000:]

    def counted(self, name: str) -> dict[int, list[SampleId]]:
        """The samples that a stage-0 peer has counted, by global step."""
        samples = defaultdict(list)
        for line in (self._records / f"{self._peer(name).process.pid}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            samples[entry["round"]] += (SampleId(*sample) for sample in entry["samples"])
        return samples

    def pids(self) -> list[int]:
        """Of the peers that run."""
        return [peer.process.pid for peer in self._running.peers if peer.process.poll() is None]

    def dead_ids(self) -> set[str]:
        """Ids of peers whose process has ended; their last announcements may still be about."""
        dead = [peer for peer in self._running.peers if peer.process.poll() is not None]
        return {peer_id for peer in dead for peer_id in re.findall(r"peer_started peer=(\S+)", self.log(peer.name))}

    def is_dead(self, name: str) -> bool:
        return self._peer(name).process.poll() is not None

    def _peer(self, name: str) -> LocalPeer:
        return next(peer for peer in self._running.peers if peer.name == name)

    async def watch(self) -> None:
        while True:
            for peer in self._running.peers:
                if peer.name not in self._expected_dead and peer.process.poll() is not None:
                    raise AssertionError(f"peer {peer.name} died: {peer.log_file.read_text()[-2000:]}")
            await anyio.sleep(0.5)

    def check_exit_codes(self) -> None:
        codes = {p.name: p.process.returncode for p in self._running.peers if p.name not in self._expected_dead}
        assert not any(codes.values()), f"every peer leaves with exit code 0: {codes}"


Script = Callable[[LiveSwarm], Awaitable[None]]


def _program(records: Path, fault: str) -> tuple[str, ...]:
    return (sys.executable, str(RECORDING_PEER), str(records), fault)


def forked_peer(records: Path, fault: str) -> Launch:
    return lambda options, log_file, threads: fork([*_program(records, fault), *options], log_file)


def new_peer(records: Path, fault: str) -> Launch:
    """Slower than a fork, and as people start it: where start-up or memory is measured."""
    return partial(launch_peer, program=_program(records, fault))


def run_swarm(
    manifest: RunManifest,
    peers_by_stage: list[int],
    folder: Path,
    timeout_s: float = 400,
    *,
    script: Script | None = None,
    launch: Callable[[Path, str], Launch] = forked_peer,
    listen_on: str = LOOPBACK,
    device: str = "cpu",
    **options: Any,
) -> SwarmRun:
    """Train to the manifest's last step and fetch the state of every peer.

    Args:
        script: acts on the live run; the run goes on to its end after it
        launch: how peers are started, of a folder to write to and a fault
        listen_on: the coordinator's address
        device: of the peers
        options: of the coordinator's RunOptions
    """
    records = folder / "records"
    records.mkdir()

    async def run() -> list[list[StageState]]:
        run_key = Identity.load_or_create(folder / "identity")
        async with open_node(folder / "identity", Entrance((), coordinator_invite(run_key)), (listen_on,)) as dht:
            service = RunService(ResolvedManifest.of(manifest), dht, RunOptions(output=folder, **options))
            invite = InviteBook(folder).standing(run_key, dht.addresses)
            peers = LocalPeers([invite.text()], peers_by_stage, folder, devices=(device,), launch=launch(records, ""))
            async with peers.running():
                live = LiveSwarm(service, dht, invite.text(), peers, records, launch)
                states = await _train_and_fetch(live, dht, script, timeout_s)
            live.check_exit_codes()
            return states

    states = run_loop(run)
    counted, ids, samples = defaultdict(list), defaultdict(list), defaultdict(list)
    period = manifest.averaging.steps_per_average
    held = _held_by_entries(records)
    for path in records.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            number, names = entry["round"], [SampleId(*sample) for sample in entry["samples"]]
            # What was computed and is in no entry is read again. Where a period ends, the entry is of all its rounds.
            if set(names) <= held.get(number + (period - 1 - number) % period, set()):
                counted[number].append(torch.tensor(entry["tokens"]))
                ids[number].append(bytes.fromhex(entry["id"]))
                samples[number] += names
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fired = [path.read_text() for path in sorted(records.glob("*.fired"))]
    return SwarmRun(states, dict(counted), dict(ids), dict(samples), lines, folder, fired)


def _held_by_entries(records: Path) -> dict[int, set[SampleId]]:
    """The samples that the entries of stage 0 hold, by round."""
    held = {}
    for path in records.glob("*.entries"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            held[entry["round"]] = {SampleId(*sample) for sample in entry["samples"]}
    return held


async def _train_and_fetch(
    live: LiveSwarm, dht: SwarmDHT, script: Script | None, timeout_s: float
) -> list[list[StageState]]:
    service = live.service
    manifest = service.manifest
    with anyio.fail_after(timeout_s):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live.watch)
            if script is not None:
                tasks.start_soon(service.run)
                try:
                    await script(live)
                except SwarmStopped:
                    tasks.cancel_scope.cancel()
                    return []
                await live.until(service.model_folder.exists, "the saved model", timeout_s)
            else:
                await service.run()
            tasks.cancel_scope.cancel()
        states = []
        async with open_transport(dht, PeerMetrics()) as transport:
            for stage in range(manifest.stages.count):
                view = await service._directory.refresh([stage])
                call = StateIndexCall(manifest=manifest.hash, of_stage=stage, min_round=service.watch.round_number + 1)
                limit = max_state_bytes(ResolvedManifest.of(manifest), stage)
                peers = [peer.peer_id for peer in view.serving(stage) if peer.peer_id not in live.dead_ids()]
                states.append(
                    [await fetch_state(transport, [peer], call, max_bytes=limit, rng=random.Random()) for peer in peers]
                )
        return states


def check_ledger(run: SwarmRun, manifest: RunManifest) -> None:
    """The data ledger of stage 0 has the samples of the run's line of steps, and no others."""
    counted = [sample for line in run.lines for sample in run.samples[line["round"]]]
    for state in run.states[0]:
        ledger = read_ledger(state.ledger, SliceReader(manifest=manifest).num_slices())
        assert ledger.current_pass == 0
        windows = [SampleId(*item.slice_id, w) for item in ledger.facts() for w in range(item.start, item.end)]
        assert sorted(windows) == sorted(counted), "each once"

"""A real swarm for tests: the coordinator's service here, its peers in processes of their own, over real libp2p."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import torch

from coordinator.local import LOOPBACK, LocalPeer, peers_running
from coordinator.service import RunService, max_state_bytes, open_transport
from swarm_peer.config import RunManifest
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.processes import run_loop
from swarm_peer.runtime.state_transfer import StageState, fetch_state
from swarm_peer.wire.identity import Identity

RECORDING_PEER = Path(__file__).with_name("recording_peer.py")

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
        "limits": {"hop_timeout_s": 20},
    }
    for name, section in sections.items():
        defaults[name] = defaults[name] | section if isinstance(section, dict) and name in defaults else section
    return RunManifest.model_validate(defaults)


@dataclass
class SwarmRun:
    """What came of a run.

    Attributes:
        states: by stage, the state of each of its peers
        counted: by global step, the counted microbatches (B, T+1), as stage 0 recorded them
        lines: of metrics.jsonl
    """

    states: list[list[StageState]]
    counted: dict[int, list[torch.Tensor]]
    lines: list[dict[str, Any]]
    output: Path

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.output / "logs").glob("*.log")))


def run_swarm(manifest: RunManifest, peers_by_stage: list[int], folder: Path, timeout_s: float = 100) -> SwarmRun:
    """Train to the manifest's last step and fetch the state of every peer."""
    records = folder / "records"
    records.mkdir()
    identity = Identity.load_or_create(folder / "identity")
    dht = SwarmDHT.start(
        initial_peers=(),
        host_maddrs=(LOOPBACK,),
        announce_maddrs=(),
        identity=identity,
        identity_path=folder / "identity",
        metrics=PeerMetrics(),
    )
    try:
        service = RunService(manifest, dht, folder)
        program = (sys.executable, str(RECORDING_PEER), str(records))
        with peers_running(dht.addresses(), peers_by_stage, folder, program=program) as peers:
            states = run_loop(_train_and_fetch, service, dht, peers, peers_by_stage, timeout_s)
        assert [peer.process.returncode for peer in peers] == [0] * len(peers), "every peer leaves with exit code 0"
    finally:
        dht.shutdown()
    counted = defaultdict(list)
    for path in records.iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            counted[entry["step"]].append(torch.tensor(entry["tokens"]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return SwarmRun(states, dict(counted), lines, folder)


async def _train_and_fetch(
    service: RunService, dht: SwarmDHT, peers: list[LocalPeer], peers_by_stage: list[int], timeout_s: float
) -> list[list[StageState]]:
    manifest = service.manifest
    with anyio.fail_after(timeout_s):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, peers)
            await service.run()
            tasks.cancel_scope.cancel()
        states = []
        async with open_transport(dht, PeerMetrics()) as transport:
            for stage, count in enumerate(peers_by_stage):
                serving = [peer.peer_id for peer in service.watch.view.serving(stage)]
                assert len(serving) == count, f"stage {stage} has {len(serving)} of {count} peers"
                states.append(
                    [
                        await fetch_state(
                            transport,
                            [peer_id],
                            manifest_hash=manifest.hash,
                            stage=stage,
                            min_step=manifest.training.steps,
                            max_bytes=max_state_bytes(manifest, stage),
                        )
                        for peer_id in serving
                    ]
                )
        return states


async def _watch(peers: list[LocalPeer]) -> None:
    while True:
        for peer in peers:
            assert peer.process.poll() is None, f"peer {peer.name} died: {peer.log_file.read_text()[-2000:]}"
        await anyio.sleep(0.5)

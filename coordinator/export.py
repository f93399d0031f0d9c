"""From a checkpoint or a live run to a folder that transformers loads: the model, and the tokenizer of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from coordinator.checkpoints import find_checkpoint
from coordinator.fetching import fetch_model
from coordinator.onlooker import onlooker
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.export import export_model
from swarm_peer.model.optimizer import STATE_PREFIX
from swarm_peer.model.partition import stages_of
from swarm_peer.runtime.bootstrap import find_manifest, read_addresses
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.processes import run_loop
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.state_index import StageState
from swarm_peer.runtime.tokenizers import load_tokenizer

log = logging.getLogger(__name__)


def check_folder(folder: Path) -> None:
    """Raises UserError: export_model would refuse it, after all the work."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {folder} is there already and is no empty folder: name another one, or remove it")


def export_checkpoint(url: str, updates: int | None, folder: Path, cache_dir: Path | None = None) -> int:
    """Write the model of a checkpoint (see find_checkpoint); returns its number of finished global steps.

    Raises:
        UserError: there is no good checkpoint, or the folder is in use
    """
    check_folder(folder)
    checkpoint = find_checkpoint(url, updates)
    states = (checkpoint.load_stage(stage) for stage in range(checkpoint.manifest.stages.count))
    export_states(checkpoint.manifest, states, folder, cache_dir)
    return checkpoint.updates


def export_run(initial_peers: Sequence[str], run_id: str | None, folder: Path, cache_dir: Path | None = None) -> int:
    """Write the model of a live run, as it is at the beginning of a global step; returns its finished global steps.

    Raises:
        UserError: nobody answers, there is no such run, or the folder is in use
        SwarmError: a stage's peers did not give its state
    """
    check_folder(folder)
    addresses = read_addresses(initial_peers)
    with onlooker(addresses) as dht:
        manifest, states = run_loop(_fetch, dht, addresses, run_id)
    export_states(manifest, states, folder, cache_dir)
    return int(states[0].updates)


async def _fetch(dht: SwarmDHT, addresses: list[str], run_id: str | None) -> tuple[RunManifest, list[StageState]]:
    _, manifest = await find_manifest(dht, addresses, run_id)
    metrics = PeerMetrics()
    directory = Directory(manifest, dht, "", None, metrics, Signal())
    return manifest, await fetch_model(dht, directory, manifest, metrics)


def export_states(
    manifest: RunManifest, states: Iterable[StageState], folder: Path, cache_dir: Path | None = None
) -> None:
    """Write the model that the states of all stages are. One state at a time is in memory with its optimizer's part.

    Raises:
        UserError: the folder is in use, or states and manifest do not belong together
    """
    assert isinstance(manifest.model.config, dict)
    weights: dict[str, torch.Tensor] = {}
    for state in states:
        weights |= {name: value for name, value in state.tensors.items() if not name.startswith(STATE_PREFIX)}
    specs, shared = stages_of(manifest), manifest.model.share_layers
    export_model(manifest.model.config, weights, folder, specs=specs, share_layers=shared)
    if manifest.data.tokenizer != "bytes":
        _save_tokenizer(manifest, folder, cache_dir)


def _save_tokenizer(manifest: RunManifest, folder: Path, cache_dir: Path | None) -> None:
    """Beside the model, where AutoTokenizer looks for it. A model without it is better than none."""
    from transformers import AutoTokenizer

    name = manifest.data.tokenizer
    assert isinstance(manifest.model.config, dict)
    try:
        load_tokenizer(manifest.data, parse_model_config(manifest.model.config).vocab_size, cache_dir)
        AutoTokenizer.from_pretrained(os.path.expanduser(name), cache_dir=cache_dir).save_pretrained(folder)
    except (UserError, OSError) as error:
        log.warning("tokenizer_not_saved folder=%s reason=%s", folder, error)

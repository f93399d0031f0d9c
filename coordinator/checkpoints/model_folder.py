"""From a checkpoint or a live run to a folder that transformers loads, with the model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from coordinator.checkpoints.fetching import fetch_snapshots, open_transport
from coordinator.checkpoints.folder import Checkpoint
from coordinator.checkpoints.model_card import Training, model_card, training_in
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.store import find_checkpoint
from coordinator.watch.observer import LiveRun, observe_run
from coordinator.watch.promises import Promises
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.export import NOT_PLAIN, check_folder, export_model
from swarm_peer.model.pretrained import check_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.runtime.data.allowed_files import ANYWHERE, check_tokenizer
from swarm_peer.runtime.data.tokenizers import PretrainedTokenizer, load_tokenizer
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.state.index import StageState

log = logging.getLogger(__name__)

NO_TOKENIZER = "the tokenizer was not saved beside the model"


def export_checkpoint(
    url: str,
    optimizer_step: int | None,
    folder: Path,
    promises: Promises,
    cache_dir: Path | None = None,
    *,
    merge: bool = False,
) -> int:
    """Write the model of a checkpoint (see find_checkpoint); returns its optimizer step.

    Args:
        promises: told if there is no tokenizer beside the model
        merge: add the run's adapters to its base

    Raises:
        UserError: there is no good checkpoint, its model cannot be exported, or the folder is in use
    """
    check_folder(folder)
    checkpoint = find_checkpoint(url, optimizer_step)
    resolved = ResolvedManifest.of(checkpoint.manifest)
    check_export(resolved.manifest, merge)
    states = (checkpoint.load_stage(stage) for stage in range(resolved.num_stages))
    training = training_in(_run_folder(checkpoint), resolved.manifest, checkpoint.optimizer_step)
    if why_not := export_states(resolved, states, folder, cache_dir, merge=merge, training=training):
        promises.broken(NO_TOKENIZER, why_not)
    return checkpoint.optimizer_step


def _run_folder(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint's run, where that is on this machine and keeps its own checkpoints."""
    return Path(checkpoint.path).absolute().parent.parent


def export_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    folder: Path,
    promises: Promises,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
    *,
    merge: bool = False,
    run_folder: Path | None = None,
) -> int:
    """Write the model of a live run, by the newest snapshot of all its stages; returns its optimizer step.

    Args:
        promises: told if there is no tokenizer beside the model
        data_dir: folder of this machine that the run may have its tokenizer read from, and the base to merge with
        merge: add the run's adapters to its base
        run_folder: of this run, if it is on this machine: it tells how the run went

    Raises:
        UserError: nobody answers, there is no such run, its model cannot be exported, or the folder is in use
        SwarmError: there is no such snapshot yet, or its peers did not give it
    """
    check_folder(folder)
    resolved, states = observe_run(initial_peers, run_id, partial(_fetch, folder, merge, data_dir))
    optimizer_step = states[0].optimizer_step
    training = Training(optimizer_step=optimizer_step)
    if run_folder is not None:
        training = training_in(run_folder, resolved.manifest, optimizer_step)
    if why_not := export_states(resolved, states, folder, cache_dir, data_dir, merge=merge, training=training):
        promises.broken(NO_TOKENIZER, why_not)
    return optimizer_step


def check_export(manifest: RunManifest, merge: bool, data_dir: Path | None = ANYWHERE) -> None:
    """Check that a run has a model to export, and something to merge, if that is wanted, whose base may be read.

    Raises:
        UserError: there is not, or it is a folder of this machine outside of `data_dir`
    """
    if not manifest.model.is_plain:
        raise UserError(f"{NOT_PLAIN}; train with model.boundary.rank instead")
    if not merge:
        return
    if manifest.model.adapter is None:
        raise UserError("--merge: the run trains all of its model and has no adapters: leave it out")
    check_pretrained(manifest, data_dir)


async def _fetch(
    folder: Path, merge: bool, data_dir: Path | None, run: LiveRun
) -> tuple[ResolvedManifest, list[StageState]]:
    resolved = ResolvedManifest.of(run.manifest)
    check_export(resolved.manifest, merge, data_dir)
    async with open_transport(run.dht, run.metrics) as transport:
        receiver = StateReceiver(resolved, SystemThreads(), folder, only_weights=True)
        await receiver.templates()  # where there are adapters, they take seconds: peers keep no snapshot for long
        return resolved, await fetch_snapshots(transport, run.directory, resolved, receiver)


def export_states(
    resolved: ResolvedManifest,
    states: Iterable[StageState],
    folder: Path,
    cache_dir: Path | None = None,
    data_dir: Path | None = ANYWHERE,
    *,
    merge: bool = False,
    training: Training | None = None,
) -> str:
    """Write the model that the states of all stages make.

    Args:
        states: in the order of their stages. Each may be let go when the next one is asked for: its weights stay
        data_dir: the tokenizer is read from there, or from a hub
        merge: add adapters to their base
        training: how the run went, for the model card; no card if not given

    Returns:
        why the tokenizer is not beside it; empty if it is, or there is none. A model without it is better than none

    Raises:
        UserError: the folder is in use, or states and manifest do not belong together
    """
    weights: dict[str, torch.Tensor] = {}
    for state in states:
        weights |= {name: value for name, value in state.tensors.items() if is_weight(name)}
    readme = "" if training is None else model_card(resolved, training, is_merged=merge)
    export_model(resolved, weights, folder, merge=merge, cache_dir=cache_dir, readme=readme)
    return save_tokenizer(resolved, folder, cache_dir, data_dir)


def save_tokenizer(
    resolved: ResolvedManifest, folder: Path, cache_dir: Path | None = None, data_dir: Path | None = ANYWHERE
) -> str:
    """Write the tokenizer beside the model, for AutoTokenizer, unless it is bytes; returns why that failed, or nothing.

    A model without it is better than none.
    """
    data = resolved.manifest.data
    if data.tokenizer == "bytes":
        return ""
    try:
        check_tokenizer(data, data_dir)
        tokenizer = load_tokenizer(data, resolved.vocab_size, cache_dir)
        if isinstance(tokenizer, PretrainedTokenizer):
            tokenizer.save(folder)
    except (UserError, OSError) as error:
        log.warning("tokenizer_not_saved folder=%s reason=%s", folder, error)
        return str(error)
    return ""

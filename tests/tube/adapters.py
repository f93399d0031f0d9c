"""Runs of adapters on a frozen base: the folder of the base, and what must hold of it beside everything else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from invariants import Invariants
from loop import HOST
from records import Place, State
from transformers import AutoConfig, AutoModelForCausalLM

from swarm_peer.model.training import StageTrainer
from swarm_peer.protocol.epochs import Restart

# So many values that what is given and averaged has several parts where pieces are small.
ADAPTER: Mapping[str, Any] = {"rank": 4, "alpha": 8}
# Of a state's tensors, those of the optimizer are named after the weights that they belong to.
ADAPTED = "lora_"


def base_of(config: Mapping[str, Any]) -> Path:
    """The folder of a published model with random weights, the same for all schedules on this machine."""
    name = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"swarm-tube-base-{os.getuid()}-{name}"
    if not folder.exists():
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(partial)
        with suppress(OSError):  # another process has been faster
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    return folder


class AdapterInvariants(Invariants):
    """Watches a tube whose run trains adapters: states hold nothing else, and nobody's base ever changes."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._bases = [dict(_frozen(trainer)) for trainer in self._reference]

    def _check_weights(self, place: Place, trainer: StageTrainer, restart: Restart) -> None:
        super()._check_weights(place, trainer, restart)
        stage = place[0]
        self._check_names(stage, trainer.state())
        expected, found = self._bases[stage], dict(_frozen(trainer))
        if others := [name for name in expected | found if not _are_equal(expected.get(name), found.get(name))]:
            self.tube.violation(f"{HOST.get()} has another base than the run's in stage {stage}: {others[0]}")

    def _check_names(self, stage: int, state: State) -> None:
        if others := [name for name, value in state.items() if ADAPTED not in name and value.ndim]:
            self.tube.violation(f"{HOST.get()} has {others[0]} in its state of stage {stage}, which is no adapter's")


def _are_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype:
        return first is second
    return torch.equal(first, second)


def _frozen(trainer: StageTrainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The base as a stage keeps it: parameters that are not trained, and quantised matrices, which are buffers."""
    for name, parameter in trainer.module.named_parameters():
        if name not in trainer.trained:
            yield name, parameter.detach().clone()
    for name, buffer in trainer.module.named_buffers():
        yield name, buffer.clone()

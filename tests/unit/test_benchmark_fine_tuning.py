"""The comparison of a swarm's adapters with those of one process: both have the same schedule and the same samples."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fine_tuning
import plain_peft
from fine_tuning import Pair, write_samples
from plain_peft import held_out_loss, rate_factor, samples_of
from transformers import AutoModelForCausalLM, LlamaConfig

from swarm_peer.config import RunManifest
from swarm_peer.model.optimizer import learning_rate

NOT_LEARNT, BEGINS = 1 << 30, 1 << 29


def manifest_of(folder: Path) -> RunManifest:
    return Pair(3, 300, 25, ()).manifest(folder / "chats.jsonl", folder / "first")


def test_both_have_the_same_learning_rates(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    highest, warmup, steps = manifest.optimizer.learning_rate, manifest.schedule.warmup_steps, manifest.training.steps
    ours = [learning_rate(manifest, step) for step in range(steps)]
    assert [highest * rate_factor(step, warmup, steps) for step in range(steps)] == pytest.approx(ours)
    assert max(ours) == highest


def test_what_is_not_learnt_is_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = np.array([[5 | NOT_LEARNT | BEGINS, 6, 0 | NOT_LEARNT]], np.int32)
    monkeypatch.setattr(fine_tuning, "validation_samples", lambda manifest, count: held_out[:count])
    first, second = torch.tensor([[1 | NOT_LEARNT, 2, 3]]), torch.tensor([[4 | NOT_LEARNT, 7, 8]])
    run = SimpleNamespace(lines=[{"round": 4}, {"round": 9}], counted={9: [second], 4: [first, second], 5: [first]})
    write_samples(file := tmp_path / "samples.safetensors", run, manifest_of(tmp_path))

    batches = [{name: value.tolist() for name, value in each.items()} for each in samples_of(file, "train")]
    assert batches == [
        {"input_ids": [[1, 2, 3], [4, 7, 8]], "labels": [[-100, 2, 3], [-100, 7, 8]]},
        {"input_ids": [[4, 7, 8]], "labels": [[-100, 7, 8]]},
    ]
    (validation,) = samples_of(file, "held_out")
    assert (validation["input_ids"].tolist(), validation["labels"].tolist()) == ([[5, 6, 0]], [[-100, 6, -100]])


def test_a_loss_is_the_mean_over_what_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the held-out samples are batched."""
    torch.manual_seed(0)
    ids = torch.randint(1, 40, (5, 7))
    labels = torch.where(torch.rand(5, 7) < 0.5, ids, -100)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=40,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    monkeypatch.setattr(plain_peft, "samples_of", lambda *_: [{"input_ids": ids, "labels": labels}])
    monkeypatch.setattr(plain_peft, "BATCH", 2)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert held_out_loss(model, tmp_path) == pytest.approx(float(expected), rel=1e-5)

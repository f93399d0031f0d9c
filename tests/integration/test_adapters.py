"""Real peers train adapters on a frozen base: those of a plain loop of transformers and PEFT, fed the same samples."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from swarm import LLAMA, run_swarm, tiny_manifest, without_data_dir
from test_keystone import check_counts, check_nothing_lost, check_stage_mates
from tiny_adapters import as_peft_names, check_alike, write_base

from coordinator.checkpoints.model_folder import export_checkpoint
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.shared_base import with_base
from coordinator.watch.promises import Promises
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

STEPS = 4


def train_plainly(
    base: Path, initial: dict[str, torch.Tensor], batches: list[torch.Tensor]
) -> tuple[list[float], peft.PeftModel]:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    assert not peft.set_peft_model_state_dict(model, initial).unexpected_keys
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for tokens in batches:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_members_give_the_base_to_those_who_have_none(tmp_path: Path) -> None:
    written = write_base(LLAMA, tmp_path / "base")
    manifest = tiny_manifest(
        model={"config": LLAMA, "pretrained": str(written), "adapter": {"rank": 4, "alpha": 8}, "base": "nf4"},
        data={"foreign_tokenizer": True},
        training={"steps": STEPS},
    )
    resolved, base = with_base(ResolvedManifest.of(manifest), None)
    (folder := tmp_path / "run").mkdir()
    run = run_swarm(resolved.manifest, [2, 1], folder, launch=without_data_dir, base=base)

    check_counts(run, resolved.manifest)
    check_stage_mates(run)
    for name in ("0.0", "0.1", "1.0"):
        assert "base_downloaded" in (folder / "logs" / f"peer-{name}.log").read_text()
    kept = {name for file in (folder / "logs" / "caches").rglob("*.safetensors") for name in load_file(file)}
    assert kept == set(load_file(written / "model.safetensors")), "the stages' parts are the model"


def test_adapters_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    base = write_base(LLAMA, tmp_path / "base")
    manifest = tiny_manifest(
        model={"config": LLAMA, "pretrained": str(base), "adapter": {"rank": 4, "alpha": 8}},
        data={"foreign_tokenizer": True},
        stages={"peers_to_start": 2},
        training={"steps": STEPS, "max_grad_norm": None},
        averaging={"compare_weights_every": 2},
        recovery={"snapshot_every": 2},
    )
    resolved = ResolvedManifest.of(manifest)
    initial = {name: value for spec in resolved.specs for name, value in StageTrainer(resolved, spec).state().items()}

    (folder := tmp_path / "run").mkdir()
    store = CheckpointStore(str(folder / "checkpoints"))
    run = run_swarm(manifest, [2, 2], folder, plan=CheckpointPlan(store, every=2))

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    batches = [torch.cat(run.counted[round_number]) for round_number in range(STEPS)]
    losses, model = train_plainly(base, as_peft_names(initial), batches)
    assert [line["loss"] for line in run.lines] == pytest.approx(losses, rel=1e-5)
    expected = peft.get_peft_model_state_dict(model)
    states = {name: value for stage in run.states for name, value in stage[0].tensors.items()}
    assert all("lora_" in name for name in states), "a state has nothing of the base"
    check_alike(as_peft_names(states), expected)

    check_alike(load_file(folder / "model" / "adapter_model.safetensors"), expected)
    card = ModelCard.load(folder / "model" / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "base")
    assert "Adapters of rank 4 on base, base in fp32: " in card.text
    assert "Trained by 4 peers with Swarm" in card.text
    for step in (1, STEPS):
        assert f"| training, step {step} | {run.lines[step - 1]['loss']:.4f} |" in card.text
    assert str(tmp_path) not in card.content
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "model")
    checkpoint = find_checkpoint(str(folder / "checkpoints"))
    assert checkpoint.optimizer_step == STEPS
    export_checkpoint(str(folder / "checkpoints"), None, tmp_path / "merged", Promises(), merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = model(input_ids=batches[0][:, :-1]).logits
        for other in (loaded, merged):
            torch.testing.assert_close(other(input_ids=batches[0][:, :-1]).logits, logits, rtol=1e-4, atol=1e-5)

"""The model card beside an exported model: what the hub reads of it, what people read, and what it does not tell."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from tiny_adapters import resolved_of, trainers_of, write_base
from tiny_models import LENGTH, LLAMA

from coordinator.checkpoints.model_card import Training, _data, model_card, training_in
from coordinator.checkpoints.model_folder import export_states
from coordinator.watch.metrics_file import MetricsFile, MetricsLine, ValidationLoss, metrics_line
from coordinator.watch.run_file import write_run_file
from swarm_peer.config import DataSection, RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.state.index import StageState


def line(step: int, loss: float, validation: float | None = None) -> MetricsLine:
    return metrics_line(
        optimizer_step=step,
        round_number=step - 1,
        loss=loss,
        samples=6,
        seconds=1.0,
        sequence_length=LENGTH,
        peers=[1, 1],
        validation=None if validation is None else ValidationLoss(validation, 4),
    )


LINES = [line(1, 5.0), line(2, 4.0, 4.5), line(3, 3.5), line(4, 3.25, 3.75)]
CHATS = {"dataset": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "format": "messages", "packing": True}


def on_base(name: str, **sections: object) -> ResolvedManifest:
    """A run of adapters on a base of this name, which need not be there."""
    manifest = resolved_of(name, **sections).manifest
    data = manifest.data.model_dump() | CHATS | {"sequence_length": LENGTH, "tokenizer": name}
    return ResolvedManifest.of(RunManifest.model_validate(manifest.model_dump() | {"data": data}))


def rows_of(card: ModelCard) -> dict[str, str]:
    cells = (row.strip("| ").split(" | ") for row in card.text.splitlines() if row.startswith("| ") and row.strip("| "))
    return dict(cells)


def test_the_hub_reads_what_a_run_has_made() -> None:
    card = ModelCard(model_card(on_base("someone/model@abc"), Training(optimizer_step=4, lines=LINES, num_peers=3)))
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("someone/model", "adapter")
    assert (data["library_name"], data["pipeline_tag"]) == ("peft", "text-generation")
    assert data["datasets"] == ["HuggingFaceH4/ultrachat_200k"]
    assert "lora" in data["tags"]
    merged = ModelCard(model_card(on_base("someone/model"), Training(optimizer_step=4), is_merged=True)).data.to_dict()
    assert (merged["library_name"], merged["base_model_relation"]) == ("transformers", "finetune")


def test_people_read_data_settings_peers_and_losses() -> None:
    card = ModelCard(model_card(on_base("someone/model@abc"), Training(optimizer_step=4, lines=LINES, num_peers=3)))
    assert "Adapters of rank 3 on someone/model, base in fp32: 4,320 parameters were trained, and " in card.text
    assert "Trained by 3 peers with Swarm " in card.text
    rows = rows_of(card)
    expected = {
        "data set": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "format": "messages",
        "learnt (`data.loss_on`)": "assistant",
        "rank": "3",
        "alpha": "6",
        "targets": "all-linear",
        "optimizer steps": "4 of 10",
        "tokens": f"{4 * 6 * LENGTH:,}",
        "learning rate": "0.5, constant, 0 steps of warm-up",
        "batch": "6 samples",
        "sequence length": f"{LENGTH} tokens",
        "training, step 1": "5.0000",
        "training, step 4": "3.2500",
        "validation, step 2": "4.5000",
        "validation, step 4": "3.7500",
    }
    assert {name: rows.get(name) for name in expected} == expected


def test_what_is_not_known_is_left_out() -> None:
    card = ModelCard(model_card(on_base("someone/model"), Training(optimizer_step=0)))
    assert "Losses" not in card.text
    assert "peers" not in card.text
    assert "tokens" not in rows_of(card)


@pytest.mark.parametrize(
    "data", [{"dataset": "/home/anna/secret/chats"}, {"dataset": "json", "files": ["/srv/anna/x.json"]}]
)
def test_nothing_private_is_told(data: dict[str, object]) -> None:
    manifest = on_base("/home/anna/models/base").manifest
    adapter = manifest.model.adapter.model_copy(update={"begin_with": "/home/anna/old"})  # type: ignore[union-attr]
    model = manifest.model.model_copy(update={"adapter": adapter})
    data = manifest.data.model_dump() | data
    manifest = RunManifest.model_validate(manifest.model_dump() | {"data": data, "model": model.model_dump()})
    card = ModelCard(model_card(ResolvedManifest.of(manifest), Training(optimizer_step=4, lines=LINES)))
    assert card.data.base_model == "base"
    assert "datasets" not in card.data.to_dict()
    assert "(local)" in card.text or "local files (json)" in card.text
    for word in ("/", "anna", "secret", "srv"):
        assert word not in card.text.replace("activations and gradients", ""), word


def test_a_model_that_began_at_random_has_a_card_too() -> None:
    manifest = resolved_of("someone/model").manifest
    model = {"config": LLAMA}
    resolved = ResolvedManifest.of(RunManifest.model_validate(manifest.model_dump() | {"model": model}))
    card = ModelCard(model_card(resolved, Training(optimizer_step=10, lines=LINES, num_peers=1)))
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.base_model is None
    assert "All weights, which began at random: 21,576 parameters. Trained by 1 peer with" in card.text
    assert rows_of(card)["data set"] == "text that comes with Python"


def test_the_folder_of_a_run_tells_how_it_went(tmp_path: Path) -> None:
    manifest = on_base("someone/model").manifest
    metrics = MetricsFile(tmp_path)
    for each in LINES:
        metrics.write(each)
    write_run_file(tmp_path, "12D3KooWrun", manifest)
    given = {"name": "", "stage": 0, "since_s": 0.0}
    (tmp_path / "contributions.json").write_text(json.dumps({f"peer {number}": given for number in range(5)}))
    training = training_in(tmp_path, manifest, 2)
    assert ([each["optimizer_step"] for each in training.lines], training.num_peers) == ([1, 2], 5)
    other = manifest.model_copy(update={"name": "other"})
    assert training_in(tmp_path, other, 2) == Training(optimizer_step=2)
    assert training_in(tmp_path / "nothing", manifest, 2) == Training(optimizer_step=2)


def test_peft_loads_the_folder_with_its_card(tmp_path: Path) -> None:
    base = write_base(LLAMA, tmp_path / "base")
    resolved = resolved_of(base, num_stages=2)
    states = [
        StageState(round_number=4, history_hash="x", tensors=trainer.state()) for trainer in trainers_of(resolved)
    ]
    folder = tmp_path / "model"
    export_states(resolved, states, folder, training=Training(optimizer_step=4, lines=LINES))
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert ModelCard.load(folder / "README.md").data.library_name == "peft"
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        assert model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.isfinite().all()


def test_chats_that_come_with_swarm_are_named_as_such() -> None:
    section = DataSection(dataset="embedded", format="messages", sequence_length=8)
    assert dict(_data(section))["data set"] == "chats that come with Swarm"
    assert dict(_data(DataSection(sequence_length=8)))["data set"] == "text that comes with Python"

import json
import os
import time

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import ALIKE, CONFIGS, LENGTH, LLAMA, VOCABULARY, exactly
from transformers import AutoModelForCausalLM

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model import export
from swarm_peer.model.export import LEFTOVER_S, NotWritten, export_model
from swarm_peer.model.families import family_class
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

LLAMA = LLAMA | {"rope_theta": 500.0, "torch_dtype": "bfloat16"}


def train(config, share_layers=False):
    """Two stages after one step, so that there are optimizer states, too."""
    manifest = RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": config, "share_layers": share_layers},
            "stages": {"count": 2},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
    )
    trainers = [StageTrainer(ResolvedManifest.of(manifest), spec) for spec in ResolvedManifest.of(manifest).specs]
    for trainer in trainers:
        trainer.apply([torch.ones_like(mean) for mean in trainer.mean_gradients()])
    return trainers, {name: value for trainer in trainers for name, value in trainer.state().items()}


def sample():
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def stage_logits(trainers):
    hidden = sample()
    with torch.no_grad():
        for trainer in trainers:
            hidden = trainer.module.eval()(hidden)
    return hidden


@pytest.mark.parametrize(
    ("config", "share_layers"),
    [
        *((config, False) for config in CONFIGS.values()),
        *((config, True) for config in ALIKE.values()),
        (LLAMA, False),
        (LLAMA, True),
    ],
)
def test_the_folder_loads_and_computes_the_same(config, share_layers, tmp_path):
    trainers, tensors = train(config, share_layers)
    folder = tmp_path / "new" / "model"
    export_model(trainers[0].resolved, tensors, folder)

    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == [family_class(config["model_type"]).model_class.__name__]

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **exactly(config))
    assert not any(report.values())
    assert model.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(sample()).logits, stage_logits(trainers), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks 1 of its 39 tensors, such as lm_head.weight"),
        (lambda tensors: tensors.update(x=torch.zeros(1)), "1 tensors are none of the model's, such as x"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}),
            r"lm_head.weight has shape \(2, 2\), and the config says \(61, 24\)",
        ),
    ],
)
@pytest.mark.parametrize("share_layers", [False, True])
def test_states_that_do_not_fit_are_refused(change, message, share_layers, tmp_path):
    trainers, tensors = train(LLAMA, share_layers)
    change(tensors)
    with pytest.raises(UserError, match=message):
        export_model(trainers[0].resolved, tensors, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_layers_that_are_not_shared_are_refused(tmp_path):
    _, tensors = train(LLAMA)
    sharing, _ = train(LLAMA, share_layers=True)
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.\S+ belongs to no stage's first layer"):
        export_model(sharing[0].resolved, tensors, tmp_path / "model")


def test_a_folder_in_use_is_left_alone(tmp_path):
    trainers, tensors = train(LLAMA)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    with pytest.raises(UserError, match="is there already and is no empty folder: name another one"):
        export_model(trainers[0].resolved, tensors, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["precious"]


def test_an_empty_folder_is_used(tmp_path):
    trainers, tensors = train(LLAMA)
    export_model(trainers[0].resolved, tensors, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_what_a_killed_process_has_left_long_ago_is_removed(tmp_path):
    trainers, tensors = train(LLAMA)
    for number, age_s in ((1, 2 * LEFTOVER_S), (2, 0.0)):
        partial = tmp_path / f".model.partial-{number}"
        partial.mkdir()
        (partial / "model.safetensors").touch()
        for path in (partial / "model.safetensors", partial):
            os.utime(path, (time.time() - age_s,) * 2)
    export_model(trainers[0].resolved, tensors, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.partial-2", "model"]


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("Error while serializing: disk full")])
def test_nothing_is_left_of_an_export_that_failed(tmp_path, monkeypatch, error):
    def disk_full(*_, **__):
        raise error

    trainers, tensors = train(LLAMA)
    monkeypatch.setattr(export, "save_file", disk_full)
    with pytest.raises(NotWritten, match=r"model: cannot be written \(.*disk full\); check space and permissions"):
        export_model(trainers[0].resolved, tensors, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path):
    trainers, tensors = train(LLAMA)
    (tmp_path / "run").touch()
    with pytest.raises(NotWritten, match="check space and permissions"):
        export_model(trainers[0].resolved, tensors, tmp_path / "run" / "model")

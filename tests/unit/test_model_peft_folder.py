"""Adapters leave a run as PEFT has them, or within their base, and a run begins with what PEFT has saved."""

import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_adapters import adapters_of, as_peft_names, batches, plain_model, resolved_of, train_plainly, write_base
from tiny_models import CONFIGS, LENGTH, LLAMA, exactly

from coordinator.run.baseline import Baseline
from swarm_peer.config import ModelSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import resolve_model
from swarm_peer.model.export import export_model
from swarm_peer.model.pretrained import check_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: write_base(config, folder / name) for name, config in CONFIGS.items()}


def trained(family, bases, **adapter):
    config = CONFIGS[family]
    optimizer = {"learning_rate": 0.01 if "initializer_range" in config else 0.5}
    baseline = Baseline(resolved_of(bases[family], num_stages=2, config=config, adapter=adapter, optimizer=optimizer))
    for batch in batches():
        baseline.train_step(batch)
    return baseline


def logits_of(baseline, tokens):
    hidden = None
    for trainer in baseline.trainers[:-1]:
        hidden = trainer.predict(tokens, hidden)
    return baseline.trainers[-1].predict(tokens, hidden)


def check_computes_alike(model, baseline):
    tokens = batches()[0][0][:, :LENGTH]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
    assert torch.allclose(logits, logits_of(baseline, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_peft_loads_what_a_run_has_trained(family, bases, tmp_path):
    baseline = trained(family, bases)
    folder = tmp_path / "model"
    export_model(baseline.trainers[0].resolved, baseline.state(), folder)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    options = exactly(CONFIGS[family])
    base = transformers.AutoModelForCausalLM.from_pretrained(bases[family], **options)
    before = base(input_ids=batches()[0][0][:, :LENGTH], use_cache=False).logits[:, -1]
    model = peft.PeftModel.from_pretrained(base, folder)
    check_computes_alike(model, baseline)
    assert not torch.allclose(logits_of(baseline, batches()[0][0][:, :LENGTH]), before, rtol=1e-3, atol=1e-3)
    check_computes_alike(peft.AutoPeftModelForCausalLM.from_pretrained(folder, **options), baseline)
    check_computes_alike(transformers.AutoModelForCausalLM.from_pretrained(folder, **options), baseline)


@pytest.mark.parametrize("adapter", [{"dora": True}, {"rslora": True, "alpha": 2.5}, {"targets": ["mlp.up_proj"]}])
def test_peft_loads_adapters_of_each_kind(adapter, bases, tmp_path):
    baseline = trained("llama", bases, **adapter)
    export_model(baseline.trainers[0].resolved, baseline.state(), tmp_path / "model")
    check_computes_alike(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model"), baseline)


@pytest.mark.parametrize(
    ("family", "dora"), [*((family, False) for family in CONFIGS), ("llama", True), ("gpt2", True)]
)
def test_a_merged_model_needs_no_adapters(family, dora, bases, tmp_path):
    baseline = trained(family, bases, dora=dora)
    export_model(baseline.trainers[0].resolved, baseline.state(), tmp_path / "model", merge=True)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **exactly(CONFIGS[family]))
    assert not any("lora" in name for name, _ in model.named_parameters())
    check_computes_alike(model, baseline)


def test_the_base_of_a_hub_is_named_by_its_commit(bases, tmp_path):
    baseline = trained("llama", bases)
    manifest = baseline.trainers[0].resolved.manifest
    named = manifest.model.model_copy(update={"pretrained": "someone/model@abc"})
    resolved = ResolvedManifest.of(manifest.model_copy(update={"model": named}))
    export_model(resolved, baseline.state(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/model", "abc")
    assert (config["r"], config["task_type"], config["inference_mode"]) == (3, "CAUSAL_LM", True)


def test_states_of_another_run_are_not_exported(bases, tmp_path):
    baseline = trained("llama", bases)
    other = resolved_of(bases["llama"], adapter={"rank": 4})
    with pytest.raises(UserError, match=r"has shape \(3, 24\), and the config says \(4, 24\)"):
        export_model(other, baseline.state(), tmp_path / "model")
    with pytest.raises(UserError, match="lacks 28 of its 56 tensors"):
        export_model(baseline.trainers[0].resolved, baseline.trainers[0].state(), tmp_path / "model")


def begun_with(folder, base, *, config=LLAMA, num_stages=2, **adapter):
    """A run as its coordinator publishes it."""
    section = {"begin_with": str(folder)} | adapter
    model = {"config": config, "pretrained": str(base), "adapter": section}
    manifest = resolved_of(base, config=config, num_stages=num_stages).manifest.model_dump() | {"model": model}
    manifest = RunManifest.model_validate(manifest)
    return ResolvedManifest.of(manifest.model_copy(update={"model": resolve_model(manifest.model)}))


@pytest.fixture
def saved(bases, tmp_path):
    """Adapters that PEFT has trained and saved."""
    initial = adapters_of(Baseline(resolved_of(bases["llama"])).trainers)
    model = plain_model(LLAMA, bases["llama"], initial)
    train_plainly(model, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_run_begins_with_what_peft_has_saved(saved, bases):
    resolved = begun_with(saved, bases["llama"])
    adapter = resolved.manifest.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.rslora, adapter.dora) == (3, 6, False, False)
    assert len(adapter.targets) == 7
    baseline = Baseline(resolved)
    loaded = as_peft_names(adapters_of(baseline.trainers))
    expected = load_file(saved / "adapter_model.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    before = adapters_of(baseline.trainers)
    baseline.train_step(batches()[0])
    for trainer in baseline.trainers:
        trainer.restart()
    assert all(torch.equal(before[name], value) for name, value in adapters_of(baseline.trainers).items())


@pytest.mark.parametrize(("family", "dora"), [("gpt2", False), ("llama", True), ("gemma3_text", True)])
def test_a_run_goes_on_from_another_ones_adapters(family, dora, bases, tmp_path):
    config = CONFIGS[family]
    baseline = trained(family, bases, dora=dora)
    export_model(baseline.trainers[0].resolved, baseline.state(), tmp_path / "model")
    resolved = begun_with(tmp_path / "model", bases[family], config=config, num_stages=3)
    after = adapters_of(Baseline(resolved).trainers)
    assert after.keys() == adapters_of(baseline.trainers).keys()
    assert all(torch.equal(after[name], value) for name, value in adapters_of(baseline.trainers).items())


def edit(saved, **changes):
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "has adapters of the kind 'IA3', and only LORA can be trained: give others"),
        ({"bias": "all"}, "has bias='all', which is not supported: give adapters without it"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern={'q_proj': 2}, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base as well: convert it"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(changes, message, saved, bases):
    edit(saved, **changes)
    with pytest.raises(UserError, match=message):
        begun_with(saved, bases["llama"])


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 5}, "has r=3, and model.adapter.rank is 5: leave that out"),
        ({"alpha": 1.0}, "has lora_alpha=6, and model.adapter.alpha is 1.0: leave that out"),
        ({"dora": True}, "has use_dora=False, and model.adapter.dora is True"),
        ({"targets": ["q_proj"]}, "and model.adapter.targets says otherwise: leave targets out"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(adapter, message, saved, bases):
    with pytest.raises(UserError, match=message):
        begun_with(saved, bases["llama"], **adapter)
    begun_with(saved, bases["llama"], rank=3, alpha=6.0, targets="all-linear")


def test_a_folder_without_adapters_is_refused(bases, tmp_path, saved):
    with pytest.raises(UserError, match=r"has no adapter_config.json: give the folder or hub name of adapters"):
        begun_with(bases["llama"], bases["llama"])
    with pytest.raises(UserError, match=r"model.adapter.begin_with='.*nowhere' is no folder on this machine"):
        begun_with(tmp_path / "nowhere", bases["llama"])
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no adapter_model.safetensors: give adapters that PEFT has saved as"):
        begun_with(saved, bases["llama"])


def test_adapters_of_other_models_are_refused(bases, saved):
    with pytest.raises(UserError, match="belongs to no matrix of the layers of gpt2 models"):
        begun_with(saved, bases["gpt2"], config=CONFIGS["gpt2"])
    path = saved / "adapter_model.safetensors"
    tensors = load_file(path)
    gone = {name: value for name, value in tensors.items() if ".layers.2." not in name}
    save_file(gone, path)
    resolved = begun_with(saved, bases["llama"])
    StageTrainer(resolved, resolved.specs[0])
    with pytest.raises(UserError, match=r"lacks the tensor base_model.model.model.layers.2.*: give adapters of all"):
        StageTrainer(resolved, resolved.specs[1])
    save_file({name: value[:, :2].contiguous() for name, value in tensors.items()}, path)
    with pytest.raises(UserError, match="has shape"):
        StageTrainer(begun_with(saved, bases["llama"]), resolved.specs[0])


def test_a_base_that_takes_images_is_refused(tmp_path):
    """PEFT would find no layer by the adapters' names, and say so in a warning at best."""
    (tmp_path / "base").mkdir()
    config = {"model_type": "gemma3", "text_config": CONFIGS["gemma3_text"], "vision_config": {}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    section = ModelSection(pretrained=str(tmp_path / "base"), adapter={})
    with pytest.raises(UserError, match="also takes images, and adapters are for models of text alone: give one"):
        resolve_model(section)
    resolve_model(section.model_copy(update={"adapter": None, "untie": True}))


def test_a_peer_reads_no_folder_that_its_user_does_not_allow(saved, bases, tmp_path):
    allowed = tmp_path / "allowed"
    shutil.copytree(bases["llama"], allowed / "base")
    manifest = begun_with(saved, allowed / "base").manifest
    with pytest.raises(UserError, match=r"the run wants to begin with the weights in .*saved on this machine"):
        check_pretrained(manifest, allowed)
    check_pretrained(manifest, tmp_path)

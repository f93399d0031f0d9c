"""A run that begins with a published model's weights: each stage reads its own, and the whole computes what it did."""

import json
import logging
import shutil
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, GPT2, LENGTH, VOCABULARY, exactly
from transformers import AutoConfig, AutoModelForCausalLM

from swarm_peer import hub_waits
from swarm_peer.config import ModelSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.files import LFS_POINTER
from swarm_peer.model import pretrained
from swarm_peer.model.architecture import resolve_model, resolve_model_config
from swarm_peer.model.export import export_model
from swarm_peer.model.pretrained import ModelSource, check_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

CONFIGS = CONFIGS | {"gpt2": GPT2 | {"n_inner": 40}}
EMBEDDING = dict.fromkeys(CONFIGS, "model.embed_tokens.weight") | {"gpt2": "transformer.wte.weight"}
ALL_MODELS = [(family, tied) for family in CONFIGS for tied in (True, False)]
# How a model lies in files, and how a stage finds its part there, is the same for all families.
SOME_MODELS = [(family, tied) for family, tied in ALL_MODELS if family in ("gpt2", "llama")]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save_model(folder, family="gpt2", tied=False, **options):
    """A tiny model with random weights, saved as transformers does it."""
    config = AutoConfig.for_model(**CONFIGS[family] | {"tie_word_embeddings": tied})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, **exactly(CONFIGS[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # biases and norms, too, so that each must be read
    model.save_pretrained(folder, **options)
    return model


def manifest_of(folder, num_stages=2, cache_dir=None, **model):
    manifest = RunManifest.model_validate(
        {
            "name": "test",
            "model": {"pretrained": str(folder), "untie": True} | model,
            "stages": {"count": num_stages},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
    )
    return manifest.model_copy(update={"model": resolve_model(manifest.model, cache_dir)})


def import_stages(folder, num_stages=2):
    manifest = manifest_of(folder, num_stages)
    return [StageTrainer(ResolvedManifest.of(manifest), spec) for spec in ResolvedManifest.of(manifest).specs]


def sample():
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_of(model):
    return model.eval()(sample()).logits


@torch.no_grad()
def chained_logits(trainers):
    hidden = sample()
    for trainer in trainers:
        hidden = trainer.module.eval()(hidden)
    return hidden


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the model is the same --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tied", "options", "num_stages"),
    [
        *(
            (*model, options, n)
            for model in SOME_MODELS
            for options in ({}, {"max_shard_size": "8KB"})
            for n in (1, 2, 3)
        ),
        *((*model, {}, 3) for model in ALL_MODELS if model not in SOME_MODELS),
    ],
)
def test_chained_stages_compute_what_the_model_does(family, tied, options, num_stages, tmp_path):
    expected = logits_of(save_model(tmp_path / "model", family, tied, **options))
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 3) == bool(options)
    trainers = import_stages(tmp_path / "model", num_stages)
    torch.testing.assert_close(chained_logits(trainers), expected, rtol=0, atol=1e-5)
    for trainer in trainers:
        assert {parameter.dtype for parameter in trainer.module.parameters()} == {torch.float32}
        assert all(parameter.requires_grad for parameter in trainer.module.parameters())


@pytest.mark.parametrize(("family", "tied"), ALL_MODELS)
def test_an_imported_model_is_exported_as_it_was(family, tied, tmp_path):
    expected = logits_of(save_model(tmp_path / "model", family, tied))
    trainers = import_stages(tmp_path / "model")
    tensors = {name: value for trainer in trainers for name, value in trainer.state().items()}
    export_model(trainers[0].resolved, tensors, tmp_path / "exported")
    options = {"output_loading_info": True} | exactly(CONFIGS[family])
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", **options)
    assert not any(report.values())
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_head_and_embedding_part_ways_in_training(family, tmp_path):
    """In one process, too, where both have been read from one tensor."""
    save_model(tmp_path, family, tied=True)
    (trainer,) = import_stages(tmp_path, num_stages=1)
    head, embedding = trainer.module.lm_head.weight, trainer.module.get_parameter(EMBEDDING[family])
    assert torch.equal(head, embedding)
    tokens = torch.cat([sample(), sample()[:, :1]], dim=1)
    trainer.backward(trainer.forward(tokens))
    trainer.apply(trainer.mean_gradients())
    assert not torch.equal(head, embedding)


@pytest.mark.parametrize("family", CONFIGS)
def test_names_without_the_body_are_understood(family, tmp_path):
    """As the hub's gpt2 has them: `h.0.ln_1.weight`, and buffers that nobody needs any more."""
    expected = logits_of(save_model(tmp_path, family, tied=True))
    body = EMBEDDING[family].partition(".")[0]
    tensors = {
        name.removeprefix(f"{body}."): value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(chained_logits(import_stages(tmp_path, 3)), expected, rtol=0, atol=1e-5)


def test_the_one_tensor_of_a_tied_model_may_have_the_heads_name(tmp_path):
    expected = logits_of(save_model(tmp_path, "llama", tied=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(chained_logits(import_stages(tmp_path)), expected, rtol=0, atol=1e-5)


def test_weights_that_the_config_says_nothing_of_are_told(tmp_path, caplog):
    """Such as the biases of another family: without them the model computes something else."""
    save_model(tmp_path, "llama")
    import_stages(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    import_stages(tmp_path)
    assert "weights_left_out" not in caplog.text
    tensors |= {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(24) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    import_stages(tmp_path, 3)
    told = [record.getMessage() for record in caplog.records if "weights_left_out" in record.getMessage()]
    assert sum(int(line.split()[2].removeprefix("tensors=")) for line in told) == 4
    assert "first=model.layers.0.self_attn.q_proj.bias" in told[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32(dtype, tmp_path):
    model = save_model(tmp_path, "llama")
    model.to(dtype).save_pretrained(tmp_path)
    trainers = import_stages(tmp_path)
    for trainer in trainers:
        for name, parameter in trainer.module.named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, model.get_parameter(name).float())


# --- a stage reads its own part ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(("family", "tied"), SOME_MODELS)
def test_a_stage_needs_the_files_of_its_own_tensors_only(family, tied, num_stages, tmp_path):
    save_model(tmp_path / "whole", family, tied, max_shard_size="8KB")
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())["weight_map"]
    manifest = manifest_of(tmp_path / "whole", num_stages)
    for spec in ResolvedManifest.of(manifest).specs:
        part = tmp_path / f"part{spec.index}"
        shutil.copytree(tmp_path / "whole", part)
        names = {name for name, _ in StageTrainer(ResolvedManifest.of(manifest), spec).module.named_parameters()}
        own = {index[EMBEDDING[family] if tied and name == "lm_head.weight" else name] for name in names}
        assert own < set(index.values())
        for shard in set(index.values()) - own:
            (part / shard).unlink()
        model = manifest.model.model_copy(update={"pretrained": str(part)})
        StageTrainer(ResolvedManifest.of(manifest.model_copy(update={"model": model})), spec)


def resolve_config(folder):
    return resolve_model_config(ModelSection(pretrained=str(folder)))


@pytest.mark.parametrize(("family", "tied"), SOME_MODELS)
def test_a_stage_reads_its_own_tensors_only(family, tied, tmp_path, monkeypatch):
    save_model(tmp_path, family, tied)
    read = []
    real = pretrained.safe_open

    class Spy:
        def __init__(self, *args, **options):
            self.real = real(*args, **options)

        def __enter__(self):
            self.content = self.real.__enter__()
            return self

        def __exit__(self, *error):
            return self.real.__exit__(*error)

        def keys(self):
            return self.content.keys()

        def get_slice(self, name):
            read.append(name)
            return self.content.get_slice(name)

    monkeypatch.setattr(pretrained, "safe_open", Spy)
    manifest = manifest_of(tmp_path, 3)
    for spec in ResolvedManifest.of(manifest).specs:
        read.clear()
        own = [name for name, _ in StageTrainer(ResolvedManifest.of(manifest), spec).module.named_parameters()]
        if tied and spec.is_last:
            own[own.index("lm_head.weight")] = EMBEDDING[family]
        assert sorted(set(read)) == sorted(own)


# --- the hub ----------------------------------------------------------------------------------------------------------


class Hub:
    """Stands in for the hub's client: one repository at a certain commit."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.snapshot = cache / "models--someone--tiny" / "snapshots" / COMMIT
        self.snapshot.mkdir(parents=True)
        self.asked = []

    def download(self, name, file, *, revision=None, cache_dir=None):
        self.asked.append((name, file, revision, cache_dir))
        if not (self.folder / file).exists():
            raise LocalEntryNotFoundError(f"{file} is not there\nand more")
        shutil.copy(self.folder / file, self.snapshot / file)
        return str(self.snapshot / file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setattr(pretrained, "hf_hub_download", hub.download)
    return hub


def test_a_hub_name_is_pinned_to_its_commit(hub):
    save_model(hub.folder, tied=True)
    manifest = manifest_of("someone/tiny", cache_dir=Path("/cache"))
    assert manifest.model.pretrained == f"someone/tiny@{COMMIT}"
    assert manifest.model.config["tie_word_embeddings"] is False
    assert set(hub.asked) == {
        ("someone/tiny", "config.json", None, Path("/cache")),
        ("someone/tiny", "config.json", COMMIT, Path("/cache")),
    }


def test_a_revision_may_be_named(hub):
    save_model(hub.folder)
    assert manifest_of("someone/tiny@refs/pr/1").model.pretrained == f"someone/tiny@{COMMIT}"
    assert hub.asked[0] == ("someone/tiny", "config.json", "refs/pr/1", None)


def test_a_stage_downloads_the_shards_that_it_needs(hub):
    expected = logits_of(save_model(hub.folder, "llama", max_shard_size="8KB"))
    manifest = manifest_of("someone/tiny", 2)
    index = json.loads((hub.folder / "model.safetensors.index.json").read_text())["weight_map"]
    trainers = []
    for spec in ResolvedManifest.of(manifest).specs:
        hub.asked.clear()
        trainers.append(StageTrainer(ResolvedManifest.of(manifest), spec, cache_dir=Path("/cache")))
        shards = {index[name] for name, _ in trainers[-1].module.named_parameters()}
        assert {file for _, file, _, _ in hub.asked} - {"model.safetensors", "model.safetensors.index.json"} == shards
        assert {(revision, cache) for _, _, revision, cache in hub.asked} == {(COMMIT, Path("/cache"))}
    torch.testing.assert_close(chained_logits(trainers), expected, rtol=0, atol=1e-5)


def test_who_takes_the_state_from_another_downloads_nothing(hub):
    save_model(hub.folder, "llama")
    manifest = manifest_of("someone/tiny", 2)
    for spec in ResolvedManifest.of(manifest).specs:
        mate = StageTrainer(ResolvedManifest.of(manifest), spec)
        hub.asked.clear()
        trainer = StageTrainer(ResolvedManifest.of(manifest), spec, blank=True)
        trainer.load_state(mate.state(), 3)
        assert hub.asked == []
        trainer.restart()
        assert "model.safetensors" in {file for _, file, _, _ in hub.asked}
        assert all(torch.equal(value, mate.state()[name]) for name, value in trainer.state().items())


def test_a_model_that_the_hub_does_not_have(monkeypatch):
    def download(*_, **__):
        raise OSError("no such repository\nand more")

    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    with pytest.raises(UserError) as caught:
        manifest_of("no/body")
    assert "'no/body' cannot be had from the Hugging Face hub (no such repository): correct" in one_line(caught)


def test_a_file_that_the_hub_does_not_have(monkeypatch):
    def download(*_, **__):
        raise RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError, "not there\nreally")

    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    with pytest.raises(UserError) as caught:
        manifest_of("some/body")
    assert "'some/body' has no config.json: " in one_line(caught)


@pytest.mark.parametrize("ask", [ModelSource.read_config, ModelSource.pinned, ModelSource.files_by_tensor])
def test_a_hub_that_does_not_answer_is_no_model_without_files(ask, monkeypatch):
    def download(*_, **__):
        raise LocalEntryNotFoundError("cannot reach it")

    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    source = ModelSource("some/body")
    with pytest.raises(UserError) as caught:
        ask(source)
    assert "'some/body' cannot be had: the Hugging Face hub does not answer (check the network" in one_line(caught)
    assert "may be named with --set model.pretrained=./FOLDER" in str(caught.value)
    assert source.fetch("chat_template.jinja") is None, "what a model may lack is no reason to stop"


def test_a_hub_out_of_reach_is_asked_once_and_told_of(monkeypatch):
    """Its client tries for half a minute each time."""
    asked, told, is_told = [], [], threading.Event()

    def download(_, file, **__):
        asked.append(file)
        assert is_told.wait(60), "nobody has said what is waited for"
        raise LocalEntryNotFoundError("cannot reach it")

    class Listener(logging.Handler):
        def emit(self, record):
            told.append(record.args[0])
            is_told.set()

    monkeypatch.setattr(hub_waits, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(hub_waits.log, "handlers", [Listener()])
    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    with pytest.raises(UserError, match="check the network"):
        manifest_of("some/body")
    assert asked == ["config.json"]
    assert told == ["model.pretrained='some/body'"]


# --- what a manifest may say ------------------------------------------------------------------------------------------


def test_a_name_means_the_same_wherever_it_is_read(tmp_path, monkeypatch):
    """A folder here that happens to be called like a model of the hub is not taken for it, nor the other way round."""
    save_model(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert manifest_of("gpt2").model.pretrained == "./gpt2"
    assert ModelSource("gpt2").folder is None
    assert ModelSource("openai-community/gpt2").folder is None
    assert ModelSource("openai-community/gpt2@refs/pr/1").folder is None
    assert ModelSource("./gpt2").folder == Path("gpt2")
    assert ModelSource("~/gpt2").folder == Path.home() / "gpt2"
    assert ModelSource("data/models/gpt2").folder == Path("data/models/gpt2")


def test_a_manifest_with_pretrained_weights_survives_publishing(tmp_path):
    save_model(tmp_path)
    manifest = manifest_of(tmp_path)
    assert RunManifest.model_validate_json(manifest.canonical_json()) == manifest


def test_config_and_pretrained_may_agree(tmp_path):
    save_model(tmp_path, "gpt2", tied=True)
    config = resolve_config(tmp_path) | {"resid_pdrop": 0.0}
    assert manifest_of(tmp_path, config=config).model.config == config
    assert manifest_of(tmp_path, config=str(tmp_path)).model.config["tie_word_embeddings"] is False


def test_an_inner_size_may_be_left_to_its_default(tmp_path):
    save_model(tmp_path, "gpt2")
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"n_inner": 96}))
    config = resolve_config(tmp_path)
    assert manifest_of(tmp_path, config=config | {"n_inner": None}).model.config["n_inner"] is None


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "gpt2",
            {"n_layer": 6},
            "has n_layer=4, and model.config has n_layer=6: leave model.config out, or correct it",
        ),
        ("gpt2", {"n_head": 4}, "has n_head=2, and model.config has n_head=4"),
        ("gpt2", {"n_inner": None}, "has n_inner=40, and model.config has n_inner=96"),
        ("llama", {"num_key_value_heads": 4}, "has num_key_value_heads=2, and model.config has num_key_value_heads=4"),
        ("llama", {"vocab_size": 64}, "has vocab_size=61, and model.config has vocab_size=64"),
    ],
)
def test_config_and_pretrained_must_agree_in_shapes(family, change, message, tmp_path):
    save_model(tmp_path, family)
    with pytest.raises(UserError) as caught:
        manifest_of(tmp_path, config=resolve_config(tmp_path) | change)
    assert message in one_line(caught)


def test_families_must_agree(tmp_path):
    save_model(tmp_path / "gpt2", "gpt2")
    save_model(tmp_path / "llama", "llama")
    with pytest.raises(UserError, match=r"has model_type=llama, and model\.config has model_type=gpt2"):
        manifest_of(tmp_path / "llama", config=str(tmp_path / "gpt2"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "config and pretrained are both missing: give one of them"),
        (
            {"pretrained": "gpt2", "share_layers": True},
            "pretrained='gpt2' has layers of its own, and share_layers makes",
        ),
        ({"pretrained": ""}, "String should match pattern"),
        ({"pretrained": "/a\0b"}, "String should match pattern"),
        ({"pretrained": "a\nb"}, "String should match pattern"),
    ],
)
def test_sections_that_cannot_work(section, message):
    with pytest.raises(ValidationError, match=message):
        ModelSection.model_validate(section)


def test_a_peer_reads_folders_inside_of_its_data_dir_only(tmp_path):
    save_model(tmp_path / "data" / "model")
    manifest = manifest_of(tmp_path / "data" / "model")
    check_pretrained(manifest, tmp_path / "data")
    check_pretrained(manifest, tmp_path / "data" / "model")
    for data_dir in (None, tmp_path / "data" / "other", tmp_path / "dat"):
        message = r"wants to begin with the weights in .*model on this machine.*--data-dir FOLDER, which is"
        with pytest.raises(UserError, match=message):
            check_pretrained(manifest, data_dir)


def test_a_folder_that_is_meant_from_elsewhere_is_told_as_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = RunManifest.model_construct(model=ModelSection(pretrained="./model"))
    with pytest.raises(UserError, match=f"the weights in {tmp_path}/model on this machine"):
        check_pretrained(manifest, tmp_path / "data")


@pytest.mark.parametrize("name", ["/data/../etc/model", "~/model", "../model", "a/../../b"])
def test_no_way_leads_out_of_the_data_dir(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = RunManifest.model_construct(model=ModelSection(pretrained=name))
    with pytest.raises(UserError, match="--data-dir"):
        check_pretrained(manifest, tmp_path)


def test_a_link_out_of_the_data_dir_is_no_way_either(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "private")
    manifest = RunManifest.model_construct(model=ModelSection(pretrained=str(tmp_path / "data" / "link")))
    with pytest.raises(UserError, match="--data-dir"):
        check_pretrained(manifest, tmp_path / "data")


def test_the_home_of_a_user_that_is_not_here_is_one_line():
    manifest = RunManifest.model_construct(model=ModelSection(pretrained="~nobody-at-all/model"))
    with pytest.raises(UserError, match="--data-dir"):
        check_pretrained(manifest, None)
    with pytest.raises(UserError, match="is no folder on this machine"):
        manifest_of("~nobody-at-all/model")


@pytest.mark.parametrize("section", [{"pretrained": "gpt2"}, {"config": {"model_type": "gpt2"}}])
def test_hub_names_and_new_models_need_no_data_dir(section):
    check_pretrained(RunManifest.model_construct(model=ModelSection.model_validate(section)), None)


# --- damaged and unfit models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere-at-all"])
def test_a_folder_that_is_not_there(name):
    with pytest.raises(UserError, match="is no folder on this machine: correct the path, or give a hub name") as caught:
        manifest_of(name)
    assert f"model.pretrained={name!r}" in one_line(caught)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def rename_config(folder):
    (folder / "config.json").rename(folder / "other.json")


def write(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def test_a_config_that_this_user_may_not_read_is_not_to_be_mended(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read config\.json: Permission denied: .*; let this user use it"):
        ModelSource(str(tmp_path)).read_config()


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


NAN = torch.full((24,), torch.nan)
NORM = "transformer.ln_f.weight"
# What Python says of JSON that is nested too deeply.
TOO_DEEP = "Stack overflow" if sys.version_info >= (3, 14) else "maximum recursion depth"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_config, "has no config.json: give the folder or hub name of a transformers model"),
        (write("config.json", b"{"), "cannot read config.json (Expecting property name"),
        (write("config.json", b"[" * 100_000), f"cannot read config.json ({TOO_DEEP}"),
        (write("config.json", b"\xff\xfe"), "cannot read config.json ('utf-8' codec"),
        (write("config.json", b"[1]"), "config.json holds no mapping: mend or replace that file"),
        (write("config.json", b'{"model_type": "bert"}'), "cannot be trained: model.config: model_type='bert' is not"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "has neither model.safetensors nor model.safetensors.index.json: give a model that was saved as",
        ),
        (cut, "cannot read model.safetensors ("),
        (write("model.safetensors", b""), "cannot read model.safetensors ("),
        (write("model.safetensors", struct.pack("<Q", 2**62) + b"{}"), "cannot read model.safetensors ("),
        (
            lambda folder: change_tensors(folder, lambda tensors: tensors.pop(NORM)),
            "lacks the tensor transformer.ln_f.weight: give a complete model",
        ),
        (
            lambda folder: change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight")),
            "lacks the tensor lm_head.weight: give a complete model",
        ),
        (
            lambda folder: change_tensors(folder, lambda tensors: tensors.update({NORM: torch.ones(23)})),
            "tensor transformer.ln_f.weight has shape (23,), and the stage needs (24,): leave model.config out",
        ),
        (
            lambda folder: change_tensors(folder, lambda t: t.update({NORM: torch.ones(24, dtype=torch.int8)})),
            "tensor transformer.ln_f.weight is of type I8: give a model that is not quantised",
        ),
        (
            lambda folder: change_tensors(folder, lambda tensors: tensors.update({NORM: NAN})),
            "tensor transformer.ln_f.weight in model.safetensors holds values that are not finite",
        ),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(damage, message, tmp_path):
    save_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        import_stages(tmp_path)
    assert one_line(caught).startswith(f"model.pretrained={str(tmp_path)!r} {message}")


def unlink_shard_of(name):
    def unlink(folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        (folder / index["weight_map"][name]).unlink()

    return unlink


def into_a_folder_below(folder, below):
    """Have the index name the shards in a folder below."""
    for shard in folder.glob("model-*.safetensors"):
        shard.rename(below / shard.name)
    change_index(folder, lambda i: i.update(weight_map={k: f"{below.name}/{v}" for k, v in i["weight_map"].items()}))


def into_a_folder_elsewhere(folder):
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    (folder / "elsewhere").symlink_to(elsewhere)
    into_a_folder_below(folder, folder / "elsewhere")


def test_shards_may_be_in_a_folder_below(tmp_path):
    save_model(tmp_path / "plain", max_shard_size="8KB")
    save_model(tmp_path / "below", max_shard_size="8KB")
    (tmp_path / "below" / "shards").mkdir()
    into_a_folder_below(tmp_path / "below", tmp_path / "below" / "shards")
    plain, below = (chained_logits(import_stages(tmp_path / name)) for name in ("plain", "below"))
    assert torch.equal(plain, below)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            unlink_shard_of(NORM),
            r"lacks model-\S+\.safetensors, where model.safetensors.index.json says that tensors are",
        ),
        (lambda f: change_index(f, lambda i: i.pop("weight_map")), "has no weight_map of files in that folder: mend"),
        (lambda f: change_index(f, lambda i: i.update(weight_map=[1])), "has no weight_map of files in that folder"),
        (lambda f: change_index(f, lambda i: i["weight_map"].update(x=1)), "has no weight_map of files in that folder"),
        (
            lambda f: change_index(f, lambda i: i["weight_map"].update({NORM: "../secret.safetensors"})),
            "has no weight_map of files in that folder",
        ),
        (
            lambda f: change_index(f, lambda i: i["weight_map"].update({NORM: "/tmp/secret.safetensors"})),
            "has no weight_map of files in that folder",
        ),
        (into_a_folder_elsewhere, r"has elsewhere/model-\S+\.safetensors outside of that folder: put it there"),
        (
            write("model-00001-of-00014.safetensors", LFS_POINTER + b"v1\noid"),
            r"has a model-00001-of-00014\.safetensors that is a pointer of Git LFS",
        ),
        (write("config.json", LFS_POINTER + b"v1\noid"), r"has a config\.json that is a pointer of Git LFS"),
        (lambda f: change_index(f, lambda i: i["weight_map"].pop(NORM)), "lacks the tensor transformer.ln_f.weight"),
        (
            lambda f: change_index(f, lambda i: i["weight_map"].update({NORM: i["weight_map"][EMBEDDING["gpt2"]]})),
            r"cannot read model-\S+\.safetensors \(.*transformer.ln_f.weight.*\): download or save it again",
        ),
        (write("model.safetensors.index.json", b"no"), "cannot read model.safetensors.index.json"),
    ],
)
def test_shards_that_cannot_be_read_are_one_line(damage, message, tmp_path):
    save_model(tmp_path, max_shard_size="8KB")
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        import_stages(tmp_path)
    one_line(caught)


def test_a_file_without_permission(tmp_path, monkeypatch):
    save_model(tmp_path)

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pretrained, "safe_open", denied)
    with pytest.raises(UserError, match=r"cannot read model\.safetensors \(.*Permission denied\)"):
        import_stages(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_tied_model_is_trained_whole_only_if_that_is_meant(family, tmp_path):
    save_model(tmp_path, family, tied=True)
    with pytest.raises(UserError, match=r"has one matrix for embedding and head.*model\.untie") as caught:
        resolve_model(ModelSection(pretrained=str(tmp_path)))
    config = AutoConfig.for_model(**CONFIGS[family])
    assert f"{config.vocab_size * config.hidden_size / 1e6:.0f} million parameters more" in str(caught.value)
    for meant in ({"untie": True}, {"adapter": {}}):
        resolve_model(ModelSection(pretrained=str(tmp_path), **meant))


def test_a_tensor_is_read_some_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "BLOCK_VALUES", 400)
    stored = {"matrix": torch.randn(200, 3).bfloat16(), "long": torch.randn(70, 500), "vector": torch.randn(1000)}
    save_file(stored, tmp_path / "model.safetensors")
    source = ModelSource(str(tmp_path))
    sizes = {}
    for name, values in stored.items():
        tensor = pretrained.StoredTensor(
            source, "model.safetensors", tmp_path / "model.safetensors", name, values.shape
        )
        sizes[name] = [len(block) for block in tensor.blocks()]
        assert torch.equal(tensor.whole(), values.float())
    assert sizes == {"matrix": [128, 72], "long": [64, 6], "vector": [384, 384, 232]}


def test_a_tensor_that_is_not_the_runs_is_refused_before_any_of_it_is_read(tmp_path):
    values = torch.randn(200, 3)
    save_file({"matrix": values}, tmp_path / "model.safetensors")
    seen = []

    def tensor(is_right):
        source = ModelSource(str(tmp_path), is_right=is_right)
        return pretrained.StoredTensor(
            source, "model.safetensors", tmp_path / "model.safetensors", "matrix", values.shape
        )

    with pytest.raises(pretrained.WrongTensor, match=r"has another tensor matrix in model\.safetensors than the run's"):
        next(tensor(lambda name, stored: seen.append((name, stored.clone()))).blocks())
    assert seen[0][0] == "matrix"
    assert torch.equal(seen[0][1], values)
    assert torch.equal(tensor(lambda name, stored: True).whole(), values)

"""Every shipped configuration loads and can be cut; every message of config.py says where, what and how to mend it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from coordinator.config_files import load_manifest
from swarm_peer.config import ModelSection, RunManifest
from swarm_peer.config_errors import describe
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.stage_memory import RESERVED_BYTES

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))
DEMO = next(path for path in CONFIGS if path.stem == "demo")


# Where test_model_published.py has the config.json of a pretrained model, or of one of the same shape.
PRETRAINED = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct": "unsloth/Llama-3.3-70B-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M",
}


def resolve(manifest: RunManifest, folder: Path) -> ResolvedManifest:
    """The manifest as it would be published, without the hub."""
    from test_model_published import TAKEN

    from swarm_peer.model.architecture import resolve_model_config

    if (name := manifest.model.pretrained) is not None:
        (folder / "config.json").write_text(json.dumps(TAKEN[PRETRAINED[name]]))
        config = resolve_model_config(ModelSection(pretrained=str(folder)))
        manifest = manifest.model_copy(update={"model": manifest.model.model_copy(update={"config": config})})
    return ResolvedManifest.of(manifest)


def num_parameters(resolved: ResolvedManifest) -> list[int]:
    """Of each stage, counted on modules without memory, and without adapters."""
    from swarm_peer.model.stage import StageModule

    modules = [StageModule(resolved.config, spec, resolved.manifest.model) for spec in resolved.specs]
    return [sum(parameter.numel() for parameter in module.parameters()) for module in modules]


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "gpt2-124m", "llama", "swarm-1b-shared"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_loads_and_can_be_cut(path: Path, tmp_path: Path) -> None:
    manifest = load_manifest(path)
    assert RunManifest.model_validate_json(manifest.canonical_json()) == manifest
    assert all(num_parameters(resolve(manifest, tmp_path)))
    if (config := manifest.model.config) is None:
        assert manifest.model.adapter is not None
        return
    assert isinstance(config, dict)
    dropouts = [value for key, value in config.items() if key.endswith(("pdrop", "dropout"))]
    assert dropouts == [0.0] * (3 if config["model_type"] == "gpt2" else 0)


@pytest.mark.parametrize(
    ("stem", "millions"), [("demo", 1.9), ("gpt2-124m", 163.1), ("llama", 162.8), ("swarm-1b-shared", 1024.6)]
)
def test_the_parameters_are_as_many_as_the_comments_say(stem: str, millions: float) -> None:
    manifest = load_manifest(DEMO.with_stem(stem))
    assert sum(num_parameters(ResolvedManifest.of(manifest))) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("stem", "trained_millions", "gpu_gib", "in_flight"),
    [("llama-8b-qlora-chat", 21, 12, 3), ("llama-70b-qlora-chat", 35, 24, 12)],
)
def test_adapters_are_as_large_as_the_comments_say_and_fit_their_gpus(
    stem: str, trained_millions: float, gpu_gib: int, in_flight: int, tmp_path: Path
) -> None:
    from swarm_peer.model.costs import stage_costs

    stages = stage_costs(resolve(load_manifest(DEMO.with_stem(stem)), tmp_path), "cuda")
    assert sum(stage.trained for stage in stages) / len(stages) / 1e6 == pytest.approx(trained_millions, abs=0.5)
    for stage in stages:
        assert stage.memory.window(gpu_gib * 2**30 - RESERVED_BYTES, 99) >= in_flight


# --- messages


def write(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = yaml.safe_load(DEMO.read_text())
    change(content)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages.layers=[4]", "stages: layers=[4] must name 2 numbers of at least 1, one for each stage: correct it"),
        ("stages.layers=[4,0]", "stages: layers=[4, 0] must name 2 numbers of at least 1"),
        ("stages.count=0", "stages.count: Input should be greater than or equal to 1 (got 0)"),
        ("data.dataset=text", "data: dataset='text' needs files: name at least one file or glob pattern"),
        (
            "data.format=alpaca",
            "data: format='alpaca' is of records in json, parquet or arrow, and dataset='embedded' is text, or "
            "messages: name another data set, or set format to one of these",
        ),
        (
            "data.packing=true",
            "data: packing=true is for records, and format='text' is cut into full samples: leave it out",
        ),
        (
            "data.loss_on=completion",
            "data: loss_on='completion' is for chats, and format='text' has none: leave it out",
        ),
        ("data.subset=en", "data: subset='en' is for data sets whose card has configs: leave it out"),
        ("data.files=[a.txt]", "data: files belong to dataset text, json, csv, tsv, parquet, arrow, not to 'embedded'"),
        ('data.dataset="a\\0b"', "data.dataset: expected a name, without control characters"),
        ('data.files=["good.txt", "a\\0b"]', "data.files.1: expected a name, without control characters"),
        ('data.tokenizer="a\\0b"', "data.tokenizer: expected a name, without control characters"),
        ('data.tokenizer=""', "data.tokenizer: expected a name, without control characters"),
        ('data.subset="a\\nb"', "data.subset: expected a name, without control characters"),
        ('data.split="a\\nb"', "data.split: expected a name, without control characters"),
        ("data.sequence_length=1", "data.sequence_length: Input should be greater than or equal to 2 (got 1)"),
        (
            "training.microbatch_size=7",
            "training: global_batch_size=64 is not a multiple of microbatch_size=7: change one of them",
        ),
        ("training.max_grad_norm=0", "training.max_grad_norm: Input should be greater than 0 (got 0)"),
        (
            "schedule.warmup_steps=1000000",
            "schedule.warmup_steps=1000000 is more than training.steps=300: set it to 300 at most",
        ),
        ("optimizer.name=adam", "optimizer.name: Input should be 'adamw', 'sgd', 'adamw_8bit' or 'muon' (got 'adam')"),
        ("schedule.decay_steps=9", "schedule: decay_steps=9 is for wsd, and name is 'cosine': leave one out"),
        (
            "schedule={name: wsd, warmup_steps: 100, decay_steps: 201}",
            "schedule.decay_steps=201 is more than the 200 of training.steps that follow the warm-up: set it to 200",
        ),
        (
            "optimizer.matrix_learning_rate=0.02",
            "optimizer: matrix_learning_rate=0.02 is for muon, and name is 'adamw': leave one out",
        ),
        ("optimizer.lr=0.1", "optimizer.lr: unknown key: remove it or correct its spelling"),
        ("training.step=5", "training.step: unknown key: remove it or correct its spelling (steps?)"),
        ("optimiser.name=sgd", "optimiser: unknown key: remove it or correct its spelling (optimizer?)"),
        ("seed=[", "--set 'seed=[': this is no valid YAML"),
        (
            "wire.activations=int4",
            "wire.activations: Input should be 'none', 'fp16', 'bf16', 'blockwise_8bit', 'int5_h",
        ),
        ("name=Not A Name", "name: expected a name of a-z, 0-9 and -, of 63 characters"),
        ("seed=-1", "seed: Input should be greater than or equal to 0 (got -1)"),
        ("limits.hop_timeout_s=86401", "limits.hop_timeout_s: Input should be less than or equal to 86400 (got 86401)"),
        ("limits.hop_timeout_s=.inf", "limits.hop_timeout_s: Input should be a finite number (got inf)"),
        ("limits.announcement_s=.inf", "limits.announcement_s: Input should be a finite number (got inf)"),
        ("averaging.round_timeout_s=.inf", "averaging.round_timeout_s: Input should be a finite number (got inf)"),
        ("averaging.chunk_timeout_s=.inf", "averaging.chunk_timeout_s: Input should be a finite number (got inf)"),
        ("optimizer.betas=[0.9, .nan]", "optimizer.betas.1: Input should be a finite number (got nan)"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas.1: Input should be less than 1 (got 1.5)"),
        (
            "training.steps=10000000000",
            "training.steps: Input should be less than or equal to 1073741824 (got 10000000000",
        ),
        ("data.validation_documents=1000000000000", "data.validation_documents: Input should be less than or equal to"),
        ("training.max_grad_norm=.inf", "training.max_grad_norm: Input should be a finite number (got inf)"),
        ('optimizer.learning_rate="1e-3"', "optimizer.learning_rate: expected a number, with a point and without"),
        ("optimizer.learning_rate=0,001", "expected a number, with a point and without quotes, not '0,001'"),
        ("training.steps=true", "training.steps: expected a number, with a point and without quotes, not True"),
        ("training.steps=1.5", "training.steps: expected a whole number (got 1.5)"),
        ("training.steps=[]", "training.steps: expected a whole number"),
        ("model.share_layers=yes", "model.share_layers: expected true or false, not 'yes'"),
        ("data.files=a.txt", "data.files: expected a list, such as [a, b] (got 'a.txt')"),
        ("data.split=5", "data.split: expected text: put it into quotes (got 5)"),
        ("data.tokenizer=null", "data.tokenizer: expected text: give some, or leave it out (got None)"),
        ("schedule=", "schedule: expected keys with values: give some, or leave it out (got None)"),
        (
            "optimizer={name: adamw, learning_rate: 0,001}",
            "optimizer.1: no name of a setting: correct it (a number has a point, and no comma) (got 1)",
        ),
        ("=5", "--set '=5': expected KEY=VALUE, such as training.steps=100"),
        ("training..steps=5", "--set 'training..steps=5': expected KEY=VALUE"),
        ("model.boundary={}", "model.boundary: rank=None and maxout=None: give one of them, or leave boundary out"),
        ("model.boundary={rank: 8, maxout: 2}", "model.boundary: rank=8 and maxout=2: give one of them"),
        (
            "model={pretrained: ./model, boundary: {rank: 8}}",
            "model: boundary is for models that begin with random weights, and pretrained='./model' has learnt to "
            "write whole hidden states: leave one out",
        ),
        (
            "model={pretrained: ./model, adapter: {}, boundary: {rank: 8}}",
            "model: boundary is for models that are trained whole, and adapter trains none: leave one out",
        ),
        (
            "model={pretrained: ./model, adapter: {}, base: nf4, boundary: {rank: 8}}",
            "model: boundary is for models that are trained whole, and base=nf4 is of a frozen one",
        ),
        ("speed=1", "speed: unknown key: remove it or correct its spelling"),
        ("training.steps", "--set 'training.steps': expected KEY=VALUE, such as training.steps=100"),
        ("name.first=x", "--set 'name.first=x': 'name' is no section"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(setting: str, message: str) -> None:
    overrides = ("training.steps=300", "training.global_batch_size=64", "stages.count=2", setting)
    with pytest.raises(UserError) as caught:
        load_manifest(DEMO, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, lambda content: content["training"].pop("steps"))
    with pytest.raises(UserError, match=r"run\.yaml: training\.steps: missing: add it$"):
        load_manifest(path)


def test_several_errors_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, lambda content: (content.pop("optimizer"), content.update(speed=1)))
    with pytest.raises(UserError, match=r"optimizer: missing: add it; speed: unknown key"):
        load_manifest(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "is no valid YAML"),
        ("just words", "expected a mapping of sections"),
        ("", "expected a mapping of sections"),
        (None, r"run\.yaml: no such file, and none of that name comes with Swarm \(demo, gpt2-124m, "),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_manifest(path)
    assert "\n" not in str(caught.value)


def test_overrides_replace_and_add() -> None:
    manifest = load_manifest(DEMO, ("training.steps=1000", "limits.hop_tries=2", "model.config.n_layer=8"))
    assert (manifest.training.steps, manifest.limits.hop_tries) == (1000, 2)
    assert isinstance(manifest.model.config, dict)
    assert manifest.model.config["n_layer"] == 8


def test_the_hash_depends_on_every_value_and_on_nothing_else(tmp_path: Path) -> None:
    hashes = {load_manifest(DEMO, (setting,)).hash for setting in ("seed=0", "seed=1", "training.microbatch_size=4")}
    assert len(hashes) == 3
    reordered = write(tmp_path, lambda content: content.update(optimizer=content.pop("optimizer")))
    assert load_manifest(reordered).hash == load_manifest(DEMO).hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "first"}, "stage: expected a number or auto, got 'first'"),
        ({"initial_peers": ()}, "initial_peers: needs more values"),
        ({"metrics_port": 70000}, "metrics_port: Input should be less than or equal to 65535 (got 70000)"),
        ({"max_memory": "much"}, "max_memory: expected a size such as 8GiB (got 'much')"),
        ({"port": 1}, "port: unknown key: remove it or correct its spelling"),
    ],
)
def test_options_of_a_peer_that_cannot_work_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PeerOptions.model_validate({"initial_peers": ("/ip4/127.0.0.1/tcp/1",), **options})
    assert message in describe(caught.value)
    assert "\n" not in describe(caught.value)

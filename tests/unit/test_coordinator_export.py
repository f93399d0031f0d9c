"""From a checkpoint to what transformers loads, through the command that a person types."""

import json
import logging
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from tiny_adapters import write_base
from transformers import AutoModelForCausalLM, AutoTokenizer

import coordinator.checkpoints.model_folder
import coordinator.cli
import coordinator.watch.observer
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.state.index import StageState

CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_positions": 16,
        "n_embd": 24,
        "n_layer": 4,
        "n_head": 2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 300,
        "max_position_embeddings": 16,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}

ID = "12D3KooWQesj3rCQXBSXiQYgCbooCQU8No5gkgRdpAaK8ahDYgsJ"


def trainers_of(family="gpt2", share_layers=False, model=None, **data):
    manifest = RunManifest.model_validate(
        {
            "name": "test",
            "model": model or {"config": CONFIGS[family], "share_layers": share_layers},
            "stages": {"count": 2},
            "data": {"sequence_length": 12} | data,
            "training": {"steps": 9, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
    )
    return [StageTrainer(ResolvedManifest.of(manifest), spec) for spec in ResolvedManifest.of(manifest).specs]


def save(trainers, url, round_number):
    states = [StageState(round_number=round_number, history_hash="x", tensors=trainer.state()) for trainer in trainers]
    CheckpointStore(url).save(round_number, trainers[0].manifest, states)


def train_and_save(trainers, url, num_steps):
    """Returns the logits after each step."""
    logits = []
    for round_number in range(1, num_steps + 1):
        for trainer in trainers:
            trainer.apply([torch.ones_like(mean) for mean in trainer.mean_gradients()])
        save(trainers, url, round_number)
        hidden = sample()
        with torch.no_grad():
            for trainer in trainers:
                hidden = trainer.module.eval()(hidden)
        logits.append(hidden)
    return logits


def sample():
    return torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(0))


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["swarm-coordinator", "export", *map(str, options)])
    coordinator.cli.run()


def one_line_of(monkeypatch, capsys, *options):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *options)
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("swarm-coordinator: ")]
    return line


def assert_loads(folder, expected):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(sample()).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_newest_checkpoint_is_exported(family, share_layers, tmp_path, monkeypatch, capsys):
    logits = train_and_save(trainers_of(family, share_layers), str(tmp_path / "checkpoints"), 2)
    run(monkeypatch, "--checkpoint", tmp_path / "checkpoints", "--output", tmp_path / "model")
    assert f"after 2 optimizer steps: {tmp_path / 'model'}" in capsys.readouterr().out
    assert_loads(tmp_path / "model", logits[1])
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_exported_alone_or_within_their_base(merge, tmp_path, monkeypatch, capsys):
    base = write_base(CONFIGS["llama"], tmp_path / "base")
    model = {"config": CONFIGS["llama"], "pretrained": str(base), "adapter": {"rank": 2}}
    logits = train_and_save(trainers_of(model=model), str(tmp_path / "checkpoints"), 2)
    options = ["--merge"] if merge else []
    run(monkeypatch, "--checkpoint", tmp_path / "checkpoints", "--output", tmp_path / "model", *options)
    names = {"config.json", "model.safetensors"} if merge else {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names | {"README.md"}
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("base", "transformers" if merge else "peft")
    assert "2 of 9" in card.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(sample()).logits, logits[1], rtol=1e-4, atol=1e-5)


def test_a_run_with_few_values_at_its_boundaries_is_exported_as_the_plain_model(tmp_path, monkeypatch):
    trainers = trainers_of(model={"config": CONFIGS["llama"], "boundary": {"rank": 4}})
    for trainer in trainers:
        trainer.apply([torch.ones_like(mean) for mean in trainer.mean_gradients()])
    save(trainers, str(tmp_path / "checkpoints"), 1)
    passed = None
    for trainer in trainers:
        passed = trainer.predict(sample(), passed)
    run(monkeypatch, "--checkpoint", tmp_path / "checkpoints", "--output", tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(sample()).logits[:, -1], passed, rtol=0, atol=1e-5)
    assert "rank 4" in ModelCard.load(tmp_path / "model" / "README.md").text


def test_maxout_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    model = {"config": CONFIGS["gpt2"], "boundary": {"maxout": 2}}
    save(trainers_of(model=model), str(tmp_path / "checkpoints"), 1)
    options = ["--checkpoint", tmp_path / "checkpoints", "--output", tmp_path / "model"]
    line = one_line_of(monkeypatch, capsys, *options)
    assert "model.boundary.maxout has layers at the boundaries that no Hugging Face model has" in line
    assert not (tmp_path / "model").exists()


def test_a_run_without_adapters_has_nothing_to_merge(tmp_path, monkeypatch, capsys):
    train_and_save(trainers_of(), str(tmp_path / "checkpoints"), 1)
    options = ["--checkpoint", tmp_path / "checkpoints", "--output", tmp_path / "model", "--merge"]
    line = one_line_of(monkeypatch, capsys, *options)
    assert line.endswith("--merge: the run trains all of its model and has no adapters: leave it out")
    assert not (tmp_path / "model").exists()


DHT = SimpleNamespace(dial_by=lambda announced, can_be_dialled, has_left: None)


def test_a_live_run_is_exported_by_an_observer(tmp_path, monkeypatch, capsys):
    (logits,) = train_and_save(trainers_of(), str(tmp_path / "checkpoints"), 1)
    checkpoint = find_checkpoint(str(tmp_path / "checkpoints"))
    inside = []

    @asynccontextmanager
    async def observer_node(entrance):
        inside.extend(entrance.addresses)
        yield DHT
        inside.clear()

    async def find_manifest(dht, addresses, run_id):
        assert (dht, run_id) == (DHT, None)
        return "a run", checkpoint.manifest

    @asynccontextmanager
    async def open_transport(dht, metrics):
        assert (dht, inside) == (DHT, [f"/ip4/127.0.0.1/tcp/9/p2p/{ID}"])
        yield "a transport"

    async def fetch_snapshots(transport, directory, resolved, check):
        assert transport == "a transport"
        return [checkpoint.load_stage(stage) for stage in range(2)]

    monkeypatch.setattr(coordinator.watch.observer, "observer_node", observer_node)
    monkeypatch.setattr(coordinator.watch.observer, "find_manifest", find_manifest)
    monkeypatch.setattr(coordinator.checkpoints.model_folder, "open_transport", open_transport)
    monkeypatch.setattr(coordinator.checkpoints.model_folder, "fetch_snapshots", fetch_snapshots)
    run(monkeypatch, "--initial-peers", f"127.0.0.1:9/{ID}", "--output", tmp_path / "model")
    assert "after 1 optimizer steps" in capsys.readouterr().out
    assert_loads(tmp_path / "model", logits)
    assert inside == []


def test_a_certain_checkpoint_is_exported(tmp_path, monkeypatch):
    logits = train_and_save(trainers_of(), str(tmp_path), 3)
    run(monkeypatch, "--checkpoint", tmp_path, "--step", 1, "--output", tmp_path / "a")
    assert_loads(tmp_path / "a", logits[0])
    run(monkeypatch, "--checkpoint", tmp_path / "step-00000002", "--output", tmp_path / "b")
    assert_loads(tmp_path / "b", logits[1])


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, monkeypatch, caplog):
    logits = train_and_save(trainers_of(), str(tmp_path), 2)
    path = tmp_path / "step-00000002" / "stage-001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        run(monkeypatch, "--checkpoint", tmp_path, "--output", tmp_path / "model")
    assert "checkpoint_damaged" in caplog.text
    assert_loads(tmp_path / "model", logits[0])


def test_an_object_store_is_as_good_as_a_disk(tmp_path, monkeypatch):
    logits = train_and_save(trainers_of(), f"memory:/{tmp_path}", 1)
    run(monkeypatch, "--checkpoint", f"memory:/{tmp_path}", "--output", tmp_path / "model")
    assert_loads(tmp_path / "model", logits[0])


@pytest.fixture
def tokenizer_folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: i for i, character in enumerate([*alphabet, "<end>"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    return folder


def test_the_tokenizer_comes_along(tokenizer_folder, tmp_path, monkeypatch):
    (logits,) = train_and_save(trainers_of(tokenizer=str(tokenizer_folder)), str(tmp_path), 1)
    run(monkeypatch, "--checkpoint", tmp_path, "--output", tmp_path / "model")
    assert_loads(tmp_path / "model", logits)
    tokenizer, original = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "model", tokenizer_folder))
    assert tokenizer.encode("Grüße") == original.encode("Grüße")
    assert tokenizer.eos_token == "<end>"


def test_a_model_without_its_tokenizer_is_better_than_none_and_not_what_was_asked_for(
    tmp_path, monkeypatch, caplog, capsys
):
    (logits,) = train_and_save(trainers_of(tokenizer=str(tmp_path / "gone")), str(tmp_path), 1)
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--checkpoint", tmp_path, "--output", tmp_path / "model")
    assert ended.value.code == 1
    assert "the tokenizer was not saved beside the model" in capsys.readouterr().err
    assert "tokenizer_not_saved" in caplog.text
    assert_loads(tmp_path / "model", logits)


def test_a_folder_in_use_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    line = one_line_of(monkeypatch, capsys, "--checkpoint", "memory://none", "--output", tmp_path / "model")
    assert "is there already and is no empty folder: name another one, or remove it" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--checkpoint", "nowhere"], "there are no checkpoints in nowhere: correct the path"),
        (
            ["--checkpoint", "nowhere", "--step", "3"],
            "nowhere has no checkpoint of step 3: name one of those it has (none)",
        ),
        ([], "there is no run in runs: name the folder that a live run writes to, or an address of it"),
        (["gone"], "gone: no addresses of a run are kept there; name the folder that it writes to"),
        (["--checkpoint", "x", "gone"], "--checkpoint x: it is exported instead of a live run; name one of them only"),
        (["--initial-peers", "@y", "--step", "3"], "--step 3: a live run gives its newest snapshot only"),
        (["--checkpoint", "nonsense://x"], "cannot reach nonsense://x (Protocol not known: nonsense)"),
    ],
)
def test_sources_that_cannot_work(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert words in one_line_of(monkeypatch, capsys, *options, "--output", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_states_of_another_model_are_refused(tmp_path, monkeypatch, capsys):
    trainers = trainers_of()
    states = [StageState(round_number=1, history_hash="x", tensors=trainers[0].state()) for _ in range(2)]
    CheckpointStore(str(tmp_path)).save(1, trainers[0].manifest, states)
    line = one_line_of(monkeypatch, capsys, "--checkpoint", tmp_path, "--output", tmp_path / "model")
    assert "export needs the states of all stages" in line
    assert json.loads((tmp_path / "step-00000001" / "checkpoint.json").read_text())["optimizer_step"] == 1

"""What a run publishes: above all, that pretrained weights get the tokens that they know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import GPT2, LLAMA
from tiny_tokenizers import save_tokenizer

from coordinator.run.resolving import choose_tokenizer, resolve_manifest
from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model import pretrained
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.runtime.data.tokenizers import PretrainedTokenizer, load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def manifest_of(model: dict[str, Any], **data: Any) -> RunManifest:
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": model,
            "stages": {"count": 2},
            "data": {"sequence_length": 8} | data,
            "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A pretrained model without a tokenizer, of which the coordinator reads the config alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 300}))
    return folder


@pytest.fixture
def model(bare: Path) -> Path:
    """One with a tokenizer."""
    save_tokenizer(bare, {"<end>": 256}, ("<end>",))
    return bare


def resolved(folder: Path | str, **data: Any) -> DataSection:
    return resolve_manifest(manifest_of({"pretrained": str(folder)}, **data)).manifest.data


def refused(folder: Path | str, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolved(folder, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pretrained_model_brings_its_tokenizer(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    data = resolved(model)
    assert data.tokenizer == str(model)
    assert isinstance(load_tokenizer(data, 300), PretrainedTokenizer)
    assert f"tokenizer_chosen tokenizer={model}" in caplog.text


def test_what_is_published_is_resolved_to_the_same(model: Path) -> None:
    """A run that is resumed, or whose manifest a program has written again."""
    once = resolve_manifest(manifest_of({"pretrained": str(model)}))
    again = RunManifest.model_validate_json(once.manifest.canonical_json())
    assert resolve_manifest(again).hash == once.hash


def test_a_folder_here_is_named_as_such(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert resolved("model").tokenizer == "./model"


def test_a_model_without_a_tokenizer_needs_one_by_name(bare: Path) -> None:
    assert "comes without a tokenizer: name in data.tokenizer the one that it was trained with" in refused(bare)
    assert resolved(bare, tokenizer="bytes").tokenizer == "bytes"


def test_bytes_are_not_what_the_weights_know(model: Path) -> None:
    message = refused(model, tokenizer="bytes")
    assert (
        f"model.pretrained={str(model)!r} has a tokenizer of its own, and data.tokenizer='bytes' has other" in message
    )
    assert "leave data.tokenizer out, or name" in message
    assert "set data.foreign_tokenizer to true" in message
    assert resolved(model, tokenizer="bytes", foreign_tokenizer=True).tokenizer == "bytes"


def test_the_same_tokenizer_by_another_name_is_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    shutil.copytree(model, tmp_path / "copy")
    save_tokenizer(tmp_path / "with more", {"<end>": 256, "<chat>": 257}, ("<end>", "<chat>"))
    for name in (str(model), f"{model}/../model", "link", "copy", "with more"):
        name = name if "/" in name else str(tmp_path / name)
        assert resolved(model, tokenizer=name).tokenizer == name


def test_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_tokenizer(tmp_path / "other", {"<end>": 256, "word": 257}, ("<end>",))
    assert "has other tokens" in refused(model, tokenizer=other)
    assert resolved(model, tokenizer=other, foreign_tokenizer=True).tokenizer == other


def test_a_tokenizer_that_cannot_be_read_cannot_be_compared(bare: Path, tmp_path: Path) -> None:
    (bare / "tokenizer.json").write_text("{nope")
    other = save_tokenizer(tmp_path / "other", {"<end>": 256}, ("<end>",))
    assert "cannot be compared with it (cannot load data.tokenizer=" in refused(bare, tokenizer=other)
    assert "cannot load data.tokenizer=" in refused(bare)
    assert resolved(bare, tokenizer=other, foreign_tokenizer=True).tokenizer == other


def test_random_weights_know_no_tokens(model: Path) -> None:
    config = resolve_manifest(manifest_of({"config": GPT2 | {"vocab_size": 256}})).manifest
    assert config.data.tokenizer == "bytes"
    assert resolve_manifest(manifest_of({"config": str(model)})).manifest.data.tokenizer == "bytes"


def test_a_tokenizer_of_the_hub_is_of_the_weights_commit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    shutil.copytree(model, snapshot)
    monkeypatch.setattr(pretrained, "hf_hub_download", lambda name, file, **_: str(snapshot / file))
    source = ModelSource("someone/tiny")
    assert source.pinned() == f"someone/tiny@{COMMIT}"
    of_weights = ModelSource(source.pinned())
    unnamed = DataSection(sequence_length=8)
    assert choose_tokenizer(unnamed, of_weights).tokenizer == f"someone/tiny@{COMMIT}"
    for name in ("someone/tiny", f"someone/tiny@{COMMIT}"):
        assert choose_tokenizer(DataSection(sequence_length=8, tokenizer=name), of_weights).tokenizer == name
    with pytest.raises(UserError, match=r"data\.tokenizer='bytes' has other tokens"):
        choose_tokenizer(DataSection(sequence_length=8, tokenizer="bytes"), of_weights)


def test_a_published_vocabulary_that_is_too_small_is_told(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 256}))
    assert "ends a text with token 256, the model's vocab_size is 256: name another eos_token" in refused(model)


def test_the_text_of_a_chat_template_goes_with_the_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")
    chats = {"dataset": "json", "files": [f"{tmp_path}/data.jsonl"], "format": "messages"}
    assert "needs a chat template, and data.tokenizer=" in refused(model, **chats)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}")
    assert resolved(model, **chats, chat_template=str(template)).chat_template == template.read_text()
    assert resolved(model, **chats, chat_template=template.read_text()).chat_template == template.read_text()
    template.write_text("{{ message.content }")
    assert "correct data.chat_template" in refused(model, **chats, chat_template=str(template))
    missing = refused(model, **chats, chat_template="./no.jinja")
    assert missing.endswith("cannot be read: No such file or directory; give a template, or its file")

"""Tokenizers as they are published: spare tokens, holes, missing files and missing packages."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import ALPHABET, save_tokenizer
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import HubFailed, UserError
from swarm_peer.files import LFS_POINTER
from swarm_peer.policy.data.ranges import SliceId
from swarm_peer.runtime.data import slices, tokenizers
from swarm_peer.runtime.data.slices import SliceReader, sample_stream, samples_of, validation_samples
from swarm_peer.runtime.data.tokenizers import (
    BytesTokenizer,
    PretrainedTokenizer,
    UnknownToken,
    load_tokenizer,
    local_tokenizer,
    read_tokenizer,
)

SPARE = "<picture>"
WORDS = ["A", "stage", "is", "served", "by", "several", "peers", "."]


def section(name: str) -> DataSection:
    return DataSection(tokenizer=name, sequence_length=8)


def run_over(folder: Path, tokenizer: str, texts: list[str]) -> RunManifest:
    """A run over texts, of a model with 257 tokens."""
    (folder / "a.txt").write_text("\n\n".join(texts))
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {"model_type": "gpt2", "vocab_size": 257}},
            "stages": {"count": 1},
            "data": {"dataset": "text", "files": [f"{folder}/a.txt"], "tokenizer": tokenizer, "sequence_length": 8},
            "training": {"steps": 1, "global_batch_size": 1, "microbatch_size": 1},
            "optimizer": {"learning_rate": 0.1},
        }
    )


@pytest.fixture
def spare(tmp_path: Path) -> str:
    """Of a model with 257 tokens, with one token more, which no text has."""
    return save_tokenizer(tmp_path / "spare", {"<end>": 256, SPARE: 257}, ("<end>", SPARE))


# --- tokens that the model does not know ------------------------------------------------------------------------------


def test_a_spare_token_beyond_the_embedding_is_fine(spare: str) -> None:
    tokenizer = load_tokenizer(section(spare), 257)
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (258, 256)
    assert tokenizer.decode(tokenizer.encode("a picture")) == "a picture"
    with pytest.raises(UnknownToken, match=r"the token '<picture>', whose id is 257, .* is 257: leave it out"):
        tokenizer.encode(f"a {SPARE}")
    assert 257 in load_tokenizer(section(spare), 258).encode(f"a {SPARE}")


def test_a_document_with_an_unknown_token_is_dropped_counted_and_told(
    spare: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(section(spare), 257)
    assert tokenizer.encode_document("ab") == [*tokenizer.encode("ab"), 256]
    for _ in range(20):
        assert tokenizer.encode_document(f"a {SPARE}") == []
    assert tokenizer.num_dropped == 20
    told = [record.getMessage() for record in caplog.records if "documents_dropped" in record.getMessage()]
    assert [line.split()[1] for line in told] == ["documents=1", "documents=10"]
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name.startswith("swarm_peer"))


def test_samples_are_of_the_other_documents(spare: str, tmp_path: Path) -> None:
    texts = [f"text number {i} {SPARE if i % 3 == 0 else ''}".strip() for i in range(60)]
    run = run_over(tmp_path, spare, texts)
    windows = [tokens for _, tokens in SliceReader(manifest=run).open(SliceId(0, 0))]
    assert windows
    assert max(int(tokens.max()) for tokens in windows) == 256
    samples = samples_of(run, texts, 1000)
    assert samples is not None
    kept = sum(len(text) + 1 for text in texts if SPARE not in text)
    assert len(samples) == (kept - 1) // 8
    assert samples_of(run, ["short"], 1) is None


def test_text_of_which_nothing_is_left_is_told(spare: str, tmp_path: Path) -> None:
    run = run_over(tmp_path, spare, [f"{SPARE} {i}" for i in range(60)])
    expected = "has given 60 documents tokens that the model does not know, and without these the text is too short"
    with pytest.raises(UserError, match=expected):
        samples_of(run, [SPARE] * 60, 1)
    with pytest.raises(UserError, match=r"documents tokens that the model does not know, .* take the model's own"):
        next(sample_stream(run, "a"))


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_a_tokenizer_that_does_not_know_the_text_is_refused(
    unknown: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "words"
    model = models.WordLevel if unknown else models.BPE
    alphabet = sorted(set("".join(WORDS)))
    ids = {token: id_ for id_, token in enumerate(["<end>", *([unknown] if unknown else []), *WORDS, *alphabet])}
    core = Tokenizer(model(ids, unk_token=unknown) if unknown else model(ids, []))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token=unknown).save_pretrained(folder)
    for texts in (["日本語 の 文書"] * 40, ["A stage", "日本語の文書です。これは長い"] * 20):
        slices._held_out.cache_clear()
        run = run_over(tmp_path, str(folder), [f"{text} {'пять' * n}" for n, text in enumerate(texts)])
        for attempt in (lambda run=run: validation_samples(run, 1), lambda run=run: next(sample_stream(run, "a"))):
            with pytest.raises(UserError, match=r"words' knows \d+% of the letters and digits of this text, .*: take"):
                attempt()
    slices._held_out.cache_clear()
    run = run_over(tmp_path, str(folder), [f"{' '.join(WORDS)} by 日本語 {'A ' * n}" for n in range(40)])
    next(sample_stream(run, "a"))
    assert "tokenizer_knows_few tokenizer=" in caplog.text


def test_a_text_that_a_tokenizer_has_no_word_for_is_dropped_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {word: id_ for id_, word in enumerate([*WORDS, "<end>"])}
    core = Tokenizer(models.WordLevel(ids, unk_token="none"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(section(str(tmp_path)), 257)
    assert tokenizer.encode_document("A peer is served") == []
    assert tokenizer.encode_document("A stage is served") == [0, 1, 2, 3, 8]
    assert "documents_dropped documents=1 reason=the tokenizer does not know a part of a text (" in caplog.text


def test_a_tokenizer_that_fits_is_not_checked(spare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of each text costs time where the model has all tokens, as nearly all have."""
    tokenizer = load_tokenizer(section(spare), 258)
    monkeypatch.setattr(tokenizers, "max", None, raising=False)
    assert tokenizer.encode("abc")


@pytest.mark.parametrize(("extra", "is_taken"), [(2, True), (3, False), (5000, False)])
def test_another_models_tokenizer_is_refused_at_the_start(tmp_path: Path, extra: int, is_taken: bool) -> None:
    """A hundredth of the tokens that text is made of may be beyond the embedding: models have been pruned so."""
    name = save_tokenizer(tmp_path / "other", {"<end>": 256, **{f"more{i}": 257 + i for i in range(extra)}})
    if is_taken:
        assert load_tokenizer(section(name), 257).vocab_size == 257 + extra
        return
    with pytest.raises(UserError, match=rf"has {257 + extra} tokens, the model's vocab_size is 257: take the model's"):
        load_tokenizer(section(name), 257)


def test_the_separator_is_checked_at_the_start(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path / "pruned", {"<stop>": 900}, ("<stop>",), end="<stop>")
    with pytest.raises(UserError, match=r"ends a text with token 900, the model's vocab_size is 512: name another"):
        load_tokenizer(section(name), 512)
    tokenizer = load_tokenizer(section(name), 901)
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (901, 900)
    name = save_tokenizer(tmp_path / "added", {})  # whose end is added behind the others
    with pytest.raises(UserError, match=r"ends a text with token 256, the model's vocab_size is 256"):
        load_tokenizer(section(name), 256)


def test_bytes_that_no_text_has_may_be_unknown() -> None:
    assert load_tokenizer(section("bytes"), 254).encode("é\udcff") == [0xC3, 0xA9, ord("?")]
    with pytest.raises(UserError, match="'bytes' has 256 tokens, the model's vocab_size is 200"):
        load_tokenizer(section("bytes"), 200)


def test_odd_text_and_odd_ids(spare: str) -> None:
    """Scraped text holds halves of characters; a model may have more ids than its tokenizer."""
    tokenizer = load_tokenizer(section(spare), 300)
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a?b"
    assert tokenizer.decode([*tokenizer.encode("ab"), 299]) == "ab"


def test_a_saved_tokenizer_is_the_same(spare: str, tmp_path: Path) -> None:
    read_tokenizer(spare, None).save(tmp_path / "saved")
    again = load_tokenizer(section(str(tmp_path / "saved")), 257)
    assert (again.vocab_size, again.separator_id) == (258, 256)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "<end>"


def test_a_class_that_has_not_all_of_transformers_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that mistral-common brings."""

    class Odd:
        eos_token_id, all_special_ids = 256, [256]

        def get_vocab(self) -> dict[str, int]:
            return {**{token: i for i, token in enumerate(ALPHABET)}, "<end>": 256}

        def added_tokens_decoder(self) -> None:
            raise NotImplementedError

        def encode(self, text: str, **_: Any) -> list[int]:
            return list(text.encode())

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Odd())
    tokenizer = load_tokenizer(section(str(tmp_path)), 257)
    assert (tokenizer.separator_id, tokenizer.encode("é\udcff")) == (256, [0xC3, 0xA9, ord("?")])
    Odd.eos_token_id = None  # type: ignore[assignment]
    assert "name it as eos_token in a tokenizer_config.json" in refused(str(tmp_path))


# --- what the same ids mean -------------------------------------------------------------------------------------------


def test_tokenizers_mean_the_same_if_text_gives_the_same_ids(tmp_path: Path, spare: str) -> None:
    def means_the_same(folder: str, extra: dict[str, int], *added: str) -> bool:
        other = read_tokenizer(save_tokenizer(tmp_path / folder, extra, added), None)
        return other.means_the_same(ours) and ours.means_the_same(other)

    ours = read_tokenizer(spare, None)
    assert means_the_same("equal", {"<end>": 256, SPARE: 257}, "<end>", SPARE)
    assert means_the_same("without", {"<end>": 256}, "<end>")
    assert means_the_same("with more", {"<end>": 256, "<chat>": 257}, "<end>", "<chat>")
    assert not means_the_same("moved", {"<end>": 257, SPARE: 256}, "<end>", SPARE)
    assert not means_the_same("larger", {"<end>": 256, "word": 257}, "<end>")


# --- what ends a text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "has_settings", "separator_id", "told"),
    [
        ({"eos_token_id": 258}, True, 258, "eos_token_id of its config.json ends each text: '<other>', token 258"),
        ({"eos_token_id": [258, 3]}, False, 258, "eos_token_id of its config.json ends each text"),
        ({"text_config": {"eos_token_id": 258}}, True, 258, "eos_token_id of its config.json ends each text"),
        ({"eos_token_id": 999}, True, 257, "its bos_token ends each text: '<begin>', token 257"),
        (None, True, 257, "its bos_token ends each text: '<begin>', token 257"),
        ({"eos_token_id": None}, False, None, "has no end-of-text token to separate documents"),
    ],
)
def test_a_tokenizer_that_names_no_end_of_text_has_that_of_the_model_beside_it(
    tmp_path: Path,
    config: dict[str, Any] | None,
    has_settings: bool,
    separator_id: int | None,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_tokenizer(tmp_path, {"<end>": 256, "<begin>": 257, "<other>": 258}, ("<end>", "<begin>", "<other>"))
    if has_settings:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    else:
        (tmp_path / "tokenizer_config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if separator_id is None:
        assert told in refused(str(tmp_path))
        return
    assert load_tokenizer(section(str(tmp_path)), 259).separator_id == separator_id
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("swarm_peer")]
    assert line.startswith(f"tokenizer_assumed tokenizer={tmp_path} reason=it names no eos_token, and so ")
    assert told in line


# --- what is missing --------------------------------------------------------------------------------------------------


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        read_tokenizer(name, None)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, HubFailed), "nobody tries again"
    return str(caught.value)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine without a package."""
    real = importlib.util.find_spec

    def hide(package: str) -> None:
        def find(name: str, *arguments: Any) -> Any:
            return None if name == package else real(name, *arguments)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return hide


@pytest.mark.parametrize(
    ("file", "content", "package", "module"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece", "sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken", "tiktoken"),
        ("spiece.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece", "sentencepiece"),
        ("tekken.json", b'{"config": {}, "vocab": []}', "mistral-common", "mistral_common"),
    ],
)
@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_a_missing_package_is_named(
    tmp_path: Path, without: Callable[[str], None], file: str, content: bytes, package: str, module: str, config: Any
) -> None:
    without(module)
    (tmp_path / file).write_bytes(content)
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = f"needs the package {package}: pip install {package}, on each machine that reads it"
    assert expected in refused(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (
            "config.json",
            b'{"model_type": "llama", "tie_word_embeddings": null}',
            "transformers refuses its config.json (TypeError: Field 'tie_word_embeddings' expected bool, got NoneType",
        ),
        (
            "config.json",
            b'\xef\xbb\xbf{"model_type": "llama"}',
            "its config.json is no JSON in UTF-8 (it begins with a",
        ),
        ("config.json", b'{"model_type":', "its config.json is no JSON in UTF-8 (Expecting value"),
        ("tokenizer.json", LFS_POINTER + b"v1\noid", "its tokenizer.json is a pointer of Git LFS, not the file itself"),
    ],
)
def test_a_damaged_file_is_named(spare: str, file: str, content: bytes, reason: str) -> None:
    Path(spare, file).write_bytes(content)
    assert refused(spare).startswith(f"cannot load data.tokenizer={spare!r}: {reason}")


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["some plain words"] * 50, 300, special_tokens=["<|endoftext|>"])
    folder = tmp_path / "byte level"
    folder.mkdir()
    trained.save_model(str(folder))
    return folder


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
@pytest.mark.parametrize("config", [None, "config.json"])
def test_gpt2s_two_files_are_enough(byte_level: Path, names: tuple[str, str], config: str | None) -> None:
    """By transformers' names, which it reads itself where it knows the model, and by OpenAI's."""
    text = "some plain words, Grüße\n\n 12345 \udcff"
    expected = AutoTokenizer.from_pretrained(_with(byte_level, "tokenizer_config.json", "GPT2Tokenizer"))
    (byte_level / "tokenizer_config.json").unlink()
    if config is not None:
        (byte_level / config).write_text('{"model_type": "gpt2"}')
    for old, new in zip(("vocab.json", "merges.txt"), names, strict=True):
        (byte_level / old).rename(byte_level / new)
    tokenizer = read_tokenizer(str(byte_level), None)
    assert tokenizer.encode(text) == expected.encode(text.replace("\udcff", "?"), add_special_tokens=False)
    assert tokenizer.separator_id == expected.eos_token_id


def _with(folder: Path, file: str, tokenizer_class: str) -> Path:
    (folder / file).write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    return folder


def test_two_files_that_are_something_else_are_not_taken_for_gpt2s(byte_level: Path) -> None:
    vocabulary = json.loads((byte_level / "vocab.json").read_text())
    for changed in (
        {token: i for token, i in vocabulary.items() if token != "<|endoftext|>"},
        {token: i for token, i in vocabulary.items() if token != "Ġ"},
        ["a list"],
    ):
        (byte_level / "vocab.json").write_text(json.dumps(changed))
        assert "add a tokenizer_config.json that names their tokenizer_class" in refused(str(byte_level))


def test_a_folder_without_a_vocabulary_is_told_what_it_holds(tmp_path: Path) -> None:
    assert "it is empty; put tokenizer.json, tokenizer.model, or vocab.json and" in refused(str(tmp_path))
    for name in "abcdefg":
        (tmp_path / f"{name}.bin").touch()
    assert "it holds a.bin, b.bin, c.bin, d.bin, e.bin, f.bin and more; put" in refused(str(tmp_path))
    assert f"name the folder that this file is in, {tmp_path}" in refused(str(tmp_path / "a.bin"))


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_hub_name_may_have_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: str) -> None:
    asked = []

    def from_pretrained(name: str, **options: Any) -> Any:
        asked.append((name, options["revision"], options["trust_remote_code"]))
        return PreTrainedTokenizerFast.from_pretrained(spare)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)
    for name in ("someone/tiny@0123abc", "someone/tiny", f"{spare}"):
        assert isinstance(read_tokenizer(name, None), PretrainedTokenizer)
    assert asked == [("someone/tiny", "0123abc", False), ("someone/tiny", "main", False), (spare, "main", False)]
    assert local_tokenizer(section("someone/tiny@0123abc")) is None
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert local_tokenizer(section("someone/tiny@0123abc")) == Path("someone/tiny"), "transformers would read it"
    assert "there is a folder 'someone/tiny' here" in refused("someone/tiny@0123abc")


def test_bytes_are_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()
    assert local_tokenizer(section("bytes")) is None
    assert isinstance(load_tokenizer(section("bytes"), 256), BytesTokenizer)

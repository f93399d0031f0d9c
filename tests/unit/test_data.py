"""The data source: which documents, in which order, as which samples. Without a hub; with real tiny files."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime import data
from swarm_peer.runtime.data import SampleStream, validation_samples
from swarm_peer.runtime.tokenizers import BytesTokenizer, load_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported, so not from a fixture

LENGTH = 32


@pytest.fixture(autouse=True)
def _forget_held_out() -> None:
    data._held_out.cache_clear()


def manifest(seed: int = 0, vocab_size: int = 256, **section: Any) -> RunManifest:
    return RunManifest.model_validate(
        {
            "name": "test",
            "seed": seed,
            "model": {"config": {"model_type": "gpt2", "vocab_size": vocab_size}},
            "stages": {"count": 2},
            "data": {"sequence_length": LENGTH, **section},
            "training": {"steps": 1, "global_batch_size": 1, "microbatch_size": 1},
            "optimizer": {"learning_rate": 0.1},
        }
    )


def paragraphs(count: int, start: int = 0) -> list[str]:
    """Distinct documents of different lengths, each of which says which one it is."""
    return [f"<{i}> " + "lorem ipsum " * (i % 5) + f"</{i}>" for i in range(start, start + count)]


def write(folder: Path, kind: str, documents: list[str], name: str = "data", field: str = "text") -> str:
    path = folder / f"{name}.{kind}"
    if kind == "text":
        path.write_text("\n\n".join(documents))
    elif kind == "json":
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({field: documents}), path)
    return str(path)


def take(stream: SampleStream, count: int) -> np.ndarray:
    return np.stack(list(islice(stream, count)))


def documents_of(samples: np.ndarray) -> list[str]:
    """The whole documents in a run of consecutive samples: without the token that successive windows share."""
    tokens = [*samples[:, :-1].reshape(-1), samples[-1, -1]]
    return BytesTokenizer().decode([int(token) for token in tokens]).split("\0")[:-1]


def first_documents(run: RunManifest, stream_id: str, count: int) -> list[str]:
    """In the order in which a stream reads them, before the samples made of them are shuffled."""
    return list(itertools.islice(SampleStream(run, stream_id)._documents(), count))


# --- order


def test_same_stream_id_gives_the_same_samples(tmp_path: Path) -> None:
    run = manifest(dataset="text", files=[write(tmp_path, "text", paragraphs(200))], shuffle_buffer=16)
    first, again = take(SampleStream(run, "a"), 600), take(SampleStream(run, "a"), 600)
    assert first.shape == (600, LENGTH + 1)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, again)


def test_the_order_is_the_same_in_another_process(tmp_path: Path) -> None:
    run = manifest(dataset="json", files=[write(tmp_path, "json", paragraphs(50))])
    code = (
        "import sys; from swarm_peer.config import RunManifest; from swarm_peer.runtime.data import SampleStream\n"
        "stream = SampleStream(RunManifest.model_validate_json(sys.argv[1]), 'a')\n"
        "sys.stdout.write(b''.join(next(stream).tobytes() for _ in range(20)).hex())"
    )
    command = [sys.executable, "-c", code, run.canonical_json().decode()]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50, env=environment).stdout
    assert bytes.fromhex(output) == take(SampleStream(run, "a"), 20).tobytes()


@pytest.mark.parametrize(("seed", "stream_id"), [(0, "b"), (1, "a")])
def test_another_id_or_seed_gives_another_order(tmp_path: Path, seed: int, stream_id: str) -> None:
    section = {"dataset": "text", "files": [write(tmp_path, "text", paragraphs(500))], "shuffle_buffer": 4}
    run, other = manifest(**section), manifest(seed=seed, **section)
    kept = 500 - 50
    mine, theirs = first_documents(run, "a", kept), first_documents(other, stream_id, kept)
    # Even with a tiny buffer the two read different parts of the one file at the same time.
    at_once = [len(set(mine[i : i + 25]) & set(theirs[i : i + 25])) for i in range(0, kept, 25)]
    assert sum(at_once) < kept / 4


def test_a_pass_has_every_document_once_and_the_next_one_another_order(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "text", paragraphs(30), name="one"),
        write(tmp_path, "text", paragraphs(30, start=30), name="two"),
    ]
    run = manifest(dataset="text", files=files, shuffle_buffer=8)
    kept = 60 - 6
    both = first_documents(run, "a", 2 * kept)
    assert len(set(both[:kept])) == kept
    assert sorted(both[:kept]) == sorted(both[kept:])
    assert both[:kept] != both[kept:]
    assert set(both) < set(paragraphs(60))


def test_samples_of_one_document_do_not_come_in_a_row(tmp_path: Path) -> None:
    run = manifest(dataset="text", files=[write(tmp_path, "text", paragraphs(200))], shuffle_buffer=64)
    in_order = manifest(dataset="text", files=list(run.data.files), shuffle_buffer=1)
    stream = SampleStream(in_order, "a")
    overlaps = sum(a[-1] == b[0] for a, b in itertools.pairwise(itertools.islice(stream, 100)))
    shuffled = sum(a[-1] == b[0] for a, b in itertools.pairwise(itertools.islice(SampleStream(run, "a"), 100)))
    assert overlaps == 99, "successive windows share a token"
    assert shuffled < 50


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_shuffle_buffer_loses_nothing_and_holds_no_more_than_its_size(size: int) -> None:
    documents = paragraphs(100)
    shuffled = list(data._shuffled(documents, size, random.Random(0)))
    assert sorted(shuffled) == sorted(documents)
    assert (shuffled == documents) == (size == 1)
    # What comes out at position i was read by then, so at most `size` documents are held at any time.
    assert all(documents.index(text) <= i + size for i, text in enumerate(shuffled))


# --- samples


@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1), max_size=8),
    length=st.integers(2, 12),
)
def test_packing_loses_and_invents_nothing(texts: list[str], length: int) -> None:
    windows = list(data._pack(texts, BytesTokenizer(), length))
    expected = [token for text in texts for token in [*text.encode(), 0]]
    assert all(window.shape == (length + 1,) for window in windows)
    for this, following in pairwise(windows):
        assert this[-1] == following[0]
    predicted = [int(token) for window in windows for token in window[1:]]
    assert predicted == expected[1 : 1 + len(predicted)]
    assert len(expected) - 1 - len(predicted) < length


@given(st.text(st.sampled_from("ab \n"), max_size=200))
def test_cut_pieces_are_short_and_make_the_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "MAX_DOCUMENT_CHARS", 16)
        pieces = list(data._cut(text))
    assert all(0 < len(piece) <= 16 and not piece.isspace() for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_a_text_file_without_blank_lines_is_cut(tmp_path: Path) -> None:
    lines = [f"line {i:06d}\n" for i in range(20_000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(lines))
    run = manifest(dataset="text", files=[str(path)])
    for document in first_documents(run, "a", 3):
        assert re.fullmatch(r"(line \d{6}\n)+", document)
    assert validation_samples(run, 4).shape == (4, LENGTH + 1)


# --- data sets


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_files_and_globs(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "brackets [1]"
    folder.mkdir()
    write(folder, kind, paragraphs(20), name="one")
    write(folder, kind, paragraphs(20, start=20), name="two")
    (folder / f"empty.{kind}").touch()
    pattern = str(tmp_path / "brackets*" / f"*.{kind}")
    run = manifest(dataset=kind, files=[pattern])
    assert set(first_documents(run, "a", 36)) < set(paragraphs(40))


def test_a_field_of_another_name_and_documents_that_are_null_or_blank(tmp_path: Path) -> None:
    documents = paragraphs(20)
    path = write(tmp_path, "json", [None, *documents, " \n"], field="body")  # type: ignore[list-item]
    run = manifest(dataset="json", files=[path], text_field="body")
    assert set(first_documents(run, "a", 18)) < set(documents)


def test_embedded_text_is_there_and_spread() -> None:
    run = manifest()
    held_out = data._held_out(run.data, 0, None)
    assert 32 <= len(held_out) <= run.data.validation_documents
    assert take(SampleStream(run, "a"), 50).shape == (50, LENGTH + 1)
    samples = validation_samples(run, 32)
    texts = [BytesTokenizer().decode(sample.tolist()).split("\0")[0] for sample in samples]
    sources = {key for key, document in held_out.items() for text in texts if text in document}
    assert len(sources) > 16
    assert any("import " in document for document in held_out.values())


# --- validation


@pytest.mark.parametrize("num_files", [1, 3])
def test_streams_never_yield_what_is_held_out(tmp_path: Path, num_files: int) -> None:
    # Every document is there twice: what is held out is held out wherever it turns up.
    files = [write(tmp_path, "text", paragraphs(40), name=f"file{i}") for i in range(num_files)]
    files.append(write(tmp_path, "text", paragraphs(40), name="copy"))
    run = manifest(dataset="text", files=files, validation_documents=3)
    held_out = set(data._held_out(run.data, run.seed, None).values())
    assert 1 <= len(held_out) <= 3
    streamed = set(first_documents(run, "a", 5 * 40)) | set(first_documents(run, "b", 5 * 40))
    assert streamed == set(paragraphs(40)) - held_out


def test_validation_samples_are_made_of_held_out_documents_alone(tmp_path: Path) -> None:
    run = manifest(dataset="text", files=[write(tmp_path, "text", paragraphs(300))])
    held_out = data._held_out(run.data, run.seed, None)
    assert len(held_out) == 30  # at most a tenth
    samples = validation_samples(run, 10_000)
    np.testing.assert_array_equal(samples, validation_samples(run, 10_000))
    assert len(samples) < 10_000  # as many as there are
    assert set(documents_of(samples)) <= set(held_out.values())
    assert validation_samples(run, 5).shape == (5, LENGTH + 1)
    assert {sample.tobytes() for sample in validation_samples(run, 5)} < {sample.tobytes() for sample in samples}


def test_another_seed_holds_out_other_documents(tmp_path: Path) -> None:
    path = write(tmp_path, "text", paragraphs(300))
    runs = [manifest(seed=seed, dataset="text", files=[path]) for seed in (0, 1)]
    assert not np.array_equal(validation_samples(runs[0], 8), validation_samples(runs[1], 8))


# --- what cannot work


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dataset": "text", "files": ["TMP/no.txt"]}, r"data\.files: '.*no\.txt' names no file"),
        ({"dataset": "json", "files": ["TMP/good.json", "TMP/*.nothing"]}, r"'.*\*\.nothing' names no file"),
        ({"dataset": "text", "files": ["TMP/empty.text"]}, r"all of \[.*\] are empty: add text"),
        ({"dataset": "text", "files": ["TMP/blank.text"]}, r"has no distinct document.*add text"),
        ({"dataset": "text", "files": ["TMP/single.text"]}, r"has 1 distinct document.*one to hold out"),
        (
            {"dataset": "json", "files": ["TMP/good.json"], "text_field": "body"},
            r"'body' is no field.*it has other, te",
        ),
        ({"dataset": "json", "files": ["TMP/good.json"], "text_field": "other"}, r"'other'.* holds int, not text"),
        ({"dataset": "json", "files": ["TMP/broken.json"]}, r"cannot read data\.dataset='json', files=.*; check the"),
        ({"dataset": "parquet", "files": ["TMP/broken.json"]}, r"cannot read data\.dataset='parquet'.*; check the"),
        ({"dataset": "text", "files": ["TMP/latin.text"]}, r"cannot read .*utf-8.*; check the files"),
        ({"dataset": "swarm/no-such-data"}, r"cannot read data\.dataset='swarm/no-such-data': .*connection to the hub"),
        ({"dataset": "text", "files": ["TMP/good.text"], "sequence_length": 4096}, r"too short for one sample.*4096"),
    ],
)
def test_bad_data_is_one_line_that_names_it(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    write(tmp_path, "text", paragraphs(20), name="good")
    (tmp_path / "good.json").write_text("".join(json.dumps({"text": p, "other": 1}) + "\n" for p in paragraphs(20)))
    (tmp_path / "broken.json").write_text('{nope\n{"text": 1}\n')
    (tmp_path / "empty.text").touch()
    (tmp_path / "blank.text").write_text(" \n\n \n\n\n\n")
    (tmp_path / "single.text").write_text("only one")
    (tmp_path / "latin.text").write_bytes("déjà vu".encode("latin-1"))
    section = {**section, "files": [name.replace("TMP", str(tmp_path)) for name in section.get("files", ())]}
    with pytest.raises(UserError, match=message) as caught:
        validation_samples(manifest(**section), 4)
    assert "\n" not in str(caught.value)


def test_a_stream_reports_bad_data_each_time_it_is_asked(tmp_path: Path) -> None:
    stream = SampleStream(manifest(dataset="text", files=[str(tmp_path / "no.txt")]), "a")
    for _ in range(2):
        with pytest.raises(UserError, match="names no file"):
            next(stream)


def test_a_data_set_that_is_all_held_out_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = manifest(dataset="text", files=[write(tmp_path, "text", paragraphs(20))])
    everything = {data._fingerprint(text, run.seed): text for text in paragraphs(20)}
    monkeypatch.setattr(data, "_held_out", lambda *_: everything)
    with pytest.raises(UserError, match="no text but what is held out"):
        next(SampleStream(run, "a"))


# --- tokenizers


def test_bytes_go_there_and_back() -> None:
    tokenizer = load_tokenizer(manifest().data, 256)
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
    assert tokenizer.separator_id == 0
    tokenizer.encode("\udcff")  # half a surrogate pair is no reason to stop a run


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    return folder


def test_a_pretrained_tokenizer(tmp_path: Path, tokenizer_folder: Path) -> None:
    files = [write(tmp_path, "text", paragraphs(20))]
    run = manifest(vocab_size=300, dataset="text", files=files, tokenizer=str(tokenizer_folder), shuffle_buffer=1)
    tokenizer = load_tokenizer(run.data, 300)
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (257, 256)
    assert tokenizer.decode(tokenizer.encode("Grüße , don 't")) == "Grüße , don 't"
    tokens = take(SampleStream(run, "a"), 40)[:, :-1].reshape(-1).tolist()
    documents = tokenizer.decode(tokens).split("<end>")
    assert set(documents[:-1]) < set(paragraphs(20))


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer_folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"has 257 tokens, the model's vocab_size is 256: set vocab_size .* 257 or more"
    ):
        load_tokenizer(manifest(tokenizer=str(tokenizer_folder)).data, 256)
    with pytest.raises(UserError, match=r"'bytes' has 256 tokens, the model's vocab_size is 100"):
        load_tokenizer(manifest().data, 100)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no such folder"),
        ({}, "cannot load data.tokenizer"),
        ({"config.json": '{"model_type": "gpt2"}'}, "its vocabulary is missing"),
        ({"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}, "its vocabulary is missing"),
        ({"config.json": '{"model_type": "gpt2"}', "tokenizer.json": "{nope"}, "cannot load data.tokenizer"),
    ],
)
def test_an_unreadable_tokenizer_is_refused(tmp_path: Path, files: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "broken"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(manifest(tokenizer=str(folder)).data, 256)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_on_a_hub_that_cannot_be_reached() -> None:
    with pytest.raises(UserError, match=r"cannot load data\.tokenizer='gpt2': .*give bytes, a folder"):
        load_tokenizer(manifest(tokenizer="gpt2").data, 50257)


def test_the_vocabulary_of_a_model_that_does_not_state_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 123}')
    run = manifest()
    for config, vocab_size in (({"model_type": "gpt2", "tie_word_embeddings": False}, 50257), (str(tmp_path), 123)):
        model = run.model.model_copy(update={"config": config})
        assert data._vocab_size(run.model_copy(update={"model": model})) == vocab_size


def test_importing_is_cheap() -> None:
    code = (
        "import sys; import swarm_peer.runtime.data\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50).stdout
    assert output.strip() == "[]"

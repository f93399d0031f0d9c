"""The corpus, its slices and its samples. Without a hub; with real tiny files."""

from __future__ import annotations

import gzip
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
from chat_templates import CHATML
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.data.ranges import SliceId, Uncounted
from swarm_peer.runtime.data import corpus as documents
from swarm_peer.runtime.data import records
from swarm_peer.runtime.data import slices as data
from swarm_peer.runtime.data.slices import (
    MIN_SLICES,
    OPEN_SLICES,
    SliceReader,
    sample_stream,
    validation_samples,
)
from swarm_peer.runtime.data.tokenizers import BytesTokenizer, load_tokenizer
from swarm_peer.token_marks import are_learnt, begin_documents, ids_of

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
    elif kind == "csv":
        path.write_text("\n".join([field, *documents]))
    elif kind == "json":
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({field: documents}), path)
    return str(path)


def take(stream: sample_stream, count: int) -> np.ndarray:
    return np.stack(list(islice(stream, count)))


def documents_of(samples: np.ndarray) -> list[str]:
    """The whole documents in a run of consecutive samples: without the token that successive windows share."""
    tokens = [*samples[:, :-1].reshape(-1), samples[-1, -1]]
    return BytesTokenizer().decode([int(token) for token in tokens]).split("\0")[:-1]


def documents_in(run: RunManifest, pass_number: int = 0) -> list[str]:
    """All that a pass reads, in the order of its slices."""
    reader = SliceReader(manifest=run)
    slices = [SliceId(pass_number, index) for index in range(reader.num_slices())]
    return [text for slice_id in slices for text in reader._documents(slice_id)]


def windows_of(run: RunManifest, slice_id: SliceId, left: Uncounted = data.ALL_WINDOWS) -> dict[int, bytes]:
    return {window: tokens.tobytes() for window, tokens in SliceReader(manifest=run).open(slice_id, left)}


def one_slice(folder: Path, count: int = 200, **section: Any) -> RunManifest:
    """Data that is too small for two slices: a window is 33 bytes, a slice at least 4096."""
    run = manifest(dataset="json", files=[write(folder, "json", paragraphs(count, start=10_000))], **section)
    assert SliceReader(manifest=run).num_slices() == count * 45 // 4096
    return run


def many_slices(folder: Path, num_files: int = 1, **section: Any) -> RunManifest:
    texts = [" ".join(f"{i}:{j}" for j in range(70)) for i in range(1000)]
    share = 1000 // num_files
    files = [write(folder, "text", texts[n * share :][:share], name=f"file{n:02d}") for n in range(num_files)]
    return manifest(dataset="text", files=files, **section)


# --- slices


@pytest.mark.parametrize(("num_files", "num_slices"), [(1, 64), (3, 66), (50, 100), (100, 64)])
def test_files_are_cut_or_joined_into_slices(tmp_path: Path, num_files: int, num_slices: int) -> None:
    run = many_slices(tmp_path, num_files)
    assert SliceReader(manifest=run).num_slices() == num_slices
    texts = documents_in(run)
    assert len(set(texts)) == len(texts) == 1000 // num_files * num_files - 64


def test_a_slice_is_not_much_shorter_than_some_samples(tmp_path: Path) -> None:
    run = many_slices(tmp_path)
    longer = many_slices(tmp_path, sequence_length=16 * LENGTH)
    assert SliceReader(manifest=longer).num_slices() in range(6, 16)
    for some in (run, longer):
        reader = SliceReader(manifest=some)
        num_windows = [len(list(reader.open(SliceId(0, index)))) for index in range(reader.num_slices())]
        kept = sum(num_windows) * some.data.sequence_length
        assert kept > 0.95 * sum(len(text) + 1 for text in documents_in(some))


@pytest.mark.parametrize(
    ("num_slices", "num_readers", "most"),
    [(1, 1, 2), (64, 1, 4), (64, 16, 4), (64, 17, 3), (64, 32, 2), (100, 1, 6), (128, 1, 8), (10_000, 100, 8)],
)
def test_where_slices_are_few_a_peer_reads_few_at_a_time(
    num_slices: int, num_readers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SliceReader(manifest=manifest())
    monkeypatch.setattr(reader, "num_slices", lambda: num_slices)
    assert reader.num_at_a_time(num_readers) == most
    assert num_slices < MIN_SLICES or most * num_readers <= num_slices


def test_the_number_of_slices_does_not_depend_on_the_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    count = SliceReader(manifest=manifest()).num_slices()
    shards = documents.open_shards(manifest().data, None)
    monkeypatch.setattr(data, "open_shards", lambda *_: shards[:500])
    assert SliceReader(manifest=manifest()).num_slices() == count == MIN_SLICES


def test_shards_of_unknown_size_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    section = manifest(dataset="some/name").data
    assert data._cut_shards(1, section) == (1, 64)
    assert data._cut_shards(40, section) == (40, 2)
    assert data._cut_shards(10_000, section) == (10_000, 1)
    monkeypatch.setattr(data, "MAX_SLICES", 1000)
    assert data._cut_shards(10_000, section) == (1000, 1)


def test_a_slice_is_the_same_for_everybody_and_each_time(tmp_path: Path) -> None:
    run = many_slices(tmp_path, shuffle_buffer=64)
    first = windows_of(run, SliceId(2, 7))
    assert list(first) == list(range(len(first)))
    assert len(set(first.values())) > 0.9 * len(first)
    assert windows_of(run, SliceId(2, 7)) == first
    samples = [tokens for _, tokens in SliceReader(manifest=run).open(SliceId(2, 7))]
    assert all(tokens.shape == (LENGTH + 1,) and tokens.dtype == np.int32 for tokens in samples)


def test_slices_are_the_same_in_another_process(tmp_path: Path) -> None:
    run = many_slices(tmp_path)
    code = (
        "import sys; from swarm_peer.config import RunManifest; from swarm_peer.runtime.data.slices import *\n"
        "from swarm_peer.policy.data.ranges import SliceId\n"
        "run = RunManifest.model_validate_json(sys.argv[1])\n"
        "windows = [tokens.tobytes() for _, tokens in SliceReader(manifest=run).open(SliceId(1, 5))]\n"
        "stream = sample_stream(run, 'a')\n"
        "samples = [next(stream).tobytes() for _ in range(20)]\n"
        "sys.stdout.write(b''.join(windows + samples).hex())"
    )
    command = [sys.executable, "-c", code, run.canonical_json().decode()]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50, env=environment).stdout
    windows = b"".join(windows_of(run, SliceId(1, 5)).values())
    assert bytes.fromhex(output) == windows + take(sample_stream(run, "a"), 20).tobytes()


def test_other_slices_passes_and_seeds_give_other_samples(tmp_path: Path) -> None:
    run, other = many_slices(tmp_path), many_slices(tmp_path, seed=1)
    mine = windows_of(run, SliceId(0, 3))
    assert not set(mine.values()) & set(windows_of(run, SliceId(0, 4)).values())
    for theirs in (windows_of(run, SliceId(1, 3)), windows_of(other, SliceId(0, 3))):
        assert sum(mine[window] == theirs[window] for window in mine.keys() & theirs.keys()) < len(mine) / 4


def test_every_pass_has_all_documents_once(tmp_path: Path) -> None:
    run = many_slices(tmp_path, num_files=2, shuffle_buffer=64)
    first, second = documents_in(run), documents_in(run, 1)
    assert len(set(first)) == len(first)
    assert sorted(first) == sorted(second)
    assert first != second


@given(st.sets(st.integers(0, 40)))
def test_what_has_counted_is_passed_over(tmp_path_factory: pytest.TempPathFactory, counted: set[int]) -> None:
    run = one_slice(tmp_path_factory.mktemp("data"), 150)
    everything = windows_of(run, SliceId(0, 0))
    next_window = max(counted, default=-1) + 1
    gaps = tuple((window, window + 1) for window in range(next_window) if window not in counted)
    opened = SliceReader(manifest=run).open(SliceId(0, 0), Uncounted(gaps, next_window))
    assert opened.num_windows is None
    left = {window: tokens.tobytes() for window, tokens in opened}
    assert left == {window: tokens for window, tokens in everything.items() if window not in counted}
    assert opened.num_windows == len(everything)


def test_the_end_is_found_though_nothing_is_left(tmp_path: Path) -> None:
    run = one_slice(tmp_path)
    opened = SliceReader(manifest=run).open(SliceId(0, 0), Uncounted((), 1 << 40))
    assert list(opened) == []
    assert opened.num_windows == len(windows_of(run, SliceId(0, 0)))
    assert next(opened, None) is None


def test_a_slice_that_cannot_be_read_to_its_end_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one_slice(tmp_path, shuffle_buffer=1)
    tokenizer = BytesTokenizer()
    reader = SliceReader(manifest=run)
    monkeypatch.setattr(reader, "_tokenizer", tokenizer, raising=False)
    opened = reader.open(SliceId(0, 0))
    next(opened)
    monkeypatch.setattr(tokenizer, "encode", lambda _: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            list(opened)
    assert opened.num_windows is None


def test_samples_of_one_document_do_not_come_in_a_row(tmp_path: Path) -> None:
    def in_a_row(run: RunManifest) -> float:
        samples = [tokens for _, tokens in SliceReader(manifest=run).open(SliceId(0, 0))]
        return sum(a[-1] == b[0] for a, b in itertools.pairwise(samples)) / len(samples)

    assert in_a_row(many_slices(tmp_path, shuffle_buffer=1)) > 0.98, "successive windows share a token"
    assert in_a_row(many_slices(tmp_path, shuffle_buffer=512)) < 0.3


def test_the_open_slices_share_the_shuffle_buffer() -> None:
    assert SliceReader(manifest=manifest(shuffle_buffer=80))._shuffle_buffer * OPEN_SLICES == 80
    assert SliceReader(manifest=manifest(shuffle_buffer=3))._shuffle_buffer == 1


# --- streams


def test_same_stream_id_gives_the_same_samples(tmp_path: Path) -> None:
    run = many_slices(tmp_path, shuffle_buffer=16)
    first, again = (take(sample_stream(run, "a"), 600) for _ in range(2))
    assert first.shape == (600, LENGTH + 1)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, take(sample_stream(run, "b"), 600))


def test_a_stream_reads_all_samples_of_a_pass_and_then_the_next(tmp_path: Path) -> None:
    run = many_slices(tmp_path)
    passes = [
        sorted(tokens for index in range(64) for tokens in windows_of(run, SliceId(number, index)).values())
        for number in (0, 1)
    ]
    samples = [sample.tobytes() for sample in take(sample_stream(run, "a"), len(passes[0]) + len(passes[1]))]
    assert sorted(samples[: len(passes[0])]) == passes[0]
    assert sorted(samples[len(passes[0]) :]) == passes[1]


def test_a_stream_mixes_slices(tmp_path: Path) -> None:
    run = many_slices(tmp_path)
    slice_of = {tokens: index for index in range(64) for tokens in windows_of(run, SliceId(0, index)).values()}
    slices = [slice_of[sample.tobytes()] for sample in take(sample_stream(run, "a"), 100)]
    assert len(set(slices)) == OPEN_SLICES
    assert slices[:OPEN_SLICES] != sorted(slices[:OPEN_SLICES])


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_shuffle_buffer_loses_nothing_and_holds_no_more_than_its_size(size: int) -> None:
    texts = paragraphs(100)
    shuffled = list(data.shuffled(texts, size, random.Random(0)))
    assert sorted(shuffled) == sorted(texts)
    assert (shuffled == texts) == (size == 1)
    # What comes out at position i was read by then, so at most `size` documents are held at any time.
    assert all(texts.index(text) <= i + size for i, text in enumerate(shuffled))


# --- samples


def test_much_that_is_left_over_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the size is not known, or little of it is text, slices may be short."""
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data.jsonl\n---\n")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs(2000)))
    reader = SliceReader(manifest=manifest(dataset=str(tmp_path), sequence_length=700))
    for index in range(reader.num_slices()):
        list(reader.open(SliceId(0, index)))
    told = [record.getMessage() for record in caplog.records if "tokens_left_over" in record.getMessage()]
    assert [re.sub(r"\d{3,}", "N", line).split(":")[0] for line in told] == [
        "tokens_left_over slice=0 left=N used=N slices=1 of=64",
        "tokens_left_over slice=9 left=N used=N slices=10 of=64",
    ]
    caplog.clear()
    list(SliceReader(manifest=one_slice(tmp_path)).open(SliceId(0, 0)))
    assert "tokens_left_over" not in caplog.text


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
        patch.setattr(records, "MAX_DOCUMENT_CHARS", 16)
        pieces = list(records.cut(text))
    assert all(0 < len(piece) <= 16 and not piece.isspace() for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_a_text_file_without_blank_lines_is_cut(tmp_path: Path) -> None:
    lines = [f"line {i:06d}\n" for i in range(20_000)]
    path = tmp_path / "book.txt"
    path.write_text("".join(lines))
    run = manifest(dataset="text", files=[str(path)])
    for document in documents_in(run):
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
    assert len(documents_in(run)) == 36
    assert set(documents_in(run)) < set(paragraphs(40))


def test_a_field_of_another_name_and_documents_that_are_null_or_blank(tmp_path: Path) -> None:
    texts = paragraphs(20)
    path = write(tmp_path, "json", [None, *texts, " \n"], field="body")  # type: ignore[list-item]
    run = manifest(dataset="json", files=[path], text_field="body")
    assert len(documents_in(run)) == 18
    assert set(documents_in(run)) < set(texts)


def test_embedded_text_is_there_and_spread() -> None:
    run = manifest()
    held_out = data._held_out(run.data, 0, None)
    assert 32 <= len(held_out) <= run.data.validation_documents
    assert take(sample_stream(run, "a"), 50).shape == (50, LENGTH + 1)
    samples = validation_samples(run, 32)
    texts = [BytesTokenizer().decode(sample.tolist()).split("\0")[0] for sample in samples]
    sources = {key for key, document in held_out.items() for text in texts if text in document}
    assert len(sources) > 16
    assert any("import " in document for document in held_out.values())


def test_embedded_chats_are_there_and_all_are_read() -> None:
    chats = documents.CHATS.read_text().splitlines()
    run = manifest(
        dataset="embedded",
        format="messages",
        chat_template=CHATML.template,
        sequence_length=2000,
        validation_documents=8,
    )
    held_out = data._held_out(run.data, run.seed, None)
    assert len(held_out) == 8
    reader = SliceReader(manifest=run)
    read = [tokens for number in range(reader.num_slices()) for _, tokens in reader.open(SliceId(0, number))]
    assert len(chats) == len(read) + len(held_out) == len(set(chats))
    assert 120 <= len(chats) <= 200


# --- validation


@pytest.mark.parametrize("num_files", [1, 3])
def test_no_slice_has_what_is_held_out(tmp_path: Path, num_files: int) -> None:
    # Every document is there twice: what is held out is held out wherever it turns up.
    files = [write(tmp_path, "text", paragraphs(40), name=f"file{i}") for i in range(num_files)]
    files.append(write(tmp_path, "text", paragraphs(40), name="copy"))
    run = manifest(dataset="text", files=files, validation_documents=3)
    held_out = set(data._held_out(run.data, run.seed, None).values())
    assert 1 <= len(held_out) <= 3
    assert set(documents_in(run)) == set(documents_in(run, 1)) == set(paragraphs(40)) - held_out


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


# --- folders and names


def test_a_folder_is_a_data_set(tmp_path: Path) -> None:
    write(tmp_path, "json", paragraphs(20))
    assert len(documents_in(manifest(dataset=str(tmp_path)))) == 18


def test_a_folder_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", "json", paragraphs(20))
    assert len(documents_in(manifest(dataset="~/texts"))) == 18


def test_a_name_is_no_folder_that_happens_to_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "csv", paragraphs(20))
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UserError, match=rf"there is a folder of that name here: write \./{tmp_path.name} if you mean"):
        validation_samples(manifest(dataset=tmp_path.name), 4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is a file of that name here: write \./data\.csv if you mean the file"):
        validation_samples(manifest(dataset="data.csv"), 4)
    with pytest.raises(UserError, match=r"'xml' leads to .*data\.csv, outside of that data set"):
        validation_samples(manifest(dataset="xml"), 4)


@pytest.mark.parametrize("file", ["PRIVATE/data.json", "../private/data.json", "link/data.json"])
def test_the_card_of_a_data_set_leads_nowhere_else(tmp_path: Path, file: str) -> None:
    for name in ("private", "public"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "json", paragraphs(20))
    (tmp_path / "public" / "link").symlink_to(tmp_path / "private")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {file}\n---\n"
    (tmp_path / "public" / "README.md").write_text(card.replace("PRIVATE", str(tmp_path / "private")))
    with pytest.raises(UserError, match=r"leads to .*private/data\.json|leads to .*link/data\.json") as caught:
        validation_samples(manifest(dataset=str(tmp_path / "public")), 4)
    assert "\n" not in str(caught.value)


# --- what cannot work


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dataset": "TMP"}, r"data\.dataset: '.*' names no file"),
        ({"dataset": "/no/such/folder"}, r"cannot read data\.dataset='/no/such/folder': .*; check the path"),
        ({"dataset": "/no/such/script.py"}, r"cannot read data\.dataset='/no/such/script.py': .*; check the path"),
        ({"dataset": "text", "files": ["TMP/no.txt"]}, r"data\.files: '.*no\.txt' names no file"),
        ({"dataset": "json", "files": ["TMP/good.json", "TMP/*.nothing"]}, r"'.*\*\.nothing' names no file"),
        ({"dataset": "text", "files": ["TMP/empty.text"]}, r"empty\.text'\]: all of its files are empty: add text"),
        ({"dataset": "text", "files": ["TMP/blank.text"]}, r"has no distinct document.*add text"),
        ({"dataset": "text", "files": ["TMP/single.text"]}, r"has 1 distinct document.*one to hold out"),
        (
            {"dataset": "json", "files": ["TMP/good.json"], "text_field": "body"},
            r"good\.json: line 1: it has no field 'body', .* but other, text: set .*mend the file",
        ),
        (
            {"dataset": "json", "files": ["TMP/good.json"], "text_field": "other"},
            r"line 1: .*'other' holds a number",
        ),
        ({"dataset": "json", "files": ["TMP/broken.json"]}, r"broken\.json: line 1: it is no JSON .*; mend the file"),
        ({"dataset": "parquet", "files": ["TMP/broken.pq"]}, r"cannot read .*broken\.pq: .*parquet.*; mend the file"),
        (
            {"dataset": "text", "files": ["TMP/*.text"]},
            r"cannot read .*latin\.text: it is text in another encoding",
        ),
        ({"dataset": "swarm/no-such-data"}, r"cannot read data\.dataset='swarm/no-such-data': .*connection to the hub"),
        ({"dataset": "text", "files": ["TMP/good.text"], "sequence_length": 4096}, r"too short for one sample.*4096"),
    ],
)
def test_bad_data_is_one_line_that_names_it(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    write(tmp_path, "text", paragraphs(20), name="good")
    (tmp_path / "good.json").write_text("".join(json.dumps({"text": p, "other": 1}) + "\n" for p in paragraphs(20)))
    for name in ("broken.json", "broken.pq"):
        (tmp_path / name).write_text('{nope\n{"text": 1}\n')
    (tmp_path / "empty.text").touch()
    (tmp_path / "blank.text").write_text(" \n\n \n\n\n\n")
    (tmp_path / "single.text").write_text("only one")
    (tmp_path / "latin.text").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "no data").mkdir()
    section = {**section, "files": [name.replace("TMP", str(tmp_path)) for name in section.get("files", ())]}
    section["dataset"] = section["dataset"].replace("TMP", str(tmp_path / "no data"))
    with pytest.raises(UserError, match=message) as caught:
        validation_samples(manifest(**section), 4)
    assert "\n" not in str(caught.value)


def test_a_stream_reports_bad_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no file"):
        next(sample_stream(manifest(dataset="text", files=[str(tmp_path / "no.txt")]), "a"))


def test_a_data_set_that_is_all_held_out_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = manifest(dataset="text", files=[write(tmp_path, "text", paragraphs(20))])
    everything = {data._fingerprint(text, run.seed): text for text in paragraphs(20)}
    monkeypatch.setattr(data, "_held_out", lambda *_: everything)
    with pytest.raises(UserError, match="no text besides the documents held out"):
        next(sample_stream(run, "a"))


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
    windows = [tokens[:-1] for _, tokens in SliceReader(manifest=run).open(SliceId(0, 0))]
    texts = tokenizer.decode(np.concatenate(windows).tolist()).split("<end>")
    assert len(texts) > 10
    assert set(texts[:-1]) < set(paragraphs(20))


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer_folder: Path) -> None:
    with pytest.raises(UserError, match=r"has 257 tokens, the model's vocab_size is 200: .* vocab_size .* 257 or more"):
        load_tokenizer(manifest(tokenizer=str(tokenizer_folder)).data, 200)
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


def test_no_code_comes_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.py").write_text("raise AssertionError('its code has run')")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    with pytest.raises(UserError, match=r"cannot load data\.tokenizer"):
        load_tokenizer(manifest(tokenizer=str(folder)).data, 256)
    assert asked == [], "nobody is asked on the terminal whether to run it"


def test_the_vocabulary_of_a_model_that_does_not_state_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 123}')
    run = manifest()
    for config, vocab_size in (({"model_type": "gpt2", "tie_word_embeddings": False}, 50257), (str(tmp_path), 123)):
        model = run.model.model_copy(update={"config": config})
        assert data._vocab_size(run.model_copy(update={"model": model})) == vocab_size


def test_importing_is_cheap() -> None:
    code = (
        "import sys; import swarm_peer.runtime.data.slices\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50).stdout
    assert output.strip() == "[]"


# --- data for fine-tuning


CHAT_TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"


def chats(count: int) -> list[dict[str, Any]]:
    """Records of messages, of different lengths, each of which says which one it is."""
    turns = [(f"<{i}>", "yes " * (i % 4) + f"</{i}>") for i in range(count)]
    return [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}], "source": None}
        for ask, answer in turns
    ]


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    if path.name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.name.endswith(".arrow"):
        import pyarrow as pa

        table = pa.Table.from_pylist(records)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(records, indent=1))
    else:
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow"])
def test_each_record_is_one_sample_whatever_its_file_is(tmp_path: Path, name: str) -> None:
    file = write_records(tmp_path / name, chats(100))
    run = manifest(dataset="json", files=[file], format="messages", chat_template=CHAT_TEMPLATE)
    reader = SliceReader(manifest=run)
    samples = [tokens for index in range(reader.num_slices()) for _, tokens in reader.open(SliceId(0, index))]
    held_out = validation_samples(run, 100)
    assert (len(samples), len(held_out)) == (90, 10)
    tokenizer = BytesTokenizer()
    seen = set()
    for sample in (*samples, *held_out):
        assert (sample.dtype, sample.shape) == (np.int32, (LENGTH + 1,))
        text = tokenizer.decode(ids_of(sample).tolist())
        number = re.match(r"u:<(\d+)>\na:", text)
        assert number is not None
        learnt = tokenizer.decode(ids_of(sample)[are_learnt(sample)].tolist())
        assert learnt == f"a:{'yes ' * (int(number[1]) % 4)}</{number[1]}>\n"
        seen.add(number[1])
    assert len(seen) == 100


def test_records_of_a_data_set_with_nothing_to_learn(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", [{"prompt": f"{i}" * 60, "completion": "x"} for i in range(40)])
    run = manifest(dataset="json", files=[file], format="prompt_completion")
    with pytest.raises(UserError, match="none has a token to learn"):
        validation_samples(run, 4)
    with pytest.raises(UserError, match=r"nothing to learn .*\(\d+ cut_off\): look at data.format='prompt_completion'"):
        next(sample_stream(run, "a"))


def test_a_file_of_another_format_is_told(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError, match=r"needs the field 'messages', and it has text: name it in data\.fields"):
        validation_samples(manifest(dataset="json", files=[file], format="messages", chat_template="x"), 4)
    (tmp_path / "b.txt").write_text("a\n\nb")
    with pytest.raises(UserError, match=r"it is text, and data\.format is of records in json, parquet or arrow"):
        validation_samples(manifest(dataset="text", files=[f"{tmp_path}/b.txt"], format="alpaca"), 4)


def test_packed_samples_hold_each_record_whole(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", chats(200))
    run = manifest(
        dataset="json", files=[file], format="messages", chat_template=CHAT_TEMPLATE, packing=True, sequence_length=96
    )
    reader = SliceReader(manifest=run)
    samples = [tokens for index in range(reader.num_slices()) for _, tokens in reader.open(SliceId(0, index))]
    texts = []
    for sample in samples:
        starts = np.flatnonzero(begin_documents(sample))
        assert starts[0] == 0
        for document in np.split(sample, starts[1:]):
            text = BytesTokenizer().decode([token for token in ids_of(document).tolist() if token])
            assert not are_learnt(document)[0], "nothing comes before it"
            assert BytesTokenizer().decode(ids_of(document)[are_learnt(document)].tolist()) == text[text.index("a:") :]
            texts.append(text)
    assert len(samples) < 0.5 * len(texts)
    assert len(set(texts)) == len(texts) == 180
    again = [tokens for index in range(reader.num_slices()) for _, tokens in reader.open(SliceId(0, index))]
    assert all(np.array_equal(one, other) for one, other in zip(samples, again, strict=True))


def test_small_data_sets_of_records_have_slices_for_all_who_read(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.jsonl", chats(100))
    section = {"dataset": "json", "files": [file], "chat_template": CHAT_TEMPLATE, "sequence_length": 2048}
    assert SliceReader(manifest=manifest(format="messages", **section)).num_slices() == MIN_SLICES
    section["sequence_length"] = 128
    assert 1 < SliceReader(manifest=manifest(format="messages", packing=True, **section)).num_slices() < MIN_SLICES

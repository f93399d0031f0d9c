"""The documents of files of each format, and what a file's defects cost. With real tiny files."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import itertools
import json
import logging
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm_peer.config import DataSection
from swarm_peer.errors import HubFailed, UserError
from swarm_peer.files import LFS_POINTER
from swarm_peer.runtime.data import opening, records, shards
from swarm_peer.runtime.data.corpus import check_shards, open_shards
from swarm_peer.runtime.data.files import DataFile
from swarm_peer.runtime.data.records import BadRecord, cut
from swarm_peer.runtime.data.shards import reading_failed, shard_of

TEXTS = [f"document {i} says déjà vu" for i in range(40)]
TEXT = DataSection(dataset="text", files=("a",), sequence_length=8)
ROWS = [{"text": text, "n": i} for i, text in enumerate(TEXTS)]
LINES = [json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    return name


def read(name: str, **more: Any) -> list[str]:
    """The documents of a file, which are the same however many slices it is read in."""
    section = DataSection(dataset="text", files=(name,), sequence_length=8, **more)
    check_shards(section, opened := open_shards(section, None))
    (shard,) = opened
    documents = list(shard())
    for stride in (3, 64):
        assert sorted(text for offset in range(stride) for text in shard(offset, stride)) == sorted(documents)
    return documents


def table(column: pa.Array | list[str], name: str = "a.parquet", **options: Any) -> str:
    other = pa.array([{"list": [1, 2]}] * len(column))
    pq.write_table(pa.table({"other": other, "text": column}), name, **options)
    return name


# --- formats


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "".join(LINES)),
        ("a.jsonl", "\ufeff" + "\r\n\r\n".join(LINES)),
        ("a.ndjson", "\n \n" + "".join(LINES).rstrip()),
        ("a.json", json.dumps(ROWS)),
        ("a.json", "\ufeff\n " + json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps(TEXTS)),
        ("a.json", "".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.json", " ".join(json.dumps(row) for row in ROWS)),
        ("a.jsonl", "".join(LINES).encode("utf-16")),
        ("a.json", json.dumps(ROWS).encode("utf-32")),
        ("a.txt", "\n\n".join(TEXTS)),
        ("a.txt", "\r\n\r\n".join(TEXTS) + "\r\n\r\n\r\n"),
        ("a.txt", "\n\n".join(TEXTS).encode("utf-16")),
        ("a.log", "\r\r".join(TEXTS)),
        ("a.csv", "n,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS))),
        ("a.tsv", "text\tn\r\n\r\n" + "".join(f"{text}\t{i}\r\n" for i, text in enumerate(TEXTS))),
    ],
)
def test_formats_and_encodings(name: str, content: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    put(name, content)
    assert [text.strip() for text in read(name)] == TEXTS
    monkeypatch.setattr(records, "BLOCK_BYTES", 7)
    assert [text.strip() for text in read(name)] == TEXTS, "however much is read at a time"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, "zstd", "lz4"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.csv.zst"])
def test_compressed_files_are_known_by_their_content(name: str, compress: Callable[[bytes], bytes] | str) -> None:
    content = ("".join(LINES) if "json" in name else "text\n" + "\n".join(TEXTS)).encode()
    if isinstance(compress, str):
        with pa.CompressedOutputStream(name, compress) as stream:
            stream.write(content)
    else:
        put(name, compress(content[:100]) + compress(content[100:]))
    assert read(name) == TEXTS
    put(name, content)
    assert read(name) == TEXTS, "a name does not make it compressed"


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.array([text.encode() for text in TEXTS]),
        pa.array([text.encode() for text in TEXTS], pa.binary_view()),
    ],
)
def test_columns_of_tables(column: pa.Array) -> None:
    assert read(table(column, row_group_size=16)) == TEXTS
    whole = pa.table({"other": list(range(len(TEXTS))), "text": column})
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new("a.arrow", whole.schema) as writer:
            writer.write_table(whole, max_chunksize=16)
        assert read("a.arrow") == TEXTS


def test_a_column_that_nobody_reads_may_change_its_type() -> None:
    values: list[Any] = [None, 1, 1.5, "one", [], ["a"], {"k": 1}, int("9" * 5000) if False else 10**30]
    lines = [json.dumps({"text": f"text {i}", "other": value}) for i, value in enumerate(values)]
    lines.append('{"text": "more digits", "other": ' + "9" * 5000 + "}")
    lines.append('{"text": "a column more", "other": 1, "new": true}')
    assert len(read(put("a.jsonl", "\n".join(lines)))) == len(lines)
    assert len(read(put("a.json", "[" + ",".join(lines) + "]"))) == len(lines)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_two_columns_of_one_name_are_refused(name: str) -> None:
    put("a.csv", "text,text\na,b\n")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), "a.parquet")
    with pytest.raises(UserError, match=r"data\.text_field='text' is the name of 2 columns: rename all but one; mend"):
        read(name)


def test_csv_with_all_that_cells_may_hold() -> None:
    long = "word " * 40_000
    put("a.csv", f'id, text\n1,"two\nlines, ""quoted"""\n\n2,NA\n3,\n4,{long}\n')
    assert read("a.csv") == ['two\nlines, "quoted"', "NA", *cut(long)]


def test_a_delimiter_that_is_not_the_comma_is_recognised() -> None:
    for delimiter, name in itertools.product(";,\t|", ("a.csv", "a.tsv")):
        rows = (
            delimiter.join(("n", " text")) + "\n" + "".join(f"{i}{delimiter}{text}\n" for i, text in enumerate(TEXTS))
        )
        for start in ("", "\ufeff", "\n\r\n", f"sep={delimiter}\r\n", f'"sep={delimiter}"\n'):
            assert read(put(name, start + rows)) == TEXTS
    put("a.csv", "id;text\n1;a, b\n")
    with pytest.raises(UserError, match=r"it has no field 'id;text', which data\.text_field names, but id, text: set"):
        read("a.csv", text_field="id;text")
    assert read(put("a.csv", "a;b;c,text\n1,x;y\n")) == ["x;y"]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quote_without_a_partner_costs_its_line(delimiter: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"{i}{delimiter}{text}\n" for i, text in enumerate(TEXTS)]
    rows[2] = f'2{delimiter}"a stray one\n'
    rows[9] = f'9{delimiter}"in ""quotes"",\n and{delimiter} more"\n'
    rows[20] = f'20{delimiter}"a word" and more\n'
    rows[21] = f'21{delimiter}5" and 6"\n'
    rows[30] = f'30{delimiter}"another stray one\n'
    put("a.csv", f"n{delimiter}text\n" + "".join(rows))
    expected = dict(enumerate(TEXTS)) | {9: f'in "quotes",\n and{delimiter} more', 21: '5" and 6"'}
    with caplog.at_level(logging.WARNING):
        assert list(shard_of(DataFile("a.csv", "csv"), TEXT)()) == [
            text for i, text in expected.items() if i not in (2, 20, 30)
        ]
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" reason=")[2].partition(" (")[0] for text in told] == [
        f"line {line}: it is no row" for line in (4, 23, 33)
    ]


def test_a_cell_that_is_too_long_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    assert read(put("a.csv", 'text\na\nb\n"c' + "x" * 2000 + '"\nd\n')) == ["a", "b", "d"]


def test_a_row_with_more_cells_than_the_first_line_costs_its_first_line(caplog: pytest.LogCaptureFixture) -> None:
    put("a.csv", 'text,n\nDear reader, hello,1\nfew\nempty ones,2,, \n"stray,5\nkept,6\n7",x,y\n')
    with caplog.at_level(logging.WARNING):
        assert list(shard_of(DataFile("a.csv", "csv"), TEXT)()) == ["few", "empty ones", "kept"]
    reason = "it has 3 cells, and the first line 2; a cell that has ',' in it needs quotes"
    told = [record.getMessage().partition(" reason=")[2] for record in caplog.records]
    assert told == [f"line {line}: {reason}" for line in (2, 5, 7)]


@given(st.lists(st.text(st.sampled_from('ab,;"\n '), min_size=1, max_size=9), max_size=20))
def test_a_table_that_csv_has_written_is_read_whole(texts: list[str]) -> None:
    content = io.StringIO()
    csv.writer(content).writerows([("n", "text"), *enumerate(texts)])
    stream = io.BufferedReader(io.BytesIO(content.getvalue().encode()))
    assert [text for _, _, text in records._cells(stream, "text", ",")] == texts


@given(st.text(st.sampled_from('abc,"\n '), max_size=300))
@example('"stray\nlost\nlost",x\n')
@example('",\n' * 50)
def test_a_table_of_any_text_loses_no_line_untold(content: str) -> None:
    stream = io.BufferedReader(io.BytesIO(f"text\n{content}\n".encode()))
    found = {line: value for line, _, value in records._cells(stream, "text", ",")}
    assert list(found) == sorted(found)
    for number, line in enumerate(content.split("\n"), 2):
        cells = [line] if '"' in line else line.split(",")
        is_alone = '"' in line or (found.get(number) == cells[0] and not "".join(cells[1:]).strip())
        is_told = isinstance(found.get(number), BadRecord)
        assert not line or is_alone or is_told or any(line in str(text) for text in found.values())


@given(st.text(st.sampled_from("ab \n"), max_size=300), st.integers(1, 20))
@example("a\n" + "b" * 14 + "\n\na", 17)  # the end of the paragraph is not known yet
def test_paragraphs_are_cut_the_same_however_much_is_read_at_a_time(text: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "MAX_DOCUMENT_CHARS", 16)
        patch.setattr(records, "BLOCK_BYTES", block)
        pieces = list(records._pieces(io.BufferedReader(io.BytesIO(text.encode()))))
        expected = [piece for paragraph in text.split("\n\n") for piece in cut(paragraph)]
    assert [piece for _, _, piece in pieces] == expected
    line_starts = [0, *(i + 1 for i, char in enumerate(text) if char == "\n"), len(text)]
    for line, _, piece in pieces:
        assert text.index(piece) <= line_starts[-1]
        assert 1 <= line <= text.count("\n") + 1


def test_a_long_record_is_spread_over_the_slices() -> None:
    long = "".join(f"line {i:06d}\n" for i in range(40_000))
    put("a.jsonl", json.dumps({"text": "short"}) + "\n" + json.dumps({"text": long}) + "\n")
    shard = shard_of(DataFile("a.jsonl", "json"), TEXT)
    slices = [list(shard(offset, 4)) for offset in range(4)]
    pieces = list(cut(long))
    assert slices == [["short", *pieces[3::4]], pieces[0::4], pieces[1::4], pieces[2::4]]


# --- defects


def test_a_bad_line_costs_itself_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = ["{nope", '{"text": null}', '{"text": 5}', '{"n": 5}', "[1]", '{"text": ["a"]}', "[" * 100_000, '"text": "x"']
    odd = ['"bare"', '{"text": "a\ttab"}', '{"text": "a\u2028b"}', '{"text": "\\ud800 lone"}', '{"text": "\\u0000"}']
    put("a.jsonl", "".join(LINES[:3]) + "\n" + "\n".join([*bad, *odd, *bad[:4]]) + "\n" + '{"text": "cut of')
    with caplog.at_level(logging.WARNING):
        shard = shard_of(DataFile("a.jsonl", "json"), TEXT)
        assert list(shard()) == [*TEXTS[:3], "bare", "a\ttab", "a\u2028b", "\ufffd lone", "\0"]
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" ", 3)[:3] for text in told] == [
        *(["record_passed_over", "file=a.jsonl", f"count={count}"] for count in (1, 2, 3)),
        ["characters_replaced", "file=a.jsonl", "count=1"],
        ["record_passed_over", "file=a.jsonl", "count=10"],
    ]
    assert "reason=line 5: it is no JSON (Expecting property name" in told[0]
    assert "reason=line 6: data.text_field='text' holds null, not text" in told[1]
    assert "reason=line 7: data.text_field='text' holds a number, not text" in told[2]
    assert "reason=line 16: 1 of its characters" in told[3]


def test_a_line_that_is_too_long_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    put("a.jsonl", "".join(LINES[:5]) + json.dumps({"text": "x" * 5000}) + "\n" + "".join(LINES[5:]))
    assert read("a.jsonl") == TEXTS
    put("a.json", json.dumps([*ROWS, {"text": "x" * (1 << 20)}]))
    assert read("a.json") == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "num_read", "reason"),
    [
        ("a.jsonl.gz", gzip.compress("".join(LINES).encode())[:-9], 40, "after line 40: Compressed file ended"),
        ("a.json", json.dumps(ROWS)[:-30], 39, "after record 39: the next record is no JSON, or cut off"),
        ("a.json", json.dumps(ROWS)[:-1], 40, "after record 40: the next record is no JSON, or cut off"),
        ("a.json", json.dumps(ROWS[:9])[:-1] + ', {"text": oops}]', 9, "after record 9: the next record is no JSON"),
        ("a.json", json.dumps(ROWS[:9])[:-1] + "," + "[" * 99_999, 9, "after record 9: the next record is nested too"),
    ],
)
def test_a_broken_file_can_be_read_up_to_there(
    name: str, content: str | bytes, num_read: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(name, content)
    with caplog.at_level(logging.WARNING):
        assert len(read(name)) == num_read
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told.startswith(f"file_cut_short file={Path(name).absolute()} reason=")
    assert reason in told


def test_a_broken_row_group_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    texts = [random.Random(i).randbytes(40).hex() for i in range(3000)]
    table(texts, row_group_size=1000, use_dictionary=False, compression="none")
    column = pq.ParquetFile("a.parquet").metadata.row_group(1).column(1)
    assert column.path_in_schema == "text"
    content = bytearray(Path("a.parquet").read_bytes())
    content[column.data_page_offset : column.data_page_offset + 20] = b"\xff" * 20
    put("a.parquet", bytes(content))
    with caplog.at_level(logging.WARNING):
        assert read("a.parquet") == texts[:1000] + texts[2000:]
    assert "reason=row 1001: nothing up to row 2000 can be read (" in caplog.text


def test_a_value_of_a_table_that_is_no_text_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    column = pa.array([b"good", None, b"caf\xe9", b"more"])
    binary = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    table(binary)
    with caplog.at_level(logging.WARNING):
        assert read("a.parquet") == ["good", "caf\ufffd", "more"]
    assert "reason=row 2: data.text_field='text' holds null, not text" in caplog.text
    assert "characters_replaced" in caplog.text


def test_a_few_bad_bytes_are_replaced_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    for name, content in {
        "a.txt": b"plain words\n\n" * 100 + b"caf\xe9 and \xff",
        "a.jsonl": b'{"text": "plain words"}\n' * 100 + b'{"text": "caf\xe9 and \xff"}\n',
        "a.csv": b"text\n" + b"plain words\n" * 100 + b"caf\xe9 and \xff\n",
    }.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read(put(name, content)) == ["plain words"] * 100 + ["caf\ufffd and \ufffd"]
        assert ": 2 of its characters or bytes are no UTF-8" in caplog.text


def test_empty_parts_are_passed_over() -> None:
    put("a.jsonl.gz", gzip.compress(b""))
    put("b.json", "[]")
    put("c.jsonl", "\n \n")
    put("d.txt", " \n\n \n\n\n\n")
    put("e.csv", "other\n")
    put("e.csv", "text\n")
    table([], "f.parquet")
    put("g.json", json.dumps(ROWS))
    section = DataSection(dataset="text", files=("*.*",), sequence_length=8)
    shards = open_shards(section, None)
    check_shards(section, shards)
    assert [text for shard in shards for text in shard()] == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            random.Random(0).randbytes(5000),
            r"a\.txt: it is binary, or UTF-16 without its mark: \d+ of",
        ),
        ("a.txt", b"a\0b\0" * 99, r"a\.txt: it is binary, or UTF-16 without its mark"),
        (
            "a.txt",
            " ".join(TEXTS).encode("latin-1"),
            r"text in another encoding: .*iconv.*shift_jis.*; mend",
        ),
        ("a.csv", ("text\n" + "\n".join(TEXTS)).encode("cp1252"), r"a\.csv: it is text in another encoding"),
        ("a.txt", LFS_POINTER + b"v1\n", r"a\.txt: it is a pointer of Git LFS, not the file itself: download that"),
        ("a.parquet", LFS_POINTER + b"v1\n", r"a\.parquet: it is a pointer of Git LFS"),
        ("a.arrow", LFS_POINTER + b"v1\n", r"a\.arrow: it is a pointer of Git LFS"),
        ("a.jsonl", b"PK\x03\x04abc", r"it is a zip archive, and its name does not say so"),
        ("a.txt", b"PAR1" + b"words " * 99, r"it is Parquet, and its name does not say so"),
        ("a.jsonl.gz", gzip.compress(b"x" * 257 + b"ustar" + b"y" * 99, mtime=0), r"it is a tar archive: unpack it"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:12], r"a\.jsonl\.gz: Compressed file ended before"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 99,
            r"a\.jsonl\.gz: Error -3 while decompressing",
        ),
        ("a.jsonl", "{nope\n" * 99, r"line 1: it is no JSON .*; no other record can be used, either; mend"),
        (
            "a.jsonl",
            '{"body": "x", "id": 1}\n' * 9,
            r"line 1: it has no field 'text', which data\.text_field names, but body, id: set data\.text_field to one",
        ),
        ("a.json", '[{"body": "x"}]', r"record 1: it has no field 'text', .*, but body: set data\.text_field to"),
        ("a.json", '{"data": [{"text": "x"}]}', r"line 1: it has no .*, but data: set .* to one of them; mend"),
        ("a.json", "[oops]", r"a\.json: the next record is no JSON, or cut off \(Expecting value\)"),
        ("a.csv", "id;body\n1;a\n", r"a\.csv: it has no field 'text', .*, but body, id: set data\.text_field to"),
        ("a.csv", 'id,"text\n1,a\n', r"a\.csv: line 1: it is no row \(.*\): a cell that begins with a quote"),
        ("a.csv", "text\n" + "a, b\n" * 9, r"line 2: it has 2 cells, and the first line 1; .* no other record can"),
        ("a.parquet", '{"text": "no table"}', r"a\.parquet: Parquet magic bytes not found"),
    ],
)
def test_a_file_of_which_nothing_can_be_used_is_an_error_that_says_why(
    name: str, content: str | bytes, message: str
) -> None:
    put(name, content)
    with pytest.raises(UserError, match=message) as caught:
        read(name)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"cannot read {Path(name).absolute()}: ")


def test_a_value_of_bytes_that_are_no_text_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    table(pa.array([b"words", random.Random(0).randbytes(500), b"caf\xe9 and " + b"words " * 50, b"PK\x03\x04\0\0"]))
    with caplog.at_level(logging.WARNING):
        assert read("a.parquet") == ["words", "caf\ufffd and " + "words " * 50]
    assert "reason=row 2: it is binary: " in caplog.text
    assert "reason=row 4: it is binary: 2 of its 6 bytes are not UTF-8" in caplog.text


@pytest.mark.parametrize("column", [pa.array([1]), pa.array([["x"]]), pa.array([{"a": "x"}])])
def test_a_column_without_text_is_an_error_that_says_what_it_holds(column: pa.Array) -> None:
    with pytest.raises(UserError, match=r"data\.text_field='text' holds .+, not text: no column does; mend"):
        read(table(column))
    pq.write_table(pa.table({"text": column, "body": ["x"], "raw": [b"x"], "n": [1]}), "b.parquet")
    with pytest.raises(UserError, match=r"holds .+, not text: choose one of body, raw; mend"):
        read("b.parquet")
    with pytest.raises(UserError, match=r"it has no field 'body', which data\.text_field names, but other, text"):
        read("a.parquet", text_field="body")


# --- the machine


def test_a_failing_disk_is_no_broken_file(monkeypatch: pytest.MonkeyPatch) -> None:
    put("a.jsonl", "".join(LINES))

    class Failing(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(memoryview(buffer)[:300])

    content = "".join(LINES).encode()
    monkeypatch.setattr(records, "open_text", lambda *_: io.BufferedReader(Failing(content)))
    documents = iter(shard_of(DataFile("a.jsonl", "json"), TEXT)())
    with pytest.raises(UserError, match=r"cannot read a\.jsonl after line \d: Input/output error; mend that disk"):
        list(documents)


def test_mistakes_of_our_own_are_not_blamed_on_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: Any) -> Iterator[Any]:
        yield 1, 5, 1 / 0

    monkeypatch.setattr("swarm_peer.runtime.data.shards.read_records", mistaken)
    with pytest.raises(ZeroDivisionError):
        list(shard_of(DataFile("a.jsonl", "json"), TEXT)())


@pytest.mark.parametrize(
    ("error", "is_remote", "kind", "message"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/a.txt"),
            False,
            UserError,
            "Too many open files: /a.txt; let this process open more files",
        ),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES), "/a.txt"),
            False,
            UserError,
            "read /a.txt: Permission denied: /a.txt; let this user use it",
        ),
        (
            OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/a.txt"),
            False,
            UserError,
            "No such file or directory; put it there",
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), "/c/lock"),
            True,
            UserError,
            "Read-only file system: /c/lock; .* --cache-dir",
        ),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES), "/c/lock"),
            True,
            UserError,
            "Permission denied: /c/lock; .* --cache-dir",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True, UserError, "No space left on device; free some space"),
        (ModuleNotFoundError("x", name="_lzma"), False, UserError, "this Python has no module _lzma; install it"),
        (
            OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)),
            True,
            HubFailed,
            "check its name, subset and split, and the connection",
        ),
        (ConnectionError("Server Disconnected"), True, HubFailed, "Server Disconnected; check its name"),
        (ValueError("Bad split: x"), True, HubFailed, "Bad split: x; check its name"),
    ],
)
def test_errors_of_the_machine_are_told_as_such(
    error: Exception, is_remote: bool, kind: type[UserError], message: str
) -> None:
    told = reading_failed("/a.txt", error, is_remote=is_remote)
    assert type(told) is kind
    with pytest.raises(kind, match=message):
        raise told


def test_a_member_of_an_archive_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("a.txt", "secret")
    content = bytearray(Path("a.zip").read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + place] |= 1  # the flag of an encrypted file
    put("a.zip", bytes(content))
    with pytest.raises(UserError, match=r"cannot read .*a\.zip:a\.txt: .*password"):
        read("a.zip")


# --- memory


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "jsonl.gz", "csv", "parquet"])
def test_a_reader_holds_little_of_a_file(kind: str) -> None:
    lines = [f"{i} " + "some plain words " * 60 for i in range(20_000)]  # 20 MB
    name = f"big.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), name, compression="none", use_dictionary=False)
    else:
        make = {
            "json": lambda: json.dumps([{"text": line} for line in lines]),
            "txt": lambda: "\n".join(lines),
            "csv": lambda: "text\n" + "\n".join(lines),
        }.get(kind, lambda: "".join(json.dumps({"text": line}) + "\n" for line in lines))
        content = make().encode()
        put(name, gzip.compress(content, 1) if kind.endswith("gz") else content)
    shard = shard_of(DataFile(os.path.abspath(name), "json" if "json" in kind else kind.replace("txt", "text")), TEXT)  # type: ignore[arg-type]
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        num_chars = 0
        for text in shard(0, 8):
            num_chars += len(text)
            assert pa.total_allocated_bytes() - before < 5 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_chars > 2_000_000
    assert peak < 5 << 20


def test_a_line_of_a_table_that_is_too_long_costs_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    cells = [f"{n},{'x' * 50}" for n in range(4)]
    put("a.csv", "\n".join(["n,text", cells[0], ",".join(["yy"] * 500), *cells[1:]]))
    assert read("a.csv") == ["x" * 50] * 4
    assert "reason=line 3: it is longer than 0 MiB: divide it" in caplog.text
    put("a.csv", "text" * 1000 + "\nabc")
    with pytest.raises(UserError, match=r"a\.csv: line 1: it is longer than"):
        read("a.csv")


def test_values_on_one_long_line_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for longest in range(60, 80):  # the first part of the line ends within a word, a space or a letter of two bytes
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", longest)
        put("a.json", "".join(json.dumps({"text": f"dé jà vu {n}"}, ensure_ascii=False) for n in range(9)))
        assert read("a.json") == [f"dé jà vu {n}" for n in range(9)]


def test_a_file_without_the_field_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_TRIED", 10)
    put("a.jsonl", "".join(LINES))
    (shard,) = open_shards(DataSection(dataset="json", files=("a.jsonl",), text_field="t", sequence_length=8), None)
    monkeypatch.setattr(shard, "_read", lambda: itertools.chain(((n, 9, b"{}") for n in range(10)), iter(int, 1)))
    expected = r"line 0: it has no field 't', which .*; so it is with all of the first 10 records; mend"
    with pytest.raises(UserError, match=expected):
        check_shards(DataSection(dataset="json", files=("a.jsonl",), sequence_length=8), [shard])


def test_no_memory_is_no_broken_file() -> None:
    assert not opening.is_about_content(pa.lib.ArrowMemoryError("malloc of size 8 failed"))
    assert opening.is_about_content(pa.lib.ArrowInvalid("corrupt"))

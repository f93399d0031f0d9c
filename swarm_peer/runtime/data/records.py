"""The records of one file, one after the other, and the text of a record: readers that hold little of the file.

A record is a paragraph of a text, a line of JSON lines, an element of a JSON list, or a row of a table. Of a table only
the column with the text is read, and of JSON only the field; other columns may hold anything. To read a record is
cheap, to take its text is not, so that a reader of every n-th record need not parse the others. A file that is broken
can be read up to there.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from swarm_peer.errors import first_line
from swarm_peer.runtime.data.files import DataFile
from swarm_peer.runtime.data.opening import (
    BLOCK_BYTES,
    Broken,
    bad_bytes,
    check_no_pointer,
    is_about_content,
    is_local,
    open_raw,
    open_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

# A longer document is cut: a whole book would defeat the shuffling and take seconds to tokenize.
MAX_DOCUMENT_CHARS = 1 << 16

# A longer record is passed over: each slice that a peer has open may have to hold one.
MAX_RECORD_BYTES = 64 << 20

# pyarrow would read a row group of a table at once, which may be the whole file.
_COLUMN_BYTES = 1 << 20
_COLUMN_ROWS = 256

# The number of a line, or what a place in another kind of file is called.
Place: TypeAlias = int | str

# (where it is in the file, at least the length of its text, what `text_of` makes the text of). There may be millions.
Record: TypeAlias = tuple[Place, int, Any]

# Numbers are not looked at, so one of thousands of digits is no reason to pass over a text.
_JSON = json.JSONDecoder(strict=False, parse_int=float)
# Of tables, besides the one that the file's name tells, and how Excel names one in a line of its own.
_DELIMITERS = (",", ";", "\t", "|")
_NAMED_DELIMITER = re.compile(r'"?sep=(?P<delimiter>[^\w\s"]|\t)"?', re.IGNORECASE)
_QUOTES = "a cell that begins with a quote has to end with one, and those within it stand twice"
# Types of columns of tables, as pyarrow prints them. Some programs write text as bytes.
_KINDS_OF_TEXT = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}
_BETWEEN_VALUES = re.compile(r"[\s,]*")
_JSON_NAMES = {dict: "an object", list: "a list", float: "a number", bool: "true or false", type(None): "null"}


class BadRecord(Exception):
    """A record has no text. Says why."""


def read_records(file: DataFile, field: str) -> Iterator[Record]:
    """Read the records of a file; blank lines and paragraphs are none.

    Raises:
        Broken: it cannot be read any further because of what is in it
        Exception: as opening.py; `is_about_content` tells whether the file is to blame
    """
    with ExitStack() as stack:
        if file.kind in ("parquet", "arrow"):
            for row, batch in _batches(file, stack, [field], _check_column):
                if isinstance(batch, BadRecord):
                    yield f"row {row}", 0, batch
                else:
                    yield from _values(batch.column(0), row)
        elif file.kind == "json":
            yield from _json_records(open_text(file, stack))
        elif file.kind == "text":
            yield from _pieces(open_text(file, stack))
        else:
            yield from _cells(open_text(file, stack), field, "\t" if file.kind == "tsv" else ",")


def read_rows(file: DataFile, names: Sequence[str]) -> Iterator[Record]:
    """Read the records of a file that have several fields each, or nested ones.

    Args:
        names: the columns of a table that are read, where it has them

    Raises:
        Broken, Exception: as read_records
    """
    with ExitStack() as stack:
        if file.kind == "json":
            yield from _json_records(open_text(file, stack))
        elif file.kind in ("parquet", "arrow"):
            for row, batch in _batches(file, stack, names):
                values = [batch] if isinstance(batch, BadRecord) else batch.to_pylist()
                yield from ((f"row {number}", 0, value) for number, value in enumerate(values, row))
        else:
            raise Broken(f"it is {file.kind}, and data.format is of records in json, parquet or arrow")


def row_of(raw: Any) -> dict[str, Any]:
    """The fields of a record that `read_rows` has read.

    Raises:
        BadRecord: it has none
    """
    if isinstance(raw, BadRecord):
        raise raw
    value = _parsed(raw) if isinstance(raw, bytes) else raw
    if not isinstance(value, dict):
        raise BadRecord(f"it is {_JSON_NAMES.get(type(value), type(value).__name__)}, not an object with fields")
    return value


def _parsed(raw: bytes) -> Any:
    try:
        return _JSON.decode(raw.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"it is no JSON ({_why(error)})") from error


def text_of(raw: Any, field: str, *, is_json: bool) -> str:
    """The text of a record. Bytes in it that are no UTF-8 become lone surrogates.

    Raises:
        BadRecord: it has none
    """
    value = raw
    if isinstance(value, BadRecord):
        raise value
    if is_json and isinstance(value, bytes):
        value = _parsed(value)
    if is_json and isinstance(value, dict):
        if field not in value:
            raise BadRecord(no_such_field(field, value))
        value = value[field]
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, str):
        return value
    raise BadRecord(f"data.text_field={field!r} holds {_JSON_NAMES.get(type(value), type(value).__name__)}, not text")


def cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most MAX_DOCUMENT_CHARS, at line ends where possible. Blank pieces are left out."""
    start = 0
    while start < len(text):
        end = start + MAX_DOCUMENT_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        piece = text[start:end]
        if not piece.isspace():
            yield piece
        start = end


def no_such_field(field: str, others: Iterable[str]) -> str:
    """The reason for which a record or a table is not read that has other fields."""
    names = ", ".join(sorted(map(str, others))[:20])
    remedy = f", but {names}: set data.text_field to one of them" if names else ""
    return f"it has no field {field!r}, which data.text_field names{remedy}"


def _check_field(field: str, names: Sequence[str]) -> None:
    """Raise Broken unless a table has the field once."""
    if field not in names:
        raise Broken(no_such_field(field, names))
    if names.count(field) > 1:
        raise Broken(f"data.text_field={field!r} is the name of {names.count(field)} columns: rename all but one")


# --- text


def _pieces(stream: io.BufferedReader) -> Iterator[Record]:
    """The paragraphs of a text, cut. They do not depend on how much of the file is read at a time."""
    line, rest = 1, ""
    for chunk in _decoded(stream):
        *paragraphs, rest = (rest + chunk).split("\n\n")
        for paragraph in paragraphs:
            yield from ((line, len(piece), piece) for piece in cut(paragraph))
            line += paragraph.count("\n") + 2
        # Where there are two more characters, a further piece follows, whatever comes.
        while len(rest) >= MAX_DOCUMENT_CHARS + 2:
            end = rest.rfind("\n", 0, MAX_DOCUMENT_CHARS) + 1 or MAX_DOCUMENT_CHARS
            yield from ((line, len(piece), piece) for piece in cut(rest[:end]))
            line += rest.count("\n", 0, end)
            rest = rest[end:]
    yield from ((line, len(piece), piece) for piece in cut(rest))


def _decoded(stream: io.BufferedReader, start: bytes = b"") -> Iterator[str]:
    """The text of a file in parts, with the line ends of Unix.

    Args:
        start: what has been read of it already
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
    data = start or stream.read1(BLOCK_BYTES)
    while data:
        yield decoder.decode(data)
        data = stream.read1(BLOCK_BYTES)
    yield decoder.decode(b"", final=True)


# --- JSON


def _json_records(stream: io.BufferedReader) -> Iterator[Record]:
    """The values of JSON lines, or the elements of a list, or values that take several lines each."""
    line = 1
    while (head := stream.peek(1))[:1].isspace():
        blank = head[: len(head) - len(head.lstrip())]
        line += blank.count(b"\n")
        stream.read(len(blank))
    if head[:1] == b"[":
        yield from _json_values(_decoded(stream))
        return
    first = stream.readline(MAX_RECORD_BYTES + 1)
    if _is_no_line(first.decode(errors="surrogateescape").rstrip()):
        yield from _json_values(_decoded(stream, first))
        return
    for number, raw in enumerate(itertools.chain([first], iter(partial(stream.readline, MAX_RECORD_BYTES + 1), b""))):
        if len(raw) > MAX_RECORD_BYTES and not raw.endswith(b"\n"):
            while (more := stream.readline(MAX_RECORD_BYTES)) and not more.endswith(b"\n"):
                pass
            yield line + number, 0, BadRecord(f"it is longer than {MAX_RECORD_BYTES >> 20} MiB: divide it")
        elif raw and not raw.isspace():
            yield line + number, len(raw), raw


def _is_no_line(first: str) -> bool:
    """Whether the first line of a file shows that its values do not have a line each."""
    try:
        _, end = _JSON.raw_decode(first)
    except json.JSONDecodeError as error:
        return bool(first) and error.pos >= len(first)  # it is good as far as it goes
    except RecursionError:
        return False
    return first[end:].lstrip().startswith("{")


def _json_values(chunks: Iterator[str]) -> Iterator[Record]:
    """The values of a text; of a list, its elements."""
    rest, start, number, is_in_list = "", 0, 0, False
    while True:
        start = _BETWEEN_VALUES.match(rest, start).end()  # type: ignore[union-attr]
        if rest[start : start + 1] == ("]" if is_in_list else "["):
            start, is_in_list = start + 1, not is_in_list
            continue
        try:
            value, end = _JSON.raw_decode(rest, start)
        except RecursionError as error:
            raise Broken("the next record is nested too deeply") from error
        except json.JSONDecodeError as error:
            rest, start = rest[start:], 0
            # Twice as much each time, since what has been read is parsed again.
            more = list(itertools.islice(chunks, 1 + len(rest) // BLOCK_BYTES))
            if not more and not rest and not is_in_list:
                return
            if not more:
                raise Broken(f"the next record is no JSON, or cut off ({error.msg})") from error
            if len(rest) > MAX_RECORD_BYTES:
                raise Broken(f"the next record is no JSON, or longer than {MAX_RECORD_BYTES >> 20} MiB") from error
            rest += "".join(more)
            continue
        number += 1
        yield f"record {number}", end - start, value
        start = end


def _why(error: Exception) -> str:
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else first_line(error)


# --- tables


def _cells(stream: io.BufferedReader, field: str, usual: str) -> Iterator[Record]:
    """The cells of a column of a table of text.

    Args:
        usual: the delimiter, unless the file's first line has another one
    """
    csv.field_size_limit(MAX_RECORD_BYTES)
    text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
    lines = iter(partial(_line, text), "")  # unlike a generator, it goes on after an error
    try:
        line, heading = next(((number, each) for number, each in enumerate(lines, 1) if not each.isspace()), (1, ""))
    except BadRecord as error:
        raise Broken(f"line 1: {error}") from error
    if named := _NAMED_DELIMITER.fullmatch(heading.strip("\r\n")):
        line, heading, delimiter = line + 1, next(lines, ""), named["delimiter"]
    else:
        delimiter = _delimiter(heading, field, usual)
    yield from _rows(itertools.chain([heading], lines), field, delimiter, line)


def _line(text: io.TextIOWrapper) -> str:
    """The next line of a table; empty at the end. Raises BadRecord, and passes the line over, if it is too long."""
    line = text.readline(MAX_RECORD_BYTES)
    if len(line) < MAX_RECORD_BYTES or line.endswith(("\r", "\n")):
        return line.replace("\0", "") or line  # a line of NULs alone is not the end
    while (more := text.readline(MAX_RECORD_BYTES)) and not more.endswith(("\r", "\n")):
        pass
    raise BadRecord(f"it is longer than {MAX_RECORD_BYTES >> 20} MiB: divide it")


def _delimiter(heading: str, field: str, usual: str) -> str:
    """The delimiter with which the first line of a table has the field, or else the most cells."""
    start = heading[:MAX_DOCUMENT_CHARS]

    def fit(delimiter: str) -> tuple[bool, int]:
        names = [name.strip() for name in next(csv.reader([start], delimiter=delimiter), [])]
        # Where the whole line is the name of one field, it may be all names at once.
        return field in names and len(names) > 1, len(names)

    return max((usual, *_DELIMITERS), key=fit)


def _rows(lines: Iterator[str], field: str, delimiter: str, line: int) -> Iterator[Record]:
    """The cells of a column, by the numbers of the lines that their rows begin in. The first row names the columns.

    A quote without its partner makes one cell of all up to the next one. It costs the line that it is in, and no other.

    Args:
        line: the number of the first one
    """
    taken: list[str] = []  # by the present row
    again: deque[str] = deque()
    header: list[str] = []

    def source() -> Iterator[str]:
        while True:
            try:
                text = again.popleft() if again else next(lines, None)
            except BadRecord:
                taken.append("")  # it has a number, too
                raise
            if text is None:
                return
            taken.append(text)
            yield text

    while True:
        try:
            for row in csv.reader(source(), delimiter=delimiter, strict=True):
                if row and header:
                    text = _text_cell(row, field, header, delimiter)
                    yield line, len(text), text
                elif row:
                    header = [name.strip() for name in row]
                    _check_field(field, header)
                line += len(taken)
                taken.clear()
            return
        except (csv.Error, BadRecord) as error:
            bad = error if isinstance(error, BadRecord) else BadRecord(f"it is no row ({error}): {_QUOTES}")
            if not header:
                raise Broken(f"line {line}: {bad}") from error
            again.extendleft(reversed(taken[1:]))
            taken.clear()
            yield line, 0, bad
            line += 1


def _text_cell(row: list[str], field: str, header: list[str], delimiter: str) -> str:
    """The cell of a row that has the text. Raises BadRecord if there is none, or too many."""
    index = header.index(field)
    if index >= len(row):
        raise BadRecord(f"it has {len(row)} cells, and {field!r} is number {index + 1}")
    if any(cell.strip() for cell in row[len(header) :]):
        need = f"a cell that has {delimiter!r} in it needs quotes"
        raise BadRecord(f"it has {len(row)} cells, and the first line {len(header)}; {need}")
    return row[index]


def _batches(
    file: DataFile,
    stack: ExitStack,
    names: Sequence[str],
    check: Callable[[pa.Schema, str], None] = lambda schema, name: None,
) -> Iterator[tuple[int, pa.RecordBatch | BadRecord]]:
    """Parts of some columns of a table, with the number of the first row of each.

    Args:
        check: raises Broken for a column that cannot be used
    """
    if is_local(file):
        with open_raw(file) as start:
            check_no_pointer(start.peek(BLOCK_BYTES))
    if file.kind == "parquet":
        yield from _parquet_batches(stack.enter_context(open_raw(file)), names, check)
    else:
        yield from _arrow_batches(file, stack, names, check)


def _chosen(schema: pa.Schema, names: Sequence[str], check: Callable[[pa.Schema, str], None]) -> list[str]:
    """Those columns that a table has."""
    for name in names:
        check(schema, name)
    if not (chosen := [name for name in names if name in schema.names]):
        raise Broken(f"it has none of {', '.join(names)}: its columns are {', '.join(schema.names[:20])}")
    return chosen


def _parquet_batches(
    stream: io.BufferedReader, names: Sequence[str], check: Callable[[pa.Schema, str], None]
) -> Iterator[tuple[int, pa.RecordBatch | BadRecord]]:
    import pyarrow.parquet as pq

    # Without a buffer size, the whole column of a row group is read at once.
    table = pq.ParquetFile(stream, pre_buffer=False, buffer_size=_COLUMN_BYTES)
    chosen = _chosen(table.schema_arrow, names, check)
    # A nested column is stored as several, whose names begin with its own.
    ours = tuple(f"{name}." for name in chosen)
    first = 1
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        num_bytes = sum(each.total_uncompressed_size for each in columns if f"{each.path_in_schema}.".startswith(ours))
        num_rows = max(1, min(_COLUMN_ROWS, _COLUMN_BYTES * metadata.num_rows // max(num_bytes, 1)))
        row = first
        try:
            for batch in table.iter_batches(num_rows, row_groups=[group], columns=chosen, use_threads=False):
                yield row, batch
                row += len(batch)
        except Exception as error:
            if not is_about_content(error):
                raise
            reason = f"nothing up to row {first + metadata.num_rows - 1} can be read ({first_line(error)})"
            yield row, BadRecord(reason)
        first += metadata.num_rows


def _arrow_batches(
    file: DataFile, stack: ExitStack, names: Sequence[str], check: Callable[[pa.Schema, str], None]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    import pyarrow as pa

    # A mapped file takes no memory of its own, and it may be one batch.
    is_mapped = is_local(file) and not file.member
    source = stack.enter_context(pa.memory_map(file.path) if is_mapped else open_raw(file))

    def opened(**options: Any) -> Any:
        source.seek(0)
        open_ = pa.ipc.open_file if source.read(6) == b"ARROW1" else pa.ipc.open_stream
        source.seek(0)
        return open_(source, options=pa.ipc.IpcReadOptions(use_threads=False, **options))

    schema = opened().schema
    reader = opened(included_fields=[schema.get_field_index(name) for name in _chosen(schema, names, check)])
    is_list = isinstance(reader, pa.ipc.RecordBatchFileReader)
    row = 1
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_list else reader:
        for start in range(0, len(batch), _COLUMN_ROWS):
            yield row + start, batch.slice(start, _COLUMN_ROWS)
        row += len(batch)


def _check_column(schema: pa.Schema, field: str) -> None:
    """Raise Broken if a table has no such column of text."""
    _check_field(field, schema.names)
    if not _may_be_text(kind := schema.field(field).type):
        others = ", ".join(column.name for column in schema if _may_be_text(column.type))
        advice = f"choose one of {others}" if others else "no column does"
        raise Broken(f"data.text_field={field!r} holds {kind}, not text: {advice}")


def _may_be_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(kind) in _KINDS_OF_TEXT


def _values(column: pa.Array, first: int) -> Iterator[Record]:
    """The values of a part of a column, as bytes: one that is no UTF-8 costs no other."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    may_be_other = "binary" in str(column.type)
    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first):
        if may_be_other and value and (bad := bad_bytes(value)):
            yield f"row {row}", 0, BadRecord(f"it is binary: {bad} of its {len(value)} bytes are not UTF-8")
        else:
            yield f"row {row}", len(value or b""), value

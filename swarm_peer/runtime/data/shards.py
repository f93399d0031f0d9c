"""A shard of a data set: the documents of one file, and all that can go wrong while they are read.

In a text file a document is a paragraph, in others the text field of a record (records.py), or what formats.py makes of
a record. A text of more than MAX_DOCUMENT_CHARS is cut into several at line ends. A record without text is passed over,
and a file that is broken ends where it is: the log names file and place. If the machine or the hub fails, a reader gets
UserError.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from swarm_peer.config import DataSection
from swarm_peer.errors import HubFailed, UserError, first_line, machine_fault
from swarm_peer.runtime.data.files import DataFile
from swarm_peer.runtime.data.formats import columns_of, document_of
from swarm_peer.runtime.data.opening import is_about_content, is_local
from swarm_peer.runtime.data.records import (
    MAX_DOCUMENT_CHARS,
    BadRecord,
    Place,
    Record,
    cut,
    read_records,
    read_rows,
    row_of,
    text_of,
)

log = logging.getLogger(__name__)

# Times that a file's defects are told each: these first ones, and then the 10th, the 100th and so on.
MOST_TOLD = 3

# A file of which so many records in a row have no text, from its beginning on, is not read to its end before that is
# told: that might take hours.
MOST_TRIED = 100_000

_SURROGATES = re.compile("[\ud800-\udfff]")


class _Hopeless(UserError):
    """So much of a file could not be used that nobody need look at the rest."""


class Shard(Protocol):
    """Reads documents of a part of the data, from the beginning at each call."""

    def __call__(self, offset: int = 0, stride: int = 1) -> Iterator[str]:
        """The documents of every `stride`-th record from number `offset` on; all together have each document once.

        Raises:
            UserError: the machine or the hub failed
        """
        ...


class RecordShard:
    """The documents of one file, or of one shard that `datasets` reads.

    Args:
        name: what messages call it
        read: reads its records
        text: gives the text of a record, or raises BadRecord
        is_whole: whether a record is never cut
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Iterator[Record]],
        text: Callable[[Any], str],
        *,
        is_remote: bool,
        is_whole: bool = False,
    ):
        self.is_remote = is_remote
        self._name = name
        self._read = read
        self._text = text
        self._is_whole = is_whole
        self._num_told: Counter[str] = Counter()

    def __call__(self, offset: int = 0, stride: int = 1) -> Iterator[str]:
        """As Shard says."""
        return self._documents(offset, stride, self._tell)

    def problem(self) -> UserError | None:
        """The error to raise if the file has records, or was meant to have some, and none of them can be used.

        Raises:
            UserError: the machine or the hub failed
        """
        problem, num_problems = "", 0

        def note(_: str, place: Place, reason: str) -> None:
            nonlocal problem, num_problems
            problem, num_problems = problem or f"{_named(place)}{reason}", num_problems + 1
            if num_problems == MOST_TRIED:
                raise _Hopeless

        others = "; no other record can be used, either"
        try:
            if next(self._documents(0, 1, note), None) is not None or not problem:
                return None
        except _Hopeless:
            others = f"; so it is with all of the first {MOST_TRIED} records"
        return UserError(
            f"cannot read {self._name}: {problem}{others if num_problems > 1 else ''}; mend the file, or leave it out"
        )

    def _documents(self, offset: int, stride: int, tell: Callable[[str, Place, str], None]) -> Iterator[str]:
        place: Place = ""
        try:
            for index, (place, size, raw) in enumerate(self._read()):
                # The pieces of a long record are spread over the slices. A short one is one piece at most.
                is_own = index % stride == offset
                if not is_own and (self._is_whole or size <= MAX_DOCUMENT_CHARS):
                    continue
                try:
                    text = self._text(raw)
                except BadRecord as error:
                    if is_own:
                        tell("record_passed_over", place, str(error))
                    continue
                if not text.isascii():
                    text, count = _SURROGATES.subn("\ufffd", text)
                    if count and is_own:
                        self._tell("characters_replaced", place, f"{count} of its characters or bytes are no UTF-8")
                for number, piece in enumerate([text] if self._is_whole else cut(text), index):
                    if number % stride == offset:
                        yield piece
        except UserError:
            raise
        except Exception as error:
            if is_about_content(error):
                tell("file_cut_short", place and f"after {_named(place)[:-2]}", first_line(error))
            elif self.is_remote or isinstance(error, (OSError, ImportError)):
                what = f"{self._name} after {_named(place)[:-2]}" if place else self._name
                raise reading_failed(what, error, is_remote=self.is_remote) from error
            else:  # a mistake of this program
                raise

    def _tell(self, event: str, place: Place, reason: str) -> None:
        """Tell of what is wrong in the file: the first times, and then ever more seldom."""
        self._num_told[event] += 1
        count = self._num_told[event]
        if event == "file_cut_short":
            if count == 1:  # each slice finds it
                log.error("%s file=%s reason=%s", event, self._name, _named(place) + reason)
        elif count <= MOST_TOLD or str(count).strip("0") == "1":
            log.warning("%s file=%s count=%d reason=%s", event, self._name, count, _named(place) + reason)


def _named(place: Place) -> str:
    return f"line {place}: " if isinstance(place, int) else place and f"{place}: "


def shard_of(file: DataFile, section: DataSection) -> RecordShard:
    """The documents of a file.

    Args:
        section: says what its records hold
    """
    is_remote, is_json = not is_local(file), file.kind == "json"
    if section.format != "text":
        return row_shard(file.name, functools.partial(read_rows, file, columns_of(section)), section, is_remote)
    read = functools.partial(read_records, file, section.text_field)
    text = functools.partial(text_of, field=section.text_field, is_json=is_json)
    return RecordShard(file.name, read, text, is_remote=is_remote)


def row_shard(name: str, read: Callable[[], Iterator[Record]], section: DataSection, is_remote: bool) -> RecordShard:
    """The documents of records with fields. The arguments are RecordShard's."""
    text = functools.partial(_document, section=section)
    return RecordShard(name, read, text, is_remote=is_remote, is_whole=True)


def _document(raw: Any, section: DataSection) -> str:
    return document_of(row_of(raw), section)


def reading_failed(what: str, error: Exception, *, is_remote: bool) -> UserError:
    """The error to raise in the place of one that the machine, the hub, or a library has raised.

    Args:
        what: what could not be read
        is_remote: whether it is on the hub
    """
    if (fault := machine_fault(error)) is not None:
        return UserError(f"cannot read {what}: {fault}")
    if isinstance(error, FileNotFoundError) and not is_remote:
        return UserError(f"cannot read {what}: {error.strerror}; put it there, or correct the path")
    if isinstance(error, ImportError):
        return UserError(f"cannot read {what}: this Python has no module {error.name}; install it (pip install NAME)")
    if is_remote:
        return HubFailed(
            f"cannot read {what}: {first_line(error)}; check its name, subset and split, and the connection to the hub "
            f"(a local folder begins with ./)"
        )
    return UserError(f"cannot read {what}: {first_line(error)}; check the files")

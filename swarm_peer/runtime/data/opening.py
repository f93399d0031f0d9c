"""The bytes of a file of text, wherever it lies: decompressed, in UTF-8, and seen to be text before they are read.

The first bytes of a file decide how it is decompressed, not its name. A reader may count on text: a file that holds
something else, or text in another encoding that does not say which, is refused with a reason.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from swarm_peer.files import LFS_POINTER, NO_LFS_POINTER
from swarm_peer.runtime.data.files import DataFile

# Bytes to read from a disk, or from the hub, at a time; the same number is looked at to see whether a file is text.
BLOCK_BYTES = 1 << 18

# Of so many bytes of a file's first block, one may be NUL or no UTF-8. A text in another encoding has more in most
# languages: German in Latin-1 has one in 60. English with typographic quotes has fewer; they are replaced and counted.
_ONE_BAD_BYTE_IN = 200

_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "lzma",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHER_THINGS = {b"PK\x03\x04": "a zip archive", b"PAR1": "Parquet", b"ARROW1": "Arrow", b"%PDF-": "PDF"}
_TAR_MARK = (257, b"ustar")

# Bytes that text in any encoding of eight bits hardly has.
_CONTROLS = bytes([*range(8), *range(14, 27), *range(28, 32)])


class Broken(Exception):
    """A file cannot be read any further, or at all, because of what is in it. Says where and why."""


def is_about_content(error: Exception) -> bool:
    """Whether what is in a file is to blame for an error, rather than the machine, the network, or this program."""
    if isinstance(error, MemoryError):  # pyarrow has its own
        return False
    if isinstance(error, (Broken, EOFError, zlib.error, zipfile.BadZipFile)):
        return True
    # pyarrow raises plain ones of its own accord. Those of its files, and of the hub, are of other classes.
    if type(error) in (OSError, gzip.BadGzipFile):
        return cast("OSError", error).errno is None
    return type(error).__name__ == "LZMAError" or type(error).__module__ == "pyarrow.lib"


def is_local(file: DataFile) -> bool:
    """Whether a file is on this machine."""
    return "://" not in file.path


def open_raw(file: DataFile) -> io.BufferedReader[Any]:
    """Open a file as it is."""
    if file.member:
        return _Member(file)
    if is_local(file):
        return io.BufferedReader(open(file.path, "rb", buffering=0), BLOCK_BYTES)
    from datasets.utils.file_utils import xopen  # tries again when the hub breaks off

    return io.BufferedReader(xopen(file.path, "rb"), BLOCK_BYTES)


def open_text(file: DataFile, stack: ExitStack) -> io.BufferedReader:
    """Open a file of text. Its bytes are UTF-8, but for a few that may be bad.

    Args:
        stack: closes it

    Raises:
        Broken: it is no text, or in another encoding
        ImportError: Python lacks the module that decompresses it
    """
    stream: Any = stack.enter_context(open_raw(file))
    head = stream.peek(BLOCK_BYTES)
    for mark, compression in _COMPRESSIONS.items():
        if head.startswith(mark):
            stream = stack.enter_context(io.BufferedReader(_Parts(_decompressed(stream, compression)), BLOCK_BYTES))
            head = stream.peek(BLOCK_BYTES)
            break
    for mark, encoding in _ENCODINGS.items():
        if head.startswith(mark):
            stream = stack.enter_context(io.BufferedReader(_Parts(_recoded(stream, encoding)), BLOCK_BYTES))
            head = stream.peek(BLOCK_BYTES)
            break
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    _check_text(head)
    return cast("io.BufferedReader", stream)


def _decompressed(stream: io.BufferedReader, compression: str) -> Callable[[int], bytes]:
    # Python's own go on behind the padding that tapes and some programs leave.
    if compression == "gzip":
        return gzip.GzipFile(fileobj=stream).read1
    if compression == "bz2":
        import bz2

        return bz2.BZ2File(stream).read1
    if compression == "lzma":
        import lzma

        return lzma.LZMAFile(stream).read1
    import pyarrow as pa

    source = pa.CompressedInputStream(pa.PythonFile(stream, "r"), compression)
    return lambda size: cast("bytes", source.read(min(size, io.DEFAULT_BUFFER_SIZE)))


def _recoded(stream: io.BufferedReader, encoding: str) -> Callable[[int], bytes]:
    text = io.TextIOWrapper(stream, encoding, errors="replace", newline="")
    return lambda size: text.read(size // 4).encode()  # a character has at most four bytes


def _check_text(head: bytes) -> None:
    """Raise Broken if the first bytes of a file are not those of a text."""
    check_no_pointer(head)
    for mark, name in _OTHER_THINGS.items():
        if head.startswith(mark):
            raise Broken(f"it is {name}, and its name does not say so")
    start, mark = _TAR_MARK
    if head[start : start + len(mark)] == mark:
        raise Broken("it is a tar archive: unpack it")
    whole = head[: head.rfind(b"\n") + 1] or head  # the last character may be cut
    if not (bad := bad_bytes(whole)):
        return
    count = f"{bad} of its first {len(whole)} bytes are not UTF-8"
    if len(whole.translate(None, _CONTROLS)) < 0.99 * len(whole):
        raise Broken(f"it is binary, or UTF-16 without its mark: {count}")
    advice = "convert it from its own (iconv -f cp1252 -t utf-8 for Western Europe's, -f shift_jis for Japan's)"
    raise Broken(f"it is text in another encoding: {count}; {advice}")


def check_no_pointer(head: bytes) -> None:
    """Raise Broken if the first bytes of a file say that it stands for another one."""
    if head.startswith(LFS_POINTER):
        raise Broken(f"it {NO_LFS_POINTER}")


def bad_bytes(data: bytes) -> int:
    """How many of some bytes are NUL or no UTF-8; 0 if they are few enough for a text."""
    if data.isascii() and b"\0" not in data:
        return 0
    bad = len(data) - len(data.replace(b"\0", b"").decode(errors="ignore").encode())
    return bad if bad * _ONE_BAD_BYTE_IN > len(data) else 0


class _Parts(io.RawIOBase):
    """The bytes that a function gives, however many it gives at a time: so all before a broken place can be read."""

    def __init__(self, read: Callable[[int], bytes]):
        self._read_some = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Member(io.BufferedReader):
    """A file in a zip archive; closes the archive, too."""

    def __init__(self, file: DataFile):
        self._archive = zipfile.ZipFile(file.path)
        try:
            super().__init__(cast("Any", self._archive.open(file.member)), BLOCK_BYTES)
        except RuntimeError as error:  # it has a password, or is compressed in a way that Python does not know
            raise Broken(str(error)) from error

    def close(self) -> None:
        super().close()
        self._archive.close()

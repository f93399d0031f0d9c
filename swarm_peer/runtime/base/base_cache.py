"""Keeps what this machine has downloaded of bases, for later runs and for other peers of its user.

Each base has a folder that reads as a published model: its small files, an index of tensors, and a safetensors file for
each tensor that is here. Files appear whole and checked, or not at all. Where the folder comes to its limit, the files
that were used longest ago go. Knows nothing of networks.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError

from swarm_peer.errors import UserError, first_line, machine_fault
from swarm_peer.files import replace_file
from swarm_peer.model.pretrained import INDEX_FILE, ModelSource
from swarm_peer.runtime.base.base_index import FILE, Base, num_bytes, read_part
from swarm_peer.runtime.state.index import hash_chunks
from swarm_peer.wire.messages import StateEntry

log = logging.getLogger(__name__)

# The index as it came.
PACKED_FILE = "index.msgpack"
# A file that was used so lately may be read, or written, by another process.
IN_USE_S = 3600.0


def bases_folder(cache_dir: Path | None) -> Path:
    """The folder of all bases: below the folder for downloads, or else this user's cache as freedesktop.org has it."""
    cache = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "swarm-bases"


class BaseCache:
    """The folder of one base. Its methods may block.

    Args:
        limit: most bytes of all bases together

    Attributes:
        folder: of this base
    """

    def __init__(self, bases: Path, sha256: str, limit: int):
        self.folder = bases / sha256
        self._bases = bases
        self._sha256 = sha256
        self._limit = limit

    def read_base(self) -> Base | None:
        """The index, if it is here."""
        try:
            return Base.read((self.folder / PACKED_FILE).read_bytes(), self._sha256)
        except OSError:
            return None

    def keep_base(self, base: Base) -> None:
        """Keep an index.

        Raises:
            UserError: the disk does not take it
        """
        files = {entry.name: _file_of(number, entry) for number, entry in enumerate(base.index.tensors)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / INDEX_FILE, json.dumps({"weight_map": files}))
            replace_file(self.folder / PACKED_FILE, base.packed)
        except OSError as error:
            raise self.error(error) from error

    def source(self, base: Base) -> ModelSource:
        """The folder, as a published model whose tensors are checked."""
        return ModelSource(str(self.folder), is_right=base.is_right)

    def path(self, number: int, entry: StateEntry) -> Path:
        """Where an entry of the index is, if it is here."""
        return self.folder / _file_of(number, entry)

    def use(self, base: Base, numbers: Iterable[int]) -> list[int]:
        """Note that some entries are used now; returns those that are not here."""
        missing = []
        for number in numbers:
            try:
                os.utime(self.path(number, base.entries[number]))
            except FileNotFoundError:
                missing.append(number)
            except OSError as error:  # another user's, perhaps
                log.debug("use_not_noted folder=%s reason=%s", self.folder, error)
        return missing

    def drop_damaged(self, base: Base, numbers: Iterable[int]) -> None:
        """Remove those of some entries whose files are not what was written."""
        for number in numbers:
            entry = base.entries[number]
            try:
                content = read_part(self.path(number, entry), entry, 0, num_bytes(entry))
                if hash_chunks(memoryview(content)) == entry.chunks:
                    continue
                log.warning("base_file_damaged path=%s: check the disk", self.path(number, entry))
                self.path(number, entry).unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError) as error:
                log.warning("base_file_damaged path=%s reason=%s", self.path(number, entry), first_line(error))
                self.path(number, entry).unlink(missing_ok=True)

    def make_room(self, wanted: int) -> None:
        """Remove what was used longest ago, until so many bytes fit.

        Raises:
            UserError: they do not fit
        """
        files = [(path.stat(), path) for path in self._bases.glob("*/*") if path.is_file()]
        total, removed, newest = sum(about.st_size for about, _ in files), 0, time.time() - IN_USE_S
        for about, path in sorted(files, key=lambda file: file[0].st_mtime):
            if total + wanted <= self._limit or about.st_mtime > newest:
                break
            path.unlink(missing_ok=True)
            removed += about.st_size
            total -= about.st_size
        if removed:
            log.info("base_files_removed folder=%s bytes=%d reason=--cache-size", self._bases, removed)
        if total + wanted > self._limit:
            raise UserError(
                f"{wanted} bytes of the run's base do not fit into {self._bases}, which holds {total} that are in use, "
                f"and may hold {self._limit}: allow more with --cache-size"
            )

    def write(self, number: int, entry: StateEntry) -> EntryFile:
        """Begin to write an entry.

        Raises:
            UserError: the disk does not take it
        """
        try:
            return EntryFile(self.path(number, entry), entry)
        except OSError as error:
            raise self.error(error) from error

    def error(self, error: OSError) -> UserError:
        """The error that tells a user that the disk has failed."""
        fault = machine_fault(error) or error.strerror
        return UserError(f"the run's base cannot be kept in {self.folder}: {fault}")


class EntryFile:
    """A tensor or a file that is being written, and appears once it is whole.

    Raises:
        OSError: all methods, if the disk does not take it
    """

    def __init__(self, path: Path, entry: StateEntry):
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        self._left = num_bytes(entry)
        header = b"" if entry.dtype == FILE else _header(entry)
        self._begin = len(header)
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.pwrite(self._file, header, 0)
        if self._left:
            os.posix_fallocate(self._file, self._begin, self._left)
        else:
            self._finish()

    def write(self, begin: int, data: memoryview) -> None:
        """Write a part of it, each once."""
        os.pwrite(self._file, data, self._begin + begin)
        self._left -= len(data)
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        self._partial.replace(self._path)
        self.close()

    def close(self) -> None:
        """Drop it, unless it is whole."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._partial.unlink(missing_ok=True)


def _file_of(number: int, entry: StateEntry) -> str:
    return entry.name if entry.dtype == FILE else f"{number:05d}.safetensors"


def _header(entry: StateEntry) -> bytes:
    """The beginning of a safetensors file with one tensor (huggingface.co/docs/safetensors: Format)."""
    about = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [0, num_bytes(entry)]}
    text = json.dumps({entry.name: about}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text

"""Keeps what this machine has downloaded of bases, for later runs and for other peers of its user.

Each base has a folder that reads as a published model: its small files, an index of tensors, and a safetensors file for
each tensor that is here. Files appear whole and checked, or not at all. Where the folder comes to its limit, tensors go
that were used longest ago. Knows nothing of networks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from swarm_peer.errors import InvalidMessage, UserError, first_line, machine_fault
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


class _Kept(NamedTuple):
    """A file, and when it was used last, in Unix seconds."""

    path: Path
    size: int
    used_s: float


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
        except (OSError, InvalidMessage):
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

    def missing_of(self, base: Base, numbers: Iterable[int]) -> list[int]:
        """Those of some entries that are not here; that the others are used now is noted."""
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
                if hash_chunks(content) == entry.chunks:
                    continue
                reason = "its hash has changed"
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError) as error:
                reason = first_line(error)
            log.warning("base_file_damaged path=%s reason=%s: check the disk", self.path(number, entry), reason)
            try:
                self.path(number, entry).unlink(missing_ok=True)
            except OSError as error:
                raise self.error(error) from error

    def make_room(self, wanted: int) -> None:
        """Remove tensors that were used longest ago, until so many bytes fit.

        Raises:
            UserError: they do not fit
        """
        kept, newest = self._kept(), time.time() - IN_USE_S
        total = sum(each.size for each in kept)
        limit = min(self._limit, total + self._free())
        old = [each for each in kept if each.used_s <= newest]
        in_use = total - sum(each.size for each in old)
        if in_use + wanted > limit:
            raise UserError(
                f"{wanted} bytes of the run's base do not fit into {self._bases}, which holds {in_use} that are in "
                f"use, and has room for {limit}: make room on that disk, or allow more with --cache-size"
            )
        removed = 0
        for each in sorted(old, key=lambda each: each.used_s):
            if total - removed + wanted <= limit:
                break
            try:
                each.path.unlink(missing_ok=True)
                removed += each.size
            except OSError as error:  # another user's, perhaps
                log.warning("base_file_not_removed path=%s reason=%s", each.path, error.strerror)
        if removed:
            log.info("base_files_removed folder=%s bytes=%d reason=--cache-size", self._bases, removed)

    def _kept(self) -> list[_Kept]:
        """The tensors of all bases, and what writers that were killed have left. Other files are small, and stay."""
        kept = []
        for path in self._bases.glob("*/*.safetensors*"):
            try:
                about = path.stat()
            except OSError:  # it has gone since
                continue
            kept.append(_Kept(path, about.st_size, about.st_mtime))
        return kept

    def _free(self) -> int:
        try:
            self._bases.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self._bases).free
        except OSError as error:
            raise self.error(error) from error

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
    """A tensor or a file that is being written, by several threads, and appears once it is whole.

    Raises:
        OSError: all methods, if the disk does not take it
    """

    def __init__(self, path: Path, entry: StateEntry):
        self._path = path
        # Two containers that share the folder may have processes of one number.
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        self._left = num_bytes(entry)
        self._counting = threading.Lock()
        header = b"" if entry.dtype == FILE else _header(entry)
        self._begin = len(header)
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.pwrite(self._file, header, 0)
            if self._left:
                os.posix_fallocate(self._file, self._begin, self._left)
            else:
                self._finish()
        except OSError:
            self.close()
            raise

    def write(self, begin: int, data: memoryview) -> bool:
        """Write a part of it, each once. Returns whether it is whole now."""
        os.pwrite(self._file, data, self._begin + begin)
        with self._counting:
            self._left -= len(data)
            if self._left:
                return False
            self._finish()
            return True

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

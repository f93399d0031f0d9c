"""Files of checkpoints on a disk or on any store that fsspec reaches (s3://, gs://, memory://).

Owns how they are written, hashed, published and removed. Knows nothing of their contents.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field

from swarm_peer.errors import UserError
from swarm_peer.files import sync
from swarm_peer.runtime.host.scratch import scratch_folder

log = logging.getLogger(__name__)

READ_BYTES = 4 * 2**20
# The name of a folder ends so while it is written; a save that was cut off leaves it behind.
PARTIAL = ".partial"


class FileEntry(BaseModel):
    """Size and hash that a file must have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class FileStore:
    """One folder, whose subfolders are written once, read, and removed. Paths are as `folders` gives them.

    Raises:
        UserError: no such kind of store, or what it needs is not installed
        OSError: all methods, whatever the store's client raises
    """

    def __init__(self, url: str):
        try:
            self._fs, self.base = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot reach {url} ({error}): correct the address, or install what it needs") from error
        self.base = self.base.rstrip("/")
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def folders(self) -> dict[str, str]:
        """Paths by name, in the base folder; empty if there is none."""
        with _errors_of_the_client():
            self._fs.invalidate_cache()
            try:
                paths = [str(path).rstrip("/") for path in self._fs.ls(self.base, detail=False)]
            except FileNotFoundError:
                return {}
        return {path.rpartition("/")[2]: path for path in paths}

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there. The client's own `exists` says no as well if the store does not answer."""
        with _errors_of_the_client():
            try:
                self._fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def read(self, path: str, max_bytes: int) -> bytes:
        """A small file, whole. Raises ValueError if it is not small."""
        with _errors_of_the_client(), self._fs.open(path, "rb") as file:
            content: bytes = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return content

    def describe(self, path: str) -> FileEntry:
        """Size and hash of a file as it is now."""
        with _errors_of_the_client(), self._fs.open(path, "rb") as file:
            return describe_file(file)

    @contextmanager
    def on_disk(self, path: str) -> Iterator[Path]:
        """The file, or a copy of it, on this machine's disk."""
        if self.is_local:
            yield Path(path)
            return
        with scratch_folder() as folder:
            with _errors_of_the_client():
                self._fs.get_file(path, f"{folder}/file")
            yield folder / "file"

    def address(self, folder: str) -> str:
        """The folder's address as a person would name it."""
        return folder if self.is_local else str(self._fs.unstrip_protocol(folder))

    def partial_of(self, folder: str) -> str:
        """Where a subfolder's files are written before `publish`."""
        return folder + PARTIAL if self.is_local else folder

    def begin(self, partial: str, first: str) -> None:
        """Make an empty subfolder; see `remove` for `first`."""
        self.remove(partial, first)
        with _errors_of_the_client():
            self._fs.makedirs(partial, exist_ok=True)

    def write(self, path: str, write: Callable[[Path], object]) -> FileEntry:
        """Have `write` make a file at a path that it is given, and store that file at `path`."""
        with nullcontext() if self.is_local else scratch_folder() as scratch:
            file = Path(path) if scratch is None else scratch / "file"
            write(file)
            with file.open("rb+") as written:
                os.fsync(written.fileno())
                entry = describe_file(written)
            if not self.is_local:
                with _errors_of_the_client():
                    self._fs.put_file(str(file), path)
        return entry

    def publish(self, partial: str, folder: str) -> None:
        """Give a folder its name. On a disk this is one step, after a folder of the same name is removed."""
        if not self.is_local:
            return
        shutil.rmtree(folder, ignore_errors=True)
        sync(Path(partial))
        os.rename(partial, folder)
        try:
            sync(Path(self.base))
        except OSError as error:  # it is there: another try would save it once more beside it
            log.warning("checkpoint_not_synced path=%s reason=%s", folder, error)

    def remove(self, folder: str, first: str) -> None:
        """Remove a subfolder, if it is there, and the file `first` in it before all others."""
        with _errors_of_the_client():
            self._fs.invalidate_cache()
            if self.exists(f"{folder}/{first}"):
                self._fs.rm_file(f"{folder}/{first}")
            if self.exists(folder):
                self._fs.rm(folder, recursive=True)


def describe_file(file: BinaryIO) -> FileEntry:
    """Size and hash, from where the file stands to its end."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(READ_BYTES):
        digest.update(block)
        size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


@contextmanager
def _errors_of_the_client() -> Iterator[None]:
    """Clients of object stores have no common class of errors: here they get one."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error

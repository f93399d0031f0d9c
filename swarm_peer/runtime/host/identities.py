"""Peers of one user keep their identities over restarts, and what they know; no two run with the same identity."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from swarm_peer.files import replace_file

log = logging.getLogger(__name__)


def state_folder() -> Path:
    """The folder of what programs of this user keep, as freedesktop.org has it."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "swarm"


@contextmanager
def free_identity(folder: Path, scratch: Path, name: str = "identity") -> Iterator[Path]:
    """The file of the first identity in a folder that no other process uses, nor will as long as the context is open.

    Args:
        scratch: where to keep the identity of this one start, if the folder cannot be written to
        name: that the files of such identities have, before their numbers
    """
    try:
        number, lock = next(
            (number, lock) for number in itertools.count() if (lock := locked(folder, f"{name}-{number}"))
        )
    except OSError as error:
        log.warning("identity_not_kept folder=%s reason=%s", folder, error.strerror)
        yield scratch / "identity"
        return
    with closing(lock):
        yield folder / f"{name}-{number}"


class KeptFile:
    """A small file that outlives this process, of something that others tell again if it is lost."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> bytes:
        """The bytes that were written last; none if they cannot be read."""
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def write(self, data: bytes) -> str:
        """Replace the content at once, if possible; otherwise the former content stays.

        Returns:
            why it was not possible; empty if it was
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, data)
        except OSError as error:
            log.warning("not_kept path=%s reason=%s", self._path, error.strerror)
            return error.strerror or str(error)
        return ""


def locked(folder: Path, name: str) -> IO[str] | None:
    """The lock of that name in a folder, held until it is closed; None if another process holds it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (folder / f"{name}.lock").open("w", encoding="utf-8")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock

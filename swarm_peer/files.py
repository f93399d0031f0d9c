"""Replaces files so that a reader, also one after a crash, finds all of the old content or all of the new; locks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from errno import EBADF, EINVAL, ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path

log = logging.getLogger(__name__)

ANYBODY = 0o666  # but for what the umask takes away
OWNER = 0o600
# A file system that does not sync folders says one of these.
UNABLE = {EBADF, EINVAL, ENOTSUP}
# A file system without locks says one of these: Lustre as it is often mounted, NFS without its lock daemon.
WITHOUT_LOCKS = {ENOSYS, ENOLCK, ENOTSUP, EOPNOTSUPP}


# How a file begins that stands for one that Git LFS has not downloaded, and what to say of it.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NO_LFS_POINTER = "is a pointer of Git LFS, not the file itself: download that (git lfs pull)"


def replace_file(path: Path, content: str | bytes, *, mode: int = ANYBODY) -> None:
    """Replace a file at once, also for a power failure. Where that fails, the former content stays, and nothing else.

    Args:
        mode: who may read and write it

    Raises:
        OSError: it cannot be written
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the name: it must not outlive the content
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file's content, or the names in a folder, survive a power failure.

    Raises:
        OSError: the disk does not take it
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in UNABLE:
            raise
    finally:
        os.close(descriptor)


def lock(function: Callable[[int, int], None], descriptor: int, operation: int, folder: Path) -> None:
    """Lock a file, until it is closed, where its file system has locks. Elsewhere the process goes on without one.

    Args:
        function: `fcntl.flock`, whose lock forked children hold as well, or `fcntl.lockf`
        folder: where the file is, to be named in the log

    Raises:
        BlockingIOError: another process holds it, and `operation` is not to wait
        OSError: as for any other use of the file
    """
    try:
        function(descriptor, operation)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning("not_locked folder=%s reason=%s", folder, error.strerror)

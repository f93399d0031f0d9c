"""Temporary folders of a process. If a process is killed, a later process removes its folder."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "swarm-peer-"
# The process that owns the folder holds a lock on this file. The lock ends with the process, even if that is killed.
LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder below the system's folder for temporary files, and remove it when the context ends.

    Snapshots in it may take gigabytes, so the folders of processes that are gone are removed first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, open(Path(name) / LOCK, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
                log.info("scratch_removed path=%s reason=the process that owned it is gone", lock.parent)
        except OSError:
            continue  # the folder is in use, or belongs to another user

"""Folders for what a process needs while it lives; those of processes that were killed are removed by later ones."""

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
# The process that owns the folder holds a lock on it, which ends with the process however that ends.
LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder below the system's one for temporary files. Snapshots in it may have gigabytes."""
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
                log.info("scratch_removed path=%s reason=the process that it belonged to is gone", lock.parent)
        except OSError:
            continue  # it is in use, or another user's

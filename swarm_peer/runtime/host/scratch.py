"""Temporary folders of a process, on a disk. If a process is killed, a later process removes its folder."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from swarm_peer.files import lock

log = logging.getLogger(__name__)

PREFIX = "swarm-peer-"
# The process that owns the folder holds a lock on this file. The lock ends with the process, even if that is killed.
LOCK = "lock"
# Where Linux lists what is mounted in the view of this process: a line each, with the device's number and the type.
MOUNTS = Path("/proc/self/mountinfo")
# Unlike /tmp, this folder of Unix systems outlives a restart of the machine, so it is on a disk.
ON_DISK = Path("/var/tmp")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for large temporary files, and remove it when the context ends.

    Snapshots in it may take gigabytes, so the folders of processes that are gone are removed first.
    """
    parent = temporary_folder()
    if is_in_memory(parent):
        log.warning(
            "snapshots_take_memory path=%s: it is no folder on a disk; name one in the environment variable TMPDIR",
            parent,
        )
    _remove_abandoned(parent)
    with ExitStack() as held:
        # Another process may take a folder for abandoned, and remove it, before this one has its lock.
        while not ((folder := _locked_folder(parent, held)) / LOCK).exists():
            held.close()
        yield folder


def _locked_folder(parent: Path, held: ExitStack) -> Path:
    """Make a folder and lock it, until `held` closes, which removes it."""
    # A thread that is left to itself may still write there then.
    made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    folder = Path(held.enter_context(made))
    with suppress(FileNotFoundError):
        file = held.enter_context((folder / LOCK).open("wb"))
        lock(fcntl.flock, file.fileno(), fcntl.LOCK_EX, folder)
    return folder


def temporary_folder() -> Path:
    """The folder for large temporary files: the one that TMPDIR names, or else the system's, if that is on a disk.

    Where /tmp is kept in memory, as on many Linux systems, /var/tmp takes its place.
    """
    usual = Path(tempfile.gettempdir())
    is_named = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))  # those that tempfile looks at
    if is_named or not is_in_memory(usual):
        return usual
    return ON_DISK if is_usable(str(ON_DISK)) and not is_in_memory(ON_DISK) else usual


def is_usable(folder: str) -> bool:
    """Whether this user may make files in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def is_in_memory(folder: Path) -> bool:
    """Whether files in a folder take memory instead of a disk; False where the system does not tell."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # As proc(5) has it: id, parent's id, device, root, mount point, options, any number of fields, "-", type, ...
    types = {line.partition(" - ")[2].split(" ")[0] for line in mounts if line.split(" ")[2] == device}
    return bool(types & {"tmpfs", "ramfs"})


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            # Without a wait: another user may have made anything there.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent)
                log.info("scratch_removed path=%s reason=the process that owned it is gone", path.parent)
        except OSError:
            continue  # the folder is in use, or belongs to another user

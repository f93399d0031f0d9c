"""The memory of this machine that this process may use: all of it, or less in a container that has a limit."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")
_OWN_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True)
class _Files:
    """Where a version of Linux's control groups has its figures, below the folder of a group.

    Attributes:
        reclaimable: key in memory.stat of what the kernel takes back before it refuses memory
    """

    limit: str
    used: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this process may still take, and may take in all.

    That is the machine's, or what the tightest of the control groups that this process is in has; a container is one.
    """
    kib = {line.split(":")[0]: int(line.split()[1]) for line in _MACHINE.read_text(encoding="utf-8").splitlines()}
    free_bytes, all_bytes = 1024 * kib["MemAvailable"], 1024 * kib["MemTotal"]
    for limit, used in _limits():
        free_bytes, all_bytes = min(free_bytes, max(limit - used, 0)), min(all_bytes, limit)
    return free_bytes, all_bytes


def within_addresses(free_bytes: int, all_bytes: int) -> tuple[int, int]:
    """The memory of `host_memory`, or less where this process may have fewer addresses (`ulimit -v`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return free_bytes, all_bytes
    used = int(_OWN_PAGES.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    return min(free_bytes, max(limit - used, 0)), min(all_bytes, limit)


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each group with a limit that this process is in, from the inside out."""
    with suppress(OSError):  # no Linux
        for line in _GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                files, mount = _V2, _ROOT
            elif "memory" in controllers.split(","):
                files, mount = _V1, _ROOT / "memory"
            else:
                continue
            # Where a container sees the machine's name of its group, the group is the mount itself all the same.
            path = PurePosixPath(group).relative_to("/")
            for folder in dict.fromkeys([path, *path.parents, PurePosixPath()]):
                with suppress(OSError, ValueError):  # without a limit version 2 says "max", and its root says nothing
                    yield _read(mount / folder, files)


def _read(folder: Path, files: _Files) -> tuple[int, int]:
    limit, used = (
        int((folder / files.limit).read_text(encoding="utf-8")),
        int((folder / files.used).read_text(encoding="utf-8")),
    )
    counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    return limit, used - int(counts.get(files.reclaimable, 0))

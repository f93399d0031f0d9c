"""The memory that a process may use where control groups limit it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from swarm_peer.runtime.host import memory

GIB = 2**30
MACHINE = f"MemTotal: {24 * 2**20} kB\nMemFree: {2**20} kB\nMemAvailable: {20 * 2**20} kB\nHugePages_Total: 0\n"
UNLIMITED_V1 = 9223372036854771712


def v1(limit: int, used: int, reclaimable: int) -> Mapping[str, str]:
    stat = f"cache 5\ninactive_file 7\ntotal_inactive_file {reclaimable}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def v2(limit: int | None, used: int, reclaimable: int) -> Mapping[str, str]:
    limit_text = "max" if limit is None else str(limit)
    return {
        "memory.max": f"{limit_text}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"inactive_file {reclaimable}\n",
    }


@pytest.mark.parametrize(
    ("lines", "groups", "free_gib", "all_gib"),
    [
        ("", {}, 20, 24),
        ("0::/\n", {"": v2(None, GIB, 0)}, 20, 24),
        ("0::/user.slice/session\n", {"user.slice/session": v2(None, GIB, 0)}, 20, 24),
        # A container that sees its group as the root, and one that sees the machine's name of it.
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB, GIB)}, 2, 4),
        ("0::/docker/1f\n", {"": v2(4 * GIB, 3 * GIB, GIB)}, 2, 4),
        # What is above limits those below.
        ("0::/pods/one\n", {"pods/one": v2(8 * GIB, GIB, 0), "pods": v2(6 * GIB, 5 * GIB, 0)}, 1, 6),
        ("9:cpu,cpuacct:/a\n4:memory:/docker/1f\n0::/\n", {"memory": v1(4 * GIB, 3 * GIB, GIB)}, 2, 4),
        ("4:hugetlb,memory:/job:1\n", {"memory/job:1": v1(GIB, 2 * GIB, 0), "memory": v1(UNLIMITED_V1, 0, 0)}, 0, 1),
        ("4:memory:/\n", {"memory": v1(UNLIMITED_V1, 9 * GIB, 0)}, 20, 24),
        # The other controllers' groups say nothing of memory.
        ("4:pids:/a\n", {"memory/a": v1(GIB, 0, 0)}, 20, 24),
    ],
)
def test_the_tightest_group_limits_what_the_machine_has(
    lines: str,
    groups: Mapping[str, Mapping[str, str]],
    free_gib: int,
    all_gib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cgroup").write_text(lines)
    for name, files in groups.items():
        folder = tmp_path / "mount" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, text in files.items():
            (folder / file_name).write_text(text)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_ROOT", tmp_path / "mount")
    (tmp_path / "meminfo").write_text(MACHINE)
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    assert memory.host_memory() == (free_gib * GIB, all_gib * GIB)


@pytest.mark.parametrize(("limit", "expected"), [(-1, (20, 24)), (9 * GIB, (6, 9)), (2 * GIB, (0, 2))])
def test_a_process_may_have_fewer_addresses(
    limit: int, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statm").write_text(f"{3 * GIB // resource.getpagesize()} 9 9 9 0 9 0\n")
    monkeypatch.setattr(memory, "_OWN_PAGES", tmp_path / "statm")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert memory.within_addresses(20 * GIB, 24 * GIB) == tuple(size * GIB for size in expected)


def test_a_system_without_groups_has_all_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "none")
    (tmp_path / "meminfo").write_text(MACHINE)
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    assert memory.host_memory() == (20 * GIB, 24 * GIB)

"""Looks at this machine for `swarm-peer doctor`, and for a peer that starts. It judges nothing."""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from urllib.parse import urlsplit

import torch

from swarm_peer.errors import UserError
from swarm_peer.model.families.attention import AMPERE
from swarm_peer.policy.diagnosis.machine_findings import (
    LEAST_ROOM_BYTES,
    LEAST_TO_START_BYTES,
    DeviceFacts,
    FolderRoom,
    MachineFacts,
)
from swarm_peer.runtime.host.identities import state_folder
from swarm_peer.runtime.host.preparation import check_device, choose_device, in_words, memory_bytes
from swarm_peer.runtime.host.scratch import temporary_folder

# Where NVIDIA's driver for Linux says its version, also inside containers.
DRIVER = Path("/proc/driver/nvidia/version")
# A product of so large matrices keeps the device busy; on a GPU, all of its cores.
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
# For so long at least, so that a GPU has its clock rate.
TIMED_S = 0.3
# A proxy is near.
PROXY_TIMEOUT_S = 3.0
# Variables of proxies that are used, as urllib and httpx read them. `no` is the list of hosts to pass them by.
PROXY_SCHEMES = ("http", "https", "all")
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


def look_at_machine(device: str, cache_dir: Path | None, *, snapshot_bytes: int = LEAST_ROOM_BYTES) -> MachineFacts:
    """Look at a machine for a moment, without its network.

    Args:
        device: as `--device` has it
        cache_dir: as `--cache-dir` has it
        snapshot_bytes: that the peer would keep in the folder for temporary files
    """
    return MachineFacts(
        device=look_at_device(device),
        rooms=look_at_rooms(cache_dir, snapshot_bytes),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        proxies={f"{name}_proxy": value for name, value in _proxies().items()},
    )


def look_longer(facts: MachineFacts) -> MachineFacts:
    """Add what takes seconds: the speed of the device, and whether proxies answer."""
    silent = frozenset(name for name, value in facts.proxies.items() if not _answers(value))
    return replace(facts, device=time_device(facts.device), silent_proxies=silent)


def _proxies() -> dict[str, str]:
    found = urllib.request.getproxies_environment()
    return {scheme: found[scheme] for scheme in PROXY_SCHEMES if found.get(scheme)}


def _answers(proxy: str) -> bool:
    """Whether something accepts connections at a proxy; True where its address cannot be read, which is judged."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        place = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return True
    if not place[0]:
        return True
    try:
        socket.create_connection((place[0], place[1]), timeout=PROXY_TIMEOUT_S).close()
    except (OSError, UnicodeError):
        return False
    return True


def look_at_device(wanted: str) -> DeviceFacts:
    """The device that a peer would compute on, without a computation."""
    facts = DeviceFacts(
        wanted=wanted,
        num_gpus=torch.cuda.device_count(),
        driver=_driver(),
        torch_cuda=torch.version.cuda or "",
        hides_gpus=os.environ.get(CUDA_DEVICES, "0").strip() in ("", "-1"),
    )
    try:
        device = str(choose_device(wanted))
        return replace(facts, device=device, name=device)
    except UserError as error:
        return replace(facts, error=str(error))


def time_device(facts: DeviceFacts) -> DeviceFacts:
    """Add name, memory and speed of the device, or why it cannot compute."""
    if facts.error:
        return facts
    device = torch.device(facts.device)
    try:
        check_device(device, "fp32")
        free_bytes, all_bytes = memory_bytes(device)
        flops_per_s, precision = _matrix_flops(device)
    except UserError as error:
        return replace(facts, error=str(error))
    except RuntimeError as error:  # out of memory, or torch has nothing for this GPU
        text = str(error).strip().splitlines()[0][:200]
        return replace(facts, error=f"{device} fails at a product of matrices ({text})")
    return replace(
        facts,
        name=in_words(device),
        free_bytes=free_bytes,
        all_bytes=all_bytes,
        flops_per_s=flops_per_s,
        precision=precision,
    )


def _matrix_flops(device: torch.device) -> tuple[float, str]:
    """Operations per second of a matrix product, and the precision that it has: the one that runs mostly train in."""
    size, dtype, precision = MATRIX_SIZE[device.type], torch.float32, "fp32"
    if device.type == "cuda":
        is_new = torch.cuda.get_device_capability(device) >= AMPERE
        dtype, precision = (torch.bfloat16, "bf16") if is_new else (torch.float16, "fp16")
    left = torch.ones(size, size, dtype=dtype, device=device)
    product = left @ left  # the first one loads libraries
    _finish(device)
    count, begun_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - begun_s) < TIMED_S:
        torch.matmul(left, left, out=product)
        _finish(device)
        count += 1
    return 2.0 * size**3 * count / passed_s, precision


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _driver() -> str:
    """The version of NVIDIA's driver on this machine; empty without one."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[.\d]+)\s", DRIVER.read_text(encoding="utf-8", errors="replace"))
        return found[1] if found else "unknown"
    return ""


def look_at_rooms(cache_dir: Path | None, snapshot_bytes: int) -> tuple[FolderRoom, ...]:
    """The folders that a peer writes to, and the room there."""
    cache = cache_dir or Path(
        os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    )
    return (
        _room("the peer's key", state_folder(), "XDG_STATE_HOME", LEAST_TO_START_BYTES),
        _room("downloads", cache, "--cache-dir", LEAST_ROOM_BYTES),
        _room("snapshots", temporary_folder(), "TMPDIR", snapshot_bytes),
    )


def _room(purpose: str, path: Path, option: str, needed_bytes: int) -> FolderRoom:
    path = path.absolute()
    folder = next(each for each in (path, *path.parents) if each.exists())  # the peer makes the rest
    room = FolderRoom(purpose=purpose, path=str(path), option=option, needed_bytes=needed_bytes)
    try:
        room = replace(room, disk=folder.stat().st_dev, free_bytes=disk_usage(folder).free)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # A full disk takes no file either, and how full it is says more.
        is_full = room.free_bytes is not None and room.free_bytes < LEAST_TO_START_BYTES
        return room if is_full else replace(room, error=error.strerror or str(error))
    return room

"""Judges the machine that a peer is to run on: device, memory, disk, open files and proxies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from swarm_peer.policy.diagnosis.finding import CheckFinding, failure, fine, in_bytes, warning

# torch, a model's code and the buffers between peers, before any weight.
LEAST_MEMORY_BYTES = 10**9
# Each connection of libp2p's daemon, each stream to it and each file of a data set takes one.
LEAST_OPEN_FILES = 1024
# Logs, a pip cache or another program fill less than that in no time.
LEAST_ROOM_BYTES = 10**9
# For the peer's key and what it keeps of revocations.
LEAST_TO_START_BYTES = 10**6
# NVIDIA's oldest driver of each CUDA release, by its first number: docs.nvidia.com/cuda/cuda-toolkit-release-notes.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
# The hub's client, which is built on httpx, takes these without further packages.
KNOWN_PROXIES = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that the peer would compute on.

    Attributes:
        wanted: what `--device` says
        device: as torch names it
        name: in words
        error: why it cannot be used; empty if it can
        free_bytes, all_bytes: its memory, free and in all
        flops_per_s: of a matrix product; 0 if it was not timed
        precision: of that product
        num_gpus: that torch can use
        driver: the version of NVIDIA's driver on this machine; empty without one
        torch_cuda: the release of CUDA that torch is built for; empty without one
        hides_gpus: whether the environment hides all GPUs from this process
    """

    wanted: str = "auto"
    device: str = "cpu"
    name: str = "cpu"
    error: str = ""
    free_bytes: int = 0
    all_bytes: int = 0
    flops_per_s: float = 0.0
    precision: str = "fp32"
    num_gpus: int = 0
    driver: str = ""
    torch_cuda: str = ""
    hides_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRoom:
    """A folder that the peer writes to.

    Attributes:
        purpose: what lies there
        option: what names another folder
        disk: identifies the disk; folders of one disk share its room
        free_bytes: None if it cannot be told
        needed_bytes: that the peer would write there
        error: why the folder cannot be written to; empty if it can
    """

    purpose: str
    path: str
    option: str
    disk: int = 0
    free_bytes: int | None = None
    needed_bytes: int = LEAST_ROOM_BYTES
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All that was measured of a machine.

    Attributes:
        open_files: that this process may have at a time
        proxies: variables of the environment that name proxies, with their values
        silent_proxies: those of them at which nothing answers, as far as that was tried
    """

    device: DeviceFacts
    rooms: Sequence[FolderRoom]
    open_files: int
    proxies: Mapping[str, str]
    silent_proxies: frozenset[str] = frozenset()


def judge_machine(facts: MachineFacts) -> tuple[CheckFinding, ...]:
    """Judge all of a machine, a finding for each check."""
    return (
        judge_device(facts.device),
        judge_memory(facts.device),
        judge_disk(facts.rooms),
        judge_open_files(facts.open_files),
        judge_proxies(facts.proxies, facts.silent_proxies),
    )


def judge_device(device: DeviceFacts) -> CheckFinding:
    """Whether the device works, and is the one that was meant: torch passes over a GPU whose driver does not fit."""
    if device.num_gpus == 0 and device.driver and not device.hides_gpus and device.wanted != "cpu":
        seen = f"torch does not see this machine's NVIDIA GPU (driver {device.driver}, torch for CUDA {_cuda(device)})"
        judged = failure if device.error else warning
        return judged("device", seen, _gpu_remedy(device))
    if device.error:
        return failure("device", device.error)
    speed = f", {device.flops_per_s / 1e12:.3g} TFLOP/s in {device.precision}" if device.flops_per_s else ""
    driver = f", driver {device.driver}" if device.driver and device.num_gpus else ""
    return fine("device", f"{device.name}{driver}{speed}")


def _cuda(device: DeviceFacts) -> str:
    return device.torch_cuda or "none"


def _gpu_remedy(device: DeviceFacts) -> str:
    if not device.torch_cuda:
        return "install a build of torch for CUDA, or say --device cpu"
    least = LEAST_DRIVER.get(_first_number(device.torch_cuda), 0)
    if _first_number(device.driver) < least:
        return f"install driver {least} or newer, or a build of torch for an older CUDA (docs/operating.md, Peers)"
    return (
        "let this process use it (in a container, `docker run --gpus all`), restart the machine if its driver is newer "
        "than its start, or say --device cpu"
    )


def _first_number(version: str) -> int:
    digits = version.split(".")[0]
    return int(digits) if digits.isdecimal() else 0


def judge_memory(device: DeviceFacts) -> CheckFinding:
    """Whether the device has memory left for training at all."""
    if not device.all_bytes:
        return fine("memory", "not looked at")
    seen = f"{in_bytes(device.free_bytes)} of {in_bytes(device.all_bytes)} free"
    if device.free_bytes < LEAST_MEMORY_BYTES:
        return warning("memory", seen, f"end what else uses the memory of {device.name}")
    return fine("memory", seen)


def judge_disk(rooms: Sequence[FolderRoom]) -> CheckFinding:
    """Whether all folders can be written to, and the disks have room for what the peer writes to them."""
    problem = next(_disk_problems(rooms), None)
    if problem is not None:
        return problem
    smallest = {room.disk: room for room in reversed(rooms) if room.free_bytes is not None}
    seen = ", ".join(f"{in_bytes(room.free_bytes or 0)} free at {room.path}" for room in reversed(smallest.values()))
    return fine("disk", seen or "its room is not known")


def _disk_problems(rooms: Sequence[FolderRoom]) -> Iterator[CheckFinding]:
    """The findings of disks that will not do, the worst first."""
    for room in rooms:
        if room.error:
            seen = f"{room.path}, for {room.purpose}, cannot be written to ({room.error})"
            yield failure("disk", seen, f"mend that, or name another folder with {room.option}")
    shared: defaultdict[int, list[FolderRoom]] = defaultdict(list)
    for room in rooms:
        if room.free_bytes is not None:
            shared[room.disk].append(room)
    for least, judged in ((LEAST_TO_START_BYTES, failure), (None, warning)):
        for together in shared.values():
            free_bytes = min(room.free_bytes or 0 for room in together)
            needed = sum(room.needed_bytes for room in together) if least is None else least
            if free_bytes < needed:
                largest = max(together, key=lambda room: room.needed_bytes)
                what = " and ".join(room.purpose for room in together)
                seen = f"{in_bytes(free_bytes)} free at {largest.path}, and {what} may take {in_bytes(needed)}"
                yield judged("disk", seen, f"free some, or name a folder elsewhere with {largest.option}")


def judge_open_files(open_files: int) -> CheckFinding:
    """Whether the peer may have as many files and connections open as a large run takes."""
    if open_files < LEAST_OPEN_FILES:
        return warning("open files", f"{open_files} at a time are few", "raise the limit with `ulimit -n 65536`")
    return fine("open files", f"{open_files} at a time")


def judge_proxies(proxies: Mapping[str, str], silent: frozenset[str]) -> CheckFinding:
    """Whether what the environment has as proxies can serve downloads. Connections between peers pass by them."""
    for name, value in sorted(proxies.items()):
        scheme, host = _proxy(value)
        if not host:
            return warning("proxies", f"{name} names no proxy", "unset it, or name one such as http://HOST:PORT")
        if scheme not in KNOWN_PROXIES:
            seen = f"{name} names a {scheme} proxy, which downloads fail with"
            return warning("proxies", seen, "unset it, name one of http, or install the package socksio")
        if name in silent:
            seen = f"nothing answers at {host}, which {name} names, and downloads go there"
            return warning("proxies", seen, "unset it, or start that proxy")
    if not proxies:
        return fine("proxies", "none in the environment")
    hosts = sorted({_proxy(value)[1] for value in proxies.values()})
    return fine("proxies", f"downloads go by {', '.join(hosts)}; connections between peers do not")


def _proxy(value: str) -> tuple[str, str]:
    """Scheme, and host and port of a proxy, without the password that may be there; empty if there is none."""
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", ""
    host = f"[{host}]" if ":" in host else host
    return parts.scheme.lower(), f"{host}:{port}" if host and port else host

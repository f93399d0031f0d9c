"""Peers that are described rather than met: the file that `plan --peers` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from coordinator.config_files import PEERS, find_file, read_yaml
from coordinator.planning.gpus import find_gpu
from swarm_peer.config_errors import describe
from swarm_peer.errors import UserError
from swarm_peer.policy.planning.resources import PeerGroup
from swarm_peer.policy.stage_memory import RESERVED_BYTES
from swarm_peer.settings import Section

Precision = Literal["fp32", "bf16", "fp16"]

# Share of a data sheet's peak that training a transformer reaches, if the file does not say: 16-bit matrix units are
# hard to feed, plain fp32 is not. A rule of thumb: a live run's own measurements are better.
USUAL_UTILISATION: dict[Precision, float] = {"fp32": 0.6, "bf16": 0.3, "fp16": 0.3}
# Share of a link that carries bytes of a run while both directions are busy, if the file does not say: measured with
# links that have a latency of 100 ms and queues of 0.2 s (benchmarks/slow-links-2026-11-25.md).
USUAL_LINK_UTILISATION = 0.65
# An average has many parts on their way, which fill gaps that microbatches leave: of the same measurements.
AVERAGING_GAIN = 1.15


def reached_bytes_per_s(mbps: float, utilisation: float = USUAL_LINK_UTILISATION) -> float:
    """Bytes of a run that a link of so many megabits per second carries in one direction."""
    return utilisation * mbps * 1e6 / 8


class PeerGroupSection(Section):
    """Some peers that are alike."""

    gpu: str | None = None
    """a GPU of the table, such as T4: for its TFLOP/s and memory"""
    tflops: float | None = Field(None, gt=0)
    """peak TFLOP/s of one peer at the run's precision; that of the GPU if not given"""
    utilisation: float | None = Field(None, gt=0, le=1)
    """share of the peak that training reaches; 0.3 in 16 bits, 0.6 in fp32 if not given"""
    memory_gb: float | None = Field(None, gt=0)
    """memory of the device, 1e9 bytes; that of the GPU if not given"""
    name: str | None = Field(None, min_length=1)
    """what reports call them; the GPU if not given"""
    count: int = Field(1, ge=1, le=100_000)
    """how many there are"""
    upload_mbps: float = Field(gt=0)
    """megabits per second that the link of one peer sends, as it is sold"""
    download_mbps: float = Field(gt=0)
    """megabits per second that it receives"""
    link_utilisation: float = Field(USUAL_LINK_UTILISATION, gt=0, le=1)
    """share of that bandwidth which training reaches; 0.65 if not given"""
    latency_ms: float = Field(0.0, ge=0)
    """round trip to another peer"""
    reachability: Literal["open", "closed"] = "open"
    """closed if their routers let in no other closed peer, and no member carries connections (docs/routers.md)"""
    dollars_per_hour: float = Field(0.0, ge=0)
    """price of one peer"""
    dollars_per_gb: float = Field(0.0, ge=0)
    """price of what it sends, per 1e9 bytes"""

    @model_validator(mode="after")
    def _can_compute(self) -> PeerGroupSection:
        missing = [key for key in ("tflops", "memory_gb") if getattr(self, key) is None]
        if self.gpu is None and missing:
            raise ValueError(f"no gpu and no {' and no '.join(missing)}: name a gpu of the table, or give both by hand")
        return self

    def group(self, precision: Precision) -> PeerGroup:
        """The group as the planner takes it.

        Raises:
            UserError: an unknown GPU, or one that lacks the precision
        """
        gpu = find_gpu(self.gpu) if self.gpu is not None else None
        tflops = self.tflops if self.tflops is not None else gpu.tflops(precision)  # type: ignore[union-attr]
        memory_gb = self.memory_gb if self.memory_gb is not None else gpu.memory_gb  # type: ignore[union-attr]
        utilisation = self.utilisation if self.utilisation is not None else USUAL_UTILISATION[precision]
        return PeerGroup(
            name=self.name or (gpu.name if gpu else f"{tflops:g} TFLOP/s"),
            count=self.count,
            flops_per_s=tflops * 1e12 * utilisation,
            memory_bytes=max(memory_gb * 1e9 - RESERVED_BYTES, 0.0),
            upload_bytes_per_s=reached_bytes_per_s(self.upload_mbps, self.link_utilisation),
            download_bytes_per_s=reached_bytes_per_s(self.download_mbps, self.link_utilisation),
            averaging_gain=min(AVERAGING_GAIN, 1 / self.link_utilisation),
            latency_s=self.latency_ms / 1e3,
            dollars_per_hour=self.dollars_per_hour,
            dollars_per_sent_byte=self.dollars_per_gb / 1e9,
            is_closed=self.reachability == "closed",
        )


class PeersFile(Section):
    """The content of a file of peers."""

    peers: tuple[PeerGroupSection, ...] = Field(min_length=1)
    """groups of peers that are alike"""


def load_peers(path: Path, precision: Precision) -> list[PeerGroup]:
    """Read a file such as configs/peers/volunteers.yaml, or one that comes with Swarm, such as volunteers.

    Raises:
        UserError: it is missing, no YAML, holds unknown, missing or contradictory keys, or an unknown GPU
    """
    try:
        content = read_yaml(find_file(path, PEERS))
    except UserError as error:
        raise UserError(f"--peers: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--peers: {path}: expected `peers:` and a list of groups, got {content!r:.60}")
    try:
        return distinct([section.group(precision) for section in PeersFile.model_validate(content).peers])
    except ValidationError as error:
        raise UserError(f"--peers: {path}: {describe(error, PeersFile)}") from error
    except UserError as error:
        raise UserError(f"--peers: {path}: {error}") from error


def distinct(groups: Sequence[PeerGroup]) -> list[PeerGroup]:
    """The same groups, with numbers after names that occur twice."""
    seen: Counter[str] = Counter()
    result = []
    for group in groups:
        seen[group.name] += 1
        result.append(replace(group, name=f"{group.name} ({seen[group.name]})") if seen[group.name] > 1 else group)
    return result

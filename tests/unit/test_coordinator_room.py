"""Runs that do not fit into this machine's memory, which is told before anything is allocated."""

from __future__ import annotations

import pytest
import torch
from swarm import tiny_manifest

from coordinator.run import room
from swarm_peer.errors import UserError
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest

CPU = torch.device("cpu")


@pytest.fixture
def resolved() -> ResolvedManifest:
    return ResolvedManifest.of(tiny_manifest())


def has(monkeypatch: pytest.MonkeyPatch, free: float, there: float) -> None:
    monkeypatch.setattr(room, "memory_bytes", lambda _: (int(free), int(there)))
    monkeypatch.setattr(room, "host_memory", lambda: (int(free), int(there)))


def test_one_process_needs_room_for_all_stages(
    resolved: ResolvedManifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = sum(costs.parameters for costs in stage_costs(resolved, "cpu"))
    for size in (40, 17):  # weights, gradients and two moments take 16 bytes of each parameter
        has(monkeypatch, size * parameters, 100 * parameters)
        room.check_one_process(resolved, CPU)
    assert "memory_is_short" in caplog.text
    has(monkeypatch, 15 * parameters, 15 * parameters)
    with pytest.raises(UserError, match=r"this run needs about \S+ of memory, and cpu may use \S+: take a smaller"):
        room.check_one_process(resolved, CPU)


def test_the_peers_of_one_machine_need_room_for_each(
    resolved: ResolvedManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(costs.memory.peak_bytes(1) for costs in stage_costs(resolved, "cpu"))
    counts = [1] * resolved.num_stages
    has(monkeypatch, 1.5 * needed, 1.5 * needed)
    room.check_local_peers(resolved, counts, ["cpu"])
    room.check_local_peers(resolved, [9 * count for count in counts], ["cuda:0"])
    with pytest.raises(UserError, match=r"and \d+ peers on this machine may use .*: name fewer in --peers"):
        room.check_local_peers(resolved, [2] * len(counts), ["cpu"])


def test_memory_that_runs_out_all_the_same_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^cpu has run out of memory: .*can't alloc"), room.running_out_told(CPU):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes")
    with pytest.raises(RuntimeError, match="else"), room.running_out_told(CPU):
        raise RuntimeError("something else")

"""How many microbatches a peer takes, by its memory."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import IO

import pytest
import torch

from coordinator.config_files import load_manifest
from swarm_peer.errors import SwarmError, UserError
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.stage_memory import RESERVED_BYTES
from swarm_peer.runtime import startup
from swarm_peer.runtime.host import preparation
from swarm_peer.runtime.host.preparation import (
    UNCHECKED_IN_FLIGHT,
    check_device,
    claimed_device,
    devices_to_share,
    has_room_beside,
    microbatch_capacity,
    stages_too_large,
)
from swarm_peer.wire.identity import Identity


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_peer_takes_as_many_microbatches_as_fit_its_memory(device: str) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    limit = resolved.manifest.limits.max_in_flight
    for spec, costs in zip(resolved.specs, stage_costs(resolved, device), strict=True):

        def capacity(memory_bytes: float) -> int:
            return microbatch_capacity(resolved, spec, torch.device(device), int(memory_bytes))  # noqa: B023

        assert capacity(1e12) == limit
        enough = costs.memory.peak_bytes(limit)
        assert capacity(enough + 1) == limit
        assert capacity(enough - 1) < limit
        assert costs.memory.peak_bytes(capacity(enough - 1)) < enough
        least = costs.memory.peak_bytes(1)
        with pytest.raises(
            UserError, match=rf"stage {spec.index} needs about {least / 2**30:.1f}GiB; raise it, or serve a"
        ):
            capacity(least - 1)


def test_more_threads_than_cores_are_told(monkeypatch, caplog):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for count in (2, 3):
        preparation.set_threads(count)
    assert given == [2, 3]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("threads_beyond_cores threads=3 cores=2 ")


def test_a_peer_that_is_not_told_its_memory_takes_more_microbatches_where_more_are_sure_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrides = ("limits.max_in_flight=12",)
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", overrides))
    memory = stage_costs(resolved, "cuda")[0].memory
    device = torch.device("cuda:0")
    for free_bytes, all_bytes, fit in (
        (1e12, 1e12, 12),
        (memory.peak_bytes(12) + 1, 1e12, 12),
        (memory.peak_bytes(12) - 1, 1e12, 11),
        (memory.peak_bytes(5), 1e12, UNCHECKED_IN_FLIGHT),
        (0, 1e12, UNCHECKED_IN_FLIGHT),
        (0, memory.peak_bytes(3) + 1, 3),
        (0, memory.peak_bytes(1) + 1, 1),
    ):
        figures = int(free_bytes) + RESERVED_BYTES, int(all_bytes) + RESERVED_BYTES
        monkeypatch.setattr(torch.cuda, "mem_get_info", {device: figures}.__getitem__)
        assert microbatch_capacity(resolved, resolved.specs[0], device, None) == fit
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, RESERVED_BYTES + int(memory.peak_bytes(1)) - 1))
    with pytest.raises(
        UserError, match=r"GiB is too little: stage 0 needs about .*GiB; serve a smaller stage, or take a"
    ):
        microbatch_capacity(resolved, resolved.specs[0], device, None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_stages_are_too_large_for_a_device_by_its_own_needs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    chosen = torch.device(device)
    needed = [costs.memory.peak_bytes(1) for costs in stage_costs(resolved, chosen.type)]
    order = sorted(range(len(needed)), key=needed.__getitem__)
    room = int(needed[order[1]]) + 1  # the two smallest fit
    assert stages_too_large(resolved, chosen, int(max(needed)) + 1) == ()
    assert stages_too_large(resolved, chosen, room) == tuple(sorted(order[2:]))
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, room))
    monkeypatch.setattr(torch.cuda, "mem_get_info", {chosen: (0, room + RESERVED_BYTES)}.__getitem__)
    assert stages_too_large(resolved, chosen, None) == tuple(sorted(order[2:])), "what is free now does not count"
    with pytest.raises(
        UserError, match=r"no stage of this run fits into 1\.0GiB of memory: the smallest needs about .*; raise --max"
    ):
        stages_too_large(resolved, chosen, 2**30)
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", {chosen: (0, 2**30 + RESERVED_BYTES)}.__getitem__)
    with pytest.raises(
        UserError, match=r"no stage of this run fits into 1\.0GiB of memory: .*; take a device with more$"
    ):
        stages_too_large(resolved, chosen, None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_peer_is_not_believed_to_have_more_memory_than_its_device(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has = 16 * 2**30
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, has))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, has + RESERVED_BYTES))
    monkeypatch.setattr(startup, "check_device", lambda *_: None)
    chosen = torch.device(device)
    manifest = load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ())
    options = PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1",))

    def believed(given: int | None) -> int | None:
        return startup._examine(manifest, chosen, options.model_copy(update={"max_memory": given}))[1].max_memory

    assert [believed(given) for given in (None, 8 * 2**30, has)] == [None, 8 * 2**30, has]
    assert not caplog.text
    assert believed(80 * 2**30) == has
    assert f"max_memory_is_more_than_there_is device={device} given=80.0GiB has=16.0GiB" in caplog.text


def test_a_peer_on_a_gpu_warns_where_the_machine_is_short_of_memory_beside_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    gpu = torch.device("cuda:0")
    needed = int(stage_costs(resolved, "cuda")[1].host_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**40, 2**40))
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, needed + 1))
    assert microbatch_capacity(resolved, resolved.specs[1], gpu, None)
    assert not caplog.text
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, needed - 1))
    assert microbatch_capacity(resolved, resolved.specs[1], gpu, None)
    assert "host_memory_is_short stage=1 has=1.3GiB needs=1.3GiB" in caplog.text


def test_a_second_replica_on_a_gpu_needs_the_memory_beside_it_that_both_take(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    both = sum(costs.host_bytes for costs in stage_costs(resolved, "cuda")[:2])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**40, 2**40))
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, int(both) + 1))
    assert has_room_beside(resolved, 0, 1, torch.device("cuda:0"), None)
    monkeypatch.setattr(preparation, "host_memory", lambda: (0, int(both) - 1))
    assert not has_room_beside(resolved, 0, 1, torch.device("cuda:0"), None)


@pytest.mark.parametrize(
    ("name", "num_gpus", "shared"),
    [
        ("cpu", 2, ("cpu",)),
        ("auto", 0, ("cpu",)),
        ("auto", 2, ("cuda:0", "cuda:1")),
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cuda:1", 2, ("cuda:1",)),
    ],
)
def test_peers_of_one_machine_share_all_its_gpus_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int, shared: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert devices_to_share(name) == shared


HOST = socket.gethostname()


class Locks:
    """Locks of a machine, in the place of `locked`."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def __call__(self, folder: Path, name: str) -> IO[str] | None:
        if name in self.held:
            return None
        self.held.append(name)
        lock = StringIO()
        lock.close = lambda: self.held.remove(name)  # type: ignore[method-assign]
        return lock


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preparation, "locked", locks := Locks())
    return locks


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_peer_that_is_told_no_gpu_takes_the_first_that_no_other_peer_has(
    name: str, locks: Locks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def claimed(name: str) -> AbstractContextManager[torch.device]:
        return claimed_device(name, tmp_path)

    with claimed(name) as first, claimed(name) as second:
        assert [str(first), str(second)] == ["cuda:0", "cuda:1"]
        assert not caplog.text
        with claimed(name) as shared:
            assert str(shared) == "cuda:0"
        assert "gpu_may_be_shared device=cuda:0" in caplog.text
        assert locks.held == [f"gpu-{HOST}-0", f"gpu-{HOST}-1"]
    with claimed("cuda:0"), claimed(name) as other:
        assert str(other) == "cuda:1", "one that a peer was told to take is taken"
    assert locks.held == []


def test_a_gpu_that_is_named_is_shared_without_a_word(
    locks: Locks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with claimed_device("auto", tmp_path), claimed_device("cuda:0", tmp_path) as shared:
        assert str(shared) == "cuda:0"
    with claimed_device("cpu", tmp_path) as cpu:
        assert (str(cpu), locks.held) == ("cpu", [])
    assert not caplog.text


def test_a_gpu_is_claimed_by_its_name_among_all_of_the_machine(
    locks: Locks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, MIG-GPU-5c/1/0")
    with claimed_device("auto", tmp_path), claimed_device("auto", tmp_path):
        assert locks.held == [f"gpu-{HOST}-3", f"gpu-{HOST}-MIG-GPU-5c-1-0"]


def test_where_no_gpu_can_be_claimed_the_first_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "file").touch()
    with claimed_device("auto", tmp_path / "file" / "state") as device:
        assert str(device) == "cuda:0"
    assert "gpu_not_claimed" in caplog.text


def test_a_device_that_cannot_compute_is_refused() -> None:
    check_device(torch.device("cpu"), "bf16")
    with pytest.raises(UserError, match=r"^meta cannot be used \(.*\): mend that, or take another with --device"):
        check_device(torch.device("meta"), "fp32")


def test_a_second_replica_needs_the_memory_that_both_take() -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    cpu, limit = torch.device("cpu"), resolved.manifest.limits.max_in_flight
    serving, joining = (stage.memory for stage in stage_costs(resolved, "cpu")[:2])
    both = serving.peak_bytes(limit) + joining.peak_bytes(0)
    assert has_room_beside(resolved, 0, 1, cpu, int(both) + 1)
    assert not has_room_beside(resolved, 0, 1, cpu, int(serving.peak_bytes(limit)) + 1)


def test_without_a_limit_a_second_replica_needs_what_the_machine_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))
    monkeypatch.setattr(preparation, "host_memory", lambda: (2**42, 2**42))
    assert has_room_beside(resolved, 0, 1, torch.device("cpu"), None)
    monkeypatch.setattr(preparation, "host_memory", lambda: (2**16, 2**42))
    assert not has_room_beside(resolved, 0, 1, torch.device("cpu"), None)


def test_a_peer_whose_device_runs_out_of_memory_in_an_update_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_loop(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(startup, "run_loop", run_loop)
    monkeypatch.setattr(startup, "spare_imports", lambda: None)
    address = f"/ip4/127.0.0.1/tcp/31337/p2p/{Identity.generate().peer_id}"
    options = PeerOptions(initial_peers=(address,), identity_path=tmp_path / "identity", device="cpu")
    with pytest.raises(SwarmError, match=r"with a lower --max-memory.*Tried to allocate 2 GiB\)$"):
        startup.run_peer(options)

"""What is seen of a machine, with faults that are feigned where it is looked at."""

from __future__ import annotations

import os
import resource
import socket
from shutil import disk_usage

import pytest

from swarm_peer.policy.diagnosis.finding import Level
from swarm_peer.policy.diagnosis.machine_findings import judge_disk, judge_machine
from swarm_peer.runtime.host import machine_facts
from swarm_peer.runtime.host.machine_facts import look_at_machine, look_at_rooms, look_longer

DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\nGCC": "470.57.02",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)": "580.65.06",
    "something else": "unknown",
}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.delenv(machine_facts.CUDA_DEVICES, raising=False)


def test_this_machine_is_fine():
    facts = look_longer(look_at_machine("cpu", None))
    assert facts.device.flops_per_s > 1e8
    assert 0 < facts.device.free_bytes <= facts.device.all_bytes
    device, memory, disk, _, proxies = judge_machine(facts)
    assert {device.level, proxies.level} == {Level.OK}
    assert "TFLOP/s in fp32" in device.text
    assert "free" in memory.text
    assert "free at" in disk.text


@pytest.mark.parametrize(("text", "version"), DRIVERS.items())
def test_a_driver_that_torch_cannot_use_is_seen(tmp_path, monkeypatch, text, version):
    driver = tmp_path / "version"
    driver.write_text(text)
    monkeypatch.setattr(machine_facts, "DRIVER", driver)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    device = look_at_machine("auto", None).device
    assert (device.device, device.driver, device.hides_gpus) == ("cpu", version, False)
    assert judge_machine(look_at_machine("auto", None))[0].level is Level.WARNING
    asked = look_longer(look_at_machine("cuda", None))
    assert (asked.device.flops_per_s, judge_machine(asked)[0].level) == (0.0, Level.FAILURE)
    monkeypatch.setenv(machine_facts.CUDA_DEVICES, "")
    assert judge_machine(look_at_machine("auto", None))[0].level is Level.OK


def test_a_device_that_fails_is_seen(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setattr(machine_facts, "_matrix_flops", fail)
    device = look_longer(look_at_machine("cpu", None)).device
    assert device.error == "cpu fails at a product of matrices (CUDA error: no kernel image is available)"


def test_the_limit_of_open_files_is_seen(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_NOFILE: (256, 4096)}[what])
    assert look_at_machine("cpu", None).open_files == 256


def test_proxies_are_seen_and_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("all_proxy", f"127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("http_proxy", "http://[::1")
        monkeypatch.setenv("no_proxy", "localhost")
        facts = look_at_machine("cpu", None)
        assert sorted(facts.proxies) == ["all_proxy", "http_proxy", "https_proxy"]
        assert facts.silent_proxies == frozenset(), "nothing is tried in a moment"
        assert look_longer(facts).silent_proxies == {"all_proxy"}


def test_the_folders_of_a_peer_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state" / "deep"))
    rooms = look_at_rooms(tmp_path / "cache", 10**10)
    assert [room.purpose for room in rooms] == ["the peer's key", "downloads", "snapshots"]
    assert rooms[1].path == str(tmp_path / "cache")
    assert [room.error for room in rooms] == [""] * 3
    assert rooms[2].needed_bytes == 10**10
    assert not (tmp_path / "cache").exists(), "nothing is left there"


def test_a_folder_that_takes_no_files_is_seen(tmp_path):
    (tmp_path / "file").touch()
    room = look_at_rooms(tmp_path / "file" / "cache", 0)[1]
    assert room.error == "Not a directory"
    finding = judge_disk([room])
    assert (finding.level, "--cache-dir" in finding.text) == (Level.FAILURE, True)


def test_a_full_disk_is_said_to_be_full(tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine_facts, "disk_usage", lambda folder: disk_usage(folder)._replace(free=0))
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    rooms = look_at_rooms(tmp_path, 0)
    assert [room.error for room in rooms] == [""] * 3
    assert "0 B free at" in judge_disk(rooms).text

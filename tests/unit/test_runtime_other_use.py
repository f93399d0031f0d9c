"""Other uses of a machine, as NVIDIA's library and systemd's logind tell of them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from swarm_peer.runtime.host import other_use
from swarm_peer.runtime.host.other_use import AT_KEYBOARD, GPU_IN_USE, CannotSee, GpuSight, KeyboardSight, sights_of

ME = os.getpid()
GPU = torch.device("cuda:0")


class Nvml:
    """NVIDIA's library, as far as it is asked."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.computing = {ME}
        self.drawing = []
        self.broken = False

    def nvmlInit(self):
        self._check()

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._check()
        return [SimpleNamespace(pid=pid) for pid in self.computing]

    def nvmlDeviceGetProcessUtilization(self, handle, since_us):
        new = [each for each in self.drawing if each.timeStamp > since_us]
        if not new:
            raise self.NVMLError("Not Found")
        return new

    def _check(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    return Nvml()


def sample(pid, at_us, percent):
    return SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=percent)


def test_another_process_that_computes_uses_the_gpu(nvml):
    sight = GpuSight(GPU, nvml)
    assert sight.look() == ""
    nvml.computing = {ME, ME + 1}
    assert sight.look() == GPU_IN_USE
    nvml.computing = {ME + 1}
    assert sight.look() == GPU_IN_USE
    nvml.computing = {ME}
    assert sight.look() == ""


def test_one_that_draws_much_does_and_a_desktop_does_not(nvml):
    sight = GpuSight(GPU, nvml)
    nvml.drawing = [sample(7, 100, 12), sample(ME, 100, 95)]
    assert sight.look() == ""
    nvml.drawing = [sample(7, 200, 60), sample(7, 300, 80)]
    assert sight.look() == GPU_IN_USE
    assert sight.look() == "", "the same samples are no news"
    nvml.drawing = [sample(7, 400, 60), sample(7, 500, 3)]
    assert sight.look() == "", "the newest counts"


def test_a_library_that_fails_for_a_moment_says_nothing(nvml):
    sight = GpuSight(GPU, nvml)
    nvml.broken = True
    assert sight.look() == ""


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_machine_without_the_library_cannot_see(device, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(other_use, "import_module", missing)
    with pytest.raises(CannotSee, match="no GPU" if device == "cpu" else "nvidia-ml-py is not installed"):
        GpuSight(torch.device(device))


def test_in_a_container_no_process_is_taken_for_another(nvml):
    nvml.computing = {ME + 1}  # this one, by its number outside
    with pytest.raises(CannotSee, match="does not show this process"):
        GpuSight(GPU, nvml)
    nvml.broken = True
    with pytest.raises(CannotSee, match="Driver Not Loaded"):
        GpuSight(GPU, nvml)


class Logind:
    """loginctl, with sessions by their id."""

    def __init__(self, **sessions):
        self.sessions = sessions

    def __call__(self, *command):
        if self.sessions is None:
            raise CannotSee("loginctl says System has not been booted with systemd")
        if command[1] == "list-sessions":
            return "".join(f"{name} 1000 anna seat0 tty2\n" for name in self.sessions)
        properties = {"Class": "user", "Remote": "no", "Active": "yes", "IdleHint": "yes"} | self.sessions[command[2]]
        asked = [each.removeprefix("--property=") for each in command[3:]]
        return "".join(f"{name}={value}\n" for name, value in properties.items() if name in asked)


@pytest.mark.parametrize(
    ("sessions", "is_used"),
    [
        ({}, False),
        ({"c1": {}}, False),
        ({"c1": {"IdleHint": "no"}}, True),
        ({"c1": {"IdleHint": "no", "Remote": "yes"}}, False),
        ({"c1": {"IdleHint": "no", "Active": "no"}}, False),
        ({"c1": {"IdleHint": "no", "Class": "greeter"}}, False),
        ({"c1": {}, "7": {"IdleHint": "no"}}, True),
    ],
)
def test_somebody_at_the_machine_itself_uses_it(sessions, is_used):
    assert KeyboardSight(Logind(**sessions)).look() == (AT_KEYBOARD if is_used else "")


def test_a_machine_without_logind_cannot_see():
    logind = Logind()
    sight = KeyboardSight(logind)
    logind.sessions = None
    assert sight.look() == ""
    with pytest.raises(CannotSee, match="not been booted with systemd"):
        KeyboardSight(logind)


@pytest.mark.parametrize(
    ("command", "why"),
    [(("/nowhere/loginctl",), "there is no"), (("false",), "false says"), (("sleep", "9"), "timed out")],
)
def test_a_command_that_fails_is_no_answer(command, why, monkeypatch):
    monkeypatch.setattr(other_use, "COMMAND_TIMEOUT_S", 0.01 if command[0] == "sleep" else 5.0)
    with pytest.raises(CannotSee, match=why):
        other_use._output_of(*command)
    assert other_use._output_of("echo", "there") == "there\n"


def test_what_cannot_be_seen_is_said_in_one_line(monkeypatch, caplog):
    def blind(*command):
        raise CannotSee("there is no loginctl")

    monkeypatch.setattr(other_use.KeyboardSight.__init__, "__defaults__", (blind,))
    assert sights_of(torch.device("cpu")) == []
    [record] = caplog.records
    assert record.levelname in ("WARN", "WARNING")
    expected = "gpu=not watched, this peer computes on no GPU; keyboard=not watched, there is no loginctl"
    assert record.getMessage() == f"pause_when_busy {expected}"

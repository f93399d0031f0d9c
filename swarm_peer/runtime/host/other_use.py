"""Sees other uses of this machine, where they can be seen: other processes on the GPU, its owner at the keyboard."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

log = logging.getLogger(__name__)

# A desktop draws with a few percent of a GPU all day. A game or a film that is cut takes more.
MUCH_PERCENT = 20
GPU_IN_USE = "the GPU is in use"
AT_KEYBOARD = "its owner is at the keyboard"
COMMAND_TIMEOUT_S = 2.0


class CannotSee(Exception):
    """Something of the machine cannot be seen, for a reason in words."""


class GpuSight:
    """Sees by NVIDIA's management library whether another process computes on a GPU, or draws much with it.

    Raises:
        CannotSee: when it is made, if that cannot be seen
    """

    def __init__(self, device: torch.device, nvml: Any = None):
        if device.type != "cuda":
            raise CannotSee("this peer computes on no GPU")
        try:
            nvml = nvml or import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            processes = self._computing()
        except ImportError:
            raise CannotSee("the package nvidia-ml-py is not installed") from None
        except nvml.NVMLError as error:
            raise CannotSee(f"NVIDIA's library says {error}") from None
        if os.getpid() not in processes:
            # So it is in a container: others' processes and this one cannot be told apart.
            raise CannotSee("NVIDIA's library does not show this process among those on the GPU")
        self._seen_us = 0

    def _computing(self) -> set[int]:
        return {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}

    def look(self) -> str:
        """Whether another process uses it, in words; empty if none does, or it is not known for the moment."""
        try:
            return GPU_IN_USE if self._computing() - {os.getpid()} or self._draws_much() else ""
        except self._nvml.NVMLError as error:
            log.debug("gpu_use_unknown reason=%s", error)
            return ""

    def _draws_much(self) -> bool:
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except self._nvml.NVMLError:  # there are no samples since the last look
            return False
        newest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        self._seen_us = max((sample.timeStamp for sample in samples), default=self._seen_us)
        return any(sample.smUtil >= MUCH_PERCENT for pid, sample in newest.items() if pid != os.getpid())


def _output_of(*command: str) -> str:
    """The output of a command.

    Raises:
        CannotSee: it is not there, fails, or takes too long
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except FileNotFoundError:
        raise CannotSee(f"there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise CannotSee(f"{command[0]} says {' '.join(error.stderr.split())[:100]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotSee(f"{command[0]}: {error}"[:100]) from None


class KeyboardSight:
    """Sees by systemd's logind whether somebody uses a session at this machine itself, with its screen or console.

    Desktops tell logind when nobody has used them for as long as it takes until the screen goes dark.

    Raises:
        CannotSee: when it is made, if that cannot be seen
    """

    def __init__(self, output_of: Callable[..., str] = _output_of):
        self._output_of = output_of
        self._is_used()

    def look(self) -> str:
        """Whether somebody does, in words; empty if not, or it is not known for the moment."""
        try:
            return AT_KEYBOARD if self._is_used() else ""
        except CannotSee as error:
            log.debug("keyboard_use_unknown reason=%s", error)
            return ""

    def _is_used(self) -> bool:
        listed = self._output_of("loginctl", "list-sessions", "--no-legend").splitlines()
        return any(self._is_in_use(line.split()[0]) for line in listed if line.strip())

    def _is_in_use(self, session: str) -> bool:
        wanted = {"Class": "user", "Remote": "no", "Active": "yes", "IdleHint": "no"}
        shown = self._output_of("loginctl", "show-session", session, *(f"--property={name}" for name in wanted))
        told = dict(line.partition("=")[::2] for line in shown.splitlines())
        return all(told.get(name) == value for name, value in wanted.items())


def sights_of(device: torch.device) -> list[GpuSight | KeyboardSight]:
    """The sights that this machine has. The log says in a line what can, and why the rest cannot."""
    sights: list[GpuSight | KeyboardSight] = []
    told = []
    ways: dict[str, Callable[[], GpuSight | KeyboardSight]] = {
        "gpu": lambda: GpuSight(device),
        "keyboard": KeyboardSight,
    }
    for name, make in ways.items():
        try:
            sights.append(make())
            told.append(f"{name}=watched")
        except CannotSee as error:
            told.append(f"{name}=not watched, {error}")
    level = logging.INFO if sights else logging.WARNING
    log.log(level, "pause_when_busy %s", "; ".join(told))
    return sights

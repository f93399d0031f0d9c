"""Swarm as people install it: from a repository's address into an empty environment, and run in an empty folder.

Needs the package index, and some minutes: pip brings torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def said(folder: Path, *command: str | Path, code: int = 0) -> str:
    """What a program prints, run in a folder that nothing of ours lies in, without what the tests are run with."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == code, (command, result.stdout[-2000:], result.stderr[-2000:])
    return result.stdout + result.stderr


def test_installed_from_its_repository_it_works_in_any_folder(tmp_path: Path) -> None:
    programs, folder = tmp_path / "environment" / "bin", tmp_path / "empty"
    folder.mkdir()
    said(folder, sys.executable, "-m", "venv", programs.parent)
    said(folder, programs / "pip", "install", "--quiet", f"git+file://{ROOT}")
    coordinator = programs / "swarm-coordinator"
    assert said(folder, programs / "swarm-peer", "--version").startswith("swarm-peer ")
    assert "demo, gpt2-124m" in said(folder, coordinator, "serve", "nothing", code=2)
    assert '"stages"' in said(folder, coordinator, "plan", "gpt2-124m", "--peers", "volunteers", "--json")
    output = said(folder, coordinator, "local", "demo", "--peers", "1,1", "--steps", "2", "--sample", "10")
    assert "2 optimizer steps done" in output
    (model,) = folder.glob("runs/demo-*/model/model.safetensors")
    assert model.stat().st_size > 1e6

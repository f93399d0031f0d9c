"""A real Prometheus, with the configuration that docker/compose.yaml gives it, for a swarm on this machine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DOCKER = Path(__file__).parents[2] / "docker"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)


class Prometheus:
    """The HTTP interface of a Prometheus that runs."""

    def __init__(self, url: str):
        self._url = url

    def _get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None  # it does not answer yet
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except urllib.error.URLError:
            return None  # it does not listen yet

    def values(self, expression: str) -> list[float]:
        """The values of all series of an expression now, but those that are no number."""
        answer = self._get("query", query=expression) or {"result": []}
        values = [float(series["value"][1]) for series in answer["result"]]
        return [value for value in values if value == value]

    def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of the alerts of this name that fire now."""
        alerts = self._get("alerts")["alerts"]
        return [it["labels"] for it in alerts if it["labels"]["alertname"] == alert and it["state"] == "firing"]


@contextmanager
def running_prometheus(folder: Path, coordinator_port: int) -> Iterator[Prometheus]:
    """Run Prometheus for as long as the context lasts; the coordinator's metrics are on this port of loopback."""
    config = (DOCKER / "prometheus.yml").read_text()
    assert config.count("coordinator:9464") == 2
    (folder / "prometheus.yml").write_text(config.replace("coordinator:9464", f"127.0.0.1:{coordinator_port}"))
    shutil.copy(DOCKER / "alerts.yml", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'series'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

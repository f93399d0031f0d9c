"""Shows how a long download gets on: a bar on a terminal, and lines in a log."""

from __future__ import annotations

import logging
import sys
from typing import Any

from swarm_peer.runtime.context import Clock

log = logging.getLogger(__name__)

# Between lines where there is no terminal.
LINE_S = 10.0


class DownloadProgress:
    """The progress of one download, shown from its first bytes on."""

    def __init__(self, num_bytes: int, clock: Clock):
        self._wanted = num_bytes
        self._clock = clock
        self._done = 0
        self._begun_s = self._told_s = clock.monotonic_s()
        self._bar: Any = None

    def __enter__(self) -> DownloadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock.monotonic_s() - self._begun_s

    def add(self, num_bytes: int) -> None:
        """Note that so many bytes more have come."""
        self._done += num_bytes
        if sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=self._wanted, unit="B", unit_scale=True, desc="model's weights")
            self._bar.update(num_bytes)
        elif self._clock.monotonic_s() >= self._told_s + LINE_S:
            self._told_s = self._clock.monotonic_s()
            text = "base_downloading bytes=%d of=%d bytes_per_s=%.0f"
            log.info(text, self._done, self._wanted, self._done / max(self.seconds, 1e-3))

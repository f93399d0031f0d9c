"""Where the coordinators of the tube keep checkpoints: disks that fail."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.errors import UserError

if TYPE_CHECKING:
    from tube import Tube


class FailingStore(CheckpointStore):
    """Checkpoints on a disk that may be full, lose power in the middle of a write, or not answer.

    Attributes:
        unanswered: the share of requests that fail
    """

    def __init__(self, tube: Tube, url: str):
        super().__init__(url, 2)
        self.unanswered = 0.0
        self._tube = tube
        self._rng = tube.world.rng(f"store {len(tube.stores)}")
        for name in ("folders", "exists", "read", "describe", "begin", "write", "publish", "remove"):
            setattr(self._files, name, partial(self._request, getattr(self._files, name)))

    def _request(self, send: Any, *args: Any, **options: Any) -> Any:
        if self.unanswered and self._rng.random() < self.unanswered:
            raise OSError(errno.EIO, "Input/output error")
        return send(*args, **options)

    def save(self, *args: Any) -> str:
        if self._tube.checkpoint_failure == "full":
            raise UserError("the disk is full")
        address = super().save(*args)
        if not Path(address).exists():
            self._tube.violation(f"the checkpoint {Path(address).name} is gone as soon as it is saved")
        if self._tube.checkpoint_failure == "torn":
            tear(Path(address))
        unanswered, self.unanswered = self.unanswered, 0.0
        self._tube.invariants.check_checkpoint(self)
        self.unanswered = unanswered
        return address


def tear(folder: Path) -> None:
    """Leave a part of a file, as a power failure does."""
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])

"""Reads from a run's folder what the page shows of the time before anybody looked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from coordinator.dashboard.history import History
from coordinator.run.invites import InviteBook
from coordinator.watch.happenings import Event
from coordinator.watch.journal import read_events
from coordinator.watch.metrics_file import whole_lines
from swarm_peer.errors import UserError

log = logging.getLogger(__name__)

# Peers come by an invite now and then, and the files of a large run take a moment to read.
LABELS_READ_S = 30.0


def read_history(folder: Path) -> History:
    """The curves of a run so far, of its folder's metrics.jsonl; none if that cannot be read."""
    history = History()
    try:
        history.add(whole_lines(folder / "metrics.jsonl"))
    except FileNotFoundError:
        pass
    except (OSError, UserError) as error:
        log.warning("history_not_read reason=%s", error)
    return history


def invite_labels(folder: Path) -> Callable[[], Mapping[str, str]]:
    """Finds the labels of the invites that peers came by, in a run's folder; none where that is not possible."""
    known: dict[str, str] = {}
    read_s = -LABELS_READ_S

    def labels() -> Mapping[str, str]:
        nonlocal known, read_s
        if time.monotonic() - read_s >= LABELS_READ_S:
            read_s = time.monotonic()
            try:
                known = InviteBook(folder).labels()
            except UserError as error:
                log.warning("labels_not_read reason=%s", error)
        return known

    return labels


def known_events(folder: Path) -> list[Event]:
    """The journal of a run so far; none if it cannot be read."""
    try:
        return read_events(folder)
    except OSError as error:
        log.warning("events_not_read reason=%s", error)
        return []

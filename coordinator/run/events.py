"""The functions that are called as a coordinator watches its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.watch.happenings import Event
from coordinator.watch.metrics_file import MetricsLine
from coordinator.watch.run_watch import RunWatch


@dataclass(frozen=True, kw_only=True)
class RunEvents:
    """Functions to call when something happens to a run.

    Attributes:
        on_ready: when peers may join
        on_update: after each look at the DHT
        on_line: for each line that is new in metrics.jsonl
        on_event: for each event that is new in events.jsonl
    """

    on_ready: Callable[[], None] = lambda: None
    on_update: Callable[[RunWatch], None] = lambda _: None
    on_line: Callable[[MetricsLine], None] = lambda _: None
    on_event: Callable[[Event], None] = lambda _: None


NO_EVENTS = RunEvents()

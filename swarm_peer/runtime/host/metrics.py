"""The metrics of a peer, for Prometheus. Labels have few values: no peer id is among them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from swarm_peer import __version__
from swarm_peer.errors import UserError
from swarm_peer.policy.view import Neighbour, TimeShares

log = logging.getLogger(__name__)

# From a small model's millisecond to a large one's minute.
SECONDS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class PeerMetrics:
    """All metrics of one peer. Each instance has a registry of its own, so that tests can have many.

    Attributes:
        run_is_over: whether the run was ended, so that no update follows, and what it would have held is no error
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.run_is_over = False

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"swarm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"swarm_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"swarm_{name}", text, labels, registry=registry, buckets=SECONDS_BUCKETS)

        self.microbatches = counter("microbatches", "Microbatches, by mode and outcome", "mode", "outcome")
        self.forward_seconds = histogram("forward_duration_seconds", "Forward pass of one microbatch on the device")
        self.backward_seconds = histogram("backward_duration_seconds", "Backward pass of one microbatch on the device")
        self.device_busy_seconds = counter("device_busy_seconds", "Time in which the compute thread has computed")
        self.sent_bytes = counter("sent_bytes", "Bytes sent to peers in calls and replies")
        self.received_bytes = counter("received_bytes", "Bytes received from peers in calls and replies")
        self.queue = gauge("queue_microbatches", "Jobs that wait for the compute thread")
        self.in_flight = gauge("in_flight_microbatches", "Microbatches that this peer holds")
        self.window = gauge("in_flight_window_microbatches", "Microbatches that stage 0 may keep in flight")
        self.round_trip_seconds = histogram("round_trip_duration_seconds", "From sending activations to the gradient")
        self.retries = counter("retries", "Tries of a hop that failed", "cause")
        self.duplicates = counter("duplicate_microbatches", "Microbatches that arrived again", "outcome")
        self.lost_samples = counter("lost_samples", "Samples whose gradient was accumulated and did not count")
        self.invalid_messages = counter("invalid_messages", "Messages that arrived and were refused", "part")
        self.carried_connections = gauge("carried_connections", "Connections of this peer that another one carries")
        self.carried_bytes = counter("carried_bytes", "Bytes carried for others, each once")
        self.lost_replies = counter("lost_replies", "Replies that their callers did not take")
        self.handler_defects = counter("handler_defects", "Calls whose handlers failed by a defect of this program")
        self.averaging_rounds = counter("averaging_rounds", "Averaging rounds with stage-mates", "outcome")
        self.leftovers_dropped = counter("leftovers_dropped", "Leftovers of averages that were lost")
        self.averaging_seconds = histogram("averaging_duration_seconds", "One averaging round")
        self.resyncs = counter("resyncs", "Times that the state was downloaded from stage-mates", "cause")
        self.rewinds = counter("rewinds", "Times that the run went back because a stage had lost all its peers")
        self.optimizer_step = gauge("optimizer_step", "Optimizer steps in this peer's weights")
        self.stage = gauge("stage", "Pipeline stage that this peer serves")
        self.loss = gauge("loss", "Training loss of the last optimizer step, nats per token")
        self.step_targets = gauge("step_targets", "Tokens that were learnt in the last optimizer step")
        self.samples_per_s = gauge("announced_samples_per_second", "Throughput that this peer announces")
        self.dht_failures = counter("dht_failures", "DHT requests that failed or took too long", "request")
        for request in ("store", "fetch"):  # a counter that begins at 1 has no increase
            self.dht_failures.labels(request)
        self.notice_failures = counter("notice_failures", "Requests for a spot notice without an answer")
        self.event_loop_lag_seconds = gauge("event_loop_lag_seconds", "How late the event loop has recently woken up")
        self.sent_today_bytes = gauge(
            "sent_today_bytes", "Bytes sent since midnight, by this peer's processes of today"
        )
        self._paused = gauge("paused", "1 if this peer's owner has it paused for that reason", "reason")
        self._time_share = gauge(
            "device_time_share", "How this peer has spent its time lately, from 0 to 1", "activity"
        )
        labels = ("neighbour", "through")
        self._round_trip = gauge("neighbour_round_trip_seconds", "Of the call answered fastest lately", *labels)
        self._exchanged = gauge("neighbour_bytes_per_second", "Tensors exchanged with a neighbour lately", *labels)
        gauge("peer_info", "Constant 1", "version").labels(__version__).set(1)

    def lose(self, samples: int, reason: str, *, round_number: int) -> None:
        """Report samples that no update will hold as lost, if there are any: count them, and log why."""
        self.lost_samples.inc(samples)
        self.tell_lost(samples, reason, round_number=round_number)

    def tell_lost(self, samples: int, reason: str, *, round_number: int) -> None:
        """Log why samples were lost that are counted elsewhere, if there are any."""
        if samples:
            level, why = (logging.INFO, "the run is over") if self.run_is_over else (logging.ERROR, reason)
            log.log(level, "samples_lost samples=%d round=%d reason=%s", samples, round_number, why)

    def show_pause(self, reason: str | None, reasons: Iterable[str]) -> None:
        """Set the gauges of why this peer's owner has it paused; None if it is not."""
        for each in reasons:
            self._paused.labels(each).set(each == reason)

    def show_neighbours(self, neighbours: Iterable[Neighbour]) -> None:
        """Set the gauges of how this peer and its busiest neighbours get on."""
        self._round_trip.clear()
        self._exchanged.clear()
        for peer, through, round_trip_ms, bytes_per_s in neighbours:
            self._round_trip.labels(peer, through).set(round_trip_ms / 1000)
            self._exchanged.labels(peer, through).set(bytes_per_s)

    def show_time_shares(self, shares: TimeShares | None) -> None:
        """Set the gauges of how this peer has spent its time, if that is known."""
        if shares is not None:
            for activity, percent in (*shares._asdict().items(), ("waiting", shares.waiting)):
                self._time_share.labels(activity).set(percent / 100)


def show_disk(registry: CollectorRegistry, prefix: str, folder: Path) -> None:
    """Have a registry show how full the disk of a folder is, as of each scrape."""

    def of_disk(name: str) -> float:
        try:
            return float(getattr(disk_usage(folder), name))
        except OSError:  # the folder is gone, or not there yet
            return math.nan

    for name, text in (("free", "Free"), ("total", "All")):
        gauge = Gauge(f"{prefix}_disk_{name}_bytes", f"{text} bytes of the disk that files go to", registry=registry)
        gauge.set_function(partial(of_disk, name))


class _ErrorCounter(logging.Handler):
    """Counts the errors that are logged. Its level is that of errors."""

    def __init__(self, counter: Counter):
        super().__init__(logging.ERROR)
        self._counter = counter

    def emit(self, record: logging.LogRecord) -> None:
        """Count one, whatever it is."""
        self._counter.inc()


def count_logged_errors(registry: CollectorRegistry) -> None:
    """Have a registry count the errors that this process logs from now on, but for those of other libraries."""
    handler = _ErrorCounter(Counter("swarm_logged_errors", "Errors in this program's log", registry=registry))
    for package in ("swarm_peer", "coordinator"):
        logging.getLogger(package).addHandler(handler)


def serve_metrics(registry: CollectorRegistry, host: str, port: int, targets: Callable[[], str] | None = None) -> int:
    """Serve a registry over HTTP to everybody who reaches `host`, and return the port.

    Args:
        targets: what to answer at /targets, as JSON; called in a thread of the server

    Raises:
        UserError: the port is taken, or this machine has no such address
    """
    # Else each counter has a gauge beside it that says when this process began to count.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(
            f"cannot serve metrics on {host} port {port}: {error.strerror}; name another --metrics-port (0 for a free "
            f"one), or an address of this machine with --metrics-host"
        ) from error
    if targets is not None:
        metrics_page = server.get_app()
        assert metrics_page is not None, "prometheus_client has set it"

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            if environ["PATH_INFO"] != "/targets":
                return metrics_page(environ, start)
            start("200 OK", [("Content-Type", "application/json")])
            return [targets().encode()]

        server.set_app(answer)
    return int(server.server_port)

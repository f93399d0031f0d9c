"""The run as a whole, for Prometheus."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from coordinator.watch.run_watch import RunWatch
from coordinator.watch.targets import scrape_targets
from coordinator.watch.what_is_trained import Parameters
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.host.metrics import show_disk
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.peer_addresses import is_loopback


class CoordinatorMetrics:
    """A run as its coordinator sees it. Belongs to the event loop's thread; any thread may read.

    Args:
        output: the run's folder
        dht: the coordinator's node
        checkpoint_every: optimizer steps between checkpoints; 0 for none

    Attributes:
        targets: the peers that show their metrics, as JSON for Prometheus' HTTP service discovery
    """

    def __init__(self, output: Path, dht: SwarmDHT, checkpoint_every: int = 0) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(dht.metrics.dht_failures)
        self.targets = "[]"
        self._is_local = all(map(is_loopback, dht.addresses))
        self._round_number = -1
        self._num_moves = 0
        self._dht = dht
        self._checkpoint_step: int | None = None

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"swarm_run_{name}", text, labels, registry=registry)

        self._step = gauge("optimizer_step", "Optimizer steps that the run has made")
        self._steps = gauge("optimizer_steps_wanted", "Optimizer steps of the whole run")
        self._step_seconds = gauge("step_duration_seconds", "How long the last optimizer step took")
        self._stepped_at = gauge("last_step_timestamp_seconds", "When this coordinator last saw a step, or started")
        self._stepped_at.set_to_current_time()
        self._loss = gauge("loss", "Training loss of the last optimizer step, nats per token")
        self._validation_loss = gauge("validation_loss", "Last validation loss, nats per token")
        for loss in (self._loss, self._validation_loss):  # 0 would be a loss
            loss.set(math.nan)
        self._tokens_per_s = gauge("tokens_per_second", "Throughput of the last optimizer step")
        self._peers = gauge("stage_peers", "Peers of a stage", "stage", "state")
        self._samples_per_s = gauge("stage_samples_per_second", "Announced throughput of a stage's peers", "stage")
        self._queue = gauge("stage_queue_microbatches", "Microbatches that a stage's peers hold", "stage")
        self._time_share = gauge(
            "stage_time_share", "How a stage's peers spend their time, in the mean, from 0 to 1", "stage", "activity"
        )
        gauge("checkpoint_every_steps", "Optimizer steps between checkpoints; 0 for none").set(checkpoint_every)
        self._uncovered = gauge(
            "steps_since_checkpoint",
            "Optimizer steps that no checkpoint of this coordinator has; 0 while another coordinator writes them",
        )
        self._standstill = gauge(
            "standstill_seconds", "For how long the run has stood still; without a value while it goes on", "trouble"
        )
        self._target_share = gauge("target_share", "Part of a round's tokens that is learnt, from 0 to 1")
        self._target_share.set(math.nan)
        self._parameters = gauge("parameters", "Parameters of the model, adapters included", "kind")
        show_disk(registry, "swarm_run", output)
        self._moves = Counter(
            "swarm_run_moves", "Moves between stages that this coordinator has assigned", registry=registry
        )
        self.look_defects = Counter(
            "swarm_run_look_defects", "Looks that failed by a defect of this program", ["work"], registry=registry
        )
        self.looks_incomplete = Counter(
            "swarm_run_looks_incomplete",
            "Looks that this machine cut short, as by a full disk",
            ["work"],
            registry=registry,
        )

    def count_moves(self, num_moves: int) -> None:
        """Take in how many moves this coordinator has assigned in its term; a new term begins with none."""
        self._moves.inc(num_moves - self._num_moves if num_moves > self._num_moves else 0)
        self._num_moves = num_moves

    def show_parameters(self, parameters: Parameters) -> None:
        """Set how many parameters the run trains, and how many are frozen."""
        for kind, number in parameters._asdict().items():
            self._parameters.labels(kind).set(number)

    def update(self, watch: RunWatch) -> None:
        """Set the gauges to the run as it is now."""
        self._step.set(watch.optimizer_step)
        self._steps.set(watch.last_step)
        if watch.round_number != self._round_number:
            self._round_number = watch.round_number
            self._stepped_at.set_to_current_time()
        if (line := watch.last_line) is not None:
            self._loss.set(line["loss"])
            self._tokens_per_s.set(line["tokens_per_s"])
            self._step_seconds.set(line["seconds"])
        if watch.validation_loss is not None:
            self._validation_loss.set(watch.validation_loss)
        if watch.target_share is not None:
            self._target_share.set(watch.target_share)
        for stage in range(watch.manifest.stages.count):
            self._update_stage(watch, stage)
        self._update_checkpoint(watch)
        self._standstill.clear()
        if (found := watch.standstill) is not None:
            self._standstill.labels(found.kind).set(watch.seen_s - found.since_s)
        self.targets = json.dumps(scrape_targets(watch.view, is_local=self._is_local))

    def _update_stage(self, watch: RunWatch, stage: int) -> None:
        peers, shares = watch.view.in_stage(stage), watch.view.mean_time_shares(stage)
        for state in (PeerState.JOINING, PeerState.SERVING, PeerState.DRAINING, PeerState.PAUSED):
            self._peers.labels(stage, state.value).set(sum(peer.state is state for peer in peers))
        self._samples_per_s.labels(stage).set(sum(peer.samples_per_s for peer in peers))
        self._queue.labels(stage).set(sum(peer.queue for peer in peers))
        for number, activity in enumerate(("computing", "ending", "joining", "waiting")):
            if shares is not None:
                self._time_share.labels(stage, activity).set((*shares, 1 - sum(shares))[number])
            else:
                with suppress(KeyError):  # there was none before either
                    self._time_share.remove(stage, activity)

    def _update_checkpoint(self, watch: RunWatch) -> None:
        """Count from the newest checkpoint, or from the first step that this coordinator was to save."""
        if watch.lines:
            first = self._checkpoint_step
            if first is None or self._is_term_of_another(watch):
                first = watch.optimizer_step
            newest = first if watch.checkpoint_step is None else max(first, watch.checkpoint_step)
            self._checkpoint_step = min(newest, watch.optimizer_step)
            self._uncovered.set(watch.optimizer_step - self._checkpoint_step)

    def _is_term_of_another(self, watch: RunWatch) -> bool:
        return watch.coordination is not None and watch.coordination[0].coordinator != self._dht.identity.peer_id

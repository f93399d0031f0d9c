"""The run as a whole, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.view import PeerState


class CoordinatorMetrics:
    """Gauges of a run as its coordinator sees it."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"swarm_run_{name}", text, labels, registry=registry)

        self._step = gauge("optimizer_step", "Optimizer steps that the run has made")
        self._steps = gauge("optimizer_steps_wanted", "Optimizer steps of the whole run")
        self._loss = gauge("loss", "Training loss of the last optimizer step, nats per token")
        self._validation_loss = gauge("validation_loss", "Last validation loss, nats per token")
        self._tokens_per_s = gauge("tokens_per_second", "Throughput of the last optimizer step")
        self._peers = gauge("stage_peers", "Peers of a stage", "stage", "state")
        self.moves = gauge("moves", "Moves between stages that this coordinator has assigned")
        self._samples_per_s = gauge("stage_samples_per_second", "Announced throughput of a stage's peers", "stage")
        self.look_defects = Counter(
            "swarm_run_look_defects", "Looks that failed by a defect of this program", ["work"], registry=registry
        )
        self._queue = gauge("stage_queue_microbatches", "Microbatches that a stage's peers hold", "stage")

    def update(self, watch: RunWatch) -> None:
        """Set the gauges to the run as it is now."""
        self._step.set(watch.optimizer_step)
        self._steps.set(watch.manifest.training.steps)
        if (line := watch.last_line) is not None:
            self._loss.set(line["loss"])
            self._tokens_per_s.set(line["tokens_per_s"])
        if watch.validation_loss is not None:
            self._validation_loss.set(watch.validation_loss)
        for stage in range(watch.manifest.stages.count):
            peers = watch.view.in_stage(stage)
            for state in (PeerState.JOINING, PeerState.SERVING, PeerState.DRAINING):
                self._peers.labels(stage, state.value).set(sum(peer.state is state for peer in peers))
            self._samples_per_s.labels(stage).set(sum(peer.samples_per_s for peer in peers))
            self._queue.labels(stage).set(sum(peer.queue for peer in peers))

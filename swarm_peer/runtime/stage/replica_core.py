"""One stage's weights in this peer, with the parts that compute with them and admit microbatches to them.

Names these parts for others, and does nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.time_meter import TimeMeter


@dataclass(frozen=True, kw_only=True)
class ReplicaCore:
    """The parts of one replica that other parts of the peer work with.

    Attributes:
        trainer: weights, gradient accumulator and optimizer; used in the device thread only
        capacity: microbatches that the peer's memory has room for, at most `limits.max_in_flight`
        speed: how fast this replica's passes go
        rounds: the present round and the one before
        admission: admits microbatches of the present round
        executor: runs microbatches
        time: how the replica's time is spent
    """

    trainer: StageTrainer
    capacity: Capacity
    device_thread: DeviceThread
    speed: SpeedMeter
    rounds: RoundBook
    admission: RoundAdmission
    executor: StageExecutor
    time: TimeMeter

    @property
    def stage(self) -> int:
        """Index of the stage in the pipeline, from 0."""
        return self.trainer.spec.index

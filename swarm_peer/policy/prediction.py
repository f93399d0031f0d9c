"""How fast a swarm trains, and what holds it back: arithmetic on what stages ask and what peers can do.

Knows numbers alone: neither models nor machines. What the numbers stand for is computed by who calls.

One global step in synchronous mode is `stream + fill + averaging + update`:

* A peer takes a microbatch every `max(compute, upload, download)` seconds, since the three overlap. It holds each one
  until its gradient is back, for `hold` seconds: its own compute, the transfers, the round trips and the compute of all
  later stages. With at most `window` microbatches held at once it takes one every `hold / window` seconds at best
  (Little's law), so latency costs nothing while the window is large enough.
* A stage does what its peers do together, and the pipeline what its slowest stage does. `stream` is the global batch at
  that rate. `fill` is what a microbatch spends elsewhere: the pipeline is empty when a step begins and drains when it
  ends, and the slowest stage idles meanwhile.
* `averaging` is a butterfly all-reduce in each stage, all stages at once: each of n peers sends and receives
  2 (n - 1) / n of the encoded gradients (Patarasuk and Yuan, 2009), at the pace of the slowest link among them.
* `update` is what follows before weights are new: gradients to the host and back, their digest, the optimizer.

Routing is taken to follow what each peer can do in truth, links included. Not counted: queues that chance makes, peers
that come and go, validation, snapshots, and the processor's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

AveragingMode = Literal["synchronous", "delayed", "local"]

# Round trips at the end of a step: barrier, both halves of the all-reduce, vote.
ROUND_TRIPS_OF_A_ROUND = 4
# Bytes of fp32 gradients that a peer gets through per second at the end of a step: copied to the host and back and
# hashed (SHA-256 of one core), beside which the optimizer on a GPU is quick.
UPDATE_BYTES_PER_S = 1.0e9
# Graphs that the last stage may hold: one goes backward while the next has gone forward.
GRAPHS_AT_THE_END = 2

# What may set the pace of a stage, in words for people.
COMPUTE = "compute"
UPLOAD = "upload of activations and gradients"
DOWNLOAD = "download of activations and gradients"
ROUND_TRIPS = "round trips, since limits.max_in_flight allows no more microbatches"
MEMORY = "round trips, since memory allows no more microbatches in flight"
# What may take most of a step besides.
FILL = "filling and draining the pipeline, since the global batch is small"
AVERAGING = "averaging"
UPDATE = "the update at the end of a step"


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one stage asks of each of its peers.

    Attributes:
        flops: of one sample, forward and backward, recomputation included
        activation_bytes: of one sample, encoded, sent to the next stage; 0 for the last
        gradient_bytes: of one sample, encoded, sent back to the stage before; 0 for the first
        averaging_bytes: all gradients of the weights, encoded
        weight_bytes, weight_gradient_bytes, optimizer_bytes: held all the time
        working_bytes: held while one microbatch is computed, besides what waits for its backward pass
        update_bytes: held while the optimizer works, when no microbatch is there
        microbatch_bytes: held for each microbatch in flight
    """

    layers: int
    parameters: int
    flops: float
    activation_bytes: float
    gradient_bytes: float
    averaging_bytes: float
    weight_bytes: float
    weight_gradient_bytes: float
    optimizer_bytes: float
    working_bytes: float
    update_bytes: float
    microbatch_bytes: float

    @property
    def held_bytes(self) -> float:
        return self.weight_bytes + self.weight_gradient_bytes + self.optimizer_bytes

    def memory_bytes(self, in_flight: int) -> float:
        """Memory that a peer needs with so many microbatches in flight."""
        return self.held_bytes + max(self.update_bytes, self.working_bytes + in_flight * self.microbatch_bytes)

    def window(self, memory_bytes: float, limit: int) -> int:
        """Microbatches that fit into memory, `limit` at most; 0 if the stage does not fit at all."""
        if self.memory_bytes(limit) <= memory_bytes:
            return limit
        if self.memory_bytes(1) > memory_bytes:
            return 0
        return int((memory_bytes - self.held_bytes - self.working_bytes) // self.microbatch_bytes)


@dataclass(frozen=True, slots=True, order=True)
class PeerGroup:
    """Peers that are all alike.

    Attributes:
        flops_per_s: what each of them does in truth, not what its data sheet says
        memory_bytes: that training may use
        latency_s: round trip to another peer
    """

    name: str
    count: int
    flops_per_s: float
    memory_bytes: float = inf
    upload_bytes_per_s: float = inf
    download_bytes_per_s: float = inf
    latency_s: float = 0.0
    dollars_per_hour: float = 0.0
    dollars_per_sent_byte: float = 0.0

    @property
    def link_bytes_per_s(self) -> float:
        return min(self.upload_bytes_per_s, self.download_bytes_per_s)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Attributes:
    max_in_flight: microbatches that one peer may hold at once
    min_peers: that each stage must have
    steps_per_round: global steps between averaging rounds, in mode `local`
    """

    global_batch_size: int
    microbatch_size: int
    max_in_flight: int
    min_peers: int = 1
    mode: AveragingMode = "synchronous"
    steps_per_round: int = 1


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Attributes:
    peers: how many of each group
    samples_per_s: what its peers can do together
    limit: what keeps them from more
    busy_share: of a step, that its devices compute
    in_flight: microbatches that one of its peers holds, the most of its groups
    memory_bytes: what its peers need with them, and
    memory_limit_bytes: what the one with the least memory has
    averaging_s: of its averaging round, and
    update_s: of what follows it
    """

    peers: tuple[int, ...]
    samples_per_s: float
    limit: str
    busy_share: float
    in_flight: int
    memory_bytes: float
    memory_limit_bytes: float
    averaging_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one assignment of peers to stages. The times are of one global step; `step_s` is what they add up to, less
    what the averaging mode overlaps.

    Attributes:
        slowest_stage: the one that sets the pace of the stream
        limit: what takes most of a step, in words
        sent_bytes: by all peers, in one step
        traffic_dollars: price of sending them
        dollars_per_hour: price of the peers that have a stage
    """

    samples_per_s: float
    step_s: float
    stream_s: float
    fill_s: float
    averaging_s: float
    update_s: float
    slowest_stage: int
    limit: str
    stages: tuple[StagePrediction, ...]
    sent_bytes: float
    traffic_dollars: float
    dollars_per_hour: float


# counts[stage][group]: how many peers of a group serve a stage.
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One microbatch on one peer of a group in one stage: seconds of each resource, and the window (0: no room)."""

    compute_s: float
    upload_s: float
    download_s: float
    window: int
    send_s: float  # activations, to the next stage
    receive_s: float  # activations, from the stage before
    send_back_s: float  # gradients, to the stage before
    receive_back_s: float  # gradients, from the next stage

    @property
    def service_s(self) -> float:
        return max(self.compute_s, self.upload_s, self.download_s)


@dataclass(frozen=True, slots=True)
class _Flow:
    """One stage's peers together; means are weighted by microbatches.

    Attributes:
        rate: microbatches per second
        service_s: that a peer's scarcest resource works on a microbatch
        hold_s: from a microbatch's arrival until its gradient leaves
        intervals: of each group, seconds from one microbatch to the next; inf if it has no peers here
    """

    rate: float
    service_s: float
    hold_s: float
    receive_s: float
    send_back_s: float
    latency_s: float
    intervals: tuple[float, ...]
    holds: tuple[float, ...]


_NO_FLOW = _Flow(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), ())


class Predictor:
    """Predictions for one cut and one set of peers; whether counts respect `fits` is the caller's concern."""

    def __init__(self, works: Sequence[StageWork], groups: Sequence[PeerGroup], settings: StepSettings):
        self.works = tuple(works)
        self.groups = tuple(groups)
        self.settings = settings
        self._pairs = [
            [self._pair(stage, group) for group in self.groups] for stage in range(len(self.works))
        ]  # fmt: skip

    def _pair(self, stage: int, group: PeerGroup) -> _Pair:
        work, samples = self.works[stage], self.settings.microbatch_size
        received = self.works[stage - 1].activation_bytes if stage else 0.0
        returned = self.works[stage + 1].gradient_bytes if stage + 1 < len(self.works) else 0.0
        up, down = group.upload_bytes_per_s, group.download_bytes_per_s
        return _Pair(
            compute_s=samples * work.flops / group.flops_per_s,
            upload_s=samples * (work.activation_bytes + work.gradient_bytes) / up,
            download_s=samples * (received + returned) / down,
            window=work.window(group.memory_bytes, self.settings.max_in_flight),
            send_s=samples * work.activation_bytes / up,
            receive_s=samples * received / down,
            send_back_s=samples * work.gradient_bytes / up,
            receive_back_s=samples * returned / down,
        )

    def fits(self, stage: int, group: int) -> bool:
        return self._pairs[stage][group].window > 0

    def rates(self, counts: Counts | None = None) -> list[list[float]]:
        """Samples per second of one peer of each group (columns) in each stage (rows); 0 where it does not fit.

        Args:
            counts: who serves the later stages, which a peer waits for; if not given, latency is taken to be hidden
        """
        samples, indices = self.settings.microbatch_size, range(len(self.groups))
        if counts is None:
            return [[samples / pair.service_s if pair.window else 0.0 for pair in pairs] for pairs in self._pairs]
        return [
            [samples / self._interval_s(stage, g, following)[0] if self.fits(stage, g) else 0.0 for g in indices]
            for stage, following in enumerate([*self._flows(counts)[1:], _NO_FLOW])
        ]

    def score(self, counts: Counts) -> tuple[float, float]:
        """Larger is better: samples per second, then (at equal ones) less time at the stages that are not the slowest.

        (0, 0) if a stage has too few peers.
        """
        if self._wanting(counts):
            return 0.0, 0.0
        flows = self._flows(counts)
        stream_s, fill_s, averaging_s, update_s = self._times(counts, flows)
        step_s = self._step_s(stream_s, fill_s, averaging_s, update_s)
        return self.settings.global_batch_size / step_s, -sum(1 / flow.rate for flow in flows)

    def slow_stages(self, counts: Counts) -> set[int]:
        """Those that set the pace of a step: of the stream, and of averaging. Those with too few peers, if any."""
        if wanting := self._wanting(counts):
            return wanting
        flows = self._flows(counts)
        stages = range(len(flows))
        return {
            min(stages, key=lambda stage: flows[stage].rate),
            max(stages, key=lambda stage: self._averaging_s(stage, counts[stage])),
        }

    def stages_by_rate(self, counts: Counts) -> list[int]:
        """The fastest first. Every stage has peers."""
        flows = self._flows(counts)
        return sorted(range(len(flows)), key=lambda stage: (-flows[stage].rate, stage))

    def _wanting(self, counts: Counts) -> set[int]:
        return {stage for stage, here in enumerate(counts) if sum(here) < self.settings.min_peers}

    def _flows(self, counts: Counts) -> list[_Flow]:
        flows: list[_Flow] = []
        following = _NO_FLOW
        for stage in reversed(range(len(self.works))):
            total = service_sum = hold_sum = receive_sum = back_sum = latency_sum = 0.0
            intervals, holds = [inf] * len(self.groups), [0.0] * len(self.groups)
            for index, number in enumerate(counts[stage]):
                if not number:
                    continue
                pair = self._pairs[stage][index]
                intervals[index], holds[index] = self._interval_s(stage, index, following)
                rate = number / intervals[index]
                total += rate
                service_sum += rate * pair.service_s
                hold_sum += rate * holds[index]
                receive_sum += rate * pair.receive_s
                back_sum += rate * pair.send_back_s
                latency_sum += rate * self.groups[index].latency_s
            following = _Flow(
                total, service_sum / total, hold_sum / total, receive_sum / total, back_sum / total,
                latency_sum / total, tuple(intervals), tuple(holds),
            )  # fmt: skip
            flows.append(following)
        return flows[::-1]

    def _interval_s(self, stage: int, index: int, following: _Flow) -> tuple[float, float]:
        """Seconds from one microbatch to the next of a peer, and how long it holds each."""
        pair = self._pairs[stage][index]
        hold_s = pair.compute_s
        if stage + 1 < len(self.works):
            hold_s += following.hold_s + (self.groups[index].latency_s + following.latency_s) / 2
            hold_s += max(pair.send_s, following.receive_s) + max(following.send_back_s, pair.receive_back_s)
        return max(pair.service_s, hold_s / pair.window), hold_s

    def _times(self, counts: Counts, flows: Sequence[_Flow]) -> tuple[float, float, float, float]:
        slowest = min(flows, key=lambda flow: flow.rate)
        stream_s = self.settings.global_batch_size / self.settings.microbatch_size / slowest.rate
        ends = [(self._averaging_s(stage, here), self._update_s(stage)) for stage, here in enumerate(counts)]
        averaging_s, update_s = max(ends, key=sum)
        return stream_s, max(flows[0].hold_s - slowest.service_s, 0.0), averaging_s, update_s

    def _averaging_s(self, stage: int, here: Sequence[int]) -> float:
        num_peers = sum(here)
        if num_peers < 2:
            return 0.0
        present = [group for group, number in zip(self.groups, here, strict=True) if number]
        link = min(group.link_bytes_per_s for group in present)
        latency_s = max(group.latency_s for group in present)
        moved = 2 * (num_peers - 1) / num_peers * self.works[stage].averaging_bytes
        return moved / link + ROUND_TRIPS_OF_A_ROUND * latency_s

    def _update_s(self, stage: int) -> float:
        return self.works[stage].weight_gradient_bytes / UPDATE_BYTES_PER_S

    def _step_s(self, stream_s: float, fill_s: float, averaging_s: float, update_s: float) -> float:
        """That the stream and an averaging round beside it share the links is left out."""
        if self.settings.mode == "delayed":
            return max(stream_s + fill_s, averaging_s) + update_s
        if self.settings.mode == "local":
            averaging_s /= self.settings.steps_per_round
        return stream_s + fill_s + averaging_s + update_s

    def predict(self, counts: Counts) -> Prediction:
        """All that is to be said of an assignment in which every stage has peers."""
        flows = self._flows(counts)
        stream_s, fill_s, averaging_s, update_s = self._times(counts, flows)
        step_s = self._step_s(stream_s, fill_s, averaging_s, update_s)
        pace = min(flow.rate for flow in flows)
        slowest = min(range(len(flows)), key=lambda stage: flows[stage].rate)
        stages = tuple(self._stage(stage, counts[stage], flows[stage], pace, step_s) for stage in range(len(flows)))
        end_s = {
            "synchronous": averaging_s,
            "delayed": max(averaging_s - stream_s - fill_s, 0.0),
            "local": averaging_s / self.settings.steps_per_round,
        }[self.settings.mode]
        shares = {stages[slowest].limit: stream_s, FILL: fill_s, AVERAGING: end_s, UPDATE: update_s}
        sent = [self._sent_bytes(stage, counts[stage], flows[stage]) for stage in range(len(flows))]
        return Prediction(
            samples_per_s=self.settings.global_batch_size / step_s,
            step_s=step_s,
            stream_s=stream_s,
            fill_s=fill_s,
            averaging_s=averaging_s,
            update_s=update_s,
            slowest_stage=slowest,
            limit=max(shares, key=lambda name: shares[name]),
            stages=stages,
            sent_bytes=sum(map(sum, sent)),
            traffic_dollars=sum(
                group.dollars_per_sent_byte * of_stage[index]
                for of_stage in sent
                for index, group in enumerate(self.groups)
            ),
            dollars_per_hour=sum(
                group.dollars_per_hour * here[index] for here in counts for index, group in enumerate(self.groups)
            ),
        )

    def _stage(self, stage: int, here: Sequence[int], flow: _Flow, pace: float, step_s: float) -> StagePrediction:
        work, samples = self.works[stage], self.settings.microbatch_size
        present = [index for index, number in enumerate(here) if number]
        flops_per_s = sum(here[index] * self.groups[index].flops_per_s for index in present)
        fastest = max(present, key=lambda index: here[index] / flow.intervals[index])
        in_flight = max(self._in_flight(stage, index, flow, pace) for index in present)
        return StagePrediction(
            peers=tuple(here),
            samples_per_s=flow.rate * samples,
            limit=self._limit(stage, fastest, flow),
            busy_share=self.settings.global_batch_size * work.flops / flops_per_s / step_s,
            in_flight=in_flight,
            memory_bytes=work.memory_bytes(in_flight),
            memory_limit_bytes=min(self.groups[index].memory_bytes for index in present),
            averaging_s=self._averaging_s(stage, here),
            update_s=self._update_s(stage),
        )

    def _in_flight(self, stage: int, index: int, flow: _Flow, pace: float) -> int:
        """What Little's law asks for at the pipeline's pace, and one that is just coming; the window at most."""
        is_last = stage + 1 == len(self.works)
        held = flow.holds[index] / flow.intervals[index] * pace / flow.rate
        wanted = GRAPHS_AT_THE_END if is_last else 1 + ceil(held)
        return min(wanted, self._pairs[stage][index].window)

    def _limit(self, stage: int, index: int, flow: _Flow) -> str:
        pair = self._pairs[stage][index]
        if flow.intervals[index] > pair.service_s:
            return ROUND_TRIPS if pair.window == self.settings.max_in_flight else MEMORY
        resources = {COMPUTE: pair.compute_s, UPLOAD: pair.upload_s, DOWNLOAD: pair.download_s}
        return max(resources, key=lambda name: resources[name])

    def _sent_bytes(self, stage: int, here: Sequence[int], flow: _Flow) -> list[float]:
        """By the peers of each group in this stage, in one step."""
        work, settings, num_peers = self.works[stage], self.settings, sum(here)
        streamed = settings.global_batch_size * (work.activation_bytes + work.gradient_bytes)
        rounds = 1 / settings.steps_per_round if settings.mode == "local" else 1.0
        averaged = rounds * 2 * (num_peers - 1) / num_peers * work.averaging_bytes
        return [
            number / flow.intervals[index] / flow.rate * streamed + number * averaged if number else 0.0
            for index, number in enumerate(here)
        ]

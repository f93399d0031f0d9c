"""How fast a swarm trains, and what limits it: arithmetic on the work of the stages and the speed of the peers.

This module knows numbers alone, neither models nor machines; the caller computes them.

The time of one optimizer step is `stream + fill + averaging + update`:

* A peer takes a microbatch every `max(compute, upload, download)` seconds, since the three overlap. It holds each one
  until its gradient is back, for `hold` seconds: its own compute, the transfers, the round trips and the compute of all
  later stages. With at most `window` microbatches held at once it takes one every `hold / window` seconds at best
  (Little's law), so latency costs nothing while the window is large enough.
* The rate of a stage is the sum of its peers' rates, and that of the pipeline is that of its slowest stage. `stream` is
  the time of the global batch at that rate. `fill` is the time that a microbatch spends outside the slowest stage: the
  pipeline is empty when a step begins and drains when it ends, and the slowest stage idles meanwhile.
* `averaging` is a butterfly all-reduce in each stage, all stages at once: each of n peers sends and receives
  2 (n - 1) / n of the encoded gradients (Patarasuk and Yuan, 2009), at the pace of the slowest link among them. Where
  stage-mates average every so many steps alone, each step has its share of that, and a barrier of its own.
* `update` is the time from the end of averaging until the weights are new: the gradients are copied to the host and
  back and hashed, and the optimizer takes its step.

The model assumes that routing follows the true speed of each peer, links included. It leaves out random queues, peers
that come and go, validation, snapshots, and the work of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from swarm_peer.policy.placement.ways import lacked
from swarm_peer.policy.planning.resources import PeerGroup, StageWork, StepSettings

# Round trips at the end of a step: barrier; and of an average: both halves of the all-reduce, vote.
ROUND_TRIPS_OF_A_BARRIER = 1
ROUND_TRIPS_OF_A_VOTE = 1
ROUND_TRIPS_OF_AN_AVERAGE = 3
# Bytes of fp32 gradients that a peer processes per second at the end of a step: it copies them to the host and back and
# hashes them (SHA-256 on one core). The optimizer on a GPU is much faster than that.
UPDATE_BYTES_PER_S = 1.0e9
# Autograd graphs that the last stage may hold: one is in its backward pass while the next has done its forward pass.
GRAPHS_AT_THE_END = 2

# The possible limits of a stage, in words for people.
COMPUTE = "compute"
UPLOAD = "upload of activations and gradients"
DOWNLOAD = "download of activations and gradients"
ROUND_TRIPS = "round trips, since limits.max_in_flight allows no more microbatches"
MEMORY = "round trips, since memory allows no more microbatches in flight"
# The other possible limits of a step.
FILL = "filling and draining the pipeline, since the global batch is small"
AVERAGING = "averaging"
UPDATE = "the update at the end of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """The prediction for one stage.

    Attributes:
        peers: how many peers of each group serve the stage
        samples_per_s: the rate of all its peers together
        limit: what limits that rate, in words
        busy_share: the share of a step in which its devices compute
        in_flight: microbatches that one of its peers holds, in the group where they are most
        memory_bytes: memory that a peer needs with that many microbatches
        memory_limit_bytes: memory of the peer that has the least
        averaging_s: time of its averaging round
        update_s: time from the end of averaging until its weights are new
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


class StepTimes(NamedTuple):
    """The four parts of an optimizer step, which follow each other."""

    stream_s: float
    fill_s: float
    averaging_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one assignment of peers to stages.

    Attributes:
        step_s: time of one optimizer step, the sum of `times`
        slowest_stage: the stage with the lowest rate
        limit: what takes most of a step, in words
        average_s: the longest time from the beginning of a stage's average to its end, also where it holds no step up
        sent_bytes: traffic of all peers in one step
        traffic_dollars: price of that traffic
        dollars_per_hour: price of all peers that have a stage
    """

    samples_per_s: float
    step_s: float
    times: StepTimes
    slowest_stage: int
    limit: str
    average_s: float
    stages: tuple[StagePrediction, ...]
    sent_bytes: float
    traffic_dollars: float
    dollars_per_hour: float


# counts[stage][group]: how many peers of a group serve a stage.
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One microbatch at one peer of a group in one stage: seconds of each resource; the window is 0 without room."""

    compute_s: float
    service_s: float  # of the scarcest resource: device, upload or download
    window: int
    send_s: float  # activations, to the next stage
    receive_s: float  # activations, from the stage before
    send_back_s: float  # gradients, to the stage before
    receive_back_s: float  # gradients, from the next stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """All peers of a stage together; means are weighted by microbatches.

    Attributes:
        rate: microbatches per second
        service_s: time that a peer's scarcest resource works on a microbatch
        hold_s: time from a microbatch's arrival until its gradient leaves
        intervals: for each group, seconds from one microbatch to the next; inf if the group has no peers here
        holds: for each group, its `hold_s`
    """

    rate: float = 0.0
    service_s: float = 0.0
    hold_s: float = 0.0
    receive_s: float = 0.0
    send_back_s: float = 0.0
    latency_s: float = 0.0
    intervals: tuple[float, ...] = ()
    holds: tuple[float, ...] = ()


_NO_FLOW = _Flow()


class Predictor:
    """Makes predictions for one cut of the model and one set of peers.

    Its methods take counts of peers. The caller sees to it that each peer fits where it is counted.
    """

    def __init__(self, *, works: Sequence[StageWork], groups: Sequence[PeerGroup], settings: StepSettings):
        self.works = tuple(works)
        self.groups = tuple(groups)
        self.settings = settings
        self._pairs = [[self._pair(stage, group) for group in self.groups] for stage in range(len(self.works))]

    def _pair(self, stage: int, group: PeerGroup) -> _Pair:
        work, samples = self.works[stage], self.settings.microbatch_size
        received = self.works[stage - 1].activation_bytes if stage else 0.0
        returned = self.works[stage + 1].gradient_bytes if stage + 1 < len(self.works) else 0.0
        up, down = group.upload_bytes_per_s, group.download_bytes_per_s
        compute_s = samples * work.flops / group.flops_per_s
        sent = work.activation_bytes + work.gradient_bytes
        return _Pair(
            compute_s=compute_s,
            service_s=max(compute_s, samples * sent / up, samples * (received + returned) / down),
            window=work.memory.window(group.memory_bytes, self.settings.max_in_flight),
            send_s=samples * work.activation_bytes / up,
            receive_s=samples * received / down,
            send_back_s=samples * work.gradient_bytes / up,
            receive_back_s=samples * returned / down,
        )

    def fits(self, stage: int, group: int) -> bool:
        """Whether a peer of the group has enough memory for the stage."""
        return self._pairs[stage][group].window > 0

    def may_join(self, counts: Counts, stage: int, group: int) -> bool:
        """Whether one more peer of the group lacks nobody in a stage, by the rule that live peers go by."""
        if not self.groups[group].is_closed:
            return True
        placed, closed = self._placed(counts)
        return not lacked(stage, placed, closed)

    def _placed(self, counts: Counts) -> tuple[list[set[str]], frozenset[str]]:
        """The peers by stage, each closed one by a name of its own; and the names of all closed ones."""
        placed: list[set[str]] = []
        for stage, here in enumerate(counts):
            num_closed = sum(count for count, group in zip(here, self.groups, strict=True) if group.is_closed)
            num_open = sum(here) - num_closed
            placed.append({*(f"{stage} {number}" for number in range(num_closed)), *["open"][:num_open]})
        return placed, frozenset().union(*placed) - {"open"}

    def _cut_off(self, counts: Counts) -> set[int]:
        """The stages with a peer that lacks a way to somebody that it needs."""
        if not any(group.is_closed for group in self.groups):
            return set()
        placed, closed = self._placed(counts)
        return {
            stage
            for stage, here in enumerate(placed)
            if any(lacked(stage, placed, closed - {peer}) for peer in here & closed)
        }

    def rates(self, counts: Counts | None = None) -> list[list[float]]:
        """Samples per second of one peer of each group (columns) in each stage (rows); 0 where it does not fit.

        Args:
            counts: the peers of each stage, since a peer waits for later stages; if not given, latency is neglected
        """
        samples, indices = self.settings.microbatch_size, range(len(self.groups))
        if counts is None:
            return [[samples / pair.service_s if pair.window else 0.0 for pair in pairs] for pairs in self._pairs]
        return [
            [samples / self._interval_s(stage, g, following)[0] if self.fits(stage, g) else 0.0 for g in indices]
            for stage, following in enumerate([*self._flows(counts)[1:], _NO_FLOW])
        ]

    def score(self, counts: Counts) -> tuple[float, float]:
        """The score of an assignment; larger is better, and (0, 0) means that a stage has too few peers, or
        one that lacks a way to somebody that it needs.

        First come the samples per second; with equal ones, less time at the other stages is better.
        """
        if self._wanting(counts):
            return 0.0, 0.0
        flows = self._flows(counts)
        step_s = sum(self._times(counts, flows))
        return self.settings.global_batch_size / step_s, -sum(1 / flow.rate for flow in flows)

    def slow_stages(self, counts: Counts) -> set[int]:
        """The stages that score refuses; if there are none, the slowest stage of the stream and that of averaging."""
        if wanting := self._wanting(counts):
            return wanting
        flows = self._flows(counts)
        stages = range(len(flows))
        slowest = min(stages, key=lambda stage: flows[stage].rate)
        stream_s = self._stream_s(flows[slowest])
        return {
            slowest,
            max(stages, key=lambda stage: self._averaging_s(stage, counts[stage], flows[stage], stream_s)),
        }

    def stages_by_rate(self, counts: Counts) -> list[int]:
        """The stages, the fastest first. Every stage must have peers."""
        flows = self._flows(counts)
        return sorted(range(len(flows)), key=lambda stage: (-flows[stage].rate, stage))

    def _wanting(self, counts: Counts) -> set[int]:
        few = {stage for stage, here in enumerate(counts) if sum(here) < self.settings.min_peers}
        return few | self._cut_off(counts)

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
                rate=total,
                service_s=service_sum / total,
                hold_s=hold_sum / total,
                receive_s=receive_sum / total,
                send_back_s=back_sum / total,
                latency_s=latency_sum / total,
                intervals=tuple(intervals),
                holds=tuple(holds),
            )
            flows.append(following)
        return flows[::-1]

    def _interval_s(self, stage: int, index: int, following: _Flow) -> tuple[float, float]:
        """Seconds from one microbatch to the next at a peer, and seconds for which it holds each."""
        pair = self._pairs[stage][index]
        hold_s = pair.compute_s
        if stage + 1 < len(self.works):
            hold_s += following.hold_s + (self.groups[index].latency_s + following.latency_s) / 2
            hold_s += max(pair.send_s, following.receive_s) + max(following.send_back_s, pair.receive_back_s)
        return max(pair.service_s, hold_s / pair.window), hold_s

    def _times(self, counts: Counts, flows: Sequence[_Flow]) -> StepTimes:
        slowest = min(flows, key=lambda flow: flow.rate)
        stream_s = self._stream_s(slowest)
        ends = [
            (self._averaging_s(stage, here, flow, stream_s), self._update_s(stage))
            for stage, (here, flow) in enumerate(zip(counts, flows, strict=True))
        ]
        averaging_s, update_s = max(ends, key=sum)
        return StepTimes(stream_s, max(flows[0].hold_s - slowest.service_s, 0.0), averaging_s, update_s)

    def _stream_s(self, slowest: _Flow) -> float:
        return self.settings.global_batch_size / self.settings.microbatch_size / slowest.rate

    def _averaging_s(self, stage: int, here: Sequence[int], flow: _Flow, stream_s: float) -> float:
        """Seconds for which averaging holds the step up."""
        if sum(here) < 2:
            return 0.0
        latency_s, average_s = self._latency_s(here), self._average_s(stage, here)
        if self.settings.averages_ahead:
            # It shares the links with the microbatches of the next step, and with what does not fit in there it holds
            # that one up.
            average_s = max(average_s + self._link_s(stage, flow) - stream_s, ROUND_TRIPS_OF_A_VOTE * latency_s)
        return ROUND_TRIPS_OF_A_BARRIER * latency_s + average_s / self.settings.steps_per_average

    def _average_s(self, stage: int, here: Sequence[int]) -> float:
        """Seconds of an average that has the links for itself."""
        num_peers = sum(here)
        if num_peers < 2:
            return 0.0
        present = [group for group, number in zip(self.groups, here, strict=True) if number]
        link = min(group.link_bytes_per_s * group.averaging_gain for group in present)
        moved = 2 * (num_peers - 1) / num_peers * self.works[stage].averaging_bytes
        return moved / link + ROUND_TRIPS_OF_AN_AVERAGE * self._latency_s(here)

    def _latency_s(self, here: Sequence[int]) -> float:
        return max(group.latency_s for group, number in zip(self.groups, here, strict=True) if number)

    def _link_s(self, stage: int, flow: _Flow) -> float:
        """Seconds of a step for which microbatches need the busiest link of a stage, in the busier direction."""
        microbatches = self.settings.global_batch_size / self.settings.microbatch_size
        return max(
            microbatches
            / (interval_s * flow.rate)
            * max(pair.send_s + pair.send_back_s, pair.receive_s + pair.receive_back_s)
            for pair, interval_s in zip(self._pairs[stage], flow.intervals, strict=True)
        )

    def _update_s(self, stage: int) -> float:
        return self.works[stage].memory.weight_gradient_bytes / UPDATE_BYTES_PER_S

    def predict(self, counts: Counts) -> Prediction:
        """The prediction for an assignment in which every stage has peers."""
        flows = self._flows(counts)
        times = self._times(counts, flows)
        step_s = sum(times)
        pace = min(flow.rate for flow in flows)
        slowest = min(range(len(flows)), key=lambda stage: flows[stage].rate)
        stages = tuple(self._stage(stage, counts[stage], flows[stage], pace, step_s) for stage in range(len(flows)))
        shares = dict(zip((stages[slowest].limit, FILL, AVERAGING, UPDATE), times, strict=True))
        # Beside the microbatches of the next step, an average has half of the links at least.
        shared = 2 if self.settings.averages_ahead else 1
        sent = [self._sent_bytes(stage, counts[stage], flows[stage]) for stage in range(len(flows))]
        return Prediction(
            samples_per_s=self.settings.global_batch_size / step_s,
            step_s=step_s,
            times=times,
            slowest_stage=slowest,
            limit=max(shares, key=lambda name: shares[name]),
            average_s=shared * max(self._average_s(stage, here) for stage, here in enumerate(counts)),
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
            memory_bytes=work.memory.peak_bytes(in_flight),
            memory_limit_bytes=min(self.groups[index].memory_bytes for index in present),
            averaging_s=self._averaging_s(stage, here, flow, self.settings.global_batch_size / samples / pace),
            update_s=self._update_s(stage),
        )

    def _in_flight(self, stage: int, index: int, flow: _Flow, pace: float) -> int:
        """The microbatches of Little's law at the pipeline's pace, and one that is arriving; at most the window."""
        is_last = stage + 1 == len(self.works)
        held = flow.holds[index] / flow.intervals[index] * pace / flow.rate
        wanted = GRAPHS_AT_THE_END if is_last else 1 + ceil(held)
        return min(wanted, self._pairs[stage][index].window)

    def _limit(self, stage: int, index: int, flow: _Flow) -> str:
        pair = self._pairs[stage][index]
        if flow.intervals[index] > pair.service_s:
            return ROUND_TRIPS if pair.window == self.settings.max_in_flight else MEMORY
        upload_s, download_s = pair.send_s + pair.send_back_s, pair.receive_s + pair.receive_back_s
        resources = {COMPUTE: pair.compute_s, UPLOAD: upload_s, DOWNLOAD: download_s}
        return max(resources, key=lambda name: resources[name])

    def _sent_bytes(self, stage: int, here: Sequence[int], flow: _Flow) -> list[float]:
        """Bytes that the peers of each group in this stage send in one step."""
        work, settings, num_peers = self.works[stage], self.settings, sum(here)
        streamed = settings.global_batch_size * (work.activation_bytes + work.gradient_bytes)
        averaged = 2 * (num_peers - 1) / num_peers * work.averaging_bytes / settings.steps_per_average
        return [
            number / flow.intervals[index] / flow.rate * streamed + number * averaged if number else 0.0
            for index, number in enumerate(here)
        ]

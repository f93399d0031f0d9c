"""`plan`: what a run would do with certain peers, as one report for people and programs.

The decisions are policy/planning.py's; here a manifest and descriptions of peers become its numbers, and its answer
tokens, days and dollars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log10
from typing import Any

from coordinator.onlooker import onlooker
from coordinator.peers_file import distinct
from coordinator.stage_work import hop_bytes, stage_works, widened_layer_flops
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config, resolve_model_config
from swarm_peer.policy.planning import Option, Plan, plan, smallest_fitting
from swarm_peer.policy.prediction import MEMORY, ROUND_TRIPS, PeerGroup, Prediction, StageWork, StepSettings
from swarm_peer.policy.square_cube import Hop
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.bootstrap import find_manifest, read_addresses
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.processes import run_loop
from swarm_peer.runtime.signal import Signal

SECONDS_PER_DAY = 24 * 3600
# Up to here every number of stages is tried; further ones are this factor apart.
EVERY_COUNT_TO = 16
NEXT_COUNT = 1.15
# Widths of the square-cube table, as multiples of the model's.
WIDTHS = (1, 2, 4, 8)
# Stages that a note names one by one.
MOST_NAMED = 6
# Live peers whose speeds agree to so many digits are one group.
SPEED_DIGITS = 2


@dataclass(frozen=True, slots=True)
class LivePeers:
    """What is assumed of a live run's peers beside the speed that they announce."""

    memory_bytes: float = inf
    upload_bytes_per_s: float = inf
    download_bytes_per_s: float = inf
    latency_s: float = 0.0


def resolve_config(manifest: RunManifest) -> RunManifest:
    """The manifest with an inline model config.

    Raises:
        UserError: see resolve_model_config
    """
    config = resolve_model_config(manifest.model)
    return manifest.model_copy(update={"model": manifest.model.model_copy(update={"config": config})})


def read_live_run(initial_peers: Sequence[str], run_id: str | None) -> tuple[RunManifest, SwarmView]:
    """The manifest of a live run, and who takes part in it.

    Raises:
        UserError: nobody answers, or there is no such run
    """
    addresses = read_addresses(initial_peers)

    async def look() -> tuple[RunManifest, SwarmView]:
        _, manifest = await find_manifest(dht, addresses, run_id)
        directory = Directory(manifest, dht, "", None, PeerMetrics(), Signal())
        return manifest, await directory.refresh(range(manifest.stages.count))

    with onlooker(addresses) as dht:
        return run_loop(look)


def live_groups(manifest: RunManifest, view: SwarmView, assumed: LivePeers) -> list[PeerGroup]:
    """The peers of a live run by what they were measured to do; those not measured yet are taken for typical ones.

    Raises:
        UserError: there are none, or none is measured
    """
    works = stage_works(manifest, manifest.stages.count)
    peers = [peer for peer in view.peers if 0 <= peer.stage < len(works)]
    measured = sorted(peer.samples_per_s * works[peer.stage].flops for peer in peers if peer.samples_per_s > 0)
    if not measured:
        raise UserError(
            f"none of the {len(peers)} peers of run {manifest.name} has measured its speed: wait until they train"
        )
    typical = measured[len(measured) // 2]
    kinds = Counter(
        (_rounded(peer.samples_per_s * works[peer.stage].flops or typical), peer.memory_bytes or assumed.memory_bytes)
        for peer in peers
    )
    groups = [
        PeerGroup(
            f"live, {speed / 1e12:.2g} TFLOP/s", number, speed, memory_bytes, assumed.upload_bytes_per_s,
            assumed.download_bytes_per_s, assumed.latency_s,
        )
        for (speed, memory_bytes), number in sorted(kinds.items(), reverse=True)
    ]  # fmt: skip
    return distinct(groups)


def _rounded(value: float) -> float:
    return round(value, SPEED_DIGITS - 1 - int(log10(value)))


def with_prices(
    groups: Iterable[PeerGroup], dollars_per_hour: float | None, dollars_per_gb: float | None
) -> list[PeerGroup]:
    """The same groups at other prices, where some are given."""
    changed = []
    for group in groups:
        if dollars_per_hour is not None:
            group = replace(group, dollars_per_hour=dollars_per_hour)
        if dollars_per_gb is not None:
            group = replace(group, dollars_per_sent_byte=dollars_per_gb / 1e9)
        changed.append(group)
    return changed


def make_report(
    manifest: RunManifest, groups: Sequence[PeerGroup], num_stages: int | None = None, tokens: int | None = None
) -> dict[str, Any]:
    """Plan a run: plain values, as `plan --json` prints them; what is unlimited or unknown is None.

    Args:
        manifest: its model config is inline (resolve_config)
        num_stages: to be taken whether it is the fastest or not
        tokens: to train on; those of the manifest if not given

    Raises:
        UserError: the model does not fit these peers, or cannot be cut so
    """
    num_layers = parse_model_config(manifest.model.config).num_hidden_layers  # type: ignore[arg-type]
    # Where a stage's layers share their weights, another number of stages makes another model.
    most = min(num_layers, sum(group.count for group in groups) // manifest.stages.peers_to_start)
    counts = [] if manifest.model.share_layers else _candidates(most)
    cuts = _cuts(manifest, [*counts, num_stages or manifest.stages.count])
    training = manifest.training
    settings = StepSettings(
        training.global_batch_size, training.microbatch_size, manifest.limits.max_in_flight,
        manifest.stages.peers_to_start, manifest.averaging.mode,
    )  # fmt: skip
    made = plan(cuts, groups, settings, num_stages)
    if made.best is None:
        raise UserError(_misfit(manifest, made, num_stages, num_layers))
    prediction = made.best.prediction
    assert prediction is not None
    length = manifest.data.sequence_length
    return {
        "name": manifest.name,
        "parameters": sum(work.parameters for work in made.best.works),
        "stages": made.best.num_stages,
        "configured_stages": manifest.stages.count,
        "tokens_per_s": prediction.samples_per_s * length,
        "limit": prediction.limit,
        "reason": made.best.reason,
        "step": {
            "seconds": prediction.step_s,
            "stream_s": prediction.stream_s,
            "fill_s": prediction.fill_s,
            "averaging_s": prediction.averaging_s,
            "update_s": prediction.update_s,
            "mode": settings.mode,
        },
        "groups": [_group_report(made, prediction, index) for index in range(len(made.groups))],
        "stage_plans": _stage_reports(made, made.best, prediction, length),
        "options": [_option_report(option, length) for option in made.options],
        "changes": [
            {
                "group": made.groups[change.group].name,
                "difference": change.difference,
                "tokens_per_s": None if change.samples_per_s is None else change.samples_per_s * length,
                "ratio": None if change.samples_per_s is None else change.samples_per_s / prediction.samples_per_s,
                "stages": list(change.stages),
            }
            for change in made.changes
        ],
        "square_cube": _square_cube(manifest, made.groups, made.best),
        "training": _training(manifest, prediction, tokens),
        "notes": _notes(manifest, made, prediction),
    }


def _candidates(most: int) -> list[int]:
    counts, count = list(range(1, min(most, EVERY_COUNT_TO) + 1)), float(EVERY_COUNT_TO)
    while count < most:
        count = min(count * NEXT_COUNT, most)
        counts.append(int(count))
    return counts


def _cuts(manifest: RunManifest, counts: Iterable[int]) -> dict[int, tuple[StageWork, ...]]:
    return {count: stage_works(manifest, count) for count in sorted(set(counts))}


def _misfit(manifest: RunManifest, made: Plan, num_stages: int | None, num_layers: int) -> str:
    """Why no option is possible, and what to do."""
    forced = [option for option in made.options if option.num_stages == num_stages]
    option = forced[0] if forced else made.options[-1]
    beginning = f"{manifest.name} does not fit these peers in {_number_of(option.num_stages, 'stage')}: {option.reason}"
    counts = [option.num_stages] if manifest.model.share_layers else _candidates(num_layers)
    fewest = smallest_fitting(_cuts(manifest, counts), made.groups)
    if fewest is None:
        remedies = ["training.microbatch_size=1" if manifest.training.microbatch_size > 1 else "peers with more memory"]
        if not manifest.model.activation_checkpointing:
            remedies.insert(0, "model.activation_checkpointing=true")
        if manifest.optimizer.name == "adamw":
            remedies.insert(0, "optimizer.name=adamw_8bit")
        return f"{beginning}; no number of stages makes all of them small enough: try {', or '.join(remedies)}"
    able = [each.num_stages for each in made.options if each.prediction]
    if able:
        return f"{beginning}; the fewest that do are {able[0]}: take --stages {able[0]}"
    missing = fewest * manifest.stages.peers_to_start - sum(group.count for group in made.groups)
    if missing > 0:
        more = f"at least {_number_of(missing, 'peer')} more"
        return f"{beginning}; the fewest stages whose memory suffices are {fewest}: add {more}"
    return f"{beginning}; add peers that have it, or lower stages.peers_to_start"


def _group_report(made: Plan, prediction: Prediction, index: int) -> dict[str, Any]:
    group = made.groups[index]
    return {
        "name": group.name,
        "count": group.count,
        "used": sum(stage.peers[index] for stage in prediction.stages),
        "flops_per_s": group.flops_per_s,
        "memory_bytes": _finite(group.memory_bytes),
        "upload_bytes_per_s": _finite(group.upload_bytes_per_s),
        "download_bytes_per_s": _finite(group.download_bytes_per_s),
        "latency_s": group.latency_s,
        "dollars_per_hour": group.dollars_per_hour,
        "dollars_per_gb": group.dollars_per_sent_byte * 1e9,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _stage_reports(made: Plan, option: Option, prediction: Prediction, length: int) -> list[dict[str, Any]]:
    reports, first = [], 0
    for index, (work, stage) in enumerate(zip(option.works, prediction.stages, strict=True)):
        reports.append(
            {
                "stage": index,
                "first_layer": first,
                "layers": work.layers,
                "parameters": work.parameters,
                "peers": {g.name: n for g, n in zip(made.groups, stage.peers, strict=True) if n},
                "tokens_per_s": stage.samples_per_s * length,
                "limit": stage.limit,
                "busy_share": stage.busy_share,
                "in_flight": stage.in_flight,
                "memory_bytes": stage.memory_bytes,
                "memory_limit_bytes": _finite(stage.memory_limit_bytes),
                "weight_bytes": work.weight_bytes,
                "weight_gradient_bytes": work.weight_gradient_bytes,
                "optimizer_bytes": work.optimizer_bytes,
                "microbatch_bytes": work.microbatch_bytes,
                "averaging_s": stage.averaging_s,
                "update_s": stage.update_s,
            }
        )
        first += work.layers
    return reports


def _option_report(option: Option, length: int) -> dict[str, Any]:
    possible = option.prediction
    return {
        "stages": option.num_stages,
        "layers": [work.layers for work in option.works],
        "peers": [sum(stage.peers) for stage in possible.stages] if possible else None,
        "tokens_per_s": possible.samples_per_s * length if possible else None,
        "limit": possible.limit if possible else None,
        "averaging_share": possible.averaging_s / possible.step_s if possible else None,
        "largest_memory_bytes": max(work.memory_bytes(1) for work in option.works),
        "reason": option.reason,
    }


def _square_cube(manifest: RunManifest, groups: Sequence[PeerGroup], option: Option) -> dict[str, Any] | None:
    """Of the most numerous peers with a known link; one layer to a stage, and the model as it was cut."""
    linked = [group for group in groups if isfinite(group.link_bytes_per_s)]
    if not linked:
        return None
    group = max(linked, key=lambda group: group.count)
    samples, length = manifest.training.microbatch_size, manifest.data.sequence_length
    layers = max(work.layers for work in option.works)
    shapes = [(width, 1) for width in WIDTHS] + ([(1, layers)] if layers > 1 else [])
    rows = []
    for width, num_layers in shapes:
        hidden_size, flops = widened_layer_flops(manifest, width)
        row: dict[str, Any] = {"hidden_size": hidden_size, "layers": num_layers}
        for codec in ("none", "fp16", "blockwise_8bit"):
            hop = Hop(
                compute_s=samples * flops * num_layers / group.flops_per_s,
                activation_bytes=samples * hop_bytes(length, hidden_size, codec),
                gradient_bytes=samples * hop_bytes(length, hidden_size, codec, with_tokens=False),
                bytes_per_s=group.link_bytes_per_s,
                latency_s=group.latency_s,
            )
            row["compute_s"] = hop.compute_s
            row[codec] = {
                "transfer_s": hop.transfer_s,
                "share_alone": hop.share_alone,
                "share_in_flight": hop.share_in_flight,
                "in_flight": hop.in_flight,
            }
        rows.append(row)
    return {
        "group": group.name,
        "bytes_per_s": group.link_bytes_per_s,
        "latency_s": group.latency_s,
        "rows": rows,
    }


def _training(manifest: RunManifest, prediction: Prediction, tokens: int | None) -> dict[str, Any]:
    tokens_per_step = manifest.training.global_batch_size * manifest.data.sequence_length
    if tokens is None:
        tokens = manifest.training.steps * tokens_per_step
    steps = tokens / tokens_per_step
    seconds = steps * prediction.step_s
    peer_dollars = prediction.dollars_per_hour * seconds / 3600
    traffic_dollars = prediction.traffic_dollars * steps
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / SECONDS_PER_DAY,
        "sent_bytes": prediction.sent_bytes * steps,
        "peer_dollars": peer_dollars,
        "traffic_dollars": traffic_dollars,
        "dollars": peer_dollars + traffic_dollars,
    }


def _notes(manifest: RunManifest, made: Plan, prediction: Prediction) -> list[str]:
    """What is worth knowing beside the numbers."""
    notes = []
    alone = [str(index) for index, stage in enumerate(prediction.stages) if sum(stage.peers) == 1]
    if alone and len(prediction.stages) > 1:
        notes.append(
            f"{_list_of('stage', alone)} with a single peer: if it goes, the run waits until somebody takes its place. "
            f"To plan for two, --set stages.peers_to_start=2"
        )
    idle = sum(group.count for group in made.groups) - sum(sum(stage.peers) for stage in prediction.stages)
    if idle:
        notes.append(
            f"{_number_of(idle, 'peer')} without a stage, as spares: in none would they make a step shorter, be it for "
            f"their links, which averaging waits for, for their memory, or because another stage sets the pace"
        )
    if manifest.model.share_layers:
        notes.append("layers of a stage share their weights, so that another number of stages would be another model")
    averaging = manifest.averaging
    if prediction.averaging_s > averaging.round_timeout_s:
        notes.append(
            f"a round of averaging takes {prediction.averaging_s:.0f} s, longer than "
            f"averaging.round_timeout_s={averaging.round_timeout_s:g}: raise that"
        )
    held = [stage for stage in prediction.stages if stage.limit in (ROUND_TRIPS, MEMORY)]
    if any(stage.limit == ROUND_TRIPS for stage in held):
        notes.append(
            f"more than limits.max_in_flight={manifest.limits.max_in_flight} microbatches in flight would hide round "
            f"trips: raise it, if memory allows"
        )
    if not all(isfinite(group.link_bytes_per_s) for group in made.groups):
        notes.append("links of live peers are not known and taken for unlimited: give --upload-mbps, --download-mbps")
    if not all(isfinite(group.memory_bytes) for group in made.groups):
        notes.append("memory of live peers is not known and taken for sufficient: give --memory-gb")
    return notes


def _number_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _list_of(noun: str, items: Sequence[str]) -> str:
    if len(items) > MOST_NAMED:
        return _number_of(len(items), noun)
    return f"{noun}{'s' if len(items) > 1 else ''} {', '.join(items)}"


def named_counts(peers: Mapping[str, int]) -> str:
    return " + ".join(f"{number} x {name}" for name, number in peers.items())

"""`plan`: predicts how a run would do with certain peers, as one report for people and programs.

policy/planning/planner.py decides; here a manifest and descriptions of peers become its numbers, and its answer becomes
tokens, days and dollars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

from coordinator.planning.advice import explain_misfit, notes_on
from coordinator.planning.stage_work import COMPARED_CODECS, cut_into, stage_works, widened_layer_flops
from coordinator.planning.ways_to_train import compare_ways
from coordinator.watch.what_is_trained import what_is_trained
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import resolve_model
from swarm_peer.model.traffic import hop_bytes
from swarm_peer.policy.planning.automatic import predict_automatic
from swarm_peer.policy.planning.performance_model import Prediction, Predictor
from swarm_peer.policy.planning.planner import Change, Option, Plan, plan, smallest_fitting
from swarm_peer.policy.planning.resources import PeerGroup, StageWork
from swarm_peer.policy.planning.square_cube import Hop
from swarm_peer.runtime.host.expected_work import step_settings

SECONDS_PER_DAY = 24 * 3600
# Up to here every number of stages is tried; further ones are this factor apart.
EVERY_COUNT_TO = 16
NEXT_COUNT = 1.15
# Widths of the square-cube table, as multiples of the model's.
WIDTHS = (1, 2, 4, 8)


def make_report(
    manifest: RunManifest, groups: Sequence[PeerGroup], num_stages: int | None = None, tokens: int | None = None
) -> dict[str, Any]:
    """Plan a run: plain values, as `plan --json` prints them; None where a value is unlimited or unknown.

    Args:
        num_stages: of the plan, whether it is the fastest or not
        tokens: to train on; those of the manifest if not given

    Raises:
        UserError: the model does not fit these peers, or cannot be cut so
    """
    manifest = manifest.model_copy(update={"model": resolve_model(manifest.model)})
    num_layers = cut_into(manifest, 1).config.num_hidden_layers
    # Where a stage's layers share their weights, another number of stages makes another model.
    most = min(num_layers, sum(group.count for group in groups) // manifest.stages.peers_to_start)
    counts = [] if manifest.model.share_layers else _candidates(most)
    cuts = _cuts(manifest, [*counts, num_stages or manifest.stages.count])
    settings = step_settings(manifest)
    made = plan(cuts, groups, settings, num_stages)
    if made.best is None:
        raise UserError(_misfit(manifest, made, num_stages, num_layers))
    prediction = made.best.prediction
    assert prediction is not None
    length = manifest.data.sequence_length
    automatic = predict_automatic(Predictor(works=made.best.works, groups=made.groups, settings=settings))
    return {
        "name": manifest.name,
        "trains": what_is_trained(manifest.model),
        "parameters": sum(work.parameters for work in made.best.works),
        "trained_parameters": sum(work.trained for work in made.best.works),
        "stages": made.best.num_stages,
        "configured_stages": manifest.stages.count,
        "tokens_per_s": prediction.samples_per_s * length,
        "tokens_per_s_automatic": automatic and automatic.samples_per_s * length,
        "limit": prediction.limit,
        "reason": made.best.reason,
        "step": {
            "seconds": prediction.step_s,
            **prediction.times._asdict(),
            "mode": manifest.averaging.mode,
        },
        "groups": [_group_report(made, prediction, index) for index in range(len(made.groups))],
        "stage_plans": _stage_reports(made, made.best, prediction, length),
        "options": [_option_report(option, length) for option in made.options],
        "changes": [_change_report(made, change, prediction, length) for change in made.changes],
        "ways": compare_ways(manifest, made, prediction),
        "square_cube": _square_cube(manifest, made.groups, made.best),
        "training": _training(manifest, prediction, tokens),
        "notes": notes_on(manifest, made, prediction, automatic),
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
    forced = [option for option in made.options if option.num_stages == num_stages]
    option = forced[0] if forced else made.options[-1]
    counts = [option.num_stages] if manifest.model.share_layers else _candidates(num_layers)
    return explain_misfit(manifest, made, option, smallest_fitting(_cuts(manifest, counts), made.groups))


def _group_report(made: Plan, prediction: Prediction, index: int) -> dict[str, Any]:
    group = _finite(asdict(made.groups[index]))
    dollars_per_gb = group.pop("dollars_per_sent_byte") * 1e9
    used = sum(stage.peers[index] for stage in prediction.stages)
    return group | {"used": used, "dollars_per_gb": dollars_per_gb}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == inf else value for name, value in values.items()}


def _stage_reports(made: Plan, option: Option, prediction: Prediction, length: int) -> list[dict[str, Any]]:
    reports, first = [], 0
    for index, (work, stage) in enumerate(zip(option.works, prediction.stages, strict=True)):
        fields = _finite(asdict(stage)) | asdict(work.memory)
        samples_per_s = fields.pop("samples_per_s")
        reports.append(
            fields
            | {
                "stage": index,
                "first_layer": first,
                "layers": work.layers,
                "parameters": work.parameters,
                "peers": {g.name: n for g, n in zip(made.groups, stage.peers, strict=True) if n},
                "tokens_per_s": samples_per_s * length,
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
        "averaging_share": possible.times.averaging_s / possible.step_s if possible else None,
        "largest_memory_bytes": max(work.memory.peak_bytes(1) for work in option.works),
        "reason": option.reason,
    }


def _change_report(made: Plan, change: Change, prediction: Prediction, length: int) -> dict[str, Any]:
    samples_per_s = change.samples_per_s
    return {
        "group": made.groups[change.group].name,
        "difference": change.difference,
        "tokens_per_s": None if samples_per_s is None else samples_per_s * length,
        "ratio": None if samples_per_s is None else samples_per_s / prediction.samples_per_s,
        "stages": list(change.stages),
    }


def _square_cube(manifest: RunManifest, groups: Sequence[PeerGroup], option: Option) -> dict[str, Any] | None:
    """The square-cube law for the most numerous peers with a known link: one layer to a stage, and the model as cut."""
    linked = [group for group in groups if isfinite(group.link_bytes_per_s)]
    if not linked:
        return None
    group = max(linked, key=lambda group: group.count)
    samples, length = manifest.training.microbatch_size, manifest.data.sequence_length
    resolved = cut_into(manifest, 1)
    passing_share = resolved.boundary_width / resolved.hidden_size
    layers = max(work.layers for work in option.works)
    shapes = [(width, 1) for width in WIDTHS] + ([(1, layers)] if layers > 1 else [])
    rows = []
    for width, num_layers in shapes:
        hidden_size, flops = widened_layer_flops(manifest, width)
        row: dict[str, Any] = {"hidden_size": hidden_size, "layers": num_layers}
        passing = round(passing_share * hidden_size)
        for codec in COMPARED_CODECS:
            hop = Hop(
                compute_s=samples * flops * num_layers / group.flops_per_s,
                activation_bytes=samples * hop_bytes(length, passing, codec),
                gradient_bytes=samples * hop_bytes(length, passing, codec, with_tokens=False),
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
    return {"group": group.name, "bytes_per_s": group.link_bytes_per_s, "latency_s": group.latency_s, "rows": rows}


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

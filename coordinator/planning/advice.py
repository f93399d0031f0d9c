"""Sentences of a plan: why a model does not fit some peers and what to do, and notes beside the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf, isfinite

from swarm_peer.config import RunManifest
from swarm_peer.model.costs import SNAPSHOTS_KEPT, state_bytes
from swarm_peer.policy.planning.performance_model import MEMORY, ROUND_TRIPS, Prediction
from swarm_peer.policy.planning.planner import Option, Plan
from swarm_peer.policy.planning.resources import StageWork

# A round of averaging that takes more of averaging.round_timeout_s may fail where a link is slower than described.
SAFE_SHARE_OF_TIMEOUT = 0.5
# The best averaging.round_timeout_s, in rounds as they usually are (see config.py).
TIMEOUT_IN_ROUNDS = 3
# A note says so if peers that choose their stages themselves reach less than this share of a plan's throughput.
NEARLY_AS_FAST = 0.95
# Of a value of a published base: nearly all are bf16.
PUBLISHED_BYTES = 2
# Stages that a note names one by one.
MOST_NAMED = 6


def explain_misfit(manifest: RunManifest, made: Plan, option: Option, fewest: int | None) -> str:
    """Why no option is possible, and what to do.

    Args:
        option: the number of stages to explain
        fewest: stages whose memory suffices, each with one of these peers; None if no number of stages does
    """
    beginning = f"{manifest.name} does not fit these peers in {number_of(option.num_stages, 'stage')}: {option.reason}"
    if fewest is None:
        remedies = ["training.microbatch_size=1" if manifest.training.microbatch_size > 1 else "peers with more memory"]
        if not manifest.model.activation_checkpointing:
            remedies.insert(0, "model.activation_checkpointing=true")
        if manifest.model.adapter is None and manifest.optimizer.name in ("adamw", "muon"):
            remedies.insert(0, "optimizer.name=adamw_8bit")
        if manifest.model.adapter is not None and manifest.model.base != "nf4":
            remedies.insert(0, "model.base=nf4")
        return f"{beginning}; no number of stages makes all of them small enough: try {', or '.join(remedies)}"
    able = [each.num_stages for each in made.options if each.prediction]
    if able:
        return f"{beginning}; the fewest that do are {able[0]}: take --stages {able[0]}"
    missing = fewest * manifest.stages.peers_to_start - sum(group.count for group in made.groups)
    if missing > 0:
        more = f"at least {number_of(missing, 'peer')} more"
        return f"{beginning}; the fewest stages whose memory suffices are {fewest}: add {more}"
    return f"{beginning}; add peers that have it, or lower stages.peers_to_start"


def notes_on(manifest: RunManifest, made: Plan, prediction: Prediction, automatic: Prediction | None) -> list[str]:
    """Notes on a plan that its numbers do not show.

    Args:
        automatic: what to expect if all of these peers choose their stages themselves; None if that does not work
    """
    notes = []
    alone = [str(index) for index, stage in enumerate(prediction.stages) if sum(stage.peers) == 1]
    if alone and len(prediction.stages) > 1:
        notes.append(
            f"{_list_of('stage', alone)} with a single peer: if it goes, the run waits until somebody takes its place. "
            f"To plan for two, --set stages.peers_to_start=2"
        )
    notes += _notes_on_idle_peers(made, prediction)
    if automatic is not None and automatic.samples_per_s < NEARLY_AS_FAST * prediction.samples_per_s:
        tokens_per_s = automatic.samples_per_s * manifest.data.sequence_length
        notes.append(
            f"if all of these peers join with `--stage auto`, expect about {tokens_per_s:,.0f} tokens/s: they choose "
            f"their stages by compute alone. For the plan's pace, start each with its stage, `--stage K`"
        )
    works = made.best.works if made.best else ()
    notes += _notes_on_machines(manifest, works)
    notes += _notes_on_base(manifest, made, prediction, works)
    if manifest.data.has_targets and not manifest.data.packing:
        notes.append(
            f"samples shorter than data.sequence_length={manifest.data.sequence_length} are filled up, and tokens/s "
            f"counts that, too: with data.packing=true they hold several records"
        )
    if manifest.model.share_layers:
        notes.append("layers of a stage share their weights, so that another number of stages would be another model")
    notes += _notes_on_averaging(manifest, prediction)
    held = [stage for stage in prediction.stages if stage.limit in (ROUND_TRIPS, MEMORY)]
    if any(stage.limit == ROUND_TRIPS for stage in held):
        notes.append(
            f"more than limits.max_in_flight={manifest.limits.max_in_flight} microbatches in flight would hide round "
            f"trips: raise it, if memory allows"
        )
    if not all(isfinite(max(group.upload_bytes_per_s, group.download_bytes_per_s)) for group in made.groups):
        notes.append("links of live peers are not known and taken for unlimited: give --upload-mbps, --download-mbps")
    if not all(isfinite(group.memory_bytes) for group in made.groups):
        notes.append("memory of live peers is not known and taken for sufficient: give --memory-gb")
    return notes


def _notes_on_idle_peers(made: Plan, prediction: Prediction) -> list[str]:
    used = [sum(numbers) for numbers in zip(*(stage.peers for stage in prediction.stages), strict=True)]
    idle = {g.name: g.count - number for g, number in zip(made.groups, used, strict=True) if g.count > number}
    if not idle:
        return []
    first = {g.name: number for g, number in zip(made.groups, prediction.stages[0].peers, strict=True) if number}
    price = ", and the price is without them" if prediction.dollars_per_hour or prediction.traffic_dollars else ""
    closed = any(group.is_closed and group.name in idle for group in made.groups)
    ways = "for the ways that closed ones lack to each other, " if closed else ""
    return [
        f"{number_of(sum(idle.values()), 'peer')} without a stage ({named_counts(idle)}): in none would they make a "
        f"step shorter, be it for their links, which averaging waits for, for their memory, {ways}or because another "
        f"stage sets the pace. Do not start these for this run: `--stage auto` would put them to work{price}. Start "
        f"the others with the stages of this plan, such as `--stage 0` for {named_counts(first)}"
    ]


def _notes_on_machines(manifest: RunManifest, works: Sequence[StageWork]) -> list[str]:
    memory_gb = max((work.host_bytes for work in works), default=0.0) / 1e9
    sizes = (state_bytes(manifest, work.trained, work.memory.optimizer_bytes) for work in works)
    largest_gb = max(sizes, default=0.0) / 1e9
    # Of its own stage and of the next one; and one more of each while it is written.
    num_states = (SNAPSHOTS_KEPT + 1) * min(2, len(works)) if manifest.recovery.snapshot_every else 0
    disk = f", and {num_states * largest_gb:.1f} GB of disk for snapshots" if num_states else ""
    return [f"beside its GPU's memory, a peer takes up to {memory_gb:.1f} GB of the machine's{disk}"]


def _notes_on_base(manifest: RunManifest, made: Plan, prediction: Prediction, works: Sequence[StageWork]) -> list[str]:
    """How much of a published base a peer reads before it can serve."""
    if manifest.model.adapter is None:
        return []
    largest = PUBLISHED_BYTES * max((work.parameters - work.trained for work in works), default=0)
    used = {index for stage in prediction.stages for index, number in enumerate(stage.peers) if number}
    slowest = min((made.groups[index].download_bytes_per_s for index in used), default=inf)
    time = f", which takes {largest / slowest / 60:.0f} min to download" if isfinite(slowest) else ""
    return [
        f"before it serves, a peer reads its stage's part of the base, up to {largest / 1e9:.1f} GB where that is "
        f"published in 16 bits{time}; it downloads the whole files that have it"
    ]


def _notes_on_averaging(manifest: RunManifest, prediction: Prediction) -> list[str]:
    notes, averaging = [], manifest.averaging
    if prediction.average_s > averaging.round_timeout_s * SAFE_SHARE_OF_TIMEOUT:
        roomy_s = ceil(TIMEOUT_IN_ROUNDS * prediction.average_s / 10) * 10
        notes.append(
            f"a round of averaging takes {prediction.average_s:.0f} s, and one longer than "
            f"averaging.round_timeout_s={averaging.round_timeout_s:g} fails: leave room for slower ones with "
            f"--set averaging.round_timeout_s={roomy_s}"
        )
    return notes


def number_of(number: int, noun: str) -> str:
    """A number of things in words, such as "1 peer" or "2 peers"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _list_of(noun: str, items: Sequence[str]) -> str:
    if len(items) > MOST_NAMED:
        return number_of(len(items), noun)
    return f"{noun}{'s' if len(items) > 1 else ''} {', '.join(items)}"


def named_counts(peers: Mapping[str, int]) -> str:
    """Peers by their groups in words, such as "3 x T4 + 1 x A100"."""
    return " + ".join(f"{number} x {name}" for name, number in peers.items())

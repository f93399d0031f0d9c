"""The model card of a run's model: the README.md that the Hugging Face hub shows, with front matter that it reads.

Whoever publishes the model publishes the card: it has no addresses, invites, names of peers or paths of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from huggingface_hub import ModelCard, ModelCardData

from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.metrics_file import METRICS, MetricsLine, whole_lines
from coordinator.watch.run_file import read_run_file
from coordinator.watch.what_is_trained import count_parameters, in_millions, public_name, what_is_trained
from swarm_peer import __version__
from swarm_peer.config import DataSection, FileKind, ModelSection, RunManifest, looks_like_a_path
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.examples import LOSS_ON

Rows = Iterable[tuple[str, object]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a run went until it had the weights of an optimizer step, as far as it is known.

    Attributes:
        lines: of metrics.jsonl, in order
        num_peers: that took part, one process counted once however often it moved; None if nobody knows
    """

    optimizer_step: int
    lines: Sequence[MetricsLine] = ()
    num_peers: int | None = None


def training_in(folder: Path, manifest: RunManifest, optimizer_step: int) -> Training:
    """How a run went until a step, by its folder; only the step is known where that is another run's or unreadable."""
    of_run = read_run_file(folder).get("manifest")
    if not isinstance(of_run, dict) or of_run.get("name") != manifest.name:
        return Training(optimizer_step=optimizer_step)
    try:
        lines = [line for line in whole_lines(folder / METRICS) if line["optimizer_step"] <= optimizer_step]
    except (OSError, UserError):
        lines = []
    contributions = ContributionEstimates(folder, is_writer=False)
    contributions.begin(resume=True)
    return Training(optimizer_step=optimizer_step, lines=lines, num_peers=len(contributions.given) or None)


def model_card(resolved: ResolvedManifest, training: Training, *, is_merged: bool = False) -> str:
    """The text of a model's README.md.

    Args:
        is_merged: whether the run's adapters are within the weights of their base
    """
    manifest = resolved.manifest
    model, data = manifest.model, manifest.data
    has_adapters = model.adapter is not None and not is_merged
    base = None if model.pretrained is None else public_name(model.pretrained)
    front = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if has_adapters else "finetune",
        library_name="peft" if has_adapters else "transformers" if model.is_plain else None,
        datasets=[public_name(data.dataset)] if _is_on_hub(data) else None,
        pipeline_tag="text-generation",
        tags=["swarm-train", *(["lora"] if model.adapter is not None else [])],
    )
    sections = [
        f"# {manifest.name}",
        _summary(resolved, training, is_merged=is_merged),
        "## Data",
        _table(_data(data)),
        "## Settings",
        _table([*_adapter(model), *_training(manifest, training)]),
    ]
    if losses := list(_losses(training.lines)):
        sections += ["## Losses", "In nats per token that was learnt.", _table(losses)]
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def _summary(resolved: ResolvedManifest, training: Training, *, is_merged: bool) -> str:
    words = what_is_trained(resolved.manifest.model)
    trained, frozen = count_parameters(resolved)
    counts = f"{in_millions(trained)} parameters" + (
        f" were trained, and {in_millions(frozen)} frozen" if frozen else ""
    )
    merged = " They are within these weights." if is_merged else ""
    by = "" if training.num_peers is None else f" by {training.num_peers} peer{'s' if training.num_peers > 1 else ''}"
    stages = resolved.num_stages
    return (
        f"{words[0].upper()}{words[1:]}: {counts}.{merged} Trained{by} with Swarm {__version__}, in {stages} pipeline "
        f"stage{'s' if stages > 1 else ''}."
    )


def _data(data: DataSection) -> Rows:
    if data.dataset == "embedded":
        yield "data set", "text that comes with Python" if data.format == "text" else "chats that come with Swarm"
    elif data.dataset in get_args(FileKind):
        yield "data set", f"local files ({data.dataset})"
    elif _is_on_hub(data):
        yield "data set", public_name(data.dataset)
    else:
        yield "data set", f"{public_name(data.dataset)} (local)"
    if data.subset is not None:
        yield "subset", data.subset
    if not data.files:
        yield "split", data.split
    yield "format", data.format
    if data.has_targets:
        by_labels = data.format == "tokens" and data.loss_on is None
        yield "learnt (`data.loss_on`)", "the records' labels" if by_labels else data.loss_on or LOSS_ON[data.format]
        yield "several records in a sample (`data.packing`)", "yes" if data.packing else "no"
    yield "tokenizer", public_name(data.tokenizer)


def _adapter(model: ModelSection) -> Rows:
    if model.pretrained is not None:
        yield "begun with", public_name(model.pretrained)
    if (adapter := model.adapter) is None:
        return
    if adapter.begin_with is not None:
        yield "adapters begun with", public_name(adapter.begin_with)
    yield "rank", adapter.rank
    yield "alpha", f"{adapter.alpha:g}"
    yield "targets", adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    if adapter.rslora or adapter.dora:
        yield (
            "kind",
            " and ".join(name for name, is_on in (("rsLoRA", adapter.rslora), ("DoRA", adapter.dora)) if is_on),
        )
    yield "base kept in", model.base


def _training(manifest: RunManifest, training: Training) -> Rows:
    batch, optimizer, schedule = manifest.training, manifest.optimizer, manifest.schedule
    yield "optimizer steps", f"{training.optimizer_step:,} of {batch.steps:,}"
    if training.lines:
        yield "tokens", f"{sum(line['tokens'] for line in training.lines):,}"
    yield "optimizer", optimizer.name
    yield "learning rate", f"{optimizer.learning_rate:g}, {schedule.name}, {schedule.warmup_steps} steps of warm-up"
    yield "weight decay", f"{optimizer.weight_decay:g}"
    yield "batch", f"{batch.global_batch_size:,} samples"
    yield "sequence length", f"{manifest.data.sequence_length:,} tokens"
    yield "precision", manifest.model.precision
    yield "averaging", f"{manifest.averaging.mode}, {manifest.averaging.compression}"
    yield "activations and gradients between stages", f"{manifest.wire.activations}, {manifest.wire.gradients}"
    if (boundary := manifest.model.boundary) is not None:
        kind = f"maxout {boundary.maxout}" if boundary.rank is None else f"rank {boundary.rank}"
        yield "boundaries between stages (`model.boundary`)", kind
    yield "seed", manifest.seed


def _losses(lines: Sequence[MetricsLine]) -> Rows:
    trained = [(line["optimizer_step"], line["loss"]) for line in lines]
    held_out = [(line["optimizer_step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    for name, told in (("training", trained), ("validation", held_out)):
        for step, loss in told if len(told) < 2 else (told[0], told[-1]):
            yield f"{name}, step {step:,}", f"{loss:.4f}"


def _is_on_hub(data: DataSection) -> bool:
    return data.dataset not in ("embedded", *get_args(FileKind)) and not looks_like_a_path(data.dataset)


def _table(rows: Rows) -> str:
    cells = [(name, str(value).replace("|", "\\|").replace("<", "&lt;")) for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])

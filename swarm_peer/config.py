"""What a run is (RunManifest) and how one peer takes part in it (PeerOptions).

The manifest is the same for every peer: the coordinator reads it from a YAML file, signs and publishes it, and
its hash rides on every announcement and every call. The options are each peer's own. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Parameter
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from swarm_peer.errors import UserError

Codec = Literal["none", "fp16", "bf16", "blockwise_8bit"]
# Of a file, a folder, or something on the hub. With other characters, Python's functions raise what nobody expects.
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    config: dict[str, Any] | str | None = Field(
        None,
        description="transformers config: inline (with model_type), a local folder, or a hub name; if not given, that "
        "of the pretrained model",
    )
    pretrained: Name | None = Field(
        None,
        description="weights to begin with: a local folder of safetensors or a hub name, perhaps with @REVISION; if "
        "not given, random ones that follow from the seed",
    )
    share_layers: bool = Field(False, description="all transformer layers of a stage are one layer, applied repeatedly")
    activation_checkpointing: bool = Field(
        False, description="keep only a stage's input, recompute the rest in the backward pass"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="autocast type of GPUs; weights are fp32 in any case, CPUs compute in fp32"
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelSection:
        if self.config is None and self.pretrained is None:
            raise ValueError("config and pretrained are both missing: give one of them")
        if self.share_layers and self.pretrained is not None:
            raise ValueError(
                f"pretrained={self.pretrained!r} has layers of its own, and share_layers makes them one: leave one out"
            )
        return self


class StagesSection(Section):
    count: int = Field(ge=1, le=256, description="number of pipeline stages K")
    layers: tuple[int, ...] | None = Field(
        None, description="transformer layers of each stage; the balanced cut if not given"
    )
    peers_to_start: int = Field(
        1, ge=1, description="peers that each stage must have before the run's first microbatch is launched"
    )

    @model_validator(mode="after")
    def _explicit_cut_matches(self) -> StagesSection:
        if self.layers is not None and (len(self.layers) != self.count or min(self.layers) < 1):
            raise ValueError(
                f"layers={list(self.layers)} must name {self.count} numbers of at least 1, one for each stage: "
                f"correct it, or leave it out for the balanced cut"
            )
        return self


class DataSection(Section):
    dataset: Name = Field(
        "embedded",
        description="embedded (text that every Python carries), text, json or parquet (with files), a local folder "
        "(which begins with ., / or ~), or a hub name",
    )
    files: tuple[Name, ...] = Field((), description="local files or glob patterns for text, json and parquet")
    subset: Name | None = Field(None, description="name of the hub dataset's configuration")
    split: Name = Field("train", description="split to train on")
    text_field: str = Field("text", description="name of the field that holds the text")
    tokenizer: Name = Field("bytes", description="bytes, or a tokenizer's hub name or local folder")
    sequence_length: int = Field(ge=2, le=1 << 20, description="tokens a sample is trained on, T")
    shuffle_buffer: int = Field(1024, ge=1, description="documents, and samples, held to shuffle a stream")
    validation_documents: int = Field(64, ge=1, description="documents held out of the stream for validation")

    @model_validator(mode="after")
    def _files_match(self) -> DataSection:
        local = self.dataset in ("text", "json", "parquet")
        if local and not self.files:
            raise ValueError(f"dataset={self.dataset!r} needs files: name at least one file or glob pattern")
        if self.files and not local:
            raise ValueError(f"files belong to dataset text, json or parquet, not to {self.dataset!r}: leave one out")
        return self


class TrainingSection(Section):
    steps: int = Field(ge=1, description="global steps of the whole run")
    global_batch_size: int = Field(ge=1, description="samples that make a global step")
    microbatch_size: int = Field(ge=1, description="samples that travel together")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="clip each stage's gradient to this norm; null for no clipping"
    )
    validation_every: int = Field(100, ge=0, description="global steps between validations; 0 for none")
    validation_samples: int = Field(32, ge=1, description="held-out samples of one validation")

    @model_validator(mode="after")
    def _batches_match(self) -> TrainingSection:
        if self.global_batch_size % self.microbatch_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"microbatch_size={self.microbatch_size}: change one of them"
            )
        return self


class OptimizerSection(Section):
    name: Literal["adamw", "sgd", "adamw_8bit"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="for sgd")
    weight_decay: float = Field(0.0, ge=0, description="of matrices; vectors (biases, norms) are not decayed")


class ScheduleSection(Section):
    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="global steps of linear warm-up")
    final_fraction: float = Field(0.1, ge=0, le=1, description="the last learning rate as a share of the highest")


class WireSection(Section):
    activations: Codec = Field("none", description="codec of activations between stages")
    gradients: Codec = Field("none", description="codec of activation gradients between stages")


class AveragingSection(Section):
    mode: Literal["synchronous"] = "synchronous"
    compression: Literal["none", "fp16", "blockwise_8bit"] = Field(
        "none", description="codec of weight gradients within a stage"
    )
    round_timeout_s: float = Field(60.0, gt=0, description="longest averaging round; about three normal ones")
    chunk_timeout_s: float = Field(8.0, gt=0, description="silence after which a stage-mate is dropped from a round")
    max_tries: int = Field(3, ge=1, description="rounds tried before a peer goes on without its stage-mates")


class RecoverySection(Section):
    snapshot_every: int = Field(
        50,
        ge=0,
        description="global steps between snapshots, which peers keep of their own stage and of the next one, so that "
        "a stage that loses all its peers can be taken over; 0 for none",
    )


class LimitsSection(Section):
    hop_timeout_s: float = Field(60.0, gt=0, description="longest wait for one hop's reply, later stages included")
    hop_tries: int = Field(4, ge=1, description="peers tried for one hop before the microbatch fails upward")
    max_in_flight: int = Field(8, ge=1, description="microbatches that one peer holds at once")
    announcement_s: float = Field(30.0, ge=2, description="lifetime of an announcement in the DHT")


class RunManifest(Section):
    """Everything that all peers of a run must agree on; immutable, identified by its hash."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="name of the run: a-z, 0-9 and -")
    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelSection
    stages: StagesSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    wire: WireSection = WireSection()
    averaging: AveragingSection = AveragingSection()
    recovery: RecoverySection = RecoverySection()
    limits: LimitsSection = LimitsSection()

    @model_validator(mode="after")
    def _warmup_fits(self) -> RunManifest:
        if self.schedule.warmup_steps > self.training.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} is more than "
                f"training.steps={self.training.steps}: lower it"
            )
        return self

    def canonical_json(self) -> bytes:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        """The first 32 hex digits of the SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical_json()).hexdigest()[:32]


class PeerOptions(Section):
    """How one peer takes part; each field is an option of swarm-peer."""

    initial_peers: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = Field(
        min_length=1, description="Addresses of any peers of the run, as the coordinator prints them."
    )
    stage: str = Field("auto", description="Pipeline stage to serve: a number, or auto for the neediest one.")
    run_id: str | None = Field(
        None, description="Which run to join, where the addresses lead to several (the coordinator's key)."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto for the first GPU if there is one.")
    host_maddrs: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = Field(
        ("/ip4/0.0.0.0/tcp/0",), description="Multiaddresses to listen on."
    )
    announce_maddrs: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = Field(
        (), description="Multiaddresses that others shall dial, where they differ (port forwarding)."
    )
    identity_path: Path | None = Field(
        None, description="File of the private key, made if missing; a new identity each start if not given."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port for Prometheus; 0 takes a free one; none if not given."
    )
    cache_dir: Path | None = Field(None, description="Where datasets and tokenizers are cached.")
    data_dir: Path | None = Field(
        None, description="Folder that the run may read local data files from; none if not given."
    )
    max_memory: ByteSize | None = Field(
        None, description="Memory that training may use, such as 8GiB; the device's own limit if not given."
    )
    grace_s: float = Field(
        20.0, gt=0, description="Seconds to finish and hand over its work when told to leave; a spot instance has 30."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the compute thread; torch's choice if not given."
    )
    preemption_notice: Literal["none", "aws", "gcp", "azure"] = Field(
        "none", description="Cloud whose notice that it takes this spot instance away makes the peer leave in time."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line to print."
    )

    @field_validator("stage")
    @classmethod
    def _stage_is_number_or_auto(cls, value: str) -> str:
        if value != "auto" and not value.isdecimal():
            raise ValueError(f"stage={value!r} is neither a number nor auto")
        return value


def describe(error: ValidationError) -> str:
    """All that a pydantic error says, as one line: where, what, and the value."""
    parts = []
    for item in error.errors():
        where = ".".join(str(key) for key in item["loc"]) or "manifest"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key: remove it or correct its spelling"
        elif item["type"] == "missing":
            message = "missing: add it"
        elif not isinstance(item["input"], dict):
            message += f" (got {reprlib.repr(item['input'])})"  # bounded in depth: it may come from a peer
        parts.append(f"{where}: {message}")
    return "; ".join(parts)


def load_manifest(path: Path, overrides: tuple[str, ...] = ()) -> RunManifest:
    """Read a run's YAML file.

    Args:
        path: file such as configs/demo.yaml
        overrides: `a.b=value` settings that replace the file's; the value is YAML

    Raises:
        UserError: the file is missing, is no YAML, or holds unknown, missing or contradictory keys
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read the run's configuration {path}: {error.strerror}; check the path") from error
    try:
        data = yaml.safe_load(text)
        if not isinstance(data, dict):
            raise UserError(f"{path}: expected a mapping of sections (model, stages, data, ...), got {data!r:.60}")
        for setting in overrides:
            _override(data, setting)
        return RunManifest.model_validate(data)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from error


def _override(data: dict[str, Any], setting: str) -> None:
    key, separator, value = setting.partition("=")
    if not separator:
        raise UserError(f"--set {setting!r}: expected KEY=VALUE, such as training.steps=100")
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(f"--set {setting!r}: {parent!r} is no section")
    data[leaf] = yaml.safe_load(value)

"""The manifest of a run.

The manifest is the same for every peer: the coordinator reads it from a YAML file, signs and publishes it, and every
announcement and every call carries its hash. The options are each peer's own. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from swarm_peer.codecs import DENSE, NEED_FEEDBACK, check_codec, check_codec_of_wires
from swarm_peer.settings import RUN_NAME, Count, Name, Section, Share

# One of codecs/__init__.py: CODECS.
CodecName = Annotated[str, AfterValidator(check_codec)]
CodecOfWires = Annotated[str, AfterValidator(check_codec_of_wires)]
BasePrecision = Literal["fp32", "bf16", "int8", "nf4"]
AveragingMode = Literal["synchronous", "delayed", "periodic"]
# Steps of a run, at the most. bitsandbytes counts in 32 bits on GPUs, and must not come to the end of them.
MAX_STEPS = 2**30
# The part of a run's optimizer steps, at its end, whose averages send what codecs have left over.
FLUSHED_SHARE = 0.02
# Of Muon, where a configuration names none (https://kellerjordan.github.io/posts/muon/).
MUON_MOMENTUM = 0.95
# Kinds of files of a data set.
FileKind = Literal["text", "json", "csv", "tsv", "parquet", "arrow"]
# Kinds of records of a data set, and the tokens of these that may be learnt.
DataFormat = Literal["text", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens"]
LossOn = Literal["all", "assistant", "completion"]


def looks_like_a_path(name: str) -> bool:
    """Whether a name is a folder's rather than a repository's on the hub. The same on all machines: no disk is read."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


class AdapterSection(Section):
    """Low-rank adapters (LoRA) on a frozen base. They alone are trained."""

    rank: int = Field(16, ge=1, le=4096)
    """columns of an adapter's matrices, r"""
    alpha: float = Field(32.0, gt=0)
    """an adapter's product is scaled by alpha / rank"""
    rslora: bool = False
    """scale by alpha / sqrt(rank) instead, so that high ranks learn as fast as low ones"""
    dora: bool = False
    """train the length of each of the base's rows as well (DoRA): better at low ranks, and slower"""
    targets: Literal["all-linear"] | tuple[Name, ...] = "all-linear"
    """which matrices of each layer have adapters: all-linear, or names such as q_proj or self_attn.q_proj"""
    begin_with: Name | None = None
    """adapters to go on from: a folder of PEFT's or a hub name, perhaps with @REVISION; the settings above follow from
    it, and may be left out. If not given, new adapters, which change nothing until the first update"""

    @model_validator(mode="after")
    def _has_targets(self) -> AdapterSection:
        if not self.targets:
            raise ValueError("targets=[] leaves nothing to train: name matrices, or leave it out for all-linear")
        return self


class BoundarySection(Section):
    """How stages send each other less than whole hidden states."""

    rank: int | None = Field(None, ge=1)
    """layers of all stages but the last write so many values of the residual stream, which alone travel; gpt2 and llama
    only"""
    maxout: int | None = Field(None, ge=2)
    """the largest of each so many values travels, between a matrix before and one behind the wire that are trained as
    well; a model of its own, which has no plain Hugging Face form"""

    @model_validator(mode="after")
    def _is_one_kind(self) -> BoundarySection:
        if (self.rank is None) == (self.maxout is None):
            raise ValueError(f"rank={self.rank} and maxout={self.maxout}: give one of them, or leave boundary out")
        return self


class ModelSection(Section):
    """The model, and the weights that it begins with."""

    config: dict[str, Any] | str | None = None
    """transformers config: inline (with model_type), a local folder, or a hub name; if not given, the config of the
    pretrained model"""
    pretrained: Name | None = None
    """weights to begin with: a local folder of safetensors or a hub name, perhaps with @REVISION; if not given, random
    weights, drawn with the seed"""
    untie: bool = False
    """train all of a pretrained model whose embedding and head are one matrix: they become two, which are not kept
    equal. Not needed with adapters, which leave both as they are"""
    share_layers: bool = False
    """all transformer layers of a stage share their weights"""
    activation_checkpointing: bool = False
    """keep only a stage's input, recompute the rest in the backward pass"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """autocast type on GPUs; trained weights are always fp32, and CPUs compute in fp32"""
    adapter: AdapterSection | None = None
    """train adapters on the pretrained weights instead of these; {} for adapters as they are by default"""
    share_base: bool | None = None
    """whether members give the frozen weights to each other, as they are published: whoever takes part then needs no
    copy, and no access to the hub. If not given, those of a local folder are given, and those from the hub are not,
    since its licence may forbid it"""
    base_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """the hash of the list of the frozen weights' hashes, where members give them to each other; the coordinator sets
    it"""
    base: BasePrecision = "fp32"
    """how the weights under adapters are kept: nf4 is 4 bit with doubly quantised scales, as in QLoRA; of nf4 and int8
    embedding and head are bf16. The model is given as published, and quantised as it is read"""
    boundary: BoundarySection | None = None
    """have fewer values pass between stages than hidden states have, from the first step on; random weights only"""

    @property
    def is_plain(self) -> bool:
        """Whether what is trained is a model, or are adapters, as Hugging Face has them."""
        return self.boundary is None or self.boundary.maxout is None

    @model_validator(mode="after")
    def _boundary_begins_at_random(self) -> ModelSection:
        if self.boundary is None:
            return self
        if self.base != "fp32":
            raise ValueError(
                f"boundary is for models that are trained whole, and base={self.base} is of a frozen one: leave one out"
            )
        if self.adapter is not None:
            raise ValueError("boundary is for models that are trained whole, and adapter trains none: leave one out")
        if self.pretrained is not None:
            raise ValueError(
                f"boundary is for models that begin with random weights, and pretrained={self.pretrained!r} has "
                f"learnt to write whole hidden states: leave one out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelSection:
        if self.config is None and self.pretrained is None:
            raise ValueError("config and pretrained are both missing: give one of them")
        if self.share_layers and self.pretrained is not None:
            raise ValueError(
                f"pretrained={self.pretrained!r} has layers of its own, and share_layers makes them one: leave one out"
            )
        if self.adapter is None and self.base != "fp32":
            raise ValueError(
                f"base={self.base} is for weights that are frozen, and all are trained: add adapter: {{}}, or leave "
                f"base out"
            )
        if self.adapter is None and (self.share_base or self.base_sha256):
            raise ValueError("share_base is for weights that are frozen, and all are trained: leave it out")
        if self.adapter is not None and self.pretrained is None:
            raise ValueError("adapter adapts pretrained weights, and there are none: give pretrained, or leave it out")
        return self


class StagesSection(Section):
    """How the model is cut into stages."""

    count: int = Field(ge=1, le=256)
    """number of pipeline stages K"""
    layers: tuple[int, ...] | None = None
    """number of transformer layers of each stage; if not given, the stages are balanced by cost"""
    peers_to_start: Count = Field(1, ge=1)
    """peers that each stage must have before the run's first microbatch is launched"""

    @model_validator(mode="after")
    def _explicit_cut_matches(self) -> StagesSection:
        if self.layers is not None and (len(self.layers) != self.count or min(self.layers) < 1):
            raise ValueError(
                f"layers={list(self.layers)} must name {self.count} numbers of at least 1, one for each stage: "
                f"correct it, or leave it out for the balanced cut"
            )
        return self


class DataSection(Section):
    """The training data, and how it becomes samples."""

    dataset: Name = "embedded"
    """embedded (text that comes with every Python; with format messages, chats about Swarm that come with it); text,
    json, csv, tsv, parquet or arrow (with files); a local folder or file (a path that begins with ., / or ~); or a hub
    name"""
    files: tuple[Name, ...] = ()
    """local files, folders or glob patterns; dataset says what those hold whose names do not tell"""
    subset: Name | None = None
    """name of the data set's configuration, as its card has it"""
    split: Name = "train"
    """split to train on"""
    format: DataFormat = "text"
    """what a record holds: text; messages (a list of role and content); prompt_completion (both texts, or messages);
    alpaca (instruction, input, output); sharegpt (conversations of from and value); tokens (input_ids, and labels with
    -100 where nothing is learnt)"""
    text_field: str = "text"
    """name of the field that holds the text"""
    fields: dict[str, Name] = Field(default_factory=dict)
    """the records' own names for fields of the format, such as {messages: dialogue}"""
    loss_on: LossOn | None = None
    """the tokens that are learnt: all; the assistant's; or the completion's, which is its last turn or the answer to a
    prompt. If not given, assistant for messages and sharegpt, completion for the other two"""
    chat_template: str | None = None
    """template that makes text of messages: Jinja, or a file's path; if not given, the tokenizer's own"""
    tokenizer: Name = "bytes"
    """bytes, or a tokenizer's local folder or hub name, perhaps with @REVISION; if not given, the pretrained model's
    own, or bytes where the weights are random"""
    foreign_tokenizer: bool = False
    """allow a tokenizer that is not the pretrained model's own: to its weights, the same ids mean other tokens"""
    sequence_length: int = Field(ge=2, le=1 << 20)
    """tokens of a sample, T"""
    packing: bool = False
    """put several short records into a sample, none of which attends to another; not for text, which is cut anyway"""
    shuffle_buffer: Count = Field(1024, ge=1)
    """size of the buffer that shuffles a stream, in documents and in samples"""
    validation_documents: Count = Field(64, ge=1)
    """documents kept from training, for validation"""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def has_targets(self) -> bool:
        """Whether samples say which of their tokens are learnt. Text is learnt whole."""
        return self.format != "text"

    @model_validator(mode="after")
    def _files_match(self) -> DataSection:
        local = self.dataset in get_args(FileKind)
        if self.format in ("text", "tokens") and self.loss_on not in (None, "all"):
            raise ValueError(
                f"loss_on={self.loss_on!r} is for chats, and format={self.format!r} has none: leave it out"
            )
        if self.format == "text" and self.packing:
            raise ValueError("packing=true is for records, and format='text' is cut into full samples: leave it out")
        if self.format not in ("text", "messages") and self.dataset == "embedded":
            reason = "dataset='embedded' is text, or messages: name another data set, or set format to one of these"
            raise ValueError(f"format={self.format!r} is of records in json, parquet or arrow, and {reason}")
        if local and not self.files:
            raise ValueError(f"dataset={self.dataset!r} needs files: name at least one file or glob pattern")
        if self.subset is not None and (self.files or self.dataset == "embedded"):
            raise ValueError(f"subset={self.subset!r} is for data sets whose card has configs: leave it out")
        if self.files and not local:
            kinds = ", ".join(get_args(FileKind))
            raise ValueError(
                f"files belong to dataset {kinds}, not to {self.dataset!r}: set it to one, or leave one out"
            )
        return self


class TrainingSection(Section):
    """How long the run trains, and in which batches."""

    steps: int = Field(ge=1, le=MAX_STEPS)
    """optimizer steps of the whole run"""
    global_batch_size: Count = Field(ge=1)
    """samples of one optimizer step"""
    microbatch_size: Count = Field(ge=1)
    """samples of one microbatch, which travel together"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """clip each stage's gradient to this norm; null for no clipping"""
    validation_every: Count = Field(100, ge=0)
    """optimizer steps between validations; 0 for no validation"""
    validation_samples: Count = Field(32, ge=1)
    """held-out samples of one validation"""

    def validates_at(self, optimizer_step: int, last_step: int | None = None) -> bool:
        """Whether the weights of this optimizer step are validated.

        Args:
            last_step: the run's last one, if it ends before `steps`
        """
        every, last_step = self.validation_every, self.steps if last_step is None else last_step
        return every > 0 and (optimizer_step % every == 0 or optimizer_step == last_step)

    @model_validator(mode="after")
    def _batches_match(self) -> TrainingSection:
        if self.global_batch_size % self.microbatch_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"microbatch_size={self.microbatch_size}: change one of them"
            )
        return self


class OptimizerSection(Section):
    """The optimizer and its settings."""

    name: Literal["adamw", "sgd", "adamw_8bit", "muon"] = "adamw"
    """muon: Muon for the matrices of layers, and AdamW for embeddings, head and vectors"""
    learning_rate: float = Field(gt=0)
    matrix_learning_rate: float | None = Field(None, gt=0)
    """for muon: learning rate of the matrices of layers; learning_rate if not given, since updates are scaled so that
    AdamW's rate carries over"""
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    momentum: Share = 0.0
    """for sgd; for muon (Nesterov's), where it is 0.95 if not given"""
    weight_decay: float = Field(0.0, ge=0)
    """decay of matrices; vectors (biases, norms) are not decayed"""

    @model_validator(mode="before")
    @classmethod
    def _has_its_momentum(cls, data: Any) -> Any:
        return {"momentum": MUON_MOMENTUM} | data if isinstance(data, dict) and data.get("name") == "muon" else data

    @model_validator(mode="after")
    def _has_matrices(self) -> OptimizerSection:
        if self.name != "muon" and self.matrix_learning_rate is not None:
            raise ValueError(
                f"matrix_learning_rate={self.matrix_learning_rate:g} is for muon, and name is {self.name!r}: leave one "
                f"out"
            )
        return self


class ScheduleSection(Section):
    """The learning rate over the run's optimizer steps."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """wsd (warm-up, stable, decay): the highest rate until the last decay_steps, which fall linearly; a run's operator
    may have the decay begin, and so the run end, earlier"""
    warmup_steps: Count = Field(0, ge=0)
    """optimizer steps of linear warm-up"""
    decay_steps: Count | None = Field(None, ge=1)
    """for wsd: optimizer steps of the decay at the end of the run; a fifth of its steps if not given"""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """the last learning rate as a share of the highest"""

    @model_validator(mode="after")
    def _has_a_decay(self) -> ScheduleSection:
        if self.name != "wsd" and self.decay_steps is not None:
            raise ValueError(f"decay_steps={self.decay_steps} is for wsd, and name is {self.name!r}: leave one out")
        return self


class WireSection(Section):
    """How activations and their gradients are encoded between stages."""

    activations: CodecOfWires = "none"
    """codec of activations between stages; rounds to nearest"""
    gradients: CodecOfWires = "none"
    """codec of activation gradients between stages; int4_hadamard and int5_hadamard round stochastically"""


class AveragingSection(Section):
    """How stage-mates average their gradients."""

    mode: AveragingMode = "synchronous"
    """synchronous: stage-mates average the gradients of each optimizer step; delayed: they average them while the next
    step computes, and update with gradients that are one step old; periodic (DiLoCo): each one updates its weights
    alone, and they average the differences every inner_steps steps, which takes little of their links"""
    inner_steps: Count = Field(50, ge=2)
    """for periodic: optimizer steps of a period; snapshots, validations and the last step are at the ends of periods"""
    outer_learning_rate: float = Field(0.7, gt=0)
    """for periodic: learning rate of the step that ends a period; 1 is better for periods of some ten steps"""
    outer_momentum: Share = 0.9
    """for periodic: Nesterov momentum of the step that ends a period; 0 is better for periods of some ten steps"""
    eager_updates: bool = True
    """for delayed: until the average of a step is there, each peer goes on from an update by its own gradient; costs
    three more values of host memory for each parameter, and saves most of the loss that the delay costs"""
    compression: CodecName = "none"
    """codec of weight gradients within a stage; int4_hadamard and int5_hadamard round stochastically; topk_2bit and
    sign send a 21st and a 30th of fp32, and what they lose is added to what the peer sends next"""
    dense_share: Share = 0.08
    """for topk_2bit and sign: part of the run's optimizer steps, at its beginning, that are averaged in 8 bit; so are
    the last 2 %, which send what was left over"""
    all_reduce: Literal["hivemind", "streamed"] = "hivemind"
    """hivemind's, or one that encodes, sends, adds and decodes parts at once, which takes less time; topk_2bit and sign
    take the second"""
    round_timeout_s: float = Field(60.0, gt=0)
    """longest averaging round, in seconds; set it to about three times a normal one"""
    chunk_timeout_s: float = Field(8.0, gt=0)
    """seconds of silence after which a stage-mate is dropped from an averaging round"""
    compare_weights_every: Count = Field(50, ge=0)
    """optimizer steps between comparisons of the weights themselves among stage-mates, of about a second per gigabyte;
    a peer whose device computes other weights downloads a state, and loses its part of one round; 0 for none"""

    @property
    def steps_per_average(self) -> int:
        """Optimizer steps from one average among stage-mates to the next."""
        return self.inner_steps if self.mode == "periodic" else 1

    @property
    def rounds_ahead(self) -> int:
        """Rounds that may be open while an earlier one is not committed, besides the next."""
        return 1 if self.mode == "delayed" else 0

    def codec_at(self, optimizer_step: int, last_step: int) -> str:
        """The codec of the average that makes the weights of an optimizer step, of a run that ends with another one."""
        is_early = optimizer_step <= self.dense_share * last_step
        is_late = optimizer_step > (1 - FLUSHED_SHARE) * last_step
        return DENSE if self.compression in NEED_FEEDBACK and (is_early or is_late) else self.compression

    def averages_at(self, optimizer_step: int) -> bool:
        """Whether an average ends the round that began with this optimizer step."""
        return (optimizer_step + 1) % self.steps_per_average == 0


class RecoverySection(Section):
    """How a run survives the loss of a whole stage."""

    snapshot_every: Count = Field(50, ge=0)
    """optimizer steps between snapshots; each peer keeps the newest two of its own stage and of the next, so that other
    peers can take over a stage that has lost all its peers; 0 for no snapshots"""

    def snapshots_at(self, optimizer_step: int) -> bool:
        """Whether peers keep a snapshot of the weights of this optimizer step. All have the initial ones."""
        return self.snapshot_every > 0 and optimizer_step > 0 and optimizer_step % self.snapshot_every == 0


class LimitsSection(Section):
    """Deadlines, tries and lifetimes that all peers keep."""

    hop_timeout_s: float = Field(60.0, gt=0, le=86400)
    """longest wait for one hop's reply, in seconds, the time of later stages included"""
    hop_tries: Count = Field(4, ge=1)
    """peers tried for one hop before it fails and the stage before tries another peer"""
    max_in_flight: Count = Field(16, ge=1)
    """most microbatches that one peer holds at once; it holds fewer if its memory is too small, and stage 0 launches no
    more than hide the round trip"""
    announcement_s: float = Field(30.0, ge=2)
    """lifetime of an announcement in the DHT, in seconds"""


class RunManifest(Section):
    """Everything that all peers of a run must agree on; immutable, identified by its hash."""

    name: str = Field(pattern=RUN_NAME)
    """name of the run: a-z, 0-9 and -"""
    seed: int = Field(0, ge=0, lt=2**63)
    admission: Literal["invite", "open"] = "invite"
    """who may take part: peers with an invite, or everybody who knows an address"""
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
                f"training.steps={self.training.steps}: set it to {self.training.steps} at most"
            )
        left = self.training.steps - self.schedule.warmup_steps
        if (decay_steps := self.schedule.decay_steps) is not None and decay_steps > left:
            raise ValueError(
                f"schedule.decay_steps={decay_steps} is more than the {left} of training.steps that follow the "
                f"warm-up: set it to {left} at most"
            )
        return self

    @model_validator(mode="after")
    def _has_boundaries(self) -> RunManifest:
        if self.model.boundary is not None and self.stages.count == 1:
            raise ValueError(
                "model.boundary is for what passes between stages, and stages.count=1 has nothing pass: raise the one "
                "or leave the other out"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> RunManifest:
        if self.optimizer.name == "muon" and self.model.adapter is not None:
            raise ValueError(
                "optimizer.name=muon is for matrices that are trained whole, and model.adapter trains pairs of thin "
                "ones: set optimizer.name to adamw"
            )
        return self

    @model_validator(mode="after")
    def _periods_fit(self) -> RunManifest:
        period = self.averaging.steps_per_average
        for name, steps in (
            ("training.steps", self.training.steps),
            ("training.validation_every", self.training.validation_every),
            ("recovery.snapshot_every", self.recovery.snapshot_every),
        ):
            if steps % period:
                raise ValueError(
                    f"{name}={steps} is not a multiple of averaging.inner_steps={period}, and peers of a stage hold "
                    f"the same weights only at the ends of periods: change one of them"
                )
        return self

    def canonical_json(self) -> bytes:
        """The manifest as JSON, with sorted keys and no spaces: equal manifests make equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def hash(self) -> str:
        """The first 32 hex digits of the SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical_json()).hexdigest()[:32]

"""Measures what real training steps of a stage add to this process's memory.

`python -m tests.measured_memory` runs all cases, prints a table, and as its last line the figures as JSON. Each case
has a process of its own, forked after the imports and before anything is computed.

What is measured is the peak of the resident set above the level after a warm-up. It follows what is allocated, because
blocks of more than MMAP_THRESHOLD bytes are mapped and unmapped one by one: glibc would keep freed ones for later, and
the peak would depend on the order of allocations. One thread computes, since MKL's workspaces grow with threads. Freed
small blocks are trimmed before the start. The resident set has an error of some megabytes, hence stages of 150 MB and
more.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file

from swarm_peer.config import RunManifest
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.wire.codecs import decode, encode

# Where the bases of adapters lie, while they are measured.
BASES = Path("bases")
MMAP_THRESHOLD = 64 * 1024
M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4  # mallopt(3)
TOKENS = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = TOKENS | {"model_type": "gpt2", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 |= {"vocab_size": 256, "n_positions": 1024, "n_embd": 64, "n_head": 4}
LLAMA = TOKENS | {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 1024, "hidden_size": 64}
LLAMA |= {"intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}


class Case(NamedTuple):
    """One stage of a model, and how it is trained.

    Attributes:
        layers: of each stage
        in_flight: microbatches that have gone forward and wait
        adapter, base: of the model's section, where adapters are trained
        boundary: of the model's section
    """

    name: str
    config: dict[str, Any]
    layers: list[int]
    stage: int
    length: int
    in_flight: int
    checkpointing: bool = False
    share_layers: bool = False
    codec: str = "none"
    precision: str = "fp32"
    adapter: dict[str, Any] | None = None
    base: str = "fp32"
    optimizer: str = "adamw"
    boundary: dict[str, int] | None = None

    @property
    def title(self) -> str:
        """The shape, and whether it is trained with activation checkpointing."""
        return self.name + (", checkpointing" if self.checkpointing else "")

    @property
    def _config(self) -> dict[str, Any]:
        return self.config | {"num_hidden_layers": sum(self.layers)}

    @property
    def _folder(self) -> Path:
        return BASES / hashlib.sha256(repr(self._config).encode()).hexdigest()[:16]

    def write_shards(self) -> None:
        """Write a base in bf16 and in several files, as large models are published."""
        if self._folder.exists():
            return
        self._folder.mkdir(parents=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**self._config))
        shards: list[dict[str, torch.Tensor]] = [{}]
        places: dict[str, str] = {}
        for name, tensor in model.state_dict().items():
            if sum(each.nbytes for each in shards[-1].values()) > SHARD_BYTES:
                shards.append({})
            shards[-1][name] = torch.randn(tensor.shape).bfloat16()
            places[name] = f"model-{len(shards)}.safetensors"
        for number, shard in enumerate(shards, 1):
            save_file(shard, self._folder / f"model-{number}.safetensors")
        (self._folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    def write_base(self) -> None:
        """Write the weights that adapters adapt, if there are any."""
        if self.adapter is not None and not self._folder.exists():
            config = transformers.AutoConfig.for_model(**self._config)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(self._folder)

    def resolved(self) -> ResolvedManifest:
        """The manifest of a run with such stages."""
        model = {"config": self._config, "share_layers": self.share_layers, "boundary": self.boundary}
        if self.adapter is not None:
            model |= {"pretrained": str(self._folder), "adapter": self.adapter, "base": self.base}
        return ResolvedManifest.of(
            RunManifest.model_validate(
                {
                    "name": "memory",
                    "model": model | {"activation_checkpointing": self.checkpointing, "precision": self.precision},
                    "stages": {"count": len(self.layers), "layers": self.layers},
                    "data": {"sequence_length": self.length},
                    "training": {"steps": 9, "global_batch_size": 2 * self.in_flight, "microbatch_size": 2},
                    "optimizer": {"name": self.optimizer, "learning_rate": 1e-3},
                    "wire": {"activations": self.codec, "gradients": self.codec},
                }
            )
        )


LARGE_VOCABULARY = GPT2 | {"vocab_size": 16384, "n_embd": 256}
DEEP = LLAMA | {"hidden_size": 192, "intermediate_size": 512}
LONG = LLAMA | {"hidden_size": 128, "intermediate_size": 1024}
SHAPES = (
    Case("GPT-2, large vocabulary, first", LARGE_VOCABULARY, [1, 1], 0, 128, 3),
    Case("GPT-2, large vocabulary, last", LARGE_VOCABULARY, [1, 1], 1, 128, 3, codec="fp16"),
    Case("Llama, many layers", DEEP, [1, 12, 1], 1, 128, 3),
    Case("Llama, long sequence, wide", LONG, [1, 2, 1], 1, 1024, 2, codec="fp16"),
)
MANY_LOGITS = LLAMA | {"vocab_size": 131072, "hidden_size": 192}
CASES = (
    *(case._replace(checkpointing=checkpointing) for case in SHAPES for checkpointing in (False, True)),
    Case("Llama, logits in chunks, last", MANY_LOGITS, [1, 1], 1, 512, 2),
    Case("Llama, many layers, Muon", DEEP, [1, 12, 1], 1, 128, 3, optimizer="muon"),
    Case(
        "Llama, wide, Muon",
        DEEP | {"hidden_size": 1024, "intermediate_size": 2816},
        [1, 2, 1],
        1,
        64,
        1,
        optimizer="muon",
    ),
    Case("GPT-2, large vocabulary, first, Muon", LARGE_VOCABULARY, [1, 1], 0, 32, 1, optimizer="muon"),
    Case("Llama, one layer for all", DEEP | {"hidden_size": 512}, [1, 8, 1], 1, 64, 2, share_layers=True),
    Case("GPT-2, rank at the boundary, last", LARGE_VOCABULARY, [1, 1], 1, 128, 3, boundary={"rank": 60}),
    Case("Llama, rank at boundaries", LONG, [1, 2, 1], 1, 1024, 2, codec="fp16", boundary={"rank": 32}),
    Case("Llama, maxout at boundaries", LONG, [1, 2, 1], 1, 1024, 2, boundary={"maxout": 2}),
)
WIDE = LLAMA | {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
ADAPTED = (
    *(
        Case(f"Llama, adapters on {base}", WIDE, [1, 6, 1], 1, 256, 3, checkpointing, adapter={"rank": 16}, base=base)
        for base, checkpointing in (("fp32", False), ("bf16", True), ("nf4", False))
    ),
    Case("GPT-2, adapters of a high rank", GPT2 | {"n_embd": 512}, [1, 6, 1], 1, 64, 2, adapter={"rank": 256}),
    Case("Llama, adapters, last", WIDE | {"vocab_size": 32768}, [1, 2], 1, 128, 3, adapter={}, base="int8"),
    Case("Llama, adapters, logits in chunks, last", MANY_LOGITS, [1, 1], 1, 512, 2, adapter={}, base="nf4"),
)
# By the program's argument: each takes minutes.
KINDS = {"whole": CASES, "adapters": ADAPTED}
# A base of 1 GB as it is published.
PUBLISHED = LLAMA | {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
SHARD_BYTES = 150e6
READ = tuple(Case(f"read as {base}", PUBLISHED, [8], 0, 64, 1, adapter={}, base=base) for base in ("nf4", "bf16"))


def measure(case: Case) -> tuple[float, float]:
    """Bytes that this process's resident set grows by at most: predicted, and measured."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    libc.mallopt(M_MMAP_MAX, 2**20)
    small = GPT2 if case.config["model_type"] == "gpt2" else LLAMA
    warm_up = case._replace(config=small, layers=[1] * len(case.layers), length=64, in_flight=1)
    for each in (warm_up, case):
        each.write_base()
    _train(warm_up)
    gc.collect()
    libc.malloc_trim(0)
    _reset_peak()
    before = _status_bytes("VmRSS")
    _train(case)
    measured = _status_bytes("VmHWM") - before
    return stage_costs(case.resolved(), "cpu")[case.stage].memory.peak_bytes(case.in_flight), measured


def _small(case: Case) -> Case:
    return case._replace(config=LLAMA, layers=[1] * len(case.layers))


def measure_reading(case: Case) -> tuple[float, float]:
    """Bytes of a stage's weights as they are kept, and what the resident set grows by at most while they are read.

    The allocator is left as it is: what it keeps of freed blocks is part of a peer's memory, too.
    """
    torch.set_num_threads(1)
    small = _small(case)
    StageTrainer(small.resolved(), small.resolved().specs[small.stage])
    resolved = case.resolved()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _reset_peak()
    before = _status_bytes("VmRSS")
    # As where members give the base: each tensor is hashed before it is read.
    source = ModelSource(
        str(case._folder), is_right=lambda name, tensor: bool(hashlib.sha256(_bytes_of(tensor)).digest())
    )
    StageTrainer(resolved, resolved.specs[case.stage], source=source)
    return stage_costs(resolved, "cpu")[case.stage].memory.weight_bytes, _status_bytes("VmHWM") - before


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def _train(case: Case) -> None:
    """Two rounds of a peer on a CPU, with what it holds beside its trainer."""
    resolved = case.resolved()
    trainer = StageTrainer(resolved, resolved.specs[case.stage])
    if case.adapter is not None:
        _reset_peak()  # while a base is read, its file is in memory as well, as long as there is room
    shapes = trainer.shapes
    averaging = [torch.ones(shape) for shape in shapes]  # as GradientAverager has them
    for _ in range(2):
        replies: list[memoryview] = []
        waiting = [_forward(trainer) for _ in range(case.in_flight)]
        snapshot = trainer.state() if trainer.optimizer_step else None
        for _ in range(case.in_flight):
            _backward(trainer, waiting.pop(), replies)
            waiting.append(_forward(trainer))  # as many wait as before, and there are gradients now
        while waiting:
            _backward(trainer, waiting.pop(), replies)
        means = trainer.mean_gradients()
        for buffer, mean in zip(averaging, means, strict=True):
            buffer.copy_(mean)
        trainer.apply(averaging)
        del means, snapshot


def _forward(trainer: StageTrainer) -> tuple[ForwardPass, Any, Any]:
    """As StageExecutor has it: a pass, and its activations as they came and as they go."""
    manifest, config = trainer.manifest, trainer.module.config
    samples, length, codec = manifest.training.microbatch_size, manifest.data.sequence_length, manifest.wire.activations
    tokens_BS = torch.randint(config.vocab_size, (samples, length + 1))
    if trainer.spec.is_first:
        passed, came = trainer.forward(tokens_BS), None
    else:
        shape = (samples, length, trainer.resolved.boundary_width)
        came = encode(torch.randn(shape), codec)
        passed = trainer.forward(tokens_BS, decode(came, shape, codec))
    return passed, came, None if trainer.spec.is_last else encode(passed.output, codec)


def _backward(trainer: StageTrainer, waiting: tuple[ForwardPass, Any, Any], replies: list[memoryview]) -> None:
    passed, codec = waiting[0], trainer.manifest.wire.gradients
    grad_BTD = None if trainer.spec.is_last else torch.randn(passed.output.shape)
    input_grad_BTD = trainer.backward(passed, grad_BTD)
    if input_grad_BTD is not None:
        replies.append(encode(input_grad_BTD, codec))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM (proc(5))


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def main() -> None:
    """Measure the cases of a kind, or those whose names contain the first argument; all by default.

    `reading` measures how bases are read.
    """
    global BASES
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = KINDS.get(wanted, [case for case in (*CASES, *ADAPTED) if wanted in case.title])
    is_reading = wanted == "reading"
    cases = READ if is_reading else cases
    # One process, replaced after each case: what one has left of the allocator's state must not be the next one's.
    with TemporaryDirectory() as folder:
        BASES = Path(folder)
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            if is_reading:
                pool.map(Case.write_shards, [each for case in cases for each in (_small(case), case)], chunksize=1)
            figures = pool.map(measure_reading if is_reading else measure, cases, chunksize=1)
    for case, (predicted, measured) in zip(cases, figures, strict=True):
        print(
            f"| {case.title} | {predicted / 1e6:.0f} MB | {measured / 1e6:.0f} MB | {predicted / measured - 1:+.1%} |"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""What only a GPU can show. Elsewhere all of it is skipped; `make gpu` runs it, with the real swarms on a GPU."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_memory import SHAPES, Case
from tiny_adapters import write_base
from tiny_models import CONFIGS, GPT2, LENGTH, LLAMA, VOCABULARY
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarm_peer.codecs import CODECS
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.host.device_errors import is_fault, is_lost, is_out_of_memory
from swarm_peer.runtime.host.preparation import free_device_memory
from swarm_peer.wire.codecs import decode, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Large enough for bitsandbytes to quantise its matrices.
WIDE = GPT2 | {"n_embd": 96, "n_head": 4}
# Of weights and gradients, as relative L2 norms.
ROUNDING = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}


def resolve(config: dict[str, Any] = LLAMA, **sections: Any) -> ResolvedManifest:
    content: dict[str, Any] = {
        "name": "test",
        "seed": 3,
        "model": {"config": config},
        "stages": {"count": 2},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return ResolvedManifest.of(RunManifest.model_validate(content))


def make_trainers(resolved: ResolvedManifest, device: str = "cuda") -> list[StageTrainer]:
    return [StageTrainer(resolved, spec, device=device) for spec in resolved.specs]


def tokens(seed: int) -> torch.Tensor:
    # Token 0 pads, and is made of zeros: each of Gemma's normalisations makes a thousandfold of its gradient.
    return torch.randint(1, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def passes(trainers: list[StageTrainer], tokens_BS: torch.Tensor) -> list[ForwardPass]:
    """A microbatch forward and backward."""
    done: list[ForwardPass] = []
    for trainer in trainers:
        done.append(trainer.forward(tokens_BS, done[-1].output if done else None))
    grad_BTD = None
    for trainer, passed in zip(reversed(trainers), reversed(done), strict=True):
        grad_BTD = trainer.backward(passed, grad_BTD)
    return done


def train(trainers: list[StageTrainer], steps: range) -> list[float]:
    """Optimizer steps of two microbatches. Returns each one's loss."""
    losses = []
    for step in steps:
        outputs = [passes(trainers, tokens(10 * step + number))[-1].output for number in range(2)]
        for trainer in trainers:
            assert not trainer.apply(trainer.mean_gradients()).skipped
        losses.append(float(torch.cat(outputs).mean()))
    return losses


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.cpu() - expected.cpu()).norm() / expected.cpu().norm().clamp_min(1e-12))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_a_cpu(name: str, precision: str, checkpointing: bool) -> None:
    config = CONFIGS[name] | {"initializer_range": 0.02}
    model = {"config": config, "precision": precision, "activation_checkpointing": checkpointing}
    on_gpu, on_cpu = (make_trainers(resolve(model=model), device) for device in ("cuda", "cpu"))
    for trainers in (on_gpu, on_cpu):
        passes(trainers, tokens(1))
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.num_samples == other.num_samples == 3
        actual = torch.cat([gradient.flatten() for gradient in one.mean_gradients()])
        expected = torch.cat([gradient.flatten() for gradient in other.mean_gradients()])
        assert relative_error(actual, expected) < ROUNDING[precision]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_fall(precision: str, optimizer: str) -> None:
    model = {"config": WIDE, "precision": precision}
    trainers = make_trainers(resolve(model=model, optimizer={"name": optimizer}))
    losses = [train(trainers, range(1))[0] for _ in range(30)]
    assert losses[-1] < losses[0] - (0.5 if optimizer != "sgd" else 0.0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_8bit"])
def test_a_state_goes_on_exactly_on_another_gpu_peer(optimizer: str) -> None:
    resolved = resolve(WIDE, optimizer={"name": optimizer})
    first = make_trainers(resolved)
    train(first, range(3))
    second = [StageTrainer(resolved, spec, device="cuda", blank=True) for spec in resolved.specs]
    for one, other in zip(first, second, strict=True):
        other.load_state(one.state(), one.optimizer_step)
    # The same averages on both, since sums on a GPU differ by their last digit from one time to the next.
    for step in range(3, 6):
        passes(first, tokens(step))
        for one, other in zip(first, second, strict=True):
            averages = one.mean_gradients()
            one.apply([average.clone() for average in averages])
            other.apply(averages)
    for one, other in zip(first, second, strict=True):
        expected = one.state()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state().items())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpus_encode_as_cpus_do(codec: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 200, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_gpu, on_cpu = (decode(encode(t, codec, 5), t.shape, codec) for t in (tensor.cuda(), tensor))
    # A few numbers of a million are rounded to the next step.
    assert relative_error(on_gpu, on_cpu) < (1e-9 if codec in ("none", "fp16", "bf16") else 2e-3)


@pytest.mark.parametrize("shape", [(3, 200, 24), (301,), (1, 1)], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_gpus_decode_as_cpus_do(codec: str, shape: tuple[int, ...]) -> None:
    data = encode(torch.randn(shape, generator=torch.Generator().manual_seed(0)), codec)
    on_gpu = decode(data, shape, codec, "cuda")
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), decode(data, shape, codec), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("none", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("blockwise_8bit", torch.float32),  # scales come first
        ("int5_hadamard", torch.bfloat16),
        ("int4_hadamard", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_on_a_gpu(codec: str, dtype: torch.dtype, bad: float) -> None:
    data = encode(torch.ones(300), codec)
    torch.frombuffer(data, dtype=dtype, count=2)[1] = bad
    with pytest.raises(InvalidMessage, match="non-finite"):
        decode(data, (300,), codec, "cuda")


@pytest.fixture(autouse=True)
def memory_before() -> int:
    """Bytes that are in use when a test begins."""
    free_device_memory(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@pytest.fixture
def little_memory(memory_before: int) -> Iterator[None]:
    """Half a gigabyte for torch's allocator."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(2**29 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def fill(held: list[torch.Tensor], size: int) -> None:
    """Allocate blocks until there is no memory left for another."""
    with suppress(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def test_a_gpu_that_runs_out_of_memory_goes_on(little_memory: None) -> None:
    trainers = make_trainers(resolve())
    train(trainers, range(1))
    hog = torch.empty(2**29 - torch.cuda.memory_reserved() - 2**21, dtype=torch.uint8, device="cuda")
    waiting: list[ForwardPass] = []
    with pytest.raises(RuntimeError) as caught:
        waiting.extend(trainers[0].forward(tokens(1)) for _ in itertools.count())
    assert is_out_of_memory(caught.value)
    assert is_fault(caught.value)
    assert not is_lost(caught.value)
    del waiting, hog, caught
    train(trainers, range(1, 3))


def test_a_failed_backward_pass_leaves_no_gradients(little_memory: None) -> None:
    width = 1024  # the gradient of a layer's largest matrix has 16 MB
    config = GPT2 | {"n_embd": width, "n_layer": 2}
    trainers = make_trainers(resolve(config, optimizer={"name": "sgd"}))
    train(trainers, range(1))
    passed = trainers[0].forward(tokens(1))
    passes(trainers, tokens(2))
    gradient_BTD = torch.full((3, LENGTH, width), 1e-4, device="cuda")
    for trainer in trainers:
        trainer.discard_gradients()
    trainers[0].num_samples = 3
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []
    fill(held, 2**20)
    with pytest.raises(RuntimeError) as caught:
        trainers[0].backward(passed, gradient_BTD)
    assert is_out_of_memory(caught.value)
    assert trainers[0].num_samples == 0
    assert all(parameter.grad is None for parameter in trainers[0].module.parameters())
    del held, caught, passed
    train(trainers, range(1, 3))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_grouped_queries_take_no_memory_of_length_squared(
    precision: str, memory_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on a GPU that has no flash attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    length = 4096
    config = LLAMA | {"max_position_embeddings": length, "num_hidden_layers": 2, "hidden_size": 64}
    resolved = resolve(model={"config": config, "precision": precision}, data={"sequence_length": length})
    trainers = make_trainers(resolved)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        trainers[0].forward(torch.zeros(1, length + 1, dtype=torch.int64))
    # One value for each pair of tokens, in one of four heads, would be as much.
    assert torch.cuda.max_memory_allocated() - memory_before < 4 * length**2


MEMORY_CASES = [
    case._replace(precision=precision, checkpointing=checkpointing, codec="none")
    for case in SHAPES
    for precision in ("fp32", "bf16")
    for checkpointing in (False, True)
]


@pytest.mark.parametrize("case", MEMORY_CASES, ids=lambda case: f"{case.title}, {case.precision}")
def test_memory_is_predicted_as_it_is_measured(case: Case, memory_before: int) -> None:
    resolved = case.resolved()
    trainer = StageTrainer(resolved, resolved.specs[case.stage], device="cuda")
    shape = 2, case.length, trainer.module.config.hidden_size
    tokens_BS = torch.randint(trainer.module.config.vocab_size, (2, case.length + 1))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        waiting: list[ForwardPass] = []
        for _ in range(2 * case.in_flight):
            if len(waiting) == case.in_flight:
                grad_BTD = None if trainer.spec.is_last else torch.full(shape, 1e-3, device="cuda")
                trainer.backward(waiting.pop(), grad_BTD)
            hidden_BTD = None if trainer.spec.is_first else torch.randn(shape, device="cuda")
            waiting.append(trainer.forward(tokens_BS, hidden_BTD))
        while waiting:
            trainer.backward(waiting.pop(), None if trainer.spec.is_last else torch.full(shape, 1e-3, device="cuda"))
        trainer.apply(trainer.mean_gradients())
    measured = torch.cuda.max_memory_allocated() - memory_before
    predicted = stage_costs(resolved, "cuda")[case.stage].memory.peak_bytes(case.in_flight)
    print(f"{predicted / 1e6:.0f} MB predicted, {measured / 1e6:.0f} MB measured, {predicted / measured - 1:+.1%}")
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("base", ["fp32", "bf16", "int8", "nf4"])
def test_adapters_are_trained_as_on_a_processor(base: str, precision: str, tmp_path: Path) -> None:
    """On a base that is the same bit by bit, since it is quantised before it comes to the GPU."""
    folder = write_base(LLAMA, tmp_path / "base")
    model = {"pretrained": str(folder), "adapter": {"rank": 4, "dora": True}, "base": base, "precision": precision}
    resolved = resolve(LLAMA, model=model, optimizer={"name": "sgd"})
    on_gpu, on_cpu = (make_trainers(resolved, device) for device in ("cuda", "cpu"))
    for trainers in (on_gpu, on_cpu):
        train(trainers, range(2))
    for mine, theirs in zip(on_gpu, on_cpu, strict=True):
        buffers = dict(theirs.module.named_buffers())
        for name, buffer in mine.module.named_buffers():
            assert name.endswith("inv_freq") or torch.equal(buffer.cpu(), buffers[name])
        expected = theirs.state()
        for name, value in mine.state().items():
            assert relative_error(value, expected[name]) < ROUNDING[precision], name


BROKEN = """
import test_gpu
import torch

trainers = test_gpu.make_trainers(test_gpu.resolve())
test_gpu.train(trainers, range(1))
bad = torch.full((3,), 10**6, device="cuda")
torch.zeros(5, device="cuda")[bad]
for job in (
    lambda: trainers[0].forward(test_gpu.tokens(1)),
    lambda: trainers[0].mean_gradients(),
    lambda: torch.cuda.mem_get_info(),
    lambda: torch.cuda.empty_cache(),
):
    try:
        job()
        print("ended well")
    except Exception as error:
        print("lost" if test_gpu.is_lost(error) else "not lost", type(error).__mro__, str(error)[:200])
"""


def test_an_error_that_stays_is_no_lack_of_memory() -> None:
    """After a failed assertion of a kernel, all that this process asks of the GPU fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", BROKEN], env=environment, capture_output=True, text=True, timeout=60)
    print(result.stdout, result.stderr[-2000:])
    lines = [line for line in result.stdout.splitlines() if "lost" in line]
    assert len(lines) >= 2
    assert all(line.startswith("lost") for line in lines)

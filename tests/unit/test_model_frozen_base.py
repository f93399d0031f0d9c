"""A base in fewer bits: adapters on it are those of a plain loop over the same rounded weights."""

import bitsandbytes.functional
import pytest
import torch
import transformers
from tiny_adapters import (
    adapters_of,
    as_peft_names,
    batches,
    check_alike,
    peft,
    plain_model,
    resolved_of,
    train_plainly,
    trainers_of,
    write_base,
)
from tiny_models import CONFIGS, LLAMA
from transformers.pytorch_utils import Conv1D

from coordinator.run.baseline import Baseline
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.frozen_base import END_BYTES, MATRIX_BYTES, FrozenLinear
from swarm_peer.model.published import as_trained

PRECISIONS = ["bf16", "int8", "nf4"]
EACH_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: write_base(config, folder / name) for name, config in CONFIGS.items()}


def resolved(bases, precision, family="llama", adapter=None, **options):
    config = CONFIGS[family]
    model = {
        "config": config,
        "pretrained": str(bases[family]),
        "adapter": {"rank": 3, "alpha": 6} | (adapter or {}),
        "base": precision,
    }
    rate = 0.01 if "initializer_range" in config else 0.5
    options = {"model": model, "optimizer": {"learning_rate": rate}} | options
    return resolved_of(bases[family], config=config, **options)


def rounded(weight, precision):
    """By bitsandbytes' functions alone."""
    if precision == "bf16":
        return weight.bfloat16().float()
    if precision == "int8":
        values, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
        return values.float() * scales[:, None] / 127
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return bitsandbytes.functional.dequantize_4bit(packed, state)


@torch.no_grad()
def round_base(model, precision):
    """Round the weights of a plain model of transformers, with PEFT's adapters in it, in their places."""
    for name, module in model.named_modules():
        is_wrapper = hasattr(module, "base_layer")
        if is_wrapper or "lora" in name or not hasattr(module, "weight") or "norm" in name or "ln_" in name:
            continue
        form = precision if ".layers." in name or ".h." in name else "bf16"
        if isinstance(module, Conv1D):
            module.weight.copy_(rounded(module.weight.T.contiguous(), form).T)
        else:
            module.weight.copy_(rounded(module.weight, form))


CASES = [(family, precision, False) for family in ("llama", "gpt2", "qwen2") for precision in PRECISIONS]
CASES += [("gemma2", "nf4", False), ("mistral", "nf4", False), ("qwen3", "nf4", False), ("llama", "bf16", True)]


@pytest.mark.parametrize(("family", "precision", "dora"), CASES)
def test_adapters_equal_those_of_a_plain_loop(family, precision, dora, bases):
    config = CONFIGS[family]
    baseline = Baseline(resolved(bases, precision, family, adapter={"dora": dora}, num_stages=2))
    model = plain_model(config, bases[family], adapters_of(baseline.trainers), use_dora=dora)
    round_base(model, precision)
    if family == "gemma2":  # which scales its embeddings, as in a model of transformers' that is bf16
        embedding = model.get_input_embeddings()
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
        embedding.register_forward_hook(lambda module, inputs, output: output.bfloat16().float())
    losses = [baseline.train_step(batch)[0] for batch in batches()]
    rate = 0.01 if "initializer_range" in config else 0.5
    expected = train_plainly(model, lambda parameters: torch.optim.SGD(parameters, lr=rate))
    assert losses == pytest.approx(expected, rel=1e-5)
    check_alike(as_peft_names(baseline.state()), peft.get_peft_model_state_dict(model))


def test_nf4_weights_are_those_of_transformers(bases):
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bases["llama"], quantization_config=settings, dtype=torch.float32
    )
    [trainer] = trainers_of(resolved(bases, "nf4"))
    for name, module in trainer.module.named_modules():
        if isinstance(module, FrozenLinear) and ".layers." in name:
            theirs = model.get_submodule(name.removesuffix(".base_layer")).weight
            assert torch.equal(module.weight, bitsandbytes.functional.dequantize_4bit(theirs.data, theirs.quant_state))


@EACH_PRECISION
@pytest.mark.parametrize("family", CONFIGS)
def test_a_base_takes_the_memory_that_is_counted(family, precision, bases):
    """But for tables of bitsandbytes' that all matrices could share, which are some of this tiny model's bytes."""
    trainers = trainers_of(resolved(bases, precision, family, num_stages=3))
    for trainer in trainers:
        for name, parameter in trainer.module.named_parameters():
            is_vector = parameter.ndim < 2
            assert is_vector or parameter.requires_grad or parameter.dtype == torch.bfloat16, f"{name} is whole"
        for name, module in trainer.module.named_modules():
            if not isinstance(module, FrozenLinear):
                continue
            in_layers = f".{trainer.module.family.layers}." in name
            counted = (MATRIX_BYTES if in_layers else END_BYTES)[precision] * module.in_features * module.out_features
            held = module.kept.numel() * module.kept.element_size()
            if in_layers and precision == "nf4":
                held += module._nf4.absmax.numel() + 4 * module._nf4.state2.absmax.numel()
            assert held == pytest.approx(counted, rel=0.1, abs=8)
    assert not any(isinstance(module, Conv1D) for trainer in trainers for module in trainer.module.modules())


@EACH_PRECISION
def test_every_peer_has_the_same_base_and_adapters(precision, bases):
    """A peer that comes later, and each cut, quantise alike; and no base is in a state."""
    one, two, three = (trainers_of(resolved(bases, precision, num_stages=count)) for count in (1, 2, 3))
    tokens = batches()[0][0]
    outputs = []
    for trainers in (one, two, three):
        hidden = None
        for trainer in trainers:
            hidden = trainer.evaluate(tokens, hidden)
        outputs.append(hidden)
        assert all("lora_" in name for trainer in trainers for name in trainer.state())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for trainer in two:
        assert trainer.state().keys() == trainer.state_template().keys()


@EACH_PRECISION
def test_a_query_changes_nothing_of_what_is_trained(precision, bases):
    """bitsandbytes' own layers repack their weights when they are asked without gradients."""
    asked, plain = (Baseline(resolved(bases, precision, num_stages=2)) for _ in range(2))
    for batch in batches():
        for trainer in asked.trainers[:1]:
            trainer.evaluate(batch[0])
            trainer.predict(batch[0])
        assert asked.train_step(batch) == plain.train_step(batch)


@EACH_PRECISION
def test_a_checkpointed_stage_trains_the_same_adapters(precision, bases):
    plain = resolved(bases, precision)
    model = plain.manifest.model.model_dump() | {"activation_checkpointing": True}
    baselines = [Baseline(plain), Baseline(resolved(bases, precision, model=model))]
    for baseline in baselines:
        baseline.train_step(batches()[0])
    check_alike(baselines[1].state(), baselines[0].state(), 1e-6)


@EACH_PRECISION
def test_a_frozen_matrix_under_autocast_computes_in_its_type(precision):
    """As on GPUs: products and gradients are of 16 bits, and an input gets a gradient of its own type."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    layer = FrozenLinear(weight.shape, [weight], torch.nn.Parameter(torch.ones(32), requires_grad=False), precision)
    inputs = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        product = layer(inputs)
    product.sum().backward()
    assert product.dtype == torch.bfloat16
    assert inputs.grad.dtype == torch.float32
    whole = rounded(weight, precision)
    assert torch.allclose(product.float(), inputs @ whole.T + 1, rtol=0.02, atol=0.2)
    assert torch.allclose(inputs.grad, torch.ones(5, 32) @ whole, rtol=0.02, atol=0.1)


@EACH_PRECISION
@pytest.mark.parametrize("shape", [(200, 96), (130, 33), (64, 64), (1, 7)])
def test_a_matrix_that_is_read_in_pieces_is_that_of_the_whole(precision, shape):
    """Bit by bit, also where the last blocks of 64 values are not full, and scales have a scale of their own."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) ** 3
    layer = FrozenLinear(shape, weight.split(64), None, precision)
    assert torch.equal(layer.whole(torch.float32), FrozenLinear(shape, [weight], None, precision).whole(torch.float32))
    assert torch.allclose(layer.whole(torch.float32), rounded(weight, precision), rtol=1e-6)
    if precision == "nf4":
        assert torch.equal(layer.whole(torch.float32), rounded(weight, precision))


def test_adapters_are_put_on_a_base_that_nobody_makes_whole(bases, monkeypatch):
    made_whole = []
    real = FrozenLinear.whole
    monkeypatch.setattr(FrozenLinear, "whole", lambda layer, dtype: made_whole.append(layer) or real(layer, dtype))
    [trainer] = trainers_of(resolved(bases, "nf4"))
    assert made_whole == []
    assert trainer.trained
    layer = next(layer for layer in trainer.module.modules() if isinstance(layer, FrozenLinear))
    assert layer.weight.unique().numel() > 1, "PEFT sees its values from now on"
    trainers_of(resolved(bases, "nf4", adapter={"dora": True}))
    assert len(made_whole) > 1, "whose magnitudes are the lengths of the base's rows"


def test_a_quantised_base_needs_adapters():
    sections = {"stages": {"count": 1}, "data": {"sequence_length": 4}, "optimizer": {"learning_rate": 1}}
    training = {"steps": 1, "global_batch_size": 1, "microbatch_size": 1}
    model = {"config": LLAMA, "base": "nf4"}
    with pytest.raises(ValueError, match="base=nf4 is for weights that are frozen, and all are trained: add adapter"):
        RunManifest.model_validate({"name": "a", "model": model, "training": training} | sections)


def test_a_base_that_is_quantised_already_is_refused():
    config = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(UserError, match=r"give the model that it was made of, and have model.base quantise it: int8"):
        as_trained(config, "quantised")

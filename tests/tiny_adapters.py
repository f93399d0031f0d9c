"""Runs of adapters on tiny bases, and the plain loop of transformers and PEFT that they are held to."""

from __future__ import annotations

import peft
import torch
import transformers
from tiny_models import LENGTH, LLAMA, VOCABULARY, exactly

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

STEPS = 4


def write_base(config, folder, seed=5):
    """A published model of a family, with weights that nobody else has."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), **exactly(config)
    )
    model.save_pretrained(folder)
    return folder


def resolved_of(base, *, num_stages=1, adapter=None, optimizer=None, seed=3, config=LLAMA, **sections):
    manifest = {
        "name": "test",
        "seed": seed,
        "model": {"config": config, "pretrained": str(base), "adapter": {"rank": 3, "alpha": 6} | (adapter or {})},
        "stages": {"count": num_stages},
        "data": {"sequence_length": LENGTH, "foreign_tokenizer": True},
        "training": {
            "steps": 10, "global_batch_size": 6, "microbatch_size": 3, "validation_every": 0, "max_grad_norm": None,
        },
        "optimizer": {"name": "sgd", "learning_rate": 0.5} | (optimizer or {}),
        "recovery": {"snapshot_every": 0},
    }  # fmt: skip
    return ResolvedManifest.of(RunManifest.model_validate(manifest | sections))


def trainers_of(resolved, **options):
    return [StageTrainer(resolved, spec, **options) for spec in resolved.specs]


def adapters_of(trainers):
    return {name: value for trainer in trainers for name, value in trainer.state().items() if "lora_" in name}


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    shape = (steps, 2, 3, LENGTH + 1)
    # Padding is embedded as zeros, of which one norm after the other makes gradients beyond what a stage sends.
    return [list(batch) for batch in torch.randint(1, VOCABULARY, shape, generator=generator)]


def as_peft_names(tensors):
    """By hand, so that the reference shares nothing with us."""
    short = {
        name.replace(".default", ""): value for name, value in tensors.items() if not name.startswith("optimizer/")
    }
    return {
        "base_model.model." + name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): value
        for name, value in short.items()
    }


def plain_model(config, base, initial, targets=None, **options):
    """transformers' model with PEFT's adapters of the same initial values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **exactly(config))
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=targets or "all-linear", task_type="CAUSAL_LM",
        fan_in_fan_out=config["model_type"] == "gpt2", **options,
    )  # fmt: skip
    model = peft.get_peft_model(model, settings)
    loaded = peft.set_peft_model_state_dict(model, as_peft_names(initial))
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if "lora" in key]
    return model


def train_plainly(model, optimizer):
    """A plain loop; returns each step's loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer(parameters)
    losses = []
    for batch in batches():
        tokens = torch.cat(batch)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_alike(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = float((actual[name] - value).norm() / value.norm().clamp_min(1e-12))
        assert difference < tolerance, f"{name} differs by {difference:.2e}"

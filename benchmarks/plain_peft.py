"""Adapters on a quantised base in one process: transformers, PEFT and bitsandbytes as their manuals use them.

Nothing of Swarm is imported here: fine_tuning.py starts this program, and compares. Samples come as a file of
safetensors: `train/0/input_ids`, `train/0/labels` and so on for each optimizer step, and `held_out/...`, both (B, S)
and int64. Labels are those of transformers: the model moves them by one, and -100 is not learnt.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

NOT_LEARNT = -100
# Held-out samples that the model is given at a time.
BATCH = 8


def base_of(folder: Path) -> transformers.PreTrainedModel:
    """A published model with its layers' matrices in NF4, and everything else in fp32."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    # Whoever evaluates has it in this mode, too, which differs by dropout alone, and there is none. In the other one
    # bitsandbytes 0.50 packs matrices anew for CPUs with AVX512 BF16: it computes in bf16 then, and without gradients.
    return model.train()


def samples_of(file: Path, kind: str) -> Iterator[dict[str, Tensor]]:
    """The arguments of the model for each batch of a kind, in order."""
    with safe_open(file, "pt") as stored:
        numbers = sorted({int(key.split("/")[1]) for key in stored.keys() if key.startswith(f"{kind}/")})  # noqa: SIM118
        for number in numbers:
            yield {name: stored.get_tensor(f"{kind}/{number}/{name}") for name in ("input_ids", "labels")}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, file: Path) -> float:
    """Mean loss of the held-out samples, in nats for each token that is learnt."""
    loss_sum, num_targets = 0.0, 0
    for whole in samples_of(file, "held_out"):
        for start in range(0, len(whole["labels"]), BATCH):
            batch = {name: values[start : start + BATCH] for name, values in whole.items()}
            count = int((batch["labels"][:, 1:] != NOT_LEARNT).sum())
            loss_sum += float(model(**batch, use_cache=False).loss) * count
            num_targets += count
    return loss_sum / num_targets


def rate_factor(step: int, warmup: int, steps: int) -> float:
    """The learning rate of a step as a share of the highest: a linear warm-up, and half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (steps - 1 - warmup))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def train(options: argparse.Namespace) -> dict[str, object]:
    """Train adapters on the file's batches, one optimizer step for each; returns the losses."""
    started = time.monotonic()
    model = peft.PeftModel.from_pretrained(base_of(options.model), options.adapters, is_trainable=True)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=options.learning_rate,
        betas=tuple(options.betas),
        weight_decay=0.0,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, options.warmup_steps, options.steps)
    )
    losses = []
    first = held_out_loss(model, options.samples)
    for batch in samples_of(options.samples, "train"):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 6))
    model.save_pretrained(options.output)
    return {
        "validation_before": first,
        "validation_loss": held_out_loss(model, options.samples),
        "losses": losses,
        "seconds": round(time.monotonic() - started),
    }


def begin(options: argparse.Namespace) -> dict[str, object]:
    """Write PEFT's own first adapters, drawn from a seed."""
    torch.manual_seed(options.seed)
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    peft.get_peft_model(base_of(options.model), config).save_pretrained(options.output)
    return {}


def evaluate(options: argparse.Namespace) -> dict[str, object]:
    """The loss of a folder of adapters."""
    model = peft.PeftModel.from_pretrained(base_of(options.model), options.adapters).train()
    return {"validation_loss": held_out_loss(model, options.samples)}


def main() -> None:
    """The command line; prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    commands = parser.add_subparsers(required=True)
    for function in (begin, train, evaluate):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--model", type=Path, required=True)
        if function is not evaluate:
            command.add_argument("--output", type=Path, required=True)
        if function is begin:
            command.add_argument("--seed", type=int, required=True)
            command.add_argument("--rank", type=int, required=True)
        else:
            command.add_argument("--adapters", type=Path, required=True)
            command.add_argument("--samples", type=Path, required=True)
        if function is train:
            command.add_argument("--learning-rate", type=float, required=True)
            command.add_argument("--betas", type=float, nargs=2, required=True)
            command.add_argument("--warmup-steps", type=int, required=True)
            command.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(options.function(options)), flush=True)


if __name__ == "__main__":
    main()

"""Real peers fine-tune on packed chats: adapters as those of a plain loop that reads each conversation by itself.

The loop is transformers', PEFT's and bitsandbytes'. It packs nothing, masks nothing, and shares no code with us.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import bitsandbytes.functional
import peft
import pytest
import torch
import transformers
from swarm import LLAMA, SwarmRun, run_swarm, tiny_manifest
from test_keystone import check_counts, check_nothing_lost, check_stage_mates
from tiny_adapters import as_peft_names, check_alike, write_base
from tiny_tokenizers import save_tokenizer

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS = 3
LENGTH = 127
VOCABULARY = 258
MODEL = LLAMA | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 1}
# Beside a token's id, as it travels.
NOT_LEARNT, BEGINS, IDS = 1 << 30, 1 << 29, (1 << 29) - 1


def write_chats(file: Path) -> None:
    """Conversations of one or two turns, some of them far shorter than a sample, and some longer."""
    rng = random.Random(5)
    with file.open("w") as lines:
        for _ in range(150):
            turns = [
                {"role": role, "content": "".join(rng.choices("abcdefgh ", k=rng.choice((2, 4, 8, 30))))}
                for _ in range(rng.choice((1, 2)))
                for role in ("user", "assistant")
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")


def manifest_of(folder: Path, num_stages: int, precision: str) -> RunManifest:
    base = write_base(MODEL, folder / "base")
    marks = {"<|im_start|>": 256, "<|im_end|>": 257}
    save_tokenizer(base, marks, [*marks], "<|im_end|>", chat_template=TEMPLATE)
    write_chats(folder / "chats.jsonl")
    return tiny_manifest(
        model={
            "config": MODEL,
            "pretrained": str(base),
            "adapter": {"rank": 4, "alpha": 8},
            "base": precision,
        },
        data={
            "dataset": str(folder / "chats.jsonl"),
            "format": "messages",
            "tokenizer": str(base),
            "sequence_length": LENGTH,
            "packing": True,
        },
        stages={"count": num_stages, "peers_to_start": 1},
        training={"steps": STEPS, "global_batch_size": 12, "max_grad_norm": None},
        optimizer={"learning_rate": 0.5},
    )


def rounded(weight: torch.Tensor, precision: str) -> torch.Tensor:
    if precision == "bf16":
        return weight.bfloat16().float()
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return bitsandbytes.functional.dequantize_4bit(packed, state)


def plain_model(base: Path, precision: str, initial: dict[str, torch.Tensor]) -> peft.PeftModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded(parameter, precision if ".layers." in name else "bf16"))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    assert not peft.set_peft_model_state_dict(adapted, initial).unexpected_keys
    return adapted


def conversations(tokens_NS: torch.Tensor) -> list[torch.Tensor]:
    """The documents that samples were packed of, each from its first token to its last."""
    found = []
    for row in tokens_NS:
        begins = [0, *(position for position in range(1, len(row)) if int(row[position]) & BEGINS), len(row)]
        found += [row[begin:end] for begin, end in itertools.pairwise(begins)]
    return found


def train_plainly(model: peft.PeftModel, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    losses = []
    for tokens_NS in batches:
        loss_sum, num_targets = torch.zeros(()), 0
        for document in conversations(tokens_NS):
            if len(document) < 2:
                continue
            ids, is_learnt = document & IDS, (document[1:] & NOT_LEARNT) == 0
            logits = model(input_ids=ids[None, :-1].long(), use_cache=False).logits[0]
            each = torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")
            loss_sum = loss_sum + each[is_learnt].sum()
            num_targets += int(is_learnt.sum())
        loss = loss_sum / num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_packs(run: SwarmRun) -> None:
    """That there is something to get wrong: samples of several conversations, of unlike numbers of targets."""
    samples = torch.cat([sample for batch in run.counted.values() for sample in batch])
    assert len(conversations(samples)) > 1.3 * len(samples)
    assert len(set(((samples[:, 1:] & NOT_LEARNT) == 0).sum(dim=1).tolist())) > 3


QUICK = [pytest.param([2, 1], "nf4", id="2x1 peers, nf4")]
SLOW = [
    pytest.param(peers, precision, id=f"{'x'.join(map(str, peers))} peers, {precision}", marks=pytest.mark.slow)
    for peers, precision in (([1], "nf4"), ([2], "bf16"), ([2, 2], "bf16"), ([1, 2, 1], "nf4"), ([2, 2, 2], "nf4"))
]


@pytest.mark.parametrize(("peers", "precision"), [*QUICK, *SLOW])
def test_adapters_equal_those_of_conversations_one_by_one(peers: list[int], precision: str, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, len(peers), precision)
    resolved = ResolvedManifest.of(manifest)
    initial = {name: value for spec in resolved.specs for name, value in StageTrainer(resolved, spec).state().items()}

    (folder := tmp_path / "run").mkdir()
    run = run_swarm(manifest, peers, folder)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    check_packs(run)
    batches = [torch.cat(run.counted[round_number]) for round_number in range(STEPS)]
    model = plain_model(tmp_path / "base", precision, as_peft_names(initial))
    losses = train_plainly(model, batches)
    assert [line["loss"] for line in run.lines] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    states = {name: value for stage in run.states for name, value in stage[0].tensors.items()}
    check_alike(as_peft_names(states), peft.get_peft_model_state_dict(model))

"""Losses over targets: however these are spread over samples, microbatches and peers, the step is that of one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, LLAMA, VOCABULARY
from torch.nn import functional
from transformers import AutoModelForCausalLM

from coordinator.run.baseline import Baseline, ReplicatedBaseline
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.token_marks import BEGINS_DOCUMENT, NOT_LEARNT, are_learnt, ids_of, num_targets
from swarm_peer.wire.codecs import decode_tokens, encode_tokens

LENGTH = 250
LONG: dict[str, Any] = LLAMA | {"max_position_embeddings": LENGTH}


def resolved(
    config: dict[str, Any] = LONG, length: int = LENGTH, *, packing: bool = False, **averaging: Any
) -> ResolvedManifest:
    return ResolvedManifest.of(
        RunManifest.model_validate(
            {
                "name": "test",
                "seed": 3,
                "model": {"config": config},
                "stages": {"count": 2},
                "data": {
                    "sequence_length": length,
                    "packing": packing,
                    "format": "messages",
                    "dataset": "json",
                    "files": ["a"],
                },
                "training": {"steps": 4, "global_batch_size": 2, "microbatch_size": 1, "max_grad_norm": None},
                "optimizer": {"name": "sgd", "learning_rate": 0.5},
                "averaging": averaging,
            }
        )
    )


def sample(num_learnt: int, seed: int, length: int = LENGTH) -> torch.Tensor:
    """A sample the last tokens of which are learnt, int32 of shape (1, T+1)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=generator, dtype=torch.int32)
    tokens[0, : length + 1 - num_learnt] |= NOT_LEARNT
    return tokens


def weights_of(trainers: list[StageTrainer]) -> dict[str, torch.Tensor]:
    return {n: v.clone() for trainer in trainers for n, v in trainer.module.state_dict().items()}


def weights_of_one_process(before: dict[str, torch.Tensor], config: dict[str, Any], batch: list[torch.Tensor]):
    """The loss, and the weights after a step of transformers' model on a whole batch, with labels of -100."""
    model = AutoModelForCausalLM.from_config(parse_model_config(config))
    model.load_state_dict(before)
    marked = torch.cat(batch)
    labels = torch.where(are_learnt(marked), marked, -100)[:, 1:].long()
    logits = model(input_ids=ids_of(marked[:, :-1]).long()).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return float(loss.detach()), model.state_dict()


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in weights.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("num_learnt", [(1, 200), (200, 1), (7, 7, 250, 1)])
def test_microbatches_of_unlike_numbers_of_targets(num_learnt: tuple[int, ...]) -> None:
    batch = [sample(count, seed) for seed, count in enumerate(num_learnt)]
    baseline = Baseline(resolved())
    before = weights_of(baseline.trainers)
    loss, num_samples = baseline.train_step(batch)
    expected_loss, expected = weights_of_one_process(before, LONG, batch)
    assert (loss, num_samples) == (pytest.approx(expected_loss, rel=1e-5), len(num_learnt))
    assert_equal(weights_of(baseline.trainers), expected)


def test_peers_with_unlike_numbers_of_targets() -> None:
    """Each stage has two replicas: one computes a microbatch with a single target, the other one with 200."""
    batch = [sample(1, 0), sample(200, 1)]
    swarm = ReplicatedBaseline(resolved(), [2, 2])
    before = weights_of([replicas[0] for replicas in swarm.stages])
    loss, _ = swarm.train_step(batch, [[[0], [1]], [[1], [0]]])
    expected_loss, expected = weights_of_one_process(before, LONG, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for number in range(2):
        assert_equal(weights_of([replicas[number] for replicas in swarm.stages]), expected)


def _as_baseline(trainers: list[StageTrainer]) -> Baseline:
    baseline = Baseline.__new__(Baseline)
    baseline.trainers, baseline.manifest = trainers, trainers[0].manifest
    return baseline


@pytest.mark.parametrize("mode", ["synchronous", "delayed", "periodic"])
def test_each_mode_weighs_by_targets(mode: str) -> None:
    """Of two replicas, one has 200 targets and one a single one: the average is nearly what the first one brings."""
    options = {"inner_steps": 2} if mode == "periodic" else {"eager_updates": False}
    run = resolved(mode=mode, **options)
    if mode == "periodic":
        training = run.manifest.training.model_copy(update={"validation_every": 0})
        run = ResolvedManifest.of(run.manifest.model_copy(update={"training": training}))
    replicas = [StageTrainer(run, run.specs[0]) for _ in range(2)]
    for number, trainer in enumerate(replicas):
        forward_pass = trainer.forward(sample((1, 200)[number], number))
        trainer.backward(forward_pass, torch.ones_like(forward_pass.output) * 1e-3)
        assert (trainer.num_samples, trainer.weight) == (1, (1, 200)[number])
        _, weight = trainer.strategy.contribution(trainer.mean_gradients(), trainer.weight)
        assert weight == (1, 200)[number]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_is_not_learnt_changes_nothing_behind(config: dict[str, Any]) -> None:
    """Padding is behind all that is learnt, and no token attends to it."""
    run = resolved(config, 12)
    trainers = [StageTrainer(run, spec) for spec in run.specs]
    short, padded = sample(4, 0, 8), torch.full((1, 13), 5 | NOT_LEARNT, dtype=torch.int32)
    padded[:, :9] = short
    losses = []
    for tokens in (short, padded):
        value = trainers[0].evaluate(tokens)
        losses.append(trainers[1].evaluate(tokens, value) * (tokens.shape[1] - 1))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("lengths", [(5, 8), (1, 6, 1, 5), (3, 2)])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_are_each_as_if_alone(config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Losses, and the gradients of all weights, in whatever order the documents stand and whatever is beside them."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    alone, packed = Baseline(resolved(config, 12)), Baseline(resolved(config, 12, packing=True))
    rows = [torch.full((1, 13), 7 | NOT_LEARNT) for _ in documents]
    for row, document in zip(rows, documents, strict=True):
        row[0, : len(document)] = document
        row[0, 0] |= NOT_LEARNT | BEGINS_DOCUMENT
    together = torch.full((2, 13), 7 | NOT_LEARNT)
    together[0, : sum(lengths)] = torch.cat([row[0, :length] for row, length in zip(rows, lengths, strict=True)])
    together[1] = rows[0]  # a sample of one document beside one of several
    losses = [
        baseline.accumulate(microbatch, b"id")
        for baseline, microbatch in ((alone, torch.cat([*rows, rows[0]])), (packed, together))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, other in zip(alone.trainers, packed.trainers, strict=True):
        assert one.weight == other.weight
        for name, mean, expected in zip(one.trained, other.mean_gradients(), one.mean_gradients(), strict=True):
            torch.testing.assert_close(
                mean, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_packing_documents_would_see_each_other(config: dict[str, Any]) -> None:
    """That the test above can fail."""
    tokens = torch.arange(13)[None] | torch.tensor(
        [NOT_LEARNT | BEGINS_DOCUMENT] + [0] * 5 + [NOT_LEARNT | BEGINS_DOCUMENT] + [0] * 6
    )
    losses = [Baseline(resolved(config, 12, packing=packing)).accumulate(tokens, b"id") for packing in (False, True)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


def test_marks_on_the_wire() -> None:
    marked = sample(3, 0, 8)
    assert num_targets(marked) == 3
    data = memoryview(bytearray(encode_tokens(marked)))
    assert torch.equal(decode_tokens(data, (1, 9), VOCABULARY, has_marks=True).int(), marked)
    with pytest.raises(InvalidMessage):
        decode_tokens(data, (1, 9), VOCABULARY)
    with pytest.raises(InvalidMessage):
        decode_tokens(data, (1, 9), int(ids_of(marked).max()), has_marks=True)
    with pytest.raises(InvalidMessage):
        decode_tokens(memoryview(bytearray(encode_tokens(marked - 2**31))), (1, 9), VOCABULARY, has_marks=True)
    trainer = StageTrainer(resolved(), resolved().specs[0])
    with pytest.raises(InvalidMessage):
        trainer.forward(torch.full((1, 9), VOCABULARY | NOT_LEARNT, dtype=torch.int32))

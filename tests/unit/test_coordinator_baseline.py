"""The reference process, and the one of the experiment about codecs, whose members average."""

import sys
from pathlib import Path

import pytest
import torch
from swarm import tiny_manifest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import members

from coordinator.run.baseline import Baseline, end_round
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.wire.codecs import decode, encode

IDS = [bytes([number] * 16) for number in range(4)]


def resolved(codec="none"):
    return ResolvedManifest.of(tiny_manifest(wire={"activations": codec, "gradients": codec}))


def microbatches(of):
    length = of.manifest.data.sequence_length + 1
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, of.vocab_size, (2, length), generator=generator) for _ in IDS]


def weights(baseline):
    return torch.cat([p.detach().flatten() for trainer in baseline.trainers for p in trainer.module.parameters()])


def weights_after_a_step(baseline, ids=None):
    baseline.train_step(microbatches(baseline.trainers[0].resolved), ids)
    return weights(baseline)


def test_gradients_are_rounded_by_the_microbatches_ids():
    run = resolved("int4_hadamard")
    first = weights_after_a_step(Baseline(run), IDS)
    assert torch.equal(first, weights_after_a_step(Baseline(run), IDS))
    assert not torch.equal(first, weights_after_a_step(Baseline(run), IDS[::-1]))
    assert torch.equal(weights_after_a_step(Baseline(run)), weights_after_a_step(Baseline(run)))
    exact = weights_after_a_step(Baseline(resolved()), IDS)
    assert 0 < float((first - exact).norm() / exact.norm()) < 0.1


def test_a_replica_without_others_takes_what_it_brings_bit_by_bit(monkeypatch):
    """As a peer without stage-mates does. (x * 6) / 6 is not x for one value in seven."""
    trainer = Baseline(resolved()).trainers[0]
    brought, applied = [torch.randn(1000, generator=torch.Generator().manual_seed(2))], []
    monkeypatch.setattr(trainer.strategy, "contribution", lambda means, num_samples: (brought, 6))
    monkeypatch.setattr(trainer, "apply", applied.extend)
    end_round([trainer])
    assert torch.equal(applied[0], brought[0])


def test_every_microbatch_has_an_id():
    with pytest.raises(ValueError, match="shorter"):
        weights_after_a_step(Baseline(resolved()), IDS[:2])


def test_activations_are_rounded_in_evaluation_too():
    run, tokens_BS = resolved("int4_hadamard"), microbatches(resolved())[0]
    baseline = Baseline(run)
    first, last = baseline.trainers
    hidden_BTD = first.evaluate(tokens_BS)
    received = decode(encode(hidden_BTD, "int4_hadamard"), hidden_BTD.shape, "int4_hadamard")
    loss = float(last.evaluate(tokens_BS, received).mean())
    assert baseline.evaluate(tokens_BS.numpy()) == pytest.approx(loss, rel=1e-6)
    assert loss != pytest.approx(float(last.evaluate(tokens_BS, hidden_BTD).mean()), rel=1e-6)


@pytest.mark.parametrize(("codec", "error"), [("none", 1e-4), ("blockwise_8bit", 0.02), ("int4_hadamard", 0.2)])
@pytest.mark.parametrize("num_members", [2, 3])
def test_members_average_what_one_process_accumulates(codec, error, num_members):
    alone, averaged = Baseline(resolved()), members.AveragedBaseline(resolved(), num_members, codec)
    before = weights(alone)
    expected = weights_after_a_step(alone) - before
    update = weights_after_a_step(averaged) - before
    difference = float((update - expected).norm() / expected.norm())
    assert difference < error
    assert (difference > 1e-4) == (codec != "none"), "the codec is used"

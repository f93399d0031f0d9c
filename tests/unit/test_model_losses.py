"""The last stage's loss in chunks of tokens: the same as of whole logits, in bounded memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_model_stage import LENGTH, build, sample
from tiny_models import CONFIGS

from swarm_peer.model import losses
from swarm_peer.model.frozen_base import FrozenLinear
from swarm_peer.model.losses import token_losses
from swarm_peer.model.stage import StageModule

# Qwen2.5's vocabulary, and a microbatch of 4 x 2048 tokens.
MEMORY_OF_A_LOSS = """
import resource, torch
from swarm_peer.model.losses import token_losses
torch.manual_seed(0)
head = torch.nn.Linear(64, 152_064, bias=False).requires_grad_(False)
hidden_ND = torch.randn(4 * 2048, 64, requires_grad=True)
targets_N = torch.randint(152_064, (4 * 2048,))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_losses(head, hidden_ND, targets_N, 152_064).mean().backward()
assert hidden_ND.grad.isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) * 1024)
"""


def gradients_of(module: StageModule, *, max_logits: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Losses and gradients of a last stage: of its inputs, and of its weights."""
    monkeypatch.setattr(losses, "MAX_LOGITS", max_logits)
    module.zero_grad()
    generator = torch.Generator().manual_seed(2)
    hidden_BTD = torch.randn(3, LENGTH, module.config.hidden_size, generator=generator, requires_grad=True)
    losses_B = module(hidden_BTD, sample())
    (losses_B * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert hidden_BTD.grad is not None
    return [losses_B.detach(), hidden_BTD.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen in bf16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_losses_and_gradients_do_not_depend_on_chunks(config, frozen, monkeypatch):
    _, last = build(config, 2)
    if frozen:
        last.lm_head = FrozenLinear(last.lm_head.weight.shape, [last.lm_head.weight.detach()], None, "bf16")
    whole = gradients_of(last, max_logits=2**25, monkeypatch=monkeypatch)
    # Chunks of 5 tokens, and a smaller one at the end.
    chunked = gradients_of(last, max_logits=5 * last.config.vocab_size, monkeypatch=monkeypatch)
    assert len(whole) == len(chunked) > 2
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_no_chunk_has_more_logits_than_may_exist_at_once(monkeypatch):
    monkeypatch.setattr(losses, "MAX_LOGITS", 40)
    seen: list[int] = []

    def head(hidden_CD: torch.Tensor) -> torch.Tensor:
        logits_CV = hidden_CD @ torch.ones(4, 10)
        seen.append(logits_CV.numel())
        return logits_CV

    hidden_ND, targets_N = torch.randn(11, 4), torch.randint(10, (11,))
    with torch.no_grad():
        assert len(token_losses(head, hidden_ND, targets_N, 10)) == 11
    assert seen == [40, 40, 30]
    token_losses(head, hidden_ND.requires_grad_(), targets_N, 10).sum().backward()
    assert max(seen) <= 40


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_large_vocabulary_takes_little_memory():
    """Whole logits alone would take 5 GB, and their gradients as much again."""
    result = subprocess.run([sys.executable, "-c", MEMORY_OF_A_LOSS], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1e9

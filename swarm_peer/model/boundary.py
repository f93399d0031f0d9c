"""How a stage makes hidden states of what the stage before it sends, and what it sends of its own.

Shapes: B samples, T tokens, D hidden size, W values of a token that pass, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_peer.config import BoundarySection
from swarm_peer.errors import UserError
from swarm_peer.model.families import Family
from swarm_peer.model.parameters import seeded
from swarm_peer.model.partition import StageSpec, boundary_width

# Of tokens' frozen values. They are drawn in it, so nothing is rounded later.
TABLE_DTYPE = torch.bfloat16
# Their deviation, as a multiple of that with which the family's embeddings begin: those grow as they learn, and these
# cannot. After 150 steps of 2 million parameters, 1 cost 0.7 % of the loss, and 5 nothing (benchmarks/).
TABLE_SCALE = 5.0


class Boundary(nn.Module):
    """The two ends of a stage; this one has whole hidden states pass.

    Attributes:
        reads_tokens: whether enter() needs the tokens
    """

    reads_tokens: ClassVar[bool] = False

    def enter(self, passed_BTW: Tensor, tokens_BT: Tensor | None) -> Tensor:
        """hidden_BTD of what has passed, or of what the first stage's embeddings give.

        Args:
            tokens_BT: the inputs' ids (int64)
        """
        return passed_BTW

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """The values passed_BTW that the next stage gets."""
        return hidden_BTD

    def draw(self, seed: int) -> None:
        """Make real what is neither trained nor in a state, on the CPU."""


class Subspace(Boundary):
    """The first W values of the residual stream pass: all others are the same at each stage.

    Stages but the last write only these values (Family's write_width), so the others stay what they were behind the
    embedding: frozen values of each token, drawn from the run's seed, which each stage looks up. That is the subspace
    of "Protocol Models" (arXiv 2506.01260), whose axes are those of the residual stream here and not random ones: the
    products that read it make one as good as the other, and nothing has to be multiplied or rounded.
    """

    reads_tokens = True
    table: Tensor

    def __init__(self, family: Family, width: int):
        super().__init__()
        self._family = family
        self._width = width
        shape = (family.config.vocab_size, family.config.hidden_size - width)
        self.register_buffer("table", torch.empty(shape, dtype=TABLE_DTYPE, device="meta"), persistent=False)

    def enter(self, passed_BTW: Tensor, tokens_BT: Tensor | None) -> Tensor:
        """With the tokens' frozen values behind."""
        assert tokens_BT is not None, "each stage knows the tokens"
        frozen = functional.embedding(tokens_BT, self.table)
        return torch.cat([passed_BTW, frozen.to(passed_BTW.dtype)], dim=-1)

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """The values that stages write."""
        return hidden_BTD[..., : self._width].contiguous()

    def draw(self, seed: int) -> None:
        """The frozen values of all tokens."""
        self.table = frozen_values(self._family, self._width, seed)


def frozen_values(family: Family, width: int, seed: int) -> Tensor:
    """The values (V, D - W) of tokens that no stage writes."""
    values = torch.empty(family.config.vocab_size, family.config.hidden_size - width, dtype=TABLE_DTYPE)
    std = TABLE_SCALE * family.weight_std(family.tokens)
    return values.normal_(std=std, generator=seeded(seed, "boundary"))


class Maxout(Boundary):
    """A matrix, then the largest of each so many values passes; behind it a normalisation, and a matrix back to D.

    As in SWARM parallelism (arXiv 2301.11913). Names say before which layer the boundary is, so that those of all
    stages differ.
    """

    def __init__(self, spec: StageSpec, hidden_size: int, group: int):
        super().__init__()
        self._group = group
        width = boundary_width(BoundarySection(maxout=group), hidden_size)
        with torch.device("meta"):
            if not spec.is_last:
                self.send = nn.ModuleDict({str(spec.end_layer): nn.Linear(hidden_size, hidden_size, bias=False)})
            if not spec.is_first:
                receive = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden_size, bias=False))
                self.receive = nn.ModuleDict({str(spec.first_layer): receive})
        self._spec = spec

    def enter(self, passed_BTW: Tensor, tokens_BT: Tensor | None) -> Tensor:
        """The hidden states that the matrix behind the wire makes of it."""
        if self._spec.is_first:
            return passed_BTW
        hidden_BTD: Tensor = self.receive[str(self._spec.first_layer)](passed_BTW)
        return hidden_BTD.float()

    def leave(self, hidden_BTD: Tensor) -> Tensor:
        """The largest values of all groups."""
        mixed_BTD: Tensor = self.send[str(self._spec.end_layer)](hidden_BTD)
        return mixed_BTD.float().view(*mixed_BTD.shape[:-1], -1, self._group).amax(dim=-1)


def make_boundary(section: BoundarySection | None, family: Family, spec: StageSpec) -> Boundary:
    """The ends of one stage."""
    if section is None or spec.num_stages == 1:
        return Boundary()
    if section.rank is not None:
        return Subspace(family, section.rank)
    assert section.maxout is not None, "a boundary is of one kind"
    return Maxout(spec, family.config.hidden_size, section.maxout)


def check_boundary(section: BoundarySection, family: Family) -> None:
    """Refuse a boundary that a model cannot have.

    Raises:
        UserError: it cannot
    """
    hidden_size, model_type = family.config.hidden_size, family.config.model_type
    if section.rank is not None and not family.writes:
        raise UserError(
            f"model.boundary.rank={section.rank} is for gpt2 and llama, and this is a {model_type} model: choose one "
            f"of these, or model.boundary.maxout"
        )
    if section.rank is not None and section.rank >= hidden_size:
        raise UserError(
            f"model.boundary.rank={section.rank} must be less than the {hidden_size} values of a hidden state: lower "
            f"it, or leave model.boundary out"
        )
    if section.maxout is not None and (hidden_size % section.maxout or hidden_size == section.maxout):
        raise UserError(
            f"model.boundary.maxout={section.maxout} must divide the {hidden_size} values of a hidden state, and leave "
            f"two or more: choose another number"
        )

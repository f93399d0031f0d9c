"""Words for what a run trains: the weights of a model, or adapters on a frozen one, and how many values these are."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from swarm_peer.config import ModelSection, RunManifest, looks_like_a_path
from swarm_peer.errors import UserError
from swarm_peer.policy.plain_text import plain_text

if TYPE_CHECKING:  # a look at a run does without models, which take seconds to import
    from swarm_peer.model.resolved import ResolvedManifest

# Numbers of parameters below this are told in full.
SMALL = 100_000
# A model that began at random writes no sentence that hangs together before it has seen more tokens than these.
FEW_TOKENS = 10_000_000
# Of a name that pages and tables show.
MAX_NAME_CHARS = 100


class Parameters(NamedTuple):
    """How many values of a model training changes, and how many stay as they are."""

    trained: int
    frozen: int


def public_name(name: str) -> str:
    """The name of a model or data set for other people: of a folder its last part, of the hub's without a revision."""
    if looks_like_a_path(name.partition("@")[0]):
        name = os.path.basename(os.path.abspath(os.path.expanduser(name)))
    else:
        name = name.partition("@")[0]
    return plain_text(name, MAX_NAME_CHARS)


def what_is_trained(model: ModelSection) -> str:
    """Words for what a run trains, such as "adapters of rank 16 on HuggingFaceTB/SmolLM2-135M, base in nf4"."""
    if model.adapter is not None and model.pretrained is not None:
        kind = "DoRA adapters" if model.adapter.dora else "adapters"
        return f"{kind} of rank {model.adapter.rank} on {public_name(model.pretrained)}, base in {model.base}"
    if model.pretrained is not None:
        return f"all weights of {public_name(model.pretrained)}"
    return "all weights, which began at random"


def what_is_saved(model: ModelSection) -> str:
    """Words for the folder that a run's model is saved to."""
    if model.adapter is not None:
        return "Adapters, as a folder of PEFT's"
    return "Hugging Face checkpoint" if model.is_plain else "Weights (no Hugging Face model, for its boundaries)"


def what_is_learnt(manifest: RunManifest, optimizer_step: int) -> str:
    """A sentence on what to expect of a text that the model writes; empty after a training that is not short."""
    num_tokens = optimizer_step * manifest.training.global_batch_size * manifest.data.sequence_length
    if manifest.model.pretrained is not None or num_tokens > FEW_TOKENS:
        return ""
    return "After so short a training it has learnt how words look, and no more."


def training_line(manifest: RunManifest) -> str:
    """Words for what a run trains, with the number of parameters where most of them are frozen.

    Those are counted with transformers, which takes seconds to import the first time.
    """
    words = what_is_trained(manifest.model)
    if manifest.model.adapter is None:
        return words
    try:
        trained, frozen = _parameters_of(manifest.canonical_json())
    except UserError:  # of another version's run, which this program may look at all the same
        return words
    return f"{words}: {in_millions(trained)} trained parameters, {in_millions(frozen)} frozen"


def count_parameters(resolved: ResolvedManifest) -> Parameters:
    """The parameters of all stages together, adapters included."""
    trained = sum(resolved.num_trained(spec) for spec in resolved.specs)
    if resolved.manifest.model.adapter is None:
        return Parameters(trained, 0)
    return Parameters(trained, sum(resolved.costs.of(spec).parameters for spec in resolved.specs))


def in_millions(number: int) -> str:
    """A number of parameters for people, such as "4.9 M"; the number itself where it is small."""
    return f"{number / 1e6:,.1f} M" if number >= SMALL else f"{number:,}"


@lru_cache(maxsize=4)
def _parameters_of(canonical_json: bytes) -> Parameters:
    from swarm_peer.model.resolved import ResolvedManifest

    return count_parameters(ResolvedManifest.of(RunManifest.model_validate_json(canonical_json)))

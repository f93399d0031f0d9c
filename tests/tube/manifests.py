"""What the runs of the tube are like: a tiny model, and the times of links at home."""

from __future__ import annotations

import random
from typing import Any

from adapters import ADAPTER, base_of
from feedback import FEW_BITS
from finish import num_steps
from small import max_in_flight

from swarm_peer.config import RunManifest

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 8,
    "n_embd": 8,
    "n_head": 1,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}

# The mode of averaging that other modes of the tube have.
AVERAGING = {
    "eager": "delayed",
    **dict.fromkeys(("short", "finish", "lost", "liar", "adapters", "feedback"), "synchronous"),
}


def make_manifest(stages: int, mode: str, seed: str) -> RunManifest:
    """A run with the times of links at home, and a model that costs next to nothing."""
    steps, validation_every = (num_steps(seed), 5) if mode.startswith("finish") else (1000, 0)
    averaging = mode.removeprefix("finish-").removeprefix("lost-")
    averaging = AVERAGING.get(averaging, averaging)
    # Where averaging is periodic, snapshots are of the ends of periods.
    snapshot_every = 5 if averaging == "periodic" else random.Random(f"snapshots {seed}").choice([2, 5])
    config = CONFIG | {"n_layer": stages}
    return RunManifest.model_validate(
        {
            "name": "tube",
            "seed": 1,
            "model": {"config": config} | (_adapters_on(config) if mode == "adapters" else {}),
            "stages": {"count": stages, "peers_to_start": 1},
            # Another number for another text: which documents are held out is remembered for its settings.
            "data": {"sequence_length": 7, "validation_documents": 3 if mode == "short" else 4},
            "training": {
                "steps": steps,
                "global_batch_size": 8,
                "microbatch_size": 2,
                "validation_every": validation_every,
                "validation_samples": 6,
            },
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
            # In a run of many steps, it is stable unless a decay is said.
            "schedule": {"name": "wsd", "final_fraction": 0.0},
            "limits": {"hop_timeout_s": 8.0, "announcement_s": 8.0, "max_in_flight": max_in_flight(seed)},
            "averaging": {
                "mode": averaging,
                "eager_updates": mode == "eager",
                "inner_steps": 5,
                "round_timeout_s": 15.0,
                "chunk_timeout_s": 4.0,
                "compare_weights_every": 5,
            }
            | (FEW_BITS if mode == "feedback" else {}),
            "recovery": {"snapshot_every": snapshot_every},
        }
    )


def _adapters_on(config: dict[str, Any]) -> dict[str, Any]:
    """Adapters on a base in four bits, which the coordinator's machine and all peers' have."""
    return {"pretrained": str(base_of(config)), "adapter": ADAPTER, "base": "nf4"}

"""`export`: a checkpoint or a live run as a model of Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

from swarm_peer.cli import configure_logging
from swarm_peer.config import Addresses
from swarm_peer.errors import UserError


def export(
    *,
    output: Path,
    checkpoint: str | None = None,
    initial_peers: Addresses = (),
    step: int | None = None,
    run_id: str | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Write the model of a checkpoint, or of a live run as it is now, as a folder that Hugging Face transformers loads.

    Args:
        output: Folder of the model, and of its tokenizer.
        checkpoint: Folder or URL (such as s3://bucket/run) of a run's checkpoints, or of one of them.
        initial_peers: Instead of a checkpoint, addresses of any peers of a live run.
        step: Which checkpoint, by its optimizer step; the newest good one if not given.
        run_id: Which live run, where the addresses lead to several.
        cache_dir: Where tokenizers are cached.
    """
    configure_logging("warning")
    if (checkpoint is None) == (not initial_peers):
        raise UserError("export needs --checkpoint DIR_OR_URL or --initial-peers ADDRESS, and one of them only")
    if step is not None and checkpoint is None:
        raise UserError(f"--step {step}: a live run has its newest weights only; leave it out, or give --checkpoint")

    from coordinator.checkpoints.export import export_checkpoint, export_run

    if checkpoint is not None:
        optimizer_step = export_checkpoint(checkpoint, step, output, cache_dir)
    else:
        optimizer_step = export_run(initial_peers, run_id, output, cache_dir)
    print(f"Hugging Face checkpoint after {optimizer_step} optimizer steps: {output}")
